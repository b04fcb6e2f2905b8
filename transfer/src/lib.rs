//! The transfer plane: how pages move from node to node.
//!
//! [`pool`] is a node's page memory, [mod@file] where its pages outlive it, [`grant`] what peers may write into it. [`tcp`] sends pages to another node, [`shm`] to another
//! process of the same one, and [`paths`] chooses; both fill granted slots and check each page's digest ([`layout::digest`]). [`sim`] is the link whose time
//! is modelled while the (tiny) pages of the simulated engine travel on the bus.

pub mod file;
mod frame;
pub mod grant;
pub mod layout;
pub mod paths;
pub mod pool;
mod region;
pub mod send;
mod serve;
pub mod shm;
pub mod sim;
pub mod tcp;
#[cfg(test)]
mod testing;

pub use file::FileTier;
pub use frame::{FrameError, PageState};
pub use grant::{Grant, Inbox};
pub use layout::{Dtype, Layout};
pub use paths::{Address, MoveError, Paths};
pub use pool::{PageRef, Pool};
pub use send::{SendError, Transport};
