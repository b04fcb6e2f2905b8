//! The long-running roles: gateway, control node, agent.

use crate::config::Config;
use crate::model::{self, Assumed, Served};
use anyhow::{Context as _, bail};
use pinion_actors::control::Control;
use pinion_actors::router::RouterConfig;
use pinion_actors::shell::Context;
use pinion_bus::Bus;
use pinion_bus::nats::NatsBus;
use pinion_gateway::GatewayConfig;
use pinion_gpu_agent::engine::native::{Model, NativeEngine};
use pinion_gpu_agent::node::{Worker, WorkerRole, start_native_worker, start_sim_worker};
use pinion_schemas::{Epoch, WorkerId};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio_util::sync::CancellationToken;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Ends when the process is asked to: Ctrl-C or SIGTERM.
async fn asked_to_stop() {
    let mut terminate = match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        Ok(signal) => signal,
        Err(error) => {
            tracing::warn!(%error, "SIGTERM ends this process without a clean stop");
            let _ = tokio::signal::ctrl_c().await;
            return;
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}

async fn connect(config: &Config, name: &str) -> anyhow::Result<Arc<NatsBus>> {
    let bus = NatsBus::connect(config.nats_options(name)?).await.with_context(|| {
        format!(
            "NATS is not reachable at {}: start it or set nats.urls",
            config.nats.urls.join(", ")
        )
    })?;
    Ok(Arc::new(bus))
}

/// The wall clock orders the lives of one name: a later start has a higher epoch.
fn wall_clock() -> anyhow::Result<Epoch> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Ok(Epoch(now.context("the clock is before 1970")?.as_millis() as u64))
}

/// `pinion gateway`.
pub async fn gateway(config: &Config, id: &str) -> anyhow::Result<()> {
    let id = WorkerId::new(id).context("in --id")?;
    let model = Served::open(config)?;
    let bus = connect(config, id.as_str()).await?;
    let metadata = HashMap::from([
        ("id".to_owned(), id.to_string()),
        ("model".to_owned(), model.name.clone()),
    ]);
    let _service = bus
        .serve("pinion-gateway", VERSION, "HTTP front of Pinion", metadata)
        .await?;
    let listen = config.gateway.listen;
    let listener = tokio::net::TcpListener::bind(listen)
        .await
        .with_context(|| format!("cannot listen on {listen}: is another gateway running? set gateway.listen"))?;
    let mut gateway = GatewayConfig::new(listen, config.cluster()?, id, model.name);
    gateway.context_tokens = model.context_tokens.unwrap_or(gateway.context_tokens);
    gateway.max_prompt_tokens = config.gateway.max_prompt_tokens;
    gateway.request_timeout = Duration::from_secs(config.gateway.request_timeout_secs);
    gateway.page_tokens = config.engine.page_tokens;
    let shutdown = CancellationToken::new();
    let stop = shutdown.clone();
    tokio::spawn(async move {
        asked_to_stop().await;
        stop.cancel();
    });
    tracing::info!(%listen, "gateway is up");
    pinion_gateway::serve(gateway, model.tokenizer, bus as Arc<dyn Bus>, listener, shutdown).await?;
    Ok(())
}

/// `pinion control`.
pub async fn control(config: &Config, id: &str) -> anyhow::Result<()> {
    let control = WorkerId::new(id).context("in --id")?;
    let bus = connect(config, control.as_str()).await?;
    let metadata = HashMap::from([("id".to_owned(), control.to_string())]);
    let _service = bus
        .serve("pinion-control", VERSION, "router and sessions of Pinion", metadata)
        .await?;
    let assumed = Assumed::of(config)?;
    let router = RouterConfig {
        cluster: config.cluster()?,
        control,
        page_tokens: assumed.page_tokens,
        page_bytes: assumed.page_bytes,
        route: config.route,
        index_pages_max: config.index_pages_max,
        prefill_tokens_per_s: assumed.prefill_tokens_per_s,
        link_bytes_per_s: assumed.link_bytes_per_s,
        backups: config.backups,
    };
    let mut running = Control::start(router, wall_clock()?, Context::new(bus))
        .await
        .context("the control node does not start")?;
    tracing::info!("control node is up");
    tokio::select! {
        () = asked_to_stop() => {}
        () = running.broken() => bail!("an actor has ended: see above; start this node again"),
    }
    running.leave().await;
    Ok(())
}

/// `pinion agent`.
pub async fn agent(config: &Config, id: &str, role: WorkerRole) -> anyhow::Result<()> {
    let worker = WorkerId::new(id).context("in --id")?;
    model::check(config)?;
    let bus = connect(config, worker.as_str()).await?;
    let epoch = wall_clock()?;
    let (service, engine) = match role {
        WorkerRole::Prefill => ("pinion-prefill", config.prefill_engine.clone()),
        WorkerRole::Decode => ("pinion-decode", config.engine.clone()),
    };
    let metadata = HashMap::from([
        ("id".to_owned(), worker.to_string()),
        ("epoch".to_owned(), epoch.to_string()),
    ]);
    let _service = bus.serve(service, VERSION, "a worker of Pinion", metadata).await?;
    let who = Worker {
        cluster: config.cluster()?,
        name: worker,
        role,
        epoch,
    };
    let context = Context::new(bus);
    let (actor, ended) = match config.model.file()? {
        None => start_sim_worker(who, engine, context)
            .await
            .context("the worker does not start")?,
        Some(file) => {
            let engine = NativeEngine::new(Model::load(file)?, config.native.clone(), &who.name, epoch)?;
            start_native_worker(who, engine, &config.plane, context).await?
        }
    };
    tracing::info!(%epoch, ?role, "worker is up");
    tokio::select! {
        () = asked_to_stop() => {}
        _ = ended => bail!("the worker has ended: see above; start it again"),
    }
    actor.stop(None);
    Ok(())
}
