//! What both roles need to give pages to each other, whichever way they go.

use crate::engine::MovedPage;
use pinion_schemas::messages::Slots;
use pinion_schemas::{Micros, PageHash};
use pinion_transfer::Grant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// How long slots stay granted: longer than any transfer of theirs may take (45 s), so that only a dead peer's grant ends by it.
pub const GRANT_TTL: Micros = Micros::from_secs(60);

/// How long a peer may take to answer before the leg, or the sync, has failed (design §4: no leg hangs).
pub const ANSWER_PATIENCE: Micros = Micros::from_millis(1_500);

/// Keys that a peer cannot guess from those it has seen.
#[derive(Debug)]
pub struct Keys {
    secret: u64,
    given: u64,
}

impl Keys {
    /// `secret` must be random.
    pub fn new(secret: u64) -> Self {
        Self { secret, given: 0 }
    }

    /// Another key.
    pub fn draw(&mut self) -> u64 {
        self.given += 1;
        xxh3_64_with_seed(&self.given.to_le_bytes(), self.secret)
    }
}

/// A grant as it is told to a peer.
pub fn slots(grant: Grant, addresses: &[String]) -> Slots {
    Slots {
        grant: grant.id,
        key: grant.key,
        epoch: grant.epoch,
        pages: grant.pages,
        addresses: addresses.to_vec(),
    }
}

/// A grant as a peer told it, and where it may be filled.
pub fn granted(slots: Slots) -> (Vec<String>, Grant) {
    let grant = Grant {
        id: slots.grant,
        key: slots.key,
        epoch: slots.epoch,
        pages: slots.pages,
    };
    (slots.addresses, grant)
}

/// Words of one simulated page on its way: what it holds, and the digest of name and content, as real pages have one.
const WORDS: usize = 2;

/// Pages of the simulated engine as they go with a commit.
pub fn sealed(pages: &[MovedPage]) -> Vec<u64> {
    let words = |(name, content): &MovedPage| [*content, digest(name, *content)];
    pages.iter().flat_map(words).collect()
}

/// Pages of the simulated engine that came with a commit: up to the first that is not what its digest says (I9).
pub fn simulated(names: &[PageHash], contents: &[u64]) -> Vec<MovedPage> {
    let pages = names.iter().zip(contents.chunks_exact(WORDS));
    let right = pages.map_while(|(name, words)| (digest(name, words[0]) == words[1]).then_some((*name, words[0])));
    right.collect()
}

fn digest(name: &PageHash, content: u64) -> u64 {
    xxh3_64_with_seed(&name.0, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_ends_what_is_taken() {
        let pages: Vec<MovedPage> = (0..3).map(|i| (PageHash([i; 32]), u64::from(i) << 40)).collect();
        let names: Vec<PageHash> = pages.iter().map(|p| p.0).collect();
        let words = sealed(&pages);
        assert_eq!(simulated(&names, &words), pages);
        for at in 0..words.len() {
            let mut wrong = words.clone();
            wrong[at] ^= 1 << (at * 7 % 64);
            assert_eq!(simulated(&names, &wrong), pages[..at / WORDS]);
        }
    }
}
