//! Statistics of the evaluation protocol (digest §4.1-4.2). No result is ever NaN: a figure that does not exist is
//! `None`, and so is every figure of values that are not all finite.

pub mod bootstrap;

use serde::Serialize;

/// Scrambles 64 bits (the finaliser of `SplitMix64`, Steele et al. 2014).
pub const fn mix64(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A small seeded generator, the same on all machines. Not for secrets.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The sequence of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        let out = mix64(self.0);
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        out
    }

    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }
}

fn sorted(values: &[f64]) -> Option<Vec<f64>> {
    if values.is_empty() || !values.iter().all(|v| v.is_finite()) {
        return None;
    }
    let mut copy = values.to_vec();
    copy.sort_by(f64::total_cmp);
    Some(copy)
}

/// Quantile `q` (0 to 1) by linear interpolation at (n−1)q (digest §4.2), in the unit of `values`, in any order.
pub fn percentile(values: &[f64], q: f64) -> Option<f64> {
    if !(0.0..=1.0).contains(&q) {
        return None;
    }
    let values = sorted(values)?;
    let rank = (values.len() - 1) as f64 * q;
    let low = values.get(rank.floor() as usize)?;
    let high = values.get(rank.ceil() as usize)?;
    let share = rank - rank.floor();
    // Weights instead of `low + (high − low)·share`: the difference of two finite numbers may overflow.
    Some(if share == 0.0 {
        *low
    } else {
        low * (1.0 - share) + high * share
    })
}

/// Arithmetic mean, in the unit of `values`.
pub fn mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    mean.is_finite().then_some(mean)
}

/// Sample standard deviation (n−1), in the unit of `values`; needs two values.
pub fn std_dev(values: &[f64]) -> Option<f64> {
    let centre = mean(values)?;
    if values.len() < 2 {
        return None;
    }
    let squares: f64 = values.iter().map(|v| (v - centre).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt()).filter(|s| s.is_finite())
}

/// Mean and percentiles of some values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Number of values.
    pub count: usize,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Spread {
    /// Of `values`; `None` if there are none, or one is not finite.
    pub fn of(values: &[f64]) -> Option<Self> {
        Some(Self {
            count: values.len(),
            mean: mean(values)?,
            p50: percentile(values, 0.5)?,
            p90: percentile(values, 0.9)?,
            p99: percentile(values, 0.99)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: Option<f64>, b: f64) -> bool {
        a.is_some_and(|a| (a - b).abs() < 1e-9)
    }

    #[test]
    fn percentiles_interpolate_like_numpy() {
        let v = [4.0, 1.0, 3.0, 2.0];
        assert!(near(percentile(&v, 0.5), 2.5));
        assert!(near(percentile(&v, 0.9), 3.7));
        assert!(near(percentile(&v, 0.0), 1.0));
        assert!(near(percentile(&v, 1.0), 4.0));
        assert!(near(percentile(&[7.0], 0.99), 7.0));
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert!(near(percentile(&hundred, 0.99), 99.01));
    }

    #[test]
    fn nothing_is_nan() {
        assert_eq!(percentile(&[], 0.5), None);
        assert_eq!(percentile(&[f64::NAN], 0.5), None);
        assert_eq!(percentile(&[1.0], f64::NAN), None);
        assert_eq!(mean(&[]), None);
        assert_eq!(mean(&[f64::INFINITY]), None);
        assert_eq!(std_dev(&[1.0]), None);
        assert_eq!(Spread::of(&[1.0, f64::NAN]), None);
    }

    #[test]
    fn the_spread_is_that_of_a_sample() {
        assert!(near(
            std_dev(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]),
            (32.0f64 / 7.0).sqrt()
        ));
    }

    #[test]
    fn generator_matches_the_reference() {
        // First outputs of the reference SplitMix64 for seed 1234567.
        let mut g = SplitMix64::new(1_234_567);
        assert_eq!(g.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(g.next_u64(), 3_203_168_211_198_807_973);
        assert_eq!(g.below(0), 0);
    }
}
