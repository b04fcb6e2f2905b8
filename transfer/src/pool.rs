//! The page pool of a node: one region of memory in slots of one page each.
//!
//! A slot is free, being written by one owner ([`SlotMut`]), or a finished page that any number may read ([`PageRef`]). Guards give
//! their slot back when the last of them ends, so nothing can leak: an evicted page stays in place while a transfer still sends it.

use crate::layout::{BadLayout, Layout, digest};
use crate::region::Region;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Slots begin at multiples of this: a cache line, and what devices like.
const ALIGN: u64 = 64;

/// Most pages of a pool: a terabyte in pages of 64 KiB.
pub const POOL_PAGES_MAX: u32 = 1 << 24;

/// Why there is no pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// Pages that cannot be.
    #[error(transparent)]
    Layout(#[from] BadLayout),
    /// A pool without a page, or with too many.
    #[error("a pool of {pages} pages of {page_bytes} bytes is not possible: between 1 and {POOL_PAGES_MAX} pages are")]
    Size {
        /// Pages asked for.
        pages: u32,
        /// Bytes of each.
        page_bytes: u64,
    },
    /// The system gives no memory.
    #[error("the system gives no memory for the page pool: {0}")]
    Memory(#[from] io::Error),
}

/// Not enough free slots. Nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} free pages are needed and {free} are there: evict some")]
pub struct NoRoom {
    /// Slots asked for.
    pub asked: usize,
    /// Slots free.
    pub free: usize,
}

/// Who has how many slots. The three add up to the pool at any instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Nobody's.
    pub free: u32,
    /// Being written.
    pub writing: u32,
    /// Finished pages.
    pub pages: u32,
}

#[derive(Debug)]
struct Books {
    free: Vec<u32>,
    writing: u32,
    pages: u32,
}

#[derive(Debug)]
struct Shared {
    region: Region,
    layout: Layout,
    page_bytes: usize,
    stride: usize,
    slots: u32,
    books: Mutex<Books>,
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        // Its three lines of arithmetic cannot stop half-way.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handle on the pool; all clones are one pool.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Shared>);

impl Pool {
    /// A pool of `pages` zeroed pages.
    ///
    /// # Errors
    /// [`PoolError`]
    pub fn new(layout: Layout, pages: u32) -> Result<Self, PoolError> {
        let page_bytes = layout.page_bytes()?;
        let stride = page_bytes.next_multiple_of(ALIGN);
        if !(1..=POOL_PAGES_MAX).contains(&pages) {
            return Err(PoolError::Size { pages, page_bytes });
        }
        // At most 2^24 times 2^28.
        let bytes = (u64::from(pages) * stride) as usize;
        let books = Books {
            // The lowest first: a pool that is never full touches less memory.
            free: (0..pages).rev().collect(),
            writing: 0,
            pages: 0,
        };
        Ok(Self(Arc::new(Shared {
            region: Region::new(bytes)?,
            layout,
            page_bytes: page_bytes as usize,
            stride: stride as usize,
            slots: pages,
            books: Mutex::new(books),
        })))
    }

    /// What its pages look like.
    pub fn layout(&self) -> &Layout {
        &self.0.layout
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.0.page_bytes
    }

    /// Pages in all.
    pub fn capacity(&self) -> u32 {
        self.0.slots
    }

    /// Who has how many slots now.
    pub fn usage(&self) -> Usage {
        let books = self.0.books();
        Usage {
            free: books.free.len() as u32,
            writing: books.writing,
            pages: books.pages,
        }
    }

    /// Takes `count` slots to write. What is in them is whatever was there before.
    ///
    /// # Errors
    /// [`NoRoom`]
    pub fn take(&self, count: usize) -> Result<Vec<SlotMut>, NoRoom> {
        let mut books = self.0.books();
        let free = books.free.len();
        let Some(left) = free.checked_sub(count) else {
            return Err(NoRoom { asked: count, free });
        };
        let taken = books.free.split_off(left);
        books.writing += count as u32;
        let slot = |number| {
            SlotMut(Slot {
                pool: self.0.clone(),
                number,
                written: false,
            })
        };
        Ok(taken.into_iter().rev().map(slot).collect())
    }

    /// Where its memory begins and how many bytes it has, for a device that reads pages.
    #[cfg(feature = "verbs")]
    pub(crate) fn span(&self) -> (u64, usize) {
        self.0.region.span()
    }

    /// The memory's file, through which a process of this machine can read the pool and not write it.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.0.region.file()
    }
}

/// One slot; gives itself back.
#[derive(Debug)]
struct Slot {
    pool: Arc<Shared>,
    number: u32,
    /// Whether it counts as a finished page.
    written: bool,
}

impl Slot {
    fn offset(&self) -> usize {
        self.number as usize * self.pool.stride
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut books = self.pool.books();
        if self.written {
            books.pages -= 1;
        } else {
            books.writing -= 1;
        }
        books.free.push(self.number);
    }
}

/// A slot that only its holder reads and writes.
#[derive(Debug)]
pub struct SlotMut(Slot);

impl SlotMut {
    /// The page is finished: from now on it is read only, by as many as want.
    pub fn finish(mut self) -> PageRef {
        {
            let mut books = self.0.pool.books();
            books.writing -= 1;
            books.pages += 1;
        }
        self.0.written = true;
        PageRef(Arc::new((self.0, OnceLock::new())))
    }
}

#[allow(unsafe_code, reason = "the guard is the proof")]
impl Deref for SlotMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: slot numbers are given out once, so only this guard has these bytes; it is borrowed while the slice lives.
        unsafe { self.0.pool.region.slot(self.0.offset(), self.0.pool.page_bytes) }
    }
}

#[allow(unsafe_code, reason = "the guard is the proof")]
impl DerefMut for SlotMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for reading, and borrowed mutably.
        unsafe { self.0.pool.region.slot_mut(self.0.offset(), self.0.pool.page_bytes) }
    }
}

/// A finished page. Clones are the same page; the slot is free when the last one ends.
#[derive(Clone, Debug)]
pub struct PageRef(Arc<(Slot, OnceLock<u128>)>);

impl PageRef {
    /// The digest of its bytes, computed once.
    pub fn digest(&self) -> u128 {
        *self.0.1.get_or_init(|| digest(self))
    }

    /// Tells the digest, when it has just been computed from these bytes.
    pub(crate) fn with_digest(self, digest: u128) -> Self {
        let _ = self.0.1.set(digest);
        self
    }

    /// Where it begins in its pool's memory, bytes.
    pub(crate) fn offset(&self) -> u64 {
        self.0.0.offset() as u64
    }

    /// Whether it is of this pool.
    pub fn is_of(&self, pool: &Pool) -> bool {
        Arc::ptr_eq(&self.0.0.pool, &pool.0)
    }
}

#[allow(unsafe_code, reason = "the guard is the proof")]
impl Deref for PageRef {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let slot = &self.0.0;
        // SAFETY: a finished page has no writer: the `SlotMut` was consumed, and the number is given out again only after the last
        // clone of this guard has ended.
        unsafe { slot.pool.region.slot(slot.offset(), slot.pool.page_bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{layout, pool};
    use proptest::prelude::*;

    #[test]
    fn a_page_stays_while_anyone_reads_it() {
        let pool = pool(2);
        let mut slot = pool.take(1).unwrap().remove(0);
        slot.fill(7);
        let page = slot.finish();
        let reader = page.clone();
        drop(page);
        let mut others = pool.take(1).unwrap();
        others[0].fill(9);
        assert_eq!(pool.take(1).unwrap_err(), NoRoom { asked: 1, free: 0 });
        assert!(reader.iter().all(|b| *b == 7));
        drop(reader);
        assert_eq!(
            pool.usage(),
            Usage {
                free: 1,
                writing: 1,
                pages: 0
            }
        );
    }

    #[test]
    fn asking_for_too_much_takes_nothing() {
        let pool = pool(3);
        assert!(pool.take(4).is_err());
        assert_eq!(pool.usage().free, 3);
        assert!(Pool::new(layout(), 0).is_err());
        assert!(Pool::new(layout(), u32::MAX).is_err());
    }

    proptest! {
        /// Whatever is taken, finished, shared and dropped: the books add up, and no two holders have the same bytes.
        #[test]
        fn the_books_add_up(steps in prop::collection::vec((0_u8..5, 0_usize..6), 1..60)) {
            let pool = pool(6);
            let mut writing: Vec<(SlotMut, u8)> = Vec::new();
            let mut pages: Vec<(PageRef, u8)> = Vec::new();
            for (mark, (what, n)) in (1_u8..).zip(steps) {
                match what {
                    0 => for mut slot in pool.take(n).unwrap_or_default() {
                        slot.fill(mark);
                        writing.push((slot, mark));
                    },
                    1 if n < writing.len() => {
                        let (slot, mark) = writing.remove(n);
                        pages.push((slot.finish(), mark));
                    }
                    2 if n < pages.len() => { let copy = pages[n].clone(); pages.push(copy); }
                    3 if n < pages.len() => { pages.remove(n); }
                    4 if n < writing.len() => { writing.remove(n); }
                    _ => {}
                }
                let usage = pool.usage();
                prop_assert_eq!(usage.free + usage.writing + usage.pages, 6);
                prop_assert_eq!(usage.writing as usize, writing.len());
                for (slot, mark) in &writing { prop_assert!(slot.iter().all(|b| b == mark)); }
                for (page, mark) in &pages { prop_assert!(page.iter().all(|b| b == mark)); }
            }
            drop((writing, pages));
            prop_assert_eq!(pool.usage().free, 6);
        }
    }
}
