//! The rows of a replay and what they come to.

use crate::stats::Spread;
use pinion_schemas::reasons::{Path, SeedReason};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::str::FromStr;

/// Longest [`Failure::detail`], characters.
const MAX_DETAIL: usize = 300;

/// Why a turn failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// No connection.
    Connect,
    /// The connection ended before an answer began, or the request could not be sent.
    NoAnswer,
    /// The request timeout passed.
    Timeout,
    /// A status other than 2xx; for 429 and 503 after the retries.
    Http(u16),
    /// The stream is none, or one of its events cannot be read.
    BadChunk,
    /// The stream broke off, or ended without a finish reason or `[DONE]`.
    BrokenStream,
    /// An `error` event in the stream.
    ServerError,
    /// A finish reason other than `stop` and `length`.
    Aborted,
    /// Fewer tokens than asked for, and the finish reason is not `stop`.
    ShortStream,
    /// More tokens than asked for.
    LongStream,
    /// `usage` counts other tokens than were sent and received.
    UsageMismatch,
}

impl Reason {
    /// All but [`Reason::Http`], with their labels.
    const LABELS: [(Self, &'static str); 10] = [
        (Self::Connect, "connect"),
        (Self::NoAnswer, "no-answer"),
        (Self::Timeout, "timeout"),
        (Self::BadChunk, "bad-chunk"),
        (Self::BrokenStream, "broken-stream"),
        (Self::ServerError, "server-error"),
        (Self::Aborted, "aborted"),
        (Self::ShortStream, "short-stream"),
        (Self::LongStream, "long-stream"),
        (Self::UsageMismatch, "usage-mismatch"),
    ];
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Http(status) = self {
            return write!(f, "http-{status}");
        }
        let label = Self::LABELS.iter().find(|(reason, _)| reason == self);
        f.write_str(label.map_or("unknown", |(_, label)| label))
    }
}

impl FromStr for Reason {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(status) = text.strip_prefix("http-").and_then(|status| status.parse().ok()) {
            return Ok(Self::Http(status));
        }
        let known = Self::LABELS.iter().find(|(_, label)| *label == text);
        known
            .map(|(reason, _)| *reason)
            .ok_or_else(|| format!("{text} is no reason of a failure"))
    }
}

impl Serialize for Reason {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Reason {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A failed turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind.
    pub reason: Reason,
    /// The server's or the connection's words, shortened.
    pub detail: String,
}

impl Failure {
    /// The words are cut to [`MAX_DETAIL`] characters.
    pub fn new(reason: Reason, detail: impl AsRef<str>) -> Self {
        let detail = detail.as_ref().trim().chars().take(MAX_DETAIL).collect();
        Self { reason, detail }
    }
}

/// One turn as it was played.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TurnRecord {
    /// The session's id in the trace.
    pub session: String,
    /// Index of the turn in its session.
    pub turn: usize,
    /// When it was sent, seconds from the start of the replay.
    pub at_s: f64,
    /// Pause between the end of the session's turn before and this one, seconds; none for a first turn.
    pub pause_s: Option<f64>,
    /// Tokens of the prompt.
    pub input: usize,
    /// Leading tokens taken over from the previous prompt and its answer (see [`super`]).
    pub carried: u32,
    /// The prompt started anew although it is not the first.
    pub reset: bool,
    /// Tokens asked for.
    pub requested: u32,
    /// Tokens received.
    pub output: usize,
    /// From the first send to the first chunk with tokens, retries included.
    pub ttft_ms: Option<f64>,
    /// From the first send to the end, retries included.
    pub latency_ms: f64,
    /// How the turn was served, if the server said so.
    pub path: Option<Path>,
    /// Why it was not direct, if the server said so.
    pub why: Option<SeedReason>,
    /// The prompt was cut to [`super::ReplayOptions::max_input_tokens`].
    pub truncated: bool,
    /// Prompt tokens that were not computed, if the server said so.
    pub cached_tokens: Option<u32>,
    /// The worker that decoded it, if known (simulated arms know).
    pub decode: Option<String>,
    /// The worker that prefilled for it, if known and another one.
    pub prefill: Option<String>,
    /// Tokens by which the session's backup lagged when the turn had ended, if known.
    pub staleness: Option<u32>,
    /// The server's name for the request, as `pinion session explain` takes it.
    pub request: Option<String>,
    /// The last finish reason.
    pub finish_reason: Option<String>,
    /// Times it was sent again after 429 or 503.
    pub retries: u32,
    /// Why it failed.
    pub error: Option<Failure>,
}

impl TurnRecord {
    /// The one failure rule of all tables (digest §1.13): an error, an abort or a refusal, whatever had come until then.
    pub const fn failed(&self) -> bool {
        self.error.is_some()
    }
}

/// How many turns took which path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Paths {
    /// All of them, failed ones too.
    pub turns: usize,
    /// See [`Path::Direct`].
    pub direct: usize,
    /// See [`Path::Seed`].
    pub seed: usize,
    /// See [`Path::Reseed`].
    pub reseed: usize,
    /// See [`Path::Fallback`].
    pub fallback: usize,
    /// The server did not say; most often because the turn failed.
    pub unknown: usize,
}

impl Paths {
    /// Counts those of `records`.
    pub fn of<'a>(records: impl Iterator<Item = &'a TurnRecord>) -> Self {
        let mut paths = Self::default();
        for record in records {
            paths.turns += 1;
            *match record.path {
                Some(Path::Direct) => &mut paths.direct,
                Some(Path::Seed) => &mut paths.seed,
                Some(Path::Reseed) => &mut paths.reseed,
                Some(Path::Fallback) => &mut paths.fallback,
                None => &mut paths.unknown,
            } += 1;
        }
        paths
    }

    /// `count` as a share of all of these turns, 0 to 1; `None` if there are none.
    pub fn share(&self, count: usize) -> Option<f64> {
        share(count as u64, self.turns as u64)
    }

    /// Label and count of each path, in a fixed order.
    pub const fn rows(&self) -> [(&'static str, usize); 5] {
        [
            (Path::Direct.label(), self.direct),
            (Path::Seed.label(), self.seed),
            (Path::Reseed.label(), self.reseed),
            (Path::Fallback.label(), self.fallback),
            ("unknown", self.unknown),
        ]
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// What a replay came to. Times are over turns that did not fail; paths are over all turns.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Sessions played, sub-agents counted as such.
    pub sessions: usize,
    /// Turns played.
    pub turns: usize,
    /// Turns failed.
    pub failed: usize,
    /// Failed turns by label of [`Reason`].
    pub failures: BTreeMap<String, usize>,
    /// The first failure of each reason, in words, with its session and turn.
    pub examples: BTreeMap<String, String>,
    /// Turns that did not fail but got fewer tokens than asked for, as the server finished with `stop`.
    pub stopped_early: usize,
    /// Requests sent again after 429 or 503.
    pub retries: u64,
    /// Prompts that started anew inside a session.
    pub resets: usize,
    /// Prompts that were cut to [`super::ReplayOptions::max_input_tokens`].
    pub truncated: usize,
    /// Turns that were not direct, by label of [`SeedReason`].
    pub not_direct: BTreeMap<&'static str, usize>,
    /// From the start to the end of the last turn, seconds.
    pub wall_s: f64,
    /// Tokens of the prompts of turns that did not fail.
    pub input_tokens: u64,
    /// Tokens received, also in failed turns.
    pub output_tokens: u64,
    /// Tokens received per second of wall time.
    pub output_tokens_per_s: Option<f64>,
    /// Cached prompt tokens as a share of all, over good turns whose server told; 0 to 1.
    pub cached_share: Option<f64>,
    /// Carried prompt tokens as a share of all, over the same turns: what a cache that never forgets would reach
    /// without sharing between sessions.
    pub carried_share: Option<f64>,
    /// Time to first token, ms.
    pub ttft_ms: Option<Spread>,
    /// The same by label of the path.
    pub ttft_ms_by_path: BTreeMap<&'static str, Spread>,
    /// Time to the end of the stream, ms.
    pub latency_ms: Option<Spread>,
    /// Paths of all turns.
    pub paths: Paths,
    /// Paths of the turns after a session's first.
    pub paths_after_first: Paths,
    /// The rows, in the order in which the turns ended.
    #[serde(skip)]
    pub records: Vec<TurnRecord>,
}

impl Summary {
    /// Sums up `records` of a replay that took `wall_s` seconds.
    pub fn of(records: Vec<TurnRecord>, wall_s: f64) -> Self {
        let good = || records.iter().filter(|r| !r.failed());
        let told = || good().filter(|r| r.cached_tokens.is_some());
        let told_input: u64 = told().map(|r| r.input as u64).sum();
        let times = |path: Option<Path>| -> Vec<f64> {
            let of_path = good().filter(|r| path.is_none() || r.path == path);
            of_path.filter_map(|r| r.ttft_ms).collect()
        };
        let (mut failures, mut examples) = (BTreeMap::new(), BTreeMap::new());
        for (record, failure) in records.iter().filter_map(|r| Some((r, r.error.as_ref()?))) {
            *failures.entry(failure.reason.to_string()).or_insert(0) += 1;
            examples
                .entry(failure.reason.to_string())
                .or_insert_with(|| format!("{} ({} turn {})", failure.detail, record.session, record.turn));
        }
        let output_tokens = records.iter().map(|r| r.output as u64).sum();
        let sessions: std::collections::BTreeSet<&str> = records.iter().map(|r| r.session.as_str()).collect();
        Self {
            sessions: sessions.len(),
            turns: records.len(),
            failed: failures.values().sum(),
            failures,
            examples,
            stopped_early: good().filter(|r| r.output < r.requested as usize).count(),
            retries: records.iter().map(|r| u64::from(r.retries)).sum(),
            resets: records.iter().filter(|r| r.reset).count(),
            truncated: records.iter().filter(|r| r.truncated).count(),
            not_direct: SeedReason::ALL
                .iter()
                .map(|why| (why.label(), records.iter().filter(|r| r.why == Some(*why)).count()))
                .filter(|(_, count)| *count > 0)
                .collect(),
            wall_s,
            input_tokens: good().map(|r| r.input as u64).sum(),
            output_tokens,
            output_tokens_per_s: (wall_s > 0.0).then(|| output_tokens as f64 / wall_s),
            cached_share: share(told().filter_map(|r| r.cached_tokens).map(u64::from).sum(), told_input),
            carried_share: share(told().map(|r| u64::from(r.carried)).sum(), told_input),
            ttft_ms: Spread::of(&times(None)),
            ttft_ms_by_path: Path::ALL
                .iter()
                .filter_map(|p| Some((p.label(), Spread::of(&times(Some(*p)))?)))
                .collect(),
            latency_ms: Spread::of(&good().map(|r| r.latency_ms).collect::<Vec<f64>>()),
            paths: Paths::of(records.iter()),
            paths_after_first: Paths::of(records.iter().filter(|r| r.turn > 0)),
            records,
        }
    }

    /// A table for a terminal, lines of at most 80 columns.
    pub fn render_table(&self) -> String {
        let mut t = String::new();
        self.table(&mut t).unwrap_or_default(); // A `String` takes everything.
        t
    }

    fn table(&self, t: &mut String) -> fmt::Result {
        writeln!(
            t,
            "{} sessions, {} turns, {} failed, {} stopped early\n{} retries, {} prompts that started anew",
            self.sessions, self.turns, self.failed, self.stopped_early, self.retries, self.resets
        )?;
        if self.truncated > 0 {
            writeln!(t, "{} prompts cut to the longest allowed input", self.truncated)?;
        }
        let rate = self.output_tokens_per_s.unwrap_or(0.0);
        writeln!(
            t,
            "{:.1} s, {} input and {} output tokens, {rate:.0} output/s",
            self.wall_s, self.input_tokens, self.output_tokens
        )?;
        writeln!(
            t,
            "prompt tokens cached {}, carried over from the turn before {}",
            percent(self.cached_share).trim(),
            percent(self.carried_share).trim()
        )?;
        writeln!(
            t,
            "\n{:<22}{:>8}{:>11}{:>11}{:>11}{:>11}",
            "milliseconds", "turns", "mean", "p50", "p90", "p99"
        )?;
        spread(t, "time to first token", self.ttft_ms)?;
        for path in Path::ALL {
            if let Some(s) = self.ttft_ms_by_path.get(path.label()) {
                spread(t, &format!("  {path}"), Some(*s))?;
            }
        }
        spread(t, "latency", self.latency_ms)?;
        writeln!(
            t,
            "\n{:<22}{:>19}{:>33}",
            "path", "all turns", "after a session's first"
        )?;
        for ((label, all), (_, later)) in self.paths.rows().into_iter().zip(self.paths_after_first.rows()) {
            if label != "unknown" || all > 0 {
                writeln!(
                    t,
                    "{label:<22}{all:>10}{:>9}{later:>24}{:>9}",
                    percent(self.paths.share(all)),
                    percent(self.paths_after_first.share(later))
                )?;
            }
        }
        if !self.not_direct.is_empty() {
            writeln!(t, "\n{:<22}{:>10}", "why not direct", "turns")?;
        }
        for (why, count) in &self.not_direct {
            writeln!(t, "{why:<22}{count:>10}")?;
        }
        if !self.failures.is_empty() {
            writeln!(t, "\n{:<22}{:>8}  first seen", "failure", "turns")?;
        }
        for (reason, count) in &self.failures {
            let example = self.examples.get(reason).map_or("", String::as_str);
            let example: String = example
                .chars()
                .map(|c| if c.is_control() { ' ' } else { c })
                .take(48)
                .collect();
            writeln!(t, "{reason:<22}{count:>8}  {example}")?;
        }
        Ok(())
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |s| format!("{:.1} %", s * 100.0))
}

fn spread(t: &mut String, label: &str, spread: Option<Spread>) -> fmt::Result {
    let Some(s) = spread else {
        return writeln!(t, "{label:<22}{:>8}{:>11}{:>11}{:>11}{:>11}", 0, "-", "-", "-", "-");
    };
    writeln!(
        t,
        "{label:<22}{:>8}{:>11.1}{:>11.1}{:>11.1}{:>11.1}",
        s.count, s.mean, s.p50, s.p90, s.p99
    )
}
