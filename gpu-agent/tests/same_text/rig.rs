//! A cluster of native workers: one P, three D, on the simulated bus, with real sockets for their pages.

use crate::talk::Tokens;
use crate::{ANSWER, PAGE};
use pinion_actors::shell::Context;
use pinion_bus::{Headers, Message};
use pinion_gpu_agent::engine::native::{FileTierConfig, Model, NativeConfig, NativeEngine};
use pinion_gpu_agent::engine::sim::{CostModel, SimConfig};
use pinion_gpu_agent::node::{Started, Worker, WorkerRole, start_native_worker};
use pinion_gpu_agent::plane::PlaneConfig;
use pinion_gpu_agent::world::{Cluster, Shape, cluster_id};
use pinion_schemas::messages::PagesAck;
use pinion_schemas::subject::Kind;
use pinion_schemas::{BackupTargets, Epoch, Path, RequestId, WorkerId, wire};
use pinion_transfer::Inbox;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// The decode workers.
const DECODE: [&str; 3] = ["d0", "d1", "d2"];
/// How long what goes on behind the turns may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// Until heartbeats have told of new workers.
const HEARD_OF: Duration = Duration::from_secs(2);

/// Engines that can have all conversations at once, whole.
pub fn engine_config() -> NativeConfig {
    NativeConfig {
        pool_pages: 1_536,
        page_tokens: PAGE as u32,
        max_jobs: 64,
        threads: 2,
        ..NativeConfig::default()
    }
}

/// A folder for file tiers, removed in the end.
pub struct Files(PathBuf);

impl Files {
    /// An empty one.
    pub fn new() -> Self {
        Self(std::env::temp_dir().join(format!("pinion-same-text-{}", std::process::id())))
    }

    /// Engines as usual, with room in the file for all they have.
    pub fn engine_config(&self) -> NativeConfig {
        NativeConfig {
            file_tier: Some(FileTierConfig {
                folder: self.0.clone(),
                bytes: 1 << 30,
            }),
            ..engine_config()
        }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How one turn of a session went.
pub struct Turn {
    pub prompt: Tokens,
    pub answer: Tokens,
    pub path: Path,
    /// Prompt tokens that were on the D before.
    pub cached: usize,
    /// What the context has more than it had after the last turn.
    pub committed: usize,
    /// What its seed computed.
    pub computed_tokens: usize,
    /// What its seed brought.
    pub moved_pages: usize,
}

impl Turn {
    /// Prompt and answer.
    pub fn context(&self) -> Tokens {
        [&self.prompt[..], &self.answer].concat()
    }
}

/// What passed on the bus since somebody last forgot it.
#[derive(Default)]
struct Heard {
    /// By session, the last `computed_tokens` and `moved_pages`.
    seeds: BTreeMap<String, (usize, usize)>,
    /// Sessions whose pages were asked of the D they left.
    moves: BTreeSet<String>,
    /// By session, the last `backup_tokens`.
    backups: BTreeMap<String, usize>,
    /// By request, pages of a seed that a D took and had not: those that came whole, over the transfer plane.
    stored: BTreeMap<RequestId, u32>,
}

impl Heard {
    fn hear(&mut self, message: &Message) {
        if let Ok(ack) = wire::decode::<PagesAck>(&message.payload) {
            *self.stored.entry(ack.request).or_default() += ack.stored;
        } else if let Ok(event) = serde_json::from_slice(&message.payload) {
            self.told(&event);
        }
    }

    fn told(&mut self, event: &Value) {
        let number = |key: &str| event[key].as_u64().map(|n| n as usize);
        let session = event["session"].as_str().unwrap_or_default().to_owned();
        if event["what"] == "moving" {
            self.moves.insert(session.clone());
        }
        if let (Some(computed), Some(moved)) = (number("computed_tokens"), number("moved_pages")) {
            self.seeds.insert(session, (computed, moved));
        } else if let Some(backup) = number("backup_tokens") {
            self.backups.insert(session, backup);
        }
    }
}

/// The cluster.
pub struct Rig {
    cluster: Cluster,
    model: Arc<Model>,
    /// Engines of the decode workers.
    decode: NativeConfig,
    workers: BTreeMap<&'static str, Started>,
    /// Of every worker that ever was.
    inboxes: Vec<(String, Inbox)>,
    heard: Arc<Mutex<Heard>>,
    epoch: u64,
    /// Tokens of each session's context.
    contexts: Vec<usize>,
}

fn session(at: usize) -> String {
    format!("talk-{at}")
}

/// Looks again and again until it is so.
async fn until(what: &str, so: impl Fn() -> Result<(), String>) {
    let begun = Instant::now();
    while let Err(missing) = so() {
        assert!(begun.elapsed() < PATIENCE, "{what}: {missing}");
        sleep(Duration::from_millis(20)).await;
    }
}

impl Rig {
    /// Starts it, and waits until all know of each other.
    pub async fn start(model: Arc<Model>, backups: BackupTargets, decode: NativeConfig) -> Self {
        let shape = Shape {
            backups,
            prefill: 0,
            decode: 0,
            engine: SimConfig {
                page_tokens: PAGE as u32,
                // What the owner believes of moving a token's KV: 30 layers, K and V, 3 heads of 64 numbers of 2 bytes.
                cost: CostModel {
                    kv_bytes_per_token: 30 * 2 * 3 * 64 * 2,
                    ..CostModel::default()
                },
                ..SimConfig::default()
            },
            ..Shape::default()
        };
        let mut rig = Self {
            cluster: Cluster::start(shape).await.unwrap(),
            model,
            decode,
            workers: BTreeMap::new(),
            inboxes: Vec::new(),
            heard: Arc::default(),
            epoch: 1,
            contexts: Vec::new(),
        };
        rig.listen().await;
        rig.worker("p0", WorkerRole::Prefill).await;
        for name in DECODE {
            rig.worker(name, WorkerRole::Decode).await;
        }
        sleep(HEARD_OF).await;
        rig
    }

    /// Hears the sessions' events, and all answers.
    async fn listen(&self) {
        let events = self.cluster.subjects.all_events_of(Kind::Session);
        for subject in [events.as_str(), "_INBOX.>"] {
            let mut messages = self.cluster.client.subscribe(subject, None).await.unwrap();
            let heard = self.heard.clone();
            tokio::spawn(async move {
                while let Some(message) = messages.next().await {
                    heard.lock().unwrap().hear(&message);
                }
            });
        }
    }

    /// Pages that came to a D in this turn.
    pub fn stored_pages(&self) -> usize {
        let heard = self.heard.lock().unwrap();
        heard.stored.values().map(|pages| *pages as usize).sum()
    }

    /// Sessions that in this turn came from another D.
    pub fn moved_sessions(&self) -> usize {
        self.heard.lock().unwrap().moves.len()
    }

    async fn worker(&mut self, name: &'static str, role: WorkerRole) {
        let epoch = Epoch(self.epoch);
        let worker = Worker {
            cluster: cluster_id(),
            name: WorkerId::new(name).unwrap(),
            role,
            epoch,
        };
        let config = match role {
            WorkerRole::Prefill => engine_config(),
            WorkerRole::Decode => self.decode.clone(),
        };
        let engine = NativeEngine::new(self.model.clone(), config, &worker.name, epoch).unwrap();
        let told = format!("{name}, epoch {}", self.epoch);
        self.inboxes.push((told, engine.inbox().clone()));
        let context = Context::new(Arc::new(self.cluster.net.endpoint(name)));
        let started = start_native_worker(worker, engine, &PlaneConfig::default(), context).await;
        self.workers.insert(name, started.unwrap());
    }

    /// One turn of all sessions, at once.
    pub async fn serve(&mut self, prompts: Vec<Tokens>) -> Vec<Turn> {
        *self.heard.lock().unwrap() = Heard::default();
        self.contexts.resize(prompts.len(), 0);
        let submit = |(at, prompt): (usize, &Tokens)| {
            let turn = self.cluster.submit(&session(at), prompt.clone(), ANSWER);
            tokio::spawn(turn)
        };
        let running: Vec<_> = prompts.iter().enumerate().map(submit).collect();
        let mut turns = Vec::new();
        for (at, (prompt, turn)) in prompts.into_iter().zip(running).enumerate() {
            let answer = turn.await.unwrap().unwrap();
            let before = self.contexts[at];
            self.contexts[at] = prompt.len() + answer.tokens.len();
            turns.push(Turn {
                prompt,
                answer: answer.tokens,
                path: answer.path,
                cached: answer.cached as usize,
                committed: self.contexts[at].saturating_sub(before),
                computed_tokens: 0,
                moved_pages: 0,
            });
        }
        turns
    }

    /// Waits until each session has told of its seed, and notes what it told.
    pub async fn hear_of_seeds(&self, turns: &mut [Turn]) {
        until("seeds", || {
            let told = self.heard.lock().unwrap().seeds.len();
            if told == turns.len() {
                return Ok(());
            }
            Err(format!("{told} of {} sessions told of one", turns.len()))
        })
        .await;
        let heard = self.heard.lock().unwrap();
        for (at, turn) in turns.iter_mut().enumerate() {
            (turn.computed_tokens, turn.moved_pages) = heard.seeds[&session(at)];
        }
    }

    /// Waits until P has all full pages of every session.
    pub async fn backups_arrive(&self, turns: &[Turn]) {
        // The last token of an answer has no KV.
        let full = |turn: &Turn| (turn.prompt.len() + turn.answer.len() - 1) / PAGE * PAGE;
        until("backups", || {
            let backups = &self.heard.lock().unwrap().backups;
            let late = |(at, turn): (usize, &Turn)| {
                let backup = backups.get(&session(at)).copied().unwrap_or(0);
                let wanted = full(turn);
                (backup < wanted).then(|| format!("{}: {backup} of {wanted}", session(at)))
            };
            let late: Vec<String> = turns.iter().enumerate().filter_map(late).collect();
            if late.is_empty() {
                return Ok(());
            }
            Err(format!("{late:?}"))
        })
        .await;
    }

    /// What each D says of its tiers.
    async fn tiers(&self) -> Vec<Value> {
        let mut told = Vec::new();
        for name in DECODE {
            let worker = WorkerId::new(name).unwrap();
            let subject = self.cluster.subjects.worker(Kind::Decode, &worker, "inspect");
            let client = &self.cluster.client;
            let asked = client.request(subject.as_str(), Headers::new(), "".into(), Duration::from_secs(5));
            let view: Value = serde_json::from_slice(&asked.await.unwrap().payload).unwrap();
            told.push(view["tiers"].clone());
        }
        told
    }

    /// Waits until every page of a D is in its file.
    pub async fn files_have_all(&self) {
        let begun = Instant::now();
        loop {
            let tiers = self.tiers().await;
            let late = |t: &&Value| t["copying"] != 0 || t["file"]["pages"].as_u64() < t["pool"]["pages"].as_u64();
            let late: Vec<&Value> = tiers.iter().filter(late).collect();
            if late.is_empty() {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "not in the file: {late:?}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Pages that the D which are there now have loaded from their files.
    pub async fn reloaded_pages(&self) -> usize {
        let tiers = self.tiers().await;
        tiers.iter().map(|t| t["reloaded"].as_u64().unwrap() as usize).sum()
    }

    /// From now on all sessions must go to `open`.
    pub async fn drain_all_but(&self, open: &str) {
        for name in DECODE {
            let worker = WorkerId::new(name).unwrap();
            let subject = self.cluster.subjects.worker(Kind::Decode, &worker, "drain");
            let word = if name == open { "off" } else { "on" };
            let answer =
                self.cluster
                    .client
                    .request(subject.as_str(), Headers::new(), word.into(), Duration::from_secs(5));
            answer.await.unwrap();
        }
        // Its heartbeat tells the router at once.
        sleep(Duration::from_millis(500)).await;
    }

    /// Kills every D, and starts new ones of the same names.
    pub async fn replace_all_decode_workers(&mut self) {
        self.epoch += 1;
        for name in DECODE {
            let (actor, ended) = self.workers.remove(name).unwrap();
            actor.kill();
            ended.await.unwrap();
            self.worker(name, WorkerRole::Decode).await;
        }
        sleep(HEARD_OF).await;
    }

    /// No slot of any pool is being written, and no grant is open: neither here nor where a worker was killed.
    pub async fn rests(&self) {
        until("every pool rests", || {
            let busy = |(name, inbox): &(String, Inbox)| {
                let (usage, grants) = (inbox.pool().usage(), inbox.grants());
                (usage.writing > 0 || grants > 0).then(|| format!("{name}: {usage:?}, {grants} grants"))
            };
            let busy: Vec<String> = self.inboxes.iter().filter_map(busy).collect();
            if busy.is_empty() { Ok(()) } else { Err(busy.join("; ")) }
        })
        .await;
    }
}
