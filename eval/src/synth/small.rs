//! Chats, and two traces that test one thing.

use super::agents::chained;
use super::draw::{Draw, exponential, geometric, lognormal, lognormal_of_mean, seconds, tokens};
use super::{BLOCK, own, push, session};
use crate::trace::Session;

/// Short chats between people and a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareGpt {
    /// Sessions.
    pub sessions: usize,
    /// Seed.
    pub seed: u64,
}

impl Default for ShareGpt {
    fn default() -> Self {
        Self { sessions: 200, seed: 0 }
    }
}

/// ShareGPT-like sessions. The digest says "short turns, low overlap"; the mean question, 161 tokens, and the mean answer,
/// 338, are those of Kwon et al., "`PagedAttention`" (SOSP 2023).
///
/// Assumptions: 3.5 turns on average, geometric; σ 1.2 and 0.9 of the logarithms; one start a second and 30 s from
/// request to request on average, both exponential.
pub fn sharegpt(options: ShareGpt) -> impl Iterator<Item = Session> {
    let mut draw = Draw::new(options.seed);
    let mut start = 0.0;
    draw.strata(options.sessions)
        .into_iter()
        .enumerate()
        .map(move |(i, u)| {
            let mut made = session(format!("sharegpt-{i}"), seconds(start), false);
            start += exponential(1.0, draw.unit());
            let mut input = 0;
            for _ in 0..geometric(3.5, u) {
                input += tokens(lognormal_of_mean(161.0, 1.2, draw.unit()));
                let output = tokens(lognormal_of_mean(338.0, 0.9, draw.unit()));
                let gap = seconds(exponential(30.0, draw.unit()));
                push(&mut made, gap, input, output, own(input), BLOCK);
                input += output;
            }
            made
        })
}

/// Many sessions that need a seed at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adversarial {
    /// Sessions; all start within a second. The digest's case has 100.
    pub sessions: usize,
    /// Turns of each.
    pub turns: usize,
    /// Blocks of 24 tokens that all share: 50 in the digest's case B-1, 500 in B-2.
    pub shared_blocks: u32,
    /// Seed.
    pub seed: u64,
}

impl Default for Adversarial {
    fn default() -> Self {
        Self {
            sessions: 100,
            turns: 4,
            shared_blocks: 50,
            seed: 0,
        }
    }
}

/// Sessions that all begin within one second with prompts of 50,000 to 90,000 tokens, the length of the prototype's reseeds
/// (digest §2.1), and then append as SWE-50 does, each 2.5 s.
pub fn adversarial(options: Adversarial) -> impl Iterator<Item = Session> {
    let mut draw = Draw::new(options.seed);
    (0..options.sessions).map(move |i| {
        let start = i as f64 / options.sessions as f64;
        let mut made = session(format!("adversarial-{i}"), seconds(start), true);
        let mut input = tokens(50_000.0 + 40_000.0 * draw.unit());
        for turn in 0..options.turns.max(1) {
            let blocks = chained(i, turn, input, options.shared_blocks);
            push(&mut made, seconds(2.5), input, 86, blocks, BLOCK);
            input += tokens(lognormal(187.0, 1.485, draw.unit()));
        }
        made
    })
}

/// The prototype's microbenchmark (digest §1.9, `make-small-append-trace`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Microbench {
    /// Sessions.
    pub sessions: usize,
    /// Turns of each.
    pub turns: usize,
    /// First prompt, tokens.
    pub initial: u32,
    /// What a turn adds to prompt and answer of the one before, tokens.
    pub append: u32,
    /// Answer, tokens.
    pub output: u32,
    /// From request to request, seconds.
    pub gap_s: f64,
    /// From start to start, seconds.
    pub stagger_s: f64,
}

impl Default for Microbench {
    fn default() -> Self {
        Self {
            sessions: 8,
            turns: 3,
            initial: 10_000,
            append: 1_000,
            output: 1_000,
            gap_s: 1.0,
            stagger_s: 0.1,
        }
    }
}

/// Equal sessions without any chance in them.
pub fn microbench(options: Microbench) -> impl Iterator<Item = Session> {
    (0..options.sessions).map(move |i| {
        let mut made = session(format!("micro-{i}"), seconds(i as f64 * options.stagger_s), false);
        let mut input = options.initial.max(1);
        for _ in 0..options.turns.max(1) {
            push(
                &mut made,
                seconds(options.gap_s),
                input,
                options.output,
                own(input),
                BLOCK,
            );
            input = input.saturating_add(options.output).saturating_add(options.append);
        }
        made
    })
}
