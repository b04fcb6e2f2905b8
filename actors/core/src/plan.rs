//! Where the pages come from that a D misses of a session (design §4, item 4): the cheapest source that is alive.
//!
//! Who computes a token needs the KV of all in front of it. So a plan is one source: a P, which computes what it lacks and sends
//! all that the D lacks, or another D that has the session and sends it, while the D computes the rest itself. The second keeps
//! every P free, and is possible while that rest is an append the D may run directly. Splitting one seed over several sources
//! would save bytes of one link and no computing; a seed moves while it is computed, so those bytes are not waited for.

use pinion_schemas::{Micros, WorkerId};

/// What is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need<'a> {
    /// The D.
    pub decode: &'a WorkerId,
    /// Tokens of the context.
    pub context_tokens: u64,
    /// Leading pages of it on the D.
    pub resident_pages: u32,
}

/// What moving and computing cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Tokens per page.
    pub page_tokens: u32,
    /// Bytes per page.
    pub page_bytes: u64,
    /// Prefill speed of a worker, tokens per second.
    pub prefill_tokens_per_s: u64,
    /// Speed of the link into a D, bytes per second.
    pub link_bytes_per_s: u64,
    /// Longest append that a D computes itself, tokens.
    pub direct_append_tokens_max: u32,
}

/// A worker that may help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Who.
    pub worker: WorkerId,
    /// Leading pages of the context it is believed to have.
    pub held_pages: u32,
    /// Tokens it has to compute before.
    pub queued_tokens: u64,
}

/// Where the pages come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan<'a> {
    /// This P computes what it lacks and sends all that the D lacks.
    Prefill(&'a WorkerId),
    /// This D sends what it has; the D computes the rest.
    Move {
        /// It.
        from: &'a WorkerId,
        /// The pages end before this one, counted from the start of the context.
        end: u32,
    },
}

/// The plan that ends first. Of equal ones a move, and then the source that is named first. `None` without any source.
pub fn cheapest<'a>(
    need: &Need<'_>,
    costs: &Costs,
    prefill: impl Iterator<Item = &'a Source>,
    decode: impl Iterator<Item = &'a Source>,
) -> Option<Plan<'a>> {
    let moves = decode.filter_map(|s| {
        costs.of_move(need, s).map(|cost| {
            (
                cost,
                Plan::Move {
                    from: &s.worker,
                    end: s.held_pages,
                },
            )
        })
    });
    let seeds = prefill.map(|s| (costs.of_seed(need, s), Plan::Prefill(&s.worker)));
    // The first of equal ones is kept.
    moves.chain(seeds).min_by_key(|(cost, _)| *cost).map(|(_, plan)| plan)
}

impl Costs {
    fn rest(&self, need: &Need<'_>, held_pages: u32) -> u64 {
        need.context_tokens
            .saturating_sub(u64::from(held_pages) * u64::from(self.page_tokens))
    }

    fn computing(&self, tokens: u64) -> Micros {
        Micros::for_amount(tokens.into(), self.prefill_tokens_per_s)
    }

    fn moving(&self, pages: u64) -> Micros {
        Micros::for_amount(u128::from(pages) * u128::from(self.page_bytes), self.link_bytes_per_s)
    }

    /// Pages leave while later ones are computed, so the longer of the two counts.
    fn of_seed(&self, need: &Need<'_>, source: &Source) -> Micros {
        let pages = need.context_tokens / u64::from(self.page_tokens.max(1));
        let moving = self.moving(pages.saturating_sub(need.resident_pages.into()));
        let computing = self.computing(self.rest(need, source.held_pages));
        self.computing(source.queued_tokens).plus(computing.max(moving))
    }

    /// `None`: it has nothing that the D lacks, or too little of it.
    fn of_move(&self, need: &Need<'_>, source: &Source) -> Option<Micros> {
        let rest = self.rest(need, source.held_pages);
        if source.worker == *need.decode || rest > self.direct_append_tokens_max.into() {
            return None;
        }
        let pages = source.held_pages.checked_sub(need.resident_pages).filter(|n| *n > 0)?;
        Some(self.moving(pages.into()).plus(self.computing(rest)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const COSTS: Costs = Costs {
        page_tokens: 64,
        page_bytes: 1 << 20,
        prefill_tokens_per_s: 10_000,
        link_bytes_per_s: 2_500_000_000,
        direct_append_tokens_max: 8_192,
    };

    fn name(text: &str) -> WorkerId {
        WorkerId::new(text).unwrap()
    }

    fn source(text: &str, held_pages: u32, queued_tokens: u64) -> Source {
        Source {
            worker: name(text),
            held_pages,
            queued_tokens,
        }
    }

    fn plan(resident_pages: u32, prefill: &[Source], decode: &[Source]) -> Option<String> {
        let d0 = name("d0");
        let need = Need {
            decode: &d0,
            context_tokens: 64_000,
            resident_pages,
        };
        cheapest(&need, &COSTS, prefill.iter(), decode.iter()).map(|plan| match plan {
            Plan::Prefill(worker) => worker.to_string(),
            Plan::Move { from, end } => format!("{from} to {end}"),
        })
    }

    #[test]
    fn the_cheapest_live_source_is_taken() {
        let cold = [source("p0", 0, 0)];
        assert_eq!(plan(0, &cold, &[source("d1", 990, 0)]).as_deref(), Some("d1 to 990"));
        // A backup that is as long costs the same transfer, and computes beside it.
        let backup = [source("p0", 990, 0)];
        assert_eq!(plan(0, &backup, &[source("d1", 990, 0)]).as_deref(), Some("p0"));
        let busy = [source("p0", 990, 5_000)];
        assert_eq!(plan(0, &busy, &[source("d1", 990, 0)]).as_deref(), Some("d1 to 990"));
        // What would be left is too long for a D.
        assert_eq!(plan(0, &cold, &[source("d1", 800, 0)]).as_deref(), Some("p0"));
        // It has no more than the D itself, or is that D.
        assert_eq!(
            plan(990, &cold, &[source("d1", 990, 0), source("d0", 999, 0)]).as_deref(),
            Some("p0")
        );
        assert_eq!(plan(0, &[], &[]), None);
    }

    proptest! {
        /// Whatever is believed of the sources: a plan moves only pages that the D lacks, leaves it no more than it may compute, and
        /// none that was possible is cheaper.
        #[test]
        fn a_plan_is_possible_and_the_best(
            context in 1_u64..2_000_000, resident: u16,
            sources in prop::collection::vec((any::<bool>(), 0_u32..40_000, 0_u64..100_000), 0..6),
        ) {
            let d0 = name("d0");
            let need = Need { decode: &d0, context_tokens: context, resident_pages: resident.into() };
            let all: Vec<(bool, Source)> =
                sources.into_iter().enumerate().map(|(i, (p, held, queued))| (p, source(&format!("w{i}"), held, queued))).collect();
            let of = |kind: bool| all.iter().filter(move |(p, _)| *p == kind).map(|(_, s)| s);
            let cost = |s: &Source, p: bool| if p { Some(COSTS.of_seed(&need, s)) } else { COSTS.of_move(&need, s) };
            let best = all.iter().filter_map(|(p, s)| cost(s, *p)).min();
            match cheapest(&need, &COSTS, of(true), of(false)) {
                None => prop_assert_eq!(best, None),
                Some(Plan::Prefill(w)) => {
                    let s = of(true).find(|s| s.worker == *w).unwrap();
                    prop_assert_eq!(cost(s, true), best);
                }
                Some(Plan::Move { from, end }) => {
                    let s = of(false).find(|s| s.worker == *from).unwrap();
                    prop_assert_eq!(cost(s, false), best);
                    prop_assert!(end > u32::from(resident));
                    prop_assert!(context.saturating_sub(u64::from(end) * 64) <= 8_192);
                }
            }
        }
    }
}
