//! Slices of the turns, by what the trace says of a turn and not by what an arm did with it (digest §4.1).

use super::EvidenceError;
use super::arms::Arm;
use super::measure::{Clusters, Metric};
use super::paired::{Compared, Pair, compare, pairs};
use super::summary::Resampling;
use crate::replay::TurnRecord;
use crate::stats::Spread;
use serde::Serialize;

/// By what turns are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dimension {
    /// Number of the turn in its session. The first has a slice of its own (digest T1).
    Turn,
    /// Prompt tokens that the session's turn before did not have.
    Append,
    /// Share of the prompt that it had.
    Overlap,
    /// Prompt tokens.
    Input,
    /// Pause before the turn.
    Gap,
}

impl Dimension {
    /// All, in the order of the tables.
    pub const ALL: [Self; 5] = [Self::Turn, Self::Append, Self::Overlap, Self::Input, Self::Gap];

    /// As tables name it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Append => "append",
            Self::Overlap => "overlap",
            Self::Input => "input",
            Self::Gap => "pause",
        }
    }

    /// Names of the slices, in order.
    pub const fn slices(self) -> &'static [&'static str] {
        match self {
            Self::Turn => &["first", "2-5", "6-20", "21+"],
            Self::Append => &["≤128", "128-1K", "1K-8K", ">8K"],
            Self::Overlap => &["≤0.3", "0.3-0.7", ">0.7"],
            Self::Input => &["≤8K", "8K-64K", ">64K"],
            Self::Gap => &["first turn", "≤5 s", "5-30 s", "30-300 s", ">300 s"],
        }
    }

    /// Which slice a turn is in. Bounds belong to the slice below them; K is 1,024.
    pub fn place(self, row: &TurnRecord) -> usize {
        let (value, bounds): (f64, &[f64]) = match self {
            Self::Turn => (row.turn as f64 + 1.0, &[1.0, 5.0, 20.0]),
            Self::Append => {
                let append = row.input.saturating_sub(row.carried as usize);
                (append as f64, &[128.0, 1_024.0, 8_192.0])
            }
            Self::Overlap => (f64::from(row.carried) / row.input.max(1) as f64, &[0.3, 0.7]),
            Self::Input => (row.input as f64, &[8_192.0, 65_536.0]),
            Self::Gap => (row.pause_s.unwrap_or(-1.0), &[-0.5, 5.0, 30.0, 300.0]),
        };
        bounds.iter().take_while(|bound| value > **bound).count()
    }
}

/// One slice of one arm.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Slice {
    /// By what it was cut.
    pub dimension: &'static str,
    /// Its name.
    pub slice: &'static str,
    /// Turns in it.
    pub turns: usize,
    /// Failed ones.
    pub failed: usize,
    /// TTFT of all of them, seconds.
    pub ttft: Option<Spread>,
    /// Latency of all of them, seconds.
    pub latency: Option<Spread>,
}

/// Every slice of an arm.
pub fn of_arm(arm: &Arm) -> Vec<Slice> {
    let rows: Vec<_> = arm.rows().collect();
    let spread = |rows: &[&(&super::rows::Run, &TurnRecord)], metric: Metric| {
        let times: Vec<f64> = rows.iter().map(|(run, row)| metric.of(run, row)).collect();
        Spread::of(&times)
    };
    let cut = Dimension::ALL.into_iter().flat_map(|d| cut(&rows, d, |(_, row)| row));
    cut.map(|(dimension, slice, rows)| Slice {
        dimension,
        slice,
        turns: rows.len(),
        failed: rows.iter().filter(|(_, row)| row.failed()).count(),
        ttft: spread(&rows, Metric::Ttft),
        latency: spread(&rows, Metric::Latency),
    })
    .collect()
}

/// `items` by slice, with the names of dimension and slice.
fn cut<T>(
    items: &[T],
    dimension: Dimension,
    row: impl Fn(&T) -> &TurnRecord,
) -> Vec<(&'static str, &'static str, Vec<&T>)> {
    let named = dimension
        .slices()
        .iter()
        .map(|slice| (dimension.label(), *slice, Vec::new()));
    let mut slices: Vec<_> = named.collect();
    for item in items {
        if let Some((_, _, slice)) = slices.get_mut(dimension.place(row(item))) {
            slice.push(item);
        }
    }
    slices
}

/// One slice of two arms.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ComparedSlice {
    /// By what it was cut.
    pub dimension: &'static str,
    /// Its name.
    pub slice: &'static str,
    /// Failed turns of the candidate.
    pub failed_candidate: usize,
    /// Failed turns of the baseline.
    pub failed_baseline: usize,
    /// One a metric; empty if no pair is in it.
    pub metrics: Vec<Compared>,
}

/// One cell of the map turn × append.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// Slice by turn.
    pub turn: &'static str,
    /// Slice by append.
    pub append: &'static str,
    /// TTFT; `None` if no pair is in it.
    pub ttft: Option<Compared>,
}

/// All slices of two arms.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Strata {
    /// The arm in question.
    pub candidate: String,
    /// The one it is held against.
    pub baseline: String,
    /// By one dimension.
    pub slices: Vec<ComparedSlice>,
    /// By turn and append, row by row.
    pub map: Vec<Cell>,
}

/// Compares two arms slice by slice.
///
/// # Errors
/// If they have no turn in common.
pub fn of_pair(candidate: &Arm, baseline: &Arm, resampling: Resampling) -> Result<Strata, EvidenceError> {
    let clusters = Clusters::of([candidate, baseline]);
    let pairs = pairs(candidate, baseline)?;
    let mut slices = Vec::new();
    for dimension in Dimension::ALL {
        for (dimension, slice, inside) in cut(&pairs, dimension, |pair| pair.baseline.1) {
            let inside: Vec<Pair<'_>> = inside.into_iter().copied().collect();
            let failed = |side: fn(&Pair<'_>) -> bool| inside.iter().filter(|pair| side(pair)).count();
            let metrics = Metric::ALL.into_iter();
            slices.push(ComparedSlice {
                dimension,
                slice,
                failed_candidate: failed(|pair| pair.candidate.1.failed()),
                failed_baseline: failed(|pair| pair.baseline.1.failed()),
                metrics: metrics
                    .filter_map(|metric| compare(&inside, metric, &clusters, resampling))
                    .collect(),
            });
        }
    }
    let mut map = Vec::new();
    for (_, turn, inside) in cut(&pairs, Dimension::Turn, |pair| pair.baseline.1) {
        let inside: Vec<Pair<'_>> = inside.into_iter().copied().collect();
        for (_, append, cell) in cut(&inside, Dimension::Append, |pair| pair.baseline.1) {
            let cell: Vec<Pair<'_>> = cell.into_iter().copied().collect();
            let ttft = compare(&cell, Metric::Ttft, &clusters, resampling);
            map.push(Cell { turn, append, ttft });
        }
    }
    Ok(Strata {
        candidate: candidate.name.clone(),
        baseline: baseline.name.clone(),
        slices,
        map,
    })
}
