//! The HTTP front of Pinion: one request in, one turn on the bus, one gapless stream out.
//!
//! A request takes this way: [`http`] reads it, `params` checks what it sets, `prompt` makes it tokens with the model's
//! [`tokenizer`], [`identity`] finds its session, [`turn`] brings it to the control node that [`owners`] knows and back (in
//! steps of `link`), and `reply` tells it to the client, up to a text of `stop`.
//! A gateway holds no truth: kill it, and only its own clients notice.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt;
use pinion_bus::Bus;
use pinion_schemas::limits::PAGE_TOKENS;
use pinion_schemas::subject::Subjects;
use pinion_schemas::{ClusterId, WorkerId};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

pub mod error;
pub mod http;
pub mod identity;
mod link;
pub mod metrics;
pub mod openai;
pub mod owners;
mod params;
mod prompt;
mod reply;
mod stop;
pub mod tokenizer;
pub mod turn;

use metrics::Metrics;
use owners::{LeaseOwners, Owners};
use tokenizer::Tokenizer;

/// How long `/health` waits for the bus.
pub(crate) const HEALTH_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a client may take to send its body.
pub(crate) const BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// How long running turns may go on after the shutdown was asked for.
const DRAIN: Duration = Duration::from_secs(10);
/// Then, how long it takes to tell clients and owners that the rest is given up.
const FAREWELL: Duration = Duration::from_millis(200);

/// How a gateway is set up.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// Where to listen; for whoever makes the listener.
    pub listen: SocketAddr,
    /// The one model served.
    pub model: String,
    /// Longest prompt, in tokens. [`http::TURN_TOKENS_MAX`] holds besides.
    pub max_prompt_tokens: u32,
    /// What prompt and answer may have together, in tokens: the model's context. [`http::TURN_TOKENS_MAX`] holds besides.
    pub context_tokens: u32,
    /// Tokens generated when a request names no limit.
    pub default_max_tokens: u32,
    /// Longest body of a request, in bytes.
    pub max_body_bytes: usize,
    /// Time from a request to the end of its turn.
    pub request_timeout: Duration,
    /// Time within which some control node must accept the turn.
    pub accept_timeout: Duration,
    /// Silence on a stream after which a comment is sent; also the wait for a first token before the headers go out.
    pub keep_alive: Duration,
    /// Turns that may run at once; above, clients get 429.
    pub max_turns: usize,
    /// Tokens per page, as everywhere in the cluster.
    pub page_tokens: u32,
    /// Name of this gateway.
    pub id: WorkerId,
    /// The cluster.
    pub cluster: ClusterId,
}

impl GatewayConfig {
    /// The usual limits.
    pub fn new(listen: SocketAddr, cluster: ClusterId, id: WorkerId, model: impl Into<String>) -> Self {
        Self {
            listen,
            model: model.into(),
            max_prompt_tokens: 200_000,
            context_tokens: u32::MAX,
            default_max_tokens: 256,
            max_body_bytes: 16 << 20,
            request_timeout: Duration::from_mins(10),
            accept_timeout: Duration::from_secs(10),
            keep_alive: Duration::from_secs(15),
            max_turns: 4_096,
            page_tokens: PAGE_TOKENS,
            id,
            cluster,
        }
    }
}

/// A gateway's parts, shared by all its requests.
pub struct Gateway {
    pub(crate) config: GatewayConfig,
    pub(crate) reach: Arc<turn::Reach>,
    pub(crate) tokenizer: Arc<dyn Tokenizer>,
    pub(crate) tips: identity::Tips,
    pub(crate) turns: Arc<Semaphore>,
    /// Unix seconds of the start.
    pub(crate) started: u64,
}

impl Gateway {
    /// A gateway with its own way to find owners and its own tokenizer.
    pub fn new(
        config: GatewayConfig,
        bus: Arc<dyn Bus>,
        owners: Arc<dyn Owners>,
        tokenizer: Arc<dyn Tokenizer>,
    ) -> Self {
        Self {
            reach: Arc::new(turn::Reach {
                bus,
                subjects: Subjects::new(&config.cluster),
                owners,
                metrics: Arc::new(Metrics::default()),
                closing: CancellationToken::new(),
            }),
            tokenizer,
            tips: identity::Tips::new(config.page_tokens, identity::TIPS_MAX),
            turns: Arc::new(Semaphore::new(config.max_turns.min(Semaphore::MAX_PERMITS))),
            started: http::unix_seconds(),
            config,
        }
    }

    /// What prompt and answer may have together, in tokens.
    pub(crate) fn turn_tokens_max(&self) -> usize {
        http::TURN_TOKENS_MAX.min(self.config.context_tokens as usize)
    }

    /// Longest prompt, in tokens: one at least is left for the answer.
    pub(crate) fn prompt_tokens_max(&self) -> usize {
        (self.config.max_prompt_tokens as usize).min(self.turn_tokens_max().saturating_sub(1))
    }

    /// Serves until `shutdown`; then takes no new connections and gives running turns ten seconds. What is not done by then is
    /// cancelled, and its client told.
    ///
    /// # Errors
    /// What the listener says.
    pub async fn serve(self, listener: TcpListener, shutdown: CancellationToken) -> std::io::Result<()> {
        let listener = listener.tap_io(|socket| {
            if let Err(error) = socket.set_nodelay(true) {
                tracing::debug!(%error, "TCP_NODELAY");
            }
        });
        let (drained, closing) = (shutdown.clone(), self.reach.closing.clone());
        let server = axum::serve(listener, http::router(Arc::new(self)));
        let ended = tokio::select! {
            ended = server.with_graceful_shutdown(shutdown.cancelled_owned()) => ended,
            () = async {
                drained.cancelled().await;
                tokio::time::sleep(DRAIN).await;
                closing.cancel();
                tokio::time::sleep(FAREWELL).await;
            } => Ok(()),
        };
        // What was sent last, cancels among it, is on its way.
        tokio::time::sleep(FAREWELL).await;
        ended
    }
}

/// Serves a model with its tokenizer, owners by shard leases, until `shutdown`.
///
/// # Errors
/// What the listener says.
pub async fn serve(
    config: GatewayConfig,
    tokenizer: Arc<dyn Tokenizer>,
    bus: Arc<dyn Bus>,
    listener: TcpListener,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let owners = Arc::new(LeaseOwners::new(Arc::clone(&bus)));
    Gateway::new(config, bus, owners, tokenizer)
        .serve(listener, shutdown)
        .await
}
