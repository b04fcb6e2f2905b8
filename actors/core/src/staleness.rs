//! Book-keeping of D→P sync on D: how far the backup of one session on one P may lag, and what is sent to catch up.
//!
//! One [`Book`] per (session, P); with target `broadcast` each P has its own (digest §1.10). A backup is within β of the
//! committed length, or flagged stale (I5). Syncs are coalesced, one in flight; a refused or failed one is not repeated
//! before the next commit: losing a backup costs a prefill, never a wrong prefix.
//!
//! | state | `Committed` | `Granted` | `Declined` / `SyncFailed` / overdue `Tick` | `Acked` |
//! |---|---|---|---|---|
//! | idle | offer what is missing | – | – | – |
//! | offered | remember | send | idle | – |
//! | sending | remember | – | idle | backup moves; idle; offer the rest if it moved |
//!
//! Answers carry the number of their sync; one that is not the sync in flight changes nothing, nor does an old epoch (I7).

use pinion_schemas::limits::STALENESS_TOKENS_MAX;
use pinion_schemas::{Epoch, Micros};
use serde::Serialize;

/// Number of a sync, unique within its book.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct SyncId(pub u64);

/// Tokens `from..to` of the session, whole pages from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Range {
    /// First token.
    pub from: u64,
    /// Token after the last.
    pub to: u64,
}

/// Where the sync in flight stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Flight {
    /// Its number.
    pub sync: SyncId,
    /// What it carries.
    pub range: Range,
    /// Whether P granted it.
    pub granted: bool,
    /// When it counts as failed, microseconds.
    pub deadline: Micros,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fact {
    /// A turn committed; the session now has `len` tokens.
    Committed {
        /// Tokens, absolute.
        len: u64,
    },
    /// The committed chain was cut back (another branch, or lost pages): only the first `len` tokens still hold.
    Rewound {
        /// Tokens, absolute.
        len: u64,
    },
    /// P takes the offered range.
    Granted {
        /// Which.
        sync: SyncId,
    },
    /// P does not take it.
    Declined {
        /// Which.
        sync: SyncId,
    },
    /// P inserted the pages; it holds the first `len` tokens.
    Acked {
        /// Which.
        sync: SyncId,
        /// Tokens, absolute.
        len: u64,
    },
    /// The transfer failed.
    SyncFailed {
        /// Which.
        sync: SyncId,
    },
    /// P evicted pages of the backup (it inserts them unpinned) and holds the first `len` tokens.
    BackupShrunk {
        /// P's epoch.
        epoch: Epoch,
        /// Tokens, absolute.
        len: u64,
    },
    /// P was replaced; the new process holds nothing.
    PeerEpochChanged {
        /// The new epoch.
        epoch: Epoch,
    },
    /// Time passed.
    Tick,
}

/// What the shell has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Send P a `SyncOffer`, at low priority.
    Offer {
        /// Its number.
        sync: SyncId,
        /// What is offered.
        range: Range,
        /// P's epoch.
        epoch: Epoch,
    },
    /// Transfer the pages and commit them.
    Send {
        /// Which.
        sync: SyncId,
        /// What.
        range: Range,
    },
    /// Stop the sync; its answers no longer matter.
    Abort {
        /// Which.
        sync: SyncId,
    },
    /// The backup is no longer within β: do not use it as if fresh.
    MarkStale {
        /// Tokens it lags.
        staleness: u64,
    },
    /// The backup is within β again.
    MarkFresh,
    /// The backup's length moved, up or down (event `BackupAdvanced`).
    BackupMoved {
        /// Tokens, absolute.
        len: u64,
    },
}

/// State of the backup of one session on one P.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Book {
    page_tokens: u64,
    timeout: Micros,
    epoch: Epoch,
    committed: u64,
    backup: u64,
    last_turn: u64,
    stale: bool,
    next_sync: u64,
    flight: Option<Flight>,
}

impl Book {
    /// An empty session whose backup goes to incarnation `epoch` of P. `page_tokens` below 1 counts as 1; an offer or a
    /// transfer that lasts longer than `timeout` (microseconds) has failed.
    pub fn new(page_tokens: u32, timeout: Micros, epoch: Epoch) -> Self {
        Self {
            page_tokens: u64::from(page_tokens.max(1)),
            timeout,
            epoch,
            committed: 0,
            backup: 0,
            last_turn: 0,
            stale: false,
            next_sync: 0,
            flight: None,
        }
    }

    /// Takes one fact at `now` (microseconds).
    pub fn step(&mut self, now: Micros, fact: Fact) -> Vec<Action> {
        let (mut out, was) = (Vec::new(), self.backup);
        let mut offer = false;
        match fact {
            Fact::Committed { len } if len > self.committed => {
                self.last_turn = len - self.committed;
                self.committed = len;
                offer = true;
            }
            Fact::Rewound { len } if len < self.committed => {
                self.committed = len;
                self.abort(&mut out);
                self.backup = self.backup.min(self.whole_pages(len));
            }
            Fact::Granted { sync } => {
                if let Some(f) = self.flight.as_mut().filter(|f| f.sync == sync && !f.granted) {
                    f.granted = true;
                    f.deadline = now.plus(self.timeout);
                    out.push(Action::Send { sync, range: f.range });
                }
            }
            Fact::Declined { sync } | Fact::SyncFailed { sync } if self.flight.is_some_and(|f| f.sync == sync) => {
                self.flight = None;
            }
            Fact::Acked { sync, len } => {
                if let Some(f) = self.flight.filter(|f| f.sync == sync && f.granted) {
                    self.flight = None;
                    // more than was sent cannot be ours; less is a partial insert, taken as it is
                    self.backup = self.backup.max(self.whole_pages(len.min(f.range.to)));
                    offer = self.backup > was;
                }
            }
            Fact::BackupShrunk { epoch, len } if epoch == self.epoch && len < self.backup => {
                self.abort(&mut out); // its range would leave a hole
                self.backup = self.whole_pages(len);
            }
            Fact::PeerEpochChanged { epoch } if epoch > self.epoch => {
                self.abort(&mut out);
                self.epoch = epoch;
                self.backup = 0;
                offer = true;
            }
            Fact::Tick if self.flight.is_some_and(|f| now >= f.deadline) => self.abort(&mut out),
            _ => {} // no news, or news of an older state
        }
        if self.backup != was {
            out.push(Action::BackupMoved { len: self.backup });
        }
        self.flag(&mut out);
        if offer {
            self.offer(now, &mut out);
        }
        out
    }

    fn whole_pages(&self, len: u64) -> u64 {
        len - len % self.page_tokens
    }

    fn abort(&mut self, out: &mut Vec<Action>) {
        if let Some(f) = self.flight.take() {
            out.push(Action::Abort { sync: f.sync });
        }
    }

    fn flag(&mut self, out: &mut Vec<Action>) {
        let stale = self.staleness() > self.beta();
        if stale != self.stale {
            self.stale = stale;
            out.push(if stale {
                Action::MarkStale {
                    staleness: self.staleness(),
                }
            } else {
                Action::MarkFresh
            });
        }
    }

    /// Offers every whole page that P lacks, unless a sync is in flight: then its end offers them.
    fn offer(&mut self, now: Micros, out: &mut Vec<Action>) {
        let range = Range {
            from: self.backup,
            to: self.whole_pages(self.committed),
        };
        if self.flight.is_some() || range.from >= range.to {
            return;
        }
        let sync = SyncId(self.next_sync);
        self.next_sync += 1;
        self.flight = Some(Flight {
            sync,
            range,
            granted: false,
            deadline: now.plus(self.timeout),
        });
        out.push(Action::Offer {
            sync,
            range,
            epoch: self.epoch,
        });
    }

    /// β in tokens: max(page, min(committed in the last turn, 4096)) (design §5, digest §1.10).
    pub fn beta(&self) -> u64 {
        self.page_tokens
            .max(self.last_turn.min(u64::from(STALENESS_TOKENS_MAX)))
    }

    /// Tokens the backup lags behind the committed length.
    pub fn staleness(&self) -> u64 {
        self.committed.saturating_sub(self.backup)
    }

    /// Committed length in tokens.
    pub fn committed(&self) -> u64 {
        self.committed
    }

    /// Acknowledged length of the backup in tokens, whole pages.
    pub fn backup(&self) -> u64 {
        self.backup
    }

    /// Whether the backup must not be used as if fresh.
    pub fn stale(&self) -> bool {
        self.stale
    }

    /// The sync in flight.
    pub fn flight(&self) -> Option<Flight> {
        self.flight
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const T: Micros = Micros::from_secs(5);

    fn book() -> Book {
        Book::new(64, T, Epoch(1))
    }
    fn ids() -> impl Strategy<Value = SyncId> {
        (0_u64..12).prop_map(SyncId)
    }
    fn any_fact() -> impl Strategy<Value = Fact> {
        let len = 0_u64..40_000;
        prop_oneof![
            4 => len.clone().prop_map(|len| Fact::Committed { len }),
            1 => len.clone().prop_map(|len| Fact::Rewound { len }),
            4 => ids().prop_map(|sync| Fact::Granted { sync }),
            1 => ids().prop_map(|sync| Fact::Declined { sync }),
            4 => (ids(), len.clone()).prop_map(|(sync, len)| Fact::Acked { sync, len }),
            1 => ids().prop_map(|sync| Fact::SyncFailed { sync }),
            1 => (0_u64..4, len).prop_map(|(e, len)| Fact::BackupShrunk { epoch: Epoch(e), len }),
            1 => (0_u64..4).prop_map(|e| Fact::PeerEpochChanged { epoch: Epoch(e) }),
            2 => Just(Fact::Tick),
        ]
    }

    #[test]
    fn commits_during_a_sync_are_coalesced_into_one() {
        let (mut b, s) = (book(), SyncId);
        let first = Range { from: 0, to: 9_984 };
        let out = b.step(Micros(0), Fact::Committed { len: 10_000 });
        let offer = Action::Offer {
            sync: s(0),
            range: first,
            epoch: Epoch(1),
        };
        assert_eq!(out, vec![Action::MarkStale { staleness: 10_000 }, offer]);
        assert_eq!(
            b.step(Micros(1), Fact::Granted { sync: s(0) }),
            vec![Action::Send {
                sync: s(0),
                range: first
            }]
        );
        assert!(b.step(Micros(2), Fact::Committed { len: 10_100 }).is_empty());
        assert!(b.step(Micros(3), Fact::Committed { len: 10_300 }).is_empty());
        let out = b.step(Micros(4), Fact::Acked { sync: s(0), len: 9_984 });
        let rest = Range {
            from: 9_984,
            to: 10_240,
        };
        let offer = Action::Offer {
            sync: s(1),
            range: rest,
            epoch: Epoch(1),
        };
        assert_eq!(out, vec![Action::BackupMoved { len: 9_984 }, offer]); // 316 behind, β = 200: still stale
        b.step(Micros(5), Fact::Granted { sync: s(1) });
        let out = b.step(
            Micros(6),
            Fact::Acked {
                sync: s(1),
                len: 10_240,
            },
        );
        assert_eq!(out, vec![Action::BackupMoved { len: 10_240 }, Action::MarkFresh]);
    }

    #[test]
    fn a_refused_failed_or_overdue_sync_waits_for_the_next_commit() {
        let mut b = book();
        b.step(Micros(0), Fact::Committed { len: 640 });
        assert!(b.step(Micros(1), Fact::Declined { sync: SyncId(0) }).is_empty());
        b.step(Micros(2), Fact::Committed { len: 1_280 });
        assert!(b.stale(), "two turns behind");
        assert_eq!(
            b.step(Micros(2).plus(T), Fact::Tick),
            vec![Action::Abort { sync: SyncId(1) }]
        );
        let out = b.step(Micros(9), Fact::Committed { len: 1_344 });
        let range = Range { from: 0, to: 1_344 };
        assert_eq!(
            out,
            vec![Action::Offer {
                sync: SyncId(2),
                range,
                epoch: Epoch(1)
            }]
        );
    }

    #[test]
    fn a_replaced_peer_holds_nothing() {
        let mut b = book();
        b.step(Micros(0), Fact::Committed { len: 6_400 });
        b.step(Micros(0), Fact::Granted { sync: SyncId(0) });
        b.step(
            Micros(0),
            Fact::Acked {
                sync: SyncId(0),
                len: 6_400,
            },
        );
        assert!(!b.stale() && b.staleness() == 0);
        let out = b.step(Micros(1), Fact::PeerEpochChanged { epoch: Epoch(2) });
        let offer = Action::Offer {
            sync: SyncId(1),
            range: Range { from: 0, to: 6_400 },
            epoch: Epoch(2),
        };
        assert_eq!(
            out,
            vec![
                Action::BackupMoved { len: 0 },
                Action::MarkStale { staleness: 6_400 },
                offer
            ]
        );
    }

    proptest! {
        /// I5 at every step, with answers repeated, reordered and invented; old answers change nothing.
        #[test]
        fn i5_within_beta_or_stale(facts in prop::collection::vec((any_fact(), 0_u64..3_000_000), 1..200)) {
            let (mut b, mut now) = (book(), Micros::ZERO);
            let mut held = 0_u64; // what P can hold at most: the end of what was sent to it
            for (fact, dt) in facts {
                now = now.plus(Micros(dt));
                let fact = match (fact, b.flight()) { // half of the answers are the right ones
                    (Fact::Granted { .. }, Some(f)) if dt % 2 == 0 => Fact::Granted { sync: f.sync },
                    (Fact::Acked { .. }, Some(f)) if dt % 2 == 0 => Fact::Acked { sync: f.sync, len: f.range.to },
                    _ => fact,
                };
                let before = b.clone();
                let out = b.step(now, fact);
                prop_assert!(b.stale() || b.staleness() <= b.beta());
                prop_assert!(b.backup() <= b.committed() && b.backup() % 64 == 0);
                for a in &out {
                    match a {
                        Action::Send { range, .. } => held = held.max(range.to),
                        Action::Offer { .. } => prop_assert!(before.flight().is_none() || before.flight() != b.flight()),
                        _ => {}
                    }
                }
                prop_assert!(b.backup() <= held);
                if let Some(f) = b.flight() {
                    prop_assert!(f.range.from <= b.backup() && f.range.to <= b.committed());
                }
                if let Fact::Acked { sync, .. } = fact && before.flight().is_none_or(|f| f.sync != sync) {
                    prop_assert!(out.is_empty());
                    prop_assert_eq!(&before, &b);
                }
            }
        }
    }
}
