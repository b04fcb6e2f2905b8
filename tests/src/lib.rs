//! Tests across crates and processes: a harness that runs real clusters (the `pinion` binary, a real `nats-server`), breaks
//! them, and checks every token against text computed without any engine.

pub mod client;
pub mod cluster;
pub mod decoders;
pub mod proxy;

use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long anything may take that should happen at once, on a busy machine.
pub const SOON: Duration = Duration::from_secs(10);

/// Runs a test in real time, and no other of the same binary beside it: on two cores, two clusters would measure each other.
///
/// # Panics
/// If there is no runtime.
pub fn in_real_time<F: Future>(run: F) -> F::Output {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.expect("no runtime").block_on(run)
}

/// Asks again and again until there is an answer.
///
/// # Panics
/// If there is none within `patience`.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, patience: Duration, ask: impl Fn() -> F) -> T {
    let until = Instant::now() + patience;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < until, "not within {patience:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What `cargo metadata` says of this workspace.
///
/// # Panics
/// If it says nothing.
pub fn cargo_metadata(more: &[&str]) -> serde_json::Value {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let run = std::process::Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--manifest-path", manifest])
        .args(more)
        .output()
        .expect("cargo does not run");
    assert!(
        run.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&run.stderr)
    );
    serde_json::from_slice(&run.stdout).expect("cargo metadata is JSON")
}

/// A port of this machine that nobody listens on, below those that the system gives to outgoing connections: one of them
/// would take it before the server of the test does.
///
/// # Panics
/// If there is none.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id() * 61;
    (0..2_000)
        .map(|_| 10_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000)
        .filter_map(|port| u16::try_from(port).ok())
        .find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("no free port")
}
