//! What runs of a trace prove: rows from files, comparisons with their uncertainty, and a report that shows where each
//! system loses (protocol: digest §4.1).
//!
//! * A **run** is one play of a trace by one system: a file whose first line says what was played and how ([`rows`]).
//! * An **arm** is one system: its runs, which differ in nothing but the seed ([`arms`]).
//! * Turns are **paired** by seed, session and number, which all arms share.
//! * A turn that failed counts with the run's request timeout, or with its own time if that is longer: who gives up has
//!   waited, and has nothing. No figure leaves failed turns out without saying so.

pub mod arms;
mod error;
pub mod measure;
pub mod paired;
pub mod plot;
pub mod report;
pub mod rows;
pub mod strata;
pub mod summary;
#[cfg(test)]
mod tests;

pub use error::EvidenceError;
