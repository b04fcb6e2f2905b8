//! A running turn on its way to the client, as one body or as a stream of server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::http::HeaderValue;
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream;
use pinion_schemas::SeedReason;
use pinion_schemas::messages::Completed;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use crate::error::ApiError;
use crate::openai::{Common, Extension, PromptDetails, Usage};
use crate::tokenizer::Decoder;
use crate::turn::{Event, Turn};
use crate::{Gateway, identity};

/// Which endpoint is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Chat,
    Completion,
}

/// What the client wants to see.
struct Wishes {
    shape: Shape,
    stream: bool,
    usage: bool,
    token_ids: bool,
    created: u64,
}

/// A turn and how to tell it. Dropping it is the client's going.
pub(crate) struct Reply {
    gateway: Arc<Gateway>,
    wishes: Wishes,
    turn: Turn,
    decoder: Box<dyn Decoder>,
    /// Whether the context is remembered, to find the session by prefix.
    learn: bool,
    said_anything: bool,
    /// Path and outcome for the metrics, once known.
    outcome: (&'static str, &'static str),
    _permit: OwnedSemaphorePermit,
}

impl Drop for Reply {
    fn drop(&mut self) {
        let metrics = &self.gateway.reach.metrics;
        metrics.running.fetch_sub(1, Ordering::Relaxed);
        metrics.request(self.outcome.0, self.outcome.1);
    }
}

/// What the client is sent next.
struct Delta {
    text: String,
    tokens: Vec<u32>,
    end: Option<Completed>,
}

impl Reply {
    pub(crate) fn new(
        gateway: Arc<Gateway>,
        shape: Shape,
        common: &Common,
        turn: Turn,
        learn: bool,
        permit: OwnedSemaphorePermit,
        created: u64,
    ) -> Self {
        let options = common.stream_options.as_ref();
        Self {
            decoder: gateway.tokenizer.decoder(),
            wishes: Wishes {
                shape,
                stream: common.stream.unwrap_or(false),
                usage: options.and_then(|options| options.include_usage).unwrap_or(false),
                token_ids: common.return_token_ids.unwrap_or(false),
                created,
            },
            gateway,
            turn,
            learn,
            said_anything: false,
            outcome: ("none", "client-gone"),
            _permit: permit,
        }
    }

    pub(crate) async fn into_response(self) -> Response {
        let session = HeaderValue::from_str(self.client_session());
        let request = HeaderValue::from_str(&self.request());
        let mut response = if self.wishes.stream {
            self.streamed().await
        } else {
            self.whole().await
        };
        for (name, value) in [("x-session-id", session), ("x-request-id", request)] {
            if let Ok(value) = value {
                response.headers_mut().insert(name, value);
            }
        }
        response
    }

    /// The next delta; cancel-safe.
    async fn next(&mut self) -> Result<Delta, ApiError> {
        let metrics = &self.gateway.reach.metrics;
        let (mut text, mut tokens, mut end) = (String::new(), Vec::new(), None);
        match self.turn.next().await {
            Event::Tokens(next) => {
                if !self.said_anything {
                    self.said_anything = true;
                    metrics.ttft.observe(self.turn.age());
                }
                self.decoder.push(&next, &mut text);
                tokens = next;
            }
            Event::Done(completed) => {
                self.decoder.finish(&mut text);
                metrics.latency.observe(self.turn.age());
                self.outcome = (completed.path.label(), "ok");
                if self.learn {
                    self.remember();
                }
                end = Some(completed);
            }
            Event::Failed(error) => {
                self.outcome = ("none", error.code);
                return Err(error);
            }
        }
        Ok(Delta { text, tokens, end })
    }

    fn remember(&self) {
        let asked = self.turn.asked();
        let context = [self.turn.prompt(), self.turn.answer()].concat();
        self.gateway
            .tips
            .learn(asked.tenant.as_deref(), &context, &asked.session);
    }

    // ---- one body ----

    async fn whole(mut self) -> Response {
        let mut all = String::new();
        loop {
            match self.next().await {
                Err(error) => return error.into_response(),
                Ok(delta) => {
                    all.push_str(&delta.text);
                    let Some(end) = delta.end else { continue };
                    let mut body = self.frame(false, &[self.choice(&all, self.turn.answer(), true)]);
                    body["usage"] = json!(self.usage(&end));
                    body["pinion"] = json!(self.extension(&end));
                    return Json(body).into_response();
                }
            }
        }
    }

    // ---- a stream ----

    /// The status is an error's if it comes before the first token, or before the client would think us dead.
    async fn streamed(mut self) -> Response {
        let beat = self.gateway.config.keep_alive;
        let mut waiting = VecDeque::new();
        let mut over = false;
        match tokio::time::timeout(beat, self.next()).await {
            Ok(Err(error)) => return error.into_response(),
            Ok(Ok(delta)) => over = self.tell(delta, true, &mut waiting),
            Err(_) => self.tell_role(&mut waiting),
        }
        let events = stream::unfold((self, waiting, over), |(mut reply, mut waiting, mut over)| async move {
            loop {
                if let Some(data) = waiting.pop_front() {
                    let event = axum::response::sse::Event::default().data(data);
                    return Some((Ok::<_, Infallible>(event), (reply, waiting, over)));
                }
                if over {
                    return None;
                }
                over = match reply.next().await {
                    Ok(delta) => reply.tell(delta, false, &mut waiting),
                    Err(error) => {
                        waiting.extend([error.body().to_string(), "[DONE]".to_owned()]);
                        true
                    }
                };
            }
        });
        let mut response = Sse::new(events)
            .keep_alive(KeepAlive::new().interval(beat).text("alive"))
            .into_response();
        let headers = response.headers_mut();
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        response
    }

    fn tell_role(&self, out: &mut VecDeque<String>) {
        if self.wishes.shape == Shape::Chat {
            let choice = json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null});
            out.push_back(self.frame(true, &[choice]).to_string());
        }
    }

    /// Puts the events of a delta into `out`; whether it was the last.
    fn tell(&self, delta: Delta, first: bool, out: &mut VecDeque<String>) -> bool {
        if first {
            self.tell_role(out);
        }
        if !delta.text.is_empty() || (self.wishes.token_ids && !delta.tokens.is_empty()) {
            let choice = self.choice(&delta.text, &delta.tokens, false);
            out.push_back(self.frame(true, &[choice]).to_string());
        }
        let Some(end) = delta.end else {
            return false;
        };
        let extension = json!(self.extension(&end));
        let mut last = self.frame(true, &[self.choice("", &[], true)]);
        last["pinion"] = extension.clone();
        out.push_back(last.to_string());
        if self.wishes.usage {
            let mut usage = self.frame(true, &[]);
            usage["usage"] = json!(self.usage(&end));
            usage["pinion"] = extension;
            out.push_back(usage.to_string());
        }
        out.push_back("[DONE]".to_owned());
        true
    }

    // ---- JSON ----

    fn client_session(&self) -> &str {
        let asked = self.turn.asked();
        identity::for_client(asked.tenant.as_deref(), &asked.session)
    }

    fn request(&self) -> String {
        self.turn.asked().request.to_string()
    }

    fn frame(&self, chunk: bool, choices: &[Value]) -> Value {
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

    /// `length` if the model was cut off, `stop` if it ended by itself, on the last token allowed perhaps.
    fn finish_reason(&self) -> &'static str {
        let answer = self.turn.answer();
        let full = answer.len() >= self.turn.asked().max_new_tokens as usize;
        let ended = answer.last().is_some_and(|last| self.gateway.tokenizer.ends(*last));
        if full && !ended { "length" } else { "stop" }
    }

    fn choice(&self, text: &str, tokens: &[u32], at_end: bool) -> Value {
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

    fn usage(&self, end: &Completed) -> Usage {
        let (prompt, answer) = (self.turn.prompt().len(), self.turn.answer().len());
        Usage {
            prompt_tokens: prompt,
            completion_tokens: answer,
            total_tokens: prompt + answer,
            prompt_tokens_details: PromptDetails {
                cached_tokens: end.cached_tokens,
            },
        }
    }

    fn extension(&self, end: &Completed) -> Extension {
        Extension {
            session: self.client_session().to_owned(),
            request: self.request(),
            path: end.path.label(),
            why: end.why.map(SeedReason::label),
            cached_tokens: end.cached_tokens,
        }
    }
}
