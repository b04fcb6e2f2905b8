//! `pinion trace`.

mod synth;

use crate::config::Config;
use crate::model::{ModelArgs, Served};
use anyhow::{Context as _, bail};
use clap::{Args, Subcommand, ValueEnum};
use pinion_eval::bar;
use pinion_eval::trace::import::{ShareGptOptions, audit, sharegpt};
use pinion_eval::trace::sample::{Profile, SMALL_APPEND_TOKENS, SampleOptions, sample};
use pinion_eval::trace::stats::Collector;
use pinion_eval::trace::{self, BrokenLine, Format};
use pinion_schemas::Micros;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// What to do with traces.
#[derive(Subcommand)]
pub enum TraceCommand {
    /// Print what a trace is like: lengths, appends, pauses, prefix sharing.
    #[command(after_help = "\
Examples:
  pinion trace stats tests/data/claude_code_sample40.jsonl
  gzip -dc sessions.jsonl.gz | pinion trace stats - --json")]
    Stats(StatsArgs),
    /// Take some sessions of a trace, whole.
    #[command(after_help = "\
Examples:
  pinion trace sample TRACE.jsonl --sessions 50 --seed 7 --out fifty.jsonl
  pinion trace sample TRACE.jsonl --profile small-append --min-turns 10 --max-initial-input 30000 --out short.jsonl
  pinion trace sample TRACE.jsonl --rate 0.1 | pinion trace stats -")]
    Sample(SampleArgs),
    /// Make a trace of another format's, of an audit log or of conversations.
    #[command(after_help = "\
Examples:
  pinion trace convert mooncake.jsonl --out sessions.jsonl
  pinion trace convert --from audit proxy.jsonl --out sessions.jsonl
  pinion trace convert --from sharegpt conversations.json --model MODEL.gguf --out sessions.jsonl
What comes out has one session a line; all commands read it.")]
    Convert(ConvertArgs),
    /// Make a trace up.
    #[command(subcommand)]
    Synth(synth::Synth),
}

/// Where a trace comes from.
#[derive(Args)]
pub struct Source {
    /// The trace: Claude Code sessions, Mooncake, the prototype's format, or Azure CSV, told by its first line; `-` is
    /// standard input.
    trace: PathBuf,
    /// Stop at the first broken line instead of leaving such lines out.
    #[arg(long)]
    strict: bool,
}

/// Arguments of `trace stats`.
#[derive(Args)]
pub struct StatsArgs {
    #[command(flatten)]
    source: Source,
    /// Count the requests with more input than this, in tokens. Default: what a worker of the research prototype could take.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_values_t = [87_811, 92_098])]
    over: Vec<u32>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Arguments of `trace sample`.
#[derive(Args)]
pub struct SampleArgs {
    #[command(flatten)]
    source: Source,
    /// Keep so many sessions.
    #[arg(long)]
    sessions: Option<usize>,
    /// Keep this share of the sessions, 0 to 1.
    #[arg(long, default_value_t = 1.0)]
    rate: f64,
    /// The first sessions instead of any.
    #[arg(long)]
    first: bool,
    /// Only sessions with so many turns.
    #[arg(long, default_value_t = 1)]
    min_turns: usize,
    /// Only sessions whose first prompt has so many tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    min_initial_input: u32,
    /// Only sessions whose first prompt has no more tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = u32::MAX, hide_default_value = true)]
    max_initial_input: u32,
    /// Only sessions of this kind.
    #[arg(long, default_value = "default")]
    profile: ProfileArg,
    /// Longest append of the profile small-append.
    #[arg(long, value_name = "TOKENS", default_value_t = SMALL_APPEND_TOKENS)]
    append: u32,
    /// Only what is sent in the first so many seconds of the trace.
    #[arg(long, value_name = "SECONDS")]
    target_duration: Option<f64>,
    /// Of the choice.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    out: Out,
}

/// Kinds of sessions.
#[derive(Clone, Copy, ValueEnum)]
enum ProfileArg {
    /// Any.
    Default,
    /// Every later turn keeps the prompt before and appends at most --append tokens.
    SmallAppend,
}

/// Arguments of `trace convert`.
#[derive(Args)]
pub struct ConvertArgs {
    #[command(flatten)]
    source: Source,
    /// What the file is.
    #[arg(long, default_value = "trace")]
    from: From,
    /// `ShareGPT`: only the first conversations.
    #[arg(long, value_name = "N")]
    max_conversations: Option<usize>,
    /// `ShareGPT`: seconds from one session's start to the next.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    stagger: f64,
    /// `ShareGPT`: seconds from a request to the next one of its session.
    #[arg(long, value_name = "SECONDS", default_value_t = 2.5)]
    gap: f64,
    /// `ShareGPT`: tokens per block.
    #[arg(long, value_name = "TOKENS", default_value_t = trace::PROTOTYPE_BLOCK_TOKENS)]
    block: u32,
    /// `ShareGPT`: whose tokens to count; the model's that `make model` fetches without it.
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    out: Out,
}

/// What can be converted.
#[derive(Clone, Copy, ValueEnum)]
enum From {
    /// A trace of any format that is read.
    Trace,
    /// An audit log: lines with `instance_id`, `ts`, `messages`, `audit.prompt_tokens` and `audit.completion_tokens`.
    Audit,
    /// Conversations with their text, a JSON list or one a line.
    Sharegpt,
}

/// Where a trace goes.
#[derive(Args)]
pub struct Out {
    /// Write to this file. Default: standard output.
    #[arg(long)]
    out: Option<PathBuf>,
}

impl Out {
    /// Lets `fill` write.
    fn write<T>(&self, fill: impl FnOnce(&mut dyn Write) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let mut writer: Box<dyn Write> = match &self.out {
            Some(path) => {
                let created = File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
                Box::new(BufWriter::new(created))
            }
            None => Box::new(BufWriter::new(std::io::stdout().lock())),
        };
        let made = fill(&mut writer)?;
        writer.flush()?;
        Ok(made)
    }
}

/// A file, or standard input for `-`, behind a progress bar.
pub fn open_file(path: &Path) -> anyhow::Result<BufReader<Box<dyn Read>>> {
    if path == Path::new("-") {
        return Ok(BufReader::new(Box::new(bar::bytes(None).wrap_read(std::io::stdin()))));
    }
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let length = file.metadata().ok().map(|m| m.len());
    Ok(BufReader::with_capacity(
        1 << 20,
        Box::new(bar::bytes(length).wrap_read(file)),
    ))
}

/// Opens a trace and finds out its format.
pub fn open_trace(path: &Path) -> anyhow::Result<(Format, impl BufRead + use<>)> {
    trace::open(open_file(path)?).with_context(|| path.display().to_string())
}

/// Tells of the lines that were left out.
pub fn tell_broken(path: &Path, broken: &[BrokenLine]) {
    for broken in broken {
        eprintln!("{}:{}: {}", path.display(), broken.line, broken.error);
    }
}

/// Runs one of them.
pub fn run(command: TraceCommand, config: &Config) -> anyhow::Result<()> {
    match command {
        TraceCommand::Stats(arguments) => stats(arguments),
        TraceCommand::Sample(arguments) => take_sample(&arguments),
        TraceCommand::Convert(arguments) => convert(&arguments, config),
        TraceCommand::Synth(synth) => synth.run(),
    }
}

fn span(name: &str, seconds: f64) -> anyhow::Result<Micros> {
    if !(0.0..=1e9).contains(&seconds) {
        bail!("--{name} {seconds} is no time span: give seconds, 0 or more");
    }
    Ok(Micros((seconds * 1e6) as u64))
}

/// That turns can be drawn around `value`.
fn positive(name: &str, value: f64) -> anyhow::Result<()> {
    if !(value > 0.0 && value <= 1e6) {
        bail!("--{name} {value} is not above 0");
    }
    Ok(())
}

impl Source {
    /// The whole trace.
    fn read(&self) -> anyhow::Result<trace::Trace> {
        let (format, reader) = open_trace(&self.trace)?;
        let report = trace::read(reader, format, self.strict).with_context(|| self.trace.display().to_string())?;
        tell_broken(&self.trace, &report.broken);
        Ok(report.trace)
    }
}

fn take_sample(arguments: &SampleArgs) -> anyhow::Result<()> {
    if !(0.0..=1.0).contains(&arguments.rate) {
        bail!("--rate {} is not from 0 to 1", arguments.rate);
    }
    let options = SampleOptions {
        sessions: arguments.sessions,
        rate: arguments.rate,
        first: arguments.first,
        min_turns: arguments.min_turns,
        initial_input: (arguments.min_initial_input, arguments.max_initial_input),
        profile: match arguments.profile {
            ProfileArg::Default => Profile::Any,
            ProfileArg::SmallAppend => Profile::SmallAppend {
                limit: arguments.append,
            },
        },
        until: arguments
            .target_duration
            .map(|s| span("target-duration", s))
            .transpose()?,
        seed: arguments.seed,
    };
    let part = sample(arguments.source.read()?, &options);
    if part.sessions.is_empty() {
        bail!("no session is left: loosen the conditions, or raise --rate");
    }
    arguments.out.write(|out| Ok(trace::write(&part, out)?))?;
    eprintln!("{} sessions, {} requests", part.sessions.len(), part.request_count());
    Ok(())
}

fn convert(arguments: &ConvertArgs, config: &Config) -> anyhow::Result<()> {
    let path = &arguments.source.trace;
    let said = || path.display().to_string();
    match arguments.from {
        From::Trace => {
            let read = arguments.source.read()?;
            arguments.out.write(|out| Ok(trace::write(&read, out)?))
        }
        From::Audit => {
            let report = audit(open_file(path)?, arguments.source.strict).with_context(said)?;
            tell_broken(path, &report.broken);
            arguments.out.write(|out| Ok(trace::write(&report.trace, out)?))
        }
        From::Sharegpt => {
            let mut config = config.clone();
            let mut model = arguments.model.clone();
            model.or_native();
            model.apply(&mut config.model)?;
            let tokenizer = Served::open(&config)?.tokenizer;
            let options = ShareGptOptions {
                max_conversations: arguments.max_conversations.unwrap_or(usize::MAX),
                stagger: span("stagger", arguments.stagger)?,
                gap: span("gap", arguments.gap)?,
                block_tokens: arguments.block.max(1),
            };
            let reader = open_file(path)?;
            let encode = |text: &str| tokenizer.encode(text);
            let done = arguments.out.write(|out| {
                let write = |session: trace::Session| trace::write_session(&session, &[], out);
                sharegpt(reader, encode, &options, write).with_context(said)
            })?;
            eprintln!(
                "{} sessions; {} conversations without an answer left out",
                done.sessions, done.left_out
            );
            Ok(())
        }
    }
}

fn stats(arguments: StatsArgs) -> anyhow::Result<()> {
    let Source { trace: path, strict } = &arguments.source;
    let (format, reader) = open_trace(path)?;
    let mut collector = Collector::new(arguments.over);
    let broken = trace::stream(reader, format, *strict, &mut collector).with_context(|| path.display().to_string())?;
    tell_broken(path, &broken);
    let stats = collector.finish();
    let mut out = std::io::stdout().lock();
    if arguments.json {
        serde_json::to_writer_pretty(&mut out, &stats)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", stats.render_table())?;
    }
    Ok(())
}
