//! One thing is lost, once, and comes back: that costs a turn seconds, not its life. `determinism::no_seed_loses_a_turn` found
//! these; here each is as small as it can be.

use pinion_gpu_agent::node::WorkerRole;
use pinion_gpu_agent::world::{Cluster, Shape, expected, in_virtual_time, prompt};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// What a lost message may cost: [`SILENCE_MAX`](pinion_core::session::SILENCE_MAX) and the turn itself.
const SOON: Duration = Duration::from_secs(20);

fn one_of_each() -> Shape {
    Shape {
        decode: 1,
        ..Shape::default()
    }
}

/// No P is there when the turn wants its seed; one is two seconds later.
#[test]
fn a_fresh_turn_waits_for_the_only_prefill_worker_to_come_back() {
    in_virtual_time(async {
        let mut cluster = Cluster::start(one_of_each()).await.unwrap();
        cluster.kill("p0").unwrap();
        sleep(Duration::from_secs(10)).await;
        let turn = tokio::spawn(cluster.submit("s", prompt(1, 300), 5));
        sleep(Duration::from_secs(2)).await;
        cluster.worker("p0", WorkerRole::Prefill, 2).await.unwrap();
        let answer = turn.await.unwrap().expect("the turn should have waited");
        assert_eq!(answer.tokens, expected(&prompt(1, 300), 5));
    });
}

/// The D gives its permits to those who wait while nothing of it reaches their owner.
#[test]
fn a_lost_permit_costs_seconds_and_not_the_turn() {
    in_virtual_time(async {
        let cluster = Cluster::start(one_of_each()).await.unwrap();
        let begun = Instant::now();
        let submit = |s| tokio::spawn(cluster.submit(&format!("s{s}"), prompt(s, 600), 5));
        let turns: Vec<_> = (0..8).map(submit).collect();
        sleep(Duration::from_millis(20)).await;
        cluster.net.partition("d0", "c0");
        sleep(Duration::from_millis(300)).await;
        cluster.net.heal("d0", "c0");
        for turn in turns {
            turn.await.unwrap().expect("a turn failed");
        }
        assert!(begun.elapsed() < SOON, "it took {:?}", begun.elapsed());
    });
}

/// The pages of a seed do not arrive, and the word of it is lost as well.
#[test]
fn a_lost_failure_of_a_seed_costs_seconds_and_not_the_turn() {
    in_virtual_time(async {
        let cluster = Cluster::start(one_of_each()).await.unwrap();
        let begun = Instant::now();
        let turn = tokio::spawn(cluster.submit("s", prompt(1, 3_000), 5));
        // The pages are ready after 0.27 s, and the P waits 1.5 s for the D to have them.
        sleep(Duration::from_millis(50)).await;
        cluster.net.partition("p0", "d0");
        sleep(Duration::from_millis(1_550)).await;
        cluster.net.partition("p0", "c0");
        sleep(Duration::from_millis(400)).await;
        cluster.net.heal("p0", "d0");
        cluster.net.heal("p0", "c0");
        turn.await.unwrap().expect("the turn failed");
        assert!(begun.elapsed() < SOON, "it took {:?}", begun.elapsed());
    });
}

/// A node leaves in the very instant in which it would look at its leases.
#[test]
fn leaving_is_deterministic() {
    async fn log_of_a_leave() -> Vec<String> {
        let shape = Shape {
            control: 2,
            ..Shape::default()
        };
        let mut cluster = Cluster::start(shape).await.unwrap();
        // A multiple of the time between two rounds, 800 ms, after the start.
        sleep(Duration::from_millis(2_800)).await;
        cluster.take_control("c1").unwrap().leave().await;
        cluster.net.log()
    }
    let logs: Vec<_> = (0..16).map(|_| in_virtual_time(log_of_a_leave())).collect();
    assert!(logs.iter().all(|log| *log == logs[0]));
}
