//! The bus on a real `nats-server`, started here: the shared suite, a killed server, services. Real time only.

#![allow(clippy::unwrap_used)] // only tests here; clippy sees helpers outside #[test]

mod common;

use std::collections::HashMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{LONG, answerer, ask, body};
use pinion_bus::nats::{Auth, NatsBus, NatsOptions};
use pinion_bus::{Bus, BusError, Headers};

fn binary() -> PathBuf {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/bin/nats-server");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join("nats-server"));
    let places = std::env::var_os("NATS_SERVER")
        .map(PathBuf::from)
        .into_iter()
        .chain([beside.clone()])
        .chain(on_path);
    places.into_iter().find(|place| place.is_file()).unwrap_or_else(|| {
        panic!(
            "these tests need nats-server >= 2.10: set NATS_SERVER, or put it at {} or on PATH",
            beside.display()
        )
    })
}

const JETSTREAM: &[&str] = &["-js"];

/// A server with its own port and folder; both go with it.
struct Server {
    child: Child,
    port: u16,
    folder: PathBuf,
    extra: &'static [&'static str],
}

impl Server {
    fn start(extra: &'static [&'static str]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("pinion-bus-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self {
            child: Self::spawn(port, &folder, extra),
            port,
            folder,
            extra,
        }
    }

    fn spawn(port: u16, folder: &Path, extra: &[&str]) -> Child {
        Command::new(binary())
            .args(["-a", "127.0.0.1", "-p", &port.to_string(), "-sd"])
            .arg(folder)
            .args(extra)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("nats-server starts")
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn restart(&mut self) {
        self.kill();
        self.child = Self::spawn(self.port, &self.folder, self.extra);
    }

    fn options(&self, name: &str) -> NatsOptions {
        NatsOptions {
            kv_bucket: Some("pinion".to_owned()),
            ..NatsOptions::new(&format!("nats://127.0.0.1:{}", self.port), name)
        }
    }

    async fn connect(&self, name: &str) -> NatsBus {
        NatsBus::connect(self.options(name))
            .await
            .expect("connects to the server just started")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_semantics() {
    let server = Server::start(JETSTREAM);
    let max = 1 << 20; // the server's default
    common::semantics(&server.connect("a").await, &server.connect("b").await, max).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_responders_comes_long_before_the_deadline() {
    let server = Server::start(JETSTREAM);
    let bus = server.connect("a").await;
    let start = Instant::now();
    let asked = bus
        .request("nobody", Headers::new(), Bytes::new(), Duration::from_secs(30))
        .await;
    assert!(matches!(asked, Err(BusError::NoResponders { .. })));
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_fails_what_is_in_flight_and_messages_flow_after_its_return() {
    let mut server = Server::start(JETSTREAM);
    let (a, b) = (server.connect("a").await, server.connect("b").await);
    let mut silent = b.subscribe("silent", None).await.unwrap();
    let _echo = answerer(&b, "echo", None, "b").await;
    ask(&a, "echo", "before").await;
    let revision = a.kv_create("k", body("v")).await.unwrap();

    let asking = tokio::spawn({
        let a = a.clone();
        async move {
            a.request("silent", Headers::new(), Bytes::new(), Duration::from_secs(30))
                .await
        }
    });
    silent.next().await.expect("the request is in flight");
    let killed = Instant::now();
    server.kill();
    assert_eq!(asking.await.unwrap().unwrap_err(), BusError::Disconnected);
    assert!(
        killed.elapsed() < Duration::from_secs(3),
        "took {:?} of the 30 s deadline",
        killed.elapsed()
    );

    let start = Instant::now();
    let down = a
        .request("echo", Headers::new(), Bytes::new(), Duration::from_secs(30))
        .await;
    assert_eq!(down.unwrap_err(), BusError::Disconnected);
    assert_eq!(a.kv_get("k").await, Err(BusError::Disconnected));
    assert!(start.elapsed() < Duration::from_secs(1));
    assert_eq!((a.connection().borrow().up, a.connection().borrow().drops), (false, 1));

    server.restart();
    assert_eq!(ask(&a, "echo", "after").await.payload, body("b:after"));
    a.connection().wait_for(|connection| connection.up).await.unwrap();
    let mut entry = Err(BusError::Disconnected);
    for _ in 0..100 {
        entry = a.kv_get("k").await; // JetStream takes a moment to come up
        if entry.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(entry.unwrap().expect("written to disk").revision, revision);
}

#[tokio::test(flavor = "multi_thread")]
async fn publish_while_down_never_hangs() {
    let mut server = Server::start(JETSTREAM);
    let options = NatsOptions {
        request_timeout: Duration::from_millis(300),
        ..server.options("a")
    };
    let bus = NatsBus::connect(options).await.unwrap();
    server.kill();
    bus.connection().wait_for(|connection| !connection.up).await.unwrap();
    let mut outcome = Ok(());
    for _ in 0..2_000 {
        let start = Instant::now();
        outcome = bus.publish("x", Headers::new(), body("m")).await;
        assert!(start.elapsed() < Duration::from_secs(3));
        if outcome.is_err() {
            break;
        }
    }
    assert!(matches!(outcome, Err(BusError::TimedOut { .. })), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_answers_ping_until_dropped() {
    let server = Server::start(JETSTREAM);
    let (a, b) = (server.connect("a").await, server.connect("b").await);
    let metadata = HashMap::from([("node".to_owned(), "n1".to_owned())]);
    let service = b
        .serve("pinion-decode", "0.1.0", "a decode worker", metadata)
        .await
        .unwrap();
    for subject in ["$SRV.PING", "$SRV.PING.pinion-decode"] {
        let pong = String::from_utf8(ask(&a, subject, "").await.payload.to_vec()).unwrap();
        assert!(pong.contains("pinion-decode") && pong.contains("n1"), "{pong}");
    }
    assert!(matches!(
        b.serve("not a name", "0.1.0", "", HashMap::new()).await,
        Err(BusError::Other(_))
    ));
    drop(service);
    let mut gone = false;
    for _ in 0..100 {
        let asked = a
            .request("$SRV.PING.pinion-decode", Headers::new(), Bytes::new(), LONG)
            .await;
        gone = matches!(asked, Err(BusError::NoResponders { .. }));
        if gone {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(gone, "still answers");
}

#[tokio::test(flavor = "multi_thread")]
async fn connecting_says_what_is_wrong() {
    let server = Server::start(&["-js", "--user", "u", "--pass", "p"]);
    let auth = |password: &str| Auth::UserPassword("u".to_owned(), password.to_owned());
    assert!(
        NatsBus::connect(NatsOptions {
            auth: auth("p"),
            ..server.options("a")
        })
        .await
        .is_ok()
    );
    let refused = NatsBus::connect(NatsOptions {
        auth: auth("wrong"),
        ..server.options("a")
    })
    .await
    .map(drop);
    assert!(matches!(refused, Err(BusError::Other(_))), "{refused:?}");
    assert!(!format!("{:?}", auth("secret")).contains("secret"));

    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let nobody = NatsOptions::new(&format!("nats://127.0.0.1:{free}"), "a");
    let nobody = NatsOptions {
        connect_timeout: Duration::from_millis(300),
        ..nobody
    };
    assert_eq!(NatsBus::connect(nobody).await.map(drop), Err(BusError::Disconnected));

    let without = NatsOptions {
        auth: auth("p"),
        kv_bucket: None,
        ..server.options("a")
    };
    let bus = NatsBus::connect(without).await.unwrap();
    assert!(matches!(bus.kv_get("k").await, Err(BusError::KvUnavailable { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_jetstream_only_the_store_is_missing() {
    let server = Server::start(&[]);
    let bus = server.connect("a").await;
    assert!(matches!(bus.kv_get("k").await, Err(BusError::KvUnavailable { .. })));
    let _echo = answerer(&bus, "echo", None, "a").await;
    assert_eq!(ask(&bus, "echo", "x").await.payload, body("a:x"));
}
