//! Traces that are made up: sessions whose lengths, growth and pauses follow what is known of workloads whose traces are not
//! public (digest §3.3), and two that test one thing.
//!
//! All are seeded, and give one session after the other, so that a trace of any length can be written. What the digest does
//! not say is an assumption, told where it is made. Pauses are from request to request, as in the traces they stand for.

mod agents;
mod draw;
mod glm;
mod small;
#[cfg(test)]
mod tests;

pub use agents::{Inferact, Swe, inferact, swe};
pub use glm::{Glm, glm};
pub use small::{Adversarial, Microbench, ShareGpt, adversarial, microbench, sharegpt};

use crate::trace::tokens::namespace_of;
use crate::trace::{BlockRun, Session, Turn};
use pinion_schemas::Micros;

/// Tokens per block of the prototype's traces.
const BLOCK: u32 = crate::trace::PROTOTYPE_BLOCK_TOKENS;

/// A session without turns. Its blocks are its own, unless `shared`: then ids mean the same in all sessions.
fn session(id: String, start: Micros, shared: bool) -> Session {
    Session {
        namespace: if shared { 0 } else { namespace_of(&id) },
        id,
        start,
        turns: Vec::new(),
        head_tokens: 0,
        parent: None,
        agent_head: false,
    }
}

/// Appends a turn that is sent `gap` after the one before, or with the session's start.
fn push(session: &mut Session, gap: Micros, input_tokens: u32, output_tokens: u32, blocks: Vec<BlockRun>, block: u32) {
    let (at, think) = session
        .turns
        .last()
        .map_or((Micros::ZERO, Micros::ZERO), |last| (last.at.plus(gap), gap));
    session.turns.push(Turn {
        input_tokens,
        output_tokens,
        at,
        think,
        blocks,
        block_tokens: block,
    });
}

/// `len` blocks from `start` on; nothing if there are none.
fn run(start: u64, len: u32) -> Option<BlockRun> {
    (len > 0).then_some(BlockRun { start, len })
}

/// The full blocks of a prompt that nobody shares.
fn own(input_tokens: u32) -> Vec<BlockRun> {
    run(0, input_tokens / BLOCK).into_iter().collect()
}
