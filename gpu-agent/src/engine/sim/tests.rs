use super::*;
use crate::engine::tree::Tier;
use pinion_schemas::hash::{PageHash, chain};
use pinion_schemas::ids::RequestId;
use pinion_schemas::time::Micros;
use proptest::prelude::*;
use std::collections::BTreeSet;

const PAGE: u32 = 4;

fn engine(device: u64, host: u64, chunk: u32) -> SimEngine {
    SimEngine::new(SimConfig {
        page_tokens: PAGE,
        device_pages: device,
        host_pages: host,
        chunk_tokens: chunk,
        ..SimConfig::default()
    })
}

fn job(id: u128, prompt: &[u32], max_new_tokens: u32) -> Job {
    Job {
        request: RequestId(id),
        prompt: prompt.to_vec(),
        max_new_tokens,
        namespace: Vec::new(),
    }
}

/// Runs until nothing is left and returns all outputs and the time.
fn drain(e: &mut SimEngine, mut now: Micros) -> (Vec<Output>, Micros) {
    let mut out = Vec::new();
    while let Some(t) = e.next_wakeup() {
        now = now.max(t);
        out.extend(e.advance(now));
        e.tree().check().unwrap();
    }
    (out, now)
}

fn tokens(out: &[Output], id: u128) -> Vec<u32> {
    out.iter()
        .filter_map(|o| {
            if let Output::Token {
                request: RequestId(r),
                token,
            } = o
            {
                (*r == id).then_some(*token)
            } else {
                None
            }
        })
        .collect()
}

fn run(e: &mut SimEngine, id: u128, prompt: &[u32], n: u32) -> Vec<u32> {
    e.submit(Micros::ZERO, job(id, prompt, n)).unwrap();
    let (out, _) = drain(e, Micros::ZERO);
    tokens(&out, id)
}

#[test]
fn time_to_first_token_is_the_cost_model() {
    let mut e = SimEngine::new(SimConfig::default());
    e.submit(Micros::ZERO, job(1, &vec![7; 5_000], 2)).unwrap();
    assert_eq!(e.next_wakeup(), Some(Micros(28_000)));
    assert!(
        e.advance(Micros(227_999))
            .iter()
            .all(|o| !matches!(o, Output::Token { .. }))
    );
    assert!(
        e.advance(Micros(228_000))
            .iter()
            .any(|o| matches!(o, Output::Token { .. }))
    );
    assert_eq!(drain(&mut e, Micros::ZERO).1, Micros(233_700));
}

#[test]
fn committed_pages_hold_what_was_written_and_a_second_turn_finds_them() {
    let mut e = engine(64, 0, 100);
    let prompt: Vec<u32> = (0..10).collect();
    let mut context = prompt.clone();
    context.extend(run(&mut e, 1, &prompt, 11));
    let names = chain(&context[..20], PAGE); // the 21st token was never read
    assert_eq!(e.tree().match_device(&names), 5);
    assert_eq!((e.tree().used(), e.tree().locked(), e.tree().reserved()), (5, 0, 0));
    context.push(3);
    assert_eq!(e.submit(Micros::ZERO, job(2, &context, 1)), Ok(20));
}

#[test]
fn a_full_pool_is_a_typed_error_and_changes_nothing() {
    let mut e = engine(4, 0, 100);
    e.submit(Micros::ZERO, job(1, &[1, 2, 3], 5)).unwrap();
    let err = e.submit(Micros::ZERO, job(2, &[1, 2, 3, 4], 8)).unwrap_err();
    assert_eq!(
        err,
        SubmitError::Pool(TreeError::NoRoom {
            needed: 3,
            available: 2
        })
    );
    assert_eq!(
        e.submit(Micros::ZERO, job(1, &[1], 1)),
        Err(SubmitError::Duplicate(RequestId(1)))
    );
    assert_eq!(e.submit(Micros::ZERO, job(3, &[], 1)), Err(SubmitError::EmptyPrompt));
    assert_eq!((e.jobs(), e.tree().reserved()), (1, 2));
}

#[test]
fn moved_pages_serve_the_same_text_and_wrong_ones_do_not() {
    let prompt: Vec<u32> = (0..21).collect();
    let mut a = engine(64, 0, 100);
    let want = run(&mut a, 1, &prompt, 9);
    let pages = a.export(&chain(&prompt, PAGE));
    let mut b = engine(64, 0, 100);
    assert_eq!(b.import(None, &pages), Ok(5));
    assert_eq!(b.import(None, &pages), Ok(0));
    assert_eq!(run(&mut b, 1, &prompt, 9), want);
    let mut c = engine(64, 0, 100);
    let mut wrong = pages;
    wrong[4].content.0 ^= 1;
    c.import(None, &wrong).unwrap();
    assert_ne!(run(&mut c, 1, &prompt, 9), want);
}

proptest! {
    #[test]
    fn text_depends_on_the_prompt_alone(
        prompt in prop::collection::vec(0u32..50, 1..60), n in 1u32..20, chunk in 1u32..70, host in 0u64..20,
    ) {
        let want = run(&mut engine(200, 0, 1_000), 1, &prompt, n);
        prop_assert_eq!(want.len(), n as usize);
        let mut e = engine(20, host, chunk);
        prop_assert_eq!(&run(&mut e, 1, &prompt, n), &want); // cold
        prop_assert_eq!(&run(&mut e, 2, &prompt, n), &want); // warm
        let other: Vec<u32> = (100..170).collect();
        run(&mut e, 3, &other, 10); // fills all 20 pages
        prop_assert_eq!(&run(&mut e, 4, &prompt, n), &want); // evicted, demoted or recomputed
        prop_assert_eq!(e.tree().locked() + e.tree().reserved(), 0);
    }

    #[test]
    fn cancelling_at_any_point_leaves_nothing_and_disturbs_nobody(
        prompts in prop::collection::vec((prop::collection::vec(0u32..2, 1..30), 0u32..12), 1..6),
        cancels in prop::collection::vec((0u64..200_000, 0u128..6), 0..6), chunk in 1u32..20, device in 5u64..40, host in 0u64..9,
    ) {
        let mut e = engine(device, host, chunk);
        let mut out = Vec::new();
        let mut taken = BTreeSet::new();
        for (i, (prompt, n)) in prompts.iter().enumerate() {
            if e.submit(Micros::ZERO, job(i as u128, prompt, *n)).is_ok() {
                taken.insert(i);
            }
            e.tree().check().unwrap();
        }
        let mut at = cancels.clone();
        at.sort_unstable();
        for (t, id) in at {
            out.extend(e.advance(Micros(t)));
            out.extend(e.cancel(RequestId(id)));
            e.tree().check().unwrap();
        }
        out.extend(drain(&mut e, Micros::ZERO).0);
        prop_assert_eq!((e.tree().locked(), e.tree().reserved(), e.jobs()), (0, 0, 0));
        for i in taken {
            let ends: Vec<_> = out.iter().filter_map(|o| match o {
                Output::Finished { request, reason, .. } if request.0 == i as u128 => Some(*reason),
                _ => None,
            }).collect();
            prop_assert_eq!(ends.len(), 1);
            prop_assert_ne!(ends[0], FinishReason::Broken);
            let (prompt, n) = &prompts[i];
            let want = run(&mut engine(100, 0, 100), 1, prompt, *n);
            let got = tokens(&out, i as u128);
            prop_assert!(want.starts_with(&got));
            prop_assert!(ends[0] == FinishReason::Cancelled || got.len() == want.len());
        }
        // The events alone tell a router what is resident.
        let mut seen = BTreeSet::new();
        for o in &out {
            match o {
                Output::Page(PageEvent::Stored(p) | PageEvent::Promoted(p)) => { seen.insert(*p); }
                Output::Page(PageEvent::Demoted(p) | PageEvent::Dropped(p)) => { seen.remove(p); }
                _ => {}
            }
        }
        prop_assert_eq!(seen, e.tree().pages(Tier::Device).collect::<BTreeSet<PageHash>>());
    }
}

/// A slow, obvious tree without a host tier: pages as (name, parent, last use), locks as a list of tips.
#[derive(Default)]
struct Naive {
    pages: Vec<(PageHash, Option<PageHash>, u64)>,
    tips: Vec<PageHash>,
    clock: u64,
}

impl Naive {
    fn path(&self, tip: PageHash) -> Vec<PageHash> {
        let mut path = vec![tip];
        while let Some(p) = self.pages.iter().find(|p| Some(&p.0) == path.last()).and_then(|p| p.1) {
            path.push(p);
        }
        path
    }
    fn touch(&mut self, names: &[PageHash]) {
        self.clock += 1;
        for p in &mut self.pages {
            if names.contains(&p.0) {
                p.2 = self.clock;
            }
        }
    }
    fn locked(&self) -> BTreeSet<PageHash> {
        self.tips.iter().flat_map(|t| self.path(*t)).collect()
    }
    fn evict(&mut self) {
        let locked = self.locked();
        let parents: BTreeSet<_> = self.pages.iter().filter_map(|p| p.1).collect();
        let victim = self
            .pages
            .iter()
            .filter(|p| !locked.contains(&p.0) && !parents.contains(&p.0))
            .map(|p| (p.2, p.0))
            .min()
            .unwrap();
        self.pages.retain(|p| p.0 != victim.1);
    }
}

proptest! {
    #[test]
    fn the_tree_does_what_a_naive_one_does(
        ops in prop::collection::vec((0u8..4, prop::collection::vec(0u32..2, 1..7), 0usize..8), 1..80),
    ) {
        const CAP: u64 = 9;
        let (mut tree, mut model, mut events) = (PageTree::new([CAP, 0, 0]), Naive::default(), Vec::new());
        for (op, text, pick) in ops {
            let names = chain(&text, 1);
            let pages: Vec<Page> = names.iter().map(|n| Page { name: *n, content: ContextHash(0) }).collect();
            let tip = names[names.len() - 1];
            match op {
                0 | 1 => {
                    let here = tree.match_device(&names);
                    let held = here.checked_sub(1).map(|i| names[i]);
                    if let Some(h) = held {
                        tree.lock(h, None).unwrap();
                        model.touch(&names[..here]);
                        model.tips.push(h);
                    }
                    let need = (names.len() - here) as u64;
                    let room = CAP - model.locked().len() as u64;
                    prop_assert_eq!(tree.available(), room);
                    let ok = tree.reserve(need, &mut events).is_ok();
                    prop_assert_eq!(ok, need <= room);
                    if ok {
                        while model.pages.len() as u64 + need > CAP { model.evict(); }
                        prop_assert_eq!(tree.commit(held, &pages[here..], &mut events), Ok(need));
                        for i in here..names.len() {
                            model.pages.push((names[i], i.checked_sub(1).map(|j| names[j]), 0));
                        }
                        model.touch(&names[here..]);
                    }
                    if let Some(h) = held {
                        tree.unlock(h).unwrap();
                        model.tips.pop();
                    }
                }
                2 => if tree.lock(tip, None).is_ok() {
                    model.touch(&names);
                    model.tips.push(tip);
                } else {
                    prop_assert!(!model.pages.iter().any(|p| p.0 == tip));
                },
                _ => if !model.tips.is_empty() {
                    let t = model.tips.remove(pick % model.tips.len());
                    let before = tree.used();
                    tree.unlock(t).unwrap();
                    prop_assert_eq!(tree.used(), before); // I11
                },
            }
            tree.check().unwrap();
            prop_assert_eq!(tree.pages(Tier::Device).collect::<BTreeSet<_>>(), model.pages.iter().map(|p| p.0).collect::<BTreeSet<_>>());
            prop_assert_eq!(tree.locked(), model.locked().len() as u64);
        }
    }
}

proptest! {
    /// Pages are stored, copied down, lost below and evicted in any order: each tier's books are right and its pages are whole
    /// prefixes, the events alone tell what is here, and nothing that a tier has room for goes.
    #[test]
    fn a_page_is_here_while_any_tier_has_it(
        ops in prop::collection::vec((0u8..7, prop::collection::vec(0u32..2, 1..7), 0usize..2), 1..80),
        host in 0u64..6, file in 0u64..20,
    ) {
        const CAP: u64 = 7;
        let (mut tree, mut events) = (PageTree::new([CAP, host, file]), Vec::new());
        let (mut here, mut on_device) = (BTreeSet::new(), BTreeSet::new());
        for (op, text, pick) in ops {
            let names = chain(&text, 1);
            let (tip, tier) = (names[names.len() - 1], [Tier::Host, Tier::File][pick]);
            let before: Vec<u64> = [Tier::Host, Tier::File].map(|t| tree.pages_in(t)).into();
            match op {
                0..=2 => {
                    let held = tree.match_device(&names);
                    let above = held.checked_sub(1).map(|i| names[i]);
                    above.map(|a| tree.lock(a, None)).transpose().unwrap();
                    let missing = (names.len() - held) as u64;
                    if tree.reserve(missing, &mut events).is_ok() {
                        let pages: Vec<Page> = names[held..].iter().map(|n| Page { name: *n, content: ContextHash(1) }).collect();
                        prop_assert_eq!(tree.commit(above, &pages, &mut events), Ok(missing));
                    }
                    above.map(|a| tree.unlock(a)).transpose().unwrap();
                    prop_assert_eq!(&before[..], [tree.pages_in(Tier::Host), tree.pages_in(Tier::File)]);
                }
                3 | 4 => for name in tree.lacking(tier, tip) {
                    let (full, parent) = (tree.pages_in(tier) == tree.capacity(tier), tree.parent(name));
                    let kept = tree.keep(tier, parent, Page { name, content: ContextHash(2) }, &mut events);
                    prop_assert!(kept.is_ok() || full, "there was room: {:?}", kept);
                    prop_assert_eq!(kept.is_ok(), tree.is_in(tier, name));
                    if kept.is_err() { break; }
                },
                5 => {
                    tree.lose(tier, tip, &mut events);
                    prop_assert!(!tree.is_in(tier, tip));
                }
                _ => tree.touch(tip),
            }
            tree.check().unwrap();
            for event in events.drain(..) {
                match event {
                    PageEvent::Stored(p) => prop_assert!(here.insert(p)),
                    PageEvent::Promoted(p) => prop_assert!(here.contains(&p) && on_device.insert(p)),
                    PageEvent::Demoted(p) => prop_assert!(on_device.remove(&p)),
                    PageEvent::Dropped(p) => { on_device.remove(&p); prop_assert!(here.remove(&p)); }
                }
            }
            // A page is stored on the device here, never found in a file.
            on_device = tree.pages(Tier::Device).collect();
            prop_assert_eq!(&here, &tree.all_pages().collect());
            let matched = tree.match_any(&names);
            prop_assert!(matched >= tree.match_device(&names));
            prop_assert!(names[..matched].iter().all(|n| tree.content(*n).is_some()));
        }
    }
}
