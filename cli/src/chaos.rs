//! `pinion chaos`: simulated clusters under faults.

use clap::{Args, Subcommand, ValueEnum};
use pinion_chaos::plan::{Mode, Plan};
use pinion_chaos::run::{Options, Outcome, run};
use pinion_chaos::swarm::{Failure, Report, Swarm, again, mode_of, swarm};
use std::io::IsTerminal as _;
use std::process::ExitCode;

/// Subcommands of `pinion chaos`.
#[derive(Subcommand)]
pub enum ChaosCommand {
    /// Run many seeds, each a whole cluster in virtual time with load and faults of its own.
    #[command(after_help = "\
Examples:
  pinion chaos swarm --seeds 300                     a minute's work before lunch
  pinion chaos swarm --seeds 10000 --minutes 5       before a release
  pinion chaos swarm --seeds 100 --from 4000 --mode liveness --json
Exit codes: 0 nothing was broken, 1 something was.")]
    Swarm(SwarmArgs),
    /// Run one seed and print what was seen.
    #[command(after_help = "\
Examples:
  pinion chaos seed 4711 --minutes 5 --mode safety   what a swarm said to run again
  pinion chaos seed 4711 --lines 2000 | less         with more of what went before")]
    Seed(SeedArgs),
}

/// When faults happen.
#[derive(Clone, Copy, ValueEnum)]
enum ModeArg {
    /// To the end: turns may fail, but nothing wrong may ever happen.
    Safety,
    /// Up to a point: after it every turn must complete and all books be at rest.
    Liveness,
}

impl From<ModeArg> for Mode {
    fn from(mode: ModeArg) -> Self {
        match mode {
            ModeArg::Safety => Self::Safety,
            ModeArg::Liveness => Self::Liveness,
        }
    }
}

/// Arguments of `swarm`.
#[derive(Args)]
pub struct SwarmArgs {
    /// How many.
    #[arg(long, default_value_t = 300)]
    seeds: u64,
    /// The first.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Virtual minutes of each.
    #[arg(long, default_value_t = 1)]
    minutes: u32,
    /// When faults happen. Default: even seeds safety, odd ones liveness.
    #[arg(long)]
    mode: Option<ModeArg>,
    /// Threads. Default: one for each core.
    #[arg(long)]
    threads: Option<usize>,
    /// Print a JSON report.
    #[arg(long)]
    json: bool,
}

/// Arguments of `seed`.
#[derive(Args)]
pub struct SeedArgs {
    /// The seed.
    seed: u64,
    /// Virtual minutes.
    #[arg(long, default_value_t = 1)]
    minutes: u32,
    /// When faults happen. Default: as in a swarm.
    #[arg(long)]
    mode: Option<ModeArg>,
    /// Lines of the log to print before the end, or before the first breach.
    #[arg(long, default_value_t = 100)]
    lines: usize,
    /// Go on after the first breach.
    #[arg(long)]
    whole: bool,
}

/// Does it.
pub fn chaos(command: &ChaosCommand) -> anyhow::Result<ExitCode> {
    match command {
        ChaosCommand::Swarm(args) => run_swarm(args),
        ChaosCommand::Seed(args) => run_seed(args),
    }
}

fn run_swarm(args: &SwarmArgs) -> anyhow::Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let report = swarm(&Swarm {
        seeds: args.from..args.from.saturating_add(args.seeds),
        minutes: args.minutes.max(1),
        mode: args.mode.map(Mode::from),
        threads: args.threads.unwrap_or(cores),
        bar: std::io::stderr().is_terminal(),
    });
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print_report(&report);
    }
    Ok(if report.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn print_report(report: &Report) {
    for failure in &report.failures {
        print_failure(failure);
    }
    println!("paths taken:");
    for (path, times) in report.coverage.counts() {
        println!("{times:>12} {path}");
    }
    println!("paths that no seed has taken: {}", report.never.join(", "));
    let [done, failed, left] = report.turns;
    println!("turns: {done} completed, {failed} failed with a reason, {left} left by their clients");
    let ratio = report.virtual_seconds / report.wall_seconds.max(1e-9);
    println!(
        "{} runs, {} broke something; {:.0} virtual s in {:.1} s: {ratio:.0} times as fast",
        report.runs, report.failed, report.virtual_seconds, report.wall_seconds
    );
}

fn print_failure(failure: &Failure) {
    println!("seed {} broke something; again: {}", failure.seed, failure.again);
    for breach in &failure.breaches {
        println!("  {breach}");
    }
    println!("  smaller:");
    for line in &failure.smaller {
        println!("    {line}");
    }
    println!("  seen last:");
    for line in &failure.window {
        println!("    {line}");
    }
}

fn run_seed(args: &SeedArgs) -> anyhow::Result<ExitCode> {
    let mode = mode_of(args.seed, args.mode.map(Mode::from));
    let plan = Plan::draw(args.seed, mode, args.minutes.max(1));
    print_plan(&plan);
    let options = Options {
        log: true,
        stops: !args.whole,
    };
    let outcome: Outcome = run(&plan, options)?;
    let skip = outcome.log.len().saturating_sub(args.lines);
    for line in outcome.log.iter().skip(skip) {
        println!("{line}");
    }
    let [done, failed, left] = outcome.turns;
    println!("turns: {done} completed, {failed} failed with a reason, {left} left by their clients");
    for breach in &outcome.breaches {
        println!("{breach}");
    }
    Ok(if outcome.breaches.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn print_plan(plan: &Plan) {
    let shape = &plan.shape;
    println!("{}", again(plan));
    println!(
        "{} control, {} gateways, {} sessions, {} routing, backups {}",
        shape.control,
        plan.gateways,
        plan.talks.len(),
        shape.route.policy,
        shape.backups
    );
    for (name, _) in shape.workers() {
        println!("{name}: {} pages", shape.engine_of(&name).device_pages);
    }
    for fault in &plan.faults {
        println!("{fault}");
    }
}
