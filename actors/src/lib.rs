//! The actors of Pinion. Each is a [`Role`]: synchronous code that takes an [`Input`] and writes [`Effect`]s. One generic
//! [`shell`] runs them all on ractor: it turns bus messages into inputs and performs effects, so that no role ever waits
//! for I/O, and the same roles run on NATS in real time and on the simulated bus in virtual time (design §3).
//!
//! | role | owns | file |
//! |---|---|---|
//! | sessions of a shard | turn order, pin, committed chain | [`sessions`] |
//! | router of a control node | where to try next, who is alive | [`router`] |
//! | decode worker | pool, permits, running turns | [`decode`] |
//! | prefill worker | prefill queue, backup pages | [`prefill`] |

pub mod codec;
pub mod control;
pub mod decode;
mod deliver;
pub mod effect;
pub mod engine;
pub mod feed;
mod grants;
pub mod lease;
pub mod prefill;
pub mod router;
pub mod sessions;
pub mod shell;
mod store;

pub use effect::{Effect, Effects, Input, Local, Role};
pub use engine::{Engine, EngineError, EngineOutput, Job};
