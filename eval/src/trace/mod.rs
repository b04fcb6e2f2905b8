//! Request traces: sessions of turns, read from four public formats, converted from two kinds of logs, summed up, sampled.
//!
//! Source of the formats: digest §3.1. Times are offsets from the start of the trace. Readers go line by line and hand on
//! what they find ([`Sink`]); [`Trace`] is the sink that keeps everything.

mod claude;
mod error;
mod fields;
mod flat;
pub mod import;
mod read;
pub mod sample;
pub mod stats;
#[cfg(test)]
mod tests;
pub mod tokens;
mod write;

pub use error::{BrokenLine, LineError, ReadError};
pub use read::{MAX_BROKEN_LINES, MAX_LINE_BYTES, MAX_LINES, Report, detect, open, read, stream};
pub use write::{write, write_session};

use crate::stats::mix64;
use pinion_schemas::Micros;

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
    /// When the session starts, from the start of the trace. Claude Code's own: 0, arrivals must be made up; for a
    /// sub-agent the offset inside its parent.
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

    /// A number that two traces share only if they are the same, short of an accident of 64 bits.
    pub fn fingerprint(&self) -> u64 {
        let mut sum = 0;
        let mut add = |n: u64| sum = mix64(sum ^ n);
        for session in &self.sessions {
            for n in [
                tokens::namespace_of(&session.id),
                session.start.0,
                session.namespace,
                u64::from(session.head_tokens),
                session.turns.len() as u64,
            ] {
                add(n);
            }
            for turn in &session.turns {
                for n in [
                    u64::from(turn.input_tokens),
                    u64::from(turn.output_tokens),
                    turn.think.0,
                ] {
                    add(n);
                }
                for run in &turn.blocks {
                    add(run.start);
                    add(u64::from(run.len));
                }
            }
        }
        sum
    }
}

/// Takes what a reader finds, in the order of the file.
pub trait Sink {
    /// A new session, still without turns. Sessions are numbered from 0 in this order.
    fn session(&mut self, session: Session);
    /// The next turn of session `number`.
    fn turn(&mut self, number: usize, turn: Turn);
    /// A whole session, which is number `number`.
    fn whole(&mut self, number: usize, mut session: Session) {
        let turns = std::mem::take(&mut session.turns);
        self.session(session);
        for turn in turns {
            self.turn(number, turn);
        }
    }
}

impl Sink for Trace {
    fn session(&mut self, session: Session) {
        self.sessions.push(session);
    }

    fn turn(&mut self, number: usize, turn: Turn) {
        if let Some(session) = self.sessions.get_mut(number) {
            session.turns.push(turn);
        }
    }
}
