//! `pinion roofline`.

use anyhow::Context as _;
use clap::Args;
use pinion_eval::roofline::{CONTEXTS, REUSE, Roofline, STUDY, Step};
use std::path::PathBuf;

/// Arguments of `roofline`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  pinion roofline                                the study of the digest
  pinion roofline deploy/roofline/active.toml    with the parameters that compute
  pinion roofline --context 131072 --reuse 0,98 --json")]
pub struct RooflineArgs {
    /// Description of model and GPU (TOML). Default: that of the digest's study.
    file: Option<PathBuf>,
    /// Contexts, in tokens.
    #[arg(long, value_delimiter = ',', default_values_t = CONTEXTS)]
    context: Vec<u64>,
    /// Cached shares of them, per cent.
    #[arg(long, value_delimiter = ',', default_values_t = REUSE)]
    reuse: Vec<u64>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// Prints the table.
pub fn run(arguments: &RooflineArgs) -> anyhow::Result<()> {
    let text = match &arguments.file {
        Some(path) => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
        None => STUDY.to_owned(),
    };
    let roofline = Roofline::parse(&text)?;
    let mut steps = Vec::new();
    for context in arguments.context.iter().copied().filter(|context| *context > 0) {
        steps.extend(arguments.reuse.iter().map(|reuse| roofline.prefill(context, *reuse)));
        steps.push(roofline.step(1, context));
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&steps)?);
        return Ok(());
    }
    println!(
        "{} on {}: operations bind from {:.0} a byte on",
        roofline.model.name,
        roofline.gpu.name,
        roofline.ridge()
    );
    println!(
        "{:>9}{:>9}{:>12}{:>12}{:>12}  {:<8}{:>11}",
        "context", "new", "TFLOP", "GB", "FLOP/byte", "bound by", "least ms"
    );
    for step in &steps {
        print_step(step);
    }
    Ok(())
}

fn print_step(step: &Step) {
    println!(
        "{:>9}{:>9}{:>12.2}{:>12.2}{:>12.1}  {:<8}{:>11.2}",
        step.context,
        step.new,
        step.flop / 1e12,
        step.bytes / 1e9,
        step.intensity,
        format!("{:?}", step.bound).to_lowercase(),
        step.seconds * 1e3
    );
}
