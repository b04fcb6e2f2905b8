//! The decisions of Pinion, as synchronous state machines: `step(now, fact) -> actions`, total over their inputs.
//!
//! No clock, no randomness, no I/O, no runtime lives here; the crate's dependencies prove it (`tests/tests/walls.rs`).
//! [`route`] is Algorithm 1, run by the router; [`admit`] is Algorithm 2, run by a decode worker on its own ledger;
//! [`dispatch`] is Algorithm 3; [`plan`] says where a seed's pages come from; [`session`] tells what happens to a turn.

pub mod admit;
pub mod dispatch;
pub mod peer;
pub mod permits;
pub mod plan;
pub mod pressure;
pub mod residency;
pub mod route;
pub mod session;
pub mod staleness;
