use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const SEC: u64 = 1_000_000;

fn config(seeds: u32, bytes: u64) -> Config {
    Config {
        max_pending_seeds: seeds,
        max_pending_seed_bytes: bytes,
        ttl: Micros(5 * SEC),
        queue_cap_per_class: 100,
    }
}

fn ask(request: u128, class: Class, bytes: u64) -> Ask {
    Ask {
        request: RequestId(request),
        class,
        bytes,
        pages: 1,
        deadline: Micros(100 * SEC),
    }
}

/// I4 and the page budget, as they must hold after every call.
fn within_budget(p: &Permits) -> bool {
    let v = p.view();
    v.pending.len() <= v.config.max_pending_seeds as usize
        && (v.pending.len() <= 1 || v.pending_bytes <= v.config.max_pending_seed_bytes)
        && v.pending_pages <= v.page_budget
}

fn granted(events: &[Event]) -> Vec<Permit> {
    let permit = |e: &Event| if let Event::Granted(p) = e { Some(*p) } else { None };
    events.iter().filter_map(permit).collect()
}

#[test]
fn a_seed_larger_than_the_budget_moves_alone() {
    let mut p = Permits::new(config(4, 100));
    assert!(matches!(
        p.request(Micros(0), ask(1, Class::Batch, 1_000)),
        Asked::Granted(..)
    ));
    assert_eq!(
        p.request(Micros(0), ask(2, Class::Batch, 1)),
        Asked::Queued { position: 0 }
    );
    assert!(p.tick(Micros(1)).is_empty());
    assert!(p.release(PermitId(0)).is_some() && p.release(PermitId(0)).is_none());
    assert_eq!(granted(&p.tick(Micros(2)))[0].ask.request, RequestId(2));
}

#[test]
fn no_budget_at_all_still_means_one() {
    let mut p = Permits::new(Config {
        ttl: Micros(0),
        ..config(0, 0)
    });
    assert_eq!(
        p.request(Micros(7), ask(1, Class::Batch, 9)),
        Asked::Granted(PermitId(0), Micros(8))
    );
}

#[test]
fn a_newcomer_that_fits_does_not_pass_the_head_that_does_not() {
    let mut p = Permits::new(config(4, 100));
    p.request(Micros(0), ask(1, Class::Interactive, 60));
    assert_eq!(
        p.request(Micros(0), ask(2, Class::Interactive, 60)),
        Asked::Queued { position: 0 }
    );
    assert_eq!(
        p.request(Micros(0), ask(3, Class::Interactive, 10)),
        Asked::Queued { position: 1 }
    );
}

#[test]
fn a_newcomer_of_another_class_does_not_take_room_that_is_due_to_a_waiter() {
    let mut p = Permits::new(config(1, 100));
    p.request(Micros(0), ask(1, Class::Interactive, 1));
    p.request(Micros(0), ask(2, Class::Batch, 1));
    p.release(PermitId(0));
    // Room is free but not yet handed out; interactive has just been served, so it is batch's turn.
    assert_eq!(
        p.request(Micros(0), ask(3, Class::Interactive, 1)),
        Asked::Queued { position: 0 }
    );
    assert_eq!(granted(&p.tick(Micros(0)))[0].ask.request, RequestId(2));
}

#[test]
fn a_full_queue_says_so_and_a_passed_deadline_too() {
    let mut p = Permits::new(Config {
        queue_cap_per_class: 1,
        ..config(1, 100)
    });
    p.request(Micros(0), ask(1, Class::Batch, 1));
    assert_eq!(
        p.request(Micros(0), ask(2, Class::Batch, 1)),
        Asked::Queued { position: 0 }
    );
    assert_eq!(p.request(Micros(0), ask(3, Class::Batch, 1)), Asked::QueueFull);
    assert_eq!(
        p.request(Micros(0), ask(4, Class::Background, 1)),
        Asked::Queued { position: 0 }
    );
    assert_eq!(p.request(Micros(100 * SEC), ask(5, Class::Batch, 1)), Asked::TooLate);
    assert_eq!(
        p.request(Micros(6 * SEC), ask(1, Class::Batch, 1)),
        Asked::TooLate,
        "expired, not yet ticked"
    );
    assert_eq!(p.waiting(), 2);
}

#[test]
fn a_permit_ends_at_its_ttl_or_its_request_deadline_whichever_is_first() {
    let mut p = Permits::new(config(2, 100));
    p.request(Micros(0), ask(1, Class::Batch, 1));
    p.request(
        Micros(0),
        Ask {
            deadline: Micros(SEC),
            ..ask(2, Class::Batch, 1)
        },
    );
    p.request(
        Micros(0),
        Ask {
            deadline: Micros(2 * SEC),
            ..ask(3, Class::Background, 1)
        },
    );
    assert_eq!(p.next_deadline(), Some(Micros(SEC)));
    let events = p.tick(Micros(SEC));
    assert!(matches!(events[0], Event::Expired(e) if e.ask.request == RequestId(2)));
    assert!(matches!(events[1], Event::Granted(e) if e.ask.request == RequestId(3) && e.expires == Micros(2 * SEC)));
    assert_eq!(p.next_deadline(), Some(Micros(2 * SEC)));
    p.tick(Micros(5 * SEC));
    assert_eq!((p.pending(), p.next_deadline()), (0, None));
}

#[test]
fn a_burst_of_100_seeds_never_exceeds_the_budget_and_is_served_in_order() {
    let mut p = Permits::new(config(4, 350));
    for r in 0..100 {
        p.request(Micros(0), ask(r, Class::Interactive, 100));
        assert!(within_budget(&p));
    }
    assert_eq!(p.pending(), 3, "350 bytes carry three seeds of 100");
    let (mut now, mut served) = (0, Vec::new());
    while let Some(first) = p.view().pending.first() {
        served.push(first.ask.request.0);
        now += 10;
        p.release(first.permit);
        p.tick(Micros(now));
        assert!(within_budget(&p));
    }
    assert_eq!(served, (0..100).collect::<Vec<_>>());
}

/// Classes in the order they are served while all of them wait throughout.
fn backlog(grants: usize) -> Vec<Class> {
    let mut p = Permits::new(config(1, 100));
    let mut out = Vec::new();
    let mut next = 0;
    while out.len() < grants {
        for class in Class::ALL {
            // Eight of each always wait.
            while p.view().waiting.iter().filter(|a| a.class == *class).count() < 8 {
                p.request(Micros(0), ask(next, *class, 1));
                next += 1;
            }
        }
        let held = p.view().pending[0];
        out.push(held.ask.class);
        p.release(held.permit);
        p.tick(Micros(0));
    }
    out
}

#[test]
fn classes_share_grants_eight_to_three_to_one() {
    let order = backlog(1_200);
    let count = |c| order.iter().filter(|o| **o == c).count();
    assert!(
        count(Class::Interactive).abs_diff(800) <= 8,
        "{}",
        count(Class::Interactive)
    );
    assert!(count(Class::Batch).abs_diff(300) <= 3, "{}", count(Class::Batch));
    assert!(
        count(Class::Background).abs_diff(100) <= 1,
        "{}",
        count(Class::Background)
    );
    for window in order.windows(16) {
        assert!(window.contains(&Class::Background), "starved: {window:?}");
    }
}

#[test]
fn idling_earns_no_credit() {
    let mut p = Permits::new(config(1, 100));
    for r in 0..1_000 {
        let Asked::Granted(id, _) = p.request(Micros(0), ask(r, Class::Interactive, 1)) else {
            panic!()
        };
        p.release(id);
    }
    p.request(Micros(0), ask(1_000, Class::Interactive, 1));
    for r in 0..20 {
        p.request(Micros(0), ask(2_000 + r, Class::Background, 1));
        p.request(Micros(0), ask(3_000 + r, Class::Interactive, 1));
    }
    let mut background = 0;
    for _ in 0..9 {
        let held = p.view().pending[0];
        background += u32::from(held.ask.class == Class::Background);
        p.release(held.permit);
        p.tick(Micros(0));
    }
    assert!((1..=2).contains(&background), "{background} of 9");
}

#[derive(Debug, Clone)]
enum Op {
    Request(u128, usize, u64, u64, u64),
    Release(usize),
    Cancel(u128),
    Budget(u64),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..60_u128, 0..3_usize, 0..150_u64, 0..20_u64, 0..12_u64)
            .prop_map(|(r, c, b, p, d)| Op::Request(r, c, b, p, d)),
        2 => any::<usize>().prop_map(Op::Release),
        1 => (0..60_u128).prop_map(Op::Cancel),
        1 => (20..60_u64).prop_map(Op::Budget),
        2 => (0..4_u64).prop_map(Op::Wait),
    ]
}

proptest! {
    /// I4, I12, idempotency, one place per request, first come first served inside a class.
    #[test]
    fn the_ledger_keeps_its_promises(ops in prop::collection::vec(op(), 1..200), seeds in 0..6_u32) {
        let mut p = Permits::new(Config { queue_cap_per_class: 5, ..config(seeds, 200) });
        let mut now = Micros(0);
        let mut arrival: BTreeMap<RequestId, usize> = BTreeMap::new();
        let mut last_served = [None; CLASSES];
        p.set_page_budget(60);
        for (n, op) in ops.into_iter().enumerate() {
            let pages_before = p.pending_pages();
            let mut given = Vec::new();
            match op {
                Op::Request(r, c, bytes, pages, seconds) => {
                    let a = Ask {
                        request: RequestId(r), class: Class::ALL[c], bytes, pages,
                        deadline: now.plus(Micros(seconds * SEC)),
                    };
                    let known = p.find(now, a.request).is_some();
                    let first = p.request(now, a);
                    let before = p.view();
                    if first != Asked::QueueFull && first != Asked::TooLate {
                        prop_assert_eq!(p.request(now, Ask { bytes: 0, pages: 0, ..a }), first);
                        prop_assert_eq!(&p.view(), &before);
                        if !known { arrival.insert(a.request, n); }
                    }
                    if !known && matches!(first, Asked::Granted(..)) {
                        given.extend(before.pending.last().copied());
                    }
                }
                Op::Release(k) => {
                    let ids: Vec<_> = p.view().pending.iter().map(|h| h.permit).collect();
                    if !ids.is_empty() { prop_assert!(p.release(ids[k % ids.len()]).is_some()); }
                }
                Op::Cancel(r) => {
                    let known = p.find(now, RequestId(r)).is_some();
                    prop_assert_eq!(p.cancel(RequestId(r)), known);
                    prop_assert!(p.find(now, RequestId(r)).is_none());
                }
                Op::Budget(pages) => p.set_page_budget(pages),
                Op::Wait(seconds) => now = now.plus(Micros(seconds * SEC)),
            }
            given.extend(granted(&p.tick(now)));
            prop_assert!(p.tick(now).is_empty(), "a tick leaves nothing for the same instant");
            for g in given {
                let at = arrival[&g.ask.request];
                let last = &mut last_served[g.ask.class as usize];
                prop_assert!(last.is_none_or(|l| l < at), "overtaken inside a class");
                *last = Some(at);
            }
            let v = p.view();
            prop_assert!(within_budget(&p) || v.pending_pages <= pages_before, "{:?}", v);
            prop_assert!(v.pending.iter().all(|h| now < h.expires && h.expires <= h.ask.deadline));
            prop_assert!(v.waiting.iter().all(|a| now < a.deadline));
            prop_assert!(p.next_deadline().is_none_or(|d| now < d));
            let mut owners: Vec<_> = v.pending.iter().map(|h| h.ask.request)
                .chain(v.waiting.iter().map(|a| a.request)).collect();
            owners.sort();
            owners.dedup();
            prop_assert_eq!(owners.len(), v.pending.len() + v.waiting.len());
            for c in Class::ALL {
                prop_assert!(v.waiting.iter().filter(|a| a.class == *c).count() <= 5);
            }
        }
        p.tick(now.plus(Micros(12 * SEC)));
        prop_assert_eq!((p.pending(), p.waiting(), p.pending_pages()), (0, 0, 0));
    }

    /// Whatever the backlog, an ask is served within the grants its weight gives it.
    #[test]
    fn no_class_starves(lens in prop::array::uniform3(1..20_usize)) {
        let mut p = Permits::new(config(1, 100));
        p.request(Micros(0), ask(9_999, Class::Interactive, 1));
        for (c, len) in lens.into_iter().enumerate() {
            for k in 0..len { p.request(Micros(0), ask((c * 100 + k) as u128, Class::ALL[c], 1)); }
        }
        let mut waited = [0_u64; CLASSES];
        while let Some(held) = p.view().pending.first() {
            let served = held.ask.class as usize;
            for (c, w) in waited.iter_mut().enumerate() {
                let waits = c != served && p.view().waiting.iter().any(|a| a.class as usize == c);
                *w = if waits { *w + 1 } else { 0 };
                prop_assert!(*w <= PASS / weight(Class::ALL[c]) , "{:?} waited {}", Class::ALL[c], w);
            }
            p.release(held.permit);
            p.tick(Micros(0));
        }
        prop_assert_eq!(p.waiting(), 0);
    }
}
