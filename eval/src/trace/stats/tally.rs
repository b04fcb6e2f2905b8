//! Exact distributions of whole numbers in memory that grows with the distinct values, not with their number.

use serde::Serialize;
use std::collections::BTreeMap;

/// How often each value came.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    counts: BTreeMap<u64, u64>,
    count: u64,
    sum: u128,
}

/// Mean and quantiles of some values, in their unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quantiles {
    /// Number of values.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest value.
    pub min: f64,
    /// 10th percentile.
    pub p10: f64,
    /// 25th percentile.
    pub p25: f64,
    /// Median.
    pub p50: f64,
    /// 75th percentile.
    pub p75: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest value.
    pub max: f64,
}

impl Tally {
    /// Counts `value`.
    pub fn add(&mut self, value: u64) {
        *self.counts.entry(value).or_default() += 1;
        self.count += 1;
        self.sum += u128::from(value);
    }

    /// Values counted.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Arithmetic mean; `None` of nothing.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum as f64 / self.count as f64)
    }

    /// Share of the values that are at most `limit`, 0 to 1; `None` of nothing.
    pub fn share_up_to(&self, limit: u64) -> Option<f64> {
        let below: u64 = self.counts.range(..=limit).map(|(_, n)| n).sum();
        (self.count > 0).then(|| below as f64 / self.count as f64)
    }

    /// The value at `rank` of the sorted values, from 0.
    fn at(&self, rank: u64) -> Option<f64> {
        let mut before = 0;
        let found = self.counts.iter().find(|(_, n)| {
            before += **n;
            before > rank
        });
        found.map(|(value, _)| *value as f64)
    }

    /// Quantile `q` (0 to 1) by linear interpolation at (n−1)q, as [`crate::stats::percentile`].
    pub fn quantile(&self, q: f64) -> Option<f64> {
        let rank = self.count.checked_sub(1)? as f64 * q;
        let (low, high) = (self.at(rank.floor() as u64)?, self.at(rank.ceil() as u64)?);
        Some(low + (high - low) * (rank - rank.floor()))
    }

    /// All figures, each value times `unit`; `None` of nothing.
    pub fn quantiles(&self, unit: f64) -> Option<Quantiles> {
        let q = |q| Some(self.quantile(q)? * unit);
        Some(Quantiles {
            count: self.count,
            mean: self.mean()? * unit,
            min: q(0.0)?,
            p10: q(0.1)?,
            p25: q(0.25)?,
            p50: q(0.5)?,
            p75: q(0.75)?,
            p90: q(0.9)?,
            p99: q(0.99)?,
            max: q(1.0)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{mean, percentile};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_says_what_sorting_all_values_says(values in prop::collection::vec(0u64..50, 1..80), q in 0.0..=1.0) {
            let mut tally = Tally::default();
            for value in &values {
                tally.add(*value);
            }
            let plain: Vec<f64> = values.iter().map(|v| *v as f64).collect();
            prop_assert!((tally.quantile(q).unwrap() - percentile(&plain, q).unwrap()).abs() < 1e-9);
            prop_assert!((tally.mean().unwrap() - mean(&plain).unwrap()).abs() < 1e-9);
            let small = values.iter().filter(|v| **v <= 20).count() as f64 / values.len() as f64;
            prop_assert_eq!(tally.share_up_to(20), Some(small));
        }
    }

    #[test]
    fn nothing_has_no_figures() {
        assert_eq!(Tally::default().quantiles(1.0), None);
        assert_eq!(Tally::default().share_up_to(3), None);
    }
}
