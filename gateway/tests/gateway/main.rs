//! The gateway over real sockets, on a simulated or a real bus in real time; `faults` is without sockets, in virtual time.

#![allow(clippy::unwrap_used)] // only tests here; clippy sees helpers outside #[test]

mod bad_input;
mod common;
mod faults;
mod model;
mod nats;
mod params;
mod turns;
