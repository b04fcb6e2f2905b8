//! Route decisions and the residency index, through the router role as a control node runs it: heartbeats and page events
//! come in as bus messages, a decision is one `RouteAsk`.

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
/// Chains of each kind; every decision takes the next one, so that caches hold little of the one before.
const CHAINS: usize = 100;
/// Decisions per row.
const DECISIONS: usize = 10_000;

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
        };
        let workers: Vec<WorkerId> = (0..size).map(|i| name(WorkerId::new(format!("decode-{i}")))).collect();
        let mut fleet = Self {
            router: Router::new(config),
            subjects: Subjects::new(&cluster),
            sequence: vec![0; size],
            workers,
            names: 0,
            pages: 0,
        };
        for i in 0..size {
            let beat = Heartbeat {
                worker: fleet.workers[i].clone(),
                epoch: Epoch(1),
                running: 3,
                queued_tokens: 0,
                pool_pages: 200_000,
                room_pages: 50_000,
                draining: false,
                pause_millis: 0,
            };
            fleet.send(i, wire::encode(&beat).expect("a heartbeat"));
        }
        fleet
    }

    fn send(&mut self, worker: usize, payload: Vec<u8>) {
        let subject = self.subjects.event(Kind::Decode, self.workers[worker].as_str());
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
        for part in pages.chunks(EVENT) {
            self.sequence[worker] += 1;
            let event = PagesStored {
                worker: self.workers[worker].clone(),
                epoch: Epoch(1),
                sequence: self.sequence[worker],
                pages: part.to_vec(),
            };
            self.send(worker, wire::encode(&event).expect("an event"));
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

    fn decide(&mut self, chains: &[Arc<Vec<PageHash>>]) -> Vec<Duration> {
        let session = name(SessionId::new("0b0a9d84-6d0a-4f8e-9a53-1c7f7b0e0001"));
        let mut took = Vec::with_capacity(DECISIONS);
        for i in 0..DECISIONS + CHAINS {
            let chain = Arc::clone(&chains[i % chains.len()]);
            let ask = RouteAsk {
                from: "sessions".to_owned(),
                session: session.clone(),
                request: RequestId(i as u128),
                attempt: 1,
                pin: Some(self.workers[(self.workers.len() - i % CHAINS % 8) % self.workers.len()].clone()),
                context_tokens: chain.len() as u64 * 64 + 20,
                chain,
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
        memory.push(Row::value(format!("index of {PAGES} pages, {size} D"), "B/pg", per_page).goal(64.0, None));
        for ((length, sharing), chains) in kinds.iter().zip(&chains) {
            let mut took = fleet.decide(chains);
            let lengths = match sharing {
                Sharing::Usual => "3 lengths".to_owned(),
                Sharing::Worst => format!("{} lengths", size.min(*length)),
            };
            let row = Row::micros(
                format!("{size:>3} D x {length:>5} pages, {lengths}"),
                &mut took,
                Duration::ZERO,
            );
            let goal = (size, *length) == (64, 1_600);
            rows.push(if goal { row.goal(10.0, None) } else { row });
        }
    }
    let title = "route decision, index of 10 M pages";
    let how = format!("{DECISIONS} decisions a row over {CHAINS} chains in turn; router role, one RouteAsk each");
    let route = Section { title, how, rows };
    let how = "heap left by the events that filled the router, counting allocator".to_owned();
    let index = Section {
        title: "bytes per indexed page",
        how,
        rows: memory,
    };
    (route, index)
}
