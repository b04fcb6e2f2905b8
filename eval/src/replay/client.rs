//! One turn over HTTP: the request, its retries, the stream, and what counts as a failure.

use super::report::{Failure, Reason};
use super::sse::SseParser;
use crate::stats::SplitMix64;
use bytes::Bytes;
use futures::StreamExt;
use pinion_schemas::reasons::{Path, SeedReason};
use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tokio::time::Instant;

/// How often a 429 or 503 with `Retry-After` is tried again.
pub const MAX_RETRIES: u32 = 3;
/// Bytes of an error body that are read.
const MAX_ERROR_BYTES: usize = 16 << 10;

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    prompt: &'a [u32],
    max_tokens: u32,
    stream: bool,
    stream_options: StreamOptions,
    /// vLLM's name, which the gateway takes too: ids under `choices[0].token_ids`.
    return_token_ids: bool,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    pinion: Option<Extension>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
}

#[derive(Deserialize)]
struct Extension {
    #[serde(default)]
    tokens: Vec<u32>,
    request: Option<serde_json::Value>,
    path: Option<Path>,
    why: Option<SeedReason>,
    cached_tokens: Option<u32>,
}

/// What is known of a turn, also of one that failed half-way.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// Ids of the answer so far.
    pub tokens: Vec<u32>,
    /// From the first send to the first chunk with tokens.
    pub ttft: Option<Duration>,
    /// From the first send to the end of the stream or to the failure.
    pub latency: Duration,
    pub path: Option<Path>,
    pub why: Option<SeedReason>,
    pub cached_tokens: Option<u32>,
    /// The gateway's name for the request.
    pub request: Option<String>,
    pub finish_reason: Option<String>,
    pub retries: u32,
    pub failure: Option<Failure>,
    usage: Option<(u64, u64)>,
    done: bool,
}

impl Answer {
    /// Takes the data of one event that came `elapsed` after the first send.
    pub fn event(&mut self, data: &[u8], elapsed: Duration) -> Result<(), Failure> {
        if self.done {
            return Ok(());
        }
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(data).map_err(|e| Failure::new(Reason::BadChunk, e.to_string()))?;
        if let Some(error) = chunk.error.filter(|e| !e.is_null()) {
            return Err(Failure::new(Reason::ServerError, message_of(&error)));
        }
        let mut ids = None;
        if let Some(choice) = chunk.choices.into_iter().next() {
            ids = choice.token_ids;
            self.finish_reason = choice.finish_reason.or(self.finish_reason.take());
        }
        if let Some(extension) = chunk.pinion {
            // A server that sends the ids at both places sends them once.
            ids = ids.or(Some(extension.tokens));
            self.path = extension.path.or(self.path);
            self.why = extension.why.or(self.why);
            self.cached_tokens = extension.cached_tokens.or(self.cached_tokens);
            self.request = match extension.request {
                None | Some(serde_json::Value::Null) => self.request.take(),
                Some(serde_json::Value::String(name)) => Some(name),
                Some(other) => Some(other.to_string()),
            };
        }
        if let Some(usage) = chunk.usage {
            self.usage = Some((usage.prompt_tokens, usage.completion_tokens));
        }
        if let Some(ids) = ids.filter(|ids| !ids.is_empty()) {
            self.ttft.get_or_insert(elapsed);
            self.tokens.extend(ids);
        }
        Ok(())
    }

    /// Judges a stream that has ended without a fault of the connection.
    pub fn judge(&self, input: usize, wanted: u32) -> Result<(), Failure> {
        let got = self.tokens.len();
        let fail = |reason, detail| Err(Failure::new(reason, detail));
        match self.finish_reason.as_deref() {
            Some("length" | "stop") | None => {}
            Some(other) => {
                return fail(
                    Reason::Aborted,
                    format!("finish reason {other} after {got} of {wanted} tokens"),
                );
            }
        }
        let early = self.finish_reason.as_deref() == Some("stop");
        if got > wanted as usize {
            return fail(Reason::LongStream, format!("{got} tokens, {wanted} asked for"));
        }
        if got < wanted as usize && !early {
            let finish = self.finish_reason.as_deref().unwrap_or("none");
            let hint = if got == 0 { " (are there token_ids?)" } else { "" };
            return fail(
                Reason::ShortStream,
                format!("{got} of {wanted} tokens, finish reason {finish}{hint}"),
            );
        }
        if self.finish_reason.is_none() || !self.done {
            let missing = if self.done { "finish reason" } else { "[DONE]" };
            return fail(Reason::BrokenStream, format!("stream ended without {missing}"));
        }
        match self.usage {
            Some(usage) if usage != (input as u64, got as u64) => fail(
                Reason::UsageMismatch,
                format!("usage says {} + {}, seen {input} + {got}", usage.0, usage.1),
            ),
            _ => Ok(()),
        }
    }
}

/// Sends turns to one gateway.
#[derive(Debug)]
pub(super) struct Client {
    http: reqwest::Client,
    completions: String,
    model: String,
    timeout: Duration,
}

impl Client {
    pub fn new(url: &str, model: &str, timeout: Duration) -> Result<Self, reqwest::Error> {
        Ok(Self {
            // A proxy of the environment would be measured along, and has no business on the way to a local gateway.
            http: reqwest::Client::builder().tcp_nodelay(true).no_proxy().build()?,
            completions: format!("{}/v1/completions", url.trim_end_matches('/')),
            model: model.to_owned(),
            timeout,
        })
    }

    /// Plays one turn. The clock starts with the first send and runs on through retries.
    pub async fn turn(&self, session: &HeaderMap, prompt: &[u32], max_tokens: u32, jitter: &mut SplitMix64) -> Answer {
        let mut answer = Answer::default();
        let body = Body {
            model: &self.model,
            prompt,
            max_tokens,
            stream: true,
            stream_options: StreamOptions { include_usage: true },
            return_token_ids: true,
        };
        let body = match serde_json::to_vec(&body) {
            Ok(body) => Bytes::from(body),
            Err(e) => {
                answer.failure = Some(Failure::new(Reason::NoAnswer, e.to_string()));
                return answer;
            }
        };
        let begin = Instant::now();
        let end = begin.checked_add(self.timeout);
        let work = self.attempts(session, body, begin, &mut answer, jitter);
        let result = match end {
            Some(end) => tokio::time::timeout_at(end, work).await,
            None => Ok(work.await),
        };
        // Time after [DONE], spent to give the connection back, is not the server's.
        if !answer.done || answer.latency.is_zero() {
            answer.latency = begin.elapsed();
        }
        let result = result.unwrap_or_else(|_| {
            if answer.done {
                return Ok(());
            }
            let got = answer.tokens.len();
            Err(Failure::new(
                Reason::Timeout,
                format!("{got} of {max_tokens} tokens after {:?}", self.timeout),
            ))
        });
        answer.failure = result.and_then(|()| answer.judge(prompt.len(), max_tokens)).err();
        answer
    }

    async fn attempts(
        &self,
        session: &HeaderMap,
        body: Bytes,
        begin: Instant,
        answer: &mut Answer,
        jitter: &mut SplitMix64,
    ) -> Result<(), Failure> {
        loop {
            let request = self.http.post(&self.completions).headers(session.clone());
            let sent = request.header(CONTENT_TYPE, "application/json").body(body.clone());
            let response = sent.send().await.map_err(|e| {
                let reason = if e.is_connect() {
                    Reason::Connect
                } else {
                    Reason::NoAnswer
                };
                Failure::new(reason, chain(&e))
            })?;
            let status = response.status();
            if status.is_success() {
                return stream(response, begin, answer).await;
            }
            let wait = retry_after(&response).filter(|_| answer.retries < MAX_RETRIES);
            let failure = refusal(response).await;
            // Up to a tenth more, so that those refused together do not come back together.
            let Some(wait) = wait.map(|w| {
                w.max(Duration::from_millis(10))
                    .mul_f64(1.0 + jitter.below(101) as f64 / 1e3)
            }) else {
                return Err(failure);
            };
            if begin.elapsed().saturating_add(wait) >= self.timeout {
                return Err(failure);
            }
            answer.retries += 1;
            tokio::time::sleep(wait).await;
        }
    }
}

async fn stream(response: Response, begin: Instant, answer: &mut Answer) -> Result<(), Failure> {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|v| v.to_str().ok());
    if !kind.is_some_and(|k| k.starts_with("text/event-stream")) {
        let kind = kind.unwrap_or("none").to_owned();
        return Err(Failure::new(
            Reason::BadChunk,
            format!("content type {kind}, not text/event-stream"),
        ));
    }
    let mut parser = SseParser::default();
    let mut pieces = response.bytes_stream();
    while let Some(piece) = pieces.next().await {
        let piece = match piece {
            Ok(piece) => piece,
            Err(_) if answer.done => break,
            Err(e) => return Err(Failure::new(Reason::BrokenStream, chain(&e))),
        };
        let elapsed = begin.elapsed();
        let mut result = Ok(());
        let pushed = parser.push(&piece, |data| {
            if result.is_ok() {
                result = answer.event(data, elapsed);
            }
        });
        result?;
        pushed.map_err(|_| Failure::new(Reason::BadChunk, "event longer than 16 MiB"))?;
        if answer.done && answer.latency.is_zero() {
            answer.latency = elapsed;
        }
    }
    Ok(())
}

/// The wait that a 429 or 503 asks for; a date instead of seconds is taken as none.
fn retry_after(response: &Response) -> Option<Duration> {
    let busy = matches!(
        response.status(),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    );
    let value = response.headers().get(RETRY_AFTER).filter(|_| busy)?;
    let seconds: u64 = value.to_str().ok()?.trim().parse().ok()?;
    // A day is beyond every request timeout.
    Some(Duration::from_secs(seconds.min(86_400)))
}

/// An answer other than 2xx.
async fn refusal(response: Response) -> Failure {
    let reason = Reason::Http(response.status().as_u16());
    let mut text = Vec::new();
    let mut pieces = response.bytes_stream();
    while let Some(Ok(piece)) = pieces.next().await {
        text.extend_from_slice(&piece);
        if text.len() > MAX_ERROR_BYTES {
            break;
        }
    }
    let detail = match serde_json::from_slice::<serde_json::Value>(&text) {
        Ok(value) => message_of(value.get("error").unwrap_or(&value)),
        Err(_) => String::from_utf8_lossy(&text).into_owned(),
    };
    Failure::new(reason, detail)
}

/// `code: message` of an OpenAI-shaped error, else all of it.
fn message_of(error: &serde_json::Value) -> String {
    let field = |name| error.get(name).and_then(serde_json::Value::as_str);
    match (field("code").or_else(|| field("type")), field("message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (None, Some(message)) => message.to_owned(),
        _ => error.as_str().map_or_else(|| error.to_string(), str::to_owned),
    }
}

/// An error with its causes, as reqwest keeps the interesting part there.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
