//! Looks at the nodes from outside, as an operator does: what they tell of themselves in JSON.

use crate::observed::{Held, Ledger, Observed, Observer};
use bytes::Bytes;
use pinion_bus::{Bus, Headers};
use pinion_gpu_agent::world::Cluster;
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{Micros, WorkerId};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long a view may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// See the module's text.
pub(crate) struct Views {
    bus: Arc<dyn Bus>,
    subjects: Subjects,
    observer: Observer,
    /// When the clock of each node began.
    origins: BTreeMap<String, Instant>,
    begun: Instant,
    well: BTreeSet<String>,
}

impl Views {
    pub(crate) fn new(cluster: &Cluster, observer: Observer) -> Self {
        Self {
            bus: cluster.client.clone(),
            subjects: cluster.subjects.clone(),
            begun: Instant::now() - Duration::from_micros(observer.now().0),
            observer,
            origins: BTreeMap::new(),
            well: BTreeSet::new(),
        }
    }

    /// A process of that name has begun now.
    pub(crate) fn born(&mut self, node: &str) {
        self.origins.insert(node.to_owned(), Instant::now());
    }

    pub(crate) fn well(&self, node: &str) -> bool {
        self.well.contains(node)
    }

    pub(crate) fn set_well(&mut self, node: &str, well: bool) {
        if well {
            self.well.insert(node.to_owned());
        } else {
            self.well.remove(node);
        }
    }

    fn clock(&self, node: &str) -> Micros {
        let origin = self.origins.get(node).copied().unwrap_or(self.begun);
        Micros(origin.elapsed().as_micros() as u64)
    }

    /// Asks those nodes for their views, in the background.
    pub(crate) fn look(&self, nodes: &[String]) {
        for node in nodes {
            let (observer, node, now) = (self.observer.clone(), node.clone(), self.clock(node));
            let view = self.view(&node);
            if let Some(view) = view.filter(|_| !node.starts_with('p')) {
                tokio::spawn(async move {
                    if let Some(seen) = view.await.and_then(|view| read(&node, now, &view)) {
                        observer.see(seen);
                    }
                });
            }
        }
    }

    /// Asks all nodes what they still hold, now that nothing should be left.
    pub(crate) async fn rest(&self, nodes: &[String]) {
        for node in nodes {
            let mut left = Vec::new();
            match Self::kinds(node) {
                Some((Kind::Node, _)) => {
                    let sessions = self.ask(Kind::Router, node, "inspect").await;
                    let turns = sessions.as_ref().map_or(0, |v| number(v, "running_turns"));
                    if turns > 0 {
                        left.push(format!("{turns} running turns"));
                    }
                    if let Some(seen) = self.ask(Kind::Node, node, "workers").await {
                        left.extend(inflight(&seen));
                    }
                }
                Some((kind, verb)) => left.extend(self.ask(kind, node, verb).await.iter().flat_map(held)),
                None => {}
            }
            let node = node.clone();
            self.observer.see(Observed::Rest { node, left });
        }
    }

    fn kinds(node: &str) -> Option<(Kind, &'static str)> {
        match node.chars().next()? {
            'c' => Some((Kind::Node, "workers")),
            'd' => Some((Kind::Decode, "inspect")),
            'p' => Some((Kind::Prefill, "inspect")),
            _ => None,
        }
    }

    fn view(&self, node: &str) -> Option<impl Future<Output = Option<Value>> + Send + use<>> {
        let (kind, verb) = Self::kinds(node)?;
        Some(self.ask(kind, node, verb))
    }

    fn ask(&self, kind: Kind, node: &str, verb: &'static str) -> impl Future<Output = Option<Value>> + Send + use<> {
        let subject = WorkerId::new(node).map(|id| self.subjects.worker(kind, &id, verb));
        let bus = self.bus.clone();
        async move {
            let subject = subject.ok()?;
            let asked = bus.request(subject.as_str(), Headers::new(), Bytes::new(), PATIENCE);
            serde_json::from_slice(&asked.await.ok()?.payload).ok()
        }
    }
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_default()
}

fn read(node: &str, now: Micros, view: &Value) -> Option<Observed> {
    if node.starts_with('c') {
        let workers = view["workers"].as_object()?.iter();
        return Some(Observed::Alive {
            control: node.to_owned(),
            workers: workers
                .map(|(name, w)| (name.clone(), w["alive"].as_bool().unwrap_or_default()))
                .collect(),
        });
    }
    let ledger = &view["ledger"];
    let running = ledger["running"].as_object()?.iter().map(|(request, held)| Held {
        request: request.clone(),
        pages: number(held, "pages"),
        bytes: 0,
        deadline: Micros(number(held, "deadline")),
    });
    let permits = ledger["permits"]["pending"].as_array()?.iter().map(|permit| Held {
        request: permit["ask"]["request"].as_str().unwrap_or_default().to_owned(),
        pages: number(&permit["ask"], "pages"),
        bytes: number(&permit["ask"], "bytes"),
        deadline: Micros(number(permit, "expires")),
    });
    Some(Observed::Ledger(Ledger {
        worker: node.to_owned(),
        now,
        pool: number(ledger, "pool_pages"),
        room: number(ledger, "room"),
        running: running.collect(),
        permits: permits.collect(),
        waiting: ledger["permits"]["waiting"].as_array()?.len(),
    }))
}

/// What a worker that should be at rest still holds.
fn held(view: &Value) -> Vec<String> {
    let mut left = Vec::new();
    let mut count = |what: &str, n: usize| {
        if n > 0 {
            left.push(format!("{n} {what}"));
        }
    };
    let len = |value: &Value| value.as_array().map_or(0, Vec::len) + value.as_object().map_or(0, serde_json::Map::len);
    let ledger = &view["ledger"];
    count("turns", len(&view["turns"]));
    count("reservations", len(&ledger["running"]));
    count("permits", len(&ledger["permits"]["pending"]));
    count("asks that wait", len(&ledger["permits"]["waiting"]));
    count("seeds", len(&view["seeds"]));
    count(
        "pages unaccounted",
        (number(ledger, "pool_pages") - number(ledger, "room")) as usize,
    );
    left
}

/// Load that a router still believes in.
fn inflight(view: &Value) -> Vec<String> {
    let workers = view["workers"].as_object().into_iter().flatten();
    workers
        .filter(|(_, w)| number(w, "inflight") > 0)
        .map(|(name, w)| format!("{} turns in flight to {name}", number(w, "inflight")))
        .collect()
}
