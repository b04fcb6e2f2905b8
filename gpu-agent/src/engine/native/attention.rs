//! Attention of some tokens of one turn over its KV.
//!
//! A token's query visits the pages of its context from the first to its own, and in each the tokens up to its own: the same sums
//! in the same order, whoever else is in the step. Keys and values come from the pages only, rounded as they are there.
#![allow(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernels are compiled for a vector unit as one piece, best from counted loops over arrays"
)]

use super::kernel::{LANES, Lanes};
use super::kv::{Kv, Part, Shape};
use super::math::{exp, multiply, total};
use super::threads::Threads;
use pulp::{Arch, NullaryFnOnce};

/// Numbers of a head that are summed at once: enough chains to hide the time that a fused multiply-add takes.
const WIDE: usize = 64;

/// The tokens of one turn in a step.
#[derive(Clone, Copy)]
pub(crate) struct Span<'a> {
    /// Its pages, with the tokens' own keys and values.
    pub(crate) kv: &'a Kv,
    /// Position of the first token.
    pub(crate) start: usize,
    /// `[token][head][dim]`
    pub(crate) queries: &'a [f32],
}

/// What all spans share.
#[derive(Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) shape: Shape,
    pub(crate) heads: usize,
    pub(crate) layer: usize,
}

/// One key-value head and the query heads that share it.
struct Kernel<'a> {
    setting: Setting,
    span: Span<'a>,
    head: usize,
    /// `[token][query head of the group][dim]`, zero.
    out: &'a mut [f32],
}

/// What a query has seen so far.
#[derive(Clone, Copy)]
struct Seen {
    largest: f32,
    sum: f32,
}

/// `[token][head][dim]`, behind one another for all spans.
pub(crate) fn attend(setting: Setting, spans: &[Span<'_>], threads: &Threads) -> Vec<f32> {
    let (width, kv_heads) = (setting.heads * setting.shape.head_dim, setting.shape.kv_heads);
    let numbers = spans.iter().map(|s| s.queries.len()).sum();
    let mut by_head = vec![0.0; numbers];
    let (mut kernels, mut rest) = (Vec::new(), by_head.as_mut_slice());
    for span in spans {
        for head in 0..kv_heads {
            let (out, behind) = rest.split_at_mut(span.queries.len() / kv_heads);
            rest = behind;
            let span = *span;
            kernels.push(Kernel {
                setting,
                span,
                head,
                out,
            });
        }
    }
    threads.each(kernels, |kernel| Arch::new().dispatch(kernel));
    // `[span][kv head][token]` to `[span][token][kv head]`.
    let (mut out, group, mut begin) = (Vec::with_capacity(numbers), width / kv_heads, 0);
    for span in spans {
        let tokens = span.queries.len() / width;
        for token in 0..tokens {
            for head in 0..kv_heads {
                let at = begin + (head * tokens + token) * group;
                out.extend_from_slice(&by_head[at..at + group]);
            }
        }
        begin += span.queries.len();
    }
    out
}

impl NullaryFnOnce for Kernel<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let (shape, span, heads) = (self.setting.shape, self.span, self.setting.heads);
        let (dim, group) = (shape.head_dim, heads / shape.kv_heads);
        let tokens = span.queries.len() / (heads * dim);
        let end = span.start + tokens;
        let mut keys = vec![0.0; shape.page_tokens * dim];
        let mut values = keys.clone();
        let mut scratch = Scratch {
            products: vec![[0.0; LANES]; shape.page_tokens],
            scores: vec![0.0; shape.page_tokens.next_multiple_of(LANES)],
        };
        let nothing = Seen {
            largest: f32::NEG_INFINITY,
            sum: 0.0,
        };
        let mut seen = vec![nothing; tokens * group];
        let scale = 1.0 / (dim as f32).sqrt();
        for page in 0..end.div_ceil(shape.page_tokens) {
            let first = page * shape.page_tokens;
            let here = shape.page_tokens.min(end - first);
            let layer = self.setting.layer;
            span.kv
                .read(&shape, page, layer, Part::Keys, self.head, &mut keys[..here * dim]);
            span.kv
                .read(&shape, page, layer, Part::Values, self.head, &mut values[..here * dim]);
            for token in first.saturating_sub(span.start)..tokens {
                let visible = here.min(span.start + token + 1 - first) * dim;
                for member in 0..group {
                    let at = token * group + member;
                    let query = (token * heads + self.head * group + member) * dim;
                    visit(
                        &span.queries[query..query + dim],
                        scale,
                        (&keys[..visible], &values[..visible]),
                        &mut scratch,
                        &mut seen[at],
                        &mut self.out[at * dim..(at + 1) * dim],
                    );
                }
            }
        }
        for (out, seen) in self.out.chunks_exact_mut(dim).zip(&seen) {
            for number in out {
                *number /= seen.sum;
            }
        }
    }
}

/// Room to work in: one place per token of a page.
struct Scratch {
    /// Products of a query and a key, 16 sums of them each.
    products: Vec<Lanes>,
    scores: Vec<f32>,
}

/// Adds the tokens of one page (keys, values) to what a query has seen.
#[inline(always)]
fn visit(query: &[f32], scale: f32, page: (&[f32], &[f32]), scratch: &mut Scratch, seen: &mut Seen, out: &mut [f32]) {
    let dim = query.len();
    let tokens = page.0.len() / dim;
    // In two passes: in one, the compiler splits the products into pairs of numbers for the sake of the sums.
    let products = &mut scratch.products[..tokens];
    for (sums, key) in products.iter_mut().zip(page.0.chunks_exact(dim)) {
        *sums = multiply(query, key);
    }
    let mut largest = seen.largest;
    for (score, sums) in scratch.scores.iter_mut().zip(products) {
        *score = total(*sums) * scale;
        largest = largest.max(*score);
    }
    // Up to a whole number of lanes; what is behind the last token weighs nothing.
    let weights = &mut scratch.scores[..tokens.next_multiple_of(LANES)];
    weights[tokens..].fill(f32::NEG_INFINITY);
    for weight in weights.iter_mut() {
        *weight = exp(*weight - largest);
    }
    weights[tokens..].fill(0.0);
    let mut sums = [0.0; LANES];
    for lanes in weights.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            sums[i] += lanes[i];
        }
    }
    let fade = exp(seen.largest - largest);
    *seen = Seen {
        largest,
        sum: seen.sum.mul_add(fade, total(sums)),
    };
    let (wide, rest) = out.as_chunks_mut::<WIDE>();
    for (at, out) in wide.iter_mut().enumerate() {
        blend(weights, &page.1[at * WIDE..], dim, fade, out);
    }
    let done = wide.len() * WIDE;
    for (at, out) in rest.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        blend(weights, &page.1[done + at * LANES..], dim, fade, out);
    }
}

/// What was seen before fades, and the values (a row each `stride` numbers) are added with their weights.
#[inline(always)]
fn blend<const N: usize>(weights: &[f32], values: &[f32], stride: usize, fade: f32, out: &mut [f32; N]) {
    let mut sums = [0.0; N];
    for i in 0..N {
        sums[i] = out[i] * fade;
    }
    for (weight, value) in weights.iter().zip(values.chunks(stride)) {
        if let Some((value, _)) = value.split_first_chunk::<N>() {
            for i in 0..N {
                sums[i] = weight.mul_add(value[i], sums[i]);
            }
        }
    }
    *out = sums;
}
