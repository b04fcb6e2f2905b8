//! Pages of a seed come in: where their bytes may go, and what becomes of them.
//!
//! A prefill worker, or a decode worker that has them, offers, is granted slots that its permit covers, fills them over the transfer plane, and says which pages they
//! are. The simulated engine's pages have no bytes: they come with the last message alone.

use super::Decode;
use crate::effect::Effects;
use crate::engine::{Engine, EngineError};
use crate::grants;
use pinion_bus::Message;
use pinion_core::admit::Fact;
use pinion_schemas::messages::{Pages, PagesAck, PagesGrant, PagesOffer, Reject};
use pinion_schemas::{Epoch, Micros, PermitId, RejectReason, RequestId};

impl<E: Engine> Decode<E> {
    pub(super) fn on_offer(&mut self, now: Micros, offer: &PagesOffer, message: &Message, out: &mut Effects) {
        let Some(turn) = self.expected((offer.request, offer.permit), offer.epoch, message, out) else {
            return;
        };
        // Asked again: what an earlier attempt has brought may be half of it, and nobody will say which half.
        let (old, until) = (turn.grant.take(), turn.permit.map_or(now, |(_, until)| until));
        if let Some(old) = old {
            self.engine.end_grant(old);
        }
        let resident = self
            .turns
            .get(&offer.request)
            .map_or(&[][..], |t| &t.chain[..self.engine.resident(&t.chain)]);
        if let Some(tip) = resident.last().copied() {
            self.engine.touch(tip);
        }
        let key = self.keys.draw();
        match self.engine.grant(offer.pages, key, until) {
            Ok(grant) => {
                if let Some(turn) = self.turns.get_mut(&offer.request) {
                    turn.grant = Some(grant.id);
                }
                let granted = PagesGrant {
                    request: offer.request,
                    slots: grants::slots(grant, &self.config.addresses),
                };
                out.respond(message, &granted);
            }
            Err(error) => {
                tracing::info!(request = %offer.request, %error, "no slots for the pages of a seed");
                reject(offer.request, RejectReason::NoSpace, message, out);
            }
        }
    }

    pub(super) fn on_pages(&mut self, now: Micros, pages: &Pages, message: &Message, out: &mut Effects) {
        let (request, permit) = (pages.request, pages.permit);
        let Some(turn) = self.expected((request, permit), pages.epoch, message, out) else {
            return;
        };
        let granted = turn.grant.take();
        let stored = match self.take_pages(pages, granted) {
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
        self.step(now, Fact::Seeded { request, permit }, None, out);
    }

    /// The turn whose pages these are. An older promise, or one of an earlier life of this worker, is none (I7), and the sender is
    /// told so.
    fn expected(
        &mut self,
        (request, permit): (RequestId, PermitId),
        epoch: Epoch,
        message: &Message,
        out: &mut Effects,
    ) -> Option<&mut super::Turn> {
        let promised = |t: &&mut super::Turn| t.permit.is_some_and(|(p, _)| p == permit) && !t.submitted;
        let turn = self.turns.get_mut(&request).filter(promised);
        let turn = turn.filter(|_| epoch == self.config.epoch);
        if turn.is_none() {
            reject(request, RejectReason::StaleEpoch, message, out);
        }
        turn
    }

    /// `granted`: what this worker granted for them. Who names another grant has filled nothing of it.
    fn take_pages(&mut self, pages: &Pages, granted: Option<u64>) -> Result<u64, EngineError> {
        if let Some(parent) = pages.parent {
            self.engine.touch(parent);
        }
        match granted {
            Some(grant) if pages.grant == Some(grant) => self.engine.import_granted(grant, pages.parent, &pages.names),
            Some(grant) => {
                self.engine.end_grant(grant);
                Ok(0)
            }
            None => {
                let moved = grants::simulated(&pages.names, &pages.contents);
                self.engine.import(pages.parent, &moved)
            }
        }
    }
}

fn reject(request: RequestId, reason: RejectReason, message: &Message, out: &mut Effects) {
    let (attempt, pause_millis) = (0, 0);
    out.respond(
        message,
        &Reject {
            request,
            attempt,
            reason,
            pause_millis,
        },
    );
}
