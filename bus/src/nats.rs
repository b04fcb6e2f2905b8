//! The bus on a real NATS server.
//!
//! What the client library does by itself, and what is added here (numbers measured, see the style report): while the
//! server is down its `publish` buffers and then blocks, so every call has a timeout; a request in flight when the
//! server dies would wait for its full deadline, so every call watches the connection; drops by slow subscriptions
//! are under-reported, so nobody counts them: what must not be missed carries sequence numbers and can be asked for again.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::kv::{CreateErrorKind, EntryErrorKind, Operation, Store, UpdateError, UpdateErrorKind};
use async_nats::jetstream::{self, kv};
use async_nats::service::ServiceExt;
use async_nats::{Client, ConnectErrorKind, PublishErrorKind, Request, RequestErrorKind};
use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt, StreamExt, TryStreamExt};
use tokio::sync::{OnceCell, watch};
use tokio::time::{Instant, sleep, timeout};
use tracing::warn;

use crate::{Bus, BusError, Headers, KV_KEYS_MAX, KvEntry, Message, Subscription, check_message, subject};

mod convert;
mod options;
use convert::{incoming, outgoing};
pub use options::{Auth, NatsOptions};
use options::{connect_options, jitter, pause};

/// How often the connection is looked at besides its events, which the library may drop in a storm of other events.
const LOOK: Duration = Duration::from_millis(50);
/// Keys whose revision is asked for at the same time.
const KEYS_IN_FLIGHT: usize = 32;

/// The connection as last reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Connected now?
    pub up: bool,
    /// How often it went down since the start.
    pub drops: u64,
}

/// One connection to NATS. Clones share it; use separate ones for control, events and tokens.
#[derive(Clone)]
pub struct NatsBus {
    client: Client,
    options: Arc<NatsOptions>,
    connection: watch::Receiver<Connection>,
    store: Arc<OnceCell<Store>>,
}

/// A registered NATS service; dropping it ends the service. (The library's own handle, dropped, would answer for
/// ever.)
pub struct Service {
    inner: Option<async_nats::service::Service>,
}

impl Drop for Service {
    fn drop(&mut self) {
        // The library's `stop` is `async` but never waits, so polling it once is enough.
        if let Some(Err(error)) = self.inner.take().and_then(|service| service.stop().now_or_never()) {
            warn!(%error, "service did not stop");
        }
    }
}

fn other(error: impl fmt::Display) -> BusError {
    BusError::Other(error.to_string())
}

impl NatsBus {
    /// Connects, trying again until `connect_timeout`; afterwards reconnects for ever.
    ///
    /// # Errors
    /// [`BusError::Disconnected`] if no server answered in time; [`BusError::Other`] at once if a server refused us,
    /// or the options are wrong.
    pub async fn connect(options: NatsOptions) -> Result<Self, BusError> {
        let until = Instant::now() + options.connect_timeout;
        for attempt in 0.. {
            let (state, connection) = watch::channel(Connection { up: true, drops: 0 });
            let connect = connect_options(&options, state).await?;
            match tokio::time::timeout_at(until, connect.connect(options.urls.clone())).await {
                Ok(Ok(client)) => {
                    return Ok(Self {
                        client,
                        options: Arc::new(options),
                        connection,
                        store: Arc::new(OnceCell::new()),
                    });
                }
                Ok(Err(error)) => match error.kind() {
                    ConnectErrorKind::Io | ConnectErrorKind::Dns | ConnectErrorKind::TimedOut => {
                        warn!(client = options.name, %error, "bus not reachable yet");
                    }
                    _ => return Err(other(error)),
                },
                Err(_) => break,
            }
            let rest = pause(attempt, jitter(&options.name, attempt));
            if Instant::now() + rest >= until {
                break;
            }
            sleep(rest).await;
        }
        Err(BusError::Disconnected)
    }

    /// The connection's state, to watch.
    pub fn connection(&self) -> watch::Receiver<Connection> {
        self.connection.clone()
    }

    /// Registers this role as a NATS service, so that `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS` find it. `name` is of
    /// `[A-Za-z0-9_-]`, `version` is semantic; node, role, model and epoch belong into `metadata`.
    ///
    /// # Errors
    /// [`BusError::Other`] for a bad name or version, else as for any call.
    pub async fn serve(
        &self,
        name: &str,
        version: &str,
        description: &str,
        metadata: HashMap<String, String>,
    ) -> Result<Service, BusError> {
        let builder = self
            .client
            .service_builder()
            .description(description)
            .metadata(metadata);
        let service = self
            .guarded(self.options.request_timeout, builder.start(name, version))
            .await?
            .map_err(other)?;
        Ok(Service { inner: Some(service) })
    }

    fn is_up(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    fn connects(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Relaxed)
    }

    /// Runs a call until it is done, its time is over or the connection it went out on is gone.
    async fn guarded<T>(&self, limit: Duration, call: impl Future<Output = T> + Send) -> Result<T, BusError> {
        let (connects, mut connection) = (self.connects(), self.connection.clone());
        let drops = connection.borrow_and_update().drops;
        if !self.is_up() {
            return Err(BusError::Disconnected);
        }
        let lost = async {
            loop {
                let _ = timeout(LOOK, connection.changed()).await;
                if !self.is_up() || self.connects() != connects || connection.borrow().drops != drops {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            done = timeout(limit, call) => done.map_err(|_| BusError::TimedOut { after: limit }),
            () = lost => Err(BusError::Disconnected),
        }
    }

    async fn open_store(&self) -> Result<Store, BusError> {
        let unavailable = |reason: String| BusError::KvUnavailable { reason };
        let Some(bucket) = &self.options.kv_bucket else {
            return Err(unavailable("no bucket configured".to_owned()));
        };
        if !self.client.is_server_compatible(2, 10, 0) {
            return Err(unavailable(format!(
                "server {} is older than 2.10",
                self.client.server_info().version
            )));
        }
        let wait = self.options.request_timeout;
        let context = jetstream::context::ContextBuilder::new()
            .timeout(wait)
            .ack_timeout(wait)
            .build(self.client.clone());
        if let Ok(store) = context.get_key_value(bucket.clone()).await {
            return Ok(store);
        }
        let config = kv::Config {
            bucket: bucket.clone(),
            description: "Pinion: a cache of truths that workers can prove again".to_owned(),
            history: 1,
            num_replicas: self.options.kv_replicas,
            ..kv::Config::default()
        };
        context
            .create_key_value(config)
            .await
            .map_err(|error| unavailable(error.to_string()))
    }

    async fn store(&self) -> Result<&Store, BusError> {
        self.guarded(
            self.options.request_timeout * 2,
            self.store.get_or_try_init(|| self.open_store()),
        )
        .await?
    }

    /// A key-value call, guarded like any other.
    async fn kv<T, E>(&self, call: impl Future<Output = Result<T, E>> + Send) -> Result<Result<T, E>, BusError> {
        self.guarded(self.options.request_timeout, call).await
    }

    fn update_error(&self, error: &UpdateError, key: &str, expected: u64) -> BusError {
        match error.kind() {
            UpdateErrorKind::WrongLastRevision => BusError::WrongRevision {
                key: key.to_owned(),
                expected,
            },
            UpdateErrorKind::InvalidKey => BusError::BadSubject {
                subject: key.to_owned(),
            },
            UpdateErrorKind::TimedOut => BusError::TimedOut {
                after: self.options.request_timeout,
            },
            UpdateErrorKind::Other => other(error),
        }
    }

    fn too_large(&self, headers: &Headers, payload: &Bytes) -> BusError {
        BusError::TooLarge {
            got: headers.wire_bytes() + payload.len(),
            max: self.client.max_payload(),
        }
    }
}

#[async_trait]
impl Bus for NatsBus {
    async fn publish(&self, subject: &str, headers: Headers, payload: Bytes) -> Result<(), BusError> {
        check_message(subject, &headers, &payload, self.client.max_payload())?;
        let too_large = self.too_large(&headers, &payload);
        let (subject, limit) = (subject.to_owned(), self.options.request_timeout);
        let sent = match outgoing(&headers)? {
            Some(map) => timeout(limit, self.client.publish_with_headers(subject, map, payload)).await,
            None => timeout(limit, self.client.publish(subject, payload)).await,
        };
        sent.map_err(|_| BusError::TimedOut { after: limit })?
            .map_err(|error| match error.kind() {
                PublishErrorKind::MaxPayloadExceeded => too_large,
                PublishErrorKind::InvalidSubject => other(error),
                PublishErrorKind::Send => BusError::Disconnected,
            })
    }

    async fn request(
        &self,
        subject: &str,
        headers: Headers,
        payload: Bytes,
        deadline: Duration,
    ) -> Result<Message, BusError> {
        check_message(subject, &headers, &payload, self.client.max_payload())?;
        let too_large = self.too_large(&headers, &payload);
        let mut request = Request::new().payload(payload).timeout(Some(deadline));
        if let Some(map) = outgoing(&headers)? {
            request = request.headers(map);
        }
        let answer = self
            .guarded(deadline, self.client.send_request(subject.to_owned(), request))
            .await?;
        answer.map(incoming).map_err(|error| match error.kind() {
            RequestErrorKind::NoResponders => BusError::NoResponders {
                subject: subject.to_owned(),
            },
            RequestErrorKind::TimedOut => BusError::TimedOut { after: deadline },
            RequestErrorKind::InvalidSubject => BusError::BadSubject {
                subject: subject.to_owned(),
            },
            RequestErrorKind::MaxPayloadExceeded => too_large,
            RequestErrorKind::Other => BusError::Disconnected,
        })
    }

    async fn subscribe(&self, pattern: &str, queue: Option<String>) -> Result<Subscription, BusError> {
        let bad = |name: &str| BusError::BadSubject {
            subject: name.to_owned(),
        };
        if !subject::is_pattern(pattern) {
            return Err(bad(pattern));
        }
        let (pattern, limit) = (pattern.to_owned(), self.options.request_timeout);
        let subscribed = match queue {
            Some(queue) if !subject::is_queue(&queue) => return Err(bad(&queue)),
            Some(queue) => timeout(limit, self.client.queue_subscribe(pattern, queue)).await,
            None => timeout(limit, self.client.subscribe(pattern)).await,
        };
        let stream = subscribed
            .map_err(|_| BusError::TimedOut { after: limit })?
            .map_err(other)?;
        Ok(Subscription::new(stream.map(incoming)))
    }

    async fn kv_get(&self, key: &str) -> Result<Option<KvEntry>, BusError> {
        let entry = self
            .kv(self.store().await?.entry(key))
            .await?
            .map_err(|error| match error.kind() {
                EntryErrorKind::InvalidKey => BusError::BadSubject {
                    subject: key.to_owned(),
                },
                EntryErrorKind::TimedOut => BusError::TimedOut {
                    after: self.options.request_timeout,
                },
                EntryErrorKind::Other => other(error),
            })?;
        let live = entry.filter(|entry| entry.operation == Operation::Put);
        Ok(live.map(|entry| KvEntry {
            key: entry.key,
            value: entry.value,
            revision: entry.revision,
        }))
    }

    async fn kv_create(&self, key: &str, value: Bytes) -> Result<u64, BusError> {
        self.kv(self.store().await?.create(key, value))
            .await?
            .map_err(|error| match error.kind() {
                CreateErrorKind::AlreadyExists => BusError::WrongRevision {
                    key: key.to_owned(),
                    expected: 0,
                },
                CreateErrorKind::InvalidKey => BusError::BadSubject {
                    subject: key.to_owned(),
                },
                CreateErrorKind::Publish | CreateErrorKind::Ack | CreateErrorKind::Other => other(error),
            })
    }

    async fn kv_update(&self, key: &str, value: Bytes, expected: u64) -> Result<u64, BusError> {
        let updated = self.kv(self.store().await?.update(key, value, expected)).await?;
        updated.map_err(|error| self.update_error(&error, key, expected))
    }

    async fn kv_delete(&self, key: &str, expected: Option<u64>) -> Result<(), BusError> {
        let deleted = self
            .kv(self.store().await?.delete_expect_revision(key, expected))
            .await?;
        deleted.map_err(|error| self.update_error(&error, key, expected.unwrap_or_default()))
    }

    async fn kv_keys(&self, prefix: &str) -> Result<Vec<(String, u64)>, BusError> {
        let store = self.store().await?;
        // The server filters by whole tokens, and knows the keys without sending a value: a bucket may hold very many others.
        let tokens = prefix.rfind('.').map_or("", |dot| &prefix[..=dot]);
        let filter = format!("{}{tokens}>", store.prefix);
        let listed = self.kv(async {
            let subjects = store.stream.info_with_subjects(filter).await.map_err(other)?;
            subjects
                .map_ok(|(subject, _)| subject)
                .try_collect::<Vec<String>>()
                .await
                .map_err(other)
        });
        let subjects = listed.await??;
        let keys = subjects.iter().filter_map(|s| s.strip_prefix(store.prefix.as_str()));
        let mut keys: Vec<String> = keys.filter(|key| key.starts_with(prefix)).map(str::to_owned).collect();
        if keys.len() > KV_KEYS_MAX {
            return Err(BusError::TooManyKeys { max: KV_KEYS_MAX });
        }
        keys.sort_unstable();
        let entries = futures::stream::iter(keys).map(|key| async move {
            let entry = self.kv_get(&key).await?;
            Ok::<_, BusError>(entry.map(|entry| (entry.key, entry.revision)))
        });
        entries
            .buffered(KEYS_IN_FLIGHT)
            .try_filter_map(|entry| async move { Ok(entry) })
            .try_collect()
            .await
    }
}
