use super::*;
use proptest::prelude::*;

const FAR: Micros = Micros::from_secs(60);

fn turn(n: u128) -> Turn {
    Turn {
        request: RequestId(n),
        class: Class::Interactive,
        deadline: FAR,
        already_sent: 0,
    }
}

fn worker(n: u8) -> WorkerId {
    WorkerId::new(format!("d{n}")).unwrap()
}

fn about(request: u128, attempt: u32, fact: TurnFact) -> Fact {
    Fact::Turn {
        request: RequestId(request),
        attempt,
        fact,
    }
}

fn commit(generated: u32) -> TurnFact {
    TurnFact::Completed(Commit {
        tokens: 100,
        tip: None,
        answer: (0..generated).collect(),
    })
}

/// Runs one turn on `d`, directly or through a seed.
fn serve(session: &mut Session, request: u128, d: u8, seeded: bool) -> Vec<Action> {
    let mut out = session.step(Micros(0), Fact::Arrived(turn(request)));
    out.extend(session.step(Micros(0), about(request, 0, TurnFact::Ranked(vec![worker(d)]))));
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
    out.extend(session.step(Micros(0), about(request, 0, commit(2))));
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

#[test]
fn the_pin_moves_only_when_the_new_worker_has_completed() {
    let mut session = Session::new(Epoch(0));
    serve(&mut session, 1, 0, true);
    session.step(Micros(0), Fact::Arrived(turn(2)));
    session.step(Micros(0), about(2, 0, TurnFact::Ranked(vec![worker(0), worker(1)])));
    session.step(Micros(0), about(2, 0, TurnFact::Rejected(RejectReason::NoSpace)));
    session.step(Micros(0), about(2, 1, TurnFact::Permit(PermitId(1))));
    session.step(Micros(0), about(2, 1, TurnFact::Started));
    assert_eq!(session.pin(), Some(&worker(0)));
    let out = session.step(Micros(0), about(2, 1, commit(0)));
    let bind = Action::Bind {
        to: worker(1),
        from: Some(worker(0)),
        reason: Some(MigrationReason::Rejected),
    };
    assert!(out.contains(&bind), "{out:?}");
}

#[test]
fn a_worker_lost_in_mid_stream_does_not_show_in_the_stream() {
    let mut session = Session::new(Epoch(0));
    session.step(Micros(0), Fact::Arrived(turn(1)));
    session.step(Micros(0), about(1, 0, TurnFact::Ranked(vec![worker(0)])));
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
            avoid: vec![worker(0)]
        }),
        "{out:?}"
    );
    let out = session.step(Micros(0), about(1, 1, TurnFact::Ranked(vec![worker(1)])));
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
fn without_a_worker_the_turn_ends_at_its_deadline_with_a_reason() {
    let mut session = Session::new(Epoch(0));
    session.step(Micros(0), Fact::Arrived(turn(1)));
    session.step(Micros(0), about(1, 0, TurnFact::Ranked(vec![])));
    let out = session.step(FAR, Fact::Tick);
    let failed = Action::Finish {
        request: RequestId(1),
        outcome: Outcome::Failed(AbortReason::Deadline),
    };
    assert_eq!(out, [failed]);
}

fn any_turn_fact() -> impl Strategy<Value = TurnFact> {
    prop_oneof![
        prop::collection::vec(0u8..3, 0..4).prop_map(|w| TurnFact::Ranked(w.into_iter().map(worker).collect())),
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
        let mut legs = std::collections::BTreeSet::new();
        let closing = std::iter::once((None, Fact::Tick)).map(|f| (FAR, f));
        for (now, (turn_fact, other)) in facts.into_iter().map(|f| (Micros(0), f)).chain(closing) {
            let fact = match (turn_fact, session.active.as_ref()) {
                (Some((behind, fact)), Some(active)) => Fact::Turn {
                    request: active.turn.request,
                    attempt: active.attempt.saturating_sub(behind),
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
                    Action::AskRun { worker, request, attempt, .. } => {
                        if closes_leg { legs.clear(); }
                        legs.insert((worker, request, attempt));
                    }
                    Action::Abort { worker, request, attempt, .. } => { legs.remove(&(worker, request, attempt)); }
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
}
