//! Traces, replay and statistics.

pub mod replay;
pub mod stats;
pub mod trace;
