//! The tokenizer of a real model, from the metadata of its GGUF file: byte-level byte pairs and a chat template.

mod chat;
mod decoder;
mod header;
mod pre;
mod template;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenizers::models::bpe::BPE;

use super::{ChatError, Decoder, Spoken, Tokenizer};
use chat::{Guards, Segment, Specials};
use decoder::{TextDecoder, Words};
use header::Header;
pub use header::HeaderError;
use pre::Cut;
use template::Template;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
/// The end of a turn, in models that tell it from the end of a text.
const EOT: &str = "tokenizer.ggml.eot_token_id";
/// Whether a text begins with the token of beginnings.
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
/// Names of tokens that end a turn, for files that do not say which one does.
const TURN_ENDS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"];
const TEMPLATE: &str = "tokenizer.chat_template";
/// Longest name of a token, in bytes.
const TOKEN_BYTES_MAX: usize = 1 << 10;

/// Why a file gives no tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file cannot be opened.
    #[error("cannot open {}: {error}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// Its metadata cannot be read, or lack something.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A vocabulary of another make.
    #[error("tokenizer.ggml.model is {0:?}, only \"gpt2\" (byte-level byte pairs) is supported: use such a model")]
    Model(String),
    /// A way to cut texts that is not known.
    #[error("tokenizer.ggml.pre is {0:?}, supported are: {supported}", supported = pre::SUPPORTED)]
    Pre(String),
    /// A vocabulary that contradicts itself.
    #[error("the vocabulary is damaged: {0}")]
    Vocabulary(String),
    /// The chat template does not compile.
    #[error("the chat template is damaged: {0}")]
    Template(String),
}

/// A model's vocabulary and chat template.
///
/// Control tokens (types *control* and *user-defined* of the file) are matched in the template's own text and nowhere else:
/// neither in a message nor in the text of a completion. A byte for which the vocabulary has no token is left out, as
/// Hugging Face's tokenizers do.
pub struct GgufTokenizer {
    pairs: tokenizers::Tokenizer,
    words: Arc<Words>,
    specials: Specials,
    template: Option<Template>,
    /// Goes before a text that is to be completed.
    bos: Option<u32>,
    ends: Vec<u32>,
    name: Option<String>,
    context: Option<u32>,
}

impl GgufTokenizer {
    /// Reads the beginning of a GGUF file; the tensors behind are not looked at.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or has a tokenizer that is not supported.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let file = File::open(path).map_err(|error| GgufError::Open {
            path: path.to_owned(),
            error,
        })?;
        Self::read(BufReader::new(file))
    }

    /// The same, from any source.
    ///
    /// # Errors
    /// As [`GgufTokenizer::open`].
    pub fn read(file: impl Read) -> Result<Self, GgufError> {
        let mut header = Header::read(file, &[TOKENS, TYPES, MERGES])?;
        let model = header.text(MODEL)?.unwrap_or_default();
        if model != "gpt2" {
            return Err(GgufError::Model(model.to_owned()));
        }
        let pre = header.text(PRE)?.unwrap_or("default");
        let cut = Cut::named(pre).ok_or_else(|| GgufError::Pre(pre.to_owned()))?;
        let tokens = header.take_texts(TOKENS)?;
        let types = header.take_numbers(TYPES)?;
        let merges = header.take_texts(MERGES)?;
        let words = Words::new(&tokens, types.as_deref()).map_err(GgufError::Vocabulary)?;
        let specials = words.specials(&tokens);
        let (bos, eos) = (known(&header, BOS, &tokens)?, known(&header, EOS, &tokens)?);
        let ends = ends([eos, known(&header, EOT, &tokens)?], &specials);
        let add_bos = header.truth(ADD_BOS)?.unwrap_or(cut.bos);
        let name_of = |id: Option<u32>| id.and_then(|id| tokens.get(id as usize)).map_or("", String::as_str);
        let template = header
            .text(TEMPLATE)?
            .map(|source| Template::new(source, name_of(bos), name_of(eos)));
        Ok(Self {
            pairs: pairs(&tokens, &words, merges, cut)?,
            words: Arc::new(words),
            specials: Specials::new(&specials).map_err(GgufError::Vocabulary)?,
            template: template
                .transpose()
                .map_err(|error| GgufError::Template(error.to_string()))?,
            bos: bos.filter(|_| add_bos),
            ends,
            name: header.text("general.name")?.map(str::to_owned),
            context: context(&header)?,
        })
    }

    /// The model's own name, which may be any text.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Tokens that prompt and answer may have together, if the file says it.
    pub fn context_tokens(&self) -> Option<u32> {
        self.context
    }

    /// The ids with which the model ends its answer.
    pub fn end_ids(&self) -> &[u32] {
        &self.ends
    }

    fn plain(&self, text: &str) -> Vec<u32> {
        match self.pairs.encode_fast(text, false) {
            Ok(encoding) => encoding.get_ids().to_vec(),
            // Byte pairs without dropout and byte-level cutting have no way to fail; silence would be worse than a log.
            Err(error) => {
                tracing::error!(%error, "a text could not be encoded");
                Vec::new()
            }
        }
    }
}

impl Tokenizer for GgufTokenizer {
    fn vocab(&self) -> u32 {
        self.words.len()
    }

    fn token_bytes_max(&self) -> usize {
        self.words.longest()
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        let mut ids: Vec<u32> = self.bos.into_iter().collect();
        ids.extend(self.plain(text));
        ids
    }

    fn chat(&self, messages: &[Spoken]) -> Result<Vec<u32>, ChatError> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate)?;
        let guards = Guards::of(messages)?;
        let rendered = template.render(&guards.lines(messages, &self.specials)?)?;
        let mut ids = Vec::new();
        for segment in guards.segments(&rendered, &self.specials) {
            match segment {
                Segment::Control(id) => ids.push(id),
                Segment::Text(text) => ids.extend(self.plain(&text)),
            }
        }
        Ok(ids)
    }

    fn ends(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    fn decoder(&self) -> Box<dyn Decoder> {
        Box::new(TextDecoder::new(Arc::clone(&self.words)))
    }
}

/// The id at a key, if it is there; it must be in the vocabulary.
fn known(header: &Header, key: &str, tokens: &[String]) -> Result<Option<u32>, GgufError> {
    let id = header.number(key)?;
    match id.filter(|id| *id as usize >= tokens.len()) {
        None => Ok(id),
        Some(id) => Err(GgufError::Vocabulary(format!("{key} is {id}, beyond the vocabulary"))),
    }
}

/// The ids that end an answer: those that the file names, and control tokens of known names.
fn ends(said: [Option<u32>; 2], specials: &[(String, u32)]) -> Vec<u32> {
    let named = specials.iter().filter(|(text, _)| TURN_ENDS.contains(&text.as_str()));
    let mut ends: Vec<u32> = said.into_iter().flatten().chain(named.map(|(_, id)| *id)).collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

fn context(header: &Header) -> Result<Option<u32>, GgufError> {
    let Some(architecture) = header.text("general.architecture")? else {
        return Ok(None);
    };
    Ok(header.number(&format!("{architecture}.context_length"))?)
}

/// The encoder of plain text: of the vocabulary's normal tokens only, so that nothing in a text is a control token.
fn pairs(tokens: &[String], words: &Words, merges: Vec<String>, cut: Cut) -> Result<tokenizers::Tokenizer, GgufError> {
    let normal = tokens.iter().zip(0u32..).filter(|(_, id)| words.is_normal(*id));
    let vocab: tokenizers::models::bpe::Vocab = normal.map(|(token, id)| (token.clone(), id)).collect();
    let merges = merges
        .into_iter()
        .map(|merge| {
            let (a, b) = merge.split_once(' ').unwrap_or((&merge, ""));
            // The builder of byte pairs trusts that all three are there.
            let there = vocab.contains_key(a) && vocab.contains_key(b) && vocab.contains_key(&format!("{a}{b}"));
            let pair = there.then(|| (a.to_owned(), b.to_owned()));
            pair.ok_or_else(|| GgufError::Vocabulary(format!("the merge {merge:?} is not of its tokens")))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let model = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(cut.whole_pieces)
        .build();
    let damaged = |error: tokenizers::Error| GgufError::Vocabulary(error.to_string());
    let mut pairs = tokenizers::Tokenizer::new(model.map_err(damaged)?);
    pairs.with_normalizer(cut.normalizer).map_err(damaged)?;
    pairs.with_pre_tokenizer(Some(cut.pre_tokenizer));
    Ok(pairs)
}
