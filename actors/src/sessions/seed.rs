//! A D has promised room: somebody is asked to send it the session's pages. Who, says [`pinion_core::plan`].

use super::view::Said;
use super::{Asked, Pending, Sessions, Turn};
use crate::effect::Effects;
use pinion_core::plan::{Need, Plan, cheapest};
use pinion_core::session::TurnFact;
use pinion_schemas::messages::{PagesMove, Seed};
use pinion_schemas::subject::Kind;
use pinion_schemas::{AbortReason, Micros, PermitId, RequestId, SessionId, WorkerId};

/// Who sends pages.
enum Sender {
    /// A prefill worker, which computes what it lacks.
    Prefill(WorkerId),
    /// A decode worker that has them; they end before this page.
    Decode(WorkerId, u32),
}

impl Sessions {
    /// Where the pages for `decode` come from. A new session has left none anywhere: what other D have of it is others' too, and a
    /// prefill worker is there to compute the rest.
    fn sender(&self, session: &SessionId, turn: &Turn, decode: &WorkerId) -> Option<Sender> {
        let new = self.held.get(session).is_none_or(|e| e.machine.next_turn().0 == 0);
        let need = Need {
            decode,
            context_tokens: (turn.submit.prompt.len() + turn.answer.len()) as u64,
            resident_pages: turn.permit.unwrap_or_default().1,
        };
        let good = |s: &&pinion_core::plan::Source| !turn.bad_sources.contains(&s.worker);
        let holders = turn.holders.iter().filter(|s| !new && good(s));
        let plan = cheapest(&need, &self.config.costs, turn.prefill.iter().filter(good), holders);
        // With everyone tried, the first may be back; nothing is condemned for good.
        let first = turn.prefill.first().map(|s| Plan::Prefill(&s.worker));
        plan.or(first).map(|plan| match plan {
            Plan::Prefill(worker) => Sender::Prefill(worker.clone()),
            Plan::Move { from, end } => Sender::Decode(from.clone(), end),
        })
    }

    pub(super) fn ask_seed(
        &mut self,
        now: Micros,
        session: &SessionId,
        decode: &WorkerId,
        (request, attempt): (RequestId, u64),
        permit: PermitId,
        out: &mut Effects,
    ) {
        let sender = self
            .turns
            .get(&request)
            .and_then(|turn| self.sender(session, turn, decode));
        let (kind, worker) = match &sender {
            Some(Sender::Prefill(worker)) => (Kind::Prefill, worker.clone()),
            Some(Sender::Decode(worker, _)) => (Kind::Decode, worker.clone()),
            None => {
                let reason = AbortReason::PrefillLost;
                return self.fact(now, request, attempt, TurnFact::LegFailed(reason), out);
            }
        };
        let epoch = self.epoch_of(session);
        let Some(turn) = self.turns.get_mut(&request) else {
            return;
        };
        turn.seeding_on = Some((kind, worker.clone()));
        turn.seeded_by = Some(worker.clone());
        let (decode_epoch, skip_pages) = turn.permit.unwrap_or_default();
        let (decode, notify, time_left) = (decode.clone(), self.notify.clone(), turn.deadline.since(now));
        let pending = Pending {
            request,
            attempt,
            session: session.clone(),
            asked: Asked::Seed { worker: worker.clone() },
        };
        if let Some(Sender::Decode(_, end)) = sender {
            let names = turn.chain.get(skip_pages as usize..end as usize).unwrap_or_default();
            let message = PagesMove {
                request,
                attempt,
                decode,
                decode_epoch,
                permit,
                parent: (skip_pages as usize)
                    .checked_sub(1)
                    .and_then(|last| turn.chain.get(last).copied()),
                names: names.to_vec(),
                time_left,
                notify,
            };
            let subject = self.subjects.worker(Kind::Decode, &worker, "move");
            self.ask(subject.into(), &message, pending, out);
        } else {
            let message = Seed {
                request,
                attempt,
                session: session.clone(),
                epoch,
                decode,
                decode_epoch,
                permit,
                tenant: turn.submit.tenant.clone(),
                tokens: [&turn.submit.prompt[..], &turn.answer[..]].concat(),
                skip_pages,
                time_left,
                notify,
            };
            if let Some(entry) = self.held.get_mut(session) {
                entry.seeded_by = Some(worker.clone());
            }
            let subject = self.subjects.worker(Kind::Prefill, &worker, "seed");
            self.ask(subject.into(), &message, pending, out);
        }
        let said = Said {
            request: Some(request),
            worker: Some(&worker),
            ..Said::of(if kind == Kind::Prefill { "seeding" } else { "moving" })
        };
        self.say(now, session, said, out);
    }
}
