//! Seeded numbers for what a caller itself chooses; the network has its own.

use std::time::Duration;

/// A generator (`SplitMix64`): the same numbers from the same seed, on every machine.
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A number in `from..to`; `from` if there is none.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.any() % to.saturating_sub(from).max(1)
    }

    /// A span of `from..to` milliseconds.
    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.between(from, to))
    }
}
