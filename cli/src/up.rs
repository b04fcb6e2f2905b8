//! A whole cluster on one machine: `pinion up` and `pinion down`.

use crate::config::Config;
use anyhow::{Context as _, bail};
use pinion_schemas::limits::MESSAGE_BYTES_MAX;
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long everything may take to be ready.
const READY: Duration = Duration::from_secs(30);
/// How long a process may take to stop by itself.
const STOP: Duration = Duration::from_secs(12);

/// What `up` starts.
pub struct Plan {
    /// Folder for logs, state and the configuration of all processes.
    pub dir: PathBuf,
    /// Servers to use instead of an own one.
    pub nats: Option<String>,
    /// Control nodes.
    pub control: u32,
    /// Prefill workers.
    pub prefill: u32,
    /// Decode workers.
    pub decode: u32,
}

/// A process that was started.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Process {
    /// `nats`, or the id of the role.
    pub name: String,
    /// Its process id.
    pub pid: i32,
    /// How it is started again.
    pub command: Vec<String>,
}

/// The file `state.json`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct State {
    /// In the order of their start.
    pub processes: Vec<Process>,
}

impl State {
    /// Reads the state of a folder.
    pub fn read(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("state.json");
        let text = fs::read(&path)
            .with_context(|| format!("no cluster was started in {} (`pinion up` starts one)", dir.display()))?;
        serde_json::from_slice(&text).with_context(|| {
            format!(
                "{} is damaged: stop the processes it was about by hand, then remove it",
                path.display()
            )
        })
    }

    /// After each start, and at once as a whole: whatever happens to `up`, `down` finds what runs.
    fn write(&self, dir: &Path) -> anyhow::Result<()> {
        let (new, path) = (dir.join("state.json.new"), dir.join("state.json"));
        fs::write(&new, serde_json::to_vec_pretty(self)?).context("cannot write state.json")?;
        fs::rename(&new, &path).context("cannot write state.json")
    }

    fn add(&mut self, dir: &Path, process: Process) -> anyhow::Result<()> {
        self.processes.push(process);
        self.write(dir)
    }
}

impl Process {
    /// Whether it runs, and is still the process that was started: numbers are used again.
    fn runs(&self) -> bool {
        let proc = PathBuf::from(format!("/proc/{}", self.pid));
        let Ok(words) = fs::read(proc.join("cmdline")) else {
            return false;
        };
        if words.is_empty() {
            // Ended and not waited for, or so young that its command line is not there yet.
            let stat = fs::read_to_string(proc.join("stat")).unwrap_or_default();
            let state = stat.rsplit(')').next().unwrap_or_default().trim_start();
            return !state.is_empty() && !state.starts_with(['Z', 'X']);
        }
        let same = words.strip_suffix(b"\0").unwrap_or(&words).split(|b| *b == 0);
        same.eq(self.command.iter().map(String::as_bytes))
    }
}

fn start(dir: &Path, name: &str, command: &[String]) -> anyhow::Result<Process> {
    let log = File::create(dir.join("logs").join(format!("{name}.log"))).context("cannot write a log")?;
    let Some((program, arguments)) = command.split_first() else {
        bail!("nothing to start for {name}")
    };
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        // Its own group: Ctrl-C at the terminal is not for it.
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {program}"))?;
    Ok(Process {
        name: name.to_owned(),
        pid: i32::try_from(child.id()).context("a process id beyond i32")?,
        command: command.to_vec(),
    })
}

/// Finds `nats-server`: `NATS_SERVER`, `PATH`, then what `deploy/get-nats.sh` installed.
fn nats_server() -> anyhow::Result<PathBuf> {
    let named = std::env::var_os("NATS_SERVER").map(PathBuf::from);
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&paths).map(|d| d.join("nats-server"));
    let found = named
        .into_iter()
        .chain(on_path)
        .chain([PathBuf::from(".tools/bin/nats-server")])
        .find(|p| p.is_file());
    found.context("nats-server (2.10 or newer) was not found: put it on PATH, set NATS_SERVER, or give --nats URL")
}

/// Says no if a cluster that was started in `dir` runs.
pub fn check_free(dir: &Path) -> anyhow::Result<()> {
    if dir.join("state.json").exists() && State::read(dir)?.processes.iter().any(Process::runs) {
        bail!("a cluster is running in {}: `pinion down` stops it", dir.display());
    }
    Ok(())
}

/// Starts everything and waits until it serves.
pub fn up(mut config: Config, plan: &Plan) -> anyhow::Result<()> {
    let dir = &plan.dir;
    fs::create_dir_all(dir.join("logs")).with_context(|| format!("cannot make {}", dir.display()))?;
    TcpListener::bind(config.gateway.listen)
        .with_context(|| format!("{} is in use: choose another with --listen", config.gateway.listen))?;
    let mut state = State::default();
    let outcome = start_all(&mut config, plan, &mut state).and_then(|()| wait_ready(&config, plan, &state));
    if let Err(error) = outcome {
        stop_all(&state);
        let _ = fs::remove_file(dir.join("state.json"));
        return Err(error.context(format!(
            "the cluster did not come up; logs are in {}",
            dir.join("logs").display()
        )));
    }
    Ok(())
}

fn start_all(config: &mut Config, plan: &Plan, state: &mut State) -> anyhow::Result<()> {
    let dir = &plan.dir;
    if let Some(url) = &plan.nats {
        config.nats.urls = vec![url.clone()];
    } else {
        let port = free_port().context("no port is free for nats-server: give --nats URL")?;
        let store = dir.join("nats");
        let file = dir.join("nats.conf");
        let text = format!(
            "listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: \"{}\" }}\nmax_payload: {MESSAGE_BYTES_MAX}\n",
            store.display()
        );
        fs::write(&file, text).context("cannot write nats.conf")?;
        let command = [
            nats_server()?.display().to_string(),
            "--config".into(),
            file.display().to_string(),
        ];
        state.add(dir, start(dir, "nats", &command)?)?;
        config.nats.urls = vec![format!("nats://127.0.0.1:{port}")];
    }
    let file = dir.join("pinion.toml");
    fs::write(&file, toml::to_string_pretty(config)?).context("cannot write pinion.toml")?;
    let binary = std::env::current_exe()?.display().to_string();
    let mut role = |name: String, words: &[&str]| -> anyhow::Result<()> {
        let mut command = vec![binary.clone(), "--config".into(), file.display().to_string()];
        command.extend(words.iter().map(|w| (*w).to_owned()));
        command.extend(["--id".into(), name.clone()]);
        state.add(dir, start(dir, &name, &command)?)?;
        Ok(())
    };
    for i in 0..plan.control {
        role(format!("control-{i}"), &["control"])?;
    }
    for i in 0..plan.prefill {
        role(format!("prefill-{i}"), &["agent", "--role", "prefill"])?;
    }
    for i in 0..plan.decode {
        role(format!("decode-{i}"), &["agent", "--role", "decode"])?;
    }
    role("gateway-0".into(), &["gateway"])
}

/// A port below those that the system gives to outgoing connections, so that none takes it while the server restarts.
fn free_port() -> Option<u16> {
    let first = std::process::id() % 10_000;
    (0..10_000)
        .filter_map(|i| u16::try_from(20_000 + (first + i) % 10_000).ok())
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
}

/// Waits until the gateway answers and the router knows every worker.
fn wait_ready(config: &Config, plan: &Plan, state: &State) -> anyhow::Result<()> {
    let until = Instant::now() + READY;
    let mut tools = crate::inspect::Tools::new(config.clone());
    loop {
        if let Some(dead) = state.processes.iter().find(|p| !p.runs()) {
            bail!("{} has ended: see its log", dead.name);
        }
        let known = tools.count_workers().unwrap_or(0);
        let listening = std::net::TcpStream::connect(config.gateway.listen).is_ok();
        let owned = tools.all_shards_owned().unwrap_or(false);
        if listening && owned && known >= (plan.prefill + plan.decode) as usize {
            return Ok(());
        }
        if Instant::now() > until {
            bail!(
                "not ready after {} s: {known} workers known, gateway listening: {listening}",
                READY.as_secs()
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn stop_all(state: &State) {
    // The front first, NATS last: control nodes hand their shards back over it.
    for process in state.processes.iter().rev().filter(|p| p.runs()) {
        signal(process.pid, Signal::TERM);
        if process.name.starts_with("gateway") || process.name.starts_with("control") {
            wait_gone(process, STOP);
        }
    }
    for process in state.processes.iter().rev() {
        wait_gone(process, STOP);
        if process.runs() {
            signal(process.pid, Signal::KILL);
        }
    }
}

fn signal(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

fn wait_gone(process: &Process, patience: Duration) {
    let until = Instant::now() + patience;
    while process.runs() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Stops what `up` started. Returns how many processes were running.
pub fn down(dir: &Path) -> anyhow::Result<usize> {
    let state = State::read(dir)?;
    let running = state.processes.iter().filter(|p| p.runs()).count();
    stop_all(&state);
    fs::remove_file(dir.join("state.json")).context("cannot remove state.json")?;
    Ok(running)
}
