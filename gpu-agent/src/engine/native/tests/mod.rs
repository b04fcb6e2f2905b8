//! The engine on a tiny random Llama, and once on a real one.

mod files;
mod golden;
mod kernels;
mod same_bits;
mod tiers;
mod tiny;
mod transfers;
mod turns;

use super::{Model, NativeConfig, NativeEngine};
use pinion_actors::{Engine as _, EngineOutput, Job};
use pinion_schemas::{ChainHasher, Epoch, Micros, PageHash, RequestId, Sampling, WorkerId};
use pinion_transfer::pool::Usage;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// An engine, and how it says that there is something to do.
struct Bench {
    engine: NativeEngine,
    woken: Receiver<()>,
    now: Micros,
}

fn config(pool_pages: u32, chunk_tokens: u32) -> NativeConfig {
    NativeConfig {
        pool_pages,
        page_tokens: tiny::PAGE,
        chunk_tokens,
        ..NativeConfig::default()
    }
}

fn job(id: u128, tokens: &[u32], max_new_tokens: u32) -> Job {
    Job {
        request: RequestId(id),
        tokens: tokens.to_vec(),
        max_new_tokens,
        sampling: Sampling::GREEDY,
        tenant: None,
    }
}

fn names(engine: &NativeEngine, tokens: &[u32]) -> Vec<PageHash> {
    ChainHasher::new(pinion_actors::Engine::page_tokens(engine), &[]).push(tokens)
}

impl Bench {
    fn new(model: &Arc<Model>, config: NativeConfig) -> Self {
        let mut engine = NativeEngine::new(model.clone(), config, &WorkerId::new("d0").unwrap(), Epoch(1)).unwrap();
        let (wake, woken) = channel();
        engine.wake_with(Arc::new(move || {
            let _ = wake.send(());
        }));
        Self {
            engine,
            woken,
            now: Micros::ZERO,
        }
    }

    fn tiny(pool_pages: u32, chunk_tokens: u32) -> Self {
        Self::new(&tiny::model(), config(pool_pages, chunk_tokens))
    }

    /// What is due now.
    fn advance(&mut self) -> Vec<EngineOutput> {
        let out = self.engine.advance(self.now);
        self.engine.tree.check().unwrap();
        out
    }

    /// Waits until a step has ended.
    fn wait(&mut self) {
        self.woken
            .recv_timeout(Duration::from_mins(1))
            .expect("a step did not end");
    }

    /// Runs until no turn is left and no page on its way.
    fn drain(&mut self) -> Vec<EngineOutput> {
        let mut out = self.advance();
        while !self.engine.turns.is_empty() || self.engine.tiers.moves() {
            self.wait();
            out.extend(self.advance());
        }
        self.assert_rest();
        out
    }

    /// Without turns and grants nothing is set aside, in neither of the books.
    fn assert_rest(&self) {
        let tree = &self.engine.tree;
        let Usage { writing, pages, .. } = self.engine.inbox.pool().usage();
        assert_eq!((tree.locked(), tree.reserved(), writing), (0, 0, 0));
        assert_eq!(u64::from(pages), tree.resident());
        self.engine.tiers.rest(tree).unwrap();
    }

    fn run(&mut self, id: u128, tokens: &[u32], max_new_tokens: u32) -> Vec<u32> {
        self.engine.submit(self.now, job(id, tokens, max_new_tokens)).unwrap();
        answer(&self.drain(), id)
    }

    /// Digests of the pages of a context that are here.
    fn digests(&self, tokens: &[u32]) -> Vec<u128> {
        let pages = self.engine.export_pages(&names(&self.engine, tokens));
        pages.iter().map(|(_, page)| page.digest()).collect()
    }
}

fn answer(out: &[EngineOutput], id: u128) -> Vec<u32> {
    let token = |o: &EngineOutput| match o {
        EngineOutput::Token(request, token) if request.0 == id => Some(*token),
        _ => None,
    };
    out.iter().filter_map(token).collect()
}

/// How a turn ended, if it did: whether well, and tokens in named pages.
fn end(out: &[EngineOutput], id: u128) -> Option<(bool, u32)> {
    out.iter().find_map(|o| match o {
        EngineOutput::Finished {
            request,
            ok,
            committed_tokens,
            ..
        } if request.0 == id => Some((*ok, *committed_tokens)),
        _ => None,
    })
}
