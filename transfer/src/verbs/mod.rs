//! Pages to another node over RDMA: one-sided writes out of the sender's pool into granted slots, over reliable connections.
//!
//! A `verbs://` address is that of a TCP port. On it both sides say hello, then which queue pairs they made ([`wire`]); it stays
//! open as the connection's life line, and heads, entries, places and answers go over it: they are small, one exchange before and
//! one after the pages of a batch, and the code for them is that of the other transports. Over RDMA go the bytes alone: writes into the
//! places that the receiver told, and behind them on each lane a write with immediate that carries the batch's number. Its completion
//! wakes the receiver, and by the rules of reliable connections all that was written before on that lane is there then.
//!
//! **What a peer can write.** Nothing, but for the time of a batch: then the slots that were opened for it are registered ([`receiver`]), each run
//! of adjacent ones by itself, in a protection domain of that connection alone. The registration ends, and the device has said so, before
//! the first digest is computed; from then on the key means nothing, and a write that uses it breaks its queue pair. The sender's
//! pool is registered once, to be read by its own device only.
//!
//! **What that costs.** Two system calls for each run, and its memory pinned and let go: a cost that grows with the bytes. It was never
//! measured on hardware. Memory windows would be cheaper, but soft-RoCE checks a window's addresses against its whole region, so that
//! nothing could be proved here (docs/adr/0016).
//!
//! **Lanes.** A connection has a queue pair for each of the sender's devices; the receiver deals the pages over them. One that
//! fails ends the connection: another path takes over, not another lane.

mod device;
mod ffi;
mod lane;
mod receiver;
mod sender;
mod wire;

pub use device::Devices;
pub use receiver::serve;
pub use sender::VerbsSender;

use std::io;
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::Handle;

/// Lanes of a connection.
const LANES_MAX: usize = crate::choice::DEVICES_MAX;
/// A page is written in pieces of so many bytes: any device takes them (soft-RoCE at most 8 MiB), and few are needed.
const PIECE_BYTES: usize = 1 << 20;
/// A life line that carries nothing is probed after so long, and again, until it is given up: its peer may be behind a cut.
const PROBE_AFTER: Duration = Duration::from_secs(2);
const PROBES: u32 = 3;
const PROBE_EVERY: Duration = Duration::from_secs(1);

/// Makes a TCP connection notice that its peer is gone within about [`PROBE_AFTER`] and [`PROBES`] × [`PROBE_EVERY`].
fn life_line(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    // The same for bytes that nobody acknowledges.
    let patience = PROBE_AFTER + PROBES * PROBE_EVERY;
    sockopt::set_tcp_user_timeout(stream, patience.as_millis() as u32)?;
    Ok(())
}

/// Does what blocks on a thread that may.
async fn on_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

/// Something whose end blocks: it ends on a thread that may.
#[derive(Debug)]
struct EndsOnThread<T: Send + 'static>(Option<T>);

impl<T: Send> EndsOnThread<T> {
    fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send> Deref for EndsOnThread<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().expect("taken by its end alone")
    }
}

impl<T: Send> DerefMut for EndsOnThread<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("taken by its end alone")
    }
}

impl<T: Send + 'static> Drop for EndsOnThread<T> {
    fn drop(&mut self) {
        if let (Some(value), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn_blocking(move || drop(value));
        }
    }
}

#[cfg(test)]
mod tests;
