//! What happens to a turn: the session machine, one per session, owner of turn order, pin, committed chain and
//! migration history (design §2, §4).
//!
//! | state \ fact | `Ranked` | `Started` | `Permit` | `Queued` | `Rejected` | `LegFailed` | `Progress` | `Completed` | due |
//! |---|---|---|---|---|---|---|---|---|---|
//! | `Routing` | → `Asking`, or → `Backoff` | – | – | – | – | – | – | – | fail |
//! | `Asking` | – | → `Running` | → `Seeding` | → `Waiting` | next candidate | next candidate | – | – | fail |
//! | `Waiting` | – | → `Running` | → `Seeding` | stays | next candidate | next candidate | – | – | fail |
//! | `Seeding` | – | → `Running` | – | – | next candidate | re-route | – | – | fail |
//! | `Running` | – | – | – | – | – | re-route (fail-over) | relay | commit | fail |
//! | `Backoff` | – | – | – | – | – | – | – | – | → `Routing` or fail |
//!
//! `Cancelled` and `Superseded` end a turn in every state. "–" changes nothing. Every fact about a turn carries the number
//! of the attempt it belongs to; one of an older attempt changes nothing (I7). Each accepted turn ends with exactly one
//! [`Action::Finish`] (I1), and by then every leg it opened has completed or got an [`Action::Abort`] (I12). The answer's
//! tokens are relayed once each and in order, whatever workers did (I2). Turns run one at a time, so they commit in order
//! (I6), and the pin moves only when the new D has completed a turn (design §4.3).
//!
//! It must not know: capacity (only a D rejects for it, digest R3), link health, how candidates are ranked.

use pinion_schemas::{
    AbortReason, Class, Epoch, FallbackReason, Micros, MigrationReason, PageHash, Path, PermitId, RejectReason,
    RequestId, TurnIndex, WorkerId,
};
use serde::Serialize;
use std::collections::VecDeque;

/// Turns a session may have waiting; an agent sends one at a time, so more is a client's mistake.
pub const QUEUED_TURNS_MAX: usize = 16;
/// Rounds over all candidates before a turn fails as [`AbortReason::RetriesSpent`].
pub const ROUNDS_MAX: u32 = 32;
/// Low bits of an attempt's number, which count within one owner; above them stands the owner's epoch.
const ATTEMPT_BITS: u32 = 12;
/// Pause between rounds: 50 ms doubling to 2 s; the shell adds jitter by ticking late.
const BACKOFF: (Micros, Micros) = (Micros::from_millis(50), Micros::from_millis(2_000));
/// Migrations remembered for `inspect`.
const HISTORY_MAX: usize = 16;
/// Ended requests remembered, so that a repeated request is recognised instead of run again.
const ENDED_MAX: usize = 32;

/// A turn as it was accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Turn {
    /// The client's request; a repeat of a known one changes nothing.
    pub request: RequestId,
    /// Service class.
    pub class: Class,
    /// When it fails if it has not ended.
    pub deadline: Micros,
    /// Tokens of the answer the client has from an earlier owner.
    pub already_sent: u32,
}

/// What a completed turn leaves on its D.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Commit {
    /// Tokens of the context with the answer.
    pub tokens: u32,
    /// Name of the last full page.
    pub tip: Option<PageHash>,
    /// The whole answer; it fills what was lost of the stream on the bus.
    pub answer: Vec<u32>,
}

/// One thing that happened to the turn that is running, in its attempt number `attempt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TurnFact {
    /// The router ranked candidates, best first; none means that no D is known to be alive.
    Ranked(Vec<WorkerId>),
    /// The D runs the turn.
    Started,
    /// The D promised room; a seed may start.
    Permit(PermitId),
    /// The D put the turn into its permit queue.
    Queued,
    /// The D said no.
    Rejected(RejectReason),
    /// A leg (decode, prefill or the transfer between them) failed.
    LegFailed(AbortReason),
    /// Tokens of the answer, the first at `offset`.
    Progress {
        /// Position of the first token in the answer.
        offset: u32,
        /// The tokens.
        tokens: Vec<u32>,
    },
    /// The D completed and committed the turn.
    Completed(Commit),
}

/// What the shell tells the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// The gateway handed over a turn.
    Arrived(Turn),
    /// Something happened to an attempt of a turn.
    Turn {
        /// The turn.
        request: RequestId,
        /// The attempt.
        attempt: u32,
        /// What happened.
        fact: TurnFact,
    },
    /// The client went away.
    Cancelled(RequestId),
    /// A D died or is unreachable.
    WorkerLost(WorkerId),
    /// Another owner has taken the session over, in this epoch.
    Superseded(Epoch),
    /// Time passed.
    Tick,
}

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Outcome {
    /// The answer is complete.
    Completed(Path),
    /// The client went away.
    Cancelled,
    /// With a reason the client is told.
    Failed(AbortReason),
    /// Not accepted: too many turns are waiting.
    Refused,
}

/// What the machine tells the shell to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Ask the router for candidates, without those in `avoid`.
    Route {
        /// The turn.
        request: RequestId,
        /// Its attempt.
        attempt: u32,
        /// Workers that are lost to this turn.
        avoid: Vec<WorkerId>,
    },
    /// Send `Run` to the D. `already_sent` tokens of the answer are part of its context and must not come again.
    AskRun {
        /// The D.
        worker: WorkerId,
        /// The turn.
        request: RequestId,
        /// Its attempt.
        attempt: u32,
        /// Whether the session stays there; `Some` reason makes it a fallback.
        fallback: Option<FallbackReason>,
        /// Tokens of the answer the client has.
        already_sent: u32,
    },
    /// Choose a P and have it send what is missing on the D.
    Seed {
        /// The D.
        worker: WorkerId,
        /// The turn.
        request: RequestId,
        /// Its attempt.
        attempt: u32,
        /// The D's promise.
        permit: PermitId,
    },
    /// Stop every leg of this attempt that touches the D.
    Abort {
        /// The D.
        worker: WorkerId,
        /// The turn.
        request: RequestId,
        /// The attempt.
        attempt: u32,
        /// Why.
        reason: AbortReason,
    },
    /// Give the client these tokens, the first at `offset`.
    Relay {
        /// The turn.
        request: RequestId,
        /// Position of the first token in the answer.
        offset: u32,
        /// The tokens.
        tokens: Vec<u32>,
    },
    /// Tell the D that the session is its own; tell the old one that it is not.
    Bind {
        /// The new D.
        to: WorkerId,
        /// The old one.
        from: Option<WorkerId>,
        /// Why it moved, if it did.
        reason: Option<MigrationReason>,
    },
    /// Write the snapshot; the commit is durable as a cache of truth only (design §7).
    Persist,
    /// The turn has ended.
    Finish {
        /// The turn.
        request: RequestId,
        /// How.
        outcome: Outcome,
    },
}

/// A move of the pin, for `explain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Migration {
    /// When it was committed.
    pub at: Micros,
    /// From where.
    pub from: WorkerId,
    /// To where.
    pub to: WorkerId,
    /// Why.
    pub reason: MigrationReason,
}

/// What is kept of a session outside its owner's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Snapshot {
    /// Epoch of the owner that wrote it.
    pub epoch: Epoch,
    /// Turns committed.
    pub next_turn: TurnIndex,
    /// The D the session belongs to.
    pub pin: Option<String>,
    /// Committed tokens.
    pub committed_tokens: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
enum State {
    Routing,
    Asking { worker: WorkerId },
    Waiting { worker: WorkerId },
    Seeding { worker: WorkerId },
    Running { worker: WorkerId, seeded: bool },
    Backoff { until: Micros },
}

impl State {
    fn worker(&self) -> Option<&WorkerId> {
        match self {
            Self::Asking { worker } | Self::Waiting { worker } | Self::Seeding { worker } => Some(worker),
            Self::Running { worker, .. } => Some(worker),
            Self::Routing | Self::Backoff { .. } => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Active {
    turn: Turn,
    state: State,
    attempt: u32,
    round: u32,
    /// Candidates of this round not yet asked, best first.
    candidates: VecDeque<WorkerId>,
    /// Workers that failed this turn, as opposed to rejecting it.
    avoid: Vec<WorkerId>,
    /// Why the pinned D does not serve this turn, if something was seen.
    moved_by: Option<MigrationReason>,
    fallback: Option<FallbackReason>,
    /// Whether every D asked so far said that the turn could never fit it.
    never_fits: bool,
    /// Tokens of the answer the client has.
    sent: u32,
}

/// The machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Session {
    epoch: Epoch,
    superseded: bool,
    next_turn: TurnIndex,
    pin: Option<WorkerId>,
    committed_tokens: u32,
    tip: Option<PageHash>,
    waiting: VecDeque<Turn>,
    active: Option<Active>,
    migrations: VecDeque<Migration>,
    ended: VecDeque<RequestId>,
}

impl Session {
    /// A session without history, owned in `epoch`.
    pub fn new(epoch: Epoch) -> Self {
        Self {
            epoch,
            superseded: false,
            next_turn: TurnIndex(0),
            pin: None,
            committed_tokens: 0,
            tip: None,
            waiting: VecDeque::new(),
            active: None,
            migrations: VecDeque::new(),
            ended: VecDeque::new(),
        }
    }

    /// The D the session belongs to.
    pub fn pin(&self) -> Option<&WorkerId> {
        self.pin.as_ref()
    }

    /// Turns committed so far.
    pub fn next_turn(&self) -> TurnIndex {
        self.next_turn
    }

    /// Committed tokens.
    pub fn committed_tokens(&self) -> u32 {
        self.committed_tokens
    }

    /// Number of the attempt that `request` is in, while it is the running turn.
    pub fn attempt(&self, request: RequestId) -> Option<u32> {
        self.active
            .as_ref()
            .filter(|a| a.turn.request == request)
            .map(|a| a.attempt)
    }

    /// What the next owner needs: written after each commit.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            epoch: self.epoch,
            next_turn: self.next_turn,
            pin: self.pin.as_ref().map(|w| w.as_str().to_owned()),
            committed_tokens: self.committed_tokens,
        }
    }

    /// A session as an earlier owner left it, now owned in `epoch`. The snapshot may be old: what it says is only where to
    /// look first, and the D that is asked decides by what it holds.
    pub fn restore(epoch: Epoch, snapshot: &Snapshot) -> Self {
        let mut session = Self::new(epoch);
        session.next_turn = snapshot.next_turn;
        session.pin = snapshot.pin.as_deref().and_then(|w| WorkerId::new(w).ok());
        session.committed_tokens = snapshot.committed_tokens;
        session
    }

    /// The state for `inspect`, `explain` and tests.
    pub fn view(&self) -> &impl Serialize {
        self
    }

    /// When a [`Fact::Tick`] is due at the latest.
    pub fn next_deadline(&self) -> Option<Micros> {
        let backoff = self.active.as_ref().and_then(|a| match a.state {
            State::Backoff { until } => Some(until),
            _ => None,
        });
        let turns = self.active.iter().map(|a| &a.turn).chain(&self.waiting);
        turns.map(|t| t.deadline).chain(backoff).min()
    }

    /// Takes one fact and says what to do about it. Total: a fact that does not fit the state changes nothing.
    pub fn step(&mut self, now: Micros, fact: Fact) -> Vec<Action> {
        let mut out = Vec::new();
        match fact {
            Fact::Arrived(turn) => self.arrived(turn, &mut out),
            Fact::Turn { request, attempt, fact } => {
                if self
                    .active
                    .as_ref()
                    .is_some_and(|a| a.turn.request == request && a.attempt == attempt)
                {
                    self.turn(now, fact, &mut out);
                }
            }
            Fact::Cancelled(request) => {
                self.end_where(&mut out, Outcome::Cancelled, AbortReason::ClientGone, |t| {
                    t.request == request
                });
            }
            Fact::WorkerLost(worker) => {
                if self.active.as_ref().and_then(|a| a.state.worker()) == Some(&worker) {
                    self.fail_over(AbortReason::DecodeLost, &mut out);
                }
            }
            Fact::Superseded(epoch) => {
                if epoch > self.epoch {
                    self.superseded = true;
                    let reason = AbortReason::Superseded;
                    self.end_where(&mut out, Outcome::Failed(reason), reason, |_| true);
                }
            }
            Fact::Tick => {}
        }
        self.expire(now, &mut out);
        self.start_next(&mut out);
        out
    }

    fn arrived(&mut self, turn: Turn, out: &mut Vec<Action>) {
        let request = turn.request;
        let known = self
            .active
            .iter()
            .map(|a| &a.turn)
            .chain(&self.waiting)
            .any(|t| t.request == request);
        if known || self.ended.contains(&request) {
            return;
        }
        if self.superseded {
            out.push(Action::Finish {
                request,
                outcome: Outcome::Failed(AbortReason::Superseded),
            });
        } else if self.waiting.len() >= QUEUED_TURNS_MAX {
            out.push(Action::Finish {
                request,
                outcome: Outcome::Refused,
            });
        } else {
            self.waiting.push_back(turn);
        }
    }

    fn start_next(&mut self, out: &mut Vec<Action>) {
        if self.active.is_some() {
            return;
        }
        let Some(turn) = self.waiting.pop_front() else { return };
        // Attempts grow across owners too, so that a stream's reader can tell the newer one.
        let attempt = (self.epoch.0 as u32) << ATTEMPT_BITS;
        let sent = turn.already_sent;
        out.push(Action::Route {
            request: turn.request,
            attempt,
            avoid: Vec::new(),
        });
        self.active = Some(Active {
            turn,
            state: State::Routing,
            attempt,
            round: 0,
            candidates: VecDeque::new(),
            avoid: Vec::new(),
            moved_by: None,
            fallback: None,
            never_fits: true,
            sent,
        });
    }

    fn turn(&mut self, now: Micros, fact: TurnFact, out: &mut Vec<Action>) {
        let pin = self.pin.clone();
        let Some(active) = self.active.as_mut() else { return };
        match (active.state.clone(), fact) {
            (State::Routing, TurnFact::Ranked(candidates)) => {
                active.candidates = candidates.into();
                active.ask_next(now, FallbackReason::NoCandidate, out);
            }
            (State::Asking { worker } | State::Waiting { worker }, TurnFact::Started) => {
                active.state = State::Running { worker, seeded: false };
            }
            (State::Seeding { worker }, TurnFact::Started) => {
                active.state = State::Running { worker, seeded: true };
            }
            (State::Asking { worker } | State::Waiting { worker }, TurnFact::Permit(permit)) => {
                let (request, attempt) = (active.turn.request, active.attempt);
                out.push(Action::Seed {
                    worker: worker.clone(),
                    request,
                    attempt,
                    permit,
                });
                active.state = State::Seeding { worker };
            }
            (State::Asking { worker }, TurnFact::Queued) => active.state = State::Waiting { worker },
            (
                State::Asking { worker } | State::Waiting { worker } | State::Seeding { worker },
                TurnFact::Rejected(reason),
            ) => {
                if pin.as_ref() == Some(&worker) {
                    active.moved_by = Some(migration_reason(reason));
                }
                active.attempt += 1;
                active.never_fits &= reason == RejectReason::NeverFits;
                if active.never_fits && active.candidates.is_empty() {
                    let request = active.turn.request;
                    self.active = None;
                    self.finish(request, Outcome::Failed(AbortReason::TooLong), out);
                } else {
                    active.ask_next(now, FallbackReason::AllRejected, out);
                }
            }
            (state, TurnFact::LegFailed(reason)) if state.worker().is_some() => self.fail_over(reason, out),
            (State::Running { .. }, TurnFact::Progress { offset, tokens }) => {
                active.relay(offset, &tokens, out);
            }
            (State::Running { worker, seeded }, TurnFact::Completed(commit)) => {
                active.relay(0, &commit.answer, out);
                self.commit(now, &worker, seeded, &commit, out);
            }
            _ => {}
        }
    }

    fn commit(&mut self, now: Micros, worker: &WorkerId, seeded: bool, commit: &Commit, out: &mut Vec<Action>) {
        let Some(active) = self.active.take() else { return };
        let path = match (active.fallback, seeded, self.next_turn) {
            (Some(_), ..) => Path::Fallback,
            (None, false, _) => Path::Direct,
            (None, true, TurnIndex(0)) => Path::Seed,
            (None, true, _) => Path::Reseed,
        };
        // Every completed turn moves the chain, on whatever path, or later appends would grow (digest R4).
        self.next_turn = self.next_turn.next();
        self.committed_tokens = commit.tokens;
        self.tip = commit.tip;
        if path != Path::Fallback && self.pin.as_ref() != Some(worker) {
            let from = self.pin.replace(worker.clone());
            let reason = from
                .as_ref()
                .map(|_| active.moved_by.unwrap_or(MigrationReason::Rebalance));
            if let (Some(from), Some(reason)) = (from.clone(), reason) {
                push_bounded(
                    &mut self.migrations,
                    Migration {
                        at: now,
                        from,
                        to: worker.clone(),
                        reason,
                    },
                    HISTORY_MAX,
                );
            }
            out.push(Action::Bind {
                to: worker.clone(),
                from,
                reason,
            });
        }
        out.push(Action::Persist);
        self.finish(active.turn.request, Outcome::Completed(path), out);
    }

    /// The present attempt is lost: abort what is left of it and route again, without the worker that failed.
    fn fail_over(&mut self, reason: AbortReason, out: &mut Vec<Action>) {
        let pin = self.pin.clone();
        let Some(active) = self.active.as_mut() else { return };
        active.abort(reason, out);
        if let Some(worker) = active.state.worker().cloned() {
            if pin.as_ref() == Some(&worker) {
                active.moved_by = Some(MigrationReason::WorkerLost);
            }
            // A prefill leg that died says nothing about the D.
            if reason != AbortReason::PrefillLost && !active.avoid.contains(&worker) {
                active.avoid.push(worker);
            }
        }
        active.attempt += 1;
        active.round += 1;
        if active.round >= ROUNDS_MAX {
            let request = active.turn.request;
            self.active = None;
            self.finish(request, Outcome::Failed(AbortReason::RetriesSpent), out);
        } else {
            active.route(out);
        }
    }

    /// Ends what is past its deadline, and the backoff that is over.
    fn expire(&mut self, now: Micros, out: &mut Vec<Action>) {
        let reason = AbortReason::Deadline;
        self.end_where(out, Outcome::Failed(reason), reason, |t| t.deadline <= now);
        let Some(active) = self.active.as_mut() else { return };
        let State::Backoff { until } = active.state else { return };
        if active.round >= ROUNDS_MAX {
            let request = active.turn.request;
            self.active = None;
            self.finish(request, Outcome::Failed(AbortReason::RetriesSpent), out);
        } else if until <= now {
            active.attempt += 1;
            // A worker that failed once may be back; nothing is condemned for good (digest chain A).
            active.avoid.clear();
            active.route(out);
        }
    }

    fn end_where(
        &mut self,
        out: &mut Vec<Action>,
        outcome: Outcome,
        reason: AbortReason,
        ends: impl Fn(&Turn) -> bool,
    ) {
        if let Some(active) = self.active.take_if(|a| ends(&a.turn)) {
            active.abort(reason, out);
            self.finish(active.turn.request, outcome, out);
        }
        let (ended, kept): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(ends);
        self.waiting = kept.into();
        for turn in ended {
            self.finish(turn.request, outcome, out);
        }
    }

    fn finish(&mut self, request: RequestId, outcome: Outcome, out: &mut Vec<Action>) {
        push_bounded(&mut self.ended, request, ENDED_MAX);
        out.push(Action::Finish { request, outcome });
    }
}

impl Active {
    fn route(&mut self, out: &mut Vec<Action>) {
        self.state = State::Routing;
        let (request, attempt) = (self.turn.request, self.attempt);
        out.push(Action::Route {
            request,
            attempt,
            avoid: self.avoid.clone(),
        });
    }

    /// Asks the next candidate; when there is none, the rest of the turn may run as a fallback, after a pause.
    fn ask_next(&mut self, now: Micros, exhausted: FallbackReason, out: &mut Vec<Action>) {
        if let Some(worker) = self.candidates.pop_front() {
            out.push(Action::AskRun {
                worker: worker.clone(),
                request: self.turn.request,
                attempt: self.attempt,
                fallback: self.fallback,
                already_sent: self.sent,
            });
            self.state = State::Asking { worker };
            return;
        }
        self.fallback = Some(exhausted);
        let doubled = BACKOFF.0.0.saturating_mul(1 << self.round.min(16));
        self.round += 1;
        self.state = State::Backoff {
            until: now.plus(Micros(doubled.min(BACKOFF.1.0))),
        };
    }

    /// Passes on what the client does not have yet. Behind a gap nothing is: `Completed` brings the whole answer.
    fn relay(&mut self, offset: u32, tokens: &[u32], out: &mut Vec<Action>) {
        let Some(known) = self.sent.checked_sub(offset) else {
            return;
        };
        let Some(fresh) = tokens.get(known as usize..).filter(|t| !t.is_empty()) else {
            return;
        };
        let offset = self.sent;
        self.sent += fresh.len() as u32;
        out.push(Action::Relay {
            request: self.turn.request,
            offset,
            tokens: fresh.to_vec(),
        });
    }

    fn abort(&self, reason: AbortReason, out: &mut Vec<Action>) {
        if let Some(worker) = self.state.worker().cloned() {
            out.push(Action::Abort {
                worker,
                request: self.turn.request,
                attempt: self.attempt,
                reason,
            });
        }
    }
}

fn migration_reason(reject: RejectReason) -> MigrationReason {
    match reject {
        RejectReason::Draining => MigrationReason::Drain,
        RejectReason::NotResident => MigrationReason::Evicted,
        _ => MigrationReason::Rejected,
    }
}

fn push_bounded<T>(queue: &mut VecDeque<T>, item: T, max: usize) {
    if queue.len() >= max {
        queue.pop_front();
    }
    queue.push_back(item);
}

#[cfg(test)]
mod tests;
