//! The router's index of which worker holds which page (design §2: an estimate, rebuildable from events at any time).
//!
//! Fed by the workers' events, numbered densely from 1 within a worker's epoch. A missing number is answered
//! [`Applied::Gap`]: ask that worker for a snapshot. A worker of a newer epoch is a new process, its pages are gone.
//!
//! A chain's pages go leaf first, so what a worker holds of a chain is always a prefix of it. Asking how long that
//! prefix is therefore takes a binary search, and for all workers at once a divide and conquer over sets of holders.
//! After pages were refused at the cap this may be wrong for them until the next snapshot; the protocol is right anyway.
//!
//! A page costs a 16-byte entry at a load between 3/8 and 3/4: 21 to 43 bytes. It names its holders by the number of an
//! interned set instead of a mask inline: 256 workers would need 32 bytes, and a cluster has few distinct sets (one per
//! worker, plus one per group that shares a prefix).

use pinion_schemas::{Epoch, PageHash, WorkerId};
use serde::Serialize;
use std::collections::BTreeMap;

mod sets;
mod table;
#[cfg(test)]
mod tests;

use sets::{Holders, Sets};
use table::{Key, Table};

/// Workers an index knows at most: the bits of a set of holders. Events of further ones are refused, and counted.
pub const WORKERS_MAX: usize = sets::SLOTS;
/// Distinct sets of holders at most, about 8 MB; whoever would need another one is refused, and counted.
pub const SETS_MAX: usize = 1 << 16;
/// Pages unless configured otherwise: 64 workers with one million tokens each, 32 MB at most.
pub const PAGES_MAX: usize = 1 << 20;

/// Lookups that wait for memory together: about what a core has under way at once.
const LOOKUPS_AT_ONCE: usize = 32;

/// What became of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[must_use = "a gap wants a snapshot"]
pub enum Applied {
    /// The index contains it.
    Ok,
    /// It is of an older process of the worker; it changed nothing (I7).
    StaleEpoch,
    /// It was contained already; it changed nothing.
    Duplicate,
    /// Events are missing before it; it changed nothing but the epoch. Ask for a snapshot.
    Gap {
        /// Number of the first missing event.
        expected: u64,
    },
    /// [`WORKERS_MAX`] others are known; it changed nothing but the count of drops.
    TooManyWorkers,
}

/// What an observer sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct View {
    /// Pages somebody holds.
    pub pages: usize,
    /// Pages there may be.
    pub pages_max: usize,
    /// Distinct sets of holders.
    pub sets: usize,
    /// Pages refused at a cap since the start.
    pub dropped: u64,
    /// The workers, by name.
    pub workers: BTreeMap<WorkerId, WorkerView>,
}

/// One worker in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct WorkerView {
    /// Its latest epoch.
    pub epoch: Epoch,
    /// Number of its last event that is contained; 0 before the first.
    pub sequence: u64,
    /// Pages it holds; too many by those that were forgotten for all because [`SETS_MAX`] was reached.
    pub pages: u64,
}

#[derive(Debug, Clone)]
struct Slot {
    worker: WorkerId,
    seen: WorkerView,
}

/// The index. See the module's text.
#[derive(Debug, Clone)]
pub struct Residency {
    pages_max: usize,
    pages: Table,
    sets: Sets,
    /// Position is the bit in a set of holders; a free slot is taken by the next new worker.
    slots: Vec<Option<Slot>>,
    by_name: BTreeMap<WorkerId, usize>,
    dropped: u64,
}

impl Default for Residency {
    fn default() -> Self {
        Self::new(PAGES_MAX)
    }
}

impl Residency {
    /// An empty index for at most `pages_max` pages.
    pub fn new(pages_max: usize) -> Self {
        Self {
            pages_max,
            pages: Table::default(),
            sets: Sets::new(SETS_MAX),
            slots: Vec::new(),
            by_name: BTreeMap::new(),
            dropped: 0,
        }
    }

    /// `worker` now holds `pages`, each behind its parent. At a cap the rest of the event is refused and counted.
    pub fn stored(&mut self, worker: &WorkerId, epoch: Epoch, sequence: u64, pages: &[PageHash]) -> Applied {
        self.event(worker, epoch, sequence, pages, Self::insert)
    }

    /// `worker` no longer holds `pages`.
    pub fn evicted(&mut self, worker: &WorkerId, epoch: Epoch, sequence: u64, pages: &[PageHash]) -> Applied {
        self.event(worker, epoch, sequence, pages, Self::remove)
    }

    /// `worker` holds exactly `pages`, all events up to number `sequence` contained. Never answers [`Applied::Gap`].
    pub fn snapshot(&mut self, worker: &WorkerId, epoch: Epoch, sequence: u64, pages: &[PageHash]) -> Applied {
        let Some(slot) = self.slot(worker, epoch, pages) else {
            return Applied::TooManyWorkers;
        };
        match self.enter_epoch(slot, epoch) {
            Some(seen) if sequence < seen => return Applied::Duplicate,
            Some(_) => {}
            None => return Applied::StaleEpoch,
        }
        self.clear(slot);
        self.insert(slot, pages);
        self.reached(slot, sequence);
        Applied::Ok
    }

    /// Number of the last event of the worker's process `epoch` that the index contains; 0 is none.
    pub fn last_event(&self, worker: &WorkerId, epoch: Epoch) -> u64 {
        let slot = self.by_name.get(worker).and_then(|slot| self.slots[*slot].as_ref());
        slot.filter(|s| s.seen.epoch == epoch).map_or(0, |s| s.seen.sequence)
    }

    /// Drops a worker that has left, and all it held. Its next event starts it anew.
    pub fn forget(&mut self, worker: &WorkerId) {
        if let Some(slot) = self.by_name.remove(worker) {
            self.clear(slot);
            self.slots[slot] = None;
        }
    }

    /// Pages of `chain`, from its root, that `worker` holds: a binary search.
    pub fn longest_prefix(&self, worker: &WorkerId, chain: &[PageHash]) -> u32 {
        let Some(&slot) = self.by_name.get(worker) else {
            return 0;
        };
        chain.partition_point(|page| self.holders(page).contains(slot)) as u32
    }

    /// Every worker that holds pages of `chain` from its root, by name, and how many.
    ///
    /// Cuts the chain: a lookup at a cut parts the workers that reach it from those that do not, and each part goes on
    /// between its cuts. All lookups of a round wait for memory together; in a large table the waits are what they cost. So
    /// few parts get several cuts each, for fewer rounds, and many parts one. Costs about log₂(pages) lookups per distinct
    /// length, and none per worker.
    pub fn longest_prefixes(&self, chain: &[PageHash]) -> Vec<(&WorkerId, u32)> {
        let mut lengths = [0; WORKERS_MAX];
        // Those in `.0` hold at least `.1` and at most `.2` pages.
        let mut open = vec![(Holders::ALL, 0, chain.len())];
        let (mut parted, mut asked) = (Vec::new(), Vec::new());
        while !open.is_empty() {
            let halvings = (LOOKUPS_AT_ONCE / open.len()).max(2).ilog2();
            for (_, least, most) in &open {
                asked.extend(cuts(*least, *most, halvings).map(|cut| Key::of(&chain[cut - 1])));
            }
            self.pages.fetch(asked.iter().copied());
            let mut keys = asked.drain(..);
            for (mut holders, mut least, most) in open.drain(..) {
                // `zip` asks the cuts first, so it takes no key too many.
                for (cut, key) in cuts(least, most, halvings).zip(&mut keys) {
                    let set = self.pages.get(key);
                    let reach = set.map_or(Holders::NONE, |set| holders.and(self.sets.get(set)));
                    part(holders.without(reach), least, cut - 1, &mut parted, &mut lengths);
                    (holders, least) = (reach, cut);
                }
                part(holders, least, most, &mut parted, &mut lengths);
            }
            drop(keys);
            std::mem::swap(&mut open, &mut parted);
        }
        let workers = self.by_name.iter().map(|(worker, slot)| (worker, lengths[*slot]));
        workers.filter(|(_, length)| *length > 0).collect()
    }

    /// Workers that hold `page`, in no meaningful but always the same order: live sources for a transfer.
    pub fn holders_of(&self, page: &PageHash) -> impl Iterator<Item = &WorkerId> {
        self.holders(page)
            .slots()
            .filter_map(|slot| self.slots[slot].as_ref())
            .map(|s| &s.worker)
    }

    /// For observers.
    pub fn view(&self) -> View {
        let slots = self.slots.iter().flatten();
        View {
            pages: self.pages.len(),
            pages_max: self.pages_max,
            sets: self.sets.len(),
            dropped: self.dropped,
            workers: slots.map(|s| (s.worker.clone(), s.seen)).collect(),
        }
    }

    fn event(
        &mut self,
        worker: &WorkerId,
        epoch: Epoch,
        sequence: u64,
        pages: &[PageHash],
        apply: impl FnOnce(&mut Self, usize, &[PageHash]),
    ) -> Applied {
        let Some(slot) = self.slot(worker, epoch, pages) else {
            return Applied::TooManyWorkers;
        };
        let Some(seen) = self.enter_epoch(slot, epoch) else {
            return Applied::StaleEpoch;
        };
        let expected = seen.saturating_add(1);
        if sequence <= seen {
            return Applied::Duplicate;
        }
        if sequence > expected {
            return Applied::Gap { expected };
        }
        apply(self, slot, pages);
        self.reached(slot, sequence);
        Applied::Ok
    }

    /// The worker's slot, a free one if it is new; none if there is none, and then `pages` count as dropped.
    fn slot(&mut self, worker: &WorkerId, epoch: Epoch, pages: &[PageHash]) -> Option<usize> {
        if let Some(&slot) = self.by_name.get(worker) {
            return Some(slot);
        }
        let free = self.slots.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.slots.len());
        if slot >= WORKERS_MAX {
            self.dropped = self.dropped.saturating_add(pages.len() as u64);
            return None;
        }
        let seen = WorkerView {
            epoch,
            sequence: 0,
            pages: 0,
        };
        let entry = Some(Slot {
            worker: worker.clone(),
            seen,
        });
        match self.slots.get_mut(slot) {
            Some(place) => *place = entry,
            None => self.slots.push(entry),
        }
        self.by_name.insert(worker.clone(), slot);
        Some(slot)
    }

    /// Number of the last event seen in `epoch`, whose start drops what the epoch before held; none if it is over.
    fn enter_epoch(&mut self, slot: usize, epoch: Epoch) -> Option<u64> {
        let seen = self.seen(slot)?;
        if epoch < seen.epoch {
            return None;
        }
        if epoch > seen.epoch {
            (seen.epoch, seen.sequence) = (epoch, 0);
            self.clear(slot);
        }
        self.seen(slot).map(|s| s.sequence)
    }

    fn reached(&mut self, slot: usize, sequence: u64) {
        if let Some(seen) = self.seen(slot) {
            seen.sequence = sequence;
        }
    }

    fn seen(&mut self, slot: usize) -> Option<&mut WorkerView> {
        self.slots.get_mut(slot)?.as_mut().map(|s| &mut s.seen)
    }

    fn holders(&self, page: &PageHash) -> Holders {
        let set = self.pages.get(Key::of(page));
        set.map_or(Holders::NONE, |set| self.sets.get(set))
    }

    /// Asked before each page of an event: makes each group of them wait for memory together.
    fn fetch(&self, pages: &[PageHash], at: usize) {
        if at.is_multiple_of(LOOKUPS_AT_ONCE) {
            let group = pages[at..].iter().take(LOOKUPS_AT_ONCE);
            self.pages.fetch(group.map(Key::of));
        }
    }

    fn insert(&mut self, slot: usize, pages: &[PageHash]) {
        let mut added = 0;
        for (i, page) in pages.iter().enumerate() {
            self.fetch(pages, i);
            let key = Key::of(page);
            let old = self.pages.get(key);
            let before = old.map_or(Holders::NONE, |set| self.sets.get(set));
            if before.contains(slot) {
                continue;
            }
            let room = old.is_some() || self.pages.len() < self.pages_max;
            let Some(new) = room.then(|| self.sets.intern(before.with(slot))).flatten() else {
                // Without this page, those behind it would not be found anyway.
                self.dropped = self.dropped.saturating_add((pages.len() - i) as u64);
                break;
            };
            if let Some(set) = old {
                self.sets.release(set);
            }
            self.pages.insert(key, new);
            added += 1;
        }
        if let Some(seen) = self.seen(slot) {
            seen.pages += added;
        }
    }

    fn remove(&mut self, slot: usize, pages: &[PageHash]) {
        let mut removed = 0u64;
        for (i, page) in pages.iter().enumerate() {
            self.fetch(pages, i);
            let sets = &mut self.sets;
            self.pages.update(Key::of(page), |set| {
                let held = sets.get(*set).contains(slot);
                removed += u64::from(held);
                !held || sets.replace_without(set, slot)
            });
        }
        if let Some(seen) = self.seen(slot) {
            seen.pages = seen.pages.saturating_sub(removed);
        }
    }

    /// Takes the worker out of every page: the one walk over the table, rare, and its order leaves no trace.
    fn clear(&mut self, slot: usize) {
        let sets = &mut self.sets;
        if self.slots[slot].as_ref().is_some_and(|s| s.seen.pages > 0) {
            self.pages
                .retain(|set| !sets.get(*set).contains(slot) || sets.replace_without(set, slot));
        }
        if let Some(seen) = self.seen(slot) {
            seen.pages = 0;
        }
    }
}

/// Where to cut a part whose workers hold `least` to `most` pages, so that it is halved so many times: numbers of pages in
/// `least + 1..=most`, none if there is nothing to find out.
fn cuts(least: usize, most: usize, halvings: u32) -> impl Iterator<Item = usize> {
    let (span, parts) = (most - least, 1 << halvings);
    let (count, scale, shift) = if span < parts {
        (span, 1, 0)
    } else {
        (parts - 1, span, halvings)
    };
    (1..=count).map(move |n| least + ((n * scale + (1 << shift) - 1) >> shift))
}

/// Workers of which is known that they hold `least` to `most` pages: to be parted further, or done.
fn part(
    holders: Holders,
    least: usize,
    most: usize,
    open: &mut Vec<(Holders, usize, usize)>,
    lengths: &mut [u32; WORKERS_MAX],
) {
    if holders.is_empty() {
    } else if least < most {
        open.push((holders, least, most));
    } else if least > 0 {
        holders.slots().for_each(|slot| lengths[slot] = least as u32);
    }
}
