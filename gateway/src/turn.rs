//! One turn's life, seen from the gateway: submit it, keep its owner alive or find the next one, hand out its tokens
//! without gap or repeat (I2), end exactly once.
//!
//! Two things happen side by side in [`Turn::next`]. The *stream* brings chunks and the end; what was lost on the way
//! comes with the end, which carries the whole answer. The *link* is what is being done about the owner:
//!
//! | link | ends as | then |
//! |---|---|---|
//! | find | found | submit with the answer so far; one that did not answer the last time is probed first |
//! | submit | accepted | wait for quiet |
//! | | refused | the turn ends with the reason; superseded: rest, find |
//! | | unreachable | rest, find |
//! | wait for quiet | quiet for [`QUIET`] | probe |
//! | probe | alive | wait for quiet; in a long silence submit again, because the end may have been lost |
//! | | another life of the owner | submit |
//! | | unreachable | rest, find |
//!
//! Submitting is idempotent: the same request id is the same turn. A turn dropped before its end is cancelled.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::StatusCode;
use pinion_bus::Subscription;
use pinion_schemas::messages::{Chunk, Completed, Failed, Probe, Submit};
use pinion_schemas::trace_context::TraceContext;
use pinion_schemas::wire::{self, Schema};
use pinion_schemas::{AbortReason, Epoch, Micros, WorkerId};
use tokio::time::{Instant, sleep_until};

use crate::error::ApiError;
pub use crate::link::Reach;
use crate::link::{self, Link, Step};

/// Silence after which the owner is asked whether it is there.
pub const QUIET: Duration = Duration::from_secs(1);
/// First silence after which a live owner gets the turn again; it doubles each time.
const SILENCE: Duration = Duration::from_secs(2);

/// What a turn has to say.
#[derive(Debug)]
pub enum Event {
    /// The next tokens of the answer.
    Tokens(Vec<u32>),
    /// All tokens have been said.
    Done(Completed),
    /// There will be no more tokens.
    Failed(ApiError),
}

/// A turn on its way. Drop it before its end, and it is cancelled.
pub struct Turn {
    reach: Arc<Reach>,
    /// What is submitted; its `answer_so_far` is what the client has.
    submit: Submit,
    /// The trace it belongs to.
    trace: TraceContext,
    stream: Subscription,
    link: Step,
    /// The owner asked last.
    owner: Option<WorkerId>,
    /// Whether that one did not answer.
    unanswered: bool,
    /// Epoch of the owner that accepted.
    accepted: Option<Epoch>,
    /// Epoch in the last probe's answer.
    probed: Option<Epoch>,
    /// Chunks of attempts below this are of the past.
    attempt: u64,
    /// When the stream or an acceptance last gave a sign of life, and the silence that calls for a submit.
    heard: Instant,
    silence: Duration,
    submits: u32,
    fails: u32,
    begun: Instant,
    deadline: Instant,
    /// Until when the turn must be accepted.
    patience: Instant,
    /// The end, when it came with tokens that had to go first.
    end: Option<Completed>,
    over: bool,
}

impl Turn {
    /// Listens for the answer of `submit` and begins to submit it; [`Turn::next`] does the rest. It ends within
    /// `timeout`, and within `patience` if nobody accepts it.
    ///
    /// # Errors
    /// 503 if the bus cannot be listened to.
    pub async fn open(
        reach: Arc<Reach>,
        mut submit: Submit,
        trace: TraceContext,
        timeout: Duration,
        patience: Duration,
    ) -> Result<Self, ApiError> {
        let subject = reach.subjects.stream(submit.request);
        let stream = reach.bus.subscribe(subject.as_str(), None).await.map_err(|error| {
            ApiError::unavailable(
                "bus-down",
                format!("the message bus is not reachable ({error}): try again"),
                1,
            )
        })?;
        subject.as_str().clone_into(&mut submit.stream);
        let now = Instant::now();
        Ok(Self {
            reach,
            submit,
            trace,
            stream,
            link: Box::pin(async { Link::Found }),
            owner: None,
            unanswered: false,
            accepted: None,
            probed: None,
            attempt: 0,
            heard: now,
            silence: SILENCE,
            submits: 0,
            fails: 0,
            begun: now,
            deadline: now + timeout,
            patience: now + patience.min(timeout),
            end: None,
            over: false,
        })
    }

    /// The answer so far.
    pub fn answer(&self) -> &[u32] {
        &self.submit.answer_so_far
    }

    /// The prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.submit.prompt
    }

    /// What is asked.
    pub fn asked(&self) -> &Submit {
        &self.submit
    }

    /// Time since the turn began.
    pub fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// The next thing the client should know. Cancel-safe. After [`Event::Done`] or [`Event::Failed`] do not call it.
    pub async fn next(&mut self) -> Event {
        if let Some(end) = self.end.take() {
            return self.done(end);
        }
        loop {
            let until = if self.accepted.is_some() {
                self.deadline
            } else {
                self.patience
            };
            let event = tokio::select! {
                biased;
                message = self.stream.next() => match message {
                    Some(message) => self.on_stream(&message.payload),
                    None => Some(Event::Failed(ApiError::unavailable("bus-down", "the message bus was closed", 1))),
                },
                link = &mut self.link => self.on_link(link),
                () = sleep_until(until) => Some(Event::Failed(self.too_late())),
                () = self.reach.closing.cancelled() => {
                    let message = "this gateway is shutting down: send the request again";
                    Some(Event::Failed(ApiError::unavailable("shutting-down", message, 1)))
                }
            };
            match event {
                Some(Event::Done(end)) => return self.done(end),
                Some(event) => return event,
                None => {}
            }
        }
    }

    /// The client has enough. Cancels the turn, unless its end is here already; that is given back then. Do not call
    /// [`Turn::next`] any more.
    pub fn stop(&mut self) -> Option<Completed> {
        let end = self.end.take();
        if end.is_none() {
            self.cancel();
        }
        self.over = true;
        end
    }

    fn cancel(&self) {
        if let (false, Some(owner)) = (self.over, &self.owner) {
            link::cancel(&self.reach, owner, &self.submit);
        }
    }

    // ---- the stream ----

    fn on_stream(&mut self, payload: &[u8]) -> Option<Event> {
        let event = match wire::schema_of(payload) {
            Some(Chunk::ID) => wire::decode::<Chunk>(payload).map(|chunk| self.on_chunk(&chunk)),
            Some(Completed::ID) => wire::decode::<Completed>(payload).map(|end| self.on_completed(end)),
            Some(Failed::ID) => wire::decode::<Failed>(payload).map(|failed| self.on_failed(&failed)),
            // The owner asks whether anybody listens; that somebody does is the answer.
            Some(Probe::ID) => return None,
            other => {
                tracing::warn!(schema = ?other, "unexpected message on the stream of a turn");
                return None;
            }
        };
        event.unwrap_or_else(|error| {
            tracing::warn!(%error, "unreadable message on the stream of a turn");
            None
        })
    }

    fn on_chunk(&mut self, chunk: &Chunk) -> Option<Event> {
        if chunk.request != self.submit.request || chunk.attempt < self.attempt {
            return None;
        }
        self.attempt = chunk.attempt;
        self.sign_of_life();
        let have = self.submit.answer_so_far.len();
        let offset = chunk.offset as usize;
        if offset > have {
            self.reach.metrics.gaps.fetch_add(1, Ordering::Relaxed);
            return None; // a chunk was lost: the end brings it, or the next owner says it again
        }
        if offset < have {
            self.reach.metrics.repeats.fetch_add(1, Ordering::Relaxed);
        }
        self.say(chunk.tokens.get(have - offset..).unwrap_or_default())
    }

    /// The end counts if it goes on from what the client has, whatever its attempt: a late end of a dead owner's leg
    /// is as good as the present one's. One of the present attempt that says something else cannot be served.
    fn on_completed(&mut self, end: Completed) -> Option<Event> {
        if end.request != self.submit.request {
            return None;
        }
        let have = self.submit.answer_so_far.len();
        if !end.answer.starts_with(&self.submit.answer_so_far) {
            if end.attempt < self.attempt {
                return None;
            }
            tracing::error!(request = %end.request, have, "the end of a turn contradicts its stream");
            let message = "the answer changed while it was sent: send the request again";
            return Some(Event::Failed(ApiError::new(
                StatusCode::BAD_GATEWAY,
                "answer-changed",
                message,
            )));
        }
        match self.say(end.answer.get(have..).unwrap_or_default()) {
            None => Some(Event::Done(end)),
            tokens => {
                self.end = Some(end);
                tokens
            }
        }
    }

    fn on_failed(&mut self, failed: &Failed) -> Option<Event> {
        if failed.request != self.submit.request {
            return None;
        }
        if failed.reason == AbortReason::Superseded {
            self.look_again("superseded");
            return None;
        }
        self.over = true;
        if failed.reason == AbortReason::TooLong {
            let (prompt, more) = (self.submit.prompt.len(), self.submit.max_new_tokens);
            let message = format!(
                "the prompt has {prompt} tokens and {more} more are asked for, which no worker's pool can hold: shorten the \
                 prompt, or ask for fewer tokens"
            );
            return Some(Event::Failed(ApiError::field(
                "max_tokens",
                "context_length_exceeded",
                message,
            )));
        }
        Some(Event::Failed(ApiError::failed(
            failed.reason,
            failed.retry_after_millis,
        )))
    }

    /// Hands tokens out, once each, and never more than were asked for.
    fn say(&mut self, tokens: &[u32]) -> Option<Event> {
        let room = (self.submit.max_new_tokens as usize).saturating_sub(self.submit.answer_so_far.len());
        let tokens = tokens.get(..room.min(tokens.len())).unwrap_or_default();
        if tokens.is_empty() {
            return None;
        }
        self.submit.answer_so_far.extend_from_slice(tokens);
        Some(Event::Tokens(tokens.to_vec()))
    }

    // ---- the link to the owner ----

    fn on_link(&mut self, link: Link) -> Option<Event> {
        match link {
            Link::Accepted(epoch) => {
                if self.accepted.replace(epoch) != Some(epoch) {
                    // Attempts of a new owner are higher; offsets and the check of the end keep the stream right all the same.
                    self.attempt = 0;
                }
                self.fails = 0;
                self.heard = Instant::now();
                self.link = link::wait_for_quiet(self.heard, QUIET);
            }
            Link::Refused(failed) => return self.on_failed(&failed),
            Link::Unreachable(why) => {
                self.unanswered = true;
                self.look_again(&why);
            }
            Link::Impossible(error) => return Some(Event::Failed(error)),
            Link::Found => self.found(),
            Link::Quiet if self.heard.elapsed() < QUIET => self.link = link::wait_for_quiet(self.heard, QUIET),
            Link::Quiet => match self.owner.clone() {
                Some(owner) => self.probe(&owner),
                None => self.look_again("nobody to probe"),
            },
            Link::Alive(epoch) => self.alive(epoch),
        }
        None
    }

    fn sign_of_life(&mut self) {
        self.heard = Instant::now();
        self.silence = SILENCE;
        // Who streams has accepted, even if the answer that says so was lost.
        self.accepted.get_or_insert_default();
    }

    fn found(&mut self) {
        match self.reach.owners.owner(&self.submit.session) {
            // The first look of all, or no node holds the shard now.
            None => self.look_again("no control node owns this session"),
            // It did not answer before: ask in few bytes, not with the whole prompt.
            Some(owner) if self.unanswered && self.owner.as_ref() == Some(&owner) => self.probe(&owner),
            Some(owner) => self.submit(owner),
        }
    }

    fn alive(&mut self, epoch: Epoch) {
        let restarted = self.probed.replace(epoch).is_some_and(|before| before != epoch);
        let silent = self.heard.elapsed() >= self.silence;
        match self.owner.clone() {
            Some(owner) if self.unanswered || restarted || silent => {
                if silent {
                    self.silence *= 2;
                }
                self.submit(owner);
            }
            _ => self.link = link::wait_for_quiet(Instant::now(), QUIET),
        }
    }

    fn submit(&mut self, owner: WorkerId) {
        self.submits += 1;
        if self.submits > 1 {
            self.reach.metrics.resubmits.fetch_add(1, Ordering::Relaxed);
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.submit.time_left = Micros(u64::try_from(left.as_micros()).unwrap_or(u64::MAX));
        self.link = link::submit(&self.reach, &owner, &self.submit, self.trace, left);
        self.owner = Some(owner);
        self.unanswered = false;
    }

    fn probe(&mut self, owner: &WorkerId) {
        self.link = link::probe(&self.reach, owner, self.submit.request);
    }

    /// Rests and finds the owner anew. The first time of all there is nothing to rest from.
    fn look_again(&mut self, why: &str) {
        let request = self.submit.request;
        let rest = if self.submits + self.fails == 0 {
            Duration::ZERO
        } else {
            tracing::debug!(%request, why, "looking for the owner again");
            link::rest(request, self.fails)
        };
        self.fails += 1;
        self.probed = None;
        self.link = link::find(Arc::clone(&self.reach), self.submit.session.clone(), rest);
    }

    // ---- the end ----

    fn done(&mut self, end: Completed) -> Event {
        self.over = true;
        Event::Done(end)
    }

    fn too_late(&self) -> ApiError {
        if self.accepted.is_some() || Instant::now() >= self.deadline {
            return ApiError::failed(AbortReason::Deadline, 0);
        }
        ApiError::unavailable(
            "no-control",
            "no control node accepts this session now: try again; if that goes on, GET /health says more",
            1,
        )
    }
}

impl Drop for Turn {
    /// The client has gone, or the deadline has passed.
    fn drop(&mut self) {
        self.cancel();
    }
}
