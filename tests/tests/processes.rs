//! Real processes and real NATS, nothing broken: workers that come and go, clients that go, users who err.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use pinion_schemas::subject::Kind;
use pinion_tests::client::{End, Talk};
use pinion_tests::cluster::{Cluster, Folder, Size, alive, run};
use pinion_tests::{SOON, eventually, in_real_time};
use std::process::Output;
use std::time::{Duration, Instant};

fn size(prefill: u32, decode: u32) -> Size {
    Size {
        control: 1,
        prefill,
        decode,
    }
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

async fn turn_each(talks: &mut Vec<Talk>, n: usize) -> Vec<String> {
    let running: Vec<_> = talks
        .drain(..)
        .map(|mut talk| {
            tokio::spawn(async move {
                let end = talk.turn(n, 37).await;
                (talk, end)
            })
        })
        .collect();
    let mut paths = Vec::new();
    for turn in running {
        let (talk, end) = turn.await.unwrap();
        let End::Completed { path } = end else {
            panic!("{}: {end:?}", talk.session)
        };
        talks.push(talk);
        paths.push(path);
    }
    paths
}

async fn pin(cluster: &Cluster, session: &str) -> String {
    let view = cluster.session(session).await.expect("a session");
    view["state"]["pin"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_drain_moves_sessions_and_fails_no_turn_and_a_new_worker_gets_work() {
    in_real_time(async {
        let mut cluster = Cluster::start(size(1, 2)).await;
        let mut talks: Vec<Talk> = (0..6).map(|i| Talk::new(&cluster.url, i, 300)).collect();
        turn_each(&mut talks, 20).await;
        let leaves = pin(&cluster, &talks[0].session).await;
        // The drain comes while turns run.
        let url = cluster.url.clone();
        let running = tokio::spawn(async move {
            let paths = turn_each(&mut talks, 100).await;
            (talks, paths)
        });
        cluster.until_busy(&leaves).await;
        let drained = cluster.pinion(&["worker", "drain", &leaves]);
        assert!(drained.status.success(), "{}", text(&drained));
        let (mut talks, paths) = running.await.unwrap();
        assert!(paths.iter().all(|p| p == "direct"), "running turns stay: {paths:?}");
        let mut moved = 0;
        for _ in 0..3 {
            let paths = turn_each(&mut talks, 20).await;
            eprintln!("{paths:?} {}", cluster.session(&talks[0].session).await.unwrap());
            moved += paths.iter().filter(|p| *p != "direct").count();
            assert!(!paths.iter().any(|p| p == "fallback"), "{paths:?}");
        }
        for talk in &talks {
            assert_ne!(
                pin(&cluster, &talk.session).await,
                leaves,
                "{} was not moved",
                talk.session
            );
        }
        assert!(
            (1..=6).contains(&moved),
            "one extra prefill at most for each session: {moved}"
        );
        assert!(cluster.held(&leaves).await.is_empty());

        // Only a draining worker and a full one are left: the new one must get fresh sessions.
        cluster.join("decode-9");
        let mut number = 100;
        let until = Instant::now() + SOON;
        loop {
            let mut talk = Talk::new(&url, number, 300);
            assert!(matches!(talk.turn(5, 0).await, End::Completed { .. }));
            if pin(&cluster, &talk.session).await == "decode-9" {
                break;
            }
            assert!(Instant::now() < until, "the new worker gets no work");
            number += 1;
        }
        // Back from the drain, the old one gets work too.
        let back = cluster.pinion(&["worker", "drain", "--off", &leaves]);
        assert!(back.status.success(), "{}", text(&back));
        let until = Instant::now() + SOON;
        loop {
            number += 1;
            let mut talk = Talk::new(&url, number, 300);
            assert!(matches!(talk.turn(5, 0).await, End::Completed { .. }));
            if pin(&cluster, &talk.session).await == leaves {
                break;
            }
            assert!(Instant::now() < until, "after the drain the worker gets no work");
        }
        cluster.rest_within(SOON).await;
    });
}

#[test]
fn a_control_node_that_joins_gets_its_part_and_one_that_leaves_hands_its_own_back() {
    in_real_time(async {
        let mut cluster = Cluster::start(size(1, 2)).await;
        let mut talks: Vec<Talk> = (0..12).map(|i| Talk::new(&cluster.url, i, 300)).collect();
        turn_each(&mut talks, 10).await;
        let sessions: Vec<String> = talks.iter().map(|t| t.session.clone()).collect();
        let owned_by = async |cluster: &Cluster, name: &str| {
            let mut count = 0;
            for session in &sessions {
                count += usize::from(cluster.owner(session).await.as_deref() == Some(name));
            }
            count
        };
        assert_eq!(owned_by(&cluster, "control-0").await, 12);
        cluster.join_control("control-1");
        // It gets sessions while turns run, and no turn fails, and none has to be seeded again.
        let until = Instant::now() + SOON * 3;
        while !(3..=9).contains(&owned_by(&cluster, "control-1").await) {
            assert!(Instant::now() < until, "the new control node gets no sessions");
            let paths = turn_each(&mut talks, 30).await;
            assert!(paths.iter().all(|p| p == "direct"), "{paths:?}");
        }
        cluster.terminate("control-0");
        let paths = turn_each(&mut talks, 30).await;
        assert!(paths.iter().all(|p| p == "direct"), "{paths:?}");
        assert_eq!(owned_by(&cluster, "control-1").await, 12);
        cluster.rest_within(SOON).await;
    });
}

#[test]
fn a_store_that_loses_everything_costs_no_turn_and_no_seed() {
    in_real_time(async {
        let cluster = Cluster::start(size(1, 2)).await;
        let mut talks: Vec<Talk> = (0..6).map(|i| Talk::new(&cluster.url, i, 300)).collect();
        turn_each(&mut talks, 10).await;
        let url = cluster.url.clone();
        let running = tokio::spawn(async move {
            let paths = turn_each(&mut talks, 100).await;
            (talks, paths)
        });
        cluster.until_busy("decode-0").await;
        assert!(cluster.lose_store().await >= 64, "leases of all shards");
        let (mut talks, paths) = running.await.unwrap();
        assert!(paths.iter().all(|p| p == "direct"), "{paths:?}");
        // What workers hold says where the sessions are.
        let paths = turn_each(&mut talks, 10).await;
        assert!(paths.iter().all(|p| p == "direct"), "{paths:?}");
        let mut fresh = Talk::new(&url, 100, 300);
        assert!(matches!(fresh.turn(5, 0).await, End::Completed { .. }));
        cluster.rest_within(SOON).await;
    });
}

#[test]
fn a_client_that_goes_away_frees_everything_at_once() {
    in_real_time(async {
        let cluster = Cluster::start(size(1, 1)).await;
        // "At once": long before the turn would have ended by itself (10 s of decoding, 2 s of prefill).
        let at_once = Duration::from_secs(1);
        let mut streaming = Talk::new(&cluster.url, 1, 300);
        streaming.leave_after(1_000, 20).await;
        cluster.rest_within(at_once).await;
        let mut seeding = Talk::new(&cluster.url, 2, 8_000);
        seeding.leave_after(10, 0).await;
        cluster.rest_within(at_once).await;
        // Both sessions go on as if nothing had been.
        assert!(matches!(streaming.turn(10, 0).await, End::Completed { .. }));
        assert!(matches!(seeding.turn(10, 0).await, End::Completed { .. }));
        cluster.rest_within(SOON).await;
    });
}

#[test]
fn clients_that_go_away_at_once_leave_nothing_behind() {
    in_real_time(async {
        let cluster = Cluster::start(size(1, 2)).await;
        let http = reqwest::Client::new();
        let mut storm = Vec::new();
        for client in 0..8_u32 {
            let (http, url) = (http.clone(), format!("{}/v1/completions", cluster.url));
            storm.push(tokio::spawn(async move {
                for n in 0..40 {
                    let prompt = pinion_tests::client::prompt(client * 1_000 + n, 0, 400);
                    let body = serde_json::json!({"prompt": prompt, "max_tokens": 500, "stream": true});
                    let left = Duration::from_millis(u64::from(1 + (client + n) % 12));
                    // It goes wherever the turn is just then: that it fails for the client is the point.
                    let _ = http.post(&url).body(body.to_string()).timeout(left).send().await;
                }
            }));
        }
        for client in storm {
            client.await.unwrap();
        }
        cluster.rest_within(Duration::from_secs(3)).await;
        let mut next = Talk::new(&cluster.url, 1, 300);
        assert!(matches!(next.turn(5, 0).await, End::Completed { .. }));
    });
}

#[test]
fn turns_of_a_killed_gateway_end_and_its_clients_next_one_need_not_wait_for_their_deadline() {
    in_real_time(async {
        let mut cluster = Cluster::start(size(1, 1)).await;
        let mut talk = Talk::new(&cluster.url, 1, 300);
        assert!(matches!(talk.turn(5, 0).await, End::Completed { .. }));
        // 100 s of decoding.
        let mut ghost = Talk::new(&cluster.url, 1, 300);
        let running = tokio::spawn(async move { ghost.turn(10_000, 0).await });
        cluster.until_busy("decode-0").await;
        cluster.kill("gateway-0");
        assert!(
            matches!(running.await.unwrap(), End::Wrong(_)),
            "its connection is gone"
        );
        cluster.rest_within(SOON * 3).await;
        cluster.restart("gateway-0");
        eventually("the gateway is back", SOON, || async {
            reqwest::get(format!("{}/health", cluster.url)).await.ok()
        })
        .await;
        assert!(matches!(talk.turn(5, 0).await, End::Completed { .. }));
        // Told to end, it gives its turns up itself.
        let url = cluster.url.clone();
        let last = tokio::spawn(async move { Talk::new(&url, 2, 300).turn(10_000, 0).await });
        cluster.until_busy("decode-0").await;
        cluster.terminate("gateway-0");
        let end = last.await.unwrap();
        assert!(
            matches!(&end, End::Failed(text) if text.contains("shutting-down")),
            "{end:?}"
        );
        cluster.rest_within(Duration::from_secs(2)).await;
    });
}

#[test]
fn down_leaves_nothing_running() {
    in_real_time(async {
        let cluster = Cluster::start(size(1, 1)).await;
        let mut talk = Talk::new(&cluster.url, 1, 100);
        assert!(matches!(talk.turn(5, 0).await, End::Completed { .. }));
        let pids = cluster.pids();
        assert_eq!(pids.len(), 5, "nats, control, prefill, decode, gateway: {pids:?}");
        let again = cluster.pinion(&["up"]);
        assert_eq!(again.status.code(), Some(1));
        assert!(text(&again).contains("pinion down"), "{}", text(&again));

        let down = cluster.pinion(&["down"]);
        assert!(down.status.success(), "{}", text(&down));
        for (name, pid) in pids {
            assert!(!alive(pid), "{name} is left");
        }
        for address in [cluster.url.trim_start_matches("http://"), &cluster.nats] {
            assert!(std::net::TcpStream::connect(address).is_err(), "{address} is served");
        }
        let again = cluster.pinion(&["down"]);
        assert_eq!(again.status.code(), Some(1));
        assert!(text(&again).contains("pinion up"), "{}", text(&again));

        // The leases of the one before are free, not owned: the next one is up only when it owns them.
        let config = cluster.folder.0.join("start.toml").display().to_string();
        let listen = cluster.url.trim_start_matches("http://");
        let up = cluster.pinion(&["--config", &config, "up", "--decode", "1", "--listen", listen]);
        assert!(up.status.success(), "{}", text(&up));
        let workers = cluster.pinion(&["worker", "ls"]);
        assert!(workers.status.success(), "{}", text(&workers));
        assert!(matches!(talk.turn(5, 0).await, End::Completed { .. }));
        assert!(cluster.pinion(&["down"]).status.success());
    });
}

#[test]
fn a_broken_trace_line_is_named_and_stops_only_a_strict_replay() {
    in_real_time(async {
        let cluster = Cluster::start(size(1, 1)).await;
        let line = |at: u32, block: u32| {
            format!(
                r#"{{"timestamp":{at},"input_length":600,"output_length":5,"hash_ids":[{block},{}]}}"#,
                block + 1
            )
        };
        let trace = [
            &line(0, 10),
            "{\"timestamp\":1,",
            &line(2, 20),
            r#"{"timestamp":3,"input_length":"x"}"#,
        ]
        .join("\n");
        let file = cluster.folder.file("trace.jsonl", &trace);
        let replay =
            |more: &[&str]| cluster.pinion(&[&["replay", &file, "--max-think", "0.1", "--json"][..], more].concat());

        let lenient = replay(&[]);
        let said = text(&lenient);
        assert!(lenient.status.success(), "{said}");
        for number in ["trace.jsonl:2: ", "trace.jsonl:4: "] {
            assert!(said.contains(number), "{number}: {said}");
        }
        assert!(said.contains("input_length"), "the field is named: {said}");
        let summary: serde_json::Value = serde_json::from_slice(&lenient.stdout).unwrap();
        assert_eq!(
            (&summary["turns"], &summary["failed"]),
            (&2.into(), &0.into()),
            "{summary}"
        );

        let strict = replay(&["--strict"]);
        assert_eq!(strict.status.code(), Some(1));
        assert!(text(&strict).contains('2'), "the line is named: {}", text(&strict));

        let nobody = replay(&["--url", "http://127.0.0.1:1"]);
        assert_eq!(nobody.status.code(), Some(3), "turns failed: {}", text(&nobody));
    });
}

#[test]
fn users_errors_are_named() {
    let folder = Folder::new();
    let none = folder.0.join("none").display().to_string();
    let config = folder.file("unknown.toml", "cluster = \"a\"\n\n[gateway]\nmodle = \"x\"\n");
    let kind = folder.file("kind.toml", "[gateway]\nmax_prompt_tokens = \"many\"\n");
    let pages = folder.file("pages.toml", "[engine]\npage_tokens = 16\n");
    let empty = folder.file("empty.toml", "[nats]\nurls = []\n");
    let prose = folder.file("prose.txt", "Dear diary\n");
    let missing = folder.0.join("missing").display().to_string();
    // Arguments, exit code, what must be said.
    let cases: &[(&[&str], i32, &[&str])] = &[
        (
            &["--config", &config, "config"],
            1,
            &["unknown.toml", "modle", "line 4"],
        ),
        (
            &["--config", &kind, "config"],
            1,
            &["kind.toml", "max_prompt_tokens", "line 2"],
        ),
        (&["--config", &pages, "config"], 1, &["page_tokens", "prefill_engine"]),
        (&["--config", &empty, "worker", "ls"], 1, &["nats.urls"]),
        (&["--config", &missing, "config"], 1, &["missing"]),
        (&["replay", &missing], 1, &["missing"]),
        (&["replay", &prose], 1, &["prose.txt", "no known trace format"]),
        (&["replay", &prose, "--max-think=x"], 2, &["max-think"]),
        (&["down"], 1, &["pinion up"]),
        (&["up", "--decode", "0"], 1, &["--decode"]),
        (&["up", "--listen", "here"], 2, &["--listen"]),
        (&["up", "--engine", "gpu"], 2, &["--engine", "native"]),
        (&["up", "--engine", "native"], 1, &["--model"]),
        (&["up", "--model", "x.gguf"], 1, &["x.gguf"]),
        (&["up", "--engine", "sim", "--model", "x.gguf"], 1, &["--engine native"]),
        (&["up", "--engine", "native", "--model", &missing], 1, &["missing"]),
        (
            &["up", "--engine", "native", "--model", &prose],
            1,
            &["prose.txt", "no GGUF"],
        ),
        (&["gateway", "--engine", "native", "--model", &prose], 1, &["no GGUF"]),
        (&["fly"], 2, &["fly"]),
        (&[], 2, &["Usage"]),
    ];
    for (arguments, code, words) in cases {
        let output = run(&[&["--dir", &none][..], arguments].concat());
        let said = text(&output);
        assert_eq!(output.status.code(), Some(*code), "{arguments:?}: {said}");
        for word in *words {
            assert!(said.contains(word), "{arguments:?} must say {word:?}: {said}");
        }
        assert!(!said.contains("panicked"), "{arguments:?}: {said}");
    }
}

#[test]
fn workers_answer_any_nats_client() {
    in_real_time(async {
        let cluster = Cluster::start(size(1, 1)).await;
        for kind in [Kind::Decode, Kind::Prefill] {
            for name in cluster.workers(kind) {
                assert_eq!(cluster.inspect(name).await.expect("an answer")["worker"], name);
            }
        }
        let unknown = cluster.pinion(&["worker", "show", "nobody"]);
        assert_eq!(unknown.status.code(), Some(1));
        assert!(text(&unknown).contains("worker ls"), "{}", text(&unknown));
        let unknown = cluster.pinion(&["session", "show", "nobody"]);
        assert_eq!(unknown.status.code(), Some(1));
        assert!(text(&unknown).contains("nobody"), "{}", text(&unknown));
    });
}
