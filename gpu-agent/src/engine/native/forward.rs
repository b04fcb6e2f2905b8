//! One forward pass over tokens of several turns.

use super::attention::{Setting, Span, attend};
use super::kernel::Rows;
use super::kv::{Kv, Part, Shape};
use super::math::{accumulate, angles, norm, rotate, swish};
use super::model::{Layer, Model};
use super::sample::choose;
use super::threads::Threads;
use pinion_schemas::Sampling;

/// What a step does for one turn.
#[derive(Debug)]
pub(crate) struct Read {
    /// Names the turn in its engine.
    pub(crate) serial: u64,
    /// Position of the first token.
    pub(crate) start: usize,
    /// Tokens to read, at least one, each below the vocabulary.
    pub(crate) tokens: Vec<u32>,
    /// Pages with everything before `start`, and open ones for these tokens.
    pub(crate) kv: Kv,
    /// How the token behind the last one is chosen; none is, if nobody wants it.
    pub(crate) sampling: Option<Sampling>,
    /// That token.
    pub(crate) next: Option<u32>,
}

/// Computes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Forward<'a> {
    pub(crate) model: &'a Model,
    pub(crate) shape: Shape,
    pub(crate) threads: &'a Threads,
}

impl Forward<'_> {
    /// Reads the tokens of all turns: writes their keys and values, and chooses next tokens where asked.
    pub(crate) fn step(&self, reads: &mut [Read]) {
        let model = self.model;
        let mut rows = self.embed(reads);
        let turns: Vec<_> = reads
            .iter()
            .flat_map(Read::positions)
            .map(|p| angles(p, &model.frequencies))
            .collect();
        for (at, layer) in model.layers.iter().enumerate() {
            self.attention(at, layer, &mut rows, &turns, reads);
            self.feed(layer, &mut rows);
        }
        self.choose(&rows, reads);
    }

    /// `[token][width]`
    fn embed(&self, reads: &[Read]) -> Vec<f32> {
        let tokens: Vec<u32> = reads.iter().flat_map(|r| r.tokens.iter().copied()).collect();
        let mut rows = vec![0.0; tokens.len() * self.model.width];
        for (row, token) in rows.chunks_exact_mut(self.model.width).zip(tokens) {
            self.model.embedding.weights(token as usize, row);
        }
        rows
    }

    fn attention(&self, at: usize, layer: &Layer, rows: &mut [f32], turns: &[Vec<(f32, f32)>], reads: &mut [Read]) {
        let model = self.model;
        let normed = norm(rows, &layer.attention_norm, model.epsilon);
        let packed = Rows::pack(&normed, model.width);
        let mut queries = layer.query.multiply(&packed, self.threads);
        let mut keys = layer.key.multiply(&packed, self.threads);
        let values = layer.value.multiply(&packed, self.threads);
        let (query_width, kv_width) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
        for (row, turn) in turns.iter().enumerate() {
            rotate(&mut queries[row * query_width..][..query_width], model.head_dim, turn);
            rotate(&mut keys[row * kv_width..][..kv_width], model.head_dim, turn);
        }
        let mut both = keys.chunks_exact(kv_width).zip(values.chunks_exact(kv_width));
        for read in reads.iter_mut() {
            for (position, (key, value)) in read.positions().zip(&mut both) {
                read.kv.write(&self.shape, position, at, Part::Keys, key);
                read.kv.write(&self.shape, position, at, Part::Values, value);
            }
        }
        let setting = Setting {
            shape: self.shape,
            heads: model.heads,
            layer: at,
        };
        let attended = attend(setting, &spans(reads, &queries, query_width), self.threads);
        let out = layer
            .attention_output
            .multiply(&Rows::pack(&attended, query_width), self.threads);
        accumulate(rows, &out);
    }

    fn feed(&self, layer: &Layer, rows: &mut [f32]) {
        let normed = norm(rows, &layer.feed_norm, self.model.epsilon);
        let packed = Rows::pack(&normed, self.model.width);
        let mut gates = layer.gate.multiply(&packed, self.threads);
        let ups = layer.up.multiply(&packed, self.threads);
        swish(&mut gates, &ups);
        let packed = Rows::pack(&gates, layer.gate.outputs());
        accumulate(rows, &layer.down.multiply(&packed, self.threads));
    }

    fn choose(&self, rows: &[f32], reads: &mut [Read]) {
        let (model, width) = (self.model, self.model.width);
        let (mut last, mut end) = (Vec::new(), 0);
        for read in reads.iter() {
            end += read.tokens.len();
            if read.sampling.is_some() {
                last.extend_from_slice(&rows[(end - 1) * width..end * width]);
            }
        }
        if last.is_empty() {
            return;
        }
        let normed = norm(&last, &model.norm, model.epsilon);
        let output = model.output.as_ref().unwrap_or(&model.embedding);
        let logits = output.multiply(&Rows::pack(&normed, width), self.threads);
        let mut logits = logits.chunks_exact(model.vocabulary());
        for read in reads {
            let Some(sampling) = read.sampling else { continue };
            let position = (read.start + read.tokens.len()) as u64;
            read.next = logits.next().map(|logits| choose(logits, &sampling, position));
        }
    }
}

impl Read {
    fn positions(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.tokens.len()
    }
}

fn spans<'a>(reads: &'a [Read], queries: &'a [f32], width: usize) -> Vec<Span<'a>> {
    let mut rest = queries;
    let span = |read: &'a Read| {
        let (queries, behind) = rest.split_at(read.tokens.len() * width);
        rest = behind;
        Span {
            kv: &read.kv,
            start: read.start,
            queries,
        }
    };
    reads.iter().map(span).collect()
}
