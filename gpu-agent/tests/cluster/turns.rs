//! A session's life in a whole cluster.

use pinion_gpu_agent::world::{Cluster, Shape, expected, in_virtual_time};
use pinion_schemas::shard::{SHARDS, shard_of};
use pinion_schemas::subject::Kind;
use pinion_schemas::{Path, SessionId};
use std::time::Duration;

#[test]
fn a_session_is_seeded_once_and_then_direct() {
    in_virtual_time(async {
        let cluster = Cluster::start(Shape::default()).await.unwrap();
        let mut context: Vec<u32> = (0..300).collect();
        for turn in 0..4 {
            let answer = cluster.submit("s", context.clone(), 20).await.unwrap();
            assert_eq!(answer.tokens, expected(&context, 20), "turn {turn}");
            assert_eq!(
                answer.path,
                if turn == 0 { Path::Seed } else { Path::Direct },
                "turn {turn}"
            );
            if turn > 0 {
                assert!(
                    answer.cached as usize > context.len() - 80,
                    "turn {turn} recomputed: {answer:?}"
                );
            }
            context.extend(answer.tokens);
            context.extend(0..37);
        }
    });
}

#[test]
fn a_killed_decode_worker_costs_no_turn_and_no_token() {
    in_virtual_time(async {
        let mut cluster = Cluster::start(Shape::default()).await.unwrap();
        let prompt: Vec<u32> = (0..200).collect();
        let turn = tokio::spawn(cluster.submit("s", prompt.clone(), 400));
        tokio::time::sleep(Duration::from_millis(900)).await;
        let mut serving = None;
        for name in ["d0", "d1", "d2"] {
            if cluster
                .inspect(Kind::Decode, name)
                .await
                .unwrap()
                .contains("\"running\":true")
            {
                serving = Some(name);
            }
        }
        cluster.kill(serving.expect("the turn runs somewhere by now")).unwrap();
        let answer = turn.await.unwrap().unwrap();
        assert_eq!(answer.tokens, expected(&prompt, 400));
    });
}

#[test]
fn a_killed_prefill_worker_costs_no_turn() {
    in_virtual_time(async {
        let shape = Shape {
            prefill: 2,
            decode: 2,
            ..Shape::default()
        };
        let mut cluster = Cluster::start(shape).await.unwrap();
        let prompt: Vec<u32> = (0..3_000).collect();
        let turn = tokio::spawn(cluster.submit("s", prompt.clone(), 5));
        tokio::time::sleep(Duration::from_millis(60)).await;
        let busy = if cluster
            .inspect(Kind::Prefill, "p0")
            .await
            .unwrap()
            .contains("\"attempt\":")
        {
            "p0"
        } else {
            "p1"
        };
        cluster.kill(busy).unwrap();
        let answer = turn.await.unwrap().unwrap();
        assert_eq!(answer.tokens, expected(&prompt, 5));
    });
}

#[test]
fn many_sessions_all_complete_without_faults() {
    in_virtual_time(async {
        let cluster = Cluster::start(Shape {
            prefill: 2,
            ..Shape::default()
        })
        .await
        .unwrap();
        let mut contexts: Vec<Vec<u32>> = (0..6).map(|s| (s * 50..s * 50 + 150).collect()).collect();
        for _ in 0..3 {
            let turns: Vec<_> = contexts
                .iter()
                .enumerate()
                .map(|(s, c)| tokio::spawn(cluster.submit(&format!("s{s}"), c.clone(), 10)))
                .collect();
            for (context, turn) in contexts.iter_mut().zip(turns) {
                let answer = turn.await.unwrap().expect("a turn failed");
                assert_eq!(answer.tokens, expected(context, 10));
                context.extend(answer.tokens);
                context.extend(0..20);
            }
        }
    });
}

#[test]
fn sessions_belong_to_shards_that_somebody_owns() {
    assert!(shard_of(&SessionId::new("s").unwrap()) < SHARDS);
}
