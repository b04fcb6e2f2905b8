//! The node agent of Pinion and its engines (design §8). Engines hold and compute KV; they decide nothing about admission.

pub mod engine;
pub mod node;
pub mod plane;
pub mod world;
