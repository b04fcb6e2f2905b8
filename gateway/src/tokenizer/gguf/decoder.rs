//! What each id is, and how the ids of an answer become text.

use std::collections::HashMap;
use std::sync::Arc;

use super::TOKEN_BYTES_MAX;
use crate::tokenizer::Decoder;

/// Types of tokens in the file.
const NORMAL: i64 = 1;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// What an id is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Spelled in the alphabet of bytes.
    Normal,
    /// Never text.
    Control,
    /// Text as it is, found in templates as a whole.
    UserDefined,
    /// Neither read nor written.
    Unused,
}

/// The vocabulary, from ids to bytes.
pub(super) struct Words {
    kinds: Vec<Kind>,
    /// What each id writes.
    bytes: Vec<Box<[u8]>>,
}

impl Words {
    /// Of the file's tokens and their types; without types all are normal. Says what is wrong.
    pub(super) fn new(tokens: &[String], types: Option<&[i64]>) -> Result<Self, String> {
        if tokens.is_empty() {
            return Err("it has no tokens".to_owned());
        }
        if types.is_some_and(|types| types.len() != tokens.len()) {
            return Err("there are not as many types as tokens".to_owned());
        }
        let byte_of = alphabet();
        let mut words = Self {
            kinds: Vec::with_capacity(tokens.len()),
            bytes: Vec::with_capacity(tokens.len()),
        };
        for (index, token) in tokens.iter().enumerate() {
            if token.len() > TOKEN_BYTES_MAX {
                return Err(format!(
                    "token {index} has {} bytes, at most {TOKEN_BYTES_MAX}",
                    token.len()
                ));
            }
            let kind = match types.and_then(|types| types.get(index)).copied().unwrap_or(NORMAL) {
                NORMAL => Kind::Normal,
                CONTROL => Kind::Control,
                USER_DEFINED => Kind::UserDefined,
                UNUSED => Kind::Unused,
                other => return Err(format!("token {index} has type {other}")),
            };
            words.bytes.push(match kind {
                Kind::Normal => {
                    spelled(token, &byte_of).ok_or_else(|| format!("token {index} does not spell bytes"))?
                }
                Kind::UserDefined => token.as_bytes().into(),
                Kind::Control | Kind::Unused => Box::default(),
            });
            words.kinds.push(kind);
        }
        Ok(words)
    }

    /// How many there are.
    pub(super) fn len(&self) -> u32 {
        self.kinds.len() as u32
    }

    /// Bytes of the longest.
    pub(super) fn longest(&self) -> usize {
        self.bytes.iter().map(|bytes| bytes.len()).max().unwrap_or(0)
    }

    pub(super) fn is_normal(&self, id: u32) -> bool {
        self.kinds.get(id as usize) == Some(&Kind::Normal)
    }

    /// Names and ids of those that are found in templates as a whole.
    pub(super) fn specials(&self, tokens: &[String]) -> Vec<(String, u32)> {
        let special = |kind: &Kind| matches!(kind, Kind::Control | Kind::UserDefined);
        let all = self.kinds.iter().zip(tokens).zip(0u32..);
        all.filter(|((kind, _), _)| special(kind))
            .map(|((_, token), id)| (token.clone(), id))
            .collect()
    }
}

/// The bytes that a normal token spells.
fn spelled(token: &str, byte_of: &HashMap<char, u8>) -> Option<Box<[u8]>> {
    token.chars().map(|c| byte_of.get(&c).copied()).collect()
}

/// The alphabet of byte-level byte pairs: printable bytes are themselves, the others, in order, the characters from U+0100.
fn alphabet() -> HashMap<char, u8> {
    let printable = |b: &u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let own = (0..=255u8).filter(printable).map(|b| (char::from(b), b));
    let moved = ('\u{100}'..).zip((0..=255u8).filter(|b| !printable(b)));
    own.chain(moved).collect()
}

/// Writes an answer. Bytes of a character that is not complete wait; what never becomes a character is U+FFFD.
pub(super) struct TextDecoder {
    words: Arc<Words>,
    /// At most three bytes between two calls.
    waiting: Vec<u8>,
}

impl TextDecoder {
    pub(super) fn new(words: Arc<Words>) -> Self {
        Self {
            words,
            waiting: Vec::new(),
        }
    }

    /// Writes all of `waiting` but the bytes of a last character that may still be completed.
    fn settle(&mut self, at_end: bool, out: &mut String) {
        let open = match self.waiting.utf8_chunks().last() {
            Some(last) if !at_end && unfinished(last.invalid()) => last.invalid().len(),
            _ => 0,
        };
        let rest = self.waiting.split_off(self.waiting.len() - open);
        out.push_str(&String::from_utf8_lossy(&self.waiting));
        self.waiting = rest;
    }
}

/// Whether more bytes could make these a character.
fn unfinished(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

impl Decoder for TextDecoder {
    fn push(&mut self, tokens: &[u32], out: &mut String) {
        for token in tokens {
            match self.words.bytes.get(*token as usize) {
                Some(bytes) if !bytes.is_empty() => self.waiting.extend_from_slice(bytes),
                // A control token: no character goes across it.
                _ => self.settle(true, out),
            }
        }
        self.settle(false, out);
    }

    fn finish(&mut self, out: &mut String) {
        self.settle(true, out);
    }
}
