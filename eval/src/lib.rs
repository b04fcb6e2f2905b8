//! Traces, replay and statistics.

pub mod bar;
pub mod replay;
pub mod stats;
pub mod synth;
pub mod trace;
