//! The inner loops of [`super::matrix`]: expand weights, multiply, add, always in the order of the inputs.
#![allow(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernels are compiled for a vector unit as one piece, best from counted loops over arrays"
)]

use super::quant::{BLOCK, Block};
use pulp::NullaryFnOnce;

/// Outputs computed side by side: one AVX-512 register, two of AVX2.
pub(crate) const LANES: usize = 16;
/// Rows computed side by side: as many as keep their sums in the 16 registers of AVX2.
const TILE: usize = 6;
/// Most tiles for which expanding the weights again costs less than storing them.
const DIRECT: usize = 3;
/// Blocks of a panel: 16 KiB, half of a first cache.
const PANEL: usize = 8;

/// One number for each of 16 outputs.
pub(crate) type Lanes = [f32; LANES];

/// 32 inputs of 16 outputs, all in one place: a core reads one stream of memory faster than three.
pub(crate) trait Weights: Copy + Send + Sync {
    /// All zero.
    const ZERO: Self;
    /// Sets what one output has.
    fn put(&mut self, lane: usize, block: &Block);
    /// The weights of one input. Rounded before use, so that it makes no difference whether they are stored in between.
    fn weights(&self, input: usize) -> Lanes;
}

/// A byte for each weight.
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    ints: [[i8; LANES]; BLOCK],
    scale: Lanes,
    offset: Lanes,
}

impl Weights for Bytes {
    const ZERO: Self = Self {
        ints: [[0; LANES]; BLOCK],
        scale: [0.0; LANES],
        offset: [0.0; LANES],
    };

    fn put(&mut self, lane: usize, block: &Block) {
        (self.scale[lane], self.offset[lane]) = (block.scale, block.offset);
        for (to, int) in self.ints.iter_mut().zip(block.ints) {
            to[lane] = int;
        }
    }

    #[inline(always)]
    fn weights(&self, input: usize) -> Lanes {
        let mut out = [0.0; LANES];
        for c in 0..LANES {
            out[c] = f32::from(self.ints[input][c]).mul_add(self.scale[c], self.offset[c]);
        }
        out
    }
}

/// Four bits for each weight, from 0 to 15: half the memory to read. The second 16 inputs are in the high halves.
#[derive(Clone, Copy)]
pub(crate) struct Nibbles {
    ints: [[u8; LANES]; BLOCK / 2],
    scale: Lanes,
    offset: Lanes,
}

impl Weights for Nibbles {
    const ZERO: Self = Self {
        ints: [[0; LANES]; BLOCK / 2],
        scale: [0.0; LANES],
        offset: [0.0; LANES],
    };

    fn put(&mut self, lane: usize, block: &Block) {
        (self.scale[lane], self.offset[lane]) = (block.scale, block.offset);
        for (i, to) in self.ints.iter_mut().enumerate() {
            let (low, high) = (block.ints[i].cast_unsigned(), block.ints[i + BLOCK / 2].cast_unsigned());
            to[lane] = low & 15 | high << 4;
        }
    }

    #[inline(always)]
    fn weights(&self, input: usize) -> Lanes {
        let (ints, shift) = (&self.ints[input % (BLOCK / 2)], input / (BLOCK / 2) * 4);
        let mut out = [0.0; LANES];
        for c in 0..LANES {
            let int = (i32::from(ints[c]) >> shift) & 15;
            out[c] = (int as f32).mul_add(self.scale[c], self.offset[c]);
        }
        out
    }
}

/// Activation rows as the kernels read them.
#[derive(Debug)]
pub(crate) enum Rows {
    /// One row.
    One(Vec<f32>),
    /// `[tile][input][row]`; the last tile is filled up with zeros.
    Tiles {
        /// Rows without the filling.
        rows: usize,
        /// The numbers.
        numbers: Vec<[f32; TILE]>,
    },
}

impl Rows {
    /// Packs `[row][input]`.
    pub(crate) fn pack(numbers: &[f32], inputs: usize) -> Self {
        let rows = numbers.len() / inputs;
        if rows == 1 {
            return Self::One(numbers.to_vec());
        }
        let mut packed = vec![[0.0; TILE]; rows.div_ceil(TILE) * inputs];
        for (tile, part) in packed.chunks_exact_mut(inputs).zip(numbers.chunks(inputs * TILE)) {
            for (r, row) in part.chunks_exact(inputs).enumerate() {
                for (to, from) in tile.iter_mut().zip(row) {
                    to[r] = *from;
                }
            }
        }
        Self::Tiles { rows, numbers: packed }
    }

    pub(crate) fn padded(&self, inputs: usize) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Tiles { numbers, .. } => numbers.len() / inputs * TILE,
        }
    }

    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Tiles { rows, .. } => *rows,
        }
    }
}

/// Some groups of outputs for all rows. A struct and no closure: only so is it compiled for the vector unit that is there.
pub(crate) struct Kernel<'a, W> {
    /// `[group][block of inputs]`
    pub(crate) blocks: &'a [W],
    pub(crate) inputs: usize,
    pub(crate) rows: &'a Rows,
    /// `[group][padded row]`
    pub(crate) out: &'a mut [Lanes],
}

impl<W: Weights> NullaryFnOnce for Kernel<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let inputs = self.inputs;
        let group = |at: usize| &self.blocks[at * (inputs / BLOCK)..][..inputs / BLOCK];
        match self.rows {
            Rows::One(row) => {
                for (at, out) in self.out.chunks_mut(2).enumerate() {
                    let first = at * 2;
                    // An odd last group is computed twice.
                    let second = first + out.len() - 1;
                    let sums = row_by_two(group(first), group(second), row);
                    out.copy_from_slice(&sums[..out.len()]);
                }
            }
            Rows::Tiles { numbers, .. } => {
                let padded = numbers.len() / inputs * TILE;
                for (at, out) in self.out.chunks_exact_mut(padded).enumerate() {
                    let group = group(at);
                    if padded <= DIRECT * TILE {
                        for (tile, out) in numbers.chunks_exact(inputs).zip(out.as_chunks_mut::<TILE>().0) {
                            tile_direct(group, tile, out);
                        }
                    } else {
                        tiles_by_panel(group, numbers, out);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn add(sums: &mut Lanes, weights: &Lanes, x: f32) {
    for c in 0..LANES {
        sums[c] = x.mul_add(weights[c], sums[c]);
    }
}

/// One row, two groups: two chains under way hide the time that a fused multiply-add takes.
#[inline(always)]
fn row_by_two<W: Weights>(a: &[W], b: &[W], row: &[f32]) -> [Lanes; 2] {
    let (mut left, mut right) = ([0.0; LANES], [0.0; LANES]);
    for ((a, b), x) in a.iter().zip(b).zip(row.as_chunks::<BLOCK>().0) {
        for i in 0..BLOCK {
            add(&mut left, &a.weights(i), x[i]);
            add(&mut right, &b.weights(i), x[i]);
        }
    }
    [left, right]
}

/// A few rows: the weights are expanded for each tile and never stored.
#[inline(always)]
fn tile_direct<W: Weights>(group: &[W], tile: &[[f32; TILE]], out: &mut [Lanes; TILE]) {
    let mut sums = [[0.0; LANES]; TILE];
    for (block, tile) in group.iter().zip(tile.as_chunks::<BLOCK>().0) {
        for i in 0..BLOCK {
            let weights = block.weights(i);
            for r in 0..TILE {
                add(&mut sums[r], &weights, tile[i][r]);
            }
        }
    }
    *out = sums;
}

/// Many rows: the weights are expanded once, as many as stay in the first cache; the sums go on from panel to panel.
#[inline(always)]
fn tiles_by_panel<W: Weights>(group: &[W], numbers: &[[f32; TILE]], out: &mut [Lanes]) {
    let inputs = group.len() * BLOCK;
    let mut panel = [[0.0; LANES]; PANEL * BLOCK];
    for (at, blocks) in group.chunks(PANEL).enumerate() {
        for (block, panel) in blocks.iter().zip(panel.as_chunks_mut::<BLOCK>().0) {
            for i in 0..BLOCK {
                panel[i] = block.weights(i);
            }
        }
        let panel = &panel[..blocks.len() * BLOCK];
        for (tile, out) in numbers.chunks_exact(inputs).zip(out.as_chunks_mut::<TILE>().0) {
            tile_onto(panel, &tile[at * PANEL * BLOCK..][..panel.len()], out);
        }
    }
}

#[inline(always)]
fn tile_onto(panel: &[Lanes], tile: &[[f32; TILE]], out: &mut [Lanes; TILE]) {
    let mut sums = *out;
    for (weights, x) in panel.iter().zip(tile) {
        for r in 0..TILE {
            add(&mut sums[r], weights, x[r]);
        }
    }
    *out = sums;
}
