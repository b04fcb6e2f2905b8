//! A seed's pages leave as they are computed: [`crate::deliver`] says how.

use super::{Prefill, Stage};
use crate::deliver::{Delivered, Delivery};
use crate::effect::Effects;
use crate::engine::Engine;
use pinion_schemas::messages::SeedDone;
use pinion_schemas::{ChainHasher, Micros, PageHash, RequestId};

impl<E: Engine> Prefill<E> {
    /// The engine has begun: what it had in cache may leave at once.
    pub(super) fn begin(&mut self, now: Micros, request: RequestId, out: &mut Effects) {
        let Some(work) = self.work.get(&request) else { return };
        let seed = &work.seed;
        let namespace = [seed.tenant.as_deref()];
        let mut chain: Vec<PageHash> = ChainHasher::new(self.engine.page_tokens(), &namespace).push(&seed.tokens);
        let names = chain.split_off((seed.skip_pages as usize).min(chain.len()));
        let delivery = Delivery {
            request,
            to: seed.decode.clone(),
            epoch: seed.decode_epoch,
            permit: seed.permit,
            parent: chain.last().copied(),
            names,
        };
        let begun = self.deliveries.begin(&self.engine, delivery, out);
        let begun = begun.or_else(|| self.deliveries.advance(now, &self.engine, request, false, out));
        self.delivered(now, begun, out);
    }

    /// Pages were stored: those of seeds under way leave.
    pub(super) fn hand_over(&mut self, now: Micros, out: &mut Effects) {
        let computing = self.work.iter().filter(|(_, w)| matches!(w.stage, Stage::Computing));
        let computing: Vec<RequestId> = computing.map(|(request, _)| *request).collect();
        for request in computing {
            let delivered = self.deliveries.advance(now, &self.engine, request, false, out);
            self.delivered(now, delivered, out);
        }
    }

    /// The KV is there, and with it the last page.
    pub(super) fn computed(&mut self, now: Micros, request: RequestId, out: &mut Effects) {
        let Some(work) = self.work.get_mut(&request) else {
            return;
        };
        work.stage = Stage::Moving;
        let delivered = self.deliveries.advance(now, &self.engine, request, true, out);
        self.delivered(now, delivered, out);
    }

    pub(super) fn delivered(&mut self, now: Micros, delivered: Option<Delivered>, out: &mut Effects) {
        match delivered {
            Some(Delivered::Done(request, moved_pages)) => {
                let Some(work) = self.work.remove(&request) else { return };
                let done = SeedDone {
                    request,
                    attempt: work.seed.attempt,
                    permit: work.seed.permit,
                    moved_pages,
                    computed_tokens: work.computed,
                };
                out.publish(work.seed.notify, &done);
            }
            Some(Delivered::Failed(request, reason)) => self.fail(now, request, reason, out),
            None => {}
        }
    }
}
