//! What is said of turns under way: by workers, by the bus about requests, and by silence.

use super::{Asked, CLIENT_LOOK, CLIENT_MISSES_MAX, Pending, ROUTER, Sessions, view::Said};
use crate::effect::{Effects, Local, Tried};
use pinion_bus::{BusError, Message};
use pinion_core::session::{Commit, Fact, TurnFact};
use pinion_schemas::messages::{
    Accepted, Completed, LegFailed, Permit, PermitExpired, PermitQueued, Probe, Reject, SeedDone, Started,
};
use pinion_schemas::shard::shard_of;
use pinion_schemas::subject::Kind;
use pinion_schemas::{AbortReason, Micros, RequestId, SessionId, WorkerId, wire};

impl Sessions {
    pub(super) fn on_started(&mut self, now: Micros, started: &Started, out: &mut Effects) {
        if let Some(turn) = self.present(started.request, started.attempt) {
            turn.seeding_on = None;
        }
        self.hint(started.request, started.attempt, started.pause_millis, out);
        self.fact(now, started.request, started.attempt, TurnFact::Started, out);
    }

    pub(super) fn on_permit(&mut self, now: Micros, permit: &Permit, out: &mut Effects) {
        self.hint(permit.request, permit.attempt, permit.pause_millis, out);
        if let Some(turn) = self.present(permit.request, permit.attempt) {
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

    /// The pages are on the D, which starts the turn by itself: people are told what it took.
    pub(super) fn on_seed_done(&mut self, now: Micros, done: &SeedDone, out: &mut Effects) {
        let Some(turn) = self.present(done.request, done.attempt) else {
            return;
        };
        let (session, worker) = (turn.submit.session.clone(), turn.seeded_by.clone());
        let said = Said {
            request: Some(done.request),
            worker: worker.as_ref(),
            computed_tokens: Some(done.computed_tokens),
            moved_pages: Some(done.moved_pages),
            ..Said::of("seeded")
        };
        self.say(now, &session, said, out);
    }

    /// The promise has run out before the pages were there: that is the doing of who was to send them.
    pub(super) fn on_permit_expired(&mut self, now: Micros, expired: &PermitExpired, out: &mut Effects) {
        self.source_lost(now, expired.request, expired.attempt, out);
    }

    /// The leg on the worker that sends pages has failed, and nobody is there to say so.
    pub(super) fn source_lost(&mut self, now: Micros, request: RequestId, attempt: u64, out: &mut Effects) {
        let reason = AbortReason::PrefillLost;
        let failed = LegFailed {
            request,
            attempt,
            reason,
        };
        self.on_leg_failed(now, &failed, out);
    }

    /// A D that takes the turn asks for a pause all the same.
    pub(super) fn hint(&mut self, request: RequestId, attempt: u64, pause_millis: u32, out: &mut Effects) {
        let asked = self.present(request, attempt).and_then(|t| t.asked.as_ref());
        if let (Some((worker, _)), true) = (asked, pause_millis > 0) {
            let (worker, what) = (worker.clone(), Tried::Hinted(pause_millis));
            out.tell(ROUTER, Local::Outcome { worker, what });
        }
    }

    pub(super) fn on_reject(&mut self, now: Micros, reject: &Reject, out: &mut Effects) {
        let Some(turn) = self.turns.get(&reject.request) else {
            return;
        };
        let session = turn.submit.session.clone();
        let worker = turn.asked.as_ref().map(|(w, _)| w.clone());
        let what = Tried::Rejected(reject.pause_millis);
        self.left(reject.request, reject.attempt, what, out);
        let said = Said {
            request: Some(reject.request),
            worker: worker.as_ref(),
            detail: Some(reject.reason.label()),
            ..Said::of("rejected")
        };
        self.say(now, &session, said, out);
        self.fact(
            now,
            reject.request,
            reject.attempt,
            TurnFact::Rejected(reject.reason),
            out,
        );
    }

    /// Tells the router how the attempt at a D went: once for each that it was told of.
    pub(super) fn left(&mut self, request: RequestId, attempt: u64, what: Tried, out: &mut Effects) {
        let asked = self.turns.get_mut(&request).map(|t| &mut t.asked);
        if let Some((worker, _)) = asked.and_then(|a| a.take_if(|(_, number)| *number == attempt)) {
            out.tell(ROUTER, Local::Outcome { worker, what });
        }
    }

    pub(super) fn on_leg_failed(&mut self, now: Micros, failed: &LegFailed, out: &mut Effects) {
        if let Some(turn) = self.present(failed.request, failed.attempt) {
            // It is told to stop when the machine aborts the attempt.
            let of_source = failed.reason != AbortReason::DecodeLost;
            let source = turn.seeding_on.as_ref().filter(|_| of_source);
            turn.bad_sources.extend(source.map(|(_, worker)| worker.clone()));
        }
        self.fact(
            now,
            failed.request,
            failed.attempt,
            TurnFact::LegFailed(failed.reason),
            out,
        );
    }

    pub(super) fn on_completed(&mut self, now: Micros, done: Completed, out: &mut Effects) {
        let (request, attempt) = (done.request, done.attempt);
        let commit = Commit {
            tokens: done.committed_tokens,
            tip: done.tip,
            path: done.path,
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

    pub(super) fn on_reply(&mut self, now: Micros, token: u64, result: Result<Message, BusError>, out: &mut Effects) {
        let Some(Pending {
            request,
            attempt,
            session,
            asked,
        }) = self.pending.remove(&token)
        else {
            return;
        };
        match (asked, result) {
            (Asked::Run { worker }, Ok(message)) if self.present(request, attempt).is_none() => {
                self.give_back(request, attempt, &session, &worker, &message, out);
            }
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
            (Asked::Client, result) => self.on_client(now, &session, request, &result, out),
            (Asked::Seed { .. }, Ok(message)) => crate::dispatch!(message, {
                Accepted(_) => {},
                LegFailed(f) => self.on_leg_failed(now, &f, out),
            }),
            (Asked::Seed { worker }, Err(error)) => {
                tracing::info!(%worker, %error, "the worker that was to send pages is not reached");
                self.source_lost(now, request, attempt, out);
            }
        }
    }

    /// A D has taken, or promised room to, a turn that is over or is tried elsewhere by now: it gets that back at once, not at
    /// its deadline. Of a session that has another owner by now it was given back when that one came.
    pub(super) fn give_back(
        &self,
        request: RequestId,
        attempt: u64,
        session: &SessionId,
        worker: &WorkerId,
        answer: &Message,
        out: &mut Effects,
    ) {
        let refused = wire::decode::<Reject>(&answer.payload).is_ok();
        if refused || !self.owned.contains_key(&shard_of(session)) {
            return;
        }
        let reason = AbortReason::PartnerFailed;
        self.send_abort(session, (request, attempt), reason, (Kind::Decode, worker), out);
    }

    /// Asks the bus whether the gateways of all running turns are there. They do not answer: that nobody listens is known at
    /// once, and silence means that somebody does.
    pub(super) fn look_for_clients(&mut self, now: Micros, out: &mut Effects) {
        if now < self.next_look {
            return;
        }
        self.next_look = now.plus(CLIENT_LOOK);
        let looks = self
            .turns
            .iter()
            .map(|(r, t)| (*r, t.submit.session.clone(), t.submit.stream.clone()));
        for (request, session, stream) in looks.collect::<Vec<_>>() {
            let probe = Probe {
                nonce: request.0 as u64,
            };
            let pending = Pending {
                request,
                attempt: 0,
                session,
                asked: Asked::Client,
            };
            self.ask(stream, &probe, pending, out);
        }
    }

    pub(super) fn on_client(
        &mut self,
        now: Micros,
        session: &SessionId,
        request: RequestId,
        result: &Result<Message, BusError>,
        out: &mut Effects,
    ) {
        let Some(turn) = self.turns.get_mut(&request) else {
            return;
        };
        turn.unheard = match result {
            Err(BusError::NoResponders { .. }) => turn.unheard + 1,
            _ => 0,
        };
        if turn.unheard >= CLIENT_MISSES_MAX {
            tracing::info!(%request, "its gateway is gone: the turn is cancelled");
            self.step(now, session, Fact::Cancelled(request), out);
        }
    }
}
