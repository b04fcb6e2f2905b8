//! The decisions of Pinion, as synchronous state machines: `step(now, fact) -> actions`, total over their inputs.
//!
//! No clock, no randomness, no I/O, no runtime lives here; the crate's dependencies prove it (`tests/tests/walls.rs`).
//! [`admit`] is Algorithm 2, run by a decode worker on its own ledger; [`session`] tells what happens to a turn.

pub mod admit;
pub mod peer;
pub mod permits;
pub mod pressure;
pub mod session;
pub mod staleness;
