//! A control node: router, sessions and the keeper of its leases, together.

use crate::lease;
use crate::router::{Router, RouterConfig};
use crate::sessions::{ROUTER, SESSIONS, Sessions, SessionsConfig};
use crate::shell::{self, Context, Envelope};
use ractor::ActorRef;
use tokio::task::JoinHandle;

/// A running control node.
pub struct Control {
    actors: Vec<ActorRef<Envelope>>,
    keeper: JoinHandle<()>,
}

impl Control {
    /// Starts one.
    ///
    /// # Errors
    /// If an actor does not start.
    pub async fn start(config: RouterConfig, context: Context) -> Result<Self, ractor::SpawnErr> {
        let sessions = SessionsConfig {
            cluster: config.cluster.clone(),
            control: config.control.clone(),
            page_tokens: config.page_tokens,
        };
        let control = config.control.clone();
        let (router, _) = shell::spawn(ROUTER, Router::new(config), context.clone()).await?;
        let (sessions, _) = shell::spawn(SESSIONS, Sessions::new(sessions), context.clone()).await?;
        let keeper = tokio::spawn(lease::keep(control, context));
        Ok(Self {
            actors: vec![router, sessions],
            keeper,
        })
    }

    /// Stops at once; the leases run out by themselves.
    pub fn stop(&self) {
        self.keeper.abort();
        for actor in &self.actors {
            actor.stop(None);
        }
    }
}
