//! Algorithm 2, Admit: a decode worker decides from its own ledger what it takes (design §4, digest §1.4).
//!
//! Nothing here asks the engine: the ledger counts what was promised and what runs, and the rest of the pool is *room*,
//! because whatever no running turn locks can be evicted by page. A turn is charged for its whole context and output
//! budget; a prefix that two running turns share is charged twice, so the ledger errs towards refusing (I3).
//!
//! | fact | asks, waits | holds a permit | runs | unknown |
//! |---|---|---|---|---|
//! | `Ask` | same answer | same answer | same answer | direct, permit, wait or reject |
//! | `Seeded` | – | runs: `Start` | – | `PermitExpired` |
//! | `Ended` | gone | room back | room back | – |
//! | its deadline | `Reject` | `PermitExpired` | `TurnExpired` | – |
//! | `Drain` | `Reject` | stands | stands | – |
//!
//! Every step first returns what has run out (I12), then handles its fact, then grants the room that is free to waiters.

use crate::permits::{self, Asked, Event, Permits};
use pinion_schemas::{Class, Epoch, Micros, PermitId, RejectReason, RequestId, SeedReason, SessionId, TurnIndex};
use serde::Serialize;
use std::collections::BTreeMap;

#[cfg(test)]
mod tests;

/// First guess of how long a seed holds its permit: the byte budget is what the link carries in 1 s (design §5).
const FIRST_HOLD: Micros = Micros::from_secs(1);

/// What a decode worker is and allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Config {
    /// Pages of the pool.
    pub pool_pages: u64,
    /// Tokens of one page, normally [`PAGE_TOKENS`](pinion_schemas::limits::PAGE_TOKENS); 0 counts as 1.
    pub page_tokens: u32,
    /// Bytes of one page over all layers.
    pub page_bytes: u64,
    /// Longest append that runs directly, tokens (`τ_append`, normally
    /// [`DIRECT_APPEND_TOKENS_MAX`](pinion_schemas::limits::DIRECT_APPEND_TOKENS_MAX)).
    pub direct_append_tokens_max: u32,
    /// Budget of pending seeds.
    pub permits: permits::Config,
}

/// A turn that wants to run here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ask {
    /// The client's request: the owner of whatever is reserved.
    pub request: RequestId,
    /// The session.
    pub session: SessionId,
    /// Position in the session.
    pub turn: TurnIndex,
    /// Epoch of the owner that asks.
    pub epoch: Epoch,
    /// Newest epoch of the session's owner that this worker has heard of, on any message (I7): its shell keeps it.
    pub newest_epoch: Epoch,
    /// Full pages of the session's committed prefix.
    pub prefix_pages: u32,
    /// Leading pages of the context that are resident here, as the worker's own index says now.
    pub resident_pages: u32,
    /// Tokens after the prefix.
    pub append_tokens: u32,
    /// Most tokens the turn may produce.
    pub output_tokens: u32,
    /// Service class.
    pub class: Class,
    /// When the turn fails, microseconds.
    pub deadline: Micros,
}

/// Answer to an [`Ask`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Decision {
    /// It runs here now; the pages are reserved.
    Direct,
    /// Its seed or reseed may start; the pages are promised.
    Permit {
        /// The promise.
        permit: PermitId,
        /// When it ends by itself, microseconds.
        expires: Micros,
    },
    /// A permit will follow.
    Wait {
        /// Asks of its class in front, from 0.
        position: u32,
        /// Estimate of the span until the permit, microseconds.
        eta: Micros,
    },
    /// Not here, not now.
    Reject(RejectReason),
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fact {
    /// A turn wants to run here.
    Ask(Ask),
    /// The pages of a permit have all arrived.
    Seeded {
        /// Its owner.
        request: RequestId,
        /// Which.
        permit: PermitId,
    },
    /// A turn has ended here, for whatever reason: completed, cancelled, aborted, its seed failed.
    Ended(RequestId),
    /// Pages now locked by something other than a turn (a sync under way, a page moving out): absolute.
    LockedElsewhere(u64),
    /// The pause this worker now asks for: [`crate::pressure::hint`], milliseconds. It goes out with every answer.
    Pressure(u32),
    /// The worker takes nothing new from here on, or does again.
    Drain(bool),
    /// Time passed.
    Tick,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub enum Action {
    /// Answer the owner of the turn. A waiting turn gets a second answer: its permit, or a reject.
    Answer {
        /// Which.
        request: RequestId,
        /// The answer.
        decision: Decision,
        /// Pause asked of the sender, milliseconds.
        pause_millis: u32,
    },
    /// The seeded turn runs now.
    Start(RequestId),
    /// Tell the owner that this promise has ended unused; pages that arrive for it are not awaited.
    PermitExpired {
        /// Its owner.
        request: RequestId,
        /// Which.
        permit: PermitId,
    },
    /// The turn's deadline passed: its room is back, abort it in the engine.
    TurnExpired(RequestId),
}

/// A running turn's reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Running {
    /// Pages of context and output budget.
    pub pages: u64,
    /// When they come back by themselves, microseconds.
    pub deadline: Micros,
    /// The answer it got, given again if asked again.
    pub decision: Decision,
}

/// What an observer sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct View {
    /// Pages of the pool.
    pub pool_pages: u64,
    /// Pages of running turns.
    pub used_pages: u64,
    /// Pages locked by something other than a turn.
    pub locked_elsewhere: u64,
    /// Pages free or evictable, and not promised.
    pub room: u64,
    /// Whether new turns are refused.
    pub draining: bool,
    /// Running turns by request.
    pub running: BTreeMap<RequestId, Running>,
    /// Permits (their pages are the promised ones) and queues.
    pub permits: permits::View,
}

/// The ledger of one decode worker. See the module's text.
#[derive(Debug, Clone, Hash)]
pub struct Admission {
    config: Config,
    running: BTreeMap<RequestId, Running>,
    permits: Permits,
    locked_elsewhere: u64,
    pause_millis: u32,
    draining: bool,
    /// Moving mean of how long a seed holds its permit.
    hold: Micros,
}

impl Admission {
    /// An empty ledger.
    pub fn new(config: Config) -> Self {
        Self {
            config: Config {
                page_tokens: config.page_tokens.max(1),
                ..config
            },
            running: BTreeMap::new(),
            permits: Permits::new(config.permits),
            locked_elsewhere: 0,
            pause_millis: 0,
            draining: false,
            hold: FIRST_HOLD,
        }
    }

    /// Takes one fact and says what to do, in order.
    pub fn step(&mut self, now: Micros, fact: Fact) -> Vec<Action> {
        let mut out = self.tick(now);
        match fact {
            Fact::Ask(ask) => {
                let decision = self.admit(now, &ask);
                out.push(self.answer(ask.request, decision));
            }
            Fact::Seeded { request, permit } => out.extend(self.seeded(now, request, permit)),
            Fact::Ended(request) => {
                self.running.remove(&request);
                self.permits.cancel(request);
            }
            Fact::LockedElsewhere(pages) => self.locked_elsewhere = pages,
            Fact::Pressure(pause_millis) => self.pause_millis = pause_millis,
            Fact::Drain(draining) => {
                self.draining = draining;
                if draining {
                    let waiting = self.permits.clear_queues();
                    let no = Decision::Reject(RejectReason::Draining);
                    out.extend(waiting.iter().map(|a| self.answer(a.request, no)));
                }
            }
            Fact::Tick => {}
        }
        out.extend(self.tick(now));
        out
    }

    /// When something runs out next: send [`Fact::Tick`] then. Microseconds.
    pub fn next_deadline(&self) -> Option<Micros> {
        let turns = self.running.values().map(|r| r.deadline);
        turns.chain(self.permits.next_deadline()).min()
    }

    /// Pages of running turns.
    pub fn used_pages(&self) -> u64 {
        self.running.values().map(|r| r.pages).sum()
    }

    /// Pages free or evictable, and not promised.
    pub fn room(&self) -> u64 {
        self.unlocked().saturating_sub(self.permits.pending_pages())
    }

    /// For observers.
    pub fn view(&self) -> View {
        View {
            pool_pages: self.config.pool_pages,
            used_pages: self.used_pages(),
            locked_elsewhere: self.locked_elsewhere,
            room: self.room(),
            draining: self.draining,
            running: self.running.clone(),
            permits: self.permits.view(),
        }
    }

    /// Pages no running turn and nothing else locks: what permits may have together.
    fn unlocked(&self) -> u64 {
        let locked = self.used_pages().saturating_add(self.locked_elsewhere);
        self.config.pool_pages.saturating_sub(locked)
    }

    /// Returns what has run out, then grants the room that is free.
    fn tick(&mut self, now: Micros) -> Vec<Action> {
        let mut out = Vec::new();
        self.running.retain(|request, turn| {
            let live = now < turn.deadline;
            if !live {
                out.push(Action::TurnExpired(*request));
            }
            live
        });
        self.permits.set_page_budget(self.unlocked());
        for event in self.permits.tick(now) {
            out.push(match event {
                Event::Granted(p) => self.answer(p.ask.request, permitted(&p)),
                Event::Expired(p) => expired(p.ask.request, p.permit),
                Event::AskExpired(a) => self.answer(a.request, Decision::Reject(RejectReason::DeadlinePassed)),
            });
        }
        out
    }

    /// The algorithm.
    fn admit(&mut self, now: Micros, ask: &Ask) -> Decision {
        if ask.epoch < ask.newest_epoch {
            return Decision::Reject(RejectReason::StaleEpoch);
        }
        if let Some(turn) = self.running.get(&ask.request) {
            return turn.decision;
        }
        if let Some(known) = self.permits.find(now, ask.request) {
            return self.asked(ask.class, known, 0);
        }
        if ask.deadline <= now {
            return Decision::Reject(RejectReason::DeadlinePassed);
        }
        if self.draining {
            return Decision::Reject(RejectReason::Draining);
        }
        let (context, pages) = self.need(ask);
        if pages > self.config.pool_pages {
            return Decision::Reject(RejectReason::NeverFits);
        }
        // A direct turn does not queue behind seeds: it brings no transfer, and its prefix would only be evicted.
        if self.runs_directly(ask) && pages <= self.room() {
            let turn = Running {
                pages,
                deadline: ask.deadline,
                decision: Decision::Direct,
            };
            self.running.insert(ask.request, turn);
            return Decision::Direct;
        }
        let missing = context.saturating_sub(u64::from(ask.resident_pages));
        let wish = permits::Ask {
            request: ask.request,
            class: ask.class,
            bytes: missing.saturating_mul(self.config.page_bytes),
            pages,
            deadline: ask.deadline,
        };
        let asked = self.permits.request(now, wish);
        self.asked(ask.class, asked, pages)
    }

    /// Pages of the context, and of context and output.
    fn need(&self, ask: &Ask) -> (u64, u64) {
        let page = u64::from(self.config.page_tokens);
        let context = u64::from(ask.prefix_pages) * page + u64::from(ask.append_tokens);
        let all = context + u64::from(ask.output_tokens);
        (context.div_ceil(page), all.div_ceil(page))
    }

    /// Why `ask`, which did not run directly, needs a seed. `session_pages` is the session's committed prefix (that of `ask`
    /// is what the worker made of it), `pinned` whether the session belongs here, `changed` whether its prompt is another one.
    pub fn why_seeded(&self, ask: &Ask, session_pages: u32, pinned: bool, changed: bool) -> SeedReason {
        if ask.turn == TurnIndex(0) && session_pages == 0 {
            SeedReason::NewSession
        } else if self.runs_directly(ask) {
            SeedReason::NoRoom
        } else if changed {
            SeedReason::PrefixChanged
        } else if ask.resident_pages >= session_pages {
            SeedReason::AppendTooLong
        } else if pinned {
            SeedReason::Evicted
        } else {
            SeedReason::Moved
        }
    }

    /// Whether the prefix is here and the append is short. A new session has no prefix to be here: it is seeded.
    fn runs_directly(&self, ask: &Ask) -> bool {
        let is_new = ask.turn == TurnIndex(0) && ask.prefix_pages == 0;
        !is_new && ask.resident_pages >= ask.prefix_pages && ask.append_tokens <= self.config.direct_append_tokens_max
    }

    /// The permit ledger's answer in the words of this one. A full queue is named by what it waits for.
    fn asked(&self, class: Class, asked: Asked, pages: u64) -> Decision {
        match asked {
            Asked::Granted(permit, expires) => Decision::Permit { permit, expires },
            Asked::Queued { position } => {
                let rounds = 1 + self.permits.grants_before(class, position)
                    / u64::from(self.config.permits.max_pending_seeds.max(1));
                let eta = Micros(self.hold.0.saturating_mul(rounds));
                Decision::Wait { position, eta }
            }
            Asked::QueueFull if pages > self.room() => Decision::Reject(RejectReason::NoSpace),
            Asked::QueueFull => Decision::Reject(RejectReason::QueueFull),
            Asked::TooLate => Decision::Reject(RejectReason::DeadlinePassed),
        }
    }

    /// Turns a promise into a reservation: the same pages, so the sum does not change.
    fn seeded(&mut self, now: Micros, request: RequestId, permit: PermitId) -> Option<Action> {
        let holds = |d: Decision| matches!(d, Decision::Permit { permit: p, .. } if p == permit);
        if self.running.get(&request).is_some_and(|r| holds(r.decision)) {
            return None; // said twice
        }
        // Only its owner may use a permit.
        let owns = matches!(self.permits.find(now, request), Some(Asked::Granted(p, _)) if p == permit);
        let Some(held) = owns.then(|| self.permits.release(permit)).flatten() else {
            return Some(expired(request, permit));
        };
        // One eighth of the news: steady within a few seeds, unmoved by one.
        self.hold = Micros((self.hold.0 / 8).saturating_mul(7) + now.since(held.granted).0 / 8);
        let turn = Running {
            pages: held.ask.pages,
            deadline: held.ask.deadline,
            decision: permitted(&held),
        };
        self.running.insert(request, turn);
        Some(Action::Start(request))
    }

    fn answer(&self, request: RequestId, decision: Decision) -> Action {
        Action::Answer {
            request,
            decision,
            pause_millis: self.pause_millis,
        }
    }
}

fn permitted(held: &permits::Permit) -> Decision {
    let (permit, expires) = (held.permit, held.expires);
    Decision::Permit { permit, expires }
}

fn expired(request: RequestId, permit: PermitId) -> Action {
    Action::PermitExpired { request, permit }
}
