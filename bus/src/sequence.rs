//! Per-publisher sequence tracking: what a listener applies, ignores, or must ask a snapshot for.
//!
//! Core NATS loses silently, so each publisher numbers its events densely from 0 within an epoch. A listener that
//! misses one, or sees a new epoch, drops what follows until a snapshot covers it. Pure: no clock, no I/O.

use std::collections::BTreeMap;

use pinion_schemas::Epoch;

/// Publishers one listener tracks. One entry is some hundred bytes, a large cluster has hundreds of workers; beyond
/// the cap a new publisher is refused visibly, because forgetting a known one would hide a gap.
pub const PUBLISHERS_MAX: usize = 16_384;

/// What to do with one numbered message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Next in order: apply it.
    Apply,
    /// Number already seen in this epoch: ignore it.
    Duplicate,
    /// From a replaced owner: ignore it (I7).
    OldEpoch,
    /// Drop it, and ask the publisher for a snapshot.
    Resync(Cause),
    /// In order, but a snapshot is still awaited: drop it, the snapshot must cover it.
    AwaitingSnapshot,
    /// [`PUBLISHERS_MAX`] others are tracked already: drop it.
    TooManyPublishers,
}

/// Why a snapshot is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// First message of this publisher, or of a new epoch: everything known about it is void.
    NewEpoch,
    /// This many messages are missing.
    Gap {
        /// Numbers skipped.
        missing: u64,
    },
}

#[derive(Clone, Copy, Debug)]
struct Track {
    epoch: Epoch,
    /// Smallest number not yet seen.
    next: u64,
    /// All of `0..next` was applied or covered by a snapshot.
    synced: bool,
}

/// The listener's view of all publishers.
#[derive(Clone, Debug, Default)]
pub struct Sequences {
    tracks: BTreeMap<String, Track>,
}

impl Sequences {
    /// Nothing seen yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Judges one message.
    pub fn observe(&mut self, publisher: &str, epoch: Epoch, sequence: u64) -> Verdict {
        let after = sequence.saturating_add(1);
        let Some(track) = self.tracks.get_mut(publisher) else {
            if self.tracks.len() >= PUBLISHERS_MAX {
                return Verdict::TooManyPublishers;
            }
            self.tracks.insert(
                publisher.to_owned(),
                Track {
                    epoch,
                    next: after,
                    synced: false,
                },
            );
            return Verdict::Resync(Cause::NewEpoch);
        };
        if epoch < track.epoch {
            return Verdict::OldEpoch;
        }
        if epoch > track.epoch {
            *track = Track {
                epoch,
                next: after,
                synced: false,
            };
            return Verdict::Resync(Cause::NewEpoch);
        }
        if sequence < track.next {
            return Verdict::Duplicate;
        }
        let missing = sequence - track.next;
        track.next = after;
        if missing > 0 {
            track.synced = false;
            return Verdict::Resync(Cause::Gap { missing });
        }
        if track.synced {
            Verdict::Apply
        } else {
            Verdict::AwaitingSnapshot
        }
    }

    /// A snapshot that holds everything up to and without number `next` arrived. `true`: install it, later messages
    /// apply on top. `false`: it is of an old epoch, older than messages already dropped (ask again if
    /// still [`Self::unsynced`]), or there is no room for one more publisher.
    pub fn snapshot(&mut self, publisher: &str, epoch: Epoch, next: u64) -> bool {
        let stale = match self.tracks.get(publisher) {
            Some(track) => epoch < track.epoch || (epoch == track.epoch && next < track.next),
            None => self.tracks.len() >= PUBLISHERS_MAX,
        };
        if !stale {
            self.tracks.insert(
                publisher.to_owned(),
                Track {
                    epoch,
                    next,
                    synced: true,
                },
            );
        }
        !stale
    }

    /// Publishers whose snapshot is still awaited, by name: to be asked again, since the asking may get lost too.
    pub fn unsynced(&self) -> impl Iterator<Item = &str> {
        self.tracks
            .iter()
            .filter(|(_, track)| !track.synced)
            .map(|(name, _)| name.as_str())
    }

    /// Drops a publisher that has left, making room. Its next message is a new epoch.
    pub fn forget(&mut self, publisher: &str) {
        self.tracks.remove(publisher);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const P: &str = "d0";

    #[test]
    fn each_case_once() {
        let mut seen = Sequences::new();
        assert_eq!(seen.observe(P, Epoch(1), 0), Verdict::Resync(Cause::NewEpoch));
        assert_eq!(seen.observe(P, Epoch(1), 1), Verdict::AwaitingSnapshot);
        assert!(!seen.snapshot(P, Epoch(1), 1), "does not cover the dropped number 1");
        assert_eq!(seen.unsynced().collect::<Vec<_>>(), [P]);
        assert!(seen.snapshot(P, Epoch(1), 2));
        assert_eq!(seen.observe(P, Epoch(1), 2), Verdict::Apply);
        assert_eq!(seen.observe(P, Epoch(1), 2), Verdict::Duplicate);
        assert_eq!(seen.observe(P, Epoch(1), 5), Verdict::Resync(Cause::Gap { missing: 2 }));
        assert_eq!(seen.observe(P, Epoch(0), 9), Verdict::OldEpoch);
        assert_eq!(seen.observe(P, Epoch(2), 0), Verdict::Resync(Cause::NewEpoch));
        assert!(!seen.snapshot(P, Epoch(1), 99));
        seen.forget(P);
        assert_eq!(seen.unsynced().count(), 0);
    }

    #[test]
    fn the_cap_is_visible_and_forgets_nobody() {
        let mut seen = Sequences::new();
        for n in 0..PUBLISHERS_MAX {
            assert!(seen.snapshot(&n.to_string(), Epoch(1), 0));
        }
        assert_eq!(seen.observe("one more", Epoch(1), 0), Verdict::TooManyPublishers);
        assert!(!seen.snapshot("one more", Epoch(1), 0));
        assert_eq!(seen.observe("7", Epoch(1), 0), Verdict::Apply);
    }

    proptest! {
        /// Whatever is lost or repeated, what a listener holds is always a gapless prefix of the publisher's newest
        /// epoch.
        #[test]
        fn applied_state_is_always_a_gapless_prefix(
            steps in prop::collection::vec((0u8..12, 0u64..4), 1..200),
        ) {
            let mut seen = Sequences::new();
            let (mut epoch, mut sent) = (1u64, 0u64);
            let mut held: Option<(u64, u64)> = None; // the listener's copy: epoch, and everything below this number
            for (kind, back) in steps {
                let (e, s) = match kind {
                    0 => { epoch += 1; sent = 0; continue; }
                    1 => { sent += 1; continue; }                                     // lost
                    2 => {                                                            // snapshot, perhaps an old one
                        let next = sent.saturating_sub(back);
                        if seen.snapshot(P, Epoch(epoch), next) {
                            if let Some((e, n)) = held { prop_assert!(e < epoch || n <= next, "state went back"); }
                            held = Some((epoch, next));
                        }
                        continue;
                    }
                    3 | 4 if sent == 0 => continue,
                    3 => (epoch, sent.saturating_sub(back + 1)),                      // repeated or out of order
                    4 => (epoch.saturating_sub(back), sent.saturating_sub(1)),        // perhaps of an old owner
                    _ => { sent += 1; (epoch, sent - 1) }
                };
                match seen.observe(P, Epoch(e), s) {
                    Verdict::Apply => { prop_assert_eq!(held, Some((e, s))); held = Some((e, s + 1)); }
                    Verdict::Duplicate | Verdict::OldEpoch => {}
                    Verdict::Resync(_) | Verdict::AwaitingSnapshot => {
                        prop_assert!(seen.unsynced().any(|p| p == P));
                    }
                    Verdict::TooManyPublishers => prop_assert!(false),
                }
            }
            // One fresh snapshot always heals.
            prop_assert!(seen.snapshot(P, Epoch(epoch), sent) || held == Some((epoch, sent)) );
            prop_assert_eq!(seen.observe(P, Epoch(epoch), sent), Verdict::Apply);
        }
    }
}
