//! One turn's life, seen from the gateway: submit it, keep its owner alive or find the next one, hand out its tokens
//! without gap or repeat (I2), end exactly once.
//!
//! Two things happen side by side in [`Turn::next`]. The *stream* brings chunks and the end; what was lost on the way
//! comes with the end, which carries the whole answer. The *link* is what is being done about the owner:
//!
//! | link | ends as | then |
//! |---|---|---|
//! | submit | accepted | wait for quiet |
//! | | refused | the turn ends with the reason; superseded: find the owner and rest |
//! | | unreachable | find the owner and rest |
//! | rest | rested | submit, with the answer so far |
//! | wait for quiet | quiet for [`QUIET`] | probe the owner |
//! | probe | alive | wait for quiet; in a long silence submit again, because the end may have been lost |
//! | | another epoch, unreachable | find the owner and rest |
//!
//! Submitting is idempotent: the same request id is the same turn. A turn dropped before its end is cancelled.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use pinion_bus::{Bus, BusError, Headers, Subscription};
use pinion_schemas::messages::{Accepted, Cancel, Chunk, Completed, Failed, Probe, ProbeAck, Submit};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::wire::{self, Schema};
use pinion_schemas::{AbortReason, Epoch, Micros, WorkerId};
use tokio::time::{Instant, sleep_until};

use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::owners::Owners;

/// Silence after which the owner is asked whether it is there.
pub const QUIET: Duration = Duration::from_secs(1);
/// How long an owner may take to accept; accepting is only writing down.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an owner may take to answer a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// First silence after which a live owner gets the turn again; it doubles each time.
const SILENCE: Duration = Duration::from_secs(4);
/// Shortest and longest rest before the next submit, without jitter.
const REST: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// What every turn needs.
pub struct Reach {
    /// The bus.
    pub bus: Arc<dyn Bus>,
    /// Names on it.
    pub subjects: Subjects,
    /// Who owns what.
    pub owners: Arc<dyn Owners>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
}

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

/// How an action about the owner ended.
enum Link {
    Accepted(Epoch),
    Refused(Failed),
    Unreachable(String),
    Impossible(ApiError),
    Rested,
    Quiet,
    Alive(Epoch),
}

/// A turn on its way. Drop it before its end, and it is cancelled.
pub struct Turn {
    reach: Arc<Reach>,
    /// What is submitted; its `answer_so_far` is what the client has.
    submit: Submit,
    stream: Subscription,
    link: BoxFuture<'static, Link>,
    /// The owner asked last.
    owner: Option<WorkerId>,
    /// Epoch of the owner that accepted.
    accepted: Option<Epoch>,
    /// Epoch in the last probe's answer.
    probed: Option<Epoch>,
    /// Chunks of attempts below this are of the past.
    attempt: u32,
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
        timeout: Duration,
        patience: Duration,
    ) -> Result<Self, ApiError> {
        let subject = reach.subjects.stream(submit.request);
        let stream = reach.bus.subscribe(subject.as_str(), None).await.map_err(|error| {
            ApiError::unavailable("bus-down", format!("the message bus is not reachable ({error}): try again"), 1)
        })?;
        subject.as_str().clone_into(&mut submit.stream);
        let now = Instant::now();
        Ok(Self {
            reach,
            submit,
            stream,
            link: async { Link::Rested }.boxed(),
            owner: None,
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
            let until = if self.accepted.is_some() { self.deadline } else { self.patience };
            let event = tokio::select! {
                biased;
                message = self.stream.next() => match message {
                    Some(message) => self.on_stream(&message.payload),
                    None => Some(Event::Failed(ApiError::unavailable("bus-down", "the message bus was closed", 1))),
                },
                link = &mut self.link => self.on_link(link),
                () = sleep_until(until) => Some(Event::Failed(self.too_late())),
            };
            match event {
                Some(Event::Done(end)) => return self.done(end),
                Some(event) => return event,
                None => {}
            }
        }
    }

    // ---- the stream ----

    fn on_stream(&mut self, payload: &[u8]) -> Option<Event> {
        let event = match wire::schema_of(payload) {
            Some(Chunk::ID) => wire::decode::<Chunk>(payload).map(|chunk| self.on_chunk(&chunk)),
            Some(Completed::ID) => wire::decode::<Completed>(payload).map(|end| self.on_completed(end)),
            Some(Failed::ID) => wire::decode::<Failed>(payload).map(|failed| self.on_failed(&failed)),
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
            return Some(Event::Failed(ApiError::new(StatusCode::BAD_GATEWAY, "answer-changed", message)));
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
        Some(Event::Failed(ApiError::failed(failed.reason, failed.retry_after_millis)))
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
                    // A new owner counts its attempts anew; offsets and the check of the end keep the stream right.
                    self.attempt = 0;
                }
                self.fails = 0;
                self.heard = Instant::now();
                self.link = wait_for_quiet(self.heard);
            }
            Link::Refused(failed) => return self.on_failed(&failed),
            Link::Unreachable(why) => self.look_again(&why),
            Link::Impossible(error) => return Some(Event::Failed(error)),
            Link::Rested => self.submit(),
            Link::Quiet if self.heard.elapsed() < QUIET => self.link = wait_for_quiet(self.heard),
            Link::Quiet => self.probe(),
            Link::Alive(epoch) => {
                if self.probed.replace(epoch).is_some_and(|before| before != epoch) {
                    self.look_again("another epoch answers");
                } else if self.heard.elapsed() >= self.silence {
                    self.silence *= 2;
                    self.submit();
                } else {
                    self.link = wait_for_quiet(Instant::now());
                }
            }
        }
        None
    }

    fn sign_of_life(&mut self) {
        self.heard = Instant::now();
        self.silence = SILENCE;
        // Who streams has accepted, even if the answer that says so was lost.
        self.accepted.get_or_insert_default();
    }

    /// Gives the turn to the owner as known.
    fn submit(&mut self) {
        self.owner = self.reach.owners.owner(&self.submit.session);
        let Some(owner) = self.owner.clone() else {
            // Nobody is known: the first look, or no node holds the shard now.
            self.look_again("no control node owns this session");
            return;
        };
        self.submits += 1;
        if self.submits > 1 {
            self.reach.metrics.resubmits.fetch_add(1, Ordering::Relaxed);
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.submit.time_left = Micros(u64::try_from(left.as_micros()).unwrap_or(u64::MAX));
        let subject = self.reach.subjects.worker(Kind::Router, &owner, "submit");
        let encoded = wire::encode(&self.submit);
        let bus = Arc::clone(&self.reach.bus);
        self.link = async move {
            let payload = match encoded {
                Ok(payload) => Bytes::from(payload),
                Err(error) => return Link::Impossible(too_large(&error.to_string())),
            };
            let asked = bus.request(subject.as_str(), Headers::new(), payload, SUBMIT_TIMEOUT.min(left));
            match asked.await {
                Ok(reply) => read_reply(&reply.payload),
                Err(error @ BusError::TooLarge { .. }) => Link::Impossible(too_large(&error.to_string())),
                Err(error) => Link::Unreachable(error.to_string()),
            }
        }
        .boxed();
    }

    /// Finds the owner anew, rests with jitter, and submits. The first time ever there is nothing to rest from.
    fn look_again(&mut self, why: &str) {
        let first = self.submits == 0 && self.fails == 0;
        if !first {
            tracing::debug!(request = %self.submit.request, why, "looking for the owner again");
        }
        let rest = if first { Duration::ZERO } else { self.rest() };
        self.fails += 1;
        self.probed = None;
        let (reach, session) = (Arc::clone(&self.reach), self.submit.session.clone());
        self.link = async move {
            tokio::time::sleep(rest).await;
            if let Err(error) = reach.owners.refresh(&session).await {
                tracing::debug!(%error, "the owner could not be looked up");
            }
            Link::Rested
        }
        .boxed();
    }

    /// Doubling, between half and all of it by bits of the request's random id, so that turns do not march in step.
    fn rest(&self) -> Duration {
        let whole = REST.0.saturating_mul(1 << self.fails.min(10)).min(REST.1);
        let bits = (self.submit.request.0 >> (self.fails % 8 * 8)) as u8;
        whole / 2 + whole / 2 * u32::from(bits) / 255
    }

    fn probe(&mut self) {
        let Some(owner) = &self.owner else {
            self.look_again("nobody to probe");
            return;
        };
        let subject = self.reach.subjects.worker(Kind::Router, owner, "probe");
        let probe = Probe {
            nonce: self.submit.request.0 as u64,
        };
        let encoded = wire::encode(&probe);
        let bus = Arc::clone(&self.reach.bus);
        self.link = async move {
            let payload = Bytes::from(encoded.unwrap_or_default());
            let asked = bus.request(subject.as_str(), Headers::new(), payload, PROBE_TIMEOUT);
            match asked.await.map(|reply| wire::decode::<ProbeAck>(&reply.payload)) {
                Ok(Ok(ack)) => Link::Alive(ack.epoch),
                Ok(Err(error)) => Link::Unreachable(error.to_string()),
                Err(error) => Link::Unreachable(error.to_string()),
            }
        }
        .boxed();
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
        ApiError::unavailable("no-control", "no control node accepts this session now: try again", 1)
    }
}

impl Drop for Turn {
    /// The client has gone, or the deadline has passed: say so at once. If the owner does not hear it, its own
    /// deadline ends the turn.
    fn drop(&mut self) {
        let (false, Some(owner)) = (self.over, self.owner.clone()) else {
            return;
        };
        let cancel = Cancel {
            request: self.submit.request,
            session: self.submit.session.clone(),
        };
        let subject = self.reach.subjects.worker(Kind::Router, &owner, "cancel");
        let bus = Arc::clone(&self.reach.bus);
        if let (Ok(payload), Ok(runtime)) = (wire::encode(&cancel), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move {
                if let Err(error) = bus.publish(subject.as_str(), Headers::new(), payload.into()).await {
                    tracing::warn!(%error, "a cancel was not sent");
                }
            });
        }
    }
}

fn read_reply(payload: &[u8]) -> Link {
    if wire::schema_of(payload) == Some(Failed::ID) {
        return match wire::decode::<Failed>(payload) {
            Ok(failed) => Link::Refused(failed),
            Err(error) => Link::Unreachable(error.to_string()),
        };
    }
    match wire::decode::<Accepted>(payload) {
        Ok(accepted) => Link::Accepted(accepted.epoch),
        Err(error) => Link::Unreachable(error.to_string()),
    }
}

fn wait_for_quiet(since: Instant) -> BoxFuture<'static, Link> {
    sleep_until(since + QUIET).map(|()| Link::Quiet).boxed()
}

fn too_large(why: &str) -> ApiError {
    let message = format!("the prompt does not fit one message ({why}): shorten it");
    ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message)
}
