//! Weights times activations.
//!
//! Each output is one chain of fused multiply-adds over the inputs in their order, starting at zero, with the weight expanded to
//! `f32` first. Rows and columns may be computed in any company, on any number of threads and with any vector width: the chain is
//! the same, so the bits are too. Vectors run across outputs, never across inputs, which is what keeps the chain in order.

use super::error::LoadError;
use super::gguf::Tensor;
use super::kernel::{Bytes, Kernel, LANES, Lanes, Nibbles, Rows, Weights};
use super::quant::BLOCK;
use super::threads::Threads;
use pulp::Arch;

/// Pieces of work per thread: enough that one slow thread does not hold up the others for long.
const PIECES: usize = 4;

/// A weight matrix of `inputs` × `outputs`, in groups of 16 outputs; the last group is filled up with zeros.
pub(crate) struct Matrix {
    inputs: usize,
    outputs: usize,
    blocks: Blocks,
}

/// `[group][block of inputs]`
enum Blocks {
    Bytes(Vec<Bytes>),
    Nibbles(Vec<Nibbles>),
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
        let blocks = if tensor.kind.is_four_bits() {
            Blocks::Nibbles(arrange(tensor, inputs / BLOCK, outputs))
        } else {
            Blocks::Bytes(arrange(tensor, inputs / BLOCK, outputs))
        };
        Ok(Self {
            inputs,
            outputs,
            blocks,
        })
    }

    /// Outputs of each row.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// The weights of one output (`output < outputs`): a row of an embedding.
    pub(crate) fn weights(&self, output: usize, into: &mut [f32]) {
        match &self.blocks {
            Blocks::Bytes(blocks) => column(blocks, self.inputs / BLOCK, output, into),
            Blocks::Nibbles(blocks) => column(blocks, self.inputs / BLOCK, output, into),
        }
    }

    /// `[row][output]` for all rows.
    pub(crate) fn multiply(&self, rows: &Rows, threads: &Threads) -> Vec<f32> {
        let sums = match &self.blocks {
            Blocks::Bytes(blocks) => self.sums(blocks, rows, threads),
            Blocks::Nibbles(blocks) => self.sums(blocks, rows, threads),
        };
        self.unpack(&sums, rows.rows(), rows.padded(self.inputs))
    }

    /// `[group][padded row][lane]`
    fn sums<W: Weights>(&self, blocks: &[W], rows: &Rows, threads: &Threads) -> Vec<Lanes> {
        let (padded, groups) = (rows.padded(self.inputs), self.outputs.div_ceil(LANES));
        let mut sums = vec![[0.0; LANES]; groups * padded];
        let piece = if threads.count() == 1 {
            groups
        } else {
            groups.div_ceil(threads.count() * PIECES).max(2)
        };
        let blocks = blocks.chunks(piece * (self.inputs / BLOCK));
        let pieces = sums.chunks_mut(piece * padded).zip(blocks).collect();
        threads.each(pieces, |(out, blocks): (&mut [Lanes], &[W])| {
            Arch::new().dispatch(Kernel {
                blocks,
                inputs: self.inputs,
                rows,
                out,
            });
        });
        sums
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

/// The blocks of a tensor whose rows have `per_row` of them.
fn arrange<W: Weights>(tensor: &Tensor<'_>, per_row: usize, outputs: usize) -> Vec<W> {
    let mut arranged = vec![W::ZERO; outputs.div_ceil(LANES) * per_row];
    for (at, block) in tensor.kind.blocks(tensor.bytes).enumerate() {
        let (output, place) = (at / per_row, at % per_row);
        arranged[output / LANES * per_row + place].put(output % LANES, &block);
    }
    arranged
}

fn column<W: Weights>(blocks: &[W], per_row: usize, output: usize, into: &mut [f32]) {
    let group = &blocks[output / LANES * per_row..][..per_row];
    for (block, into) in group.iter().zip(into.chunks_mut(BLOCK)) {
        for (i, to) in into.iter_mut().enumerate() {
            *to = block.weights(i)[output % LANES];
        }
    }
}
