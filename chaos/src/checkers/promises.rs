//! I4: a D's pending seeds and their bytes stay within its budget; one is always allowed.

use super::books::{Books, Stage};
use super::{Checker, Found, Invariant, Rules};
use crate::observed::Observed;
use pinion_schemas::Micros;

/// See the module's text.
pub(super) struct Promises {
    rules: Rules,
    books: Books,
}

impl Promises {
    pub(super) fn new(rules: &Rules) -> Self {
        Self {
            rules: rules.clone(),
            books: Books::default(),
        }
    }
}

impl Checker for Promises {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        if let Some(worker) = self.books.see(at, seen) {
            let promised = self.books.of(&worker, at).filter(|leg| leg.stage == Stage::Promised);
            let seeds = promised.count();
            if seeds > self.rules.seeds_max {
                out.breach(Invariant::I4, at, format!("{worker} has promised {seeds} seeds"));
            }
        }
        if let Observed::Ledger(ledger) = seen {
            let (worker, seeds) = (&ledger.worker, ledger.permits.len());
            let bytes: u64 = ledger.permits.iter().map(|p| p.bytes).sum();
            if seeds > self.rules.seeds_max {
                out.breach(
                    Invariant::I4,
                    at,
                    format!("{worker} says it has promised {seeds} seeds"),
                );
            }
            if seeds > 1 && bytes > self.rules.bytes_max {
                out.breach(
                    Invariant::I4,
                    at,
                    format!("{worker} has promised {seeds} seeds of {bytes} bytes"),
                );
            }
        }
    }
}
