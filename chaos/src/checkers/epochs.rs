//! I7: a D does nothing for an owner after it has heard of a newer one, nor with pages that are for an earlier life of it.

use super::{Checker, Found, Invariant};
use crate::observed::{Body, Observed};
use pinion_schemas::{Epoch, Micros, RequestId};
use std::collections::BTreeMap;

/// See the module's text.
#[derive(Default)]
pub(super) struct Epochs {
    /// Newest owner of each session that each D has heard of.
    newest: BTreeMap<(String, String), Epoch>,
    /// Asks of old owners, by D, turn and attempt.
    old: BTreeMap<(String, RequestId, u64), Epoch>,
    /// Life of each process.
    lives: BTreeMap<String, Epoch>,
    /// Lives for which pages were sent to a D, by turn.
    sent: BTreeMap<(String, RequestId), Vec<Epoch>>,
}

impl Epochs {
    fn said(&mut self, at: Micros, from: &str, body: &Body, out: &mut Found) {
        let answered = match body {
            Body::Started(request, attempt) | Body::Permit(request, attempt) | Body::Queued(request, attempt) => {
                Some((*request, *attempt))
            }
            _ => None,
        };
        if let Some((request, attempt)) = answered
            && let Some(epoch) = self.old.get(&(from.to_owned(), request, attempt))
        {
            let what = format!("{from} took {request} from an owner of the old epoch {epoch}");
            out.breach(Invariant::I7, at, what);
        }
        if let Body::PagesAck(request) = body {
            let life = self.lives.get(from).copied().unwrap_or_default();
            let sent = self.sent.remove(&(from.to_owned(), *request)).unwrap_or_default();
            if !sent.is_empty() && !sent.contains(&life) {
                let what = format!("{from} of epoch {life} took pages for {request} of epoch {}", sent[0]);
                out.breach(Invariant::I7, at, what);
            }
        }
    }
}

impl Checker for Epochs {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        match seen {
            Observed::Born(node, epoch) => {
                self.lives.insert(node.clone(), *epoch);
            }
            Observed::Died(node) => {
                self.newest.retain(|(d, _), _| d != node);
                self.old.retain(|(d, ..), _| d != node);
                self.sent.retain(|(d, _), _| d != node);
            }
            Observed::Heard {
                arrived: true,
                to,
                body: Body::Run(run),
                ..
            } => {
                let newest = self.newest.entry((to.clone(), run.session.clone())).or_default();
                if run.epoch < *newest {
                    self.old.insert((to.clone(), run.request, run.attempt), run.epoch);
                }
                *newest = run.epoch.max(*newest);
            }
            Observed::Heard {
                arrived: false,
                from,
                to,
                body,
            } => {
                if let Body::Pages(request, epoch) = body {
                    self.sent.entry((to.clone(), *request)).or_default().push(*epoch);
                }
                self.said(at, from, body, out);
            }
            _ => {}
        }
    }
}
