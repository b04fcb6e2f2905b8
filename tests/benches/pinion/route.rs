//! Route decisions and the residency index, through the router role as a control node runs it: heartbeats and page events
//! come in as bus messages, a decision is one `RouteAsk`: longest prefixes of all workers, ranking, and the answer.

use crate::alloc;
use crate::table::{Row, Section};
use pinion_actors::effect::{Effects, Input, Local, Role, RouteAsk};
use pinion_actors::router::{Router, RouterConfig};
use pinion_bus::{Headers, Message};
use pinion_core::route;
use pinion_schemas::messages::{Heartbeat, PagesStored};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::wire;
use pinion_schemas::{ClusterId, Epoch, Micros, PageHash, RequestId, SessionId, WorkerId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages in the index.
const PAGES: usize = 10_000_000;
/// Pages in one event.
const EVENT: usize = 16_000;
/// Chains of each kind; every decision takes the next one.
const CHAINS: usize = 100;
/// Bytes of other memory read between two decisions: by the time a chain comes again, so much was read that no cache holds
/// its entries any more. So it is for a router with thousands of sessions, of which each comes every few seconds.
const BETWEEN: usize = 1 << 19;
const OTHER: usize = 1 << 26;
/// Rounds per row, and decisions per round.
const ROUNDS: usize = 5;
const DECISIONS: usize = 2_000;
/// One P for so many D. They are ranked too, but hold nothing here.
const D_PER_P: usize = 4;

/// Who holds what of a chain.
#[derive(Clone, Copy, PartialEq)]
enum Sharing {
    /// One D all of it, one D 3/5 (it was there before), all others the first tenth (a common system prompt).
    Usual,
    /// Every D another length.
    Worst,
}

struct Fleet {
    router: Router,
    subjects: Subjects,
    workers: Vec<WorkerId>,
    sequence: Vec<u64>,
    /// Names made so far; each is new.
    names: u64,
    pages: usize,
    other: Vec<u64>,
}

fn name<T>(made: Result<T, pinion_schemas::IdError>) -> T {
    made.expect("a valid name")
}

impl Fleet {
    fn new(size: usize) -> Self {
        let cluster = name(ClusterId::new("bench"));
        let config = RouterConfig {
            cluster: cluster.clone(),
            control: name(WorkerId::new("control-0")),
            page_tokens: 64,
            page_bytes: 6_291_456,
            route: route::Config::default(),
            index_pages_max: 2 * PAGES,
            prefill_tokens_per_s: 25_000,
            link_bytes_per_s: 2_500_000_000,
            backups: pinion_schemas::BackupTargets::LastPrefill,
        };
        let workers: Vec<WorkerId> = (0..size).map(|i| name(WorkerId::new(format!("decode-{i}")))).collect();
        let mut fleet = Self {
            router: Router::new(config),
            subjects: Subjects::new(&cluster),
            sequence: vec![0; size],
            workers,
            names: 0,
            pages: 0,
            other: vec![1; OTHER / size_of::<u64>()],
        };
        let decode = fleet.workers.clone().into_iter().map(|w| (Kind::Decode, w));
        let prefill = (0..size / D_PER_P).map(|i| (Kind::Prefill, name(WorkerId::new(format!("prefill-{i}")))));
        for (kind, worker) in decode.chain(prefill) {
            let beat = Heartbeat {
                worker: worker.clone(),
                epoch: Epoch(1),
                running: 3,
                queued_tokens: 0,
                pool_pages: 200_000,
                room_pages: 50_000,
                draining: false,
                pause_millis: 0,
                residency_sequence: 0,
            };
            fleet.send(kind, &worker, wire::encode(&beat).expect("a heartbeat"));
        }
        fleet
    }

    fn send(&mut self, kind: Kind, worker: &WorkerId, payload: Vec<u8>) {
        let subject = self.subjects.event(kind, worker.as_str());
        let message = Message {
            subject: subject.as_str().to_owned(),
            reply: None,
            headers: Headers::new(),
            payload: payload.into(),
        };
        self.router
            .handle(Micros(1), Input::Message(message), &mut Effects::default());
    }

    fn stored(&mut self, worker: usize, pages: &[PageHash]) {
        let name = self.workers[worker].clone();
        for part in pages.chunks(EVENT) {
            self.sequence[worker] += 1;
            let event = PagesStored {
                worker: name.clone(),
                epoch: Epoch(1),
                sequence: self.sequence[worker],
                pages: part.to_vec(),
            };
            self.send(Kind::Decode, &name, wire::encode(&event).expect("an event"));
        }
    }

    /// New names, as evenly spread as a SHA-256's.
    fn fresh(&mut self, pages: usize) -> Vec<PageHash> {
        self.pages += pages;
        let mut word = || {
            self.names += 1;
            let mut x = self.names.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (x ^ (x >> 31)).to_le_bytes()
        };
        let page = |_| {
            let words = [word(), word(), word(), word()];
            PageHash(std::array::from_fn(|i| words[i / 8][i % 8]))
        };
        (0..pages).map(page).collect()
    }

    fn chains(&mut self, length: usize, sharing: Sharing) -> Vec<Arc<Vec<PageHash>>> {
        let size = self.workers.len();
        let chains: Vec<_> = (0..CHAINS).map(|_| self.fresh(length)).collect();
        for worker in 0..size {
            for (i, chain) in chains.iter().enumerate() {
                // Who holds how much turns with the chain.
                let place = (worker + i % 8) % size;
                let held = match (sharing, place) {
                    (Sharing::Worst, _) => (length * (place + 1)).div_ceil(size),
                    (Sharing::Usual, 0) => length,
                    (Sharing::Usual, 1) => length * 3 / 5,
                    (Sharing::Usual, _) => length / 10,
                };
                self.stored(worker, &chain[..held]);
            }
        }
        chains.into_iter().map(Arc::new).collect()
    }

    /// Fills the index up to [`PAGES`] with what other sessions hold.
    fn fill(&mut self) {
        let mut worker = 0;
        while self.pages < PAGES {
            let pages = self.fresh(EVENT.min(PAGES - self.pages));
            self.stored(worker % self.workers.len(), &pages);
            worker += 1;
        }
    }

    /// One round.
    fn decide(&mut self, chains: &[Arc<Vec<PageHash>>]) -> Vec<Duration> {
        let session = name(SessionId::new("0b0a9d84-6d0a-4f8e-9a53-1c7f7b0e0001"));
        let mut took = Vec::with_capacity(DECISIONS);
        let mut other = self.other.chunks(BETWEEN / size_of::<u64>()).cycle();
        for i in 0..DECISIONS + CHAINS {
            std::hint::black_box(other.next().map(|words| words.iter().sum::<u64>()));
            let ask = RouteAsk {
                from: "sessions".to_owned(),
                session: session.clone(),
                request: RequestId(i as u128),
                attempt: 1,
                pin: Some(self.workers[(self.workers.len() - i % CHAINS % 8) % self.workers.len()].clone()),
                context_tokens: chains[0].len() as u64 * 64 + 20,
                // Names that were hashed a moment ago, as by the sessions role: near, while the table is far.
                chain: Arc::new(chains[i % CHAINS].to_vec()),
                avoid: Vec::new(),
                rejects: Vec::new(),
            };
            let mut out = Effects::default();
            let begun = Instant::now();
            self.router
                .handle(Micros(2), Input::Local(Local::RouteAsk(ask)), &mut out);
            let spent = begun.elapsed();
            assert_eq!(out.0.len(), 1, "one answer to one question");
            if i >= CHAINS {
                took.push(spent);
            }
        }
        took
    }
}

/// Measures.
pub fn run() -> (Section, Section) {
    let (mut rows, mut memory) = (Vec::new(), Vec::new());
    for size in [8, 64, 256] {
        eprintln!("route: {size} D, {PAGES} pages");
        let mut fleet = Fleet::new(size);
        let kinds = [
            (100, Sharing::Usual),
            (100, Sharing::Worst),
            (1_600, Sharing::Usual),
            (1_600, Sharing::Worst),
        ];
        let (bytes, chains) = alloc::left_by(|| {
            let chains: Vec<_> = kinds
                .iter()
                .map(|(length, sharing)| fleet.chains(*length, *sharing))
                .collect();
            fleet.fill();
            chains
        });
        // The chains themselves belong to the bench.
        let own: usize = chains.iter().flatten().map(|c| c.len() * size_of::<PageHash>()).sum();
        let per_page = (bytes - own.cast_signed()) as f64 / fleet.pages as f64;
        memory.push(Row::value(format!("index of 10 M pages, {size} D"), "B", per_page).goal(64.0, None));
        for ((length, sharing), chains) in kinds.iter().zip(&chains) {
            let mut rounds: Vec<_> = (0..ROUNDS).map(|_| (fleet.decide(chains), Duration::ZERO)).collect();
            let lengths = match sharing {
                Sharing::Usual => "3 lengths".to_owned(),
                Sharing::Worst => format!("{} lengths", size.min(*length)),
            };
            let row = Row::rounds(format!("{size:>3} D x {length:>5} pages, {lengths}"), &mut rounds);
            let goal = (size, *length) == (64, 1_600);
            rows.push(if goal { row.goal(10.0, None) } else { row });
        }
    }
    let route = Section {
        title: "route decision, index of 10 M pages",
        how: vec![
            format!(
                "{ROUNDS} rounds of {DECISIONS} RouteAsk to the router role; p50 and p99 are medians over rounds, best is"
            ),
            "the best round's p50. 3 lengths: one D holds all of the chain, one 3/5, the others 1/10 (a common"
                .to_owned(),
            "system prompt); n lengths: as many D as possible hold different lengths, the worst there is.".to_owned(),
        ],
        rows,
    };
    let index = Section {
        title: "bytes per indexed page",
        how: vec!["heap left by the events that filled the router, by a counting allocator".to_owned()],
        rows: memory,
    };
    (route, index)
}
