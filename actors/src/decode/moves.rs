//! A session's pages move on: this worker has them, and another D is to serve the next turn. Its owner says to whom they go; the
//! pages stay here too, evictable.

use super::Decode;
use crate::deliver::{Delivered, Deliveries, Delivery};
use crate::effect::Effects;
use crate::engine::Engine;
use pinion_bus::{BusError, Message};
use pinion_schemas::messages::{Abort, Accepted, LegFailed, PagesMove, SeedDone};
use pinion_schemas::subject::Subjects;
use pinion_schemas::{AbortReason, Micros, RequestId};
use pinion_transfer::MoveError;
use pinion_transfer::sim::LinkModel;
use std::collections::BTreeMap;

/// Moves at once: a draining worker gives its sessions to others turn by turn, and each of them promises room for four seeds.
const MOVES_MAX: usize = 64;
/// Numbers of requests and transfers of moves begin here; those of syncs stay below.
const FIRST_TOKEN: u64 = 1 << 63;

/// The moves of this worker.
pub(super) struct Moves {
    deliveries: Deliveries,
    under_way: BTreeMap<RequestId, Move>,
}

struct Move {
    wanted: PagesMove,
    deadline: Micros,
}

impl Moves {
    pub(super) fn new(subjects: &Subjects, link: LinkModel) -> Self {
        Self {
            deliveries: Deliveries::new(subjects.clone(), link, FIRST_TOKEN),
            under_way: BTreeMap::new(),
        }
    }

    pub(super) fn asked(&self, token: u64) -> bool {
        self.deliveries.asked(token)
    }

    pub(super) fn next_deadline(&self) -> Option<Micros> {
        let ends = self.under_way.values().map(|m| m.deadline);
        ends.chain(self.deliveries.next_done()).min()
    }

    pub(super) fn abort(&mut self, now: Micros, abort: &Abort) {
        let old = |m: &Move| m.wanted.attempt <= abort.attempt;
        if self.under_way.get(&abort.request).is_some_and(old) {
            self.forget(now, abort.request);
        }
    }

    fn forget(&mut self, now: Micros, request: RequestId) -> Option<PagesMove> {
        self.deliveries.cancel(now, request);
        self.under_way.remove(&request).map(|m| m.wanted)
    }

    /// The session's owner is told how a move ended.
    fn ended(&mut self, now: Micros, delivered: Option<Delivered>, out: &mut Effects) {
        match delivered {
            Some(Delivered::Done(request, moved_pages)) => {
                let Some(wanted) = self.forget(now, request) else {
                    return;
                };
                let done = SeedDone {
                    request,
                    attempt: wanted.attempt,
                    permit: wanted.permit,
                    moved_pages,
                    computed_tokens: 0,
                };
                out.publish(wanted.notify, &done);
            }
            Some(Delivered::Failed(request, reason)) => {
                if let Some(wanted) = self.forget(now, request) {
                    let failed = failed(&wanted, reason);
                    out.publish(wanted.notify, &failed);
                }
            }
            None => {}
        }
    }
}

fn failed(wanted: &PagesMove, reason: AbortReason) -> LegFailed {
    LegFailed {
        request: wanted.request,
        attempt: wanted.attempt,
        reason,
    }
}

impl<E: Engine> Decode<E> {
    pub(super) fn on_move(&mut self, now: Micros, wanted: PagesMove, message: &Message, out: &mut Effects) {
        let request = wanted.request;
        let known = self.moves.under_way.get(&request).map(|m| m.wanted.attempt);
        if known.is_some_and(|attempt| attempt >= wanted.attempt) {
            return;
        }
        self.moves.forget(now, request);
        // What would have to be loaded first is computed as fast.
        let ready = if self.engine.has_bytes() {
            self.engine.export_pages(&wanted.names).len()
        } else {
            self.engine.export(&wanted.names).len()
        };
        if ready < wanted.names.len() || self.moves.under_way.len() >= MOVES_MAX {
            return out.respond(message, &failed(&wanted, AbortReason::SourceLost));
        }
        let (epoch, waiting) = (self.config.epoch, self.moves.under_way.len() as u32);
        out.respond(
            message,
            &Accepted {
                request,
                epoch,
                waiting,
            },
        );
        let delivery = Delivery {
            request,
            to: wanted.decode.clone(),
            epoch: wanted.decode_epoch,
            permit: wanted.permit,
            parent: wanted.parent,
            names: wanted.names.clone(),
        };
        let deadline = now.plus(wanted.time_left);
        self.moves.under_way.insert(request, Move { wanted, deadline });
        let deliveries = &mut self.moves.deliveries;
        let begun = deliveries.begin(&self.engine, delivery, out);
        let begun = begun.or_else(|| deliveries.advance(now, &self.engine, request, true, out));
        self.moves.ended(now, begun, out);
    }

    pub(super) fn on_move_reply(
        &mut self,
        now: Micros,
        token: u64,
        result: Result<Message, BusError>,
        out: &mut Effects,
    ) {
        let delivered = self.moves.deliveries.on_reply(now, &self.engine, token, result, out);
        self.moves.ended(now, delivered, out);
    }

    pub(super) fn on_move_sent(&mut self, now: Micros, token: u64, result: Result<(), MoveError>, out: &mut Effects) {
        let delivered = self.moves.deliveries.on_sent(now, &self.engine, token, result, out);
        self.moves.ended(now, delivered, out);
    }

    pub(super) fn advance_moves(&mut self, now: Micros, out: &mut Effects) {
        while let Some(request) = self.moves.deliveries.take_passed(now) {
            let delivered = self.moves.deliveries.advance(now, &self.engine, request, false, out);
            self.moves.ended(now, delivered, out);
        }
        let late = |(request, m): (&RequestId, &Move)| (m.deadline <= now).then_some(*request);
        let late: Vec<RequestId> = self.moves.under_way.iter().filter_map(late).collect();
        for request in late {
            let delivered = Some(Delivered::Failed(request, AbortReason::Deadline));
            self.moves.ended(now, delivered, out);
        }
    }
}
