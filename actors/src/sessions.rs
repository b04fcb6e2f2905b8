//! The sessions role: all sessions of the shards this control node owns, each a [`pinion_core::session::Session`].
//!
//! It turns `Submit` and what workers report into facts, and the machine's actions into messages. What happens to a turn is
//! decided in the machine; here is only who is told how.

use crate::effect::{Effect, Effects, Input, Local, Role, RouteAnswer, RouteAsk, Tried};
use bytes::Bytes;
use pinion_bus::{BusError, Message};
use pinion_core::session::{self, Action, Commit, Fact, Outcome, Session, TurnFact};
use pinion_schemas::messages::{
    Abort, Accepted, Cancel, Chunk, Completed, Failed, LegFailed, Permit, PermitExpired, PermitQueued, Probe, ProbeAck,
    Reject, Run, Seed, SeedDone, Started, Submit,
};
use pinion_schemas::shard::shard_of;
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{
    AbortReason, ChainHasher, ClusterId, Epoch, Micros, PageHash, PermitId, RejectReason, RequestId, SessionId,
    WorkerId,
};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Name of the router's actor in the process.
pub const ROUTER: &str = "router";
/// Name of this actor in the process.
pub const SESSIONS: &str = "sessions";
/// Sessions held; beyond it the one idle longest is dropped, and is rebuilt from what workers hold when it comes back.
const SESSIONS_MAX: usize = 200_000;
/// How long a worker may take to answer `Run` or `Seed`: it does so at once or is in trouble (design §4, 2 s for a dead partner).
const ANSWER_PATIENCE: Micros = Micros::from_millis(1_500);
/// Completed turns whose answer is kept for a client that has not heard of it; it asks again within seconds.
const ANSWERS_MAX: usize = 4_096;
/// Tokens of them: 16 MB.
const ANSWER_TOKENS_MAX: usize = 4 << 20;
/// Shortest advice to a client whose turn failed.
const RETRY_AFTER_MILLIS: u32 = 1_000;

/// What the role is.
#[derive(Clone, Debug)]
pub struct SessionsConfig {
    /// The cluster.
    pub cluster: ClusterId,
    /// The control node.
    pub control: WorkerId,
    /// Tokens per page of the cluster's engines.
    pub page_tokens: u32,
}

struct Entry {
    machine: Session,
    last_used: Micros,
    /// Counts by path, for `explain`.
    turns: u32,
}

/// What a turn carries while it runs.
struct Turn {
    submit: Submit,
    deadline: Micros,
    chain: Arc<Vec<PageHash>>,
    answer: Vec<u32>,
    prefill: Vec<WorkerId>,
    /// Prefill workers that failed this turn.
    bad_prefill: Vec<WorkerId>,
    seeding_on: Option<WorkerId>,
    permit: Option<(Epoch, u32)>,
    /// The D that has the turn, and in which attempt: the router counts it as load until it is taken away here.
    asked: Option<(WorkerId, u32)>,
    /// The D's word that the turn is complete.
    end: Option<Completed>,
}

/// The ends of turns that completed lately, for clients that have not heard of theirs. The oldest go first.
#[derive(Default)]
struct Answers {
    by_request: BTreeMap<RequestId, Completed>,
    order: VecDeque<RequestId>,
    tokens: usize,
}

impl Answers {
    fn push(&mut self, done: Completed) {
        if self.by_request.contains_key(&done.request) {
            return;
        }
        self.tokens += done.answer.len();
        self.order.push_back(done.request);
        self.by_request.insert(done.request, done);
        while self.order.len() > ANSWERS_MAX || self.tokens > ANSWER_TOKENS_MAX {
            let Some(oldest) = self.order.pop_front() else { return };
            if let Some(old) = self.by_request.remove(&oldest) {
                self.tokens -= old.answer.len();
            }
        }
    }

    fn get(&self, request: RequestId) -> Option<&Completed> {
        self.by_request.get(&request)
    }
}

enum Asked {
    Run { worker: WorkerId },
    Seed { worker: WorkerId },
}

struct Pending {
    request: RequestId,
    attempt: u32,
    asked: Asked,
}

/// The role.
pub struct Sessions {
    config: SessionsConfig,
    subjects: Subjects,
    notify: String,
    owned: BTreeMap<u16, Epoch>,
    sessions: BTreeMap<SessionId, Entry>,
    idle: BTreeMap<(Micros, SessionId), ()>,
    turns: BTreeMap<RequestId, Turn>,
    pending: BTreeMap<u64, Pending>,
    completed: Answers,
    next_token: u64,
}

#[derive(Serialize)]
struct View<'a, S: Serialize> {
    session: &'a SessionId,
    owner: &'a WorkerId,
    turns: u32,
    state: &'a S,
}

#[derive(Serialize)]
struct Event<'a> {
    session: &'a SessionId,
    at_micros: u64,
    request: Option<String>,
    what: &'a str,
    worker: Option<&'a WorkerId>,
    detail: Option<&'a str>,
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
            sessions: BTreeMap::new(),
            idle: BTreeMap::new(),
            turns: BTreeMap::new(),
            pending: BTreeMap::new(),
            completed: Answers::default(),
            next_token: 0,
        }
    }

    fn on_message(&mut self, now: Micros, message: &Message, out: &mut Effects) {
        if message.subject.ends_with(".inspect") {
            return self.on_inspect(message, out);
        }
        crate::dispatch!(message, {
            Submit(submit) => self.on_submit(now, submit, message, out),
            Cancel(cancel) => self.step(now, &cancel.session, Fact::Cancelled(cancel.request), out),
            Chunk(c) => self.fact(now, c.request, c.attempt, TurnFact::Progress { offset: c.offset, tokens: c.tokens }, out),
            Completed(done) => self.on_completed(now, done, out),
            Started(s) => self.on_started(now, &s, out),
            Permit(p) => self.on_permit(now, &p, out),
            PermitQueued(q) => self.fact(now, q.request, q.attempt, TurnFact::Queued, out),
            PermitExpired(p) => self.fact(now, p.request, p.attempt, TurnFact::Rejected(RejectReason::QueueFull), out),
            Reject(r) => self.on_reject(now, &r, out),
            LegFailed(f) => self.on_leg_failed(now, &f, out),
            SeedDone(_) => {},
            Probe(p) => out.respond(message, &ProbeAck { nonce: p.nonce, epoch: Epoch(0) }),
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
        self.make_room();
        let entry = self.sessions.entry(session.clone()).or_insert_with(|| Entry {
            machine: Session::new(epoch),
            last_used: now,
            turns: 0,
        });
        self.idle.remove(&(entry.last_used, session.clone()));
        entry.last_used = now;
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
        let chain = ChainHasher::new(self.config.page_tokens, &namespace).push(&submit.prompt);
        let deadline = now.plus(submit.time_left);
        let already_sent = submit.answer_so_far.len() as u32;
        let turn = session::Turn {
            request,
            class: submit.class,
            deadline,
            prompt_tokens: submit.prompt.len() as u32,
            answer_max: submit.max_new_tokens,
            already_sent,
        };
        let repeated = self
            .sessions
            .get(&session)
            .is_some_and(|e| e.machine.ended(request).is_some());
        let answer = submit.answer_so_far.clone();
        self.turns.insert(
            request,
            Turn {
                submit,
                deadline,
                chain: Arc::new(chain),
                answer,
                prefill: Vec::new(),
                bad_prefill: Vec::new(),
                seeding_on: None,
                permit: None,
                asked: None,
                end: None,
            },
        );
        let what = if repeated { "asked-again" } else { "accepted" };
        self.event(now, &session, Some(request), what, None, None, out);
        self.step(now, &session, Fact::Arrived(turn), out);
    }

    /// Drops the session that is idle longest when there are too many.
    fn make_room(&mut self) {
        while self.sessions.len() >= SESSIONS_MAX {
            let Some(((_, session), ())) = self.idle.pop_first() else {
                return;
            };
            self.sessions.remove(&session);
        }
    }

    fn on_inspect(&self, message: &Message, out: &mut Effects) {
        let Some(parsed) = pinion_schemas::subject::parse(&message.subject) else {
            return;
        };
        if parsed.kind == Kind::Router {
            #[derive(Serialize)]
            struct Node<'a> {
                control: &'a WorkerId,
                shards: usize,
                sessions: Vec<&'a SessionId>,
                running_turns: usize,
            }
            // A list for people: the first thousand by name.
            let sessions = self.sessions.keys().take(1_000).collect();
            let (shards, running_turns) = (self.owned.len(), self.turns.len());
            return out.respond_json(
                message,
                &Node {
                    control: &self.config.control,
                    shards,
                    sessions,
                    running_turns,
                },
            );
        }
        // Only the owner answers: others stay silent, so that the asker gets one answer.
        let found = self
            .sessions
            .iter()
            .find(|(id, _)| id.as_str() == parsed.id || id.token() == parsed.id);
        if let Some((session, entry)) = found {
            let (owner, turns, state) = (&self.config.control, entry.turns, entry.machine.view());
            out.respond_json(
                message,
                &View {
                    session,
                    owner,
                    turns,
                    state,
                },
            );
        }
    }

    fn fact(&mut self, now: Micros, request: RequestId, attempt: u32, fact: TurnFact, out: &mut Effects) {
        let Some(session) = self.turns.get(&request).map(|t| t.submit.session.clone()) else {
            return;
        };
        self.step(now, &session, Fact::Turn { request, attempt, fact }, out);
    }

    fn on_started(&mut self, now: Micros, started: &Started, out: &mut Effects) {
        if let Some(turn) = self.turns.get_mut(&started.request) {
            turn.seeding_on = None;
        }
        self.fact(now, started.request, started.attempt, TurnFact::Started, out);
    }

    fn on_permit(&mut self, now: Micros, permit: &Permit, out: &mut Effects) {
        if let Some(turn) = self.turns.get_mut(&permit.request) {
            turn.permit = Some((permit.epoch, permit.resident_pages));
        }
        self.fact(
            now,
            permit.request,
            permit.attempt,
            TurnFact::Permit(permit.permit),
            out,
        );
    }

    fn on_reject(&mut self, now: Micros, reject: &Reject, out: &mut Effects) {
        let Some(turn) = self.turns.get(&reject.request) else {
            return;
        };
        let session = turn.submit.session.clone();
        let worker = turn.asked.as_ref().map(|(w, _)| w.clone());
        let what = Tried::Rejected(reject.pause_millis);
        self.left(reject.request, reject.attempt, what, out);
        self.event(
            now,
            &session,
            Some(reject.request),
            "rejected",
            worker.as_ref(),
            Some(reject.reason.label()),
            out,
        );
        self.fact(
            now,
            reject.request,
            reject.attempt,
            TurnFact::Rejected(reject.reason),
            out,
        );
    }

    /// Tells the router how the attempt at a D went: once for each that it was told of.
    fn left(&mut self, request: RequestId, attempt: u32, what: Tried, out: &mut Effects) {
        let asked = self.turns.get_mut(&request).map(|t| &mut t.asked);
        if let Some((worker, _)) = asked.and_then(|a| a.take_if(|(_, number)| *number == attempt)) {
            out.tell(ROUTER, Local::Outcome { worker, what });
        }
    }

    fn on_leg_failed(&mut self, now: Micros, failed: &LegFailed, out: &mut Effects) {
        if let Some(turn) = self.turns.get_mut(&failed.request) {
            if let Some(prefill) = turn.seeding_on.take() {
                turn.bad_prefill.push(prefill);
            }
        }
        self.fact(
            now,
            failed.request,
            failed.attempt,
            TurnFact::LegFailed(failed.reason),
            out,
        );
    }

    fn on_completed(&mut self, now: Micros, done: Completed, out: &mut Effects) {
        let (request, attempt) = (done.request, done.attempt);
        let commit = Commit {
            tokens: done.committed_tokens,
            tip: done.tip,
            answer: done.answer.clone(),
        };
        let Some(turn) = self.turns.get_mut(&request) else {
            return;
        };
        if turn.asked.as_ref().is_some_and(|(_, number)| *number == attempt) {
            turn.end = Some(done);
        }
        self.fact(now, request, attempt, TurnFact::Completed(commit), out);
    }

    fn on_reply(&mut self, now: Micros, token: u64, result: Result<Message, BusError>, out: &mut Effects) {
        let Some(Pending {
            request,
            attempt,
            asked,
        }) = self.pending.remove(&token)
        else {
            return;
        };
        match (asked, result) {
            (Asked::Run { .. }, Ok(message)) => crate::dispatch!(message, {
                Started(s) => self.on_started(now, &s, out),
                Permit(p) => self.on_permit(now, &p, out),
                PermitQueued(q) => self.fact(now, q.request, q.attempt, TurnFact::Queued, out),
                Reject(r) => self.on_reject(now, &r, out),
            }),
            (Asked::Run { worker }, Err(error)) => {
                tracing::info!(%worker, %error, "decode worker not reached");
                self.left(request, attempt, Tried::Unreachable, out);
                self.fact(now, request, attempt, TurnFact::LegFailed(AbortReason::DecodeLost), out);
            }
            (Asked::Seed { .. }, Ok(message)) => crate::dispatch!(message, {
                Accepted(_) => {},
                LegFailed(f) => self.on_leg_failed(now, &f, out),
            }),
            (Asked::Seed { worker }, Err(error)) => {
                tracing::info!(%worker, %error, "prefill worker not reached");
                let reason = AbortReason::PrefillLost;
                self.on_leg_failed(
                    now,
                    &LegFailed {
                        request,
                        attempt,
                        reason,
                    },
                    out,
                );
            }
        }
    }

    fn on_local(&mut self, now: Micros, local: Local, out: &mut Effects) {
        match local {
            Local::RouteAnswer(RouteAnswer {
                request,
                attempt,
                decode,
                prefill,
                ..
            }) => {
                if let Some(turn) = self.turns.get_mut(&request) {
                    turn.prefill = prefill;
                }
                self.fact(now, request, attempt, TurnFact::Ranked(decode), out);
            }
            Local::WorkerLost(worker) => self.on_worker_lost(now, &worker, out),
            Local::Shard(shard, Some(epoch)) => {
                self.owned.insert(shard, epoch);
            }
            Local::Shard(shard, None) => {
                let Some(epoch) = self.owned.remove(&shard) else { return };
                let lost: Vec<SessionId> = self.sessions.keys().filter(|s| shard_of(s) == shard).cloned().collect();
                for session in lost {
                    self.step(now, &session, Fact::Superseded(epoch.next()), out);
                    self.sessions.remove(&session);
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
                    t.seeding_on.as_ref() == Some(worker),
                )
            })
            .collect();
        for (request, session, seeding) in running {
            if seeding {
                let attempt = self.sessions.get(&session).and_then(|e| e.machine.attempt(request));
                if let Some(attempt) = attempt {
                    self.on_leg_failed(
                        now,
                        &LegFailed {
                            request,
                            attempt,
                            reason: AbortReason::PrefillLost,
                        },
                        out,
                    );
                }
            } else {
                self.step(now, &session, Fact::WorkerLost(worker.clone()), out);
            }
        }
    }

    fn step(&mut self, now: Micros, session: &SessionId, fact: Fact, out: &mut Effects) {
        let Some(entry) = self.sessions.get_mut(session) else {
            return;
        };
        for action in entry.machine.step(now, fact) {
            self.perform(now, session, action, out);
        }
    }

    fn perform(&mut self, now: Micros, session: &SessionId, action: Action, out: &mut Effects) {
        match action {
            Action::Route {
                request,
                attempt,
                avoid,
                rejects,
            } => {
                let Some(turn) = self.turns.get(&request) else { return };
                let pin = self.sessions.get(session).and_then(|e| e.machine.pin().cloned());
                out.tell(
                    ROUTER,
                    Local::RouteAsk(RouteAsk {
                        from: SESSIONS.to_owned(),
                        session: session.clone(),
                        request,
                        attempt,
                        pin,
                        chain: turn.chain.clone(),
                        context_tokens: turn.submit.prompt.len() as u64,
                        avoid,
                        rejects,
                    }),
                );
            }
            Action::AskRun {
                worker,
                request,
                attempt,
                fallback,
                already_sent,
            } => {
                self.ask_run(
                    now,
                    session,
                    &worker,
                    (request, attempt),
                    fallback.is_none(),
                    already_sent,
                    out,
                );
            }
            Action::Seed {
                worker,
                request,
                attempt,
                permit,
            } => {
                self.ask_seed(now, session, &worker, (request, attempt), permit, out);
            }
            Action::Abort {
                worker,
                request,
                attempt,
                reason,
            } => {
                let epoch = self.epoch_of(session);
                let abort = Abort {
                    request,
                    attempt,
                    epoch,
                    reason,
                };
                out.publish(self.subjects.worker(Kind::Decode, &worker, "abort").as_str(), &abort);
                if let Some(prefill) = self.turns.get_mut(&request).and_then(|t| t.seeding_on.take()) {
                    out.publish(self.subjects.worker(Kind::Prefill, &prefill, "abort").as_str(), &abort);
                }
                self.left(request, attempt, Tried::Ended, out);
                self.event(
                    now,
                    session,
                    Some(request),
                    "aborted",
                    Some(&worker),
                    Some(reason.label()),
                    out,
                );
            }
            Action::Relay { request, tokens, .. } => {
                // The client has them from the worker's own stream; here they are kept for a fail-over.
                if let Some(turn) = self.turns.get_mut(&request) {
                    turn.answer.extend(tokens);
                }
            }
            Action::Bind { to, reason, .. } => {
                self.event(
                    now,
                    session,
                    None,
                    "bound",
                    Some(&to),
                    reason.map(pinion_schemas::MigrationReason::label),
                    out,
                );
            }
            Action::Persist => self.persist(session, out),
            Action::Finish { request, outcome } => self.finish(now, session, request, outcome, out),
            Action::FinishAgain { request, outcome } => {
                let Some(turn) = self.turns.remove(&request) else {
                    return;
                };
                let reason = match (outcome, self.completed.get(request)) {
                    (Outcome::Completed(_), Some(done)) => return out.publish(turn.submit.stream, done),
                    // Its answer is forgotten: the client has to ask anew.
                    (Outcome::Completed(_), None) => AbortReason::RetriesSpent,
                    _ => abort_reason(outcome).unwrap_or(AbortReason::RetriesSpent),
                };
                let failed = Failed {
                    request,
                    reason,
                    retry_after_millis: RETRY_AFTER_MILLIS,
                };
                out.publish(turn.submit.stream, &failed);
            }
        }
    }

    fn epoch_of(&self, session: &SessionId) -> Epoch {
        self.owned.get(&shard_of(session)).copied().unwrap_or_default()
    }

    #[expect(clippy::too_many_arguments, reason = "one message's worth of fields, used once")]
    fn ask_run(
        &mut self,
        now: Micros,
        session: &SessionId,
        worker: &WorkerId,
        (request, attempt): (RequestId, u32),
        keep: bool,
        already_sent: u32,
        out: &mut Effects,
    ) {
        let epoch = self.epoch_of(session);
        let Some(entry) = self.sessions.get(session) else {
            return;
        };
        let Some(turn) = self.turns.get(&request) else { return };
        let sent = &turn.answer[..turn.answer.len().min(already_sent as usize)];
        let run = Run {
            request,
            attempt,
            session: session.clone(),
            turn: entry.machine.next_turn(),
            epoch,
            class: turn.submit.class,
            tenant: turn.submit.tenant.clone(),
            time_left: turn.deadline.since(now),
            prefix_pages: entry.machine.committed_tokens() / self.config.page_tokens.max(1),
            tokens: [&turn.submit.prompt[..], sent].concat(),
            already_sent: sent.len() as u32,
            max_new_tokens: turn.submit.max_new_tokens.saturating_sub(sent.len() as u32),
            keep,
            stream: turn.submit.stream.clone(),
            notify: self.notify.clone(),
        };
        let subject = self.subjects.worker(Kind::Decode, worker, "run");
        self.next_token += 1;
        if out.request(self.next_token, &subject, &run, ANSWER_PATIENCE) {
            let asked = Asked::Run { worker: worker.clone() };
            self.pending.insert(
                self.next_token,
                Pending {
                    request,
                    attempt,
                    asked,
                },
            );
            let what = Tried::Assigned;
            let before = self
                .turns
                .get_mut(&request)
                .and_then(|t| t.asked.replace((worker.clone(), attempt)));
            if let Some((worker, _)) = before {
                let what = Tried::Ended;
                out.tell(ROUTER, Local::Outcome { worker, what });
            }
            let worker = worker.clone();
            out.tell(ROUTER, Local::Outcome { worker, what });
        } else {
            self.fact(now, request, attempt, TurnFact::Rejected(RejectReason::NeverFits), out);
        }
    }

    fn ask_seed(
        &mut self,
        now: Micros,
        session: &SessionId,
        worker: &WorkerId,
        (request, attempt): (RequestId, u32),
        permit: PermitId,
        out: &mut Effects,
    ) {
        let epoch = self.epoch_of(session);
        let Some(turn) = self.turns.get_mut(&request) else {
            return;
        };
        let healthy = turn.prefill.iter().find(|p| !turn.bad_prefill.contains(p));
        // With every prefill worker tried, the first may be back; nothing is condemned for good.
        let Some(prefill) = healthy.or(turn.prefill.first()).cloned() else {
            let reason = AbortReason::PrefillLost;
            return self.fact(now, request, attempt, TurnFact::LegFailed(reason), out);
        };
        let (decode_epoch, skip_pages) = turn.permit.unwrap_or_default();
        let seed = Seed {
            request,
            attempt,
            session: session.clone(),
            epoch,
            decode: worker.clone(),
            decode_epoch,
            permit,
            tenant: turn.submit.tenant.clone(),
            tokens: [&turn.submit.prompt[..], &turn.answer[..]].concat(),
            skip_pages,
            time_left: turn.deadline.since(now),
            notify: self.notify.clone(),
        };
        turn.seeding_on = Some(prefill.clone());
        let subject = self.subjects.worker(Kind::Prefill, &prefill, "seed");
        self.next_token += 1;
        if out.request(self.next_token, &subject, &seed, ANSWER_PATIENCE) {
            let asked = Asked::Seed {
                worker: prefill.clone(),
            };
            self.pending.insert(
                self.next_token,
                Pending {
                    request,
                    attempt,
                    asked,
                },
            );
        }
        self.event(now, session, Some(request), "seeding", Some(&prefill), None, out);
    }

    fn finish(&mut self, now: Micros, session: &SessionId, request: RequestId, outcome: Outcome, out: &mut Effects) {
        let Some(turn) = self.turns.remove(&request) else {
            return;
        };
        let (what, detail) = match outcome {
            Outcome::Completed(path) => ("completed", path.label()),
            Outcome::Cancelled => ("cancelled", AbortReason::ClientGone.label()),
            Outcome::Failed(reason) => ("failed", reason.label()),
            Outcome::Refused => ("refused", RejectReason::QueueFull.label()),
        };
        if let Some((worker, _)) = turn.asked {
            let what = Tried::Ended;
            out.tell(ROUTER, Local::Outcome { worker, what });
        }
        if let Outcome::Completed(path) = outcome {
            let done = turn.end.unwrap_or_else(|| {
                // No D said so: the client had the whole answer when its D or its session's owner died.
                let context_tokens = (turn.submit.prompt.len() + turn.answer.len()) as u32;
                let done = Completed {
                    request,
                    attempt: 0,
                    path,
                    context_tokens,
                    committed_tokens: 0,
                    tip: None,
                    cached_tokens: 0,
                    answer: turn.answer,
                };
                out.publish(turn.submit.stream.clone(), &done);
                done
            });
            self.completed.push(done);
        } else if let Some(reason) = abort_reason(outcome) {
            let failed = Failed {
                request,
                reason,
                retry_after_millis: RETRY_AFTER_MILLIS,
            };
            out.publish(turn.submit.stream, &failed);
        }
        if let Some(entry) = self.sessions.get_mut(session) {
            entry.turns += 1;
            self.idle.insert((entry.last_used, session.clone()), ());
        }
        self.event(now, session, Some(request), what, None, Some(detail), out);
    }

    fn persist(&self, session: &SessionId, out: &mut Effects) {
        let Some(entry) = self.sessions.get(session) else {
            return;
        };
        match serde_json::to_vec(&entry.machine.snapshot()) {
            Ok(text) => out
                .0
                .push(Effect::Put(format!("session.{}", session.token()), Bytes::from(text))),
            Err(error) => tracing::error!(%error, "a snapshot cannot be written as JSON"),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one event")]
    fn event(
        &self,
        now: Micros,
        session: &SessionId,
        request: Option<RequestId>,
        what: &str,
        worker: Option<&WorkerId>,
        detail: Option<&str>,
        out: &mut Effects,
    ) {
        let subject = self.subjects.event(Kind::Session, &session.token());
        let request = request.map(|r| format!("{:032x}", r.0));
        out.event(
            &subject,
            &Event {
                session,
                at_micros: now.0,
                request,
                what,
                worker,
                detail,
            },
        );
    }
}

/// What the client of a turn that did not complete is told.
fn abort_reason(outcome: Outcome) -> Option<AbortReason> {
    match outcome {
        Outcome::Completed(_) => None,
        Outcome::Cancelled => Some(AbortReason::ClientGone),
        Outcome::Failed(reason) => Some(reason),
        Outcome::Refused => Some(AbortReason::RetriesSpent),
    }
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
            Input::Tick => {
                let due: Vec<SessionId> = self
                    .turns
                    .values()
                    .map(|t| &t.submit.session)
                    .filter(|s| {
                        self.sessions
                            .get(*s)
                            .and_then(|e| e.machine.next_deadline())
                            .is_some_and(|at| at <= now)
                    })
                    .cloned()
                    .collect();
                for session in due {
                    self.step(now, &session, Fact::Tick, out);
                }
            }
        }
    }

    fn next_deadline(&self) -> Option<Micros> {
        let sessions = self.turns.values().map(|t| &t.submit.session);
        sessions
            .filter_map(|s| self.sessions.get(s))
            .filter_map(|e| e.machine.next_deadline())
            .min()
    }
}
