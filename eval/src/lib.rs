//! Traces, replay and statistics.

pub mod stats;
pub mod trace;
