//! A node's link in simulation: transfers share it one after the other, in the order in which they were begun.
//!
//! Serial and not fair-shared, because the senders' budget is made for that: a decode worker promises at most what its link
//! carries in a second (design §5), so nobody waits long, and whoever is first is done first.

use pinion_schemas::Micros;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How fast a link is.
#[derive(Clone, Debug)]
pub struct LinkModel {
    /// Bytes per second; 0 counts as 1.
    pub bytes_per_sec: u64,
    /// Fixed cost of each transfer: the exchange before the first byte, microseconds.
    pub setup: Micros,
    /// What is wrong with it, for whoever wants to break it.
    pub trouble: Option<Arc<Trouble>>,
}

/// What is wrong with a link at the moment. The default is nothing.
#[derive(Debug, Default)]
pub struct Trouble {
    stuck_until: AtomicU64,
    slowness: AtomicU64,
    corrupts: AtomicBool,
}

impl Trouble {
    /// Nothing is done before this time of the node's clock, microseconds.
    pub fn stick(&self, until: Micros) {
        self.stuck_until.store(until.0, Ordering::Relaxed);
    }

    /// A transfer that begins now takes so many times as long; 0 and 1 change nothing.
    pub fn slow(&self, times: u64) {
        self.slowness.store(times, Ordering::Relaxed);
    }

    /// Whether bits flip on the way.
    pub fn corrupt(&self, corrupts: bool) {
        self.corrupts.store(corrupts, Ordering::Relaxed);
    }
}

impl LinkModel {
    /// How long `bytes` keep the link busy, rounded up.
    pub fn time(&self, bytes: u64) -> Micros {
        let slowness = self.trouble.as_ref().map_or(0, |t| t.slowness.load(Ordering::Relaxed));
        let time = Micros::for_amount(u128::from(bytes), self.bytes_per_sec);
        self.setup.plus(Micros(time.0.saturating_mul(slowness.max(1))))
    }

    /// Words that pass the link, as they arrive.
    pub fn carry(&self, words: &mut [u64]) {
        let corrupts = |t: &Arc<Trouble>| t.corrupts.load(Ordering::Relaxed);
        if self.trouble.as_ref().is_some_and(corrupts)
            && let Some(word) = words.first_mut()
        {
            *word ^= 1;
        }
    }

    fn stuck_until(&self) -> Micros {
        let until = |t: &Arc<Trouble>| t.stuck_until.load(Ordering::Relaxed);
        Micros(self.trouble.as_ref().map_or(0, until))
    }
}

#[derive(Clone, Debug)]
struct Transfer<K> {
    key: K,
    time: Micros,
}

/// The link and what is on it. Bounded by its user, who knows how many transfers it may have under way.
#[derive(Clone, Debug)]
pub struct Link<K> {
    model: LinkModel,
    waiting: VecDeque<Transfer<K>>,
    /// When the first of them began.
    begun: Micros,
}

impl<K: PartialEq> Link<K> {
    /// A link with nothing on it.
    pub fn new(model: LinkModel) -> Self {
        Self {
            model,
            waiting: VecDeque::new(),
            begun: Micros::ZERO,
        }
    }

    /// How fast it is.
    pub fn model(&self) -> &LinkModel {
        &self.model
    }

    /// Puts a transfer behind those that are there.
    pub fn begin(&mut self, now: Micros, key: K, bytes: u64) {
        if self.waiting.is_empty() {
            self.begun = now;
        }
        let time = self.model.time(bytes);
        self.waiting.push_back(Transfer { key, time });
    }

    /// Takes a transfer off, wherever it is; the next ones move up. One that is not there changes nothing.
    pub fn cancel(&mut self, now: Micros, key: &K) {
        let Some(place) = self.waiting.iter().position(|t| t.key == *key) else {
            return;
        };
        self.waiting.remove(place);
        if place == 0 {
            self.begun = now;
        }
    }

    /// When the next transfer is done.
    pub fn next_done(&self) -> Option<Micros> {
        let done = self.waiting.front().map(|t| self.begun.plus(t.time))?;
        Some(done.max(self.model.stuck_until()))
    }

    /// A transfer that is done by `now`, in their order; call it until there is none.
    pub fn take_done(&mut self, now: Micros) -> Option<K> {
        let done = self.next_done().filter(|at| *at <= now)?;
        self.begun = done;
        self.waiting.pop_front().map(|t| t.key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MODEL: LinkModel = LinkModel {
        bytes_per_sec: 1_000_000,
        setup: Micros(5),
        trouble: None,
    };

    fn link() -> Link<u8> {
        Link::new(MODEL)
    }

    #[test]
    fn transfers_follow_each_other() {
        let mut link = link();
        link.begin(Micros(100), 1, 10);
        link.begin(Micros(100), 2, 20);
        assert_eq!(link.next_done(), Some(Micros(115)));
        assert_eq!(link.take_done(Micros(114)), None);
        // Looked at late, both are done: the second began when the first was done, not when somebody looked.
        assert_eq!(link.take_done(Micros(140)), Some(1));
        assert_eq!(link.take_done(Micros(140)), Some(2));
        assert_eq!(link.next_done(), None);
    }

    #[test]
    fn who_is_cancelled_frees_the_link() {
        let mut link = link();
        link.begin(Micros(0), 1, 1_000);
        link.begin(Micros(0), 2, 10);
        link.cancel(Micros(50), &1);
        assert_eq!(link.next_done(), Some(Micros(65)));
        link.cancel(Micros(50), &9);
        assert_eq!(link.next_done(), Some(Micros(65)));
    }

    #[test]
    fn no_speed_is_no_panic() {
        let model = LinkModel {
            bytes_per_sec: 0,
            setup: Micros(0),
            trouble: None,
        };
        assert_eq!(model.time(3), Micros(3_000_000));
        assert_eq!(model.time(u64::MAX), Micros(u64::MAX));
    }

    #[test]
    fn a_link_in_trouble_sticks_slows_and_flips_a_bit() {
        let trouble = Arc::new(Trouble::default());
        let model = LinkModel {
            trouble: Some(trouble.clone()),
            ..MODEL
        };
        let mut link = Link::new(model.clone());
        trouble.slow(3);
        link.begin(Micros(0), 1, 10);
        assert_eq!(link.next_done(), Some(Micros(35)));
        trouble.stick(Micros(1_000));
        assert_eq!(link.take_done(Micros(999)), None);
        assert_eq!(link.take_done(Micros(1_000)), Some(1));
        let mut words = [8, 9];
        model.carry(&mut words);
        assert_eq!(words, [8, 9]);
        trouble.corrupt(true);
        model.carry(&mut words);
        assert_eq!(words, [9, 9]);
    }

    proptest! {
        /// Without cancels, transfers begun at once are done in their order, and the last one when the bytes of all have passed.
        #[test]
        fn the_link_is_busy_exactly_as_long_as_its_bytes_need(sizes in prop::collection::vec(0_u64..10_000, 1..20)) {
            let mut link = Link::new(MODEL);
            let mut sum = Micros(7);
            for (i, bytes) in sizes.iter().enumerate() {
                link.begin(Micros(7), i, *bytes);
                sum = sum.plus(MODEL.time(*bytes));
            }
            let mut order = Vec::new();
            let mut last = Micros(0);
            while let Some(at) = link.next_done() {
                prop_assert!(at >= last);
                last = at;
                order.extend(link.take_done(at));
            }
            prop_assert_eq!(last, sum);
            prop_assert_eq!(order, (0..sizes.len()).collect::<Vec<_>>());
        }
    }
}
