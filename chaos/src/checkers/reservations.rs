//! I12: no reservation outlives its deadline, and when all turns are over there is none.

use super::{Checker, Found, Invariant};
use crate::observed::Observed;
use pinion_schemas::Micros;

/// A worker may be told of the time a moment late.
const SLACK: Micros = Micros::from_millis(100);

/// See the module's text.
pub(super) struct Reservations;

impl Checker for Reservations {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        match seen {
            Observed::Ledger(ledger) => {
                let held = ledger.running.iter().chain(&ledger.permits);
                for late in held.filter(|held| held.deadline.plus(SLACK) < ledger.now) {
                    let what = format!(
                        "{} still holds {} pages for {}",
                        ledger.worker, late.pages, late.request
                    );
                    out.breach(Invariant::I12, at, what);
                }
            }
            Observed::Rest { node, left } if !node.starts_with('c') => {
                for what in left.iter().filter(|what| !what.contains("unaccounted")) {
                    out.breach(Invariant::I12, at, format!("{node} at rest: {what}"));
                }
            }
            _ => {}
        }
    }
}
