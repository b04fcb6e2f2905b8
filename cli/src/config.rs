//! The one configuration file of all roles.

use crate::model::Model;
use anyhow::{Context as _, bail};
use pinion_bus::nats::{Auth, NatsOptions};
use pinion_core::route;
use pinion_gpu_agent::engine::native::NativeConfig;
use pinion_gpu_agent::engine::sim::SimConfig;
use pinion_gpu_agent::plane::PlaneConfig;
use pinion_schemas::{BackupTargets, ClusterId};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Everything that can be set. Every field has a default; an unknown key is an error that names it and its line.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Name of the cluster: the second token of every subject.
    pub cluster: String,
    /// How to reach NATS.
    pub nats: Nats,
    /// The HTTP front.
    pub gateway: Gateway,
    /// What computes.
    pub model: Model,
    /// How sessions find workers.
    pub route: route::Config,
    /// Which prefill workers back sessions up: `off`, `last-p`, `round-robin` or `broadcast`.
    pub backups: BackupTargets,
    /// Pages the router's index may hold: at most 57 bytes each.
    pub index_pages_max: usize,
    /// How pages of KV move between nodes, with the engine `native`.
    pub plane: PlaneConfig,
    /// The engine `native`.
    pub native: NativeConfig,
    /// The simulated engine of decode workers.
    pub engine: SimConfig,
    /// The simulated engine of prefill workers.
    pub prefill_engine: SimConfig,
}

/// Section `[nats]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nats {
    /// Servers, `nats://host:port` or `tls://…`.
    pub urls: Vec<String>,
    /// File with a JWT and its nkey seed.
    pub credentials: Option<PathBuf>,
    /// File with an nkey seed (`SU…`).
    pub nkey_file: Option<PathBuf>,
    /// Root certificates (PEM); requires TLS.
    pub tls_root: Option<PathBuf>,
    /// Replicas of the key-value bucket, if it has to be made.
    pub kv_replicas: usize,
}

/// Section `[gateway]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gateway {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Name of the model. Default: `pinion-sim`, or that of the model's file without its ending.
    pub model: Option<String>,
    /// Longest prompt, tokens.
    pub max_prompt_tokens: u32,
    /// Longest time of a turn, seconds.
    pub request_timeout_secs: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            cluster: "local".into(),
            nats: Nats::default(),
            gateway: Gateway::default(),
            model: Model::default(),
            route: route::Config::default(),
            backups: BackupTargets::LastPrefill,
            index_pages_max: 10_000_000,
            plane: PlaneConfig::default(),
            native: NativeConfig::default(),
            engine: SimConfig::default(),
            prefill_engine: SimConfig::default(),
        }
    }
}

impl Default for Nats {
    fn default() -> Self {
        let urls = vec!["nats://127.0.0.1:4222".into()];
        Self {
            urls,
            credentials: None,
            nkey_file: None,
            tls_root: None,
            kv_replicas: 1,
        }
    }
}

impl Default for Gateway {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            model: None,
            max_prompt_tokens: 1_000_000,
            request_timeout_secs: 600,
        }
    }
}

impl Config {
    /// Reads a file; without one, the defaults.
    pub fn read(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else { return Ok(Self::default()) };
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let config: Self =
            toml::from_str(&text).with_context(|| format!("{} is not a valid configuration", path.display()))?;
        config.cluster()?;
        if config.engine.page_tokens != config.prefill_engine.page_tokens {
            bail!(
                "engine.page_tokens is {} and prefill_engine.page_tokens is {}: make them equal, pages move between the two",
                config.engine.page_tokens,
                config.prefill_engine.page_tokens
            );
        }
        Ok(config)
    }

    /// The cluster's name, checked.
    pub fn cluster(&self) -> anyhow::Result<ClusterId> {
        ClusterId::new(self.cluster.clone()).context("in the key `cluster`")
    }

    /// Options for a connection called `name`.
    pub fn nats_options(&self, name: &str) -> anyhow::Result<NatsOptions> {
        let Some(first) = self.nats.urls.first() else {
            bail!("nats.urls is empty: name at least one server, such as nats://127.0.0.1:4222");
        };
        let mut options = NatsOptions::new(first, name);
        options.urls.clone_from(&self.nats.urls);
        options.tls_root.clone_from(&self.nats.tls_root);
        options.kv_bucket = Some(format!("pinion-{}", self.cluster));
        options.kv_replicas = self.nats.kv_replicas;
        options.auth = match (&self.nats.credentials, &self.nats.nkey_file) {
            (Some(_), Some(_)) => bail!("nats.credentials and nats.nkey_file are both set: keep one"),
            (Some(file), None) => Auth::CredentialsFile(file.clone()),
            (None, Some(file)) => {
                let seed = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
                Auth::Nkey(seed.trim().to_owned())
            }
            (None, None) => Auth::None,
        };
        Ok(options)
    }
}
