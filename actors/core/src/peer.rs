//! Health of peers: suspect after several failures in a window, probed with growing intervals, back after one answer.
//!
//! Liveness only (design §5): an admission answer is no fact here, and suspicion is no reject. The owner of a table sees
//! its own links, so a bad P→D pair is suspect on that P alone (digest R10). Nothing is condemned for good: a suspect peer
//! always has a probe pending, and one that answers again is clear within [`Policy::recovery_bound`] (I8).
//!
//! | state | `Failed` | `ProbeMissed` (reported, or overdue at a `Tick`) | `ProbeAnswered` | `Succeeded` |
//! |---|---|---|---|---|
//! | healthy | count; at the threshold suspect, probe | count; probe again, at the threshold suspect | misses = 0 | misses = 0, interval reset |
//! | suspect | – | probe again after a longer interval | clear | clear, interval reset |
//!
//! A fact of an older epoch changes nothing (I7); one of a newer epoch starts that epoch first.

use pinion_schemas::{Epoch, Micros, WorkerId};
use serde::Serialize;
use std::collections::BTreeMap;

/// When a peer is suspect and how it is probed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Policy {
    /// Failures inside `window` that make a peer suspect; below 2 counts as 2. 3 (design §5).
    pub failures: u32,
    /// Length of the sliding window, microseconds. 60 s (design §5).
    pub window: Micros,
    /// Probes missed in a row that make a peer suspect; below 2 counts as 2. 2: one lost packet is no verdict.
    pub misses: u32,
    /// A probe without an answer this long after its time is missed, microseconds.
    pub probe_timeout: Micros,
    /// Longest wait before the first probe, microseconds; doubles with every miss.
    pub interval_first: Micros,
    /// Bound of that doubling, microseconds.
    pub interval_max: Micros,
    /// Peers in the table; further ones are not tracked, count as healthy, and are counted in [`Peers::untracked`].
    pub peers_max: usize,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            failures: 3,
            window: Micros::from_secs(60),
            misses: 2,
            probe_timeout: Micros::from_secs(1),
            interval_first: Micros::from_millis(500),
            interval_max: Micros::from_secs(10),
            peers_max: 1_024,
        }
    }
}

impl Policy {
    /// The time stated by I8, microseconds: a suspect peer that answers every probe from now on is clear by then. One probe
    /// may already be lost, then one interval passes, then one answer travels. 12 s by default.
    pub fn recovery_bound(&self) -> Micros {
        self.probe_timeout.plus(self.interval_max).plus(self.probe_timeout)
    }

    /// Wait before the next probe at back-off `level`: the upper half of the doubled, bounded interval, placed by `jitter`.
    fn interval(&self, level: u32, jitter: u32) -> Micros {
        let full = self
            .interval_first
            .0
            .saturating_mul(1_u64 << level.min(32))
            .min(self.interval_max.0);
        let half = full / 2;
        Micros(full - half + ((u128::from(half) * u128::from(jitter)) >> 32) as u64)
    }
}

/// What the shell saw of one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fact {
    /// A transfer or request to it failed or timed out.
    Failed,
    /// A transfer or request to it completed on the data path.
    Succeeded,
    /// It answered a probe.
    ProbeAnswered,
    /// A probe went unanswered.
    ProbeMissed,
    /// Time passed; an overdue probe counts as missed.
    Tick,
    /// The process behind the name was replaced; the epoch the fact carries beside this one is ignored.
    NewEpoch(Epoch),
}

/// What the shell has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Give it no new work. Work in flight goes on or is retried by its own owner.
    Suspect,
    /// Probe it at this time, microseconds on the table's axis; replaces an earlier pending probe.
    Probe {
        /// When.
        at: Micros,
    },
    /// It may get work again.
    Clear,
}

/// What is known of one peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Peer {
    /// Its newest known epoch.
    pub epoch: Epoch,
    /// Whether it gets no new work.
    pub suspect: bool,
    /// Times of recent failures, microseconds; at most `Policy::failures`.
    pub failures: Vec<Micros>,
    /// Probes missed in a row.
    pub misses: u32,
    /// Back-off level: doublings of the first interval.
    pub level: u32,
    /// Time of the pending probe, microseconds.
    pub probe_at: Option<Micros>,
}

impl Peer {
    fn new(epoch: Epoch) -> Self {
        Self {
            epoch,
            suspect: false,
            failures: Vec::new(),
            misses: 0,
            level: 0,
            probe_at: None,
        }
    }

    fn probe(&mut self, at: Micros, out: &mut Vec<Action>) {
        self.probe_at = Some(at);
        out.push(Action::Probe { at });
    }

    /// Probes after the current interval and makes the next one longer.
    fn probe_later(&mut self, now: Micros, jitter: u32, policy: &Policy, out: &mut Vec<Action>) {
        let at = now.plus(policy.interval(self.level, jitter));
        self.level = self.level.saturating_add(1);
        self.probe(at, out);
    }

    fn start_epoch(&mut self, now: Micros, epoch: Epoch, out: &mut Vec<Action>) {
        if epoch <= self.epoch {
            return;
        }
        let suspect = self.suspect;
        *self = Self {
            suspect,
            ..Self::new(epoch)
        };
        if suspect {
            self.probe(now, out); // a new process: ask at once, believe its answer only
        }
    }

    fn failed(&mut self, now: Micros, jitter: u32, policy: &Policy, out: &mut Vec<Action>) {
        if self.suspect {
            return;
        }
        self.failures.retain(|t| now.since(*t) < policy.window);
        self.failures.push(now);
        if self.failures.len() >= policy.failures.max(2) as usize {
            self.suspect = true;
            out.push(Action::Suspect);
            self.probe_later(now, jitter, policy, out);
        }
    }

    fn missed(&mut self, now: Micros, jitter: u32, policy: &Policy, out: &mut Vec<Action>) {
        if self.probe_at.is_some_and(|at| now < at) {
            return; // the pending probe is not sent yet: this is a miss already counted
        }
        self.misses = self.misses.saturating_add(1);
        if !self.suspect && self.misses >= policy.misses.max(2) {
            self.suspect = true;
            out.push(Action::Suspect);
        }
        self.probe_later(now, jitter, policy, out);
    }

    /// The level survives a probe's answer, so a link that answers probes and fails work is probed ever more slowly.
    fn answered(&mut self, out: &mut Vec<Action>) {
        self.misses = 0;
        self.probe_at = None;
        if self.suspect {
            self.suspect = false;
            self.failures.clear();
            out.push(Action::Clear);
        }
    }
}

/// Health of all peers of one owner.
#[derive(Debug, Clone)]
pub struct Peers {
    policy: Policy,
    known: BTreeMap<WorkerId, Peer>,
    untracked: u64,
}

impl Peers {
    /// An empty table: everybody is healthy.
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            known: BTreeMap::new(),
            untracked: 0,
        }
    }

    /// Takes one fact about incarnation `epoch` of `peer` at `now` (microseconds). `jitter` is any number spread evenly over
    /// `u32`; it places the next probe.
    pub fn step(&mut self, now: Micros, jitter: u32, peer: &WorkerId, epoch: Epoch, fact: Fact) -> Vec<Action> {
        let mut out = Vec::new();
        let epoch = if let Fact::NewEpoch(new) = fact { new } else { epoch };
        if !self.known.contains_key(peer) && self.known.len() >= self.policy.peers_max {
            self.untracked = self.untracked.saturating_add(1);
            return out;
        }
        let policy = &self.policy;
        let p = self.known.entry(peer.clone()).or_insert_with(|| Peer::new(epoch));
        if epoch < p.epoch {
            return out;
        }
        p.start_epoch(now, epoch, &mut out);
        match fact {
            Fact::Failed => p.failed(now, jitter, policy, &mut out),
            Fact::ProbeMissed => p.missed(now, jitter, policy, &mut out),
            Fact::ProbeAnswered => p.answered(&mut out),
            Fact::Succeeded => {
                p.answered(&mut out);
                p.level = 0;
            }
            Fact::Tick => {
                if p.probe_at.is_some_and(|at| now >= at.plus(policy.probe_timeout)) {
                    p.missed(now, jitter, policy, &mut out);
                }
            }
            Fact::NewEpoch(_) => {}
        }
        out
    }

    /// Whether `peer` may get new work. An unknown peer may.
    pub fn usable(&self, peer: &WorkerId) -> bool {
        self.known.get(peer).is_none_or(|p| !p.suspect)
    }

    /// Drops a peer that left the cluster, to make room.
    pub fn forget(&mut self, peer: &WorkerId) {
        self.known.remove(peer);
    }

    /// Facts ignored because the table was full (count since start).
    pub fn untracked(&self) -> u64 {
        self.untracked
    }

    /// Everything known, for inspection.
    pub fn view(&self) -> &BTreeMap<WorkerId, Peer> {
        &self.known
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(n: usize) -> WorkerId {
        WorkerId::new(format!("d-{n}")).unwrap()
    }
    fn sec(n: u64) -> Micros {
        Micros::from_secs(n)
    }
    fn table() -> Peers {
        Peers::new(Policy::default())
    }
    fn any_fact() -> impl Strategy<Value = Fact> {
        prop_oneof![
            Just(Fact::Failed),
            Just(Fact::Succeeded),
            Just(Fact::ProbeAnswered),
            Just(Fact::ProbeMissed),
            Just(Fact::Tick)
        ]
    }

    #[test]
    fn three_failures_in_the_window_suspect_and_one_answer_clears() {
        let (mut t, e) = (table(), Epoch(1));
        assert!(t.step(sec(0), 0, &id(0), e, Fact::Failed).is_empty());
        assert!(t.step(sec(30), 0, &id(0), e, Fact::Failed).is_empty());
        assert!(
            t.step(sec(60), 0, &id(0), e, Fact::Failed).is_empty(),
            "the first is out of the window"
        );
        let got = t.step(sec(61), 0, &id(0), e, Fact::Failed);
        assert_eq!(got, vec![Action::Suspect, Action::Probe { at: Micros(61_250_000) }]);
        assert!(!t.usable(&id(0)) && t.usable(&id(1)));
        assert_eq!(t.step(sec(62), 0, &id(0), e, Fact::ProbeAnswered), vec![Action::Clear]);
        assert!(t.usable(&id(0)));
    }

    #[test]
    fn a_new_epoch_of_a_suspect_is_probed_at_once() {
        let mut t = table();
        for _ in 0..3 {
            t.step(sec(1), 0, &id(0), Epoch(1), Fact::Failed);
        }
        let got = t.step(sec(2), 0, &id(0), Epoch(0), Fact::NewEpoch(Epoch(2)));
        assert_eq!(got, vec![Action::Probe { at: sec(2) }]);
        assert!(
            t.step(sec(2), 0, &id(0), Epoch(1), Fact::ProbeAnswered).is_empty(),
            "I7"
        );
        assert_eq!(
            t.step(sec(3), 0, &id(0), Epoch(2), Fact::ProbeAnswered),
            vec![Action::Clear]
        );
    }

    #[test]
    fn the_table_is_bounded_and_says_so() {
        let mut t = Peers::new(Policy {
            peers_max: 2,
            ..Policy::default()
        });
        for n in 0..5 {
            t.step(sec(1), 0, &id(n), Epoch(1), Fact::Failed);
        }
        assert_eq!((t.view().len(), t.untracked()), (2, 3));
        t.forget(&id(0));
        t.step(sec(1), 0, &id(4), Epoch(1), Fact::Failed);
        assert!(t.view().contains_key(&id(4)));
    }

    proptest! {
        /// Whatever came before, one failure or one missed probe on a quiet healthy peer never suspects.
        #[test]
        fn one_failure_never_suspects(gap in 60_u64..10_000, n in 1_u64..20, missed: bool, jitter: u32) {
            let mut t = table();
            for i in 0..n {
                let fact = if missed { Fact::ProbeMissed } else { Fact::Failed };
                t.step(sec(i * gap), jitter, &id(0), Epoch(1), fact);
                prop_assert!(t.usable(&id(0)));
                if missed { t.step(sec(i * gap + 1), jitter, &id(0), Epoch(1), Fact::ProbeAnswered); }
            }
        }

        /// I7, and: a suspect always has a probe pending, within the longest interval.
        #[test]
        fn i7_old_epochs_change_nothing(
            facts in prop::collection::vec((any_fact(), 0_u64..30_000_000, 0_u64..4, any::<u32>()), 1..200),
        ) {
            let (mut t, mut now) = (table(), Micros::ZERO);
            for (fact, dt, e, jitter) in facts {
                now = now.plus(Micros(dt));
                let before = t.view().get(&id(0)).cloned();
                let out = t.step(now, jitter, &id(0), Epoch(e), fact);
                let after = t.view().get(&id(0)).cloned().unwrap();
                if let Some(b) = before && b.epoch > Epoch(e) {
                    prop_assert!(out.is_empty());
                    prop_assert_eq!(&b, &after);
                }
                prop_assert!(after.failures.len() <= 3);
                if after.suspect {
                    prop_assert!(after.probe_at.is_some_and(|at| at <= now.plus(Policy::default().interval_max)));
                }
            }
        }

        /// I8: after any past, a peer that answers every probe is clear within the stated time.
        #[test]
        fn i8_a_peer_that_answers_gets_work_again(
            facts in prop::collection::vec((any_fact(), 0_u64..5_000_000, any::<u32>()), 1..200), jitter: u32,
        ) {
            let (mut t, mut now) = (table(), Micros::ZERO);
            for (fact, dt, j) in facts {
                now = now.plus(Micros(dt));
                t.step(now, j, &id(0), Epoch(1), fact);
            }
            let healed = now;
            while !t.usable(&id(0)) {
                let at = t.view()[&id(0)].probe_at.unwrap();
                let timeout = Policy::default().probe_timeout;
                if at < healed { // sent before it healed: lost, found out by a tick
                    now = healed.max(at.plus(timeout));
                    t.step(now, jitter, &id(0), Epoch(1), Fact::Tick);
                } else { // sent after: answered as late as it may be
                    now = at.plus(timeout);
                    t.step(now, jitter, &id(0), Epoch(1), Fact::ProbeAnswered);
                }
                prop_assert!(now.since(healed) <= Policy::default().recovery_bound());
            }
        }
    }
}
