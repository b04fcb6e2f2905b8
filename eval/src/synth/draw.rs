//! Random draws by inverted distribution functions: a number between 0 and 1 in, a value out.

use crate::stats::SplitMix64;
use pinion_schemas::Micros;

/// Uniform draws.
#[derive(Clone, Debug)]
pub(super) struct Draw(SplitMix64);

impl Draw {
    pub(super) const fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// Above 0 and below 1.
    pub(super) const fn unit(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// `n` draws, one from each n-th part of 0 to 1, in any order. Their mean hardly varies, so that a short trace is as long
    /// as a long one by session.
    pub(super) fn strata(&mut self, n: usize) -> Vec<f64> {
        let mut draws: Vec<f64> = (0..n).map(|i| (i as f64 + self.unit()) / n as f64).collect();
        for i in (1..n).rev() {
            draws.swap(i, self.0.below(i + 1));
        }
        draws
    }
}

/// Exponential with this mean.
pub(super) fn exponential(mean: f64, u: f64) -> f64 {
    -mean * u.ln()
}

/// 1, 2, … with this mean, above 1: trials until a success.
pub(super) fn geometric(mean: f64, u: f64) -> usize {
    1 + (u.ln() / (1.0 - 1.0 / mean).ln()) as usize
}

/// Log-normal with this median; `sigma` of its logarithm.
pub(super) fn lognormal(median: f64, sigma: f64, u: f64) -> f64 {
    median * (sigma * normal(u)).exp()
}

/// Log-normal with this mean.
pub(super) fn lognormal_of_mean(mean: f64, sigma: f64, u: f64) -> f64 {
    lognormal(mean * (-sigma * sigma / 2.0).exp(), sigma, u)
}

/// The value at `u` of a distribution known by its quantiles (share, value), linear in the logarithm between them.
pub(super) fn by_quantiles(quantiles: &[(f64, f64)], u: f64) -> f64 {
    for pair in quantiles.windows(2) {
        if let [(from, low), (to, high)] = pair
            && u <= *to
        {
            let share = ((u - from) / (to - from)).max(0.0);
            return low * (high / low).powf(share);
        }
    }
    quantiles.last().map_or(0.0, |(_, value)| *value)
}

/// Quantile of the standard normal distribution, by P. J. Acklam's rational approximation (relative error under 1.2e-9).
fn normal(u: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 6] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
        1.0,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 5] = [
        7.784_695_709_041_462e-3,
        3.224_671_290_700_398e-1,
        2.445_134_137_142_996,
        3.754_408_661_907_416,
        1.0,
    ];
    const TAIL: f64 = 0.024_25;
    let polynomial = |coefficients: &[f64], x: f64| coefficients.iter().fold(0.0, |sum, c| sum * x + c);
    if u > 1.0 - TAIL {
        return -normal(1.0 - u);
    }
    if u < TAIL {
        let q = (-2.0 * u.ln()).sqrt();
        return polynomial(&C, q) / polynomial(&D, q);
    }
    let q = u - 0.5;
    q * polynomial(&A, q * q) / polynomial(&B, q * q)
}

/// A whole number of tokens, at least 1.
pub(super) fn tokens(value: f64) -> u32 {
    (value.round() as u32).max(1)
}

/// Seconds as a time span.
pub(super) fn seconds(value: f64) -> Micros {
    Micros((value * 1e6).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_normal_quantile_is_that_of_the_tables() {
        for (u, z) in [
            (0.5, 0.0),
            (0.9, 1.281_551_566),
            (0.99, 2.326_347_874),
            (0.001, -3.090_232_306),
        ] {
            assert!((normal(u) - z).abs() < 1e-7, "{u}");
        }
    }

    #[test]
    fn means_are_as_asked_for() {
        let mut draw = Draw::new(1);
        let draws = draw.strata(100_000);
        let mean = |of: &dyn Fn(f64) -> f64| draws.iter().map(|u| of(*u)).sum::<f64>() / draws.len() as f64;
        assert!((mean(&|u| u) - 0.5).abs() < 1e-5);
        assert!((mean(&|u| exponential(7.0, u)) - 7.0).abs() < 0.01);
        assert!((mean(&|u| geometric(8.0, u) as f64) - 8.0).abs() < 0.01);
        assert!((mean(&|u| lognormal_of_mean(563.0, 1.485, u)) - 563.0).abs() < 6.0);
        let ladder = [(0.0, 10.0), (0.5, 20.0), (1.0, 80.0)];
        assert!((by_quantiles(&ladder, 0.25) - 200f64.sqrt()).abs() < 1e-9);
        assert!((by_quantiles(&ladder, 0.75) - 40.0).abs() < 1e-9);
    }
}
