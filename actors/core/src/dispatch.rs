//! Algorithm 3, Dispatch: what a session remembers of the workers that rejected it (design §4.3, digest §1.5).
//!
//! The session machine asks the ranked workers in turn and moves the pin; this is the book it keeps meanwhile, read by
//! [`crate::route`]. A reject counts where it arrives, whether or not a later worker serves the turn. A completed direct
//! turn clears the count of that (session, D) and no other (digest T44, T50): a seed only shows that a permit was free.
//!
//! Theorem 1 holds because Route leaves nobody out: a round asks all |D| workers, so one with room serves within
//! |D| ≤ |D|·τ attempts (I10). The migration bound (|D|−1)·τ of the prototype does *not* follow from the counts: two
//! workers that reject a session alternately and serve it directly between clear each other's effect and pass it to and
//! fro for ever. It is therefore a budget, [`Rejects::may_migrate`].

use pinion_schemas::{MigrationReason, RejectReason, WorkerId};
use serde::Serialize;
use std::collections::BTreeMap;

#[cfg(test)]
mod tests;

/// Workers one session remembers; at the cap the least rejected one is forgotten, which asks it again sooner.
pub const WORKERS_MAX: usize = crate::residency::WORKERS_MAX;

/// Whether a reject speaks against this worker for this session: it has no room, or wants no work.
///
/// The others tell of the message, of the membership (draining workers leave the candidates), or ask for another path on the
/// same worker. Counting those fed the prototype's thrash (digest R3 to R5).
pub const fn counts(reason: RejectReason) -> bool {
    match reason {
        RejectReason::NoSpace | RejectReason::QueueFull | RejectReason::Paused | RejectReason::NeverFits => true,
        RejectReason::NotResident
        | RejectReason::AppendTooLong
        | RejectReason::Draining
        | RejectReason::StaleEpoch
        | RejectReason::DeadlinePassed => false,
    }
}

/// The book of one session. Bounded by [`WORKERS_MAX`]; empty for a session that was never rejected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Rejects {
    by_worker: BTreeMap<WorkerId, u32>,
    migrations: u32,
}

impl Rejects {
    /// An empty book of a session that has used up some of its budget with an earlier owner.
    pub fn after(migrations: u32) -> Self {
        Self {
            migrations,
            ..Self::default()
        }
    }

    /// `worker` said no. Returns its count.
    pub fn rejected(&mut self, worker: &WorkerId, reason: RejectReason) -> u32 {
        if !counts(reason) {
            return self.count(worker);
        }
        if let Some(count) = self.by_worker.get_mut(worker) {
            *count = count.saturating_add(1);
            return *count;
        }
        if self.by_worker.len() >= WORKERS_MAX {
            let least = self.by_worker.iter().min_by_key(|(_, count)| **count);
            if let Some(least) = least.map(|(worker, _)| worker.clone()) {
                self.by_worker.remove(&least);
            }
        }
        self.by_worker.insert(worker.clone(), 1);
        1
    }

    /// `worker` completed a turn directly, on pages it held: what it rejected before is over.
    pub fn completed_direct(&mut self, worker: &WorkerId) {
        self.by_worker.remove(worker);
    }

    /// `worker` has left or is a new process.
    pub fn forget(&mut self, worker: &WorkerId) {
        self.by_worker.remove(worker);
    }

    /// Rejects of the session by `worker` since it last completed a turn directly.
    pub fn count(&self, worker: &WorkerId) -> u32 {
        self.by_worker.get(worker).copied().unwrap_or(0)
    }

    /// The pin moved. A lost or draining worker left no choice, so those moves are not charged to the budget.
    pub fn migrated(&mut self, reason: MigrationReason) {
        let charged = match reason {
            MigrationReason::Rejected | MigrationReason::Evicted | MigrationReason::Rebalance => 1,
            MigrationReason::WorkerLost | MigrationReason::Drain => 0,
        };
        self.migrations = self.migrations.saturating_add(charged);
    }

    /// Whether the pin may still move by choice: fewer than (|D|−1)·τ did in the session's life (design §5). If not, the pin
    /// stays, whoever serves. `rejects_max` 0 is no bound, as in Route.
    pub fn may_migrate(&self, workers: usize, rejects_max: u32) -> bool {
        let budget = (workers as u64)
            .saturating_sub(1)
            .saturating_mul(u64::from(rejects_max));
        rejects_max == 0 || u64::from(self.migrations) < budget
    }

    /// Moves of the pin charged to the budget.
    pub fn migrations(&self) -> u32 {
        self.migrations
    }

    /// For observers: rejects by worker.
    pub fn view(&self) -> &BTreeMap<WorkerId, u32> {
        &self.by_worker
    }
}
