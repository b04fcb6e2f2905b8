//! Whole clusters of the real actors on the simulated bus, in virtual time.
//!
//! | module | what it holds |
//! |---|---|
//! | [`turns`] | a session's life: seeded once, then direct; killed workers cost nothing |
//! | [`determinism`] | the same seed gives the same bytes in another process, under faults |
//! | [`burst`] | a burst of fresh sessions keeps every decode worker inside its pending-seed budget (I4) |
//! | [`losses`] | one thing is lost once: what that still costs too much |
//! | [`books`], [`watch`] | one D's permits as an observer of the bus counts them |
#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod backup;
mod books;
mod burst;
mod determinism;
mod eviction;
mod losses;
mod moves;
mod pages;
mod turns;
mod watch;
