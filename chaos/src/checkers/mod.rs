//! One checker for each invariant of design §6. Each is fed by [`Observed`] facts alone, knows nothing of the actors' own books, and
//! errs towards silence: what it calls a breach is one.

mod backups;
mod books;
mod ends;
mod epochs;
mod fairness;
mod order;
mod pages;
mod peers;
mod pool;
mod promises;
mod reservations;
mod sharing;
mod stream;
#[cfg(test)]
mod tests;

use crate::observed::Observed;
use pinion_schemas::Micros;
use serde::Serialize;
use std::fmt;

/// The invariants, by their numbers in design §6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Invariant {
    /// Every accepted turn ends exactly once.
    I1,
    /// The client's stream is gapless and without repeats.
    I2,
    /// Used and promised pages never exceed the pool; none is unaccounted at rest.
    I3,
    /// Pending seeds and bytes never exceed the budget.
    I4,
    /// A backup says how far it reaches; a served prefix is the right one.
    I5,
    /// Turns commit in order, each by one owner epoch.
    I6,
    /// What is of an old epoch changes nothing.
    I7,
    /// A peer that answers again gets work again.
    I8,
    /// A delivered page is what its digest says.
    I9,
    /// Nobody is starved.
    I10,
    /// Losing a session frees only what nobody else uses.
    I11,
    /// No reservation outlives its deadline.
    I12,
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// An invariant was broken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Breach {
    /// Which.
    pub invariant: Invariant,
    /// When it was seen.
    pub at: Micros,
    /// What was seen.
    pub what: String,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.at.0 as f64 / 1e6;
        write!(f, "{} at {at:.3} s: {}", self.invariant, self.what)
    }
}

/// What a checker must know of the cluster.
#[derive(Clone, Debug)]
pub struct Rules {
    /// Tokens of a page.
    pub page_tokens: u64,
    /// Decode workers, and the pages of their pools.
    pub pools: Vec<(String, u64)>,
    /// Most promises of a D.
    pub seeds_max: usize,
    /// Most bytes of them.
    pub bytes_max: u64,
    /// τ: rejects after which a D comes last.
    pub rejects_max: usize,
}

/// Watches one invariant.
pub trait Checker: Send {
    /// Takes one fact, and says what it breaks.
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found);
}

/// Breaches found, at most [`Found::MAX`] of them: the first ones tell.
#[derive(Debug, Default)]
pub struct Found(Vec<Breach>);

impl Found {
    /// Most breaches kept.
    pub const MAX: usize = 20;

    /// Adds one.
    pub fn breach(&mut self, invariant: Invariant, at: Micros, what: String) {
        if self.0.len() < Self::MAX {
            self.0.push(Breach { invariant, at, what });
        }
    }

    /// What was found so far.
    pub fn breaches(&self) -> &[Breach] {
        &self.0
    }
}

/// All of them.
pub fn all(rules: &Rules) -> Vec<Box<dyn Checker>> {
    vec![
        Box::new(ends::Ends::default()),
        Box::new(stream::Streams::default()),
        Box::new(pool::Pool::new(rules)),
        Box::new(promises::Promises::new(rules)),
        Box::new(backups::Backups::new(rules)),
        Box::new(order::Order::default()),
        Box::new(epochs::Epochs::default()),
        Box::new(peers::Peers::default()),
        Box::new(pages::Pages::default()),
        Box::new(fairness::Fairness::new(rules)),
        Box::new(sharing::Sharing),
        Box::new(reservations::Reservations),
    ]
}
