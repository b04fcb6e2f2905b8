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
    /// The span from `earlier` to here, zero if `earlier` lies in the future (a clock may jump).
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}
