//! What the control plane adds to a turn. Compared are, in turns within one loop so that what else the machine does hits all:
//!
//! * a turn through real processes (`pinion up`: gateway, control, one D, one P, NATS) over HTTP, until the first event with
//!   text has been read. Each is a direct append to a warm session; a turn on another path fails the run;
//! * the same turn in this process: submit to the same engine, until its first token. The engine's work takes no time, so
//!   this is what its bookkeeping costs. The median of it, per round, is taken off the first: what is left was added;
//! * the floor: the same three NATS hops between blocking sockets, and an HTTP round trip that ends in the gateway.

use crate::alloc;
use crate::hops::Hops;
use crate::table::{Row, Section, percentile};
use pinion_actors::{Engine, EngineOutput, Job};
use pinion_gpu_agent::engine::sim::{CostModel, SimConfig, SimEngine};
use pinion_schemas::{Micros, RequestId};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Rounds per row, and turns per round.
const ROUNDS: usize = 5;
const TURNS: usize = 300;
/// Turns before them that do not count.
const WARM: usize = 50;
/// Tokens of the smallest prompt. It fills no page, so all of it is new in each turn.
const TINY: usize = 20;
/// Tokens a turn appends to what its D holds, and tokens it generates.
const APPEND: usize = 40;
const ANSWER: u32 = 8;
/// Pause between turns: what a turn leaves to do after its last token (commit, snapshot) is done by then.
const REST: Duration = Duration::from_millis(4);
/// Tokens of each stream, and how long one after the other is read.
const STREAM: u32 = 5_000;
const STREAMING: Duration = Duration::from_secs(2);
/// Sessions made in the real cluster.
const SESSIONS: usize = 10_000;
/// Connections that make them.
const MAKERS: usize = 8;

/// Why nothing was measured.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// No work takes time. Each step still has its smallest unit, 1 µs.
fn engine() -> SimConfig {
    let cost = CostModel {
        ttft_base: Micros::ZERO,
        prefill_tokens_per_sec: 1_000_000_000_000,
        decode_step: Micros::ZERO,
        decode_per_request: Micros::ZERO,
        link_bytes_per_sec: 1_000_000_000_000_000,
        ..CostModel::default()
    };
    SimConfig {
        device_pages: 200_000,
        cost,
        ..SimConfig::default()
    }
}

/// A cluster of its own, stopped when dropped.
pub struct Cluster {
    binary: PathBuf,
    dir: PathBuf,
    address: String,
}

impl Cluster {
    fn up() -> Result<Self, Failure> {
        Self::with("turns", "")
    }

    /// A cluster with `settings` before the sections of its configuration; `name` tells it from others of this process.
    pub fn with(name: &str, settings: &str) -> Result<Self, Failure> {
        let here = std::env::current_exe()?;
        let beside = here.parent().and_then(|deps| deps.parent()).map(|d| d.join("pinion"));
        let named = std::env::var_os("PINION_BIN").map(PathBuf::from);
        let binary = named.or(beside).filter(|b| b.is_file());
        let binary = binary.ok_or("no binary: `cargo build --release -p pinion` makes it, or set PINION_BIN")?;
        let dir = std::env::temp_dir().join(format!("pinion-bench-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let engine = toml::to_string(&engine())?.replace("[cost]", "[engine.cost]");
        let prefill = engine.replace("[engine.cost]", "[prefill_engine.cost]");
        let file = dir.join("bench.toml");
        std::fs::write(
            &file,
            format!("{settings}\n[engine]\n{engine}\n[prefill_engine]\n{prefill}"),
        )?;
        let cluster = Self { binary, dir, address };
        let ended = cluster
            .command(&["up", "--prefill", "1", "--decode", "1", "--listen", &cluster.address])
            .arg("--config")
            .arg(&file)
            .status()?;
        if ended.success() {
            Ok(cluster)
        } else {
            Err("`pinion up` failed".into())
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(words).arg("--dir").arg(&self.dir).stdout(Stdio::null());
        command.env("PINION_LOG", "warn").env_remove("PINION_CONFIG");
        command
    }

    fn pid(&self, name: &str) -> Result<String, Failure> {
        let state: serde_json::Value = serde_json::from_slice(&std::fs::read(self.dir.join("state.json"))?)?;
        let processes = state["processes"].as_array().ok_or("no processes in state.json")?;
        let found = processes.iter().find(|p| p["name"] == name).ok_or("no such process")?;
        Ok(found["pid"].to_string())
    }

    /// Host and port of its NATS server.
    fn nats(&self) -> Result<String, Failure> {
        let config: toml::Table = std::fs::read_to_string(self.dir.join("pinion.toml"))?.parse()?;
        let url = config["nats"]["urls"][0].as_str().ok_or("no NATS URL in pinion.toml")?;
        Ok(url.trim_start_matches("nats://").to_owned())
    }

    /// A connection to its gateway.
    pub fn client(&self) -> Result<Client, Failure> {
        let socket = TcpStream::connect(&self.address)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(Duration::from_mins(1)))?;
        let reader = BufReader::with_capacity(1 << 16, socket.try_clone()?);
        Ok(Client { socket, reader })
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.command(&["down"]).status();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// What a streamed turn showed.
pub struct Seen {
    /// Time to the first event with text.
    pub first: Duration,
    /// Events with text.
    chunks: u32,
    /// How the turn was served.
    pub path: String,
}

/// One kept-alive HTTP connection, as plain as can be.
pub struct Client {
    socket: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Client {
    /// One streamed turn.
    pub fn turn(&mut self, session: &str, prompt: &str, max_tokens: u32) -> Result<Seen, Failure> {
        let body = format!(r#"{{"model":"pinion-sim","stream":true,"max_tokens":{max_tokens},"prompt":"{prompt}"}}"#);
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nx-session-id: {session}\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let begun = Instant::now();
        self.socket.write_all(request.as_bytes())?;
        let mut line = String::new();
        self.line(&mut line)?;
        if !line.starts_with("HTTP/1.1 200") {
            let mut rest = vec![0; 2_048];
            let got = self.reader.read(&mut rest)?;
            return Err(format!("{line}{}", String::from_utf8_lossy(&rest[..got])).into());
        }
        while !line.trim().is_empty() {
            self.line(&mut line)?;
        }
        let (mut first, mut chunks, mut path) = (None, 0, String::new());
        // Chunk sizes are lines of their own and are skipped like the empty ones.
        loop {
            self.line(&mut line)?;
            let Some(data) = line.strip_prefix("data: ") else {
                if line.trim() == "0" {
                    self.line(&mut line)?;
                    break;
                }
                continue;
            };
            if data.contains("\"error\"") {
                return Err(data.into());
            }
            first.get_or_insert_with(|| begun.elapsed());
            if let Some((_, tail)) = data.split_once("\"path\":\"") {
                tail.split('"').next().unwrap_or_default().clone_into(&mut path);
            } else if data.starts_with('{') {
                chunks += 1;
            }
        }
        let first = first.ok_or("no token")?;
        Ok(Seen { first, chunks, path })
    }

    /// A round trip to the gateway and no further.
    fn models(&mut self) -> Result<Duration, Failure> {
        let begun = Instant::now();
        self.socket
            .write_all(b"GET /v1/models HTTP/1.1\r\nhost: bench\r\n\r\n")?;
        let (mut line, mut length) = (String::new(), 0);
        while line != "\r\n" {
            self.line(&mut line)?;
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim().parse()?;
            }
        }
        self.reader.read_exact(&mut vec![0; length])?;
        Ok(begun.elapsed())
    }

    fn line(&mut self, line: &mut String) -> Result<(), Failure> {
        line.clear();
        match self.reader.read_line(line)? {
            0 => Err("the gateway closed the connection".into()),
            _ => Ok(()),
        }
    }
}

/// The same turn in this process: time to its first token.
fn direct(engine: &mut SimEngine, origin: Instant, number: u128, prompt: &str) -> Result<Duration, Failure> {
    let now = || Micros(origin.elapsed().as_micros() as u64);
    let request = RequestId(number);
    let job = Job {
        request,
        tokens: prompt.bytes().map(u32::from).collect(),
        max_new_tokens: ANSWER,
        sampling: pinion_schemas::Sampling::GREEDY,
        tenant: None,
    };
    let begun = Instant::now();
    Engine::submit(engine, now(), job)?;
    let mut first = None;
    loop {
        for output in Engine::advance(engine, now()) {
            match output {
                EngineOutput::Token(..) => drop(first.get_or_insert_with(|| begun.elapsed())),
                EngineOutput::Finished { .. } => return Ok(first.ok_or("no token")?),
                EngineOutput::Stored(_) | EngineOutput::Evicted(_) => {}
            }
        }
    }
}

/// One round: via the cluster, alone, hops, HTTP.
fn round(
    (client, hops, here): &mut (Client, Hops, SimEngine),
    origin: Instant,
    tokens: usize,
    number: usize,
) -> Result<[Vec<Duration>; 4], Failure> {
    let session = format!("bench-{tokens}");
    let width = APPEND.min(tokens);
    let base: String = (width..tokens).map(|i| char::from(b'a' + (i * 7 % 26) as u8)).collect();
    let mut all = [const { Vec::new() }; 4];
    for i in 0..TURNS + WARM {
        let i = number * (TURNS + WARM) + i;
        let prompt = format!("{base}{i:0>width$}");
        let own = direct(here, origin, (tokens << 32 | i) as u128, &prompt)?;
        let floor = hops.turn()?;
        let http = client.models()?;
        let seen = client.turn(&session, &prompt, ANSWER)?;
        if i % (TURNS + WARM) >= WARM {
            if seen.path != "direct" {
                return Err(format!("a turn of {tokens} tokens was {:?}, not direct", seen.path).into());
            }
            for (samples, sample) in all.iter_mut().zip([seen.first, own, floor, http]) {
                samples.push(sample);
            }
        }
        std::thread::sleep(REST);
    }
    Ok(all)
}

fn first_token(cluster: &Cluster, tokens: usize) -> Result<Vec<Row>, Failure> {
    eprintln!("turns: {tokens} tokens");
    let mut parties = (
        cluster.client()?,
        Hops::new(&cluster.nats()?, tokens)?,
        SimEngine::new(engine()),
    );
    let origin = Instant::now();
    let mut rounds: [Vec<(Vec<Duration>, Duration)>; 4] = Default::default();
    for number in 0..ROUNDS {
        let mut all = round(&mut parties, origin, tokens, number)?;
        all[1].sort_unstable();
        let alone = percentile(&all[1], 0.5);
        let bases = [alone, Duration::ZERO, Duration::ZERO, Duration::ZERO];
        for ((rounds, samples), base) in rounds.iter_mut().zip(all).zip(bases) {
            rounds.push((samples, base));
        }
    }
    let [via, alone, hops, http] = &mut rounds;
    Ok(vec![
        Row::rounds(format!("added to first token, {tokens} tokens"), via).goal(500.0, Some(3_000.0)),
        Row::rounds("  engine alone", alone),
        Row::rounds("  floor: 3 NATS hops, blocking sockets", hops),
        Row::rounds("  floor: GET /v1/models", http),
    ])
}

fn streams(cluster: &Cluster, count: usize) -> Result<Vec<Row>, Failure> {
    eprintln!("turns: {count} streams");
    let (begun, until) = (Instant::now(), Instant::now() + STREAMING);
    let read = |i: usize| -> Result<(u32, u32), Failure> {
        let (mut client, mut chunks, mut turns) = (cluster.client()?, 0, 0);
        while Instant::now() < until {
            let seen = client.turn(&format!("stream-{count}-{i}"), "tell me", STREAM)?;
            (chunks, turns) = (chunks + seen.chunks, turns + 1);
        }
        Ok((chunks, turns))
    };
    let seen: Vec<(u32, u32)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|i| scope.spawn(move || read(i))).collect();
        let joined = threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|_| Err("a client panicked".into())));
        joined.collect::<Result<_, _>>()
    })?;
    let took = begun.elapsed().as_secs_f64();
    let per_second = |n: u32| f64::from(n) / took;
    let (chunks, turns) = seen.iter().fold((0, 0), |sum, s| (sum.0 + s.0, sum.1 + s.1));
    Ok(vec![
        Row::value(format!("streamed chunks, {count} at once"), "/s", per_second(chunks)),
        Row::value(
            format!("streamed tokens, {count} at once"),
            "/s",
            per_second(turns) * f64::from(STREAM),
        ),
    ])
}

fn sessions(cluster: &Cluster) -> Result<Vec<Row>, Failure> {
    eprintln!("turns: {SESSIONS} sessions in a real cluster");
    let control = cluster.pid("control-0")?;
    let (before, begun) = (alloc::resident(&control), Instant::now());
    let make = |maker: usize| -> Result<(), Failure> {
        let mut client = cluster.client()?;
        for i in (maker..SESSIONS).step_by(MAKERS) {
            client.turn(&format!("{i:08x}-6d0a-4f8e-9a53-1c7f7b0e0001"), "hello", 1)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..MAKERS).map(|m| scope.spawn(move || make(m))).collect();
        let joined = threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|_| Err("a client panicked".into())));
        joined.collect::<Result<Vec<()>, _>>()
    })?;
    let took = begun.elapsed().as_secs_f64();
    std::thread::sleep(Duration::from_secs(1));
    let grown = alloc::resident(&control).saturating_sub(before) as f64;
    Ok(vec![
        Row::value(
            format!("RSS of a real control node, {SESSIONS} sessions"),
            "B",
            grown / SESSIONS as f64,
        )
        .goal(4096.0, None),
        Row::value(format!("  time to make them, {MAKERS} at once"), "s", took),
    ])
}

/// Measures; the second part belongs to the sessions' memory.
pub fn run() -> Result<(Section, Vec<Row>), Failure> {
    let cluster = Cluster::up()?;
    let mut rows = first_token(&cluster, TINY)?;
    rows.extend(first_token(&cluster, 8_000)?);
    for count in [1, 16] {
        rows.extend(streams(&cluster, count)?);
    }
    drop(cluster);
    // A fresh one: what the turns above have freed would hide what sessions take.
    let memory = sessions(&Cluster::up()?)?;
    let how = vec![
        format!(
            "{ROUNDS} rounds of {TURNS} warm direct turns, {} ms apart; less the engine's median; `pinion up` with one D",
            REST.as_millis()
        ),
        "and one P, all on this machine, like the client. \"best\" is the best round's p50.".to_owned(),
    ];
    let title = "a turn: gateway + control + NATS";
    Ok((Section { title, how, rows }, memory))
}
