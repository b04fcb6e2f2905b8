//! What an engine must do for the prefill and decode roles (design §8). Engines live in `gpu-agent`.

use pinion_schemas::{Micros, PageHash, RequestId, Sampling};
use pinion_transfer::{Grant, PageRef};
use serde::Serialize;
use std::sync::Arc;

/// One turn for an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Names it in outputs.
    pub request: RequestId,
    /// The whole context.
    pub tokens: Vec<u32>,
    /// Tokens to generate; 0 is prefill only.
    pub max_new_tokens: u32,
    /// How they are chosen.
    pub sampling: Sampling,
    /// Tenant, which separates page names.
    pub tenant: Option<String>,
}

/// Why an engine did not do it. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The pool cannot hold it now.
    #[error("the engine has no room: {0}")]
    NoRoom(String),
    /// The job makes no sense to this engine.
    #[error("the engine refused the job: {0}")]
    Refused(String),
}

/// What an engine has to say, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineOutput {
    /// The next token of a turn.
    Token(RequestId, u32),
    /// A turn has ended.
    Finished {
        /// The turn.
        request: RequestId,
        /// Whether it was completed.
        ok: bool,
        /// Tokens of it in named pages.
        committed_tokens: u32,
        /// Its last named page.
        tip: Option<PageHash>,
    },
    /// A page became resident.
    Stored(PageHash),
    /// A page is no longer resident.
    Evicted(PageHash),
}

/// Pages of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierPages {
    /// Held now.
    pub pages: u64,
    /// Most that can be.
    pub capacity: u64,
}

/// The tiers of an engine's pages, for observers: what they hold, and what has happened since it started, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TierView {
    /// The pool.
    pub pool: TierPages,
    /// Host memory.
    pub host: TierPages,
    /// The file.
    pub file: TierPages,
    /// On their way to a lower tier now.
    pub copying: u64,
    /// Copied to a lower tier.
    pub copied: u64,
    /// Evicted from the pool, and still in a lower tier.
    pub demoted: u64,
    /// Loaded back into the pool.
    pub reloaded: u64,
    /// Gone from all tiers.
    pub dropped: u64,
    /// Not what was written when they were loaded: computed again.
    pub corrupt: u64,
    /// Not written or not read, because the system refused.
    pub failed: u64,
}

/// A page on its way: its name, and what it holds (engine `sim`: the content hash; real KV goes over the transfer plane).
pub type MovedPage = (PageHash, u64);

/// Asks for a call of [`Engine::advance`] soon, from any thread.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// An inference engine with its page pool, driven by time: the role calls [`Engine::advance`] when
/// [`Engine::next_wakeup`] says so.
pub trait Engine: Send + 'static {
    /// Tokens per page.
    fn page_tokens(&self) -> u32;
    /// Bytes per page.
    fn page_bytes(&self) -> u64;
    /// Pages of the pool.
    fn pool_pages(&self) -> u64;
    /// Pages that nothing is in.
    fn free_pages(&self) -> u64;
    /// Takes a turn. Returns the prompt tokens found in cache.
    ///
    /// # Errors
    /// [`EngineError`]
    fn submit(&mut self, now: Micros, job: Job) -> Result<u64, EngineError>;
    /// Ends a turn and frees what it holds; `false` if it is not here.
    fn cancel(&mut self, request: RequestId) -> bool;
    /// When [`Engine::advance`] has something to do.
    fn next_wakeup(&self) -> Option<Micros>;
    /// Tells whom to wake when there is something to do that [`Engine::next_wakeup`] could not foresee: an engine that computes
    /// on threads of its own calls it when a step has ended.
    fn wake_with(&mut self, _wake: Wake) {}
    /// Does what is due.
    fn advance(&mut self, now: Micros) -> Vec<EngineOutput>;
    /// How many leading pages of the chain can be used without recomputing: in the pool, or loaded into it first.
    fn resident(&self, chain: &[PageHash]) -> usize;
    /// All resident pages.
    fn pages(&self) -> Vec<PageHash>;
    /// Whether its pages have bytes, which move over the transfer plane. Those of a simulated engine have none.
    fn has_bytes(&self) -> bool {
        false
    }
    /// Leading pages of the chain with what they hold.
    fn export(&self, chain: &[PageHash]) -> Vec<MovedPage>;
    /// Adds pages behind `parent`. Returns how many were new.
    ///
    /// # Errors
    /// [`EngineError`]
    fn import(&mut self, parent: Option<PageHash>, pages: &[MovedPage]) -> Result<u64, EngineError>;
    /// Leading pages of the chain with their bytes, for engines that have real ones (the others: none): those in the pool. They stay as they are
    /// while someone holds them, even if the engine evicts them.
    fn export_pages(&self, _chain: &[PageHash]) -> Vec<(PageHash, PageRef)> {
        Vec::new()
    }
    /// Pages will come behind `tip`: marks those up to it as just used, so that room is not made of them, and begins to load those that
    /// are in lower tiers.
    fn touch(&mut self, _tip: PageHash) {}
    /// Sets room for `pages` aside, evicting as needed, and lets who knows `key` fill it until `deadline`.
    ///
    /// # Errors
    /// [`EngineError`]
    fn grant(&mut self, _pages: u32, _key: u64, _deadline: Micros) -> Result<Grant, EngineError> {
        Err(EngineError::Refused("this engine's pages have no bytes".into()))
    }
    /// Ends a grant and adds what came behind `parent`: `names[i]` is the name of the page in place i, and the first place that
    /// is empty ends it. Returns how many pages were new. A grant that has ended adds none.
    ///
    /// # Errors
    /// [`EngineError`]
    fn import_granted(
        &mut self,
        _grant: u64,
        _parent: Option<PageHash>,
        _names: &[PageHash],
    ) -> Result<u64, EngineError> {
        Err(EngineError::Refused("this engine's pages have no bytes".into()))
    }
    /// Ends a grant; whatever came is of no use, and its slots are free.
    fn end_grant(&mut self, grant: u64) {
        // Without names nothing is added, so there is nothing that could fail and matter.
        let _ = self.import_granted(grant, None, &[]);
    }
    /// What its tiers hold, if it has any.
    fn tiers(&self) -> Option<TierView> {
        None
    }
    /// Tokens waiting for prefill.
    fn queued_tokens(&self) -> u64;
    /// Turns in the engine.
    fn running(&self) -> u32;
}
