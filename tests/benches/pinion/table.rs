//! The one table, as text and as JSON.

use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::Duration;

/// One line of the table.
pub struct Row {
    what: String,
    unit: &'static str,
    /// The median, or the one value there is.
    p50: f64,
    p99: Option<f64>,
    /// The median of the best round: what other work on the machine disturbed least.
    best: Option<f64>,
    goal: Option<f64>,
    goal_p99: Option<f64>,
}

impl Row {
    /// A value without a distribution.
    pub fn value(what: impl Into<String>, unit: &'static str, value: f64) -> Self {
        Self {
            what: what.into(),
            unit,
            p50: value,
            p99: None,
            best: None,
            goal: None,
            goal_p99: None,
        }
    }
    /// Samples of several rounds, less the round's `base`, in µs: the medians over the rounds of their median and 99th
    /// percentile, so that one disturbed round decides nothing.
    pub fn rounds(what: impl Into<String>, rounds: &mut [(Vec<Duration>, Duration)]) -> Self {
        let mut at = |q: f64| {
            let mut found: Vec<f64> = Vec::with_capacity(rounds.len());
            for (samples, base) in &mut *rounds {
                samples.sort_unstable();
                found.push((percentile(samples, q).as_nanos() as f64 - base.as_nanos() as f64) / 1e3);
            }
            found.sort_by(f64::total_cmp);
            found
        };
        let (p50, p99) = (at(0.5), at(0.99));
        Self {
            p99: Some(p99[p99.len() / 2]),
            best: Some(p50[0]),
            ..Self::value(what, "µs", p50[p50.len() / 2])
        }
    }
    /// With the most the median may be, and the 99th percentile.
    pub fn goal(mut self, p50: f64, p99: Option<f64>) -> Self {
        (self.goal, self.goal_p99) = (Some(p50), p99);
        self
    }

    fn met(&self) -> Option<bool> {
        let below = |value: f64, goal: Option<f64>| goal.is_none_or(|g| value <= g);
        self.goal?;
        Some(below(self.p50, self.goal) && self.p99.is_none_or(|v| below(v, self.goal_p99)))
    }

    fn json(&self) -> Value {
        json!({
            "what": self.what, "unit": self.unit, "p50": self.p50, "p99": self.p99, "best_p50": self.best,
            "goal_p50": self.goal, "goal_p99": self.goal_p99, "met": self.met(),
        })
    }
}

/// The sample below which a part `q` of the sorted ones lies.
pub fn percentile(sorted: &[Duration], q: f64) -> Duration {
    let at = (sorted.len() as f64 * q) as usize;
    sorted
        .get(at.min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

/// A number in few characters.
fn short(value: f64) -> String {
    match value.abs() {
        v if v >= 100_000.0 => format!("{:.0} k", value / 1e3),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// The rows of one topic.
pub struct Section {
    /// Its headline.
    pub title: &'static str,
    /// How it was measured, in lines.
    pub how: Vec<String>,
    /// Its rows.
    pub rows: Vec<Row>,
}

/// The table as text, at most 100 columns.
pub fn text(machine: &str, sections: &[Section]) -> String {
    let mut out = format!("{machine}\n");
    for section in sections {
        let spread = section.rows.iter().any(|row| row.p99.is_some());
        let [value, p99, best] = if spread {
            ["p50", "p99", "best"]
        } else {
            ["value", "", ""]
        };
        let _ = write!(
            out,
            "\n{:<48} {value:>8} {p99:>8} {best:>8} {:>5}  goal\n",
            section.title, "unit"
        );
        for row in &section.rows {
            let [p99, best] = [row.p99, row.best].map(|v| v.map(short).unwrap_or_default());
            let goal = match (row.goal, row.goal_p99, row.met()) {
                (Some(goal), None, Some(met)) => format!("≤ {} {}", short(goal), if met { "ok" } else { "MISSED" }),
                (Some(goal), Some(p99), Some(met)) => {
                    format!("≤ {}/{} {}", short(goal), short(p99), if met { "ok" } else { "MISSED" })
                }
                _ => String::new(),
            };
            let line = format!(
                "  {:<46} {:>8} {p99:>8} {best:>8} {:>5}  {goal}",
                row.what,
                short(row.p50),
                row.unit
            );
            let _ = writeln!(out, "{}", line.trim_end());
        }
        for line in &section.how {
            let _ = writeln!(out, "  {line}");
        }
    }
    out
}

/// The same as JSON.
pub fn json(machine: &Value, sections: &[Section]) -> Value {
    let section = |s: &Section| {
        let rows: Vec<Value> = s.rows.iter().map(Row::json).collect();
        json!({"title": s.title, "how": s.how, "rows": rows})
    };
    json!({"machine": machine, "sections": sections.iter().map(section).collect::<Vec<_>>()})
}
