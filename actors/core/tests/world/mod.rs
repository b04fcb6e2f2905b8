//! A world small enough to look at all of it: real sessions, real ledgers of decode workers, the real ranking; between them
//! queues that keep their order, and faults that a test allows one by one.
//!
//! One page holds one token. Turn k of a session has a context of 2k + 1 tokens and an answer of one, so it leaves 2k + 2.
//! What the shells around the machines do (`actors/src/sessions.rs`, `decode.rs`) is repeated here in short.

use pinion_core::admit::{self, Admission, Decision};
use pinion_core::permits;
use pinion_core::route::{self, Candidate};
use pinion_core::session::{self, Action, Commit, Fact, Offer, Outcome, Ranking, Session, TurnFact};
use pinion_schemas::limits::REJECTS_MAX;
use pinion_schemas::{
    AbortReason, Class, Epoch, Micros, MigrationReason, Path, PermitId, RejectReason, RequestId, SessionId, TurnIndex,
    WorkerId,
};
use std::collections::{BTreeMap, VecDeque};

/// A turn's time: longer than all waits in these worlds together.
const TURN: Micros = Micros::from_secs(600);

/// What is planted to see whether the checks find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(dead_code, reason = "each test binary uses its own")]
pub enum Bug {
    None,
    /// A session takes what is said of an older attempt for the present one's.
    StaleAccepted,
    /// A worker does not give back the room of an aborted turn.
    RoomKept,
}

/// How often each fault may still happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Faults {
    pub rejects: u8,
    pub losses: u8,
    pub lost: u8,
    pub late: u8,
    pub cancels: u8,
    /// Deadlines that pass although messages are under way.
    pub hasty: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Setup {
    pub turns: u32,
    pub pool_pages: u64,
    pub bug: Bug,
}

#[derive(Clone, Debug, Hash)]
enum ToWorker {
    Run {
        attempt: u64,
        turn: u32,
        prefix: u32,
    },
    Pages {
        attempt: u64,
        turn: u32,
        permit: PermitId,
        epoch: u32,
    },
    Abort {
        attempt: u64,
        turn: u32,
    },
}

/// `answers`: the reply to a `Run`, of which the asker notices the loss; else it was published.
#[derive(Clone, Debug, Hash)]
struct ToSession {
    fact: Fact,
    answers: bool,
    epoch: u32,
}

#[derive(Clone, Debug, Hash)]
struct OnWorker {
    session: usize,
    turn: u32,
    attempt: u64,
    running: bool,
}

#[derive(Clone, Debug, Hash)]
pub struct Worker {
    pub ledger: Admission,
    alive: bool,
    /// Whether the router thinks that it is alive.
    believed: bool,
    epoch: u32,
    /// Pages of each session it holds.
    pub held: Vec<u32>,
    turns: BTreeMap<RequestId, OnWorker>,
    done: Vec<RequestId>,
}

#[derive(Clone, Debug, Hash)]
pub struct Client {
    pub machine: Session,
    pub submitted: u32,
    pub outcomes: Vec<Outcome>,
    cancelled: Option<u32>,
    /// `Run`s of the present turn.
    pub asks: u32,
    /// Epoch of the worker that gave the last permit.
    permit_epoch: u32,
}

#[derive(Clone, Debug, Hash)]
pub struct World {
    setup: Setup,
    pub now: Micros,
    pub clients: Vec<Client>,
    pub workers: Vec<Worker>,
    /// By session, then worker.
    to_worker: Vec<VecDeque<ToWorker>>,
    /// By session, then worker; after the workers comes what the router tells.
    to_session: Vec<VecDeque<ToSession>>,
    /// The message that is late, and its queue.
    late_to_worker: Option<(usize, ToWorker)>,
    late_to_session: Option<(usize, ToSession)>,
    pub faults: Faults,
    /// A lost or late message may leave a reservation behind until its deadline.
    excused: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Submit(usize),
    ToWorker(usize),
    ToSession(usize),
    LateToWorker,
    LateToSession,
    /// The worker finishes a turn that runs.
    Done(usize, RequestId),
    Detected(usize),
    Returned(usize),
    Time,
    // Faults.
    Refused(usize),
    WorkerLost(usize),
    LostToWorker(usize),
    LostToSession(usize),
    DelayToWorker(usize),
    DelayToSession(usize),
    Cancel(usize),
    Hasty,
}

type Checked = Result<(), String>;

fn name(worker: usize) -> WorkerId {
    WorkerId::new(format!("d{worker}")).unwrap()
}

fn number(worker: &WorkerId) -> usize {
    worker.as_str()[1..].parse().unwrap()
}

fn request(session: usize, turn: u32) -> RequestId {
    RequestId((session as u128) * 10_000 + u128::from(turn))
}

fn turn_of(request: RequestId) -> u32 {
    (request.0 % 10_000) as u32
}

fn context(turn: u32) -> u32 {
    2 * turn + 1
}

fn ledger(pool_pages: u64) -> Admission {
    Admission::new(admit::Config {
        pool_pages,
        page_tokens: 1,
        page_bytes: 1,
        direct_append_tokens_max: 2,
        permits: permits::Config {
            max_pending_seeds: 1,
            max_pending_seed_bytes: 4,
            ttl: Micros::from_secs(5),
            queue_cap_per_class: 4,
        },
    })
}

impl World {
    pub fn new(sessions: usize, workers: usize, setup: Setup, faults: Faults) -> Self {
        let client = Client {
            machine: Session::new(Epoch(0)),
            submitted: 0,
            outcomes: Vec::new(),
            cancelled: None,
            asks: 0,
            permit_epoch: 0,
        };
        let worker = Worker {
            ledger: ledger(setup.pool_pages),
            alive: true,
            believed: true,
            epoch: 0,
            held: vec![0; sessions],
            turns: BTreeMap::new(),
            done: Vec::new(),
        };
        Self {
            setup,
            now: Micros::ZERO,
            clients: vec![client; sessions],
            workers: vec![worker; workers],
            to_worker: vec![VecDeque::new(); sessions * workers],
            to_session: vec![VecDeque::new(); sessions * (workers + 1)],
            late_to_worker: None,
            late_to_session: None,
            faults,
            excused: false,
        }
    }

    /// Everything that may happen next.
    pub fn events(&self) -> Vec<Event> {
        let mut out = Vec::new();
        for (s, c) in self.clients.iter().enumerate() {
            let open = c.submitted > c.outcomes.len() as u32;
            if !open && c.submitted < self.setup.turns {
                out.push(Event::Submit(s));
            }
            if open && self.faults.cancels > 0 {
                out.push(Event::Cancel(s));
            }
        }
        for (q, queue) in self.to_worker.iter().enumerate() {
            let Some(head) = queue.front() else { continue };
            out.push(Event::ToWorker(q));
            if self.faults.rejects > 0 && matches!(head, ToWorker::Run { .. }) {
                out.push(Event::Refused(q));
            }
            if self.faults.lost > 0 {
                out.push(Event::LostToWorker(q));
            }
            if self.faults.late > 0 {
                out.push(Event::DelayToWorker(q));
            }
        }
        for (q, queue) in self.to_session.iter().enumerate() {
            let Some(head) = queue.front() else { continue };
            out.push(Event::ToSession(q));
            let local = matches!(head.fact, Fact::WorkerLost(_));
            if self.faults.lost > 0 && !local {
                out.push(Event::LostToSession(q));
            }
            if self.faults.late > 0 && !local && !head.answers {
                out.push(Event::DelayToSession(q));
            }
        }
        if self.late_to_worker.is_some() {
            out.push(Event::LateToWorker);
        }
        if self.late_to_session.is_some() {
            out.push(Event::LateToSession);
        }
        for (d, w) in self.workers.iter().enumerate() {
            let running = w.turns.iter().filter(|(_, t)| t.running);
            out.extend(running.map(|(r, _)| Event::Done(d, *r)));
            if !w.alive {
                out.push(Event::Returned(d));
                if w.believed {
                    out.push(Event::Detected(d));
                }
            } else if self.faults.losses > 0 {
                out.push(Event::WorkerLost(d));
            }
        }
        let quiet = out.iter().all(|e| matches!(e, Event::Cancel(_) | Event::WorkerLost(_)));
        if let Some(due) = self.next_deadline() {
            if quiet {
                out.push(Event::Time);
            } else if self.faults.hasty > 0 && due < TURN {
                // Not a turn's own deadline: a turn may fail of that.
                out.push(Event::Hasty);
            }
        }
        out
    }

    fn next_deadline(&self) -> Option<Micros> {
        let sessions = self.clients.iter().filter_map(|c| c.machine.next_deadline());
        let alive = self.workers.iter().filter(|w| w.alive);
        sessions.chain(alive.filter_map(|w| w.ledger.next_deadline())).min()
    }

    /// Lets one thing happen. What must hold for a step is checked here, what must hold in a state in [`World::check`].
    pub fn apply(&mut self, event: Event) -> Checked {
        let per_session = self.workers.len() + 1;
        match event {
            Event::Submit(s) => self.submit(s)?,
            Event::ToWorker(q) => {
                let message = self.to_worker[q].pop_front().unwrap();
                self.at_worker(q, &message, false);
            }
            Event::Refused(q) => {
                self.faults.rejects -= 1;
                let message = self.to_worker[q].pop_front().unwrap();
                self.at_worker(q, &message, true);
            }
            Event::ToSession(q) => {
                let message = self.to_session[q].pop_front().unwrap();
                self.at_session(q / per_session, message)?;
            }
            Event::LateToWorker => {
                let (q, message) = self.late_to_worker.take().unwrap();
                self.at_worker(q, &message, false);
            }
            Event::LateToSession => {
                let (q, message) = self.late_to_session.take().unwrap();
                self.at_session(q / per_session, message)?;
            }
            Event::Done(d, request) => self.done(d, request),
            Event::WorkerLost(d) => {
                self.faults.losses -= 1;
                let w = &mut self.workers[d];
                w.alive = false;
                w.turns.clear();
                w.done.clear();
                w.held.fill(0);
                w.ledger = ledger(self.setup.pool_pages);
            }
            Event::Detected(d) => self.tell_lost(d),
            Event::Returned(d) => {
                if self.workers[d].believed {
                    self.tell_lost(d);
                }
                let w = &mut self.workers[d];
                (w.alive, w.believed, w.epoch) = (true, true, w.epoch + 1);
            }
            Event::LostToWorker(q) => {
                self.faults.lost -= 1;
                let message = self.to_worker[q].pop_front().unwrap();
                self.missed_at_worker(q, &message);
            }
            Event::DelayToWorker(q) => {
                self.faults.late -= 1;
                let message = self.to_worker[q].pop_front().unwrap();
                // So late that the sender has given up on it.
                self.missed_at_worker(q, &message);
                self.late_to_worker = Some((q, message));
            }
            Event::LostToSession(q) => {
                self.faults.lost -= 1;
                self.excused = true;
                let message = self.to_session[q].pop_front().unwrap();
                if let (true, Fact::Turn { request, attempt, .. }) = (message.answers, message.fact) {
                    let fact = TurnFact::LegFailed(AbortReason::DecodeLost);
                    let fact = Fact::Turn { request, attempt, fact };
                    let (answers, epoch) = (false, message.epoch);
                    self.to_session[q].push_back(ToSession { fact, answers, epoch });
                }
            }
            Event::DelayToSession(q) => {
                self.faults.late -= 1;
                self.excused = true;
                self.late_to_session = self.to_session[q].pop_front().map(|m| (q, m));
            }
            Event::Cancel(s) => {
                self.faults.cancels -= 1;
                let turn = self.clients[s].submitted - 1;
                self.clients[s].cancelled = Some(turn);
                self.tell(s, Fact::Cancelled(request(s, turn)))?;
            }
            Event::Time | Event::Hasty => {
                if event == Event::Hasty {
                    self.faults.hasty -= 1;
                    self.excused = true;
                }
                self.now = self.next_deadline().unwrap().max(self.now);
                self.tick()?;
            }
        }
        Ok(())
    }

    pub fn submit(&mut self, s: usize) -> Checked {
        let turn = self.clients[s].submitted;
        self.clients[s].submitted += 1;
        self.clients[s].asks = 0;
        let arrived = session::Turn {
            request: request(s, turn),
            class: Class::Interactive,
            deadline: self.now.plus(TURN),
            prompt_tokens: context(turn),
            answer_max: 1,
            already_sent: 0,
            prompt_end: None,
        };
        self.tell(s, Fact::Arrived(arrived))
    }

    fn tick(&mut self) -> Checked {
        for s in 0..self.clients.len() {
            if self.clients[s].machine.next_deadline().is_some_and(|at| at <= self.now) {
                self.tell(s, Fact::Tick)?;
            }
        }
        for d in 0..self.workers.len() {
            let due = self.workers[d].ledger.next_deadline().is_some_and(|at| at <= self.now);
            if due && self.workers[d].alive {
                self.ledger_step(d, admit::Fact::Tick, None);
            }
        }
        Ok(())
    }

    fn tell_lost(&mut self, d: usize) {
        self.workers[d].believed = false;
        let per_session = self.workers.len() + 1;
        for s in 0..self.clients.len() {
            self.to_session[s * per_session + self.workers.len()].push_back(ToSession {
                fact: Fact::WorkerLost(name(d)),
                answers: false,
                epoch: 0,
            });
        }
    }

    /// What the sender makes of a message that did not arrive in time.
    fn missed_at_worker(&mut self, q: usize, message: &ToWorker) {
        self.excused = true;
        let (s, d) = (q / self.workers.len(), q % self.workers.len());
        match *message {
            ToWorker::Run { attempt, turn, .. } => {
                self.reply(d, s, turn, attempt, TurnFact::LegFailed(AbortReason::DecodeLost), false);
            }
            ToWorker::Pages { attempt, turn, .. } => {
                self.reply(
                    d,
                    s,
                    turn,
                    attempt,
                    TurnFact::LegFailed(AbortReason::TransferFailed),
                    false,
                );
            }
            ToWorker::Abort { .. } => {}
        }
    }

    fn reply(&mut self, d: usize, s: usize, turn: u32, attempt: u64, fact: TurnFact, answers: bool) {
        let epoch = self.workers[d].epoch;
        let request = request(s, turn);
        let fact = Fact::Turn { request, attempt, fact };
        self.to_session[s * (self.workers.len() + 1) + d].push_back(ToSession { fact, answers, epoch });
    }

    // The worker's shell.

    fn at_worker(&mut self, q: usize, message: &ToWorker, refuse: bool) {
        let (s, d) = (q / self.workers.len(), q % self.workers.len());
        if !self.workers[d].alive {
            if !matches!(message, ToWorker::Abort { .. }) {
                let excused = self.excused;
                self.missed_at_worker(q, message);
                self.excused = excused;
            }
            return;
        }
        match *message {
            ToWorker::Run { attempt, turn, prefix } => self.run(d, s, attempt, turn, prefix, refuse),
            ToWorker::Pages {
                attempt,
                turn,
                permit,
                epoch,
            } => {
                let request = request(s, turn);
                let w = &self.workers[d];
                if epoch == w.epoch && w.turns.contains_key(&request) {
                    self.ledger_step(d, admit::Fact::Seeded { request, permit }, None);
                } else {
                    self.reply(
                        d,
                        s,
                        turn,
                        attempt,
                        TurnFact::LegFailed(AbortReason::TransferFailed),
                        false,
                    );
                }
            }
            ToWorker::Abort { attempt, turn } => {
                let request = request(s, turn);
                if self.workers[d]
                    .turns
                    .get(&request)
                    .is_some_and(|t| t.attempt <= attempt)
                {
                    self.end(d, request);
                }
            }
        }
    }

    fn end(&mut self, d: usize, request: RequestId) {
        self.workers[d].turns.remove(&request);
        if self.setup.bug != Bug::RoomKept {
            self.ledger_step(d, admit::Fact::Ended(request), None);
        }
    }

    fn run(&mut self, d: usize, s: usize, attempt: u64, turn: u32, prefix: u32, refuse: bool) {
        let id = request(s, turn);
        if self.workers[d].done.contains(&id) {
            self.reply(d, s, turn, attempt, TurnFact::Started, true);
            return self.reply(d, s, turn, attempt, completed(turn), false);
        }
        if let Some(known) = self.workers[d].turns.get_mut(&id) {
            if attempt < known.attempt {
                return self.reply(d, s, turn, attempt, TurnFact::Rejected(RejectReason::StaleEpoch), true);
            }
            if known.running {
                known.attempt = attempt;
                return self.reply(d, s, turn, attempt, TurnFact::Started, true);
            }
        }
        if refuse {
            self.end(d, id);
            return self.reply(d, s, turn, attempt, TurnFact::Rejected(RejectReason::NoSpace), true);
        }
        let resident = self.workers[d].held[s].min(context(turn));
        let ask = admit::Ask {
            request: id,
            session: SessionId::new(format!("s{s}")).unwrap(),
            turn: TurnIndex(turn),
            epoch: Epoch(0),
            newest_epoch: Epoch(0),
            prefix_pages: prefix.min(resident),
            resident_pages: resident,
            append_tokens: context(turn) - resident,
            output_tokens: 1,
            class: Class::Interactive,
            deadline: self.now.plus(TURN),
        };
        let entry = OnWorker {
            session: s,
            turn,
            attempt,
            running: false,
        };
        self.workers[d].turns.insert(id, entry);
        self.ledger_step(d, admit::Fact::Ask(ask), Some(id));
    }

    fn ledger_step(&mut self, d: usize, fact: admit::Fact, asked: Option<RequestId>) {
        for action in self.workers[d].ledger.step(self.now, fact) {
            match action {
                admit::Action::Answer { request, decision, .. } => {
                    let Some(t) = self.workers[d].turns.get(&request).cloned() else {
                        continue;
                    };
                    let fact = match decision {
                        Decision::Direct => TurnFact::Started,
                        Decision::Permit { permit, .. } => TurnFact::Permit(permit),
                        Decision::Wait { .. } => TurnFact::Queued,
                        Decision::Reject(reason) => TurnFact::Rejected(reason),
                    };
                    match decision {
                        Decision::Direct => self.start(d, request),
                        Decision::Reject(_) => drop(self.workers[d].turns.remove(&request)),
                        _ => {}
                    }
                    self.reply(d, t.session, t.turn, t.attempt, fact, asked == Some(request));
                }
                admit::Action::Start(request) => {
                    let Some(t) = self.workers[d].turns.get(&request).cloned() else {
                        continue;
                    };
                    self.start(d, request);
                    self.reply(d, t.session, t.turn, t.attempt, TurnFact::Started, false);
                }
                admit::Action::PermitExpired { request, .. } => {
                    if let Some(t) = self.workers[d].turns.remove(&request) {
                        let fact = TurnFact::LegFailed(AbortReason::PrefillLost);
                        self.reply(d, t.session, t.turn, t.attempt, fact, false);
                    }
                }
                admit::Action::TurnExpired(request) => drop(self.workers[d].turns.remove(&request)),
            }
        }
    }

    /// The turn's pages come in, and push out those of sessions that do not run.
    fn start(&mut self, d: usize, request: RequestId) {
        let pool = self.setup.pool_pages as u32;
        let w = &mut self.workers[d];
        let Some(turn) = w.turns.get_mut(&request) else { return };
        turn.running = true;
        let (s, pages) = (turn.session, context(turn.turn) + 1);
        w.held[s] = w.held[s].max(pages - 1);
        for other in 0..w.held.len() {
            let idle = !w.turns.values().any(|t| t.session == other && t.running);
            if idle && w.held.iter().sum::<u32>() + 1 > pool {
                w.held[other] = 0;
            }
        }
    }

    fn done(&mut self, d: usize, request: RequestId) {
        let w = &mut self.workers[d];
        let t = w.turns.remove(&request).unwrap();
        w.held[t.session] = w.held[t.session].max(context(t.turn) + 1);
        if w.done.len() > 3 {
            w.done.remove(0);
        }
        w.done.push(request);
        self.reply(d, t.session, t.turn, t.attempt, completed(t.turn), false);
        self.ledger_step(d, admit::Fact::Ended(request), None);
    }

    // The session's shell and the router.

    fn at_session(&mut self, s: usize, message: ToSession) -> Checked {
        let mut fact = message.fact;
        if let Fact::Turn {
            request,
            attempt,
            fact: of_turn,
        } = &mut fact
        {
            let present = self.clients[s].machine.attempt(*request);
            if present != Some(*attempt) {
                let before = self.clients[s].machine.clone();
                if let (Bug::StaleAccepted, Some(present)) = (self.setup.bug, present) {
                    *attempt = present;
                }
                self.tell(s, fact)?;
                // The clock may have brought something about, but only if something was due.
                let due = before.next_deadline().is_some_and(|at| at <= self.now);
                let same = due || before == self.clients[s].machine;
                return if same {
                    Ok(())
                } else {
                    Err("I7: an old attempt changed something".to_owned())
                };
            }
            if matches!(of_turn, TurnFact::Permit(_)) {
                self.clients[s].permit_epoch = message.epoch;
            }
        }
        self.tell(s, fact)
    }

    pub fn tell(&mut self, s: usize, fact: Fact) -> Checked {
        let mut facts = VecDeque::from([fact]);
        while let Some(fact) = facts.pop_front() {
            let before = self.clients[s].machine.next_turn();
            let actions = self.clients[s].machine.step(self.now, fact);
            let commits = actions.iter().filter(|a| **a == Action::Persist).count() as u32;
            if self.clients[s].machine.next_turn().0 != before.0 + commits || commits > 1 {
                return Err("I6: the chain moved without one commit for each turn".to_owned());
            }
            for action in actions {
                self.perform(s, action, &mut facts)?;
            }
        }
        Ok(())
    }

    fn perform(&mut self, s: usize, action: Action, facts: &mut VecDeque<Fact>) -> Checked {
        let queue = |d: &WorkerId, workers: usize| s * workers + number(d);
        let workers = self.workers.len();
        match action {
            Action::Route {
                request,
                attempt,
                avoid,
                rejects,
            } => {
                let fact = TurnFact::Ranked(self.rank(s, turn_of(request), &avoid, &rejects));
                facts.push_back(Fact::Turn { request, attempt, fact });
            }
            Action::AskRun {
                worker,
                request,
                attempt,
                ..
            } => {
                let client = &mut self.clients[s];
                client.asks += 1;
                if client.asks as usize > workers * REJECTS_MAX as usize {
                    return Err(format!("I10: {} attempts for one turn", client.asks));
                }
                let (turn, prefix) = (turn_of(request), client.machine.committed_tokens());
                let run = ToWorker::Run { attempt, turn, prefix };
                self.to_worker[queue(&worker, workers)].push_back(run);
            }
            Action::Seed {
                worker,
                request,
                attempt,
                permit,
            } => {
                let epoch = self.clients[s].permit_epoch;
                let turn = turn_of(request);
                let pages = ToWorker::Pages {
                    attempt,
                    turn,
                    permit,
                    epoch,
                };
                self.to_worker[queue(&worker, workers)].push_back(pages);
            }
            Action::Abort {
                worker,
                request,
                attempt,
                ..
            } => {
                let turn = turn_of(request);
                self.to_worker[queue(&worker, workers)].push_back(ToWorker::Abort { attempt, turn });
            }
            Action::Finish { request, outcome } => {
                let client = &mut self.clients[s];
                if turn_of(request) != client.outcomes.len() as u32 {
                    return Err(format!("I1, I6: {request} ended twice or out of order"));
                }
                client.outcomes.push(outcome);
            }
            Action::FinishAgain { .. } | Action::Relay { .. } | Action::Bind { .. } | Action::Persist => {}
        }
        Ok(())
    }

    fn rank(&self, s: usize, turn: u32, avoid: &[WorkerId], rejects: &[(WorkerId, u32)]) -> Ranking {
        let pin = self.clients[s].machine.pin();
        let believed = self.workers.iter().enumerate().filter(|(_, w)| w.believed);
        let names: Vec<WorkerId> = (0..self.workers.len()).map(name).collect();
        let candidates: Vec<Candidate<'_>> = believed
            .map(|(d, w)| Candidate {
                worker: &names[d],
                overlap_pages: w.held[s],
                exclusive_pages: w.held[s],
                inflight: w.turns.len() as u32,
                assigned: 0,
                rejects: rejects.iter().find(|(r, _)| number(r) == d).map_or(0, |(_, n)| *n),
                paused_until: Micros::ZERO,
                queue_tokens: 0,
                prefill_tokens_per_s: 1_000,
                link_bytes_per_s: 1_000,
            })
            .collect();
        let request = route::Request {
            pin,
            chain_pages: context(turn) - 1,
            context_tokens: u64::from(context(turn)),
            page_tokens: 1,
            page_bytes: 1,
            now: self.now,
            avoid,
        };
        let ranked = route::rank(&route::Config::default(), &request, &candidates);
        let lost = pin.is_some_and(|p| !self.workers[number(p)].believed);
        Ranking {
            offers: ranked
                .into_iter()
                .map(|r| Offer {
                    worker: r.worker.clone(),
                    not_before: r.not_before,
                })
                .collect(),
            pin_gone: lost.then_some(MigrationReason::WorkerLost),
            workers: self.workers.len(),
            rejects_max: REJECTS_MAX,
        }
    }

    // What must hold.

    pub fn check(&self) -> Checked {
        for (d, w) in self.workers.iter().enumerate() {
            let view = w.ledger.view();
            let seeds = &view.permits;
            if view.used_pages + seeds.pending_pages > view.pool_pages {
                return Err(format!("I3: d{d} has promised more than its pool"));
            }
            let over = seeds.pending_bytes > seeds.config.max_pending_seed_bytes && seeds.pending.len() > 1;
            if seeds.pending.len() > seeds.config.max_pending_seeds as usize || over {
                return Err(format!("I4: d{d} has promised more seeds than its budget"));
            }
            let running = view.running.values().map(|r| r.deadline);
            if running
                .chain(seeds.pending.iter().map(|p| p.expires))
                .any(|at| at <= self.now)
            {
                return Err(format!("I12: d{d} keeps a reservation after its deadline"));
            }
        }
        let all_ended = self.clients.iter().all(|c| c.submitted == c.outcomes.len() as u32);
        let idle = self.to_worker.iter().all(VecDeque::is_empty)
            && self.to_session.iter().all(VecDeque::is_empty)
            && self.workers.iter().all(|w| w.turns.values().all(|t| !t.running));
        if all_ended && idle && !self.excused && self.reserved() > 0 {
            return Err("I3, I12: at rest, and something is still reserved".to_owned());
        }
        for (s, c) in self.clients.iter().enumerate() {
            let migrations = c.machine.rejects().migrations() as usize;
            if migrations > (self.workers.len() - 1) * REJECTS_MAX as usize {
                return Err(format!("s{s} migrated {migrations} times"));
            }
        }
        Ok(())
    }

    pub fn check_terminal(&self) -> Checked {
        for (s, c) in self.clients.iter().enumerate() {
            if c.outcomes.len() as u32 != self.setup.turns {
                return Err(format!("I1: s{s} has a turn without an end"));
            }
            for (turn, outcome) in c.outcomes.iter().enumerate() {
                let cancelled = c.cancelled == Some(turn as u32);
                match outcome {
                    Outcome::Completed(_) => {}
                    Outcome::Cancelled if cancelled => {}
                    other => return Err(format!("I10: turn {turn} of s{s} ended as {other:?}")),
                }
            }
        }
        if self.reserved() > 0 {
            return Err("I12: reservations outlive everything".to_owned());
        }
        Ok(())
    }

    fn reserved(&self) -> u64 {
        let of = |w: &Worker| {
            let view = w.ledger.view();
            view.used_pages + view.permits.pending_pages + view.permits.waiting.len() as u64
        };
        self.workers.iter().map(of).sum()
    }
}

fn completed(turn: u32) -> TurnFact {
    TurnFact::Completed(Commit {
        tokens: context(turn) + 1,
        tip: None,
        path: Path::Direct,
        answer: vec![turn],
    })
}
