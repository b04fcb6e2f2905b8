//! Time and size of the simulated engine's work, calibrated per digest §3.2. Integers only, so that runs repeat to the byte.

use pinion_schemas::time::Micros;
use pinion_transfer::sim::LinkModel;
use serde::{Deserialize, Serialize};

/// What each kind of work costs. All fields may be configured; [`CostModel::default`] is the digest's 30B model on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CostModel {
    /// Fixed part of the time to first token, in microseconds: 28 ms (digest §3.2). It delays a turn and does not occupy the engine.
    pub ttft_base: Micros,
    /// Prefill speed in tokens per second: 25,000 (digest §3.2). Zero is taken as 1.
    pub prefill_tokens_per_sec: u64,
    /// One decode step with one running request, in microseconds: 5.7 ms (digest §3.2, TPOT p50).
    pub decode_step: Micros,
    /// What each further running request adds to a decode step, in microseconds: 100 µs. An assumption: the digest
    /// gives only p50 and p90 of TPOT (5.7 and about 7 ms), no curve over the batch size.
    pub decode_per_request: Micros,
    /// Bytes of KV per token over all layers: 98,304 (digest §3.2).
    pub kv_bytes_per_token: u64,
    /// Speed of the link to other nodes in bytes per second: 2.5 GB/s, TCP loopback (digest §3.2). Zero is taken as 1.
    pub link_bytes_per_sec: u64,
    /// Speed between host and device memory in bytes per second: 25 GB/s. An assumption: `PCIe` 4.0 `x16`, not in the digest. Zero is taken as 1.
    pub host_bytes_per_sec: u64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self {
            ttft_base: Micros::from_millis(28),
            prefill_tokens_per_sec: 25_000,
            decode_step: Micros(5_700),
            decode_per_request: Micros(100),
            kv_bytes_per_token: 98_304,
            link_bytes_per_sec: 2_500_000_000,
            host_bytes_per_sec: 25_000_000_000,
        }
    }
}

impl CostModel {
    /// The same work done `speed` times as fast, for demonstrations; below 1 it is slower, and nonsense (0, not a number) changes nothing.
    #[must_use]
    pub fn faster(&self, speed: f64) -> Self {
        if !speed.is_finite() || speed <= 0.0 {
            return self.clone();
        }
        let span = |m: Micros| Micros((m.0 as f64 / speed) as u64);
        let rate = |per_sec: u64| (per_sec as f64 * speed) as u64;
        Self {
            ttft_base: span(self.ttft_base),
            prefill_tokens_per_sec: rate(self.prefill_tokens_per_sec),
            decode_step: span(self.decode_step),
            decode_per_request: span(self.decode_per_request),
            kv_bytes_per_token: self.kv_bytes_per_token,
            link_bytes_per_sec: rate(self.link_bytes_per_sec),
            host_bytes_per_sec: rate(self.host_bytes_per_sec),
        }
    }

    /// Time in which the engine prefills `tokens`, without the fixed part.
    pub fn prefill(&self, tokens: u64) -> Micros {
        Micros::for_amount(u128::from(tokens), self.prefill_tokens_per_sec)
    }

    /// Time of one decode step over `running` requests; zero for none.
    pub fn decode(&self, running: u64) -> Micros {
        match running {
            0 => Micros::ZERO,
            n => Micros(
                self.decode_step
                    .0
                    .saturating_add(self.decode_per_request.0.saturating_mul(n - 1)),
            ),
        }
    }

    /// Time to the first token of a lone turn with `new_tokens` to prefill.
    pub fn ttft(&self, new_tokens: u64) -> Micros {
        self.ttft_base.plus(self.prefill(new_tokens))
    }

    /// Bytes of KV of `tokens`.
    pub fn kv_bytes(&self, tokens: u64) -> u64 {
        self.kv_bytes_per_token.saturating_mul(tokens)
    }

    /// The link to other nodes. What sets up a transfer is in its speed: that was measured over whole transfers.
    pub fn link(&self) -> LinkModel {
        LinkModel {
            bytes_per_sec: self.link_bytes_per_sec,
            setup: Micros::ZERO,
            trouble: None,
        }
    }

    /// Time in which the KV of `tokens` comes back from host memory.
    pub fn promote(&self, tokens: u64) -> Micros {
        Micros::for_amount(
            u128::from(tokens) * u128::from(self.kv_bytes_per_token),
            self.host_bytes_per_sec,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_measurements_of_the_digest() {
        let cost = CostModel::default();
        assert_eq!(cost.ttft(341), Micros(41_640)); // seen 41-42 ms
        assert_eq!(cost.ttft(5_000).as_millis(), 228);
        assert_eq!(cost.ttft(50_000).as_millis(), 2_028);
        assert_eq!(cost.decode(0), Micros::ZERO);
        assert_eq!(cost.decode(3), Micros(5_900));
        assert_eq!(cost.link().time(cost.kv_bytes(50_000)).as_millis(), 1_966); // seen 1.5-4 s for 5-9 GB
    }

    #[test]
    fn extreme_values_do_not_panic() {
        let cost = CostModel {
            prefill_tokens_per_sec: 0,
            link_bytes_per_sec: 0,
            kv_bytes_per_token: u64::MAX,
            ..CostModel::default()
        };
        assert_eq!(cost.prefill(u64::MAX), Micros(u64::MAX));
        assert_eq!(cost.link().time(u64::MAX), Micros(u64::MAX));
        assert_eq!(cost.kv_bytes(2), u64::MAX);
    }
}
