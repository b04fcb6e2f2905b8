//! What is replayed, when, and with which prompts. Nothing here does any input or output.

use super::{PromptMode, ReplayOptions};
use crate::stats::SplitMix64;
use crate::trace::tokens::Vocab;
use crate::trace::{Session, Trace, Turn};
use std::collections::HashMap;
use std::time::Duration;

/// When a session begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// This long after the replay began.
    At(Duration),
    /// A sub-agent: as soon as its parent, at this place of the plan, has finished this many turns.
    After {
        /// Index into the plan.
        parent: usize,
        /// Turns of the parent.
        turns: usize,
    },
}

/// One session of the replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    /// Index into the trace.
    pub session: usize,
    /// Turns to play, from the first on; 1 or more.
    pub turns: usize,
    /// When it begins.
    pub start: Start,
}

/// `span` divided by the time scale.
pub(super) fn scaled(span: Duration, time_scale: f64) -> Duration {
    Duration::try_from_secs_f64(span.as_secs_f64() / time_scale).unwrap_or(Duration::MAX)
}

/// The pause before `turn`.
pub(super) fn pause(turn: &Turn, options: &ReplayOptions) -> Duration {
    scaled(
        Duration::from_micros(turn.think.0).min(options.max_think),
        options.time_scale,
    )
}

/// Tokens to ask for.
pub(super) fn output_tokens(turn: &Turn, options: &ReplayOptions) -> u32 {
    turn.output_tokens
        .min(options.max_output_tokens.unwrap_or(u32::MAX))
        .max(1)
}

/// The sessions to play, parents before their sub-agents.
///
/// A sub-agent's start in the trace is an offset inside its parent, whose pauses the replay shortens; so it is tied to
/// the parent's turns instead, and is left out if the parent is, or is cut before the turn that called it.
pub(super) fn plan(trace: &Trace, options: &ReplayOptions) -> Vec<Planned> {
    let mut plan: Vec<Planned> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut arrivals = SplitMix64::new(options.seed);
    let (mut mains, mut made_up) = (0usize, Duration::ZERO);
    for (index, session) in trace.sessions.iter().enumerate() {
        let turns = session.turns.len().min(options.max_turns.unwrap_or(usize::MAX));
        let start = match &session.parent {
            Some(parent) => {
                let Some((place, planned)) = places
                    .get(parent.as_str())
                    .and_then(|&place| Some((place, plan.get(place)?)))
                else {
                    continue;
                };
                let before = trace
                    .sessions
                    .get(planned.session)
                    .map_or(0, |p| p.turns.iter().take_while(|t| t.at <= session.start).count());
                if before > planned.turns {
                    continue;
                }
                Start::After {
                    parent: place,
                    turns: before,
                }
            }
            None if options.sessions.is_some_and(|most| mains >= most) => continue,
            None => {
                mains += 1;
                let start = scaled(Duration::from_micros(session.start.0), options.time_scale);
                let start = Start::At(start.saturating_add(made_up));
                made_up = made_up.saturating_add(gap(options.arrival_gap, &mut arrivals));
                start
            }
        };
        if turns > 0 {
            places.insert(&session.id, plan.len());
            plan.push(Planned {
                session: index,
                turns,
                start,
            });
        }
    }
    plan
}

/// One gap of a Poisson process.
fn gap(mean: Duration, generator: &mut SplitMix64) -> Duration {
    let unit = ((generator.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    Duration::try_from_secs_f64(mean.as_secs_f64() * -unit.ln()).unwrap_or(Duration::MAX)
}

/// The prompt of one turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Made {
    /// Leading tokens that are those of the previous prompt and, in [`PromptMode::Continue`], its answer.
    pub carried: u32,
    /// The trace shares less than half of the previous prompt, so this one starts anew.
    pub reset: bool,
    /// It was longer than [`ReplayOptions::max_input_tokens`] and was cut.
    pub truncated: bool,
}

/// Makes the prompts of one session in order.
pub(super) struct Prompts<'a> {
    session: &'a Session,
    vocab: Vocab,
    mode: PromptMode,
    common_head: bool,
    /// Longest prompt.
    max: usize,
    /// The prompt made last.
    tokens: Vec<u32>,
}

impl<'a> Prompts<'a> {
    pub fn new(session: &'a Session, options: &ReplayOptions) -> Self {
        Self {
            session,
            vocab: options.vocab,
            mode: options.prompts,
            common_head: options.common_head,
            max: match options.max_input_tokens {
                0 => usize::MAX,
                max => max,
            },
            tokens: Vec::new(),
        }
    }

    /// The prompt made last.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Makes the prompt of turn `index`, given the answer to the one before (empty if that failed).
    pub fn make(&mut self, index: usize, answer: &[u32]) -> Made {
        let made = self.make_whole(index, answer);
        let truncated = self.tokens.len() > self.max;
        self.tokens.truncate(self.max);
        Made {
            carried: made.carried.min(u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)),
            truncated,
            ..made
        }
    }

    fn make_whole(&mut self, index: usize, answer: &[u32]) -> Made {
        let Some(blocks) = self.vocab.prompt(self.session, index, self.common_head) else {
            return Made::default();
        };
        let turns = &self.session.turns;
        let pair = index.checked_sub(1).and_then(|i| turns.get(i)).zip(turns.get(index));
        let Some((previous, turn)) = pair else {
            self.tokens = blocks;
            return Made::default();
        };
        // Without blocks nothing is known of sharing, and a conversation is what the session says it is.
        let known = turn.block_tokens > 0 && previous.block_tokens > 0;
        let shared = turn.shared_tokens(previous).min(previous.input_tokens);
        let reset = known && u64::from(shared) * 2 < u64::from(previous.input_tokens);
        if reset || self.mode == PromptMode::Blocks {
            let carried = self.tokens.iter().zip(&blocks).take_while(|(a, b)| a == b).count();
            self.tokens = blocks;
            return Made {
                carried: u32::try_from(carried).unwrap_or(u32::MAX),
                reset,
                truncated: false,
            };
        }
        self.tokens.extend_from_slice(answer);
        self.tokens.truncate(blocks.len());
        let carried = u32::try_from(self.tokens.len()).unwrap_or(u32::MAX);
        self.tokens.extend(blocks.into_iter().skip(self.tokens.len()));
        Made {
            carried,
            reset,
            truncated: false,
        }
    }
}
