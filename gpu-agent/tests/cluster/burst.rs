//! A hundred fresh sessions within a second at one D of three: no D promises more than its budget, nobody is passed by another of
//! its class, and no turn fails (I4, design §5).
//!
//! What makes one D everybody's first choice is what does so in practice: all sessions share a system prompt, and one D has
//! served it before. The router ranks by overlap, so all hundred are sent there first.

use crate::books::{Breach, Budget};
use crate::watch::Watch;
use pinion_actors::Engine;
use pinion_actors::decode::{Decode, DecodeConfig};
use pinion_core::permits;
use pinion_gpu_agent::engine::sim::{SimConfig, SimEngine};
use pinion_gpu_agent::world::{Cluster, Dice, Shape, VOCAB, cluster_id, expected, in_virtual_time, prompt};
use pinion_schemas::limits::{DIRECT_APPEND_TOKENS_MAX, PENDING_SEEDS_MAX};
use pinion_schemas::subject::Kind;
use pinion_schemas::{Class, Epoch, Path, WorkerId};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::sleep;

const WORKERS: [&str; 3] = ["d0", "d1", "d2"];
/// Tokens of the system prompt: two pages.
const SHARED: u32 = 128;
const ANSWER: u32 = 20;

fn engine() -> SimConfig {
    SimConfig {
        page_tokens: 64,
        vocab: VOCAB,
        ..SimConfig::default()
    }
}

/// What every D of these tests should keep to: four seeds, and what its link carries in 1 s.
fn budget() -> Budget {
    Budget {
        seeds: PENDING_SEEDS_MAX as usize,
        bytes: engine().cost.link_bytes_per_sec,
    }
}

/// Two P, and three D of `engine()` unless the test starts its own.
async fn cluster(decode: u32) -> Cluster {
    Cluster::start(Shape {
        prefill: 2,
        decode,
        engine: engine(),
        ..Shape::default()
    })
    .await
    .unwrap()
}

fn context(session: u32, length: u32) -> Vec<u32> {
    [prompt(0, SHARED), prompt(session + 1, length)].concat()
}

/// Three of four are interactive, most others batch: so the interactive queue of the favourite overflows.
fn class_of(session: u32) -> Class {
    match session % 20 {
        3 | 7 | 11 | 15 => Class::Batch,
        19 => Class::Background,
        _ => Class::Interactive,
    }
}

/// Serves the system prompt once, then sends `sessions` at seeded moments of one second; asks every D for its view all the
/// while. Gives back what was heard, and who had served the system prompt.
async fn burst(cluster: &Cluster, sessions: u32) -> (Arc<Mutex<Watch>>, String) {
    let model = SimEngine::new(engine());
    let watch = Watch::start(cluster, budget(), model.page_tokens(), model.page_bytes()).await;
    cluster.submit("warm-up", context(0, 64), ANSWER).await.unwrap();
    let favourite = watch.lock().unwrap().first_asked.values().next().unwrap().clone();
    // Its pages become known with its next event at the latest.
    sleep(Duration::from_secs(1)).await;

    let mut dice = Dice(7);
    let turns: Vec<_> = (1..=sessions)
        .map(|s| {
            // From 196 MB to 1 GB: so that sometimes the seeds fill the budget, sometimes the bytes.
            let context = context(s, dice.between(2_000, 10_000) as u32);
            let (clients, after) = (cluster.clients.clone(), dice.millis(0, 1_000));
            tokio::spawn(async move {
                sleep(after).await;
                let end = clients
                    .submit(class_of(s), &format!("s{s}"), context.clone(), ANSWER)
                    .await;
                (s, end, expected(&context, ANSWER))
            })
        })
        .collect();
    while !turns.iter().all(tokio::task::JoinHandle::is_finished) {
        for worker in WORKERS {
            cluster.inspect(Kind::Decode, worker).await.unwrap();
        }
        sleep(Duration::from_millis(10)).await;
    }
    for turn in turns {
        let (session, end, expected) = turn.await.unwrap();
        let answer = end.unwrap_or_else(|reason| panic!("s{session} failed: {reason:?}"));
        assert_eq!(answer.tokens, expected, "s{session}");
        assert_ne!(answer.path, Path::Direct, "s{session} is fresh");
    }
    (watch, favourite)
}

#[test]
fn a_burst_at_one_worker_keeps_every_budget_and_every_order() {
    in_virtual_time(async {
        let cluster = cluster(3).await;
        let (watch, favourite) = burst(&cluster, 100).await;
        let watch = watch.lock().unwrap();
        for (worker, books) in &watch.books {
            assert_eq!(books.breaches, [], "{worker}");
            assert_eq!((books.seeds(), books.waiting()), (0, 0), "{worker} is at rest");
        }
        for (worker, samples) in &watch.samples {
            assert!(samples.len() > 100, "{worker} was looked at {} times", samples.len());
            for sample in samples {
                assert!(sample.seeds <= budget().seeds, "{worker}: {sample:?}");
                assert!(
                    sample.seeds == 1 || sample.bytes <= budget().bytes,
                    "{worker}: {sample:?}"
                );
                assert_eq!(sample.seeds, sample.counted, "the books of {worker} are wrong");
            }
        }
        // It was the burst that was meant: at one D, more than it could queue, and at the limit of both budgets.
        let asked: BTreeSet<&String> = watch.first_asked.values().collect();
        assert_eq!(asked, BTreeSet::from([&favourite]), "all were sent to one D first");
        let books = &watch.books[&favourite];
        assert_eq!(books.most_seeds, budget().seeds);
        assert!(books.most_bytes > budget().bytes / 10 * 9, "{}", books.most_bytes);
        assert_eq!(
            books.longest[&Class::Interactive],
            permits::Config::default().queue_cap_per_class
        );
        assert!(books.longest[&Class::Batch] > 10 && books.longest[&Class::Background] > 2);
        assert!(watch.rejects > 0, "the queue of the favourite was never full");
        assert!(watch.books.len() > 1, "who was rejected went nowhere else");
        assert_eq!(watch.aborts, 0);
        let granted: usize = watch.books.values().map(|b| b.granted.len()).sum();
        assert_eq!(granted, 101, "one permit for each session");
    });
}

/// A D that promises more than it should: the test above would see it.
#[test]
fn a_worker_that_keeps_to_a_larger_budget_is_caught() {
    in_virtual_time(async {
        let mut cluster = cluster(0).await;
        for name in WORKERS {
            let config = DecodeConfig {
                cluster: cluster_id(),
                worker: WorkerId::new(name).unwrap(),
                epoch: Epoch(1),
                direct_append_tokens_max: DIRECT_APPEND_TOKENS_MAX,
                permits: permits::Config {
                    max_pending_seeds: PENDING_SEEDS_MAX + 1,
                    max_pending_seed_bytes: 2 * budget().bytes,
                    ..permits::Config::default()
                },
                link: engine().cost.link(),
                addresses: Vec::new(),
                secret: 0,
            };
            cluster
                .worker_as(name, Decode::new(config, SimEngine::new(engine())), None)
                .await
                .unwrap();
        }
        sleep(Duration::from_secs(2)).await;
        let (watch, favourite) = burst(&cluster, 20).await;
        let watch = watch.lock().unwrap();
        let breaches = &watch.books[&favourite].breaches;
        let too_many = PENDING_SEEDS_MAX as usize + 1;
        assert!(
            breaches.contains(&Breach::TooManySeeds { seeds: too_many }),
            "{breaches:?}"
        );
        assert!(
            breaches.iter().any(|b| matches!(b, Breach::TooManyBytes { .. })),
            "{breaches:?}"
        );
        assert!(watch.samples[&favourite].iter().any(|s| s.seeds == too_many));
    });
}
