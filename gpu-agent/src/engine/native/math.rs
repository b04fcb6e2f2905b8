//! The small functions of a Llama layer. All sums are in a fixed order and nothing depends on the vector unit, so that the bits
//! are the same on every machine (the angles alone come from the system, in double precision). Those that are `inline(always)` belong into a kernel, which compiles them for its vector unit.
#![allow(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernels are compiled for a vector unit as one piece, best from counted loops over arrays"
)]

use super::kernel::{LANES, Lanes};
use pulp::{Arch, NullaryFnOnce};
use std::f32::consts::LOG2_E;

/// Adding it rounds a number of at most 2²² to a whole one, which is then in the lowest bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts, the first of which has few bits.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Polynomial of `(eˣ - 1 - x) / x²` between -ln 2 / 2 and ln 2 / 2 (Cephes), highest power first.
const EXP: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    0.5,
];

/// eˣ, within two units in the last place; -87 and less are taken as -87, 88 and more as 88.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    let whole = x.mul_add(LOG2_E, ROUND);
    let n = whole - ROUND;
    let rest = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut sum = EXP[0];
    for factor in &EXP[1..] {
        sum = sum.mul_add(rest, *factor);
    }
    let small = (sum * rest).mul_add(rest, rest) + 1.0;
    let power = whole.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    small * f32::from_bits(power << 23)
}

/// The sum of 16 numbers, in pairs.
#[inline(always)]
pub(crate) fn total(mut lanes: Lanes) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The products of two rows, whose length is a multiple of 16, in 16 sums.
#[inline(always)]
pub(crate) fn multiply(a: &[f32], b: &[f32]) -> Lanes {
    let mut sums = [0.0; LANES];
    for (a, b) in a.as_chunks::<LANES>().0.iter().zip(b.as_chunks::<LANES>().0) {
        for i in 0..LANES {
            sums[i] = a[i].mul_add(b[i], sums[i]);
        }
    }
    sums
}

struct Norm<'a> {
    rows: &'a [f32],
    weights: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl NullaryFnOnce for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let width = self.weights.len();
        for (row, out) in self.rows.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let factor = 1.0 / (total(multiply(row, row)) / width as f32 + self.epsilon).sqrt();
            for i in 0..width {
                out[i] = row[i] * factor * self.weights[i];
            }
        }
    }
}

/// Root mean square norm of each row. `weights` has a multiple of 16 numbers.
pub(crate) fn norm(rows: &[f32], weights: &[f32], epsilon: f32) -> Vec<f32> {
    let mut out = vec![0.0; rows.len()];
    let out_rows = &mut out;
    Arch::new().dispatch(Norm {
        rows,
        weights,
        epsilon,
        out: out_rows,
    });
    out
}

struct Swish<'a> {
    gates: &'a mut [f32],
    ups: &'a [f32],
}

impl NullaryFnOnce for Swish<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (gate, up) in self.gates.iter_mut().zip(self.ups) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}

/// `SwiGLU`: `gate · sigmoid(gate) · up`, into the gates.
pub(crate) fn swish(gates: &mut [f32], ups: &[f32]) {
    Arch::new().dispatch(Swish { gates, ups });
}

/// Adds `more` to `rows`.
pub(crate) fn accumulate(rows: &mut [f32], more: &[f32]) {
    for (row, more) in rows.iter_mut().zip(more) {
        *row += more;
    }
}

/// Angles of the rotary embedding for one position: cosine and sine of each pair.
pub(crate) fn angles(position: usize, frequencies: &[f64]) -> Vec<(f32, f32)> {
    let angle = |frequency: &f64| {
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        (cos as f32, sin as f32)
    };
    frequencies.iter().map(angle).collect()
}

/// Turns the first pairs of neighbours of each head: the files for this architecture have them side by side.
pub(crate) fn rotate(row: &mut [f32], head_dim: usize, angles: &[(f32, f32)]) {
    for head in row.chunks_exact_mut(head_dim) {
        for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(angles) {
            let (a, b) = (pair[0], pair[1]);
            pair[0] = a * cos - b * sin;
            pair[1] = a * sin + b * cos;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_the_exponential() {
        for i in -870..880 {
            let x = i as f32 * 0.1;
            let want = f64::from(x).exp();
            let wrong = (f64::from(exp(x)) - want).abs() / want;
            assert!(wrong < 2.5e-7, "exp({x}) is {} and not {want}", exp(x));
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
    }

    #[test]
    fn sums_are_sums() {
        let a: Vec<f32> = (0..48).map(|i| i as f32).collect();
        assert!((total(multiply(&a, &a)) - 35_720.0).abs() < 1e-9);
        let rows = norm(&[3.0; 32], &[2.0; 16], 0.0);
        assert!(rows.iter().all(|n| (n - 2.0).abs() < 1e-6));
    }
}
