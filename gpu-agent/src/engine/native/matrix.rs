//! Weights times activations.
//!
//! Each output is one chain of fused multiply-adds over the inputs in their order, starting at zero, with the weight expanded to
//! `f32` first. Rows and columns may be computed in any company, on any number of threads and with any vector width: the chain is
//! the same, so the bits are too. Vectors run across outputs, never across inputs, which is what keeps the chain in order.

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

/// One number for each of 16 outputs.
pub(crate) type Lanes = [f32; LANES];

/// A weight matrix of `inputs` × `outputs`, in groups of 16 outputs; the last group is filled up with zeros.
pub(crate) struct Matrix {
    inputs: usize,
    outputs: usize,
    /// `[group][input][output]`
    ints: Vec<[i8; LANES]>,
    /// `[group][block of inputs][output]`
    scales: Vec<Lanes>,
    offsets: Vec<Lanes>,
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
            ints: vec![[0; LANES]; groups * inputs],
            scales: vec![[0.0; LANES]; groups * blocks],
            offsets: vec![[0.0; LANES]; groups * blocks],
        };
        for (at, block) in tensor.kind.blocks(tensor.bytes).enumerate() {
            let (output, place) = (at / blocks, at % blocks);
            let (group, lane) = (output / LANES, output % LANES);
            matrix.scales[group * blocks + place][lane] = block.scale;
            matrix.offsets[group * blocks + place][lane] = block.offset;
            let begin = group * inputs + place * BLOCK;
            for (to, int) in matrix.ints[begin..begin + BLOCK].iter_mut().zip(block.ints) {
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
        for (i, (to, ints)) in into.iter_mut().zip(group.ints).enumerate() {
            let (scale, offset) = (group.scales[i / BLOCK][lane], group.offsets[i / BLOCK][lane]);
            *to = f32::from(ints[lane]).mul_add(scale, offset);
        }
    }

    fn group(&self, at: usize) -> Group<'_> {
        let (inputs, blocks) = (self.inputs, self.inputs / BLOCK);
        Group {
            ints: &self.ints[at * inputs..][..inputs],
            scales: &self.scales[at * blocks..][..blocks],
            offsets: &self.offsets[at * blocks..][..blocks],
        }
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

#[derive(Clone, Copy)]
struct Group<'a> {
    ints: &'a [[i8; LANES]],
    scales: &'a [Lanes],
    offsets: &'a [Lanes],
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
                let mut panel = vec![[0.0; LANES]; inputs];
                let padded = numbers.len() / inputs * TILE;
                for (at, out) in self.out.chunks_exact_mut(padded).enumerate() {
                    expand(self.matrix.group(self.first + at), &mut panel);
                    for (tile, out) in numbers.chunks_exact(inputs).zip(out.chunks_exact_mut(TILE)) {
                        out.copy_from_slice(&tile_by_one(&panel, tile));
                    }
                }
            }
        }
    }
}

/// The weights of one input. Rounded before use, so that it makes no difference whether they are stored in between.
#[inline(always)]
fn weight(ints: &[i8; LANES], scale: &Lanes, offset: &Lanes) -> Lanes {
    let mut out = [0.0; LANES];
    for c in 0..LANES {
        out[c] = f32::from(ints[c]).mul_add(scale[c], offset[c]);
    }
    out
}

#[inline(always)]
fn expand(group: Group<'_>, panel: &mut [Lanes]) {
    let blocks = group.ints.chunks_exact(BLOCK).zip(panel.chunks_exact_mut(BLOCK));
    for ((ints, panel), (scale, offset)) in blocks.zip(group.scales.iter().zip(group.offsets)) {
        for (ints, to) in ints.iter().zip(panel) {
            *to = weight(ints, scale, offset);
        }
    }
}

#[inline(always)]
fn add(sums: &mut Lanes, weights: &Lanes, x: f32) {
    for c in 0..LANES {
        sums[c] = x.mul_add(weights[c], sums[c]);
    }
}

#[inline(always)]
fn tile_by_one(panel: &[Lanes], tile: &[[f32; TILE]]) -> [Lanes; TILE] {
    let mut sums = [[0.0; LANES]; TILE];
    for (weights, x) in panel.iter().zip(tile) {
        for r in 0..TILE {
            add(&mut sums[r], weights, x[r]);
        }
    }
    sums
}

/// One row, two groups: two chains under way hide the time that a fused multiply-add takes.
#[inline(always)]
fn row_by_two(a: Group<'_>, b: Group<'_>, row: &[f32]) -> [Lanes; 2] {
    let (mut left, mut right) = ([0.0; LANES], [0.0; LANES]);
    for (at, x) in row.chunks_exact(BLOCK).enumerate() {
        let (first, second) = (&a.ints[at * BLOCK..][..BLOCK], &b.ints[at * BLOCK..][..BLOCK]);
        for i in 0..BLOCK {
            let one = weight(&first[i], &a.scales[at], &a.offsets[at]);
            let two = weight(&second[i], &b.scales[at], &b.offsets[at]);
            add(&mut left, &one, x[i]);
            add(&mut right, &two, x[i]);
        }
    }
    [left, right]
}
