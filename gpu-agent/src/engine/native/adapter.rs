//! The native engine behind the trait that the roles know. Everything here is answered at once: the computer has no books.

use super::NativeEngine;
use super::tiers::in_pool;
use super::turn::Turn;
use crate::engine::tree::{Tier, TreeError};
use pinion_actors::engine::{MovedPage, TierView, Wake};
use pinion_actors::{Engine, EngineError, EngineOutput, Job};
use pinion_schemas::{ChainHasher, Micros, PageHash, RequestId};
use pinion_transfer::{Grant, PageRef};

impl From<TreeError> for EngineError {
    fn from(error: TreeError) -> Self {
        match error {
            TreeError::NoRoom { .. } => Self::NoRoom(error.to_string()),
            _ => Self::Refused(error.to_string()),
        }
    }
}

impl Engine for NativeEngine {
    fn page_tokens(&self) -> u32 {
        self.config.page_tokens
    }

    fn page_bytes(&self) -> u64 {
        self.inbox.pool().page_bytes() as u64
    }

    fn has_bytes(&self) -> bool {
        true
    }

    fn pool_pages(&self) -> u64 {
        self.tree.capacity(Tier::Device)
    }

    fn free_pages(&self) -> u64 {
        self.tree.free()
    }

    fn submit(&mut self, _now: Micros, job: Job) -> Result<u64, EngineError> {
        self.check(&job)?;
        let mut names = ChainHasher::new(self.config.page_tokens, &[job.tenant.as_deref()]).push(&job.tokens);
        // The last token is always read, because the first new one comes from it.
        names.truncate((job.tokens.len() - 1) / self.page_len());
        names.truncate(self.tree.match_any(&names));
        let cached = names.len() * self.page_len();
        if let Some(last) = names.last() {
            self.tree.touch(*last);
        }
        let load = names.split_off(self.tree.match_device(&names));
        let pages: Vec<PageRef> = names.iter().filter_map(|n| in_pool(&self.tree, *n)).collect();
        let tip = names.last().copied();
        if let Some(tip) = tip {
            self.tree.lock(tip, None)?;
        }
        let placed = self.place(job, tip, pages, load);
        if let (Err(_), Some(tip)) = (&placed, tip) {
            self.tree.unlock(tip)?;
        }
        placed.map(|()| cached as u64)
    }

    fn cancel(&mut self, request: RequestId) -> bool {
        let Some(at) = self.turns.iter().position(|t| t.request == request && !t.cancelled) else {
            return false;
        };
        if self.turns[at].cancel() {
            self.end(at, false, &mut Vec::new());
        }
        true
    }

    fn next_wakeup(&self) -> Option<Micros> {
        let due = if self.computer.busy() {
            self.computer.has_outcome()
        } else {
            self.turns.iter().any(Turn::is_ready)
        };
        if due || self.tiers.due() || !self.events.is_empty() {
            return Some(Micros::ZERO);
        }
        self.grants.values().map(|g| g.deadline).min()
    }

    fn wake_with(&mut self, wake: Wake) {
        self.tiers.wake_with(&wake);
        self.computer.wake_with(wake);
    }

    fn advance(&mut self, now: Micros) -> Vec<EngineOutput> {
        self.expire_grants(now);
        let mut out = Vec::new();
        self.tell(&mut out);
        if let Some(outcome) = self.computer.take() {
            self.end_step(outcome, &mut out);
        }
        self.move_pages(&mut out);
        self.tell(&mut out);
        if !self.computer.busy() {
            self.begin_step();
        }
        out
    }

    fn resident(&self, chain: &[PageHash]) -> usize {
        self.tree.match_any(chain)
    }

    fn pages(&self) -> Vec<PageHash> {
        self.tree.all_pages().collect()
    }

    fn export(&self, _chain: &[PageHash]) -> Vec<MovedPage> {
        Vec::new()
    }

    fn import(&mut self, _parent: Option<PageHash>, pages: &[MovedPage]) -> Result<u64, EngineError> {
        if pages.is_empty() {
            return Ok(0);
        }
        let why = "these pages are simulated and this engine's are real: run the same engine on both workers";
        Err(EngineError::Refused(why.into()))
    }

    fn export_pages(&self, chain: &[PageHash]) -> Vec<(PageHash, PageRef)> {
        let held = &chain[..self.tree.match_device(chain)];
        held.iter()
            .filter_map(|n| Some((*n, in_pool(&self.tree, *n)?)))
            .collect()
    }

    fn touch(&mut self, tip: PageHash) {
        self.tree.touch(tip);
        self.fetch(tip);
    }

    fn grant(&mut self, pages: u32, key: u64, deadline: Micros) -> Result<Grant, EngineError> {
        self.give_grant(pages, key, deadline)
    }

    fn import_granted(&mut self, grant: u64, parent: Option<PageHash>, names: &[PageHash]) -> Result<u64, EngineError> {
        self.take_grant(grant, parent, names)
    }

    fn tiers(&self) -> Option<TierView> {
        Some(self.tiers.view(&self.tree))
    }

    fn queued_tokens(&self) -> u64 {
        self.live().map(|t| t.unread() as u64).sum()
    }

    fn running(&self) -> u32 {
        self.live().count() as u32
    }
}
