//! Faults on purpose, invariants always: whole clusters of the real actors in virtual time, each with a topology, load and faults drawn
//! from one seed, watched by checkers that know nothing of the actors' own books (design §6).
//!
//! | module | what it holds |
//! |---|---|
//! | [`plan`] | what one run is, drawn from a seed |
//! | [`fault`] | what goes wrong, and how it is done |
//! | [`load`] | clients that follow turns through a gateway's own code |
//! | [`observed`] | what observers see: client streams, messages, writes, pages, views |
//! | [`checkers`] | one checker for each invariant: pure, fed by observations |
//! | [`run`] | one run from its plan to its breaches |
//! | [`shrink`] | a smaller plan that fails in the same way |
//! | [`swarm`] | many seeds over all cores |
//! | [`coverage`] | which rare paths were taken, and which never |

pub mod checkers;
pub mod coverage;
pub mod fault;
pub mod load;
mod log;
pub mod observed;
pub mod plan;
pub mod run;
pub mod shrink;
pub mod swarm;
mod views;
