//! A node: hosts the decode and prefill actors of its engines.

use crate::engine::native::NativeEngine;
use crate::engine::sim::{SimConfig, SimEngine};
use crate::plane::{Plane, PlaneConfig, PlaneError};
use pinion_actors::Engine;
use pinion_actors::decode::{Decode, DecodeConfig};
use pinion_actors::prefill::{Prefill, PrefillConfig};
use pinion_actors::shell::{self, Context, Envelope};
use pinion_schemas::limits::DIRECT_APPEND_TOKENS_MAX;
use pinion_schemas::{ClusterId, Epoch, Micros, WorkerId};
use pinion_transfer::sim::LinkModel;
use ractor::ActorRef;
use std::hash::{BuildHasher as _, RandomState};
use tokio::task::JoinHandle;

/// How long a promise of room stands. Its owner gives it back long before when a leg fails; this bounds what a dead owner holds.
/// The longest contexts (a million tokens) need a minute of prefill and as much of transfer.
const PERMIT_TTL: Micros = Micros::from_secs(120);

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerRole {
    /// Prefills for others.
    Prefill,
    /// Decodes, and runs short appends itself.
    Decode,
}

/// Who a worker is.
#[derive(Clone, Debug)]
pub struct Worker {
    /// The cluster.
    pub cluster: ClusterId,
    /// Its name.
    pub name: WorkerId,
    /// What it does.
    pub role: WorkerRole,
    /// Higher than that of any earlier process of that name.
    pub epoch: Epoch,
}

/// A worker's actor, and what ends when it does.
pub type Started = (ActorRef<Envelope>, JoinHandle<()>);

/// Starts a worker with a simulated engine.
///
/// # Errors
/// If the actor does not start.
pub async fn start_sim_worker(
    worker: Worker,
    engine: SimConfig,
    context: Context,
) -> Result<Started, ractor::SpawnErr> {
    let link = engine.cost.link();
    start_worker(worker, SimEngine::new(engine), link, Vec::new(), context).await
}

/// Why a worker does not start.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// It is not on the transfer plane.
    #[error(transparent)]
    Plane(#[from] PlaneError),
    /// No actor.
    #[error("the worker's actor does not start: {0}")]
    Spawn(#[from] ractor::SpawnErr),
}

/// Starts a worker with a native engine, which must have been made with the worker's epoch: the grants on its pages end with it.
///
/// # Errors
/// [`NodeError`]
pub async fn start_native_worker(
    worker: Worker,
    engine: NativeEngine,
    config: &PlaneConfig,
    mut context: Context,
) -> Result<Started, NodeError> {
    let plane = Plane::open(engine.inbox(), worker.name.as_str(), config).await?;
    context.paths = Some(plane.paths.clone());
    let (actor, ended) = start_worker(worker, engine, config.link(), plane.addresses.clone(), context).await?;
    let ended = tokio::spawn(async move {
        let _ = ended.await;
        drop(plane);
    });
    Ok((actor, ended))
}

/// Starts a worker with any engine, whose simulated pages leave over `link`.
///
/// # Errors
/// If the actor does not start.
pub async fn start_worker<E: Engine>(
    who: Worker,
    engine: E,
    link: LinkModel,
    addresses: Vec<String>,
    context: Context,
) -> Result<Started, ractor::SpawnErr> {
    let Worker {
        cluster,
        name: worker,
        role,
        epoch,
    } = who;
    let name = worker.as_str().to_owned();
    let secret = RandomState::new().hash_one(&name);
    match role {
        WorkerRole::Prefill => {
            let config = PrefillConfig {
                cluster,
                worker,
                epoch,
                link,
                addresses,
                secret,
            };
            shell::spawn(&name, Prefill::new(config, engine), context).await
        }
        WorkerRole::Decode => {
            let permits = pinion_core::permits::Config {
                // What the link carries in 1 s (design §5).
                max_pending_seed_bytes: link.bytes_per_sec,
                ttl: PERMIT_TTL,
                ..pinion_core::permits::Config::default()
            };
            let direct_append_tokens_max = DIRECT_APPEND_TOKENS_MAX;
            let config = DecodeConfig {
                cluster,
                worker,
                epoch,
                direct_append_tokens_max,
                permits,
                link,
                addresses,
                secret,
            };
            shell::spawn(&name, Decode::new(config, engine), context).await
        }
    }
}
