//! The report: one HTML file that needs nothing else, or Markdown, of the same figures.

use super::EvidenceError;
use super::arms::{Arm, check};
use super::paired::{Compared, Delta, Paired, paired};
use super::plot::pictures;
use super::rows::Settings;
use super::strata::{Strata, of_pair};
use super::summary::{ArmSummary, Resampling, summarise};
use crate::stats::bootstrap::Interval;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Value, context};
use serde::Serialize;
use std::cmp::Reverse;

/// Most arms in a picture: more lines cannot be told apart.
const MAX_SHOWN: usize = 4;
/// Turns listed as the worst ones.
const WORST: usize = 12;

/// What to report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The arm in question.
    pub candidate: String,
    /// The arm of strata and losses. Default: the fastest other one by mean TTFT that is not an oracle.
    pub baseline: Option<String>,
    /// Arms that no system can be, which are shown and never chosen as a baseline.
    pub oracles: Vec<String>,
    /// A test of the machinery: fewer runs are taken, and the report says so.
    pub smoke: bool,
    /// How intervals are made.
    pub resampling: Resampling,
}

/// Where the candidate is slower in at least one figure, and not by chance ([`Delta::is_loss`]).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// Against whom.
    pub baseline: String,
    /// All turns, or a slice.
    pub slice: String,
    /// TTFT or latency.
    pub metric: &'static str,
    /// Over how many pairs.
    pub pairs: usize,
    /// All figures, those it does not lose too.
    pub deltas: Vec<Delta>,
}

/// One of the turns that were slowest against the baseline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worst {
    /// Session.
    pub session: String,
    /// Number of the turn, from 1.
    pub turn: usize,
    /// Seed of the run.
    pub seed: u64,
    /// Prompt tokens.
    pub input: usize,
    /// Those that the session's turn before did not have.
    pub append: usize,
    /// Candidate's TTFT, seconds; `None` if it failed.
    pub candidate: Option<f64>,
    /// Baseline's.
    pub baseline: Option<f64>,
    /// How the candidate served it, or why it failed.
    pub how: String,
}

/// All figures.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Not to be quoted.
    pub smoke: bool,
    /// The arm in question.
    pub candidate: String,
    /// The arm of strata and losses.
    pub baseline: String,
    /// What all runs have in common.
    pub settings: Settings,
    /// The main table.
    pub arms: Vec<ArmSummary>,
    /// The candidate against every other arm.
    pub paired: Vec<Paired>,
    /// Against the baseline, slice by slice.
    pub strata: Strata,
    /// Where the candidate loses.
    pub losses: Vec<Loss>,
    /// How many figures were looked at for losses.
    pub looked_at: usize,
    /// The turns it lost most with.
    pub worst: Vec<Worst>,
}

/// A report with its pictures.
#[derive(Clone, Debug)]
pub struct Report {
    /// All figures.
    pub figures: Figures,
    pictures: Vec<(String, String)>,
}

impl Report {
    /// Compares `arms`.
    ///
    /// # Errors
    /// If they cannot be compared, or an arm that was asked for is not there.
    pub fn of(arms: &[Arm], options: &Options) -> Result<Self, EvidenceError> {
        check(arms, options.smoke)?;
        let candidate = find(arms, &options.candidate)?;
        let summaries: Vec<ArmSummary> = arms.iter().map(|arm| summarise(arm, options.resampling)).collect();
        let baseline = match &options.baseline {
            Some(name) => find(arms, name)?,
            None => find(arms, fastest(&summaries, options).unwrap_or(&options.candidate))?,
        };
        let others = arms.iter().filter(|arm| arm.name != candidate.name);
        let paired = others
            .clone()
            .map(|other| paired(candidate, other, options.resampling))
            .collect::<Result<Vec<_>, _>>()?;
        let strata = of_pair(candidate, baseline, options.resampling)?;
        let (losses, looked_at) = losses(&paired, &strata, options);
        let mut shown = vec![candidate, baseline];
        shown.extend(others.filter(|arm| arm.name != baseline.name));
        shown.dedup_by_key(|arm| arm.name.clone());
        shown.truncate(MAX_SHOWN);
        let pictures = pictures(&shown, arms)?;
        let settings = candidate.runs.first().map(|run| run.head.settings.clone());
        let settings = settings.ok_or_else(|| EvidenceError::NoArm {
            name: options.candidate.clone(),
            arms: Vec::new(),
        })?;
        Ok(Self {
            pictures: pictures.into_iter().map(|p| (p.caption, p.svg)).collect(),
            figures: Figures {
                smoke: options.smoke,
                candidate: candidate.name.clone(),
                baseline: baseline.name.clone(),
                settings,
                arms: summaries,
                paired,
                strata,
                losses,
                looked_at,
                worst: worst(candidate, baseline)?,
            },
        })
    }

    /// One HTML file.
    ///
    /// # Errors
    /// If the template is wrong.
    pub fn html(&self) -> Result<String, EvidenceError> {
        self.render("report.html", include_str!("report.html"))
    }

    /// Markdown, without pictures.
    ///
    /// # Errors
    /// If the template is wrong.
    pub fn markdown(&self) -> Result<String, EvidenceError> {
        self.render("report.md", include_str!("report.md"))
    }

    fn render(&self, name: &'static str, template: &'static str) -> Result<String, EvidenceError> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.add_filter("seconds", |value: Option<f64>| {
            value.map_or_else(|| "–".to_owned(), seconds)
        });
        environment.add_filter("percent", |value: Option<f64>| {
            value.map_or_else(|| "–".to_owned(), percent)
        });
        environment.add_filter("change", |value: f64| difference(value, None));
        environment.add_filter("p_value", |value: Option<f64>| {
            value.map_or_else(|| "–".to_owned(), p_value)
        });
        environment.add_filter("millions", |value: f64| format!("{:.2}", value / 1e6));
        environment.add_template(name, template)?;
        let pictures: Vec<Value> = self
            .pictures
            .iter()
            .map(|(caption, svg)| context! { caption, svg => Value::from_safe_string(svg.clone()) })
            .collect();
        Ok(environment
            .get_template(name)?
            .render(context! { f => Value::from(Serde(&self.figures)), pictures })?)
    }
}

fn find<'a>(arms: &'a [Arm], name: &str) -> Result<&'a Arm, EvidenceError> {
    arms.iter()
        .find(|arm| arm.name == name)
        .ok_or_else(|| EvidenceError::NoArm {
            name: name.to_owned(),
            arms: arms.iter().map(|arm| arm.name.clone()).collect(),
        })
}

/// The arm with the lowest mean TTFT beside the candidate.
fn fastest<'a>(summaries: &'a [ArmSummary], options: &Options) -> Option<&'a str> {
    let others = summaries
        .iter()
        .filter(|s| s.arm != options.candidate && !options.oracles.contains(&s.arm));
    let mean = |s: &ArmSummary| s.ttft.as_ref()?.figures.first().map(|mean| mean.value);
    let timed = others.filter_map(|s| Some((mean(s)?, s.arm.as_str())));
    timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
}

fn losses(paired: &[Paired], strata: &Strata, options: &Options) -> (Vec<Loss>, usize) {
    let real = paired.iter().filter(|p| !options.oracles.contains(&p.baseline));
    let whole = real.flat_map(|p| p.all.iter().map(|c| (p.baseline.as_str(), "all turns".to_owned(), c)));
    let sliced = strata.slices.iter().flat_map(|s| {
        let name = format!("{} {}", s.dimension, s.slice);
        s.metrics
            .iter()
            .map(move |c| (strata.baseline.as_str(), name.clone(), c))
    });
    let mut losses = Vec::new();
    let mut looked_at = 0;
    for (baseline, slice, compared) in whole.chain(sliced) {
        looked_at += compared.deltas.len();
        if compared.deltas.iter().any(Delta::is_loss) {
            losses.push(Loss {
                baseline: baseline.to_owned(),
                slice,
                metric: compared.metric,
                pairs: compared.pairs,
                deltas: compared.deltas.clone(),
            });
        }
    }
    (losses, looked_at)
}

fn worst(candidate: &Arm, baseline: &Arm) -> Result<Vec<Worst>, EvidenceError> {
    let ms = |pair: &super::paired::Pair<'_>| {
        let time = |(run, row)| super::measure::Metric::Ttft.of(run, row);
        ((time(pair.candidate) - time(pair.baseline)) * 1e6) as i64
    };
    let mut pairs = super::paired::pairs(candidate, baseline)?;
    pairs.sort_by_key(|pair| Reverse(ms(pair)));
    let lost = pairs.into_iter().filter(|pair| ms(pair) > 0).take(WORST);
    let ttft = |row| super::measure::Metric::Ttft.served(row);
    Ok(lost
        .map(|pair| {
            let (run, row) = pair.candidate;
            let path = row.path.map_or("", |path| path.label());
            Worst {
                session: row.session.clone(),
                turn: row.turn + 1,
                seed: run.head.seed,
                input: row.input,
                append: row.input.saturating_sub(row.carried as usize),
                candidate: ttft(row),
                baseline: ttft(pair.baseline.1),
                how: match (&row.error, row.why) {
                    (Some(failure), _) => format!("{}: {}", failure.reason, failure.detail),
                    (None, Some(why)) => format!("{path}: {why}"),
                    (None, None) => path.to_owned(),
                },
            }
        })
        .collect())
}

/// Seconds with three digits that count.
pub fn seconds(value: f64) -> String {
    // Just below a bound it rounds to it.
    match value.abs() * 1.0005 {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        v if v >= 0.01 => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

/// A difference with its interval, in seconds: `−0.12 [−0.20, −0.05]`.
pub fn difference(value: f64, interval: Option<Interval>) -> String {
    let sign = |v: f64| {
        if v > 0.0 {
            format!("+{}", seconds(v))
        } else {
            seconds(v)
        }
    };
    let text = match interval {
        Some(Interval { low, high }) => format!("{} [{}, {}]", sign(value), sign(low), sign(high)),
        None => sign(value),
    };
    text.replace('-', "−")
}

/// A share as per cent.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A p-value; those at the resolution of the resamples are bounds.
pub fn p_value(value: f64) -> String {
    if value < 0.001 {
        "<0.001".to_owned()
    } else {
        format!("{value:.3}")
    }
}

impl Compared {
    /// The delta of `figure`.
    pub fn delta(&self, figure: &str) -> Option<&Delta> {
        self.deltas.iter().find(|delta| delta.estimate.figure == figure)
    }
}
