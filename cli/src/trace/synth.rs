//! `pinion trace synth`.

use super::Out;
use clap::{Args, Subcommand};
use pinion_eval::bar;
use pinion_eval::synth;
use pinion_eval::trace::{Session, write_session};

/// What to make up.
#[derive(Subcommand)]
#[command(after_help = "\
Examples:
  pinion trace synth swe --out swe.jsonl && pinion trace stats swe.jsonl
  pinion trace synth inferact --sessions 610 --turns 33.2 --seed 3 --out inferact.jsonl
  pinion trace synth adversarial --shared-blocks 500 --out storm.jsonl
The same seed gives the same trace on all machines.")]
pub enum Synth {
    /// Long sessions of a coding agent, about one at a time, nothing shared (SWE-50).
    Swe {
        #[command(flatten)]
        common: Common<52>,
    },
    /// Agents that start within a minute, with a common system prompt and fast growth (Inferact-50).
    Inferact {
        #[command(flatten)]
        common: Common<50>,
        /// Mean turns of a session.
        #[arg(long, default_value_t = 25.7)]
        turns: f64,
        /// Blocks of 24 tokens that all sessions share.
        #[arg(long, value_name = "BLOCKS", default_value_t = 50)]
        shared_blocks: u32,
    },
    /// A large service for coding, most of whose sessions have one turn (GLM coder trace).
    Glm {
        #[command(flatten)]
        common: Common<10_000>,
    },
    /// Short chats (`ShareGPT`).
    Sharegpt {
        #[command(flatten)]
        common: Common<200>,
    },
    /// Sessions that all need a seed within one second.
    Adversarial {
        #[command(flatten)]
        common: Common<100>,
        /// Turns of each.
        #[arg(long, default_value_t = 4)]
        turns: usize,
        /// Blocks of 24 tokens that all sessions share.
        #[arg(long, value_name = "BLOCKS", default_value_t = 50)]
        shared_blocks: u32,
    },
    /// Equal sessions with small appends, without any chance in them.
    Microbench {
        /// Sessions.
        #[arg(long, default_value_t = 8)]
        sessions: usize,
        /// Turns of each.
        #[arg(long, default_value_t = 3)]
        turns: usize,
        /// Tokens of the first prompt.
        #[arg(long, value_name = "TOKENS", default_value_t = 10_000)]
        initial: u32,
        /// Tokens that a turn adds to prompt and answer before.
        #[arg(long, value_name = "TOKENS", default_value_t = 1_000)]
        append: u32,
        /// Tokens of an answer.
        #[arg(long, value_name = "TOKENS", default_value_t = 1_000)]
        output: u32,
        /// From request to request.
        #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
        gap: f64,
        /// From start to start.
        #[arg(long, value_name = "SECONDS", default_value_t = 0.1)]
        stagger: f64,
        #[command(flatten)]
        out: Out,
    },
}

/// What all but one have, and the sessions made without `--sessions`.
#[derive(Args)]
pub struct Common<const SESSIONS: usize> {
    /// Sessions.
    #[arg(long, default_value_t = SESSIONS)]
    sessions: usize,
    /// Of all chance.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    out: Out,
}

/// Writes sessions as they are made.
fn write(sessions: impl Iterator<Item = Session>, count: usize, out: &Out) -> anyhow::Result<()> {
    let bar = bar::bar(count as u64, "sessions");
    let requests = out.write(|writer| {
        let mut requests = 0;
        for session in bar.wrap_iter(sessions) {
            requests += session.turns.len();
            write_session(&session, &[], writer)?;
        }
        Ok(requests)
    })?;
    bar.finish_and_clear();
    eprintln!("{count} sessions, {requests} requests");
    Ok(())
}

impl Synth {
    /// Makes it and writes it.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Swe {
                common: Common { sessions, seed, out },
            } => write(synth::swe(synth::Swe { sessions, seed }), sessions, &out),
            Self::Inferact {
                common: Common { sessions, seed, out },
                turns,
                shared_blocks,
            } => {
                super::positive("turns", turns)?;
                let options = synth::Inferact {
                    sessions,
                    turns,
                    shared_blocks,
                    seed,
                };
                write(synth::inferact(options), sessions, &out)
            }
            Self::Glm {
                common: Common { sessions, seed, out },
            } => write(synth::glm(synth::Glm { sessions, seed }), sessions, &out),
            Self::Sharegpt {
                common: Common { sessions, seed, out },
            } => write(synth::sharegpt(synth::ShareGpt { sessions, seed }), sessions, &out),
            Self::Adversarial {
                common: Common { sessions, seed, out },
                turns,
                shared_blocks,
            } => {
                let options = synth::Adversarial {
                    sessions,
                    turns,
                    shared_blocks,
                    seed,
                };
                write(synth::adversarial(options), sessions, &out)
            }
            Self::Microbench {
                sessions,
                turns,
                initial,
                append,
                output,
                gap,
                stagger,
                out,
            } => {
                super::span("gap", gap)?;
                super::span("stagger", stagger)?;
                let options = synth::Microbench {
                    sessions,
                    turns,
                    initial,
                    append,
                    output,
                    gap_s: gap,
                    stagger_s: stagger,
                };
                write(synth::microbench(options), sessions, &out)
            }
        }
    }
}
