//! Every order in which two sessions of three turns can meet two decode workers, with a few faults, looked at state by state.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod world;

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use world::{Bug, Faults, Setup, World};

struct Found {
    states: usize,
    ends: usize,
}

fn hash(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

/// Breadth first over all states that can be reached; the first violation is given back with the way to it.
fn explore(start: World) -> Result<Found, String> {
    let mut seen = HashSet::from([hash(&start)]);
    let mut level = vec![start];
    let mut ends = 0;
    while !level.is_empty() {
        let mut next = Vec::new();
        for world in level {
            let events = world.events();
            if events.is_empty() {
                ends += 1;
                world.check_terminal().map_err(|e| format!("{e}\n{world:#?}"))?;
            }
            for event in events {
                let mut then = world.clone();
                let step = then.apply(event).and_then(|()| then.check());
                step.map_err(|e| format!("{e}, by {event:?}\n{world:#?}"))?;
                if seen.insert(hash(&then)) {
                    next.push(then);
                }
            }
        }
        level = next;
    }
    Ok(Found {
        states: seen.len(),
        ends,
    })
}

fn world(sessions: usize, turns: u32, faults: Faults, bug: Bug) -> Result<Found, String> {
    let setup = Setup {
        turns,
        pool_pages: 8,
        bug,
    };
    explore(World::new(sessions, 2, setup, faults))
}

/// Everything is looked at, nothing is violated, and each world has about as many states as when it was last looked at by a
/// person: a world that has shrunk explores less than it says.
fn holds(sessions: usize, turns: u32, faults: Faults, states_at_least: usize) {
    let found = world(sessions, turns, faults, Bug::None).unwrap_or_else(|violation| panic!("{violation}"));
    eprintln!(
        "{sessions} sessions, {turns} turns: {} states, {} ends",
        found.states, found.ends
    );
    assert!(found.states >= states_at_least, "only {} states", found.states);
}

#[test]
fn two_sessions_of_three_turns_without_faults() {
    holds(2, 3, Faults::default(), 3_000);
}

#[test]
fn two_sessions_of_three_turns_with_rejects() {
    let rejects = 2;
    holds(
        2,
        3,
        Faults {
            rejects,
            ..Faults::default()
        },
        50_000,
    );
}

#[test]
fn two_sessions_of_three_turns_with_a_client_that_leaves() {
    let cancels = 1;
    holds(
        2,
        3,
        Faults {
            cancels,
            ..Faults::default()
        },
        100_000,
    );
}

/// With two sessions of three turns these worlds have tens of millions of states, so each is looked at from both sides: one
/// session for its whole life, and two that meet in one turn.
#[test]
fn messages_that_are_lost() {
    let faults = Faults {
        lost: 1,
        ..Faults::default()
    };
    holds(1, 3, faults, 300);
    holds(2, 1, faults, 3_000);
}

#[test]
fn messages_that_come_too_late() {
    let faults = Faults {
        late: 1,
        ..Faults::default()
    };
    holds(1, 3, faults, 800);
    holds(2, 1, faults, 13_000);
}

#[test]
fn deadlines_that_pass_while_the_answer_is_under_way() {
    let faults = Faults {
        hasty: 1,
        ..Faults::default()
    };
    holds(1, 3, faults, 80);
    holds(2, 1, faults, 1_000);
}

#[test]
fn a_worker_that_dies_and_comes_back() {
    let faults = Faults {
        losses: 1,
        ..Faults::default()
    };
    holds(1, 3, faults, 3_000);
    let faults = Faults {
        losses: 2,
        ..Faults::default()
    };
    holds(1, 1, faults, 1_000);
}

/// The checks are worth something: what is planted, they find.
#[test]
fn planted_bugs_are_found() {
    let faults = Faults {
        late: 1,
        ..Faults::default()
    };
    let found = world(1, 2, faults, Bug::StaleAccepted)
        .err()
        .expect("a stale fact must be noticed");
    assert!(
        found.contains("I7") || found.contains("I6") || found.contains("I1"),
        "{found}"
    );
    let faults = Faults {
        cancels: 1,
        ..Faults::default()
    };
    let found = world(1, 2, faults, Bug::RoomKept)
        .err()
        .expect("room that is kept must be noticed");
    assert!(found.contains("I12"), "{found}");
}
