//! Weights times activations.
//!
//! Each output is one chain of fused multiply-adds over the inputs in their order, starting at zero, with the weight expanded to
//! `f32` first. Rows and columns may be computed in any company, on any number of threads and with any vector width: the chain is
//! the same, so the bits are too. Vectors run across outputs, never across inputs, which is what keeps the chain in order.
#![allow(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernels are compiled for a vector unit as one piece, best from counted loops over arrays"
)]

use super::error::LoadError;
use super::gguf::Tensor;
use super::quant::BLOCK;
use super::threads::Threads;
use pulp::{Arch, NullaryFnOnce};

/// Outputs computed side by side: one AVX-512 register, two of AVX2.
pub(crate) const LANES: usize = 16;
/// Rows computed side by side: as many as keep their sums in the 16 registers of AVX2.
const TILE: usize = 6;
/// Pieces of work per thread: enough that one slow thread does not hold up the others for long.
const PIECES: usize = 4;

/// Most tiles for which expanding the weights again costs less than storing them.
const DIRECT: usize = 3;
/// Blocks of a panel: 16 KiB, half of a first cache.
const PANEL: usize = 8;

/// One number for each of 16 outputs.
pub(crate) type Lanes = [f32; LANES];

/// A weight matrix of `inputs` × `outputs`, in groups of 16 outputs; the last group is filled up with zeros.
pub(crate) struct Matrix {
    inputs: usize,
    outputs: usize,
    /// `[group][block of inputs]`
    blocks: Vec<Weights>,
}

/// 32 inputs of 16 outputs, all in one place: a core reads one stream of memory faster than three.
#[derive(Clone, Copy)]
struct Weights {
    ints: [[i8; LANES]; BLOCK],
    scale: Lanes,
    offset: Lanes,
}

impl Weights {
    const ZERO: Self = Self {
        ints: [[0; LANES]; BLOCK],
        scale: [0.0; LANES],
        offset: [0.0; LANES],
    };
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

    fn padded(&self, inputs: usize) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Tiles { numbers, .. } => numbers.len() / inputs * TILE,
        }
    }

    fn rows(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Tiles { rows, .. } => *rows,
        }
    }
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} × {}", self.inputs, self.outputs)
    }
}

impl Matrix {
    /// A tensor of the shape `[inputs, outputs]`.
    ///
    /// # Errors
    /// [`LoadError::Shape`]
    pub(crate) fn new(name: &str, tensor: &Tensor<'_>, inputs: usize, outputs: usize) -> Result<Self, LoadError> {
        let wanted = vec![inputs as u64, outputs as u64];
        if tensor.shape != wanted || !inputs.is_multiple_of(BLOCK) || !tensor.kind.divides(inputs) {
            return Err(LoadError::Shape {
                name: name.into(),
                found: tensor.shape.clone(),
                wanted,
            });
        }
        let (groups, blocks) = (outputs.div_ceil(LANES), inputs / BLOCK);
        let mut matrix = Self {
            inputs,
            outputs,
            blocks: vec![Weights::ZERO; groups * blocks],
        };
        for (at, block) in tensor.kind.blocks(tensor.bytes).enumerate() {
            let (output, place) = (at / blocks, at % blocks);
            let lane = output % LANES;
            let weights = &mut matrix.blocks[output / LANES * blocks + place];
            weights.scale[lane] = block.scale;
            weights.offset[lane] = block.offset;
            for (to, int) in weights.ints.iter_mut().zip(block.ints) {
                to[lane] = int;
            }
        }
        Ok(matrix)
    }

    /// Outputs of each row.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// The weights of one output (`output < outputs`): a row of an embedding.
    pub(crate) fn weights(&self, output: usize, into: &mut [f32]) {
        let (group, lane) = (self.group(output / LANES), output % LANES);
        for (block, into) in group.iter().zip(into.chunks_mut(BLOCK)) {
            for (to, ints) in into.iter_mut().zip(&block.ints) {
                *to = f32::from(ints[lane]).mul_add(block.scale[lane], block.offset[lane]);
            }
        }
    }

    fn group(&self, at: usize) -> &[Weights] {
        let blocks = self.inputs / BLOCK;
        &self.blocks[at * blocks..][..blocks]
    }

    /// `[row][output]` for all rows.
    pub(crate) fn multiply(&self, rows: &Rows, threads: &Threads) -> Vec<f32> {
        let (padded, groups) = (rows.padded(self.inputs), self.outputs.div_ceil(LANES));
        let mut sums = vec![[0.0; LANES]; groups * padded];
        let piece = if threads.count() == 1 {
            groups
        } else {
            groups.div_ceil(threads.count() * PIECES).max(2)
        };
        let pieces = sums.chunks_mut(piece * padded).enumerate().collect();
        threads.each(pieces, |(at, out): (usize, &mut [Lanes])| {
            let first = at * piece;
            Arch::new().dispatch(Kernel {
                matrix: self,
                first,
                rows,
                out,
            });
        });
        self.unpack(&sums, rows.rows(), padded)
    }

    /// `[group][padded row][lane]` to `[row][output]`.
    fn unpack(&self, sums: &[Lanes], rows: usize, padded: usize) -> Vec<f32> {
        if padded == 1 {
            let mut flat = sums.as_flattened().to_vec();
            flat.truncate(self.outputs);
            return flat;
        }
        let mut out = vec![0.0; rows * self.outputs];
        for (r, row) in out.chunks_exact_mut(self.outputs).enumerate() {
            for (g, lanes) in row.chunks_mut(LANES).enumerate() {
                lanes.copy_from_slice(&sums[g * padded + r][..lanes.len()]);
            }
        }
        out
    }
}

/// Some groups of outputs for all rows. A struct and no closure: only so is it compiled for the vector unit that is there.
struct Kernel<'a> {
    matrix: &'a Matrix,
    first: usize,
    rows: &'a Rows,
    /// `[group][padded row]`
    out: &'a mut [Lanes],
}

impl NullaryFnOnce for Kernel<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let inputs = self.matrix.inputs;
        match self.rows {
            Rows::One(row) => {
                for (at, out) in self.out.chunks_mut(2).enumerate() {
                    let first = self.first + at * 2;
                    // An odd last group is computed twice.
                    let second = first + out.len() - 1;
                    let sums = row_by_two(self.matrix.group(first), self.matrix.group(second), row);
                    out.copy_from_slice(&sums[..out.len()]);
                }
            }
            Rows::Tiles { numbers, .. } => {
                let padded = numbers.len() / inputs * TILE;
                for (at, out) in self.out.chunks_exact_mut(padded).enumerate() {
                    let group = self.matrix.group(self.first + at);
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

/// The weights of one input. Rounded before use, so that it makes no difference whether they are stored in between.
#[inline(always)]
fn weight(block: &Weights, input: usize) -> Lanes {
    let mut out = [0.0; LANES];
    for c in 0..LANES {
        out[c] = f32::from(block.ints[input][c]).mul_add(block.scale[c], block.offset[c]);
    }
    out
}

#[inline(always)]
fn add(sums: &mut Lanes, weights: &Lanes, x: f32) {
    for c in 0..LANES {
        sums[c] = x.mul_add(weights[c], sums[c]);
    }
}

/// One row, two groups: two chains under way hide the time that a fused multiply-add takes.
#[inline(always)]
fn row_by_two(a: &[Weights], b: &[Weights], row: &[f32]) -> [Lanes; 2] {
    let (mut left, mut right) = ([0.0; LANES], [0.0; LANES]);
    for ((a, b), x) in a.iter().zip(b).zip(row.as_chunks::<BLOCK>().0) {
        for i in 0..BLOCK {
            add(&mut left, &weight(a, i), x[i]);
            add(&mut right, &weight(b, i), x[i]);
        }
    }
    [left, right]
}

/// A few rows: the weights are expanded for each tile and never stored.
#[inline(always)]
fn tile_direct(group: &[Weights], tile: &[[f32; TILE]], out: &mut [Lanes; TILE]) {
    let mut sums = [[0.0; LANES]; TILE];
    for (block, tile) in group.iter().zip(tile.as_chunks::<BLOCK>().0) {
        for i in 0..BLOCK {
            let weights = weight(block, i);
            for r in 0..TILE {
                add(&mut sums[r], &weights, tile[i][r]);
            }
        }
    }
    *out = sums;
}

/// Many rows: the weights are expanded once, as many as stay in the first cache; the sums go on from panel to panel.
#[inline(always)]
fn tiles_by_panel(group: &[Weights], numbers: &[[f32; TILE]], out: &mut [Lanes]) {
    let inputs = group.len() * BLOCK;
    let mut panel = [[0.0; LANES]; PANEL * BLOCK];
    for (at, blocks) in group.chunks(PANEL).enumerate() {
        for (block, panel) in blocks.iter().zip(panel.as_chunks_mut::<BLOCK>().0) {
            for i in 0..BLOCK {
                panel[i] = weight(block, i);
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
