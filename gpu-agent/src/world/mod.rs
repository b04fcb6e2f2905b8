//! A whole cluster of the real actors in one process: the simulated bus, simulated engines, virtual time.
//!
//! Nothing of the cluster is imitated: routers, sessions, leases, decode and prefill workers are those of production (design §3 rule 1).
//! [`Cluster`] starts and kills them by name and hands out the network ([`SimNet`]) to break; [`Clients`] follow turns to their end as
//! the gateway does. Everything in one run comes from [`Shape::seed`] and from what the caller does, so that it repeats to the byte.
//!
//! ```
//! # use pinion_gpu_agent::world::{Cluster, Shape, expected, in_virtual_time, prompt};
//! in_virtual_time(async {
//!     let cluster = Cluster::start(Shape::default()).await?;
//!     let answer = cluster.submit("s", prompt(1, 300), 20).await?;
//!     assert_eq!(answer.tokens, expected(&prompt(1, 300), 20));
//!     Ok::<(), Box<dyn std::error::Error>>(())
//! }).unwrap();
//! ```

mod client;
mod dice;

pub use client::{Answer, Ask, Clients, End, TurnError};
pub use dice::Dice;

use crate::engine::sim::{SimConfig, SimEngine, continuation};
use crate::node::{Worker, WorkerRole, start_sim_worker};
use bytes::Bytes;
use pinion_actors::control::Control;
use pinion_actors::router::RouterConfig;
use pinion_actors::shell::{self, Context, Envelope};
use pinion_actors::{Engine as _, Role};
use pinion_bus::sim::{Faults, SimNet};
use pinion_bus::{Bus, BusError, Headers, Subscription};
use pinion_core::route;
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{BackupTargets, Class, ClusterId, Epoch, IdError, WorkerId};
use pinion_transfer::Paths;
use ractor::ActorRef;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// Different tokens that the engines of [`Shape::default`] write: what [`expected`] and [`prompt`] assume.
pub const VOCAB: u32 = 1_000;

/// Until heartbeats have told every router of every worker, and the shards are dealt out.
const HEARD_OF: Duration = Duration::from_secs(2);
/// How long a view may take.
const VIEW_PATIENCE: Duration = Duration::from_secs(1);

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
    /// The engine of every worker, with its costs.
    pub engine: SimConfig,
    /// Engines of single workers, by name, that are not like the others. Their pages must be: all nodes name pages alike.
    pub engines: BTreeMap<String, SimConfig>,
    /// How the routers order candidates.
    pub route: route::Config,
    /// Pages each router's index may hold.
    pub index_pages_max: usize,
    /// Prefill speed that routers assume, tokens per second.
    pub prefill_tokens_per_s: u64,
    /// Link speed that routers assume, bytes per second.
    pub link_bytes_per_s: u64,
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
            engines: BTreeMap::new(),
            route: route::Config::default(),
            index_pages_max: 100_000,
            prefill_tokens_per_s: 25_000,
            link_bytes_per_s: 12_500_000_000,
            backups: BackupTargets::LastPrefill,
        }
    }
}

impl Shape {
    /// Names of the control nodes.
    pub fn controls(&self) -> Vec<String> {
        (0..self.control).map(|i| format!("c{i}")).collect()
    }

    /// Names and roles of the workers.
    pub fn workers(&self) -> Vec<(String, WorkerRole)> {
        let prefill = (0..self.prefill).map(|i| (format!("p{i}"), WorkerRole::Prefill));
        let decode = (0..self.decode).map(|i| (format!("d{i}"), WorkerRole::Decode));
        prefill.chain(decode).collect()
    }

    /// The engine of a worker.
    pub fn engine_of(&self, worker: &str) -> &SimConfig {
        self.engines.get(worker).unwrap_or(&self.engine)
    }
}

/// Why a cluster, or a part of it, could not be had.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// Nothing can be called that.
    #[error("{name:?} names no node: {why}")]
    Name {
        /// What was given.
        name: String,
        /// What is wrong with it.
        why: IdError,
    },
    /// An actor did not start.
    #[error("{name} does not start: {why}")]
    Spawn {
        /// Which node.
        name: String,
        /// What the library says.
        why: ractor::SpawnErr,
    },
    /// Nobody of that name runs.
    #[error("no node called {name} runs: start it first")]
    Absent {
        /// The name.
        name: String,
    },
    /// The network did not do it.
    #[error(transparent)]
    Bus(#[from] BusError),
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
    /// What it was built from.
    pub shape: Shape,
    controls: BTreeMap<String, Control>,
    workers: BTreeMap<String, ActorRef<Envelope>>,
}

/// Name of the cluster.
pub fn cluster_id() -> ClusterId {
    // One plain word, so that it cannot fail.
    ClusterId::new("sim").unwrap_or_else(|error| unreachable!("{error}"))
}

/// Runs to the end on a clock that passes only when nobody has anything to do.
///
/// # Panics
/// If the system gives no runtime, or if `run` panics.
pub fn in_virtual_time<F: Future>(run: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap_or_else(|error| panic!("no runtime: {error}"))
        .block_on(run)
}

fn worker_id(name: &str) -> Result<WorkerId, WorldError> {
    WorkerId::new(name).map_err(|why| WorldError::Name {
        name: name.to_owned(),
        why,
    })
}

impl Cluster {
    /// Starts all nodes, and waits until they know of each other.
    ///
    /// # Errors
    /// [`WorldError`], if a node does not start.
    pub async fn start(shape: Shape) -> Result<Self, WorldError> {
        let net = SimNet::new(shape.seed, shape.faults.clone());
        let client: Arc<dyn Bus> = Arc::new(net.endpoint("client"));
        let subjects = Subjects::new(&cluster_id());
        let controls: Result<_, _> = shape.controls().iter().map(|name| worker_id(name)).collect();
        let mut this = Self {
            clients: Clients::new(client.clone(), subjects.clone(), controls?),
            client,
            net,
            subjects,
            shape: shape.clone(),
            controls: BTreeMap::new(),
            workers: BTreeMap::new(),
        };
        for name in shape.controls() {
            this.control(&name, 1).await?;
        }
        for (name, role) in shape.workers() {
            this.worker(&name, role, 1).await?;
        }
        tokio::time::sleep(HEARD_OF).await;
        Ok(this)
    }

    fn context(&self, name: &str) -> Context {
        Context::new(Arc::new(self.net.endpoint(name)))
    }

    /// Starts a control node; `birth` must be higher than that of an earlier one of that name.
    ///
    /// # Errors
    /// [`WorldError`]
    pub async fn control(&mut self, name: &str, birth: u64) -> Result<(), WorldError> {
        let shape = &self.shape;
        let engine = SimEngine::new(shape.engine.clone());
        let config = RouterConfig {
            cluster: cluster_id(),
            control: worker_id(name)?,
            page_tokens: engine.page_tokens(),
            page_bytes: engine.page_bytes(),
            route: shape.route,
            index_pages_max: shape.index_pages_max,
            prefill_tokens_per_s: shape.prefill_tokens_per_s,
            link_bytes_per_s: shape.link_bytes_per_s,
            backups: shape.backups,
        };
        let started = Control::start(config, Epoch(birth), self.context(name)).await;
        let control = started.map_err(|why| spawn_error(name, why))?;
        self.controls.insert(name.to_owned(), control);
        Ok(())
    }

    /// Starts a worker; `epoch` must be higher than that of an earlier one of that name.
    ///
    /// # Errors
    /// [`WorldError`]
    pub async fn worker(&mut self, name: &str, role: WorkerRole, epoch: u64) -> Result<(), WorldError> {
        let worker = Worker {
            cluster: cluster_id(),
            name: worker_id(name)?,
            role,
            epoch: Epoch(epoch),
        };
        let started = start_sim_worker(worker, self.shape.engine_of(name).clone(), self.context(name)).await;
        let (actor, _) = started.map_err(|why| spawn_error(name, why))?;
        self.workers.insert(name.to_owned(), actor);
        Ok(())
    }

    /// Starts a worker that is built in an unusual way; its pages leave by `paths`, if they have bytes.
    ///
    /// # Errors
    /// [`WorldError`]
    pub async fn worker_as(
        &mut self,
        name: &str,
        role: impl Role,
        paths: Option<Arc<Paths>>,
    ) -> Result<(), WorldError> {
        let context = Context {
            paths,
            ..self.context(name)
        };
        let started = shell::spawn(name, role, context).await;
        let (actor, _) = started.map_err(|why| spawn_error(name, why))?;
        self.workers.insert(name.to_owned(), actor);
        Ok(())
    }

    /// Ends a node in the middle of whatever it does.
    ///
    /// # Errors
    /// [`WorldError::Absent`]
    pub fn kill(&mut self, name: &str) -> Result<(), WorldError> {
        if let Some(worker) = self.workers.remove(name) {
            worker.kill();
        } else if let Some(control) = self.controls.remove(name) {
            control.stop();
        } else {
            return Err(WorldError::Absent { name: name.to_owned() });
        }
        Ok(())
    }

    /// Takes a control node out, to leave in good order ([`Control::leave`]) or to be stopped.
    pub fn take_control(&mut self, name: &str) -> Option<Control> {
        self.controls.remove(name)
    }

    /// Whether a node of that name runs.
    pub fn runs(&self, name: &str) -> bool {
        self.workers.contains_key(name) || self.controls.contains_key(name)
    }

    /// Sends an interactive turn, and gives back a future of its end.
    ///
    /// # Errors
    /// The future gives [`TurnError`].
    pub fn submit(&self, session: &str, prompt: Vec<u32>, n: u32) -> impl Future<Output = End> + Send + use<> {
        self.clients.submit(Class::Interactive, session, prompt, n)
    }

    /// What happens to a session, or on a worker, from now on: JSON for sessions, frames for workers. `id` may be `*`.
    ///
    /// # Errors
    /// [`WorldError::Bus`]
    pub async fn events(&self, kind: Kind, id: &str) -> Result<Subscription, WorldError> {
        let subject = self.subjects.event(kind, id).as_str().to_owned();
        Ok(self.client.subscribe(&subject, None).await?)
    }

    /// What a node tells people, in JSON.
    ///
    /// # Errors
    /// [`WorldError`]
    pub async fn inspect(&self, kind: Kind, id: &str) -> Result<String, WorldError> {
        let subject = self.subjects.worker(kind, &worker_id(id)?, "inspect");
        let asked = self
            .client
            .request(subject.as_str(), Headers::new(), Bytes::new(), VIEW_PATIENCE);
        Ok(String::from_utf8_lossy(&asked.await?.payload).into_owned())
    }
}

fn spawn_error(name: &str, why: ractor::SpawnErr) -> WorldError {
    WorldError::Spawn {
        name: name.to_owned(),
        why,
    }
}

/// What an engine with [`VOCAB`] tokens must write after `prompt`, computed without any engine.
pub fn expected(prompt: &[u32], n: u32) -> Vec<u32> {
    continuation(prompt, n as usize, VOCAB)
}

/// Tokens that no two sessions share.
pub fn prompt(session: u32, length: u32) -> Vec<u32> {
    (0..length)
        .map(|i| (session.wrapping_mul(7_919) ^ i.wrapping_mul(31)) % VOCAB)
        .collect()
}
