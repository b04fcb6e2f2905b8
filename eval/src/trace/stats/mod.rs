//! What a trace is like: the figures of digest §3.1 and of the notes beside the public traces.
//!
//! One pass, as a [`Sink`]. Memory: the last prompt of each session, the distinct values of each figure, and the ranges of
//! blocks ever named. Lengths are in tokens, times in seconds as recorded.

mod blocks;
mod table;
mod tally;
#[cfg(test)]
mod tests;

pub use tally::{Quantiles, Tally};

use super::{Session, Sink, Turn};
use blocks::Blocks;
use pinion_schemas::Micros;
use serde::Serialize;

/// Ends of the bins of input lengths, tokens (digest §3.1, GLM).
const INPUT_BINS: [(&str, u64); 6] = [
    ("< 1K", 1_023),
    ("1K-8K", 8_191),
    ("8K-32K", 32_767),
    ("32K-65K", 65_535),
    ("65K-131K", 131_071),
    ("> 131K", u64::MAX),
];
/// Appends of which the share is told, tokens: half of, and the prototype's two values of, τ of appends.
const APPENDS: [u64; 4] = [500, 512, 2_048, 8_192];
/// Pauses of which the share is told, seconds (field §9.1).
const PAUSES: [u64; 5] = [5, 30, 60, 300, 3_600];
/// Times are counted in these parts of a second: finer than any recorded one that matters.
const TICKS: u64 = 1_000;

/// Share of the values up to a limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ShareUpTo {
    /// The limit, in the unit of the values.
    pub limit: u64,
    /// Share of the values that are at most the limit, 0 to 1.
    pub share: f64,
}

/// Requests with inputs of some length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Bin {
    /// The lengths.
    pub label: &'static str,
    /// Requests.
    pub requests: u64,
    /// Share of all, 0 to 1.
    pub share: f64,
    /// Their mean input, tokens.
    pub mean: f64,
}

/// Requests with long inputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Over {
    /// Tokens.
    pub limit: u32,
    /// Requests with more.
    pub requests: u64,
}

/// What a cache that forgets nothing would hold, and what it would not.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct IdealCache {
    /// Blocks named, each time counted.
    pub blocks: u64,
    /// Different blocks.
    pub unique: u64,
    /// Different blocks that two prompts or more name.
    pub shared: u64,
    /// Different blocks that more than ten prompts name.
    pub over_ten: u64,
    /// Mean number of prompts that name one of the ten most named blocks.
    pub top_ten: f64,
    /// Tokens of all different blocks.
    pub working_set: u64,
    /// Hits as a share of the blocks named, 0 to 1. A hit is a block that had been named before, behind nothing but hits:
    /// only a prefix can be used again.
    pub block_hit_rate: f64,
    /// Hits as a share of the input tokens, 0 to 1.
    pub token_hit_rate: f64,
    /// The part of them that the turn before in the same session had named, 0 to 1.
    pub from_session: f64,
    /// Share of requests with over 90 % hit, 0 to 1.
    pub warm: f64,
    /// New tokens of these, mean.
    pub warm_new: Option<f64>,
    /// Share of requests without any hit, 0 to 1.
    pub cold: f64,
    /// New tokens of these, mean.
    pub cold_new: Option<f64>,
    /// Tokens to compute in a request.
    pub new: Option<Quantiles>,
}

/// The figures of a trace. Where a trace does not tell, there is none.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TraceStats {
    /// Requests.
    pub requests: u64,
    /// Sessions, without sub-agents.
    pub sessions: u64,
    /// Of these, sessions of two turns or more.
    pub multi_turn: u64,
    /// Sub-agents.
    pub agents: u64,
    /// From the first request to the last, seconds.
    pub span_s: f64,
    /// Requests per second of that.
    pub requests_per_s: Option<f64>,
    /// Turns of a session, without sub-agents.
    pub turns: Option<Quantiles>,
    /// Input of a request.
    pub input: Option<Quantiles>,
    /// Input of a session's first request.
    pub first_input: Option<Quantiles>,
    /// Longest input of a session.
    pub peak_input: Option<Quantiles>,
    /// Inputs by length.
    pub input_bins: Vec<Bin>,
    /// Requests with inputs over some limits.
    pub input_over: Vec<Over>,
    /// Output of a request.
    pub output: Option<Quantiles>,
    /// Input tokens per output token, of all requests together.
    pub io_ratio: Option<f64>,
    /// Median over the requests with output.
    pub io_ratio_p50: Option<f64>,
    /// Tokens of a later turn behind what it shares with the turn before; without resets.
    pub append: Option<Quantiles>,
    /// Shares of short appends.
    pub append_up_to: Vec<ShareUpTo>,
    /// Later turns that share less than half of the prompt before.
    pub resets: u64,
    /// Later turns.
    pub pairs: u64,
    /// Part of all appended tokens that can be the answer before, 0 to 1.
    pub append_generated: Option<f64>,
    /// The same part by turn, 0 to 1.
    pub append_generated_by_turn: Option<Quantiles>,
    /// From one request of a session to the next, seconds.
    pub gap_s: Option<Quantiles>,
    /// From the answer before to the request, seconds; where answers are not recorded, as `gap_s`.
    pub think_s: Option<Quantiles>,
    /// Shares of short pauses.
    pub think_up_to: Vec<ShareUpTo>,
    /// Prefix sharing; none if the trace names no blocks.
    pub cache: Option<IdealCache>,
}

/// What is kept of a session.
struct Open {
    namespace: u64,
    start: Micros,
    agent: bool,
    turns: u64,
    peak: u32,
    last: Option<Turn>,
}

/// Sums, of tokens unless said otherwise.
#[derive(Default)]
struct Sums {
    input: u64,
    output: u64,
    append: u64,
    generated: u64,
    blocks: u64,
    /// Blocks.
    block_hits: u64,
    hits: u64,
    from_session: u64,
    working_set: u64,
    resets: u64,
}

/// Takes a trace in and tells its figures.
#[derive(Default)]
pub struct Collector {
    over: Vec<u32>,
    open: Vec<Open>,
    /// Start of the last session that is no sub-agent: theirs are offsets from it.
    main_start: Micros,
    first: Option<Micros>,
    last: Micros,
    sums: Sums,
    cache: Blocks,
    input: Tally,
    bins: [Tally; INPUT_BINS.len()],
    first_input: Tally,
    output: Tally,
    /// Thousandths.
    io_ratio: Tally,
    append: Tally,
    /// Millionths.
    generated: Tally,
    gap: Tally,
    think: Tally,
    new: Tally,
    warm_new: Tally,
    cold_new: Tally,
}

fn ticks(time: Micros) -> u64 {
    time.0 * TICKS / 1_000_000
}

fn shares(tally: &Tally, limits: &[u64], unit: u64) -> Vec<ShareUpTo> {
    let share = |&limit: &u64| {
        Some(ShareUpTo {
            limit,
            share: tally.share_up_to(limit * unit)?,
        })
    };
    limits.iter().filter_map(share).collect()
}

fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

impl Collector {
    /// Counts inputs over each of these lengths, too.
    pub fn new(over: Vec<u32>) -> Self {
        Self {
            over,
            ..Self::default()
        }
    }

    /// What `turn` shares with the one `before`, and what else a pair of turns tells.
    fn pair(&mut self, before: &Turn, turn: &Turn) -> u32 {
        let shared = turn.shared_tokens(before).min(before.input_tokens);
        self.gap.add(ticks(turn.at.since(before.at)));
        self.think.add(ticks(turn.think));
        if turn.block_tokens == 0 {
            return 0;
        }
        // A prompt that starts anew appends nothing.
        if u64::from(shared) * 2 < u64::from(before.input_tokens) {
            self.sums.resets += 1;
            return shared;
        }
        let append = turn.input_tokens - shared;
        let generated = append.min(before.output_tokens);
        self.append.add(append.into());
        self.sums.append += u64::from(append);
        self.sums.generated += u64::from(generated);
        if append > 0 {
            self.generated.add(u64::from(generated) * 1_000_000 / u64::from(append));
        }
        shared
    }

    fn blocks(&mut self, namespace: u64, turn: &Turn, shared: u32) {
        if turn.block_tokens == 0 {
            return;
        }
        let hit_blocks = self.cache.prompt(namespace, &turn.blocks);
        let input = u64::from(turn.input_tokens);
        let hit = (hit_blocks * u64::from(turn.block_tokens)).min(input);
        let named = turn.block_count();
        self.sums.blocks += named;
        self.sums.block_hits += hit_blocks;
        self.sums.working_set += (named - hit_blocks) * u64::from(turn.block_tokens);
        self.sums.hits += hit;
        self.sums.from_session += u64::from(shared).min(hit);
        let new = input - hit;
        self.new.add(new);
        if hit == 0 {
            self.cold_new.add(new);
        } else if hit * 10 > input * 9 {
            self.warm_new.add(new);
        }
    }

    /// The figures of what came.
    pub fn finish(self) -> TraceStats {
        let (mut turns, mut peaks) = (Tally::default(), Tally::default());
        for session in &self.open {
            peaks.add(session.peak.into());
            if !session.agent {
                turns.add(session.turns);
            }
        }
        let requests = self.input.count();
        let span_s = self.last.since(self.first.unwrap_or_default()).0 as f64 / 1e6;
        let bin = |((label, _), tally): (&(&'static str, u64), &Tally)| Bin {
            label,
            requests: tally.count(),
            share: ratio(tally.count(), requests).unwrap_or(0.0),
            mean: tally.mean().unwrap_or(0.0),
        };
        let over = |&limit: &u32| Over {
            limit,
            requests: requests - (self.input.share_up_to(limit.into()).unwrap_or(0.0) * requests as f64).round() as u64,
        };
        let (second, thousandth, millionth) = (1.0 / TICKS as f64, 1e-3, 1e-6);
        let references = self.cache.references();
        let cache = (self.new.count() > 0).then(|| IdealCache {
            blocks: self.sums.blocks,
            unique: references.unique,
            shared: references.shared,
            over_ten: references.over_ten,
            top_ten: references.top_ten,
            working_set: self.sums.working_set,
            block_hit_rate: ratio(self.sums.block_hits, self.sums.blocks).unwrap_or(0.0),
            token_hit_rate: ratio(self.sums.hits, self.sums.input).unwrap_or(0.0),
            from_session: ratio(self.sums.from_session, self.sums.input).unwrap_or(0.0),
            warm: ratio(self.warm_new.count(), self.new.count()).unwrap_or(0.0),
            warm_new: self.warm_new.mean(),
            cold: ratio(self.cold_new.count(), self.new.count()).unwrap_or(0.0),
            cold_new: self.cold_new.mean(),
            new: self.new.quantiles(1.0),
        });
        TraceStats {
            requests,
            sessions: turns.count(),
            multi_turn: self.open.iter().filter(|s| !s.agent && s.turns > 1).count() as u64,
            agents: self.open.iter().filter(|s| s.agent).count() as u64,
            span_s,
            requests_per_s: (span_s > 0.0).then(|| requests as f64 / span_s),
            turns: turns.quantiles(1.0),
            input: self.input.quantiles(1.0),
            first_input: self.first_input.quantiles(1.0),
            peak_input: peaks.quantiles(1.0),
            input_bins: INPUT_BINS.iter().zip(&self.bins).map(bin).collect(),
            input_over: self.over.iter().map(over).collect(),
            output: self.output.quantiles(1.0),
            io_ratio: ratio(self.sums.input, self.sums.output),
            io_ratio_p50: self.io_ratio.quantile(0.5).map(|r| r * thousandth),
            append: self.append.quantiles(1.0),
            append_up_to: shares(&self.append, &APPENDS, 1),
            resets: self.sums.resets,
            pairs: self.gap.count(),
            append_generated: ratio(self.sums.generated, self.sums.append),
            append_generated_by_turn: self.generated.quantiles(millionth),
            gap_s: self.gap.quantiles(second),
            think_s: self.think.quantiles(second),
            think_up_to: shares(&self.think, &PAUSES, TICKS),
            cache,
        }
    }
}

impl Sink for Collector {
    fn session(&mut self, session: Session) {
        let agent = session.parent.is_some();
        if !agent {
            self.main_start = session.start;
        }
        self.open.push(Open {
            namespace: session.namespace,
            start: if agent {
                self.main_start.plus(session.start)
            } else {
                session.start
            },
            agent,
            turns: 0,
            peak: 0,
            last: None,
        });
    }

    fn turn(&mut self, number: usize, turn: Turn) {
        let Some(open) = self.open.get_mut(number) else { return };
        let (before, namespace) = (open.last.take(), open.namespace);
        let sent = open.start.plus(turn.at);
        open.turns += 1;
        open.peak = open.peak.max(turn.input_tokens);
        self.first = Some(self.first.map_or(sent, |first| first.min(sent)));
        self.last = self.last.max(sent);
        let input = u64::from(turn.input_tokens);
        self.input.add(input);
        let bin = INPUT_BINS
            .iter()
            .zip(&mut self.bins)
            .find(|((_, end), _)| input <= *end);
        if let Some((_, bin)) = bin {
            bin.add(input);
        }
        self.output.add(turn.output_tokens.into());
        self.sums.input += input;
        self.sums.output += u64::from(turn.output_tokens);
        if turn.output_tokens > 0 {
            self.io_ratio.add(input * 1_000 / u64::from(turn.output_tokens));
        }
        let shared = if let Some(before) = &before {
            self.pair(before, &turn)
        } else {
            self.first_input.add(input);
            0
        };
        self.blocks(namespace, &turn, shared);
        if let Some(open) = self.open.get_mut(number) {
            open.last = Some(turn);
        }
    }
}
