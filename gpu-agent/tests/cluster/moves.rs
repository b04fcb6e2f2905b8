//! A session leaves a D that still has its pages: they go straight to the next one, and no P computes them again.

use bytes::Bytes;
use pinion_bus::Headers;
use pinion_gpu_agent::world::{Cluster, Shape, expected, in_virtual_time, prompt};
use pinion_schemas::messages::{LegFailed, PagesMove};
use pinion_schemas::subject::Kind;
use pinion_schemas::{AbortReason, BackupTargets, Epoch, Micros, PageHash, Path, PermitId, RequestId, WorkerId, wire};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Tokens of a first turn whose pages (188 of 1.5 MB) take 0.12 s to compute and as long to move.
const LONG: u32 = 3_000;

/// Two D, and nobody who has a copy of their pages.
fn two() -> Shape {
    Shape {
        decode: 2,
        backups: BackupTargets::Off,
        ..Shape::default()
    }
}

/// Serves the first turn of a session, and drains the D that has it. Returns its context and the two D, the drained one first.
async fn drained(cluster: &Cluster) -> (Vec<u32>, [&'static str; 2]) {
    let mut context = prompt(1, LONG);
    let answer = cluster.submit("s", context.clone(), 8).await.unwrap();
    context.extend(answer.tokens);
    context.extend(prompt(2, 40));
    let first = cluster
        .inspect(Kind::Decode, "d0")
        .await
        .unwrap()
        .contains("\"resident_pages\":0");
    let workers = if first { ["d1", "d0"] } else { ["d0", "d1"] };
    let pinned = WorkerId::new(workers[0]).unwrap();
    let subject = cluster.subjects.worker(Kind::Decode, &pinned, "drain");
    let asked = cluster.client.request(
        subject.as_str(),
        Headers::new(),
        Bytes::from("on"),
        Duration::from_secs(1),
    );
    assert_eq!(asked.await.unwrap().payload.as_ref(), b"true");
    sleep(Duration::from_secs(2)).await;
    (context, workers)
}

#[test]
fn a_drained_worker_hands_its_session_over_without_any_prefill_worker() {
    in_virtual_time(async {
        let mut cluster = Cluster::start(two()).await.unwrap();
        let (context, _) = drained(&cluster).await;
        cluster.kill("p0").unwrap();
        sleep(Duration::from_secs(10)).await;
        let answer = cluster.submit("s", context.clone(), 8).await.unwrap();
        assert_eq!((answer.tokens, answer.path), (expected(&context, 8), Path::Reseed));
        let again = [&context[..], &expected(&context, 8), &prompt(3, 40)].concat();
        let answer = cluster.submit("s", again.clone(), 8).await.unwrap();
        assert_eq!((answer.tokens, answer.path), (expected(&again, 8), Path::Direct));
    });
}

#[test]
fn one_that_dies_while_it_hands_over_costs_a_prefill_and_no_turn() {
    in_virtual_time(async {
        let mut cluster = Cluster::start(two()).await.unwrap();
        let (context, [from, to]) = drained(&cluster).await;
        let turn = tokio::spawn(cluster.submit("s", context.clone(), 8));
        sleep(Duration::from_millis(60)).await;
        let waits = cluster.inspect(Kind::Decode, to).await.unwrap();
        assert!(
            waits.contains("\"running\":false"),
            "the pages are there already: {waits}"
        );
        cluster.kill(from).unwrap();
        let answer = turn.await.unwrap().unwrap();
        assert_eq!((answer.tokens, answer.path), (expected(&context, 8), Path::Reseed));
    });
}

/// The owner's estimate was wrong, which it may always be: it hears so at once.
#[test]
fn one_that_has_lost_the_pages_says_so() {
    in_virtual_time(async {
        let cluster = Cluster::start(two()).await.unwrap();
        let (request, attempt) = (RequestId(77), 3);
        let wanted = PagesMove {
            request,
            attempt,
            decode: WorkerId::new("d1").unwrap(),
            decode_epoch: Epoch(1),
            permit: PermitId(1),
            parent: None,
            names: vec![PageHash([7; 32])],
            time_left: Micros::from_secs(5),
            notify: "pinion.sim.router.c0.notify".into(),
        };
        let d0 = WorkerId::new("d0").unwrap();
        let subject = cluster.subjects.worker(Kind::Decode, &d0, "move");
        let payload = wire::encode(&wanted).unwrap().into();
        let asked = cluster
            .client
            .request(subject.as_str(), Headers::new(), payload, Duration::from_secs(1));
        let failed = LegFailed {
            request,
            attempt,
            reason: AbortReason::SourceLost,
        };
        assert_eq!(
            wire::decode::<LegFailed>(&asked.await.unwrap().payload).unwrap(),
            failed
        );
    });
}

/// The pages of one chunk travel while the next is computed, so a seed takes little longer than the slower of the two.
#[test]
fn a_seed_moves_while_it_is_computed() {
    in_virtual_time(async {
        let mut shape = two();
        shape.engine.chunk_tokens = 256;
        let cost = shape.engine.cost.clone();
        let cluster = Cluster::start(shape).await.unwrap();
        let begun = Instant::now();
        cluster.submit("s", prompt(1, LONG), 1).await.unwrap();
        let took = begun.elapsed();
        let compute = cost.ttft(LONG.into());
        let transfer = cost.link().time(cost.kv_bytes(LONG.into()));
        let one_after_the_other = Duration::from_micros(compute.plus(transfer).plus(cost.ttft_base).0);
        let overlapped = Duration::from_micros(compute.max(transfer).plus(cost.ttft_base).0);
        assert!(took < overlapped.mul_f64(1.2), "{took:?}, overlapped {overlapped:?}");
        assert!(
            took < one_after_the_other.mul_f64(0.8),
            "{took:?}, in turn {one_after_the_other:?}"
        );
    });
}
