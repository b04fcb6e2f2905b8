//! The prefill role: computes what a seed misses and sends its pages to the decode worker that promised room for them.
//!
//! A seed is queued, computed and moved; its pages leave as they are computed. It ends by `SeedDone` or `LegFailed` to the session's owner, by `Abort`, or
//! at its deadline; whatever the end, nothing stays locked: the pages remain as evictable backup.

mod pages;
mod sync;

use crate::decode::HEARTBEAT;
use crate::deliver::Deliveries;
use crate::effect::{Effect, Effects, Input, Role};
use crate::engine::{Engine, EngineError, EngineOutput, Job};
use crate::feed::ResidencyFeed;
use crate::grants::Keys;
use pinion_bus::Message;
use pinion_schemas::messages::{
    Abort, Accepted, Heartbeat, LegFailed, Probe, ProbeAck, Seed, SnapshotAsk, SyncCommit, SyncOffer,
};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{AbortReason, ClusterId, Epoch, Micros, RequestId, SessionId, WorkerId};
use pinion_transfer::sim::LinkModel;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

/// Seeds waiting for the engine; a D promises four at a time, so this serves 64 decode workers.
const QUEUE_MAX: usize = 256;

/// What a prefill worker is.
#[derive(Clone, Debug)]
pub struct PrefillConfig {
    /// The cluster.
    pub cluster: ClusterId,
    /// Its name.
    pub worker: WorkerId,
    /// Its epoch: grows with every start.
    pub epoch: Epoch,
    /// The link over which its pages leave.
    pub link: LinkModel,
    /// Where its page server is, for an engine whose pages have bytes.
    pub addresses: Vec<String>,
    /// Random: keys of grants are made from it.
    pub secret: u64,
}

enum Stage {
    Queued,
    /// What is computed moves already.
    Computing,
    Moving,
}

struct Work {
    seed: Seed,
    deadline: Micros,
    stage: Stage,
    /// Tokens that were not in cache.
    computed: u32,
}

impl Work {
    /// Whether the pool could hold the seed's context if it were empty.
    fn fits(&self, engine: &impl Engine) -> bool {
        let pages = self.seed.tokens.len().div_ceil(engine.page_tokens().max(1) as usize);
        pages as u64 <= engine.pool_pages()
    }
}

/// The role.
pub struct Prefill<E> {
    config: PrefillConfig,
    subjects: Subjects,
    engine: E,
    feed: ResidencyFeed,
    work: BTreeMap<RequestId, Work>,
    queue: VecDeque<RequestId>,
    deliveries: Deliveries,
    keys: Keys,
    /// Slots that are being filled with backups.
    backups: sync::Backups,
    next_heartbeat: Micros,
}

#[derive(Serialize)]
struct View<'a> {
    worker: &'a WorkerId,
    epoch: Epoch,
    queued: usize,
    seeds: Vec<SeedView<'a>>,
    queued_tokens: u64,
    resident_pages: usize,
    /// Of an engine that has some.
    tiers: Option<crate::engine::TierView>,
}

#[derive(Serialize)]
struct SeedView<'a> {
    request: RequestId,
    session: &'a SessionId,
    attempt: u64,
    decode: &'a WorkerId,
    tokens: usize,
    stage: &'static str,
}

impl<E: Engine> Prefill<E> {
    /// A worker in front of `engine`.
    pub fn new(config: PrefillConfig, engine: E) -> Self {
        let subjects = Subjects::new(&config.cluster);
        let subject = subjects
            .event(Kind::Prefill, config.worker.as_str())
            .as_str()
            .to_owned();
        Self {
            feed: ResidencyFeed::new(subject, config.worker.clone(), config.epoch),
            deliveries: Deliveries::new(subjects.clone(), config.link, 0),
            keys: Keys::new(config.secret),
            backups: sync::Backups::default(),
            subjects,
            config,
            engine,
            work: BTreeMap::new(),
            queue: VecDeque::new(),
            next_heartbeat: Micros::ZERO,
        }
    }

    fn on_message(&mut self, now: Micros, message: &Message, out: &mut Effects) {
        if message.subject.ends_with(".inspect") {
            return out.respond_json(message, &self.view());
        }
        crate::dispatch!(message, {
            Seed(seed) => self.on_seed(now, seed, message, out),
            SyncOffer(offer) => self.on_sync_offer(now, &offer, message, out),
            SyncCommit(commit) => self.on_sync_commit(&commit, message, out),
            Abort(abort) => {
                if self.work.get(&abort.request).is_some_and(|w| w.seed.attempt <= abort.attempt) {
                    self.drop_seed(now, abort.request);
                }
            },
            Probe(probe) => out.respond(message, &ProbeAck { nonce: probe.nonce, epoch: self.config.epoch }),
            SnapshotAsk(ask) => self.feed.answer(&self.engine, &ask, message, out),
        });
    }

    fn on_seed(&mut self, now: Micros, seed: Seed, message: &Message, out: &mut Effects) {
        let request = seed.request;
        if self.work.get(&request).is_some_and(|w| w.seed.attempt >= seed.attempt) {
            return;
        }
        let same = |s: &Seed| (s.permit, &s.decode, s.decode_epoch) == (seed.permit, &seed.decode, seed.decode_epoch);
        if let Some(work) = self.work.get_mut(&request).filter(|w| same(&w.seed)) {
            // Asked after: it goes on, and its end belongs to the new attempt.
            (work.seed.attempt, work.seed.notify) = (seed.attempt, seed.notify);
            let (epoch, waiting) = (self.config.epoch, self.queue.len() as u32);
            let accepted = Accepted {
                request,
                epoch,
                waiting,
            };
            return out.respond(message, &accepted);
        }
        self.drop_seed(now, request);
        let attempt = seed.attempt;
        if self.work.len() >= QUEUE_MAX {
            return out.respond(
                message,
                &LegFailed {
                    request,
                    attempt,
                    reason: AbortReason::EngineFailed,
                },
            );
        }
        let waiting = self.queue.len() as u32;
        out.respond(
            message,
            &Accepted {
                request,
                epoch: self.config.epoch,
                waiting,
            },
        );
        let deadline = now.plus(seed.time_left);
        self.work.insert(
            request,
            Work {
                seed,
                deadline,
                stage: Stage::Queued,
                computed: 0,
            },
        );
        self.queue.push_back(request);
        self.start_queued(now, out);
    }

    /// Gives the engine what it can take, first come first served.
    fn start_queued(&mut self, now: Micros, out: &mut Effects) {
        while let Some(request) = self.queue.front().copied() {
            let Some(work) = self.work.get_mut(&request) else {
                self.queue.pop_front();
                continue;
            };
            let job = Job {
                request,
                tokens: work.seed.tokens.clone(),
                max_new_tokens: 0,
                sampling: pinion_schemas::Sampling::GREEDY,
                tenant: work.seed.tenant.clone(),
            };
            match self.engine.submit(now, job) {
                Ok(cached) => {
                    work.stage = Stage::Computing;
                    work.computed = (work.seed.tokens.len() as u32).saturating_sub(cached as u32);
                    self.begin(now, request, out);
                }
                // Others' turns, grants and pages on their way end soon; the heartbeat looks again.
                Err(EngineError::NoRoom(_)) if work.fits(&self.engine) => return,
                Err(error) => {
                    tracing::warn!(request = %request, %error, "seed not computed");
                    self.fail(now, request, AbortReason::EngineFailed, out);
                }
            }
            self.queue.pop_front();
        }
    }

    fn drop_seed(&mut self, now: Micros, request: RequestId) {
        self.engine.cancel(request);
        self.deliveries.cancel(now, request);
        self.work.remove(&request);
    }

    fn fail(&mut self, now: Micros, request: RequestId, reason: AbortReason, out: &mut Effects) {
        self.engine.cancel(request);
        self.deliveries.cancel(now, request);
        if let Some(work) = self.work.remove(&request) {
            out.publish(
                work.seed.notify,
                &LegFailed {
                    request,
                    attempt: work.seed.attempt,
                    reason,
                },
            );
        }
    }

    fn advance(&mut self, now: Micros, out: &mut Effects) {
        let mut stored = false;
        for output in self.engine.advance(now) {
            self.feed.take(&output, out);
            match output {
                EngineOutput::Finished { request, ok: true, .. } => self.computed(now, request, out),
                EngineOutput::Finished { request, ok: false, .. } => {
                    self.fail(now, request, AbortReason::EngineFailed, out);
                }
                EngineOutput::Stored(_) => stored = true,
                EngineOutput::Token(..) | EngineOutput::Evicted(_) => {}
            }
        }
        self.feed.flush(out);
        if stored {
            self.hand_over(now, out);
        }
        while let Some(request) = self.deliveries.take_passed(now) {
            let delivered = self.deliveries.advance(now, &self.engine, request, false, out);
            self.delivered(now, delivered, out);
        }
        let late: Vec<RequestId> = self
            .work
            .iter()
            .filter(|(_, w)| w.deadline <= now)
            .map(|(r, _)| *r)
            .collect();
        for request in late {
            self.fail(now, request, AbortReason::Deadline, out);
        }
        self.start_queued(now, out);
    }

    fn heartbeat(&mut self, now: Micros, out: &mut Effects) {
        let subject = self.subjects.event(Kind::Prefill, self.config.worker.as_str());
        out.publish(
            subject,
            &Heartbeat {
                worker: self.config.worker.clone(),
                epoch: self.config.epoch,
                running: self.work.len() as u32,
                queued_tokens: self.queued_tokens(),
                pool_pages: self.engine.pool_pages() as u32,
                room_pages: 0,
                draining: false,
                pause_millis: 0,
                residency_sequence: self.feed.sequence(),
            },
        );
        self.next_heartbeat = now.plus(HEARTBEAT);
    }

    fn queued_tokens(&self) -> u64 {
        let waiting = self
            .queue
            .iter()
            .filter_map(|r| self.work.get(r))
            .map(|w| w.seed.tokens.len() as u64);
        self.engine.queued_tokens() + waiting.sum::<u64>()
    }

    fn view(&self) -> View<'_> {
        let seeds = self.work.iter().map(|(request, w)| SeedView {
            request: *request,
            session: &w.seed.session,
            attempt: w.seed.attempt,
            decode: &w.seed.decode,
            tokens: w.seed.tokens.len(),
            stage: match w.stage {
                Stage::Queued => "queued",
                Stage::Computing => "computing",
                Stage::Moving => "moving",
            },
        });
        View {
            worker: &self.config.worker,
            epoch: self.config.epoch,
            queued: self.queue.len(),
            seeds: seeds.collect(),
            queued_tokens: self.queued_tokens(),
            resident_pages: self.engine.pages().len(),
            tiers: self.engine.tiers(),
        }
    }
}

impl<E: Engine> Role for Prefill<E> {
    fn start(&mut self, now: Micros, out: &mut Effects) {
        let all = self.subjects.worker(Kind::Prefill, &self.config.worker, "*");
        out.0.push(Effect::Subscribe(all.as_str().to_owned()));
        self.heartbeat(now, out);
    }

    fn wake_with(&mut self, wake: crate::engine::Wake) {
        self.engine.wake_with(wake);
    }

    fn handle(&mut self, now: Micros, input: Input, out: &mut Effects) {
        match input {
            Input::Message(message) => self.on_message(now, &message, out),
            Input::Reply { token, result } => {
                let delivered = self.deliveries.on_reply(now, &self.engine, token, result, out);
                self.delivered(now, delivered, out);
            }
            Input::Sent { token, result } => {
                let delivered = self.deliveries.on_sent(now, &self.engine, token, result, out);
                self.delivered(now, delivered, out);
            }
            Input::Local(_) | Input::Got { .. } | Input::Tick => {}
        }
        self.advance(now, out);
        if self.next_heartbeat <= now {
            self.heartbeat(now, out);
        }
    }

    fn next_deadline(&self) -> Option<Micros> {
        let seeds = self.work.values().map(|w| w.deadline);
        seeds
            .chain(self.deliveries.next_done())
            .chain(self.engine.next_wakeup())
            .chain([self.next_heartbeat])
            .min()
    }
}
