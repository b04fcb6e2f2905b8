//! A node: hosts the decode and prefill actors of its engines.

use crate::engine::native::NativeEngine;
use crate::engine::sim::{SimConfig, SimEngine};
use pinion_actors::Engine;
use pinion_actors::decode::{Decode, DecodeConfig};
use pinion_actors::prefill::{Prefill, PrefillConfig};
use pinion_actors::shell::{self, Context, Envelope};
use pinion_schemas::limits::DIRECT_APPEND_TOKENS_MAX;
use pinion_schemas::{ClusterId, Epoch, Micros, WorkerId};
use pinion_transfer::sim::LinkModel;
use ractor::ActorRef;
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

/// Starts a worker with a simulated engine. `epoch` must be higher than that of any earlier process of that name. Besides the
/// actor comes what ends when it does.
///
/// # Errors
/// If the actor does not start.
pub async fn start_sim_worker(
    cluster: ClusterId,
    worker: WorkerId,
    role: WorkerRole,
    epoch: Epoch,
    engine: SimConfig,
    context: Context,
) -> Result<(ActorRef<Envelope>, JoinHandle<()>), ractor::SpawnErr> {
    let link = engine.cost.link();
    start_worker(cluster, worker, role, epoch, (SimEngine::new(engine), link), context).await
}

/// Starts a worker with a native engine, which must have been made with the same `epoch`: the grants on its pages end with it.
/// `link` is how fast pages leave this node. The rest is as for [`start_sim_worker`].
///
/// # Errors
/// If the actor does not start.
pub async fn start_native_worker(
    cluster: ClusterId,
    worker: WorkerId,
    role: WorkerRole,
    epoch: Epoch,
    (engine, link): (NativeEngine, LinkModel),
    context: Context,
) -> Result<(ActorRef<Envelope>, JoinHandle<()>), ractor::SpawnErr> {
    start_worker(cluster, worker, role, epoch, (engine, link), context).await
}

async fn start_worker<E: Engine>(
    cluster: ClusterId,
    worker: WorkerId,
    role: WorkerRole,
    epoch: Epoch,
    (engine, link): (E, LinkModel),
    context: Context,
) -> Result<(ActorRef<Envelope>, JoinHandle<()>), ractor::SpawnErr> {
    let name = worker.as_str().to_owned();
    match role {
        WorkerRole::Prefill => {
            let config = PrefillConfig {
                cluster,
                worker,
                epoch,
                link,
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
            };
            shell::spawn(&name, Decode::new(config, engine), context).await
        }
    }
}
