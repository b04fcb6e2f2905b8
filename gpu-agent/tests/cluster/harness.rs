//! A cluster of the real actors in one process, on the simulated bus and in virtual time.

use crate::client::{Clients, End};
use pinion_actors::control::Control;
use pinion_actors::router::RouterConfig;
use pinion_actors::shell::{self, Context, Envelope};
use pinion_actors::{Engine, Role};
use pinion_bus::sim::{Faults, SimNet};
use pinion_bus::{Bus, Headers};
use pinion_core::route;
use pinion_gpu_agent::engine::sim::{SimConfig, SimEngine, continuation};
use pinion_gpu_agent::node::{Worker, WorkerRole, start_sim_worker};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{BackupTargets, Class, ClusterId, Epoch, WorkerId};
use pinion_transfer::Paths;
use ractor::ActorRef;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// Tokens that the simulated engines write.
pub const VOCAB: u32 = 1_000;

/// What a cluster consists of.
#[derive(Clone)]
pub struct Shape {
    /// Of every random choice of the network.
    pub seed: u64,
    /// What goes wrong on the network.
    pub faults: Faults,
    /// Control nodes `c0`, `c1`, …; they race for the shards.
    pub control: u32,
    /// Prefill workers `p0`, `p1`, …
    pub prefill: u32,
    /// Decode workers `d0`, `d1`, …
    pub decode: u32,
    /// The engine of every worker.
    pub engine: SimConfig,
    /// Where sessions are backed up.
    pub backups: BackupTargets,
}

impl Default for Shape {
    /// One control node, one P, three D, a perfect network, and a pool so small that it is used up.
    fn default() -> Self {
        Self {
            seed: 1,
            faults: Faults::default(),
            control: 1,
            prefill: 1,
            decode: 3,
            engine: SimConfig {
                page_tokens: 16,
                device_pages: 256,
                vocab: VOCAB,
                ..SimConfig::default()
            },
            backups: BackupTargets::LastPrefill,
        }
    }
}

/// A running cluster.
pub struct Cluster {
    /// The network, to break.
    pub net: SimNet,
    /// An endpoint that belongs to nobody.
    pub client: Arc<dyn Bus>,
    /// Whoever sends turns.
    pub clients: Clients,
    /// The subjects.
    pub subjects: Subjects,
    /// The control nodes, by name.
    pub controls: BTreeMap<String, Control>,
    engine: SimConfig,
    backups: BackupTargets,
    workers: BTreeMap<String, ActorRef<Envelope>>,
}

/// Name of the cluster.
pub fn cluster_id() -> ClusterId {
    ClusterId::new("sim").unwrap()
}

/// Runs to the end on a clock that passes only when nobody has anything to do.
pub fn in_virtual_time<F: Future>(run: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(run)
}

impl Cluster {
    /// Starts all nodes, and waits until they know of each other.
    pub async fn start(shape: Shape) -> Self {
        let net = SimNet::new(shape.seed, shape.faults);
        let client: Arc<dyn Bus> = Arc::new(net.endpoint("client"));
        let subjects = Subjects::new(&cluster_id());
        let controls = (0..shape.control).map(|i| WorkerId::new(format!("c{i}")).unwrap());
        let mut this = Self {
            clients: Clients::new(client.clone(), subjects.clone(), controls.collect()),
            client,
            net,
            subjects,
            controls: BTreeMap::new(),
            engine: shape.engine,
            backups: shape.backups,
            workers: BTreeMap::new(),
        };
        for i in 0..shape.control {
            this.control(&format!("c{i}")).await;
        }
        for i in 0..shape.prefill {
            this.worker(&format!("p{i}"), WorkerRole::Prefill, 1).await;
        }
        for i in 0..shape.decode {
            this.worker(&format!("d{i}"), WorkerRole::Decode, 1).await;
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        this
    }

    async fn control(&mut self, name: &str) {
        let engine = SimEngine::new(self.engine.clone());
        let config = RouterConfig {
            cluster: cluster_id(),
            control: WorkerId::new(name).unwrap(),
            page_tokens: engine.page_tokens(),
            page_bytes: engine.page_bytes(),
            route: route::Config::default(),
            index_pages_max: 100_000,
            prefill_tokens_per_s: 25_000,
            link_bytes_per_s: 12_500_000_000,
            backups: self.backups,
        };
        let context = Context::new(Arc::new(self.net.endpoint(name)));
        let control = Control::start(config, Epoch(1), context).await.unwrap();
        self.controls.insert(name.to_owned(), control);
    }

    /// Starts a worker; `epoch` must be higher than that of an earlier one of that name.
    pub async fn worker(&mut self, name: &str, role: WorkerRole, epoch: u64) {
        let context = Context::new(Arc::new(self.net.endpoint(name)));
        let worker = Worker {
            cluster: cluster_id(),
            name: WorkerId::new(name).unwrap(),
            role,
            epoch: Epoch(epoch),
        };
        let started = start_sim_worker(worker, self.engine.clone(), context).await;
        let (actor, _) = started.unwrap();
        self.workers.insert(name.to_owned(), actor);
    }

    /// Starts a worker that is built in an unusual way.
    pub async fn worker_as(&mut self, name: &str, role: impl Role) {
        self.worker_with(name, role, None).await;
    }

    /// Starts a worker whose pages leave by `paths`.
    pub async fn worker_with(&mut self, name: &str, role: impl Role, paths: Option<Arc<Paths>>) {
        let mut context = Context::new(Arc::new(self.net.endpoint(name)));
        context.paths = paths;
        let (actor, _) = shell::spawn(name, role, context).await.unwrap();
        self.workers.insert(name.to_owned(), actor);
    }

    /// Ends a worker in the middle of whatever it does.
    pub fn kill(&mut self, name: &str) {
        self.workers.remove(name).unwrap().kill();
    }

    /// Sends an interactive turn, and gives back a future of its end.
    pub fn submit(&self, session: &str, prompt: Vec<u32>, n: u32) -> impl Future<Output = End> + Send + use<> {
        self.clients.submit(Class::Interactive, session, prompt, n)
    }

    /// What a node tells people, in JSON.
    pub async fn inspect(&self, kind: Kind, id: &str) -> String {
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
pub fn expected(prompt: &[u32], n: u32) -> Vec<u32> {
    continuation(prompt, n as usize, VOCAB)
}

/// Tokens that no two sessions share.
pub fn prompt(session: u32, length: u32) -> Vec<u32> {
    (0..length)
        .map(|i| (session.wrapping_mul(7_919) ^ i.wrapping_mul(31)) % VOCAB)
        .collect()
}

/// Seeded numbers for what a test itself chooses (`SplitMix64`): the network has its own.
pub struct Dice(pub u64);

impl Dice {
    /// A number in `from..to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        from + (x ^ (x >> 31)) % (to - from)
    }

    /// A span of `from..to` milliseconds.
    pub fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.between(from, to))
    }
}
