//! What an observer of a simulated network sees.

use std::fmt;
use std::time::Duration;

use crate::Message;

/// What became of one copy of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// It was sent; nobody has it yet.
    Sent,
    /// A subscriber has it.
    Got,
    /// Whoever asked has its answer.
    Answered,
    /// Chance has lost it.
    Lost,
    /// A partition has.
    Cut,
    /// The subscriber holds as many as it can, which is this many.
    Slow(usize),
    /// The subscriber is not there any more.
    Gone,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sent => f.write_str("sent"),
            Self::Got => f.write_str("got"),
            Self::Answered => f.write_str("answered"),
            Self::Lost => f.write_str("lost"),
            Self::Cut => f.write_str("cut"),
            Self::Slow(capacity) => write!(f, "slow({capacity})"),
            Self::Gone => f.write_str("gone"),
        }
    }
}

/// Something that happened on the network, `at` after its start.
#[derive(Debug)]
pub enum Seen<'a> {
    /// A message, or a copy of it.
    Message {
        /// When.
        at: Duration,
        /// What became of it.
        what: What,
        /// Endpoint that sent it.
        from: &'a str,
        /// Endpoint it goes to; `-` when it is only sent.
        to: &'a str,
        /// The message.
        message: &'a Message,
    },
    /// A key was written, or deleted.
    Written {
        /// When.
        at: Duration,
        /// The key.
        key: &'a str,
        /// Its value; `None`: deleted.
        value: Option<&'a [u8]>,
    },
    /// The server restarts.
    Restart {
        /// When.
        at: Duration,
    },
}

/// Whoever watches. It is called while the network is locked, so it must not use it.
pub type Tap = Box<dyn FnMut(&Seen<'_>) + Send>;
