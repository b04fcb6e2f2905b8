//! The tiers below the pool: host memory, and a file.
//!
//! A page is copied down soon after it was named, not when it is evicted ([`Tiers::copy`]): then an eviction is a matter of the
//! books, no turn and no grant waits for a device, and a worker that is killed leaves its pages in the file. At most [`COPIES_MAX`]
//! pages are on their way at once; one that is evicted before its turn came is dropped, and counted. A copy holds its page until it is
//! made, so a slot that was evicted meanwhile is free a moment later: a turn waits for that ([`Stage::Waiting`]).
//!
//! A turn whose chain goes on in a lower tier has it loaded first ([`Stage::Loading`]), by another thread, while other turns
//! compute. A page that cannot be loaded is forgotten there, and computed.
//!
//! The host tier is of use where the pool is not host memory itself. For this engine it is a second copy of the same kind, and
//! off unless it is asked for.

use super::NativeConfig;
use super::engine::NativeEngine;
use super::error::StartError;
use super::mover::{Held, Load, Loaded, Moved, Mover, Target, Task};
use super::turn::{Stage, Turn};
use crate::engine::tree::{Page, PageEvent, PageTree, Tier};
use pinion_actors::engine::{TierPages, TierView};
use pinion_schemas::{ChainHasher, PageHash, RequestId, Sampling, WorkerId};
use pinion_transfer::file::{FileTier, PageName, ReadError};
use pinion_transfer::{Layout, PageRef, Pool};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Copies on their way at once: enough to keep a device busy, and few slots of the pool to wait for.
const COPIES_MAX: usize = 8;
/// Chains waiting to be copied; a later turn of a chain brings what is left out.
const CHAINS_MAX: usize = 4_096;
/// The lower tiers.
const LOWER: [Tier; 2] = [Tier::Host, Tier::File];

/// The page of the pool behind a name, if it is there.
pub(super) fn in_pool(tree: &PageTree<Held>, name: PageHash) -> Option<PageRef> {
    match tree.content(name)? {
        (Tier::Device, Held::Memory(page)) => Some(page.clone()),
        _ => None,
    }
}

/// What the engine has below its pool.
pub(crate) struct Tiers {
    host: Option<Pool>,
    file: Option<FileTier>,
    /// One thread for each direction: a turn that waits for pages does not wait for copies.
    down: Mover,
    up: Mover,
    /// Last pages of chains that are to be copied.
    chains: VecDeque<(Tier, PageHash)>,
    /// The chain being copied.
    next: VecDeque<(Tier, PageHash)>,
    copying: Vec<PageHash>,
    /// Pages being loaded.
    loading: BTreeSet<PageHash>,
    seen: TierView,
}

impl Tiers {
    /// Opens the tiers, and the books over them and the pool: with what the file offers. Page changes go to `events`.
    ///
    /// # Errors
    /// [`StartError`]
    pub(super) fn open(
        config: &NativeConfig,
        layout: &Layout,
        worker: &WorkerId,
        events: &mut Vec<PageEvent>,
    ) -> Result<(Self, PageTree<Held>), StartError> {
        let (mut file, mut found) = (None, Vec::new());
        if let Some(config) = &config.file_tier {
            let opened = config.open(worker, layout)?;
            (file, found) = (Some(opened.0), opened.1);
        }
        let page_bytes = layout.page_bytes().unwrap_or(u64::MAX);
        let host_pages = u32::try_from(config.host_tier_bytes / page_bytes).unwrap_or(u32::MAX);
        let host = (host_pages > 0)
            .then(|| Pool::new(layout.clone(), host_pages))
            .transpose()?;
        let file_pages = file.as_ref().map_or(0, FileTier::capacity);
        let mut tree = PageTree::new([config.pool_pages.into(), host_pages.into(), file_pages.into()]);
        let offered = found.len();
        for found in found {
            let PageName { name, parent } = found.name;
            let content = Held::File(found.page);
            // One without its parent is of no use; its slot is free then.
            let _ = tree.keep(Tier::File, parent, Page { name, content }, events);
        }
        if let Some(file) = &file {
            let pages = tree.pages_in(Tier::File);
            tracing::info!(
                pages,
                orphans = offered as u64 - pages,
                slots = file.capacity(),
                "file tier is open"
            );
        }
        let tiers = Self {
            down: Mover::start("pages-down", file.as_ref())?,
            up: Mover::start("pages-up", file.as_ref())?,
            host,
            file,
            chains: VecDeque::new(),
            next: VecDeque::new(),
            copying: Vec::new(),
            loading: BTreeSet::new(),
            seen: TierView::default(),
        };
        Ok((tiers, tree))
    }

    /// Whether there is something to do now.
    pub(super) fn due(&self) -> bool {
        let waiting = !self.chains.is_empty() || !self.next.is_empty();
        self.down.has_done() || self.up.has_done() || (waiting && self.copying.len() < COPIES_MAX)
    }

    pub(super) fn wake_with(&self, wake: &pinion_actors::engine::Wake) {
        self.down.wake_with(wake.clone());
        self.up.wake_with(wake.clone());
    }

    /// The chain up to `tip` is on the device: what lower tiers lack of it is to be copied.
    pub(super) fn note(&mut self, tree: &PageTree<Held>, tip: PageHash) {
        for tier in LOWER {
            if tree.capacity(tier) > 0 && !tree.is_in(tier, tip) && self.chains.len() < CHAINS_MAX {
                self.chains.push_back((tier, tip));
            }
        }
    }

    /// Slots of the pool that will be free when copies under way are made.
    fn slots_held(&self, tree: &PageTree<Held>) -> usize {
        let evicted = self.copying.iter().filter(|page| !tree.is_in(Tier::Device, **page));
        // One may be on its way to two tiers.
        evicted.collect::<BTreeSet<_>>().len()
    }

    /// Begins copies, as many as may be.
    fn copy(&mut self, tree: &mut PageTree<Held>, events: &mut Vec<PageEvent>) {
        while self.copying.len() < COPIES_MAX {
            if self.next.is_empty() {
                let Some((tier, tip)) = self.chains.pop_front() else {
                    return;
                };
                self.next
                    .extend(tree.lacking(tier, tip).into_iter().map(|page| (tier, page)));
            } else if let Some((tier, name)) = self.next.pop_front()
                && !self.copy_one(tree, tier, name, events)
            {
                // A page behind one without a copy would not be found.
                self.next.clear();
            }
        }
    }

    fn copy_one(&mut self, tree: &mut PageTree<Held>, tier: Tier, name: PageHash, events: &mut Vec<PageEvent>) -> bool {
        if tree.is_in(tier, name) {
            return true;
        }
        let Some(page) = in_pool(tree, name) else { return false };
        let parent = tree.parent(name);
        let content = Held::Memory(page.clone());
        if tree.keep(tier, parent, Page { name, content }, events).is_err() {
            return false;
        }
        let target = match tier {
            Tier::File => self.file.as_ref().and_then(FileTier::take).map(Target::File),
            _ => self
                .host
                .as_ref()
                .and_then(|host| host.take(1).ok()?.pop())
                .map(Target::Host),
        };
        let Some(target) = target else {
            // Its slot is still being read.
            tree.lose(tier, name, events);
            return false;
        };
        self.copying.push(name);
        let name = PageName { name, parent };
        self.down.begin(Task::Copy { name, page, target });
        true
    }

    fn copied(&mut self, tree: &mut PageTree<Held>, moved: Moved, events: &mut Vec<PageEvent>) {
        let Moved::Copied { name, tier, held } = moved else {
            return;
        };
        if let Some(at) = self.copying.iter().position(|page| *page == name) {
            self.copying.swap_remove(at);
        }
        match held {
            Ok(held) => {
                // It may have left the tier already.
                self.seen.copied += u64::from(tree.replace(tier, name, held));
            }
            Err(error) => {
                tracing::warn!(%error, page = %name, "a page was not written to the file tier");
                self.seen.failed += 1;
                tree.lose(tier, name, events);
            }
        }
    }

    /// Counts what happened to a page.
    pub(super) fn count(&mut self, event: PageEvent) {
        match event {
            PageEvent::Demoted(_) => self.seen.demoted += 1,
            PageEvent::Dropped(_) => self.seen.dropped += 1,
            PageEvent::Stored(_) | PageEvent::Promoted(_) => {}
        }
    }

    /// What there is, and what has happened.
    pub(super) fn view(&self, tree: &PageTree<Held>) -> TierView {
        let pages = |tier| TierPages {
            pages: tree.pages_in(tier),
            capacity: tree.capacity(tier),
        };
        TierView {
            pool: pages(Tier::Device),
            host: pages(Tier::Host),
            file: pages(Tier::File),
            copying: self.copying.len() as u64,
            ..self.seen
        }
    }

    /// Whether pages are on their way.
    #[cfg(test)]
    pub(super) fn moves(&self) -> bool {
        self.due() || !self.copying.is_empty() || !self.loading.is_empty()
    }

    /// At rest the slots of each tier are those of the books.
    ///
    /// # Errors
    /// What does not add up.
    #[cfg(test)]
    pub(super) fn rest(&self, tree: &PageTree<Held>) -> Result<(), String> {
        if self.moves() {
            return Err("pages are on their way".into());
        }
        let host = self.host.as_ref().map(Pool::usage).unwrap_or_default();
        let file = self.file.as_ref().map(FileTier::usage).unwrap_or_default();
        for (tier, usage) in [(Tier::Host, host), (Tier::File, file)] {
            let slots = (
                u64::from(usage.pages),
                usage.writing,
                u64::from(usage.free + usage.pages),
            );
            if slots != (tree.pages_in(tier), 0, tree.capacity(tier)) {
                return Err(format!(
                    "{tier:?}: {usage:?} and {} pages in the books",
                    tree.pages_in(tier)
                ));
            }
        }
        Ok(())
    }
}

impl NativeEngine {
    /// Takes what was moved, and moves more.
    pub(super) fn move_pages(&mut self, out: &mut Vec<pinion_actors::EngineOutput>) {
        for moved in self.tiers.down.take_done() {
            self.tiers.copied(&mut self.tree, moved, &mut self.events);
        }
        for moved in self.tiers.up.take_done() {
            if let Moved::Loaded { serial, pages } = moved {
                self.loaded(serial, pages, out);
            }
        }
        for at in 0..self.turns.len() {
            self.give_slots(at);
        }
        self.tiers.copy(&mut self.tree, &mut self.events);
    }

    /// Whether the pool has so many slots, or will have when copies are made, beside what other turns wait for.
    pub(super) fn slots_come(&self, slots: usize) -> bool {
        let waiting = |turn: &Turn| {
            if let Stage::Waiting { .. } = turn.stage {
                turn.reserved as usize
            } else {
                0
            }
        };
        let wanted: usize = self.turns.iter().map(waiting).sum::<usize>() + slots;
        let free = self.inbox.pool().usage().free as usize;
        wanted <= free + self.tiers.slots_held(&self.tree)
    }

    /// A turn that waits for slots takes them if they are there, and has its pages loaded into the first.
    pub(super) fn give_slots(&mut self, at: usize) {
        let turn = &mut self.turns[at];
        let Stage::Waiting { load } = &turn.stage else { return };
        let Ok(slots) = self.inbox.pool().take(turn.reserved as usize) else {
            return;
        };
        turn.slots = slots;
        // Some may have gone while it waited.
        let held = |name: &PageHash| self.tree.content(*name).map(|(tier, held)| (*name, tier, held.clone()));
        let held: Vec<_> = load.iter().map_while(held).collect();
        let into = turn.slots.drain(..held.len());
        let load = |((name, from, held), into)| Load { name, from, held, into };
        let pages: Vec<Load> = held.into_iter().zip(into).map(load).collect();
        if pages.is_empty() {
            turn.loaded(self.config.page_tokens);
            return;
        }
        self.tiers.loading.extend(pages.iter().map(|page| page.name));
        let (serial, stop) = (turn.serial, Arc::new(AtomicBool::new(false)));
        turn.stage = Stage::Loading { stop: stop.clone() };
        self.tiers.up.begin(Task::Load { serial, pages, stop });
    }

    /// A turn's pages have come, as far as they could: it begins behind them.
    fn loaded(&mut self, serial: u64, loaded: Vec<Loaded>, out: &mut Vec<pinion_actors::EngineOutput>) {
        let (mut pages, mut slots) = (Vec::new(), Vec::new());
        for Loaded { name, from, page } in loaded {
            self.tiers.loading.remove(&name);
            match page {
                Ok(page) => {
                    self.tiers.seen.reloaded += 1;
                    pages.push((name, page));
                }
                Err((slot, error)) => {
                    slots.push(slot);
                    if let Some(error) = error {
                        self.forget(name, from, &error);
                    }
                }
            }
        }
        // Those of a turn that ended meanwhile are of no use.
        let Some(at) = self.turns.iter().position(|t| t.serial == serial) else {
            return;
        };
        let turn = &mut self.turns[at];
        turn.slots.splice(..0, slots);
        let done = turn.name(pages, &mut self.tree, &mut self.events);
        turn.loaded(self.config.page_tokens);
        if let Err(error) = &done {
            tracing::error!(request = %turn.request, %error, "the page books are wrong: the turn ends");
        }
        if done.is_err() || turn.cancelled {
            self.end(at, false, out);
        }
    }

    /// A page that a lower tier did not give is computed from now on.
    fn forget(&mut self, name: PageHash, from: Tier, error: &ReadError) {
        tracing::warn!(page = %name, ?from, %error, "a page was not loaded: it is computed");
        let seen = &mut self.tiers.seen;
        match error {
            ReadError::Corrupt => seen.corrupt += 1,
            ReadError::Io(_) => seen.failed += 1,
        }
        self.tree.lose(from, name, &mut self.events);
    }

    /// Pages will come behind `tip`, which needs it in the pool: what is in lower tiers is loaded, as by a turn that nobody waits for.
    pub(super) fn fetch(&mut self, tip: PageHash) {
        let load = self.tree.lacking(Tier::Device, tip);
        let (Some(first), missing) = (load.first(), load.len()) else {
            return;
        };
        if self.tiers.loading.contains(&tip) {
            return;
        }
        let above = self.tree.parent(*first);
        if above.is_some_and(|above| self.tree.lock(above, None).is_err()) {
            return;
        }
        let mut turn = Turn {
            serial: self.next_serial(),
            request: RequestId(0),
            prompt_tokens: 0,
            tokens: Vec::new(),
            wanted: 0,
            sampling: Sampling::GREEDY,
            computed: 0,
            chain: ChainHasher::new(self.config.page_tokens, &[]),
            tip: above,
            pages: Vec::new(),
            slots: Vec::new(),
            reserved: 0,
            cancelled: true,
            stage: Stage::Waiting { load },
        };
        let reserved = self.tree.reserve(missing as u64, &mut self.events).is_ok();
        turn.reserved = if reserved { missing as u64 } else { 0 };
        if !reserved || !self.slots_come(missing) {
            // No room: who sends behind it is told so.
            return turn.end(&mut self.tree);
        }
        self.turns.push(turn);
        self.give_slots(self.turns.len() - 1);
    }
}
