//! Makes a failing plan smaller as long as it fails in the same way: fewer faults, fewer sessions, a shorter run.

use crate::checkers::Invariant;
use crate::plan::Plan;
use crate::run::{Options, run};
use std::time::Duration;

/// Runs spent on one plan.
const RUNS_MAX: usize = 60;

/// A smaller plan that breaks the same invariant, and how many runs were made to find it.
pub fn shrink(plan: &Plan, invariant: Invariant) -> (Plan, usize) {
    let mut search = Search {
        best: plan.clone(),
        invariant,
        runs: 0,
    };
    search.shorter();
    search.fewer(
        |plan| plan.faults.len(),
        |plan, from, to| drop(plan.faults.drain(from..to)),
    );
    search.fewer(
        |plan| plan.talks.len(),
        |plan, from, to| drop(plan.talks.drain(from..to)),
    );
    (search.best, search.runs)
}

struct Search {
    best: Plan,
    invariant: Invariant,
    runs: usize,
}

impl Search {
    /// Takes `plan` if it still fails.
    fn try_(&mut self, plan: Plan) -> bool {
        if self.runs >= RUNS_MAX {
            return false;
        }
        self.runs += 1;
        let options = Options {
            stops: true,
            ..Options::default()
        };
        let fails = run(&plan, options).is_ok_and(|o| o.breaches.iter().any(|b| b.invariant == self.invariant));
        if fails {
            self.best = plan;
        }
        fails
    }

    fn shorter(&mut self) {
        while self.best.lasts > Duration::from_secs(20) {
            let mut plan = self.best.clone();
            plan.lasts /= 2;
            let calm = plan.calm_at();
            plan.faults.retain(|f| f.at < calm);
            for fault in &mut plan.faults {
                fault.lasts = fault.lasts.min(calm.saturating_sub(fault.at));
            }
            if !self.try_(plan) {
                return;
            }
        }
    }

    /// Leaves parts out: first halves, then quarters, at last single ones.
    fn fewer(&mut self, len: impl Fn(&Plan) -> usize, cut: impl Fn(&mut Plan, usize, usize)) {
        let mut part = len(&self.best).div_ceil(2);
        while part > 0 {
            let mut from = 0;
            while from < len(&self.best) {
                let mut plan = self.best.clone();
                cut(&mut plan, from, (from + part).min(len(&self.best)));
                if !self.try_(plan) {
                    from += part;
                }
            }
            part = if part == 1 { 0 } else { part.div_ceil(2) };
        }
    }
}
