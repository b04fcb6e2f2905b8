//! How a connection to NATS is set up: who we are, which servers, how patiently.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{ConnectOptions, Event};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use tokio::sync::watch;
use tracing::{info, warn};

use super::{Connection, other};
use crate::{BusError, SUBSCRIPTION_CAPACITY};

/// A dead peer is noticed after two missed pings, so within 15 s; the library's default of 60 s is longer than any
/// turn.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Commands buffered while the server is down. Small: what waits there is stale when it is finally sent.
const CLIENT_CAPACITY: usize = 256;
/// First and longest pause between attempts to connect.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// How a role proves who it is.
#[derive(Clone, Default)]
pub enum Auth {
    /// Not at all.
    #[default]
    None,
    /// A file with a JWT and its nkey seed.
    CredentialsFile(PathBuf),
    /// An nkey seed (`SU…`).
    Nkey(String),
    /// A name and a password.
    UserPassword(String, String),
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::CredentialsFile(_) => "CredentialsFile(..)",
            Self::Nkey(_) => "Nkey(..)",
            Self::UserPassword(..) => "UserPassword(..)",
        })
    }
}

/// How to connect.
#[derive(Clone, Debug)]
pub struct NatsOptions {
    /// Servers to try, `nats://host:port` or `tls://…`.
    pub urls: Vec<String>,
    /// Name of this client in the server's lists.
    pub name: String,
    /// Proof of identity.
    pub auth: Auth,
    /// Root certificates (PEM) to trust; requires TLS.
    pub tls_root: Option<PathBuf>,
    /// How long [`super::NatsBus::connect`] keeps trying.
    pub connect_timeout: Duration,
    /// Longest wait of a publish, subscribe or key-value call.
    pub request_timeout: Duration,
    /// Messages a subscription holds; the newest beyond are dropped silently.
    pub subscription_capacity: usize,
    /// Key-value bucket, created if missing; none: no key-value store.
    pub kv_bucket: Option<String>,
    /// Replicas of the bucket if it is created here.
    pub kv_replicas: usize,
}

impl NatsOptions {
    /// One server, no authentication, no key-value store, 10 s to connect, 5 s per call.
    pub fn new(url: &str, name: &str) -> Self {
        Self {
            urls: vec![url.to_owned()],
            name: name.to_owned(),
            auth: Auth::None,
            tls_root: None,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(5),
            subscription_capacity: SUBSCRIPTION_CAPACITY,
            kv_bucket: None,
            kv_replicas: 1,
        }
    }
}

/// Exponential pause with jitter over its upper half, so that clients do not come back in step.
pub(super) fn pause(attempt: usize, random: u64) -> Duration {
    let full = PAUSE.0.saturating_mul(1 << attempt.min(10)).min(PAUSE.1);
    full / 2 + Duration::from_micros(random % (full.as_micros() as u64 / 2 + 1))
}

/// Jitter differs by client and attempt; it needs no secret, only to differ.
pub(super) fn jitter(name: &str, attempt: usize) -> u64 {
    let seed = name.bytes().fold(u64::from(std::process::id()), |seed, b| {
        seed.wrapping_mul(31).wrapping_add(u64::from(b))
    });
    ChaCha8Rng::seed_from_u64(seed.wrapping_add(attempt as u64)).next_u64()
}

pub(super) async fn connect_options(
    options: &NatsOptions,
    state: watch::Sender<Connection>,
) -> Result<ConnectOptions, BusError> {
    let (name, state) = (options.name.clone(), Arc::new(state));
    let callback_name = name.clone();
    let mut connect = ConnectOptions::new()
        .name(&name)
        .ping_interval(PING_INTERVAL)
        .connection_timeout(options.request_timeout)
        .request_timeout(Some(options.request_timeout))
        .client_capacity(CLIENT_CAPACITY)
        .subscription_capacity(options.subscription_capacity)
        .max_reconnects(None)
        .reconnect_delay_callback(move |attempt| pause(attempt, jitter(&name, attempt)))
        .event_callback(move |event| {
            match &event {
                Event::Connected => info!(client = callback_name, "bus connected"),
                Event::Disconnected | Event::Closed => warn!(client = callback_name, %event, "bus connection lost"),
                event => warn!(client = callback_name, %event, "bus event"),
            }
            state.send_if_modified(|now| {
                let up = match event {
                    Event::Connected => true,
                    Event::Disconnected | Event::Closed => false,
                    _ => return false,
                };
                now.drops += u64::from(now.up && !up);
                std::mem::replace(&mut now.up, up) != up
            });
            std::future::ready(())
        });
    connect = match &options.auth {
        Auth::None => connect,
        Auth::CredentialsFile(path) => connect.credentials_file(path).await.map_err(other)?,
        Auth::Nkey(seed) => connect.nkey(seed.clone()),
        Auth::UserPassword(user, password) => connect.user_and_password(user.clone(), password.clone()),
    };
    Ok(match &options.tls_root {
        Some(root) => connect.add_root_certificates(root.clone()).require_tls(true),
        None => connect,
    })
}
