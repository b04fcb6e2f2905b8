//! What peers may write: slots granted to one transfer, until a deadline.
//!
//! The owner of the pool grants slots ([`Inbox::grant`]) and tells the peer number, key and epoch over the bus. A transport opens the
//! grant by them, gets the empty slots, and puts each back as a verified page. The owner takes the pages when the
//! peer says that it is ready ([`Inbox::take`]). Whatever happens - connection lost, peer dead, deadline passed - each slot is
//! either in the grant, with the transport that writes it, or free.

use crate::frame::{Entry, PageState};
use crate::layout::digest;
use crate::pool::{NoRoom, PageRef, Pool, SlotMut};
use pinion_schemas::{Epoch, Micros};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Grants at once: four pending seeds and four backups of each of 32 peers.
pub const GRANTS_MAX: usize = 256;
/// Pages of one grant: a million tokens in pages of 16.
pub const GRANT_PAGES_MAX: usize = 65_536;

/// A promise that a peer may fill `pages` slots. It travels over the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Its number in this pool.
    pub id: u64,
    /// Secret of the two.
    pub key: u64,
    /// Life of the pool: a pool that was made anew honours no older grant.
    pub epoch: Epoch,
    /// Slots.
    pub pages: u32,
}

/// Why no grant was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// The pool is full.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// Too many grants are open.
    #[error("{GRANTS_MAX} transfers are under way: try again when one has ended")]
    TooMany,
    /// Too many pages for one grant.
    #[error("{0} pages are too many for one transfer: at most {GRANT_PAGES_MAX} are possible")]
    TooLong(usize),
}

/// Why a peer may not write. The numbers are what transports send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Refusal {
    /// Not granted, already taken, or past its deadline.
    #[error("there is no such grant (any more)")]
    Unknown = 1,
    /// The wrong key.
    #[error("the key is not that of the grant")]
    Key = 2,
    /// Of another life of the pool.
    #[error("the grant is of another life of the pool")]
    Epoch = 3,
    /// A slot outside of the grant, or named twice.
    #[error("a page is named that was not granted, or is named twice")]
    Page = 4,
}

impl Refusal {
    /// The refusal of a number from a peer.
    pub fn from_wire(byte: u8) -> Option<Self> {
        [Self::Unknown, Self::Key, Self::Epoch, Self::Page]
            .into_iter()
            .find(|r| *r as u8 == byte)
    }
}

#[derive(Debug)]
enum Place {
    Empty(SlotMut),
    /// A transport writes it.
    Out,
    Filled(PageRef),
}

#[derive(Debug)]
struct Granted {
    key: u64,
    deadline: Micros,
    places: Vec<Place>,
}

#[derive(Debug)]
struct Table {
    next: u64,
    open: BTreeMap<u64, Granted>,
}

/// The grants of one pool. Clones are the same.
#[derive(Clone, Debug)]
pub struct Inbox {
    pool: Pool,
    epoch: Epoch,
    table: Arc<Mutex<Table>>,
}

impl Inbox {
    /// Grants on `pool`, whose life is `epoch`.
    pub fn new(pool: Pool, epoch: Epoch) -> Self {
        let table = Table {
            // No number means anything in another life of the pool.
            next: digest(&epoch.0.to_le_bytes()) as u64,
            open: BTreeMap::new(),
        };
        Self {
            pool,
            epoch,
            table: Arc::new(Mutex::new(table)),
        }
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing in its critical sections can panic half-way.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Grants `pages` slots until `deadline`. `key` must be random: who knows it may write.
    ///
    /// # Errors
    /// [`GrantError`]; nothing was taken then.
    pub fn grant(&self, pages: usize, key: u64, deadline: Micros) -> Result<Grant, GrantError> {
        if pages > GRANT_PAGES_MAX {
            return Err(GrantError::TooLong(pages));
        }
        let mut table = self.table();
        if table.open.len() >= GRANTS_MAX {
            return Err(GrantError::TooMany);
        }
        let places = self.pool.take(pages)?.into_iter().map(Place::Empty).collect();
        table.next = table.next.wrapping_add(1);
        let id = table.next;
        table.open.insert(id, Granted { key, deadline, places });
        Ok(Grant {
            id,
            key,
            epoch: self.epoch,
            pages: pages as u32,
        })
    }

    /// A transport wants to write these pages of a grant. Pages that are there already, or that another connection is writing,
    /// are left out of what it gets: sending a page twice changes nothing.
    ///
    /// # Errors
    /// [`Refusal`]; nothing has changed then.
    pub fn open(&self, id: u64, key: u64, epoch: Epoch, pages: &[u32]) -> Result<Opened, Refusal> {
        if epoch != self.epoch {
            return Err(Refusal::Epoch);
        }
        let mut table = self.table();
        let granted = table.open.get_mut(&id).ok_or(Refusal::Unknown)?;
        if granted.key != key {
            return Err(Refusal::Key);
        }
        let mut seen = vec![false; granted.places.len()];
        for page in pages {
            match seen.get_mut(*page as usize) {
                Some(seen @ false) => *seen = true,
                _ => return Err(Refusal::Page),
            }
        }
        let mut slots = BTreeMap::new();
        for page in pages {
            let place = &mut granted.places[*page as usize];
            match std::mem::replace(place, Place::Out) {
                Place::Empty(slot) => {
                    slots.insert(*page, slot);
                }
                other => *place = other,
            }
        }
        Ok(Opened {
            inbox: self.clone(),
            id,
            slots,
        })
    }

    /// Ends a grant and gives what came, in the order of the slots. A connection that still writes to it writes for nothing: its
    /// slots become free when it ends.
    pub fn take(&self, id: u64) -> Vec<Option<PageRef>> {
        let granted = self.table().open.remove(&id);
        let places = granted.into_iter().flat_map(|g| g.places);
        let page = |place| {
            if let Place::Filled(page) = place {
                Some(page)
            } else {
                None
            }
        };
        places.map(page).collect()
    }

    /// How many pages of a grant have come; 0 when it has ended.
    pub fn filled(&self, id: u64) -> usize {
        let table = self.table();
        let places = table.open.get(&id).into_iter().flat_map(|g| &g.places);
        places.filter(|p| matches!(p, Place::Filled(_))).count()
    }

    /// Ends the grants whose deadline has passed. Returns their numbers.
    pub fn expire(&self, now: Micros) -> Vec<u64> {
        let mut table = self.table();
        let late: Vec<u64> = table
            .open
            .iter()
            .filter(|(_, g)| g.deadline <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in &late {
            table.open.remove(id);
        }
        late
    }

    /// Grants that have not ended.
    pub fn grants(&self) -> usize {
        self.table().open.len()
    }

    fn put(&self, id: u64, page: u32, place: Place) -> bool {
        let mut table = self.table();
        let slot = table.open.get_mut(&id).and_then(|g| g.places.get_mut(page as usize));
        match slot {
            Some(slot @ Place::Out) => {
                *slot = place;
                true
            }
            _ => false,
        }
    }
}

/// Slots of a grant while a transport fills them. When it ends, those that were not filled are empty in the grant again.
#[derive(Debug)]
pub struct Opened {
    inbox: Inbox,
    id: u64,
    slots: BTreeMap<u32, SlotMut>,
}

impl Opened {
    /// The slot of a page, if it is for this transport to fill.
    pub fn slot(&mut self, page: u32) -> Option<&mut [u8]> {
        self.slots.get_mut(&page).map(|slot| &mut **slot)
    }

    /// Why a page is not for this transport to fill.
    pub(crate) fn absent(&self, page: u32) -> PageState {
        let table = self.inbox.table();
        let places = table.open.get(&self.id).map(|g| &g.places);
        match places.and_then(|p| p.get(page as usize)) {
            Some(Place::Filled(_)) => PageState::Known,
            Some(Place::Out | Place::Empty(_)) => PageState::Busy,
            None => PageState::Ended,
        }
    }

    /// All of a page's bytes are in its slot, and `digest` was computed from them.
    pub(crate) fn judge(&mut self, entry: &Entry, digest: u128) -> PageState {
        if digest != entry.digest {
            return PageState::Corrupt;
        }
        let Some(slot) = self.slots.remove(&entry.place) else {
            return self.absent(entry.place);
        };
        let page = slot.finish().with_digest(digest);
        if self.inbox.put(self.id, entry.place, Place::Filled(page)) {
            PageState::Stored
        } else {
            PageState::Ended
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        for (page, slot) in std::mem::take(&mut self.slots) {
            self.inbox.put(self.id, page, Place::Empty(slot));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Usage;
    use crate::testing::pool;
    use proptest::prelude::*;

    const EPOCH: Epoch = Epoch(9);
    const LATER: Micros = Micros(100);

    fn entry(place: u32, digest: u128) -> Entry {
        Entry {
            place,
            offset: 0,
            digest,
        }
    }

    fn fill(opened: &mut Opened, page: u32, byte: u8) -> PageState {
        let Some(slot) = opened.slot(page) else {
            return PageState::Known;
        };
        slot.fill(byte);
        let sum = digest(slot);
        opened.judge(&entry(page, sum), sum)
    }

    #[test]
    fn only_who_was_granted_writes() {
        let inbox = Inbox::new(pool(4), EPOCH);
        let grant = inbox.grant(2, 77, LATER).unwrap();
        let open = |id, key, epoch, pages: &[u32]| inbox.open(id, key, epoch, pages).map(|_| ()).unwrap_err();
        assert_eq!(open(grant.id, 78, EPOCH, &[0]), Refusal::Key);
        assert_eq!(open(grant.id, 77, Epoch(8), &[0]), Refusal::Epoch);
        assert_eq!(open(grant.id + 1, 77, EPOCH, &[0]), Refusal::Unknown);
        assert_eq!(open(grant.id, 77, EPOCH, &[0, 2]), Refusal::Page);
        assert_eq!(open(grant.id, 77, EPOCH, &[1, 1]), Refusal::Page);
        let mut opened = inbox.open(grant.id, 77, EPOCH, &[0, 1]).unwrap();
        assert_eq!(fill(&mut opened, 1, 5), PageState::Stored);
        drop(opened);
        assert_eq!(
            inbox.pool().usage(),
            Usage {
                free: 2,
                writing: 1,
                pages: 1
            }
        );
        let pages = inbox.take(grant.id);
        assert!(pages[0].is_none() && pages[1].as_ref().unwrap().iter().all(|b| *b == 5));
        assert_eq!(open(grant.id, 77, EPOCH, &[0]), Refusal::Unknown);
        drop(pages);
        assert_eq!(inbox.pool().usage().free, 4);
    }

    #[test]
    fn wrong_bytes_are_not_a_page_and_may_be_sent_again() {
        let inbox = Inbox::new(pool(1), EPOCH);
        let grant = inbox.grant(1, 1, LATER).unwrap();
        let mut opened = inbox.open(grant.id, 1, EPOCH, &[0]).unwrap();
        assert_eq!(opened.judge(&entry(0, 3), 4), PageState::Corrupt);
        assert_eq!(fill(&mut opened, 0, 2), PageState::Stored);
        // Sent a second time over another path: nothing to write.
        let mut again = inbox.open(grant.id, 1, EPOCH, &[0]).unwrap();
        assert!(again.slot(0).is_none());
        assert_eq!(again.judge(&entry(0, 1), 1), PageState::Known);
        assert!(inbox.take(grant.id)[0].is_some());
    }

    #[test]
    fn a_late_writer_writes_for_nothing_and_leaks_nothing() {
        let inbox = Inbox::new(pool(2), EPOCH);
        let grant = inbox.grant(2, 1, LATER).unwrap();
        let mut opened = inbox.open(grant.id, 1, EPOCH, &[0, 1]).unwrap();
        assert!(inbox.expire(Micros(99)).is_empty());
        assert_eq!(inbox.expire(LATER), [grant.id]);
        assert_eq!(fill(&mut opened, 0, 1), PageState::Ended);
        assert_eq!(inbox.pool().usage().writing, 1, "the other slot is still the writer's");
        drop(opened);
        assert_eq!(inbox.pool().usage().free, 2);
    }

    #[test]
    fn grants_are_bounded() {
        let inbox = Inbox::new(pool(1), EPOCH);
        assert!(matches!(inbox.grant(2, 1, LATER), Err(GrantError::NoRoom(_))));
        assert!(matches!(
            inbox.grant(GRANT_PAGES_MAX + 1, 1, LATER),
            Err(GrantError::TooLong(_))
        ));
        for _ in 0..GRANTS_MAX {
            inbox.grant(0, 1, LATER).unwrap();
        }
        assert_eq!(inbox.grant(0, 1, LATER), Err(GrantError::TooMany));
    }

    proptest! {
        /// Grants, openings, fills, ends of connections, takes and expiries in any order: slots add up, and when all has ended
        /// all are free.
        #[test]
        fn nothing_leaks(steps in prop::collection::vec((0_u8..6, 0_u64..6, 0_u32..4), 1..80)) {
            let inbox = Inbox::new(pool(8), EPOCH);
            let mut opened: Vec<Opened> = Vec::new();
            let (mut kept, mut given) = (Vec::new(), Vec::new());
            let id_of = |given: &Vec<u64>, id: u64| given.get(id as usize).copied().unwrap_or(id);
            for (now, (what, id, page)) in (0_u64..).zip(steps) {
                match what {
                    0 => given.extend(inbox.grant(page as usize, id, Micros(now + 20)).map(|g| g.id)),
                    1 => for key in 0..6 { opened.extend(inbox.open(id_of(&given, id), key, EPOCH, &[page, 0][..if page == 0 { 1 } else { 2 }])); },
                    2 => for o in &mut opened { fill(o, page, 3); },
                    3 if !opened.is_empty() => { opened.remove(id as usize % opened.len()); }
                    4 => kept.extend(inbox.take(id_of(&given, id)).into_iter().flatten()),
                    _ => { inbox.expire(Micros(now)); }
                }
                let usage = inbox.pool().usage();
                prop_assert_eq!(usage.free + usage.writing + usage.pages, 8);
            }
            drop((opened, kept));
            inbox.expire(Micros(1_000));
            prop_assert_eq!(inbox.grants(), 0);
            prop_assert_eq!(inbox.pool().usage().free, 8);
        }
    }
}
