//! Headers that are small, damaged or hostile.

use proptest::prelude::*;

use super::super::*;
use super::{decode, spoken};

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn texts(out: &mut Vec<u8>, key: &str, all: &[String]) {
    text(out, key);
    out.extend([9u32.to_le_bytes(), 8u32.to_le_bytes()].concat());
    out.extend((all.len() as u64).to_le_bytes());
    for entry in all {
        text(out, entry);
    }
}

/// A file with a vocabulary of `a` to `z` and two merges.
fn small(pre: &str) -> Vec<u8> {
    let mut tokens: Vec<String> = ('a'..='z').map(String::from).collect();
    tokens.extend(["ab", "abc", "<|end|>"].map(String::from));
    let mut out = [
        b"GGUF".as_slice(),
        &3u32.to_le_bytes(),
        &0u64.to_le_bytes(),
        &7u64.to_le_bytes(),
    ]
    .concat();
    for (key, value) in [
        (MODEL, "gpt2"),
        (PRE, pre),
        (TEMPLATE, "{{ messages[0].content }}<|end|>{{ eos_token }}"),
    ] {
        text(&mut out, key);
        out.extend(8u32.to_le_bytes());
        text(&mut out, value);
    }
    texts(&mut out, TOKENS, &tokens);
    texts(&mut out, MERGES, &["a b".to_owned(), "ab c".to_owned()]);
    text(&mut out, TYPES);
    out.extend([9u32.to_le_bytes(), 5u32.to_le_bytes()].concat());
    out.extend((tokens.len() as u64).to_le_bytes());
    (0..tokens.len()).for_each(|i| out.extend(if i == 28 { 3i32 } else { 1 }.to_le_bytes()));
    number(&mut out, EOS, 28);
    out
}

fn number(out: &mut Vec<u8>, key: &str, value: u32) {
    text(out, key);
    out.extend([4u32.to_le_bytes(), value.to_le_bytes()].concat());
}

/// The same with more keys.
fn with_more(pre: &str, more: impl Fn(&mut Vec<u8>), keys: u64) -> Vec<u8> {
    let mut file = small(pre);
    file[16..24].copy_from_slice(&(7 + keys).to_le_bytes());
    more(&mut file);
    file
}

/// The token of beginnings goes before a text where the file says so, or where such models expect it.
#[test]
fn a_text_begins_as_the_model_expects() {
    let truth = |out: &mut Vec<u8>, truth: u8| {
        number(out, BOS, 3);
        text(out, ADD_BOS);
        out.extend([&7u32.to_le_bytes()[..], &[truth]].concat());
    };
    for (file, want) in [
        (small("llama-bpe"), vec![26]),
        (with_more("llama-bpe", |out| number(out, BOS, 3), 1), vec![3, 26]),
        (with_more("llama-bpe", |out| truth(out, 0), 2), vec![26]),
        (with_more("smollm", |out| number(out, BOS, 3), 1), vec![26]),
        (with_more("smollm", |out| truth(out, 1), 2), vec![3, 26]),
    ] {
        assert_eq!(GgufTokenizer::read(file.as_slice()).unwrap().encode("ab"), want);
    }
}

/// Arrays that nobody asks for cost no memory, and none costs a stack.
#[test]
fn other_arrays_are_read_over() {
    let floats = |out: &mut Vec<u8>| {
        text(out, "tokenizer.ggml.scores");
        out.extend([9u32.to_le_bytes(), 6u32.to_le_bytes()].concat());
        out.extend(2u64.to_le_bytes());
        out.extend([0; 8]);
    };
    assert!(GgufTokenizer::read(with_more("smollm", floats, 1).as_slice()).is_ok());
    let nested = |out: &mut Vec<u8>| {
        text(out, "x");
        out.extend(9u32.to_le_bytes());
        for _ in 0..1_000_000 {
            out.extend(9u32.to_le_bytes());
            out.extend(1u64.to_le_bytes());
        }
    };
    let error = GgufTokenizer::read(with_more("smollm", nested, 1).as_slice())
        .err()
        .unwrap();
    assert!(error.to_string().contains("kind 9"), "{error}");
}

/// Uses everything of it; there is nothing to say but that it does not panic.
fn exercise(t: &GgufTokenizer) {
    let _ = t.chat(&[spoken("user", "abc <|end|> ab"), spoken("assistant", "é")]);
    let _ = decode(t, &(0..40).chain([u32::MAX]).collect::<Vec<_>>());
    assert!(t.encode("abcab 12 é").iter().all(|id| *id < t.vocab()));
    assert!(t.end_ids().iter().all(|id| *id < t.vocab()));
}

#[test]
fn a_small_vocabulary_works() {
    for pre in pre::SUPPORTED.split(", ") {
        let t = GgufTokenizer::read(small(pre).as_slice()).unwrap();
        assert_eq!(t.encode("abcab"), [27, 26]);
        assert_eq!(t.chat(&[spoken("user", "ab<|end|>")]).unwrap(), [26, 4, 13, 3, 28, 28]);
        exercise(&t);
    }
}

#[test]
fn what_is_not_supported_is_named() {
    let say = |file: &[u8]| GgufTokenizer::read(file).err().unwrap().to_string();
    let default = say(&small("default"));
    assert!(
        default.contains("\"default\"") && default.contains("smollm"),
        "{default}"
    );
    let small = small("smollm");
    let with = |from: &[u8], to: &[u8]| {
        let at = small.windows(from.len()).position(|w| w == from).unwrap();
        [&small[..at], to, &small[at + from.len()..]].concat()
    };
    assert!(say(&with(b"gpt2", b"bert")).contains("bert"));
    assert!(say(&with(b"\x04\0\0\0\0\0\0\0gpt2", b"\x05\0\0\0\0\0\0\0llama")).contains("\"llama\""));
    assert!(say(&with(b"ab c", b"ab d")).contains("ab d"));
    assert!(say(&with(b"{{ mess", b"{% mess")).contains("template"));
    assert!(say(&with(&28u32.to_le_bytes(), &99u32.to_le_bytes())).contains("99"));
    assert!(say(&with(b"GGUF\x03", b"GGUF\x01")).contains("version 1"));
    assert!(say(b"PK\x03\x04").contains("no GGUF"));
    assert!(matches!(
        GgufTokenizer::open(Path::new("/nowhere")),
        Err(GgufError::Open { .. })
    ));
}

/// The length that a general reader would try to allocate.
#[test]
fn large_lengths_are_refused() {
    for (at, what) in [(16, "keys"), (24, "bytes of a text")] {
        let mut file = small("smollm");
        file[at..at + 8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
        let error = GgufTokenizer::read(file.as_slice()).err().unwrap().to_string();
        assert!(error.contains(what), "{error}");
    }
}

proptest! {
    #[test]
    fn truncated_headers_are_errors(part in 0.0f64..1.0) {
        let file = small("smollm");
        let cut = (file.len() as f64 * part) as usize;
        prop_assert!(GgufTokenizer::read(&file[..cut]).is_err());
    }

    #[test]
    fn mutated_headers_do_no_harm(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut file = small("llama-bpe");
        for (index, byte) in changes {
            *index.get_mut(&mut file) = byte;
        }
        if let Ok(t) = GgufTokenizer::read(file.as_slice()) {
            exercise(&t);
        }
    }
}
