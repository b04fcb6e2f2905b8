//! Deterministic text: the next token is a function of the whole context, so that a wrong prefix or a lost or repeated
//! token changes everything after it.

use serde::{Deserialize, Serialize};

/// Rolling hash over all tokens of a context. It stands for the *content* of the KV: each page keeps the value at its end,
/// and a turn goes on from what its cached page says, as a real engine would, right or wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ContextHash(pub u64);

/// The finalizer of `SplitMix64`: a bijection over 64 bits.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl ContextHash {
    /// Appends one token. For a given token this is a bijection of the state: contexts that differ stay different.
    pub fn push(&mut self, token: u32) {
        self.0 = mix(self.0.wrapping_add(0x9e37_79b9_7f4a_7c15)
            ^ (u64::from(token) << 1 | 1).wrapping_mul(0xd6e8_feb8_6659_fd93));
    }

    /// Appends all `tokens` in order.
    pub fn extend(&mut self, tokens: &[u32]) {
        for t in tokens {
            self.push(*t);
        }
    }

    /// The token after this context, in `0..vocab`; a `vocab` of zero is taken as 1.
    pub fn next_token(self, vocab: u32) -> u32 {
        (mix(self.0 ^ 0xa076_1d64_78bd_642f) % u64::from(vocab.max(1))) as u32
    }
}

/// The `n` tokens that an engine must write after `context`: what tests compare an answer with.
pub fn continuation(context: &[u32], n: usize, vocab: u32) -> Vec<u32> {
    let mut hash = ContextHash::default();
    hash.extend(context);
    let next = || {
        let token = hash.next_token(vocab);
        hash.push(token);
        Some(token)
    };
    std::iter::from_fn(next).take(n).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(tokens: &[u32]) -> ContextHash {
        let mut h = ContextHash::default();
        h.extend(tokens);
        h
    }

    proptest! {
        #[test]
        fn splits_do_not_matter(tokens in prop::collection::vec(any::<u32>(), 0..100), cut in 0usize..100) {
            let cut = cut.min(tokens.len());
            let mut h = hash(&tokens[..cut]);
            h.extend(&tokens[cut..]);
            prop_assert_eq!(h, hash(&tokens));
        }

        #[test]
        fn a_changed_lost_or_repeated_token_changes_what_follows(
            tokens in prop::collection::vec(0u32..50_000, 1..100), at in 0usize..100, other in 0u32..50_000,
        ) {
            let at = at % tokens.len();
            let right = hash(&tokens);
            let mut lost = tokens.clone();
            lost.remove(at);
            prop_assert_ne!(hash(&lost), right);
            let mut repeated = tokens.clone();
            repeated.insert(at, tokens[at]);
            prop_assert_ne!(hash(&repeated), right);
            if other != tokens[at] {
                let mut changed = tokens.clone();
                changed[at] = other;
                prop_assert_ne!(hash(&changed), right);
            }
            prop_assert!(right.next_token(7) < 7);
            prop_assert_eq!(right.next_token(0), 0);
        }
    }
}
