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
use pinion_schemas::messages::Completed;
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;

use crate::Gateway;
use crate::error::ApiError;
use crate::http::unix_seconds;
use crate::openai::Common;
use crate::stop::Stop;
use crate::tokenizer::Decoder;
use crate::turn::{Event, Turn};

mod body;

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
    stop: Stop,
    /// Whether a stop text has ended the answer.
    stopped: bool,
    /// Tokens of the answer, up to the one that completed a stop text.
    taken: usize,
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
    /// What was generated; their text may wait, because it may begin a stop text.
    tokens: Vec<u32>,
    end: Option<End>,
}

/// The end of an answer: what the cluster says of it, unless a stop text came before.
type End = Option<Completed>;

impl Reply {
    pub(crate) fn new(
        gateway: Arc<Gateway>,
        shape: Shape,
        common: &Common,
        stop: Stop,
        turn: Turn,
        learn: bool,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let options = common.stream_options.as_ref();
        Self {
            decoder: gateway.tokenizer.decoder(),
            wishes: Wishes {
                shape,
                stream: common.stream.unwrap_or(false),
                usage: options.and_then(|options| options.include_usage).unwrap_or(false),
                token_ids: common.return_token_ids.unwrap_or(false),
                created: unix_seconds(),
            },
            gateway,
            turn,
            stop,
            stopped: false,
            taken: 0,
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

    /// The next delta; cancel-safe. After one with an end do not call it.
    async fn next(&mut self) -> Result<Delta, ApiError> {
        let mut text = String::new();
        match self.turn.next().await {
            Event::Tokens(mut tokens) => {
                if !self.said_anything {
                    self.said_anything = true;
                    self.gateway.reach.metrics.ttft.observe(self.turn.age());
                }
                tokens.truncate(self.take(&tokens, &mut text));
                let end = self.stopped.then(|| self.turn.stop());
                if let Some(end) = &end {
                    self.ended(end.as_ref());
                }
                Ok(Delta { text, tokens, end })
            }
            Event::Done(completed) => {
                self.take_rest(&mut text);
                self.ended(Some(&completed));
                Ok(Delta {
                    text,
                    tokens: Vec::new(),
                    end: Some(Some(completed)),
                })
            }
            Event::Failed(error) => {
                self.outcome = ("none", error.code);
                Err(error)
            }
        }
    }

    /// Decodes token by token until a stop text is complete; how many that were.
    fn take(&mut self, tokens: &[u32], text: &mut String) -> usize {
        let before = self.taken;
        for token in tokens {
            self.taken += 1;
            let mut piece = String::new();
            self.decoder.push(&[*token], &mut piece);
            self.stopped = self.stop.push(&piece, text);
            if self.stopped {
                break;
            }
        }
        self.taken - before
    }

    /// The answer ends: what waits in the decoder may complete a stop text, too.
    fn take_rest(&mut self, text: &mut String) {
        let mut piece = String::new();
        self.decoder.finish(&mut piece);
        self.stopped = self.stop.push(&piece, text);
        if !self.stopped {
            self.stop.finish(text);
        }
    }

    fn ended(&mut self, end: Option<&Completed>) {
        self.gateway.reach.metrics.latency.observe(self.turn.age());
        self.outcome = end.map_or(("none", "stopped"), |end| (end.path.label(), "ok"));
        if self.learn {
            self.remember();
        }
    }

    fn remember(&self) {
        let asked = self.turn.asked();
        let context = [self.turn.prompt(), self.answer()].concat();
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
                    let mut body = self.frame(false, &[self.choice(&all, self.answer(), true)]);
                    body["usage"] = json!(self.usage(end.as_ref()));
                    body["pinion"] = json!(self.extension(end.as_ref()));
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
        let extension = json!(self.extension(end.as_ref()));
        let mut last = self.frame(true, &[self.choice("", &[], true)]);
        last["pinion"] = extension.clone();
        out.push_back(last.to_string());
        if self.wishes.usage {
            let mut usage = self.frame(true, &[]);
            usage["usage"] = json!(self.usage(end.as_ref()));
            usage["pinion"] = extension;
            out.push_back(usage.to_string());
        }
        out.push_back("[DONE]".to_owned());
        true
    }
}
