//! Real processes, real NATS, real kills: no accepted turn is lost, every stream is exact (I1, I2), what a dead process held is
//! let go by its partners (I12), all budgets return to rest (I3), and who comes back gets work again (I8).
//!
//! `cargo test` breaks each thing once. `make faults` does it `PINION_FAULT_REPS` times (10) and prints the table.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

use pinion_schemas::subject::Kind;
use pinion_tests::client::{End, Progress, Record, Talk};
use pinion_tests::cluster::{Cluster, Held, Size};
use pinion_tests::proxy::Proxy;
use pinion_tests::{SOON, eventually, in_real_time};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// When a leg must have ended after its partner's death (design §4), and what a busy machine may add.
const LEGS_END: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(1));
/// When a peer that is back gets work (I8): the recovery bound of `pinion_core::peer`, and what a busy machine may add.
const WORK_AGAIN: Duration = Duration::from_secs(12 + 8);
/// Length of a prompt whose seed takes a second.
const LONG: u32 = 4_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    DecodeInStream,
    DecodeInSeed,
    PrefillInSeed,
    ControlInStream,
    ControlBetweenTurns,
    GatewayCut,
    NatsRestart,
}

impl Fault {
    const ALL: [Self; 7] = [
        Self::DecodeInStream,
        Self::DecodeInSeed,
        Self::PrefillInSeed,
        Self::ControlInStream,
        Self::ControlBetweenTurns,
        Self::GatewayCut,
        Self::NatsRestart,
    ];

    fn label(self) -> &'static str {
        match self {
            Self::DecodeInStream => "kill -9 decode worker, mid-stream",
            Self::DecodeInSeed => "kill -9 decode worker, mid-seed",
            Self::PrefillInSeed => "kill -9 prefill worker, mid-seed",
            Self::ControlInStream => "kill -9 owning control node, mid-stream",
            Self::ControlBetweenTurns => "kill -9 owning control node, between turns",
            Self::GatewayCut => "gateway's NATS connection cut for 1.5 s",
            Self::NatsRestart => "kill -9 nats-server, back after 1.5 s",
        }
    }

    fn size(self) -> Size {
        let (control, prefill) = match self {
            Self::ControlInStream | Self::ControlBetweenTurns => (2, 1),
            Self::PrefillInSeed | Self::DecodeInSeed => (1, 2),
            _ => (1, 1),
        };
        Size {
            control,
            prefill,
            decode: 3,
        }
    }

    /// Tokens of the first prompt of each session, tokens of each answer.
    fn load(self) -> ([u32; 6], usize) {
        match self {
            Self::PrefillInSeed | Self::DecodeInSeed => ([LONG, 300, 300, LONG, 300, 300], 60),
            Self::ControlBetweenTurns => ([300; 6], 40),
            _ => ([300; 6], 200),
        }
    }
}

/// What one run gave.
#[derive(Default)]
struct Row {
    accepted: usize,
    completed: usize,
    failed: usize,
    refused: usize,
    recoveries: Vec<Duration>,
    legs_ended: Vec<Duration>,
    wrong: Vec<String>,
}

impl Row {
    fn take(&mut self, records: &[Record]) {
        for record in records {
            match &record.end {
                End::Completed { .. } => self.completed += 1,
                End::Refused(_) => self.refused += 1,
                End::Failed(what) | End::Wrong(what) => {
                    self.failed += 1;
                    self.wrong.push(what.clone());
                }
            }
        }
        self.accepted = self.completed + self.failed;
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spread = |times: &[Duration]| {
            let mut times = times.to_vec();
            times.sort();
            match times.get(times.len() / 2) {
                Some(p50) => format!("{:.2} / {:.2}", p50.as_secs_f64(), times[times.len() - 1].as_secs_f64()),
                None => "-".to_owned(),
            }
        };
        write!(
            f,
            "{:>8} {:>9} {:>6} {:>7} {:>15} {:>15}",
            self.accepted,
            self.completed,
            self.failed,
            self.refused,
            spread(&self.recoveries),
            spread(&self.legs_ended)
        )
    }
}

/// Sessions that talk by themselves.
struct Crowd {
    names: Vec<String>,
    progress: Vec<Arc<Progress>>,
    tasks: Vec<JoinHandle<Talk>>,
}

impl Crowd {
    /// `think` is waited for before each turn but the first.
    fn start(url: &str, (prompts, n): ([u32; 6], usize), turns: usize, think: Duration) -> Self {
        let (mut names, mut progress, mut tasks) = (Vec::new(), Vec::new(), Vec::new());
        for (number, length) in (0..).zip(prompts) {
            let mut talk = Talk::new(url, number, length);
            names.push(talk.session.clone());
            progress.push(talk.progress.clone());
            tasks.push(tokio::spawn(async move {
                for turn in 0..turns {
                    if turn > 0 {
                        tokio::time::sleep(think).await;
                    }
                    if !matches!(talk.turn(n, 37).await, End::Completed { .. }) {
                        break;
                    }
                }
                talk
            }));
        }
        Self { names, progress, tasks }
    }

    async fn until(&self, what: &str, there: impl Fn(&[(usize, usize)]) -> bool) {
        eventually(what, SOON * 2, || async {
            let now: Vec<_> = self.progress.iter().map(|p| p.now()).collect();
            there(&now).then_some(())
        })
        .await;
    }

    async fn end(self) -> Vec<Talk> {
        let mut ended = Vec::new();
        for task in self.tasks {
            let talk = tokio::time::timeout(Duration::from_mins(1), task).await;
            ended.push(talk.expect("a turn hangs").unwrap());
        }
        ended
    }
}

/// Waits until a worker of this kind works for a turn. Returns it with all it holds.
async fn busy(cluster: &Cluster, kind: Kind) -> (String, Vec<Held>) {
    eventually("a worker is busy", SOON, || async {
        for name in cluster.workers(kind) {
            let held = cluster.held(name).await;
            if held.iter().any(|h| h.busy) {
                return Some((name.to_owned(), held));
            }
        }
        None
    })
    .await
}

/// Waits until no worker but the dead one holds anything for these attempts. Returns how long after the death that was.
async fn legs_end(cluster: &Cluster, dead: &str, lost: &[Held], died: Instant) -> Duration {
    let names: Vec<&str> = [Kind::Decode, Kind::Prefill]
        .into_iter()
        .flat_map(|k| cluster.workers(k))
        .filter(|n| *n != dead)
        .collect();
    loop {
        let mut left = Vec::new();
        for name in &names {
            let held = cluster.held(name).await;
            left.extend(
                held.into_iter()
                    .filter(|h| lost.iter().any(|l| l.request == h.request && h.attempt <= l.attempt)),
            );
        }
        let took = died.elapsed();
        if left.is_empty() {
            return took;
        }
        assert!(
            took < LEGS_END.0 + LEGS_END.1,
            "legs outlive {dead} by {took:?}: {left:?}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Fresh sessions come until the worker has taken something.
async fn gets_work(cluster: &Cluster, name: &str, number: u32) -> Vec<Talk> {
    let until = Instant::now() + WORK_AGAIN;
    let mut tasks = Vec::new();
    for i in 0.. {
        let mut talk = Talk::new(&cluster.url, number + i, 1_000);
        tasks.push(tokio::spawn(async move {
            talk.turn(20, 0).await;
            talk
        }));
        tokio::time::sleep(Duration::from_millis(150)).await;
        let view = cluster.inspect(name).await.unwrap_or_default();
        if view["resident_pages"].as_u64().is_some_and(|n| n > 0) || !cluster.held(name).await.is_empty() {
            break;
        }
        assert!(Instant::now() < until, "{name} is back and gets no work: {view}");
    }
    let mut ended = Vec::new();
    for task in tasks {
        ended.push(task.await.unwrap());
    }
    ended
}

/// What was broken.
struct Broken {
    at: Instant,
    /// Sessions that had to do with it.
    sessions: BTreeSet<String>,
    /// The process that is dead.
    dead: Option<String>,
    /// When its partners had let go.
    legs_ended: Option<Duration>,
}

async fn break_it(fault: Fault, cluster: &mut Cluster, crowd: &Crowd, proxy: Option<&Proxy>) -> Broken {
    let all: BTreeSet<String> = crowd.names.iter().cloned().collect();
    // Most of them: on a busy machine one may lag or be ahead.
    let second_turn_streams = |now: &[(usize, usize)]| {
        now.iter()
            .filter(|(turns, tokens)| *turns >= 1 && *tokens >= 20)
            .count()
            >= 4
    };
    match fault {
        Fault::DecodeInStream | Fault::DecodeInSeed | Fault::PrefillInSeed => {
            let (name, held) = if fault == Fault::DecodeInStream {
                crowd.until("most are in their second turn", second_turn_streams).await;
                busy(cluster, Kind::Decode).await
            } else {
                let (prefill, held) = busy(cluster, Kind::Prefill).await;
                if fault == Fault::PrefillInSeed {
                    (prefill, held)
                } else {
                    let request = &held.iter().find(|h| h.busy).expect("busy").request;
                    let mut found = None;
                    for name in cluster.workers(Kind::Decode) {
                        let held = cluster.held(name).await;
                        if held.iter().any(|h| h.request == *request) {
                            found = Some((name.to_owned(), held));
                        }
                    }
                    found.expect("somebody waits for the seed")
                }
            };
            let at = cluster.kill(&name);
            let legs_ended = legs_end(cluster, &name, &held, at).await;
            Broken {
                at,
                sessions: held.into_iter().map(|h| h.session).collect(),
                dead: Some(name),
                legs_ended: Some(legs_ended),
            }
        }
        Fault::ControlInStream | Fault::ControlBetweenTurns => {
            if fault == Fault::ControlInStream {
                crowd.until("most are in their second turn", second_turn_streams).await;
            } else {
                let idle = |now: &[(usize, usize)]| now.iter().all(|(turns, tokens)| *turns == 1 && *tokens == 0);
                crowd.until("all have ended their first turn", idle).await;
            }
            let name = cluster.owner(&crowd.names[0]).await.expect("an owner");
            let mut sessions = BTreeSet::new();
            for session in &crowd.names {
                if cluster.owner(session).await.as_ref() == Some(&name) {
                    sessions.insert(session.clone());
                }
            }
            Broken {
                at: cluster.kill(&name),
                sessions,
                dead: Some(name),
                legs_ended: None,
            }
        }
        Fault::GatewayCut => {
            crowd.until("most are in their second turn", second_turn_streams).await;
            let at = Instant::now();
            proxy.expect("a proxy").cut(Duration::from_millis(1_500)).await;
            Broken {
                at,
                sessions: all,
                dead: None,
                legs_ended: None,
            }
        }
        Fault::NatsRestart => {
            crowd.until("most are in their second turn", second_turn_streams).await;
            let at = cluster.kill("nats");
            tokio::time::sleep(Duration::from_millis(1_500)).await;
            cluster.restart("nats");
            Broken {
                at,
                sessions: all,
                dead: None,
                legs_ended: None,
            }
        }
    }
}

async fn scenario(fault: Fault) -> Row {
    let mut cluster = Cluster::start(fault.size()).await;
    let (mut proxy, mut url) = (None, cluster.url.clone());
    if fault == Fault::GatewayCut {
        let between = Proxy::start(cluster.nats.clone()).await;
        url = cluster.join_gateway(between.port).await;
        proxy = Some(between);
    }
    let think = match fault {
        Fault::ControlBetweenTurns => Duration::from_secs(4),
        _ => Duration::ZERO,
    };
    let crowd = Crowd::start(&url, fault.load(), 3, think);
    let broken = break_it(fault, &mut cluster, &crowd, proxy.as_ref()).await;
    let mut talks = crowd.end().await;
    if let Some(dead) = &broken.dead {
        cluster.restart(dead);
    }
    let mut row = Row::default();
    for talk in talks.iter().filter(|t| broken.sessions.contains(&t.session)) {
        let waits = talk.records.iter().map(|r| r.longest_wait(broken.at, broken.at + SOON));
        row.recoveries.extend(waits.max());
    }
    row.legs_ended.extend(broken.legs_ended);
    let worker = broken.dead.as_deref().filter(|name| !name.starts_with("control"));
    if let Some(name) = worker {
        talks.extend(gets_work(&cluster, name, 100).await);
    } else if let Some(name) = &broken.dead {
        // The restarted control node takes over when the other one dies.
        let other = if name == "control-0" { "control-1" } else { "control-0" };
        eventually("the control node is back", SOON, || cluster.control(name)).await;
        cluster.kill(other);
        for talk in &mut talks {
            talk.turn(5, 0).await;
            let owner = cluster.owner(&talk.session).await;
            assert_eq!(owner.as_ref(), Some(name), "owner of {}", talk.session);
        }
    }
    for talk in &talks {
        row.take(&talk.records);
    }
    if row.wrong.is_empty() {
        cluster.rest_within(SOON).await;
    }
    row
}

fn once(fault: Fault) {
    let row = in_real_time(scenario(fault));
    println!("{}: {row}", fault.label());
    assert!(row.wrong.is_empty(), "{}: {:#?}", fault.label(), row.wrong);
    assert_eq!(row.refused, 0, "turns were refused");
}

#[test]
fn a_decode_worker_killed_in_mid_stream() {
    once(Fault::DecodeInStream);
}

#[test]
fn a_decode_worker_killed_in_mid_seed() {
    once(Fault::DecodeInSeed);
}

#[test]
fn a_prefill_worker_killed_in_mid_seed() {
    once(Fault::PrefillInSeed);
}

#[test]
fn the_owning_control_node_killed_in_mid_stream() {
    once(Fault::ControlInStream);
}

#[test]
fn the_owning_control_node_killed_between_turns() {
    once(Fault::ControlBetweenTurns);
}

#[test]
fn the_gateways_connection_cut_in_mid_stream() {
    once(Fault::GatewayCut);
}

#[test]
fn the_nats_server_killed_and_restarted_in_mid_stream() {
    once(Fault::NatsRestart);
}

/// `make faults`.
#[test]
#[ignore = "takes minutes; `make faults` runs it"]
fn table() {
    let reps = std::env::var("PINION_FAULT_REPS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(10);
    println!(
        "{reps} repetitions each; recovery: longest wait of an affected session for its next token, and the time until"
    );
    println!("the dead process's partners had let go of its turns; p50 / max in seconds.");
    let head = [
        "fault",
        "accepted",
        "completed",
        "failed",
        "refused",
        "recovery (s)",
        "legs ended (s)",
    ];
    let [fault, accepted, completed, failed, refused, recovery, legs] = head;
    println!("{fault:<44} {accepted:>8} {completed:>9} {failed:>6} {refused:>7} {recovery:>15} {legs:>15}");
    let mut wrong = Vec::new();
    for fault in Fault::ALL {
        let mut sum = Row::default();
        for _ in 0..reps {
            let row = in_real_time(scenario(fault));
            sum.accepted += row.accepted;
            sum.completed += row.completed;
            sum.failed += row.failed;
            sum.refused += row.refused;
            sum.recoveries.extend(row.recoveries);
            sum.legs_ended.extend(row.legs_ended);
            wrong.extend(row.wrong);
        }
        println!("{:<44} {sum}", fault.label());
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
