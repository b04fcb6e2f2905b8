//! A part of a trace, for a shorter run.

use super::{Session, Trace, Turn};
use crate::stats::mix64;
use crate::trace::tokens::namespace_of;
use pinion_schemas::Micros;
use std::collections::HashSet;

/// Longest append of the profile [`Profile::SmallAppend`], tokens: the prototype's limit for a direct append (τ of appends,
/// digest §1.7).
pub const SMALL_APPEND_TOKENS: u32 = 8_192;

/// What kind of session is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// Any.
    #[default]
    Any,
    /// Sessions whose every later turn keeps the prompt before and appends at most so many tokens: all of them could be
    /// direct. The prototype names such a profile without its rule; this one is ours.
    SmallAppend {
        /// The limit, tokens.
        limit: u32,
    },
}

/// Which sessions are kept. Sub-agents stay with their parents and are not judged.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleOptions {
    /// So many at most; the same seed keeps nearly the same ones of two numbers.
    pub sessions: Option<usize>,
    /// The share that is kept, 0 to 1, before `sessions`.
    pub rate: f64,
    /// Take the first ones instead of any.
    pub first: bool,
    /// Least turns.
    pub min_turns: usize,
    /// Bounds on the input of the first turn, tokens.
    pub initial_input: (u32, u32),
    /// What kind.
    pub profile: Profile,
    /// Only turns sent up to this time of the trace; a later one ends its session.
    pub until: Option<Micros>,
    /// Of the choice.
    pub seed: u64,
}

impl Default for SampleOptions {
    fn default() -> Self {
        Self {
            sessions: None,
            rate: 1.0,
            first: false,
            min_turns: 1,
            initial_input: (0, u32::MAX),
            profile: Profile::Any,
            until: None,
            seed: 0,
        }
    }
}

fn small_append(before: &Turn, turn: &Turn, limit: u32) -> bool {
    let shared = turn.shared_tokens(before).min(before.input_tokens);
    u64::from(shared) * 2 >= u64::from(before.input_tokens) && turn.input_tokens - shared <= limit
}

impl SampleOptions {
    fn fits(&self, session: &Session) -> bool {
        let (least, most) = self.initial_input;
        let turns = &session.turns;
        turns.len() >= self.min_turns.max(1)
            && turns.first().is_some_and(|t| (least..=most).contains(&t.input_tokens))
            && match self.profile {
                Profile::Any => true,
                Profile::SmallAppend { limit } => turns.windows(2).all(|pair| match pair {
                    [before, turn] => small_append(before, turn, limit),
                    _ => true,
                }),
            }
    }
}

/// The part of `trace` that `options` keep, in its order. Each session draws its lot from its id and the seed alone, so that
/// a session's luck does not depend on its neighbours, and a smaller sample is a part of a larger one.
pub fn sample(mut trace: Trace, options: &SampleOptions) -> Trace {
    if let Some(until) = options.until {
        let mut main_start = Micros::ZERO;
        for session in &mut trace.sessions {
            let start = if session.parent.is_some() {
                main_start.plus(session.start)
            } else {
                main_start = session.start;
                session.start
            };
            session.turns.retain(|turn| start.plus(turn.at) <= until);
        }
    }
    let lot = |session: &Session| mix64(namespace_of(&session.id) ^ mix64(options.seed));
    // Of 64 bits; a rate of 1 or more keeps all.
    let limit = options.rate * u64::MAX as f64;
    let mut kept: Vec<(u64, &str)> = trace
        .sessions
        .iter()
        .filter(|s| s.parent.is_none() && options.fits(s))
        .map(|s| (lot(s), s.id.as_str()))
        .filter(|(lot, _)| options.rate >= 1.0 || (*lot as f64) < limit)
        .collect();
    if !options.first {
        kept.sort_unstable();
    }
    kept.truncate(options.sessions.unwrap_or(usize::MAX));
    let kept: HashSet<String> = kept.into_iter().map(|(_, id)| id.to_owned()).collect();
    let root = |s: &Session| s.parent.as_ref().unwrap_or(&s.id).clone();
    trace
        .sessions
        .retain(|s| kept.contains(&root(s)) && !s.turns.is_empty());
    trace
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{open, read};

    const SAMPLE: &str = include_str!("../../../tests/data/claude_code_sample40.jsonl");

    fn trace() -> Trace {
        let (format, reader) = open(SAMPLE.as_bytes()).unwrap();
        read(reader, format, true).unwrap().trace
    }

    fn ids(options: &SampleOptions) -> Vec<String> {
        sample(trace(), options).sessions.into_iter().map(|s| s.id).collect()
    }

    #[test]
    fn a_seed_chooses_and_smaller_samples_are_parts_of_larger_ones() {
        let of = |sessions, seed| {
            ids(&SampleOptions {
                sessions: Some(sessions),
                seed,
                ..SampleOptions::default()
            })
        };
        assert_eq!((of(10, 1).len(), of(10, 1)), (10, of(10, 1)));
        assert_ne!(of(10, 1), of(10, 2));
        assert!(of(5, 1).iter().all(|id| of(10, 1).contains(id)));
        let all = ids(&SampleOptions::default());
        assert_eq!(all.len(), 40);
        let first = SampleOptions {
            sessions: Some(3),
            first: true,
            ..SampleOptions::default()
        };
        assert_eq!(ids(&first), all[..3]);
    }

    #[test]
    fn a_rate_keeps_its_share() {
        let kept: usize = (0..50)
            .map(|seed| {
                ids(&SampleOptions {
                    rate: 0.3,
                    seed,
                    ..SampleOptions::default()
                })
                .len()
            })
            .sum();
        // 2,000 draws of 0.3: a standard deviation of 20.5.
        assert!((500..=700).contains(&kept), "{kept}");
    }

    #[test]
    fn filters_hold() {
        let options = SampleOptions {
            min_turns: 20,
            initial_input: (10_000, 30_000),
            profile: Profile::SmallAppend {
                limit: SMALL_APPEND_TOKENS,
            },
            ..SampleOptions::default()
        };
        let part = sample(trace(), &options);
        assert!(!part.sessions.is_empty() && part.sessions.len() < 40);
        for session in &part.sessions {
            assert!(session.turns.len() >= 20);
            assert!((10_000..=30_000).contains(&session.turns[0].input_tokens));
            for pair in session.turns.windows(2) {
                assert!(pair[1].input_tokens - pair[1].shared_tokens(&pair[0]).min(pair[0].input_tokens) <= 8_192);
            }
        }
        let until = Micros::from_secs(600);
        let short = sample(
            trace(),
            &SampleOptions {
                until: Some(until),
                ..SampleOptions::default()
            },
        );
        assert!(short.sessions.iter().flat_map(|s| &s.turns).all(|t| t.at <= until));
        assert!(short.request_count() > 40 && short.request_count() < 2_705);
    }

    #[test]
    fn agents_stay_with_their_parents() {
        let line = |id: &str| {
            format!(
                r#"{{"id":"{id}","block_size":4,"requests":[{{"t":0,"in":8,"out":1,"hash_runs":[[1,2]]}},{{"t":5,"type":"subagent","agent_id":"a","requests":[{{"t":0,"in":8,"out":1,"hash_runs":[[9,2]]}}]}}]}}"#
            )
        };
        let text = [line("p"), line("q")].join("\n");
        let (format, reader) = open(text.as_bytes()).unwrap();
        let trace = read(reader, format, true).unwrap().trace;
        let options = SampleOptions {
            sessions: Some(1),
            ..SampleOptions::default()
        };
        let part = sample(trace, &options).sessions;
        assert_eq!(part.len(), 2);
        assert_eq!(part[1].parent.as_ref(), Some(&part[0].id));
    }
}
