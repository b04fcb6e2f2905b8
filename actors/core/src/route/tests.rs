use super::*;
use proptest::prelude::*;

fn id(n: usize) -> WorkerId {
    WorkerId::new(format!("d{n}")).unwrap()
}

/// Names live as long as the tests.
pub(crate) fn idle(n: usize) -> Candidate<'static> {
    Candidate {
        worker: Box::leak(Box::new(id(n))),
        overlap_pages: 0,
        exclusive_pages: 0,
        inflight: 0,
        assigned: 0,
        rejects: 0,
        paused_until: Micros::ZERO,
        queue_tokens: 0,
        prefill_tokens_per_s: 10_000,
        link_bytes_per_s: 1_000_000_000,
    }
}

fn fleet(n: usize, edit: impl Fn(usize, &mut Candidate<'_>)) -> Vec<Candidate<'static>> {
    let mut all: Vec<_> = (0..n).map(idle).collect();
    all.iter_mut().enumerate().for_each(|(i, c)| edit(i, c));
    all
}

const TURN: Request<'static> = Request {
    pin: None,
    chain_pages: 800,
    context_tokens: 800 * 64 + 100,
    page_tokens: 64,
    page_bytes: 1_000_000,
    now: Micros(1_000),
    avoid: &[],
};

fn pinned(pin: &WorkerId) -> Request<'_> {
    Request { pin: Some(pin), ..TURN }
}

fn config(policy: PolicyKind) -> Config {
    Config {
        policy,
        ..Config::default()
    }
}

fn names<'a>(ranked: &[Ranked<'a>]) -> Vec<&'a str> {
    ranked.iter().map(|r| r.worker.as_str()).collect()
}

fn order(config: &Config, request: &Request<'_>, candidates: &[Candidate<'_>]) -> Vec<String> {
    names(&rank(config, request, candidates))
        .into_iter()
        .map(str::to_owned)
        .collect()
}

#[test]
fn labels_are_those_of_the_configuration() {
    for p in PolicyKind::ALL {
        assert_eq!(serde_plain(&p), p.label());
        assert_eq!(p.to_string(), p.label());
    }
    for w in [
        Why::Pinned,
        Why::Overlap,
        Why::LoadFloor,
        Why::LeastLoaded,
        Why::RoundRobin,
        Why::Fastest,
        Why::Paused,
        Why::LeastRejected,
    ] {
        assert_eq!(serde_plain(&w), w.label());
    }
}

/// The name serde gives a unit variant: a `Formatter` is a serializer of those.
fn serde_plain(value: &impl Serialize) -> String {
    struct Plain<'a, T>(&'a T);
    impl<T: Serialize> fmt::Display for Plain<'_, T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.serialize(f)
        }
    }
    Plain(value).to_string()
}

// The prototype's unit tests (digest §4.3, 001:15888-16233), in its order.

#[test]
fn a_full_blacklist_still_yields_every_worker_least_rejected_first() {
    let all = fleet(3, |i, c| {
        c.rejects = [5, 10, 3][i];
        c.overlap_pages = [0, 500, 0][i];
    });
    for policy in PolicyKind::ALL {
        let ranked = rank(&config(policy), &TURN, &all);
        assert_eq!(names(&ranked), ["d2", "d0", "d1"], "{policy}");
        assert!(ranked.iter().all(|r| r.why == Why::LeastRejected));
    }
}

#[test]
fn as_many_rejects_as_workers_times_threshold_visit_every_worker() {
    let mut all = fleet(4, |i, c| c.overlap_pages = 100 * i as u32);
    let mut visited = std::collections::BTreeMap::new();
    for _ in 0..all.len() as u32 * REJECTS_MAX {
        let first = rank(&Config::default(), &TURN, &all).remove(0).worker;
        all.iter_mut().find(|c| c.worker == first).unwrap().rejects += 1;
        *visited.entry(first).or_insert(0) += 1;
    }
    assert_eq!(visited.into_values().collect::<Vec<_>>(), [REJECTS_MAX; 4]);
}

#[test]
fn threshold_zero_disables() {
    let all = fleet(2, |i, c| {
        c.rejects = [99, 0][i];
        c.overlap_pages = [5, 1][i];
    });
    let off = Config {
        rejects_max: 0,
        ..Config::default()
    };
    assert_eq!(order(&off, &TURN, &all), ["d0", "d1"]);
    assert_eq!(order(&Config::default(), &TURN, &all), ["d1", "d0"]);
}

#[test]
fn the_score_has_four_parts_and_is_pure() {
    let d0 = id(0);
    let all = fleet(1, |_, c| {
        (c.overlap_pages, c.inflight, c.assigned) = (7, 2, 9);
    });
    let score = rank(&Config::default(), &pinned(&d0), &all)[0].score;
    let expected = Score {
        points: 8,
        sticky: true,
        inflight: 2,
        assigned: 9,
    };
    assert_eq!(score, expected);
    assert_eq!(rank(&Config::default(), &pinned(&d0), &all)[0].score, expected);
}

#[test]
fn overlap_of_two_beats_sticky_alone_and_sticky_wins_at_equal_overlap() {
    let d1 = id(1);
    let two = fleet(2, |i, c| c.overlap_pages = [2, 0][i]);
    assert_eq!(order(&Config::default(), &pinned(&d1), &two), ["d0", "d1"]);
    let equal = fleet(2, |_, c| c.overlap_pages = 2);
    assert_eq!(order(&Config::default(), &pinned(&d1), &equal), ["d1", "d0"]);
}

#[test]
fn then_fewer_in_flight_then_fewer_assigned_then_topology_in_strict_order() {
    let all = fleet(4, |i, c| {
        c.inflight = [1, 0, 0, 0][i];
        c.assigned = [0, 5, 4, 4][i];
    });
    assert_eq!(order(&Config::default(), &TURN, &all), ["d2", "d3", "d1", "d0"]);
    // One page of overlap outweighs any load.
    let all = fleet(2, |i, c| (c.overlap_pages, c.inflight) = [(1, 1_000), (0, 0)][i]);
    assert_eq!(order(&Config::default(), &TURN, &all), ["d0", "d1"]);
}

#[test]
fn the_floor_is_off_by_default_off_when_sticky_and_never_negative() {
    let all = fleet(2, |i, c| c.assigned = [20, 0][i]);
    assert_eq!(rank(&Config::default(), &TURN, &all)[0].score.points, 0);
    let d1 = id(1);
    let on = Config {
        floor_bonus: 200,
        ..Config::default()
    };
    assert_eq!(rank(&on, &pinned(&d1), &all)[0].score.points, 1);
    assert_eq!(rank(&on, &TURN, &all)[0].why, Why::LoadFloor);
    assert!(!rank(&on, &TURN, &all)[0].reuse_expected, "T57");
    assert_eq!(floor_points(200, 0, 0, 2), 0, "mean 0");
    assert_eq!([0, 5, 10, 15].map(|a| floor_points(200, a, 20, 2)), [200, 100, 0, 0]);
}

#[test]
fn a_real_prefix_beats_the_floor_and_a_cold_worker_beats_boilerplate() {
    let on = Config {
        floor_bonus: 200,
        ..Config::default()
    };
    for (overlap, first, points) in [(800, "d0", 801), (50, "d1", 200)] {
        let all = fleet(2, |i, c| (c.overlap_pages, c.assigned) = [(overlap, 20), (0, 0)][i]);
        let d0 = id(0);
        let ranked = rank(&on, &pinned(&d0), &all);
        assert_eq!((ranked[0].worker.as_str(), ranked[0].score.points), (first, points));
    }
}

// What the prototype did not have.

#[test]
fn round_robin_moves_on_by_one_per_decision() {
    let mut all = fleet(3, |_, _| ());
    let mut seen = Vec::new();
    for _ in 0..7 {
        let first = rank(&config(PolicyKind::Default), &TURN, &all).remove(0);
        assert_eq!(first.why, Why::RoundRobin);
        all.iter_mut().find(|c| c.worker == first.worker).unwrap().assigned += 1;
        seen.push(first.worker.to_string());
    }
    assert_eq!(seen, ["d0", "d1", "d2", "d0", "d1", "d2", "d0"]);
    assert!(rank(&config(PolicyKind::Default), &TURN, &[]).is_empty());
}

#[test]
fn sticky_knows_the_pin_and_load_only() {
    let d1 = id(1);
    let all = fleet(3, |i, c| {
        c.overlap_pages = [800, 0, 0][i];
        c.inflight = [1, 9, 0][i];
    });
    let ranked = rank(&config(PolicyKind::Sticky), &pinned(&d1), &all);
    assert_eq!(names(&ranked), ["d1", "d2", "d0"]);
    assert_eq!(
        ranked.iter().map(|r| r.why).collect::<Vec<_>>(),
        [Why::Pinned, Why::LeastLoaded, Why::LeastLoaded]
    );
}

#[test]
fn exclusive_ignores_what_all_sessions_share() {
    let all = fleet(2, |i, c| (c.overlap_pages, c.exclusive_pages) = [(50, 0), (10, 10)][i]);
    assert_eq!(order(&config(PolicyKind::KvAware), &TURN, &all), ["d0", "d1"]);
    assert_eq!(order(&config(PolicyKind::Exclusive), &TURN, &all), ["d1", "d0"]);
}

#[test]
fn cost_weighs_queue_against_missing_prefill_and_transfer() {
    // Nothing held: 51,300 tokens at 10,000/s, and 800 MB at 1 GB/s. All held: 100 tokens.
    let mut all = fleet(2, |i, c| c.overlap_pages = [0, 800][i]);
    let ttfts = |all: &[Candidate<'_>]| all.iter().map(|c| ttft(&TURN, c).0).collect::<Vec<_>>();
    assert_eq!(ttfts(&all), [5_130_000 + 800_000, 10_000]);
    assert_eq!(order(&config(PolicyKind::Cost), &TURN, &all), ["d1", "d0"]);
    all[1].queue_tokens = 60_000;
    assert_eq!(order(&config(PolicyKind::Cost), &TURN, &all), ["d0", "d1"]);
    // Unknown speeds are slow, not a division by zero; more overlap than pages is all of them.
    all[0].prefill_tokens_per_s = 0;
    all[1].overlap_pages = u32::MAX;
    assert_eq!(order(&config(PolicyKind::Cost), &TURN, &all), ["d1", "d0"]);
}

#[test]
fn a_pause_sends_a_worker_behind_unless_it_is_the_pin_and_holds_most() {
    let d0 = id(0);
    let until = Micros(2_000_000);
    let paused = |overlap| {
        fleet(2, |i, c| {
            if i == 0 {
                (c.overlap_pages, c.paused_until) = (overlap, until);
            }
        })
    };
    let ranked = rank(&Config::default(), &TURN, &paused(800));
    assert_eq!(
        (names(&ranked), ranked[1].why, ranked[1].not_before),
        (vec!["d1", "d0"], Why::Paused, until)
    );
    let ranked = rank(&Config::default(), &pinned(&d0), &paused(800));
    assert_eq!(
        (names(&ranked), ranked[0].why, ranked[0].not_before),
        (vec!["d0", "d1"], Why::Pinned, until)
    );
    assert_eq!(order(&Config::default(), &pinned(&d0), &paused(400)), ["d1", "d0"]);
    assert_eq!(
        order(&config(PolicyKind::Default), &pinned(&d0), &paused(800)),
        ["d1", "d0"]
    );
    // Over when it is over.
    let later = Request { now: until, ..TURN };
    assert_eq!(order(&Config::default(), &later, &paused(800)), ["d0", "d1"]);
}

#[test]
fn a_worker_that_failed_this_turn_is_left_out() {
    let avoid = [id(0)];
    let request = Request { avoid: &avoid, ..TURN };
    assert_eq!(order(&Config::default(), &request, &fleet(2, |_, _| ())), ["d1"]);
}

prop_compose! {
    pub(crate) fn any_candidates(max: usize)(
        drawn in prop::collection::vec(
            (0u32..900, 0u32..900, 0u32..5, 0u64..50, 0u32..6, 0u64..3_000, any::<u64>(), any::<u64>(), any::<u64>()),
            1..max,
        ),
    ) -> Vec<Candidate<'static>> {
        fleet(drawn.len(), |i, c| {
            let d = drawn[i];
            (c.overlap_pages, c.exclusive_pages, c.inflight, c.assigned) = (d.0, d.1.min(d.0), d.2, d.3);
            (c.rejects, c.paused_until) = (d.4, Micros(d.5));
            (c.queue_tokens, c.prefill_tokens_per_s, c.link_bytes_per_s) = (d.6, d.7, d.8);
        })
    }
}

proptest! {
    /// R3: whatever is believed, every worker that did not fail the turn is offered exactly once.
    #[test]
    fn nobody_is_refused(all in any_candidates(20), pin in 0usize..20, policy in 0usize..5, floor in 0u32..300) {
        let pin = id(pin);
        let config = Config { floor_bonus: floor, ..config(PolicyKind::ALL[policy]) };
        let ranked = rank(&config, &pinned(&pin), &all);
        let mut got: Vec<_> = ranked.iter().map(|r| r.worker).collect();
        let mut want: Vec<_> = all.iter().map(|c| c.worker).collect();
        got.sort();
        want.sort();
        prop_assert_eq!(got, want);
        // Never a rejected one before one that is not, nor a paused one before a ready one.
        let tiers: Vec<_> = ranked.iter().map(|r| match r.why {
            Why::LeastRejected => 2,
            Why::Paused => 1,
            _ => 0,
        }).collect();
        prop_assert!(tiers.is_sorted());
    }
}
