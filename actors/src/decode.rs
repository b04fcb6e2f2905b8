//! The decode role: owner of one decode worker's pool, permits and running turns (design §2).
//!
//! What happens to a `Run` (design §4): the engine says how much of the context is resident, the ledger
//! ([`pinion_core::admit`]) decides, and the answer goes back in the same exchange: `Started`, `Permit`, `PermitQueued` or
//! `Reject`. Tokens go to the turn's stream (the gateway) and to the session's owner, which needs them for a fail-over.

mod moves;
mod pages;
mod run;
mod sync;

use crate::effect::{Effect, Effects, Input, Role};
use crate::engine::{Engine, EngineOutput};
use crate::feed::ResidencyFeed;
use crate::grants::Keys;
use moves::Moves;
use pinion_bus::Message;
use pinion_core::admit::{self, Admission, Fact};
use pinion_core::pressure;
use pinion_schemas::messages::{
    Abort, Chunk, Completed, Heartbeat, Pages, PagesMove, PagesOffer, Probe, ProbeAck, Run, SnapshotAsk,
};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{
    ChainHasher, ClusterId, Epoch, Micros, PageHash, Path, PermitId, RequestId, SeedReason, SessionId, WorkerId,
};
use pinion_transfer::sim::LinkModel;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use sync::{BackupView, Syncs};

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
    /// The link over which simulated pages leave.
    pub link: LinkModel,
    /// Where its page server is, for an engine whose pages have bytes.
    pub addresses: Vec<String>,
    /// Random: keys of grants are made from it.
    pub secret: u64,
}

struct Turn {
    run: Run,
    /// Names of the prompt's full pages.
    chain: Vec<PageHash>,
    /// At the end of `run.tokens`, to name the answer's pages.
    hasher: ChainHasher,
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
    /// The promise that its pages come under, and its end.
    permit: Option<(PermitId, Micros)>,
    /// Slots that a prefill worker fills for it.
    grant: Option<u64>,
}

impl Turn {
    /// Names of its first `pages` pages, the answer's included.
    fn committed(&mut self, pages: u32) -> Vec<PageHash> {
        let already_sent = (self.run.already_sent as usize).min(self.answer.len());
        let mut chain = std::mem::take(&mut self.chain);
        chain.extend(self.hasher.push(&self.answer[already_sent..]));
        chain.truncate(pages as usize);
        chain
    }
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
    keys: Keys,
    syncs: Syncs,
    moves: Moves,
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
    /// Of an engine that has some.
    tiers: Option<crate::engine::TierView>,
    backups: Vec<BackupView<'a>>,
}

#[derive(Serialize)]
struct TurnView<'a> {
    request: RequestId,
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
            keys: Keys::new(config.secret),
            syncs: Syncs::new(config.link),
            moves: Moves::new(&subjects, config.link),
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
                PagesOffer(offer) => self.on_offer(now, &offer, message, out),
                Pages(pages) => self.on_pages(now, &pages, message, out),
                PagesMove(wanted) => self.on_move(now, wanted, message, out),
                Probe(probe) => out.respond(message, &ProbeAck { nonce: probe.nonce, epoch: self.config.epoch }),
                SnapshotAsk(ask) => self.feed.answer(&self.engine, &ask, message, out),
            }),
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
        self.moves.abort(now, abort);
    }

    /// Forgets a turn and frees what it holds.
    fn end(&mut self, now: Micros, request: RequestId, out: &mut Effects) {
        self.forget(request);
        self.step(now, Fact::Ended(request), None, out);
    }

    /// Takes a turn off the engine and ends what is granted for it.
    fn forget(&mut self, request: RequestId) -> Option<Turn> {
        self.engine.cancel(request);
        let turn = self.turns.remove(&request)?;
        if let Some(grant) = turn.grant {
            self.engine.end_grant(grant);
        }
        Some(turn)
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
        let Some(mut turn) = self.forget(request) else {
            return;
        };
        let attempt = turn.run.attempt;
        if ok {
            let chain = turn.committed(committed_tokens / self.engine.page_tokens().max(1));
            let (session, backups) = (turn.run.session.clone(), std::mem::take(&mut turn.run.backups));
            let prompt = run::prompt_tokens(&turn.run) as u32;
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
            self.back_up(now, &session, &backups, &chain, out);
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
            subject,
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
        self.sync_tick(now, out);
        self.next_heartbeat = now.plus(HEARTBEAT);
    }

    fn view(&self) -> View<'_> {
        let turns = self.turns.iter().map(|(request, t)| TurnView {
            request: *request,
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
            backups: self.syncs.view(),
            resident_pages: self.engine.pages().len(),
            tiers: self.engine.tiers(),
        }
    }
}

impl<E: Engine> Role for Decode<E> {
    fn start(&mut self, now: Micros, out: &mut Effects) {
        let prefix = self.subjects.worker(Kind::Decode, &self.config.worker, "*");
        out.0.push(Effect::Subscribe(prefix.as_str().to_owned()));
        self.heartbeat(now, out);
    }

    fn wake_with(&mut self, wake: crate::engine::Wake) {
        self.engine.wake_with(wake);
    }

    fn handle(&mut self, now: Micros, input: Input, out: &mut Effects) {
        match input {
            Input::Message(message) => self.on_message(now, &message, out),
            Input::Reply { token, result } if self.moves.asked(token) => self.on_move_reply(now, token, result, out),
            Input::Reply { token, result } => self.on_sync_reply(now, token, result, out),
            Input::Sent { token, result } if self.moves.asked(token) => self.on_move_sent(now, token, result, out),
            Input::Sent { token, result } => self.on_sync_sent(now, token, result, out),
            Input::Local(_) | Input::Got { .. } | Input::Tick => {}
        }
        while let Some(token) = self.syncs.link.take_done(now) {
            self.on_sync_sent(now, token, Ok(()), out);
        }
        self.advance_moves(now, out);
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
            self.syncs.link.next_done(),
            self.moves.next_deadline(),
            Some(self.next_heartbeat),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}
