use super::*;
use proptest::prelude::*;

fn worker(n: u32) -> WorkerId {
    WorkerId::new(format!("d-{n}")).unwrap()
}

fn usage(permille: u64) -> Sample {
    Sample {
        used_pages: permille,
        pool_pages: 1_000,
        ..Sample::default()
    }
}

const MS: u64 = 1_000;

#[test]
fn the_hint_follows_the_table() {
    for (permille, millis) in [
        (0, 0),
        (899, 0),
        (900, 200),
        (910, 200),
        (920, 400),
        (950, 1_000),
        (1_000, 2_000),
        (1_500, 2_000),
    ] {
        assert_eq!(hint(&usage(permille)), millis, "usage {permille} permille");
    }
    for (depth, millis) in [(7, 0), (8, 800), (19, 1_900), (20, 2_000), (u32::MAX, 2_000)] {
        assert_eq!(
            hint(&Sample {
                transfer_queue: depth,
                ..usage(0)
            }),
            millis,
            "depth {depth}"
        );
    }
    assert_eq!(
        hint(&Sample {
            retracted: 1,
            transfer_queue: 99,
            ..usage(1_000)
        }),
        1_500,
        "retraction goes first"
    );
    assert_eq!(
        hint(&Sample {
            transfer_queue: 99,
            ..usage(900)
        }),
        200,
        "then usage"
    );
    assert_eq!(hint(&Sample::default()), 2_000, "no pool is a full pool");
}

#[test]
fn pauses_in_a_row_double_but_hints_of_one_burst_do_not() {
    let (d, mut p) = (worker(0), Pauses::default());
    p.hinted(Micros(0), &d, 300, 0);
    p.hinted(Micros(10 * MS), &d, 300, 0);
    assert_eq!(p.until(Micros(10 * MS), &d), Some(Micros(310 * MS)));
    assert_eq!(p.until(Micros(310 * MS), &d), None);
    p.hinted(Micros(400 * MS), &d, 300, 0);
    assert_eq!(p.until(Micros(400 * MS), &d), Some(Micros(1_000 * MS)));
    p.hinted(Micros(1_000 * MS), &d, 300, 0);
    assert_eq!(p.until(Micros(1_000 * MS), &d), Some(Micros(2_200 * MS)));
    p.hinted(Micros(2_200 * MS), &d, 0, 0);
    p.hinted(Micros(2_300 * MS), &d, 300, 0);
    assert_eq!(
        p.until(Micros(2_300 * MS), &d),
        Some(Micros(2_600 * MS)),
        "a hint of 0 ends the streak"
    );
    p.hinted(Micros(9_000 * MS), &d, 300, 0);
    assert_eq!(p.view()[&d].streak, 0, "and so does time");
}

#[test]
fn a_later_smaller_hint_never_shortens_a_pause() {
    let (d, mut p) = (worker(0), Pauses::default());
    p.hinted(Micros(0), &d, 2_000, 0);
    p.hinted(Micros(1), &d, 200, 0);
    p.hinted(Micros(2), &d, 0, 0);
    assert_eq!(p.until(Micros(3), &d), Some(Micros(2_000 * MS)));
    p.forget(&d);
    assert_eq!(p.until(Micros(3), &d), None);
}

#[test]
fn senders_at_the_bound_do_not_wake_together() {
    let d = worker(0);
    let until = |jitter| {
        let mut p = Pauses::default();
        p.hinted(Micros(0), &d, 9_999, jitter);
        p.until(Micros(0), &d).unwrap()
    };
    assert_eq!(
        (until(0), until(500), until(1_000)),
        (Micros(2_000 * MS), Micros(2_250 * MS), Micros(2_500 * MS))
    );
}

proptest! {
    #[test]
    fn the_hint_is_bounded_and_grows_with_usage(retracted in 0..3_u32, used: u64, pool: u64, queue: u32, less: u64) {
        let s = Sample { retracted, used_pages: used, pool_pages: pool, transfer_queue: queue };
        let h = hint(&s);
        prop_assert!(h <= PAUSE_MILLIS_MAX);
        if retracted == 0 && queue < TRANSFER_QUEUE_MIN && pool > 0 {
            let lighter = Sample { used_pages: used.min(less), ..s };
            prop_assert!(hint(&lighter) <= h);
        }
    }

    #[test]
    fn an_end_only_moves_on_and_is_bounded(steps in prop::collection::vec((0..3_000_u64, 0..3_u32, 0..3_000_u32, 0..1_000_u32), 1..100)) {
        let mut p = Pauses::default();
        let mut now = Micros(0);
        for (wait, w, millis, jitter) in steps {
            now = now.plus(Micros::from_millis(wait));
            let d = worker(w);
            let before = p.until(now, &d);
            p.hinted(now, &d, millis, jitter);
            let after = p.until(now, &d);
            prop_assert!(after >= before);
            prop_assert!(after.is_none_or(|a| a <= now.plus(Micros::from_millis(2_500))));
            let asked = u64::from(millis.min(PAUSE_MILLIS_MAX));
            prop_assert!(asked == 0 || after >= Some(now.plus(Micros::from_millis(asked))), "sent earlier than asked");
            prop_assert!(p.view().len() <= 3);
        }
    }
}
