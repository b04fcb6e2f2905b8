//! What computes, and with which model: `--engine` and `--model`, or section `[model]`.

use crate::config::Config;
use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use pinion_gateway::tokenizer::{ByteTokenizer, GgufTokenizer, Tokenizer};
use pinion_gpu_agent::engine::native;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where `make model` puts its model.
const FETCHED: &str = ".tools/models/SmolLM2-135M-Instruct.Q4_1.gguf";
/// Name of the simulated model.
const SIM: &str = "pinion-sim";

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// The simulated engine: no model, bytes as tokens.
    #[default]
    Sim,
    /// Our own engine on a model's GGUF file.
    Native,
}

/// Section `[model]`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// What computes: `sim` or `native`.
    pub engine: Engine,
    /// The model's GGUF file, for `native`.
    pub path: Option<PathBuf>,
}

/// The flags that stand above section `[model]`.
#[derive(Args, Clone, Debug, Default)]
pub struct ModelArgs {
    /// What computes. Default: what --config says; without it, `native` for `up` and `sim` for single roles.
    #[arg(long)]
    engine: Option<Engine>,
    /// The model's GGUF file, for --engine native. Default: the one that `make model` has fetched.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
}

impl ModelArgs {
    /// The native engine, unless another is named.
    pub fn or_native(&mut self) {
        self.engine = self.engine.or(Some(Engine::Native));
    }

    /// Puts the flags into the configuration.
    pub fn apply(&self, model: &mut Model) -> anyhow::Result<()> {
        if let Some(engine) = self.engine {
            model.engine = engine;
        }
        let fetched = || Some(PathBuf::from(FETCHED)).filter(|p| p.is_file());
        let found = match (model.engine, &model.path) {
            (Engine::Native, None) => fetched(),
            _ => None,
        };
        let Some(path) = self.model.as_ref().or(found.as_ref()) else {
            return Ok(());
        };
        if model.engine == Engine::Sim {
            bail!("--model means nothing to the engine `sim`: add --engine native, or leave it out");
        }
        // Other processes read it, perhaps from elsewhere.
        model.path = Some(std::path::absolute(path).with_context(|| format!("in --model {}", path.display()))?);
        Ok(())
    }
}

impl Model {
    /// The model's file; none for the simulated engine.
    pub fn file(&self) -> anyhow::Result<Option<&Path>> {
        match (self.engine, &self.path) {
            (Engine::Sim, _) => Ok(None),
            (Engine::Native, Some(path)) => Ok(Some(path)),
            (Engine::Native, None) => {
                bail!(
                    "the engine `native` needs a model: `make model` fetches a small one; give another's GGUF file with --model, or as \
                     model.path; --engine sim needs none"
                )
            }
        }
    }
}

/// A model as the gateway sees it.
pub struct Served {
    /// The name that clients give.
    pub name: String,
    /// Its text and its tokens.
    pub tokenizer: Arc<dyn Tokenizer>,
    /// Tokens that prompt and answer may have together, if the model limits them.
    pub context_tokens: Option<u32>,
}

impl Served {
    /// The model of this configuration. Reads the beginning of its file.
    pub fn open(config: &Config) -> anyhow::Result<Self> {
        let name = config.gateway.model.clone();
        let Some(file) = config.model.file()? else {
            return Ok(Self {
                name: name.unwrap_or_else(|| SIM.to_owned()),
                tokenizer: Arc::new(ByteTokenizer::new(config.engine.vocab)),
                context_tokens: None,
            });
        };
        let tokenizer = GgufTokenizer::open(file).with_context(|| format!("the model {}", file.display()))?;
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Self {
            name: name.unwrap_or_else(|| stem.into_owned()),
            context_tokens: tokenizer.context_tokens(),
            tokenizer: Arc::new(tokenizer),
        })
    }
}

/// Prefill speed that the router assumes of a native engine, tokens per second: what one core of a server does with the small
/// model that `make model` fetches.
const NATIVE_PREFILL_TOKENS_PER_S: u64 = 300;

/// What the router has to know of the engines.
pub struct Assumed {
    /// Tokens per page.
    pub page_tokens: u32,
    /// Bytes per page.
    pub page_bytes: u64,
    /// Prefill speed of a worker, tokens per second.
    pub prefill_tokens_per_s: u64,
    /// Speed of a worker's link, bytes per second.
    pub link_bytes_per_s: u64,
}

impl Assumed {
    /// What is assumed of the engines of this configuration.
    pub fn of(config: &Config) -> anyhow::Result<Self> {
        let Some(file) = config.model.file()? else {
            let (page_tokens, cost) = (config.engine.page_tokens, &config.engine.cost);
            return Ok(Self {
                page_tokens,
                page_bytes: cost.kv_bytes(page_tokens.into()),
                prefill_tokens_per_s: config.prefill_engine.cost.prefill_tokens_per_sec,
                link_bytes_per_s: cost.link_bytes_per_sec,
            });
        };
        let page_tokens = config.native.page_tokens;
        Ok(Self {
            page_tokens,
            page_bytes: native::Model::load(file)?.layout(page_tokens).page_bytes()?,
            prefill_tokens_per_s: NATIVE_PREFILL_TOKENS_PER_S,
            link_bytes_per_s: config.plane.link_bytes_per_s,
        })
    }
}

/// Says early, in the process that the user started, what each worker would say in its log.
pub fn check(config: &Config) -> anyhow::Result<()> {
    Served::open(config)?;
    if let Some(file) = config.model.file()? {
        native::Model::load(file)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn applied(engine: Option<Engine>, model: Option<&str>) -> anyhow::Result<Config> {
        let arguments = ModelArgs {
            engine,
            model: model.map(PathBuf::from),
        };
        let mut config = Config::default();
        arguments.apply(&mut config.model)?;
        Ok(config)
    }

    fn said(result: anyhow::Result<impl Sized>) -> String {
        format!("{:#}", result.err().unwrap())
    }

    #[test]
    fn without_flags_the_engine_is_simulated() {
        let served = Served::open(&applied(None, None).unwrap()).unwrap();
        assert_eq!((served.name.as_str(), served.context_tokens), (SIM, None));
        assert_eq!(served.tokenizer.encode("hi"), [104, 105]);
    }

    #[test]
    fn the_native_engine_needs_a_model_that_can_be_read() {
        assert!(said(applied(None, Some("x.gguf"))).contains("--engine native"));
        let none = applied(Some(Engine::Native), None).unwrap();
        assert!(said(Served::open(&none)).contains("--model"));
        let nowhere = applied(Some(Engine::Native), Some("nowhere.gguf")).unwrap();
        let path = nowhere.model.path.clone().unwrap();
        assert!(path.is_absolute(), "workers may run elsewhere");
        assert!(said(check(&nowhere)).contains("nowhere.gguf"));
    }

    #[test]
    fn the_section_says_what_the_flags_say() {
        let mut config: Config = toml::from_str("[model]\nengine = \"native\"\npath = \"/a/b.gguf\"\n").unwrap();
        assert_eq!(config.model.file().unwrap(), Some(Path::new("/a/b.gguf")));
        let sim = ModelArgs {
            engine: Some(Engine::Sim),
            model: None,
        };
        sim.apply(&mut config.model).unwrap();
        assert_eq!(config.model.file().unwrap(), None, "the flag wins");
        let again: Config = toml::from_str(&toml::to_string_pretty(&config).unwrap()).unwrap();
        assert_eq!(again.model.path, config.model.path);
        assert!(toml::from_str::<Config>("[model]\nengine = \"other\"\n").is_err());
    }
}
