//! Pages of a seed come in: where their bytes may go, and what becomes of them.
//!
//! A prefill worker offers, is granted slots that its permit covers, fills them over the transfer plane, and says which pages they
//! are. The simulated engine's pages have no bytes: they come with the last message alone.

use super::Decode;
use crate::effect::Effects;
use crate::engine::{Engine, EngineError};
use pinion_bus::Message;
use pinion_core::admit::Fact;
use pinion_schemas::messages::{Pages, PagesAck, PagesGrant, PagesOffer, Reject};
use pinion_schemas::{Epoch, Micros, RejectReason, RequestId};

/// How long slots stay granted: longer than any transfer of theirs may take (45 s, prefill role), so that only a dead
/// peer's grant ends by it.
const GRANT_TTL: Micros = Micros::from_secs(60);

impl<E: Engine> Decode<E> {
    pub(super) fn on_offer(&mut self, now: Micros, offer: &PagesOffer, message: &Message, out: &mut Effects) {
        let Some(turn) = self.expected(offer.request, offer.epoch, message, out) else {
            return;
        };
        // Asked again: what an earlier attempt has brought may be half of it, and nobody will say which half.
        if let Some(old) = turn.grant.take() {
            let _ = self.engine.import_granted(old, None, &[]);
        }
        self.grants += 1;
        let key = key(self.config.secret, self.grants);
        match self.engine.grant(offer.pages, key, now.plus(GRANT_TTL)) {
            Ok(grant) => {
                if let Some(turn) = self.turns.get_mut(&offer.request) {
                    turn.grant = Some(grant.id);
                }
                let granted = PagesGrant {
                    request: offer.request,
                    grant: grant.id,
                    key: grant.key,
                    epoch: grant.epoch,
                    pages: grant.pages,
                    addresses: self.config.addresses.clone(),
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
        let Some(turn) = self.expected(request, pages.epoch, message, out) else {
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

    /// The turn whose pages these are. A promise of an earlier life of this worker is none (I7), and the sender is told so.
    fn expected(
        &mut self,
        request: RequestId,
        epoch: Epoch,
        message: &Message,
        out: &mut Effects,
    ) -> Option<&mut super::Turn> {
        let turn = self.turns.get_mut(&request).filter(|_| epoch == self.config.epoch);
        if turn.is_none() {
            reject(request, RejectReason::StaleEpoch, message, out);
        }
        turn
    }

    /// `granted`: what this worker granted for them. Who names another grant has filled nothing of it.
    fn take_pages(&mut self, pages: &Pages, granted: Option<u64>) -> Result<u64, EngineError> {
        match granted {
            Some(grant) if pages.grant == Some(grant) => self.engine.import_granted(grant, pages.parent, &pages.names),
            Some(grant) => self.engine.import_granted(grant, None, &[]),
            None => {
                let moved: Vec<_> = pages
                    .names
                    .iter()
                    .copied()
                    .zip(pages.contents.iter().copied())
                    .collect();
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

/// A key that a peer cannot guess from those it has seen.
fn key(secret: u64, number: u64) -> u64 {
    let bytes = [secret.to_le_bytes(), number.to_le_bytes()].concat();
    xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, secret)
}
