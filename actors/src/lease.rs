//! Which control node owns which shard: leases in the key-value bucket, taken and renewed by compare-and-set, each take-over
//! with a higher epoch (design §2).
//!
//! The keeper tells the sessions role what it owns. A lease that cannot be renewed in time is given up before another node may
//! take it, so that two owners never overlap by more than what epochs fence off (I6, I7).

use crate::effect::Local;
use crate::sessions::SESSIONS;
use crate::shell::Context;
use pinion_bus::{Bus, BusError};
use pinion_schemas::shard::{SHARDS, lease_key};
use pinion_schemas::{Epoch, WorkerId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// A lease not renewed for so long may be taken. Times are measured by who looks: no clocks are compared.
pub const LEASE: Duration = Duration::from_secs(3);
/// Time between renewals.
pub const RENEW: Duration = Duration::from_millis(800);

/// Value of a lease's key, in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The control node.
    pub owner: String,
    /// Its epoch.
    pub epoch: u64,
}

/// What the keeper saw of one shard.
struct Seen {
    revision: u64,
    since: Instant,
    /// Our epoch and the time of our last renewal, while it is ours.
    ours: Option<(Epoch, Instant)>,
}

/// Takes, renews and gives up leases until it is dropped.
pub async fn keep(control: WorkerId, context: Context) {
    let mut seen: BTreeMap<u16, Seen> = BTreeMap::new();
    loop {
        for shard in 0..SHARDS {
            if let Err(error) = tend(&control, &context, shard, &mut seen).await {
                tracing::debug!(shard, %error, "lease not looked at");
            }
            give_up_if_late(&context, shard, &mut seen);
        }
        tokio::time::sleep(RENEW).await;
    }
}

async fn tend(
    control: &WorkerId,
    context: &Context,
    shard: u16,
    seen: &mut BTreeMap<u16, Seen>,
) -> Result<(), BusError> {
    let key = lease_key(shard);
    let now = Instant::now();
    let Some(entry) = context.bus.kv_get(&key).await? else {
        return take(control, context, shard, None, Epoch(1), seen).await;
    };
    let lease: Option<Lease> = serde_json::from_slice(&entry.value).ok();
    let known = seen.get(&shard).filter(|s| s.revision == entry.revision);
    let since = known.map_or(now, |s| s.since);
    let ours = known.and_then(|s| s.ours);
    let epoch = Epoch(lease.as_ref().map_or(0, |l| l.epoch));
    match ours {
        Some((epoch, _)) => return renew(control, context, shard, entry.revision, epoch, seen).await,
        None if now.duration_since(since) > LEASE => {
            return take(control, context, shard, Some(entry.revision), epoch.next(), seen).await;
        }
        None => {
            if seen.get(&shard).is_some_and(|s| s.ours.is_some()) {
                context.directory.tell(SESSIONS, Local::Shard(shard, None));
            }
            seen.insert(
                shard,
                Seen {
                    revision: entry.revision,
                    since,
                    ours: None,
                },
            );
        }
    }
    Ok(())
}

async fn take(
    control: &WorkerId,
    context: &Context,
    shard: u16,
    revision: Option<u64>,
    epoch: Epoch,
    seen: &mut BTreeMap<u16, Seen>,
) -> Result<(), BusError> {
    let started = Instant::now();
    let revision = write(control, context.bus.as_ref(), shard, revision, epoch).await?;
    seen.insert(
        shard,
        Seen {
            revision,
            since: started,
            ours: Some((epoch, started)),
        },
    );
    context.directory.tell(SESSIONS, Local::Shard(shard, Some(epoch)));
    Ok(())
}

async fn renew(
    control: &WorkerId,
    context: &Context,
    shard: u16,
    revision: u64,
    epoch: Epoch,
    seen: &mut BTreeMap<u16, Seen>,
) -> Result<(), BusError> {
    let started = Instant::now();
    let revision = write(control, context.bus.as_ref(), shard, Some(revision), epoch).await?;
    seen.insert(
        shard,
        Seen {
            revision,
            since: started,
            ours: Some((epoch, started)),
        },
    );
    Ok(())
}

async fn write(
    control: &WorkerId,
    bus: &dyn Bus,
    shard: u16,
    revision: Option<u64>,
    epoch: Epoch,
) -> Result<u64, BusError> {
    let lease = Lease {
        owner: control.as_str().to_owned(),
        epoch: epoch.0,
    };
    // A struct of a string and a number always has a JSON form.
    let value = serde_json::to_vec(&lease).unwrap_or_default().into();
    match revision {
        None => bus.kv_create(&lease_key(shard), value).await,
        Some(revision) => bus.kv_update(&lease_key(shard), value, revision).await,
    }
}

/// Another node may take the shard [`LEASE`] after it saw our last renewal; we stop before.
fn give_up_if_late(context: &Context, shard: u16, seen: &mut BTreeMap<u16, Seen>) {
    let Some(state) = seen.get_mut(&shard) else { return };
    let late = state
        .ours
        .is_some_and(|(_, renewed)| renewed.elapsed() > LEASE.mul_f32(0.8));
    if late {
        tracing::warn!(shard, "lease not renewed in time: given up");
        state.ours = None;
        state.since = Instant::now();
        context.directory.tell(SESSIONS, Local::Shard(shard, None));
    }
}
