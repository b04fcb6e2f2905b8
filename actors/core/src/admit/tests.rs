use super::*;
use proptest::prelude::*;

const SEC: u64 = 1_000_000;

fn config(pool_pages: u64) -> Config {
    Config {
        pool_pages,
        page_tokens: 64,
        page_bytes: 10,
        direct_append_tokens_max: 8_192,
        permits: permits::Config {
            max_pending_seeds: 2,
            max_pending_seed_bytes: 1_000,
            ttl: Micros(5 * SEC),
            queue_cap_per_class: 2,
        },
    }
}

/// A later turn of a session: ten pages of prefix, one of append, one of output.
fn turn(request: u128, resident_pages: u32) -> Ask {
    Ask {
        request: RequestId(request),
        session: SessionId::new(format!("s{request}")).unwrap(),
        turn: TurnIndex(1),
        epoch: Epoch(3),
        newest_epoch: Epoch(3),
        prefix_pages: 10,
        resident_pages,
        append_tokens: 64,
        output_tokens: 64,
        class: Class::Interactive,
        deadline: Micros(60 * SEC),
    }
}

/// The decisions a step hands out, in order.
fn decisions(actions: &[Action]) -> Vec<Decision> {
    let decision = |a: &Action| match a {
        Action::Answer { decision, .. } => Some(*decision),
        _ => None,
    };
    actions.iter().filter_map(decision).collect()
}

fn answer(a: &mut Admission, ask: Ask) -> Decision {
    decisions(&a.step(Micros(0), Fact::Ask(ask)))[0]
}

fn permit_of(d: Decision) -> PermitId {
    let Decision::Permit { permit, .. } = d else {
        panic!("{d:?}")
    };
    permit
}

#[test]
fn direct_needs_the_prefix_a_short_append_and_room() {
    let mut a = Admission::new(config(1_000));
    assert_eq!(answer(&mut a, turn(1, 10)), Decision::Direct);
    assert_eq!(a.used_pages(), 12, "prefix, append and output are locked");
    assert!(matches!(answer(&mut a, turn(2, 9)), Decision::Permit { .. }));
    let long = Ask {
        append_tokens: 8_193,
        ..turn(3, 10)
    };
    let mut other = Admission::new(config(1_000));
    assert!(matches!(answer(&mut other, long), Decision::Permit { .. }));
    let mut b = Admission::new(config(1_000));
    let first = Ask {
        turn: TurnIndex(0),
        prefix_pages: 0,
        ..turn(4, 0)
    };
    assert!(
        matches!(answer(&mut b, first), Decision::Permit { .. }),
        "a new session is seeded"
    );
    let second = Ask {
        prefix_pages: 0,
        ..turn(5, 0)
    };
    assert_eq!(
        answer(&mut b, second),
        Decision::Direct,
        "a short session has no full page yet"
    );
}

#[test]
fn each_refusal_has_its_reason() {
    let reject = Decision::Reject;
    let mut a = Admission::new(config(24));
    assert_eq!(
        answer(
            &mut a,
            Ask {
                prefix_pages: 23,
                ..turn(1, 23)
            }
        ),
        reject(RejectReason::NeverFits)
    );
    assert_eq!(
        answer(
            &mut a,
            Ask {
                newest_epoch: Epoch(4),
                ..turn(1, 10)
            }
        ),
        reject(RejectReason::StaleEpoch)
    );
    assert_eq!(
        answer(
            &mut a,
            Ask {
                deadline: Micros(0),
                ..turn(1, 10)
            }
        ),
        reject(RejectReason::DeadlinePassed)
    );
    assert_eq!(answer(&mut a, turn(1, 10)), Decision::Direct);
    assert_eq!(answer(&mut a, turn(2, 10)), Decision::Direct);
    assert_eq!(a.room(), 0);
    assert!(matches!(
        answer(&mut a, turn(3, 10)),
        Decision::Wait { position: 0, .. }
    ));
    assert!(matches!(answer(&mut a, turn(4, 0)), Decision::Wait { position: 1, .. }));
    assert_eq!(answer(&mut a, turn(5, 0)), reject(RejectReason::NoSpace));
    let told = decisions(&a.step(Micros(0), Fact::Drain(true)));
    assert_eq!(told, [reject(RejectReason::Draining); 2], "who waits is told at once");
    assert_eq!(answer(&mut a, turn(6, 10)), reject(RejectReason::Draining));
    assert_eq!(answer(&mut a, turn(1, 10)), Decision::Direct, "what runs goes on");
    let mut b = Admission::new(config(1_000));
    for r in 0..4 {
        answer(&mut b, turn(r, 0));
    }
    assert_eq!(
        answer(&mut b, turn(4, 0)),
        reject(RejectReason::QueueFull),
        "room, but no budget"
    );
}

#[test]
fn a_seed_becomes_a_turn_with_the_same_pages_and_only_its_owner_can_do_it() {
    let mut a = Admission::new(config(12));
    let permit = permit_of(answer(&mut a, turn(1, 0)));
    assert_eq!((a.room(), a.used_pages()), (0, 0));
    let seeded = |request| Fact::Seeded {
        request: RequestId(request),
        permit,
    };
    assert_eq!(a.step(Micros(1), seeded(2)), [expired(RequestId(2), permit)]);
    assert_eq!(a.step(Micros(1), seeded(1)), [Action::Start(RequestId(1))]);
    assert_eq!((a.room(), a.used_pages()), (0, 12));
    assert_eq!(a.step(Micros(2), seeded(1)), [], "said twice");
    assert_eq!(permit_of(answer(&mut a, turn(1, 0))), permit, "asked again");
    a.step(Micros(3), Fact::Ended(RequestId(1)));
    assert_eq!(a.room(), 12);
}

#[test]
fn the_owner_of_one_permit_cannot_use_another() {
    let mut a = Admission::new(config(1_000));
    let permit = permit_of(answer(&mut a, turn(1, 9)));
    answer(&mut a, turn(2, 9));
    let foreign = Fact::Seeded {
        request: RequestId(2),
        permit,
    };
    assert_eq!(a.step(Micros(1), foreign), [expired(RequestId(2), permit)]);
    assert_eq!((a.view().permits.pending.len(), a.used_pages()), (2, 0));
}

#[test]
fn room_that_comes_back_goes_to_who_waits() {
    let mut a = Admission::new(config(12));
    answer(&mut a, turn(1, 10));
    answer(&mut a, turn(2, 0));
    a.step(Micros(0), Fact::Pressure(700));
    let told = a.step(Micros(1), Fact::Ended(RequestId(1)));
    assert!(matches!(
        told[..],
        [Action::Answer {
            request: RequestId(2),
            decision: Decision::Permit { .. },
            pause_millis: 700
        }]
    ));
}

#[test]
fn a_seed_that_arrives_too_late_does_not_start() {
    let mut a = Admission::new(config(12));
    let permit = permit_of(answer(&mut a, turn(1, 0)));
    let late = a.step(
        Micros(5 * SEC),
        Fact::Seeded {
            request: RequestId(1),
            permit,
        },
    );
    assert_eq!(
        late,
        [expired(RequestId(1), permit); 2],
        "once for the deadline, once for the late pages"
    );
    assert_eq!(a.room(), 12);
}

#[test]
fn a_turn_gives_its_room_back_at_its_deadline() {
    let mut a = Admission::new(config(12));
    answer(&mut a, turn(1, 10));
    assert_eq!(a.next_deadline(), Some(Micros(60 * SEC)));
    assert_eq!(
        a.step(Micros(60 * SEC), Fact::Tick),
        [Action::TurnExpired(RequestId(1))]
    );
    assert_eq!((a.room(), a.next_deadline()), (12, None));
}

#[test]
fn pages_locked_elsewhere_are_not_room() {
    let mut a = Admission::new(config(24));
    a.step(Micros(0), Fact::LockedElsewhere(13));
    assert!(
        matches!(answer(&mut a, turn(1, 10)), Decision::Wait { .. }),
        "fits the pool, not the room"
    );
    assert!(matches!(
        decisions(&a.step(Micros(0), Fact::LockedElsewhere(12)))[..],
        [Decision::Permit { .. }]
    ));
}

#[test]
fn a_burst_of_100_new_sessions_stays_within_the_budget() {
    let mut big = config(100_000);
    big.permits.queue_cap_per_class = 100;
    let mut a = Admission::new(big);
    for r in 0..100 {
        answer(
            &mut a,
            Ask {
                turn: TurnIndex(0),
                ..turn(r, 0)
            },
        );
        let v = a.view().permits;
        assert!(v.pending.len() <= 2 && v.pending_bytes <= 1_000);
    }
    let mut started = Vec::new();
    while let Some(p) = a.view().permits.pending.first().copied() {
        let now = Micros(started.len() as u64);
        started.extend(a.step(
            now,
            Fact::Seeded {
                request: p.ask.request,
                permit: p.permit,
            },
        ));
        let v = a.view().permits;
        assert!(v.pending.len() <= 2 && v.pending_bytes <= 1_000);
        started.retain(|s| matches!(s, Action::Start(_)));
    }
    assert_eq!(
        started,
        (0..100).map(|r| Action::Start(RequestId(r))).collect::<Vec<_>>()
    );
}

fn fact() -> impl Strategy<Value = Fact> {
    let ask = (
        0..40_u128,
        0..3_usize,
        0..20_u32,
        0..20_u32,
        0..600_u32,
        (0..300_u32, 0..10_u64, 0..3_u32),
    )
        .prop_map(
            |(r, class, prefix_pages, resident_pages, append_tokens, (output_tokens, seconds, turn_index))| Ask {
                turn: TurnIndex(turn_index),
                prefix_pages,
                resident_pages,
                append_tokens,
                output_tokens,
                class: Class::ALL[class],
                deadline: Micros(seconds * SEC),
                ..turn(r, 0)
            },
        );
    prop_oneof![
        6 => ask.prop_map(Fact::Ask),
        3 => (0..40_u128, 0..40_u64).prop_map(|(r, p)| Fact::Seeded { request: RequestId(r), permit: PermitId(p) }),
        2 => (0..40_u128).prop_map(|r| Fact::Ended(RequestId(r))),
        1 => (0..30_u64).prop_map(Fact::LockedElsewhere),
        1 => any::<bool>().prop_map(Fact::Drain),
        1 => Just(Fact::Tick),
    ]
}

proptest! {
    /// I3, I4, I12, idempotency and liveness of the waiting, over any facts in any order.
    #[test]
    fn the_ledger_is_right_whatever_happens(steps in prop::collection::vec((0..2_u64, any::<bool>(), fact()), 1..150)) {
        let mut a = Admission::new(config(40));
        let mut now = Micros(0);
        for (seconds, honest, fact) in steps {
            now = now.plus(Micros(seconds * SEC / 2));
            // Half the seeds are of permits that really are out, or hardly any would ever start.
            let fact = match (fact, a.view().permits.pending.first()) {
                (Fact::Seeded { .. }, Some(p)) if honest => Fact::Seeded { request: p.ask.request, permit: p.permit },
                (Fact::Ask(ask), _) => Fact::Ask(Ask { deadline: now.plus(ask.deadline), ..ask }),
                (other, _) => other,
            };
            let actions = a.step(now, fact.clone());
            let v = a.view();
            let promised = v.permits.pending_pages;
            prop_assert!(v.used_pages + promised <= v.pool_pages, "I3: {:?}", v);
            prop_assert!(v.permits.pending.len() <= 2, "I4");
            prop_assert!(v.permits.pending.len() <= 1 || v.permits.pending_bytes <= 1_000, "I4");
            prop_assert!(v.running.values().all(|r| now < r.deadline), "I12");
            prop_assert!(v.permits.pending.iter().all(|p| now < p.expires), "I12");
            prop_assert!(v.permits.waiting.iter().all(|w| now < w.deadline), "I12");
            prop_assert!(v.permits.pending.iter().all(|p| !v.running.contains_key(&p.ask.request)), "one owner, one place");
            prop_assert!(a.next_deadline().is_none_or(|d| now < d));
            prop_assert_eq!(a.step(now, Fact::Tick), [], "a step leaves nothing for the same instant");
            if let Fact::Ask(ask) = fact {
                let own = |acts: &[Action]| acts.iter().rev().find_map(|x| match x {
                    Action::Answer { request, decision, .. } if *request == ask.request => Some(*decision),
                    _ => None,
                });
                let first = own(&actions);
                prop_assert!(first.is_some(), "every ask is answered");
                let again = own(&a.step(now, Fact::Ask(ask.clone())));
                // A place in the queue may have been granted meanwhile; anything else is said again word for word.
                let waited = matches!(first, Some(Decision::Wait { .. }));
                prop_assert!(again == first || waited);
                prop_assert_eq!(a.view(), v);
            }
        }
        let end = now.plus(Micros(20 * SEC));
        a.step(end, Fact::Tick);
        a.step(end, Fact::LockedElsewhere(0));
        prop_assert_eq!((a.room(), a.next_deadline()), (40, None), "nothing is left at rest");
    }
}
