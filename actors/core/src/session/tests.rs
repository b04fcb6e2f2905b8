use super::running::PAUSE_MAX;
use super::*;
use pinion_schemas::limits::REJECTS_MAX;
use pinion_schemas::{Class, PermitId};
use proptest::prelude::*;

const FAR: Micros = Micros::from_secs(60);

fn turn(n: u128) -> Turn {
    Turn {
        request: RequestId(n),
        class: Class::Interactive,
        deadline: FAR,
        prompt_tokens: 50,
        answer_max: 50,
        already_sent: 0,
        prompt_end: None,
    }
}

/// The router's answer: these workers of three, with the ends of their pauses.
fn ranked(offers: &[(u8, Micros)]) -> TurnFact {
    let offer = |(n, not_before): &(u8, Micros)| Offer {
        worker: worker(*n),
        not_before: *not_before,
    };
    TurnFact::Ranked(Ranking {
        offers: offers.iter().map(offer).collect(),
        pin_gone: None,
        workers: 3,
        rejects_max: REJECTS_MAX,
    })
}

fn free(workers: &[u8]) -> TurnFact {
    ranked(&workers.iter().map(|n| (*n, Micros(0))).collect::<Vec<_>>())
}

fn worker(n: u8) -> WorkerId {
    WorkerId::new(format!("d{n}")).unwrap()
}

fn about(request: u128, attempt: u64, fact: TurnFact) -> Fact {
    Fact::Turn {
        request: RequestId(request),
        attempt,
        fact,
    }
}

fn commit(generated: u32) -> TurnFact {
    committed(Path::Direct, generated)
}

fn committed(path: Path, generated: u32) -> TurnFact {
    TurnFact::Completed(Commit {
        tokens: 100,
        tip: None,
        path,
        answer: (0..generated).collect(),
    })
}

/// Runs one turn on `d`, directly or through a seed.
fn serve(session: &mut Session, request: u128, d: u8, seeded: bool) -> Vec<Action> {
    let mut out = session.step(Micros(0), Fact::Arrived(turn(request)));
    out.extend(session.step(Micros(0), about(request, 0, free(&[d]))));
    if seeded {
        out.extend(session.step(Micros(0), about(request, 0, TurnFact::Permit(PermitId(1)))));
    }
    out.extend(session.step(Micros(0), about(request, 0, TurnFact::Started)));
    out.extend(session.step(
        Micros(0),
        about(
            request,
            0,
            TurnFact::Progress {
                offset: 0,
                tokens: vec![0, 1],
            },
        ),
    ));
    let path = if seeded { Path::Seed } else { Path::Direct };
    out.extend(session.step(Micros(0), about(request, 0, committed(path, 2))));
    out
}

#[test]
fn the_first_turn_seeds_and_pins_and_the_next_is_direct() {
    let mut session = Session::new(Epoch(0));
    let first = serve(&mut session, 1, 0, true);
    assert!(first.contains(&Action::Bind {
        to: worker(0),
        from: None,
        reason: None
    }));
    let seeded = Action::Finish {
        request: RequestId(1),
        outcome: Outcome::Completed(Path::Seed),
    };
    assert_eq!(first.last(), Some(&seeded));
    assert_eq!(session.pin(), Some(&worker(0)));
    let second = serve(&mut session, 2, 0, false);
    let direct = Action::Finish {
        request: RequestId(2),
        outcome: Outcome::Completed(Path::Direct),
    };
    assert_eq!(second.last(), Some(&direct));
    assert_eq!(session.next_turn(), TurnIndex(2));
}

/// One turn that `from` rejects and `to` serves.
fn rejected_by(session: &mut Session, request: u128, from: u8, to: u8) -> Vec<Action> {
    session.step(Micros(0), Fact::Arrived(turn(request)));
    session.step(Micros(0), about(request, 0, free(&[from, to])));
    session.step(Micros(0), about(request, 0, TurnFact::Rejected(RejectReason::NoSpace)));
    session.step(Micros(0), about(request, 1, TurnFact::Started));
    session.step(Micros(0), about(request, 1, commit(0)))
}

#[test]
fn the_pin_moves_when_it_has_rejected_often_and_the_new_worker_has_completed() {
    let mut session = Session::new(Epoch(0));
    serve(&mut session, 1, 0, true);
    for request in 2..4 {
        rejected_by(&mut session, request, 0, 1);
        assert_eq!(session.pin(), Some(&worker(0)), "a passing reject moves nothing");
    }
    let out = rejected_by(&mut session, 4, 0, 1);
    let bind = Action::Bind {
        to: worker(1),
        from: Some(worker(0)),
        reason: Some(MigrationReason::Rejected),
    };
    assert!(out.contains(&bind), "{out:?}");
    assert_eq!(session.rejects().migrations(), 1);
}

#[test]
fn the_pin_stays_when_it_serves_again_before_that() {
    let mut session = Session::new(Epoch(0));
    serve(&mut session, 1, 0, true);
    for request in 2..40 {
        if request % 3 == 0 {
            serve(&mut session, request, 0, false);
        } else {
            rejected_by(&mut session, request, 0, 1);
        }
    }
    assert_eq!(session.rejects().migrations(), 0);
}

#[test]
fn the_pin_leaves_a_lost_worker_at_once_and_free_of_charge() {
    let mut session = Session::new(Epoch(0));
    serve(&mut session, 1, 0, true);
    session.step(Micros(0), Fact::Arrived(turn(2)));
    let gone = TurnFact::Ranked(Ranking {
        offers: vec![Offer {
            worker: worker(2),
            not_before: Micros(0),
        }],
        pin_gone: Some(MigrationReason::Drain),
        workers: 3,
        rejects_max: REJECTS_MAX,
    });
    session.step(Micros(0), about(2, 0, gone));
    session.step(Micros(0), about(2, 0, TurnFact::Started));
    session.step(Micros(0), about(2, 0, commit(0)));
    assert_eq!((session.pin(), session.rejects().migrations()), (Some(&worker(2)), 0));
}

fn asked(actions: &[Action]) -> Option<&WorkerId> {
    actions.iter().find_map(|a| match a {
        Action::AskRun { worker, .. } => Some(worker),
        _ => None,
    })
}

#[test]
fn a_paused_worker_is_asked_when_its_pause_is_over_and_not_before() {
    let until = Micros::from_millis(700);
    let mut session = Session::new(Epoch(0));
    session.step(Micros(0), Fact::Arrived(turn(1)));
    let out = session.step(
        Micros(0),
        about(1, 0, ranked(&[(0, until), (1, Micros(0)), (2, until)])),
    );
    assert_eq!(asked(&out), Some(&worker(1)), "one that is not paused goes first");
    let out = session.step(Micros(0), about(1, 0, TurnFact::Rejected(RejectReason::NoSpace)));
    assert_eq!((asked(&out), session.next_deadline()), (None, Some(until)));
    assert!(session.step(Micros(until.0 - 1), Fact::Tick).is_empty());
    assert_eq!(asked(&session.step(until, Fact::Tick)), Some(&worker(0)));
}

#[test]
fn a_paused_pin_in_front_is_waited_for_but_never_longer_than_a_pause_may_last() {
    let mut session = Session::new(Epoch(0));
    serve(&mut session, 1, 0, true);
    session.step(Micros(0), Fact::Arrived(turn(2)));
    let out = session.step(Micros(0), about(2, 0, ranked(&[(0, FAR), (1, Micros(0))])));
    assert_eq!((asked(&out), session.next_deadline()), (None, Some(PAUSE_MAX)));
    // Lost in the meantime: the other one is asked when the wait is over.
    let mut lost = session.clone();
    lost.step(Micros(0), Fact::WorkerLost(worker(0)));
    assert_eq!(asked(&lost.step(PAUSE_MAX, Fact::Tick)), Some(&worker(1)));
    assert_eq!(asked(&session.step(PAUSE_MAX, Fact::Tick)), Some(&worker(0)));
}

#[test]
fn a_request_that_has_ended_is_told_its_end_again() {
    let mut session = Session::new(Epoch(0));
    serve(&mut session, 1, 0, true);
    let again = |n: u128| Action::FinishAgain {
        request: RequestId(n),
        outcome: Outcome::Completed(Path::Seed),
    };
    assert_eq!(session.step(Micros(0), Fact::Arrived(turn(1))), [again(1)]);
    assert_eq!(session.next_turn(), TurnIndex(1));
    for request in 2..2 + ENDED_MAX as u128 {
        serve(&mut session, request, 0, false);
    }
    assert_eq!((session.ended(RequestId(1)), session.ended.len()), (None, ENDED_MAX));
}

#[test]
fn an_answer_that_is_complete_ends_at_once() {
    let mut session = Session::new(Epoch(3));
    let whole = Turn {
        already_sent: 50,
        ..turn(1)
    };
    let out = session.step(Micros(0), Fact::Arrived(whole));
    let done = Action::Finish {
        request: RequestId(1),
        outcome: Outcome::Completed(Path::Direct),
    };
    assert_eq!(out, [Action::Persist, done]);
    assert_eq!((session.next_turn(), session.committed_tokens()), (TurnIndex(1), 100));
}

#[test]
fn a_worker_lost_after_its_last_token_ends_the_turn() {
    let mut session = Session::new(Epoch(0));
    session.step(Micros(0), Fact::Arrived(turn(1)));
    session.step(Micros(0), about(1, 0, free(&[0])));
    let tokens: Vec<u32> = (0..50).collect();
    session.step(Micros(0), about(1, 0, TurnFact::Progress { offset: 0, tokens }));
    let out = session.step(Micros(0), Fact::WorkerLost(worker(0)));
    assert!(
        matches!(out[..], [Action::Abort { .. }, Action::Persist, Action::Finish { .. }]),
        "{out:?}"
    );
}

#[test]
fn an_end_without_a_start_counts() {
    let mut session = Session::new(Epoch(0));
    session.step(Micros(0), Fact::Arrived(turn(1)));
    session.step(Micros(0), about(1, 0, free(&[0])));
    session.step(Micros(0), about(1, 0, TurnFact::Permit(PermitId(1))));
    session.step(Micros(0), about(1, 0, committed(Path::Seed, 2)));
    assert_eq!(session.ended(RequestId(1)), Some(Outcome::Completed(Path::Seed)));
}

#[test]
fn a_running_turn_that_goes_silent_is_asked_for_again() {
    let mut session = Session::new(Epoch(0));
    session.step(Micros(0), Fact::Arrived(turn(1)));
    session.step(Micros(0), about(1, 0, free(&[0])));
    session.step(Micros(0), about(1, 0, TurnFact::Started));
    let out = session.step(SILENCE_MAX, Fact::Tick);
    assert!(matches!(out[..], [Action::AskRun { attempt: 1, .. }]), "{out:?}");
}

#[test]
fn a_worker_lost_in_mid_stream_does_not_show_in_the_stream() {
    let mut session = Session::new(Epoch(0));
    session.step(Micros(0), Fact::Arrived(turn(1)));
    session.step(Micros(0), about(1, 0, free(&[0])));
    session.step(Micros(0), about(1, 0, TurnFact::Started));
    session.step(
        Micros(0),
        about(
            1,
            0,
            TurnFact::Progress {
                offset: 0,
                tokens: vec![0, 1, 2],
            },
        ),
    );
    let out = session.step(Micros(0), Fact::WorkerLost(worker(0)));
    assert!(
        out.contains(&Action::Route {
            request: RequestId(1),
            attempt: 1,
            avoid: vec![worker(0)],
            rejects: vec![],
        }),
        "{out:?}"
    );
    let out = session.step(Micros(0), about(1, 1, free(&[1])));
    assert!(matches!(out[..], [Action::AskRun { already_sent: 3, .. }]), "{out:?}");
    session.step(Micros(0), about(1, 1, TurnFact::Started));
    let late = session.step(
        Micros(0),
        about(
            1,
            0,
            TurnFact::Progress {
                offset: 3,
                tokens: vec![3],
            },
        ),
    );
    assert!(
        late.is_empty(),
        "a chunk of the dead attempt must not be relayed: {late:?}"
    );
    let out = session.step(
        Micros(0),
        about(
            1,
            1,
            TurnFact::Progress {
                offset: 2,
                tokens: vec![2, 3],
            },
        ),
    );
    assert_eq!(
        out,
        [Action::Relay {
            request: RequestId(1),
            offset: 3,
            tokens: vec![3]
        }]
    );
}

#[test]
fn a_superseded_owner_gives_promises_back_and_lets_work_go_on() {
    let said = [
        (None, true),
        (Some(TurnFact::Queued), true),
        (Some(TurnFact::Permit(PermitId(1))), false),
        (Some(TurnFact::Started), false),
    ];
    for (heard, given_back) in said {
        let mut session = Session::new(Epoch(0));
        session.step(Micros(0), Fact::Arrived(turn(1)));
        session.step(Micros(0), about(1, 0, free(&[0])));
        if let Some(fact) = heard.clone() {
            session.step(Micros(0), about(1, 0, fact));
        }
        let out = session.step(Micros(1), Fact::Superseded(Epoch(1)));
        let aborts = out.iter().filter(|a| matches!(a, Action::Abort { .. })).count();
        assert_eq!(aborts, usize::from(given_back), "{heard:?}: {out:?}");
    }
}

#[test]
fn without_a_worker_the_turn_ends_at_its_deadline_with_a_reason() {
    let mut session = Session::new(Epoch(0));
    session.step(Micros(0), Fact::Arrived(turn(1)));
    session.step(Micros(0), about(1, 0, free(&[])));
    let out = session.step(FAR, Fact::Tick);
    let failed = Action::Finish {
        request: RequestId(1),
        outcome: Outcome::Failed(AbortReason::Deadline),
    };
    assert_eq!(out, [failed]);
}

fn any_turn_fact() -> impl Strategy<Value = TurnFact> {
    prop_oneof![
        prop::collection::vec((0u8..3, (0u64..2).prop_map(Micros)), 0..4).prop_map(|offers| ranked(&offers)),
        Just(TurnFact::Started),
        Just(TurnFact::Started),
        Just(TurnFact::Permit(PermitId(1))),
        Just(TurnFact::Queued),
        Just(TurnFact::Rejected(RejectReason::NoSpace)),
        Just(TurnFact::LegFailed(AbortReason::PrefillLost)),
        (0u32..6, 0usize..4).prop_map(|(offset, n)| TurnFact::Progress {
            offset,
            // Token k of the answer is k, so a gap or a repeat shows.
            tokens: (offset..offset + n as u32).collect(),
        }),
        (0u32..8).prop_map(commit),
    ]
}

/// A fact, and how far its attempt lies behind the present one.
fn any_fact() -> impl Strategy<Value = (Option<(u32, TurnFact)>, Fact)> {
    prop_oneof![
        8 => (0u32..2, any_turn_fact()).prop_map(|(behind, f)| (Some((behind / 2 * behind, f)), Fact::Tick)),
        1 => (1u128..6).prop_map(|n| (None, Fact::Arrived(turn(n)))),
        1 => (0u8..3).prop_map(|n| (None, Fact::WorkerLost(worker(n)))),
        1 => (1u128..6).prop_map(|n| (None, Fact::Cancelled(RequestId(n)))),
    ]
}

proptest! {
    /// I1, I2, I6 and I12 over arbitrary histories.
    #[test]
    fn every_turn_ends_once_and_its_stream_is_gapless(facts in prop::collection::vec(any_fact(), 0..80)) {
        let mut session = Session::new(Epoch(0));
        let mut accepted = std::collections::BTreeSet::new();
        let mut ended = std::collections::BTreeMap::<RequestId, u32>::new();
        let mut sent = std::collections::BTreeMap::<RequestId, u32>::new();
        // By worker: one that is asked for a turn again goes on with it, whatever the attempt.
        let mut legs = std::collections::BTreeSet::new();
        let closing = std::iter::once((None, Fact::Tick)).map(|f| (FAR, f));
        for (now, (turn_fact, other)) in facts.into_iter().map(|f| (Micros(0), f)).chain(closing) {
            let fact = match (turn_fact, session.active.as_ref()) {
                (Some((behind, fact)), Some(active)) => Fact::Turn {
                    request: active.turn.request,
                    attempt: active.attempt.saturating_sub(u64::from(behind)),
                    fact,
                },
                _ => other,
            };
            if let Fact::Arrived(t) = &fact {
                accepted.insert(t.request);
            }
            let closes_leg = matches!(
                fact,
                Fact::Turn { fact: TurnFact::Rejected(_) | TurnFact::Completed(_), .. }
            );
            let before = session.next_turn();
            for action in session.step(now, fact) {
                match action {
                    Action::AskRun { worker, request, .. } => {
                        if closes_leg { legs.clear(); }
                        legs.insert((worker, request));
                    }
                    Action::Abort { worker, request, .. } => { legs.remove(&(worker, request)); }
                    Action::Relay { request, offset, tokens } => {
                        let next = sent.entry(request).or_default();
                        prop_assert_eq!(offset, *next);
                        for (k, t) in tokens.iter().enumerate() {
                            prop_assert_eq!(*t, offset + k as u32);
                        }
                        *next += tokens.len() as u32;
                    }
                    Action::Finish { request, outcome } => {
                        *ended.entry(request).or_default() += 1;
                        if closes_leg { legs.clear(); }
                        if outcome == Outcome::Failed(AbortReason::Superseded) { legs.retain(|l| l.1 != request); }
                        prop_assert!(legs.iter().all(|l| l.1 != request), "{outcome:?} left {legs:?}");
                    }
                    _ => {}
                }
            }
            prop_assert!(session.next_turn() == before || session.next_turn() == before.next());
            if session.active.as_ref().is_none_or(|a| a.state.worker().is_none()) && closes_leg {
                legs.clear();
            }
        }
        prop_assert_eq!(accepted.len(), ended.len());
        prop_assert!(ended.values().all(|n| *n == 1));
    }

    /// I7: a fact of an older attempt changes nothing.
    #[test]
    fn an_older_attempt_changes_nothing(facts in prop::collection::vec(any_turn_fact(), 0..20), late in any_turn_fact()) {
        let mut session = Session::new(Epoch(0));
        session.step(Micros(0), Fact::Arrived(turn(1)));
        for fact in facts {
            let attempt = session.active.as_ref().map_or(0, |a| a.attempt);
            session.step(Micros(0), about(1, attempt, fact));
        }
        let Some(attempt) = session.active.as_ref().map(|a| a.attempt).filter(|a| *a > 0) else { return Ok(()) };
        let before = session.clone();
        prop_assert!(session.step(Micros(0), about(1, attempt - 1, late)).is_empty());
        prop_assert_eq!(session, before);
    }

    /// A session that moves to a new owner after every few facts keeps its chain, its pin and what is left of its budget,
    /// and goes on; what the snapshot does not hold are turns under way, which the gateway sends again.
    #[test]
    fn a_restored_session_goes_on_where_the_snapshot_stands(
        lives in prop::collection::vec(prop::collection::vec(any_fact(), 0..30), 1..5),
    ) {
        let mut session = Session::new(Epoch(0));
        for (epoch, facts) in lives.into_iter().enumerate() {
            let snapshot = session.snapshot();
            let text = serde_json::to_string(&snapshot).unwrap();
            let read: Snapshot = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(&read, &snapshot);
            session = Session::restore(Epoch(epoch as u64), &read);
            let same_but_epoch = Snapshot { epoch: Epoch(epoch as u64), ..snapshot.clone() };
            prop_assert_eq!(session.snapshot(), same_but_epoch);
            prop_assert_eq!(session.pin().map(WorkerId::as_str), snapshot.pin.as_deref());
            let mut persisted = session.snapshot();
            for (turn_fact, other) in facts {
                let fact = match (turn_fact, session.active.as_ref()) {
                    (Some((_, fact)), Some(a)) => Fact::Turn { request: a.turn.request, attempt: a.attempt, fact },
                    _ => other,
                };
                let before = session.next_turn();
                let out = session.step(Micros(0), fact);
                if out.contains(&Action::Persist) {
                    persisted = session.snapshot();
                }
                prop_assert_eq!(&persisted, &session.snapshot(), "a change that no snapshot was asked for");
                prop_assert!(session.next_turn() >= before);
                prop_assert!(session.attempt(RequestId(1)).is_none_or(|n| n >> ATTEMPT_BITS == epoch as u64));
            }
        }
    }
}

proptest! {
    /// R4: whichever path a turn takes, the next one counts its append from where that one ended; a fallback for one turn
    /// does not make all later appends grow, and the turn after it is asked of the pin again.
    #[test]
    fn the_chain_moves_on_every_path(paths in prop::collection::vec(0..Path::ALL.len(), 1..30)) {
        let mut session = Session::new(Epoch(0));
        serve(&mut session, 0, 0, true);
        for (n, path) in (1_u32..).zip(paths) {
            let (request, path) = (u128::from(n), Path::ALL[path]);
            let tokens = 100 + n * 10;
            session.step(Micros(0), Fact::Arrived(turn(request)));
            session.step(Micros(0), about(request, 0, free(&[0])));
            session.step(Micros(0), about(request, 0, TurnFact::Started));
            let TurnFact::Completed(end) = committed(path, 1) else { unreachable!() };
            session.step(Micros(0), about(request, 0, TurnFact::Completed(Commit { tokens, ..end })));
            prop_assert_eq!(session.committed_tokens(), tokens);
            prop_assert_eq!(session.next_turn(), TurnIndex(n + 1));
            prop_assert_eq!(session.pin(), Some(&worker(0)));
        }
    }

    /// T44, T50: only a turn that its D served directly clears what that D has rejected, and it clears nothing of others.
    #[test]
    fn only_a_direct_success_clears_and_only_its_own_pair(path in 0..Path::ALL.len(), by in 0_u8..2, rejects in 1_u32..3) {
        let mut session = Session::new(Epoch(0));
        serve(&mut session, 0, 0, true);
        // Both have rejected the session, each as often.
        for n in 0..rejects {
            let request = 1 + u128::from(n);
            session.step(Micros(0), Fact::Arrived(turn(request)));
            session.step(Micros(0), about(request, 0, free(&[0, 1, 2])));
            session.step(Micros(0), about(request, 0, TurnFact::Rejected(RejectReason::NoSpace)));
            session.step(Micros(0), about(request, 1, TurnFact::Rejected(RejectReason::NoSpace)));
            session.step(Micros(0), Fact::Cancelled(RequestId(request)));
        }
        let counts = |s: &Session| [s.rejects().count(&worker(0)), s.rejects().count(&worker(1))];
        prop_assert_eq!(counts(&session), [rejects, rejects]);
        let path = Path::ALL[path];
        session.step(Micros(0), Fact::Arrived(turn(9)));
        session.step(Micros(0), about(9, 0, free(&[by])));
        session.step(Micros(0), about(9, 0, TurnFact::Started));
        session.step(Micros(0), about(9, 0, committed(path, 1)));
        let mut expected = [rejects, rejects];
        if path == Path::Direct {
            expected[by as usize] = 0;
        }
        prop_assert_eq!(counts(&session), expected);
    }
}
