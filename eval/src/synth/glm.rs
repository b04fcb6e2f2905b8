//! GLM-like requests: a large service for coding, where most sessions have one turn (digest §3.1, §3.3).

use super::draw::{Draw, exponential, geometric, lognormal, seconds, tokens};
use super::{push, run, session};
use crate::trace::Session;

/// Inputs by length: share of the requests, ends of the bin and mean inside it, tokens. The last end is an assumption.
const INPUTS: [(f64, f64, f64, f64); 6] = [
    (202_396.0, 1.0, 1_024.0, 440.0),
    (380_009.0, 1_024.0, 8_192.0, 4_210.0),
    (720_871.0, 8_192.0, 32_768.0, 17_618.0),
    (405_371.0, 32_768.0, 65_536.0, 47_857.0),
    (394_014.0, 65_536.0, 131_072.0, 90_606.0),
    (11_559.0, 131_072.0, 163_840.0, 138_420.0),
];
/// Requests per second.
const RATE: f64 = 2_114_220.0 / 7_200.0;
/// Share of the sessions that have more than one turn, and their mean turns; together 1.63 turns per session.
const MULTI: f64 = 0.09;
const MULTI_TURNS: f64 = 8.0;
/// Mean seconds from request to request inside a session, exponential. An assumption: the digest has none.
const GAP: f64 = 60.0;
/// How far apart the lengths of a session's prompts lie, as a share of all lengths. Chosen so that 57 % of all tokens were
/// in the turn before.
const SPREAD: f64 = 0.5;
/// Tokens per block. An assumption: the digest does not say.
const BLOCK: u32 = 64;
/// Share of the sessions whose first prompt is one that others send too (a template with much the same content), how many
/// such there are, and how steeply they are liked (Zipf). Chosen so that a cache that forgets nothing has 71 % hits in
/// 100,000 requests and that the most liked one begins 64,754 of 2,114,220 requests.
const TEMPLATED: f64 = 0.45;
const TEMPLATES: usize = 1_000;
const ZIPF: f64 = 0.8;
/// Longest answer, tokens: what such models are limited to, an assumption that cuts off 0.04 % of the answers.
const OUTPUT_MAX: u32 = 32_768;
/// Ids: blocks of template k from k · STRIDE on, those of session s from (`TEMPLATES` + 1 + s) · STRIDE on.
const STRIDE: u64 = 1 << 20;

/// GLM-like traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glm {
    /// Sessions; 1.3 million in the digest's two hours.
    pub sessions: usize,
    /// Seed.
    pub seed: u64,
}

impl Default for Glm {
    fn default() -> Self {
        Self {
            sessions: 10_000,
            seed: 0,
        }
    }
}

/// The input at quantile `u` of all requests: inside a bin, a power of `u` that gives its mean.
fn input(u: f64) -> f64 {
    let all: f64 = INPUTS.iter().map(|bin| bin.0).sum();
    let mut below = 0.0;
    for (count, low, high, mean) in INPUTS {
        let share = count / all;
        if u <= below + share {
            let exponent = (high - low) / (mean - low) - 1.0;
            return low + (high - low) * ((u - below) / share).clamp(0.0, 1.0).powf(exponent);
        }
        below += share;
    }
    INPUTS.last().map_or(0.0, |bin| bin.2)
}

/// Quantile of a lone request's length among all. Requests of longer sessions have the density 2u, which makes them longer
/// by half; lone ones have what is left, so that both together have the digest's lengths.
fn lone(v: f64) -> f64 {
    let of_multi = MULTI * MULTI_TURNS;
    let c = of_multi / (1.0 - MULTI);
    ((1.0 + c) - ((1.0 + c) * (1.0 + c) - 4.0 * c * v).sqrt()) / (2.0 * c)
}

/// Lengths of a longer session's prompts, growing: near each other, and each as long as any.
fn growing(draw: &mut Draw, turns: usize) -> Vec<u32> {
    let centre = draw.unit();
    let mut inputs: Vec<u32> = (0..turns)
        .map(|_| {
            // Reflected at 0 and 1: that keeps even draws even.
            let v = (centre + SPREAD * (draw.unit() - 0.5)).abs();
            let v = if v > 1.0 { 2.0 - v } else { v };
            tokens(input(v.sqrt()))
        })
        .collect();
    inputs.sort_unstable();
    inputs
}

/// GLM-like sessions in order of their starts, a Poisson process.
pub fn glm(options: Glm) -> impl Iterator<Item = Session> {
    let mut draw = Draw::new(options.seed);
    let mut popularity = Vec::with_capacity(TEMPLATES);
    let mut sum = 0.0;
    for rank in 1..=TEMPLATES {
        sum += (rank as f64).powf(-ZIPF);
        popularity.push(sum);
    }
    let turns_per_session = 1.0 - MULTI + MULTI * MULTI_TURNS;
    let mut start = 0.0;
    (0..options.sessions).map(move |i| {
        let mut made = session(format!("glm-{i}"), seconds(start), true);
        start += exponential(turns_per_session / RATE, draw.unit());
        let inputs = if draw.unit() < MULTI {
            let turns = 1 + geometric(MULTI_TURNS - 1.0, draw.unit());
            growing(&mut draw, turns)
        } else {
            vec![tokens(input(lone(draw.unit())))]
        };
        let first = inputs.first().copied().unwrap_or(0) / BLOCK;
        let shared = if draw.unit() < TEMPLATED { first } else { 0 };
        let liked = draw.unit() * sum;
        let template = popularity.partition_point(|below| *below < liked) as u64;
        let own = STRIDE * (TEMPLATES as u64 + 1 + i as u64);
        for input in inputs {
            let output = tokens(lognormal(80.0, 1.81, draw.unit())).min(OUTPUT_MAX);
            let gap = seconds(exponential(GAP, draw.unit()));
            let rest = run(own, (input / BLOCK).saturating_sub(shared));
            let blocks = run(template * STRIDE, shared).into_iter().chain(rest).collect();
            push(&mut made, gap, input, output, blocks, BLOCK);
        }
        made
    })
}
