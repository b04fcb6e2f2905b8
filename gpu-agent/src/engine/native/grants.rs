//! Pages that come from other workers: room is set aside in the tree and in the pool, filled by a transport, and taken.

use super::NativeEngine;
use super::mover::Held;
use crate::engine::tree::{Page, TreeError};
use pinion_actors::EngineError;
use pinion_schemas::{Micros, PageHash};
use pinion_transfer::Grant;
use pinion_transfer::grant::GrantError;

/// What the tree holds for a grant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pages: u32,
    pub(crate) deadline: Micros,
}

impl NativeEngine {
    pub(super) fn give_grant(&mut self, pages: u32, key: u64, deadline: Micros) -> Result<Grant, EngineError> {
        self.tree.reserve(pages.into(), &mut self.events)?;
        match self.inbox.grant(pages as usize, key, deadline) {
            Ok(grant) => {
                self.grants.insert(grant.id, Granted { pages, deadline });
                Ok(grant)
            }
            Err(error) => {
                self.tree.release(pages.into())?;
                Err(match error {
                    GrantError::NoRoom(_) | GrantError::TooMany => EngineError::NoRoom(error.to_string()),
                    GrantError::TooLong(_) => EngineError::Refused(error.to_string()),
                })
            }
        }
    }

    pub(super) fn take_grant(
        &mut self,
        grant: u64,
        parent: Option<PageHash>,
        names: &[PageHash],
    ) -> Result<u64, EngineError> {
        let Some(granted) = self.grants.remove(&grant) else {
            return Ok(0);
        };
        let came = self.inbox.take(grant);
        let pool = self.inbox.pool();
        let whole = came.into_iter().map_while(|page| page.filter(|p| p.is_of(pool)));
        let pages: Vec<Page<Held>> = names
            .iter()
            .zip(whole)
            .map(|(name, page)| Page {
                name: *name,
                content: Held::Memory(page),
            })
            .collect();
        let before = self.tree.reserved();
        let stored = self.tree.commit(parent, &pages, &mut self.events);
        // Each page that was new has taken one of the reserved.
        let left = u64::from(granted.pages).saturating_sub(before - self.tree.reserved());
        self.tree.release(left)?;
        if let Some(last) = pages.last().filter(|_| stored.is_ok()) {
            self.tiers.note(&self.tree, last.name);
        }
        stored.map_err(|error| match error {
            // It was evicted while they were on their way.
            TreeError::NotResident(_) => EngineError::NoRoom(error.to_string()),
            other => other.into(),
        })
    }

    /// Ends grants whose time is over.
    pub(super) fn expire_grants(&mut self, now: Micros) {
        for id in self.inbox.expire(now) {
            if let Some(granted) = self.grants.remove(&id) {
                // It was reserved with the grant; it fails only if the books are broken already.
                let _ = self.tree.release(granted.pages.into());
            }
        }
    }
}
