//! D→P sync, this side (design §5): pages of sessions that decode elsewhere are taken as backup, like any other page evictable,
//! and never instead of work of this worker's own.

use super::Prefill;
use crate::effect::Effects;
use crate::engine::{Engine, EngineError};
use crate::grants::{GRANT_TTL, simulated, slots};
use pinion_bus::Message;
use pinion_schemas::messages::{Slots, SyncAck, SyncCommit, SyncDecline, SyncGrant, SyncOffer};
use pinion_schemas::{Micros, RejectReason, SessionId};
use std::collections::BTreeMap;

/// With more seeds waiting than this no backup is taken: they want the link and the pages.
const SEEDS_WAITING_MAX: usize = 8;
/// The part of the pool that one backup may take from what is there, and all on their way together from seeds: a session that comes
/// whole, because its front was evicted, would in a small pool cost others theirs, and be evicted for them in turn.
const POOL_PART: u64 = 16;

/// Slots granted to backups, by session: (grant, pages, end).
pub(super) type Backups = BTreeMap<SessionId, (u64, u64, Micros)>;

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
        if let Some(tip) = offer.pages[..skip].last().copied().or(offer.parent) {
            self.engine.touch(tip);
        }
        let missing = (offer.pages.len() - skip) as u32;
        let slots = if missing == 0 {
            None
        } else {
            self.sync_slots(now, &offer.session, missing)?
        };
        Ok(SyncGrant {
            session: offer.session.clone(),
            sync: offer.sync,
            skip_pages: skip as u32,
            slots,
        })
    }

    fn sync_slots(&mut self, now: Micros, session: &SessionId, pages: u32) -> Result<Option<Slots>, RejectReason> {
        self.end_backup(session);
        self.backups.retain(|_, (.., end)| *end > now);
        let taken: u64 = self.backups.values().map(|(_, pages, _)| pages).sum();
        if taken + u64::from(pages) > self.engine.free_pages() + self.engine.pool_pages() / POOL_PART {
            return Err(RejectReason::NoSpace);
        }
        let end = now.plus(GRANT_TTL);
        match self.engine.grant(pages, self.keys.draw(), end) {
            Ok(grant) => {
                self.backups.insert(session.clone(), (grant.id, pages.into(), end));
                Ok(Some(slots(grant, &self.config.addresses)))
            }
            // Pages without bytes come with the commit.
            Err(EngineError::Refused(_)) => Ok(None),
            Err(EngineError::NoRoom(_)) => Err(RejectReason::NoSpace),
        }
    }

    /// Takes back what was granted for a backup of the session before.
    fn end_backup(&mut self, session: &SessionId) {
        if let Some((grant, ..)) = self.backups.remove(session) {
            self.engine.end_grant(grant);
        }
    }

    pub(super) fn on_sync_commit(&mut self, commit: &SyncCommit, message: &Message, out: &mut Effects) {
        if let Some(parent) = commit.parent {
            self.engine.touch(parent);
        }
        let known = self.backups.get(&commit.session).map(|(grant, ..)| *grant);
        let taken = match commit.grant {
            Some(grant) if known == Some(grant) => {
                self.backups.remove(&commit.session);
                self.engine.import_granted(grant, commit.parent, &commit.names)
            }
            // Somebody else's, or of an earlier life of this worker.
            Some(_) => Ok(0),
            None => {
                let pages = simulated(&commit.names, &commit.contents);
                self.engine.import(commit.parent, &pages)
            }
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
