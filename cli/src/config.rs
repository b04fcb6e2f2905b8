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
        config.check_counts()?;
        if config.engine.page_tokens != config.prefill_engine.page_tokens {
            bail!(
                "engine.page_tokens is {} and prefill_engine.page_tokens is {}: make them equal, pages move between the two",
                config.engine.page_tokens,
                config.prefill_engine.page_tokens
            );
        }
        Ok(config)
    }

    /// Refuses a zero where there must be something.
    fn check_counts(&self) -> anyhow::Result<()> {
        let mut counts = vec![
            ("native.pool_pages".to_owned(), u64::from(self.native.pool_pages)),
            ("native.page_tokens".to_owned(), u64::from(self.native.page_tokens)),
            ("native.max_jobs".to_owned(), self.native.max_jobs as u64),
            ("index_pages_max".to_owned(), self.index_pages_max as u64),
            (
                "gateway.max_prompt_tokens".to_owned(),
                u64::from(self.gateway.max_prompt_tokens),
            ),
            (
                "gateway.request_timeout_secs".to_owned(),
                self.gateway.request_timeout_secs,
            ),
        ];
        for (section, engine) in [("engine", &self.engine), ("prefill_engine", &self.prefill_engine)] {
            counts.extend([
                (format!("{section}.page_tokens"), u64::from(engine.page_tokens)),
                (format!("{section}.device_pages"), engine.device_pages),
                (format!("{section}.max_jobs"), engine.max_jobs as u64),
                (format!("{section}.vocab"), u64::from(engine.vocab)),
                (
                    format!("{section}.cost.prefill_tokens_per_sec"),
                    engine.cost.prefill_tokens_per_sec,
                ),
                (
                    format!("{section}.cost.link_bytes_per_sec"),
                    engine.cost.link_bytes_per_sec,
                ),
            ]);
        }
        match counts.into_iter().find(|count| count.1 == 0) {
            Some((key, _)) => bail!("{key} is 0: give at least 1, or leave it out for the default"),
            None => Ok(()),
        }
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EXAMPLE: &str = include_str!("../../deploy/pinion.toml");

    fn read(text: &str) -> anyhow::Result<Config> {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let file = std::env::temp_dir().join(format!("pinion-config-{}-{number}.toml", std::process::id()));
        std::fs::write(&file, text)?;
        let config = Config::read(Some(&file));
        std::fs::remove_file(&file)?;
        config
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert!(read(EXAMPLE).is_ok());
        for (text, key) in [
            ("[engine]\ndevice_pages = 0", "engine.device_pages"),
            (
                "[prefill_engine.cost]\nlink_bytes_per_sec = 0",
                "prefill_engine.cost.link_bytes_per_sec",
            ),
            ("[native]\npool_pages = 0", "native.pool_pages"),
            ("[native]\npool_pagse = 1", "pool_pagse"),
            ("cluster = \"a b\"", "cluster"),
        ] {
            let error = format!("{:#}", read(text).unwrap_err());
            assert!(error.contains(key), "{error}");
        }
    }

    proptest! {
        /// A damaged file is read or refused.
        #[test]
        fn damaged_files_are_refused_or_read(at in any::<prop::sample::Index>(), bytes in "[\\[\\]0-9a-z=\"\n#._-]{0,6}", drop in 0_usize..20) {
            let at = at.index(EXAMPLE.len());
            let rest = EXAMPLE.get(at + drop..).unwrap_or_default();
            let _ = read(&format!("{}{bytes}{rest}", &EXAMPLE[..at]));
        }
    }
}
