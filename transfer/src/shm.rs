//! Pages to another process of the same machine: the receiver copies them out of the sender's memory, which it can read and not
//! write, into granted slots. Only names and digests go over the (Unix) socket.

use crate::frame::{Entry, PageState};
use crate::grant::{Grant, Inbox};
use crate::pool::Pool;
use crate::region::Foreign;
use crate::send::{HELLO_PATIENCE, Placed, SendError, Transport, announce, exchange_hello, read_answer};
use crate::serve::{self, Batch, next_batch, report};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::io::{AsyncWriteExt as _, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Mutex;
use twox_hash::XxHash3_128;

/// What is copied at once: little enough to be in the cache still when its digest is computed.
const COPY_BYTES: usize = 128 << 10;
/// Peers whose connection is kept.
const PEERS_MAX: usize = 64;

/// Sends pages of a pool. Transfers to one peer follow each other: the copying is the receiver's.
#[derive(Debug)]
pub struct ShmSender {
    pool: Pool,
    idle: Mutex<Vec<(PathBuf, UnixStream)>>,
}

impl ShmSender {
    /// A sender of this pool's pages.
    pub fn new(pool: Pool) -> Self {
        Self {
            pool,
            idle: Mutex::default(),
        }
    }

    async fn connect(&self, to: &Path) -> Result<UnixStream, SendError> {
        let work = async {
            let mut stream = UnixStream::connect(to).await?;
            exchange_hello(&mut stream, &self.pool).await?;
            stream
                .async_io(Interest::WRITABLE, || give(&stream, &self.pool))
                .await?;
            Ok(stream)
        };
        tokio::time::timeout(HELLO_PATIENCE, work)
            .await
            .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
    }
}

impl Transport for ShmSender {
    type Address = PathBuf;

    async fn send(&self, to: &PathBuf, grant: &Grant, pages: &[Placed]) -> Result<Vec<PageState>, SendError> {
        let kept = {
            let mut idle = self.idle.lock().await;
            let at = idle.iter().position(|(path, _)| path == to);
            at.map(|at| idle.swap_remove(at).1)
        };
        let mut stream = match kept {
            Some(stream) if alive(&stream) => stream,
            _ => self.connect(to).await?,
        };
        stream.write_all(&announce(grant, pages)).await?;
        let states = read_answer(&mut stream, pages.len()).await?;
        let mut idle = self.idle.lock().await;
        if idle.len() >= PEERS_MAX {
            idle.clear();
        }
        idle.push((to.clone(), stream));
        Ok(states)
    }
}

/// A peer says nothing between batches: what can be read is its end.
fn alive(stream: &UnixStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// Sends one byte, and the pool's memory with it.
fn give(stream: &UnixStream, pool: &Pool) -> io::Result<()> {
    let files = [pool.file()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(stream, &[IoSlice::new(&[1])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn get(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut [0])],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut files) = message
            && let Some(file) = files.next()
        {
            return Ok(file);
        }
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "the peer gave no memory"))
}

/// Takes pages from peers into the slots that were granted to them, until dropped.
pub async fn serve(listener: UnixListener, inbox: Inbox) {
    let next = || async { Ok(listener.accept().await?.0) };
    serve::accept(next, |stream| connection(stream, inbox.clone())).await;
}

async fn connection(mut stream: UnixStream, inbox: Inbox) -> Result<(), SendError> {
    exchange_hello(&mut stream, inbox.pool()).await?;
    let file = tokio::time::timeout(HELLO_PATIENCE, stream.async_io(Interest::READABLE, || get(&stream)))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    let memory = Arc::new(Foreign::map(file)?);
    while let Some(batch) = next_batch(&mut stream, &inbox).await? {
        let memory = memory.clone();
        let states = tokio::task::spawn_blocking(move || copy_all(batch, &memory))
            .await
            .map_err(io::Error::other)?;
        report(&mut stream, &states).await?;
    }
    Ok(())
}

fn copy_all(mut batch: Batch, memory: &Foreign) -> Vec<PageState> {
    let entries = std::mem::take(&mut batch.entries);
    let page = |entry: Entry| {
        let Some(slot) = batch.opened.slot(entry.place) else {
            return batch.opened.absent(entry.place);
        };
        let mut hash = XxHash3_128::new();
        let mut at = entry.offset;
        for part in slot.chunks_mut(COPY_BYTES) {
            if !memory.copy(at, part) {
                return PageState::Corrupt;
            }
            hash.write(part);
            at = at.saturating_add(part.len() as u64);
        }
        batch.opened.judge(&entry, hash.finish_128())
    };
    entries.into_iter().map(page).collect()
}
