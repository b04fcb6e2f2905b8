//! A working set 2.7 times the pool (digest C-1, where the prototype threw whole sessions out, 67 K tokens at a time): here pages go, one
//! by one from the tail of what is used least, and a session that comes back pays for what it lost and for nothing else.

use pinion_gpu_agent::engine::sim::SimConfig;
use pinion_gpu_agent::world::{Cluster, Dice, Shape, expected, in_virtual_time, prompt};
use pinion_schemas::messages::{PagesEvicted, PagesStored};
use pinion_schemas::subject::Kind;
use pinion_schemas::wire::{self, Schema as _};
use pinion_schemas::{BackupTargets, ChainHasher, PageHash};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGE: u64 = 16;
/// Pages of the D's pool.
const POOL: u64 = 512;
const SESSIONS: u32 = 24;
const TURNS: u32 = 240;

/// What the D's residency events have told so far.
#[derive(Default)]
struct Told {
    resident: BTreeSet<PageHash>,
    /// Pages of each eviction.
    evictions: Vec<u64>,
}

fn names(context: &[u32]) -> Vec<PageHash> {
    ChainHasher::new(PAGE as u32, &[None]).push(context)
}

async fn listen(cluster: &Cluster) -> Arc<Mutex<Told>> {
    let subject = cluster.subjects.event(Kind::Decode, "d0").as_str().to_owned();
    let mut events = cluster.client.subscribe(&subject, None).await.unwrap();
    let told: Arc<Mutex<Told>> = Arc::default();
    let into = told.clone();
    tokio::spawn(async move {
        while let Some(message) = events.next().await {
            let mut told = into.lock().unwrap();
            match wire::schema_of(&message.payload) {
                Some(PagesStored::ID) => told
                    .resident
                    .extend(wire::decode::<PagesStored>(&message.payload).unwrap().pages),
                Some(PagesEvicted::ID) => {
                    let pages = wire::decode::<PagesEvicted>(&message.payload).unwrap().pages;
                    told.resident.retain(|page| !pages.contains(page));
                    told.evictions.push(pages.len() as u64);
                }
                _ => {}
            }
        }
    });
    told
}

#[test]
fn pages_are_evicted_and_not_sessions() {
    in_virtual_time(async {
        let shape = Shape {
            decode: 1,
            backups: BackupTargets::Off,
            engine: SimConfig {
                device_pages: POOL,
                ..Shape::default().engine
            },
            ..Shape::default()
        };
        let cluster = Cluster::start(shape).await.unwrap();
        let told = listen(&cluster).await;
        // 24 sessions of some 940 tokens are 2.7 times 8,192.
        let mut contexts: Vec<Vec<u32>> = (0..SESSIONS).map(|s| prompt(s + 1, 720)).collect();
        let mut had = vec![0; SESSIONS as usize];
        let mut dice = Dice(7);
        let (mut partly, mut revisits) = (0, 0);
        for turn in 0..TURNS {
            let s = dice.between(0, u64::from(SESSIONS)) as usize;
            let context = contexts[s].clone();
            let (held, before) = {
                let told = told.lock().unwrap();
                let held = names(&context)
                    .iter()
                    .take_while(|p| told.resident.contains(*p))
                    .count() as u64;
                (held, told.evictions.iter().sum::<u64>())
            };
            let answer = cluster.submit(&format!("s{s}"), context.clone(), 12).await.unwrap();
            assert_eq!(answer.tokens, expected(&context, 12), "turn {turn}");
            assert_eq!(
                u64::from(answer.cached),
                held * PAGE,
                "turn {turn}: what is there is used, no more and no less"
            );
            let needed = (context.len() as u64 + 12).div_ceil(PAGE) - held;
            let freed = told.lock().unwrap().evictions.iter().sum::<u64>() - before;
            assert!(
                freed <= needed,
                "turn {turn}: {freed} pages freed, {needed} needed: someone lost the rest for nothing"
            );
            revisits += u32::from(had[s] > 0);
            partly += u32::from(held > 0 && held < had[s]);
            contexts[s].extend(answer.tokens);
            had[s] = contexts[s].len() as u64 / PAGE;
            contexts[s].extend(prompt(turn + 100, 10));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let told = told.lock().unwrap();
        let total: usize = contexts.iter().map(Vec::len).sum();
        let evictions = told.evictions.len() as u64;
        let mean = told.evictions.iter().sum::<u64>() * PAGE / evictions.max(1);
        println!(
            "working set {:.1} x the pool; {evictions} evictions of {mean} tokens on average; {partly} of {revisits} revisits found a part",
            total as f64 / (POOL * PAGE) as f64
        );
        assert!(
            total as u64 * 10 >= 27 * POOL * PAGE,
            "the working set is too small: {total} tokens"
        );
        assert!(evictions > 50 && mean <= 500, "{evictions} evictions of {mean} tokens");
        assert!(partly > 0, "leaf by leaf, some sessions keep a part");
    });
}
