use super::arms::{Arm, check, group, load, load_one};
use super::measure::Clusters;
use super::paired::paired;
use super::report::{Options, Report};
use super::rows::{self, Head, Run, Settings};
use super::strata::{Dimension, of_arm, of_pair};
use super::summary::{Resampling, summarise};
use super::*;
use crate::replay::{Failure, Reason, ReplayOptions, TurnRecord};
use crate::stats::SplitMix64;
use crate::trace::Trace;
use crate::trace::tokens::Vocab;
use pinion_schemas::reasons::{Path, SeedReason};

fn head(arm: &str, seed: u64) -> Head {
    let options = ReplayOptions::new("http://x", "m", Vocab { first: 0, size: 1 });
    Head {
        arm: arm.to_owned(),
        seed,
        settings: Settings::of("made-up.jsonl", &Trace::default(), &options),
    }
}

/// Turn `turn` of `session` with prompts that grow by 500 tokens, each tenth turn by 10,000.
fn row(session: usize, turn: usize, ttft_ms: f64) -> TurnRecord {
    let input = 1_000 + turn * 500 + turn / 10 * 9_500;
    let before = if turn == 0 {
        0
    } else {
        1_000 + (turn - 1) * 500 + (turn - 1) / 10 * 9_500
    };
    TurnRecord {
        session: format!("s{session}"),
        turn,
        at_s: turn as f64 * 10.0,
        pause_s: (turn > 0).then_some(9.0),
        input,
        carried: before as u32,
        requested: 10,
        output: 10,
        ttft_ms: Some(ttft_ms),
        latency_ms: ttft_ms + 90.0,
        path: Some(if turn == 0 { Path::Seed } else { Path::Direct }),
        why: (turn == 0).then_some(SeedReason::NewSession),
        cached_tokens: Some(before as u32),
        decode: Some(format!("d{}", session % 2)),
        prefill: (turn == 0).then(|| "p0".to_owned()),
        staleness: Some((turn * 7) as u32),
        ..TurnRecord::default()
    }
}

/// 3 runs of 20 sessions of 25 turns whose TTFT is log-normal-ish; `change` makes an arm of it.
fn arm(name: &str, change: impl Fn(&mut TurnRecord)) -> Arm {
    let run = |seed| {
        let mut dice = SplitMix64::new(seed);
        let mut rows = Vec::new();
        for session in 0..20 {
            for turn in 0..25 {
                let mut row = row(session, turn, 40.0 + dice.below(100) as f64);
                change(&mut row);
                rows.push(row);
            }
        }
        Run {
            head: head(name, seed),
            rows,
        }
    };
    Arm {
        name: name.to_owned(),
        runs: (0..3).map(run).collect(),
    }
}

fn fail(row: &mut TurnRecord) {
    row.error = Some(Failure::new(Reason::Http(503), "no room"));
    (row.ttft_ms, row.path) = (None, None);
}

fn slower(row: &mut TurnRecord, ms: f64) {
    row.ttft_ms = row.ttft_ms.map(|t| t + ms);
    row.latency_ms += ms;
}

fn resampling() -> Resampling {
    Resampling::new(5_000, 7).unwrap()
}

fn options(candidate: &str) -> Options {
    Options {
        candidate: candidate.to_owned(),
        baseline: None,
        oracles: vec!["oracle".to_owned()],
        smoke: false,
        resampling: resampling(),
    }
}

#[test]
fn a_constant_difference_is_found_exactly() {
    let (base, late) = (arm("base", |_| {}), arm("late", |row| slower(row, 100.0)));
    let p = paired(&late, &base, resampling()).unwrap();
    assert_eq!(
        (p.pairs, p.unpaired, p.only_candidate_failed, p.served.len()),
        (1_500, 0, 0, 0)
    );
    for compared in &p.all {
        assert_eq!((compared.wins, compared.losses, compared.ties), (0, 1_500, 0));
        for delta in &compared.deltas {
            let interval = delta.estimate.interval.unwrap();
            let near = |value: f64| (value - 0.1).abs() < 1e-9;
            assert!(
                near(delta.estimate.value) && near(interval.low) && near(interval.high),
                "{delta:?}"
            );
            assert!(delta.is_loss() && delta.p_value.unwrap() < 0.001);
        }
    }
    let with_itself = paired(&base, &base, resampling()).unwrap();
    assert_eq!(with_itself.all[0].ties, 1_500);
    assert!((with_itself.all[0].deltas[0].p_value.unwrap() - 1.0).abs() < 1e-9);
}

/// Fails fast and looks fast: the prototype's mistake (digest R19).
#[test]
fn failures_count_against_the_arm() {
    let base = arm("base", |_| {});
    let failing = arm("failing", |row| {
        slower(row, -20.0);
        if row.turn == 24 {
            fail(row);
            row.latency_ms = 80.0;
        }
    });
    let summary = summarise(&failing, resampling());
    assert_eq!((summary.failed, summary.turns, summary.timeouts), (60, 1_500, 0));
    assert_eq!(summary.failures["http-503"], 60);
    let p99 = |s: &summary::ArmSummary| s.ttft.as_ref().unwrap().figures[3].value;
    assert!(
        (p99(&summary) - 600.0).abs() < 1e-9,
        "4 % failed, so the 99th percentile is the timeout"
    );
    assert!(summary.served_ttft.unwrap().p99 < 0.2);
    let p = paired(&failing, &base, resampling()).unwrap();
    assert_eq!(
        (p.only_candidate_failed, p.only_baseline_failed, p.both_failed),
        (60, 0, 0)
    );
    assert_eq!((p.all[0].wins, p.all[0].losses), (1_440, 60));
    assert!(p.all[0].deltas[0].is_loss(), "the mean is that of a client that waits");
    assert!(p.served[0].deltas[0].is_win(), "of those that both served");
    // Tasks: 25 turns, 10 s apart, and the last one lost.
    let clusters = Clusters::of([&failing]);
    let task = measure::tasks(&failing.runs, &clusters).unwrap().figures()[0];
    assert!((task - (240.0 + 600.0)).abs() < 1e-6, "{task}");
}

#[test]
fn a_slice_that_loses_is_named_and_no_other() {
    let base = arm("base", |_| {});
    let slow = arm("slow", |row| {
        slower(row, -1.0);
        if Dimension::Append.place(row) == 3 {
            slower(row, 500.0);
        }
    });
    let strata = of_pair(&slow, &base, resampling()).unwrap();
    let of = |dimension: &'static str| strata.slices.iter().filter(move |s| s.dimension == dimension);
    for dimension in Dimension::ALL {
        let pairs: usize = of(dimension.label())
            .filter_map(|s| Some(s.metrics.first()?.pairs))
            .sum();
        assert_eq!(pairs, 1_500, "{dimension:?}: every turn is in one slice");
    }
    let first = of("turn").next().unwrap();
    assert_eq!((first.slice, first.metrics[0].pairs), ("first", 60));
    let lost = |slice: &strata::ComparedSlice| slice.metrics[0].deltas[1].is_loss();
    let names = of("append").filter(|s| !s.metrics.is_empty());
    let verdicts: Vec<_> = names.map(|s| (s.slice, lost(s))).collect();
    assert_eq!(verdicts, [("128-1K", false), (">8K", true)]);
    assert_eq!(strata.map.len(), 16);
    assert_eq!(of_arm(&slow).iter().map(|s| s.turns).sum::<usize>(), 5 * 1_500);
    let report = Report::of(&[base, slow], &options("slow")).unwrap();
    let slices: Vec<&str> = report.figures.losses.iter().map(|l| l.slice.as_str()).collect();
    assert!(
        slices.contains(&"append >8K") && !slices.contains(&"append 128-1K"),
        "{slices:?}"
    );
    assert_eq!(report.figures.worst.len(), 12);
    assert!(report.figures.worst.iter().all(|w| w.append > 8_192));
}

#[test]
fn headlines_need_three_runs_and_equal_settings() {
    let mut two = arm("two", |_| {});
    two.runs.truncate(2);
    let refused = check(std::slice::from_ref(&two), false).unwrap_err();
    assert!(
        matches!(refused, EvidenceError::TooFewRuns { runs: 2, needed: 3, .. }),
        "{refused}"
    );
    check(std::slice::from_ref(&two), true).unwrap();
    let mut other = arm("other", |_| {});
    other.runs[1].head.settings.time_scale = 10.0;
    let refused = check(&[arm("base", |_| {}), other], true).unwrap_err();
    let EvidenceError::Settings {
        ref setting,
        ref a_value,
        ref b_value,
        ..
    } = refused
    else {
        panic!("{refused}");
    };
    assert_eq!(
        (setting.as_str(), a_value.as_str(), b_value.as_str()),
        ("time_scale", "1.0", "10.0")
    );
    assert!(matches!(
        Resampling::new(4_999, 0),
        Err(EvidenceError::Resamples { .. })
    ));
    let missing = Report::of(&[arm("base", |_| {})], &options("pinion")).unwrap_err();
    assert!(missing.to_string().contains("base"), "{missing}");
}

#[test]
fn files_come_back_as_they_were() {
    let folder = tempdir();
    let made = arm("made", |row| {
        if row.turn == 3 {
            fail(row);
        }
    });
    for run in &made.runs {
        let path = folder.join(format!("made-{}.jsonl", run.head.seed));
        rows::write(&path, &run.head, &run.rows).unwrap();
    }
    assert_eq!(load(&folder).unwrap(), std::slice::from_ref(&made));
    assert_eq!(load_one(std::slice::from_ref(&folder)).unwrap(), made);
    let path = folder.join("made-0.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen("\"turn\":5", "\"turn\":five", 1)).unwrap();
    let broken = Run::read(&path).unwrap_err();
    assert!(matches!(broken, EvidenceError::Line { line: 7, .. }), "{broken}");
    std::fs::write(&path, text.lines().nth(1).unwrap()).unwrap();
    assert!(matches!(
        Run::read(&path).unwrap_err(),
        EvidenceError::Line { line: 1, .. }
    ));
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(matches!(load(&folder).unwrap_err(), EvidenceError::Io { .. }));
}

fn tempdir() -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("pinion-evidence-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn the_report_is_one_file_with_everything() {
    let runs = [
        arm("pinion <1P3D>", |row| {
            slower(row, if row.turn == 0 { 50.0 } else { -20.0 });
        }),
        arm("fused", |_| {}),
        arm("broken", |row| {
            if row.turn % 5 == 0 {
                fail(row);
            }
        }),
        arm("oracle", |row| slower(row, -30.0)),
    ];
    let arms = group(runs.into_iter().flat_map(|arm| arm.runs).collect());
    let report = Report::of(&arms, &options("pinion <1P3D>")).unwrap();
    assert_eq!(report.figures.baseline, "fused", "neither an oracle nor one that fails");
    let html = report.html().unwrap();
    for wanted in [
        "pinion &lt;1P3D&gt;",
        "Main table",
        "Paired on identical requests",
        "Slices, against fused",
        "Turn × append",
        "loses",
        "turn first",
        "300 http-503",
    ] {
        assert!(html.contains(wanted), "{wanted} is missing");
    }
    assert!(!html.contains("NaN") && !html.contains("undefined") && !html.contains("pinion <1P3D>"));
    assert!(!html.contains("src=") && !html.contains("href="), "needs nothing else");
    assert_eq!(html.matches("<svg").count(), 4 + 4 * 2 + 1);
    let markdown = report.markdown().unwrap();
    assert!(markdown.contains("| fused | 3 | 1500 | 0.0 % |"), "{markdown}");
    let columns = |line: &str| line.matches('|').count();
    let tables = markdown.split("\n\n").filter(|part| part.starts_with('|'));
    for table in tables {
        let first = table.lines().next().map(columns);
        assert!(table.trim().lines().all(|line| Some(columns(line)) == first), "{table}");
    }
    if let Ok(folder) = std::env::var("PINION_REPORT_DIR") {
        std::fs::write(std::path::Path::new(&folder).join("report.html"), html).unwrap();
        std::fs::write(std::path::Path::new(&folder).join("report.md"), markdown).unwrap();
    }
}
