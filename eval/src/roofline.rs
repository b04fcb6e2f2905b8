//! The roofline of a model on a GPU: operations and bytes of a step, which of them binds, and how long it takes at least
//! (Williams et al. 2009; the digest's study of a 30B model on H20, §3.8).
//!
//! A step computes `new` tokens at the end of a context of `context` tokens, whose other tokens are cached: a prefill with
//! reuse, or, with one new token, a decoding step.
//!
//! ```text
//! operations = 2 · parameters · new + 4 · layers · heads · head_dim · new · context
//! bytes      = weights + KV · context + activations · new
//! ```

use pinion_gpu_agent::engine::sim::CostModel;
use pinion_schemas::Micros;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The description that is used when none is given: that of the digest's study.
pub const STUDY: &str = include_str!("../../deploy/roofline/study.toml");
/// Contexts of the study's table: its "32K" and "64K" are thousands.
pub const CONTEXTS: [u64; 2] = [32_000, 64_000];
/// Shares of the context that are cached in the study's table, per cent.
pub const REUSE: [u64; 5] = [0, 50, 70, 90, 95];

/// What a step of a model takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// As tables name it.
    pub name: String,
    /// Layers.
    pub layers: u64,
    /// Query heads of a layer.
    pub heads: u64,
    /// Elements of a head.
    pub head_dim: u64,
    /// Parameters that compute for each token: of a mixture of experts the active ones.
    pub computed_parameters: u64,
    /// Bytes of weights that a step reads.
    pub weight_bytes: u64,
    /// Bytes of KV of one token, all layers.
    pub kv_bytes_per_token: u64,
    /// Bytes of activations read and written for each new token, all layers.
    pub activation_bytes_per_token: u64,
}

/// What a GPU can do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// As tables name it.
    pub name: String,
    /// Operations a second at the weights' precision.
    pub flop_per_s: f64,
    /// Bytes a second to and from its memory.
    pub bytes_per_s: f64,
}

/// A model on a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Roofline {
    /// The model.
    pub model: Model,
    /// The GPU.
    pub gpu: Gpu,
}

/// A description that cannot be used.
#[derive(Debug, Error)]
pub enum RooflineError {
    /// It is not what it should be.
    #[error("the description of model and GPU: {0}")]
    Toml(#[from] toml::de::Error),
    /// A rate is none.
    #[error("gpu.{field} is {value}; give a number above 0")]
    Rate {
        /// Which.
        field: &'static str,
        /// What it is.
        value: f64,
    },
}

/// What binds a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Operations.
    Compute,
    /// Bytes.
    Memory,
}

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Step {
    /// Tokens computed.
    pub new: u64,
    /// Tokens of the context, the new ones included.
    pub context: u64,
    /// Operations.
    pub flop: f64,
    /// Bytes.
    pub bytes: f64,
    /// Operations a byte.
    pub intensity: f64,
    /// What binds it.
    pub bound: Bound,
    /// Least time, seconds.
    pub seconds: f64,
}

impl Roofline {
    /// Reads a description.
    ///
    /// # Errors
    /// If it is not one, or a rate is not above 0.
    pub fn parse(text: &str) -> Result<Self, RooflineError> {
        let this: Self = toml::from_str(text)?;
        for (field, value) in [
            ("flop_per_s", this.gpu.flop_per_s),
            ("bytes_per_s", this.gpu.bytes_per_s),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return Err(RooflineError::Rate { field, value });
            }
        }
        Ok(this)
    }

    /// Operations a byte at which operations and bytes take equally long.
    pub fn ridge(&self) -> f64 {
        self.gpu.flop_per_s / self.gpu.bytes_per_s
    }

    /// A step that computes the last `new` tokens of `context`.
    pub fn step(&self, new: u64, context: u64) -> Step {
        let model = &self.model;
        let attention = 4 * model.layers * model.heads * model.head_dim;
        let flop = 2.0 * model.computed_parameters as f64 * new as f64 + attention as f64 * new as f64 * context as f64;
        let bytes = model.weight_bytes as f64
            + model.kv_bytes_per_token as f64 * context as f64
            + model.activation_bytes_per_token as f64 * new as f64;
        let (compute, memory) = (flop / self.gpu.flop_per_s, bytes / self.gpu.bytes_per_s);
        Step {
            new,
            context,
            flop,
            bytes,
            intensity: flop / bytes,
            bound: if compute >= memory {
                Bound::Compute
            } else {
                Bound::Memory
            },
            seconds: compute.max(memory),
        }
    }

    /// A prefill of `context` tokens of which `reuse` per cent are cached.
    pub fn prefill(&self, context: u64, reuse: u64) -> Step {
        self.step(context - context * reuse.min(100) / 100, context)
    }

    /// Fewest new tokens with which a step at `context` is bound by operations.
    pub fn compute_bound_from(&self, context: u64) -> Option<u64> {
        (1..=context).find(|new| self.step(*new, context).bound == Bound::Compute)
    }

    /// Costs of the simulated engine in which work takes what the roofline says at `context` tokens, and everything else
    /// (fixed parts, links) what `calibrated` says: an alternative to the calibrated costs, and never slower than a GPU.
    pub fn cost_model(&self, context: u64, calibrated: &CostModel) -> CostModel {
        let micros = |seconds: f64| Micros((seconds * 1e6).round() as u64);
        let alone = self.step(1, context).seconds;
        // A step of two turns reads the weights once, and the KV of both.
        let kv = self.model.kv_bytes_per_token as f64 * context as f64 / self.gpu.bytes_per_s;
        CostModel {
            prefill_tokens_per_sec: (context as f64 / self.step(context, context).seconds) as u64,
            decode_step: micros(alone),
            decode_per_request: micros(kv),
            kv_bytes_per_token: self.model.kv_bytes_per_token,
            ..calibrated.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(value: f64, wanted: f64, share: f64) -> bool {
        (value / wanted - 1.0).abs() <= share
    }

    /// Digest §3.8: operations a byte by context and reuse in per cent.
    const DIGEST: [(u64, u64, f64); 9] = [
        (32_000, 0, 23_368.0),
        (32_000, 50, 14_899.0),
        (32_000, 70, 10_045.0),
        (32_000, 90, 3_821.0),
        (32_000, 95, 1_980.0),
        (64_000, 0, 40_758.0),
        (64_000, 70, 20_610.0),
        (64_000, 90, 8_544.0),
        (64_000, 95, 4_549.0),
    ];

    #[test]
    fn the_study_comes_out() {
        let study = Roofline::parse(STUDY).unwrap();
        assert!(near(study.ridge(), 37.0, 1e-9));
        for (context, reuse, intensity) in DIGEST {
            let step = study.prefill(context, reuse);
            assert!(near(step.intensity, intensity, 0.0005), "{context} {reuse}: {step:?}");
            assert_eq!(step.bound, Bound::Compute);
        }
        // Decoding: 1.0 to 1.9 operations a byte over all contexts, always bound by memory.
        let decode = |context| study.step(1, context);
        assert!(near(decode(1).intensity, 1.0, 0.02) && near(decode(131_072).intensity, 1.9, 0.02));
        assert_eq!(decode(131_072).bound, Bound::Memory);
        // "Memory-bound only under about 10 new tokens" is the limit of long contexts.
        assert_eq!(study.compute_bound_from(10_000_000), Some(10));
        assert_eq!(study.compute_bound_from(1), None);
    }

    #[test]
    fn with_active_parameters_a_tenth_of_the_operations_is_left() {
        let active = Roofline::parse(include_str!("../../deploy/roofline/active.toml")).unwrap();
        let study = Roofline::parse(STUDY).unwrap();
        assert!(near(active.step(1, 1).flop, study.step(1, 1).flop * 0.11, 0.001));
        let from = |roofline: &Roofline| roofline.compute_bound_from(1_000).unwrap();
        assert!(from(&active) > 6 * from(&study), "{} {}", from(&active), from(&study));
    }

    #[test]
    fn it_drives_the_simulated_engine() {
        let study = Roofline::parse(STUDY).unwrap();
        let cost = study.cost_model(32_000, &CostModel::default());
        // 32,000 tokens: 2.73 · 10^15 operations at 148 · 10^12 a second.
        assert!(
            near(cost.prefill(32_000).as_millis() as f64, 18_414.0, 0.001),
            "{cost:?}"
        );
        assert!(near(cost.decode(1).0 as f64, 16_573.0, 0.001) && cost.decode(2).0 - cost.decode(1).0 == 1_573);
        assert_eq!(cost.link_bytes_per_sec, CostModel::default().link_bytes_per_sec);
    }

    #[test]
    fn a_wrong_description_says_what_is_wrong() {
        let zero = STUDY.replace("4.0e12", "0.0");
        assert!(Roofline::parse(&zero).unwrap_err().to_string().contains("bytes_per_s"));
        let unknown = STUDY.replace("heads = 32", "headz = 32");
        assert!(Roofline::parse(&unknown).unwrap_err().to_string().contains("headz"));
    }
}
