//! A control node: router, sessions and the keeper of its leases, together.

use crate::lease::Keeper;
use crate::router::{Router, RouterConfig};
use crate::sessions::{ROUTER, SESSIONS, Sessions, SessionsConfig};
use crate::shell::{self, Context, Envelope};
use pinion_core::plan::Costs;
use pinion_schemas::Epoch;
use pinion_schemas::limits::DIRECT_APPEND_TOKENS_MAX;
use ractor::ActorRef;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// What a node that leaves leaves itself to free its leases.
const LEAVE: Duration = Duration::from_secs(2);
/// Then, to tell its clients that they have to look for another owner.
const FAREWELL: Duration = Duration::from_millis(100);

/// A running control node.
pub struct Control {
    actors: Vec<ActorRef<Envelope>>,
    keeper: JoinHandle<()>,
    leave: watch::Sender<bool>,
    running: JoinSet<()>,
}

impl Control {
    /// Starts one. `birth` is which life of the node it is: milliseconds of the wall clock now.
    ///
    /// # Errors
    /// If an actor does not start.
    pub async fn start(config: RouterConfig, birth: Epoch, context: Context) -> Result<Self, ractor::SpawnErr> {
        let sessions = SessionsConfig {
            cluster: config.cluster.clone(),
            control: config.control.clone(),
            costs: Costs {
                page_tokens: config.page_tokens,
                page_bytes: config.page_bytes,
                prefill_tokens_per_s: config.prefill_tokens_per_s,
                link_bytes_per_s: config.link_bytes_per_s,
                direct_append_tokens_max: DIRECT_APPEND_TOKENS_MAX,
            },
            birth,
            backups: config.backups,
        };
        let keeper = Keeper::new(config.control.clone(), birth, context.clone());
        let mut running = JoinSet::new();
        let mut actors = Vec::new();
        for (actor, handle) in [
            shell::spawn(ROUTER, Router::new(config), context.clone()).await?,
            shell::spawn(SESSIONS, Sessions::new(sessions), context).await?,
        ] {
            actors.push(actor);
            running.spawn(async move {
                // An error is a panic; that it ended is all that counts.
                let _ = handle.await;
            });
        }
        let (leave, left) = watch::channel(false);
        Ok(Self {
            actors,
            keeper: tokio::spawn(keeper.keep(left)),
            leave,
            running,
        })
    }

    /// Waits until one of its actors ends, which they do only by a bug. A node without one is no node: it has to end as a
    /// whole, so that its leases run out and whoever watches processes starts it anew.
    pub async fn broken(&mut self) {
        self.running.join_next().await;
        self.stop();
    }

    /// Hands its shards back, so that the next owner need not wait for the leases to run out, and stops.
    pub async fn leave(mut self) {
        self.leave.send_replace(true);
        if tokio::time::timeout(LEAVE, &mut self.keeper).await.is_err() {
            tracing::warn!("leases not handed back: they run out by themselves");
        }
        tokio::time::sleep(FAREWELL).await;
        self.stop();
    }

    /// Stops at once; the leases run out by themselves.
    pub fn stop(&self) {
        self.keeper.abort();
        for actor in &self.actors {
            actor.stop(None);
        }
    }
}
