//! Names of KV pages: a SHA-256 chain over token ids, the same bytes `SGLang` uses for its page keys.
//!
//! `h_i = sha256(h_{i-1} ‖ page_tokens token ids as little-endian u32)`. Without a namespace `h_{-1}` is empty; with
//! one it is `sha256("sglang-cache-namespace-v1" ‖ for each part: 00 if absent, else 01 ‖ 8-byte LE length ‖ utf-8)`.
//! Measured against a real `SGLang` 0.5.23 server (engines part B). Equal name = equal prefix, inside one namespace and one
//! model fingerprint. Only full pages have names.

use rkyv::{Archive, Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt;

const NAMESPACE_TAG: &[u8] = b"sglang-cache-namespace-v1";

/// Name of one page and, with it, of the whole prefix that ends there: 32 bytes.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub [u8; 32]);

pub(crate) fn push_hex(out: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for b in bytes {
        out.push(DIGITS[usize::from(b >> 4)] as char);
        out.push(DIGITS[usize::from(b & 15)] as char);
    }
}

impl fmt::Display for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut hex = String::with_capacity(64);
        push_hex(&mut hex, &self.0);
        f.write_str(&hex)
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut hex = String::with_capacity(16);
        push_hex(&mut hex, &self.0[..8]);
        f.write_str(&hex)
    }
}

impl serde::Serialize for PageHash {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// Extends a chain page by page, so that a turn hashes only what it appends.
#[derive(Clone, Debug)]
pub struct ChainHasher {
    /// Bytes of the parent's name; empty before the first page of a chain without namespace.
    parent: Vec<u8>,
    page_tokens: usize,
    /// Tokens behind the last full page, fewer than `page_tokens`.
    tail: Vec<u32>,
}

impl ChainHasher {
    /// A chain from its root. `namespace` holds the parts that separate tenants (`SGLang`: `extra_key`, `cache_salt`);
    /// no part given means no namespace. `page_tokens` below 1 is taken as 1.
    pub fn new(page_tokens: u32, namespace: &[Option<&str>]) -> Self {
        let parent = if namespace.iter().all(Option::is_none) {
            Vec::new()
        } else {
            namespace_root(namespace).to_vec()
        };
        Self {
            parent,
            page_tokens: page_tokens.max(1) as usize,
            tail: Vec::new(),
        }
    }

    /// A chain that goes on behind the page `tip`.
    pub fn resume(page_tokens: u32, tip: PageHash) -> Self {
        Self {
            parent: tip.0.to_vec(),
            page_tokens: page_tokens.max(1) as usize,
            tail: Vec::new(),
        }
    }

    /// Appends `tokens` and returns the names of the pages that became full.
    pub fn push(&mut self, tokens: &[u32]) -> Vec<PageHash> {
        let mut names = Vec::with_capacity((self.tail.len() + tokens.len()) / self.page_tokens);
        let mut rest = tokens;
        while self.tail.len() + rest.len() >= self.page_tokens {
            let (head, behind) = rest.split_at(self.page_tokens - self.tail.len());
            rest = behind;
            let mut sha = Sha256::new();
            sha.update(&self.parent);
            update(&mut sha, &self.tail);
            update(&mut sha, head);
            self.tail.clear();
            let name: [u8; 32] = sha.finalize().into();
            self.parent.clear();
            self.parent.extend_from_slice(&name);
            names.push(PageHash(name));
        }
        self.tail.extend_from_slice(rest);
        names
    }

    /// Tokens behind the last full page.
    pub fn tail(&self) -> &[u32] {
        &self.tail
    }
}

/// Feeds token ids in blocks: feeding them one by one costs twice the hashing.
fn update(sha: &mut Sha256, tokens: &[u32]) {
    let mut block = [0; 256];
    for part in tokens.chunks(block.len() / 4) {
        for (bytes, token) in block.chunks_exact_mut(4).zip(part) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        sha.update(&block[..part.len() * 4]);
    }
}

fn namespace_root(parts: &[Option<&str>]) -> [u8; 32] {
    let mut sha = Sha256::new();
    sha.update(NAMESPACE_TAG);
    for part in parts {
        match part {
            None => sha.update([0u8]),
            Some(text) => {
                sha.update([1u8]);
                sha.update((text.len() as u64).to_le_bytes());
                sha.update(text.as_bytes());
            }
        }
    }
    sha.finalize().into()
}

/// Names of all full pages of `tokens`, without namespace.
pub fn chain(tokens: &[u32], page_tokens: u32) -> Vec<PageHash> {
    ChainHasher::new(page_tokens, &[]).push(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    // Computed with Python's hashlib, not with this code:
    //   h0 = sha256(struct.pack('<64I', *range(64))); h1 = sha256(h0 + struct.pack('<64I', *range(64, 128)))
    const H0: &str = "fea7b32778ecbdd7adee1941e98c89cf96bbc762f5f1beb0be24e36a456fbbc5";
    const H1: &str = "1617a7384eff5e9135098c24794739af884859cdb17c1a61a834e8d6ac997351";
    //   root = sha256(b"sglang-cache-namespace-v1" + b"\x01" + struct.pack('<Q', 8) + b"tenant-a" + b"\x00"); h0 as above behind root
    const NS0: &str = "08f2c8c63d884a20323b7f079ec6f97aef924e1c0e37176226bdbb386bfae587";

    #[test]
    fn names_match_vectors_computed_elsewhere() {
        let tokens: Vec<u32> = (0..130).collect();
        let names = chain(&tokens, 64);
        assert_eq!(names.iter().map(ToString::to_string).collect::<Vec<_>>(), [H0, H1]);
        let in_tenant = ChainHasher::new(64, &[Some("tenant-a"), None]).push(&tokens);
        assert_eq!(in_tenant[0].to_string(), NS0);
    }

    proptest! {
        #[test]
        fn pushing_in_pieces_or_resuming_gives_the_same_names(
            tokens in prop::collection::vec(any::<u32>(), 0..200), cut in 0usize..200, page in 1u32..9,
        ) {
            let cut = cut.min(tokens.len());
            let whole = chain(&tokens, page);
            let mut hasher = ChainHasher::new(page, &[]);
            let mut pieces = hasher.push(&tokens[..cut]);
            pieces.extend(hasher.push(&tokens[cut..]));
            prop_assert_eq!(&pieces, &whole);
            let full = cut / page as usize;
            if full > 0 {
                let rest = ChainHasher::resume(page, whole[full - 1]).push(&tokens[full * page as usize..]);
                prop_assert_eq!(&rest[..], &whole[full..]);
            }
        }
    }
}
