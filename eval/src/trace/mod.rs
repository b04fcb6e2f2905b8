//! Request traces: sessions of turns, read from four public formats.
//!
//! Source of the formats: digest §3.1. Times are offsets from the start of the trace.

mod claude;
mod error;
mod fields;
mod flat;
#[cfg(test)]
mod tests;
pub mod tokens;

pub use error::{BrokenLine, LineError, ReadError};

use pinion_schemas::Micros;
use serde_json::Value;
use std::io::{BufRead, Read};

/// Longest accepted line, bytes. The longest of the public traces has under 1 MiB.
pub const MAX_LINE_BYTES: u64 = 64 << 20;
/// Most tokens of one input or output; a guard against nonsense, not a limit of a model.
pub const MAX_TOKENS: u32 = 1 << 24;
/// Tokens per block of a Mooncake FAST'25 trace.
pub const MOONCAKE_BLOCK_TOKENS: u32 = 512;
/// Tokens per block of a trace of the prototype (digest §4.2, converter).
pub const PROTOTYPE_BLOCK_TOKENS: u32 = 24;

/// Where a trace's lines come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One session per line, `hash_runs` of 64-token blocks (kv-cache-tester, re-encoded).
    ClaudeCode,
    /// One request per line with `hash_ids`, no session id: sessions are inferred.
    Mooncake,
    /// One request per line with `chat_id` and `parent_chat_id`.
    Prototype {
        /// Tokens per block: [`PROTOTYPE_BLOCK_TOKENS`] for the prototype's own, 16 for qwen-bailian.
        block_tokens: u32,
    },
    /// `TIMESTAMP,ContextTokens,GeneratedTokens`: every line is a session of one turn, without blocks.
    AzureCsv,
}

/// `len` blocks with the ids `start`, `start + 1`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    /// First block id.
    pub start: u64,
    /// Number of blocks, 1 or more.
    pub len: u32,
}

/// One request of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Whole prompt, tokens.
    pub input_tokens: u32,
    /// Answer, tokens.
    pub output_tokens: u32,
    /// When the request was sent, from the start of its session.
    pub at: Micros,
    /// Pause before the request. Claude Code: since the previous answer (0 if not recorded); Mooncake and Prototype:
    /// since the previous request was sent, as the end of the answer is not recorded.
    pub think: Micros,
    /// Block ids of the prompt in order. May end before the prompt does.
    pub blocks: Vec<BlockRun>,
    /// Tokens per block; 0 if the trace has no blocks. The last block may be partial.
    pub block_tokens: u32,
}

impl Turn {
    /// Number of blocks.
    pub fn block_count(&self) -> u64 {
        self.blocks.iter().map(|r| u64::from(r.len)).sum()
    }

    /// Block ids in order.
    pub fn block_ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.blocks
            .iter()
            .flat_map(|r| (0..u64::from(r.len)).map(|i| r.start.wrapping_add(i)))
    }

    /// Tokens that this prompt shares with the prompt of `previous`, counted in equal leading blocks.
    pub fn shared_tokens(&self, previous: &Self) -> u32 {
        let equal = self
            .block_ids()
            .zip(previous.block_ids())
            .take_while(|(a, b)| a == b)
            .count() as u64;
        let tokens = equal
            .saturating_mul(u64::from(self.block_tokens))
            .min(u64::from(self.input_tokens));
        u32::try_from(tokens).unwrap_or(self.input_tokens)
    }
}

/// A conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Unique in the trace. A sub-agent's is `<parent>/<index of its entry>-<agent_id>`.
    pub id: String,
    /// When the session starts, from the start of the trace. Claude Code: 0, arrivals must be made up; for a sub-agent
    /// the offset inside its parent.
    pub start: Micros,
    /// Requests in the order of the file.
    pub turns: Vec<Turn>,
    /// Equal block ids mean equal prefixes only where this is equal.
    pub namespace: u64,
    /// Tool and system tokens at the head of the prompts, which may be made common between sessions; 0 if unknown.
    pub head_tokens: u32,
    /// The session this is a sub-agent of.
    pub parent: Option<String>,
    /// True if the head is that of a sub-agent, which is not the head of a main session.
    pub agent_head: bool,
}

/// Sessions in the order in which the file first names them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The sessions.
    pub sessions: Vec<Session>,
}

impl Trace {
    /// Requests of all sessions.
    pub fn request_count(&self) -> usize {
        self.sessions.iter().map(|s| s.turns.len()).sum()
    }
}

/// What was read, and what had to be left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The sound lines.
    pub trace: Trace,
    /// The other lines.
    pub broken: Vec<BrokenLine>,
}

/// The format whose first line (not the whole file) is `first_line`; `None` if it is none of them.
pub fn detect(first_line: &str) -> Option<Format> {
    let line = first_line.trim_start_matches('\u{feff}').trim();
    if flat::is_azure_header(line) {
        return Some(Format::AzureCsv);
    }
    let Ok(Value::Object(map)) = serde_json::from_str::<Value>(line) else {
        return None;
    };
    let has = |key: &str| map.contains_key(key);
    if has("requests") && has("block_size") {
        Some(Format::ClaudeCode)
    } else if has("chat_id") && has("parent_chat_id") {
        Some(Format::Prototype {
            block_tokens: PROTOTYPE_BLOCK_TOKENS,
        })
    } else if has("timestamp") && has("input_length") && has("hash_ids") {
        Some(Format::Mooncake)
    } else {
        None
    }
}

enum Parser {
    Claude(claude::Reader),
    Mooncake(flat::Mooncake),
    Prototype(flat::Prototype),
    Azure(flat::Azure),
}

impl Parser {
    fn line(&mut self, text: &str, trace: &mut Trace) -> Result<(), LineError> {
        if let Self::Azure(reader) = self {
            return reader.line(text, trace);
        }
        let value: Value = serde_json::from_str(text).map_err(|e| LineError::Json { message: e.to_string() })?;
        match self {
            Self::Claude(reader) => reader.line(&value, trace),
            Self::Mooncake(reader) => reader.line(&value, trace),
            Self::Prototype(reader) => reader.line(&value, trace),
            Self::Azure(_) => Ok(()),
        }
    }
}

/// Reads one line into `buffer`, without its end. `Ok(None)` at the end of the source, `Ok(Some(false))` if the line
/// was too long and has been skipped.
fn next_line(reader: &mut impl BufRead, buffer: &mut Vec<u8>) -> std::io::Result<Option<bool>> {
    buffer.clear();
    let read = reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', buffer)?;
    if read == 0 {
        return Ok(None);
    }
    if buffer.last() == Some(&b'\n') || (buffer.len() as u64) <= MAX_LINE_BYTES {
        return Ok(Some(true));
    }
    loop {
        buffer.clear();
        let read = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', buffer)?;
        if read == 0 || buffer.last() == Some(&b'\n') {
            return Ok(Some(false));
        }
    }
}

/// Reads a whole trace. Empty lines are passed over; a broken line is reported and left out, or, if `strict`, ends it.
///
/// # Errors
/// [`ReadError::Io`] if the source fails; [`ReadError::Broken`] at the first broken line if `strict`.
pub fn read(mut reader: impl BufRead, format: Format, strict: bool) -> Result<Report, ReadError> {
    let mut parser = match format {
        Format::ClaudeCode => Parser::Claude(claude::Reader::default()),
        Format::Mooncake => Parser::Mooncake(flat::Mooncake::default()),
        Format::Prototype { block_tokens } => Parser::Prototype(flat::Prototype::new(block_tokens)),
        Format::AzureCsv => Parser::Azure(flat::Azure::default()),
    };
    let mut report = Report::default();
    let mut buffer = Vec::new();
    let mut line = 0u64;
    loop {
        let whole = match next_line(&mut reader, &mut buffer) {
            Ok(None) => return Ok(report),
            Ok(Some(whole)) => whole,
            Err(source) => return Err(ReadError::Io { line, source }),
        };
        line += 1;
        let result = if whole {
            match std::str::from_utf8(&buffer) {
                Ok(text) => match text.trim_start_matches('\u{feff}').trim() {
                    "" => Ok(()),
                    text => parser.line(text, &mut report.trace),
                },
                Err(_) => Err(LineError::NotUtf8),
            }
        } else {
            Err(LineError::TooLong { limit: MAX_LINE_BYTES })
        };
        if let Err(error) = result {
            let broken = BrokenLine { line, error };
            if strict {
                return Err(broken.into());
            }
            report.broken.push(broken);
        }
    }
}
