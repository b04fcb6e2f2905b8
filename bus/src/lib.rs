//! How Pinion's roles talk: publish, request with deadline, subscribe, key-value.
//!
//! One trait, [`Bus`], in two worlds: [`nats::NatsBus`] on a real NATS server and real time, [`sim::SimBus`] in
//! memory on tokio's (usually paused) time with seeded faults. Both have core-NATS semantics: at most once, no answer
//! kept for a subscriber that was not there, the newest message dropped when a subscriber is slow. Never use sockets
//! under paused time.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::{Stream, StreamExt};

pub mod nats;
pub mod sim;
pub mod subject;

/// Headers of one message: schema, version, deadline, epoch and trace context are five; three times that is a
/// mistake.
pub const HEADERS_MAX: usize = 16;
/// Messages a subscription holds before the newest is dropped. Small enough that a stuck consumer costs megabytes,
/// not gigabytes; large enough for a burst of one second of events from a node.
pub const SUBSCRIPTION_CAPACITY: usize = 4_096;
/// Keys one [`Bus::kv_keys`] may return: the store is for rarely written truth (placements, configuration), not for
/// events.
pub const KV_KEYS_MAX: usize = 65_536;

/// Headers in the order they were added; names are case-sensitive, so use constants.
///
/// Over NATS the order of different names is not kept: they arrive sorted by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(pub Vec<(String, String)>);

impl Headers {
    /// No headers.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// These headers and one more.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.0.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The first value under this exact name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// What the headers add to a message on the wire: the `NATS/1.0` line, each `name: value` line, the empty line.
    pub fn wire_bytes(&self) -> usize {
        if self.0.is_empty() {
            0
        } else {
            12 + self
                .0
                .iter()
                .map(|(name, value)| name.len() + value.len() + 4)
                .sum::<usize>()
        }
    }
}

/// One message as a subscriber or a requester gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The subject it was published under.
    pub subject: String,
    /// Where the answer goes, if one is wanted; see [`Bus::respond`].
    pub reply: Option<String>,
    /// Its headers.
    pub headers: Headers,
    /// Its body, as it arrived: at any alignment.
    pub payload: Bytes,
}

/// A live key with its value and the revision that a compare-and-set must name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEntry {
    /// The key.
    pub key: String,
    /// The value.
    pub value: Bytes,
    /// Revision of this value; revisions grow over the whole bucket, except when a crash loses acknowledged writes.
    pub revision: u64,
}

/// Why the bus did not do it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BusError {
    /// Nobody subscribes to the subject of a request; known at once, the first sign that a role is gone.
    #[error("no responders on {subject}")]
    NoResponders {
        /// The subject that was asked.
        subject: String,
    },
    /// The deadline passed. Whether the other side acted is unknown.
    #[error("timed out after {after:?}")]
    TimedOut {
        /// How long was waited.
        after: Duration,
    },
    /// The connection is down, or went down while this was in flight. Whether the other side acted is unknown.
    #[error("disconnected")]
    Disconnected,
    /// Headers and payload exceed what the server takes; nothing was sent.
    #[error("message of {got} bytes, at most {max} allowed")]
    TooLarge {
        /// Bytes of headers and payload.
        got: usize,
        /// The limit.
        max: usize,
    },
    /// Compare-and-set lost: the key's last revision is another one (0 expected = "does not exist").
    #[error("key {key} is not at revision {expected}")]
    WrongRevision {
        /// The key.
        key: String,
        /// The revision the caller named.
        expected: u64,
    },
    /// There is no key-value store here: not asked for, server older than 2.10, `JetStream` off, or no quorum.
    #[error("key-value store unavailable: {reason}")]
    KvUnavailable {
        /// Why, for people.
        reason: String,
    },
    /// Not a subject, pattern, queue group or key; nothing was sent.
    #[error("bad subject or key {subject:?}")]
    BadSubject {
        /// What was given.
        subject: String,
    },
    /// The message came without a reply subject, so it cannot be answered.
    #[error("message on {subject} wants no answer")]
    NoReply {
        /// The subject of the message.
        subject: String,
    },
    /// Too many headers, or one with a line break or a colon in its name; nothing was sent.
    #[error("bad headers")]
    BadHeaders,
    /// More keys than [`KV_KEYS_MAX`] under the prefix.
    #[error("more than {max} keys")]
    TooManyKeys {
        /// The limit.
        max: usize,
    },
    /// Anything else, for people; never match on the text.
    #[error("bus: {0}")]
    Other(String),
}

/// Messages of one subscription, at most its capacity of them waiting. Dropping it unsubscribes.
pub struct Subscription {
    stream: Pin<Box<dyn Stream<Item = Message> + Send>>,
}

impl Subscription {
    /// Wraps the stream of an implementation.
    pub fn new(stream: impl Stream<Item = Message> + Send + 'static) -> Self {
        Self {
            stream: Box::pin(stream),
        }
    }

    /// The next message; `None` when the bus is closed for good. Cancel-safe.
    pub async fn next(&mut self) -> Option<Message> {
        self.stream.next().await
    }
}

impl Stream for Subscription {
    type Item = Message;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Message>> {
        self.stream.as_mut().poll_next(cx)
    }
}

/// The message bus. All calls return within their deadline (requests) or the configured timeout (everything else).
#[async_trait]
pub trait Bus: Send + Sync {
    /// Sends to whoever subscribes now. `Ok` says it was taken for sending, not that anyone got it.
    async fn publish(&self, subject: &str, headers: Headers, payload: Bytes) -> Result<(), BusError>;

    /// Sends and waits for the first answer, at most `deadline`.
    ///
    /// # Errors
    /// [`BusError::NoResponders`] at once when nobody subscribes; [`BusError::Disconnected`] as soon as the
    /// connection is known to be lost; [`BusError::TimedOut`] at the deadline. After the last two the other side may
    /// have acted.
    async fn request(
        &self,
        subject: &str,
        headers: Headers,
        payload: Bytes,
        deadline: Duration,
    ) -> Result<Message, BusError>;

    /// Listens on a pattern (`*` one token, `>` the rest); of the members of one queue group one gets each message.
    /// Calls made later through the same bus find it registered; other connections a moment later.
    async fn subscribe(&self, pattern: &str, queue: Option<String>) -> Result<Subscription, BusError>;

    /// Answers a message that came as a request.
    async fn respond(&self, to: &Message, headers: Headers, payload: Bytes) -> Result<(), BusError> {
        match &to.reply {
            Some(reply) => self.publish(reply, headers, payload).await,
            None => Err(BusError::NoReply {
                subject: to.subject.clone(),
            }),
        }
    }

    /// The live value of a key. In a replicated store it may be a moment old: compare-and-set is what guards.
    async fn kv_get(&self, key: &str) -> Result<Option<KvEntry>, BusError>;

    /// Writes a key that does not exist (or was deleted); else [`BusError::WrongRevision`] with 0 expected.
    async fn kv_create(&self, key: &str, value: Bytes) -> Result<u64, BusError>;

    /// Replaces the value if the key's last revision is `expected`; returns the new one. Acknowledged is not yet
    /// durable: a server crash may lose it, so what is stored must be a copy of a truth that its owners can prove
    /// again.
    async fn kv_update(&self, key: &str, value: Bytes, expected: u64) -> Result<u64, BusError>;

    /// Deletes the key, if `expected` is given only at that revision. Deleting what does not exist is fine.
    async fn kv_delete(&self, key: &str, expected: Option<u64>) -> Result<(), BusError>;

    /// The live keys that start with `prefix` and their revisions, sorted by key. Not a snapshot of one moment.
    async fn kv_keys(&self, prefix: &str) -> Result<Vec<(String, u64)>, BusError>;
}

/// The checks every implementation makes before it sends.
pub(crate) fn check_message(subject: &str, headers: &Headers, payload: &Bytes, max: usize) -> Result<(), BusError> {
    if !subject::is_subject(subject) {
        return Err(BusError::BadSubject {
            subject: subject.to_owned(),
        });
    }
    let bad_name = |name: &str| name.is_empty() || name.bytes().any(|b| !b.is_ascii_graphic() || b == b':');
    let bad_value = |value: &str| value.contains(['\r', '\n']) || value.trim() != value;
    if headers.0.len() > HEADERS_MAX || headers.0.iter().any(|(name, value)| bad_name(name) || bad_value(value)) {
        return Err(BusError::BadHeaders);
    }
    let got = headers.wire_bytes() + payload.len();
    if got > max {
        Err(BusError::TooLarge { got, max })
    } else {
        Ok(())
    }
}
