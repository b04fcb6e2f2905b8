//! What `sideway` does not wrap, or not as it is needed here: memory of which the end is certain, and the two kinds of events.
#![allow(unsafe_code, reason = "calls of a C library")]

use rdma_mummy_sys::{
    ibv_ack_async_event, ibv_ack_cq_events, ibv_async_event, ibv_dereg_mr, ibv_event_type, ibv_get_async_event,
    ibv_get_cq_event, ibv_mr, ibv_reg_mr, ibv_req_notify_cq,
};
use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::completion::{BasicCompletionQueue, CompletionChannel, CompletionQueue as _};
use sideway::ibverbs::device_context::DeviceContext;
use sideway::ibverbs::protection_domain::ProtectionDomain;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Memory that a device may touch.
#[derive(Debug)]
pub(super) struct Registered {
    /// Taken when it ends.
    region: Option<NonNull<ibv_mr>>,
    lkey: u32,
    rkey: u32,
    _domain: Arc<ProtectionDomain>,
}

// SAFETY: verbs may be called from any thread, and the pointer is this value's alone.
unsafe impl Send for Registered {}
// SAFETY: as above; what a shared reference gives are two numbers.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers `bytes` from `at` on.
    ///
    /// # Safety
    /// The memory stays mapped until this ends; and if `access` lets the device write it, nobody else touches it until then.
    pub(super) unsafe fn new(
        domain: &Arc<ProtectionDomain>,
        at: u64,
        bytes: usize,
        access: AccessFlags,
    ) -> io::Result<Self> {
        // SAFETY: the domain is alive; the caller has the memory.
        let region = unsafe { ibv_reg_mr(domain.pd().as_ptr(), at as *mut _, bytes, access.bits() as _) };
        let region = NonNull::new(region).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: just made.
        let (lkey, rkey) = unsafe { (region.as_ref().lkey, region.as_ref().rkey) };
        Ok(Self {
            region: Some(region),
            lkey,
            rkey,
            _domain: domain.clone(),
        })
    }

    pub(super) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(super) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Ends it: when this has returned `Ok`, no device touches the memory any more.
    pub(super) fn close(&mut self) -> io::Result<()> {
        let Some(region) = self.region.take() else {
            return Ok(());
        };
        // SAFETY: ours, and not closed before.
        match unsafe { ibv_dereg_mr(region.as_ptr()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!(%error, "a device does not let memory go");
        }
    }
}

/// A completion channel's descriptor: readable when completions have come for a queue that asked to be told.
#[derive(Debug)]
pub(super) struct Channel(Arc<CompletionChannel>);

impl Channel {
    /// Its events, waited for by the runtime.
    pub(super) fn watched(channel: Arc<CompletionChannel>) -> io::Result<AsyncFd<Self>> {
        watched(Self(channel))
    }
}

/// Waits on a descriptor, which will not block from now on.
fn watched<T: AsRawFd>(of: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: open as long as `of`.
    let fd = unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) };
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
    // SAFETY: the types here own their descriptor and always give the same.
    let watched = unsafe { AsyncFd::register_with_interest(of, Interest::READABLE) };
    watched.map_err(io::Error::from)
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Asks to be told of the next completion.
pub(super) fn notify(queue: &BasicCompletionQueue) -> io::Result<()> {
    // SAFETY: the queue is alive.
    match unsafe { ibv_req_notify_cq(queue.cq().as_ptr(), 0) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Takes one event off a channel that does not block, all of whose events are of `queue`.
pub(super) fn take_completion_event(channel: &Channel, queue: &BasicCompletionQueue) -> io::Result<()> {
    let (mut of, mut context) = (null_mut(), null_mut());
    // SAFETY: the channel is alive, and the pointers are ours.
    if unsafe { ibv_get_cq_event(channel.0.comp_channel().as_ptr(), &raw mut of, &raw mut context) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: one event of this queue was taken. Without its acknowledgement the queue could never be destroyed.
    unsafe { ibv_ack_cq_events(queue.cq().as_ptr(), 1) };
    Ok(())
}

/// A device's descriptor: readable when something happens to it.
#[derive(Debug)]
pub(super) struct DeviceEvents(Arc<DeviceContext>);

impl AsRawFd for DeviceEvents {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the context is alive.
        unsafe { self.0.context().as_ref().async_fd }
    }
}

/// Numbers of events.
const UP: u32 = ibv_event_type::IBV_EVENT_PORT_ACTIVE as u32;
const DOWN: u32 = ibv_event_type::IBV_EVENT_PORT_ERR as u32;
const LOST: u32 = ibv_event_type::IBV_EVENT_DEVICE_FATAL as u32;

/// What may happen to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortEvent {
    Up(u8),
    Down(u8),
    /// The device is lost, with all its ports.
    Lost,
    /// Something else.
    Other,
}

impl DeviceEvents {
    /// The events of a device, waited for by the runtime.
    pub(super) fn watched(device: Arc<DeviceContext>) -> io::Result<AsyncFd<Self>> {
        watched(Self(device))
    }

    /// Takes one event.
    pub(super) fn take(&self) -> io::Result<PortEvent> {
        let mut event = MaybeUninit::<ibv_async_event>::uninit();
        // SAFETY: the context is alive, and the event is ours.
        if unsafe { ibv_get_async_event(self.0.context().as_ptr(), event.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let event = event.as_mut_ptr();
        // SAFETY: filled in, and acknowledged once: else what it is about could never be destroyed. Any bytes are a number; that of
        // a port means one only in the events of ports. The type is read as a number, too: a newer kernel has more than the enum.
        let (kind, port) = unsafe {
            ibv_ack_async_event(event);
            (
                (&raw const (*event).event_type).cast::<u32>().read(),
                (*event).element.port_num as u8,
            )
        };
        Ok(match kind {
            UP => PortEvent::Up(port),
            DOWN => PortEvent::Down(port),
            LOST => PortEvent::Lost,
            _ => PortEvent::Other,
        })
    }
}
