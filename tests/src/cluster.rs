//! A cluster of real processes in a folder of its own, and the means to break it.

use crate::{SOON, eventually, free_port};
use bytes::Bytes;
use pinion_bus::nats::{NatsBus, NatsOptions};
use pinion_bus::{Bus as _, Headers};
use pinion_schemas::shard::{lease_key, shard_of};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{ClusterId, SessionId, WorkerId};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a cluster may take to be ready or at rest, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// The cluster's configuration: a slow engine, so that there is a middle of a stream (10 ms a token) and of a seed (4,000
/// tokens/s), and small pages.
const CONFIG: &str = r"
[engine]
page_tokens = 16
device_pages = 4000
vocab = 50000
[engine.cost]
decode_step = 10000
[prefill_engine]
page_tokens = 16
device_pages = 4000
vocab = 50000
[prefill_engine.cost]
prefill_tokens_per_sec = 4000
";

/// The `pinion` binary: `PINION_BIN`, or what cargo builds next to this test.
///
/// # Panics
/// If it does not build.
pub fn pinion() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(named) = std::env::var_os("PINION_BIN") {
            return named.into();
        }
        // target/<profile>/deps/<test>
        let test = std::env::current_exe().expect("no name");
        let profile = test.ancestors().nth(2).expect("no target folder").to_owned();
        let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--package", "pinion", "--manifest-path"]);
        build.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"));
        build
            .arg("--target-dir")
            .arg(profile.parent().expect("no target folder"));
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(
            build.status().expect("cargo does not run").success(),
            "pinion does not build"
        );
        profile.join("pinion")
    })
}

/// Runs `pinion` with these arguments.
///
/// # Panics
/// If it does not start.
pub fn run(arguments: &[&str]) -> Output {
    let tools = concat!(env!("CARGO_MANIFEST_DIR"), "/../.tools/bin");
    let path = std::env::var("PATH").unwrap_or_default();
    Command::new(pinion())
        .args(arguments)
        .env("PATH", format!("{path}:{tools}"))
        .stdin(Stdio::null())
        .output()
        .expect("pinion does not start")
}

/// A folder that goes away with it, except after a panic.
pub struct Folder(pub PathBuf);

impl Folder {
    /// A new one.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::SeqCst);
        let path = std::env::temp_dir().join(format!("pinion-test-{}-{count}", std::process::id()));
        fs::create_dir_all(&path).expect("cannot make a folder");
        Self(path)
    }

    /// Writes a file into it.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).expect("cannot write");
        path.display().to_string()
    }
}

impl Default for Folder {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("left for a look: {}", self.0.display());
        } else {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// Whether a process runs; one that has ended but was not waited for does not.
pub fn alive(pid: i32) -> bool {
    let zombie = fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| s.contains(") Z "));
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid).is_ok()) && !zombie
}

/// How many of each.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Control nodes.
    pub control: u32,
    /// Prefill workers.
    pub prefill: u32,
    /// Decode workers.
    pub decode: u32,
}

/// A running cluster. Dropped, it and everything it started is gone.
pub struct Cluster {
    /// Its folder, `--dir`.
    pub folder: Folder,
    /// Its first gateway.
    pub url: String,
    /// Where its NATS server listens.
    pub nats: String,
    bus: NatsBus,
    subjects: Subjects,
    workers: Vec<(Kind, String)>,
    controls: Vec<String>,
    children: Vec<Child>,
}

impl Cluster {
    /// Starts one and waits until it serves.
    ///
    /// # Panics
    /// If it does not come up.
    pub async fn start(size: Size) -> Self {
        let folder = Folder::new();
        let config = folder.file("start.toml", CONFIG);
        let listen = format!("127.0.0.1:{}", free_port());
        let dir = folder.0.display().to_string();
        let (control, prefill, decode) = (
            size.control.to_string(),
            size.prefill.to_string(),
            size.decode.to_string(),
        );
        let up = run(&[
            "--config",
            &config,
            "--dir",
            &dir,
            "up",
            "--listen",
            &listen,
            "--control",
            &control,
            "--prefill",
            &prefill,
            "--decode",
            &decode,
        ]);
        assert!(
            up.status.success(),
            "up: {}\nin {}",
            String::from_utf8_lossy(&up.stderr),
            dir
        );
        let text = fs::read_to_string(folder.0.join("pinion.toml")).expect("no configuration");
        let config: toml::Table = text.parse().expect("unreadable configuration");
        let url = config["nats"]["urls"][0].as_str().expect("no url").to_owned();
        let mut options = NatsOptions::new(&url, "test");
        options.kv_bucket = Some("pinion-local".into());
        let names = |kind, what: &str, n: u32| -> Vec<(Kind, String)> {
            (0..n).map(|i| (kind, format!("{what}-{i}"))).collect()
        };
        Self {
            folder,
            url: format!("http://{listen}"),
            nats: url.trim_start_matches("nats://").to_owned(),
            bus: NatsBus::connect(options).await.expect("no bus"),
            subjects: Subjects::new(&ClusterId::new("local").expect("a name")),
            workers: [
                names(Kind::Decode, "decode", size.decode),
                names(Kind::Prefill, "prefill", size.prefill),
            ]
            .concat(),
            controls: (0..size.control).map(|i| format!("control-{i}")).collect(),
            children: Vec::new(),
        }
    }

    /// Runs `pinion` on this cluster.
    pub fn pinion(&self, arguments: &[&str]) -> Output {
        let dir = self.folder.0.display().to_string();
        run(&[&["--dir", &dir][..], arguments].concat())
    }

    fn state(&self) -> Value {
        let text = fs::read(self.folder.0.join("state.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Process ids by name.
    pub fn pids(&self) -> BTreeMap<String, i32> {
        let state = self.state();
        let processes = state["processes"].as_array().into_iter().flatten();
        processes
            .filter_map(|p| Some((p["name"].as_str()?.to_owned(), p["pid"].as_i64()? as i32)))
            .collect()
    }

    /// Kills a process as `kill -9` does. Returns when.
    ///
    /// # Panics
    /// If there is none of that name.
    pub fn kill(&self, name: &str) -> Instant {
        let pid = self.signal(name, Signal::KILL);
        let at = Instant::now();
        while alive(pid) {
            std::thread::sleep(Duration::from_millis(1));
        }
        at
    }

    /// Starts a process again, by the command that started it first.
    ///
    /// # Panics
    /// If it does not start.
    pub fn restart(&mut self, name: &str) {
        let state = self.state();
        let process = state["processes"]
            .as_array()
            .and_then(|all| all.iter().find(|p| p["name"] == name))
            .expect("no such process");
        let command: Vec<String> = serde_json::from_value(process["command"].clone()).expect("a command");
        self.spawn(name, &command);
    }

    /// Starts another process of this cluster; `command` is the binary and its arguments. It is written into the state, so
    /// that `pinion down` stops it.
    ///
    /// # Panics
    /// If it does not start.
    pub fn spawn(&mut self, name: &str, command: &[String]) {
        let log = File::options()
            .append(true)
            .create(true)
            .open(self.folder.0.join("logs").join(format!("{name}.log")))
            .expect("no log");
        let child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("no log"))
            .stderr(log)
            .spawn()
            .expect("does not start");
        let mut state = self.state();
        if let Some(all) = state["processes"].as_array_mut() {
            all.retain(|p| p["name"] != name);
            all.push(json!({"name": name, "pid": child.id(), "command": command}));
        }
        self.children.push(child);
        fs::write(self.folder.0.join("state.json"), state.to_string()).expect("cannot write the state");
    }

    /// Starts another role, with a configuration file of this cluster's folder.
    fn role(&mut self, name: &str, config: &str, words: &[&str]) {
        let (binary, config) = (pinion().display().to_string(), self.folder.0.join(config));
        let config = config.display().to_string();
        let command = [&[&binary, "--config", &config][..], words, &["--id", name]].concat();
        let command: Vec<String> = command.into_iter().map(str::to_owned).collect();
        self.spawn(name, &command);
    }

    /// Adds a decode worker. It is not waited for.
    pub fn join(&mut self, name: &str) {
        self.role(name, "pinion.toml", &["agent", "--role", "decode"]);
        self.workers.push((Kind::Decode, name.to_owned()));
    }

    /// Adds a control node. It is not waited for.
    pub fn join_control(&mut self, name: &str) {
        self.role(name, "pinion.toml", &["control"]);
        self.controls.push(name.to_owned());
    }

    /// Asks a process to end, as an operator or an orchestrator does.
    ///
    /// # Panics
    /// If there is none of that name.
    pub fn terminate(&self, name: &str) {
        self.signal(name, Signal::TERM);
    }

    fn signal(&self, name: &str, signal: Signal) -> i32 {
        let pid = self.pids()[name];
        kill_process(Pid::from_raw(pid).expect("a pid"), signal).expect("cannot signal");
        pid
    }

    /// Deletes everything in the store, as a `JetStream` server without its disk would. Returns how many keys that were.
    ///
    /// # Panics
    /// If the store does not answer.
    pub async fn lose_store(&self) -> usize {
        let mut lost = 0;
        for prefix in ["session.", "shard.", "control."] {
            for (key, _) in self.bus.kv_keys(prefix).await.expect("no keys") {
                self.bus.kv_delete(&key, None).await.expect("cannot delete");
                lost += 1;
            }
        }
        lost
    }

    /// Adds a gateway that reaches NATS on another port, and waits until it serves. Returns its URL.
    ///
    /// # Panics
    /// If it does not start.
    pub async fn join_gateway(&mut self, nats_port: u16) -> String {
        let port = free_port();
        let text = fs::read_to_string(self.folder.0.join("pinion.toml")).expect("no configuration");
        let mut config: toml::Table = text.parse().expect("unreadable configuration");
        config["nats"]["urls"] = vec![format!("nats://127.0.0.1:{nats_port}")].into();
        config["gateway"]["listen"] = format!("127.0.0.1:{port}").into();
        self.folder.file("gateway-1.toml", &config.to_string());
        self.role("gateway-1", "gateway-1.toml", &["gateway"]);
        let url = format!("http://127.0.0.1:{port}");
        let health = format!("{url}/health");
        eventually("the second gateway serves", PATIENCE, || async {
            reqwest::get(&health)
                .await
                .is_ok_and(|r| r.status().is_success())
                .then_some(())
        })
        .await;
        url
    }

    async fn ask(&self, kind: Kind, id: &str, verb: &'static str) -> Option<Value> {
        let subject = self.subjects.worker(kind, &WorkerId::new(id).ok()?, verb);
        let wait = Duration::from_secs(1);
        let answer = self
            .bus
            .request(subject.as_str(), Headers::new(), Bytes::new(), wait)
            .await;
        serde_json::from_slice(&answer.ok()?.payload).ok()
    }

    /// What a worker says of itself; `None` if it says nothing.
    pub async fn inspect(&self, name: &str) -> Option<Value> {
        let kind = self.workers.iter().find(|(_, n)| n == name)?.0;
        self.ask(kind, name, "inspect").await
    }

    /// What a control node says of itself; `None` if it says nothing.
    pub async fn control(&self, name: &str) -> Option<Value> {
        self.ask(Kind::Router, name, "inspect").await
    }

    /// What a session's owner says of it.
    pub async fn session(&self, session: &str) -> Option<Value> {
        let subject = self.subjects.session(&SessionId::new(session).ok()?, "inspect");
        let wait = Duration::from_secs(1);
        let answer = self
            .bus
            .request(subject.as_str(), Headers::new(), Bytes::new(), wait)
            .await;
        serde_json::from_slice(&answer.ok()?.payload).ok()
    }

    /// The control node that owns a session.
    pub async fn owner(&self, session: &str) -> Option<String> {
        let key = lease_key(shard_of(&SessionId::new(session).ok()?));
        let lease: Value = serde_json::from_slice(&self.bus.kv_get(&key).await.ok()??.value).ok()?;
        lease["owner"].as_str().map(str::to_owned)
    }

    /// Turns and seeds a worker holds: session, request and attempt of each.
    pub async fn held(&self, name: &str) -> Vec<Held> {
        let Some(view) = self.inspect(name).await else {
            return Vec::new();
        };
        let lists = [&view["turns"], &view["seeds"]];
        let all = lists.into_iter().filter_map(Value::as_array).flatten();
        all.map(|t| Held {
            session: t["session"].as_str().unwrap_or_default().to_owned(),
            request: t["request"].as_str().unwrap_or_default().to_owned(),
            attempt: t["attempt"].as_u64().unwrap_or_default(),
            busy: t["running"] == true || t["stage"] == "computing",
        })
        .collect()
    }

    /// Waits until a worker works for a turn.
    ///
    /// # Panics
    /// If it does not soon.
    pub async fn until_busy(&self, name: &str) {
        eventually("a worker is busy", SOON, || async {
            self.held(name).await.iter().any(|h| h.busy).then_some(())
        })
        .await;
    }

    /// Names of all workers of a kind.
    pub fn workers(&self, kind: Kind) -> impl Iterator<Item = &str> {
        self.workers
            .iter()
            .filter(move |(k, _)| *k == kind)
            .map(|(_, n)| n.as_str())
    }

    /// Why the cluster is not at rest; `None` if it is: no turn, no seed, no page used or promised, anywhere.
    async fn unrest(&self) -> Option<String> {
        for (kind, name) in &self.workers {
            let Some(view) = self.ask(*kind, name, "inspect").await else {
                return Some(format!("{name} does not answer"));
            };
            let ledger = &view["ledger"];
            let rest = match kind {
                Kind::Decode => {
                    view["turns"] == json!([])
                        && ledger["used_pages"] == 0
                        && ledger["locked_elsewhere"] == 0
                        && ledger["running"] == json!({})
                        && ledger["permits"]["pending"] == json!([])
                        && ledger["permits"]["pending_pages"] == 0
                        && ledger["permits"]["pending_bytes"] == 0
                        && ledger["permits"]["waiting"] == json!([])
                        && ledger["room"] == ledger["pool_pages"]
                }
                _ => view["seeds"] == json!([]) && view["queued"] == 0 && view["queued_tokens"] == 0,
            };
            if !rest {
                return Some(format!("{name}: {view}"));
            }
        }
        for name in &self.controls {
            // A killed control node owns nothing; it need not be there.
            if let Some(view) = self.control(name).await
                && view["running_turns"] != 0
            {
                return Some(format!("{name}: {view}"));
            }
        }
        None
    }

    /// Waits until all budgets are at rest. Returns how long it took.
    ///
    /// # Panics
    /// If they are not within `patience`.
    pub async fn rest_within(&self, patience: Duration) -> Duration {
        let begun = Instant::now();
        loop {
            let Some(why) = self.unrest().await else {
                return begun.elapsed();
            };
            assert!(begun.elapsed() < patience, "not at rest within {patience:?}: {why}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Something a worker holds for a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The session.
    pub session: String,
    /// The request, as in subjects.
    pub request: String,
    /// The attempt.
    pub attempt: u64,
    /// Whether the engine works on it now.
    pub busy: bool,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for pid in self.pids().into_values().filter(|pid| alive(*pid)) {
            if let Some(pid) = Pid::from_raw(pid) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        for pid in self.pids().into_values() {
            let until = Instant::now() + Duration::from_secs(2);
            while alive(pid) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
