//! What is counted, and its text for Prometheus. Labels come from closed sets, so the registry cannot grow without end.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Upper bounds of the buckets, in seconds: from a direct append to a long prefill and a long answer.
const BUCKETS: [f64; 16] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];

/// A histogram with fixed buckets.
#[derive(Default)]
pub struct Histogram {
    counts: [AtomicU64; BUCKETS.len()],
    total: AtomicU64,
    micros: AtomicU64,
}

impl Histogram {
    /// Counts one value.
    pub fn observe(&self, value: Duration) {
        let seconds = value.as_secs_f64();
        if let Some(count) = BUCKETS
            .iter()
            .position(|b| seconds <= *b)
            .and_then(|i| self.counts.get(i))
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.total.fetch_add(1, Ordering::Relaxed);
        let micros = u64::try_from(value.as_micros()).unwrap_or(u64::MAX);
        self.micros.fetch_add(micros, Ordering::Relaxed);
    }

    fn write(&self, name: &str, help: &str, out: &mut String) {
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        let mut sum = 0;
        for (bound, count) in BUCKETS.iter().zip(&self.counts) {
            sum += count.load(Ordering::Relaxed);
            let _ = writeln!(out, "{name}_bucket{{le=\"{bound}\"}} {sum}");
        }
        let total = self.total.load(Ordering::Relaxed).max(sum);
        let seconds = Duration::from_micros(self.micros.load(Ordering::Relaxed)).as_secs_f64();
        let _ = writeln!(
            out,
            "{name}_bucket{{le=\"+Inf\"}} {total}\n{name}_sum {seconds}\n{name}_count {total}"
        );
    }
}

/// Everything the gateway counts.
#[derive(Default)]
pub struct Metrics {
    requests: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
    /// Time to the first token.
    pub ttft: Histogram,
    /// Time to the end of a whole answer.
    pub latency: Histogram,
    /// Turns that run now.
    pub running: AtomicU64,
    /// Submits after the first of a turn.
    pub resubmits: AtomicU64,
    /// Chunks or parts of them that were there already.
    pub repeats: AtomicU64,
    /// Chunks behind a lost one; the end of the turn fills the gap.
    pub gaps: AtomicU64,
}

impl Metrics {
    /// One request is over: how it was served (`none` if it was not, or not known), and its outcome (`ok`, `stopped` by a
    /// stop text and therefore cancelled, `client-gone` or the error's code).
    pub fn request(&self, path: &'static str, outcome: &'static str) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((path, outcome)).or_default() += 1;
    }

    /// Prometheus' text format.
    pub fn text(&self) -> String {
        let mut out = String::with_capacity(4_096);
        let name = "pinion_gateway_requests_total";
        let _ = writeln!(
            out,
            "# HELP {name} Requests by path and outcome.\n# TYPE {name} counter"
        );
        for ((path, outcome), count) in self.requests.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let _ = writeln!(out, "{name}{{path=\"{path}\",outcome=\"{outcome}\"}} {count}");
        }
        for (name, kind, help, value) in [
            ("turns_running", "gauge", "Turns that run now.", &self.running),
            (
                "resubmits_total",
                "counter",
                "Submits after the first of a turn.",
                &self.resubmits,
            ),
            (
                "chunk_repeats_total",
                "counter",
                "Chunks that brought tokens twice.",
                &self.repeats,
            ),
            ("chunk_gaps_total", "counter", "Chunks behind a lost one.", &self.gaps),
        ] {
            let value = value.load(Ordering::Relaxed);
            let _ = writeln!(
                out,
                "# HELP pinion_gateway_{name} {help}\n# TYPE pinion_gateway_{name} {kind}\npinion_gateway_{name} {value}"
            );
        }
        self.ttft
            .write("pinion_gateway_ttft_seconds", "Time to the first token.", &mut out);
        self.latency.write(
            "pinion_gateway_latency_seconds",
            "Time to the end of a whole answer.",
            &mut out,
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative() {
        let metrics = Metrics::default();
        for millis in [1, 3, 400_000] {
            metrics.ttft.observe(Duration::from_millis(millis));
        }
        metrics.request("direct", "ok");
        let text = metrics.text();
        for line in [
            "pinion_gateway_ttft_seconds_bucket{le=\"0.001\"} 1",
            "pinion_gateway_ttft_seconds_bucket{le=\"0.005\"} 2",
            "pinion_gateway_ttft_seconds_bucket{le=\"300\"} 2",
            "pinion_gateway_ttft_seconds_bucket{le=\"+Inf\"} 3",
            "pinion_gateway_ttft_seconds_count 3",
            "pinion_gateway_requests_total{path=\"direct\",outcome=\"ok\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }
}
