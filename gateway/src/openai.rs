//! The request and response bodies of `OpenAI`'s API, as far as they mean something here. Fields not listed are ignored;
//! fields that would change the answer and cannot be honoured are refused by name.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::ApiError;
use crate::tokenizer::Spoken;

mod text_or;

pub use text_or::{Listed, TextOr};

/// What both endpoints share; it is read from the same body, beside the rest.
#[derive(Debug, Default, Deserialize)]
pub struct Common {
    /// Model name.
    pub model: Option<String>,
    /// Most tokens to generate.
    pub max_tokens: Option<i64>,
    /// The newer name of `max_tokens`; it wins.
    pub max_completion_tokens: Option<i64>,
    /// Whether to stream.
    pub stream: Option<bool>,
    /// Options of the stream.
    pub stream_options: Option<StreamOptions>,
    /// `OpenAI`'s hint which requests share a prefix.
    pub prompt_cache_key: Option<String>,
    /// Free metadata.
    pub metadata: Option<Metadata>,
    /// Choices wanted; only one is served.
    pub n: Option<i64>,
    /// Texts before which the answer ends: one, or up to four of them.
    pub stop: Option<TextOr<String>>,
    /// 0 to 2. Without it the answer is greedy, as with 0; `OpenAI`'s own default is 1.
    pub temperature: Option<f64>,
    /// 0 to 1: the part of the probability mass that is chosen from. Means nothing to a greedy answer.
    pub top_p: Option<f64>,
    /// Makes draws repeatable. Without it each request draws anew.
    pub seed: Option<i64>,
    /// Whether token ids are wanted beside the text (the name is vLLM's).
    pub return_token_ids: Option<bool>,
}

/// Options of a stream.
#[derive(Debug, Default, Deserialize)]
pub struct StreamOptions {
    /// Whether a last chunk carries the usage.
    pub include_usage: Option<bool>,
}

/// Metadata of a request.
#[derive(Debug, Default, Deserialize)]
pub struct Metadata {
    /// Names the session for clients that put it here.
    pub user_id: Option<String>,
}

/// Body of `/v1/chat/completions`.
#[derive(Debug, Deserialize)]
pub struct ChatBody {
    /// The conversation.
    pub messages: Option<Vec<Message>>,
    /// Tools on offer; the template shows them to the model.
    pub tools: Option<Vec<Value>>,
}

/// One message of a conversation.
#[derive(Debug, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: String,
    /// What is said.
    pub content: Option<Content>,
    /// Calls an assistant made.
    pub tool_calls: Option<Vec<Value>>,
}

/// A text, or its parts.
pub type Content = TextOr<Part>;

/// A part of a message.
#[derive(Debug, Deserialize)]
pub struct Part {
    /// Kind of the part; only `text` is served.
    pub r#type: String,
    /// The text.
    pub text: Option<String>,
}

/// Body of `/v1/completions`.
#[derive(Debug, Deserialize)]
pub struct CompletionBody {
    /// What to continue.
    pub prompt: Option<Prompt>,
}

/// A text or token ids.
pub type Prompt = TextOr<u32>;

/// Reads a body, or says which field is wrong.
///
/// # Errors
/// 400 with the path of the field.
pub fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    if body.trim_ascii_start().first() == Some(&b'[') {
        // serde would take an array for a struct, field by field.
        let message = "the body is an array: send one JSON object";
        return Err(ApiError::new(
            axum::http::StatusCode::BAD_REQUEST,
            "invalid_type",
            message,
        ));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if !inner.is_data() {
            return malformed(&inner);
        }
        if path == "." {
            return ApiError::new(axum::http::StatusCode::BAD_REQUEST, "invalid_type", inner.to_string());
        }
        ApiError::field(&path, "invalid_type", inner)
    })?;
    json.end().map_err(|error| malformed(&error))?;
    Ok(value)
}

fn malformed(error: &serde_json::Error) -> ApiError {
    let message = format!("the body is not valid JSON: {error}");
    ApiError::new(axum::http::StatusCode::BAD_REQUEST, "malformed_json", message)
}

/// Who may speak, as in the API of `OpenAI`.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

impl ChatBody {
    /// The conversation as the template takes it.
    ///
    /// # Errors
    /// 400 for an empty conversation and for parts that are no text.
    pub fn spoken(self) -> Result<Vec<Spoken>, ApiError> {
        let messages = self.messages.unwrap_or_default();
        if messages.is_empty() {
            return Err(ApiError::field("messages", "empty", "give at least one message"));
        }
        let mut spoken = Vec::with_capacity(messages.len() + 1);
        if let Some(tools) = self.tools.filter(|tools| !tools.is_empty()) {
            spoken.push(Spoken {
                role: "tools".to_owned(),
                content: Value::Array(tools).to_string(),
            });
        }
        for (index, message) in messages.into_iter().enumerate() {
            if !ROLES.contains(&message.role.as_str()) {
                let field = format!("messages[{index}].role");
                let text = format!("{:?} is no role: use one of {}", message.role, ROLES.join(", "));
                return Err(ApiError::field(&field, "invalid_value", text));
            }
            let calls = message.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
            if message.content.is_none() && !calls {
                let field = format!("messages[{index}].content");
                return Err(ApiError::field(&field, "missing", "give a text, or its parts"));
            }
            let mut content = match message.content {
                None => String::new(),
                Some(TextOr::Text(text)) => text,
                Some(TextOr::List(parts)) => joined(index, parts)?,
            };
            if let Some(calls) = message.tool_calls.filter(|calls| !calls.is_empty()) {
                content.push_str(&Value::Array(calls).to_string());
            }
            spoken.push(Spoken {
                role: message.role,
                content,
            });
        }
        Ok(spoken)
    }
}

fn joined(index: usize, parts: Vec<Part>) -> Result<String, ApiError> {
    let mut out = String::new();
    for (number, part) in parts.into_iter().enumerate() {
        let Some(text) = part.text.filter(|_| part.r#type == "text") else {
            let field = format!("messages[{index}].content[{number}]");
            let message = format!("type {:?} is not served here: send text parts only", part.r#type);
            return Err(ApiError::field(&field, "unsupported_content", message));
        };
        out.push_str(&text);
    }
    Ok(out)
}

/// Tokens of a turn.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer.
    pub completion_tokens: usize,
    /// Their sum.
    pub total_tokens: usize,
    /// Details of the prompt, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptDetails>,
}

/// Details of the prompt's tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PromptDetails {
    /// How many of them were found in cache.
    pub cached_tokens: u32,
}

/// What Pinion says about a turn, under `pinion` in the body or in the last chunk.
#[derive(Clone, Debug, Serialize)]
pub struct Extension {
    /// The session.
    pub session: String,
    /// The request, 32 hex digits, as in subjects.
    pub request: String,
    /// How it was served. Not known of an answer that a stop text ended: its turn was cancelled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<&'static str>,
    /// Why it was not direct.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<&'static str>,
    /// Prompt tokens found in cache, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u32>,
}
