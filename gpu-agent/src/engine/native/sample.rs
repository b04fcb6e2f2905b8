//! How the next token is chosen from the logits.

use super::math::exp;
use pinion_schemas::Sampling;

/// A token this much less likely than the likeliest, as a logarithm, is in no nucleus: a million such tokens together have less
/// than the thousandth that the largest nucleus below 1 leaves out.
const NEGLIGIBLE: f32 = 21.0;

/// The next token, which will be at `position` of the context. The draw depends on the seed and the position alone, so a turn
/// that goes on elsewhere goes on alike.
pub(crate) fn choose(logits: &[f32], sampling: &Sampling, position: u64) -> u32 {
    let (best, largest) = likeliest(logits);
    if sampling.temperature_milli == 0 {
        return best;
    }
    let inverse = 1_000.0 / sampling.temperature_milli as f32;
    let weight = |logit: &f32| f64::from(exp((logit - largest) * inverse));
    let draw = uniform(sampling.seed, position);
    if matches!(sampling.top_p_milli, 1..1_000) {
        let kept = |(_, logit): &(u32, &f32)| (**logit - largest) * inverse > -NEGLIGIBLE;
        let mut likely: Vec<_> = (0..).zip(logits).filter(kept).map(|(id, l)| (id, weight(l))).collect();
        likely.sort_by(|a, b| b.1.total_cmp(&a.1));
        let whole: f64 = logits.iter().map(weight).sum();
        let wanted = whole * f64::from(sampling.top_p_milli) / 1_000.0;
        let mut mass = 0.0;
        let more = |(_, weight): &&(u32, f64)| {
            let go_on = mass < wanted;
            mass += weight;
            go_on
        };
        let nucleus = likely.iter().take_while(more).count();
        likely.truncate(nucleus);
        return pick(likely.into_iter(), draw).unwrap_or(best);
    }
    pick((0..).zip(logits.iter().map(weight)), draw).unwrap_or(best)
}

/// The largest logit and the lowest token that has it. What is no number is passed over.
fn likeliest(logits: &[f32]) -> (u32, f32) {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, logit) in (0..).zip(logits) {
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    best
}

/// The token at which the sum of the weights passes `draw` of their total.
fn pick(weights: impl Iterator<Item = (u32, f64)> + Clone, draw: f64) -> Option<u32> {
    let mut left = weights.clone().map(|(_, w)| w).sum::<f64>() * draw;
    let mut last = None;
    for (id, weight) in weights {
        last = Some(id);
        left -= weight;
        if left < 0.0 {
            break;
        }
    }
    last
}

/// The finalizer of `SplitMix64`: a bijection over 64 bits.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Number `position` of the sequence of `seed`, from 0 to below 1.
fn uniform(seed: u64, position: u64) -> f64 {
    let place = position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mix(mix(seed).wrapping_add(place)) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature_milli: u32, top_p_milli: u32, seed: u64) -> Sampling {
        Sampling {
            temperature_milli,
            top_p_milli,
            seed,
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_likeliest() {
        assert_eq!(choose(&[1.0, f32::NAN, 3.0, 3.0], &Sampling::GREEDY, 5), 2);
        assert_eq!(choose(&[f32::NAN; 3], &sampling(1_000, 500, 1), 5), 0);
    }

    #[test]
    fn draws_have_the_probabilities_of_the_softmax() {
        let logits = [0.0, 1.0_f32, 2.0];
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(*l / 0.5).exp()).collect();
        let mut counts = [0_u32; 3];
        for position in 0..20_000 {
            counts[choose(&logits, &sampling(500, 1_000, 9), position) as usize] += 1;
        }
        for (count, weight) in counts.iter().zip(&weights) {
            let wanted = weight / weights.iter().sum::<f64>();
            assert!((f64::from(*count) / 20_000.0 - wanted).abs() < 0.01, "{counts:?}");
        }
    }

    #[test]
    fn a_nucleus_leaves_out_the_unlikely() {
        let logits = [0.0, 1.0, 2.0, -90.0];
        let drawn = |top_p, seed| choose(&logits, &sampling(1_000, top_p, seed), 3);
        assert!((0..200).all(|seed| drawn(600, seed) == 2), "0.66 is enough");
        assert!((0..200).all(|seed| drawn(700, seed) != 0), "0.91 is enough");
        assert!((0..200).any(|seed| drawn(1_000, seed) == 0));
        assert_eq!(drawn(900, 7), drawn(900, 7));
    }
}
