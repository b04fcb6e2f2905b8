//! The vocabulary of Pinion: ids, units, page names, reasons, NATS subjects and wire messages.
//!
//! This crate does no I/O and knows no runtime; every other crate may use it and it uses none of them
//! (design §3). Words are the ones of design §1.

pub mod hash;
pub mod ids;
pub mod limits;
pub mod messages;
pub mod reasons;
pub mod sampling;
pub mod shard;
pub mod subject;
pub mod time;
pub mod trace_context;
pub mod wire;

pub use hash::{ChainHasher, PageHash, chain};
pub use ids::{ClusterId, Epoch, IdError, PermitId, RequestId, SessionId, TurnIndex, WorkerId};
pub use reasons::{AbortReason, Class, FallbackReason, MigrationReason, Path, RejectReason, SeedReason};
pub use sampling::Sampling;
pub use shard::{SHARDS, shard_of};
pub use time::Micros;
