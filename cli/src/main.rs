//! `pinion`: every role of a cluster, and the tools of its operators.

mod chaos;
mod config;
mod evidence;
mod inspect;
mod model;
mod replay;
mod roles;
mod roofline;
mod trace;
mod up;

use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use config::Config;
use inspect::Tools;
use model::ModelArgs;
use pinion_gpu_agent::engine::native::FileTierConfig;
use pinion_gpu_agent::node::WorkerRole;
use serde_json::Value;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Serves multi-turn agent sessions on prefill/decode-disaggregated LLM engines.
#[derive(Parser)]
#[command(
    name = "pinion",
    version,
    after_help = "\
Examples:
  pinion up                               a cluster on this machine
  pinion replay TRACE.jsonl               real agent sessions against it
  pinion session ls                       what it holds
  pinion session show SESSION             where a session is and why
  pinion down                             stop it
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 done but some turns failed (replay)."
)]
struct Cli {
    /// Configuration file of all roles (TOML). Without it: the one of the cluster in --dir, else defaults.
    #[arg(long, global = true, env = "PINION_CONFIG")]
    config: Option<PathBuf>,
    /// Folder of the cluster that `pinion up` started.
    #[arg(long, global = true, default_value = ".pinion", env = "PINION_DIR")]
    dir: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a cluster on this machine: nats-server, gateway, control nodes and workers, each a process.
    Up(UpArgs),
    /// Stop the cluster that `up` started.
    Down,
    /// Run the HTTP front.
    Gateway {
        /// Name of this gateway.
        #[arg(long, default_value = "gateway-0")]
        id: String,
        #[command(flatten)]
        model: ModelArgs,
    },
    /// Run a control node: router and sessions.
    Control {
        /// Name of this node.
        #[arg(long, default_value = "control-0")]
        id: String,
    },
    /// Run a worker and its engine.
    Agent {
        /// Name of the worker.
        #[arg(long)]
        id: String,
        /// What it does.
        #[arg(long)]
        role: AgentRole,
        #[command(flatten)]
        model: ModelArgs,
    },
    /// Look at sessions.
    #[command(subcommand)]
    Session(SessionCommand),
    /// Look at workers and drain them.
    #[command(subcommand)]
    Worker(WorkerCommand),
    /// Print the events of all sessions, one JSON object a line.
    Events {
        /// Stop after so many seconds.
        #[arg(long)]
        seconds: Option<u64>,
    },
    /// Replay a trace against a running gateway.
    Replay(replay::ReplayArgs),
    /// Compare two arms on identical requests.
    Compare(evidence::CompareArgs),
    /// Look at slices of the turns: where an arm is fast or slow.
    Stratify(evidence::StratifyArgs),
    /// Write a report of runs, one HTML file: tables, slices, losses, pictures.
    Report(evidence::ReportArgs),
    /// Print what work on a GPU takes at least: operations, bytes, which of them binds.
    Roofline(roofline::RooflineArgs),
    /// Look at traces, sample, convert and make them up.
    #[command(subcommand)]
    Trace(trace::TraceCommand),
    /// Break simulated clusters on purpose, and check that nothing wrong ever happens.
    #[command(subcommand)]
    Chaos(chaos::ChaosCommand),
    /// Print the configuration in force.
    Config,
}

/// Pools that hold the sessions of a few dozen coding agents.
const UP_POOL_TOKENS: u64 = 4_000_000;

#[derive(Args)]
struct UpArgs {
    /// Prefill workers.
    #[arg(long, default_value_t = 1)]
    prefill: u32,
    /// Decode workers.
    #[arg(long, default_value_t = 3)]
    decode: u32,
    /// Control nodes.
    #[arg(long, default_value_t = 1)]
    control: u32,
    /// Use these NATS servers instead of starting one.
    #[arg(long)]
    nats: Option<String>,
    /// Where the gateway listens.
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Pool of each worker, in tokens. Default: 32,768 for a model, 4,000,000 simulated, or what --config says.
    #[arg(long)]
    pool_tokens: Option<u64>,
    /// Keep pages of KV in a file of at most so many bytes for each worker, in the folder of --dir: they outlive the pool and the process.
    /// For a model only. Default: no file, or what --config says.
    #[arg(long, value_name = "BYTES")]
    file_tier: Option<u64>,
    /// Let the simulated engines (--engine sim) work so many times as fast as the calibrated model.
    #[arg(long)]
    speed: Option<f64>,
    #[command(flatten)]
    model: ModelArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum AgentRole {
    /// Prefills for others.
    Prefill,
    /// Decodes, and runs short appends itself.
    Decode,
}

#[derive(Subcommand)]
enum SessionCommand {
    /// List sessions by control node.
    Ls,
    /// Show where a session is, and its migrations.
    Show {
        /// The session.
        id: String,
    },
    /// Print a session's events as they happen.
    Watch {
        /// The session.
        id: String,
        /// Stop after so many seconds.
        #[arg(long)]
        seconds: Option<u64>,
    },
    /// Say in words where a session is and why it was moved.
    Explain {
        /// The session.
        id: String,
    },
}

#[derive(Subcommand)]
enum WorkerCommand {
    /// List workers.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show a worker's ledger and turns.
    Show {
        /// The worker.
        id: String,
    },
    /// Let a decode worker take nothing new; its sessions move at their next turn.
    Drain {
        /// The worker.
        id: String,
        /// Let it take work again.
        #[arg(long)]
        off: bool,
    },
}

fn main() -> ExitCode {
    // `pinion session ls | head` is no failure.
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.to_string();
        if text.contains("failed printing to stdout") {
            std::process::exit(0);
        }
        eprintln!("{text}");
    }));
    let cli = Cli::parse();
    let role = matches!(
        cli.command,
        Command::Gateway { .. } | Command::Control { .. } | Command::Agent { .. }
    );
    let default = match cli.command {
        _ if role => "info,async_nats=warn",
        // Thousands of clusters are broken on purpose: what they warn of is known.
        Command::Chaos(_) => "off",
        _ => "warn",
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("PINION_LOG").unwrap_or_else(|_| default.into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("pinion: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let of_cluster = cli.dir.join("pinion.toml");
    let starts = matches!(cli.command, Command::Up(_));
    let path = cli
        .config
        .clone()
        .or_else(|| (!starts && of_cluster.is_file()).then_some(of_cluster));
    let mut config = Config::read(path.as_deref())?;
    match cli.command {
        Command::Up(mut arguments) => {
            if path.is_none() {
                arguments.model.or_native();
                size_sim_pools(&mut config, UP_POOL_TOKENS);
            }
            return start(&mut config, &cli.dir, &arguments);
        }
        Command::Down => println!("stopped {} processes", up::down(&cli.dir)?),
        Command::Gateway { id, model } => {
            model.apply(&mut config.model)?;
            runtime()?.block_on(roles::gateway(&config, &id))?;
        }
        Command::Control { id } => runtime()?.block_on(roles::control(&config, &id))?,
        Command::Agent { id, role, model } => {
            model.apply(&mut config.model)?;
            let role = match role {
                AgentRole::Prefill => WorkerRole::Prefill,
                AgentRole::Decode => WorkerRole::Decode,
            };
            runtime()?.block_on(roles::agent(&config, &id, role))?;
        }
        Command::Session(command) => session(Tools::new(config), command)?,
        Command::Worker(command) => worker(Tools::new(config), command)?,
        Command::Events { seconds } => Tools::new(config).events(None, seconds)?,
        Command::Replay(arguments) => return replay::run(&config, arguments),
        Command::Compare(arguments) => evidence::compare(&arguments)?,
        Command::Stratify(arguments) => evidence::stratify(&arguments)?,
        Command::Report(arguments) => evidence::report(arguments)?,
        Command::Roofline(arguments) => roofline::run(&arguments)?,
        Command::Trace(command) => trace::run(command, &config)?,
        Command::Chaos(command) => return chaos::chaos(&command),
        Command::Config => print!("{}", toml::to_string_pretty(&config)?),
    }
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

fn size_native(config: &mut Config, dir: &Path, arguments: &UpArgs) -> anyhow::Result<()> {
    if arguments.speed.is_some() {
        bail!("--speed is of simulated engines: add --engine sim, or leave it out");
    }
    if let Some(tokens) = arguments.pool_tokens {
        let pages = tokens / u64::from(config.native.page_tokens.max(1));
        config.native.pool_pages = u32::try_from(pages).unwrap_or(u32::MAX);
    }
    if let Some(bytes) = arguments.file_tier {
        let folder = std::path::absolute(dir.join("pages")).context("in --dir")?;
        config.native.file_tier = Some(FileTierConfig { folder, bytes });
    }
    Ok(())
}

fn size_sim(config: &mut Config, arguments: &UpArgs) -> anyhow::Result<()> {
    if arguments.file_tier.is_some() {
        bail!("--file-tier is of a model's pages: leave it out, or leave out --engine sim");
    }
    let speed = arguments.speed.unwrap_or(1.0);
    if !(speed.is_finite() && speed > 0.0) {
        bail!("--speed {speed} is not above 0");
    }
    for engine in [&mut config.engine, &mut config.prefill_engine] {
        engine.cost = engine.cost.faster(speed);
    }
    if let Some(tokens) = arguments.pool_tokens {
        size_sim_pools(config, tokens);
    }
    Ok(())
}

fn size_sim_pools(config: &mut Config, tokens: u64) {
    for engine in [&mut config.engine, &mut config.prefill_engine] {
        engine.device_pages = tokens / u64::from(engine.page_tokens.max(1));
    }
}

fn start(config: &mut Config, dir: &Path, arguments: &UpArgs) -> anyhow::Result<ExitCode> {
    if arguments.decode == 0 || arguments.prefill == 0 || arguments.control == 0 {
        bail!("--decode, --prefill and --control must be at least 1");
    }
    if arguments.pool_tokens == Some(0) {
        bail!("--pool-tokens 0 holds nothing: give the tokens of one worker's pool");
    }
    up::check_free(dir)?;
    arguments.model.apply(&mut config.model)?;
    model::check(config)?;
    if let Some(listen) = arguments.listen {
        config.gateway.listen = listen;
    }
    match config.model.engine {
        model::Engine::Native => size_native(config, dir, arguments)?,
        model::Engine::Sim => size_sim(config, arguments)?,
    }
    let UpArgs {
        prefill,
        decode,
        control,
        ref nats,
        ..
    } = *arguments;
    let plan = up::Plan {
        dir: dir.to_owned(),
        nats: nats.clone(),
        control,
        prefill,
        decode,
    };
    let (listen, cluster) = (config.gateway.listen, config.cluster.clone());
    up::up(config.clone(), &plan)?;
    println!("cluster {cluster} is up: {control} control, {prefill} prefill, {decode} decode");
    println!("  HTTP     http://{listen}/v1/chat/completions");
    println!("  logs     {}", dir.join("logs").display());
    println!("  look     pinion worker ls; pinion session ls; pinion events");
    println!("  stop     pinion down");
    Ok(ExitCode::SUCCESS)
}

fn print_json(value: &Value) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

fn session(mut tools: Tools, command: SessionCommand) -> anyhow::Result<()> {
    match command {
        SessionCommand::Ls => {
            for node in tools.sessions()? {
                println!(
                    "{}: {} turns running",
                    node["control"].as_str().unwrap_or("?"),
                    node["running_turns"]
                );
                for session in node["sessions"].as_array().into_iter().flatten() {
                    println!("  {}", session.as_str().unwrap_or("?").escape_debug());
                }
            }
        }
        SessionCommand::Show { id } => print_json(&tools.session(&id)?)?,
        SessionCommand::Watch { id, seconds } => tools.events(Some(&id), seconds)?,
        SessionCommand::Explain { id } => explain(&id, &tools.session(&id)?),
    }
    Ok(())
}

fn explain(id: &str, view: &Value) {
    let state = &view["state"];
    let owner = view["owner"].as_str().unwrap_or("?");
    match state["pin"].as_str() {
        Some(pin) => println!("session {id} belongs to {pin}: it completed the session's last kept turn there"),
        None => println!("session {id} belongs to no decode worker yet: no turn of it was completed and kept"),
    }
    println!(
        "its owner is {owner}; {} turns are committed, and {} tokens in full pages",
        state["next_turn"], state["committed_tokens"]
    );
    let migrations = state["migrations"].as_array().map_or(&[][..], Vec::as_slice);
    if migrations.is_empty() {
        println!("it was never moved");
    }
    for m in migrations {
        let text = |key: &str| m[key].as_str().unwrap_or("?").to_owned();
        println!(
            "it moved from {} to {} because: {}",
            text("from"),
            text("to"),
            text("reason")
        );
    }
    match state["active"].as_object() {
        None => println!("no turn is running"),
        Some(turn) => {
            let state = &turn["state"];
            // A state is its name, or an object of that one name with what belongs to it.
            let (name, more) = match state.as_object().and_then(|s| s.iter().next()) {
                Some((name, more)) => (name.as_str(), more),
                None => (state.as_str().unwrap_or("?"), &Value::Null),
            };
            let at = more["worker"].as_str().map(|w| format!(" on {w}")).unwrap_or_default();
            println!("a turn is under way: {}{at}", name.to_lowercase());
            let (attempts, sent) = (turn["attempt"].as_u64().unwrap_or(0) & 0xFFFF, &turn["sent"]);
            println!(
                "  request {}, attempt {attempts}, {sent} tokens sent",
                turn["turn"]["request"].as_str().unwrap_or("?")
            );
        }
    }
}

fn worker(mut tools: Tools, command: WorkerCommand) -> anyhow::Result<()> {
    match command {
        WorkerCommand::Ls { json } => {
            let view = tools.workers()?;
            if json {
                return print_json(&view);
            }
            println!(
                "{:<14} {:<8} {:<9} {:>7} {:>10} {:>10} {:>10}",
                "WORKER", "KIND", "STATE", "RUNNING", "QUEUED", "POOL", "ROOM"
            );
            for (name, w) in view["workers"].as_object().into_iter().flatten() {
                let state = match (w["alive"] == true, w["draining"] == true) {
                    (false, _) => "suspect",
                    (true, true) => "draining",
                    (true, false) => "alive",
                };
                let number = |key: &str| w[key].as_u64().unwrap_or(0);
                // A prefill worker promises nothing: all of its pool is a cache.
                let room = match w["kind"].as_str() {
                    Some("decode") => number("room_pages").to_string(),
                    _ => "-".to_owned(),
                };
                println!(
                    "{name:<14} {:<8} {state:<9} {:>7} {:>10} {:>10} {:>10}",
                    w["kind"].as_str().unwrap_or("?"),
                    number("running"),
                    number("queued_tokens"),
                    number("pool_pages"),
                    room,
                );
            }
            println!("QUEUED in tokens, POOL and ROOM in pages.");
        }
        WorkerCommand::Show { id } => print_json(&tools.worker(&id)?)?,
        WorkerCommand::Drain { id, off } => {
            tools.drain(&id, !off)?;
            println!("{id} {}", if off { "takes work again" } else { "takes nothing new" });
        }
    }
    Ok(())
}
