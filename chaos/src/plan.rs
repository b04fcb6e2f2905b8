//! What one run is: a topology, sessions and faults, all drawn from one seed.
//!
//! A plan is plain data, so that a failing one can be made smaller piece by piece ([`crate::shrink`]): each session and each fault
//! has numbers of its own, and leaving one out changes nothing about the others.

use crate::fault::{Fault, Planned};
use pinion_bus::sim::{Faults, SERVER};
use pinion_core::route::{self, PolicyKind};
use pinion_gpu_agent::engine::sim::{CostModel, SimConfig};
use pinion_gpu_agent::world::{Dice, Shape, VOCAB};
use pinion_schemas::{BackupTargets, Class};
use std::collections::BTreeMap;
use std::time::Duration;

/// Tokens of a page: few, so that short contexts have many.
pub const PAGE_TOKENS: u32 = 16;
/// Smallest pool of a worker, pages: two of the longest contexts.
const POOL_MIN: u64 = 2 * (CONTEXT_MAX as u64 / PAGE_TOKENS as u64);
/// A session starts over when its context is longer than this, tokens.
pub const CONTEXT_MAX: u32 = 1_200;
/// Before the first fault, so that the cluster stands.
const FIRST_FAULT: Duration = Duration::from_secs(4);
/// Mean time between faults.
const FAULT_EVERY: u64 = 9;
/// Part of a liveness run after which nothing breaks any more, percent.
const CALM_AFTER: u32 = 60;

/// When faults happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// To the end: nothing wrong may ever happen, though turns may fail.
    Safety,
    /// Up to a point: after it everything must complete, and all books be at rest.
    Liveness,
}

/// One session.
#[derive(Clone, Debug)]
pub struct Talk {
    /// Its number: of its name and its prompt.
    pub number: u32,
    /// Of all that it chooses.
    pub seed: u64,
    /// Service class of its turns.
    pub class: Class,
    /// When its first turn comes.
    pub begins: Duration,
    /// Longest pause between turns, milliseconds.
    pub pause: u64,
    /// Longest first prompt, and longest append, tokens.
    pub prompt: u32,
    /// Longest append, tokens.
    pub append: u32,
    /// Longest answer, tokens.
    pub answer: u32,
    /// Turns of a hundred whose client goes away.
    pub cancels: u64,
    /// Turns of a hundred whose client reads slowly.
    pub slow: u64,
    /// Whether it begins with the system prompt that others have too.
    pub shares: bool,
    /// Which gateway it comes through.
    pub gateway: u32,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What it was drawn from.
    pub seed: u64,
    /// When faults happen.
    pub mode: Mode,
    /// How long sessions go on.
    pub lasts: Duration,
    /// The cluster.
    pub shape: Shape,
    /// Gateways.
    pub gateways: u32,
    /// The load.
    pub talks: Vec<Talk>,
    /// What breaks.
    pub faults: Vec<Planned>,
}

impl Plan {
    /// The run of this seed, `minutes` long.
    pub fn draw(seed: u64, mode: Mode, minutes: u32) -> Self {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed);
        let lasts = Duration::from_secs(u64::from(minutes) * 60);
        let shape = shape(seed, &mut dice);
        let gateways = 1 + dice.between(0, 2) as u32;
        let mut plan = Self {
            seed,
            mode,
            lasts,
            gateways,
            talks: talks(&mut dice, gateways),
            faults: Vec::new(),
            shape,
        };
        plan.faults = plan.draw_faults(&mut dice);
        plan
    }

    /// From when on nothing breaks.
    pub fn calm_at(&self) -> Duration {
        match self.mode {
            Mode::Safety => self.lasts,
            Mode::Liveness => self.lasts * CALM_AFTER / 100,
        }
    }

    fn draw_faults(&self, dice: &mut Dice) -> Vec<Planned> {
        let until = self.calm_at();
        let (mut at, mut faults) = (FIRST_FAULT, Vec::new());
        loop {
            at += Duration::from_millis(dice.between(500, FAULT_EVERY * 2_000));
            if at >= until {
                return faults;
            }
            let lasts = Duration::from_millis(match dice.between(0, 10) {
                0..5 => dice.between(100, 2_000),
                5..9 => dice.between(1_000, 12_000),
                _ => dice.between(10_000, 60_000),
            });
            let lasts = lasts.min(until.saturating_sub(at));
            let fault = self.draw_fault(dice);
            faults.push(Planned { at, lasts, fault });
        }
    }

    fn draw_fault(&self, dice: &mut Dice) -> Fault {
        let workers = self.shape.workers();
        let pick = |dice: &mut Dice, names: &[String]| names[dice.between(0, names.len() as u64) as usize].clone();
        let worker_names: Vec<String> = workers.iter().map(|w| w.0.clone()).collect();
        let decode: Vec<String> = worker_names.iter().filter(|n| n.starts_with('d')).cloned().collect();
        let gateways = (0..self.gateways).map(|g| format!("g{g}"));
        let nodes: Vec<String> = self
            .shape
            .controls()
            .into_iter()
            .chain(worker_names.iter().cloned())
            .collect();
        let all: Vec<String> = nodes.iter().cloned().chain(gateways).collect();
        match dice.between(0, 20) {
            0..3 => Fault::Crash(pick(dice, &nodes)),
            3..5 => Fault::Stop(pick(dice, &nodes)),
            5 | 6 => Fault::Cut {
                from: pick(dice, &all),
                to: SERVER.to_owned(),
                both: dice.between(0, 2) == 0,
            },
            7 => Fault::Cut {
                from: pick(dice, &all),
                to: pick(dice, &all),
                both: dice.between(0, 2) == 0,
            },
            8 => Fault::CutIn(pick(dice, &all)),
            9 => Fault::Lag {
                node: pick(dice, &all),
                millis: dice.between(50, 2_500),
            },
            10 => Fault::Weather(Faults {
                latency_max: dice.millis(1, 60),
                loss: dice.between(0, 20) as f64 / 200.0,
                duplication: dice.between(0, 20) as f64 / 100.0,
                reordering: dice.between(0, 2) == 0,
                subscription_capacity: dice.between(1, 64) as usize,
                ..Faults::default()
            }),
            11 => Fault::Restart {
                noticed: dice.between(0, 2) == 0,
                lose_writes: dice.between(0, 40) as usize,
            },
            12 => Fault::LoseWrites(dice.between(1, 40) as usize),
            13 => Fault::EngineStall(pick(dice, &worker_names)),
            14 => Fault::EngineCrash(pick(dice, &worker_names)),
            15 => Fault::LinkStuck(pick(dice, &worker_names)),
            16 => Fault::LinkSlow {
                node: pick(dice, &worker_names),
                times: dice.between(2, 200),
            },
            17 => Fault::Corrupt(pick(dice, &worker_names)),
            _ => Fault::Drain(pick(dice, &decode)),
        }
    }
}

fn shape(seed: u64, dice: &mut Dice) -> Shape {
    let pool = |dice: &mut Dice| match dice.between(0, 3) {
        0 => dice.between(POOL_MIN, 2 * POOL_MIN),
        1 => dice.between(2 * POOL_MIN, 6 * POOL_MIN),
        _ => dice.between(6 * POOL_MIN, 12 * POOL_MIN),
    };
    let cost = CostModel {
        prefill_tokens_per_sec: dice.between(1_000, 30_000),
        decode_step: pinion_schemas::Micros(dice.between(4_000, 40_000)),
        // From 100 tokens' KV a second on: so that bytes are short sometimes, seeds at others.
        link_bytes_per_sec: 98_304 * dice.between(100, 20_000),
        ..CostModel::default()
    };
    let mut shape = Shape {
        seed,
        control: 1 + dice.between(0, 3) as u32,
        prefill: 1 + dice.between(0, 3) as u32,
        decode: 1 + dice.between(0, 4) as u32,
        faults: Faults {
            latency_min: Duration::from_micros(dice.between(20, 300)),
            latency_max: Duration::from_micros(dice.between(300, 3_000)),
            reordering: dice.between(0, 2) == 0,
            ..Faults::default()
        },
        engine: SimConfig {
            page_tokens: PAGE_TOKENS,
            device_pages: pool(dice),
            host_pages: 0,
            chunk_tokens: dice.between(64, 2_048) as u32,
            max_jobs: dice.between(4, 32) as usize,
            vocab: VOCAB,
            cost,
        },
        engines: BTreeMap::new(),
        route: route::Config {
            policy: PolicyKind::ALL[dice.between(0, PolicyKind::ALL.len() as u64) as usize],
            ..route::Config::default()
        },
        backups: BackupTargets::ALL[dice.between(0, BackupTargets::ALL.len() as u64) as usize],
        ..Shape::default()
    };
    for (name, _) in shape.workers() {
        let device_pages = pool(dice);
        let engine = SimConfig {
            device_pages,
            ..shape.engine.clone()
        };
        shape.engines.insert(name, engine);
    }
    shape
}

fn talks(dice: &mut Dice, gateways: u32) -> Vec<Talk> {
    let talks = 2 + dice.between(0, 9) as u32;
    let pause = 1_000 << dice.between(0, 4);
    (0..talks)
        .map(|number| Talk {
            number,
            seed: dice.any(),
            class: Class::ALL[dice.between(0, Class::ALL.len() as u64) as usize],
            begins: dice.millis(0, 5_000),
            pause,
            prompt: dice.between(40, 700) as u32,
            append: dice.between(8, 200) as u32,
            answer: dice.between(2, 60) as u32,
            cancels: [0, 0, 10, 40][dice.between(0, 4) as usize],
            slow: [0, 0, 20][dice.between(0, 3) as usize],
            shares: dice.between(0, 3) == 0,
            gateway: number % gateways,
        })
        .collect()
}
