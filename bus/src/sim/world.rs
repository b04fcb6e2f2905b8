//! The state behind [`super::SimNet`]: synchronous, every random choice from one generator, every collection ordered.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::store::KvStore;
use super::{Faults, Restart, SERVER, Seen, SimNet, Tap, What};
use crate::{BusError, Message, subject};

/// Messages a client buffers while the server is away, as the control connection of `NatsBus` does; then publish
/// blocks.
const DOWN_BUFFER_MAX: usize = 256;
/// Remembered "not before" times of (publisher, subject, subscription) before those in the past are swept.
const ORDER_SWEEP: usize = 65_536;

struct Subscriber {
    endpoint: String,
    pattern: String,
    queue: Option<String>,
    capacity: usize,
    sender: mpsc::Sender<Message>,
}

#[derive(Clone, Copy)]
enum Target {
    Subscription(u64),
    Inbox,
}

struct Flight {
    from: String,
    target: Target,
    message: Message,
}

/// A request that waits for its answer.
pub(super) struct Waiter {
    endpoint: String,
    sender: oneshot::Sender<Result<Message, BusError>>,
}

pub(super) struct World {
    pub(super) faults: Faults,
    pub(super) log: Vec<String>,
    pub(super) log_hash: u64,
    pub(super) logs: bool,
    pub(super) tap: Option<Tap>,
    pub(super) waiting: BTreeMap<String, Waiter>,
    pub(super) restarts: u64,
    pub(super) noticed: bool,
    start: Instant,
    random: ChaCha8Rng,
    subscribers: BTreeMap<u64, Subscriber>,
    /// Subscriptions without wildcards by subject; the others.
    exact: BTreeMap<String, BTreeSet<u64>>,
    wild: BTreeSet<u64>,
    /// Due time and number.
    queue: BinaryHeap<Reverse<(Instant, u64)>>,
    flights: BTreeMap<u64, Flight>,
    not_before: BTreeMap<(String, String, u64), Instant>,
    next_id: u64,
    up_at: Instant,
    held: VecDeque<(String, Message)>,
    /// Ways on which nothing passes: from, to.
    cuts: BTreeSet<(String, String)>,
    /// What is added to each journey from or to an endpoint.
    lags: BTreeMap<String, Duration>,
    /// How often an endpoint has crashed.
    lives: BTreeMap<String, u64>,
    pub(super) store: KvStore,
}

fn fnv(mut hash: u64, bytes: &[u8]) -> u64 {
    for byte in bytes {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

impl World {
    pub(super) fn new(seed: u64, faults: Faults, now: Instant) -> Self {
        Self {
            faults,
            log: Vec::new(),
            log_hash: FNV_START,
            logs: true,
            tap: None,
            waiting: BTreeMap::new(),
            restarts: 0,
            noticed: false,
            start: now,
            random: ChaCha8Rng::seed_from_u64(seed),
            subscribers: BTreeMap::new(),
            exact: BTreeMap::new(),
            wild: BTreeSet::new(),
            queue: BinaryHeap::new(),
            flights: BTreeMap::new(),
            not_before: BTreeMap::new(),
            next_id: 0,
            up_at: now,
            held: VecDeque::new(),
            cuts: BTreeSet::new(),
            lags: BTreeMap::new(),
            lives: BTreeMap::new(),
            store: KvStore::default(),
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn chance(&mut self, probability: f64) -> bool {
        // 53 random bits are all a double holds. Drawn even at probability 0, so that faults do not shift later draws.
        ((self.random.next_u64() >> 11) as f64) / ((1u64 << 53) as f64) < probability
    }

    /// How long the next journey takes.
    pub(super) fn journey(&mut self) -> Duration {
        let (min, max) = (self.faults.latency_min, self.faults.latency_max);
        let spread = u64::try_from(max.saturating_sub(min).as_micros()).unwrap_or(u64::MAX - 1);
        min + Duration::from_micros(self.random.next_u64() % (spread + 1))
    }

    fn note(&mut self, now: Instant, what: What, from: &str, to: &str, message: &Message) {
        let at = now.saturating_duration_since(self.start);
        if let Some(tap) = &mut self.tap {
            tap(&Seen::Message {
                at,
                what,
                from,
                to,
                message,
            });
        }
        if !self.logs {
            return;
        }
        let body = fnv(
            fnv(FNV_START, format!("{:?}", message.headers.0).as_bytes()),
            &message.payload,
        );
        self.line(format!(
            "{} {what} {from} {to} {} {} {body:016x}",
            at.as_micros(),
            message.subject,
            message.payload.len()
        ));
    }

    fn line(&mut self, line: String) {
        if !self.logs {
            return;
        }
        self.log_hash = fnv(fnv(self.log_hash, line.as_bytes()), b"\n");
        if self.log.len() < SimNet::LOG_LINES_MAX {
            self.log.push(line);
        }
    }

    /// Nothing passes from `a` to `b` any more; what is on its way there is lost.
    pub(super) fn cut(&mut self, a: &str, b: &str) {
        self.cuts.insert((a.to_owned(), b.to_owned()));
        let (cuts, flights) = (&self.cuts, &mut self.flights);
        let (subscribers, waiting) = (&self.subscribers, &self.waiting);
        flights.retain(|_, flight| {
            let to = match flight.target {
                Target::Subscription(id) => subscribers.get(&id).map(|s| s.endpoint.as_str()),
                Target::Inbox => waiting.get(&flight.message.subject).map(|w| w.endpoint.as_str()),
            };
            to.is_some_and(|to| reachable(cuts, &flight.from, to))
        });
    }

    pub(super) fn heal(&mut self, a: &str, b: &str) {
        self.cuts.remove(&(a.to_owned(), b.to_owned()));
        self.cuts.remove(&(b.to_owned(), a.to_owned()));
    }

    pub(super) fn lag(&mut self, endpoint: &str, lag: Duration) {
        self.lags.insert(endpoint.to_owned(), lag);
    }

    fn lag_of(&self, endpoint: &str) -> Duration {
        self.lags.get(endpoint).copied().unwrap_or_default()
    }

    /// Whether something sent by `a` gets to `b`.
    pub(super) fn reachable(&self, a: &str, b: &str) -> bool {
        reachable(&self.cuts, a, b)
    }

    /// Which life of the endpoint this is.
    pub(super) fn life(&self, endpoint: &str) -> u64 {
        self.lives.get(endpoint).copied().unwrap_or_default()
    }

    /// Whoever has the endpoint now is dead: the server drops its subscriptions, and nothing of it is sent any more.
    pub(super) fn crash(&mut self, endpoint: &str) {
        *self.lives.entry(endpoint.to_owned()).or_default() += 1;
        let gone: Vec<u64> = self
            .subscribers
            .iter()
            .filter(|(_, s)| s.endpoint == endpoint)
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            self.unsubscribe(id);
        }
        self.held.retain(|(from, _)| from != endpoint);
    }

    pub(super) fn is_down(&self, now: Instant) -> bool {
        now < self.up_at
    }

    pub(super) fn restart(&mut self, restart: Restart) {
        let now = Instant::now();
        self.up_at = self.up_at.max(now + restart.down);
        self.restarts += 1;
        self.noticed = restart.noticed;
        let lost = self.flights.len();
        self.flights.clear();
        self.queue.clear();
        if restart.noticed {
            while let Some((_, waiter)) = self.waiting.pop_first() {
                let _ = waiter.sender.send(Err(BusError::Disconnected));
            }
        }
        self.store.lose(restart.lose_writes);
        let at = now.saturating_duration_since(self.start);
        if let Some(tap) = &mut self.tap {
            tap(&Seen::Restart { at });
        }
        self.line(format!("{} restart {lost} in flight lost", at.as_micros()));
    }

    pub(super) fn subscribe(
        &mut self,
        (endpoint, life): (&str, u64),
        pattern: &str,
        queue: Option<String>,
    ) -> (u64, mpsc::Receiver<Message>) {
        let id = self.id();
        let alive = life == self.life(endpoint);
        let capacity = self.faults.subscription_capacity.max(1);
        let (sender, receiver) = mpsc::channel(capacity);
        if !alive {
            return (id, receiver); // nobody sends to it
        }
        if pattern.split('.').any(|token| token == "*" || token == ">") {
            self.wild.insert(id);
        } else {
            self.exact.entry(pattern.to_owned()).or_default().insert(id);
        }
        let (endpoint, pattern) = (endpoint.to_owned(), pattern.to_owned());
        self.subscribers.insert(
            id,
            Subscriber {
                endpoint,
                pattern,
                queue,
                capacity,
                sender,
            },
        );
        (id, receiver)
    }

    pub(super) fn unsubscribe(&mut self, id: u64) {
        let Some(gone) = self.subscribers.remove(&id) else {
            return;
        };
        self.wild.remove(&id);
        if let Some(ids) = self.exact.get_mut(&gone.pattern) {
            ids.remove(&id);
            if ids.is_empty() {
                self.exact.remove(&gone.pattern);
            }
        }
    }

    fn matching(&self, subject: &str) -> impl Iterator<Item = u64> {
        let wild = self.wild.iter().filter(move |id| {
            self.subscribers
                .get(id)
                .is_some_and(|subscriber| subject::matches(&subscriber.pattern, subject))
        });
        self.exact.get(subject).into_iter().flatten().chain(wild).copied()
    }

    pub(super) fn has_interest(&self, subject: &str) -> bool {
        self.matching(subject).next().is_some()
    }

    pub(super) fn open_inbox(&mut self, endpoint: &str, sender: oneshot::Sender<Result<Message, BusError>>) -> String {
        let inbox = format!("_INBOX.{}", self.id());
        self.waiting.insert(
            inbox.clone(),
            Waiter {
                endpoint: endpoint.to_owned(),
                sender,
            },
        );
        inbox
    }

    /// `false`: the server is away and the client's buffer is full.
    pub(super) fn publish(&mut self, from: &str, message: &Message, now: Instant) -> bool {
        if self.is_down(now) {
            let full = self.held.iter().filter(|(holder, _)| holder == from).count() >= DOWN_BUFFER_MAX;
            // A request is not held: its asker fails or times out, and a late copy would only repeat it.
            if !full && message.reply.is_none() {
                self.held.push_back((from.to_owned(), message.clone()));
            }
            return !full;
        }
        self.note(now, What::Sent, from, "-", message);
        if !self.reachable(from, SERVER) {
            self.note(now, What::Cut, from, SERVER, message);
            return true;
        }
        if self.waiting.contains_key(&message.subject) {
            self.dispatch(from, &Target::Inbox, message, now);
        }
        let mut groups: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        let mut chosen = Vec::new();
        for id in self.matching(&message.subject) {
            match self
                .subscribers
                .get(&id)
                .and_then(|subscriber| subscriber.queue.clone())
            {
                Some(queue) => groups.entry(queue).or_default().push(id),
                None => chosen.push(id),
            }
        }
        for members in groups.into_values() {
            chosen.push(members[(self.random.next_u64() % members.len() as u64) as usize]);
        }
        for id in chosen {
            self.dispatch(from, &Target::Subscription(id), message, now);
        }
        true
    }

    /// Decides the fate of one copy.
    fn dispatch(&mut self, from: &str, target: &Target, message: &Message, now: Instant) {
        let (lost, twice) = (self.chance(self.faults.loss), self.chance(self.faults.duplication));
        let mut at = now + self.journey();
        let (to, floor_of) = match target {
            Target::Subscription(id) => (self.subscribers.get(id).map(|s| s.endpoint.clone()), *id),
            Target::Inbox => (self.waiting.get(&message.subject).map(|w| w.endpoint.clone()), 0),
        };
        let to = to.unwrap_or_default();
        at += self.lag_of(from) + self.lag_of(&to);
        if lost || !self.reachable(from, &to) {
            self.note(now, if lost { What::Lost } else { What::Cut }, from, &to, message);
            return;
        }
        if floor_of != 0 {
            let order = if self.faults.reordering {
                message.subject.clone()
            } else {
                String::new()
            };
            let floor = self.not_before.entry((from.to_owned(), order, floor_of)).or_insert(at);
            at = at.max(*floor);
            *floor = at;
            if self.not_before.len() > ORDER_SWEEP {
                self.not_before.retain(|_, floor| *floor > now);
            }
        }
        for _ in 0..if twice { 2 } else { 1 } {
            let id = self.id();
            self.flights.insert(
                id,
                Flight {
                    from: from.to_owned(),
                    target: *target,
                    message: message.clone(),
                },
            );
            self.queue.push(Reverse((at, id)));
        }
    }

    /// Delivers everything due at `now`; returns when to come again.
    pub(super) fn deliver_due(&mut self, now: Instant) -> Option<Instant> {
        if !self.is_down(now) {
            while let Some((from, message)) = self.held.pop_front() {
                self.publish(&from, &message, now);
            }
        }
        while let Some(Reverse((at, id))) = self.queue.peek().copied() {
            if at > now {
                break;
            }
            self.queue.pop();
            if let Some(flight) = self.flights.remove(&id) {
                self.land(flight, now);
            }
        }
        let due = self.queue.peek().map(|Reverse((at, _))| *at);
        if self.held.is_empty() {
            due
        } else {
            Some(due.map_or(self.up_at, |at| at.min(self.up_at)))
        }
    }

    fn land(&mut self, flight: Flight, now: Instant) {
        let Flight { from, target, message } = flight;
        match target {
            Target::Inbox => {
                if let Some(waiter) = self.waiting.remove(&message.subject) {
                    self.note(now, What::Answered, &from, &waiter.endpoint, &message);
                    let _ = waiter.sender.send(Ok(message));
                }
            }
            Target::Subscription(id) => {
                let Some(subscriber) = self.subscribers.get(&id) else {
                    return;
                };
                let what = match subscriber.sender.try_send(message.clone()) {
                    Ok(()) => What::Got,
                    Err(mpsc::error::TrySendError::Full(_)) => What::Slow(subscriber.capacity),
                    Err(mpsc::error::TrySendError::Closed(_)) => What::Gone,
                };
                let to = subscriber.endpoint.clone();
                self.note(now, what, &from, &to, &message);
            }
        }
    }

    pub(super) fn kv_write(&mut self, bucket: &str, key: &str, value: Option<Bytes>) -> u64 {
        if let Some(tap) = &mut self.tap {
            let at = Instant::now().saturating_duration_since(self.start);
            tap(&Seen::Written {
                at,
                key,
                value: value.as_deref(),
            });
        }
        let revision = self.store.write(bucket, key, value);
        self.line(format!("kv {bucket} {key} {revision}"));
        revision
    }
}

fn reachable(cuts: &BTreeSet<(String, String)>, a: &str, b: &str) -> bool {
    let cut = |a: &str, b: &str| !cuts.is_empty() && cuts.contains(&(a.to_owned(), b.to_owned()));
    !cut(a, b) && !cut(a, SERVER) && !cut(SERVER, b)
}
