//! What happens to a turn: the session machine, one per session, owner of turn order, pin, committed chain and
//! migration history (design §2, §4).
//!
//! | state \ fact | `Ranked` | `Started` | `Permit` | `Queued` | `Rejected` | `LegFailed` | `Progress` | `Completed` | due |
//! |---|---|---|---|---|---|---|---|---|---|
//! | `Routing` | → `Asking`, `Paused` or `Backoff` | – | – | – | – | – | – | – | – |
//! | `Paused` | – | – | – | – | – | – | – | – | ask the candidate |
//! | `Asking` | – | → `Running` | → `Seeding` | → `Waiting` | next candidate | re-route | relay, → `Running` | commit | – |
//! | `Waiting` | – | → `Running` | → `Seeding` | – | next candidate | re-route | relay, → `Running` | commit | ask the same D again |
//! | `Seeding` | – | → `Running` | – | – | next candidate | re-route | relay, → `Running` | commit | ask the same D again |
//! | `Running` | – | – | – | – | – | re-route (fail-over) | relay | commit | ask the same D again |
//! | `Backoff` | – | – | – | – | – | – | – | – | → `Routing` or fail |
//!
//! In every state `Cancelled`, `Superseded` and the turn's deadline end it, and losing the D it is on re-routes it. "–"
//! changes nothing. Every fact about a turn carries the number of the attempt it belongs to; one of an older attempt changes
//! nothing (I7). Each accepted turn ends with exactly one [`Action::Finish`] (I1), and by then every leg it opened has
//! completed or got an [`Action::Abort`] (I12), except that seeds and running legs outlive their owner: the next one takes them
//! over. The answer's tokens are relayed once each and in order, whatever workers did (I2). Turns run one at a time, so they commit in order (I6).
//!
//! **When the pin moves** (`Session::bind`): only with a completed turn, and never for a passing reject.
//! At once if the pinned D is lost or leaves. Else when it has rejected the session τ times since it last served it directly,
//! or when other D have served τ turns in a row: then the session's newest pages are elsewhere to stay. Before that the pin
//! waits: going back costs one short append or reseed (digest R4, R5), while following each reject made the prototype's
//! sessions wander. So a burst of 3 rejects moves the pin at most once, and a budget of (|D|−1)·τ bounds a session's life
//! ([`Rejects::may_migrate`]). Where the next turn is *tried* first is the router's choice; it follows the pages anyway.
//!
//! It must not know: capacity (only a D rejects for it, digest R3), link health, how candidates are ranked.

mod running;
mod types;
mod view;

pub use types::{Action, Commit, Fact, Migration, Offer, Outcome, Ranking, Snapshot, Turn, TurnFact};

use crate::dispatch::Rejects;
use pinion_schemas::{
    AbortReason, Epoch, FallbackReason, Micros, MigrationReason, PageHash, Path, RejectReason, RequestId, TurnIndex,
    WorkerId,
};
use running::{Active, State};
use serde::Serialize;
use std::collections::VecDeque;

/// Turns a session may have waiting; an agent sends one at a time, so more is a client's mistake.
pub const QUEUED_TURNS_MAX: usize = 16;
/// Rounds over all candidates before a turn fails as [`AbortReason::RetriesSpent`].
pub const ROUNDS_MAX: u32 = 32;
/// A turn that a D has, and of which nothing was heard for so long, is asked for again: what was said last may be lost. A D
/// that runs it goes on; one that has it waiting, or for which it is seeded, gives the same answer again.
pub const SILENCE_MAX: Micros = Micros::from_secs(10);
/// Low bits of an attempt's number, which count within one owner: more than [`ROUNDS_MAX`] times the workers of any cluster.
/// Above them stands the owner's epoch, milliseconds since 1970 at most or little more, so that the sum fits for millennia.
const ATTEMPT_BITS: u32 = 16;
/// Migrations remembered for `inspect`.
const HISTORY_MAX: usize = 16;
/// Ended requests remembered, so that a repeated request gets its end again instead of being run again.
pub const ENDED_MAX: usize = 32;

/// The machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Session {
    epoch: Epoch,
    superseded: bool,
    next_turn: TurnIndex,
    pin: Option<WorkerId>,
    committed_tokens: u32,
    tip: Option<PageHash>,
    /// [`Turn::prompt_end`] of the last committed turn.
    prompt_end: Option<(u32, PageHash)>,
    waiting: VecDeque<Turn>,
    active: Option<Active>,
    rejects: Rejects,
    /// Turns in a row that others than the pin have served.
    away: u32,
    migrations: VecDeque<Migration>,
    ended: VecDeque<(RequestId, Outcome)>,
}

impl Session {
    /// Takes one fact and says what to do about it. Total: a fact that does not fit the state changes nothing.
    pub fn step(&mut self, now: Micros, fact: Fact) -> Vec<Action> {
        let mut out = Vec::new();
        match fact {
            Fact::Arrived(turn) => self.arrived(turn, &mut out),
            Fact::Turn { request, attempt, fact } => {
                if self.attempt(request) == Some(attempt) {
                    self.turn(now, fact, &mut out);
                }
            }
            Fact::Cancelled(request) => {
                self.end_where(&mut out, Outcome::Cancelled, AbortReason::ClientGone, |t| {
                    t.request == request
                });
            }
            Fact::WorkerLost(worker) => self.worker_lost(now, &worker, &mut out),
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

    /// A turn comes in. One that is known goes on; one that has ended is told its end again.
    fn arrived(&mut self, turn: Turn, out: &mut Vec<Action>) {
        let request = turn.request;
        let mut known = self.active.iter().map(|a| &a.turn).chain(&self.waiting);
        if known.any(|t| t.request == request) {
            return;
        }
        if let Some(outcome) = self.ended(request) {
            out.push(Action::FinishAgain { request, outcome });
        } else if self.superseded {
            let outcome = Outcome::Failed(AbortReason::Superseded);
            out.push(Action::Finish { request, outcome });
        } else if self.waiting.len() >= QUEUED_TURNS_MAX {
            let outcome = Outcome::Refused;
            out.push(Action::Finish { request, outcome });
        } else {
            self.waiting.push_back(turn);
        }
    }

    /// Takes the next turn in order. One whose answer the client has already (its last owner died then) only ends.
    fn start_next(&mut self, out: &mut Vec<Action>) {
        while self.active.is_none() {
            let Some(turn) = self.waiting.pop_front() else { return };
            // Attempts grow across owners too, so that a stream's reader can tell the newer one.
            let attempt = self.epoch.0 << ATTEMPT_BITS;
            let active = self.active.insert(Active::new(turn, attempt));
            if active.answered() {
                self.commit_answered(out);
            } else {
                active.route(&self.rejects, out);
            }
        }
    }

    /// What a fact of the present attempt does: the table above.
    fn turn(&mut self, now: Micros, fact: TurnFact, out: &mut Vec<Action>) {
        let pin = self.pin.as_ref();
        let Some(active) = self.active.as_mut() else { return };
        match (active.state.clone(), fact) {
            (State::Routing, TurnFact::Ranked(ranking)) => {
                active.ranked(now, ranking);
                active.ask_next(now, pin, FallbackReason::NoCandidate, out);
            }
            (
                State::Asking { worker } | State::Waiting { worker, .. } | State::Seeding { worker, .. },
                TurnFact::Started,
            ) => {
                active.state = State::Running { worker, heard: now };
            }
            (State::Asking { worker } | State::Waiting { worker, .. }, TurnFact::Permit(permit)) => {
                active.seeded = true;
                out.push(Action::Seed {
                    worker: worker.clone(),
                    request: active.turn.request,
                    attempt: active.attempt,
                    permit,
                });
                active.state = State::Seeding { worker, heard: now };
            }
            (State::Asking { worker }, TurnFact::Queued) => active.state = State::Waiting { worker, heard: now },
            (
                State::Asking { worker } | State::Waiting { worker, .. } | State::Seeding { worker, .. },
                TurnFact::Rejected(reason),
            ) => self.rejected(now, &worker, reason, out),
            (state, TurnFact::LegFailed(reason)) if state.worker().is_some() => self.fail_over(now, reason, out),
            // Tokens and the end also say that it runs: `Started` may be lost, or come later on another subject.
            (state, TurnFact::Progress { offset, tokens }) => {
                let Some(worker) = state.worker().cloned() else { return };
                active.state = State::Running { worker, heard: now };
                active.relay(offset, &tokens, out);
            }
            (state, TurnFact::Completed(commit)) => {
                let Some(worker) = state.worker() else { return };
                active.relay(0, &commit.answer, out);
                self.commit(now, worker, &commit, out);
            }
            _ => {}
        }
    }

    /// A D said no: it counts here, where it arrives (digest §1.5), and the next candidate is asked.
    fn rejected(&mut self, now: Micros, worker: &WorkerId, reason: RejectReason, out: &mut Vec<Action>) {
        let Some(active) = self.active.as_mut() else { return };
        self.rejects.rejected(worker, reason);
        if self.pin.as_ref() == Some(worker) {
            active.moved_by = Some(migration_reason(reason));
        }
        if matches!(active.state, State::Seeding { .. }) {
            active.abort(AbortReason::PartnerFailed, out);
        }
        active.attempt += 1;
        active.never_fits &= reason == RejectReason::NeverFits;
        if active.never_fits && active.offers.is_empty() {
            self.fail(AbortReason::TooLong, out);
        } else {
            active.ask_next(now, self.pin.as_ref(), FallbackReason::AllRejected, out);
        }
    }

    /// The D is gone for all turns of the session.
    fn worker_lost(&mut self, now: Micros, worker: &WorkerId, out: &mut Vec<Action>) {
        self.rejects.forget(worker);
        let Some(active) = self.active.as_mut() else { return };
        active.offers.retain(|o| o.worker != *worker);
        if self.pin.as_ref() == Some(worker) {
            active.moved_by = Some(MigrationReason::WorkerLost);
        }
        if active.state.worker() == Some(worker) {
            self.fail_over(now, AbortReason::DecodeLost, out);
        }
    }

    /// The present attempt is lost: abort what is left of it and route again, without the worker that failed.
    fn fail_over(&mut self, now: Micros, reason: AbortReason, out: &mut Vec<Action>) {
        let Some(active) = self.active.as_mut() else { return };
        active.abort(reason, out);
        let of_source = matches!(reason, AbortReason::PrefillLost | AbortReason::SourceLost);
        // A leg that died where pages come from says nothing about the D. And one failure does not make a D lost: the router says that.
        if let Some(worker) = active.state.worker().filter(|_| !of_source)
            && !active.avoid.contains(worker)
        {
            active.avoid.push(worker.clone());
        }
        active.attempt += 1;
        let asked_only = matches!(active.state, State::Asking { .. });
        if asked_only && reason == AbortReason::DecodeLost && !active.offers.is_empty() {
            // It never had the turn: on to the next candidate, as after a reject. Many may be dead at once.
            return active.ask_next(now, self.pin.as_ref(), FallbackReason::AllRejected, out);
        }
        active.round += 1;
        if active.answered() {
            self.commit_answered(out);
        } else if active.round >= ROUNDS_MAX {
            self.fail(AbortReason::RetriesSpent, out);
        } else if reason == AbortReason::PrefillLost && active.round > 1 {
            // No P can be had just now. Asking again at once would spend all rounds in some milliseconds.
            active.back_off(now);
        } else {
            active.route(&self.rejects, out);
        }
    }

    /// A D has completed the turn. On every path that moves the chain, or later appends would grow (digest R4).
    fn commit(&mut self, now: Micros, worker: &WorkerId, commit: &Commit, out: &mut Vec<Action>) {
        let Some(active) = self.active.take() else { return };
        let path = commit.path;
        self.next_turn = self.next_turn.next();
        self.committed_tokens = commit.tokens;
        self.tip = commit.tip;
        self.prompt_end = active.turn.prompt_end;
        if path == Path::Direct {
            // Only a direct success clears, and only this pair (digest T44, T50).
            self.rejects.completed_direct(worker);
        }
        if path != Path::Fallback {
            self.bind(now, worker, &active, out);
        }
        out.push(Action::Persist);
        self.finish(active.turn.request, Outcome::Completed(path), out);
    }

    /// The client has the whole answer, and the D that made it is not there to say so. No pages are known to be anywhere.
    fn commit_answered(&mut self, out: &mut Vec<Action>) {
        let Some(active) = self.active.take() else { return };
        self.next_turn = self.next_turn.next();
        self.committed_tokens = active.turn.prompt_tokens.saturating_add(active.sent);
        self.tip = None;
        self.prompt_end = active.turn.prompt_end;
        let path = if active.seeded { Path::Seed } else { Path::Direct };
        out.push(Action::Persist);
        self.finish(active.turn.request, Outcome::Completed(path), out);
    }

    /// `worker` has completed a turn and may keep the session: whether the pin moves there. See above.
    fn bind(&mut self, now: Micros, worker: &WorkerId, active: &Active, out: &mut Vec<Action>) {
        let from = self.pin.clone();
        if from.as_ref() == Some(worker) {
            self.away = 0;
            return;
        }
        let mut why = None;
        if let Some(old) = &from {
            self.away += 1;
            let reason = active.moved_by.unwrap_or(MigrationReason::Rebalance);
            let gone = matches!(reason, MigrationReason::WorkerLost | MigrationReason::Drain);
            let (tau, workers) = (active.rejects_max, active.workers);
            let settled = self.away >= tau || self.rejects.count(old) >= tau;
            let may = gone || settled && self.rejects.may_migrate(workers, tau);
            if !may {
                return;
            }
            self.rejects.migrated(reason);
            let migration = Migration {
                at: now,
                from: old.clone(),
                to: worker.clone(),
                reason,
            };
            push_bounded(&mut self.migrations, migration, HISTORY_MAX);
            why = Some(reason);
        }
        self.away = 0;
        self.pin = Some(worker.clone());
        let (to, reason) = (worker.clone(), why);
        out.push(Action::Bind { to, from, reason });
    }

    /// Does what is due: deadlines, pauses, backoffs, and asking after a turn that has gone silent.
    fn expire(&mut self, now: Micros, out: &mut Vec<Action>) {
        let reason = AbortReason::Deadline;
        self.end_where(out, Outcome::Failed(reason), reason, |t| t.deadline <= now);
        let pin = self.pin.as_ref();
        let Some(active) = self.active.as_mut() else { return };
        match active.state.clone() {
            State::Paused { until } if until <= now => {
                active.ask_next(now, pin, FallbackReason::AllRejected, out);
            }
            State::Running { worker, heard } | State::Waiting { worker, heard } | State::Seeding { worker, heard }
                if heard.plus(SILENCE_MAX) <= now =>
            {
                active.attempt += 1;
                active.ask(worker, pin, out);
            }
            State::Backoff { .. } if active.round >= ROUNDS_MAX => self.fail(AbortReason::RetriesSpent, out),
            State::Backoff { until } if until <= now => {
                active.attempt += 1;
                // A worker that failed once may be back; nothing is condemned for good (digest chain A).
                active.avoid.clear();
                active.route(&self.rejects, out);
            }
            _ => {}
        }
    }

    fn fail(&mut self, reason: AbortReason, out: &mut Vec<Action>) {
        if let Some(active) = self.active.take() {
            self.finish(active.turn.request, Outcome::Failed(reason), out);
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
            // For the next owner work goes on: it asks the same D, which then tells it instead (design §4). A mere promise does
            // not: should the next owner ask elsewhere, nobody would give it back.
            let works = matches!(active.state, State::Seeding { .. } | State::Running { .. });
            if reason != AbortReason::Superseded || !works {
                active.abort(reason, out);
            }
            self.finish(active.turn.request, outcome, out);
        }
        let (ended, kept): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(ends);
        self.waiting = kept.into();
        for turn in ended {
            self.finish(turn.request, outcome, out);
        }
    }

    fn finish(&mut self, request: RequestId, outcome: Outcome, out: &mut Vec<Action>) {
        push_bounded(&mut self.ended, (request, outcome), ENDED_MAX);
        out.push(Action::Finish { request, outcome });
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
