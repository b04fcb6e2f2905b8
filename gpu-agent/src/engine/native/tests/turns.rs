//! Turns: what they hold, how they end.

use super::tiny::{CONTEXT, STOP, VOCABULARY};
use super::{Bench, answer, end, job, names, tiny};
use pinion_actors::{Engine as _, EngineError, EngineOutput};
use pinion_schemas::{Micros, PageHash, RequestId, Sampling};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn prompt(len: u32, seed: u32) -> Vec<u32> {
    (0..len)
        .map(|i| (i * 7 + seed * 13 + i * i) % (VOCABULARY - 1))
        .collect()
}

#[test]
fn a_turn_writes_and_the_next_one_finds_its_pages() {
    let mut bench = Bench::tiny(20, 16);
    let mut context = prompt(21, 1);
    let text = bench.run(1, &context, 12);
    context.extend(&text);
    assert_eq!(text.len(), 12);
    // 33 tokens, of which the last has no KV.
    assert_eq!(bench.engine.resident(&names(&bench.engine, &context)), 4);
    assert_eq!(bench.engine.submit(Micros::ZERO, job(2, &context, 0)), Ok(32));
    let out = bench.drain();
    assert_eq!((end(&out, 2), answer(&out, 2)), (Some((true, 32)), vec![]));
}

#[test]
fn jobs_without_sense_are_refused() {
    let mut bench = Bench::tiny(4, 16);
    let mut refused = |tokens: &[u32]| bench.engine.submit(Micros::ZERO, job(1, tokens, 1)).unwrap_err();
    assert!(matches!(refused(&[]), EngineError::Refused(_)));
    assert!(matches!(refused(&[VOCABULARY]), EngineError::Refused(_)));
    assert!(matches!(
        refused(&vec![0; CONTEXT as usize + 1]),
        EngineError::Refused(_)
    ));
    assert!(matches!(refused(&prompt(33, 0)), EngineError::NoRoom(_)));
    bench.engine.submit(Micros::ZERO, job(1, &[1], 1)).unwrap();
    let again = bench.engine.submit(Micros::ZERO, job(1, &[1], 1));
    assert!(matches!(again, Err(EngineError::Refused(_))));
    let simulated = [(pinion_schemas::chain(&[1; 16], 16)[0], 1)];
    assert!(matches!(
        bench.engine.import(None, &simulated),
        Err(EngineError::Refused(_))
    ));
    bench.drain();
}

#[test]
fn the_context_ends_where_the_models_does() {
    let mut bench = Bench::tiny(60, 256);
    let text = bench.run(1, &prompt(CONTEXT - 2, 3), 50);
    assert!(text.len() <= 3);
    assert!(bench.run(2, &prompt(CONTEXT, 3), 50).len() <= 1);
}

#[test]
fn a_stop_token_ends_a_turn_and_is_not_part_of_it() {
    let model = tiny::model();
    let mut bench = Bench::tiny(40, 64);
    // At a high temperature each token is likely to come up some time.
    let mut stopped = 0;
    for seed in 0..40 {
        let mut job = job(seed.into(), &prompt(9, 2), 60);
        job.sampling = Sampling {
            temperature_milli: 50_000,
            top_p_milli: 1_000,
            seed,
        };
        bench.engine.submit(Micros::ZERO, job).unwrap();
        let out = bench.drain();
        let text = answer(&out, seed.into());
        assert!(!text.contains(&STOP) && model.stop_tokens() == [STOP]);
        assert!(end(&out, seed.into()).unwrap().0);
        stopped += usize::from(text.len() < 60);
    }
    assert!(stopped > 5, "{stopped}");
}

#[test]
fn a_cancelled_turn_frees_its_pages_when_its_step_has_ended() {
    let mut bench = Bench::tiny(8, 16);
    bench.engine.submit(Micros::ZERO, job(1, &prompt(40, 1), 10)).unwrap();
    bench.advance();
    assert!(bench.engine.cancel(RequestId(1)) && !bench.engine.cancel(RequestId(1)));
    assert_eq!((bench.engine.running(), bench.engine.queued_tokens()), (0, 0));
    // The same request may come again at once, and has to wait for room like any other.
    let again = bench.engine.submit(Micros::ZERO, job(1, &prompt(40, 1), 10));
    assert!(matches!(again, Err(EngineError::NoRoom(_))));
    let out = bench.drain();
    assert_eq!(end(&out, 1), None);
    assert_eq!(bench.run(1, &prompt(40, 1), 10).len(), 10);
}

#[test]
fn a_panic_of_the_computer_ends_all_turns() {
    let mut bench = Bench::tiny(8, 16);
    bench.engine.submit(Micros::ZERO, job(1, &prompt(10, 1), 2)).unwrap();
    bench.engine.submit(Micros::ZERO, job(2, &prompt(10, 2), 2)).unwrap();
    bench.engine.turns[1].tokens[3] = u32::MAX;
    let out = bench.drain();
    assert_eq!((end(&out, 1), end(&out, 2)), (Some((false, 0)), Some((false, 0))));
    assert_eq!(bench.run(3, &prompt(10, 1), 2).len(), 2, "it goes on with new ones");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Turns come, end, and are cancelled at any time in a small pool: the books are right, each ends once, and the events alone
    /// tell what is resident.
    #[test]
    fn nothing_leaks(
        steps in prop::collection::vec((0_u8..6, 0_u128..5, 1_u32..40, 0_u32..10), 1..40), pool in 6_u32..14,
    ) {
        let mut bench = Bench::tiny(pool, 16);
        let (mut out, mut running) = (Vec::new(), BTreeSet::new());
        for (what, id, len, new) in steps {
            match what {
                0..=2 => if bench.engine.submit(Micros::ZERO, job(id, &prompt(len, id as u32 % 2), new)).is_ok() {
                    prop_assert!(running.insert(id));
                },
                3 => { prop_assert_eq!(bench.engine.cancel(RequestId(id)), running.remove(&id)); }
                _ => {
                    let some = bench.advance();
                    for o in &some {
                        if let EngineOutput::Finished { request, ok, .. } = o {
                            prop_assert!(*ok && running.remove(&request.0));
                        }
                    }
                    out.extend(some);
                }
            }
            let usage = bench.engine.inbox.pool().usage();
            prop_assert_eq!(u64::from(usage.writing + usage.pages), bench.engine.tree.used());
        }
        out.extend(bench.drain());
        let mut seen = BTreeSet::new();
        for o in &out {
            match o {
                EngineOutput::Stored(p) => { seen.insert(*p); }
                EngineOutput::Evicted(p) => { seen.remove(p); }
                _ => {}
            }
        }
        prop_assert_eq!(seen, bench.engine.pages().into_iter().collect::<BTreeSet<PageHash>>());
    }
}
