//! Algorithm 1, Route: in which order a turn asks the decode workers (design §4.1, digest §1.3).
//!
//! A pure function of what the router estimates. It never refuses a worker for capacity (only a D does, digest R3) and
//! never counts anything: whoever sends the turn does. Workers come out in four tiers, in each ordered by the policy,
//! ties in the order given (the topology's):
//!
//! | tier | who | why so |
//! |---|---|---|
//! | ready | fewer than `rejects_max` rejects, no pause | |
//! | paused | the same, but asked for a pause | a pause is honoured by every sender; see [`Ranked::not_before`] |
//! | rejected | `rejects_max` rejects or more | the prototype dropped them, and with more than τ workers a session could miss the only one with room for longer than Theorem 1 allows; last, they are asked when all else said no |
//! | – | failed this turn already (`avoid`) | left out; the session clears the list itself |
//!
//! The exception: the pinned worker keeps its place through a pause while it holds more of the context than it misses.
//! A pause lasts 2.5 s at most, while moving the session costs its prefill *and* makes the next turn move too. It is still
//! not asked before the pause ends. The round-robin policy knows no pin and makes no exception.

use pinion_schemas::limits::REJECTS_MAX;
use pinion_schemas::{Micros, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt;

#[cfg(test)]
pub(crate) mod tests;

/// How workers are ordered inside a tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Round robin: topology order, from a place that moves by one per decision.
    Default,
    /// The pinned worker, then the least loaded.
    Sticky,
    /// The prototype's lexicographic [`Score`] over all overlap.
    #[default]
    KvAware,
    /// The same, but overlap counts only pages no other session shares.
    Exclusive,
    /// Smallest estimated time to first token, [`ttft`].
    Cost,
}

impl PolicyKind {
    /// Every policy, in order of declaration.
    pub const ALL: [Self; 5] = [Self::Default, Self::Sticky, Self::KvAware, Self::Exclusive, Self::Cost];

    /// The stable label, the same as in configuration files.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Sticky => "sticky",
            Self::KvAware => "kv-aware",
            Self::Exclusive => "exclusive",
            Self::Cost => "cost",
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// What decided a worker's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Why {
    /// The session belongs to it.
    Pinned,
    /// It holds pages of the context.
    Overlap,
    /// It was given less than its share of the work (`floor_bonus`).
    LoadFloor,
    /// It has the least to do.
    LeastLoaded,
    /// It was its turn.
    RoundRobin,
    /// It should answer first.
    Fastest,
    /// It asked for a pause.
    Paused,
    /// It rejected the session too often; ordered by how often.
    LeastRejected,
}

impl Why {
    /// The stable label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Pinned => "pinned",
            Self::Overlap => "overlap",
            Self::LoadFloor => "load-floor",
            Self::LeastLoaded => "least-loaded",
            Self::RoundRobin => "round-robin",
            Self::Fastest => "fastest",
            Self::Paused => "paused",
            Self::LeastRejected => "least-rejected",
        }
    }
}

/// The knobs (digest §1.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Which order.
    pub policy: PolicyKind,
    /// α: points for being the pinned worker, in pages. 1, so that any shared page beats pure stickiness.
    pub sticky_bonus: u32,
    /// K: points for a worker that never got any work, in pages; 0 is off. Must exceed the boilerplate all sessions
    /// share and stay below a real prefix, or it takes sessions from their pins.
    pub floor_bonus: u32,
    /// `τ_reject`: rejects of this session from which a worker is asked last; 0 is off.
    pub rejects_max: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            policy: PolicyKind::default(),
            sticky_bonus: 1,
            floor_bonus: 0,
            rejects_max: REJECTS_MAX,
        }
    }
}

/// What the router believes about one worker, seen from one session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Candidate<'a> {
    /// Its name.
    pub worker: &'a WorkerId,
    /// Pages of the chain it holds, from the root.
    pub overlap_pages: u32,
    /// Those of them that no other session uses.
    pub exclusive_pages: u32,
    /// Turns sent to it and not ended.
    pub inflight: u32,
    /// Routing decisions for it so far, one per turn.
    pub assigned: u64,
    /// Times it rejected this session ([`crate::dispatch::Rejects`]).
    pub rejects: u32,
    /// Nothing is sent to it before this, microseconds.
    pub paused_until: Micros,
    /// Tokens waiting to be prefilled in front of this turn.
    pub queue_tokens: u64,
    /// Prefill speed, tokens per second; 0 counts as 1.
    pub prefill_tokens_per_s: u64,
    /// Speed of the link that missing pages would come over, bytes per second; 0 counts as 1.
    pub link_bytes_per_s: u64,
}

/// One turn that wants a worker.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The worker the session belongs to.
    pub pin: Option<&'a WorkerId>,
    /// Full pages of the context before the append.
    pub chain_pages: u32,
    /// Tokens of the context with the append.
    pub context_tokens: u64,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Now, microseconds.
    pub now: Micros,
    /// Workers that failed this turn.
    pub avoid: &'a [WorkerId],
}

/// The prototype's score, compared from top to bottom (digest §1.3).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Score {
    /// Overlap, plus `sticky_bonus` if pinned, plus the load floor; in pages, more is better.
    pub points: u64,
    /// Whether it is the pinned worker; true is better.
    pub sticky: bool,
    /// Turns in flight; fewer is better.
    pub inflight: u32,
    /// Decisions so far; fewer is better.
    pub assigned: u64,
}

/// A worker in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Ranked<'a> {
    /// Its name.
    pub worker: &'a WorkerId,
    /// What decided the place.
    pub why: Why,
    /// For `explain`: its score, whatever the policy.
    pub score: Score,
    /// For `explain`: its estimated time to first token, microseconds, whatever the policy.
    pub ttft: Micros,
    /// Whether it holds pages of the context. From overlap alone: the load floor promises no reuse (digest T57).
    pub reuse_expected: bool,
    /// The sender must not ask it earlier, microseconds.
    pub not_before: Micros,
}

/// The candidates, best first. Pure: same input, same output.
pub fn rank<'a>(config: &Config, request: &Request<'_>, candidates: &[Candidate<'a>]) -> Vec<Ranked<'a>> {
    let fleet = Fleet::of(candidates);
    let mut keyed: Vec<_> = candidates
        .iter()
        .enumerate()
        .filter(|(_, c)| !request.avoid.contains(c.worker))
        .map(|(place, c)| fleet.place(config, request, place as u64, c))
        .collect();
    // Stable, so equals stay in topology order.
    keyed.sort_by_key(|(key, _)| *key);
    keyed.into_iter().map(|(_, ranked)| ranked).collect()
}

/// Estimated time to first token on `c`: rest of its pause + queue + prefill of what it misses + transfer of the pages
/// it misses, microseconds, each rounded up. A missing page costs both: P computes it, then it moves to D.
pub fn ttft(request: &Request<'_>, c: &Candidate<'_>) -> Micros {
    let held_pages = c.overlap_pages.min(request.chain_pages);
    let held_tokens = u64::from(held_pages) * u64::from(request.page_tokens);
    let missing_tokens = request.context_tokens.saturating_sub(held_tokens);
    let missing_bytes = u64::from(request.chain_pages - held_pages).saturating_mul(request.page_bytes);
    let waiting_tokens = c.queue_tokens.saturating_add(missing_tokens);
    let prefill = Micros::for_amount(u128::from(waiting_tokens), c.prefill_tokens_per_s);
    let transfer = Micros::for_amount(u128::from(missing_bytes), c.link_bytes_per_s);
    c.paused_until.since(request.now).plus(prefill).plus(transfer)
}

/// Points of the load floor: `K · (mean − assigned) / mean`, rounded down; 0 for a worker at or above the mean.
pub fn floor_points(bonus: u32, assigned: u64, total_assigned: u64, workers: usize) -> u64 {
    if bonus == 0 {
        return 0;
    }
    let total = u128::from(total_assigned);
    let deficit = total.saturating_sub(u128::from(assigned) * workers as u128);
    (u128::from(bonus) * deficit).checked_div(total).unwrap_or(0) as u64
}

/// Smaller is better, from left to right.
type Key = (Tier, [u64; 4]);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Tier {
    Ready,
    Paused,
    Rejected,
}

/// What the workers have in common.
struct Fleet {
    workers: usize,
    total_assigned: u64,
}

impl Fleet {
    fn of(candidates: &[Candidate<'_>]) -> Self {
        Self {
            workers: candidates.len(),
            total_assigned: candidates.iter().fold(0, |sum, c| sum.saturating_add(c.assigned)),
        }
    }

    fn place<'a>(&self, config: &Config, request: &Request<'_>, place: u64, c: &Candidate<'a>) -> (Key, Ranked<'a>) {
        let policy = config.policy;
        let sticky = request.pin == Some(c.worker);
        let score = self.score(config, sticky, c);
        let ttft = ttft(request, c);
        let paused = request.now < c.paused_until;
        let stays = sticky && policy != PolicyKind::Default && holds_most(request, c);
        let tier = if config.rejects_max > 0 && c.rejects >= config.rejects_max {
            Tier::Rejected
        } else if paused && !stays {
            Tier::Paused
        } else {
            Tier::Ready
        };
        let load = u64::from(c.inflight);
        let order = match (tier, policy) {
            (Tier::Rejected, _) => [u64::from(c.rejects), u64::from(paused), 0, 0],
            (_, PolicyKind::Default) => [self.places_after_cursor(place), 0, 0, 0],
            (_, PolicyKind::Sticky) => [u64::from(!sticky), load, c.assigned, 0],
            (_, PolicyKind::KvAware | PolicyKind::Exclusive) => {
                [u64::MAX - score.points, u64::from(!sticky), load, c.assigned]
            }
            (_, PolicyKind::Cost) => [ttft.0, u64::from(!sticky), load, c.assigned],
        };
        let ranked = Ranked {
            worker: c.worker,
            why: why(tier, policy, &score, counted_overlap(policy, c)),
            score,
            ttft,
            reuse_expected: c.overlap_pages > 0,
            not_before: if paused { c.paused_until } else { request.now },
        };
        ((tier, order), ranked)
    }

    fn score(&self, config: &Config, sticky: bool, c: &Candidate<'_>) -> Score {
        let bonus = if sticky {
            u64::from(config.sticky_bonus)
        } else {
            floor_points(config.floor_bonus, c.assigned, self.total_assigned, self.workers)
        };
        Score {
            points: u64::from(counted_overlap(config.policy, c)) + bonus,
            sticky,
            inflight: c.inflight,
            assigned: c.assigned,
        }
    }

    /// Round robin without a cursor of its own: decisions so far are the cursor, so a rebuilt router goes on as before.
    fn places_after_cursor(&self, place: u64) -> u64 {
        let workers = self.workers as u64;
        (place + workers - self.total_assigned % workers) % workers
    }
}

fn counted_overlap(policy: PolicyKind, c: &Candidate<'_>) -> u32 {
    match policy {
        PolicyKind::Exclusive => c.exclusive_pages,
        _ => c.overlap_pages,
    }
}

fn holds_most(request: &Request<'_>, c: &Candidate<'_>) -> bool {
    c.overlap_pages > request.chain_pages.saturating_sub(c.overlap_pages)
}

fn why(tier: Tier, policy: PolicyKind, score: &Score, overlap: u32) -> Why {
    match (tier, policy) {
        (Tier::Rejected, _) => Why::LeastRejected,
        (Tier::Paused, _) => Why::Paused,
        (Tier::Ready, PolicyKind::Default) => Why::RoundRobin,
        (Tier::Ready, PolicyKind::Cost) => Why::Fastest,
        (Tier::Ready, _) if score.sticky => Why::Pinned,
        (Tier::Ready, PolicyKind::Sticky) => Why::LeastLoaded,
        (Tier::Ready, _) if score.points > u64::from(overlap) => Why::LoadFloor,
        (Tier::Ready, _) if overlap > 0 => Why::Overlap,
        (Tier::Ready, _) => Why::LeastLoaded,
    }
}
