//! What is measured of turns and sessions, in seconds; a failed turn counts as [said above](super).

use super::arms::Arm;
use super::rows::Run;
use crate::replay::TurnRecord;
use crate::stats::bootstrap::Sample;
use std::collections::{BTreeMap, HashMap};

/// A time of one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Time to the first token.
    Ttft,
    /// Time to the end of the answer.
    Latency,
}

impl Metric {
    /// Both, in the order of the tables.
    pub const ALL: [Self; 2] = [Self::Ttft, Self::Latency];

    /// As tables name it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Ttft => "TTFT",
            Self::Latency => "latency",
        }
    }

    /// Of a turn that was served, seconds.
    pub fn served(self, row: &TurnRecord) -> Option<f64> {
        let ms = match self {
            Self::Ttft => row.ttft_ms,
            Self::Latency => Some(row.latency_ms),
        };
        ms.filter(|_| !row.failed()).map(|ms| ms / 1e3)
    }

    /// Of any turn, seconds.
    pub fn of(self, run: &Run, row: &TurnRecord) -> f64 {
        self.served(row).unwrap_or_else(|| penalty(run, row))
    }
}

/// What a failed turn counts, seconds.
fn penalty(run: &Run, row: &TurnRecord) -> f64 {
    run.head.settings.request_timeout_s.max(row.latency_ms / 1e3)
}

/// Time per output token behind the first of a turn that was served, seconds.
pub fn tpot(row: &TurnRecord) -> Option<f64> {
    let behind_first = row.output.checked_sub(1).filter(|n| *n > 0)?;
    let ttft = Metric::Ttft.served(row)?;
    Some((row.latency_ms / 1e3 - ttft) / behind_first as f64)
}

/// Numbers for sessions, the same in all runs: what the bootstrap draws.
#[derive(Debug, Default)]
pub struct Clusters<'a>(HashMap<&'a str, u32>);

impl<'a> Clusters<'a> {
    /// Of all sessions of `arms`.
    pub fn of(arms: impl IntoIterator<Item = &'a Arm>) -> Self {
        let mut clusters = HashMap::new();
        for (_, row) in arms.into_iter().flat_map(Arm::rows) {
            let next = clusters.len() as u32;
            clusters.entry(row.session.as_str()).or_insert(next);
        }
        Self(clusters)
    }

    /// How many.
    pub fn count(&self) -> u32 {
        self.0.len() as u32
    }

    /// The number of `session`; that of the first one if it is unknown.
    pub fn number(&self, session: &str) -> u32 {
        self.0.get(session).copied().unwrap_or(0)
    }
}

/// A metric over all turns of `runs`.
pub fn turns(runs: &[Run], metric: Metric, clusters: &Clusters<'_>) -> Option<Sample> {
    let rows = runs.iter().flat_map(|run| run.rows.iter().map(move |row| (run, row)));
    Sample::new(rows.map(|(run, row)| (metric.of(run, row), clusters.number(&row.session))))
}

/// Task completion: from the first send of a session to its last end, pauses included, for every session of `runs`.
pub fn tasks(runs: &[Run], clusters: &Clusters<'_>) -> Option<Sample> {
    let mut times = Vec::new();
    for run in runs {
        let mut sessions: BTreeMap<&str, (f64, f64, f64)> = BTreeMap::new();
        for row in &run.rows {
            let end = row.at_s + row.latency_ms / 1e3;
            let lost = if row.failed() {
                penalty(run, row) - row.latency_ms / 1e3
            } else {
                0.0
            };
            let task = sessions.entry(&row.session).or_insert((row.at_s, end, 0.0));
            *task = (task.0.min(row.at_s), task.1.max(end), task.2 + lost);
        }
        let of_session = |(session, (begin, end, lost))| (end - begin + lost, clusters.number(session));
        times.extend(sessions.into_iter().map(of_session));
    }
    Sample::new(times)
}
