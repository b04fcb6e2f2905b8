//! A turn in the engine, and what it holds.

use super::forward::Read;
use super::kv::Kv;
use crate::engine::tree::{Page, PageEvent, PageTree, TreeError};
use pinion_schemas::{ChainHasher, PageHash, RequestId, Sampling};
use pinion_transfer::PageRef;
use pinion_transfer::pool::SlotMut;

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
    /// First tokens whose KV exists.
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
}

impl Turn {
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
        tree: &mut PageTree<PageRef>,
        events: &mut Vec<PageEvent>,
    ) -> Result<(), TreeError> {
        self.computed += read.tokens.len();
        let names = self.chain.push(&read.tokens);
        debug_assert_eq!(self.pages.len() + names.len(), self.computed / page_tokens);
        let mut slots = read.kv.open;
        let full: Vec<SlotMut> = slots.drain(..names.len().min(slots.len())).collect();
        self.slots.splice(..0, slots);
        let pages = names.into_iter().zip(full).map(|(name, slot)| Page {
            name,
            content: slot.finish(),
        });
        let pages: Vec<_> = pages.collect();
        let Some(last) = pages.last().map(|p| p.name) else {
            return Ok(());
        };
        let before = tree.reserved();
        let taken = tree.commit(self.tip, &pages, events);
        // Also if it stopped half-way: what it took is not this turn's to give back.
        self.reserved -= before.saturating_sub(tree.reserved()).min(self.reserved);
        let shared = pages.len() as u64 - taken?;
        // Another turn has named these meanwhile: they are shared now, and this turn's copies end here.
        tree.release(shared)?;
        self.reserved -= shared;
        tree.lock(last, self.tip)?;
        self.tip = Some(last);
        self.pages.extend(
            pages
                .into_iter()
                .map(|p| tree.content(p.name).cloned().unwrap_or(p.content)),
        );
        Ok(())
    }

    /// Gives back all it holds.
    pub(crate) fn end(self, tree: &mut PageTree<PageRef>) {
        // Both fail only if the books are broken already; the turn ends all the same.
        let _ = tree.release(self.reserved);
        let _ = self.tip.map(|tip| tree.unlock(tip));
    }
}
