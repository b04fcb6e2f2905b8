//! `pinion replay`.

use crate::config::Config;
use crate::model::Served;
use crate::trace::{open_trace, tell_broken};
use anyhow::{Context as _, bail};
use clap::Args;
use pinion_eval::evidence::rows::{self, Head, Settings};
use pinion_eval::replay::{PromptMode, ReplayOptions, bar, replay};
use pinion_eval::trace::read;
use pinion_eval::trace::tokens::Vocab;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Arguments of `replay`.
#[derive(Args)]
pub struct ReplayArgs {
    /// The trace: Claude Code sessions, Mooncake, the prototype's format, or Azure CSV; told by its first line.
    trace: PathBuf,
    /// The gateway. Default: the one of the configuration.
    #[arg(long)]
    url: Option<String>,
    /// Longest pause before a turn, in seconds.
    #[arg(long, default_value_t = 10.0)]
    max_think: f64,
    /// Run so many times faster than recorded.
    #[arg(long, default_value_t = 1.0)]
    time_scale: f64,
    /// Only the first sessions.
    #[arg(long)]
    sessions: Option<usize>,
    /// Only the first turns of each session.
    #[arg(long)]
    max_turns: Option<usize>,
    /// Sessions at a time.
    #[arg(long, default_value_t = 64)]
    concurrency: usize,
    /// Mean seconds between starts of sessions, for traces without arrivals.
    #[arg(long, default_value_t = 0.0)]
    arrival_gap: f64,
    /// Most tokens to generate in a turn.
    #[arg(long)]
    max_output: Option<u32>,
    /// Cut longer prompts to so many tokens (and say how many): for pools smaller than the trace's contexts.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    max_input: usize,
    /// Send the trace's own blocks instead of continuing the real answers.
    #[arg(long)]
    exact_blocks: bool,
    /// Stop at the first broken line of the trace.
    #[arg(long)]
    strict: bool,
    /// Fail if less than so many percent of the turns after a session's first are direct.
    #[arg(long, value_name = "PERCENT")]
    min_direct: Option<f64>,
    /// Write settings and one JSON object a turn to this file, for `pinion compare` and `pinion report`.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Name of what is measured, in that file.
    #[arg(long, default_value = "pinion")]
    arm: String,
    /// Of made-up starts and of the jitter of retries: another one for each run of an arm.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print the summary as JSON.
    #[arg(long)]
    json: bool,
}

fn seconds(name: &str, value: f64) -> anyhow::Result<Duration> {
    Duration::try_from_secs_f64(value)
        .with_context(|| format!("--{name} {value} is no time span: give seconds, 0 or more"))
}

/// The last part of a path.
pub fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

/// Replays, prints, and says by the exit code whether turns failed.
pub fn run(config: &Config, arguments: ReplayArgs) -> anyhow::Result<ExitCode> {
    let path = &arguments.trace;
    let (format, reader) = open_trace(path)?;
    let report = read(reader, format, arguments.strict).with_context(|| path.display().to_string())?;
    tell_broken(path, &report.broken);
    let model = Served::open(config)?;
    // Ids from 256 on, so that no trace token is a byte of text to the simulated tokenizer, or a control token of a model.
    let vocab = Vocab {
        first: 256,
        size: model.tokenizer.vocab().saturating_sub(256).max(1),
    };
    let url = arguments
        .url
        .unwrap_or_else(|| format!("http://{}", config.gateway.listen));
    let mut options = ReplayOptions::new(url, model.name, vocab);
    options.max_think = seconds("max-think", arguments.max_think)?;
    options.arrival_gap = seconds("arrival-gap", arguments.arrival_gap)?;
    options.time_scale = arguments.time_scale;
    options.sessions = arguments.sessions;
    options.max_turns = arguments.max_turns;
    options.concurrency = arguments.concurrency;
    options.seed = arguments.seed;
    options.max_output_tokens = arguments.max_output;
    options.max_input_tokens = arguments.max_input;
    options.session_prefix = format!("r{}-", std::process::id());
    if arguments.exact_blocks {
        options.prompts = PromptMode::Blocks;
    }
    let head = Head {
        arm: arguments.arm,
        seed: arguments.seed,
        settings: Settings::of(&file_name(path), &report.trace, &options),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let summary = runtime.block_on(replay(report.trace, options, bar()))?;
    if let Some(out) = &arguments.out {
        rows::write(out, &head, &summary.records)?;
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        println!("{}", summary.render_table());
    }
    let direct = summary.paths_after_first.share(summary.paths_after_first.direct);
    if let (Some(least), Some(share)) = (arguments.min_direct, direct)
        && share * 100.0 < least
    {
        bail!(
            "{:.1} % of the turns after a session's first were direct, not {least} %",
            share * 100.0
        );
    }
    Ok(if summary.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(3)
    })
}
