//! `pinion trace`.

use anyhow::Context as _;
use clap::{Args, Subcommand};
use pinion_eval::bar;
use pinion_eval::trace::stats::Collector;
use pinion_eval::trace::{self, BrokenLine, Format};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write as _};
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

/// A file, or standard input for `-`, behind a progress bar.
pub fn open_file(path: &Path) -> anyhow::Result<BufReader<Box<dyn Read>>> {
    if path == Path::new("-") {
        return Ok(BufReader::new(Box::new(bar::bytes(None).wrap_read(std::io::stdin()))));
    }
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let length = file.metadata().ok().map(|m| m.len());
    Ok(BufReader::with_capacity(1 << 20, Box::new(bar::bytes(length).wrap_read(file))))
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
pub fn run(command: TraceCommand) -> anyhow::Result<()> {
    match command {
        TraceCommand::Stats(arguments) => stats(arguments),
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
