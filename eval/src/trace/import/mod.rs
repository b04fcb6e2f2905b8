//! Traces out of logs: what was sent to a model, or said in conversations.

mod audit;
mod sharegpt;
#[cfg(test)]
mod tests;

pub use audit::audit;
pub use sharegpt::{Conversations, ShareGptOptions, sharegpt};

use super::error::{LineError, ReadError};
use thiserror::Error;

/// Why a log is not made a trace.
#[derive(Debug, Error)]
pub enum ImportError {
    /// A line of a log cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The file is not JSON, or one conversation is too long.
    #[error("the file cannot be read as JSON: {0}; it should be a list of conversations, or one a line")]
    Json(#[from] serde_json::Error),
    /// A conversation is not one.
    #[error("conversation {number}: {error}")]
    Conversation {
        /// Its place in the file, from 1.
        number: usize,
        /// What is wrong with it.
        error: LineError,
    },
    /// The trace cannot be written.
    #[error("the trace cannot be written: {0}; check the disk")]
    Write(std::io::Error),
}
