//! A counting global allocator: live bytes of this process, exact where RSS is only a hint.

#![expect(
    unsafe_code,
    reason = "a global allocator cannot be written without; it only counts and passes on"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering::Relaxed};

struct Counting;

static ON: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicIsize = AtomicIsize::new(0);

fn count(bytes: usize, sign: isize) {
    // Off while times are taken, so that counting costs them nothing.
    if ON.load(Relaxed) {
        LIVE.fetch_add(bytes.cast_signed() * sign, Relaxed);
    }
}

// SAFETY: every call goes to `System` with the arguments it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(layout.size(), -1);
        count(size, 1);
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Bytes that `work` leaves allocated, and what it returns.
pub fn left_by<T>(work: impl FnOnce() -> T) -> (isize, T) {
    let before = LIVE.load(Relaxed);
    ON.store(true, Relaxed);
    let result = work();
    ON.store(false, Relaxed);
    (LIVE.load(Relaxed) - before, result)
}

/// Resident bytes of a process; 0 if it is gone.
pub fn resident(pid: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line
        .and_then(|l| l.split_whitespace().next())
        .and_then(|n| n.parse::<u64>().ok());
    kib.unwrap_or(0) * 1_024
}
