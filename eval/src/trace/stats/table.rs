//! The figures as a table for a terminal.

use super::{IdealCache, Quantiles, TraceStats};
use std::fmt::{self, Write as _};

/// A number with as many digits as a reader can use.
fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 1_000.0 || v.fract() <= 0.0 => format!("{value:.0}"),
        v if v >= 100.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

fn row(t: &mut String, label: &str, quantiles: Option<&Quantiles>) -> fmt::Result {
    let Some(q) = quantiles else { return Ok(()) };
    write!(t, "{label:<26}{:>9}", q.count)?;
    for value in [q.mean, q.p10, q.p50, q.p90, q.p99, q.max] {
        write!(t, "{:>10}", short(value))?;
    }
    writeln!(t)
}

fn line(t: &mut String, label: &str, text: &str) -> fmt::Result {
    writeln!(t, "{label:<36}{text}")
}

fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), short)
}

impl TraceStats {
    /// The figures as text, lines of at most 100 columns.
    pub fn render_table(&self) -> String {
        let mut t = String::new();
        self.table(&mut t).unwrap_or_default(); // A `String` takes everything.
        t
    }

    fn table(&self, t: &mut String) -> fmt::Result {
        writeln!(
            t,
            "{} requests, {} sessions ({} of two turns or more), {} sub-agents\n{} s, {} requests/s\n",
            self.requests,
            self.sessions,
            self.multi_turn,
            self.agents,
            short(self.span_s),
            optional(self.requests_per_s)
        )?;
        writeln!(
            t,
            "{:<26}{:>9}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "tokens unless said", "count", "mean", "p10", "p50", "p90", "p99", "max"
        )?;
        row(t, "turns of a session", self.turns.as_ref())?;
        row(t, "input", self.input.as_ref())?;
        row(t, "  first of a session", self.first_input.as_ref())?;
        row(t, "  longest of a session", self.peak_input.as_ref())?;
        row(t, "output", self.output.as_ref())?;
        row(t, "append of a later turn", self.append.as_ref())?;
        row(t, "new to an ideal cache", self.cache.and_then(|c| c.new).as_ref())?;
        row(t, "between requests, s", self.gap_s.as_ref())?;
        row(t, "pause before a request, s", self.think_s.as_ref())?;
        writeln!(t, "\n{:<14}{:>10}{:>10}{:>10}", "input", "requests", "share", "mean")?;
        for bin in &self.input_bins {
            let (share, mean) = (percent(bin.share), short(bin.mean));
            writeln!(t, "{:<14}{:>10}{share:>10}{mean:>10}", bin.label, bin.requests)?;
        }
        writeln!(t)?;
        for over in &self.input_over {
            line(t, &format!("inputs over {}", over.limit), &over.requests.to_string())?;
        }
        for s in &self.append_up_to {
            line(t, &format!("appends up to {}", s.limit), &percent(s.share))?;
        }
        for s in &self.think_up_to {
            line(t, &format!("pauses up to {} s", s.limit), &percent(s.share))?;
        }
        let io = format!("{}, median {}", optional(self.io_ratio), optional(self.io_ratio_p50));
        line(t, "input per output", &io)?;
        if self.append.is_some() {
            line(t, "prefix resets", &format!("{} of {}", self.resets, self.pairs))?;
            let by_turn = self.append_generated_by_turn.as_ref();
            let generated = format!(
                "{}; by turn p25 {}, p50 {}, p75 {}",
                percent(self.append_generated.unwrap_or(0.0)),
                percent(by_turn.map_or(0.0, |q| q.p25)),
                percent(by_turn.map_or(0.0, |q| q.p50)),
                percent(by_turn.map_or(0.0, |q| q.p75)),
            );
            line(t, "appends that may be the last answer", &generated)?;
        }
        self.cache.map_or(Ok(()), |cache| ideal(t, &cache))
    }
}

fn ideal(t: &mut String, cache: &IdealCache) -> fmt::Result {
    writeln!(t, "\na cache that forgets nothing")?;
    let hits = format!(
        "{} of blocks, {} of tokens",
        percent(cache.block_hit_rate),
        percent(cache.token_hit_rate)
    );
    line(t, "  hits", &hits)?;
    line(
        t,
        "  from the turn before",
        &format!("{} of tokens", percent(cache.from_session)),
    )?;
    let blocks = format!(
        "{}; {} different, {} in two prompts or more, {} in over ten",
        cache.blocks, cache.unique, cache.shared, cache.over_ten
    );
    line(t, "  blocks", &blocks)?;
    line(t, "  prompts with one of the top ten", &short(cache.top_ten))?;
    line(t, "  tokens it would hold", &cache.working_set.to_string())?;
    let warm = format!("{}, {} new", percent(cache.warm), optional(cache.warm_new));
    line(t, "  warm: over 90 % hit", &warm)?;
    let cold = format!("{}, {} new", percent(cache.cold), optional(cache.cold_new));
    line(t, "  cold: no hit", &cold)
}
