//! What a reply looks like: objects and chunks in the shape of `OpenAI`'s.

use pinion_schemas::SeedReason;
use pinion_schemas::messages::Completed;
use serde_json::{Value, json};

use super::{Reply, Shape};
use crate::identity;
use crate::openai::{Extension, PromptDetails, Usage};

impl Reply {
    pub(super) fn client_session(&self) -> &str {
        let asked = self.turn.asked();
        identity::for_client(asked.tenant.as_deref(), &asked.session)
    }

    pub(super) fn request(&self) -> String {
        self.turn.asked().request.to_string()
    }

    pub(super) fn frame(&self, chunk: bool, choices: &[Value]) -> Value {
        let (prefix, object) = match (self.wishes.shape, chunk) {
            (Shape::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
            (Shape::Chat, false) => ("chatcmpl", "chat.completion"),
            (Shape::Completion, _) => ("cmpl", "text_completion"),
        };
        json!({
            "id": format!("{prefix}-{}", self.request()), "object": object, "created": self.wishes.created,
            "model": self.gateway.config.model, "choices": choices,
        })
    }

    /// `length` if the model was cut off, `stop` if a stop text ended the answer or the model by itself, on the last token
    /// allowed perhaps.
    fn finish_reason(&self) -> &'static str {
        let answer = self.turn.answer();
        let full = answer.len() >= self.turn.asked().max_new_tokens as usize;
        let ended = answer.last().is_some_and(|last| self.gateway.tokenizer.ends(*last));
        if full && !ended && !self.stopped {
            "length"
        } else {
            "stop"
        }
    }

    pub(super) fn choice(&self, text: &str, tokens: &[u32], at_end: bool) -> Value {
        let reason = if at_end {
            json!(self.finish_reason())
        } else {
            Value::Null
        };
        let mut choice = json!({"index": 0, "finish_reason": reason});
        match (self.wishes.shape, self.wishes.stream) {
            (Shape::Completion, _) => choice["text"] = json!(text),
            (Shape::Chat, true) if text.is_empty() => choice["delta"] = json!({}),
            (Shape::Chat, true) => choice["delta"] = json!({"content": text}),
            (Shape::Chat, false) => choice["message"] = json!({"role": "assistant", "content": text}),
        }
        if self.wishes.token_ids {
            choice["token_ids"] = json!(tokens);
        }
        choice
    }

    /// The answer's tokens that count.
    pub(super) fn answer(&self) -> &[u32] {
        self.turn.answer().get(..self.taken).unwrap_or_default()
    }

    pub(super) fn usage(&self, end: Option<&Completed>) -> Usage {
        let (prompt, answer) = (self.turn.prompt().len(), self.answer().len());
        Usage {
            prompt_tokens: prompt,
            completion_tokens: answer,
            total_tokens: prompt + answer,
            prompt_tokens_details: end.map(|end| PromptDetails {
                cached_tokens: end.cached_tokens,
            }),
        }
    }

    pub(super) fn extension(&self, end: Option<&Completed>) -> Extension {
        Extension {
            session: self.client_session().to_owned(),
            request: self.request(),
            path: end.map(|end| end.path.label()),
            why: end.and_then(|end| end.why).map(SeedReason::label),
            cached_tokens: end.map(|end| end.cached_tokens),
        }
    }
}
