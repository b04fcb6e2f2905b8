//! The native engine: a Llama-family model from a GGUF file on the CPU, with its KV in pages of the node's pool.
//!
//! Four parts. The *books* ([`engine`], [`turn`], [`grants`]) belong to the caller's thread and never wait: turns, page tree, grants. The
//! *computer* ([`computer`]) is one thread that gets a step (some tokens of some turns, with their pages), runs the forward pass
//! ([`forward`]), and gives the pages back. The *tiers* ([`tiers`], [`mover`]) keep
//! copies of pages in host memory and in a file, on two threads of their own. The *model* ([`model`]) is shared by all engines of the process.
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
mod mover;
mod quant;
mod sample;
mod threads;
mod tiers;
mod turn;

#[cfg(test)]
mod tests;

pub use engine::NativeEngine;
pub use error::{LoadError, StartError};
pub use model::Model;

use pinion_schemas::WorkerId;
use pinion_schemas::limits::PAGE_TOKENS;
use pinion_transfer::file::Found;
use pinion_transfer::{FileTier, Layout};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

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
    /// Bytes of the host tier: copies of pages in host memory, in whole pages. Default 0, none: this engine's pool is host memory
    /// already, so a larger pool is of more use.
    pub host_tier_bytes: u64,
    /// The file tier. Default: none.
    pub file_tier: Option<FileTierConfig>,
}

/// Section `[native.file_tier]`: pages outlive the pool, and the process, in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileTierConfig {
    /// Folder of the files; each worker has one, of its name. On a local disk: pages are read when a client waits.
    pub folder: PathBuf,
    /// Most bytes of a worker's file. It holds copies of the pool's pages too, so several times the pool.
    pub bytes: u64,
}

impl FileTierConfig {
    fn open(&self, worker: &WorkerId, layout: &Layout) -> Result<(FileTier, Vec<Found>), StartError> {
        std::fs::create_dir_all(&self.folder).map_err(|source| StartError::Folder {
            folder: self.folder.clone(),
            source,
        })?;
        let path = self.folder.join(format!("{worker}.kv"));
        Ok(FileTier::open(&path, layout, self.bytes)?)
    }
}

impl Default for NativeConfig {
    fn default() -> Self {
        Self {
            pool_pages: 512,
            page_tokens: PAGE_TOKENS,
            chunk_tokens: 256,
            max_jobs: 32,
            threads: 1,
            host_tier_bytes: 0,
            file_tier: None,
        }
    }
}
