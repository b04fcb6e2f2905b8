//! Looking at a cluster, by NATS subjects alone: the same questions any NATS client can ask.

use crate::config::Config;
use anyhow::{Context as _, bail};
use bytes::Bytes;
use pinion_bus::nats::NatsBus;
use pinion_bus::{Bus, Headers};
use pinion_schemas::shard::{Lease, SHARDS, lease_key, shard_of};
use pinion_schemas::subject::{Kind, Subject, Subjects};
use pinion_schemas::{SessionId, WorkerId};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::runtime::Runtime;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// A connection for questions.
pub struct Tools {
    config: Config,
    connected: Option<(Runtime, NatsBus, Subjects)>,
}

impl Tools {
    /// Connects at the first question.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            connected: None,
        }
    }

    fn connected(&mut self) -> anyhow::Result<&(Runtime, NatsBus, Subjects)> {
        if self.connected.is_none() {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?;
            let mut options = self.config.nats_options("pinion-cli")?;
            options.connect_timeout = Duration::from_secs(3);
            let bus = runtime
                .block_on(NatsBus::connect(options))
                .with_context(|| format!("NATS is not reachable at {}", self.config.nats.urls.join(", ")))?;
            let subjects = Subjects::new(&self.config.cluster()?);
            self.connected = Some((runtime, bus, subjects));
        }
        self.connected.as_ref().context("not connected")
    }

    fn ask(&mut self, subject: impl FnOnce(&Subjects) -> Subject, payload: &'static [u8]) -> anyhow::Result<Value> {
        let (runtime, bus, subjects) = self.connected()?;
        let subject = subject(subjects);
        let asked = bus.request(subject.as_str(), Headers::new(), Bytes::from_static(payload), PATIENCE);
        let answer = runtime
            .block_on(asked)
            .with_context(|| format!("nobody answered on {subject}"))?;
        serde_json::from_slice(&answer.payload).with_context(|| format!("the answer on {subject} is not JSON"))
    }

    /// Owner of each shard.
    fn owners(&mut self) -> anyhow::Result<BTreeMap<u16, WorkerId>> {
        let (runtime, bus, _) = self.connected()?;
        runtime.block_on(async {
            let mut owners = BTreeMap::new();
            for shard in 0..SHARDS {
                let Some(entry) = bus.kv_get(&lease_key(shard)).await? else {
                    continue;
                };
                let lease: Lease = serde_json::from_slice(&entry.value)?;
                owners.extend(lease.holder().map(|owner| (shard, owner)));
            }
            Ok(owners)
        })
    }

    /// Whether every shard has an owner.
    pub fn all_shards_owned(&mut self) -> anyhow::Result<bool> {
        Ok(self.owners()?.len() == usize::from(SHARDS))
    }

    fn controls(&mut self) -> anyhow::Result<Vec<WorkerId>> {
        let names: BTreeSet<WorkerId> = self.owners()?.into_values().collect();
        Ok(names.into_iter().collect())
    }

    /// What the router of some control node knows of all workers.
    pub fn workers(&mut self) -> anyhow::Result<Value> {
        let controls = self.controls()?;
        let mut last = None;
        for control in controls {
            match self.ask(|s| s.worker(Kind::Node, &control, "workers"), b"") {
                Ok(view) => return Ok(view),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| anyhow::anyhow!("no control node holds a lease: is one running?")))
    }

    /// How many workers are known and alive.
    pub fn count_workers(&mut self) -> anyhow::Result<usize> {
        let view = self.workers()?;
        let alive = view["workers"]
            .as_object()
            .map(|w| w.values().filter(|w| w["alive"] == true).count());
        Ok(alive.unwrap_or(0))
    }

    /// `worker show`.
    pub fn worker(&mut self, name: &str) -> anyhow::Result<Value> {
        let worker = WorkerId::new(name)?;
        let kind = self.kind_of(name)?;
        self.ask(|s| s.worker(kind, &worker, "inspect"), b"")
    }

    /// `worker drain`.
    pub fn drain(&mut self, name: &str, on: bool) -> anyhow::Result<Value> {
        let worker = WorkerId::new(name)?;
        if self.kind_of(name)? != Kind::Decode {
            bail!("{name} is no decode worker: only these hold sessions to drain");
        }
        self.ask(
            |s| s.worker(Kind::Decode, &worker, "drain"),
            if on { b"on" } else { b"off" },
        )
    }

    fn kind_of(&mut self, name: &str) -> anyhow::Result<Kind> {
        let view = self.workers()?;
        match view["workers"][name]["kind"].as_str() {
            Some("decode") => Ok(Kind::Decode),
            Some("prefill") => Ok(Kind::Prefill),
            _ => bail!("no worker is called {name}: `pinion worker ls` lists them"),
        }
    }

    /// `session ls`: names by control node.
    pub fn sessions(&mut self) -> anyhow::Result<Vec<Value>> {
        let controls = self.controls()?;
        controls
            .iter()
            .map(|control| self.ask(|s| s.worker(Kind::Router, control, "inspect"), b""))
            .collect()
    }

    /// `session show`.
    pub fn session(&mut self, id: &str) -> anyhow::Result<Value> {
        let session = SessionId::new(id)?;
        self.ask(|s| s.session(&session, "inspect"), b"").with_context(|| {
            format!(
                "session {id} (shard {}) is not known; `pinion session ls` lists those that are",
                shard_of(&session)
            )
        })
    }

    /// Prints events until Ctrl-C, or until `seconds` have passed.
    pub fn events(&mut self, session: Option<&str>, seconds: Option<u64>) -> anyhow::Result<()> {
        let session = session.map(SessionId::new).transpose()?;
        let (runtime, bus, subjects) = self.connected()?;
        let subject = match &session {
            Some(session) => subjects.event(Kind::Session, &session.token()),
            None => subjects.all_events_of(Kind::Session),
        };
        runtime.block_on(async {
            let mut events = bus.subscribe(subject.as_str(), None).await?;
            let end = tokio::time::sleep(Duration::from_secs(seconds.unwrap_or(u64::MAX >> 32)));
            tokio::pin!(end);
            loop {
                tokio::select! {
                    () = &mut end => return Ok(()),
                    _ = tokio::signal::ctrl_c() => return Ok(()),
                    event = events.next() => match event {
                        Some(event) => println!("{}", String::from_utf8_lossy(&event.payload)),
                        None => bail!("the connection to NATS has ended"),
                    },
                }
            }
        })
    }
}
