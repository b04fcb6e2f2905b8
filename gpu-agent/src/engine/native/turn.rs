//! A turn in the engine, and what it holds.

use super::forward::Read;
use super::kv::Kv;
use super::mover::Held;
use super::tiers::in_pool;
use crate::engine::tree::{Page, PageEvent, PageTree, TreeError};
use pinion_schemas::{ChainHasher, PageHash, RequestId, Sampling};
use pinion_transfer::PageRef;
use pinion_transfer::pool::SlotMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How far a turn is.
#[derive(Debug)]
pub(crate) enum Stage {
    /// It has no slots yet: some hold evicted pages that are being copied. Then it loads these pages, which lower tiers have.
    Waiting { load: Vec<PageHash> },
    /// Its first slots are with the thread that loads its pages, which ends early if `stop` is set.
    Loading { stop: Arc<AtomicBool> },
    /// It computes.
    Ready,
}

/// A turn. It has locked its named pages in the tree, and for each slot it holds, or a step holds for it, a page is reserved there.
#[derive(Debug)]
pub(crate) struct Turn {
    pub(crate) serial: u64,
    pub(crate) request: RequestId,
    /// Prompt, and behind it what was written.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_tokens: usize,
    /// Tokens still to be written.
    pub(crate) wanted: usize,
    pub(crate) sampling: Sampling,
    /// First tokens whose KV exists, or is being loaded.
    pub(crate) computed: usize,
    pub(crate) chain: ChainHasher,
    /// Last named page.
    pub(crate) tip: Option<PageHash>,
    pub(crate) pages: Vec<PageRef>,
    /// Slots behind the named pages, in order; those of a step under way are missing at the front.
    pub(crate) slots: Vec<SlotMut>,
    /// Pages reserved in the tree.
    pub(crate) reserved: u64,
    /// Nobody wants it any more, and a step still has slots of it.
    pub(crate) cancelled: bool,
    pub(crate) stage: Stage,
}

impl Turn {
    /// Whether it can take part in a step.
    pub(crate) fn is_ready(&self) -> bool {
        matches!(self.stage, Stage::Ready)
    }

    /// Nobody wants it any more. Whether it can end at once: no slot of it is elsewhere.
    pub(crate) fn cancel(&mut self) -> bool {
        self.cancelled = true;
        match &self.stage {
            Stage::Waiting { .. } => true,
            Stage::Loading { stop } => {
                stop.store(true, Ordering::Relaxed);
                false
            }
            // A step under way may have slots of it, at least that of its last token: then it ends with that step.
            Stage::Ready => self.slots.len() as u64 == self.reserved,
        }
    }

    /// It has what could be loaded, and goes on behind it.
    pub(crate) fn loaded(&mut self, page_tokens: u32) {
        self.stage = Stage::Ready;
        self.computed = self.pages.len() * page_tokens as usize;
        if let Some(tip) = self.tip {
            self.chain = ChainHasher::resume(page_tokens, tip);
        }
    }

    /// Whether its next step writes a token.
    pub(crate) fn decodes(&self) -> bool {
        self.computed >= self.prompt_tokens
    }

    /// Prompt tokens without KV.
    pub(crate) fn unread(&self) -> usize {
        self.prompt_tokens.saturating_sub(self.computed)
    }

    /// Lends a step what it needs to read `count` more tokens.
    pub(crate) fn lend(&mut self, count: usize, page_tokens: usize) -> Read {
        let end = self.computed + count;
        let slots = end.div_ceil(page_tokens) - self.pages.len();
        let sampled = end == self.tokens.len() && self.wanted > 0;
        Read {
            serial: self.serial,
            start: self.computed,
            tokens: self.tokens[self.computed..end].to_vec(),
            kv: Kv {
                full: self.pages.clone(),
                open: self.slots.drain(..slots).collect(),
            },
            sampling: sampled.then_some(self.sampling),
            next: None,
        }
    }

    /// Takes back what a step has read, and names the pages that became full.
    ///
    /// # Errors
    /// [`TreeError`] if the books contradict each other.
    pub(crate) fn take_back(
        &mut self,
        read: Read,
        page_tokens: usize,
        tree: &mut PageTree<Held>,
        events: &mut Vec<PageEvent>,
    ) -> Result<(), TreeError> {
        self.computed += read.tokens.len();
        let names = self.chain.push(&read.tokens);
        debug_assert_eq!(self.pages.len() + names.len(), self.computed / page_tokens);
        let mut slots = read.kv.open;
        let full: Vec<SlotMut> = slots.drain(..names.len().min(slots.len())).collect();
        self.slots.splice(..0, slots);
        let pages = names.into_iter().zip(full.into_iter().map(SlotMut::finish));
        self.name(pages.collect(), tree, events)
    }

    /// Names the pages behind those it has, which are in slots of its own.
    ///
    /// # Errors
    /// [`TreeError`] if the books contradict each other.
    pub(crate) fn name(
        &mut self,
        pages: Vec<(PageHash, PageRef)>,
        tree: &mut PageTree<Held>,
        events: &mut Vec<PageEvent>,
    ) -> Result<(), TreeError> {
        let Some(last) = pages.last().map(|p| p.0) else {
            return Ok(());
        };
        let held = |(name, page): &(PageHash, PageRef)| Page {
            name: *name,
            content: Held::Memory(page.clone()),
        };
        let before = tree.reserved();
        let taken = tree.commit(self.tip, &pages.iter().map(held).collect::<Vec<_>>(), events);
        // Also if it stopped half-way: what it took is not this turn's to give back.
        self.reserved -= before.saturating_sub(tree.reserved()).min(self.reserved);
        let shared = pages.len() as u64 - taken?;
        // Another turn has named these meanwhile: they are shared now, and this turn's copies end here.
        tree.release(shared)?;
        self.reserved -= shared;
        tree.lock(last, self.tip)?;
        self.tip = Some(last);
        let pages = pages
            .into_iter()
            .map(|(name, page)| in_pool(tree, name).unwrap_or(page));
        self.pages.extend(pages);
        Ok(())
    }

    /// Gives back all it holds.
    pub(crate) fn end(self, tree: &mut PageTree<Held>) {
        // Both fail only if the books are broken already; the turn ends all the same.
        let _ = tree.release(self.reserved);
        let _ = self.tip.map(|tip| tree.unlock(tip));
    }
}
