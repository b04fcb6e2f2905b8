//! Statistics of the evaluation protocol (digest §4.1-4.2). No result is ever NaN: a figure that does not exist is
//! `None`, and so is every figure of values that are not all finite.

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

/// How a request ended, as far as statistics care.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// An error was reported.
    pub error: bool,
    /// No error, but the answer was aborted or refused (finish reason abort or bad request).
    pub aborted: bool,
    /// Output tokens asked for.
    pub requested_tokens: u32,
    /// Output tokens received.
    pub actual_tokens: u32,
}

impl Outcome {
    /// The one failure rule of all tables (digest §1.13): error or abort. Latencies are taken over the other rows only.
    pub const fn failed(&self) -> bool {
        self.error || self.aborted
    }

    /// More than one token asked for and under half of them received (digest §1.13).
    pub const fn truncated(&self) -> bool {
        self.requested_tokens > 1 && (self.actual_tokens as u64) * 2 < self.requested_tokens as u64
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

/// A confidence interval, in the unit of the values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// 2.5 % end.
    pub low: f64,
    /// 97.5 % end.
    pub high: f64,
}

/// 95 % bootstrap interval of `statistic`: `resamples` draws of n with replacement; the ends are
/// sorted\[int(0.025(B−1))\] and sorted\[int(0.975(B−1))\] (digest §4.2, M1). Needs two values and one resample.
///
/// Give it the pooled values of all runs, or, for a pair of systems, the differences.
pub fn bootstrap_ci(
    values: &[f64],
    statistic: impl Fn(&[f64]) -> Option<f64>,
    resamples: usize,
    seed: u64,
) -> Option<Interval> {
    if values.len() < 2 || resamples == 0 {
        return None;
    }
    let mut generator = SplitMix64::new(seed);
    let mut draw = Vec::with_capacity(values.len());
    let mut results = Vec::with_capacity(resamples);
    for _ in 0..resamples {
        draw.clear();
        draw.extend((0..values.len()).filter_map(|_| values.get(generator.below(values.len()))));
        results.push(statistic(&draw)?);
    }
    let results = sorted(&results)?;
    let end = |q: f64| results.get(((results.len() - 1) as f64 * q) as usize).copied();
    Some(Interval {
        low: end(0.025)?,
        high: end(0.975)?,
    })
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
        assert_eq!(bootstrap_ci(&[1.0], mean, 100, 1), None);
        assert_eq!(bootstrap_ci(&[1.0, f64::NAN], mean, 100, 1), None);
    }

    #[test]
    fn spread_and_interval() {
        assert!(near(
            std_dev(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]),
            (32.0f64 / 7.0).sqrt()
        ));
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        let ci = bootstrap_ci(&hundred, mean, 2000, 20_260_512).unwrap();
        // Standard error of the mean: 28.87 / 10; the 95 % ends lie near 50.5 ± 5.66.
        assert!((ci.low - 44.84).abs() < 0.8 && (ci.high - 56.16).abs() < 0.8, "{ci:?}");
        assert_eq!(bootstrap_ci(&hundred, mean, 2000, 20_260_512), Some(ci));
    }

    #[test]
    fn generator_matches_the_reference() {
        // First outputs of the reference SplitMix64 for seed 1234567.
        let mut g = SplitMix64::new(1_234_567);
        assert_eq!(g.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(g.next_u64(), 3_203_168_211_198_807_973);
        assert_eq!(g.below(0), 0);
    }

    #[test]
    fn failure_rule() {
        assert!(!Outcome::default().failed());
        assert!(
            Outcome {
                aborted: true,
                ..Outcome::default()
            }
            .failed()
        );
        assert!(
            Outcome {
                requested_tokens: 10,
                actual_tokens: 4,
                ..Outcome::default()
            }
            .truncated()
        );
        assert!(
            !Outcome {
                requested_tokens: 10,
                actual_tokens: 5,
                ..Outcome::default()
            }
            .truncated()
        );
    }
}
