//! A random Llama of two layers, as the bytes of a GGUF file.

use super::super::Model;
use std::sync::{Arc, OnceLock};

/// Tokens per page of the tests.
pub(super) const PAGE: u32 = 8;
pub(super) const VOCABULARY: u32 = 70;
pub(super) const CONTEXT: u32 = 300;
pub(super) const STOP: u32 = 69;
const WIDTH: u64 = 64;
const FEED: u64 = 96;
/// Four query heads of 16, two key-value heads.
const KEYS: u64 = 32;

/// What is written into a file.
pub(super) enum Data {
    F32(Vec<f32>),
    Q4_1(Vec<u8>),
    Q8_0(Vec<u8>),
}

pub(super) struct File {
    pub(super) values: Vec<(String, Vec<u8>)>,
    pub(super) tensors: Vec<(String, Vec<u64>, Data)>,
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5
    }
}

fn text(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

pub(super) fn whole(n: u32) -> Vec<u8> {
    [4_u32.to_le_bytes(), n.to_le_bytes()].concat()
}

pub(super) fn real(x: f32) -> Vec<u8> {
    [6_u32.to_le_bytes(), x.to_le_bytes()].concat()
}

pub(super) fn word(s: &str) -> Vec<u8> {
    let mut out = 8_u32.to_le_bytes().to_vec();
    text(&mut out, s);
    out
}

impl File {
    /// The model of the tests.
    pub(super) fn llama() -> Self {
        let value = |key: &str, bytes| (key.to_owned(), bytes);
        let values = vec![
            value("general.architecture", word("llama")),
            value("llama.embedding_length", whole(WIDTH as u32)),
            value("llama.attention.head_count", whole(4)),
            value("llama.attention.head_count_kv", whole(2)),
            value("llama.feed_forward_length", whole(FEED as u32)),
            value("llama.block_count", whole(2)),
            value("llama.context_length", whole(CONTEXT)),
            value("llama.attention.layer_norm_rms_epsilon", real(1e-5)),
            value("tokenizer.ggml.eos_token_id", whole(STOP)),
        ];
        let mut random = Random(88_172_645_463_325_252);
        let mut tensors = vec![
            (
                "token_embd.weight".to_owned(),
                vec![WIDTH, VOCABULARY.into()],
                random.q8(WIDTH * u64::from(VOCABULARY)),
            ),
            ("output_norm.weight".to_owned(), vec![WIDTH], ones()),
        ];
        for layer in 0..2 {
            let mut add = |name: &str, shape: Vec<u64>, data| {
                tensors.push((format!("blk.{layer}.{name}.weight"), shape, data));
            };
            add("attn_norm", vec![WIDTH], ones());
            add("ffn_norm", vec![WIDTH], ones());
            add("attn_q", vec![WIDTH, WIDTH], random.q4(WIDTH * WIDTH));
            add("attn_k", vec![WIDTH, KEYS], random.q4(WIDTH * KEYS));
            add("attn_v", vec![WIDTH, KEYS], random.f32(WIDTH * KEYS));
            add("attn_output", vec![WIDTH, WIDTH], random.q8(WIDTH * WIDTH));
            add("ffn_gate", vec![WIDTH, FEED], random.q4(WIDTH * FEED));
            add("ffn_up", vec![WIDTH, FEED], random.q8(WIDTH * FEED));
            add("ffn_down", vec![FEED, WIDTH], random.q4(WIDTH * FEED));
        }
        Self { values, tensors }
    }

    pub(super) fn set(&mut self, key: &str, bytes: Vec<u8>) {
        self.values.retain(|(k, _)| k != key);
        self.values.push((key.to_owned(), bytes));
    }

    /// The file.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.values.len() as u64).to_le_bytes());
        for (key, value) in &self.values {
            text(&mut out, key);
            out.extend(value);
        }
        let mut data = Vec::new();
        for (name, shape, numbers) in &self.tensors {
            text(&mut out, name);
            out.extend((shape.len() as u32).to_le_bytes());
            out.extend(shape.iter().flat_map(|n| n.to_le_bytes()));
            let (kind, bytes) = match numbers {
                Data::F32(f) => (0_u32, f.iter().flat_map(|x| x.to_le_bytes()).collect()),
                Data::Q4_1(b) => (3, b.clone()),
                Data::Q8_0(b) => (8, b.clone()),
            };
            out.extend(kind.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend(bytes);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(data);
        out
    }
}

fn ones() -> Data {
    Data::F32(vec![1.0; WIDTH as usize])
}

impl Random {
    fn f32(&mut self, numbers: u64) -> Data {
        Data::F32((0..numbers).map(|_| self.number() * 0.5).collect())
    }

    fn half(&mut self, least: f32) -> [u8; 2] {
        half::f16::from_f32(least * (1.0 + self.number().abs())).to_le_bytes()
    }

    fn q4(&mut self, numbers: u64) -> Data {
        let mut out = Vec::new();
        for _ in 0..numbers / 32 {
            out.extend(self.half(0.03));
            out.extend(self.half(-0.28));
            out.extend((0..16).map(|_| self.next() as u8));
        }
        Data::Q4_1(out)
    }

    fn q8(&mut self, numbers: u64) -> Data {
        let mut out = Vec::new();
        for _ in 0..numbers / 32 {
            out.extend(self.half(0.003));
            out.extend((0..32).map(|_| self.next() as u8));
        }
        Data::Q8_0(out)
    }
}

/// The model of the tests, one for all of them.
pub(super) fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let make = || Arc::new(Model::read(&File::llama().bytes()).unwrap());
    MODEL.get_or_init(make).clone()
}
