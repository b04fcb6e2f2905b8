//! Many runs over all cores, each on a thread and a clock of its own.

use crate::coverage::Coverage;
use crate::plan::{Mode, Plan};
use crate::run::{Options, Outcome, run};
use crate::shrink::shrink;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Failing seeds that are looked into; of the others only the number counts.
const FAILURES_MAX: usize = 10;
/// Lines of the log shown before a breach.
const WINDOW: usize = 60;

/// What to run.
#[derive(Clone, Debug)]
pub struct Swarm {
    /// The seeds.
    pub seeds: Range<u64>,
    /// Virtual minutes of each.
    pub minutes: u32,
    /// When faults happen; `None`: half of the seeds each.
    pub mode: Option<Mode>,
    /// Threads.
    pub threads: usize,
    /// Whether a bar is drawn on standard error.
    pub bar: bool,
}

/// A seed that broke something.
#[derive(Debug, Serialize)]
pub struct Failure {
    /// It.
    pub seed: u64,
    /// What it broke, in words.
    pub breaches: Vec<String>,
    /// The command that runs it again.
    pub again: String,
    /// What a smaller plan that fails in the same way still has, in words.
    pub smaller: Vec<String>,
    /// What was seen last before the first breach.
    pub window: Vec<String>,
}

/// What came of a swarm.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Runs made.
    pub runs: u64,
    /// Runs that broke something.
    pub failed: u64,
    /// The first of them, by seed.
    pub failures: Vec<Failure>,
    /// Turns that completed, failed, and whose client left.
    pub turns: [u64; 3],
    /// Virtual seconds.
    pub virtual_seconds: f64,
    /// Seconds on the clock.
    pub wall_seconds: f64,
    /// Paths taken.
    pub coverage: Coverage,
    /// Paths that no seed has taken.
    pub never: Vec<String>,
}

/// The mode of a seed, if none is asked for: even ones are of the one, odd ones of the other.
pub fn mode_of(seed: u64, mode: Option<Mode>) -> Mode {
    let half = if seed.is_multiple_of(2) {
        Mode::Safety
    } else {
        Mode::Liveness
    };
    mode.unwrap_or(half)
}

/// The command that runs a seed again.
pub fn again(plan: &Plan) -> String {
    let mode = if plan.mode == Mode::Safety {
        "safety"
    } else {
        "liveness"
    };
    let minutes = plan.lasts.as_secs() / 60;
    format!("pinion chaos seed {} --minutes {minutes} --mode {mode}", plan.seed)
}

/// Runs one, whatever happens.
///
/// # Errors
/// In words, if it panicked or its cluster could not be built.
pub fn survive(plan: &Plan, options: Options) -> Result<Outcome, String> {
    match catch_unwind(AssertUnwindSafe(|| run(plan, options))) {
        Ok(Ok(outcome)) => Ok(outcome),
        Ok(Err(error)) => Err(error.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("it panicked: {}", text.unwrap_or("without a word")))
        }
    }
}

/// Runs them all.
pub fn swarm(swarm: &Swarm) -> Report {
    let begun = Instant::now();
    let next = AtomicU64::new(swarm.seeds.start);
    let bar = bar(swarm);
    let report = Mutex::new(Report::default());
    std::thread::scope(|scope| {
        for _ in 0..swarm.threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= swarm.seeds.end {
                        return;
                    }
                    let plan = Plan::draw(seed, mode_of(seed, swarm.mode), swarm.minutes);
                    let came = survive(&plan, Options::default());
                    let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                    report.take(&plan, came);
                    bar.set_position(report.runs);
                    bar.set_message(format!("{} failed", report.failed));
                }
            });
        }
    });
    bar.finish_and_clear();
    let mut report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
    report.failures.sort_by_key(|f| f.seed);
    report.failures.truncate(FAILURES_MAX);
    for failure in &mut report.failures {
        let plan = Plan::draw(failure.seed, mode_of(failure.seed, swarm.mode), swarm.minutes);
        look_into(&plan, failure);
    }
    report.never = report.coverage.never();
    report.wall_seconds = begun.elapsed().as_secs_f64();
    report
}

impl Report {
    fn take(&mut self, plan: &Plan, came: Result<Outcome, String>) {
        self.runs += 1;
        let breaches = match came {
            Ok(outcome) => {
                for (sum, n) in self.turns.iter_mut().zip(outcome.turns) {
                    *sum += n;
                }
                self.virtual_seconds += outcome.micros as f64 / 1e6;
                self.coverage.add(&outcome.coverage);
                outcome.breaches.iter().map(ToString::to_string).collect()
            }
            Err(why) => vec![why],
        };
        if breaches.is_empty() {
            return;
        }
        self.failed += 1;
        self.failures.push(Failure {
            seed: plan.seed,
            breaches,
            again: again(plan),
            smaller: Vec::new(),
            window: Vec::new(),
        });
    }
}

/// Makes a failing plan smaller, and keeps what was seen before its first breach.
fn look_into(plan: &Plan, failure: &mut Failure) {
    let log = Options { log: true, stops: true };
    let Ok(outcome) = survive(plan, log) else { return };
    let Some(breach) = outcome.breaches.first() else { return };
    let shrunk = catch_unwind(|| shrink(plan, breach.invariant));
    let Ok((small, runs)) = shrunk else { return };
    let (talks, seconds) = (small.talks.len(), small.lasts.as_secs());
    failure.smaller.push(format!(
        "{talks} of {} sessions, {} of {} faults, {seconds} s (after {runs} runs):",
        plan.talks.len(),
        small.faults.len(),
        plan.faults.len()
    ));
    failure.smaller.extend(small.faults.iter().map(ToString::to_string));
    if let Ok(outcome) = survive(&small, log) {
        failure
            .smaller
            .extend(outcome.breaches.first().map(ToString::to_string));
        let skip = outcome.log.len().saturating_sub(WINDOW);
        failure.window = outcome.log.into_iter().skip(skip).collect();
    }
}

fn bar(swarm: &Swarm) -> ProgressBar {
    if !swarm.bar {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(swarm.seeds.end.saturating_sub(swarm.seeds.start));
    let style =
        ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} seeds, {msg} (about {eta} left)");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}
