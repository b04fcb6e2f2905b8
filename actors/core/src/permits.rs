//! Ledger of the seeds one decode worker has promised room for and not yet received (design §5, digest A-4).
//!
//! A permit has an owner (a request) and an expiry. At most `max_pending_seeds` are out, carrying at most
//! `max_pending_seed_bytes`; a single seed is always allowed, or one larger than the budget could never move (I4).
//! Who does not fit waits. Classes share grants 8 : 3 : 1 by start-time fair queueing: each class has a *pass* that
//! advances by `PASS / weight` per grant, the smallest pass is next, and a class that was idle resumes at the present
//! virtual time, so that idling earns no credit. Inside a class, first come is first served. The chosen head is never
//! overtaken, even if a smaller ask behind it would fit: that is what makes starvation impossible.
//!
//! [`Permits::tick`] returns what has run out (I12) and grants to waiters; call it when [`Permits::next_deadline`] is
//! due, before a request, and after anything that gave room back.

use pinion_schemas::limits::PENDING_SEEDS_MAX;
use pinion_schemas::{Class, Micros, PermitId, RequestId};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

#[cfg(test)]
mod tests;

/// Classes there are.
const CLASSES: usize = Class::ALL.len();
/// Least common multiple of the weights: every `PASS / weight` is whole.
const PASS: u64 = 24;

/// Share of a class in the grants while every class waits (design §5, chosen here: interactive first, none starved).
pub const fn weight(class: Class) -> u64 {
    match class {
        Class::Interactive => 8,
        Class::Batch => 3,
        Class::Background => 1,
    }
}

/// Budget of one decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Config {
    /// Permits out at once; 0 counts as 1.
    pub max_pending_seeds: u32,
    /// Bytes of all permits together, unless there is only one: what the worker's link carries in 1 s (design §5).
    pub max_pending_seed_bytes: u64,
    /// Longest life of a permit, microseconds; the request's own deadline may end it earlier. 0 counts as 1.
    pub ttl: Micros,
    /// Asks that wait, per class.
    pub queue_cap_per_class: usize,
}

impl Default for Config {
    /// [`PENDING_SEEDS_MAX`] seeds; 12.5 GB (1 s of a 100 Gbit/s link); 30 s (digest §1.7, transfer timeout); 64 asks.
    fn default() -> Self {
        Self {
            max_pending_seeds: PENDING_SEEDS_MAX,
            max_pending_seed_bytes: 12_500_000_000,
            ttl: Micros::from_secs(30),
            queue_cap_per_class: 64,
        }
    }
}

/// Wish for one permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Ask {
    /// The owner. One request has at most one permit or place in a queue.
    pub request: RequestId,
    /// Service class.
    pub class: Class,
    /// Bytes the seed will move.
    pub bytes: u64,
    /// Pages the turn will occupy.
    pub pages: u64,
    /// When the turn fails, microseconds: neither permit nor place in the queue outlives it.
    pub deadline: Micros,
}

/// Answer to an [`Ask`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Asked {
    /// The seed may start; the promise ends by itself at the given time, microseconds.
    Granted(PermitId, Micros),
    /// Wait for [`Event::Granted`].
    Queued {
        /// Asks of the class in front, from 0.
        position: u32,
    },
    /// As many asks of the class wait as may.
    QueueFull,
    /// The ask's deadline (or that of the permit it already has) has passed.
    TooLate,
}

/// A promise that stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Permit {
    /// Its name.
    pub permit: PermitId,
    /// What was asked.
    pub ask: Ask,
    /// When it was given, microseconds.
    pub granted: Micros,
    /// When it ends by itself, microseconds. At this instant it is already over.
    pub expires: Micros,
}

/// What [`Permits::tick`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Event {
    /// A waiting ask got its permit.
    Granted(Permit),
    /// A permit ended unused; its room is back.
    Expired(Permit),
    /// A waiting ask reached its deadline.
    AskExpired(Ask),
}

/// What an observer sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct View {
    /// The budget.
    pub config: Config,
    /// Permits out, oldest first.
    pub pending: Vec<Permit>,
    /// Their bytes.
    pub pending_bytes: u64,
    /// Their pages.
    pub pending_pages: u64,
    /// Pages they may have together.
    pub page_budget: u64,
    /// Asks that wait: by class in order of declaration, then in order of arrival.
    pub waiting: Vec<Ask>,
}

/// The waiting asks of one class.
#[derive(Debug, Clone, Default, Hash)]
struct Queue {
    asks: VecDeque<Ask>,
    pass: u64,
}

/// The ledger. See the module's text.
#[derive(Debug, Clone, Hash)]
pub struct Permits {
    config: Config,
    page_budget: u64,
    /// Ids only grow, so the order of the map is the order of grants.
    pending: BTreeMap<PermitId, Permit>,
    /// One per class, by its discriminant.
    queues: [Queue; CLASSES],
    /// Pass of the last grant.
    virtual_time: u64,
    next_id: u64,
}

impl Permits {
    /// An empty ledger whose page budget is unlimited until [`Permits::set_page_budget`].
    pub fn new(config: Config) -> Self {
        Self {
            config: Config {
                max_pending_seeds: config.max_pending_seeds.max(1),
                ttl: config.ttl.max(Micros(1)),
                ..config
            },
            page_budget: u64::MAX,
            pending: BTreeMap::new(),
            queues: Default::default(),
            virtual_time: 0,
            next_id: 0,
        }
    }

    /// Pages that all permits may have together: what the pool has left beside its running turns. A permit that
    /// stands is not taken back when this shrinks. Asks that could never fit must be refused by the caller.
    pub fn set_page_budget(&mut self, pages: u64) {
        self.page_budget = pages;
    }

    /// Asks for a permit. Asking again changes nothing and returns the permit, or the present place in the queue.
    pub fn request(&mut self, now: Micros, ask: Ask) -> Asked {
        if let Some(known) = self.find(now, ask.request) {
            return known;
        }
        if ask.deadline <= now {
            return Asked::TooLate;
        }
        let queue = &mut self.queues[ask.class as usize];
        if queue.asks.is_empty() {
            queue.pass = queue.pass.max(self.virtual_time);
        }
        queue.asks.push_back(ask);
        let position = queue.asks.len() - 1;
        // Only if it is its turn: a newcomer that fits must not pass those who wait.
        if position == 0
            && self.chosen() == Some(ask.class)
            && let Some(permit) = self.grant_chosen(now)
        {
            return Asked::Granted(permit.permit, permit.expires);
        }
        if position >= self.config.queue_cap_per_class {
            self.queues[ask.class as usize].asks.pop_back();
            return Asked::QueueFull;
        }
        Asked::Queued {
            position: position as u32,
        }
    }

    /// What `request` has: its permit, or its present place in a queue; nothing if it is unknown.
    pub fn find(&self, now: Micros, request: RequestId) -> Option<Asked> {
        if let Some(held) = self.pending.values().find(|p| p.ask.request == request) {
            return Some(if held.expires <= now {
                Asked::TooLate
            } else {
                Asked::Granted(held.permit, held.expires)
            });
        }
        self.queues.iter().find_map(|q| {
            let position = q.asks.iter().position(|a| a.request == request)?;
            Some(Asked::Queued {
                position: position as u32,
            })
        })
    }

    /// Ends a permit whose seed has arrived or failed, and returns it; nothing if it has ended before.
    pub fn release(&mut self, id: PermitId) -> Option<Permit> {
        self.pending.remove(&id)
    }

    /// Ends whatever `request` has. Returns whether it had anything.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        let had = self.pending.len() + self.waiting();
        self.pending.retain(|_, p| p.ask.request != request);
        for queue in &mut self.queues {
            queue.asks.retain(|a| a.request != request);
        }
        self.pending.len() + self.waiting() < had
    }

    /// Ends every wait and returns the asks; permits stand.
    pub fn clear_queues(&mut self) -> Vec<Ask> {
        self.queues.iter_mut().flat_map(|q| q.asks.drain(..)).collect()
    }

    /// Ends what has run out, then grants to waiters as far as the budget goes.
    pub fn tick(&mut self, now: Micros) -> Vec<Event> {
        let mut events = Vec::new();
        self.pending.retain(|_, p| {
            let live = now < p.expires;
            if !live {
                events.push(Event::Expired(*p));
            }
            live
        });
        for queue in &mut self.queues {
            queue.asks.retain(|a| {
                let live = now < a.deadline;
                if !live {
                    events.push(Event::AskExpired(*a));
                }
                live
            });
        }
        while let Some(permit) = self.grant_chosen(now) {
            events.push(Event::Granted(permit));
        }
        events
    }

    /// When the next permit or ask runs out, microseconds.
    pub fn next_deadline(&self) -> Option<Micros> {
        let permits = self.pending.values().map(|p| p.expires);
        let asks = self.queues.iter().flat_map(|q| q.asks.iter().map(|a| a.deadline));
        permits.chain(asks).min()
    }

    /// Permits out.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Asks that wait, over all classes.
    pub fn waiting(&self) -> usize {
        self.queues.iter().map(|q| q.asks.len()).sum()
    }

    /// Bytes of the permits out.
    pub fn pending_bytes(&self) -> u64 {
        self.pending.values().fold(0, |sum, p| sum.saturating_add(p.ask.bytes))
    }

    /// Pages of the permits out.
    pub fn pending_pages(&self) -> u64 {
        self.pending.values().fold(0, |sum, p| sum.saturating_add(p.ask.pages))
    }

    /// Estimate of the grants before that of the ask at `position` of `class`: those of its class in front, and of each
    /// other class what its weight gives it meanwhile, if it has as many.
    pub fn grants_before(&self, class: Class, position: u32) -> u64 {
        let own = u64::from(position);
        let others = Class::ALL.iter().filter(|c| **c != class).map(|c| {
            let meanwhile = (own + 1) * weight(*c) / weight(class);
            meanwhile.min(self.queues[*c as usize].asks.len() as u64)
        });
        own + others.sum::<u64>()
    }

    /// For observers.
    pub fn view(&self) -> View {
        View {
            config: self.config,
            pending: self.pending.values().copied().collect(),
            pending_bytes: self.pending_bytes(),
            pending_pages: self.pending_pages(),
            page_budget: self.page_budget,
            waiting: self.queues.iter().flat_map(|q| q.asks.iter().copied()).collect(),
        }
    }

    /// The class whose head is next: the smallest pass, ties in order of declaration.
    fn chosen(&self) -> Option<Class> {
        let waiting = |c: &Class| !self.queues[*c as usize].asks.is_empty();
        let pass = |c: &Class| self.queues[*c as usize].pass;
        Class::ALL.iter().copied().filter(waiting).min_by_key(pass)
    }

    /// Whether the budget has a place for `ask` now.
    fn fits(&self, ask: &Ask) -> bool {
        let bytes = self.pending_bytes().saturating_add(ask.bytes);
        let pages = self.pending_pages().saturating_add(ask.pages);
        self.pending.len() < self.config.max_pending_seeds as usize
            && (self.pending.is_empty() || bytes <= self.config.max_pending_seed_bytes)
            && pages <= self.page_budget
    }

    /// Grants to the next head if it fits.
    fn grant_chosen(&mut self, now: Micros) -> Option<Permit> {
        let class = self.chosen()?;
        let ask = *self.queues[class as usize].asks.front()?;
        if !self.fits(&ask) {
            return None;
        }
        let queue = &mut self.queues[class as usize];
        queue.asks.pop_front();
        self.virtual_time = queue.pass;
        queue.pass += PASS / weight(class);
        let permit = Permit {
            permit: PermitId(self.next_id),
            ask,
            granted: now,
            expires: now.plus(self.config.ttl).min(ask.deadline),
        };
        self.next_id += 1;
        self.pending.insert(permit.permit, permit);
        Some(permit)
    }
}
