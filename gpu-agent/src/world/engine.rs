//! A simulated engine that can be broken, and watched.

use crate::engine::sim::SimEngine;
use pinion_actors::engine::MovedPage;
use pinion_actors::{Engine, EngineError, EngineOutput, Job};
use pinion_schemas::{ChainHasher, Micros, PageHash, RequestId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What an observer of an engine sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineSeen {
    /// A page of another node was taken.
    Imported {
        /// Its name.
        name: PageHash,
        /// What it holds.
        content: u64,
    },
    /// A page was evicted that a running turn stands on.
    EvictedInUse {
        /// The page.
        name: PageHash,
        /// The turn.
        request: RequestId,
    },
}

/// Whoever watches; it is told the worker's name.
pub type EngineWatch = Arc<dyn Fn(&str, EngineSeen) + Send + Sync>;

/// What is wrong with an engine at the moment. The default is nothing.
#[derive(Debug, Default)]
pub struct EngineTrouble(Mutex<Wrong>);

#[derive(Debug, Default)]
struct Wrong {
    stalled_until: Micros,
    crashed: bool,
}

impl EngineTrouble {
    fn wrong(&self) -> std::sync::MutexGuard<'_, Wrong> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its step loop does nothing before this time of the node's clock, microseconds.
    pub fn stall(&self, until: Micros) {
        self.wrong().stalled_until = until;
    }

    /// Its process dies and is started again, empty: all turns fail, all pages are gone.
    pub fn crash(&self) {
        self.wrong().crashed = true;
    }
}

/// A simulated engine with its troubles.
pub(super) struct Breakable {
    name: String,
    sim: SimEngine,
    trouble: Arc<EngineTrouble>,
    watch: Option<EngineWatch>,
    /// The last time it was told.
    now: Micros,
    /// Names of the pages of the prompts that run; only kept for somebody who watches.
    running: BTreeMap<RequestId, Vec<PageHash>>,
}

impl Breakable {
    pub(super) fn new(name: &str, sim: SimEngine, trouble: Arc<EngineTrouble>, watch: Option<EngineWatch>) -> Self {
        Self {
            name: name.to_owned(),
            sim,
            trouble,
            watch,
            now: Micros::ZERO,
            running: BTreeMap::new(),
        }
    }

    fn crash(&mut self) -> Vec<EngineOutput> {
        let fail = |request| EngineOutput::Finished {
            request,
            ok: false,
            committed_tokens: 0,
            tip: None,
        };
        let failed: Vec<_> = std::mem::take(&mut self.running).into_keys().map(fail).collect();
        let pages = Engine::pages(&self.sim).into_iter();
        let mut out: Vec<_> = pages.map(EngineOutput::Evicted).collect();
        out.extend(failed);
        self.sim = SimEngine::new(self.sim.config().clone());
        out
    }

    fn watch(&mut self, output: &EngineOutput) {
        match output {
            EngineOutput::Finished { request, .. } => {
                self.running.remove(request);
            }
            EngineOutput::Evicted(name) => {
                let user = self.running.iter().find(|(_, chain)| chain.contains(name));
                if let (Some(watch), Some((request, _))) = (&self.watch, user) {
                    let (name, request) = (*name, *request);
                    watch(&self.name, EngineSeen::EvictedInUse { name, request });
                }
            }
            EngineOutput::Token(..) | EngineOutput::Stored(_) => {}
        }
    }
}

impl Engine for Breakable {
    fn page_tokens(&self) -> u32 {
        self.sim.page_tokens()
    }
    fn page_bytes(&self) -> u64 {
        self.sim.page_bytes()
    }
    fn pool_pages(&self) -> u64 {
        self.sim.pool_pages()
    }
    fn free_pages(&self) -> u64 {
        self.sim.free_pages()
    }
    fn submit(&mut self, now: Micros, job: Job) -> Result<u64, EngineError> {
        let (request, mut chain) = (job.request, Vec::new());
        if self.watch.is_some() {
            chain = ChainHasher::new(self.page_tokens(), &[job.tenant.as_deref()]).push(&job.tokens);
        }
        let cached = Engine::submit(&mut self.sim, now, job)?;
        chain.truncate((cached / u64::from(self.page_tokens().max(1))) as usize);
        self.running.insert(request, chain);
        Ok(cached)
    }
    fn cancel(&mut self, request: RequestId) -> bool {
        self.running.remove(&request);
        Engine::cancel(&mut self.sim, request)
    }
    fn next_wakeup(&self) -> Option<Micros> {
        let wrong = self.trouble.wrong();
        if wrong.crashed {
            return Some(Micros::ZERO);
        }
        Engine::next_wakeup(&self.sim).map(|at| at.max(wrong.stalled_until))
    }
    fn advance(&mut self, now: Micros) -> Vec<EngineOutput> {
        self.now = now;
        let crashed = std::mem::take(&mut self.trouble.wrong().crashed);
        if crashed {
            return self.crash();
        }
        if now < self.trouble.wrong().stalled_until {
            return Vec::new();
        }
        let out = Engine::advance(&mut self.sim, now);
        if self.watch.is_some() {
            for output in &out {
                self.watch(output);
            }
        }
        out
    }
    fn resident(&self, chain: &[PageHash]) -> usize {
        self.sim.resident(chain)
    }
    fn pages(&self) -> Vec<PageHash> {
        self.sim.pages()
    }
    fn export(&self, chain: &[PageHash]) -> Vec<MovedPage> {
        Engine::export(&self.sim, chain)
    }
    fn import(&mut self, parent: Option<PageHash>, pages: &[MovedPage]) -> Result<u64, EngineError> {
        if self.now < self.trouble.wrong().stalled_until {
            return Err(EngineError::NoRoom("its step loop blocks".to_owned()));
        }
        let new = Engine::import(&mut self.sim, parent, pages)?;
        if let Some(watch) = &self.watch {
            for (name, content) in pages.iter().copied() {
                watch(&self.name, EngineSeen::Imported { name, content });
            }
        }
        Ok(new)
    }
    fn touch(&mut self, tip: PageHash) {
        Engine::touch(&mut self.sim, tip);
    }
    fn queued_tokens(&self) -> u64 {
        self.sim.queued_tokens()
    }
    fn running(&self) -> u32 {
        Engine::running(&self.sim)
    }
}
