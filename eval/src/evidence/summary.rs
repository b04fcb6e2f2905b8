//! The main table: one line an arm, over all of its turns, failed ones included.

use super::EvidenceError;
use super::arms::Arm;
use super::measure::{Clusters, Metric, tasks, tpot, turns};
use super::rows::Run;
use crate::replay::{Paths, Reason, TurnRecord};
use crate::stats::bootstrap::{Draws, FIGURES, Figures, Interval, MIN_RESAMPLES, Sample};
use crate::stats::{Spread, std_dev};
use serde::Serialize;
use std::collections::BTreeMap;

/// How intervals are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resampling {
    resamples: usize,
    seed: u64,
}

impl Default for Resampling {
    fn default() -> Self {
        Self {
            resamples: MIN_RESAMPLES,
            seed: 0,
        }
    }
}

impl Resampling {
    /// `resamples` draws from `seed`.
    ///
    /// # Errors
    /// If they are fewer than the protocol asks for.
    pub fn new(resamples: usize, seed: u64) -> Result<Self, EvidenceError> {
        if resamples < MIN_RESAMPLES {
            return Err(EvidenceError::Resamples {
                given: resamples,
                least: MIN_RESAMPLES,
            });
        }
        Ok(Self { resamples, seed })
    }

    /// Draws of one sample.
    pub fn of(self, sample: &Sample, clusters: &Clusters<'_>) -> Draws {
        Draws::of(sample, clusters.count(), self.resamples, self.seed)
    }

    /// Draws of a difference.
    pub fn of_difference(self, candidate: &Sample, baseline: &Sample, clusters: &Clusters<'_>) -> Draws {
        Draws::of_difference(candidate, baseline, clusters.count(), self.resamples, self.seed)
    }
}

/// A figure with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Which of [`FIGURES`].
    pub figure: &'static str,
    /// Of the sample, seconds.
    pub value: f64,
    /// `None` if the values come from too few sessions.
    pub interval: Option<Interval>,
}

/// A figure of each kind, from a sample and its draws.
pub fn estimates(figures: Figures, draws: &Draws) -> Vec<Estimate> {
    let named = FIGURES.iter().zip(figures).enumerate();
    named
        .map(|(place, (figure, value))| Estimate {
            figure,
            value,
            interval: draws.interval(place),
        })
        .collect()
}

/// One time of one arm.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Mean, p50, p90, p99, pooled over all runs.
    pub figures: Vec<Estimate>,
    /// Standard deviation of the runs' means, seconds.
    pub std_of_runs: Option<f64>,
}

/// One line of the main table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ArmSummary {
    /// Its name.
    pub arm: String,
    /// Runs.
    pub runs: usize,
    /// Turns of all runs.
    pub turns: usize,
    /// Those that failed.
    pub failed: usize,
    /// Those that failed because the request timeout passed.
    pub timeouts: usize,
    /// Failed turns by reason.
    pub failures: BTreeMap<String, usize>,
    /// Time to first token of all turns.
    pub ttft: Option<Measured>,
    /// Latency of all turns.
    pub latency: Option<Measured>,
    /// Task completion of all sessions.
    pub task: Option<Measured>,
    /// TTFT of the turns that were served, seconds: to be compared only where nothing failed.
    pub served_ttft: Option<Spread>,
    /// Their latency, seconds.
    pub served_latency: Option<Spread>,
    /// Their time per output token, seconds.
    pub tpot: Option<Spread>,
    /// Paths of all turns.
    pub paths: Paths,
    /// Prompt tokens not computed as a share of all, over turns that tell.
    pub cached_share: Option<f64>,
    /// Prompt tokens computed and tokens written, a run.
    pub work_tokens: f64,
}

/// Sums up one arm.
pub fn summarise(arm: &Arm, resampling: Resampling) -> ArmSummary {
    let clusters = Clusters::of([arm]);
    let rows = || arm.rows().map(|(_, row)| row);
    let mut failures = BTreeMap::new();
    for failure in rows().filter_map(|row| row.error.as_ref()) {
        *failures.entry(failure.reason.to_string()).or_insert(0) += 1;
    }
    let measured = |sample: fn(&[Run], &Clusters<'_>) -> Option<Sample>| {
        let pooled = sample(&arm.runs, &clusters)?;
        let of_runs = arm.runs.iter().filter_map(|run| {
            let [mean, ..] = sample(std::slice::from_ref(run), &clusters)?.figures();
            Some(mean)
        });
        let of_runs: Vec<f64> = of_runs.collect();
        Some(Measured {
            figures: estimates(pooled.figures(), &resampling.of(&pooled, &clusters)),
            std_of_runs: std_dev(&of_runs),
        })
    };
    let spread =
        |value: &dyn Fn(&TurnRecord) -> Option<f64>| Spread::of(&rows().filter_map(value).collect::<Vec<f64>>());
    let told = || rows().filter_map(|row| Some((row.input as u64, u64::from(row.cached_tokens?))));
    let (input, cached) = told().fold((0, 0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
    let written: u64 = rows().map(|row| row.output as u64).sum();
    ArmSummary {
        arm: arm.name.clone(),
        runs: arm.runs.len(),
        turns: rows().count(),
        failed: rows().filter(|row| row.failed()).count(),
        timeouts: failures.get(&Reason::Timeout.to_string()).copied().unwrap_or(0),
        failures,
        ttft: measured(|runs, clusters| turns(runs, Metric::Ttft, clusters)),
        latency: measured(|runs, clusters| turns(runs, Metric::Latency, clusters)),
        task: measured(tasks),
        served_ttft: spread(&|row| Metric::Ttft.served(row)),
        served_latency: spread(&|row| Metric::Latency.served(row)),
        tpot: spread(&tpot),
        paths: Paths::of(rows()),
        cached_share: (input > 0).then(|| cached as f64 / input as f64),
        work_tokens: (input - cached + written) as f64 / arm.runs.len().max(1) as f64,
    }
}
