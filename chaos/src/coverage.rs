//! Which rare paths were taken: every reason and path there is, and every fault together with what was going on where it struck.

use crate::fault::Fault;
use crate::observed::{Body, Observed};
use pinion_schemas::{AbortReason, MigrationReason, Path, RejectReason, SeedReason};
use serde::Serialize;
use std::collections::BTreeMap;

/// How often each path was taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Coverage(BTreeMap<String, u64>);

impl Coverage {
    /// Counts one.
    pub fn count(&mut self, path: String) {
        *self.0.entry(path).or_default() += 1;
    }

    /// Adds what another has counted.
    pub fn add(&mut self, other: &Self) {
        for (path, times) in &other.0 {
            *self.0.entry(path.clone()).or_default() += times;
        }
    }

    /// Reads one fact.
    pub fn see(&mut self, seen: &Observed) {
        match seen {
            Observed::Fault(true, kind) => self.count(format!("fault {kind}")),
            Observed::Heard {
                arrived: false, body, ..
            } => self.heard(body),
            Observed::Ended { end, .. } => self.count(match end {
                crate::observed::End::Done(_) => "client done".into(),
                crate::observed::End::Left => "client left".into(),
                crate::observed::End::Failed(code) => format!("client failed {code}"),
            }),
            _ => {}
        }
    }

    fn heard(&mut self, body: &Body) {
        match body {
            Body::Reject(no) => self.count(format!("reject {}", no.reason)),
            Body::Abort(abort) => self.count(format!("abort {}", abort.reason)),
            Body::LegFailed(failed) => self.count(format!("leg failed {}", failed.reason)),
            Body::Queued(..) => self.count("permit queued".into()),
            Body::PermitExpired(..) => self.count("permit expired".into()),
            Body::Completed(done) => {
                self.count(format!("path {}", done.path));
                if let Some(why) = done.why {
                    self.count(format!("seed {why}"));
                }
            }
            Body::Said(said) if !said.event.is_empty() => self.count(format!("backup {}", said.event)),
            Body::Said(said) => match (said.what.as_str(), &said.detail) {
                ("bound", Some(reason)) => self.count(format!("migration {reason}")),
                ("failed", Some(reason)) => self.count(format!("turn failed {reason}")),
                (what, _) => self.count(format!("session {what}")),
            },
            _ => {}
        }
    }

    /// Every path that a closed set of reasons names: what was never counted was never reached.
    pub fn never(&self) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        all.extend(RejectReason::ALL.iter().map(|r| format!("reject {r}")));
        all.extend(AbortReason::ALL.iter().map(|r| format!("abort {r}")));
        all.extend(AbortReason::ALL.iter().map(|r| format!("leg failed {r}")));
        all.extend(AbortReason::ALL.iter().map(|r| format!("turn failed {r}")));
        all.extend(MigrationReason::ALL.iter().map(|r| format!("migration {r}")));
        all.extend(SeedReason::ALL.iter().map(|r| format!("seed {r}")));
        all.extend(Path::ALL.iter().map(|r| format!("path {r}")));
        all.extend(Fault::KINDS.iter().map(|k| format!("fault {k}")));
        for state in STATES {
            all.extend(Fault::KINDS.iter().map(|k| format!("{k} while {state}")));
        }
        all.extend(["permit queued", "permit expired"].map(str::to_owned));
        all.retain(|path| !self.0.contains_key(path));
        all
    }

    /// What was counted.
    pub fn counts(&self) -> &BTreeMap<String, u64> {
        &self.0
    }
}

/// What the cluster may be doing when a fault strikes.
pub const STATES: [&str; 3] = ["idle", "seeding", "running"];
