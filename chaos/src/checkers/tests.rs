//! Each checker sees what it is for, and nothing in what is right.

use super::*;
use crate::observed::{Body, End, Held, Ledger, Right, RunSeen, Said};
use pinion_schemas::messages::{Abort, Reject};
use pinion_schemas::{AbortReason, Epoch, PageHash, RejectReason, RequestId};
use std::sync::Arc;

const T: Micros = Micros::from_secs(1);
const REQUEST: RequestId = RequestId(7);

fn found(facts: impl IntoIterator<Item = Observed>) -> Vec<Invariant> {
    let rules = Rules {
        page_tokens: 16,
        pools: vec![("d0".into(), 10), ("d1".into(), 10)],
        seeds_max: 1,
        bytes_max: 100,
        rejects_max: 1,
    };
    let mut found = Found::default();
    let mut checkers = all(&rules);
    for (i, fact) in facts.into_iter().enumerate() {
        for checker in &mut checkers {
            checker.see(Micros(T.0 * (i as u64 + 1)), &fact, &mut found);
        }
    }
    found.breaches().iter().map(|b| b.invariant).collect()
}

fn begun() -> Observed {
    Observed::Begun {
        request: REQUEST,
        session: "s".into(),
        turn: 0,
        right: Arc::new(right()),
        deadline: T,
    }
}

fn right() -> Right {
    Right::of(&[1; 40], 8, 16)
}

fn tokens(tokens: &[u32]) -> Observed {
    Observed::Tokens {
        request: REQUEST,
        tokens: tokens.to_vec(),
    }
}

fn ended(end: End) -> Observed {
    Observed::Ended { request: REQUEST, end }
}

fn done() -> Observed {
    ended(End::Done(right().answer))
}

fn sent(from: &str, to: &str, body: Body) -> Observed {
    heard(false, from, to, body)
}

fn heard(arrived: bool, from: &str, to: &str, body: Body) -> Observed {
    let (from, to) = (from.to_owned(), to.to_owned());
    Observed::Heard {
        arrived,
        from,
        to,
        body,
    }
}

fn run(request: u128, epoch: u64) -> Body {
    Body::Run(RunSeen {
        request: RequestId(request),
        attempt: epoch,
        session: "s".into(),
        epoch: Epoch(epoch),
        tokens: 96,
        time_left: Micros::from_secs(60),
    })
}

fn said(what: &str) -> Observed {
    let said = Said {
        request: Some("r".into()),
        what: what.into(),
        ..Said::default()
    };
    sent("c0", "s", Body::Said(said))
}

#[test]
fn a_turn_as_it_should_be() {
    let answer = right().answer;
    let facts = [
        begun(),
        said("accepted"),
        heard(true, "c0", "d0", run(7, 1)),
        sent("d0", "", Body::Permit(REQUEST, 1)),
        sent("d0", "", Body::Started(REQUEST, 1)),
        tokens(&answer[..3]),
        tokens(&answer[3..]),
        said("completed"),
        done(),
        Observed::Over,
    ];
    assert_eq!(found(facts), []);
}

#[test]
fn i1_an_end_too_few_or_too_many() {
    assert_eq!(found([begun(), Observed::Over]), [Invariant::I1]);
    let left = || ended(End::Left);
    assert_eq!(found([begun(), left(), left()]), [Invariant::I1]);
    assert_eq!(found([begun(), left(), tokens(&right().answer[..1])]), [Invariant::I1]);
    assert_eq!(
        found([said("accepted"), said("failed"), said("cancelled")]),
        [Invariant::I1]
    );
    let rest = Observed::Rest {
        node: "c0".into(),
        left: vec!["1 turn".into()],
    };
    assert_eq!(found([rest]), [Invariant::I1]);
}

#[test]
fn i2_a_gap_a_repeat_a_short_answer() {
    let answer = right().answer;
    assert_eq!(found([begun(), tokens(&answer[1..4]), done()]), [Invariant::I2]);
    assert_eq!(
        found([begun(), tokens(&answer[..2]), tokens(&answer[1..5]), done()]),
        [Invariant::I2]
    );
    assert_eq!(found([begun(), tokens(&answer[..2]), done()]), [Invariant::I2]);
    assert_eq!(found([begun(), ended(End::Failed("answer-changed"))]), [Invariant::I2]);
}

#[test]
fn i5_tokens_of_another_context() {
    assert_eq!(
        found([begun(), tokens(&[1_001, 1_002, 1_003]), done()]),
        [Invariant::I5]
    );
}

fn ledger(running: u64, permits: &[(u64, u64)], room: u64) -> Observed {
    let held = |(pages, bytes): (u64, u64)| Held {
        request: "r".into(),
        pages,
        bytes,
        deadline: Micros::from_secs(9),
    };
    Observed::Ledger(Ledger {
        worker: "d0".into(),
        now: T,
        pool: 10,
        room,
        running: vec![held((running, 0))],
        permits: permits.iter().copied().map(held).collect(),
        waiting: 0,
    })
}

#[test]
fn i3_more_than_the_pool_by_its_own_books_or_by_ours() {
    assert_eq!(found([ledger(6, &[(4, 1)], 0)]), []);
    assert_eq!(found([ledger(6, &[(5, 1)], 0)]), [Invariant::I3]);
    assert_eq!(found([ledger(6, &[(3, 1)], 0)]), [Invariant::I3]);
    let takes = |n| {
        let request = RequestId(n);
        [
            heard(true, "c0", "d0", run(n, 1)),
            sent("d0", "", Body::Started(request, 1)),
        ]
    };
    assert_eq!(found(takes(1).into_iter().chain(takes(2))), [Invariant::I3]);
    let abort = Body::Abort(Abort {
        request: RequestId(1),
        attempt: 1,
        epoch: Epoch(1),
        reason: AbortReason::ClientGone,
    });
    let between = [heard(true, "c0", "d0", abort)];
    assert_eq!(found(takes(1).into_iter().chain(between).chain(takes(2))), []);
}

#[test]
fn i4_a_promise_too_many() {
    assert_eq!(found([ledger(0, &[(1, 60), (1, 30)], 8)]), [Invariant::I4]);
    assert_eq!(found([ledger(0, &[(1, 600)], 9)]), []);
    let takes = |n| {
        let request = RequestId(n);
        [
            heard(true, "c0", "d1", run(n, 1)),
            sent("d1", "", Body::Permit(request, 1)),
        ]
    };
    let both = found(takes(1).into_iter().chain(takes(2)));
    assert!(both.contains(&Invariant::I4), "{both:?}");
}

#[test]
fn i5_a_backup_that_was_never_there() {
    let advanced = || {
        let said = Said {
            session: "s".into(),
            event: "backup-advanced".into(),
            prefill: "p0".into(),
            backup_tokens: 32,
            ..Said::default()
        };
        sent("d0", "s", Body::Said(said))
    };
    let stored = |n: usize| sent("p0", "p0", Body::Stored(right().names[..n].to_vec()));
    assert_eq!(found([begun(), stored(2), advanced(), done_all()]), []);
    assert_eq!(found([begun(), stored(1), advanced(), done_all()]), [Invariant::I5]);
}

fn done_all() -> Observed {
    ended(End::Left)
}

#[test]
fn i6_backwards() {
    let wrote = |epoch, turns| Observed::Snapshot {
        session: "s".into(),
        epoch: Epoch(epoch),
        turns,
    };
    let leased = |owner: &str, epoch| Observed::Leased {
        shard: 1,
        owner: owner.into(),
        epoch: Epoch(epoch),
    };
    let twice = || [begun(), done_all(), begun(), done_all()].into_iter();
    let after = |facts: Vec<Observed>| found(twice().chain(facts));
    assert_eq!(after(vec![wrote(1, 1), wrote(1, 2), wrote(2, 1)]), []);
    assert_eq!(after(vec![wrote(1, 1), wrote(1, 1)]), [Invariant::I6]);
    assert_eq!(after(vec![wrote(2, 1), wrote(1, 2)]), [Invariant::I6]);
    assert_eq!(after(vec![wrote(2, 1), Observed::StoreLost, wrote(1, 2)]), []);
    assert_eq!(after(vec![wrote(1, 3)]), [Invariant::I6]);
    assert_eq!(found([leased("a", 1), leased("a", 1), leased("b", 2)]), []);
    assert_eq!(found([leased("a", 1), leased("b", 1)]), [Invariant::I6]);
    assert_eq!(
        found([leased("a", 2), Observed::StoreLost, leased("b", 1)]),
        [Invariant::I6]
    );
    let twice = found([said("accepted"), said("completed"), said("accepted"), said("completed")]);
    assert_eq!(twice, [Invariant::I6]);
}

#[test]
fn i7_work_for_an_old_owner_and_pages_for_an_old_life() {
    let arrives = |request, epoch| heard(true, "c0", "d0", run(request, epoch));
    let starts = |request, attempt| sent("d0", "", Body::Started(RequestId(request), attempt));
    assert_eq!(found([arrives(1, 1), arrives(2, 2), starts(2, 2)]), []);
    assert_eq!(found([arrives(1, 2), arrives(2, 1), starts(2, 1)]), [Invariant::I7]);
    let born = Observed::Born("d0".into(), Epoch(5));
    let pages = |epoch| sent("p0", "d0", Body::Pages(REQUEST, Epoch(epoch)));
    let taken = || sent("d0", "", Body::PagesAck(REQUEST));
    assert_eq!(found([born.clone(), pages(5), taken()]), []);
    assert_eq!(found([born, pages(4), taken()]), [Invariant::I7]);
}

#[test]
fn i8_a_worker_that_is_avoided() {
    let well = |node: &str| Observed::Well(node.into(), Some(Micros::ZERO));
    let alive = |alive| Observed::Alive {
        control: "c0".into(),
        workers: vec![("d0".into(), alive)],
    };
    let wait = || std::iter::repeat_n(Observed::Calm, 20);
    let facts = |a| [well("c0"), well("d0")].into_iter().chain(wait()).chain([alive(a)]);
    assert_eq!(found(facts(true)), []);
    assert_eq!(found(facts(false)), [Invariant::I8]);
    assert_eq!(found([well("c0"), well("d0"), alive(false)]), []);
}

#[test]
fn i9_a_wrong_page() {
    let took = |name: PageHash, content| Observed::Imported {
        worker: "d0".into(),
        name,
        content,
    };
    let (name, content) = (right().names[0], right().contents[0]);
    assert_eq!(found([begun(), took(name, content), done_all()]), []);
    assert_eq!(found([begun(), took(name, content ^ 1), done_all()]), [Invariant::I9]);
}

#[test]
fn i10_somebody_who_is_never_asked_and_a_turn_that_fails_for_nothing() {
    let well = |node: &str| Observed::Well(node.into(), Some(Micros::ZERO));
    let wait = || std::iter::repeat_n(Observed::Over, 30);
    let asks = |d: &str| {
        let no = Reject {
            request: REQUEST,
            attempt: 1,
            reason: RejectReason::NoSpace,
            pause_millis: 0,
        };
        [sent("c0", d, run(7, 1)), sent(d, "", Body::Reject(no))]
    };
    let facts = |second: &str| {
        let before = [well("d0"), well("d1")].into_iter().chain(wait()).chain([begun()]);
        let asks = asks("d0").into_iter().chain(asks(second));
        before.chain(asks).chain([done_all()]).collect::<Vec<_>>()
    };
    assert_eq!(found(facts("d1")), []);
    assert_eq!(found(facts("d0")), [Invariant::I10]);
    let failed = || ended(End::Failed("retries-spent"));
    let facts = [Observed::Calm].into_iter().chain(wait()).chain([begun(), failed()]);
    assert_eq!(found(facts), [Invariant::I10]);
    assert_eq!(found([Observed::Calm, begun(), failed()]), []);
}

#[test]
fn i11_and_i12() {
    let evicted = Observed::EvictedInUse {
        worker: "d0".into(),
        request: REQUEST,
    };
    assert_eq!(found([evicted]), [Invariant::I11]);
    let Observed::Ledger(mut late) = ledger(5, &[], 5) else {
        unreachable!()
    };
    late.now = Micros::from_secs(10);
    assert_eq!(found([Observed::Ledger(late)]), [Invariant::I12]);
    let rest = Observed::Rest {
        node: "d0".into(),
        left: vec!["1 permit".into()],
    };
    assert_eq!(found([rest]), [Invariant::I12]);
}
