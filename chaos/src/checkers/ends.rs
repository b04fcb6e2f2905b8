//! I1: every accepted turn ends exactly once, for its client and at each owner that accepted it.

use super::{Checker, Found, Invariant};
use crate::observed::{Body, Observed};
use pinion_schemas::{Micros, RequestId};
use std::collections::{BTreeMap, BTreeSet};

/// What a client may need to notice: it may read slowly.
const LENIENCE: Micros = Micros::from_secs(30);

/// See the module's text.
#[derive(Default)]
pub(super) struct Ends {
    /// When each client's turn must have ended.
    running: BTreeMap<RequestId, Micros>,
    ended: BTreeSet<RequestId>,
    /// Turns that owners have accepted and not ended.
    accepted: BTreeSet<(String, String)>,
}

impl Checker for Ends {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        let mut breach = |what| out.breach(Invariant::I1, at, what);
        match seen {
            Observed::Begun { request, deadline, .. } => {
                self.running.insert(*request, at.plus(*deadline).plus(LENIENCE));
            }
            Observed::Tokens { request, .. } if !self.running.contains_key(request) => {
                breach(format!("{request} got tokens after its end"));
            }
            Observed::Ended { request, .. } => match self.running.remove(request) {
                Some(until) => {
                    self.ended.insert(*request);
                    if at > until {
                        breach(format!("{request} ended late"));
                    }
                }
                None => breach(format!("{request} ended twice")),
            },
            Observed::Heard {
                arrived: false,
                from,
                body: Body::Said(said),
                ..
            } => {
                let Some(request) = &said.request else { return };
                let turn = (from.clone(), request.clone());
                match said.what.as_str() {
                    "accepted" => {
                        self.accepted.insert(turn);
                    }
                    "completed" | "cancelled" | "failed" | "refused" if !self.accepted.remove(&turn) => {
                        breach(format!("{from} ended {request} a second time: {}", said.what));
                    }
                    _ => {}
                }
            }
            Observed::Died(node) => self.accepted.retain(|(from, _)| from != node),
            Observed::Rest { node, left } if node.starts_with('c') && !left.is_empty() => {
                breach(format!("{node} still has {}", left.join(", ")));
            }
            Observed::Over => {
                for request in self.running.keys() {
                    breach(format!("{request} never ended"));
                }
            }
            _ => {}
        }
    }
}
