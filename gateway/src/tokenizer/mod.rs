//! Text to token ids and back. [`GgufTokenizer`] reads vocabulary and template of a real model from its file;
//! [`ByteTokenizer`] serves the engine `sim`.

mod byte;
mod gguf;

pub use byte::ByteTokenizer;
pub use gguf::{GgufError, GgufTokenizer, HeaderError};

/// One message of a conversation, as the template sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spoken {
    /// `system`, `user`, `assistant`, `tool` …
    pub role: String,
    /// What was said.
    pub content: String,
}

/// Why a conversation has no prompt. The request is at fault, or the model's template.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The model has no chat template.
    #[error("this model has no chat template: use /v1/completions")]
    NoTemplate,
    /// A role that could be taken for something else in the template.
    #[error("{0:?} is no role: use letters, digits, - and _")]
    Role(String),
    /// The template refused the conversation, or failed.
    #[error("the model's chat template does not take this conversation: {0}")]
    Template(String),
    /// The conversation uses every character that could mark where its messages begin and end.
    #[error("the conversation uses all private characters there are: leave some out")]
    NoGuard,
}

/// A vocabulary and a chat template. Two laws, which make a session's next prompt extend its last one:
/// what [`Decoder`] writes for an answer is encoded to the same ids again, and the template of messages `1..n` with
/// the answer behind it is a prefix of the template of messages `1..n+1`.
///
/// The first law holds as far as the vocabulary allows. A model may spell a word in other tokens than the encoder
/// would, or stop within a character. Such an answer comes back with other ids: the session's next prompt departs from
/// its last one there, pays for what follows, and is right all the same, because the prompt is always made from the text
/// that the client sent.
pub trait Tokenizer: Send + Sync {
    /// Ids are below this.
    fn vocab(&self) -> u32;
    /// No id stands for more bytes of text than this.
    fn token_bytes_max(&self) -> usize;
    /// The ids of a text. Nothing in it is taken for a control token.
    fn encode(&self, text: &str) -> Vec<u32>;
    /// The ids of a conversation, up to where the assistant speaks next.
    ///
    /// # Errors
    /// The template does not take this conversation.
    fn chat(&self, messages: &[Spoken]) -> Result<Vec<u32>, ChatError>;
    /// Whether the model ends its answer with this id.
    fn ends(&self, _id: u32) -> bool {
        false
    }
    /// Begins the text of one answer.
    fn decoder(&self) -> Box<dyn Decoder>;
}

/// Turns the ids of one answer into text as they come.
pub trait Decoder: Send {
    /// Appends to `out` what is certain after `tokens`; characters of several tokens wait until they are complete.
    fn push(&mut self, tokens: &[u32], out: &mut String);
    /// The answer ends: appends what still waits.
    fn finish(&mut self, out: &mut String);
}
