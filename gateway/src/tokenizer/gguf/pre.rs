//! How a text is cut before byte pairs are merged: `tokenizer.ggml.pre` names one of a few known ways.

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, SplitDelimiterBehavior};

/// The names that [`Cut::named`] knows.
pub(super) const SUPPORTED: &str = "smollm, gpt-2, llama-bpe, llama3, llama-v3, qwen2";

const LLAMA_BPE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// One way to cut.
pub(super) struct Cut {
    pub(super) pre_tokenizer: PreTokenizerWrapper,
    pub(super) normalizer: Option<NormalizerWrapper>,
    /// Whether a piece that is a token as a whole is taken as that, whatever the merges say.
    pub(super) whole_pieces: bool,
    /// Whether a text that is to be completed begins with the token of beginnings, if the file does not say.
    pub(super) bos: bool,
}

impl Cut {
    /// The way that the file names; none if it is not known.
    pub(super) fn named(name: &str) -> Option<Self> {
        // Spaces are never put in front, and offsets are not asked for. GPT-2's pattern is built in.
        let gpt2 = ByteLevel::new(false, false, true);
        let pre_tokenizer = match name {
            "gpt-2" => gpt2.into(),
            "smollm" => in_order(vec![Digits::new(true).into(), gpt2.into()]),
            "llama-bpe" | "llama3" | "llama-v3" => by_pattern(LLAMA_BPE)?,
            "qwen2" => by_pattern(QWEN2)?,
            _ => return None,
        };
        let llama = name.starts_with("llama");
        Some(Self {
            pre_tokenizer,
            normalizer: (name == "qwen2").then(|| NFC.into()),
            whole_pieces: llama,
            bos: llama,
        })
    }
}

fn in_order(steps: Vec<PreTokenizerWrapper>) -> PreTokenizerWrapper {
    Sequence::new(steps).into()
}

/// None only if the pattern is wrong, which a test would show.
fn by_pattern(pattern: &str) -> Option<PreTokenizerWrapper> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).ok()?;
    let bytes = ByteLevel::new(false, false, false);
    Some(in_order(vec![split.into(), bytes.into()]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_supported_name_is_known() {
        for name in SUPPORTED.split(", ") {
            assert!(Cut::named(name).is_some(), "{name}");
        }
        assert!(Cut::named("default").is_none());
    }
}
