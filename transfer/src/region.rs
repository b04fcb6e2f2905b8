//! The memory of a page pool: one mapping of one memory file, cut into slots. The only unsafe code of the pool is here.
//!
//! Who may touch a slot is decided by ownership, not by locks: a slot's number is given out once, inside a guard that cannot be
//! copied ([`crate::pool::SlotMut`]), and comes back when the guard ends.
#![allow(unsafe_code, reason = "memory that other processes and devices can map is made here")]

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// A mapping of a memory file.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    bytes: usize,
    file: OwnedFd,
}

// SAFETY: the mapping lives as long as the region, and access to its bytes goes through `slot` and `slot_mut`, whose callers
// prove that nobody else has them.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// New zeroed memory. Its file can never shrink, so a peer that maps it cannot be killed by us; and nobody who gets the file
    /// can write it, only this mapping can.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let file = memfd_create("pinion-kv", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        let region = Self::map(file, bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        fcntl_add_seals(
            &region.file,
            SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE,
        )?;
        Ok(region)
    }

    fn map(file: OwnedFd, bytes: usize, access: ProtFlags) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0)? };
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, bytes, file })
    }

    /// The file, through which a peer can read this memory and not write it.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where it begins, and how many bytes it has.
    #[cfg(feature = "verbs")]
    pub(crate) fn span(&self) -> (u64, usize) {
        (self.start.as_ptr().expose_provenance() as u64, self.bytes)
    }

    /// The bytes from `at` on.
    ///
    /// # Safety
    /// Nobody writes them while the slice lives.
    pub(crate) unsafe fn slot(&self, at: usize, len: usize) -> &[u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes));
        // SAFETY: inside the mapping (checked above); the caller has the rest.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at), len) }
    }

    /// The bytes from `at` on, to write.
    ///
    /// # Safety
    /// Nobody else has them while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the caller owns the slot, not the region")]
    pub(crate) unsafe fn slot_mut(&self, at: usize, len: usize) -> &mut [u8] {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes));
        // SAFETY: inside the mapping (checked above); the caller has the rest.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(at), len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// A peer's memory, to read. What is in it may change at any time, so its bytes are only ever copied out, and judged afterwards.
#[derive(Debug)]
pub(crate) struct Foreign(Region);

impl Foreign {
    /// Maps what a peer gave. It must be a memory file of ours' kind: one that could shrink would kill its readers.
    pub(crate) fn map(file: OwnedFd) -> io::Result<Self> {
        if !fcntl_get_seals(&file)?.contains(SealFlags::SHRINK) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the peer's memory could shrink: it is not sealed",
            ));
        }
        let bytes = usize::try_from(fstat(&file)?.st_size).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Self(Region::map(file, bytes, ProtFlags::READ)?))
    }

    /// Copies `into.len()` bytes from `at` on; `false` if they are not all inside.
    pub(crate) fn copy(&self, at: u64, into: &mut [u8]) -> bool {
        let Some(at) = usize::try_from(at)
            .ok()
            .filter(|at| at.checked_add(into.len()).is_some_and(|end| end <= self.0.bytes))
        else {
            return false;
        };
        // SAFETY: inside the mapping, which cannot shrink; `into` is ours alone and elsewhere. A peer that writes meanwhile makes
        // the copy wrong, which its digest shows.
        unsafe { std::ptr::copy_nonoverlapping(self.0.start.as_ptr().add(at), into.as_mut_ptr(), into.len()) };
        true
    }
}
