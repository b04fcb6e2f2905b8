//! A turn without HTTP, in simulated time, on a network that loses and repeats messages and with owners that die.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Owner, Say, lease, subjects};
use pinion_bus::Bus;
use pinion_bus::sim::{Faults, SimNet};
use pinion_gateway::metrics::Metrics;
use pinion_gateway::owners::LeaseOwners;
use pinion_gateway::turn::{Event, Reach, Turn};
use pinion_schemas::messages::Submit;
use pinion_schemas::trace_context::TraceContext;
use pinion_schemas::{Class, Micros, RequestId, SessionId};
use tokio::time::{Instant, sleep};

const MS: Duration = Duration::from_millis(1);

fn answer() -> Vec<u32> {
    (1_000..1_040).collect()
}

/// Goes on from what the client has; chunks of three tokens, in its own count of attempts.
async fn speak(say: Say, asked: Submit) {
    say.accepted().await;
    let (all, mut at) = (answer(), asked.answer_so_far.len());
    while at < all.len() {
        let end = all.len().min(at + 3);
        say.chunk(1, at, &all[at..end]).await;
        at = end;
        sleep(30 * MS).await;
    }
    say.completed(1, &all).await;
}

/// The tokens that came, and how long it took.
async fn run(seed: u64) -> (Vec<u32>, Duration) {
    let faults = Faults {
        latency_min: MS,
        latency_max: 40 * MS,
        loss: 0.15,
        duplication: 0.15,
        reordering: true,
        ..Faults::default()
    };
    let net = SimNet::new(seed, faults);
    let bus: Arc<dyn Bus> = Arc::new(net.endpoint("g0"));
    let control = net.endpoint("kv");
    let first = Owner::start(Arc::new(net.endpoint("c0")), "c0", speak).await;
    let second = Owner::start(Arc::new(net.endpoint("c1")), "c1", speak).await;
    lease(&control, "c0").await;
    let reach = Arc::new(Reach {
        owners: Arc::new(LeaseOwners::new(Arc::clone(&bus))),
        bus,
        subjects: subjects(),
        metrics: Arc::new(Metrics::default()),
        closing: tokio_util::sync::CancellationToken::new(),
    });
    let submit = Submit {
        request: RequestId(u128::from(seed) << 64 | 7),
        session: SessionId::new("s").unwrap(),
        class: Class::Interactive,
        tenant: None,
        time_left: Micros::ZERO,
        prompt: vec![1, 2, 3],
        max_new_tokens: 64,
        sampling: pinion_schemas::Sampling::GREEDY,
        answer_so_far: Vec::new(),
        stream: String::new(),
    };
    let trace = TraceContext {
        trace: 1,
        span: 1,
        sampled: false,
    };
    let start = Instant::now();
    let limit = Duration::from_mins(2);
    let mut turn = Turn::open(reach, submit, trace, limit, limit).await.unwrap();
    let killer = tokio::spawn(async move {
        sleep(MS * (seed % 500) as u32).await;
        first.kill();
        sleep(700 * MS).await;
        lease(&control, "c1").await;
    });
    let mut tokens = Vec::new();
    loop {
        match turn.next().await {
            Event::Tokens(more) => tokens.extend(more),
            Event::Done(_) => break,
            Event::Failed(error) => panic!("seed {seed}: {error:?}"),
        }
    }
    killer.abort();
    drop(second);
    (tokens, start.elapsed())
}

#[tokio::test(start_paused = true)]
async fn every_token_comes_once_whatever_happens() {
    let mut longest = Duration::ZERO;
    for seed in 0..300 {
        let (tokens, took) = run(seed).await;
        assert_eq!(tokens, answer(), "seed {seed}");
        longest = longest.max(took);
    }
    assert!(longest < Duration::from_secs(30), "{longest:?}");
}
