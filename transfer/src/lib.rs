//! The transfer plane: how pages move from node to node.
//!
//! So far there is [`sim`], the link whose time is modelled while the (tiny) pages of the simulated engine travel on the bus.
//! Transports for real pages join it here.

pub mod sim;
