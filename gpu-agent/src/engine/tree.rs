//! Page-exact KV bookkeeping: which pages are on the device, which have copies in lower tiers, what may be evicted (design §5, digest
//! §1.11).
//!
//! A page may be in several tiers at once. A copy in a lower tier is made while the page is on the device ([`PageTree::keep`]), so
//! that evicting it later is a matter of the books alone: it is *demoted* if a copy is left, else *dropped*. (`HiCache` calls this
//! write-through; it is also what leaves something behind when the process is killed.)
//!
//! Always: a page that a tier holds has its parent in the same tier; a locked page is on the device and so are, locked too, all its
//! ancestors; used + free = capacity. Nothing is freed by closing a session (I11): unlocking only makes pages evictable, in each
//! tier least recently used leaf first.

use pinion_schemas::hash::PageHash;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Why the tree refused. It has then changed nothing but what the reported events say.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// Not even evicting every unlocked page makes enough room.
    #[error("{needed} pages are needed and {available} can be had: wait for a turn to end or go elsewhere")]
    NoRoom {
        /// Pages asked for.
        needed: u64,
        /// Free and evictable pages.
        available: u64,
    },
    /// The page is not on the device.
    #[error("page {0} is not on the device: insert its chain first")]
    NotResident(PageHash),
    /// The page is known under another parent; chain names cannot do that, so a name is forged or broken.
    #[error("page {0} is known behind another parent: its name is wrong")]
    WrongParent(PageHash),
    /// More was committed or released than reserved.
    #[error("{asked} reserved pages are needed and {reserved} are reserved: reserve first")]
    NotReserved {
        /// Pages needed.
        asked: u64,
        /// Pages reserved.
        reserved: u64,
    },
    /// The page carries no lock.
    #[error("page {0} is not locked: each unlock needs its lock")]
    NotLocked(PageHash),
}

/// Where pages are, fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// The engine's pool: only here a page can be read by a forward pass.
    Device,
    /// Host memory.
    Host,
    /// A file.
    File,
}

/// Number of tiers.
pub const TIERS: usize = 3;

/// A change of residency, in the order it happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum PageEvent {
    /// New on this worker.
    Stored(PageHash),
    /// Back on the device; a lower tier had it.
    Promoted(PageHash),
    /// Evicted from the device; a lower tier has it.
    Demoted(PageHash),
    /// Gone from this worker: no tier has it any more.
    Dropped(PageHash),
}

/// A page with the content it holds: what stands for the KV, or the KV itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page<C> {
    /// Its name.
    pub name: PageHash,
    /// What it holds.
    pub content: C,
}

#[derive(Debug, Clone)]
struct Node<C> {
    parent: Option<PageHash>,
    /// Its content in each tier that holds it; at least one does.
    held: [Option<C>; TIERS],
    /// Children in each tier.
    children: [u32; TIERS],
    locks: u32,
    used_at: u64,
}

impl<C> Node<C> {
    fn is_in(&self, tier: Tier) -> bool {
        self.held[tier as usize].is_some()
    }

    fn evictable(&self, tier: Tier) -> bool {
        self.is_in(tier) && self.children[tier as usize] == 0 && (tier != Tier::Device || self.locks == 0)
    }
}

#[derive(Debug, Clone, Default)]
struct Books {
    capacity: u64,
    pages: u64,
    /// What may be evicted, least recently used first.
    leaves: BTreeSet<(u64, PageHash)>,
}

/// The pages of one worker. What a tier holds of one is its content `C`, which ends when the page leaves the tier. Sizes are in pages.
#[derive(Debug, Clone)]
pub struct PageTree<C> {
    tiers: [Books; TIERS],
    nodes: BTreeMap<PageHash, Node<C>>,
    locked: u64,
    reserved: u64,
    clock: u64,
}

const ALL: [Tier; TIERS] = [Tier::Device, Tier::Host, Tier::File];

impl<C: Clone> PageTree<C> {
    /// An empty tree over so many pages of each tier (0: no such tier).
    pub fn new(capacity: [u64; TIERS]) -> Self {
        Self {
            tiers: capacity.map(|capacity| Books {
                capacity,
                ..Books::default()
            }),
            nodes: BTreeMap::new(),
            locked: 0,
            reserved: 0,
            clock: 0,
        }
    }

    fn books(&self, tier: Tier) -> &Books {
        &self.tiers[tier as usize]
    }
    /// Pages that a tier can hold.
    pub fn capacity(&self, tier: Tier) -> u64 {
        self.books(tier).capacity
    }
    /// Pages that a tier holds.
    pub fn pages_in(&self, tier: Tier) -> u64 {
        self.books(tier).pages
    }
    /// Device pages in use: resident and reserved.
    pub fn used(&self) -> u64 {
        self.resident() + self.reserved
    }
    /// Device pages not in use.
    pub fn free(&self) -> u64 {
        self.capacity(Tier::Device).saturating_sub(self.used())
    }
    /// Device pages that hold a named page.
    pub fn resident(&self) -> u64 {
        self.pages_in(Tier::Device)
    }
    /// Device pages promised to running turns and not yet named.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }
    /// Resident pages that a running turn holds.
    pub fn locked(&self) -> u64 {
        self.locked
    }
    /// Device pages that can be had: free, or evictable.
    pub fn available(&self) -> u64 {
        self.free() + self.resident().saturating_sub(self.locked)
    }
    /// Whether a tier holds `page`.
    pub fn is_in(&self, tier: Tier, page: PageHash) -> bool {
        self.nodes.get(&page).is_some_and(|n| n.is_in(tier))
    }
    /// The page in front of `page`, if there is one and `page` is known.
    pub fn parent(&self, page: PageHash) -> Option<PageHash> {
        self.nodes.get(&page)?.parent
    }
    /// Content of a page in the fastest tier that holds it.
    pub fn content(&self, page: PageHash) -> Option<(Tier, &C)> {
        let node = self.nodes.get(&page)?;
        ALL.into_iter()
            .find_map(|tier| Some((tier, node.held[tier as usize].as_ref()?)))
    }

    /// How many first pages of `names` are on the device. A pure function of the tree.
    pub fn match_device(&self, names: &[PageHash]) -> usize {
        names.iter().take_while(|p| self.is_in(Tier::Device, **p)).count()
    }

    /// How many first pages of `names` are in any tier. A pure function of the tree.
    pub fn match_any(&self, names: &[PageHash]) -> usize {
        names.iter().take_while(|p| self.nodes.contains_key(*p)).count()
    }

    /// The pages up to `tip` that `tier` lacks, from the root on.
    pub fn lacking(&self, tier: Tier, tip: PageHash) -> Vec<PageHash> {
        let (mut lacking, mut at) = (Vec::new(), Some(tip));
        while let Some((page, node)) = at
            .and_then(|p| Some((p, self.nodes.get(&p)?)))
            .filter(|n| !n.1.is_in(tier))
        {
            lacking.push(page);
            at = node.parent;
        }
        lacking.reverse();
        lacking
    }

    /// Changes one node and keeps the lists of leaves right.
    fn update(&mut self, page: PageHash, change: impl FnOnce(&mut Node<C>)) {
        let Some(node) = self.nodes.get_mut(&page) else { return };
        let old = (node.used_at, page);
        change(node);
        for (books, tier) in self.tiers.iter_mut().zip(ALL) {
            books.leaves.remove(&old);
            if node.evictable(tier) {
                books.leaves.insert((node.used_at, page));
            }
        }
    }

    /// `tier` holds `content` for a page that is known, in place of what it held, if it did.
    fn enter(&mut self, tier: Tier, page: PageHash, content: C) {
        let Some(node) = self.nodes.get(&page) else { return };
        if !node.is_in(tier) {
            self.tiers[tier as usize].pages += 1;
            if let Some(parent) = node.parent {
                self.update(parent, |n| n.children[tier as usize] += 1);
            }
        }
        self.update(page, |n| n.held[tier as usize] = Some(content));
    }

    /// A page without children in `tier` leaves it.
    fn leave(&mut self, tier: Tier, page: PageHash, events: &mut Vec<PageEvent>) {
        self.update(page, |n| n.held[tier as usize] = None);
        self.tiers[tier as usize].pages -= 1;
        let Some(node) = self.nodes.get(&page) else { return };
        if let Some(parent) = node.parent {
            self.update(parent, |n| n.children[tier as usize] -= 1);
        }
        if self.content(page).is_none() {
            self.nodes.remove(&page);
            events.push(PageEvent::Dropped(page));
        } else if tier == Tier::Device {
            events.push(PageEvent::Demoted(page));
        }
    }

    /// Evicts the least recently used leaf of a tier, but not `spared`. False if there is none.
    fn evict_one(&mut self, tier: Tier, spared: Option<PageHash>, events: &mut Vec<PageEvent>) -> bool {
        let mut leaves = self.books(tier).leaves.iter();
        let Some(&(_, page)) = leaves.find(|l| Some(l.1) != spared) else {
            return false;
        };
        self.leave(tier, page, events);
        true
    }

    fn node(&mut self, parent: Option<PageHash>) -> Node<C> {
        Node {
            parent,
            held: [const { None }; TIERS],
            children: [0; TIERS],
            locks: 0,
            used_at: self.clock,
        }
    }

    /// A lower tier holds a page from now on: a copy of one that is known, or one that is new here (found in the tier when it was
    /// opened). Makes room in that tier as needed.
    ///
    /// # Errors
    /// [`TreeError::NotResident`] if the tier lacks the parent, [`TreeError::WrongParent`], [`TreeError::NoRoom`] if it holds nothing
    /// that could go.
    pub fn keep(
        &mut self,
        tier: Tier,
        parent: Option<PageHash>,
        page: Page<C>,
        events: &mut Vec<PageEvent>,
    ) -> Result<(), TreeError> {
        if let Some(parent) = parent.filter(|p| !self.is_in(tier, *p)) {
            return Err(TreeError::NotResident(parent));
        }
        let known = self.nodes.get(&page.name).map(|n| n.parent);
        if known.is_some_and(|known| known != parent) {
            return Err(TreeError::WrongParent(page.name));
        }
        let full = |this: &Self| this.pages_in(tier) >= this.capacity(tier) && !this.is_in(tier, page.name);
        if full(self) && !self.evict_one(tier, parent, events) {
            let available = 0;
            return Err(TreeError::NoRoom { needed: 1, available });
        }
        if known.is_none() {
            self.clock += 1;
            let node = self.node(parent);
            self.nodes.insert(page.name, node);
            events.push(PageEvent::Stored(page.name));
        }
        self.enter(tier, page.name, page.content);
        Ok(())
    }

    /// Replaces what a tier holds of a page. False if it does not hold it (any more).
    pub fn replace(&mut self, tier: Tier, page: PageHash, content: C) -> bool {
        let held = self.is_in(tier, page);
        if held {
            self.enter(tier, page, content);
        }
        held
    }

    /// A lower tier has lost a page, and with it all behind it there. Linear in the number of pages; it happens after errors alone.
    pub fn lose(&mut self, tier: Tier, page: PageHash, events: &mut Vec<PageEvent>) {
        if !self.is_in(tier, page) {
            return;
        }
        if self.nodes.get(&page).is_some_and(|n| n.children[tier as usize] == 0) {
            return self.leave(tier, page, events);
        }
        let mut children: BTreeMap<PageHash, Vec<PageHash>> = BTreeMap::new();
        for (child, node) in self.nodes.iter().filter(|(_, n)| n.is_in(tier)) {
            if let Some(parent) = node.parent {
                children.entry(parent).or_default().push(*child);
            }
        }
        let (mut gone, mut next) = (vec![page], 0);
        while let Some(children) = gone.get(next).map(|p| children.remove(p)) {
            gone.extend(children.unwrap_or_default());
            next += 1;
        }
        for page in gone.into_iter().rev() {
            self.leave(tier, page, events);
        }
    }

    /// Sets `pages` device pages aside for a turn, evicting as needed.
    ///
    /// # Errors
    /// [`TreeError::NoRoom`], with nothing evicted.
    pub fn reserve(&mut self, pages: u64, events: &mut Vec<PageEvent>) -> Result<(), TreeError> {
        if pages > self.available() {
            return Err(TreeError::NoRoom {
                needed: pages,
                available: self.available(),
            });
        }
        while self.free() < pages && self.evict_one(Tier::Device, None, events) {}
        self.reserved += pages;
        Ok(())
    }

    /// Returns `pages` reserved pages.
    ///
    /// # Errors
    /// [`TreeError::NotReserved`] if fewer are reserved.
    pub fn release(&mut self, pages: u64) -> Result<(), TreeError> {
        self.reserved = self.reserved.checked_sub(pages).ok_or(TreeError::NotReserved {
            asked: pages,
            reserved: self.reserved,
        })?;
        Ok(())
    }

    /// Names computed pages behind `parent`. Each that is not on the device takes one reserved page. Returns how many did; the caller
    /// releases what it reserved for the others.
    ///
    /// # Errors
    /// [`TreeError::NotResident`] (parent), [`TreeError::WrongParent`], [`TreeError::NotReserved`]: pages before the faulty one stay.
    pub fn commit(
        &mut self,
        parent: Option<PageHash>,
        pages: &[Page<C>],
        events: &mut Vec<PageEvent>,
    ) -> Result<u64, TreeError> {
        if let Some(p) = parent.filter(|p| !self.is_in(Tier::Device, *p)) {
            return Err(TreeError::NotResident(p));
        }
        self.clock += 1;
        let (now, mut taken, mut above) = (self.clock, 0, parent);
        for page in pages {
            let known = self.nodes.get(&page.name).map(|n| (n.parent, n.is_in(Tier::Device)));
            if known.is_some_and(|(p, _)| p != above) {
                return Err(TreeError::WrongParent(page.name));
            }
            if !known.is_some_and(|(_, on_device)| on_device) {
                self.release(1)?;
                taken += 1;
                if known.is_some() {
                    events.push(PageEvent::Promoted(page.name));
                } else {
                    let node = self.node(above);
                    self.nodes.insert(page.name, node);
                    events.push(PageEvent::Stored(page.name));
                }
                self.enter(Tier::Device, page.name, page.content.clone());
            }
            self.update(page.name, |n| n.used_at = now);
            above = Some(page.name);
        }
        Ok(taken)
    }

    /// Adds one lock to each page from `tip` up to, and without, `below` (`None`: to the root), and marks them used. A turn that
    /// holds a lock to `below` holds one to `tip` afterwards.
    ///
    /// # Errors
    /// [`TreeError::NotResident`] if `tip` is not on the device.
    pub fn lock(&mut self, tip: PageHash, below: Option<PageHash>) -> Result<(), TreeError> {
        if !self.is_in(Tier::Device, tip) {
            return Err(TreeError::NotResident(tip));
        }
        self.clock += 1;
        let (now, mut at) = (self.clock, Some(tip));
        while let Some(page) = at.filter(|p| Some(*p) != below) {
            let mut fresh = false;
            self.update(page, |n| {
                fresh = n.locks == 0;
                n.locks += 1;
                n.used_at = now;
            });
            self.locked += u64::from(fresh);
            at = self.nodes.get(&page).and_then(|n| n.parent);
        }
        Ok(())
    }

    /// Takes one lock from each page from `tip` to the root. Frees nothing (I11).
    ///
    /// # Errors
    /// [`TreeError::NotLocked`] if `tip` carries none.
    pub fn unlock(&mut self, tip: PageHash) -> Result<(), TreeError> {
        if self.nodes.get(&tip).is_none_or(|n| n.locks == 0) {
            return Err(TreeError::NotLocked(tip));
        }
        let mut at = Some(tip);
        while let Some(page) = at {
            let mut last = false;
            self.update(page, |n| {
                last = n.locks == 1;
                n.locks = n.locks.saturating_sub(1);
            });
            self.locked -= u64::from(last);
            at = self.nodes.get(&page).and_then(|n| n.parent);
        }
        Ok(())
    }

    /// Marks the pages up to `tip` as just used, in all tiers.
    pub fn touch(&mut self, tip: PageHash) {
        self.clock += 1;
        let (now, mut at) = (self.clock, Some(tip));
        while let Some(page) = at {
            self.update(page, |n| n.used_at = now);
            at = self.nodes.get(&page).and_then(|n| n.parent);
        }
    }

    /// Pages that a tier holds, in order of their names.
    pub fn pages(&self, tier: Tier) -> impl Iterator<Item = PageHash> + '_ {
        self.nodes.iter().filter(move |(_, n)| n.is_in(tier)).map(|(p, _)| *p)
    }

    /// All pages, in order of their names.
    pub fn all_pages(&self) -> impl Iterator<Item = PageHash> + '_ {
        self.nodes.keys().copied()
    }

    /// Recounts everything and says what does not add up; for tests and `chaos`, linear in the number of pages.
    ///
    /// # Errors
    /// A sentence that names the broken invariant.
    pub fn check(&self) -> Result<(), String> {
        if self.used() + self.free() != self.capacity(Tier::Device) {
            return Err(format!("used {} + free {} is not the pool", self.used(), self.free()));
        }
        let locked = self.nodes.values().filter(|n| n.locks > 0).count() as u64;
        if locked != self.locked {
            return Err(format!("counted {locked} locked, kept {}", self.locked));
        }
        for (page, node) in &self.nodes {
            if node.held.iter().all(Option::is_none) {
                return Err(format!("{page} is in no tier"));
            }
            if node.locks > 0 && !node.is_in(Tier::Device) {
                return Err(format!("{page} is locked and not on the device"));
            }
            let above = node.parent.map(|p| self.nodes.get(&p));
            if above.is_some_and(|above| above.is_none_or(|above| above.locks < node.locks)) {
                return Err(format!("parent of {page} is missing or less locked"));
            }
        }
        ALL.into_iter().try_for_each(|tier| self.check_tier(tier))
    }

    fn check_tier(&self, tier: Tier) -> Result<(), String> {
        let books = self.books(tier);
        let held = || self.nodes.iter().filter(|(_, n)| n.is_in(tier));
        let count = held().count() as u64;
        if count != books.pages || count > books.capacity {
            return Err(format!(
                "{tier:?}: counted {count}, kept {} of {}",
                books.pages, books.capacity
            ));
        }
        let leaves: BTreeSet<_> = held()
            .filter(|(_, n)| n.evictable(tier))
            .map(|(p, n)| (n.used_at, *p))
            .collect();
        if leaves != books.leaves {
            return Err(format!("{tier:?}: the list of leaves is wrong"));
        }
        let mut children: BTreeMap<PageHash, u32> = BTreeMap::new();
        for (page, node) in held() {
            let Some(above) = node.parent else { continue };
            if !self.is_in(tier, above) {
                return Err(format!("{tier:?}: {page} is there and its parent is not"));
            }
            *children.entry(above).or_default() += 1;
        }
        let miscounted =
            |(p, n): &(&PageHash, &Node<C>)| children.get(*p).copied().unwrap_or_default() != n.children[tier as usize];
        match self.nodes.iter().find(miscounted) {
            Some((p, _)) => Err(format!("{tier:?}: children of {p} are miscounted")),
            None => Ok(()),
        }
    }
}
