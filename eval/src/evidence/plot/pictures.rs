//! What the report shows.

use super::{Bars, Lines, Scale, Series};
use crate::evidence::EvidenceError;
use crate::evidence::arms::Arm;
use crate::evidence::measure::Metric;
use crate::replay::{Paths, TurnRecord};
use crate::stats::{mean, percentile};
use std::collections::BTreeMap;

/// Points of a distribution.
const POINTS: usize = 240;
/// Turns of the picture of cache efficiency.
const TURNS: usize = 100;
/// Spans of time in the picture of load.
const SPANS: usize = 80;

/// Of a line, from left to right.
type Points = Vec<(f64, f64)>;

/// A picture with its caption.
#[derive(Clone, Debug)]
pub struct Picture {
    /// What is seen.
    pub caption: String,
    /// SVG text.
    pub svg: String,
}

/// All pictures for which the rows have data: lines of the arms in `shown`, bars of `all`.
///
/// # Errors
/// If one cannot be drawn.
pub fn pictures(shown: &[&Arm], all: &[Arm]) -> Result<Vec<Picture>, EvidenceError> {
    let mut out = Vec::new();
    let mut add = |caption: String, svg: Result<String, EvidenceError>| -> Result<(), EvidenceError> {
        out.push(Picture { caption, svg: svg? });
        Ok(())
    };
    let (body, tail) = distributions(shown);
    add(
        "TTFT, body: share of turns with a first token by then.".to_owned(),
        body.svg(),
    )?;
    add(
        "TTFT, tail: share of turns still without a first token. Failed turns count with the request timeout."
            .to_owned(),
        tail.svg(),
    )?;
    add(
        "Cached share of the prompt, mean by turn.".to_owned(),
        cache_by_turn(shown).svg(),
    )?;
    add("How turns were served.".to_owned(), paths(all).svg())?;
    for arm in shown {
        if let Some(work) = work(arm) {
            add(format!("{}: work of each GPU, a run.", arm.name), work.svg())?;
        }
        if let Some(load) = load(arm) {
            add(
                format!("{}: turns in flight on each decoding GPU, first run.", arm.name),
                load.svg(),
            )?;
        }
    }
    let staleness = staleness(shown);
    if !staleness.series.is_empty() {
        add("Staleness of backups after each turn.".to_owned(), staleness.svg())?;
    }
    Ok(out)
}

fn lines(x: &'static str, y: &'static str, scales: (Scale, Scale), series: Vec<Series>) -> Lines {
    Lines { x, y, scales, series }
}

fn distributions(shown: &[&Arm]) -> (Lines, Lines) {
    let times: Vec<(&Arm, Vec<f64>)> = shown
        .iter()
        .map(|arm| (*arm, arm.rows().map(|(run, row)| Metric::Ttft.of(run, row)).collect()))
        .collect();
    // The body ends where the slower of candidate and baseline has nine tenths of its turns.
    let p90s = times.iter().take(2).filter_map(|(_, times)| percentile(times, 0.9));
    let end = p90s.fold(0.0, f64::max);
    let series = |points: &dyn Fn(&[f64]) -> Points| -> Vec<Series> {
        let named = times.iter().map(|(arm, times)| Series {
            name: arm.name.clone(),
            points: points(times),
        });
        named.collect()
    };
    let body = series(&|times| {
        let mut points = curve(times, |share| share);
        points.retain(|(time, _)| *time <= end);
        points
    });
    // Evenly in the exponent: from all turns to one in ten thousand.
    let tail = series(&|times| {
        let points = curve(times, |share| 1.0 - 10f64.powf(-4.0 * share));
        let slower = points.into_iter().map(|(time, share)| (time, 100.0 - share));
        slower.filter(|(time, share)| *time > 0.0 && *share > 0.0).collect()
    });
    (
        lines("seconds", "% of turns", (Scale::Linear, Scale::Linear), body),
        lines("seconds", "% of turns, slower", (Scale::Log, Scale::Log), tail),
    )
}

/// Quantiles of `values` with their share in %, at shares that `place` gives for numbers from 0 to 1.
fn curve(values: &[f64], place: fn(f64) -> f64) -> Points {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let points = (0..=POINTS).filter_map(|i| {
        let share = place(i as f64 / POINTS as f64);
        let rank = sorted.len().saturating_sub(1) as f64 * share;
        Some((*sorted.get(rank as usize)?, share * 100.0))
    });
    points.collect()
}

fn cache_by_turn(shown: &[&Arm]) -> Lines {
    let series = shown.iter().map(|arm| {
        let mut by_turn: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for (_, row) in arm.rows().filter(|(_, row)| row.turn < TURNS && row.input > 0) {
            if let Some(cached) = row.cached_tokens {
                by_turn
                    .entry(row.turn)
                    .or_default()
                    .push(f64::from(cached) / row.input as f64 * 100.0);
            }
        }
        let points = by_turn
            .into_iter()
            .filter_map(|(turn, shares)| Some((turn as f64 + 1.0, mean(&shares)?)));
        Series {
            name: arm.name.clone(),
            points: points.collect(),
        }
    });
    lines("turn", "% cached", (Scale::Linear, Scale::Linear), series.collect())
}

fn paths(all: &[Arm]) -> Bars {
    let bars = all.iter().map(|arm| {
        let served = Paths::of(arm.rows().map(|(_, row)| row).filter(|row| !row.failed()));
        let total = arm.rows().count().max(1) as f64;
        let mut parts: Vec<f64> = served
            .rows()
            .iter()
            .map(|(_, count)| *count as f64 / total * 100.0)
            .collect();
        parts.push((total - served.turns as f64) / total * 100.0);
        (arm.name.clone(), parts)
    });
    let labels = Paths::default().rows().map(|(label, _)| label.to_owned());
    Bars {
        y: "% of turns",
        bars: bars.collect(),
        parts: labels.into_iter().chain(["failed".to_owned()]).collect(),
    }
}

/// Tokens prefilled and decoded by each worker.
fn work(arm: &Arm) -> Option<Bars> {
    let mut workers: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    for (_, row) in arm.rows() {
        let Some(decode) = row.decode.as_deref() else { continue };
        let computed = row.input as f64 - f64::from(row.cached_tokens.unwrap_or(0));
        let prefilled_on = row.prefill.as_deref().unwrap_or(decode);
        workers.entry(prefilled_on).or_default()[0] += computed;
        workers.entry(decode).or_default()[1] += row.output as f64;
    }
    let runs = arm.runs.len().max(1) as f64;
    let bar = |(name, parts): (&str, [f64; 2])| (name.to_owned(), parts.map(|part| part / runs).to_vec());
    (!workers.is_empty()).then(|| Bars {
        y: "tokens",
        parts: vec!["prefilled".to_owned(), "decoded".to_owned()],
        bars: workers.into_iter().map(bar).collect(),
    })
}

/// Mean number of turns in flight on each decoding worker over the first run.
fn load(arm: &Arm) -> Option<Lines> {
    let rows: Vec<&TurnRecord> = arm.runs.first()?.rows.iter().collect();
    let end_of = |row: &TurnRecord| row.at_s + row.latency_ms / 1e3;
    let end = rows.iter().map(|row| end_of(row)).fold(0.0, f64::max);
    let span = end / SPANS as f64;
    let mut workers: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for row in rows.iter().filter(|_| span > 0.0) {
        let Some(decode) = row.decode.as_deref() else { continue };
        let load = workers.entry(decode).or_insert_with(|| vec![0.0; SPANS]);
        for (place, busy) in load.iter_mut().enumerate() {
            let (from, to) = (place as f64 * span, (place + 1) as f64 * span);
            *busy += (end_of(row).min(to) - row.at_s.max(from)).max(0.0) / span;
        }
    }
    let series = workers.into_iter().take(6).map(|(name, load)| Series {
        name: name.to_owned(),
        points: load
            .into_iter()
            .enumerate()
            .map(|(i, busy)| ((i as f64 + 0.5) * span, busy))
            .collect(),
    });
    let series: Vec<Series> = series.collect();
    (!series.is_empty()).then(|| lines("seconds", "turns", (Scale::Linear, Scale::Linear), series))
}

fn staleness(shown: &[&Arm]) -> Lines {
    let series = shown.iter().filter_map(|arm| {
        let lags: Vec<f64> = arm.rows().filter_map(|(_, row)| row.staleness.map(f64::from)).collect();
        let points = curve(&lags, |share| share);
        (!points.is_empty()).then(|| Series {
            name: arm.name.clone(),
            points,
        })
    });
    lines(
        "tokens behind",
        "% of turns",
        (Scale::Linear, Scale::Linear),
        series.collect(),
    )
}
