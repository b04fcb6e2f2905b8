use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

fn id(n: usize) -> WorkerId {
    WorkerId::new(format!("d{n}")).unwrap()
}

/// Page `i` of chain `c`; mixed like a real name.
fn page(c: u64, i: u64) -> PageHash {
    let mut bytes = [0; 32];
    let mut x = (c << 32) + i + 1;
    for word in bytes.chunks_mut(8) {
        x = (x ^ (x >> 31)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        x = (x ^ (x >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word.copy_from_slice(&x.to_le_bytes());
    }
    PageHash(bytes)
}

fn chain(c: u64, pages: u64) -> Vec<PageHash> {
    (0..pages).map(|i| page(c, i)).collect()
}

const E: Epoch = Epoch(1);

#[test]
fn events_count_once_in_order_and_in_their_epoch() {
    let mut index = Residency::default();
    let (d, pages) = (id(0), chain(0, 4));
    assert_eq!(index.stored(&d, E, 2, &pages), Applied::Gap { expected: 1 });
    assert_eq!(index.stored(&d, E, 1, &pages), Applied::Ok);
    assert_eq!(index.evicted(&d, E, 1, &pages), Applied::Duplicate);
    assert_eq!(index.evicted(&d, E, 3, &pages), Applied::Gap { expected: 2 });
    assert_eq!(index.evicted(&d, E, 2, &pages[3..]), Applied::Ok);
    assert_eq!(index.longest_prefix(&d, &pages), 3);
    assert_eq!(index.evicted(&d, Epoch(0), 3, &pages), Applied::StaleEpoch);
    // A snapshot closes a gap, and an old one does not undo it.
    assert_eq!(index.snapshot(&d, E, 9, &pages[..2]), Applied::Ok);
    assert_eq!(index.snapshot(&d, E, 8, &pages), Applied::Duplicate);
    assert_eq!(index.longest_prefix(&d, &pages), 2);
    assert_eq!(index.stored(&d, E, 10, &pages[2..3]), Applied::Ok);
    // A new process holds nothing yet, even if its first event is late.
    assert_eq!(index.stored(&d, Epoch(2), 2, &pages), Applied::Gap { expected: 1 });
    assert_eq!(index.longest_prefix(&d, &pages), 0);
    assert_eq!(index.view().pages, 0);
    assert_eq!(index.stored(&d, E, 11, &pages), Applied::StaleEpoch);
}

#[test]
fn at_the_cap_new_pages_are_refused_and_counted_and_shared_ones_are_not() {
    let mut index = Residency::new(3);
    let pages = chain(0, 5);
    assert_eq!(index.stored(&id(0), E, 1, &pages), Applied::Ok);
    assert_eq!((index.view().pages, index.view().dropped), (3, 2));
    assert_eq!(index.stored(&id(1), E, 1, &pages[..2]), Applied::Ok);
    assert_eq!(index.longest_prefixes(&pages), [(&id(0), 3), (&id(1), 2)]);
    assert_eq!(index.evicted(&id(0), E, 2, &pages[2..]), Applied::Ok);
    assert_eq!(index.stored(&id(1), E, 2, &pages[2..3]), Applied::Ok);
    assert_eq!((index.longest_prefix(&id(1), &pages), index.view().dropped), (3, 2));
}

#[test]
fn the_workers_are_bounded_and_a_slot_is_used_again() {
    let mut index = Residency::default();
    let pages = chain(0, 2);
    for n in 0..WORKERS_MAX {
        assert_eq!(index.stored(&id(n), E, 1, &pages), Applied::Ok);
    }
    let late = id(WORKERS_MAX);
    assert_eq!(index.stored(&late, E, 1, &pages), Applied::TooManyWorkers);
    assert_eq!(index.view().dropped, 2);
    assert_eq!(index.holders_of(&pages[1]).count(), WORKERS_MAX);
    index.forget(&id(200));
    assert_eq!(index.longest_prefix(&id(200), &pages), 0);
    assert_eq!(index.stored(&late, E, 1, &pages[..1]), Applied::Ok);
    assert_eq!(index.longest_prefix(&late, &pages), 1);
    assert_eq!(index.longest_prefixes(&pages).len(), WORKERS_MAX);
}

#[test]
fn a_page_costs_at_most_64_bytes() {
    // Worst just after growing, when 3/8 of the places are taken.
    assert!(size_of::<table::Entry>() * 8 / 3 <= 64);
}

#[test]
#[ignore = "a measurement: cargo test -p pinion-core --lib --release residency -- --ignored --nocapture"]
fn measure() {
    let mut index = Residency::default();
    let long = chain(0, 1_600);
    for n in 0..64 {
        // All share a boilerplate of 200 pages, a few hold more of this session, all hold much else.
        let _ = index.stored(&id(n), E, 1, &long[..if n % 8 == 0 { 200 + 25 * n } else { 200 }]);
        let _ = index.stored(&id(n), E, 2, &chain(n as u64 + 1, 12_000));
    }
    let mut nanos: Vec<_> = (0..10_000)
        .map(|_| {
            let start = std::time::Instant::now();
            std::hint::black_box(index.longest_prefixes(std::hint::black_box(&long)));
            start.elapsed().as_nanos()
        })
        .collect();
    nanos.sort_unstable();
    let start = std::time::Instant::now();
    index.forget(&id(3));
    println!(
        "longest_prefixes p50 {} ns, p99 {} ns; forget {:?}; {:?} pages",
        nanos[5_000],
        nanos[9_900],
        start.elapsed(),
        index.view().pages
    );
}

fn leaves(model: &mut BTreeMap<PageHash, BTreeSet<WorkerId>>, worker: &WorkerId) {
    for holders in model.values_mut() {
        holders.remove(worker);
    }
}

/// What a worker may do, keeping leaf-first eviction: hold the first `n` pages of chain `c`.
#[derive(Debug, Clone)]
enum Op {
    Hold(usize, u64, u64),
    Snapshot(usize, Vec<(u64, u64)>),
    Restart(usize),
    Forget(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let (w, c, n) = (0usize..70, 0u64..4, 0u64..40);
    prop::collection::vec(
        prop_oneof![
            8 => (w.clone(), c.clone(), n.clone()).prop_map(|(w, c, n)| Op::Hold(w, c, n)),
            1 => (w.clone(), prop::collection::vec((c, n), 0..3)).prop_map(|(w, held)| Op::Snapshot(w, held)),
            1 => w.clone().prop_map(Op::Restart),
            1 => w.prop_map(Op::Forget),
        ],
        0..120,
    )
}

proptest! {
    #[test]
    fn agrees_with_a_naive_model(ops in ops()) {
        let mut index = Residency::default();
        let mut model: BTreeMap<PageHash, BTreeSet<WorkerId>> = BTreeMap::new();
        let mut clock: BTreeMap<usize, (Epoch, u64)> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Hold(w, c, n) => {
                    let (worker, pages) = (id(w), chain(c, 40));
                    let (epoch, sequence) = clock.entry(w).or_insert((E, 0));
                    let (keep, drop) = pages.split_at(n as usize);
                    for p in keep {
                        model.entry(*p).or_default().insert(worker.clone());
                    }
                    for p in drop {
                        model.entry(*p).or_default().remove(&worker);
                    }
                    *sequence += 2;
                    prop_assert_eq!(index.stored(&worker, *epoch, *sequence - 1, keep), Applied::Ok);
                    prop_assert_eq!(index.evicted(&worker, *epoch, *sequence, drop), Applied::Ok);
                }
                Op::Snapshot(w, held) => {
                    let worker = id(w);
                    let (epoch, sequence) = clock.entry(w).or_insert((E, 0));
                    *sequence += 5;
                    let pages: Vec<_> = held.into_iter().flat_map(|(c, n)| chain(c, n)).collect();
                    leaves(&mut model, &worker);
                    for p in &pages {
                        model.entry(*p).or_default().insert(worker.clone());
                    }
                    prop_assert_eq!(index.snapshot(&worker, *epoch, *sequence, &pages), Applied::Ok);
                }
                Op::Restart(w) => {
                    let (epoch, sequence) = clock.entry(w).or_insert((E, 0));
                    (*epoch, *sequence) = (epoch.next(), 1);
                    leaves(&mut model, &id(w));
                    prop_assert_eq!(index.stored(&id(w), *epoch, 1, &[]), Applied::Ok);
                }
                Op::Forget(w) => {
                    clock.remove(&w);
                    leaves(&mut model, &id(w));
                    index.forget(&id(w));
                }
            }
        }
        model.retain(|_, h| !h.is_empty());
        let view = index.view();
        prop_assert_eq!((view.pages, view.dropped), (model.len(), 0));
        prop_assert_eq!(view.sets, model.values().collect::<BTreeSet<_>>().len());
        for c in 0..4 {
            let pages = chain(c, 40);
            let mut expected = BTreeMap::new();
            for w in 0..70 {
                let held = pages.iter().take_while(|p| model.get(p).is_some_and(|h| h.contains(&id(w)))).count() as u32;
                prop_assert_eq!(index.longest_prefix(&id(w), &pages), held);
                if held > 0 {
                    expected.insert(id(w), held);
                }
            }
            let got = index.longest_prefixes(&pages);
            prop_assert_eq!(got.len(), expected.len());
            prop_assert_eq!(got.into_iter().map(|(w, n)| (w.clone(), n)).collect::<BTreeMap<_, _>>(), expected);
            for p in &pages {
                let got: BTreeSet<_> = index.holders_of(p).cloned().collect();
                prop_assert_eq!(got, model.get(p).cloned().unwrap_or_default());
            }
        }
        let held: u64 = model.values().map(|h| h.len() as u64).sum();
        prop_assert_eq!(index.view().workers.values().map(|w| w.pages).sum::<u64>(), held);
    }
}

proptest! {
    /// Names from few homes, so that lines overflow, around the end of the table too.
    #[test]
    fn the_table_agrees_with_a_naive_one(ops in prop::collection::vec((0u8..8, 0u8..40, 0u32..4), 0..300)) {
        let key = |n: u8| {
            let mut name = [0; 32];
            (name[0], name[8]) = (n % 5 * 63, n);
            Key::of(&PageHash(name))
        };
        let (mut table, mut model) = (Table::default(), BTreeMap::new());
        for (op, n, set) in ops {
            match op {
                0..4 => {
                    table.insert(key(n), set);
                    model.insert(n, set);
                }
                4..7 => {
                    table.update(key(n), |_| false);
                    model.remove(&n);
                }
                _ => {
                    table.retain(|s| *s != set);
                    model.retain(|_, s| *s != set);
                }
            }
            prop_assert_eq!(table.len(), model.len());
            for n in 0..40 {
                prop_assert_eq!(table.get(key(n)), model.get(&n).copied());
            }
        }
    }
}
