//! The router role, one per control node: where to try next, and who is alive. All it knows is an estimate, rebuilt from
//! events at any time; it never rejects for capacity (digest R3).
//!
//! Liveness is kept apart from admission (design §5): a heartbeat or a probe's answer is life, an overdue heartbeat is asked
//! after by a probe, and only [`pinion_core::peer`] declares a worker suspect.

use crate::decode::HEARTBEAT;
use crate::effect::{Effect, Effects, Input, Local, Role, RouteAnswer, RouteAsk, Tried};
use crate::sessions::SESSIONS;
use pinion_bus::{BusError, Message};
use pinion_core::peer::{self, Peers};
use pinion_core::plan::Source;
use pinion_core::pressure::Pauses;
use pinion_core::residency::{Applied, Residency};
use pinion_core::route::{self, Candidate};
use pinion_core::session::{Offer, Ranking};
use pinion_schemas::limits::PAUSE_MILLIS_MAX;
use pinion_schemas::messages::{Heartbeat, PagesEvicted, PagesStored, Probe, ProbeAck, ResidencySnapshot, SnapshotAsk};
use pinion_schemas::subject::{self, Kind, Subjects};
use pinion_schemas::{BackupTargets, ClusterId, Epoch, Micros, MigrationReason, PageHash, WorkerId, wire};
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::BTreeMap;

/// A heartbeat this late is asked after: two were missed.
const OVERDUE: Micros = Micros::from_millis(2 * HEARTBEAT.as_millis() + 200);
/// How often the clock is looked at.
const LOOK: Micros = Micros::from_millis(250);
/// How long a probe may take.
const PROBE_PATIENCE: Micros = Micros::from_millis(500);
/// How long a part of a snapshot may take.
const SNAPSHOT_PATIENCE: Micros = Micros::from_millis(1_000);
/// Decode workers told of that have pages of a session: the one it leaves, and those it was on before.
const HOLDERS_MAX: usize = 4;
/// A worker silent for so long is forgotten altogether.
const FORGET: Micros = Micros::from_secs(600);

/// What the router is and assumes.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// The cluster.
    pub cluster: ClusterId,
    /// The control node.
    pub control: WorkerId,
    /// Tokens per page.
    pub page_tokens: u32,
    /// Bytes per page.
    pub page_bytes: u64,
    /// How candidates are ordered.
    pub route: route::Config,
    /// Pages the index may hold.
    pub index_pages_max: usize,
    /// Prefill speed assumed of a worker, tokens per second.
    pub prefill_tokens_per_s: u64,
    /// Link speed assumed, bytes per second.
    pub link_bytes_per_s: u64,
    /// Where sessions' pages are backed up.
    pub backups: BackupTargets,
}

#[derive(Debug, Clone, Serialize)]
struct Worker {
    kind: Kind,
    epoch: Epoch,
    alive: bool,
    draining: bool,
    running: u32,
    queued_tokens: u64,
    pool_pages: u32,
    room_pages: u32,
    last_seen: Micros,
    inflight: u32,
    assigned: u64,
    #[serde(skip)]
    overdue: bool,
}

enum Asked {
    Probe(WorkerId),
    Snapshot {
        worker: WorkerId,
        epoch: Epoch,
        sequence: Option<u64>,
        pages: Vec<PageHash>,
    },
}

/// The role.
pub struct Router {
    config: RouterConfig,
    subjects: Subjects,
    workers: BTreeMap<WorkerId, Worker>,
    index: Residency,
    peers: Peers,
    pauses: Pauses,
    asked: BTreeMap<u64, Asked>,
    /// Workers with a snapshot under way.
    resyncing: BTreeMap<WorkerId, Epoch>,
    next_token: u64,
    next_look: Micros,
    decisions: u64,
}

#[derive(Serialize)]
struct View<'a> {
    control: &'a WorkerId,
    decisions: u64,
    workers: &'a BTreeMap<WorkerId, Worker>,
    index: pinion_core::residency::View,
}

impl Router {
    /// A router that knows nobody yet.
    pub fn new(config: RouterConfig) -> Self {
        Self {
            subjects: Subjects::new(&config.cluster),
            workers: BTreeMap::new(),
            index: Residency::new(config.index_pages_max),
            peers: Peers::new(peer::Policy::default()),
            pauses: Pauses::new(PAUSE_MILLIS_MAX),
            asked: BTreeMap::new(),
            resyncing: BTreeMap::new(),
            next_token: 0,
            next_look: Micros::ZERO,
            decisions: 0,
            config,
        }
    }

    fn on_message(&mut self, now: Micros, message: &Message, out: &mut Effects) {
        let Some(parsed) = subject::parse(&message.subject) else {
            return;
        };
        if parsed.verb == Some("workers") {
            let (control, decisions, index) = (&self.config.control, self.decisions, self.index.view());
            return out.respond_json(
                message,
                &View {
                    control,
                    decisions,
                    workers: &self.workers,
                    index,
                },
            );
        }
        let kind = parsed.kind;
        if !matches!(kind, Kind::Decode | Kind::Prefill) {
            return;
        }
        crate::dispatch!(message, {
            // A worker speaks for itself only, on its own subject.
            Heartbeat(beat) => if beat.worker.as_str() == parsed.id { self.on_heartbeat(now, kind, &beat, out) },
            PagesStored(e) => {
                let applied = self.index.stored(&e.worker, e.epoch, e.sequence, &e.pages);
                self.on_applied(&e.worker, e.epoch, applied, out);
            },
            PagesEvicted(e) => {
                let applied = self.index.evicted(&e.worker, e.epoch, e.sequence, &e.pages);
                self.on_applied(&e.worker, e.epoch, applied, out);
            },
        });
    }

    fn on_heartbeat(&mut self, now: Micros, kind: Kind, beat: &Heartbeat, out: &mut Effects) {
        let jitter = self.jitter();
        let known = self.workers.get(&beat.worker).map(|w| w.epoch);
        if known.is_some_and(|e| beat.epoch < e) {
            return;
        }
        if known.is_none_or(|e| beat.epoch > e) {
            let fact = peer::Fact::NewEpoch(beat.epoch);
            self.peers.step(now, jitter, &beat.worker, beat.epoch, fact);
            if known.is_some() {
                // What ran in the old process is lost.
                out.tell(SESSIONS, Local::WorkerLost(beat.worker.clone()));
            }
            self.workers.remove(&beat.worker);
            // A router that joins late has missed the worker's events so far.
            self.ask_snapshot(&beat.worker, beat.epoch, 0, None, Vec::new(), kind, out);
        }
        let worker = self.workers.entry(beat.worker.clone()).or_insert_with(|| Worker {
            kind,
            epoch: beat.epoch,
            alive: true,
            draining: false,
            running: 0,
            queued_tokens: 0,
            pool_pages: 0,
            room_pages: 0,
            last_seen: now,
            inflight: 0,
            assigned: 0,
            overdue: false,
        });
        worker.draining = beat.draining;
        worker.running = beat.running;
        worker.queued_tokens = beat.queued_tokens;
        worker.pool_pages = beat.pool_pages;
        worker.room_pages = beat.room_pages;
        worker.last_seen = now;
        worker.overdue = false;
        if beat.pause_millis > 0 {
            self.pauses.hinted(now, &beat.worker, beat.pause_millis, jitter % 1_000);
        }
        if self.index.last_event(&beat.worker, beat.epoch) < beat.residency_sequence {
            // The last events of a burst are lost: no later one would show the gap.
            self.ask_snapshot(&beat.worker, beat.epoch, 0, None, Vec::new(), kind, out);
        }
        self.health(now, &beat.worker, peer::Fact::ProbeAnswered, out);
    }

    /// Feeds one fact about a worker's life and acts on a change.
    fn health(&mut self, now: Micros, worker: &WorkerId, fact: peer::Fact, out: &mut Effects) {
        let jitter = self.jitter();
        let Some(epoch) = self.workers.get(worker).map(|w| w.epoch) else {
            return;
        };
        for action in self.peers.step(now, jitter, worker, epoch, fact) {
            match action {
                peer::Action::Suspect => {
                    tracing::warn!(%worker, "worker is suspect: it gets no new work until it answers");
                    if let Some(w) = self.workers.get_mut(worker) {
                        w.alive = false;
                        w.inflight = 0;
                    }
                    out.tell(SESSIONS, Local::WorkerLost(worker.clone()));
                }
                peer::Action::Clear => {
                    tracing::info!(%worker, "worker is back");
                    if let Some(w) = self.workers.get_mut(worker) {
                        w.alive = true;
                    }
                }
                peer::Action::Probe { .. } => {}
            }
        }
    }

    /// Spread that needs no randomness of its own: the count of decisions and probes, mixed.
    fn jitter(&self) -> u32 {
        (self
            .next_token
            .wrapping_add(self.decisions)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            >> 32) as u32
    }

    fn on_applied(&mut self, worker: &WorkerId, epoch: Epoch, applied: Applied, out: &mut Effects) {
        if let (Applied::Gap { .. }, Some(kind)) = (applied, self.workers.get(worker).map(|w| w.kind)) {
            self.ask_snapshot(worker, epoch, 0, None, Vec::new(), kind, out);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one snapshot under way")]
    fn ask_snapshot(
        &mut self,
        worker: &WorkerId,
        epoch: Epoch,
        skip: u64,
        sequence: Option<u64>,
        pages: Vec<PageHash>,
        kind: Kind,
        out: &mut Effects,
    ) {
        if skip == 0 && self.resyncing.insert(worker.clone(), epoch) == Some(epoch) {
            return;
        }
        self.next_token += 1;
        let subject = self.subjects.worker(kind, worker, "snapshot");
        out.request(self.next_token, subject, &SnapshotAsk { skip }, SNAPSHOT_PATIENCE);
        let worker = worker.clone();
        self.asked.insert(
            self.next_token,
            Asked::Snapshot {
                worker,
                epoch,
                sequence,
                pages,
            },
        );
    }

    fn on_reply(&mut self, now: Micros, token: u64, result: Result<Message, BusError>, out: &mut Effects) {
        match self.asked.remove(&token) {
            Some(Asked::Probe(worker)) => {
                let alive = result
                    .as_ref()
                    .is_ok_and(|m| wire::decode::<ProbeAck>(&m.payload).is_ok());
                if alive {
                    if let Some(w) = self.workers.get_mut(&worker) {
                        w.overdue = false;
                    }
                    return self.health(now, &worker, peer::Fact::ProbeAnswered, out);
                }
                self.health(now, &worker, peer::Fact::ProbeMissed, out);
                if matches!(result, Err(BusError::NoResponders { .. })) {
                    // The bus itself says that nobody is there: that is worth as much as a second missed probe.
                    self.health(now, &worker, peer::Fact::ProbeMissed, out);
                }
            }
            Some(Asked::Snapshot {
                worker,
                epoch,
                sequence,
                mut pages,
            }) => {
                let part = result
                    .ok()
                    .and_then(|m| wire::decode::<ResidencySnapshot>(&m.payload).ok());
                let Some(part) = part.filter(|p| p.epoch == epoch) else {
                    self.resyncing.remove(&worker);
                    return;
                };
                let Some(kind) = self.workers.get(&worker).map(|w| w.kind) else {
                    return;
                };
                if sequence.is_some_and(|s| s != part.sequence) {
                    self.resyncing.remove(&worker);
                    return self.ask_snapshot(&worker, epoch, 0, None, Vec::new(), kind, out);
                }
                pages.extend(part.pages);
                if part.more {
                    let skip = pages.len() as u64;
                    return self.ask_snapshot(&worker, epoch, skip, Some(part.sequence), pages, kind, out);
                }
                self.resyncing.remove(&worker);
                let applied = self.index.snapshot(&worker, epoch, part.sequence, &pages);
                tracing::debug!(%worker, ?applied, pages = pages.len(), "residency resynchronised");
            }
            None => {}
        }
    }

    fn on_route(&mut self, now: Micros, ask: &RouteAsk, out: &mut Effects) {
        self.decisions += 1;
        // By name, as the workers are.
        let overlaps = self.index.longest_prefixes(&ask.chain);
        let [mut along_decode, mut along_prefill, mut along_holders] = [&overlaps; 3].map(|o| Along(o));
        let rejects = |name: &WorkerId| ask.rejects.iter().find(|(w, _)| w == name).map_or(0, |(_, n)| *n);
        let usable = |w: &&(&WorkerId, &Worker)| w.1.alive && !w.1.draining;
        let of_kind = |kind: Kind| self.workers.iter().filter(move |(_, w)| w.kind == kind);
        let candidates: Vec<Candidate<'_>> = of_kind(Kind::Decode)
            .filter(|w| usable(&w))
            .map(|(name, w)| Candidate {
                worker: name,
                overlap_pages: along_decode.of(name),
                exclusive_pages: 0,
                inflight: w.inflight,
                assigned: w.assigned,
                rejects: rejects(name),
                paused_until: self.pauses.until(now, name).unwrap_or_default(),
                queue_tokens: w.queued_tokens,
                prefill_tokens_per_s: self.config.prefill_tokens_per_s,
                link_bytes_per_s: self.config.link_bytes_per_s,
            })
            .collect();
        let request = route::Request {
            pin: ask.pin.as_ref(),
            chain_pages: ask.chain.len() as u32,
            context_tokens: ask.context_tokens,
            page_tokens: self.config.page_tokens,
            page_bytes: self.config.page_bytes,
            now,
            avoid: &ask.avoid,
        };
        let offers = route::rank(&self.config.route, &request, &candidates)
            .into_iter()
            .map(|r| Offer {
                worker: r.worker.clone(),
                not_before: r.not_before,
            })
            .collect();
        let pin_gone = ask.pin.as_ref().and_then(|pin| match self.workers.get(pin) {
            Some(w) if w.alive && w.draining => Some(MigrationReason::Drain),
            Some(w) if w.alive => None,
            _ => Some(MigrationReason::WorkerLost),
        });
        let decode = Ranking {
            offers,
            pin_gone,
            workers: of_kind(Kind::Decode).count(),
            rejects_max: self.config.route.rejects_max,
        };
        let source = |(name, w): (&WorkerId, &Worker), held_pages| Source {
            worker: name.clone(),
            held_pages,
            queued_tokens: w.queued_tokens,
        };
        let prefill = of_kind(Kind::Prefill).filter(|w| usable(&w));
        let mut prefill: Vec<Source> = prefill.map(|w| source(w, along_prefill.of(w.0))).collect();
        // Tokens until the seed could be done: what waits, and what of the chain is not there (digest R10, G2).
        prefill.sort_by_key(|s| {
            let held = u64::from(s.held_pages) * u64::from(self.config.page_tokens);
            (
                s.queued_tokens + ask.context_tokens.saturating_sub(held),
                s.worker.clone(),
            )
        });
        let alive = of_kind(Kind::Decode).filter(|(_, w)| w.alive);
        let mut holders: Vec<Source> = alive
            .map(|w| source(w, along_holders.of(w.0)))
            .filter(|s| s.held_pages > 0)
            .collect();
        holders.sort_by_key(|s| std::cmp::Reverse(s.held_pages));
        holders.truncate(HOLDERS_MAX);
        let (session, request, attempt) = (ask.session.clone(), ask.request, ask.attempt);
        out.tell(
            ask.from.clone(),
            Local::RouteAnswer(RouteAnswer {
                session,
                request,
                attempt,
                decode,
                prefill,
                holders,
            }),
        );
    }

    fn on_outcome(&mut self, now: Micros, worker: &WorkerId, what: Tried, out: &mut Effects) {
        match what {
            Tried::Assigned => {
                if let Some(w) = self.workers.get_mut(worker) {
                    w.assigned += 1;
                    w.inflight += 1;
                }
                return;
            }
            Tried::Rejected(pause_millis) => self.hinted(now, worker, pause_millis),
            Tried::Hinted(pause_millis) => return self.hinted(now, worker, pause_millis),
            Tried::Unreachable => self.probe(worker, out),
            Tried::Ended => {}
        }
        if let Some(w) = self.workers.get_mut(worker) {
            w.inflight = w.inflight.saturating_sub(1);
        }
    }

    /// A D asks for a pause.
    fn hinted(&mut self, now: Micros, worker: &WorkerId, pause_millis: u32) {
        let jitter = self.jitter() % 1_000;
        self.pauses.hinted(now, worker, pause_millis, jitter);
    }

    fn probe(&mut self, worker: &WorkerId, out: &mut Effects) {
        let under_way = self.asked.values().any(|a| matches!(a, Asked::Probe(w) if w == worker));
        let Some(kind) = self.workers.get(worker).map(|w| w.kind).filter(|_| !under_way) else {
            return;
        };
        self.next_token += 1;
        let subject = self.subjects.worker(kind, worker, "probe");
        out.request(
            self.next_token,
            subject,
            &Probe { nonce: self.next_token },
            PROBE_PATIENCE,
        );
        self.asked.insert(self.next_token, Asked::Probe(worker.clone()));
    }

    /// Asks after everybody who is late, and forgets who is long gone.
    fn look(&mut self, now: Micros, out: &mut Effects) {
        self.next_look = now.plus(LOOK);
        let late: Vec<(WorkerId, bool)> = self
            .workers
            .iter()
            .filter(|(_, w)| now.since(w.last_seen) > OVERDUE)
            .map(|(name, w)| (name.clone(), now.since(w.last_seen) > FORGET))
            .collect();
        for (worker, gone) in late {
            if gone {
                self.workers.remove(&worker);
                self.peers.forget(&worker);
                self.pauses.forget(&worker);
                self.index.forget(&worker);
                continue;
            }
            let first = self
                .workers
                .get_mut(&worker)
                .is_some_and(|w| !std::mem::replace(&mut w.overdue, true));
            let due = self
                .peers
                .view()
                .get(&worker)
                .and_then(|p| p.probe_at)
                .is_some_and(|at| at <= now);
            if first || due {
                self.probe(&worker, out);
            }
        }
    }
}

/// Overlaps by name, asked for in the order of names: one walk along both lists.
struct Along<'a>(&'a [(&'a WorkerId, u32)]);

impl Along<'_> {
    fn of(&mut self, name: &WorkerId) -> u32 {
        while let Some((&(worker, pages), rest)) = self.0.split_first() {
            match worker.cmp(name) {
                Ordering::Less => self.0 = rest,
                Ordering::Equal => return pages,
                Ordering::Greater => break,
            }
        }
        0
    }
}

impl Role for Router {
    fn start(&mut self, now: Micros, out: &mut Effects) {
        let events = |kind: Kind| self.subjects.all_events_of(kind);
        let workers = self.subjects.worker(Kind::Node, &self.config.control, "workers");
        for subject in [events(Kind::Decode), events(Kind::Prefill), workers] {
            out.0.push(Effect::Subscribe(subject.as_str().to_owned()));
        }
        self.next_look = now.plus(LOOK);
    }

    fn handle(&mut self, now: Micros, input: Input, out: &mut Effects) {
        match input {
            Input::Message(message) => self.on_message(now, &message, out),
            Input::Reply { token, result } => self.on_reply(now, token, result, out),
            Input::Local(Local::RouteAsk(ask)) => self.on_route(now, &ask, out),
            Input::Local(Local::Outcome { worker, what }) => self.on_outcome(now, &worker, what, out),
            Input::Local(_) | Input::Got { .. } | Input::Sent { .. } | Input::Tick => {}
        }
        if self.next_look <= now {
            self.look(now, out);
        }
    }

    fn next_deadline(&self) -> Option<Micros> {
        Some(self.next_look)
    }
}
