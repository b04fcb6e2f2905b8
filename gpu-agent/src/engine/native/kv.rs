//! A turn's KV: pages of the pool, the last ones still being written.

use bytemuck::{cast_slice, cast_slice_mut};
use half::f16;
use half::slice::HalfFloatSliceExt as _;
use pinion_transfer::Layout;
use pinion_transfer::pool::{PageRef, SlotMut};

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Keys = 0,
    Values = 1,
}

/// Where numbers are in a page: `[layer][K, then V][kv head][token][dim]`, `f16`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) page_tokens: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Shape {
    pub(crate) fn of(layout: &Layout) -> Self {
        Self {
            page_tokens: layout.page_tokens as usize,
            kv_heads: layout.kv_heads as usize,
            head_dim: layout.head_dim as usize,
        }
    }

    /// First number of a head.
    fn head(&self, layer: usize, part: Part, head: usize) -> usize {
        ((layer * 2 + part as usize) * self.kv_heads + head) * self.page_tokens * self.head_dim
    }
}

/// The pages of one turn, as far as a step reads and writes them.
#[derive(Debug, Default)]
pub(crate) struct Kv {
    /// Finished pages, from the first token on.
    pub(crate) full: Vec<PageRef>,
    /// Behind them, those being written.
    pub(crate) open: Vec<SlotMut>,
}

impl Kv {
    // Slots begin at multiples of 64 and hold whole numbers, so their bytes are numbers wherever they are.
    fn page(&self, at: usize) -> &[f16] {
        match self.full.get(at) {
            Some(page) => cast_slice(page),
            None => cast_slice(&self.open[at - self.full.len()]),
        }
    }

    /// The first numbers of one head in page `at`, as `[token][dim]`: as many tokens as fit into `into`.
    pub(crate) fn read(&self, shape: &Shape, at: usize, layer: usize, part: Part, head: usize, into: &mut [f32]) {
        let begin = shape.head(layer, part, head);
        self.page(at)[begin..begin + into.len()].convert_to_f32_slice(into);
    }

    /// Rounds what all heads have for the token at `position` (`[kv head][dim]`) and writes it. Its page must be open.
    pub(crate) fn write(&mut self, shape: &Shape, position: usize, layer: usize, part: Part, numbers: &[f32]) {
        let (at, token) = (position / shape.page_tokens, position % shape.page_tokens);
        let page: &mut [f16] = cast_slice_mut(&mut self.open[at - self.full.len()]);
        for (head, numbers) in numbers.chunks_exact(shape.head_dim).enumerate() {
            let begin = shape.head(layer, part, head) + token * shape.head_dim;
            page[begin..begin + shape.head_dim].convert_from_f32_slice(numbers);
        }
    }
}
