//! The decode role: owner of one decode worker's pool, permits and running turns (design §2).
//!
//! What happens to a `Run` (design §4): the engine says how much of the context is resident, the ledger
//! ([`pinion_core::admit`]) decides, and the answer goes back in the same exchange: `Started`, `Permit`, `PermitQueued` or
//! `Reject`. Tokens go to the turn's stream (the gateway) and to the session's owner, which needs them for a fail-over.

use crate::effect::{Effect, Effects, Input, Role};
use crate::engine::{Engine, EngineOutput, Job};
use crate::feed::ResidencyFeed;
use pinion_bus::Message;
use pinion_core::admit::{self, Action, Admission, Ask, Decision, Fact};
use pinion_core::pressure;
use pinion_schemas::messages::{
    Abort, Chunk, Completed, Heartbeat, Pages, PagesAck, Permit, PermitExpired, PermitQueued, Probe, ProbeAck, Reject,
    Run, SnapshotAsk, Started,
};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{
    ChainHasher, ClusterId, Epoch, Micros, PageHash, Path, PermitId, RejectReason, RequestId, SeedReason, SessionId,
    TurnIndex, WorkerId,
};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

/// Time between heartbeats.
pub const HEARTBEAT: Micros = Micros::from_millis(500);
/// Completed turns whose answer is kept for a new owner that asks again; a fail-over asks within seconds.
const COMPLETED_MAX: usize = 64;
/// Sessions whose newest owner epoch is remembered; beyond it the first by name is forgotten and its messages are trusted.
const EPOCHS_MAX: usize = 100_000;

/// What a decode worker is.
#[derive(Clone, Debug)]
pub struct DecodeConfig {
    /// The cluster.
    pub cluster: ClusterId,
    /// Its name.
    pub worker: WorkerId,
    /// Its epoch: grows with every start.
    pub epoch: Epoch,
    /// Longest append that runs directly, tokens.
    pub direct_append_tokens_max: u32,
    /// Budget of pending seeds.
    pub permits: pinion_core::permits::Config,
}

struct Turn {
    run: Run,
    chain: Vec<PageHash>,
    path: Path,
    /// Why it needs a seed, if it does.
    why: SeedReason,
    /// What was here when it came; pages that a seed brought are not counted.
    cached_tokens: u32,
    /// The whole answer.
    answer: Vec<u32>,
    /// Tokens of it already in a `Chunk`.
    flushed: usize,
    submitted: bool,
}

/// The role.
pub struct Decode<E> {
    config: DecodeConfig,
    subjects: Subjects,
    engine: E,
    ledger: Admission,
    turns: BTreeMap<RequestId, Turn>,
    completed: VecDeque<(Completed, SessionId)>,
    owners: BTreeMap<SessionId, Epoch>,
    feed: ResidencyFeed,
    next_heartbeat: Micros,
    pause_millis: u32,
    draining: bool,
}

#[derive(Serialize)]
struct View<'a> {
    worker: &'a WorkerId,
    epoch: Epoch,
    draining: bool,
    pause_millis: u32,
    ledger: admit::View,
    turns: Vec<TurnView<'a>>,
    resident_pages: usize,
}

#[derive(Serialize)]
struct TurnView<'a> {
    request: String,
    session: &'a SessionId,
    turn: u32,
    attempt: u64,
    path: Path,
    context_tokens: usize,
    answered: usize,
    running: bool,
}

impl<E: Engine> Decode<E> {
    /// A worker in front of `engine`.
    pub fn new(config: DecodeConfig, engine: E) -> Self {
        let ledger = Admission::new(admit::Config {
            pool_pages: engine.pool_pages(),
            page_tokens: engine.page_tokens(),
            page_bytes: engine.page_bytes(),
            direct_append_tokens_max: config.direct_append_tokens_max,
            permits: config.permits,
        });
        let subjects = Subjects::new(&config.cluster);
        let subject = subjects.event(Kind::Decode, config.worker.as_str()).as_str().to_owned();
        Self {
            feed: ResidencyFeed::new(subject, config.worker.clone(), config.epoch),
            subjects,
            config,
            engine,
            ledger,
            turns: BTreeMap::new(),
            completed: VecDeque::new(),
            owners: BTreeMap::new(),
            next_heartbeat: Micros::ZERO,
            pause_millis: 0,
            draining: false,
        }
    }

    fn on_message(&mut self, now: Micros, message: &Message, out: &mut Effects) {
        match message.subject.rsplit('.').next() {
            Some("inspect") => out.respond_json(message, &self.view()),
            Some("drain") => {
                self.draining = message.payload.as_ref() != b"off";
                self.step(now, Fact::Drain(self.draining), None, out);
                self.next_heartbeat = now;
                out.respond_json(message, &self.draining);
            }
            _ => crate::dispatch!(message, {
                Run(run) => self.on_run(now, run, message, out),
                Abort(abort) => self.on_abort(now, &abort, out),
                Pages(pages) => self.on_pages(now, &pages, message, out),
                Probe(probe) => out.respond(message, &ProbeAck { nonce: probe.nonce, epoch: self.config.epoch }),
                SnapshotAsk(ask) => self.feed.answer(&self.engine, &ask, message, out),
            }),
        }
    }

    fn on_run(&mut self, now: Micros, run: Run, message: &Message, out: &mut Effects) {
        let (request, attempt) = (run.request, run.attempt);
        let newest = self
            .owners
            .get(&run.session)
            .copied()
            .unwrap_or_default()
            .max(run.epoch);
        if self.owners.len() >= EPOCHS_MAX && !self.owners.contains_key(&run.session) {
            self.owners.pop_first();
        }
        self.owners.insert(run.session.clone(), newest);
        if run.epoch < newest {
            let reason = RejectReason::StaleEpoch;
            return out.respond(
                message,
                &Reject {
                    request,
                    attempt,
                    reason,
                    pause_millis: 0,
                },
            );
        }
        if let Some((done, _)) = self
            .completed
            .iter()
            .find(|(c, s)| c.request == request && *s == run.session)
        {
            // The owner that heard of it is gone; the new one hears it again.
            let done = Completed {
                attempt,
                ..done.clone()
            };
            out.respond(
                message,
                &Started {
                    request,
                    attempt,
                    resident_pages: 0,
                    pause_millis: 0,
                },
            );
            out.publish(run.notify.clone(), &done);
            return out.publish(run.stream, &done);
        }
        let answered = run.already_sent as usize;
        let prompt_tokens = run.tokens.len().saturating_sub(answered);
        if let Some(turn) = self.turns.get_mut(&request) {
            let same_prompt = turn.run.tokens.len().saturating_sub(turn.run.already_sent as usize) == prompt_tokens;
            if attempt < turn.run.attempt {
                let reason = RejectReason::StaleEpoch;
                return out.respond(
                    message,
                    &Reject {
                        request,
                        attempt,
                        reason,
                        pause_millis: 0,
                    },
                );
            }
            if turn.submitted && same_prompt && turn.answer.len() >= answered {
                // Already running here for an earlier attempt or owner: it goes on, and tells the new one.
                turn.flushed = answered;
                (turn.run.attempt, turn.run.epoch) = (attempt, run.epoch);
                (turn.run.notify, turn.run.stream) = (run.notify, run.stream);
                out.respond(
                    message,
                    &Started {
                        request,
                        attempt,
                        resident_pages: 0,
                        pause_millis: self.pause_millis,
                    },
                );
                return self.flush(request, out);
            }
            self.end(now, request, out);
        }
        let namespace = [run.tenant.as_deref()];
        let chain = ChainHasher::new(self.engine.page_tokens(), &namespace).push(&run.tokens);
        let resident = self.engine.resident(&chain) as u32;
        let page = self.engine.page_tokens().max(1);
        let tokens = run.tokens.len() as u32;
        let prefix_pages = match resident {
            // Nothing of it is here: a new session, or one that comes from elsewhere.
            0 => run.prefix_pages.min(tokens / page),
            // A new session is seeded, whatever others have left here; but one of which most is here is not new: its owner
            // and the store have lost what they knew of it.
            _ if run.turn == TurnIndex(0) && resident <= tokens / page / 2 => run.prefix_pages.min(resident),
            // Less than the session's prefix if the tail was evicted: then what is lost counts as append. More if the turn
            // was here before and did not end.
            _ => resident,
        };
        let ask = Ask {
            request,
            session: run.session.clone(),
            turn: run.turn,
            epoch: run.epoch,
            newest_epoch: newest,
            prefix_pages,
            resident_pages: resident,
            append_tokens: tokens - prefix_pages * page,
            output_tokens: run.max_new_tokens,
            class: run.class,
            deadline: now.plus(run.time_left),
        };
        let answer = run.tokens[prompt_tokens..].to_vec();
        let why = self
            .ledger
            .why_seeded(&ask, run.prefix_pages, run.pinned, run.prefix_changed);
        let turn = Turn {
            flushed: answer.len(),
            chain,
            path: Path::Direct,
            why,
            cached_tokens: resident * page,
            answer,
            submitted: false,
            run,
        };
        self.turns.insert(request, turn);
        self.step(now, Fact::Ask(ask), Some(message), out);
    }

    /// Feeds the ledger and does what it says. `message` is the one to answer, if the fact came with one.
    fn step(&mut self, now: Micros, fact: Fact, message: Option<&Message>, out: &mut Effects) {
        let asked = match &fact {
            Fact::Ask(ask) => Some(ask.request),
            _ => None,
        };
        for action in self.ledger.step(now, fact) {
            match action {
                Action::Answer { request, decision, .. } => {
                    let to = message.filter(|_| asked == Some(request));
                    self.answer(now, request, decision, to, out);
                }
                Action::Start(request) => self.start_seeded(now, request, out),
                Action::PermitExpired { request, permit } => {
                    if let Some(turn) = self.turns.remove(&request) {
                        let attempt = turn.run.attempt;
                        out.publish(
                            turn.run.notify,
                            &PermitExpired {
                                request,
                                attempt,
                                permit,
                            },
                        );
                    }
                }
                Action::TurnExpired(request) => {
                    self.engine.cancel(request);
                    self.turns.remove(&request);
                }
            }
        }
    }

    fn answer(&mut self, now: Micros, request: RequestId, decision: Decision, to: Option<&Message>, out: &mut Effects) {
        let Some(turn) = self.turns.get_mut(&request) else {
            return;
        };
        let (attempt, pause_millis) = (turn.run.attempt, self.pause_millis);
        let notify = turn.run.notify.clone();
        let resident_pages = self.engine.resident(&turn.chain) as u32;
        macro_rules! send {
            ($body:expr) => {
                match to {
                    Some(message) => out.respond(message, &$body),
                    None => out.publish(notify, &$body),
                }
            };
        }
        match decision {
            Decision::Direct => {
                if self.submit(now, request) {
                    send!(Started {
                        request,
                        attempt,
                        resident_pages,
                        pause_millis
                    });
                } else {
                    send!(Reject {
                        request,
                        attempt,
                        reason: RejectReason::NoSpace,
                        pause_millis
                    });
                    self.end(now, request, out);
                }
            }
            Decision::Permit { permit, expires } => {
                turn.path = if turn.run.turn == TurnIndex(0) {
                    Path::Seed
                } else {
                    Path::Reseed
                };
                let (epoch, ttl) = (self.config.epoch, expires.since(now));
                send!(Permit {
                    request,
                    attempt,
                    permit,
                    epoch,
                    ttl,
                    resident_pages,
                    pause_millis
                });
            }
            Decision::Wait { position, eta } => send!(PermitQueued {
                request,
                attempt,
                position,
                eta
            }),
            Decision::Reject(reason) => {
                send!(Reject {
                    request,
                    attempt,
                    reason,
                    pause_millis
                });
                self.turns.remove(&request);
            }
        }
    }

    fn start_seeded(&mut self, now: Micros, request: RequestId, out: &mut Effects) {
        let started = self.submit(now, request);
        let Some(turn) = self.turns.get(&request) else { return };
        let (attempt, pause_millis) = (turn.run.attempt, self.pause_millis);
        if started {
            let resident_pages = self.engine.resident(&turn.chain) as u32;
            out.publish(
                turn.run.notify.clone(),
                &Started {
                    request,
                    attempt,
                    resident_pages,
                    pause_millis,
                },
            );
        } else {
            let reason = RejectReason::NoSpace;
            out.publish(
                turn.run.notify.clone(),
                &Reject {
                    request,
                    attempt,
                    reason,
                    pause_millis,
                },
            );
            self.end(now, request, out);
        }
    }

    fn submit(&mut self, now: Micros, request: RequestId) -> bool {
        let Some(turn) = self.turns.get_mut(&request) else {
            return false;
        };
        let job = Job {
            request,
            tokens: turn.run.tokens.clone(),
            max_new_tokens: turn.run.max_new_tokens,
            tenant: turn.run.tenant.clone(),
        };
        match self.engine.submit(now, job) {
            Ok(cached) => {
                turn.submitted = true;
                if turn.path == Path::Direct {
                    turn.cached_tokens = cached as u32;
                }
                true
            }
            Err(error) => {
                tracing::warn!(request = %request, %error, "the engine did not take an admitted turn");
                false
            }
        }
    }

    fn on_abort(&mut self, now: Micros, abort: &Abort, out: &mut Effects) {
        let known = self
            .turns
            .get(&abort.request)
            .is_some_and(|t| t.run.attempt <= abort.attempt);
        if known {
            self.end(now, abort.request, out);
        }
    }

    /// Forgets a turn and frees what it holds.
    fn end(&mut self, now: Micros, request: RequestId, out: &mut Effects) {
        self.engine.cancel(request);
        self.turns.remove(&request);
        self.step(now, Fact::Ended(request), None, out);
    }

    fn on_pages(&mut self, now: Micros, pages: &Pages, message: &Message, out: &mut Effects) {
        let (request, permit) = (pages.request, pages.permit);
        // A promise of an earlier life of this worker is none (I7); the sender hears nothing and gives up by its deadline.
        if pages.epoch != self.config.epoch || !self.turns.contains_key(&request) {
            let reason = RejectReason::StaleEpoch;
            return out.respond(
                message,
                &Reject {
                    request,
                    attempt: 0,
                    reason,
                    pause_millis: 0,
                },
            );
        }
        let moved: Vec<_> = pages
            .names
            .iter()
            .copied()
            .zip(pages.contents.iter().copied())
            .collect();
        let stored = match self.engine.import(pages.parent, &moved) {
            Ok(stored) => stored as u32,
            Err(error) => {
                // The turn starts all the same and computes what is missing: slower, never wrong.
                tracing::info!(request = %request, %error, "pages of a seed not taken");
                0
            }
        };
        out.respond(
            message,
            &PagesAck {
                request,
                permit,
                stored,
            },
        );
        self.step(
            now,
            Fact::Seeded {
                request,
                permit: PermitId(permit.0),
            },
            None,
            out,
        );
    }

    fn advance(&mut self, now: Micros, out: &mut Effects) {
        let mut touched: Vec<RequestId> = Vec::new();
        for output in self.engine.advance(now) {
            self.feed.take(&output, out);
            match output {
                EngineOutput::Token(request, token) => {
                    if let Some(turn) = self.turns.get_mut(&request) {
                        turn.answer.push(token);
                        touched.push(request);
                    }
                }
                EngineOutput::Finished {
                    request,
                    ok,
                    committed_tokens,
                    tip,
                } => {
                    self.finished(now, request, ok, committed_tokens, tip, out);
                }
                EngineOutput::Stored(_) | EngineOutput::Evicted(_) => {}
            }
        }
        self.feed.flush(out);
        touched.dedup();
        for request in touched {
            self.flush(request, out);
        }
    }

    fn flush(&mut self, request: RequestId, out: &mut Effects) {
        let Some(turn) = self.turns.get_mut(&request) else {
            return;
        };
        let tokens = turn.answer[turn.flushed..].to_vec();
        if tokens.is_empty() {
            return;
        }
        let chunk = Chunk {
            request,
            attempt: turn.run.attempt,
            offset: turn.flushed as u32,
            tokens,
        };
        turn.flushed = turn.answer.len();
        out.publish(turn.run.stream.clone(), &chunk);
        out.publish(turn.run.notify.clone(), &chunk);
    }

    fn finished(
        &mut self,
        now: Micros,
        request: RequestId,
        ok: bool,
        committed_tokens: u32,
        tip: Option<PageHash>,
        out: &mut Effects,
    ) {
        let Some(turn) = self.turns.remove(&request) else {
            return;
        };
        let attempt = turn.run.attempt;
        if ok {
            let prompt = turn.run.tokens.len() as u32 - turn.run.already_sent;
            let done = Completed {
                request,
                attempt,
                path: if turn.run.keep { turn.path } else { Path::Fallback },
                why: (turn.path != Path::Direct).then_some(turn.why),
                context_tokens: prompt + turn.answer.len() as u32,
                committed_tokens,
                tip,
                cached_tokens: turn.cached_tokens,
                answer: turn.answer,
            };
            out.publish(turn.run.stream, &done);
            out.publish(turn.run.notify, &done);
            if self.completed.len() >= COMPLETED_MAX {
                self.completed.pop_front();
            }
            self.completed.push_back((done, turn.run.session));
        } else {
            let reason = pinion_schemas::AbortReason::EngineFailed;
            out.publish(
                turn.run.notify,
                &pinion_schemas::messages::LegFailed {
                    request,
                    attempt,
                    reason,
                },
            );
        }
        self.step(now, Fact::Ended(request), None, out);
    }

    fn heartbeat(&mut self, now: Micros, out: &mut Effects) {
        let sample = pressure::Sample {
            retracted: 0,
            used_pages: self.ledger.used_pages(),
            pool_pages: self.engine.pool_pages(),
            transfer_queue: 0,
        };
        self.pause_millis = pressure::hint(&sample);
        self.step(now, Fact::Pressure(self.pause_millis), None, out);
        let subject = self.subjects.event(Kind::Decode, self.config.worker.as_str());
        out.publish(
            subject.as_str(),
            &Heartbeat {
                worker: self.config.worker.clone(),
                epoch: self.config.epoch,
                running: self.engine.running(),
                queued_tokens: self.engine.queued_tokens(),
                pool_pages: self.engine.pool_pages() as u32,
                room_pages: self.ledger.room() as u32,
                draining: self.draining,
                pause_millis: self.pause_millis,
                residency_sequence: self.feed.sequence(),
            },
        );
        self.next_heartbeat = now.plus(HEARTBEAT);
    }

    fn view(&self) -> View<'_> {
        let turns = self.turns.iter().map(|(request, t)| TurnView {
            request: format!("{:032x}", request.0),
            session: &t.run.session,
            turn: t.run.turn.0,
            attempt: t.run.attempt,
            path: t.path,
            context_tokens: t.run.tokens.len(),
            answered: t.answer.len(),
            running: t.submitted,
        });
        View {
            worker: &self.config.worker,
            epoch: self.config.epoch,
            draining: self.draining,
            pause_millis: self.pause_millis,
            ledger: self.ledger.view(),
            turns: turns.collect(),
            resident_pages: self.engine.pages().len(),
        }
    }
}

impl<E: Engine> Role for Decode<E> {
    fn start(&mut self, now: Micros, out: &mut Effects) {
        let prefix = self.subjects.worker(Kind::Decode, &self.config.worker, "*");
        out.0.push(Effect::Subscribe(prefix.as_str().to_owned()));
        self.heartbeat(now, out);
    }

    fn handle(&mut self, now: Micros, input: Input, out: &mut Effects) {
        if let Input::Message(message) = &input {
            self.on_message(now, message, out);
        }
        self.advance(now, out);
        if self.ledger.next_deadline().is_some_and(|at| at <= now) {
            self.step(now, Fact::Tick, None, out);
        }
        if self.next_heartbeat <= now {
            self.heartbeat(now, out);
        }
    }

    fn next_deadline(&self) -> Option<Micros> {
        [
            self.engine.next_wakeup(),
            self.ledger.next_deadline(),
            Some(self.next_heartbeat),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}
