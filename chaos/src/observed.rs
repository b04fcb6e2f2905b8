//! What observers see: client streams, messages on the bus, writes to the store, pages that engines take, views of nodes.
//!
//! Everything comes as one sequence of [`Observed`], with the virtual time at which it was seen. Checkers and coverage read nothing
//! else. The same facts could be gathered from a real cluster: they are what passes on NATS, and what clients get.

use pinion_bus::Message;
use pinion_bus::sim::{Seen, What};
use pinion_gpu_agent::engine::sim::ContextHash;
use pinion_gpu_agent::world::expected;
use pinion_schemas::messages::{
    Abort, Completed, LegFailed, Pages, PagesAck, PagesEvicted, PagesStored, Permit, PermitExpired, PermitQueued,
    Reject, Run, Started,
};
use pinion_schemas::shard::Lease;
use pinion_schemas::subject::{Kind, Parsed, parse};
use pinion_schemas::wire::{self, Schema};
use pinion_schemas::{ChainHasher, Epoch, Micros, PageHash, RequestId};
use serde::Deserialize;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::time::Instant;

/// What is right for a turn, computed without any engine.
#[derive(Debug)]
pub struct Right {
    /// Its answer.
    pub answer: Vec<u32>,
    /// Names of the full pages of context and answer.
    pub names: Vec<PageHash>,
    /// What each of them holds.
    pub contents: Vec<u64>,
}

impl Right {
    /// For `prompt` and `n` more tokens, in pages of `page` tokens.
    pub fn of(prompt: &[u32], n: u32, page: u32) -> Self {
        let answer = expected(prompt, n);
        let all = [prompt, &answer].concat();
        let mut hash = ContextHash::default();
        let pages = all.chunks_exact(page.max(1) as usize);
        let contents = pages.map(|page| {
            hash.extend(page);
            hash.0
        });
        Self {
            contents: contents.collect(),
            names: ChainHasher::new(page, &[None]).push(&all),
            answer,
        }
    }
}

/// How a turn ended for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// With the whole answer.
    Done(Vec<u32>),
    /// With an error of this code.
    Failed(&'static str),
    /// The client went away.
    Left,
}

/// A `Run`, as far as observers care.
#[derive(Clone, Debug)]
pub struct RunSeen {
    /// The turn.
    pub request: RequestId,
    /// Its attempt.
    pub attempt: u64,
    /// Its session.
    pub session: String,
    /// Epoch of its owner.
    pub epoch: Epoch,
    /// Tokens of context and longest answer.
    pub tokens: u64,
    /// Time left.
    pub time_left: Micros,
}

/// What a message says, as far as observers care.
#[derive(Clone, Debug)]
pub enum Body {
    /// To a D.
    Run(RunSeen),
    /// From a D.
    Started(RequestId, u64),
    /// From a D.
    Permit(RequestId, u64),
    /// From a D.
    Queued(RequestId, u64),
    /// From a D.
    Reject(Reject),
    /// From a D.
    PermitExpired(RequestId, u64),
    /// From a D.
    Completed(Box<Completed>),
    /// From a D or a P.
    LegFailed(LegFailed),
    /// To a D or a P.
    Abort(Abort),
    /// To a D: pages, by the permit's request and the epoch of the life that gave it.
    Pages(RequestId, Epoch),
    /// From a D: it took them.
    PagesAck(RequestId),
    /// Of a worker: pages it has now.
    Stored(Vec<PageHash>),
    /// Of a worker: pages it has no more.
    Evicted(Vec<PageHash>),
    /// What an owner, or a D of a backup, says of a session.
    Said(Said),
}

/// An event of a session.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Said {
    /// The session.
    #[serde(default)]
    pub session: String,
    /// The turn.
    #[serde(default)]
    pub request: Option<String>,
    /// In a word.
    #[serde(default)]
    pub what: String,
    /// Label of path or reason.
    #[serde(default)]
    pub detail: Option<String>,
    /// Label of the reason of a seed.
    #[serde(default)]
    pub why: Option<String>,
    /// Of a backup: what happened to it.
    #[serde(default)]
    pub event: String,
    /// Of a backup: on which P.
    #[serde(default)]
    pub prefill: String,
    /// Of a backup: how far it reaches.
    #[serde(default)]
    pub backup_tokens: u64,
    /// Of a backup: how far it lags.
    #[serde(default)]
    pub staleness: u64,
}

/// A reservation in a D's view.
#[derive(Clone, Debug)]
pub struct Held {
    /// Whose it is.
    pub request: String,
    /// Pages.
    pub pages: u64,
    /// Bytes that its seed moves; 0 for a running turn.
    pub bytes: u64,
    /// When it ends by itself, on the D's clock.
    pub deadline: Micros,
}

/// A D's own books.
#[derive(Clone, Debug)]
pub struct Ledger {
    /// The D.
    pub worker: String,
    /// Its clock when it was asked: what it says is of then or later.
    pub now: Micros,
    /// Pages of its pool.
    pub pool: u64,
    /// Pages it says are free.
    pub room: u64,
    /// Running turns.
    pub running: Vec<Held>,
    /// Promises.
    pub permits: Vec<Held>,
    /// Asks that wait.
    pub waiting: usize,
}

/// One thing that was seen.
#[derive(Clone, Debug)]
pub enum Observed {
    /// A client has sent a turn.
    Begun {
        /// Its id.
        request: RequestId,
        /// Its session.
        session: String,
        /// Number in the session, as the client counts.
        turn: u32,
        /// What it must be answered.
        right: Arc<Right>,
        /// Longest it may take.
        deadline: Micros,
    },
    /// A client got tokens.
    Tokens {
        /// Of which turn.
        request: RequestId,
        /// They.
        tokens: Vec<u32>,
    },
    /// A client's turn is over.
    Ended {
        /// Which.
        request: RequestId,
        /// How.
        end: End,
    },
    /// A message was sent, or has arrived.
    Heard {
        /// Whether it has arrived.
        arrived: bool,
        /// Endpoint that sent it.
        from: String,
        /// Whom its subject names: the worker it is for, or of which it is an event.
        to: String,
        /// What it says.
        body: Body,
    },
    /// A shard's lease was written.
    Leased {
        /// The shard.
        shard: u16,
        /// Its owner; empty: nobody.
        owner: String,
        /// In which epoch.
        epoch: Epoch,
    },
    /// A session's snapshot was written.
    Snapshot {
        /// The session, by its key.
        session: String,
        /// Epoch of who wrote it.
        epoch: Epoch,
        /// Turns committed.
        turns: u64,
    },
    /// The store has lost writes.
    StoreLost,
    /// A process died.
    Died(String),
    /// A process began, in this epoch.
    Born(String, Epoch),
    /// A fault began (`true`) or ended.
    Fault(bool, String),
    /// A node's link or process has been well since then; `None`: it is not.
    Well(String, Option<Micros>),
    /// An engine took a page of another node.
    Imported {
        /// Whose engine.
        worker: String,
        /// The page.
        name: PageHash,
        /// What is in it.
        content: u64,
    },
    /// An engine evicted a page that a running turn stands on.
    EvictedInUse {
        /// Whose engine.
        worker: String,
        /// The turn.
        request: RequestId,
    },
    /// A D showed its books.
    Ledger(Ledger),
    /// A router showed whom it believes alive.
    Alive {
        /// The control node.
        control: String,
        /// Workers, and whether each is alive to it.
        workers: Vec<(String, bool)>,
    },
    /// Nothing breaks any more.
    Calm,
    /// A node's last view, when nothing runs any more: what it still holds, in words; empty is at rest.
    Rest {
        /// The node.
        node: String,
        /// What is left.
        left: Vec<String>,
    },
    /// The run is over.
    Over,
}

type Sink = Box<dyn FnMut(Micros, &Observed) + Send>;

/// Where observers bring what they see. Clones are one.
#[derive(Clone)]
pub struct Observer {
    begun: Instant,
    sink: Arc<Mutex<Sink>>,
}

impl Observer {
    /// Hands everything on to `sink`.
    pub fn new(sink: impl FnMut(Micros, &Observed) + Send + 'static) -> Self {
        Self {
            begun: Instant::now(),
            sink: Arc::new(Mutex::new(Box::new(sink))),
        }
    }

    /// Time since it began.
    pub fn now(&self) -> Micros {
        Micros(self.begun.elapsed().as_micros() as u64)
    }

    /// Reports.
    #[expect(clippy::needless_pass_by_value, reason = "whoever saw it has no use for it any more")]
    pub fn see(&self, seen: Observed) {
        let now = self.now();
        (self.sink.lock().unwrap_or_else(PoisonError::into_inner))(now, &seen);
    }

    /// Reports what passes on a network, as far as anybody cares.
    pub fn tap(&self, seen: &Seen<'_>) {
        match seen {
            Seen::Message {
                what: what @ (What::Sent | What::Got),
                from,
                message,
                ..
            } => {
                let arrived = *what == What::Got;
                if let Some((to, body)) = read(message, arrived) {
                    let from = (*from).to_owned();
                    self.see(Observed::Heard {
                        arrived,
                        from,
                        to,
                        body,
                    });
                }
            }
            Seen::Message { .. } => {}
            Seen::Written { key, value, .. } => {
                if let Some(written) = value.and_then(|value| written(key, value)) {
                    self.see(written);
                }
            }
            Seen::Restart { .. } => self.see(Observed::StoreLost),
        }
    }
}

fn written(key: &str, value: &[u8]) -> Option<Observed> {
    #[derive(Deserialize)]
    struct Snapshot {
        epoch: Epoch,
        next_turn: u64,
    }
    if let Some(shard) = key.strip_prefix("shard.") {
        let Lease { owner, epoch } = serde_json::from_slice(value).ok()?;
        let shard = shard.parse().ok()?;
        return Some(Observed::Leased { shard, owner, epoch });
    }
    let session = key.strip_prefix("session.")?.to_owned();
    let Snapshot { epoch, next_turn } = serde_json::from_slice(value).ok()?;
    Some(Observed::Snapshot {
        session,
        epoch,
        turns: next_turn,
    })
}

/// A payload as this message, made a body.
macro_rules! as_ {
    ($message:ty, $payload:expr, |$m:ident| $body:expr) => {{
        let $m: $message = wire::decode($payload).ok()?;
        $body
    }};
}

/// What arrives matters only for what changes the one that gets it.
fn read(message: &Message, arrived: bool) -> Option<(String, Body)> {
    let to = parse(&message.subject);
    let payload = &message.payload[..];
    let worker = |to: &Option<Parsed<'_>>| to.as_ref().map(|to| to.id.to_owned()).unwrap_or_default();
    let id = wire::schema_of(payload);
    if arrived {
        let to = to.filter(|to| matches!(to.kind, Kind::Decode | Kind::Prefill) && to.verb.is_some())?;
        let body = match id? {
            Run::ID => Body::Run(run(payload)?),
            Abort::ID => Body::Abort(wire::decode(payload).ok()?),
            _ => return None,
        };
        return Some((to.id.to_owned(), body));
    }
    let Some(id) = id else {
        let to = to.filter(|to| to.kind == Kind::Session && to.verb.is_none())?;
        let said = serde_json::from_slice(payload).ok()?;
        return Some((to.id.to_owned(), Body::Said(said)));
    };
    let body = match id {
        Run::ID => Body::Run(run(payload)?),
        Started::ID => as_!(Started, payload, |m| Body::Started(m.request, m.attempt)),
        Permit::ID => as_!(Permit, payload, |m| Body::Permit(m.request, m.attempt)),
        PermitQueued::ID => as_!(PermitQueued, payload, |m| Body::Queued(m.request, m.attempt)),
        PermitExpired::ID => as_!(PermitExpired, payload, |m| Body::PermitExpired(m.request, m.attempt)),
        Reject::ID => as_!(Reject, payload, |m| Body::Reject(m)),
        Completed::ID => as_!(Completed, payload, |m| Body::Completed(Box::new(m))),
        LegFailed::ID => as_!(LegFailed, payload, |m| Body::LegFailed(m)),
        Abort::ID => as_!(Abort, payload, |m| Body::Abort(m)),
        Pages::ID => as_!(Pages, payload, |m| Body::Pages(m.request, m.epoch)),
        PagesAck::ID => as_!(PagesAck, payload, |m| Body::PagesAck(m.request)),
        PagesStored::ID => as_!(PagesStored, payload, |m| Body::Stored(m.pages)),
        PagesEvicted::ID => as_!(PagesEvicted, payload, |m| Body::Evicted(m.pages)),
        _ => return None,
    };
    Some((worker(&to), body))
}

fn run(payload: &[u8]) -> Option<RunSeen> {
    let m: Run = wire::decode(payload).ok()?;
    Some(RunSeen {
        request: m.request,
        attempt: m.attempt,
        session: m.session.as_str().to_owned(),
        epoch: m.epoch,
        tokens: m.tokens.len() as u64 + u64::from(m.max_new_tokens),
        time_left: m.time_left,
    })
}
