//! One run: a plan, a cluster, clients, faults, observers; its breaches and what was seen on the way.

use crate::checkers::{self, Breach, Checker, Found, Rules};
use crate::coverage::Coverage;
use crate::fault::{Breaker, Planned, Process};
use crate::load::{DEADLINE, reach, talk};
use crate::observed::{Body, End, Observed, Observer};
use crate::plan::{PAGE_TOKENS, Plan};
use crate::views::Views;
use pinion_gpu_agent::world::{Cluster, EngineSeen, WorldError, in_virtual_time};
use pinion_schemas::limits::{PENDING_SEEDS_MAX, REJECTS_MAX};
use pinion_schemas::{Epoch, Micros, RequestId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Lines of the log kept: the last ones before the end.
pub const LOG_MAX: usize = 20_000;
/// Time between looks at the views of nodes.
const LOOK: Duration = Duration::from_secs(3);
/// What a turn's legs may take to end after it, and its owner to hear of it (design §4: 2 s).
const LEGS: Duration = Duration::from_secs(5);
/// In a liveness run, what may pass after the last session should have stopped: one more turn with all its time.
const LAST_TURN: Duration = Duration::from_mins(2);

/// What is to be done besides running.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Keep the last lines of what was seen.
    pub log: bool,
    /// Stop at the first breach.
    pub stops: bool,
}

/// What came of a run.
#[derive(Debug, Default, Serialize)]
pub struct Outcome {
    /// Its seed.
    pub seed: u64,
    /// Invariants broken.
    pub breaches: Vec<Breach>,
    /// Turns that completed, failed, and whose client left.
    pub turns: [u64; 3],
    /// Virtual time.
    pub micros: u64,
    /// Paths taken.
    #[serde(skip)]
    pub coverage: Coverage,
    /// The end of the log.
    #[serde(skip)]
    pub log: VecDeque<String>,
}

/// Everything that looks at what is observed.
struct Eyes {
    checkers: Vec<Box<dyn Checker>>,
    found: Found,
    outcome: Outcome,
    options: Options,
    seeding: BTreeSet<RequestId>,
    running: BTreeSet<RequestId>,
}

impl Eyes {
    fn see(&mut self, at: Micros, seen: &Observed) {
        for checker in &mut self.checkers {
            checker.see(at, seen, &mut self.found);
        }
        self.outcome.coverage.see(seen);
        self.follow(seen);
        if self.options.log {
            if self.outcome.log.len() >= LOG_MAX {
                self.outcome.log.pop_front();
            }
            self.outcome.log.push_back(crate::log::line(at, seen));
        }
    }

    /// What is going on, for coverage.
    fn follow(&mut self, seen: &Observed) {
        match seen {
            Observed::Heard {
                arrived: false, body, ..
            } => match body {
                Body::Permit(request, _) => {
                    self.seeding.insert(*request);
                }
                Body::Started(request, _) => {
                    self.seeding.remove(request);
                    self.running.insert(*request);
                }
                _ => {}
            },
            Observed::Ended { request, end } => {
                self.seeding.remove(request);
                self.running.remove(request);
                let place = match end {
                    End::Done(_) => 0,
                    End::Failed(_) => 1,
                    End::Left => 2,
                };
                self.outcome.turns[place] += 1;
            }
            Observed::Fault(true, kind) => {
                let states = [
                    (self.seeding.is_empty() && self.running.is_empty(), "idle"),
                    (!self.seeding.is_empty(), "seeding"),
                    (!self.running.is_empty(), "running"),
                ];
                for (_, state) in states.iter().filter(|(is, _)| *is) {
                    self.outcome.coverage.count(format!("{kind} while {state}"));
                }
            }
            _ => {}
        }
    }
}

/// Runs a plan in virtual time.
///
/// # Errors
/// [`WorldError`] if the cluster could not be built; that is a mistake of the plan.
pub fn run(plan: &Plan, options: Options) -> Result<Outcome, WorldError> {
    in_virtual_time(run_in_time(plan, options))
}

fn rules(plan: &Plan) -> Rules {
    let decode = plan
        .shape
        .workers()
        .into_iter()
        .map(|w| w.0)
        .filter(|n| n.starts_with('d'));
    Rules {
        page_tokens: u64::from(PAGE_TOKENS),
        pools: decode
            .map(|d| (d.clone(), plan.shape.engine_of(&d).device_pages))
            .collect(),
        seeds_max: PENDING_SEEDS_MAX as usize,
        bytes_max: plan.shape.engine.cost.link_bytes_per_sec,
        rejects_max: REJECTS_MAX as usize,
    }
}

async fn run_in_time(plan: &Plan, options: Options) -> Result<Outcome, WorldError> {
    let eyes = Arc::new(Mutex::new(Eyes {
        checkers: checkers::all(&rules(plan)),
        found: Found::default(),
        outcome: Outcome::default(),
        options,
        seeding: BTreeSet::new(),
        running: BTreeSet::new(),
    }));
    let sink = eyes.clone();
    let observer = Observer::new(move |at, seen| sink.lock().unwrap_or_else(PoisonError::into_inner).see(at, seen));
    let (on_bus, on_engine) = (observer.clone(), observer.clone());
    let tap = Box::new(move |seen: &pinion_bus::sim::Seen<'_>| on_bus.tap(seen));
    let watch = Arc::new(move |worker: &str, seen| {
        let worker = worker.to_owned();
        on_engine.see(match seen {
            EngineSeen::Imported { name, content } => Observed::Imported { worker, name, content },
            EngineSeen::EvictedInUse { request, .. } => Observed::EvictedInUse { worker, request },
        });
    });
    let cluster = Cluster::start_watched(plan.shape.clone(), Some(tap), Some(watch)).await?;
    cluster.net.log_off();
    let mut run = Run {
        plan,
        breaker: Breaker::new(plan.shape.faults.clone()),
        views: Views::new(&cluster, observer.clone()),
        observer,
        cluster,
        troubles: BTreeMap::new(),
    };
    run.whole(&eyes).await?;
    let mut eyes = eyes.lock().unwrap_or_else(PoisonError::into_inner);
    let mut outcome = std::mem::take(&mut eyes.outcome);
    outcome.seed = plan.seed;
    outcome.breaches = eyes.found.breaches().to_vec();
    outcome.micros = run.observer.now().0;
    Ok(outcome)
}

struct Run<'a> {
    plan: &'a Plan,
    cluster: Cluster,
    observer: Observer,
    breaker: Breaker,
    views: Views,
    /// Faults under way that concern a node; the empty name: all.
    troubles: BTreeMap<String, usize>,
}

/// Everything that a node can be called.
fn nodes(plan: &Plan) -> Vec<String> {
    let workers = plan.shape.workers().into_iter().map(|w| w.0);
    plan.shape.controls().into_iter().chain(workers).collect()
}

impl Run<'_> {
    async fn whole(&mut self, eyes: &Mutex<Eyes>) -> Result<(), WorldError> {
        for node in nodes(self.plan) {
            self.observer.see(Observed::Born(node, Epoch(1)));
        }
        self.tell_well();
        let begun = Instant::now();
        let until = begun + self.plan.lasts;
        let mut talks = tokio::task::JoinSet::new();
        let gateways: Vec<_> = (0..self.plan.gateways)
            .map(|g| {
                reach(
                    Arc::new(self.cluster.net.endpoint(&format!("g{g}"))),
                    self.cluster.subjects.clone(),
                )
            })
            .collect();
        for one in &self.plan.talks {
            let reach = gateways[one.gateway as usize % gateways.len()].clone();
            talks.spawn(talk(one.clone(), reach, until, self.observer.clone()));
        }
        let broken = || {
            let eyes = eyes.lock().unwrap_or_else(PoisonError::into_inner);
            eyes.options.stops && !eyes.found.breaches().is_empty()
        };
        self.break_things(begun, &broken).await?;
        if broken() {
            return Ok(());
        }
        self.observer.see(Observed::Calm);
        let ended = self.look_until_done(until + LAST_TURN, &mut talks, &broken).await;
        if broken() {
            return Ok(());
        }
        if ended {
            // Until every turn that was begun while things broke has run out of time, also where nobody told of its end.
            let rest = (begun + self.plan.calm_at() + DEADLINE + LEGS).max(Instant::now() + LEGS);
            sleep_until(rest).await;
            self.views.rest(&nodes(self.plan)).await;
        }
        self.observer.see(Observed::Over);
        Ok(())
    }

    /// Begins and ends the faults in their time, and looks at the views in between.
    async fn break_things(&mut self, begun: Instant, broken: &impl Fn() -> bool) -> Result<(), WorldError> {
        let mut steps: Vec<(Duration, bool, &Planned)> = Vec::new();
        for planned in &self.plan.faults {
            steps.push((planned.at, true, planned));
            steps.push((planned.at + planned.lasts, false, planned));
        }
        // Stable: what was planned first is done first.
        steps.sort_by_key(|(at, begins, _)| (*at, *begins));
        let mut next_look = begun + LOOK;
        for (at, begins, planned) in steps {
            self.look_until(begun + at, &mut next_look, broken).await;
            if broken() {
                return Ok(());
            }
            self.step(begins, planned).await?;
        }
        self.look_until(begun + self.plan.calm_at(), &mut next_look, broken)
            .await;
        Ok(())
    }

    async fn look_until(&self, until: Instant, next_look: &mut Instant, broken: &impl Fn() -> bool) {
        while *next_look < until && !broken() {
            sleep_until(*next_look).await;
            self.views.look(&self.well());
            *next_look += LOOK;
        }
        if !broken() {
            sleep_until(until).await;
        }
    }

    /// Waits for the sessions; whether they have ended.
    async fn look_until_done(
        &self,
        until: Instant,
        talks: &mut tokio::task::JoinSet<()>,
        broken: &impl Fn() -> bool,
    ) -> bool {
        while Instant::now() < until && !broken() {
            let look = Instant::now() + LOOK;
            loop {
                tokio::select! {
                    biased;
                    ended = talks.join_next() => if ended.is_none() { return true },
                    () = sleep_until(look) => break,
                }
            }
            self.views.look(&self.well());
        }
        false
    }

    async fn step(&mut self, begins: bool, planned: &Planned) -> Result<(), WorldError> {
        let fault = &planned.fault;
        self.observer.see(Observed::Fault(begins, fault.kind().to_owned()));
        let mut concerned: Vec<&str> = fault.nodes();
        if concerned.is_empty() {
            concerned.push("");
        }
        let process = if begins {
            for node in concerned {
                *self.troubles.entry(node.to_owned()).or_default() += 1;
            }
            self.tell_well();
            self.breaker.begin(&mut self.cluster, planned)?
        } else {
            let now = self.observer.now();
            let process = self.breaker.end(now, &mut self.cluster, fault).await?;
            for node in concerned {
                *self.troubles.entry(node.to_owned()).or_default() -= 1;
            }
            self.tell_well();
            process
        };
        match process {
            Some(Process::Dead(node)) => self.observer.see(Observed::Died(node)),
            Some(Process::Born(node, epoch)) => {
                self.views.born(&node);
                self.observer.see(Observed::Born(node, Epoch(epoch)));
            }
            None => {}
        }
        Ok(())
    }

    /// Nodes that nothing is done to.
    fn well(&self) -> Vec<String> {
        let hurt = |node: &str| self.troubles.get(node).is_some_and(|n| *n > 0);
        nodes(self.plan).into_iter().filter(|n| !hurt("") && !hurt(n)).collect()
    }

    /// Tells who is well, and since when if that is new.
    fn tell_well(&mut self) {
        let (well, now) = (self.well(), self.observer.now());
        for node in nodes(self.plan) {
            let is = well.contains(&node);
            if self.views.well(&node) != is {
                self.views.set_well(&node, is);
                self.observer.see(Observed::Well(node, is.then_some(now)));
            }
        }
    }
}
