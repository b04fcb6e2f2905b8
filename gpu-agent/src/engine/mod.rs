//! Engines: what computes tokens and holds KV pages on a node (design §8).

pub mod native;
pub mod sim;
pub mod tree;
