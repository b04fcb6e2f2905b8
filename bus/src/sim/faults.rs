//! What can be made to go wrong on a simulated network.

use std::time::Duration;

use crate::SUBSCRIPTION_CAPACITY;

/// What goes wrong, and how often. The default is a perfect network without latency.
#[derive(Clone, Debug)]
pub struct Faults {
    /// Least time a message travels.
    pub latency_min: Duration,
    /// Most time a message travels; each copy draws its own, uniformly.
    pub latency_max: Duration,
    /// Probability that a copy is lost.
    pub loss: f64,
    /// Probability that a copy arrives twice (next to each other on its subject).
    pub duplication: f64,
    /// May messages of one publisher on different subjects overtake each other? On one subject they never do.
    pub reordering: bool,
    /// Largest headers + payload.
    pub payload_max: usize,
    /// Messages a subscription holds; the newest beyond are dropped.
    pub subscription_capacity: usize,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            latency_min: Duration::ZERO,
            latency_max: Duration::ZERO,
            loss: 0.0,
            duplication: 0.0,
            reordering: false,
            payload_max: pinion_schemas::limits::MESSAGE_BYTES_MAX,
            subscription_capacity: SUBSCRIPTION_CAPACITY,
        }
    }
}

/// A server restart.
#[derive(Clone, Copy, Debug, Default)]
pub struct Restart {
    /// How long the server is away; subscriptions are back with it.
    pub down: Duration,
    /// `true`: clients see the connection drop, requests fail at once with [`crate::BusError::Disconnected`], as
    /// `NatsBus` does. `false`: nobody notices (a host gone without a goodbye); requests end at their deadline.
    pub noticed: bool,
    /// How many of the last acknowledged key-value writes are gone afterwards (`JetStream` acknowledges before it
    /// syncs).
    pub lose_writes: usize,
}
