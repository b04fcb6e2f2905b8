//! Pages that leave the pool, and come back from host memory or from a file.

use super::super::tiers::in_pool;
use super::super::{FileTierConfig, NativeConfig, NativeEngine, StartError};
use super::{Bench, answer, config, end, job, names, tiny};
use crate::engine::tree::Tier;
use pinion_actors::engine::TierView;
use pinion_actors::{Engine as _, EngineOutput};
use pinion_schemas::{Epoch, Micros, RequestId, WorkerId};
use pinion_transfer::file::FileError;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a page of the tiny model, and of a block of its file: the header's, those of 32 records, and a slot each.
const PAGE_BYTES: u64 = 2_048;
const BLOCK: u64 = 4_096;

/// A folder for the file of one test, removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("pinion-tiers-{}-{number}", std::process::id())))
    }

    /// An engine with so many pages in each tier.
    fn config(&self, pool: u32, host: u64, file: u64) -> NativeConfig {
        NativeConfig {
            host_tier_bytes: host * PAGE_BYTES,
            file_tier: (file > 0).then(|| FileTierConfig {
                folder: self.0.clone(),
                bytes: (1 + file.div_ceil(32) + file) * BLOCK,
            }),
            ..config(pool, 256)
        }
    }

    fn bench(&self, pool: u32, host: u64, file: u64) -> Bench {
        Bench::new(&tiny::model(), self.config(pool, host, file))
    }

    fn file(&self) -> PathBuf {
        self.0.join("d0.kv")
    }

    /// Flips a bit in every page of the file, and in no record.
    fn damage(&self) {
        let mut bytes = std::fs::read(self.file()).unwrap();
        // The header's block, one of records, and the slots.
        for slot in bytes.chunks_mut(BLOCK as usize).skip(2) {
            slot[100] ^= 4;
        }
        std::fs::OpenOptions::new()
            .write(true)
            .open(self.file())
            .unwrap()
            .write_all(&bytes)
            .unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn context(len: u32, seed: u32) -> Vec<u32> {
    (0..len).map(|i| (i * i + 3 * i + seed * 11) % 69).collect()
}

fn seen(bench: &Bench) -> TierView {
    bench.engine.tiers().unwrap()
}

/// Turns of another conversation until nothing of `context` is in the pool.
fn push_out(bench: &mut Bench, context: &[u32]) {
    let chain = names(&bench.engine, context);
    let pool = bench.engine.pool_pages() as u32;
    bench.run(999, &super::tiers::context(pool * tiny::PAGE, 5), 0);
    assert_eq!(bench.engine.tree.match_device(&chain), 0);
}

#[test]
fn an_evicted_session_is_loaded_and_says_the_same() {
    let context = context(45, 1);
    let mut alone = Bench::tiny(40, 256);
    let want = alone.run(1, &context, 20);
    for (host, file) in [(0, 40), (40, 0), (40, 40), (3, 40)] {
        let folder = Folder::new();
        let mut bench = folder.bench(10, host, file);
        bench.run(1, &context, 0);
        push_out(&mut bench, &context);
        let chain = names(&bench.engine, &context);
        assert_eq!(
            (chain.len(), bench.engine.resident(&chain)),
            (5, 5),
            "a demoted page is a hit"
        );
        assert!(
            bench.engine.export_pages(&chain).is_empty(),
            "peers get what is in the pool"
        );
        assert_eq!(bench.engine.submit(Micros::ZERO, job(2, &context, 20)), Ok(40));
        assert_eq!(bench.engine.queued_tokens(), 5, "what is loaded is not computed");
        let out = bench.drain();
        assert_eq!(answer(&out, 2), want, "host {host}, file {file}");
        let said = [&context[..], &want].concat();
        assert_eq!(bench.digests(&said), alone.digests(&said));
        let seen = seen(&bench);
        assert_eq!((seen.reloaded, seen.corrupt, seen.failed), (5, 0, 0));
        assert!(seen.demoted >= 5 && seen.pool.pages <= 10, "{seen:?}");
    }
}

#[test]
fn without_tiers_an_evicted_page_is_gone() {
    let mut bench = Bench::tiny(10, 256);
    let context = context(45, 1);
    bench.run(1, &context, 0);
    push_out(&mut bench, &context);
    assert_eq!(bench.engine.resident(&names(&bench.engine, &context)), 0);
    assert_eq!((seen(&bench).copied, seen(&bench).demoted), (0, 0));
    assert!(seen(&bench).dropped >= 5);
}

#[test]
fn a_restarted_worker_offers_what_it_had() {
    let (folder, context) = (Folder::new(), context(45, 1));
    let mut first = folder.bench(10, 0, 40);
    let text = first.run(1, &context, 12);
    let said = [&context[..], &text].concat();
    let digests = first.digests(&said);
    drop(first);
    let mut second = folder.bench(10, 0, 40);
    let told = second.advance();
    let chain = names(&second.engine, &said);
    // The last token has no KV.
    let pages = (said.len() - 1) / tiny::PAGE as usize;
    let stored = told
        .iter()
        .filter(|o| matches!(o, EngineOutput::Stored(p) if chain.contains(p)));
    assert_eq!(
        (stored.count(), second.engine.pages().len()),
        (pages, pages),
        "the router hears of them"
    );
    let next = [&said[..], &[3, 1, 4]].concat();
    assert_eq!(
        second.engine.submit(Micros::ZERO, job(2, &next, 9)),
        Ok(pages as u64 * 8)
    );
    let text = answer(&second.drain(), 2);
    assert_eq!(second.digests(&said), digests);
    assert_eq!(Bench::tiny(40, 256).run(1, &next, 9), text);
    assert_eq!(seen(&second).reloaded, pages as u64);
}

#[test]
fn a_damaged_page_is_computed_again() {
    let (folder, context) = (Folder::new(), context(45, 1));
    let want = Bench::tiny(40, 256).run(1, &context, 20);
    let mut bench = folder.bench(10, 0, 32);
    bench.run(1, &context, 0);
    push_out(&mut bench, &context);
    folder.damage();
    assert_eq!(bench.engine.submit(Micros::ZERO, job(2, &context, 20)), Ok(40));
    assert_eq!(answer(&bench.drain(), 2), want);
    assert_eq!((seen(&bench).reloaded, seen(&bench).corrupt), (0, 1));
    // It was written again. What pushes it out was damaged too.
    push_out(&mut bench, &context);
    assert_eq!(bench.run(3, &context, 20), want);
    assert_eq!((seen(&bench).reloaded, seen(&bench).corrupt), (5, 2));
}

#[test]
fn a_page_that_is_evicted_before_its_copy_began_is_dropped_and_nobody_waits() {
    let folder = Folder::new();
    let mut bench = folder.bench(32, 0, 100);
    let (first, second) = (context(32 * tiny::PAGE, 1), context(30 * tiny::PAGE, 2));
    bench.engine.submit(Micros::ZERO, job(1, &first, 0)).unwrap();
    // One step names all 32 pages; the first few copies begin.
    let mut out = bench.advance();
    while end(&out, 1).is_none() {
        bench.wait();
        out.extend(bench.advance());
    }
    bench.engine.submit(Micros::ZERO, job(2, &second, 0)).unwrap();
    out.extend(bench.drain());
    let seen = seen(&bench);
    assert_eq!(end(&out, 2), Some((true, 240)));
    assert!(seen.dropped > 0 && seen.demoted > 0, "{seen:?}");
    assert_eq!(
        seen.dropped + seen.demoted,
        30,
        "each evicted page is counted: {seen:?}"
    );
    let chain = names(&bench.engine, &first);
    let evicted = out
        .iter()
        .filter(|o| matches!(o, EngineOutput::Evicted(p) if chain.contains(p)));
    assert_eq!(evicted.count() as u64, seen.dropped);
    assert_eq!(bench.engine.resident(&chain) as u64, 32 - seen.dropped);
}

#[test]
fn a_turn_that_is_cancelled_while_it_loads_leaves_nothing() {
    let (folder, context) = (Folder::new(), context(64, 1));
    let mut bench = folder.bench(12, 0, 40);
    bench.run(1, &context, 0);
    push_out(&mut bench, &context);
    bench.engine.submit(Micros::ZERO, job(2, &context, 4)).unwrap();
    assert_eq!(bench.engine.running(), 1);
    assert!(bench.engine.cancel(RequestId(2)));
    assert_eq!((bench.engine.running(), bench.engine.queued_tokens()), (0, 0));
    let out = bench.drain();
    assert_eq!((end(&out, 2), answer(&out, 2)), (None, vec![]));
    // What was loaded by then may stay; the turn can come again.
    assert_eq!(bench.run(2, &context, 4), Bench::tiny(40, 256).run(1, &context, 4));
}

#[test]
fn others_compute_while_a_turn_loads() {
    let (folder, context) = (Folder::new(), context(64, 1));
    let mut bench = folder.bench(20, 0, 40);
    bench.run(1, &context, 0);
    push_out(&mut bench, &context);
    bench.engine.submit(Micros::ZERO, job(2, &context, 4)).unwrap();
    bench.engine.submit(Micros::ZERO, job(3, &[1, 2, 3], 4)).unwrap();
    // Its pages are not back before somebody takes them: the first step is the other's alone.
    bench.engine.begin_step();
    assert!(bench.engine.computer.busy());
    assert!(!bench.engine.turns[0].is_ready() && bench.engine.turns[1].slots.is_empty());
    let out = bench.drain();
    assert_eq!((answer(&out, 2).len(), answer(&out, 3).len()), (4, 4));
}

#[test]
fn pages_come_behind_those_that_are_brought_back() {
    let (folder, context) = (Folder::new(), context(64, 1));
    let mut bench = folder.bench(12, 0, 40);
    bench.run(1, &context, 0);
    push_out(&mut bench, &context);
    let chain = names(&bench.engine, &context);
    bench.engine.touch(chain[3]);
    bench.engine.touch(chain[3]);
    assert_eq!(
        (bench.engine.running(), bench.engine.tree.reserved()),
        (0, 4),
        "asked for once"
    );
    bench.drain();
    assert_eq!((bench.engine.tree.match_device(&chain), seen(&bench).reloaded), (4, 4));
    assert!(in_pool(&bench.engine.tree, chain[3]).is_some());
}

#[test]
fn a_small_file_keeps_the_beginning_of_what_was_used_last() {
    let (folder, first, second) = (Folder::new(), context(64, 1), context(64, 2));
    let mut bench = folder.bench(9, 0, 6);
    bench.run(1, &first, 0);
    let chain = names(&bench.engine, &first);
    push_out(&mut bench, &first);
    bench.run(2, &second, 0);
    let tree = &bench.engine.tree;
    assert_eq!((tree.pages_in(Tier::File), tree.capacity(Tier::File)), (6, 6));
    assert_eq!(bench.engine.resident(&chain), 0);
    push_out(&mut bench, &second);
    assert!(bench.engine.resident(&names(&bench.engine, &second)) < 8);
}

#[test]
fn a_file_that_cannot_be_had_is_an_error_that_says_so() {
    let folder = Folder::new();
    let _first = folder.bench(4, 0, 4);
    let start = |config| {
        NativeEngine::new(tiny::model(), config, &WorkerId::new("d0").unwrap(), Epoch(2))
            .err()
            .unwrap()
    };
    let locked = start(folder.config(4, 0, 4));
    assert!(matches!(locked, StartError::File(FileError::Locked(path)) if path == folder.file()));
    let nowhere = Folder("/proc/nowhere".into());
    assert!(matches!(start(nowhere.config(4, 0, 4)), StartError::Folder { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Turns come and are cancelled at any time, with tiers of any size, and the worker is replaced in between: each turn says what
    /// it says alone, the books add up, and the events alone tell what is resident.
    #[test]
    fn nothing_leaks_and_nothing_is_wrong(
        steps in prop::collection::vec((0_u8..9, 0_u128..6, 1_u32..70, 0_u32..6), 1..40),
        pool in 14_u32..22, host in 0_u64..12, file in 0_u64..40,
    ) {
        let folder = Folder::new();
        let mut bench = folder.bench(pool, host, file);
        let mut alone = Bench::tiny(200, 256);
        let (mut out, mut running) = (Vec::new(), BTreeSet::new());
        for (what, id, len, new) in steps {
            match what {
                0..=3 => {
                    let prompt = context(len, id as u32 % 4);
                    if bench.engine.submit(Micros::ZERO, job(id, &prompt, new)).is_ok() {
                        prop_assert!(running.insert(id));
                    }
                }
                4 => { prop_assert_eq!(bench.engine.cancel(RequestId(id)), running.remove(&id)); }
                5 => if let Some(tip) = names(&bench.engine, &context(len, id as u32 % 4)).last() { bench.engine.touch(*tip); }
                6 if new == 0 => {
                    drop(bench);
                    out.clear();
                    running.clear();
                    bench = folder.bench(pool, host, file);
                }
                6 => {
                    let prompt = context(len + 30, id as u32 % 4);
                    out.extend(bench.drain());
                    running.clear();
                    bench.engine.submit(Micros::ZERO, job(77, &prompt, new)).unwrap();
                    let some = bench.drain();
                    prop_assert_eq!(answer(&some, 77), alone.run(1, &prompt, new));
                    out.extend(some);
                }
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
            let (usage, tree) = (bench.engine.inbox.pool().usage(), &bench.engine.tree);
            prop_assert_eq!(usage.free + usage.writing + usage.pages, pool);
            prop_assert!(tree.used() <= u64::from(pool));
        }
        out.extend(bench.drain());
        let mut told = BTreeSet::new();
        for o in &out {
            match o {
                EngineOutput::Stored(p) => { prop_assert!(told.insert(*p)); }
                EngineOutput::Evicted(p) => { prop_assert!(told.remove(p)); }
                _ => {}
            }
        }
        prop_assert_eq!(told, bench.engine.pages().into_iter().collect::<BTreeSet<_>>());
        prop_assert_eq!(seen(&bench).corrupt + seen(&bench).failed, 0);
    }
}
