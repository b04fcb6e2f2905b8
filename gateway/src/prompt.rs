//! From a body to the prompt's tokens, within vocabulary and length.

use std::sync::Arc;

use axum::body::Bytes;
use axum::http::StatusCode;

use crate::Gateway;
use crate::error::ApiError;
use crate::openai::{ChatBody, CompletionBody, TextOr, read};
use crate::reply::Shape;

/// Bodies up to this are tokenised where they arrive: a millisecond or so.
const INLINE_BODY_BYTES: usize = 4 << 10;

/// The prompt's tokens; a long body is read beside the async workers, which have other turns to serve.
pub(crate) async fn tokens(gateway: &Arc<Gateway>, shape: Shape, body: Bytes) -> Result<Vec<u32>, ApiError> {
    if body.len() <= INLINE_BODY_BYTES {
        return prompt(gateway, shape, &body);
    }
    let gateway = Arc::clone(gateway);
    tokio::task::spawn_blocking(move || prompt(&gateway, shape, &body))
        .await
        .unwrap_or_else(|error| {
            tracing::error!(%error, "a prompt could not be tokenised");
            let message = "the prompt could not be tokenised: see the gateway's log";
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "tokenizer", message))
        })
}

/// The prompt's tokens, within vocabulary and length.
fn prompt(gateway: &Gateway, shape: Shape, body: &[u8]) -> Result<Vec<u32>, ApiError> {
    let most = gateway.prompt_tokens_max();
    let (field, tokens) = match shape {
        Shape::Chat => ("messages", conversation(gateway, read(body)?)?),
        Shape::Completion => match read::<CompletionBody>(body)?.prompt {
            None => ("prompt", Vec::new()),
            Some(TextOr::Text(text)) => {
                check_bytes(gateway, "prompt", text.len())?;
                ("prompt", gateway.tokenizer.encode(&text))
            }
            Some(TextOr::List(tokens)) => ("prompt", in_vocabulary(gateway, tokens)?),
        },
    };
    if tokens.is_empty() {
        return Err(ApiError::field(field, "empty", "give at least one token"));
    }
    if tokens.len() > most {
        let message = format!("{} tokens, at most {most} are served: shorten it", tokens.len());
        return Err(ApiError::field(field, "context_length_exceeded", message));
    }
    Ok(tokens)
}

fn conversation(gateway: &Gateway, body: ChatBody) -> Result<Vec<u32>, ApiError> {
    let spoken = body.spoken()?;
    let bytes = spoken.iter().map(|message| message.content.len()).sum();
    check_bytes(gateway, "messages", bytes)?;
    gateway
        .tokenizer
        .chat(&spoken)
        .map_err(|error| ApiError::field("messages", "template_refused", error))
}

/// Refuses what is too long whatever its tokens are, before work and memory go into them.
fn check_bytes(gateway: &Gateway, field: &str, bytes: usize) -> Result<(), ApiError> {
    let (most, longest) = (gateway.prompt_tokens_max(), gateway.tokenizer.token_bytes_max().max(1));
    if bytes / longest > most {
        let message = format!(
            "{bytes} bytes are more than {} tokens, at most {most} are served: shorten it",
            bytes / longest
        );
        return Err(ApiError::field(field, "context_length_exceeded", message));
    }
    Ok(())
}

fn in_vocabulary(gateway: &Gateway, tokens: Vec<u32>) -> Result<Vec<u32>, ApiError> {
    let vocab = gateway.tokenizer.vocab();
    match tokens.iter().enumerate().find(|(_, id)| **id >= vocab) {
        None => Ok(tokens),
        Some((index, id)) => {
            let message = format!("{id} is no token id: this model's are 0 to {}", vocab - 1);
            let field = format!("prompt[{index}]");
            Err(ApiError::field(&field, "token_out_of_range", message))
        }
    }
}
