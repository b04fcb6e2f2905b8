//! Writes to the key-value bucket: in order for each key, without holding anybody up.

use bytes::Bytes;
use pinion_bus::{Bus, BusError};
use pinion_schemas::Epoch;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// Keys that may wait to be written. Beyond it a write is left out: what is written is a cache of truth only (design §7).
const WAITING_MAX: usize = 65_536;
/// Writes at a time; each is a read and a compare-and-set.
const AT_A_TIME: usize = 16;

type Waiting = Mutex<BTreeMap<String, (Epoch, Bytes)>>;

/// The writer of one actor. Of several values for one key that wait, only the last is written.
pub struct Store {
    waiting: Arc<Waiting>,
    more: Arc<Notify>,
    writer: JoinHandle<()>,
}

impl Store {
    /// A writer to the bucket of `bus`; it stops when this is dropped.
    pub fn new(bus: Arc<dyn Bus>) -> Self {
        let (waiting, more) = (Arc::<Waiting>::default(), Arc::new(Notify::new()));
        let writer = tokio::spawn(write(bus, waiting.clone(), more.clone()));
        Self { waiting, more, writer }
    }

    /// Has `value` written by and by, for the owner of `epoch`.
    pub fn put(&self, key: String, epoch: Epoch, value: Bytes) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() < WAITING_MAX || waiting.contains_key(&key) {
            waiting.insert(key, (epoch, value));
            self.more.notify_one();
        } else {
            tracing::debug!(%key, "not written: too much is waiting");
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.writer.abort();
    }
}

async fn write(bus: Arc<dyn Bus>, waiting: Arc<Waiting>, more: Arc<Notify>) {
    loop {
        let next: Vec<_> = {
            let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
            std::iter::from_fn(|| waiting.pop_first()).take(AT_A_TIME).collect()
        };
        if next.is_empty() {
            more.notified().await;
            continue;
        }
        let writes = next.into_iter().map(|(key, (epoch, value))| {
            let bus = &bus;
            async move {
                if let Err(error) = put(bus.as_ref(), &key, epoch, value).await {
                    tracing::debug!(%key, %error, "not written");
                }
            }
        });
        futures::future::join_all(writes).await;
    }
}

/// Writes unless a later epoch has written.
async fn put(bus: &dyn Bus, key: &str, epoch: Epoch, value: Bytes) -> Result<(), BusError> {
    #[derive(serde::Deserialize)]
    struct Written {
        epoch: Epoch,
    }
    match bus.kv_get(key).await? {
        Some(entry) => {
            let written = serde_json::from_slice::<Written>(&entry.value);
            if written.is_ok_and(|w| w.epoch > epoch) {
                return Ok(());
            }
            bus.kv_update(key, value, entry.revision).await.map(drop)
        }
        None => bus.kv_create(key, value).await.map(drop),
    }
}
