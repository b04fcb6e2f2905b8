//! All ways to a peer behind one call: the nearest first, another when one fails, and one that keeps failing last.

use crate::frame::PageState;
use crate::grant::Grant;
use crate::pool::Pool;
use crate::send::{Placed, SendError, Transport as _};
use crate::shm::ShmSender;
use crate::tcp::{STREAMS, TcpSender};
use crate::verbs::VerbsSender;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// A path is suspect after so many failures in [`WINDOW`].
const FAILURES: usize = 3;
const WINDOW: Duration = Duration::from_mins(1);
/// How long a suspect path comes last before a transfer tries it again; doubles with each failure.
const SHUN: Duration = Duration::from_secs(1);
const SHUN_MAX: Duration = Duration::from_mins(1);
/// Paths whose failures are remembered: more than any cluster has peers.
const PATHS_MAX: usize = 4_096;
/// Tries of one transfer, over all paths.
const TRIES: u32 = 5;
/// Before a try after the first; doubles with each.
const PAUSE: Duration = Duration::from_millis(10);

/// Where a node takes pages. `tcp://10.0.0.7:7400`; `verbs://10.0.0.7:7401` over RDMA; or `shm://HOST/path/of/socket` for processes
/// of the same machine. The nearest is the first in order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// A Unix socket, on the machine whose current boot has this id.
    Shm {
        /// See [`host`].
        host: String,
        /// The socket.
        path: PathBuf,
    },
    /// Where connections over RDMA begin: a TCP address.
    Verbs(SocketAddr),
    /// A TCP address.
    Tcp(SocketAddr),
}

/// Not an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no address of a page server: give tcp://IP:PORT, verbs://IP:PORT or shm://HOST/PATH")]
pub struct BadAddress(String);

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shm { host, path } => write!(f, "shm://{host}{}", path.display()),
            Self::Verbs(at) => write!(f, "verbs://{at}"),
            Self::Tcp(at) => write!(f, "tcp://{at}"),
        }
    }
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        let bad = || BadAddress(text.chars().take(200).collect());
        if let Some(at) = text.strip_prefix("tcp://") {
            return at.parse().map(Self::Tcp).map_err(|_| bad());
        }
        if let Some(at) = text.strip_prefix("verbs://") {
            return at.parse().map(Self::Verbs).map_err(|_| bad());
        }
        let rest = text.strip_prefix("shm://").ok_or_else(bad)?;
        let (host, path) = rest
            .split_once('/')
            .filter(|(host, _)| !host.is_empty())
            .ok_or_else(bad)?;
        Ok(Self::Shm {
            host: host.to_owned(),
            path: PathBuf::from(format!("/{path}")),
        })
    }
}

/// Names this machine and its current boot, so that shared memory is tried only where it can work.
pub fn host() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| !id.is_empty())
}

/// Why pages did not arrive. Those that did are in the grant.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// The peer named no address that this node can use.
    #[error("the peer has no address that this node can reach")]
    NoPath,
    /// The last of the tries.
    #[error("over {path}: {error}")]
    Failed {
        /// The path.
        path: Address,
        /// What went wrong there.
        error: SendError,
    },
    /// Some pages came with wrong bytes each time.
    #[error("{0} pages arrived with wrong bytes, again and again")]
    Corrupt(usize),
    /// The time was over.
    #[error("the transfer took too long")]
    Late,
}

#[derive(Debug, Default)]
struct Health {
    failures: Vec<Instant>,
    /// Failures since the last success.
    row: u32,
    shunned_until: Option<Instant>,
}

/// Sends a pool's pages over whatever path there is.
#[derive(Debug)]
pub struct Paths {
    tcp: TcpSender,
    shm: ShmSender,
    verbs: Option<VerbsSender>,
    host: Option<String>,
    health: Mutex<BTreeMap<Address, Health>>,
}

impl Paths {
    /// Paths for the pages of `pool`.
    pub fn new(pool: &Pool) -> Self {
        Self {
            tcp: TcpSender::new(pool.clone(), STREAMS),
            shm: ShmSender::new(pool.clone()),
            verbs: None,
            host: host(),
            health: Mutex::default(),
        }
    }

    /// Uses RDMA, too. Without this, `verbs://` addresses of peers are passed over.
    #[must_use]
    pub fn with_verbs(mut self, verbs: VerbsSender) -> Self {
        self.verbs = Some(verbs);
        self
    }

    /// Sends `pages` into a grant of the peer that listens at `to`, within `patience`. Pages of which the digest was wrong, and those
    /// of a path that failed, go over the next path; a peer that refuses is not asked twice.
    ///
    /// # Errors
    /// [`MoveError`]
    pub async fn send(
        &self,
        to: &[Address],
        grant: &Grant,
        pages: &[Placed],
        patience: Duration,
    ) -> Result<(), MoveError> {
        let deadline = Instant::now() + patience;
        if timeout_at(deadline, digests(pages.to_vec())).await.is_err() {
            return Err(MoveError::Late);
        }
        let mut missing = pages.to_vec();
        let mut last = MoveError::NoPath;
        for attempt in 0..TRIES {
            if attempt > 0 && timeout_at(deadline, pause(attempt, grant.key)).await.is_err() {
                return Err(MoveError::Late);
            }
            let order = self.order(to);
            let Some(path) = order.get(attempt as usize % order.len().max(1)) else {
                break;
            };
            match timeout_at(deadline, self.over(path, grant, &missing)).await {
                Err(_) => {
                    self.failed(path);
                    return Err(MoveError::Late);
                }
                Ok(Ok(states)) => {
                    let corrupt = states.iter().filter(|s| **s == PageState::Corrupt).count();
                    if corrupt > 0 {
                        self.failed(path);
                    } else {
                        self.worked(path);
                    }
                    let open = |s: &PageState| matches!(s, PageState::Corrupt | PageState::Busy);
                    missing = states
                        .iter()
                        .zip(missing)
                        .filter(|(s, _)| open(s))
                        .map(|(_, page)| page)
                        .collect();
                    if missing.is_empty() {
                        return Ok(());
                    }
                    last = MoveError::Corrupt(missing.len());
                }
                Ok(Err(error)) => {
                    tracing::debug!(%path, %error, "pages not sent");
                    let path = path.clone();
                    if error.is_final() {
                        return Err(MoveError::Failed { path, error });
                    }
                    self.failed(&path);
                    last = MoveError::Failed { path, error };
                }
            }
        }
        Err(last)
    }

    async fn over(&self, path: &Address, grant: &Grant, pages: &[Placed]) -> Result<Vec<PageState>, SendError> {
        match path {
            Address::Verbs(at) => match &self.verbs {
                Some(verbs) => verbs.send(at, grant, pages).await,
                None => Err(io::Error::from(io::ErrorKind::Unsupported).into()),
            },
            Address::Tcp(at) => self.tcp.send(at, grant, pages).await,
            Address::Shm { path, .. } => self.shm.send(path, grant, pages).await,
        }
    }

    /// Shared memory before RDMA before TCP, and suspect paths behind all others.
    fn order(&self, to: &[Address]) -> Vec<Address> {
        let now = Instant::now();
        let health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        let usable = |a: &&Address| match a {
            Address::Tcp(_) => true,
            Address::Verbs(_) => self.verbs.is_some(),
            Address::Shm { host, .. } => self.host.as_ref() == Some(host),
        };
        let mut order: Vec<Address> = to.iter().filter(usable).cloned().collect();
        order.sort_by_key(|a| {
            let suspect = health
                .get(a)
                .and_then(|h| h.shunned_until)
                .is_some_and(|until| until > now);
            (suspect, a.clone())
        });
        order
    }

    fn worked(&self, path: &Address) {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).remove(path);
    }

    fn failed(&self, path: &Address) {
        let now = Instant::now();
        let mut all = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= PATHS_MAX && !all.contains_key(path) {
            all.clear();
        }
        let health = all.entry(path.clone()).or_default();
        health.failures.retain(|at| now.duration_since(*at) < WINDOW);
        health.failures.push(now);
        health.row = health.row.saturating_add(1);
        if health.failures.len() >= FAILURES {
            let doublings = health.row.saturating_sub(FAILURES as u32).min(6);
            let shun = (SHUN * (1 << doublings)).min(SHUN_MAX);
            if health.shunned_until.is_none() {
                tracing::warn!(%path, ?shun, "the path to a peer's pages is suspect: others go first");
            }
            health.shunned_until = Some(now + shun);
            health.failures.drain(..health.failures.len() - FAILURES);
        }
    }
}

/// Computes the digests that are not known yet, on a thread of their own: many pages take as long as many messages.
async fn digests(pages: Vec<Placed>) {
    let work = tokio::task::spawn_blocking(move || {
        for (_, page) in &pages {
            page.digest();
        }
    });
    // Without them they are computed where they are sent.
    let _ = work.await;
}

/// Longer before each try, and never the same for two transfers at once.
async fn pause(attempt: u32, key: u64) {
    let base = PAUSE * (1 << attempt.min(6));
    let jitter = key.rotate_left(attempt * 7) % 100;
    tokio::time::sleep(base.mul_f64(0.75 + jitter as f64 / 200.0)).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grant::Inbox;
    use crate::tcp;
    use crate::testing::{page, pool};
    use pinion_schemas::{Epoch, Micros};

    #[test]
    fn addresses_are_read_as_they_are_written() {
        let here = host().unwrap_or_else(|| "here".into());
        for text in [
            "tcp://127.0.0.1:80".to_owned(),
            "tcp://[::1]:80".to_owned(),
            "verbs://10.0.0.7:7401".to_owned(),
            format!("shm://{here}/run/x.sock"),
        ] {
            assert_eq!(text.parse::<Address>().map(|a| a.to_string()), Ok(text));
        }
        for bad in [
            "",
            "tcp://",
            "tcp://host:1",
            "shm://",
            "shm:///x",
            "verbs://",
            "udp://1.2.3.4:5",
        ] {
            let error = bad.parse::<Address>().unwrap_err();
            assert!(error.to_string().contains("tcp://IP:PORT"), "{error}");
        }
    }

    /// A port where nobody listens.
    async fn dead() -> Address {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        Address::Tcp(listener.local_addr().unwrap())
    }

    async fn alive(inbox: &Inbox) -> Address {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        tokio::spawn(tcp::serve(listener, inbox.clone()));
        Address::Tcp(at)
    }

    #[tokio::test]
    async fn a_path_that_fails_is_left_for_another_and_soon_comes_last() {
        let from = pool(1);
        let inbox = Inbox::new(pool(1), Epoch(1));
        let (dead, alive) = (dead().await, alive(&inbox).await);
        let paths = Paths::new(&from);
        let sent = [(0, page(&from, 1))];
        let patience = Duration::from_secs(10);
        for _ in 0..FAILURES {
            let grant = inbox.grant(1, 1, Micros(1)).unwrap();
            let both = [dead.clone(), alive.clone()];
            paths.send(&both, &grant, &sent, patience).await.unwrap();
            assert!(inbox.take(grant.id)[0].is_some());
            paths.failed(&dead);
        }
        assert_eq!(
            paths.order(&[dead.clone(), alive.clone()]),
            [alive.clone(), dead.clone()]
        );
        let only = inbox.grant(1, 1, Micros(1)).unwrap();
        let error = paths
            .send(std::slice::from_ref(&dead), &only, &sent, patience)
            .await
            .unwrap_err();
        assert!(matches!(error, MoveError::Failed { .. }), "{error}");
        paths.worked(&dead);
        assert!(paths.health.lock().unwrap().is_empty(), "one success forgives all");
    }

    #[tokio::test]
    async fn who_refuses_is_not_asked_twice_and_who_is_nowhere_is_not_asked() {
        let from = pool(1);
        let inbox = Inbox::new(pool(1), Epoch(1));
        let alive = alive(&inbox).await;
        let paths = Paths::new(&from);
        let grant = inbox.grant(1, 1, Micros(1)).unwrap();
        inbox.take(grant.id);
        let sent = [(0, page(&from, 1))];
        let refused = paths.send(&[alive], &grant, &sent, Duration::from_secs(9)).await;
        assert!(
            matches!(
                refused,
                Err(MoveError::Failed {
                    error: SendError::Refused(_),
                    ..
                })
            ),
            "{refused:?}"
        );
        let elsewhere = Address::Shm {
            host: "another-boot".into(),
            path: "/x".into(),
        };
        let unreachable = [elsewhere, "verbs://127.0.0.1:1".parse().unwrap()];
        let nowhere = paths.send(&unreachable, &grant, &sent, Duration::from_secs(9)).await;
        assert!(matches!(nowhere, Err(MoveError::NoPath)), "{nowhere:?}");
    }
}
