//! Pages from pool to pool over TCP and shared memory, in one process with two threads, beside what the machine can do at best:
//! the same bytes over one plain TCP stream, and by `memcpy`. Digests are computed by who makes a page, once; the receiver's check
//! of each is part of the time.

use crate::table::{Row, Section};
use pinion_schemas::{Epoch, Micros};
use pinion_transfer::shm::{self, ShmSender};
use pinion_transfer::tcp::{self, TcpSender};
use pinion_transfer::{Dtype, Inbox, Layout, PageRef, Pool, Transport};
use std::hint::black_box;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const MIB: usize = 1 << 20;
/// Total sizes, and rounds of each.
const SIZES: [(usize, usize); 3] = [(MIB, 41), (16 * MIB, 21), (256 * MIB, 7)];
/// Transfers of one small page.
const SMALL: usize = 2_000;
const KEY: u64 = 1;

fn layout(page_tokens: u32) -> Layout {
    // 24,576 bytes for each token: 64 are 1.5 MiB.
    Layout {
        model: 1,
        layers: 32,
        kv_heads: 3,
        head_dim: 64,
        page_tokens,
        dtype: Dtype::Bf16,
    }
}

fn small() -> Layout {
    Layout {
        model: 1,
        layers: 8,
        kv_heads: 1,
        head_dim: 64,
        page_tokens: 32,
        dtype: Dtype::Bf16,
    }
}

/// CPU time of this process so far.
fn cpu() -> Duration {
    let usage = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = usage.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|f| f.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

/// Time of the median round, and CPU time of all rounds over the number of rounds.
fn timed(rounds: usize, mut round: impl FnMut()) -> (Duration, Duration) {
    round();
    let before = cpu();
    let mut times: Vec<Duration> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    (times[rounds / 2], (cpu() - before) / rounds as u32)
}

/// Two pools and what is between them.
struct Rig<T: Transport> {
    runtime: Runtime,
    inbox: Inbox,
    pages: Vec<(u32, PageRef)>,
    sender: T,
    address: T::Address,
}

impl<T: Transport> Rig<T> {
    fn new(layout: Layout, count: usize, make: impl FnOnce(&Runtime, Pool, Inbox) -> (T, T::Address)) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let pool = |layout| Pool::new(layout, count as u32).expect("memory for the pools");
        let (from, to) = (pool(layout.clone()), pool(layout));
        let inbox = Inbox::new(to, Epoch(1));
        let fill = |(i, mut slot): (u32, pinion_transfer::pool::SlotMut)| {
            slot.fill(i as u8 + 1);
            let page = slot.finish();
            page.digest();
            (i, page)
        };
        let pages = (0..).zip(from.take(count).expect("room")).map(fill).collect();
        let (sender, address) = make(&runtime, from, inbox.clone());
        Self {
            runtime,
            inbox,
            pages,
            sender,
            address,
        }
    }

    fn round(&self) {
        let grant = self.inbox.grant(self.pages.len(), KEY, Micros(u64::MAX)).expect("room");
        let sent = self
            .runtime
            .block_on(self.sender.send(&self.address, &grant, &self.pages));
        assert!(sent.is_ok(), "a transfer failed: {sent:?}");
        let got = self.inbox.take(grant.id);
        assert!(got.iter().all(Option::is_some), "a page is missing");
    }
}

fn over_tcp(runtime: &Runtime, from: Pool, inbox: Inbox) -> (TcpSender, std::net::SocketAddr) {
    let _inside = runtime.enter();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket that does not block");
    let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
    let address = listener.local_addr().expect("its address");
    runtime.spawn(tcp::serve(listener, inbox));
    (TcpSender::new(from, tcp::STREAMS), address)
}

fn over_shm(runtime: &Runtime, from: Pool, inbox: Inbox) -> (ShmSender, std::path::PathBuf) {
    let _inside = runtime.enter();
    let path = std::env::temp_dir().join(format!("pinion-bench-{}.sock", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let listener = tokio::net::UnixListener::bind(&path).expect("a socket");
    runtime.spawn(shm::serve(listener, inbox));
    (ShmSender::new(from), path)
}

/// One plain stream: a thread writes, this one reads and answers with a byte.
fn plain(bytes: usize, rounds: usize) -> (Duration, Duration) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut near = TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection");
    let (mut far, _) = listener.accept().expect("a connection");
    near.set_nodelay(true).and(far.set_nodelay(true)).expect("no delay");
    let receiver = std::thread::spawn(move || {
        let mut into = vec![0_u8; bytes];
        while far.read_exact(&mut into).is_ok() {
            black_box(&into);
            if far.write_all(&[1]).is_err() {
                break;
            }
        }
    });
    let from = vec![7_u8; bytes];
    let result = timed(rounds, || {
        near.write_all(&from).expect("the peer reads");
        near.read_exact(&mut [0]).expect("the peer answers");
    });
    drop(near);
    receiver.join().expect("the receiver ended well");
    result
}

fn memcpy(bytes: usize, rounds: usize) -> (Duration, Duration) {
    let (from, mut into) = (vec![7_u8; bytes], vec![0_u8; bytes]);
    timed(rounds, || {
        into.copy_from_slice(black_box(&from));
        black_box(&into);
    })
}

fn gb_per_s(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

/// Throughput, and the latency of one page.
pub fn run() -> Section {
    let mut rows = Vec::new();
    for (size, rounds) in SIZES {
        let pages = size.div_ceil(3 * MIB / 2);
        let bytes = pages * 3 * MIB / 2;
        let (plain, _) = plain(bytes, rounds);
        let (memcpy, _) = memcpy(bytes, rounds);
        let tcp = Rig::new(layout(64), pages, over_tcp);
        let (tcp, tcp_cpu) = timed(rounds, || tcp.round());
        let shm = Rig::new(layout(64), pages, over_shm);
        let (shm, shm_cpu) = timed(rounds, || shm.round());
        let name = format!(
            "{} MiB in {pages} page{}",
            size / MIB,
            if pages == 1 { "" } else { "s" }
        );
        rows.push(Row::value(
            format!("{name}: one plain TCP stream"),
            "GB/s",
            gb_per_s(bytes, plain),
        ));
        rows.push(Row::value(format!("{name}: memcpy"), "GB/s", gb_per_s(bytes, memcpy)));
        rows.push(Row::value(format!("{name}: tcp"), "GB/s", gb_per_s(bytes, tcp)));
        rows.push(Row::value(format!("{name}: shm"), "GB/s", gb_per_s(bytes, shm)));
        let ratio = |a: Duration, b: Duration| a.as_secs_f64() / b.as_secs_f64();
        rows.push(Row::value(format!("{name}: tcp over plain, time"), "x", ratio(tcp, plain)).goal(1.25, None));
        rows.push(Row::value(format!("{name}: shm over memcpy, time"), "x", ratio(shm, memcpy)).goal(1.25, None));
        if size == SIZES[2].0 {
            let per_gb = |cpu: Duration| cpu.as_secs_f64() / (bytes as f64 / 1e9);
            rows.push(Row::value(format!("{name}: tcp, CPU"), "s/GB", per_gb(tcp_cpu)));
            rows.push(Row::value(format!("{name}: shm, CPU"), "s/GB", per_gb(shm_cpu)));
        }
    }
    let (plain, _) = plain(64 << 10, SMALL);
    let tcp = Rig::new(small(), 1, over_tcp);
    let (tcp, _) = timed(SMALL, || tcp.round());
    let shm = Rig::new(small(), 1, over_shm);
    let (shm, _) = timed(SMALL, || shm.round());
    for (what, time) in [("one plain TCP stream", plain), ("tcp", tcp), ("shm", shm)] {
        rows.push(Row::value(
            format!("one 64 KiB page: {what}"),
            "µs",
            time.as_nanos() as f64 / 1e3,
        ));
    }
    Section {
        title: "Pages from pool to pool",
        how: vec![
            "one process, two threads; median round; both sides of a transfer and the check of every page's digest are in the time".into(),
            "digests are made once, by who makes a page, before; plain TCP and memcpy check nothing".into(),
        ],
        rows,
    }
}
