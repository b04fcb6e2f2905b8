//! Pages to another node over TCP: straight from the sender's pages into the receiver's granted slots, without a copy of ours.

use crate::frame::{Entry, PageState};
use crate::grant::{Grant, Inbox};
use crate::pool::Pool;
use crate::send::{HELLO_PATIENCE, Placed, SendError, Transport, announce, exchange_hello, read_answer};
use crate::serve::{self, Batch, next_batch, report, within};
use futures::future::try_join_all;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use twox_hash::XxHash3_128;

/// Connections to one peer for one transfer.
pub const STREAMS: usize = 4;
/// A transfer is split over streams only if each gets so much: below, one stream is as fast.
const STREAM_BYTES_MIN: usize = 8 << 20;
/// Idle connections kept: those of 64 peers.
const IDLE_MAX: usize = 64 * STREAMS;
/// What is read at once of a page, so that its digest is computed from bytes that are still in the cache.
const READ_BYTES: usize = 256 << 10;

/// How long the pages of a batch may take: no grant stands longer, and a peer that trickles must not keep its slots.
const BATCH_PATIENCE: Duration = Duration::from_mins(1);

/// Sends pages of a pool.
#[derive(Debug)]
pub struct TcpSender {
    pool: Pool,
    streams: usize,
    idle: Mutex<HashMap<SocketAddr, Vec<TcpStream>>>,
}

impl TcpSender {
    /// A sender that splits large transfers over `streams` connections (1 to [`STREAMS`]).
    pub fn new(pool: Pool, streams: usize) -> Self {
        Self {
            pool,
            streams: streams.clamp(1, STREAMS),
            idle: Mutex::default(),
        }
    }

    async fn connect(&self, to: SocketAddr) -> Result<TcpStream, SendError> {
        let mut stream = tokio::time::timeout(HELLO_PATIENCE, TcpStream::connect(to))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        stream.set_nodelay(true)?;
        exchange_hello(&mut stream, &self.pool).await?;
        Ok(stream)
    }

    fn idle(&self, to: SocketAddr) -> Option<TcpStream> {
        self.idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_mut(&to)?
            .pop()
    }

    fn keep(&self, to: SocketAddr, stream: TcpStream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.values().map(Vec::len).sum::<usize>() >= IDLE_MAX {
            idle.clear();
        }
        let here = idle.entry(to).or_default();
        if here.len() < self.streams {
            here.push(stream);
        }
    }

    /// One batch over one connection. A kept connection may have died since: then a new one is tried, once.
    async fn send_part(&self, to: SocketAddr, grant: &Grant, pages: &[Placed]) -> Result<Vec<PageState>, SendError> {
        if let Some(mut stream) = self.idle(to) {
            match exchange(&mut stream, grant, pages).await {
                Err(SendError::Connection(_)) => {}
                other => {
                    if other.is_ok() {
                        self.keep(to, stream);
                    }
                    return other;
                }
            }
        }
        let mut stream = self.connect(to).await?;
        let states = exchange(&mut stream, grant, pages).await?;
        self.keep(to, stream);
        Ok(states)
    }
}

impl Transport for TcpSender {
    type Address = SocketAddr;

    async fn send(&self, to: &SocketAddr, grant: &Grant, pages: &[Placed]) -> Result<Vec<PageState>, SendError> {
        let bytes = pages.len() * self.pool.page_bytes();
        let streams = (bytes / STREAM_BYTES_MIN).clamp(1, self.streams);
        let parts = pages.chunks(pages.len().div_ceil(streams).max(1));
        let states = try_join_all(parts.map(|part| self.send_part(*to, grant, part))).await?;
        Ok(states.concat())
    }
}

async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    grant: &Grant,
    pages: &[Placed],
) -> Result<Vec<PageState>, SendError> {
    let (mut reader, mut writer) = tokio::io::split(stream);
    let write = async {
        writer.write_all(&announce(grant, pages)).await?;
        for (_, page) in pages {
            writer.write_all(page).await?;
        }
        Ok::<_, SendError>(())
    };
    // Read beside: a refusal comes before the bytes are all sent, and makes sending the rest pointless.
    let (states, ()) = tokio::try_join!(read_answer(&mut reader, pages.len()), write)?;
    Ok(states)
}

/// Takes pages from peers into the slots that were granted to them, until dropped.
pub async fn serve(listener: TcpListener, inbox: Inbox) {
    let next = || async {
        let stream = listener.accept().await?.0;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    serve::accept(next, |stream| serve_stream(stream, inbox.clone())).await;
}

/// Serves one connection, whatever carries it, until the peer closes it.
///
/// # Errors
/// The connection failed, or the peer is wrong or wants what it may not.
pub async fn serve_stream<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, inbox: Inbox) -> Result<(), SendError> {
    exchange_hello(&mut stream, inbox.pool()).await?;
    while let Some(mut batch) = next_batch(&mut stream, &inbox).await? {
        let mut states = Vec::with_capacity(batch.entries.len());
        let all = async {
            for at in 0..batch.entries.len() {
                let entry = batch.entries[at];
                states.push(receive(&mut stream, entry, &mut batch, inbox.pool().page_bytes()).await?);
            }
            Ok::<_, io::Error>(())
        };
        tokio::time::timeout(BATCH_PATIENCE, all)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
        drop(batch);
        report(&mut stream, &states).await?;
    }
    Ok(())
}

async fn receive<S: AsyncRead + Unpin>(
    stream: &mut S,
    entry: Entry,
    batch: &mut Batch,
    bytes: usize,
) -> io::Result<PageState> {
    let Some(slot) = batch.opened.slot(entry.place) else {
        let mut page = stream.take(bytes as u64);
        let passed = within(tokio::io::copy(&mut page, &mut tokio::io::sink())).await?;
        return if passed == bytes as u64 {
            Ok(batch.opened.absent(entry.place))
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        };
    };
    let mut hash = XxHash3_128::new();
    let mut at = 0;
    while at < bytes {
        let end = bytes.min(at + READ_BYTES);
        let read = within(stream.read(&mut slot[at..end])).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        hash.write(&slot[at..at + read]);
        at += read;
    }
    Ok(batch.opened.judge(&entry, hash.finish_128()))
}

#[cfg(test)]
mod tests;
