//! Coding agents: SWE-like and Inferact-like sessions.

use super::draw::{Draw, by_quantiles, exponential, lognormal, lognormal_of_mean, seconds, tokens};
use super::{BLOCK, own, push, run, session};
use crate::trace::{BlockRun, Session};

/// Answers of SWE-50: p50, p90, p99 of the digest; the least one is what makes the mean 226, the largest what it says to cap at.
const SWE_OUTPUT: [(f64, f64); 5] = [(0.0, 31.0), (0.5, 86.0), (0.9, 576.0), (0.99, 1_347.0), (1.0, 1_500.0)];
/// Seconds from request to request in SWE-50; the least one is an assumption.
const SWE_GAP: [(f64, f64); 6] = [
    (0.0, 1.0),
    (0.1, 1.6),
    (0.5, 2.5),
    (0.9, 7.8),
    (0.99, 25.1),
    (1.0, 261.0),
];
/// Seconds from one start to the next: 52 sessions in 5.5 h. That starts are a Poisson process is an assumption.
const SWE_START_GAP: f64 = 19_800.0 / 52.0;
/// A session that would pass this prompt length ends, tokens: what models of that kind take. SWE-50's longest is 104,000.
const SWE_LONGEST: u32 = 131_072;

/// SWE-50: long sessions of a coding agent on separate repositories, about one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swe {
    /// Sessions; the digest's trace has 52.
    pub sessions: usize,
    /// Seed.
    pub seed: u64,
}

impl Default for Swe {
    fn default() -> Self {
        Self { sessions: 52, seed: 0 }
    }
}

/// SWE-like sessions, in order of their starts. Nothing is shared between them.
pub fn swe(options: Swe) -> impl Iterator<Item = Session> {
    let mut draw = Draw::new(options.seed);
    let mut start = 0.0;
    draw.strata(options.sessions)
        .into_iter()
        .enumerate()
        .map(move |(i, u)| {
            let mut made = session(format!("swe-{i}"), seconds(start), false);
            start += exponential(SWE_START_GAP, draw.unit());
            // 8 to 150 turns, with an exponent that makes the mean 85.6.
            let turns = (8.0 + 142.0 * u.powf(0.83)).round() as usize;
            // "About 1,000": a tenth up or down.
            let mut input = tokens(lognormal(1_000.0, 0.1, draw.unit()));
            while made.turns.len() < turns && input <= SWE_LONGEST {
                // The answer is a part of the next append: long ones go together, and each keeps its own distribution.
                let u = draw.unit();
                let gap = seconds(by_quantiles(&SWE_GAP, draw.unit()));
                push(
                    &mut made,
                    gap,
                    input,
                    tokens(by_quantiles(&SWE_OUTPUT, u)),
                    own(input),
                    BLOCK,
                );
                input = input.saturating_add(tokens(lognormal(187.0, 1.485, u)));
            }
            made
        })
}

/// Inferact-50: many agents that start within a minute, with a common system prompt and fast growth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Inferact {
    /// Sessions; the digest's traces have 50 and 610.
    pub sessions: usize,
    /// Mean turns of a session: 25.7 in the head of 50 sessions, 33.2 in all.
    pub turns: f64,
    /// Blocks of 24 tokens that all sessions share.
    pub shared_blocks: u32,
    /// Seed.
    pub seed: u64,
}

impl Default for Inferact {
    fn default() -> Self {
        Self {
            sessions: 50,
            turns: 25.7,
            shared_blocks: 50,
            seed: 0,
        }
    }
}

/// Ids of a session's own blocks; partial ones come behind the full ones.
const OWN: u64 = 1 << 32;
const PARTIAL: u64 = 1 << 31;

/// The blocks of a prompt that begins with `shared` blocks of all sessions, its last partial one included, which is
/// another one in each turn.
pub(super) fn chained(number: usize, turn: usize, input: u32, shared: u32) -> Vec<BlockRun> {
    let base = OWN * (number as u64 + 1);
    let (full, rest) = (input / BLOCK, input % BLOCK);
    let shared = shared.min(full);
    let partial = run(base + PARTIAL + turn as u64, u32::from(rest > 0));
    let own = run(base + u64::from(shared), full - shared);
    run(0, shared).into_iter().chain(own).chain(partial).collect()
}

/// Inferact-like sessions: one starts each second, a request comes each 2.5 s.
///
/// Assumptions: turns between half and one and a half times the mean, evenly; growth of 4,150 tokens a turn, log-normal with
/// σ 0.6, which makes the mean prompt of the 50 sessions 67,631 tokens; answers log-normal with σ 0.8.
pub fn inferact(options: Inferact) -> impl Iterator<Item = Session> {
    let mut draw = Draw::new(options.seed);
    draw.strata(options.sessions)
        .into_iter()
        .enumerate()
        .map(move |(i, u)| {
            let mut made = session(format!("inferact-{i}"), seconds(i as f64), true);
            let turns = (options.turns * (0.5 + u)).round().max(1.0) as usize;
            let mut input = tokens(lognormal(12_000.0, 0.1, draw.unit()));
            for turn in 0..turns {
                let u = draw.unit();
                let output = tokens(lognormal_of_mean(700.0, 0.8, u));
                push(
                    &mut made,
                    seconds(2.5),
                    input,
                    output,
                    chained(i, turn, input, options.shared_blocks),
                    BLOCK,
                );
                input = input.saturating_add(tokens(lognormal_of_mean(4_150.0, 0.6, u)));
            }
            made
        })
}
