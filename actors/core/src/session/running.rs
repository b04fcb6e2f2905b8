//! The turn that is running: where it stands, whom it asks next, what of its answer the client has.

use super::types::{Action, Offer, Ranking, Turn};
use crate::dispatch::Rejects;
use pinion_schemas::limits::PAUSE_MILLIS_MAX;
use pinion_schemas::{AbortReason, FallbackReason, Micros, MigrationReason, WorkerId};
use serde::Serialize;
use std::collections::VecDeque;

/// Pause between rounds: 50 ms doubling to 2 s; the shell adds jitter by ticking late.
const BACKOFF: (Micros, Micros) = (Micros::from_millis(50), Micros::from_millis(2_000));
/// Longest pause that is kept: what a D may ask for, and the quarter of it that [`Pauses`](crate::pressure::Pauses) adds as
/// jitter. Without the quarter all sessions that hit the bound would ask at the same moment.
pub(super) const PAUSE_MAX: Micros = Micros::from_millis(PAUSE_MILLIS_MAX as u64 / 4 * 5);

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub(super) enum State {
    Routing,
    Asking { worker: WorkerId },
    Waiting { worker: WorkerId, heard: Micros },
    Seeding { worker: WorkerId, heard: Micros },
    Running { worker: WorkerId, heard: Micros },
    Paused { until: Micros },
    Backoff { until: Micros },
}

impl State {
    pub(super) fn worker(&self) -> Option<&WorkerId> {
        match self {
            Self::Asking { worker }
            | Self::Waiting { worker, .. }
            | Self::Seeding { worker, .. }
            | Self::Running { worker, .. } => Some(worker),
            Self::Routing | Self::Paused { .. } | Self::Backoff { .. } => None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub(super) struct Active {
    pub(super) turn: Turn,
    pub(super) state: State,
    pub(super) attempt: u64,
    pub(super) round: u32,
    /// Candidates of this round not yet asked, best first.
    pub(super) offers: VecDeque<Offer>,
    /// Workers that failed this turn, as opposed to rejecting it.
    pub(super) avoid: Vec<WorkerId>,
    /// Why the pinned D does not serve this turn, if something was seen.
    pub(super) moved_by: Option<MigrationReason>,
    /// Set when a round has found nobody: whoever serves the turn after that does not keep the session.
    pub(super) fallback: Option<FallbackReason>,
    /// Whether every D asked so far said that the turn could never fit it.
    pub(super) never_fits: bool,
    /// Whether the D now asked gets the pages from elsewhere.
    pub(super) seeded: bool,
    /// Tokens of the answer the client has.
    pub(super) sent: u32,
    /// |D| and τ as the router last said, for the migration budget.
    pub(super) workers: usize,
    pub(super) rejects_max: u32,
}

impl Active {
    pub(super) fn new(turn: Turn, attempt: u64) -> Self {
        let sent = turn.already_sent;
        Self {
            turn,
            state: State::Routing,
            attempt,
            round: 0,
            offers: VecDeque::new(),
            avoid: Vec::new(),
            moved_by: None,
            fallback: None,
            never_fits: true,
            seeded: false,
            sent,
            workers: 0,
            rejects_max: 0,
        }
    }

    /// Whether the client has all of the answer, so that there is nothing left to run.
    pub(super) fn answered(&self) -> bool {
        self.sent >= self.turn.answer_max
    }

    pub(super) fn route(&mut self, rejects: &Rejects, out: &mut Vec<Action>) {
        self.state = State::Routing;
        out.push(Action::Route {
            request: self.turn.request,
            attempt: self.attempt,
            avoid: self.avoid.clone(),
            rejects: rejects.view().iter().map(|(w, n)| (w.clone(), *n)).collect(),
        });
    }

    /// Takes the router's answer. No pause is kept longer than [`PAUSE_MAX`] from here, whatever is said.
    pub(super) fn ranked(&mut self, now: Micros, ranking: Ranking) {
        let latest = now.plus(PAUSE_MAX);
        let bounded = |o: Offer| Offer {
            not_before: o.not_before.min(latest),
            ..o
        };
        self.offers = ranking.offers.into_iter().map(bounded).collect();
        self.moved_by = ranking.pin_gone.or(self.moved_by);
        (self.workers, self.rejects_max) = (ranking.workers, ranking.rejects_max);
    }

    /// Asks the best candidate that may be asked now. If all are paused, waits for the first pause to end; if there is none
    /// left, a round is over and the turn may run as a fallback, after a while.
    ///
    /// The router puts a paused pin in front only if moving the session would cost more than the pause: it is waited for.
    pub(super) fn ask_next(
        &mut self,
        now: Micros,
        pin: Option<&WorkerId>,
        exhausted: FallbackReason,
        out: &mut Vec<Action>,
    ) {
        let pin_first = self.offers.front().is_some_and(|o| pin == Some(&o.worker));
        let considered = if pin_first { 1 } else { self.offers.len() };
        let free = self.offers.iter().take(considered).position(|o| o.not_before <= now);
        if let Some(offer) = free.and_then(|place| self.offers.remove(place)) {
            self.seeded = false;
            return self.ask(offer.worker, pin, out);
        }
        let pauses = self.offers.iter().take(considered).map(|o| o.not_before);
        if let Some(until) = pauses.min() {
            self.state = State::Paused { until };
            return;
        }
        self.fallback = Some(exhausted);
        self.back_off(now);
        self.round += 1;
    }

    /// Rests before the next round, longer each time.
    pub(super) fn back_off(&mut self, now: Micros) {
        let doubled = BACKOFF.0.0.saturating_mul(1 << self.round.min(16));
        self.state = State::Backoff {
            until: now.plus(Micros(doubled.min(BACKOFF.1.0))),
        };
    }

    /// Sends `Run` to this D. On the pin it is no fallback, however long it took: the session is there.
    pub(super) fn ask(&mut self, worker: WorkerId, pin: Option<&WorkerId>, out: &mut Vec<Action>) {
        out.push(Action::AskRun {
            worker: worker.clone(),
            request: self.turn.request,
            attempt: self.attempt,
            fallback: self.fallback.filter(|_| pin != Some(&worker)),
            already_sent: self.sent,
        });
        self.state = State::Asking { worker };
    }

    /// Passes on what the client does not have yet. Behind a gap nothing is: `Completed` brings the whole answer.
    pub(super) fn relay(&mut self, offset: u32, tokens: &[u32], out: &mut Vec<Action>) {
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

    pub(super) fn abort(&self, reason: AbortReason, out: &mut Vec<Action>) {
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
