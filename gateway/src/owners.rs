//! Which control node owns a session: read from the shard leases in the key-value bucket, cached.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use pinion_bus::{Bus, BusError};
use pinion_schemas::shard::{Lease, SHARDS, lease_key, shard_of};
use pinion_schemas::{SessionId, WorkerId};
use tokio::time::Instant;

/// Knows which control node to talk to about a session. It may be wrong: the node itself refuses what it does not own.
#[async_trait]
pub trait Owners: Send + Sync {
    /// The owner as last known; `None` if nobody is known.
    fn owner(&self, session: &SessionId) -> Option<WorkerId>;

    /// Looks again, because the known owner did not answer or said that it is not the owner.
    ///
    /// # Errors
    /// The bus's, if it could not be asked; what was known stays known.
    async fn refresh(&self, session: &SessionId) -> Result<(), BusError>;
}

/// One shard as last read. `known` is locked only to copy; `reading` holds when the last read began, and is locked while
/// one goes on, so that a hundred stuck turns of one shard are two reads.
#[derive(Default)]
struct Shard {
    known: Mutex<Option<WorkerId>>,
    reading: tokio::sync::Mutex<Option<Instant>>,
}

/// [`Owners`] from the leases `shard.<n>`.
pub struct LeaseOwners {
    bus: Arc<dyn Bus>,
    shards: Vec<Shard>,
}

impl LeaseOwners {
    /// Knows nothing yet.
    pub fn new(bus: Arc<dyn Bus>) -> Self {
        Self {
            bus,
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
        }
    }
}

#[async_trait]
impl Owners for LeaseOwners {
    fn owner(&self, session: &SessionId) -> Option<WorkerId> {
        let shard = self.shards.get(usize::from(shard_of(session)))?;
        shard.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn refresh(&self, session: &SessionId) -> Result<(), BusError> {
        let number = shard_of(session);
        let Some(shard) = self.shards.get(usize::from(number)) else {
            return Ok(());
        };
        let asked = Instant::now();
        let mut read = shard.reading.lock().await;
        if read.is_some_and(|began| began > asked) {
            return Ok(()); // somebody read it, or tried to, while we waited
        }
        *read = Some(Instant::now());
        let entry = self.bus.kv_get(&lease_key(number)).await?;
        let owner = entry.and_then(|entry| {
            let lease = serde_json::from_slice::<Lease>(&entry.value);
            if let Err(error) = &lease {
                tracing::warn!(key = entry.key, %error, "unreadable lease");
            }
            lease.ok()?.holder()
        });
        *shard.known.lock().unwrap_or_else(PoisonError::into_inner) = owner;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use pinion_bus::sim::{Faults, SimNet};

    #[tokio::test(start_paused = true)]
    async fn a_lease_names_the_owner_and_is_read_again_on_demand() {
        let bus: Arc<dyn Bus> = Arc::new(SimNet::new(1, Faults::default()).endpoint("g"));
        let owners = LeaseOwners::new(Arc::clone(&bus));
        let session = SessionId::new("s-1").unwrap();
        owners.refresh(&session).await.unwrap();
        assert_eq!(owners.owner(&session), None);

        let key = lease_key(shard_of(&session));
        let first = bus
            .kv_create(&key, Bytes::from_static(br#"{"owner":"c0","epoch":1}"#))
            .await
            .unwrap();
        owners.refresh(&session).await.unwrap();
        assert_eq!(owners.owner(&session).unwrap().as_str(), "c0");

        bus.kv_update(&key, Bytes::from_static(b"nonsense"), first)
            .await
            .unwrap();
        assert_eq!(owners.owner(&session).unwrap().as_str(), "c0", "cached");
        owners.refresh(&session).await.unwrap();
        assert_eq!(owners.owner(&session), None);
    }
}
