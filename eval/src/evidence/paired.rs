//! Two arms on identical requests.

use super::EvidenceError;
use super::arms::Arm;
use super::measure::{Clusters, Metric};
use super::rows::Run;
use super::summary::{Estimate, Resampling, estimates};
use crate::replay::TurnRecord;
use crate::stats::bootstrap::{Sample, difference};
use serde::Serialize;
use std::cmp::Ordering;

/// Times that differ by no more than this are a tie, seconds: the clocks count microseconds.
const TIE: f64 = 1e-6;

/// One turn in two arms.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// As the candidate served it.
    pub candidate: (&'a Run, &'a TurnRecord),
    /// As the baseline served it.
    pub baseline: (&'a Run, &'a TurnRecord),
}

/// Turns that both arms played, in a fixed order.
///
/// # Errors
/// If there are none.
pub fn pairs<'a>(candidate: &'a Arm, baseline: &'a Arm) -> Result<Vec<Pair<'a>>, EvidenceError> {
    let theirs = baseline.keyed();
    let mut pairs: Vec<_> = candidate
        .keyed()
        .into_iter()
        .filter_map(|(key, candidate)| {
            let baseline = *theirs.get(&key)?;
            Some((key, Pair { candidate, baseline }))
        })
        .collect();
    if pairs.is_empty() {
        return Err(EvidenceError::NoPairs {
            candidate: candidate.name.clone(),
            baseline: baseline.name.clone(),
        });
    }
    pairs.sort_by_key(|(key, _)| *key);
    Ok(pairs.into_iter().map(|(_, pair)| pair).collect())
}

/// A difference candidate − baseline with what it is worth. Below 0 the candidate is faster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Delta {
    /// Difference of the two figures, seconds.
    #[serde(flatten)]
    pub estimate: Estimate,
    /// The baseline's figure, seconds.
    pub baseline: f64,
    /// Of "there is no difference", two-sided; `None` where there is no interval.
    pub p_value: Option<f64>,
}

impl Delta {
    /// Slower, and not by chance: the whole interval is above 0.
    pub fn is_loss(&self) -> bool {
        self.estimate.interval.is_some_and(|interval| interval.low > 0.0)
    }

    /// Faster, and not by chance.
    pub fn is_win(&self) -> bool {
        self.estimate.interval.is_some_and(|interval| interval.high < 0.0)
    }
}

/// One metric of some pairs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// As tables name it.
    pub metric: &'static str,
    /// Over how many pairs.
    pub pairs: usize,
    /// Mean, p50, p90, p99.
    pub deltas: Vec<Delta>,
    /// Pairs in which the candidate was faster; a turn that failed is slower than any that was served.
    pub wins: usize,
    /// Pairs in which the baseline was.
    pub losses: usize,
    /// All others.
    pub ties: usize,
}

/// Compares one metric over `pairs`; `None` if there are none.
pub fn compare(
    pairs: &[Pair<'_>],
    metric: Metric,
    clusters: &Clusters<'_>,
    resampling: Resampling,
) -> Option<Compared> {
    let sample = |side: for<'a> fn(&Pair<'a>) -> (&'a Run, &'a TurnRecord)| {
        Sample::new(pairs.iter().map(|pair| {
            let (run, row) = side(pair);
            (metric.of(run, row), clusters.number(&row.session))
        }))
    };
    let (candidate, baseline) = (sample(|pair| pair.candidate)?, sample(|pair| pair.baseline)?);
    let draws = resampling.of_difference(&candidate, &baseline, clusters);
    let seen = estimates(difference(candidate.figures(), baseline.figures()), &draws);
    let deltas = seen.into_iter().zip(baseline.figures()).enumerate();
    let deltas = deltas.map(|(place, (estimate, baseline))| Delta {
        estimate,
        baseline,
        p_value: draws.p_value(place, estimate.value),
    });
    let mut compared = Compared {
        metric: metric.label(),
        pairs: pairs.len(),
        deltas: deltas.collect(),
        wins: 0,
        losses: 0,
        ties: 0,
    };
    for pair in pairs {
        *match outcome(pair, metric) {
            Ordering::Less => &mut compared.wins,
            Ordering::Greater => &mut compared.losses,
            Ordering::Equal => &mut compared.ties,
        } += 1;
    }
    Some(compared)
}

/// How the candidate's time compares; a turn that failed is slower than any that was served.
fn outcome(pair: &Pair<'_>, metric: Metric) -> Ordering {
    let time = |row| metric.served(row).unwrap_or(f64::INFINITY);
    let (candidate, baseline) = (time(pair.candidate.1), time(pair.baseline.1));
    if (candidate - baseline).abs() <= TIE {
        Ordering::Equal
    } else {
        candidate.total_cmp(&baseline) // Two that failed are equally late.
    }
}

/// Everything about two arms.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Paired {
    /// The arm in question.
    pub candidate: String,
    /// The one it is held against.
    pub baseline: String,
    /// Turns that both played.
    pub pairs: usize,
    /// Turns that only one of them played.
    pub unpaired: usize,
    /// Pairs in which only the candidate failed.
    pub only_candidate_failed: usize,
    /// Pairs in which only the baseline failed.
    pub only_baseline_failed: usize,
    /// Pairs in which both failed.
    pub both_failed: usize,
    /// Over all pairs, failed turns included.
    pub all: Vec<Compared>,
    /// Over the pairs that both served, if some were not.
    pub served: Vec<Compared>,
}

/// Compares `candidate` with `baseline`.
///
/// # Errors
/// If they have no turn in common.
pub fn paired(candidate: &Arm, baseline: &Arm, resampling: Resampling) -> Result<Paired, EvidenceError> {
    let clusters = Clusters::of([candidate, baseline]);
    let pairs = pairs(candidate, baseline)?;
    let failed = |pair: &Pair<'_>| (pair.candidate.1.failed(), pair.baseline.1.failed());
    let count = |which| pairs.iter().filter(|pair| failed(pair) == which).count();
    let compare = |pairs: &[Pair<'_>]| {
        let metrics = Metric::ALL.into_iter();
        metrics
            .filter_map(|metric| compare(pairs, metric, &clusters, resampling))
            .collect()
    };
    let served: Vec<Pair<'_>> = pairs
        .iter()
        .copied()
        .filter(|pair| failed(pair) == (false, false))
        .collect();
    Ok(Paired {
        candidate: candidate.name.clone(),
        baseline: baseline.name.clone(),
        pairs: pairs.len(),
        unpaired: candidate.rows().count() + baseline.rows().count() - 2 * pairs.len(),
        only_candidate_failed: count((true, false)),
        only_baseline_failed: count((false, true)),
        both_failed: count((true, true)),
        all: compare(&pairs),
        served: if served.len() < pairs.len() {
            compare(&served)
        } else {
            Vec::new()
        },
    })
}
