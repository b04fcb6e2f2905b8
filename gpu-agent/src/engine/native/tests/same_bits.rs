//! However a context was split, batched or cached: the same tokens and the same bytes.

use super::tiny::VOCABULARY;
use super::{Bench, answer, config, job, tiny};
use crate::engine::native::NativeConfig;
use pinion_actors::Engine as _;
use pinion_schemas::{Micros, Sampling};
use proptest::prelude::*;

fn tokens(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..VOCABULARY - 1, len)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn splits_batches_and_caches_do_not_matter(
        prompt in tokens(1..90), others in prop::collection::vec((tokens(1..40), 0_u32..12), 0..4),
        chunk in 1_u32..50, threads in 1_usize..4, new in 1_u32..20, warm in 0_usize..90, seed in any::<u64>(),
        temperature_milli in prop_oneof![Just(0_u32), Just(900)],
    ) {
        let sampling = Sampling { temperature_milli, top_p_milli: 950, seed };
        let sampled = |id, max_new| {
            let mut job = job(id, &prompt, max_new);
            job.sampling = sampling;
            job
        };
        // Alone, in one chunk.
        let mut alone = Bench::tiny(80, 256);
        alone.engine.submit(Micros::ZERO, sampled(1, new)).unwrap();
        let want = answer(&alone.drain(), 1);
        let context = [&prompt[..], &want].concat();
        let digests = alone.digests(&context);
        // In small chunks, beside others, behind a prefix of its own that is in the cache.
        let config = NativeConfig { threads, ..config(80, chunk) };
        let mut bench = Bench::new(&tiny::model(), config);
        bench.run(99, &prompt[..warm.clamp(1, prompt.len())], 0);
        for (id, (tokens, new)) in (10..).zip(&others) {
            bench.engine.submit(Micros::ZERO, job(id, tokens, *new)).unwrap();
            let _ = bench.advance();
        }
        bench.engine.submit(Micros::ZERO, sampled(1, new)).unwrap();
        prop_assert_eq!(&answer(&bench.drain(), 1), &want);
        prop_assert_eq!(bench.digests(&context), digests);
        // A turn that goes on elsewhere after some tokens goes on alike.
        if want.len() > 1 {
            let cut = prompt.len() + want.len() / 2;
            let mut rest = job(5, &context[..cut], (context.len() - cut) as u32);
            rest.sampling = sampling;
            bench.engine.submit(Micros::ZERO, rest).unwrap();
            prop_assert_eq!(&answer(&bench.drain(), 5), &context[cut..]);
        }
    }
}
