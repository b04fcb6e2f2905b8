//! Traces, replay, statistics, and the report made of them.

pub mod bar;
pub mod evidence;
pub mod replay;
pub mod roofline;
pub mod stats;
pub mod synth;
pub mod trace;
