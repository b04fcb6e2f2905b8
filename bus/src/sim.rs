//! The bus in memory: core-NATS semantics on tokio time, with seeded faults.
//!
//! [`SimNet`] is the server and the wires, [`SimBus`] one named endpoint on it. On a current-thread runtime with
//! paused time the same seed gives the same deliveries, to the byte ([`SimNet::log`], [`SimNet::log_hash`]). A
//! message is judged when it is published: who subscribes, what is lost, how long each copy travels. `world` holds
//! that state, this file the calls.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::Stream;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use crate::{Bus, BusError, Headers, KV_KEYS_MAX, KvEntry, Message, Subscription, check_message, subject};

mod faults;
mod seen;
mod store;
mod world;
pub use faults::{Faults, Restart};
pub use seen::{Seen, Tap, What};
use world::World;

/// The name of the server in [`SimNet::partition`]: cutting an endpoint from it cuts it from everything.
pub const SERVER: &str = "server";

/// How long a publish waits for room, or a key-value call for the server, before [`BusError::TimedOut`].
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

struct Shared {
    world: Mutex<World>,
    wake: Arc<Notify>,
    courier: Mutex<Option<JoinHandle<()>>>,
    /// By endpoint, whether its process is stopped.
    stopped: Mutex<BTreeMap<String, watch::Sender<bool>>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.wake.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The simulated server and network. Clones are the same network.
#[derive(Clone)]
pub struct SimNet {
    shared: Arc<Shared>,
}

impl SimNet {
    /// A network whose every random choice comes from `seed`.
    pub fn new(seed: u64, faults: Faults) -> Self {
        let world = Mutex::new(World::new(seed, faults, Instant::now()));
        Self {
            shared: Arc::new(Shared {
                world,
                wake: Arc::new(Notify::new()),
                courier: Mutex::new(None),
                stopped: Mutex::default(),
            }),
        }
    }

    /// An endpoint. Names are what [`Self::partition`] and the log speak of; endpoints may share one.
    pub fn endpoint(&self, name: &str) -> SimBus {
        SimBus {
            net: self.clone(),
            name: name.to_owned(),
            life: lock(&self.shared.world).life(name),
            stopped: self.stopped(name),
            bucket: "default".to_owned(),
        }
    }

    /// Whether the process of this endpoint is stopped: it handles nothing then, and what it was about to send waits.
    pub fn stopped(&self, name: &str) -> watch::Receiver<bool> {
        lock(&self.shared.stopped)
            .entry(name.to_owned())
            .or_default()
            .subscribe()
    }

    /// Stops the process of an endpoint, as a garbage collector or a stopped machine does, or lets it go on. Messages to it
    /// wait, up to the capacity of its subscriptions.
    pub fn stop(&self, name: &str, stopped: bool) {
        lock(&self.shared.stopped)
            .entry(name.to_owned())
            .or_default()
            .send_replace(stopped);
    }

    /// The process of an endpoint is dead: its subscriptions end, and nothing that is left of it sends anything. The next
    /// [`Self::endpoint`] of that name is another life.
    pub fn crash(&self, name: &str) {
        self.stop(name, false);
        lock(&self.shared.world).crash(name);
    }

    /// Changes the faults for what is published from now on.
    pub fn set_faults(&self, faults: Faults) {
        lock(&self.shared.world).faults = faults;
    }

    /// Cuts two endpoints (or one and [`SERVER`]) from each other, both ways; what is in flight between them is lost.
    pub fn partition(&self, a: &str, b: &str) {
        let mut world = lock(&self.shared.world);
        world.cut(a, b);
        world.cut(b, a);
    }

    /// Cuts one way only: what `from` sends does not get to `to` (either may be [`SERVER`]).
    pub fn cut_one_way(&self, from: &str, to: &str) {
        lock(&self.shared.world).cut(from, to);
    }

    /// What an endpoint sends and gets takes so much longer from now on; zero undoes it.
    pub fn lag(&self, endpoint: &str, lag: Duration) {
        lock(&self.shared.world).lag(endpoint, lag);
    }

    /// The store loses its last `writes` although it acknowledged them, without any restart (a leader that was cut off).
    pub fn lose_writes(&self, writes: usize) {
        lock(&self.shared.world).store.lose(writes);
    }

    /// Has everything that happens told to `tap` from now on.
    pub fn watch(&self, tap: Tap) {
        lock(&self.shared.world).tap = Some(tap);
    }

    /// Keeps no log from now on: writing it is most of what a simulation costs.
    pub fn log_off(&self) {
        lock(&self.shared.world).logs = false;
    }

    /// Undoes [`Self::partition`] and [`Self::cut_one_way`].
    pub fn heal(&self, a: &str, b: &str) {
        lock(&self.shared.world).heal(a, b);
    }

    /// The server goes down now and comes back after `restart.down`. Everything in flight is lost.
    pub fn restart(&self, restart: Restart) {
        lock(&self.shared.world).restart(restart);
        self.shared.wake.notify_one();
    }

    /// What was sent, delivered, dropped, in order; at most [`Self::LOG_LINES_MAX`] of the first lines.
    pub fn log(&self) -> Vec<String> {
        lock(&self.shared.world).log.clone()
    }

    /// Hash over all lines of the log, also those beyond the cap.
    pub fn log_hash(&self) -> u64 {
        lock(&self.shared.world).log_hash
    }

    /// Lines of the log kept: some tens of megabytes.
    pub const LOG_LINES_MAX: usize = 200_000;

    /// Sees to it that somebody carries messages, and wakes them.
    fn kick(&self) {
        let mut courier = lock(&self.shared.courier);
        if courier.as_ref().is_none_or(JoinHandle::is_finished) {
            *courier = Some(tokio::spawn(carry(
                Arc::downgrade(&self.shared),
                Arc::clone(&self.shared.wake),
            )));
        }
        self.shared.wake.notify_one();
    }
}

/// Delivers what is due, sleeps until the next is; ends with the network.
async fn carry(shared: Weak<Shared>, wake: Arc<Notify>) {
    loop {
        let Some(next) = shared
            .upgrade()
            .map(|shared| lock(&shared.world).deliver_due(Instant::now()))
        else {
            return;
        };
        match next {
            Some(at) => tokio::select! {
                biased;
                () = wake.notified() => {}
                () = sleep_until(at) => {}
            },
            None => wake.notified().await,
        }
    }
}

/// One endpoint of a [`SimNet`].
#[derive(Clone)]
pub struct SimBus {
    net: SimNet,
    name: String,
    life: u64,
    stopped: watch::Receiver<bool>,
    bucket: String,
}

impl SimBus {
    /// The same endpoint on another key-value bucket; the first is called `default`.
    #[must_use]
    pub fn with_bucket(mut self, bucket: &str) -> Self {
        bucket.clone_into(&mut self.bucket);
        self
    }

    fn world(&self) -> MutexGuard<'_, World> {
        lock(&self.net.shared.world)
    }

    /// Waits while the process is stopped.
    async fn awake(&self) -> Result<(), BusError> {
        if *self.stopped.borrow() {
            let mut stopped = self.stopped.clone();
            // The network cannot go while an endpoint holds it.
            let _ = stopped.wait_for(|stopped| !stopped).await;
        }
        if self.world().life(&self.name) == self.life {
            Ok(())
        } else {
            Err(BusError::Disconnected)
        }
    }

    /// A key-value call: one journey to the server and back, then `act` on the bucket.
    async fn kv<T>(&self, act: impl FnOnce(&mut World, &str) -> Result<T, BusError> + Send) -> Result<T, BusError> {
        self.awake().await?;
        let (journey, born) = {
            let mut world = self.world();
            (world.journey() + world.journey(), world.restarts)
        };
        if !journey.is_zero() {
            tokio::time::sleep(journey).await;
        }
        {
            let mut world = self.world();
            let broken = world.is_down(Instant::now()) || world.restarts != born;
            if broken && world.noticed {
                return Err(BusError::Disconnected);
            }
            if !broken && world.reachable(&self.name, SERVER) && world.reachable(SERVER, &self.name) {
                return act(&mut world, &self.bucket);
            }
        }
        tokio::time::sleep(CALL_TIMEOUT.saturating_sub(journey)).await;
        Err(BusError::TimedOut { after: CALL_TIMEOUT })
    }
}

fn checked_key(key: &str) -> Result<(), BusError> {
    if subject::is_key(key) {
        Ok(())
    } else {
        Err(BusError::BadSubject {
            subject: key.to_owned(),
        })
    }
}

struct Inbox {
    messages: mpsc::Receiver<Message>,
    shared: Weak<Shared>,
    id: u64,
}

impl Stream for Inbox {
    type Item = Message;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Message>> {
        self.messages.poll_recv(cx)
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            lock(&shared.world).unsubscribe(self.id);
        }
    }
}

/// Takes the waiting request out of the world, also when its future is dropped half-way.
struct Waiting<'a> {
    bus: &'a SimBus,
    inbox: String,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.bus.world().waiting.remove(&self.inbox);
    }
}

#[async_trait]
impl Bus for SimBus {
    async fn publish(&self, subject: &str, headers: Headers, payload: Bytes) -> Result<(), BusError> {
        self.awake().await?;
        let taken = {
            let mut world = self.world();
            check_message(subject, &headers, &payload, world.faults.payload_max)?;
            let message = Message {
                subject: subject.to_owned(),
                reply: None,
                headers,
                payload,
            };
            world.publish(&self.name, &message, Instant::now())
        };
        if !taken {
            tokio::time::sleep(CALL_TIMEOUT).await;
            return Err(BusError::TimedOut { after: CALL_TIMEOUT });
        }
        self.net.kick();
        Ok(())
    }

    async fn request(
        &self,
        subject: &str,
        headers: Headers,
        payload: Bytes,
        deadline: Duration,
    ) -> Result<Message, BusError> {
        self.awake().await?;
        let (answer, waiting) = {
            let now = Instant::now();
            let mut world = self.world();
            check_message(subject, &headers, &payload, world.faults.payload_max)?;
            if world.is_down(now) && world.noticed {
                return Err(BusError::Disconnected);
            }
            let reachable = !world.is_down(now) && world.reachable(&self.name, SERVER);
            if reachable && !world.has_interest(subject) {
                return Err(BusError::NoResponders {
                    subject: subject.to_owned(),
                });
            }
            let (sender, answer) = oneshot::channel();
            let inbox = world.open_inbox(&self.name, sender);
            let message = Message {
                subject: subject.to_owned(),
                reply: Some(inbox.clone()),
                headers,
                payload,
            };
            world.publish(&self.name, &message, now);
            (answer, Waiting { bus: self, inbox })
        };
        self.net.kick();
        let outcome = timeout(deadline, answer).await;
        drop(waiting);
        match outcome {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(BusError::Disconnected),
            Err(_) => Err(BusError::TimedOut { after: deadline }),
        }
    }

    async fn subscribe(&self, pattern: &str, queue: Option<String>) -> Result<Subscription, BusError> {
        for (name, good) in [
            (pattern, subject::is_pattern(pattern)),
            (
                queue.as_deref().unwrap_or_default(),
                queue.as_deref().is_none_or(subject::is_queue),
            ),
        ] {
            if !good {
                return Err(BusError::BadSubject {
                    subject: name.to_owned(),
                });
            }
        }
        let (id, messages) = self.world().subscribe((&self.name, self.life), pattern, queue);
        Ok(Subscription::new(Inbox {
            messages,
            shared: Arc::downgrade(&self.net.shared),
            id,
        }))
    }

    async fn kv_get(&self, key: &str) -> Result<Option<KvEntry>, BusError> {
        checked_key(key)?;
        self.kv(|world, bucket| {
            let (revision, value) = world.store.last(bucket, key);
            Ok(value.map(|value| KvEntry {
                key: key.to_owned(),
                value,
                revision,
            }))
        })
        .await
    }

    async fn kv_create(&self, key: &str, value: Bytes) -> Result<u64, BusError> {
        checked_key(key)?;
        self.kv(|world, bucket| match world.store.last(bucket, key) {
            (_, Some(_)) => Err(BusError::WrongRevision {
                key: key.to_owned(),
                expected: 0,
            }),
            (_, None) => Ok(world.kv_write(bucket, key, Some(value))),
        })
        .await
    }

    async fn kv_update(&self, key: &str, value: Bytes, expected: u64) -> Result<u64, BusError> {
        checked_key(key)?;
        self.kv(|world, bucket| {
            if world.store.last(bucket, key).0 == expected {
                Ok(world.kv_write(bucket, key, Some(value)))
            } else {
                Err(BusError::WrongRevision {
                    key: key.to_owned(),
                    expected,
                })
            }
        })
        .await
    }

    async fn kv_delete(&self, key: &str, expected: Option<u64>) -> Result<(), BusError> {
        checked_key(key)?;
        self.kv(|world, bucket| match expected {
            Some(expected) if world.store.last(bucket, key).0 != expected => Err(BusError::WrongRevision {
                key: key.to_owned(),
                expected,
            }),
            _ => {
                world.kv_write(bucket, key, None);
                Ok(())
            }
        })
        .await
    }

    async fn kv_keys(&self, prefix: &str) -> Result<Vec<(String, u64)>, BusError> {
        self.kv(|world, bucket| {
            let keys = world.store.keys(bucket, prefix);
            if keys.len() > KV_KEYS_MAX {
                Err(BusError::TooManyKeys { max: KV_KEYS_MAX })
            } else {
                Ok(keys)
            }
        })
        .await
    }
}
