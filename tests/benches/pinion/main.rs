//! `make bench`: one table of what the goals of the design name, with the machine it was measured on.
//!
//! `make bench ARGS='--json'` prints JSON; `--only backup|route|sessions|transfer|turns` a part.

mod alloc;
mod backup;
mod hops;
mod route;
mod sessions;
mod table;
mod transfer;
mod turns;

use serde_json::{Value, json};
use std::process::ExitCode;

const PARTS: [&str; 5] = ["backup", "route", "sessions", "transfer", "turns"];

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn load() -> String {
    read("/proc/loadavg")
        .split_whitespace()
        .take(3)
        .collect::<Vec<_>>()
        .join(" ")
}

fn machine(before: &str) -> Value {
    let cpu = read("/proc/cpuinfo");
    let model = cpu
        .lines()
        .find(|l| l.starts_with("model name"))
        .and_then(|l| l.split_once(": "));
    json!({
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "cpu": model.map_or("?", |m| m.1),
        "load_before": before,
        "load_after": load(),
    })
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let only = words.iter().position(|w| w == "--only").and_then(|i| words.get(i + 1));
    if let Some(part) = only.filter(|o| !PARTS.contains(&o.as_str())) {
        eprintln!("no part {part:?}: give one of {}", PARTS.join(", "));
        return ExitCode::from(2);
    }
    let wanted = |part: &str| only.is_none_or(|o| o == part);
    let before = load();
    let (mut sections, mut memory, mut failed) = (Vec::new(), Vec::new(), false);
    // First, while this process is small and the machine as idle as it was found.
    if wanted("turns") {
        match turns::run() {
            Ok((section, rows)) => {
                sections.push(section);
                memory = rows;
            }
            Err(error) => {
                eprintln!("turns: {error}");
                failed = true;
            }
        }
    }
    if wanted("backup") {
        match backup::run() {
            Ok(section) => sections.push(section),
            Err(error) => {
                eprintln!("backup: {error}");
                failed = true;
            }
        }
    }
    if wanted("sessions") {
        memory.splice(0..0, sessions::run());
    }
    if wanted("route") {
        let (route, index) = route::run();
        sections.splice(0..0, [route, index]);
    }
    if wanted("transfer") {
        sections.push(transfer::run());
    }
    if !memory.is_empty() {
        sections.push(sessions::section(memory));
    }
    let machine = machine(&before);
    if words.iter().any(|w| w == "--json") {
        println!("{:#}", table::json(&machine, &sections));
    } else {
        let text = |key: &str| machine[key].as_str().unwrap_or("?").to_owned();
        let (cpu, load_before, load_after) = (text("cpu"), text("load_before"), text("load_after"));
        let line = format!(
            "pinion bench: {} cores, {cpu:.50}\nload average (1, 5, 15 min) before {load_before}, after {load_after}",
            machine["cores"]
        );
        print!("{}", table::text(&line, &sections));
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
