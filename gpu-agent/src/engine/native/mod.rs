//! The native engine: a Llama-family model from a GGUF file on the CPU, with its KV in pages of the node's pool.
//!
//! Three parts. The *books* ([`engine`], [`turn`], [`grants`]) belong to the caller's thread and never wait: turns, page tree, grants. The
//! *computer* ([`computer`]) is one thread that gets a step (some tokens of some turns, with their pages), runs the forward pass
//! ([`forward`]), and gives the pages back. The *model* ([`model`]) is shared by all engines of the process.
//!
//! What a token's KV and logits are depends on the tokens before it and on nothing else, to the bit: not on chunks, batches, threads, vector
//! units, or on whether its prefix was computed here, found in cache, or moved here. So a page can be proved right by comparing
//! digests, and a turn goes on elsewhere with the same words. [`matrix`] and [`attention`] say how that is kept.

mod adapter;
mod attention;
mod computer;
mod engine;
mod error;
mod forward;
mod gguf;
mod grants;
mod kernel;
mod kv;
mod math;
mod matrix;
mod model;
mod quant;
mod sample;
mod threads;
mod turn;

#[cfg(test)]
mod tests;

pub use engine::NativeEngine;
pub use error::{LoadError, StartError};
pub use model::Model;

use pinion_schemas::limits::PAGE_TOKENS;
use serde::{Deserialize, Serialize};

/// Shape of a native engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NativeConfig {
    /// Pages of the pool. Default 512: 32,768 tokens in pages of 64, 755 MB for a model of 30 layers with 3 key-value heads of 64.
    pub pool_pages: u32,
    /// Tokens per page. Workers that exchange pages must agree. Default [`PAGE_TOKENS`].
    pub page_tokens: u32,
    /// Most prefill tokens in one step; 0 is taken as 1. Default 256: long enough that weights are read seldom, short enough that
    /// turns which write wait less than a second for their next token.
    pub chunk_tokens: u32,
    /// Most turns at once, waiting and running. Default 32.
    pub max_jobs: usize,
    /// Threads that compute; 0 is taken as 1. Default 1: several engines often share a machine.
    pub threads: usize,
}

impl Default for NativeConfig {
    fn default() -> Self {
        Self {
            pool_pages: 512,
            page_tokens: PAGE_TOKENS,
            chunk_tokens: 256,
            max_jobs: 32,
            threads: 1,
        }
    }
}
