//! Made-up prompts: token ids that are a function of block ids, so that equal ids give equal tokens.
//!
//! A trace has no text. The token at an offset of a block depends on (namespace, block id, offset) only; tokens behind
//! the last block depend on the session and the turn, so nobody shares them.

use super::{Session, Turn};
use crate::stats::mix64;

const COMMON_MAIN: u64 = 0x636f_6d6d_6f6e_0001;
const COMMON_AGENT: u64 = 0x636f_6d6d_6f6e_0002;
const TAIL: u64 = 0x7461_696c_0000_0003;

/// Namespace of a session whose block ids are its own: FNV-1a of `id`, never 0 (0 is the namespace of a whole file).
pub fn namespace_of(id: &str) -> u64 {
    let step = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
    id.bytes().fold(0xcbf2_9ce4_8422_2325, step).max(1)
}

/// Which token ids prompts are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vocab {
    /// Smallest id used; ids below are often control tokens.
    pub first: u32,
    /// Number of ids used, from `first` on; 0 is taken as 1.
    pub size: u32,
}

impl Vocab {
    /// The token at `offset` tokens into block `block` of `namespace`.
    pub fn token(self, namespace: u64, block: u64, offset: u32) -> u32 {
        let hash = mix64(mix64(mix64(namespace) ^ block).wrapping_add(u64::from(offset)));
        // The high product maps evenly and the result is below `size`.
        let index = (u128::from(hash) * u128::from(self.size.max(1))) >> 64;
        self.first.saturating_add(index as u32)
    }

    /// The prompt of turn `index` of `session`, [`Turn::input_tokens`] long; `None` if there is no such turn.
    ///
    /// With `common_head`, the first [`Session::head_tokens`] tokens depend on their position only and are thus the
    /// same in all main sessions (and the same in all sub-agents), as tools and system prompt would be.
    pub fn prompt(self, session: &Session, index: usize, common_head: bool) -> Option<Vec<u32>> {
        let turn: &Turn = session.turns.get(index)?;
        let wanted = turn.input_tokens as usize;
        let mut tokens = Vec::with_capacity(wanted);
        for block in turn.block_ids() {
            let left = u32::try_from(wanted - tokens.len()).unwrap_or(u32::MAX);
            if left == 0 {
                break;
            }
            tokens.extend((0..turn.block_tokens.min(left)).map(|o| self.token(session.namespace, block, o)));
        }
        let own = mix64(namespace_of(&session.id) ^ TAIL);
        let behind = u32::try_from(wanted - tokens.len()).unwrap_or(u32::MAX);
        tokens.extend((0..behind).map(|o| self.token(own, index as u64, o)));
        if common_head {
            let group = if session.agent_head { COMMON_AGENT } else { COMMON_MAIN };
            for (token, position) in tokens.iter_mut().zip(0..session.head_tokens) {
                *token = self.token(group, 0, position);
            }
        }
        Some(tokens)
    }
}
