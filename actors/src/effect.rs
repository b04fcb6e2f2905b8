//! What a role is given and what it asks for.

use bytes::Bytes;
use pinion_bus::{BusError, Message};
use pinion_core::plan::Source;
use pinion_core::session::Ranking;
use pinion_schemas::subject::Subject;
use pinion_schemas::wire::{self, Schema};
use pinion_schemas::{Epoch, Micros, RequestId, SessionId, WorkerId};
use pinion_transfer::{Grant, MoveError, PageRef};
use rkyv::api::high::HighSerializer;
use rkyv::rancor;
use rkyv::ser::allocator::ArenaHandle;
use rkyv::util::AlignedVec;
use std::time::Duration;

/// Something an actor is told.
#[derive(Debug)]
pub enum Input {
    /// A message of one of the role's subscriptions.
    Message(Message),
    /// The answer to [`Effect::Request`] number `token`.
    Reply {
        /// Which request.
        token: u64,
        /// What came of it.
        result: Result<Message, BusError>,
    },
    /// The answer to [`Effect::Get`] number `token`.
    Got {
        /// Which.
        token: u64,
        /// What stands there; nothing also if the store did not answer in time.
        value: Option<Bytes>,
    },
    /// How [`Effect::Send`] number `token` went.
    Sent {
        /// Which.
        token: u64,
        /// Whether all pages are there.
        result: Result<(), MoveError>,
    },
    /// From another actor of the same process.
    Local(Local),
    /// The time the role asked for has come.
    Tick,
}

/// Messages between actors of one control node; they never leave the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Local {
    /// Sessions to router: where to try this turn?
    RouteAsk(RouteAsk),
    /// Router to sessions.
    RouteAnswer(RouteAnswer),
    /// Router to sessions: this worker died, or a new process has its name.
    WorkerLost(WorkerId),
    /// Sessions to router: how an attempt at a worker went.
    Outcome {
        /// The D.
        worker: WorkerId,
        /// What happened there.
        what: Tried,
    },
    /// Lease keeper to sessions: the shard is this node's, in this epoch; `None` means that it is not any more.
    Shard(u16, Option<pinion_schemas::Epoch>),
}

/// How an attempt at a D went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tried {
    /// A turn was sent there.
    Assigned,
    /// It said no, and asks for this pause in milliseconds.
    Rejected(u32),
    /// It took the turn, and asks for this pause in milliseconds before the next.
    Hinted(u32),
    /// The attempt ended, well or not.
    Ended,
    /// It could not be reached.
    Unreachable,
}

/// See [`Local::RouteAsk`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteAsk {
    /// Name of the actor that asks.
    pub from: String,
    /// The session.
    pub session: SessionId,
    /// The turn.
    pub request: RequestId,
    /// Its attempt.
    pub attempt: u64,
    /// The session's pin.
    pub pin: Option<WorkerId>,
    /// Names of the context's full pages.
    pub chain: std::sync::Arc<Vec<pinion_schemas::PageHash>>,
    /// Tokens of the context.
    pub context_tokens: u64,
    /// Workers that failed this turn.
    pub avoid: Vec<WorkerId>,
    /// How often which D has rejected the session.
    pub rejects: Vec<(WorkerId, u32)>,
}

/// See [`Local::RouteAnswer`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteAnswer {
    /// The session.
    pub session: SessionId,
    /// The turn.
    pub request: RequestId,
    /// Its attempt.
    pub attempt: u64,
    /// Decode workers, best first, and what bounds the moves between them.
    pub decode: Ranking,
    /// Prefill workers, best first.
    pub prefill: Vec<Source>,
    /// Decode workers with pages of the session, the longest part first. One that drains is among them.
    pub holders: Vec<Source>,
}

/// Something an actor wants done.
#[derive(Debug)]
pub enum Effect {
    /// Send to whoever listens.
    Publish(String, Bytes),
    /// Send and wait for one answer; it comes back as [`Input::Reply`].
    Request {
        /// Number that comes back with the answer.
        token: u64,
        /// To whom.
        subject: String,
        /// What.
        payload: Bytes,
        /// How long to wait.
        deadline: Duration,
    },
    /// Send pages over the transfer plane; how it went comes back as [`Input::Sent`].
    Send {
        /// Number that comes back.
        token: u64,
        /// Where the peer takes pages.
        to: Vec<String>,
        /// What it granted.
        grant: Grant,
        /// The pages, each with its place in the grant.
        pages: Vec<(u32, PageRef)>,
        /// How long it may take.
        patience: Duration,
    },
    /// Answer a message.
    Respond(Message, Bytes),
    /// Listen to a subject from now on.
    Subscribe(String),
    /// Tell another actor of this process.
    Tell(String, Local),
    /// Write to the key-value bucket. Writes of one key keep their order, and one that a newer makes needless may be left out.
    /// What a writer of a later epoch has put there stays: values are JSON objects with an `epoch`.
    Put(String, Epoch, Bytes),
    /// Read from the key-value bucket; the value comes back as [`Input::Got`].
    Get {
        /// Number that comes back with it.
        token: u64,
        /// The key.
        key: String,
        /// How long to wait.
        deadline: Duration,
    },
}

/// A message that can be sent.
pub trait Body: Schema + for<'a> rkyv::Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, rancor::Error>> {}

impl<T> Body for T where T: Schema + for<'a> rkyv::Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, rancor::Error>> {}

/// The effects of one step, in the order in which they are to be performed.
#[derive(Debug, Default)]
pub struct Effects(pub Vec<Effect>);

impl Effects {
    /// Encodes and publishes. A message that cannot be encoded is a bug or too large for the bus; it is logged and dropped.
    pub fn publish(&mut self, subject: impl Into<String>, message: &impl Body) {
        if let Some(payload) = encoded(message) {
            self.0.push(Effect::Publish(subject.into(), payload));
        }
    }

    /// Encodes and answers.
    pub fn respond(&mut self, to: &Message, message: &impl Body) {
        if let Some(payload) = encoded(message) {
            self.0.push(Effect::Respond(to.clone(), payload));
        }
    }

    /// Encodes and asks. Returns whether it could be encoded.
    pub fn request(&mut self, token: u64, subject: impl Into<String>, message: &impl Body, deadline: Micros) -> bool {
        let Some(payload) = encoded(message) else { return false };
        let (subject, deadline) = (subject.into(), Duration::from_micros(deadline.0));
        self.0.push(Effect::Request {
            token,
            subject,
            payload,
            deadline,
        });
        true
    }

    /// Reads from the key-value bucket.
    pub fn get(&mut self, token: u64, key: String, deadline: Micros) {
        let deadline = Duration::from_micros(deadline.0);
        self.0.push(Effect::Get { token, key, deadline });
    }

    /// Answers in JSON, for people.
    pub fn respond_json(&mut self, to: &Message, value: &impl serde::Serialize) {
        match serde_json::to_vec(value) {
            Ok(text) => self.0.push(Effect::Respond(to.clone(), text.into())),
            Err(error) => tracing::error!(%error, "a view cannot be written as JSON"),
        }
    }

    /// Publishes JSON, for people.
    pub fn event(&mut self, subject: &Subject, value: &impl serde::Serialize) {
        match serde_json::to_vec(value) {
            Ok(text) => self.0.push(Effect::Publish(subject.as_str().to_owned(), text.into())),
            Err(error) => tracing::error!(%error, "an event cannot be written as JSON"),
        }
    }

    /// Tells another actor.
    pub fn tell(&mut self, to: impl Into<String>, local: Local) {
        self.0.push(Effect::Tell(to.into(), local));
    }
}

fn encoded<T: Body>(message: &T) -> Option<Bytes> {
    match wire::encode(message) {
        Ok(bytes) => Some(bytes.into()),
        Err(error) => {
            tracing::error!(schema = T::NAME, %error, "message not sent");
            None
        }
    }
}

/// An actor's own code: synchronous, total, and without any I/O of its own.
pub trait Role: Send + 'static {
    /// Called once, before anything else: what to subscribe to.
    fn start(&mut self, now: Micros, out: &mut Effects);
    /// Tells the role how to wake itself from another thread; called once, before the start.
    fn wake_with(&mut self, _wake: crate::engine::Wake) {}
    /// Takes one input.
    fn handle(&mut self, now: Micros, input: Input, out: &mut Effects);
    /// When [`Input::Tick`] is due at the latest.
    fn next_deadline(&self) -> Option<Micros>;
}
