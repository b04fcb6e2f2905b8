//! D→P sync, this side (design §5): pages of sessions that decode elsewhere are taken as backup, like any other page evictable,
//! and never instead of work of this worker's own.

use super::Prefill;
use crate::effect::Effects;
use crate::engine::{Engine, EngineError};
use crate::grants::{GRANT_TTL, slots};
use pinion_bus::Message;
use pinion_schemas::messages::{Slots, SyncAck, SyncCommit, SyncDecline, SyncGrant, SyncOffer};
use pinion_schemas::{Micros, RejectReason};

/// With more seeds waiting than this no backup is taken: they want the link and the pages.
const SEEDS_WAITING_MAX: usize = 8;

impl<E: Engine> Prefill<E> {
    pub(super) fn on_sync_offer(&mut self, now: Micros, offer: &SyncOffer, message: &Message, out: &mut Effects) {
        match self.sync_grant(now, offer) {
            Ok(grant) => out.respond(message, &grant),
            Err(reason) => {
                let (session, sync) = (offer.session.clone(), offer.sync);
                out.respond(message, &SyncDecline { session, sync, reason });
            }
        }
    }

    fn sync_grant(&mut self, now: Micros, offer: &SyncOffer) -> Result<SyncGrant, RejectReason> {
        if offer.parent.is_some_and(|parent| self.engine.resident(&[parent]) == 0) {
            return Err(RejectReason::NotResident);
        }
        if self.queue.len() > SEEDS_WAITING_MAX {
            return Err(RejectReason::QueueFull);
        }
        let skip = self.engine.resident(&offer.pages);
        let missing = (offer.pages.len() - skip) as u32;
        let slots = if missing == 0 {
            None
        } else {
            self.sync_slots(now, missing)?
        };
        Ok(SyncGrant {
            session: offer.session.clone(),
            sync: offer.sync,
            skip_pages: skip as u32,
            slots,
        })
    }

    fn sync_slots(&mut self, now: Micros, pages: u32) -> Result<Option<Slots>, RejectReason> {
        match self.engine.grant(pages, self.keys.draw(), now.plus(GRANT_TTL)) {
            Ok(grant) => Ok(Some(slots(grant, &self.config.addresses))),
            // Pages without bytes come with the commit.
            Err(EngineError::Refused(_)) => Ok(None),
            Err(EngineError::NoRoom(_)) => Err(RejectReason::NoSpace),
        }
    }

    pub(super) fn on_sync_commit(&mut self, commit: &SyncCommit, message: &Message, out: &mut Effects) {
        let taken = if let Some(grant) = commit.grant {
            self.engine.import_granted(grant, commit.parent, &commit.names)
        } else {
            let pages: Vec<_> = commit
                .names
                .iter()
                .copied()
                .zip(commit.contents.iter().copied())
                .collect();
            self.engine.import(commit.parent, &pages)
        };
        if let Err(error) = taken {
            tracing::debug!(session = %commit.session, %error, "a backup was not taken");
        }
        let ack = SyncAck {
            session: commit.session.clone(),
            sync: commit.sync,
            held_pages: self.engine.resident(&commit.names) as u32,
        };
        out.respond(message, &ack);
    }
}
