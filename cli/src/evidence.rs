//! `pinion compare`, `pinion stratify` and `pinion report`.

use anyhow::Context as _;
use clap::Args;
use pinion_eval::evidence::arms::{Arm, check, load, load_one};
use pinion_eval::evidence::paired::{Compared, Paired, paired};
use pinion_eval::evidence::report::{Options, Report, difference, p_value, percent, seconds};
use pinion_eval::evidence::strata::{Slice, Strata, of_arm, of_pair};
use pinion_eval::evidence::summary::Resampling;
use pinion_eval::stats::bootstrap::MIN_RESAMPLES;
use std::path::PathBuf;

/// How sure figures are made.
#[derive(Args)]
struct Sureness {
    /// Draws of an interval.
    #[arg(long, default_value_t = MIN_RESAMPLES)]
    resamples: usize,
    /// Of the draws.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Take fewer than three runs of an arm: a test of the machinery, not a result.
    #[arg(long)]
    smoke: bool,
}

impl Sureness {
    fn resampling(&self) -> anyhow::Result<Resampling> {
        Ok(Resampling::new(self.resamples, self.seed)?)
    }

    fn check(&self, arms: &[Arm]) -> anyhow::Result<()> {
        check(arms, self.smoke)?;
        if self.smoke {
            eprintln!("smoke test: not a result");
        }
        Ok(())
    }
}

/// Arguments of `compare`.
#[derive(Args)]
#[command(after_help = "\
Each of the two is a file that `pinion replay --out` or `pinion sim` wrote, or a folder with the runs of one arm.
Differences are CANDIDATE minus BASELINE in seconds: below 0 the candidate is faster.
Examples:
  pinion compare runs/pinion runs/fused-rr
  pinion compare one.jsonl other.jsonl --smoke")]
pub struct CompareArgs {
    /// The arm in question.
    candidate: PathBuf,
    /// The arm it is held against.
    baseline: PathBuf,
    #[command(flatten)]
    sureness: Sureness,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Compares two arms on identical requests.
pub fn compare(arguments: &CompareArgs) -> anyhow::Result<()> {
    let arms = [&arguments.candidate, &arguments.baseline].map(|place| load_one(std::slice::from_ref(place)));
    let [candidate, baseline] = arms;
    let arms = [candidate?, baseline?];
    arguments.sureness.check(&arms)?;
    let [candidate, baseline] = &arms;
    let paired = paired(candidate, baseline, arguments.sureness.resampling()?)?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&paired)?);
    } else {
        print_paired(&paired);
    }
    Ok(())
}

fn print_paired(p: &Paired) {
    println!(
        "{} minus {}: {} pairs, {} turns without a partner",
        p.candidate, p.baseline, p.pairs, p.unpaired
    );
    println!(
        "failed: {} only {}, {} only {}, {} both",
        p.only_candidate_failed, p.candidate, p.only_baseline_failed, p.baseline, p.both_failed
    );
    for (compared, of) in [(&p.all, "all pairs"), (&p.served, "pairs that both served")] {
        for compared in compared {
            println!("\n{}, {of}, seconds", compared.metric);
            print_compared(compared);
        }
    }
}

fn print_compared(compared: &Compared) {
    println!(
        "{:<8}{:>12}  {:<34}{:>8}",
        "", "baseline", "difference [95 % interval]", "p"
    );
    for delta in &compared.deltas {
        println!(
            "{:<8}{:>12}  {:<34}{:>8}",
            delta.estimate.figure,
            seconds(delta.baseline),
            difference(delta.estimate.value, delta.estimate.interval),
            delta.p_value.map_or_else(|| "-".to_owned(), p_value)
        );
    }
    println!(
        "{} wins, {} losses, {} ties",
        compared.wins, compared.losses, compared.ties
    );
}

/// Arguments of `stratify`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  pinion stratify runs/pinion                          slices of one arm
  pinion stratify runs/pinion --against runs/fused-rr  and where it wins and loses")]
pub struct StratifyArgs {
    /// Files or folders with the runs of one arm.
    #[arg(required = true)]
    arm: Vec<PathBuf>,
    /// Compare with this arm, slice by slice.
    #[arg(long)]
    against: Option<PathBuf>,
    #[command(flatten)]
    sureness: Sureness,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Prints the slices of an arm.
pub fn stratify(arguments: &StratifyArgs) -> anyhow::Result<()> {
    let arm = load_one(&arguments.arm)?;
    let Some(place) = &arguments.against else {
        arguments.sureness.check(std::slice::from_ref(&arm))?;
        let slices = of_arm(&arm);
        if arguments.json {
            println!("{}", serde_json::to_string_pretty(&slices)?);
        } else {
            print_slices(&slices);
        }
        return Ok(());
    };
    let arms = [arm, load_one(std::slice::from_ref(place))?];
    arguments.sureness.check(&arms)?;
    let [candidate, baseline] = &arms;
    let strata = of_pair(candidate, baseline, arguments.sureness.resampling()?)?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&strata)?);
    } else {
        print_strata(&strata);
    }
    Ok(())
}

fn print_slices(slices: &[Slice]) {
    println!(
        "{:<20}{:>8}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}",
        "TTFT and latency, s", "turns", "failed", "mean", "p50", "p90", "p99", "lat p50", "lat p99"
    );
    for slice in slices {
        let figure = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), seconds);
        println!(
            "{:<20}{:>8}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}",
            format!("{} {}", slice.dimension, slice.slice),
            slice.turns,
            slice.failed,
            figure(slice.ttft.map(|s| s.mean)),
            figure(slice.ttft.map(|s| s.p50)),
            figure(slice.ttft.map(|s| s.p90)),
            figure(slice.ttft.map(|s| s.p99)),
            figure(slice.latency.map(|s| s.p50)),
            figure(slice.latency.map(|s| s.p99)),
        );
    }
}

/// A difference of one figure, in its column.
fn column(compared: &Compared, figure: &str) -> String {
    let delta = compared.delta(figure);
    delta.map_or_else(String::new, |d| difference(d.estimate.value, d.estimate.interval))
}

fn print_strata(strata: &Strata) {
    println!("TTFT of {} minus {}, seconds", strata.candidate, strata.baseline);
    println!(
        "{:<20}{:>8}{:>8}  {:<26}{:<26}{:<26}",
        "slice", "pairs", "wins", "mean", "p50", "p99"
    );
    for slice in &strata.slices {
        for compared in slice.metrics.iter().filter(|c| c.metric == "TTFT") {
            println!(
                "{:<20}{:>8}{:>8}  {:<26}{:<26}{:<26}",
                format!("{} {}", slice.dimension, slice.slice),
                compared.pairs,
                percent(compared.wins as f64 / compared.pairs as f64),
                column(compared, "mean"),
                column(compared, "p50"),
                column(compared, "p99")
            );
        }
    }
    println!("\nturn and append: difference of the median, pairs");
    for cell in &strata.map {
        if let Some(compared) = &cell.ttft {
            println!(
                "{:<8}{:<10}{:<28}{:>8}",
                cell.turn,
                cell.append,
                column(compared, "p50"),
                compared.pairs
            );
        }
    }
}

/// Arguments of `report`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  pinion report runs --out report.html
  pinion report runs --candidate pinion --baseline fused-rr --out report.html --markdown report.md")]
pub struct ReportArgs {
    /// Folder with the runs of all arms.
    runs: PathBuf,
    /// The arm in question.
    #[arg(long, default_value = "pinion")]
    candidate: String,
    /// The arm of slices and losses. Default: the other arm with the lowest mean TTFT.
    #[arg(long)]
    baseline: Option<String>,
    /// Arms that no real system can be: shown, and not chosen as baseline.
    #[arg(long, value_delimiter = ',', default_value = "oracle")]
    oracle: Vec<String>,
    /// Where the HTML file goes.
    #[arg(long, default_value = "report.html")]
    out: PathBuf,
    /// Where Markdown of the same figures goes.
    #[arg(long)]
    markdown: Option<PathBuf>,
    /// Where the figures go as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    #[command(flatten)]
    sureness: Sureness,
}

/// Writes the report.
pub fn report(arguments: ReportArgs) -> anyhow::Result<()> {
    let arms = load(&arguments.runs)?;
    let options = Options {
        candidate: arguments.candidate,
        baseline: arguments.baseline,
        oracles: arguments.oracle,
        smoke: arguments.sureness.smoke,
        resampling: arguments.sureness.resampling()?,
    };
    let report = Report::of(&arms, &options)?;
    let write = |path: &PathBuf, text: String| {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
        anyhow::Ok(())
    };
    write(&arguments.out, report.html()?)?;
    if let Some(path) = &arguments.markdown {
        write(path, report.markdown()?)?;
    }
    if let Some(path) = &arguments.json {
        write(path, serde_json::to_string_pretty(&report.figures)?)?;
    }
    Ok(())
}
