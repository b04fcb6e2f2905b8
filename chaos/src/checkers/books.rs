//! What a D has taken on, as an observer of the bus counts it. It may count too little (an abort that has arrived may not be handled yet),
//! never too much.

use crate::observed::{Body, Observed};
use pinion_schemas::{Micros, RequestId};
use std::collections::BTreeMap;

/// A turn at a D.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leg {
    /// Tokens of context and longest answer.
    pub tokens: u64,
    /// Its newest attempt there.
    attempt: u64,
    /// When it ends by itself, at the earliest.
    until: Micros,
    /// Attempts up to this one were told to stop.
    aborted: Option<u64>,
    /// Whether it has completed there: if it is asked for again, its end is only told again.
    completed: bool,
    /// Whether room is reserved for it, by a promise or because it runs.
    pub stage: Stage,
}

/// Where a leg stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Asked,
    Promised,
    Running,
}

/// The books of all D.
#[derive(Default)]
pub(super) struct Books(BTreeMap<String, BTreeMap<RequestId, Leg>>);

impl Books {
    /// Takes a fact; the D whose legs have become more.
    pub(super) fn see(&mut self, at: Micros, seen: &Observed) -> Option<String> {
        match seen {
            Observed::Died(node) => {
                self.0.remove(node);
                None
            }
            Observed::Heard {
                arrived: true,
                to,
                body,
                ..
            } => {
                self.arrived(at, to, body);
                None
            }
            Observed::Heard {
                arrived: false,
                from,
                body,
                ..
            } => self.said(from, body).then(|| from.clone()),
            _ => None,
        }
    }

    /// Legs of a D that it has taken on and that have not ended by themselves.
    pub(super) fn of(&self, worker: &str, at: Micros) -> impl Iterator<Item = &Leg> {
        let legs = self.0.get(worker).into_iter().flat_map(|legs| legs.values());
        legs.filter(move |leg| leg.until > at && leg.stage != Stage::Asked)
    }

    fn arrived(&mut self, at: Micros, to: &str, body: &Body) {
        match body {
            Body::Run(run) => {
                let legs = self.0.entry(to.to_owned()).or_default();
                legs.retain(|_, leg| leg.until > at);
                let leg = legs.entry(run.request).or_insert(Leg {
                    tokens: 0,
                    attempt: 0,
                    until: Micros::ZERO,
                    aborted: None,
                    completed: false,
                    stage: Stage::Asked,
                });
                if run.attempt >= leg.attempt {
                    (leg.attempt, leg.tokens) = (run.attempt, run.tokens);
                    leg.until = at.plus(run.time_left);
                }
            }
            Body::Abort(abort) => {
                let leg = self.0.get_mut(to).and_then(|legs| legs.get_mut(&abort.request));
                if let Some(leg) = leg.filter(|leg| leg.attempt <= abort.attempt) {
                    leg.aborted = leg.aborted.max(Some(abort.attempt));
                    leg.stage = Stage::Asked;
                }
            }
            _ => {}
        }
    }

    /// What a D says of itself; whether it takes something on.
    fn said(&mut self, from: &str, body: &Body) -> bool {
        let (request, attempt, stage) = match body {
            Body::Started(request, attempt) => (request, *attempt, Stage::Running),
            Body::Permit(request, attempt) => (request, *attempt, Stage::Promised),
            Body::Queued(request, attempt) | Body::PermitExpired(request, attempt) => (request, *attempt, Stage::Asked),
            Body::Reject(no) => (&no.request, no.attempt, Stage::Asked),
            Body::LegFailed(no) => (&no.request, no.attempt, Stage::Asked),
            Body::Completed(done) => (&done.request, done.attempt, Stage::Asked),
            _ => return false,
        };
        let Some(leg) = self.0.get_mut(from).and_then(|legs| legs.get_mut(request)) else {
            return false;
        };
        if attempt < leg.attempt && stage == Stage::Asked && !matches!(body, Body::Completed(_)) {
            return false; // of an older attempt
        }
        leg.completed |= matches!(body, Body::Completed(_));
        if stage != Stage::Asked && (leg.completed || leg.aborted >= Some(attempt) || attempt != leg.attempt) {
            return false;
        }
        leg.stage = stage;
        stage != Stage::Asked
    }
}
