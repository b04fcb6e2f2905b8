use super::*;
use crate::route::tests::{any_candidates, idle};
use crate::route::{Candidate, Config, PolicyKind, Request, rank};
use pinion_schemas::Micros;
use pinion_schemas::limits::REJECTS_MAX;
use proptest::prelude::*;

fn id(n: usize) -> WorkerId {
    WorkerId::new(format!("d{n}")).unwrap()
}

fn request(pin: Option<&WorkerId>, chain_pages: u32) -> Request<'_> {
    Request {
        pin,
        chain_pages,
        context_tokens: u64::from(chain_pages) * 64 + 100,
        page_tokens: 64,
        page_bytes: 1_000_000,
        now: Micros(1_000),
        avoid: &[],
    }
}

/// One session before its workers, in the way of `session.rs`.
struct World {
    config: Config,
    rejects: Rejects,
    /// Pages of the session each worker holds.
    held: Vec<u32>,
    chain_pages: u32,
    pin: Option<WorkerId>,
    migrations: u32,
    keeps_budget: bool,
}

impl World {
    fn new(policy: PolicyKind, workers: usize) -> Self {
        Self {
            config: Config {
                policy,
                ..Config::default()
            },
            rejects: Rejects::default(),
            held: vec![0; workers],
            chain_pages: 10,
            pin: None,
            migrations: 0,
            keeps_budget: true,
        }
    }

    fn candidates(&self) -> Vec<Candidate<'static>> {
        let of = |(n, held): (usize, &u32)| Candidate {
            overlap_pages: *held,
            exclusive_pages: *held,
            rejects: self.rejects.count(&id(n)),
            ..idle(n)
        };
        self.held.iter().enumerate().map(of).collect()
    }

    /// One turn: asks until somebody has room, at most 8 rounds. Returns who served it and the attempts.
    fn turn(&mut self, mut room: impl FnMut(usize) -> bool) -> Option<(usize, usize)> {
        let mut attempts = 0;
        for round in 0..8 {
            for r in rank(
                &self.config,
                &request(self.pin.as_ref(), self.chain_pages),
                &self.candidates(),
            ) {
                let d: usize = r.worker.as_str()[1..].parse().unwrap();
                attempts += 1;
                if room(d) {
                    self.served(d, round > 0);
                    return Some((d, attempts));
                }
                self.rejects.rejected(r.worker, RejectReason::NoSpace);
            }
        }
        None
    }

    fn served(&mut self, d: usize, fallback: bool) {
        let direct = self.held[d] == self.chain_pages;
        let moves = self.pin.as_ref().is_some_and(|p| *p != id(d));
        let allowed = !moves || !self.keeps_budget || self.rejects.may_migrate(self.held.len(), REJECTS_MAX);
        if direct && !fallback {
            self.rejects.completed_direct(&id(d));
        }
        self.chain_pages += 3;
        if !allowed || fallback {
            return;
        }
        if moves {
            self.rejects.migrated(MigrationReason::Rejected);
            self.migrations += 1;
        }
        self.held[d] = self.chain_pages;
        self.pin = Some(id(d));
    }
}

#[test]
fn a_reject_counts_where_it_arrives_and_a_direct_turn_clears_that_pair_only() {
    let (mut a, mut b) = (Rejects::default(), Rejects::default());
    for n in 1..=3 {
        assert_eq!(a.rejected(&id(0), RejectReason::NoSpace), n);
    }
    a.rejected(&id(1), RejectReason::QueueFull);
    assert_eq!(a.rejected(&id(1), RejectReason::StaleEpoch), 1, "tells of the message");
    // Another session is not affected.
    assert_eq!(b.count(&id(0)), 0);
    a.completed_direct(&id(0));
    assert_eq!((a.count(&id(0)), a.count(&id(1))), (0, 1));
    b.completed_direct(&id(1));
    a.forget(&id(1));
    assert_eq!(a, b);
}

#[test]
fn the_book_is_bounded_and_forgets_the_least_rejected() {
    let mut rejects = Rejects::default();
    for n in 0..WORKERS_MAX {
        rejects.rejected(&id(n), RejectReason::NoSpace);
        if n != 7 {
            rejects.rejected(&id(n), RejectReason::NoSpace);
        }
    }
    rejects.rejected(&id(WORKERS_MAX), RejectReason::NoSpace);
    assert_eq!(rejects.view().len(), WORKERS_MAX);
    assert_eq!((rejects.count(&id(7)), rejects.count(&id(WORKERS_MAX))), (0, 1));
}

#[test]
fn only_moves_by_choice_are_charged() {
    let mut rejects = Rejects::default();
    rejects.migrated(MigrationReason::WorkerLost);
    rejects.migrated(MigrationReason::Drain);
    assert!(rejects.may_migrate(2, 1) && !rejects.may_migrate(1, 1) && rejects.may_migrate(1, 0));
    rejects.migrated(MigrationReason::Rejected);
    assert!(!rejects.may_migrate(2, 1) && rejects.migrations() == 1);
}

/// Why the migration bound is a budget: the pinned worker rejects every second turn, and serves directly between.
#[test]
fn the_counts_alone_do_not_bound_migrations() {
    for keeps_budget in [false, true] {
        let mut world = World {
            keeps_budget,
            ..World::new(PolicyKind::KvAware, 2)
        };
        for turn in 0..200 {
            let pin = world.pin.clone();
            world.turn(|d| turn % 2 == 0 || pin != Some(id(d)));
        }
        assert_eq!(world.migrations <= REJECTS_MAX, keeps_budget, "{}", world.migrations);
    }
}

const KEEPING: [PolicyKind; 3] = [PolicyKind::Sticky, PolicyKind::KvAware, PolicyKind::Exclusive];

proptest! {
    /// Theorem 1, I10: with room somewhere, whatever was counted before, a turn is served within |D|·τ attempts.
    #[test]
    fn theorem_1_nobody_starves(
        all in any_candidates(12), with_room in prop::collection::vec(any::<bool>(), 12), lucky in any::<prop::sample::Index>(),
        pin in 0usize..12, policy in 0usize..5,
    ) {
        let lucky = lucky.index(all.len());
        let pin = id(pin);
        let config = Config { policy: PolicyKind::ALL[policy], ..Config::default() };
        let room = |worker: &WorkerId| (0..all.len()).any(|d| *worker == id(d) && (d == lucky || with_room[d]));
        let ranked = rank(&config, &request(Some(&pin), 800), &all);
        let attempts = 1 + ranked.iter().position(|r| room(r.worker)).unwrap();
        prop_assert!(attempts <= all.len() && attempts <= all.len() * REJECTS_MAX as usize);
    }

    /// Theorem 2: prefix resident on the pinned worker and not rejected there too often: it is asked first, each time.
    /// (Append ≤ τ and room make its answer "direct": Algorithm 2.) A load floor K > 0 trades this away on purpose.
    #[test]
    fn theorem_2_the_resident_pin_is_first(
        mut all in any_candidates(12), pin in any::<prop::sample::Index>(), shared in 0u32..900, chain in 1u32..900,
        policy in 0usize..3,
    ) {
        for c in &mut all {
            c.overlap_pages = c.overlap_pages.min(chain);
            c.exclusive_pages = c.overlap_pages.saturating_sub(shared);
        }
        let at = pin.index(all.len());
        all[at].overlap_pages = chain;
        all[at].exclusive_pages = chain.saturating_sub(shared);
        all[at].rejects %= REJECTS_MAX;
        let pin = all[at].worker.clone();
        let config = Config { policy: KEEPING[policy], ..Config::default() };
        let ranked = rank(&config, &request(Some(&pin), chain), &all);
        prop_assert_eq!(ranked[0].worker, &pin);
        prop_assert!(ranked[0].reuse_expected);
        prop_assert_eq!(rank(&config, &request(Some(&pin), chain), &all), ranked);
    }

    /// R5: after 3 rejects in a row, wherever they come from, the session settles with at most one more move; if they all
    /// come from the pinned worker, that one is the only move at all.
    #[test]
    fn a_burst_of_rejects_moves_a_session_once(
        workers in 1usize..7, warm in 1usize..6, only_pin in any::<bool>(), policy in 0usize..3,
    ) {
        let mut world = World::new(KEEPING[policy], workers);
        for _ in 0..warm {
            world.turn(|_| true);
        }
        prop_assert_eq!(world.migrations, 0);
        let first = world.pin.clone().unwrap();
        let mut burst = 3;
        for _ in 0..3 {
            world.turn(|d| {
                let rejects = burst > 0 && (!only_pin || id(d) == first);
                burst -= i32::from(rejects);
                !rejects
            });
        }
        let during = world.migrations;
        for _ in 0..20 {
            let (_, attempts) = world.turn(|_| true).unwrap();
            prop_assert_eq!(attempts, 1);
        }
        prop_assert!(world.migrations - during <= 1);
        prop_assert!(!only_pin || world.migrations <= 1);
    }

    /// Whatever the workers answer, a session's pin moves at most (|D|−1)·τ times.
    #[test]
    fn migrations_are_bounded(
        workers in 1usize..5, policy in 0usize..5, answers in prop::collection::vec(any::<bool>(), 1..400),
    ) {
        let mut world = World::new(PolicyKind::ALL[policy], workers);
        let mut answers = answers.into_iter().peekable();
        while answers.peek().is_some() {
            world.turn(|_| answers.next().unwrap_or(true));
        }
        prop_assert!(world.migrations as usize <= (workers - 1) * REJECTS_MAX as usize);
    }
}
