//! Backpressure: how long a decode worker asks its senders to pause, and how a sender keeps to it (digest §1.8).
//!
//! A pause is a wish about the *next* sends; it never stands for a reject (those are the decode worker's, design §2).
//! The prototype's hint fired 20 times and nobody listened (digest §1.8); here every sender keeps [`Pauses`].

use pinion_schemas::limits::PAUSE_MILLIS_MAX;
use pinion_schemas::{Micros, WorkerId};
use serde::Serialize;
use std::collections::BTreeMap;

#[cfg(test)]
mod tests;

/// Pause while the engine is taking back running turns, milliseconds (digest §1.8).
pub const RETRACTED_MILLIS: u32 = 1_500;
/// Shortest pause for a full pool, milliseconds (digest §1.8).
pub const USAGE_MILLIS_MIN: u32 = 200;
/// Depth of the transfer queue from which a pause is asked (digest §1.8).
pub const TRANSFER_QUEUE_MIN: u32 = 8;
/// Pause per transfer in the queue, milliseconds (digest §1.8).
pub const TRANSFER_MILLIS: u32 = 100;

/// Parts a pool is divided into to measure its usage. The digest leaves the unit of "overshoot" open; with this one its
/// factor 5 takes the pause from 0 at usage 0.90 to exactly its bound of 2000 ms at 1.00, i.e. 20 ms per permille.
const USAGE_PARTS: u128 = 4_000;
/// Usage 0.90.
const USAGE_HIGH: u128 = USAGE_PARTS * 9 / 10;
/// Pause per part over [`USAGE_HIGH`], milliseconds (digest §1.8).
const MILLIS_PER_PART: u128 = 5;

/// What a decode worker knows about its own load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Sample {
    /// Running turns the engine has taken back for want of pages and not yet resumed.
    pub retracted: u32,
    /// Pages in use that cannot be evicted, and promised ones.
    pub used_pages: u64,
    /// Pages of the pool; 0 counts as a full pool.
    pub pool_pages: u64,
    /// Seeds whose pages are moving or wait to move.
    pub transfer_queue: u32,
}

/// The pause to ask of every sender, milliseconds; 0 for none, never more than [`PAUSE_MILLIS_MAX`].
///
/// The first that holds: turns were taken back; usage is 0.90 or more; the transfer queue is long.
pub fn hint(sample: &Sample) -> u32 {
    let parts = (u128::from(sample.used_pages) * USAGE_PARTS)
        .checked_div(u128::from(sample.pool_pages))
        .unwrap_or(USAGE_PARTS);
    if sample.retracted > 0 {
        RETRACTED_MILLIS
    } else if parts >= USAGE_HIGH {
        let overshoot = (parts - USAGE_HIGH).min(USAGE_PARTS - USAGE_HIGH);
        ((overshoot * MILLIS_PER_PART) as u32).clamp(USAGE_MILLIS_MIN, PAUSE_MILLIS_MAX)
    } else if sample.transfer_queue >= TRANSFER_QUEUE_MIN {
        sample
            .transfer_queue
            .saturating_mul(TRANSFER_MILLIS)
            .min(PAUSE_MILLIS_MAX)
    } else {
        0
    }
}

/// Where a sender stands with one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Pause {
    /// Nothing is sent before this, microseconds.
    pub until: Micros,
    /// Pauses in a row before this one: each doubles the length, up to the bound.
    pub streak: u32,
}

/// The pauses one sender keeps, by worker. Holds only workers that asked for one lately, so it is bounded by the cluster.
#[derive(Debug, Clone)]
pub struct Pauses {
    max: Micros,
    by_worker: BTreeMap<WorkerId, Pause>,
}

impl Default for Pauses {
    fn default() -> Self {
        Self::new(PAUSE_MILLIS_MAX)
    }
}

impl Pauses {
    /// No pauses yet; none will be longer than `max_millis` before jitter, whatever is asked.
    pub fn new(max_millis: u32) -> Self {
        Self {
            max: Micros::from_millis(u64::from(max_millis)),
            by_worker: BTreeMap::new(),
        }
    }

    /// Takes the hint of an answer: milliseconds, 0 for none. `jitter` is a fresh random number in 0..1000.
    ///
    /// A hint that comes after the last pause was kept doubles it: the pause was not enough. One that comes *during* a
    /// pause (answers to what was already under way) does not, or a burst would count as a streak. Jitter lengthens by up
    /// to a quarter, so no one sends earlier than asked and senders at the bound still do not wake together. An end once
    /// set is never brought forward, not even by a hint of 0; that only ends the streak.
    pub fn hinted(&mut self, now: Micros, worker: &WorkerId, hint_millis: u32, jitter: u32) {
        // A pause that ended longer ago than the longest one is no longer "in a row" with anything.
        let max = self.max;
        self.by_worker.retain(|_, p| now <= p.until.plus(max));
        if hint_millis == 0 {
            if let Some(pause) = self.by_worker.get_mut(worker) {
                pause.streak = 0;
                if pause.until <= now {
                    self.by_worker.remove(worker);
                }
            }
            return;
        }
        let (previous, streak) = match self.by_worker.get(worker) {
            None => (Micros::ZERO, 0),
            Some(p) if now < p.until => (p.until, p.streak),
            Some(p) => (p.until, p.streak.saturating_add(1)),
        };
        let factor = 1_u64.checked_shl(streak).unwrap_or(u64::MAX);
        let asked = Micros::from_millis(u64::from(hint_millis)).0;
        let length = asked.saturating_mul(factor).min(max.0);
        let spread = length / 4 * u64::from(jitter.min(1_000)) / 1_000;
        let until = now.plus(Micros(length + spread)).max(previous);
        self.by_worker.insert(worker.clone(), Pause { until, streak });
    }

    /// Until when nothing is sent to `worker`, microseconds; nothing if it may be sent to now.
    pub fn until(&self, now: Micros, worker: &WorkerId) -> Option<Micros> {
        self.by_worker.get(worker).map(|p| p.until).filter(|until| now < *until)
    }

    /// Drops what is known about a worker that has left or was replaced.
    pub fn forget(&mut self, worker: &WorkerId) {
        self.by_worker.remove(worker);
    }

    /// For observers.
    pub fn view(&self) -> &BTreeMap<WorkerId, Pause> {
        &self.by_worker
    }
}
