//! The file that a run leaves: a first line with what was played, then one line a turn.

use super::EvidenceError;
use crate::replay::{ReplayOptions, TurnRecord};
use crate::trace::Trace;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;

/// What a comparison must find equal in all of its runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Name of the trace's file.
    pub trace: String,
    /// Its content, see [`Trace::fingerprint`], in hex.
    pub fingerprint: String,
    /// Whether the time was simulated.
    pub virtual_time: bool,
    /// GPUs (workers); `None` if that is not known, as for a live cluster.
    pub gpus: Option<u32>,
    /// Times ran this much faster than recorded.
    pub time_scale: f64,
    /// Longest pause before a turn, seconds.
    pub max_think_s: f64,
    /// Mean gap between starts of sessions that was made up, seconds.
    pub arrival_gap_s: f64,
    /// Only the first sessions.
    pub sessions: Option<usize>,
    /// Only the first turns of each.
    pub max_turns: Option<usize>,
    /// Most sessions at a time.
    pub concurrency: usize,
    /// Most tokens asked for.
    pub max_output: Option<u32>,
    /// Longest prompt, 0 for none.
    pub max_input: usize,
    /// Whether all sessions had the same head.
    pub common_head: bool,
    /// Longest time of a turn, seconds.
    pub request_timeout_s: f64,
}

impl Settings {
    /// Those of a replay of `trace`, read from the file `name`.
    pub fn of(name: &str, trace: &Trace, options: &ReplayOptions) -> Self {
        Self {
            trace: name.to_owned(),
            fingerprint: format!("{:016x}", trace.fingerprint()),
            virtual_time: false,
            gpus: None,
            time_scale: options.time_scale,
            max_think_s: options.max_think.as_secs_f64(),
            arrival_gap_s: options.arrival_gap.as_secs_f64(),
            sessions: options.sessions,
            max_turns: options.max_turns,
            concurrency: options.concurrency,
            max_output: options.max_output_tokens,
            max_input: options.max_input_tokens,
            common_head: options.common_head,
            request_timeout_s: options.request_timeout.as_secs_f64(),
        }
    }

    /// The first setting in which `other` differs, with both values.
    pub fn difference(&self, other: &Self) -> Option<(String, String, String)> {
        let fields = |settings| match serde_json::to_value(settings) {
            Ok(serde_json::Value::Object(fields)) => fields,
            _ => serde_json::Map::new(), // A struct is an object.
        };
        let (own, theirs) = (fields(self), fields(other));
        own.into_iter()
            .filter_map(|(name, value)| Some((theirs.get(&name)?.to_string(), name, value.to_string())))
            .find(|(theirs, _, value)| theirs != value)
            .map(|(theirs, name, value)| (name, value, theirs))
    }
}

/// First line of a file of rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// The system, as tables name it.
    pub arm: String,
    /// Of arrivals and all other chance.
    pub seed: u64,
    /// What was played, and how.
    pub settings: Settings,
}

#[derive(Serialize, Deserialize)]
struct HeadLine<H> {
    run: H,
}

/// One play of a trace by one system.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// What was played.
    pub head: Head,
    /// One a turn, in the order in which they ended.
    pub rows: Vec<TurnRecord>,
}

impl Run {
    /// How messages name it.
    pub fn name(&self) -> String {
        format!("{} seed {}", self.head.arm, self.head.seed)
    }

    /// Writes head and rows, one JSON object a line.
    ///
    /// # Errors
    /// Those of `writer`.
    pub fn write_to(&self, writer: &mut impl Write) -> io::Result<()> {
        write_to(writer, &self.head, &self.rows)
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If it cannot be read, or a line is not what it should be.
    pub fn read(path: &Path) -> Result<Self, EvidenceError> {
        let file = File::open(path).map_err(|source| io_error(path, source))?;
        let broken = |line: usize, message: String| EvidenceError::Line {
            path: path.to_owned(),
            line,
            message,
        };
        let mut head = None;
        let mut rows = Vec::new();
        for (line, number) in BufReader::new(file).lines().zip(1..) {
            let line = line.map_err(|source| io_error(path, source))?;
            if head.is_none() {
                let first: HeadLine<Head> = serde_json::from_str(&line)
                    .map_err(|e| broken(number, format!("no {{\"run\":…}} line with the settings ({e})")))?;
                head = Some(first.run);
            } else {
                rows.push(serde_json::from_str(&line).map_err(|e| broken(number, e.to_string()))?);
            }
        }
        let head = head.ok_or_else(|| broken(1, "the file is empty".to_owned()))?;
        Ok(Self { head, rows })
    }
}

/// Writes a file at once: under another name first, so that one that is there is whole.
///
/// # Errors
/// Those of the file system.
pub fn write(path: &Path, head: &Head, rows: &[TurnRecord]) -> Result<(), EvidenceError> {
    let unfinished = path.with_extension("unfinished");
    let all = || -> io::Result<()> {
        let mut writer = BufWriter::new(File::create(&unfinished)?);
        write_to(&mut writer, head, rows)?;
        writer
            .into_inner()
            .map_err(io::IntoInnerError::into_error)?
            .sync_all()?;
        std::fs::rename(&unfinished, path)
    };
    all().map_err(|source| io_error(path, source))
}

fn write_to(writer: &mut impl Write, head: &Head, rows: &[TurnRecord]) -> io::Result<()> {
    serde_json::to_writer(&mut *writer, &HeadLine { run: head })?;
    writer.write_all(b"\n")?;
    for row in rows {
        serde_json::to_writer(&mut *writer, row)?;
        writer.write_all(b"\n")?;
    }
    writer.flush()
}

pub(super) fn io_error(path: &Path, source: io::Error) -> EvidenceError {
    EvidenceError::Io {
        path: path.to_owned(),
        source,
    }
}
