//! Whole clusters of the real actors on the simulated bus, in virtual time.

use pinion_actors::control::Control;
use pinion_actors::router::RouterConfig;
use pinion_actors::shell::{Context, Envelope};
use pinion_bus::sim::{Faults, SimNet};
use pinion_bus::{Bus, Headers};
use pinion_core::route;
use pinion_gpu_agent::engine::sim::{ContextHash, SimConfig};
use pinion_gpu_agent::node::{WorkerRole, start_sim_worker};
use pinion_schemas::messages::{Accepted, Chunk, Completed, Failed, Submit};
use pinion_schemas::shard::shard_of;
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::wire::{self, Schema};
use pinion_schemas::{AbortReason, Class, ClusterId, Epoch, Micros, Path, RequestId, SessionId, WorkerId};
use ractor::ActorRef;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

const VOCAB: u32 = 1_000;

struct Cluster {
    net: SimNet,
    client: Arc<dyn Bus>,
    subjects: Subjects,
    workers: BTreeMap<String, ActorRef<Envelope>>,
    _control: Control,
    requests: u128,
}

#[derive(Debug)]
struct Answer {
    path: Path,
    tokens: Vec<u32>,
    cached: u32,
}

fn in_virtual_time<F: Future>(run: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(run)
}

fn engine() -> SimConfig {
    SimConfig {
        page_tokens: 16,
        device_pages: 256,
        vocab: VOCAB,
        ..SimConfig::default()
    }
}

impl Cluster {
    async fn start(seed: u64, faults: Faults, prefill: u32, decode: u32) -> Self {
        let net = SimNet::new(seed, faults);
        let cluster = ClusterId::new("sim").unwrap();
        let control = WorkerId::new("c0").unwrap();
        let config = RouterConfig {
            cluster: cluster.clone(),
            control,
            page_tokens: 16,
            page_bytes: 16 * 98_304,
            route: route::Config::default(),
            index_pages_max: 100_000,
            prefill_tokens_per_s: 25_000,
            link_bytes_per_s: 12_500_000_000,
        };
        let control = Control::start(config, Epoch(1), Context::new(Arc::new(net.endpoint("c0"))))
            .await
            .unwrap();
        let mut this = Self {
            client: Arc::new(net.endpoint("client")),
            net,
            subjects: Subjects::new(&cluster),
            workers: BTreeMap::new(),
            _control: control,
            requests: 0,
        };
        for i in 0..prefill {
            this.worker(&format!("p{i}"), WorkerRole::Prefill, 1).await;
        }
        for i in 0..decode {
            this.worker(&format!("d{i}"), WorkerRole::Decode, 1).await;
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        this
    }

    async fn worker(&mut self, name: &str, role: WorkerRole, epoch: u64) {
        let cluster = ClusterId::new("sim").unwrap();
        let worker = WorkerId::new(name).unwrap();
        let context = Context::new(Arc::new(self.net.endpoint(name)));
        let (actor, _) = start_sim_worker(cluster, worker, role, Epoch(epoch), engine(), context)
            .await
            .unwrap();
        self.workers.insert(name.to_owned(), actor);
    }

    fn kill(&mut self, name: &str) {
        self.workers.remove(name).unwrap().kill();
    }

    /// Sends a turn, and gives back a future of its end.
    fn submit(
        &mut self,
        session: &str,
        prompt: Vec<u32>,
        n: u32,
    ) -> impl Future<Output = Result<Answer, AbortReason>> + use<> {
        self.requests += 1;
        let request = RequestId(self.requests);
        let session = SessionId::new(session).unwrap();
        let (bus, stream) = (self.client.clone(), self.subjects.stream(request).as_str().to_owned());
        let control = WorkerId::new("c0").unwrap();
        let to = self
            .subjects
            .worker(Kind::Router, &control, "submit")
            .as_str()
            .to_owned();
        let submit = Submit {
            request,
            session,
            class: Class::Interactive,
            tenant: None,
            time_left: Micros::from_secs(60),
            prompt,
            max_new_tokens: n,
            answer_so_far: Vec::new(),
            stream: stream.clone(),
        };
        async move {
            let mut stream = bus.subscribe(&stream, None).await.unwrap();
            // A lost exchange is asked again: the request's id makes that harmless.
            loop {
                let payload = wire::encode(&submit).unwrap().into();
                let asked = bus.request(&to, Headers::new(), payload, Duration::from_secs(1)).await;
                if asked.is_ok_and(|m| wire::decode::<Accepted>(&m.payload).is_ok()) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let mut tokens: Vec<u32> = Vec::new();
            loop {
                let message = tokio::time::timeout(Duration::from_secs(90), stream.next()).await;
                let message = message.expect("the turn hangs").expect("the bus is gone");
                match wire::schema_of(&message.payload) {
                    Some(Chunk::ID) => {
                        let chunk: Chunk = wire::decode(&message.payload).unwrap();
                        if let Some(known) = tokens.len().checked_sub(chunk.offset as usize) {
                            tokens.extend(chunk.tokens.get(known..).unwrap_or_default());
                        }
                    }
                    Some(Completed::ID) => {
                        let done: Completed = wire::decode(&message.payload).unwrap();
                        assert!(
                            done.answer.starts_with(&tokens),
                            "the stream is not a prefix of the answer"
                        );
                        return Ok(Answer {
                            path: done.path,
                            tokens: done.answer,
                            cached: done.cached_tokens,
                        });
                    }
                    Some(Failed::ID) => return Err(wire::decode::<Failed>(&message.payload).unwrap().reason),
                    other => panic!("unexpected schema {other:?}"),
                }
            }
        }
    }

    async fn inspect(&self, kind: Kind, id: &str) -> String {
        let worker = WorkerId::new(id).unwrap();
        let subject = self.subjects.worker(kind, &worker, "inspect").as_str().to_owned();
        let answer = self
            .client
            .request(&subject, Headers::new(), bytes::Bytes::new(), Duration::from_secs(1))
            .await;
        String::from_utf8(answer.unwrap().payload.to_vec()).unwrap()
    }
}

/// What the engine must write after `prompt`, computed without any engine.
fn expected(prompt: &[u32], n: u32) -> Vec<u32> {
    let mut context = ContextHash::default();
    context.extend(prompt);
    (0..n)
        .map(|_| {
            let token = context.next_token(VOCAB);
            context.push(token);
            token
        })
        .collect()
}

#[test]
fn a_session_is_seeded_once_and_then_direct() {
    in_virtual_time(async {
        let mut cluster = Cluster::start(1, Faults::default(), 1, 3).await;
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
        let mut cluster = Cluster::start(2, Faults::default(), 1, 3).await;
        let prompt: Vec<u32> = (0..200).collect();
        let turn = tokio::spawn(cluster.submit("s", prompt.clone(), 400));
        tokio::time::sleep(Duration::from_millis(900)).await;
        let mut serving = None;
        for name in ["d0", "d1", "d2"] {
            if cluster.inspect(Kind::Decode, name).await.contains("\"running\":true") {
                serving = Some(name);
            }
        }
        cluster.kill(serving.expect("the turn runs somewhere by now"));
        let answer = turn.await.unwrap().unwrap();
        assert_eq!(answer.tokens, expected(&prompt, 400));
    });
}

#[test]
fn a_killed_prefill_worker_costs_no_turn() {
    in_virtual_time(async {
        let mut cluster = Cluster::start(3, Faults::default(), 2, 2).await;
        let prompt: Vec<u32> = (0..3_000).collect();
        let turn = tokio::spawn(cluster.submit("s", prompt.clone(), 5));
        tokio::time::sleep(Duration::from_millis(60)).await;
        let busy = if cluster.inspect(Kind::Prefill, "p0").await.contains("\"attempt\":") {
            "p0"
        } else {
            "p1"
        };
        cluster.kill(busy);
        let answer = turn.await.unwrap().unwrap();
        assert_eq!(answer.tokens, expected(&prompt, 5));
    });
}

/// A run under faults: many sessions at once. Returns the hash of all that was sent and delivered.
async fn busy_run(seed: u64, faults: Faults) -> u64 {
    let mut cluster = Cluster::start(seed, faults, 2, 3).await;
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
    cluster.net.log_hash()
}

#[test]
fn many_sessions_all_complete_without_faults() {
    in_virtual_time(busy_run(4, Faults::default()));
}

#[test]
fn sessions_belong_to_shards_that_somebody_owns() {
    assert!(shard_of(&SessionId::new("s").unwrap()) < pinion_schemas::shard::SHARDS);
}
