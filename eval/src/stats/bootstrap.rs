//! Bootstrap intervals and p-values for values that come in clusters.
//!
//! Turns of one session are alike: they share a context, a worker, a bad moment. An interval that drew single turns would
//! be too narrow, so whole sessions are drawn, with replacement (cluster bootstrap; Davison and Hinkley 1997, §3.8). For
//! sessions of one turn it is the plain bootstrap of the protocol (digest §4.1, M1).

use super::{SplitMix64, mix64};
use rayon::prelude::*;
use std::collections::BTreeSet;

/// Least resamples of a result (digest §4.1, M1).
pub const MIN_RESAMPLES: usize = 5_000;
/// Least clusters that the values of a sample must come from: with fewer, draws hardly differ, and an interval would claim
/// what nobody knows.
pub const MIN_CLUSTERS: usize = 5;
/// Figures that every sample is summed up by: mean, p50, p90, p99.
pub const FIGURES: [&str; 4] = ["mean", "p50", "p90", "p99"];
/// The quantiles behind the mean in [`FIGURES`].
const QUANTILES: [f64; 3] = [0.5, 0.9, 0.99];

/// One number for each of [`FIGURES`].
pub type Figures = [f64; FIGURES.len()];

/// A 95 % confidence interval, in the unit of the values.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Interval {
    /// 2.5 % end.
    pub low: f64,
    /// 97.5 % end.
    pub high: f64,
}

/// Values, each of a cluster. Sorted once, so that a resample is one pass.
#[derive(Clone, Debug)]
pub struct Sample {
    sorted: Vec<(f64, u32)>,
    /// Different clusters among them.
    clusters: usize,
}

impl Sample {
    /// Pairs of value and cluster; `None` if there are none, or a value is not finite.
    pub fn new(values: impl IntoIterator<Item = (f64, u32)>) -> Option<Self> {
        let mut sorted: Vec<(f64, u32)> = values.into_iter().collect();
        if sorted.is_empty() || sorted.iter().any(|(value, _)| !value.is_finite()) {
            return None;
        }
        sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
        let clusters: BTreeSet<u32> = sorted.iter().map(|(_, cluster)| *cluster).collect();
        Some(Self {
            sorted,
            clusters: clusters.len(),
        })
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.sorted.len()
    }

    /// Never: see [`Self::new`].
    pub fn is_empty(&self) -> bool {
        self.sorted.is_empty()
    }

    /// The figures of the sample itself.
    pub fn figures(&self) -> Figures {
        let clusters = self.sorted.iter().map(|(_, cluster)| cluster + 1).max().unwrap_or(0);
        self.weighted(&vec![1; clusters as usize])
    }

    /// The figures of the sample in which each value occurs as often as `weights` says of its cluster; quantiles by linear
    /// interpolation at (n−1)q. NaN if nothing occurs.
    fn weighted(&self, weights: &[u32]) -> Figures {
        let mut upto = Vec::with_capacity(self.sorted.len());
        let (mut count, mut sum) = (0u64, 0.0);
        for (value, cluster) in &self.sorted {
            let weight = weights.get(*cluster as usize).copied().unwrap_or(0);
            count += u64::from(weight);
            sum += value * f64::from(weight);
            upto.push(count);
        }
        let value_at = |rank: u64| {
            let place = upto.partition_point(|upto| *upto <= rank);
            self.sorted.get(place).map_or(f64::NAN, |(value, _)| *value)
        };
        let last = count.saturating_sub(1);
        let [p50, p90, p99] = QUANTILES.map(|q| {
            let rank = last as f64 * q;
            let (low, share) = (value_at(rank.floor() as u64), rank.fract());
            if share > 0.0 {
                low * (1.0 - share) + value_at(rank.ceil() as u64) * share
            } else {
                low
            }
        });
        [sum / count as f64, p50, p90, p99]
    }
}

/// What `resamples` draws of clusters came to.
#[derive(Clone, Debug)]
pub struct Draws {
    /// One a resample; none if the clusters are too few.
    figures: Vec<Figures>,
}

impl Draws {
    /// Draws as many of `clusters` clusters as there are, again and again, and keeps the figures of `sample`. The same
    /// seed gives the same draws on any number of threads.
    pub fn of(sample: &Sample, clusters: u32, resamples: usize, seed: u64) -> Self {
        Self::each(sample.clusters, clusters, resamples, seed, |weights| {
            sample.weighted(weights)
        })
    }

    /// The same for the difference `candidate` − `baseline`: both get the same clusters, so what they have in common
    /// cancels out.
    pub fn of_difference(candidate: &Sample, baseline: &Sample, clusters: u32, resamples: usize, seed: u64) -> Self {
        let present = candidate.clusters.min(baseline.clusters);
        Self::each(present, clusters, resamples, seed, |weights| {
            difference(candidate.weighted(weights), baseline.weighted(weights))
        })
    }

    fn each(
        present: usize,
        clusters: u32,
        resamples: usize,
        seed: u64,
        figures: impl Fn(&[u32]) -> Figures + Sync,
    ) -> Self {
        let draw = |number: usize| {
            let mut generator = SplitMix64::new(mix64(seed) ^ mix64(number as u64));
            let mut weights = vec![0u32; clusters as usize];
            for _ in 0..clusters {
                if let Some(weight) = weights.get_mut(generator.below(clusters as usize)) {
                    *weight += 1;
                }
            }
            figures(&weights)
        };
        let resamples = if present < MIN_CLUSTERS { 0 } else { resamples };
        // A draw of a stratum may contain none of its values; it says nothing.
        let draws = (0..resamples).into_par_iter().map(draw);
        let figures = draws.filter(|figures| figures.iter().all(|f| f.is_finite())).collect();
        Self { figures }
    }

    fn figure(&self, place: usize) -> Vec<f64> {
        self.figures
            .iter()
            .filter_map(|figures| figures.get(place).copied())
            .collect()
    }

    /// The 95 % interval of figure `place`: sorted\[int(0.025(B−1))\] and sorted\[int(0.975(B−1))\] (digest §4.2). `None`
    /// if the values come from fewer than [`MIN_CLUSTERS`] clusters.
    pub fn interval(&self, place: usize) -> Option<Interval> {
        let mut values = self.figure(place);
        if values.len() < 2 {
            return None;
        }
        values.sort_by(f64::total_cmp);
        let end = |q: f64| values.get(((values.len() - 1) as f64 * q) as usize).copied();
        Some(Interval {
            low: end(0.025)?,
            high: end(0.975)?,
        })
    }

    /// Two-sided p-value of "figure `place` is 0 in truth", given that it was observed as `observed`: how often draws
    /// moved to a centre of 0 are as far out. Never below 1/(B+1). `None` where there is no interval.
    pub fn p_value(&self, place: usize, observed: f64) -> Option<f64> {
        let values = self.figure(place);
        if values.is_empty() {
            return None;
        }
        let beyond = values
            .iter()
            .filter(|v| (*v - observed).abs() >= observed.abs())
            .count();
        Some((beyond + 1) as f64 / (values.len() + 1) as f64)
    }
}

/// `a` − `b`, figure by figure.
pub fn difference(a: Figures, b: Figures) -> Figures {
    std::array::from_fn(|i| a.get(i).zip(b.get(i)).map_or(f64::NAN, |(a, b)| a - b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::{mean, percentile};

    /// Uniform on (0, 1).
    fn unit(generator: &mut SplitMix64) -> f64 {
        ((generator.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    fn single(values: &[f64]) -> Sample {
        Sample::new(values.iter().copied().zip(0..)).unwrap()
    }

    #[test]
    fn figures_are_those_of_the_plain_definitions() {
        let values = [4.0, 1.0, 3.0, 2.0, 9.0, 0.5];
        let plain = |v: &[f64]| {
            let p = |q| percentile(v, q).unwrap();
            [mean(v).unwrap(), p(0.5), p(0.9), p(0.99)]
        };
        let sample = single(&values);
        let near = |a: Figures, b: Figures| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(near(sample.figures(), plain(&values)));
        // Clusters 0, 4 and 5 thrice, none and twice; the others once.
        let written_out = [4.0, 4.0, 4.0, 1.0, 3.0, 2.0, 0.5, 0.5];
        assert!(near(sample.weighted(&[3, 1, 1, 1, 0, 2]), plain(&written_out)));
        assert!(Sample::new([]).is_none() && Sample::new([(f64::NAN, 0)]).is_none());
    }

    #[test]
    fn the_interval_of_a_mean_is_the_textbook_one() {
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        let draws = Draws::of(&single(&hundred), 100, MIN_RESAMPLES, 20_260_512);
        let ci = draws.interval(0).unwrap();
        // Standard error of the mean: 28.87 / 10; the 95 % ends lie near 50.5 ± 5.66.
        assert!((ci.low - 44.84).abs() < 0.5 && (ci.high - 56.16).abs() < 0.5, "{ci:?}");
        let again = Draws::of(&single(&hundred), 100, MIN_RESAMPLES, 20_260_512);
        assert_eq!(again.interval(0), Some(ci));
        // Of the median of a uniform distribution: 50.5 ± 1.96 · 100 / (2 √100).
        let ci = draws.interval(1).unwrap();
        assert!((ci.low - 40.7).abs() < 2.5 && (ci.high - 60.3).abs() < 2.5, "{ci:?}");
    }

    /// 30 clusters of 40 equal values say as much as 30 values, not as 1,200.
    #[test]
    fn equal_values_of_a_cluster_count_once() {
        let mut generator = SplitMix64::new(5);
        let of_cluster: Vec<f64> = (0..30).map(|_| unit(&mut generator)).collect();
        let many = of_cluster.iter().zip(0u32..).flat_map(|(v, c)| vec![(*v, c); 40]);
        let width = |ci: Interval| ci.high - ci.low;
        let clustered = Draws::of(&Sample::new(many).unwrap(), 30, MIN_RESAMPLES, 1).interval(0);
        let once = Draws::of(&single(&of_cluster), 30, MIN_RESAMPLES, 1).interval(0);
        assert!((width(clustered.unwrap()) - width(once.unwrap())).abs() < 1e-9);
        let few = Sample::new((0..400).map(|i| (f64::from(i), i % 4))).unwrap();
        assert_eq!(Draws::of(&few, 30, MIN_RESAMPLES, 1).interval(0), None);
    }

    /// 95 of 100 intervals contain the truth, and 5 of 100 p-values without an effect are below 0.05.
    #[test]
    fn intervals_and_p_values_keep_their_word() {
        let (mut covered, mut small, mut large) = (0, 0, 0);
        for seed in 0..200 {
            let mut generator = SplitMix64::new(seed);
            let mut exponential =
                |shift: f64| -> Vec<f64> { (0..80).map(|_| shift - unit(&mut generator).ln()).collect() };
            let (base, same, slower) = (exponential(0.0), exponential(0.0), exponential(1.0));
            let ci = Draws::of(&single(&base), 80, 400, seed).interval(0).unwrap();
            covered += usize::from(ci.low <= 1.0 && 1.0 <= ci.high);
            let p = |candidate: &[f64]| {
                let (candidate, base) = (single(candidate), single(&base));
                let seen = difference(candidate.figures(), base.figures());
                Draws::of_difference(&candidate, &base, 80, 400, seed)
                    .p_value(0, seen[0])
                    .unwrap()
            };
            small += usize::from(p(&same) < 0.05);
            large += usize::from(p(&slower) < 0.05);
        }
        assert!((180..=198).contains(&covered), "{covered} of 200");
        assert!((3..=22).contains(&small), "{small} of 200");
        assert_eq!(large, 200);
    }
}
