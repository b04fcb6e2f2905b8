//! How the next token is chosen from what the model says.

use rkyv::{Archive, Deserialize, Serialize};

/// Greedy by default. Integers, so that any bytes of the wire are a sampling that works.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// Thousandths; 0 takes the likeliest token.
    pub temperature_milli: u32,
    /// Thousandths of the probability mass that may be chosen from; 1,000 or more is all of it, and so is 0.
    pub top_p_milli: u32,
    /// With the token's position in the context it decides the draw: a turn that goes on elsewhere goes on alike.
    pub seed: u64,
}

impl Sampling {
    /// The likeliest token each time.
    pub const GREEDY: Self = Self {
        temperature_milli: 0,
        top_p_milli: 1_000,
        seed: 0,
    };
}

impl Default for Sampling {
    fn default() -> Self {
        Self::GREEDY
    }
}
