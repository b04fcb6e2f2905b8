//! A Llama-family model: its numbers and its weights, loaded once per process.

use super::error::LoadError;
use super::gguf::{Gguf, Value};
use super::kernel::LANES;
use super::matrix::Matrix;
use pinion_transfer::layout::{Dtype, Layout, digest};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Largest value believed of the metadata: a million layers, heads or tokens is more than any model has.
const NUMBER_MAX: u64 = 1 << 24;

/// One layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) query: Matrix,
    pub(crate) key: Matrix,
    pub(crate) value: Matrix,
    pub(crate) attention_output: Matrix,
    pub(crate) feed_norm: Vec<f32>,
    pub(crate) gate: Matrix,
    pub(crate) up: Matrix,
    pub(crate) down: Matrix,
}

/// A loaded model.
#[derive(Debug)]
pub struct Model {
    fingerprint: u128,
    pub(crate) width: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) context: usize,
    pub(crate) epsilon: f32,
    /// Of the rotary embedding, radians per token, one for each pair of a head.
    pub(crate) frequencies: Vec<f64>,
    pub(crate) stops: Vec<u32>,
    pub(crate) embedding: Matrix,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Vec<f32>,
    /// None: the embedding serves as output, too.
    pub(crate) output: Option<Matrix>,
}

/// The models of this process by file, while an engine uses them.
static LOADED: Mutex<BTreeMap<PathBuf, Weak<Model>>> = Mutex::new(BTreeMap::new());

impl Model {
    /// Loads a GGUF file, or shares the model that another engine of this process has loaded from it. The file is read whole,
    /// so for a moment it takes twice its room.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load(path: &Path) -> Result<Arc<Self>, LoadError> {
        let file = path.canonicalize().map_err(|error| failed(path, error))?;
        // Held while loading: a second engine waits instead of loading it again.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(model) = loaded.get(&file).and_then(Weak::upgrade) {
            return Ok(model);
        }
        let bytes = std::fs::read(&file).map_err(|error| failed(path, error))?;
        let model = Arc::new(Self::read(&bytes)?);
        loaded.insert(file, Arc::downgrade(&model));
        Ok(model)
    }

    /// A model from the bytes of a GGUF file.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn read(bytes: &[u8]) -> Result<Self, LoadError> {
        let gguf = Gguf::read(bytes)?;
        supported(&gguf)?;
        let width = number(&gguf, "llama.embedding_length")?;
        let heads = number(&gguf, "llama.attention.head_count")?;
        let kv_heads = number_or(&gguf, "llama.attention.head_count_kv", heads)?;
        let head_dim = number_or(&gguf, "llama.attention.key_length", width / heads)?;
        if !heads.is_multiple_of(kv_heads) || !head_dim.is_multiple_of(LANES) || head_dim > 1 << 10 || heads > 1 << 12 {
            return Err(LoadError::Unsupported("heads of an unusual shape"));
        }
        let feed = number(&gguf, "llama.feed_forward_length")?;
        let vocabulary = gguf.tensor("token_embd.weight")?.shape.get(1).copied().unwrap_or(0);
        let vocabulary = possible(vocabulary).ok_or_else(|| LoadError::Metadata("token_embd.weight".into()))?;
        let layers = number(&gguf, "llama.block_count")?;
        let shape = LayerShape {
            width,
            queries: heads * head_dim,
            keys: kv_heads * head_dim,
            feed,
        };
        let has_output = gguf.has("output.weight");
        let output = has_output.then(|| matrix(&gguf, "output.weight", width, vocabulary));
        Ok(Self {
            fingerprint: digest(bytes),
            width,
            heads,
            kv_heads,
            head_dim,
            context: number(&gguf, "llama.context_length")?,
            epsilon: epsilon(&gguf)?,
            frequencies: frequencies(&gguf, head_dim)?,
            stops: stops(&gguf),
            embedding: matrix(&gguf, "token_embd.weight", width, vocabulary)?,
            layers: (0..layers).map(|i| shape.layer(&gguf, i)).collect::<Result<_, _>>()?,
            norm: vector(&gguf, "output_norm.weight", width)?,
            output: output.transpose()?,
        })
    }

    /// What its KV looks like in pages of `page_tokens` tokens.
    pub fn layout(&self, page_tokens: u32) -> Layout {
        Layout {
            model: self.fingerprint,
            layers: self.layers.len() as u32,
            kv_heads: self.kv_heads as u32,
            head_dim: self.head_dim as u32,
            page_tokens,
            dtype: Dtype::F16,
        }
    }

    /// Number of different tokens.
    pub fn vocabulary(&self) -> usize {
        self.embedding.outputs()
    }

    /// Longest context, tokens.
    pub fn context_tokens(&self) -> usize {
        self.context
    }

    /// Tokens that end an answer.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stops
    }
}

fn failed(path: &Path, source: std::io::Error) -> LoadError {
    let path = path.to_owned();
    if source.kind() == std::io::ErrorKind::NotFound {
        LoadError::Missing(path)
    } else {
        LoadError::Read { path, source }
    }
}

/// Refuses what would be computed wrongly.
fn supported(gguf: &Gguf<'_>) -> Result<(), LoadError> {
    match gguf.value("general.architecture") {
        Value::Text("llama") => {}
        Value::Text(other) => return Err(LoadError::Architecture(other.into())),
        _ => return Err(LoadError::Metadata("general.architecture".into())),
    }
    match gguf.value("llama.rope.scaling.type") {
        Value::Text("none") | Value::Other => {}
        _ => return Err(LoadError::Unsupported("a scaled rotary embedding")),
    }
    if gguf.has("blk.0.attn_q.bias") {
        return Err(LoadError::Unsupported("biases"));
    }
    if gguf.has("blk.0.ffn_gate_inp.weight") {
        return Err(LoadError::Unsupported("experts"));
    }
    Ok(())
}

fn possible(number: u64) -> Option<usize> {
    usize::try_from(number)
        .ok()
        .filter(|_| (1..=NUMBER_MAX).contains(&number))
}

fn number(gguf: &Gguf<'_>, key: &str) -> Result<usize, LoadError> {
    match gguf.value(key) {
        Value::Whole(n) => possible(n),
        _ => None,
    }
    .ok_or_else(|| LoadError::Metadata(key.into()))
}

fn number_or(gguf: &Gguf<'_>, key: &str, otherwise: usize) -> Result<usize, LoadError> {
    match gguf.value(key) {
        Value::Other => possible(otherwise as u64).ok_or_else(|| LoadError::Metadata(key.into())),
        _ => number(gguf, key),
    }
}

fn epsilon(gguf: &Gguf<'_>) -> Result<f32, LoadError> {
    match gguf.value("llama.attention.layer_norm_rms_epsilon") {
        Value::Real(x) if x > 0.0 && x < 1.0 => Ok(x),
        _ => Err(LoadError::Metadata("llama.attention.layer_norm_rms_epsilon".into())),
    }
}

/// `base^(-2i / n)` for each pair, divided by the file's own factors, if it has such.
fn frequencies(gguf: &Gguf<'_>, head_dim: usize) -> Result<Vec<f64>, LoadError> {
    let base = match gguf.value("llama.rope.freq_base") {
        Value::Real(x) if x >= 1.0 && x.is_finite() => f64::from(x),
        Value::Other => 10_000.0,
        _ => return Err(LoadError::Metadata("llama.rope.freq_base".into())),
    };
    let dimensions = number_or(gguf, "llama.rope.dimension_count", head_dim)?;
    if dimensions > head_dim || !dimensions.is_multiple_of(2) {
        return Err(LoadError::Metadata("llama.rope.dimension_count".into()));
    }
    let factors = if gguf.has("rope_freqs.weight") {
        vector(gguf, "rope_freqs.weight", dimensions / 2)?
    } else {
        vec![1.0; dimensions / 2]
    };
    let frequency = |(i, factor): (usize, &f32)| base.powf(-2.0 * i as f64 / dimensions as f64) / f64::from(*factor);
    Ok(factors.iter().enumerate().map(frequency).collect())
}

/// End of text, of turn, of message: whatever the file names.
fn stops(gguf: &Gguf<'_>) -> Vec<u32> {
    let id = |name| match gguf.value(&format!("tokenizer.ggml.{name}_token_id")) {
        Value::Whole(id) => u32::try_from(id).ok(),
        _ => None,
    };
    ["eos", "eot", "eom"].into_iter().filter_map(id).collect()
}

fn matrix(gguf: &Gguf<'_>, name: &str, inputs: usize, outputs: usize) -> Result<Matrix, LoadError> {
    Matrix::new(name, &gguf.tensor(name)?, inputs, outputs)
}

fn vector(gguf: &Gguf<'_>, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
    let tensor = gguf.tensor(name)?;
    let numbers = tensor.kind.floats(tensor.bytes);
    if tensor.shape == [len as u64] && numbers.len() == len {
        Ok(numbers)
    } else {
        Err(LoadError::Shape {
            name: name.into(),
            found: tensor.shape,
            wanted: vec![len as u64],
        })
    }
}

struct LayerShape {
    width: usize,
    queries: usize,
    keys: usize,
    feed: usize,
}

impl LayerShape {
    fn layer(&self, gguf: &Gguf<'_>, at: usize) -> Result<Layer, LoadError> {
        let matrix = |name: &str, inputs, outputs| matrix(gguf, &format!("blk.{at}.{name}.weight"), inputs, outputs);
        let norm = |name: &str| vector(gguf, &format!("blk.{at}.{name}.weight"), self.width);
        Ok(Layer {
            attention_norm: norm("attn_norm")?,
            query: matrix("attn_q", self.width, self.queries)?,
            key: matrix("attn_k", self.width, self.keys)?,
            value: matrix("attn_v", self.width, self.keys)?,
            attention_output: matrix("attn_output", self.queries, self.width)?,
            feed_norm: norm("ffn_norm")?,
            gate: matrix("ffn_gate", self.width, self.feed)?,
            up: matrix("ffn_up", self.width, self.feed)?,
            down: matrix("ffn_down", self.feed, self.width)?,
        })
    }
}
