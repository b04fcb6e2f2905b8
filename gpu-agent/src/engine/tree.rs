//! Page-exact KV bookkeeping: which pages are on the device, which in host memory, what may be evicted (design §5, digest §1.11).
//!
//! Always: a page on the device has its parent there; a page in host memory has its parent somewhere; a locked page is on the
//! device and so are, locked too, all its ancestors; used + free = capacity. Nothing is freed by closing a session (I11):
//! unlocking only makes pages evictable, least recently used leaf first.

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

/// A change of residency, in the order it happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum PageEvent {
    /// New on the device.
    Stored(PageHash),
    /// Back on the device from host memory.
    Promoted(PageHash),
    /// Evicted from the device to host memory.
    Demoted(PageHash),
    /// Gone from this worker: from the device without a host tier, or from host memory.
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
    content: C,
    on_device: bool,
    locks: u32,
    children: u32,
    device_children: u32,
    used_at: u64,
}

/// The pages of one worker, each with a content `C`, which ends when its page leaves the worker. Sizes are in pages.
#[derive(Debug, Clone)]
pub struct PageTree<C> {
    capacity: u64,
    host_capacity: u64,
    nodes: BTreeMap<PageHash, Node<C>>,
    device_leaves: BTreeSet<(u64, PageHash)>,
    host_leaves: BTreeSet<(u64, PageHash)>,
    resident: u64,
    host: u64,
    locked: u64,
    reserved: u64,
    clock: u64,
}

impl<C: Clone> PageTree<C> {
    /// An empty tree over `capacity` device pages and `host_capacity` pages of host memory (0: no host tier).
    pub fn new(capacity: u64, host_capacity: u64) -> Self {
        Self {
            capacity,
            host_capacity,
            nodes: BTreeMap::new(),
            device_leaves: BTreeSet::new(),
            host_leaves: BTreeSet::new(),
            resident: 0,
            host: 0,
            locked: 0,
            reserved: 0,
            clock: 0,
        }
    }

    /// Device pages in all.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }
    /// Device pages in use: resident and reserved.
    pub fn used(&self) -> u64 {
        self.resident + self.reserved
    }
    /// Device pages not in use.
    pub fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.used())
    }
    /// Device pages that hold a named page.
    pub fn resident(&self) -> u64 {
        self.resident
    }
    /// Device pages promised to running turns and not yet named.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }
    /// Resident pages that a running turn holds.
    pub fn locked(&self) -> u64 {
        self.locked
    }
    /// Pages in host memory.
    pub fn host(&self) -> u64 {
        self.host
    }
    /// Device pages that can be had: free, or evictable.
    pub fn available(&self) -> u64 {
        self.free() + self.resident.saturating_sub(self.locked)
    }
    /// Whether `page` is on the device.
    pub fn on_device(&self, page: PageHash) -> bool {
        self.nodes.get(&page).is_some_and(|n| n.on_device)
    }
    /// Content of a page in either tier.
    pub fn content(&self, page: PageHash) -> Option<&C> {
        self.nodes.get(&page).map(|n| &n.content)
    }

    /// How many first pages of `names` are on the device. A pure function of the tree.
    pub fn match_device(&self, names: &[PageHash]) -> usize {
        names.iter().take_while(|p| self.on_device(**p)).count()
    }

    /// How many first pages of `names` are in either tier. A pure function of the tree.
    pub fn match_any(&self, names: &[PageHash]) -> usize {
        names.iter().take_while(|p| self.nodes.contains_key(*p)).count()
    }

    /// Changes one node and keeps both lists of leaves right.
    fn update(&mut self, page: PageHash, change: impl FnOnce(&mut Node<C>)) {
        let Some(node) = self.nodes.get_mut(&page) else { return };
        let old = (node.used_at, page);
        self.device_leaves.remove(&old);
        self.host_leaves.remove(&old);
        change(node);
        let key = (node.used_at, page);
        if node.on_device && node.locks == 0 && node.device_children == 0 {
            self.device_leaves.insert(key);
        } else if !node.on_device && node.children == 0 {
            self.host_leaves.insert(key);
        }
    }

    fn drop_host_leaf(&mut self, events: &mut Vec<PageEvent>) {
        let Some((_, page)) = self.host_leaves.pop_first() else {
            return;
        };
        if let Some(node) = self.nodes.remove(&page) {
            self.host -= 1;
            if let Some(parent) = node.parent {
                self.update(parent, |n| n.children -= 1);
            }
            events.push(PageEvent::Dropped(page));
        }
    }

    /// Evicts the least recently used unlocked leaf of the device. False if there is none.
    fn evict_one(&mut self, events: &mut Vec<PageEvent>) -> bool {
        let Some(&(_, page)) = self.device_leaves.first() else {
            return false;
        };
        let parent = self.nodes.get(&page).and_then(|n| n.parent);
        if self.host_capacity > 0 {
            if self.host >= self.host_capacity {
                self.drop_host_leaf(events);
            }
            self.update(page, |n| n.on_device = false);
            self.host += 1;
            events.push(PageEvent::Demoted(page));
        } else {
            self.device_leaves.pop_first();
            self.nodes.remove(&page);
            events.push(PageEvent::Dropped(page));
        }
        self.resident -= 1;
        let gone = u32::from(self.host_capacity == 0);
        if let Some(parent) = parent {
            self.update(parent, |n| {
                n.device_children -= 1;
                n.children -= gone;
            });
        }
        true
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
        while self.free() < pages && self.evict_one(events) {}
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

    /// Names computed pages behind `parent`. Each that is not on the device takes one reserved page (and replaces its copy in
    /// host memory). Returns how many did; the caller releases what it reserved for the others.
    ///
    /// # Errors
    /// [`TreeError::NotResident`] (parent), [`TreeError::WrongParent`], [`TreeError::NotReserved`]: pages before the faulty one stay.
    pub fn commit(
        &mut self,
        parent: Option<PageHash>,
        pages: &[Page<C>],
        events: &mut Vec<PageEvent>,
    ) -> Result<u64, TreeError> {
        if let Some(p) = parent.filter(|p| !self.on_device(*p)) {
            return Err(TreeError::NotResident(p));
        }
        self.clock += 1;
        let (now, mut taken, mut above) = (self.clock, 0, parent);
        for page in pages {
            let known = self.nodes.get(&page.name).map(|n| (n.parent, n.on_device));
            if known.is_some_and(|(p, _)| p != above) {
                return Err(TreeError::WrongParent(page.name));
            }
            if !known.is_some_and(|(_, on_device)| on_device) {
                self.release(1)?;
                taken += 1;
                self.resident += 1;
                if known.is_some() {
                    self.host -= 1;
                    events.push(PageEvent::Promoted(page.name));
                } else {
                    let node = Node {
                        parent: above,
                        content: page.content.clone(),
                        on_device: false,
                        locks: 0,
                        children: 0,
                        device_children: 0,
                        used_at: now,
                    };
                    self.nodes.insert(page.name, node);
                    events.push(PageEvent::Stored(page.name));
                }
                let born = u32::from(known.is_none());
                if let Some(above) = above {
                    self.update(above, |n| {
                        n.children += born;
                        n.device_children += 1;
                    });
                }
            }
            self.update(page.name, |n| {
                n.on_device = true;
                n.used_at = now;
            });
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
        if !self.on_device(tip) {
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

    /// Marks the pages up to `tip` as just used, if they are on the device.
    pub fn touch(&mut self, tip: PageHash) {
        if self.lock(tip, None).is_ok() {
            // It was locked a line above.
            let _ = self.unlock(tip);
        }
    }

    /// Pages on the device, in order of their names.
    pub fn device_pages(&self) -> impl Iterator<Item = PageHash> + '_ {
        self.nodes.iter().filter(|(_, n)| n.on_device).map(|(p, _)| *p)
    }

    /// Recounts everything and says what does not add up; for tests and `chaos`, linear in the number of pages.
    ///
    /// # Errors
    /// A sentence that names the broken invariant.
    pub fn check(&self) -> Result<(), String> {
        let count = |f: fn(&Node<C>) -> bool| self.nodes.values().filter(|n| f(n)).count() as u64;
        let counts = (count(|n| n.on_device), count(|n| !n.on_device), count(|n| n.locks > 0));
        if counts != (self.resident, self.host, self.locked) {
            return Err(format!(
                "counted {counts:?}, kept {:?}",
                (self.resident, self.host, self.locked)
            ));
        }
        if self.used() + self.free() != self.capacity || self.host > self.host_capacity {
            return Err(format!(
                "used {} + free {} of {}",
                self.used(),
                self.free(),
                self.capacity
            ));
        }
        let mut children: BTreeMap<PageHash, (u32, u32)> = BTreeMap::new();
        for (page, node) in &self.nodes {
            if node.locks > 0 && !node.on_device {
                return Err(format!("{page} is locked and not on the device"));
            }
            let Some(above) = node.parent else { continue };
            match self.nodes.get(&above) {
                Some(p) if (p.on_device || !node.on_device) && p.locks >= node.locks => {}
                _ => return Err(format!("parent of {page} is missing, in host memory or less locked")),
            }
            let c = children.entry(above).or_default();
            c.0 += 1;
            c.1 += u32::from(node.on_device);
        }
        match self
            .nodes
            .iter()
            .find(|(p, n)| children.get(p).copied().unwrap_or_default() != (n.children, n.device_children))
        {
            Some((p, _)) => Err(format!("children of {p} are miscounted")),
            None => Ok(()),
        }
    }
}
