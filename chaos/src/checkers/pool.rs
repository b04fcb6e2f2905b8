//! I3: what runs on a D and what it has promised fit its pool together, by its own books and by those of an observer; at rest nothing
//! is missing.

use super::books::Books;
use super::{Checker, Found, Invariant, Rules};
use crate::observed::{Held, Observed};
use pinion_schemas::Micros;
use std::collections::BTreeMap;

/// See the module's text.
pub(super) struct Pool {
    page_tokens: u64,
    pools: BTreeMap<String, u64>,
    books: Books,
}

impl Pool {
    pub(super) fn new(rules: &Rules) -> Self {
        Self {
            page_tokens: rules.page_tokens,
            pools: rules.pools.iter().cloned().collect(),
            books: Books::default(),
        }
    }
}

impl Checker for Pool {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        if let Some(worker) = self.books.see(at, seen)
            && let Some(pool) = self.pools.get(&worker)
        {
            let pages = self
                .books
                .of(&worker, at)
                .map(|leg| leg.tokens.div_ceil(self.page_tokens));
            let taken: u64 = pages.sum();
            if taken > *pool {
                out.breach(Invariant::I3, at, format!("{worker} took on {taken} of {pool} pages"));
            }
        }
        match seen {
            Observed::Ledger(ledger) => {
                let pages = |held: &[Held]| held.iter().map(|h| h.pages).sum::<u64>();
                let (used, promised) = (pages(&ledger.running), pages(&ledger.permits));
                let (worker, pool, room) = (&ledger.worker, ledger.pool, ledger.room);
                if used + promised > pool {
                    let what = format!("{worker}: {used} pages used and {promised} promised of {pool}");
                    out.breach(Invariant::I3, at, what);
                } else if used + promised + room != pool {
                    let what = format!("{worker}: {used} used, {promised} promised, {room} free, {pool} in all");
                    out.breach(Invariant::I3, at, what);
                }
            }
            Observed::Rest { node, left } => {
                for what in left.iter().filter(|what| what.contains("unaccounted")) {
                    out.breach(Invariant::I3, at, format!("{node} at rest: {what}"));
                }
            }
            _ => {}
        }
    }
}
