//! Stands in for `verbs/` where the feature of that name is off. There are no devices then, so nothing that needs one can exist.
#![allow(clippy::unused_async, reason = "the same functions as in verbs/")]

use crate::choice::{Choice, DeviceError};
use crate::frame::PageState;
use crate::grant::{Grant, Inbox};
use crate::pool::Pool;
use crate::send::{Placed, SendError, Transport};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use tokio::net::TcpListener;

/// None.
#[derive(Clone, Debug)]
pub struct Devices(Infallible);

impl Devices {
    /// Opens what was chosen; none for `off`.
    ///
    /// # Errors
    /// [`DeviceError::NotBuilt`]
    pub async fn open(choice: &Choice) -> Result<Option<Self>, DeviceError> {
        match choice {
            Choice::Off => Ok(None),
            _ => Err(DeviceError::NotBuilt),
        }
    }

    /// Their names.
    pub fn names(&self) -> Vec<&str> {
        match self.0 {}
    }
}

/// Sends nothing.
#[derive(Debug)]
pub struct VerbsSender(Infallible);

impl VerbsSender {
    /// Not to be had.
    ///
    /// # Errors
    /// Never.
    pub async fn new(_: Pool, devices: &Devices) -> io::Result<Self> {
        match devices.0 {}
    }
}

impl Transport for VerbsSender {
    type Address = SocketAddr;

    async fn send(&self, _: &SocketAddr, _: &Grant, _: &[Placed]) -> Result<Vec<PageState>, SendError> {
        match self.0 {}
    }
}

/// Takes nothing.
pub async fn serve(_: TcpListener, _: Inbox, devices: Devices) {
    match devices.0 {}
}
