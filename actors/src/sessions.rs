//! The sessions role: all sessions of the shards this control node owns, each a [`pinion_core::session::Session`].
//!
//! It turns `Submit` and what workers report into facts, and the machine's actions into messages. What happens to a turn is
//! decided in the machine; here is only who is told how.

mod acts;
mod answers;
mod reports;
mod seed;
mod view;

use crate::effect::{Effect, Effects, Input, Local, Role, RouteAnswer};
use answers::Answers;
use pinion_bus::Message;
use pinion_core::plan::{Costs, Source};
use pinion_core::session::{self, Fact, Outcome, Session, Snapshot, TurnFact};
use pinion_schemas::messages::{
    Accepted, Cancel, Chunk, Completed, Failed, LegFailed, Permit, PermitExpired, PermitQueued, Probe, ProbeAck,
    Reject, SeedDone, Started, Submit,
};
use pinion_schemas::shard::shard_of;
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{
    AbortReason, BackupTargets, ChainHasher, ClusterId, Epoch, Micros, PageHash, RequestId, SessionId, WorkerId,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use view::Said;

/// Name of the router's actor in the process.
pub const ROUTER: &str = "router";
/// Name of this actor in the process.
pub const SESSIONS: &str = "sessions";
/// Sessions held; beyond it the one idle longest is dropped, and is rebuilt from what workers hold when it comes back.
const SESSIONS_MAX: usize = 200_000;
/// How long a worker may take to answer `Run` or `Seed`: it does so at once or is in trouble (design §4, 2 s for a dead partner).
const ANSWER_PATIENCE: Micros = Micros::from_millis(1_500);
/// How long the store may take to say what it has of a session; after that it goes on with what workers hold.
const STORE_PATIENCE: Micros = Micros::from_secs(1);
/// How often the gateway of a running turn is asked whether it is there.
const CLIENT_LOOK: Micros = Micros::from_secs(5);
/// How long it has to be away for its turns to be given up: longer than a connection takes to come back.
const CLIENT_MISSES_MAX: u32 = 3;
/// Shortest advice to a client whose turn failed.
const RETRY_AFTER_MILLIS: u32 = 1_000;

/// What the role is.
#[derive(Clone, Debug)]
pub struct SessionsConfig {
    /// The cluster.
    pub cluster: ClusterId,
    /// The control node.
    pub control: WorkerId,
    /// What moving and computing costs there.
    pub costs: Costs,
    /// Which life of the node this is.
    pub birth: Epoch,
    /// Where pages are backed up.
    pub backups: BackupTargets,
}

struct Entry {
    machine: Session,
    last_used: Micros,
    /// Turns that ended here.
    turns: u32,
    /// Turns that came before the snapshot of the session's last owner was read.
    opening: Option<Vec<session::Turn>>,
    /// When it is looked at again; its machine may have nothing to do then.
    due: Option<Micros>,
    /// The last prefill worker that had a seed of it.
    seeded_by: Option<WorkerId>,
}

/// What a turn carries while it runs.
struct Turn {
    submit: Submit,
    deadline: Micros,
    chain: Arc<Vec<PageHash>>,
    answer: Vec<u32>,
    /// Prefill workers, and decode workers that have pages of the session, best first.
    prefill: Vec<Source>,
    holders: Vec<Source>,
    /// Those of them that failed this turn.
    bad_sources: Vec<WorkerId>,
    /// The one that sends the pages, while it does.
    seeding_on: Option<(Kind, WorkerId)>,
    /// The last one that did.
    seeded_by: Option<WorkerId>,
    permit: Option<(Epoch, u32)>,
    /// The D that has the turn, and in which attempt: the router counts it as load until it is taken away here.
    asked: Option<(WorkerId, u64)>,
    /// The D's word that the turn is complete.
    end: Option<Completed>,
    /// Looks in a row at which nobody listened to the stream.
    unheard: u32,
}

enum Asked {
    /// Whether anybody listens to the turn's stream.
    Client,
    Run {
        worker: WorkerId,
    },
    Seed {
        worker: WorkerId,
    },
}

struct Pending {
    request: RequestId,
    attempt: u64,
    session: SessionId,
    asked: Asked,
}

/// The role.
pub struct Sessions {
    config: SessionsConfig,
    subjects: Subjects,
    notify: String,
    owned: BTreeMap<u16, Epoch>,
    held: BTreeMap<SessionId, Entry>,
    idle: BTreeSet<(Micros, SessionId)>,
    due: BTreeSet<(Micros, SessionId)>,
    turns: BTreeMap<RequestId, Turn>,
    pending: BTreeMap<u64, Pending>,
    /// Sessions whose snapshot is being read.
    opening: BTreeMap<u64, SessionId>,
    completed: Answers,
    next_token: u64,
    next_look: Micros,
}

impl Sessions {
    /// The role of one control node; shards come by [`Local::Shard`].
    pub fn new(config: SessionsConfig) -> Self {
        let subjects = Subjects::new(&config.cluster);
        let notify = subjects
            .worker(Kind::Router, &config.control, "notify")
            .as_str()
            .to_owned();
        Self {
            config,
            subjects,
            notify,
            owned: BTreeMap::new(),
            held: BTreeMap::new(),
            idle: BTreeSet::new(),
            due: BTreeSet::new(),
            turns: BTreeMap::new(),
            pending: BTreeMap::new(),
            opening: BTreeMap::new(),
            completed: Answers::default(),
            next_token: 0,
            next_look: Micros::ZERO,
        }
    }

    fn on_message(&mut self, now: Micros, message: &Message, out: &mut Effects) {
        if message.subject.ends_with(".inspect") {
            return self.on_inspect(message, out);
        }
        crate::dispatch!(message, {
            Submit(submit) => self.on_submit(now, submit, message, out),
            Cancel(cancel) => self.on_cancel(now, &cancel, out),
            Chunk(c) => self.fact(now, c.request, c.attempt, TurnFact::Progress { offset: c.offset, tokens: c.tokens }, out),
            Completed(done) => self.on_completed(now, done, out),
            Started(s) => self.on_started(now, &s, out),
            Permit(p) => self.on_permit(now, &p, out),
            PermitQueued(q) => self.fact(now, q.request, q.attempt, TurnFact::Queued, out),
            PermitExpired(p) => self.on_permit_expired(now, &p, out),
            Reject(r) => self.on_reject(now, &r, out),
            LegFailed(f) => self.on_leg_failed(now, &f, out),
            SeedDone(done) => self.on_seed_done(now, &done, out),
            Probe(p) => out.respond(message, &ProbeAck { nonce: p.nonce, epoch: self.config.birth }),
        });
    }

    fn on_submit(&mut self, now: Micros, submit: Submit, message: &Message, out: &mut Effects) {
        let request = submit.request;
        let Some(epoch) = self.owned.get(&shard_of(&submit.session)).copied() else {
            let failed = Failed {
                request,
                reason: AbortReason::Superseded,
                retry_after_millis: 100,
            };
            return out.respond(message, &failed);
        };
        let session = submit.session.clone();
        if !self.held.contains_key(&session) {
            self.open(now, &session, epoch, out);
        }
        if let Some(entry) = self.held.get_mut(&session) {
            self.idle.remove(&(entry.last_used, session.clone()));
            entry.last_used = now;
        }
        out.respond(
            message,
            &Accepted {
                request,
                epoch,
                waiting: 0,
            },
        );
        if self.turns.contains_key(&request) {
            return;
        }
        let namespace = [submit.tenant.as_deref()];
        let chain = ChainHasher::new(self.config.costs.page_tokens, &namespace).push(&submit.prompt);
        let deadline = now.plus(submit.time_left);
        let already_sent = submit.answer_so_far.len() as u32;
        let turn = session::Turn {
            request,
            class: submit.class,
            deadline,
            prompt_tokens: submit.prompt.len() as u32,
            prompt_end: chain.last().map(|end| (chain.len() as u32, *end)),
            answer_max: submit.max_new_tokens,
            already_sent,
        };
        let repeated = self
            .held
            .get(&session)
            .is_some_and(|e| e.machine.ended(request).is_some());
        let answer = submit.answer_so_far.clone();
        if self.turns.is_empty() {
            self.next_look = now.plus(CLIENT_LOOK);
        }
        self.turns.insert(
            request,
            Turn {
                submit,
                deadline,
                chain: Arc::new(chain),
                answer,
                prefill: Vec::new(),
                holders: Vec::new(),
                bad_sources: Vec::new(),
                seeding_on: None,
                seeded_by: None,
                permit: None,
                asked: None,
                end: None,
                unheard: 0,
            },
        );
        let what = if repeated { "asked-again" } else { "accepted" };
        let request = Some(request);
        self.say(
            now,
            &session,
            Said {
                request,
                ..Said::of(what)
            },
            out,
        );
        self.arrived(now, &session, turn, out);
    }

    /// Begins to hold a session: asks the store for what its last owner left there.
    fn open(&mut self, now: Micros, session: &SessionId, epoch: Epoch, out: &mut Effects) {
        while self.held.len() >= SESSIONS_MAX {
            let Some((_, longest_idle)) = self.idle.first().cloned() else {
                break;
            };
            self.forget(&longest_idle);
        }
        let entry = Entry {
            machine: Session::new(epoch),
            last_used: now,
            turns: 0,
            opening: Some(Vec::new()),
            due: None,
            seeded_by: None,
        };
        self.held.insert(session.clone(), entry);
        self.next_token += 1;
        self.opening.insert(self.next_token, session.clone());
        out.get(self.next_token, snapshot_key(session), STORE_PATIENCE);
    }

    /// The store has answered, or did not in time: what it has is only where to look first (design §7).
    fn opened(&mut self, now: Micros, token: u64, value: Option<&[u8]>, out: &mut Effects) {
        let Some(session) = self.opening.remove(&token) else {
            return;
        };
        let epoch = self.epoch_of(&session);
        let Some(entry) = self.held.get_mut(&session) else {
            return;
        };
        let Some(turns) = entry.opening.take() else { return };
        let snapshot: Option<Snapshot> = value.and_then(|text| serde_json::from_slice(text).ok());
        if let Some(snapshot) = snapshot {
            entry.machine = Session::restore(epoch, &snapshot);
            let pin = entry.machine.pin().cloned();
            let worker = pin.as_ref();
            self.say(
                now,
                &session,
                Said {
                    worker,
                    ..Said::of("restored")
                },
                out,
            );
        }
        for turn in turns {
            self.step(now, &session, Fact::Arrived(turn), out);
        }
    }

    fn arrived(&mut self, now: Micros, session: &SessionId, turn: session::Turn, out: &mut Effects) {
        let Some(entry) = self.held.get_mut(session) else {
            return;
        };
        match &mut entry.opening {
            None => self.step(now, session, Fact::Arrived(turn), out),
            Some(turns) if turns.len() < session::QUEUED_TURNS_MAX => turns.push(turn),
            Some(_) => self.finish(now, session, turn.request, Outcome::Refused, out),
        }
    }

    fn on_cancel(&mut self, now: Micros, cancel: &Cancel, out: &mut Effects) {
        let (session, request) = (&cancel.session, cancel.request);
        let opening = self.held.get_mut(session).and_then(|e| e.opening.as_mut());
        match opening {
            None => self.step(now, session, Fact::Cancelled(request), out),
            Some(turns) => {
                turns.retain(|t| t.request != request);
                self.finish(now, session, request, Outcome::Cancelled, out);
            }
        }
    }

    /// Lets go of a session that has another owner now.
    fn close(&mut self, now: Micros, session: &SessionId, newer: Epoch, out: &mut Effects) {
        self.step(now, session, Fact::Superseded(newer), out);
        let Some(entry) = self.held.get_mut(session) else {
            return;
        };
        for turn in entry.opening.take().unwrap_or_default() {
            let outcome = Outcome::Failed(AbortReason::Superseded);
            self.finish(now, session, turn.request, outcome, out);
        }
        self.forget(session);
    }

    /// Drops all that is kept of a session here.
    fn forget(&mut self, session: &SessionId) {
        if let Some(entry) = self.held.remove(session) {
            self.idle.remove(&(entry.last_used, session.clone()));
            if let Some(due) = entry.due {
                self.due.remove(&(due, session.clone()));
            }
        }
    }

    fn epoch_of(&self, session: &SessionId) -> Epoch {
        self.owned.get(&shard_of(session)).copied().unwrap_or_default()
    }

    fn fact(&mut self, now: Micros, request: RequestId, attempt: u64, fact: TurnFact, out: &mut Effects) {
        let Some(session) = self.turns.get(&request).map(|t| t.submit.session.clone()) else {
            return;
        };
        self.step(now, &session, Fact::Turn { request, attempt, fact }, out);
    }

    /// What a turn carries, if the attempt is its present one: what is said of an older one changes nothing (I7).
    fn present(&mut self, request: RequestId, attempt: u64) -> Option<&mut Turn> {
        let turn = self.turns.get_mut(&request)?;
        let entry = self.held.get(&turn.submit.session)?;
        (entry.machine.attempt(request) == Some(attempt)).then_some(turn)
    }

    fn on_local(&mut self, now: Micros, local: Local, out: &mut Effects) {
        match local {
            Local::RouteAnswer(RouteAnswer {
                request,
                attempt,
                decode,
                prefill,
                holders,
                ..
            }) => {
                if let Some(turn) = self.turns.get_mut(&request) {
                    (turn.prefill, turn.holders) = (prefill, holders);
                }
                self.fact(now, request, attempt, TurnFact::Ranked(decode), out);
            }
            Local::WorkerLost(worker) => self.on_worker_lost(now, &worker, out),
            Local::Shard(shard, Some(epoch)) => {
                self.owned.insert(shard, epoch);
            }
            Local::Shard(shard, None) => {
                let Some(epoch) = self.owned.remove(&shard) else { return };
                let lost: Vec<SessionId> = self.held.keys().filter(|s| shard_of(s) == shard).cloned().collect();
                for session in lost {
                    self.close(now, &session, epoch.next(), out);
                }
            }
            Local::RouteAsk(_) | Local::Outcome { .. } => {}
        }
    }

    fn on_worker_lost(&mut self, now: Micros, worker: &WorkerId, out: &mut Effects) {
        let running: Vec<(RequestId, SessionId, bool)> = self
            .turns
            .iter()
            .map(|(request, t)| {
                (
                    *request,
                    t.submit.session.clone(),
                    t.seeding_on.as_ref().is_some_and(|(_, source)| source == worker),
                )
            })
            .collect();
        for (request, session, seeding) in running {
            if seeding {
                let attempt = self.held.get(&session).and_then(|e| e.machine.attempt(request));
                if let Some(attempt) = attempt {
                    self.source_lost(now, request, attempt, out);
                }
            }
            self.step(now, &session, Fact::WorkerLost(worker.clone()), out);
        }
    }

    fn step(&mut self, now: Micros, session: &SessionId, fact: Fact, out: &mut Effects) {
        let Some(entry) = self.held.get_mut(session) else {
            return;
        };
        for action in entry.machine.step(now, fact) {
            self.perform(now, session, action, out);
        }
        self.schedule(session);
    }

    /// Sees to it that the session is looked at in time. A time that has moved on is left as it is: that happens with each
    /// chunk, and a look too early costs nothing.
    fn schedule(&mut self, session: &SessionId) {
        let Some(entry) = self.held.get_mut(session) else {
            return;
        };
        let Some(due) = entry.machine.next_deadline() else {
            return;
        };
        if entry.due.is_none_or(|at| due < at) {
            if let Some(later) = entry.due.replace(due) {
                self.due.remove(&(later, session.clone()));
            }
            self.due.insert((due, session.clone()));
        }
    }
}

/// Where the snapshot of a session is kept.
fn snapshot_key(session: &SessionId) -> String {
    format!("session.{}", session.token())
}

impl Role for Sessions {
    fn start(&mut self, _now: Micros, out: &mut Effects) {
        for subject in [
            self.subjects.worker(Kind::Router, &self.config.control, "*"),
            self.subjects.all(Kind::Session, "inspect"),
        ] {
            out.0.push(Effect::Subscribe(subject.as_str().to_owned()));
        }
    }

    fn handle(&mut self, now: Micros, input: Input, out: &mut Effects) {
        match input {
            Input::Message(message) => self.on_message(now, &message, out),
            Input::Reply { token, result } => self.on_reply(now, token, result, out),
            Input::Local(local) => self.on_local(now, local, out),
            Input::Got { token, value } => self.opened(now, token, value.as_deref(), out),
            Input::Sent { .. } => {}
            Input::Tick => {
                self.look_for_clients(now, out);
                while self.due.first().is_some_and(|(at, _)| *at <= now) {
                    let Some((_, session)) = self.due.pop_first() else {
                        return;
                    };
                    if let Some(entry) = self.held.get_mut(&session) {
                        entry.due = None;
                    }
                    self.step(now, &session, Fact::Tick, out);
                }
            }
        }
    }

    fn next_deadline(&self) -> Option<Micros> {
        let look = (!self.turns.is_empty()).then_some(self.next_look);
        self.due.first().map(|(at, _)| *at).into_iter().chain(look).min()
    }
}
