//! What can be made to go wrong, and how it is done to a simulated cluster.

use bytes::Bytes;
use pinion_bus::sim::{Faults, Restart, SERVER};
use pinion_bus::{BusError, Headers};
use pinion_gpu_agent::node::WorkerRole;
use pinion_gpu_agent::world::{Cluster, WorldError};
use pinion_schemas::subject::Kind;
use pinion_schemas::{Micros, WorkerId};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;
use tokio::task::AbortHandle;

/// An operator asks again after this time, and gives up after so many tries: longer than any fault lasts.
const DRAIN_PATIENCE: Duration = Duration::from_secs(1);
const DRAIN_TRIES: u32 = 60;

/// One kind of thing that goes wrong, with whom it concerns.
#[derive(Clone, Debug)]
pub enum Fault {
    /// A process dies, and another is started in its place at the end.
    Crash(String),
    /// A process does nothing for a while, as in a long garbage collection.
    Stop(String),
    /// Nothing passes between two endpoints (one may be the server), or only one way.
    Cut {
        /// What it sends is lost.
        from: String,
        /// What is sent to it is.
        to: String,
        /// Also the other way.
        both: bool,
    },
    /// An endpoint is heard by all and hears nobody.
    CutIn(String),
    /// Messages of and to an endpoint come late.
    Lag {
        /// Which.
        node: String,
        /// By how much.
        millis: u64,
    },
    /// The whole network is bad; consumers are slow.
    Weather(Faults),
    /// The server restarts.
    Restart {
        /// Whether clients see that.
        noticed: bool,
        /// Acknowledged writes that are lost.
        lose_writes: usize,
    },
    /// The store loses acknowledged writes.
    LoseWrites(usize),
    /// An engine's step loop blocks.
    EngineStall(String),
    /// An engine dies and is empty.
    EngineCrash(String),
    /// Nothing passes a worker's link to the others.
    LinkStuck(String),
    /// It is slow.
    LinkSlow {
        /// Whose.
        node: String,
        /// How many times as slow.
        times: u64,
    },
    /// Bits flip on it.
    Corrupt(String),
    /// A decode worker is told to drain, and at the end that it need not.
    Drain(String),
}

impl Fault {
    /// Every kind, by its word.
    pub const KINDS: [&'static str; 14] = [
        "crash",
        "stop",
        "cut",
        "cut-in",
        "lag",
        "weather",
        "restart",
        "lose-writes",
        "engine-stall",
        "engine-crash",
        "link-stuck",
        "link-slow",
        "corrupt",
        "drain",
    ];

    /// Its kind in a word.
    pub const fn kind(&self) -> &'static str {
        let place = match self {
            Self::Crash(_) => 0,
            Self::Stop(_) => 1,
            Self::Cut { .. } => 2,
            Self::CutIn(_) => 3,
            Self::Lag { .. } => 4,
            Self::Weather(_) => 5,
            Self::Restart { .. } => 6,
            Self::LoseWrites(_) => 7,
            Self::EngineStall(_) => 8,
            Self::EngineCrash(_) => 9,
            Self::LinkStuck(_) => 10,
            Self::LinkSlow { .. } => 11,
            Self::Corrupt(_) => 12,
            Self::Drain(_) => 13,
        };
        Self::KINDS[place]
    }

    /// Whom it concerns; empty: everybody.
    pub fn nodes(&self) -> Vec<&str> {
        match self {
            Self::Crash(n)
            | Self::Stop(n)
            | Self::CutIn(n)
            | Self::EngineStall(n)
            | Self::EngineCrash(n)
            | Self::LinkStuck(n)
            | Self::Corrupt(n)
            | Self::Drain(n) => vec![n],
            Self::Lag { node, .. } | Self::LinkSlow { node, .. } => vec![node],
            Self::Cut { from, to, .. } if to == SERVER => vec![from],
            Self::Cut { from, to, .. } => vec![from, to],
            Self::Weather(_) | Self::Restart { .. } | Self::LoseWrites(_) => Vec::new(),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cut { from, to, both } => {
                let way = if *both { "and" } else { "to" };
                write!(f, "cut {from} {way} {to}")
            }
            Self::Lag { node, millis } => write!(f, "lag {node} by {millis} ms"),
            Self::Weather(w) => write!(
                f,
                "weather: {:?}, loss {}, twice {}, capacity {}",
                w.latency_max, w.loss, w.duplication, w.subscription_capacity
            ),
            Self::Restart { noticed, lose_writes } => {
                write!(f, "restart, noticed {noticed}, {lose_writes} writes lost")
            }
            Self::LoseWrites(n) => write!(f, "lose {n} writes"),
            Self::LinkSlow { node, times } => write!(f, "link of {node} {times} times slower"),
            _ => write!(f, "{} {}", self.kind(), self.nodes().join(" ")),
        }
    }
}

/// A fault with its time.
#[derive(Clone, Debug)]
pub struct Planned {
    /// When it begins, after the cluster stands.
    pub at: Duration,
    /// How long it lasts.
    pub lasts: Duration,
    /// What it is.
    pub fault: Fault,
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (at, lasts) = (self.at.as_secs_f64(), self.lasts.as_secs_f64());
        write!(f, "{at:.3} s, for {lasts:.3} s: {}", self.fault)
    }
}

/// Does faults to a cluster and takes them back.
pub struct Breaker {
    /// The network when nothing is wrong.
    fair: Faults,
    /// Operators who tell a worker to drain or not.
    drains: BTreeMap<String, AbortHandle>,
}

/// Whose process has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Process {
    /// It is dead.
    Dead(String),
    /// It lives, in this epoch.
    Born(String, u64),
}

impl Breaker {
    /// Of a cluster whose network is like this when nothing is wrong.
    pub fn new(fair: Faults) -> Self {
        Self {
            fair,
            drains: BTreeMap::new(),
        }
    }

    /// Begins a fault.
    ///
    /// # Errors
    /// [`WorldError`], which says that the plan makes no sense.
    pub fn begin(&mut self, cluster: &mut Cluster, planned: &Planned) -> Result<Option<Process>, WorldError> {
        let net = cluster.net.clone();
        let until = |now: Micros| now.plus(Micros(planned.lasts.as_micros() as u64));
        match &planned.fault {
            Fault::Crash(node) if cluster.runs(node) => {
                cluster.kill(node)?;
                return Ok(Some(Process::Dead(node.clone())));
            }
            Fault::Crash(_) => {}
            Fault::Stop(node) => net.stop(node, true),
            Fault::Cut { from, to, both: true } => net.partition(from, to),
            Fault::Cut { from, to, both: false } => net.cut_one_way(from, to),
            Fault::CutIn(node) => net.cut_one_way(SERVER, node),
            Fault::Lag { node, millis } => net.lag(node, Duration::from_millis(*millis)),
            Fault::Weather(weather) => net.set_faults(weather.clone()),
            Fault::Restart { noticed, lose_writes } => net.restart(Restart {
                down: planned.lasts,
                noticed: *noticed,
                lose_writes: *lose_writes,
            }),
            Fault::LoseWrites(writes) => net.lose_writes(*writes),
            // One that is dead has no engine.
            Fault::EngineStall(node)
            | Fault::EngineCrash(node)
            | Fault::LinkStuck(node)
            | Fault::LinkSlow { node, .. }
            | Fault::Corrupt(node)
                if !cluster.runs(node) => {}
            Fault::EngineStall(node) => {
                let (engine, _, now) = cluster.trouble(node)?;
                engine.stall(until(now));
            }
            Fault::EngineCrash(node) => cluster.trouble(node)?.0.crash(),
            Fault::LinkStuck(node) => {
                let (_, link, now) = cluster.trouble(node)?;
                link.stick(until(now));
            }
            Fault::LinkSlow { node, times } => cluster.trouble(node)?.1.slow(*times),
            Fault::Corrupt(node) => cluster.trouble(node)?.1.corrupt(true),
            Fault::Drain(node) => self.drain(cluster, node, "on"),
        }
        Ok(None)
    }

    /// Ends it, `now` after the cluster's start.
    ///
    /// # Errors
    /// [`WorldError`], if a process does not start again.
    pub async fn end(
        &mut self,
        now: Micros,
        cluster: &mut Cluster,
        fault: &Fault,
    ) -> Result<Option<Process>, WorldError> {
        let net = cluster.net.clone();
        match fault {
            Fault::Crash(node) if !cluster.runs(node) => {
                // Milliseconds of the wall clock, as in production.
                let epoch = 1 + now.as_millis();
                match node.chars().next() {
                    Some('c') => cluster.control(node, epoch).await?,
                    Some('p') => cluster.worker(node, WorkerRole::Prefill, epoch).await?,
                    _ => cluster.worker(node, WorkerRole::Decode, epoch).await?,
                }
                return Ok(Some(Process::Born(node.clone(), epoch)));
            }
            Fault::Stop(node) => net.stop(node, false),
            Fault::Cut { from, to, .. } => net.heal(from, to),
            Fault::CutIn(node) => net.heal(SERVER, node),
            Fault::Lag { node, .. } => net.lag(node, Duration::ZERO),
            Fault::Weather(_) => net.set_faults(self.fair.clone()),
            Fault::LinkSlow { node, .. } if cluster.runs(node) => cluster.trouble(node)?.1.slow(1),
            Fault::Corrupt(node) if cluster.runs(node) => cluster.trouble(node)?.1.corrupt(false),
            Fault::Drain(node) => self.drain(cluster, node, "off"),
            _ => {}
        }
        Ok(None)
    }

    /// Tells a decode worker to drain or not, again until it hears or is not there.
    fn drain(&mut self, cluster: &Cluster, node: &str, word: &'static str) {
        let Ok(worker) = WorkerId::new(node) else { return };
        let subject = cluster
            .subjects
            .worker(Kind::Decode, &worker, "drain")
            .as_str()
            .to_owned();
        let bus = cluster.client.clone();
        let told = tokio::spawn(async move {
            for _ in 0..DRAIN_TRIES {
                let word = Bytes::from_static(word.as_bytes());
                match bus.request(&subject, Headers::new(), word, DRAIN_PATIENCE).await {
                    Ok(_) | Err(BusError::NoResponders { .. }) => return,
                    Err(_) => tokio::time::sleep(DRAIN_PATIENCE).await,
                }
            }
        });
        if let Some(before) = self.drains.insert(node.to_owned(), told.abort_handle()) {
            before.abort();
        }
    }
}
