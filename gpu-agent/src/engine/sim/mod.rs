//! The simulated engine: page-exact KV bookkeeping ([`super::tree`]), continuous batching with chunked prefill ([`batch`]), a calibrated
//! cost model ([`cost`]) and deterministic text ([`text`]). Synchronous and pure: time is passed in, and the same calls give
//! the same outputs to the byte.

mod adapter;
pub mod batch;
pub mod cost;
pub mod text;

pub use super::tree::{PageEvent, TreeError};
pub use batch::SimEngine;
pub use cost::CostModel;
pub use text::{ContextHash, continuation};

/// A page with the context hash at its end: the simulated KV.
pub type Page = super::tree::Page<ContextHash>;
/// The pages of a simulated worker.
pub type PageTree = super::tree::PageTree<ContextHash>;

use pinion_schemas::hash::PageHash;
use pinion_schemas::ids::RequestId;
use pinion_schemas::limits::PAGE_TOKENS;
use serde::{Deserialize, Serialize};

/// Shape of a simulated engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SimConfig {
    /// Tokens per page; 0 is taken as 1. Default [`PAGE_TOKENS`].
    pub page_tokens: u32,
    /// Device pool in pages. Default 1,439: the digest's 92,104 tokens (§3.2).
    pub device_pages: u64,
    /// Host tier in pages; 0 (default): none. It holds copies, so it is of use if it is larger than the pool.
    pub host_pages: u64,
    /// Most prefill tokens in one step; 0 is taken as 1. Default 8,192, `SGLang`'s chunked prefill size on a large GPU.
    pub chunk_tokens: u32,
    /// Most turns at once, waiting and running. Default 32 (digest §3.2: concurrency 32).
    pub max_jobs: usize,
    /// Number of different tokens the engine writes; 0 is taken as 1. Default 151,936 (Qwen3).
    pub vocab: u32,
    /// What work costs.
    pub cost: CostModel,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            page_tokens: PAGE_TOKENS,
            device_pages: 1_439,
            host_pages: 0,
            chunk_tokens: 8_192,
            max_jobs: 32,
            vocab: 151_936,
            cost: CostModel::default(),
        }
    }
}

/// One turn to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Names it in outputs and in [`SimEngine::cancel`].
    pub request: RequestId,
    /// The whole context, cached prefix included. At least one token.
    pub prompt: Vec<u32>,
    /// Tokens to write; 0 means prefill only.
    pub max_new_tokens: u32,
    /// Parts that separate tenants in page names, as for [`pinion_schemas::hash::ChainHasher::new`]; empty: none.
    pub namespace: Vec<Option<String>>,
}

/// Why a job was not taken. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// No tokens were given.
    #[error("the prompt is empty: give it at least one token")]
    EmptyPrompt,
    /// The request is already in the engine.
    #[error("request {0} is already running: cancel it first")]
    Duplicate(RequestId),
    /// The engine has its most turns.
    #[error("{max} turns are in the engine: wait for one to end")]
    TooManyJobs {
        /// The limit.
        max: usize,
    },
    /// The pool cannot hold the turn beside what is running.
    #[error(transparent)]
    Pool(#[from] TreeError),
}

/// Why a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum FinishReason {
    /// All tokens were written (or the prefill is done, for a job that asked for none).
    Length,
    /// It was cancelled.
    Cancelled,
    /// The engine's books contradict each other: a bug, or a page imported under a wrong parent.
    Broken,
}

/// What the engine has to say, in the order it happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// The next token of a turn.
    Token {
        /// The turn.
        request: RequestId,
        /// The token, in `0..vocab`.
        token: u32,
    },
    /// A turn ended; its locks and reservations are gone, its pages stay until they are evicted (I11).
    Finished {
        /// The turn.
        request: RequestId,
        /// Why.
        reason: FinishReason,
        /// Tokens of it in named pages.
        committed_tokens: u64,
        /// Its last named page.
        tip: Option<PageHash>,
    },
    /// Pages came or went.
    Page(PageEvent),
}

#[cfg(test)]
mod tests;
