//! Bytes as tokens, for the engine `sim`.

use super::{ChatError, Decoder, Spoken, Tokenizer};

/// Byte `b` of a text is id `b`; an id that is no byte of valid UTF-8 is written `<|hex|>` and read back as one id.
///
/// A text that happens to contain `<|hex|>` names that id, too. When an answer spells such a mark byte by byte, its `|`
/// behind a `<` is written as a mark itself, so that reading gives the same bytes and not the id they spell.
#[derive(Clone, Copy, Debug)]
pub struct ByteTokenizer {
    vocab: u32,
}

/// Ids below this are bytes.
const BYTES: u32 = 256;
/// The longest mark: eight hex digits and what is around them.
const MARK_BYTES: usize = 12;

impl ByteTokenizer {
    /// With ids below `vocab`; fewer than 256 are taken as 256, because texts are bytes.
    pub const fn new(vocab: u32) -> Self {
        Self {
            vocab: if vocab < BYTES { BYTES } else { vocab },
        }
    }

    /// The id of the mark at the start of `text`, and its length.
    fn mark(self, text: &str) -> Option<(u32, usize)> {
        let inner = text.strip_prefix("<|")?;
        // Eight hex digits are a u32; anything longer is no mark.
        let end = inner.bytes().take(9).position(|b| b == b'|')?;
        let hex = inner.get(..end)?;
        inner.get(end..)?.strip_prefix("|>")?;
        let canonical = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if hex.is_empty() || !hex.bytes().all(canonical) || (hex.len() > 1 && hex.starts_with('0')) {
            return None;
        }
        let id = u32::from_str_radix(hex, 16).ok().filter(|id| *id < self.vocab)?;
        Some((id, end + 4))
    }
}

impl Tokenizer for ByteTokenizer {
    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn token_bytes_max(&self) -> usize {
        MARK_BYTES
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len());
        let mut at = 0;
        while let Some(byte) = text.as_bytes().get(at) {
            let mark = if *byte == b'<' {
                text.get(at..).and_then(|rest| self.mark(rest))
            } else {
                None
            };
            let (id, length) = mark.unwrap_or((u32::from(*byte), 1));
            ids.push(id);
            at += length;
        }
        ids
    }

    fn chat(&self, messages: &[Spoken]) -> Result<Vec<u32>, ChatError> {
        let mut ids = Vec::new();
        let mut line = |text: &str| {
            ids.extend(self.encode(text));
            ids.push(u32::from(b'\n'));
        };
        for message in messages {
            line(&format!("<{}>", message.role));
            line(&message.content);
        }
        line("<assistant>");
        Ok(ids)
    }

    fn decoder(&self) -> Box<dyn Decoder> {
        Box::new(ByteDecoder::default())
    }
}

#[derive(Default)]
struct ByteDecoder {
    /// Bytes of a character that is not complete: at most three.
    waiting: Vec<u8>,
    /// Whether the last thing written was the byte `<`.
    after_less: bool,
}

impl ByteDecoder {
    fn mark(&mut self, id: u32, out: &mut String) {
        use std::fmt::Write;
        // Writing to a String cannot fail.
        let _ = write!(out, "<|{id:x}|>");
        self.after_less = false;
    }

    fn text(&mut self, text: &str, out: &mut String) {
        for c in text.chars() {
            if c == '|' && self.after_less {
                self.mark(u32::from(b'|'), out);
            } else {
                out.push(c);
                self.after_less = c == '<';
            }
        }
    }

    /// Writes what of `waiting` is certain: whole characters as text, bytes that cannot be in one as marks.
    fn settle(&mut self, at_end: bool, out: &mut String) {
        let bytes = std::mem::take(&mut self.waiting);
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let (valid, bad) = match std::str::from_utf8(rest) {
                Ok(all) => (all, 0),
                Err(error) => {
                    let (valid, tail) = rest.split_at(error.valid_up_to());
                    let bad = error.error_len().unwrap_or(if at_end { tail.len() } else { 0 });
                    (std::str::from_utf8(valid).unwrap_or_default(), bad)
                }
            };
            self.text(valid, out);
            rest = rest.get(valid.len()..).unwrap_or_default();
            for byte in rest.iter().take(bad) {
                self.mark(u32::from(*byte), out);
            }
            rest = rest.get(bad..).unwrap_or_default();
            if bad == 0 {
                self.waiting = rest.to_vec();
                return;
            }
        }
    }
}

impl Decoder for ByteDecoder {
    fn push(&mut self, tokens: &[u32], out: &mut String) {
        for token in tokens {
            if let Ok(byte) = u8::try_from(*token) {
                self.waiting.push(byte);
                self.settle(false, out);
            } else {
                self.settle(true, out);
                self.mark(*token, out);
            }
        }
    }

    fn finish(&mut self, out: &mut String) {
        self.settle(true, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VOCAB: u32 = 151_936;

    fn decode(ids: &[u32]) -> String {
        let (mut decoder, mut out) = (ByteTokenizer::new(VOCAB).decoder(), String::new());
        decoder.push(ids, &mut out);
        decoder.finish(&mut out);
        out
    }

    /// Ids as engines give them, thick with what could be misread.
    fn ids() -> impl Strategy<Value = Vec<u32>> {
        let id = prop_oneof![
            Just(u32::from(b'<')),
            Just(u32::from(b'|')),
            Just(u32::from(b'>')),
            Just(u32::from(b'a')),
            Just(u32::from(b'0')),
            0..BYTES,
            128..BYTES,
            0..VOCAB,
        ];
        prop::collection::vec(id, 0..40)
    }

    #[test]
    fn bytes_are_text_and_other_ids_are_marks() {
        let t = ByteTokenizer::new(VOCAB);
        assert_eq!(t.encode("a<|1ff|>ü"), [97, 0x1ff, 0xc3, 0xbc]);
        assert_eq!(decode(&[97, 0x1ff, 0xc3, 0xbc, 0xff]), "a<|1ff|>ü<|ff|>");
        // No marks: not canonical, not in the vocabulary, not closed.
        for text in [
            "<|01|>",
            "<|FF|>",
            "<||>",
            "<|ffffffff|>",
            "<|fffffffff|>",
            "<|ff",
            "<|ff|",
            "<|ü|>",
        ] {
            assert_eq!(t.encode(text).len(), text.len(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn an_answer_sent_back_is_the_same_ids(ids in ids()) {
            prop_assert_eq!(ByteTokenizer::new(VOCAB).encode(&decode(&ids)), ids);
        }

        #[test]
        fn deltas_add_up_to_the_whole_text(ids in ids(), cuts in prop::collection::vec(0usize..40, 0..6)) {
            let mut decoder = ByteTokenizer::new(VOCAB).decoder();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(ids.len())).chain([0, ids.len()]).collect();
            cuts.sort_unstable();
            let mut sum = String::new();
            for pair in cuts.windows(2) {
                let mut delta = String::new();
                decoder.push(&ids[pair[0]..pair[1]], &mut delta);
                sum += &delta;
            }
            decoder.finish(&mut sum);
            prop_assert_eq!(sum, decode(&ids));
        }

        #[test]
        fn a_conversation_extends_its_earlier_turns(
            texts in prop::collection::vec(".{0,12}", 1..6), answers in prop::collection::vec(ids(), 6),
        ) {
            let t = ByteTokenizer::new(VOCAB);
            let mut messages = Vec::new();
            let mut before: Vec<u32> = Vec::new();
            for (text, answer) in texts.iter().zip(&answers) {
                messages.push(Spoken { role: "user".into(), content: text.clone() });
                let prompt = t.chat(&messages).unwrap();
                prop_assert!(prompt.starts_with(&before));
                before = prompt;
                before.extend(answer);
                messages.push(Spoken { role: "assistant".into(), content: decode(answer) });
            }
        }
    }
}
