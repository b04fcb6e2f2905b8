//! Time as the machines see it: a number that is passed in, never read.

use rkyv::{Archive, Deserialize, Serialize};

/// A point on the cluster's time axis, or a span of it, in microseconds. The origin is whatever the shell
/// chose (process start, or virtual zero); only differences mean anything across processes.
#[derive(
    Archive,
    Serialize,
    Deserialize,
    serde::Serialize,
    serde::Deserialize,
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
)]
#[serde(transparent)]
pub struct Micros(pub u64);

impl Micros {
    /// The origin.
    pub const ZERO: Self = Self(0);
    /// `n` milliseconds.
    pub const fn from_millis(n: u64) -> Self {
        Self(n.saturating_mul(1_000))
    }
    /// `n` seconds.
    pub const fn from_secs(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000))
    }
    /// Whole milliseconds, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000
    }
    /// This point moved by `span` into the future; the far end of the axis is its own successor.
    #[must_use]
    pub const fn plus(self, span: Self) -> Self {
        Self(self.0.saturating_add(span.0))
    }
    /// How long `amount` takes at `per_second`, rounded up; a rate of 0 counts as 1, and what overflows is the longest span.
    pub fn for_amount(amount: u128, per_second: u64) -> Self {
        let rate = per_second.max(1);
        // The usual amounts fit into 64 bits, and a route decision asks this twice for every worker.
        let small = u64::try_from(amount).ok().and_then(|a| a.checked_mul(1_000_000));
        if let Some(scaled) = small {
            return Self(scaled.div_ceil(rate));
        }
        let micros = amount.saturating_mul(1_000_000).div_ceil(u128::from(rate));
        Self(u64::try_from(micros).unwrap_or(u64::MAX))
    }
    /// The span from `earlier` to here, zero if `earlier` lies in the future (a clock may jump).
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}
