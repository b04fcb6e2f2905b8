//! I8: a worker that is well, and whose link to a control node is, gets work from it again within the stated time.

use super::{Checker, Found, Invariant};
use crate::observed::Observed;
use pinion_core::peer::Policy;
use pinion_schemas::Micros;
use std::collections::BTreeMap;

/// Until a missing heartbeat is noticed, and an answer is on its way.
const SLACK: Micros = Micros::from_secs(4);

/// See the module's text.
#[derive(Default)]
pub(super) struct Peers {
    well: BTreeMap<String, Micros>,
}

impl Checker for Peers {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        match seen {
            Observed::Well(node, Some(since)) => {
                self.well.insert(node.clone(), *since);
            }
            Observed::Well(node, None) => {
                self.well.remove(node);
            }
            Observed::Alive { control, workers } => {
                let bound = Policy::default().recovery_bound().plus(SLACK);
                let well = |node: &str| self.well.get(node).is_some_and(|since| at.since(*since) > bound);
                if !well(control) {
                    return;
                }
                for worker in self
                    .well
                    .keys()
                    .filter(|node| node.starts_with(['d', 'p']) && well(node))
                {
                    let alive = workers.iter().find(|(name, _)| name == worker).map(|(_, alive)| *alive);
                    if alive != Some(true) {
                        let believes = if alive.is_none() { "does not know" } else { "avoids" };
                        let what = format!("{control} {believes} {worker}, which is well");
                        out.breach(Invariant::I8, at, what);
                    }
                }
            }
            _ => {}
        }
    }
}
