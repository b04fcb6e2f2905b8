//! I10: a turn that is rejected |D|·τ times has asked everybody who is well; and a turn of a time without faults is served.

use super::{Checker, Found, Invariant, Rules};
use crate::observed::{Body, End, Observed};
use pinion_core::dispatch::counts;
use pinion_schemas::{Micros, RequestId};
use std::collections::{BTreeMap, BTreeSet};

/// Until what broke is forgotten: suspicions, leases, pauses.
const SETTLED: Micros = Micros::from_secs(20);

#[derive(Debug)]
struct Turn {
    begun: Micros,
    rejects: usize,
    asked: BTreeSet<String>,
}

/// See the module's text.
pub(super) struct Fairness {
    rules: Rules,
    turns: BTreeMap<RequestId, Turn>,
    well: BTreeMap<String, Micros>,
    calm: Option<Micros>,
}

impl Fairness {
    pub(super) fn new(rules: &Rules) -> Self {
        Self {
            rules: rules.clone(),
            turns: BTreeMap::new(),
            well: BTreeMap::new(),
            calm: None,
        }
    }

    fn rejected(&mut self, at: Micros, request: RequestId, out: &mut Found) {
        let Some(turn) = self.turns.get_mut(&request) else {
            return;
        };
        turn.rejects += 1;
        if turn.rejects != self.rules.pools.len() * self.rules.rejects_max {
            return;
        }
        let well = |d: &String| self.well.get(d).is_some_and(|since| since.plus(SETTLED) < turn.begun);
        let decode = self.rules.pools.iter().map(|(d, _)| d);
        for d in decode.filter(|d| well(d) && !turn.asked.contains(*d)) {
            let what = format!("{request} was rejected {} times and has not asked {d}", turn.rejects);
            out.breach(Invariant::I10, at, what);
        }
    }
}

impl Checker for Fairness {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        match seen {
            Observed::Begun { request, .. } => {
                let (begun, rejects, asked) = (at, 0, BTreeSet::new());
                self.turns.insert(*request, Turn { begun, rejects, asked });
            }
            Observed::Well(node, since) => {
                self.well.remove(node);
                self.well.extend(since.map(|since| (node.clone(), since)));
            }
            Observed::Calm => self.calm = Some(at),
            Observed::Heard {
                arrived: false,
                to,
                body: Body::Run(run),
                ..
            } => {
                if let Some(turn) = self.turns.get_mut(&run.request) {
                    turn.asked.insert(to.clone());
                }
            }
            Observed::Heard {
                arrived: false,
                body: Body::Reject(no),
                ..
            } if counts(no.reason) => self.rejected(at, no.request, out),
            Observed::Ended { request, end } => {
                let turn = self.turns.remove(request);
                let settled = self.calm.map(|calm| calm.plus(SETTLED));
                let late = turn.is_some_and(|turn| settled.is_some_and(|settled| turn.begun > settled));
                if let (End::Failed(code), true) = (end, late) {
                    out.breach(
                        Invariant::I10,
                        at,
                        format!("{request} failed without any fault: {code}"),
                    );
                }
            }
            _ => {}
        }
    }
}
