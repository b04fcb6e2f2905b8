//! Live replay of a trace against a running gateway.
//!
//! Each session plays its turns in order: turn n+1 is sent when turn n has ended and its pause has passed. Pauses are cut
//! to [`ReplayOptions::max_think`] and divided by [`ReplayOptions::time_scale`]; starts of sessions are divided only.
//! (Mooncake and Prototype traces know the pause since the previous *request*, so they play slower than recorded.)
//!
//! # What the prompts are made of
//!
//! A trace gives block ids, not text, and its blocks fix the tokens of every prompt, the answers inside included. The
//! server's real answer is another one. A replay of the blocks ([`PromptMode::Blocks`]) therefore never continues what
//! the server has just generated, and would measure a cache that loses every answer, which no real client causes.
//!
//! The default, [`PromptMode::Continue`], is a choice with consequences. A prompt is the previous prompt, the answer that
//! really came, and, up to the trace's length and never beyond, tokens of the trace's prompt at those places:
//!
//! * Where the trace's prompt ends inside the answer (280 of the 2,665 pairs of turns of the 40-session sample), the
//!   answer is cut, and there are no fresh tokens at all: fewer may be fresh than in the trace. Where the answer is
//!   shorter than the recorded one ([`ReplayOptions::max_output_tokens`], finish reason `stop`), more are fresh.
//! * Where the trace shares less than half of the previous prompt (a compaction, 40 of those pairs), the prompt starts
//!   anew from the trace's blocks. A trace that changed a smaller tail (34 pairs by more than one block, 0.02 % of the
//!   tokens) is replayed as if it had not, which is to the advantage of the cache.
//! * Prompts of sub-agents share with their parents only what no answer precedes.
//! * After a failed turn its answer is taken as lost: the next prompt continues the failed prompt alone.
//!
//! Each record says how many tokens were carried over, so the fresh ones of a run are known.
//!
//! # What counts
//!
//! The clock of a turn starts when its first request is sent, with the body ready, and includes retries. A turn that
//! yields other than the asked number of tokens fails, unless the server finished with `stop`, which is counted apart.
//! Token ids are taken from `choices[0].token_ids` (asked for with vLLM's `return_token_ids`), else from `pinion.tokens`;
//! a server that sends neither cannot be replayed against. Nothing is tried again but a 429 or 503 with `Retry-After`, 3 times at most and within the request timeout.

mod client;
mod pacing;
mod progress;
mod report;
mod sse;
#[cfg(test)]
mod tests;

pub use client::MAX_RETRIES;
pub use progress::{Progress, bar};
pub use report::{Failure, Paths, Reason, Summary, TurnRecord};
pub use sse::{EventTooLong, MAX_EVENT_BYTES, SseParser};

use crate::stats::SplitMix64;
use crate::trace::tokens::{Vocab, namespace_of};
use crate::trace::{Session, Trace};
use client::Client;
use pacing::{Made, Planned, Prompts, Start};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Longest session id that the gateway takes, bytes.
const MAX_SESSION_ID: usize = 256;

/// Where the tokens of a later turn's prompt come from; see [the module](self).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptMode {
    /// The previous prompt, the answer that came, then the trace's tokens.
    #[default]
    Continue,
    /// The trace's blocks alone.
    Blocks,
}

/// How to replay.
#[derive(Clone, Debug, PartialEq)]
pub struct ReplayOptions {
    /// The gateway, such as `http://127.0.0.1:8080`.
    pub url: String,
    /// Name of the model.
    pub model: String,
    /// Token ids to use.
    pub vocab: Vocab,
    /// Where prompts come from.
    pub prompts: PromptMode,
    /// Longest pause before a turn, before scaling.
    pub max_think: Duration,
    /// Times run this much faster than recorded; above 0.
    pub time_scale: f64,
    /// Mean gap between the starts of sessions, made up from `seed` on top of the trace's own starts and not scaled.
    /// For traces without arrivals (Claude Code), whose sessions would all start at once.
    pub arrival_gap: Duration,
    /// Only the first sessions, sub-agents not counted; they come along with their parents.
    pub sessions: Option<usize>,
    /// Only the first turns of each session.
    pub max_turns: Option<usize>,
    /// Most sessions at a time. A session holds its place during its pauses.
    pub concurrency: usize,
    /// Give all sessions the same head (see [`Vocab::prompt`]).
    pub common_head: bool,
    /// Longest time of a turn, retries included.
    pub request_timeout: Duration,
    /// Most tokens to ask for in a turn.
    pub max_output_tokens: Option<u32>,
    /// Longest prompt: longer ones are cut to their first tokens, and counted. For models and pools with less room than the
    /// trace's; 0 is none.
    pub max_input_tokens: usize,
    /// Put before the trace's ids in `x-session-id`, so that a second replay does not meet the sessions of the first.
    pub session_prefix: String,
    /// Of made-up arrivals and of the jitter of retries.
    pub seed: u64,
}

impl ReplayOptions {
    /// Recorded times with pauses of up to 10 s, everything, 64 sessions at a time.
    pub fn new(url: impl Into<String>, model: impl Into<String>, vocab: Vocab) -> Self {
        Self {
            url: url.into(),
            model: model.into(),
            vocab,
            prompts: PromptMode::default(),
            max_think: Duration::from_secs(10),
            time_scale: 1.0,
            arrival_gap: Duration::ZERO,
            sessions: None,
            max_turns: None,
            concurrency: 64,
            common_head: false,
            request_timeout: Duration::from_mins(10),
            max_output_tokens: None,
            max_input_tokens: 0,
            session_prefix: String::new(),
            seed: 0,
        }
    }
}

/// A replay that cannot begin.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// Not an address that can be used.
    #[error("url {url} is not an http:// address ({message}); give one such as http://127.0.0.1:8080")]
    Url {
        /// The option.
        url: String,
        /// What is wrong with it.
        message: String,
    },
    /// An option is out of its range.
    #[error("option {option} should be {expected}; correct the value")]
    Option {
        /// Its name.
        option: &'static str,
        /// What is accepted.
        expected: &'static str,
    },
    /// Nothing to play.
    #[error("no turn is left to replay; check the trace and the options sessions and max_turns")]
    Empty,
    /// The HTTP client cannot be set up.
    #[error("the HTTP client cannot start: {0}")]
    Client(#[from] reqwest::Error),
}

fn check(options: &ReplayOptions) -> Result<(), ReplayError> {
    let wrong = |message: String| ReplayError::Url {
        url: options.url.clone(),
        message,
    };
    let url = reqwest::Url::parse(&options.url).map_err(|e| wrong(e.to_string()))?;
    if url.scheme() != "http" {
        return Err(wrong(format!("scheme {} is not supported", url.scheme())));
    }
    let bad = |option, expected| Err(ReplayError::Option { option, expected });
    if !(options.time_scale.is_finite() && options.time_scale > 0.0) {
        return bad("time_scale", "a number above 0");
    }
    if options.concurrency == 0 {
        return bad("concurrency", "1 or more");
    }
    if options.request_timeout.is_zero() {
        return bad("request_timeout", "more than 0 s");
    }
    Ok(())
}

/// The value of `x-session-id`. An id that no header can carry, or that is too long, is replaced by its hash.
fn session_header(options: &ReplayOptions, session: &Session) -> HeaderMap {
    let id = format!("{}{}", options.session_prefix, session.id);
    let fits = id.len() <= MAX_SESSION_ID && !id.is_empty() && id.bytes().all(|b| b.is_ascii_graphic());
    let id = if fits {
        id
    } else {
        format!("hash-{:016x}", namespace_of(&id))
    };
    let value = HeaderValue::try_from(id).ok();
    let name = HeaderName::from_static("x-session-id");
    value.into_iter().map(|value| (name.clone(), value)).collect()
}

/// What all sessions of a replay have in common.
struct Shared {
    trace: Trace,
    options: ReplayOptions,
    client: Client,
    places: Semaphore,
    begin: Instant,
    /// Per planned session, the number of its finished turns.
    finished: Vec<watch::Sender<usize>>,
}

/// Plays `trace` to its end and tells `progress` of every turn as it ends, on the caller's task. Dropping the future
/// ends all requests.
///
/// # Errors
/// Only before the first request; failed turns are in the summary.
///
/// # Panics
/// If a session's task panicked.
pub async fn replay(
    trace: Trace,
    options: ReplayOptions,
    mut progress: impl FnMut(&Progress<'_>),
) -> Result<Summary, ReplayError> {
    check(&options)?;
    let plan = pacing::plan(&trace, &options);
    let total: usize = plan.iter().map(|p| p.turns).sum();
    if total == 0 {
        return Err(ReplayError::Empty);
    }
    let shared = Arc::new(Shared {
        client: Client::new(&options.url, &options.model, options.request_timeout)?,
        places: Semaphore::new(options.concurrency.min(Semaphore::MAX_PERMITS)),
        begin: Instant::now(),
        finished: plan.iter().map(|_| watch::Sender::new(0)).collect(),
        trace,
        options,
    });
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for (place, planned) in plan.into_iter().enumerate() {
        tasks.spawn(play(Arc::clone(&shared), place, planned, sender.clone()));
    }
    drop(sender);
    let (mut records, mut failed) = (Vec::with_capacity(total), 0);
    while let Some(record) = receiver.recv().await {
        failed += usize::from(record.error.is_some());
        progress(&Progress {
            record: &record,
            done: records.len() + 1,
            total,
            failed,
        });
        records.push(record);
    }
    let wall = shared.begin.elapsed();
    while let Some(ended) = tasks.join_next().await {
        if let Err(panic) = ended.map_err(tokio::task::JoinError::try_into_panic) {
            std::panic::resume_unwind(panic.unwrap_or_else(|e| Box::new(e.to_string())));
        }
    }
    Ok(Summary::of(records, wall.as_secs_f64()))
}

/// Plays one session.
async fn play(shared: Arc<Shared>, place: usize, planned: Planned, records: mpsc::UnboundedSender<TurnRecord>) {
    let options = &shared.options;
    let Some(session) = shared.trace.sessions.get(planned.session) else {
        return;
    };
    match planned.start {
        Start::At(offset) => tokio::time::sleep(offset.saturating_sub(shared.begin.elapsed())).await,
        Start::After { parent, turns } => {
            if let Some(parent) = shared.finished.get(parent) {
                // The sender lives as long as `shared`.
                let _ = parent.subscribe().wait_for(|&done| done >= turns).await;
            }
        }
    }
    let Ok(_place) = shared.places.acquire().await else {
        return; // Never closed.
    };
    let header = session_header(options, session);
    let mut jitter = SplitMix64::new(options.seed ^ namespace_of(&session.id));
    let mut prompts = Prompts::new(session, options);
    let mut answer = Vec::new();
    for (index, turn) in session.turns.iter().enumerate().take(planned.turns) {
        let pause = pacing::pause(turn, options);
        let ended = Instant::now();
        // Made during the pause, so that it does not add to it.
        let Made {
            carried,
            reset,
            truncated,
        } = prompts.make(index, &answer);
        let requested = pacing::output_tokens(turn, options);
        if index > 0 {
            tokio::time::sleep(pause.saturating_sub(ended.elapsed())).await;
        }
        let at = shared.begin.elapsed();
        let got = shared
            .client
            .turn(&header, prompts.tokens(), requested, &mut jitter)
            .await;
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let record = TurnRecord {
            session: session.id.clone(),
            turn: index,
            at_s: at.as_secs_f64(),
            pause_s: (index > 0).then_some(pause.as_secs_f64()),
            input: prompts.tokens().len(),
            carried,
            reset,
            requested,
            output: got.tokens.len(),
            ttft_ms: got.ttft.map(ms),
            latency_ms: ms(got.latency),
            path: got.path,
            why: got.why,
            truncated,
            cached_tokens: got.cached_tokens,
            request: got.request,
            finish_reason: got.finish_reason,
            retries: got.retries,
            error: got.failure,
            ..TurnRecord::default()
        };
        answer = if record.error.is_none() { got.tokens } else { Vec::new() };
        if records.send(record).is_err() {
            return;
        }
        if let Some(finished) = shared.finished.get(place) {
            finished.send_replace(index + 1);
        }
    }
}
