//! The file tier: pages in one bounded file of fixed slots, found again after a restart or a crash.
//!
//! The file is a header, one record of [`record::RECORD_BYTES`] for each slot, and the slots. A page is written in three steps: the
//! slot's record is cleared, the slot is written, and the record is written that names the page, its parent and the digest of its
//! bytes. A page is right if its record's checksum and its own digest agree, and nothing else is trusted. So there is nothing to
//! repair, and nothing is ever synced: whatever a crash leaves (a torn slot, a torn record, a record before its slot, writes
//! that a power failure lost, in any order) is a page that is not offered, or one that is refused when it is loaded. At worst a page is
//! lost. What a killed process had written, the system writes; clearing first makes sure that then not even a refusal is left.
//!
//! Refused: a log (it needs cleaning, and slots are all of one size), a database (it would copy megabytes through its own pages and
//! logs), headers in front of each page (opening would read the whole file's length, seek by seek), syncing (it buys nothing but
//! the last seconds before a power failure, of a cache).
//!
//! Slots go past the system's page cache (`O_DIRECT`) where the file system can do that: they are read once and go to the pool, which
//! is the cache. Records do not; 4 KiB of them hold the records of 32 slots.
//!
//! Slots are owned by guards like those of the pool ([`crate::pool`]): free, being written by one owner ([`FileSlot`]), or a page
//! that any number may read ([`FilePage`]). Which page goes when the file is full is the owner's business.

mod disk;
mod record;

pub use disk::Buffer;

use crate::layout::{BadLayout, Layout, digest};
use crate::pool::{PageRef, SlotMut, Usage};
use disk::{BLOCK, Disk};
use pinion_schemas::PageHash;
use record::{Header, RECORD_BYTES, Record};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most slots of a file: 1.5 TB in pages of 1.5 MB; their records are 128 MiB to read when it is opened.
pub const FILE_PAGES_MAX: u64 = 1 << 20;

/// Why there is no file tier.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Pages that cannot be.
    #[error(transparent)]
    Layout(#[from] BadLayout),
    /// No room for a page, or for too many.
    #[error(
        "a file of {bytes} bytes holds {pages} pages: between 1 and {FILE_PAGES_MAX} are possible, choose another size"
    )]
    Size {
        /// Bytes it may have.
        bytes: u64,
        /// Pages in them.
        pages: u64,
    },
    /// Another process, or another engine of this one, has it open.
    #[error("{} is in use by another worker: give each worker a file of its own", .0.display())]
    Locked(PathBuf),
    /// It is not ours to overwrite.
    #[error("{} is no page file of Pinion: name another one, or move it away", .0.display())]
    Foreign(PathBuf),
    /// The system refuses.
    #[error("the page file {} cannot be used: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// Why a page could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The slot holds other bytes than its record says.
    #[error("the page is damaged: its bytes are not those that were written")]
    Corrupt,
    /// The system refuses.
    #[error("the page cannot be read: {0}")]
    Io(#[from] io::Error),
}

/// Which page it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageName {
    /// Its name.
    pub name: PageHash,
    /// The page in front of it.
    pub parent: Option<PageHash>,
}

/// A page that an opened file offers.
#[derive(Clone, Debug)]
pub struct Found {
    /// Which.
    pub name: PageName,
    /// Where.
    pub page: FilePage,
}

#[derive(Debug)]
struct Books {
    free: Vec<u32>,
    writing: u32,
    pages: u32,
}

#[derive(Debug)]
struct Shared {
    disk: Disk,
    page_bytes: usize,
    slots: u32,
    /// Where the slots begin, and how far they are apart, bytes.
    first: u64,
    stride: u64,
    sequence: AtomicU64,
    books: Mutex<Books>,
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        // Its lines of arithmetic cannot stop half-way.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn offset(&self, slot: u32) -> u64 {
        self.first + u64::from(slot) * self.stride
    }

    fn write_record(&self, slot: u32, bytes: &[u8; RECORD_BYTES]) -> io::Result<()> {
        self.disk.write_record(bytes, record::offset(slot))
    }
}

/// A handle on the file; all clones are one. It is unlocked when the last of them, and of its slots and pages, ends.
#[derive(Clone, Debug)]
pub struct FileTier(Arc<Shared>);

impl FileTier {
    /// Opens the file at `path`, or makes it, with room for as many pages of `layout` as fit into `bytes`. Returns what it offers, in the
    /// order in which it was written; a page may come without its parent, which was lost. Reads the records, not the pages.
    ///
    /// A page file of another layout, size or version is of no use any more: it is emptied, with a warning. Any other file stays.
    ///
    /// # Errors
    /// [`FileError`]
    pub fn open(path: &Path, layout: &Layout, bytes: u64) -> Result<(Self, Vec<Found>), FileError> {
        let page_bytes = layout.page_bytes()?;
        let stride = page_bytes.next_multiple_of(BLOCK);
        let slots = slots(bytes, stride);
        if !(1..=FILE_PAGES_MAX).contains(&slots) {
            return Err(FileError::Size { bytes, pages: slots });
        }
        let header = Header {
            fingerprint: layout.fingerprint(),
            page_bytes,
            slots,
        };
        let first = BLOCK + records_bytes(slots);
        let (disk, records) = disk::open(path, &header, first + slots * stride)?;
        let (kept, next) = newest(records);
        let used: BTreeSet<u32> = kept.iter().map(|r| r.slot).collect();
        let books = Books {
            // The lowest first: a file that is never full stays short on disk.
            free: (0..slots as u32).rev().filter(|slot| !used.contains(slot)).collect(),
            writing: 0,
            pages: kept.len() as u32,
        };
        let tier = Self(Arc::new(Shared {
            disk,
            page_bytes: page_bytes as usize,
            slots: slots as u32,
            first,
            stride,
            sequence: AtomicU64::new(next),
            books: Mutex::new(books),
        }));
        let found = kept.into_iter().map(|record| Found {
            name: record.name,
            page: FilePage(Arc::new(Written {
                digest: record.digest,
                slot: tier.slot(record.slot, true),
            })),
        });
        let found = found.collect();
        Ok((tier, found))
    }

    fn slot(&self, number: u32, written: bool) -> FileSlot {
        let file = self.0.clone();
        FileSlot { file, number, written }
    }

    /// Pages that it can hold.
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

    /// A buffer through which one thread reads and writes pages.
    pub fn buffer(&self) -> Buffer {
        Buffer::new(self.0.stride as usize)
    }

    /// A free slot to write, if there is one.
    pub fn take(&self) -> Option<FileSlot> {
        let mut books = self.0.books();
        let number = books.free.pop()?;
        books.writing += 1;
        Some(self.slot(number, false))
    }
}

/// Bytes of so many records, in whole blocks.
fn records_bytes(slots: u64) -> u64 {
    (slots * RECORD_BYTES as u64).next_multiple_of(BLOCK)
}

/// How many slots fit into a file of so many bytes, beside their records and the header.
fn slots(bytes: u64, stride: u64) -> u64 {
    let slots = bytes.saturating_sub(BLOCK) / (stride + RECORD_BYTES as u64);
    // The records' last block may be one too many.
    let room = bytes.saturating_sub(BLOCK).saturating_sub(slots.saturating_mul(stride));
    slots - u64::from(slots > 0 && records_bytes(slots) > room)
}

/// Of two records of one page the later one, in the order in which they were written; and the next number of that order.
fn newest(mut records: Vec<Record>) -> (Vec<Record>, u64) {
    records.sort_unstable_by_key(|r| std::cmp::Reverse(r.sequence));
    let next = records.first().map_or(0, |r| r.sequence.saturating_add(1));
    let mut seen = BTreeSet::new();
    records.retain(|r| seen.insert(r.name.name));
    records.reverse();
    (records, next)
}

/// A slot that only its holder writes; gives itself back.
#[derive(Debug)]
pub struct FileSlot {
    file: Arc<Shared>,
    number: u32,
    /// Whether it counts as a page.
    written: bool,
}

impl Drop for FileSlot {
    fn drop(&mut self) {
        let mut books = self.file.books();
        if self.written {
            books.pages -= 1;
        } else {
            books.writing -= 1;
        }
        books.free.push(self.number);
    }
}

impl FileSlot {
    /// Writes a page, which must be one of the file's layout. Waits for the device.
    ///
    /// # Errors
    /// What the system says; the slot is then free.
    pub fn write(mut self, name: PageName, page: &PageRef, buffer: &mut Buffer) -> io::Result<FilePage> {
        let (file, slot, digest) = (self.file.clone(), self.number, page.digest());
        file.write_record(slot, &[0; RECORD_BYTES])?;
        file.disk.write_slot(buffer.filled(page), file.offset(slot))?;
        let record = Record {
            slot,
            sequence: file.sequence.fetch_add(1, Ordering::Relaxed),
            name,
            digest,
        };
        file.write_record(slot, &record.bytes())?;
        {
            let mut books = file.books();
            books.writing -= 1;
            books.pages += 1;
        }
        self.written = true;
        Ok(FilePage(Arc::new(Written { slot: self, digest })))
    }
}

#[derive(Debug)]
struct Written {
    slot: FileSlot,
    digest: u128,
}

/// A page in the file. Clones are the same page; the slot is free when the last one ends.
#[derive(Clone, Debug)]
pub struct FilePage(Arc<Written>);

impl FilePage {
    /// Loads the page into a slot of a pool of the same layout, and checks it. Waits for the device.
    ///
    /// # Errors
    /// [`ReadError`], and the slot.
    pub fn read(&self, mut into: SlotMut, buffer: &mut Buffer) -> Result<PageRef, (SlotMut, ReadError)> {
        let file = &self.0.slot.file;
        if let Err(error) = file.disk.read_slot(buffer.whole(), file.offset(self.0.slot.number)) {
            return Err((into, error.into()));
        }
        let bytes = &buffer.whole()[..file.page_bytes];
        if digest(bytes) != self.0.digest {
            return Err((into, ReadError::Corrupt));
        }
        into.copy_from_slice(bytes);
        Ok(into.finish().with_digest(self.0.digest))
    }
}

#[cfg(test)]
mod tests;
