//! What receivers of all transports share: connections in bounds, batches checked, each page judged by its digest.

use crate::frame::{BATCH_BYTES, BatchHead, ENTRY_BYTES, Entry, FrameError, PageState, checksum};
use crate::grant::{Inbox, Opened, Refusal};
use crate::send::SendError;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Connections at once: four streams of each of 64 peers.
pub const CONNECTIONS_MAX: usize = 256;
/// A connection that brings nothing for so long is closed; its peer opens another.
const IDLE: Duration = Duration::from_mins(2);
/// How long the pages of a batch may take: no grant stands longer, and a peer that trickles must not keep its slots.
pub(crate) const BATCH_PATIENCE: Duration = Duration::from_mins(1);
/// A peer that is told no may not have read it yet: so long, and so many bytes, it is listened to before the connection ends.
const LINGER: Duration = Duration::from_secs(1);
const LINGER_BYTES: u64 = 8 << 20;
/// After an `accept` that failed, for want of descriptors say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A batch whose slots are ours to fill.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) entries: Vec<Entry>,
    pub(crate) opened: Opened,
}

/// Takes connections, at most [`CONNECTIONS_MAX`] at once, and serves each in a task; all end when this future is dropped.
pub(crate) async fn accept<S, A, C>(mut next: impl FnMut() -> A, mut connection: impl FnMut(S) -> C)
where
    A: Future<Output = io::Result<S>>,
    C: Future<Output = Result<(), SendError>> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut tasks = JoinSet::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        match next().await {
            Ok(stream) => {
                let served = connection(stream);
                tasks.spawn(async move {
                    if let Err(error) = served.await {
                        tracing::debug!(%error, "a peer's connection has ended");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "no connection can be taken");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The next batch of a connection, opened, and the peer told so. `None`: the peer has closed it.
///
/// # Errors
/// The connection failed, or the peer wants what it may not; it has been told then.
pub(crate) async fn next_batch<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    inbox: &Inbox,
) -> Result<Option<Batch>, SendError> {
    let mut head = [0; BATCH_BYTES];
    match within(stream.read_exact(&mut head[..1])).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    };
    within(stream.read_exact(&mut head[1..])).await?;
    let head = BatchHead::decode(&head)?;
    let mut bytes = vec![0; head.pages as usize * ENTRY_BYTES];
    within(stream.read_exact(&mut bytes)).await?;
    if checksum(&bytes) != head.entries_sum {
        return Err(FrameError::Garbled.into());
    }
    let entries: Vec<Entry> = bytes.chunks_exact(ENTRY_BYTES).map(Entry::decode).collect();
    let places: Vec<u32> = entries.iter().map(|e| e.place).collect();
    match inbox.open(head.id, head.key, head.epoch, &places) {
        Ok(opened) => {
            within(stream.write_all(&[0])).await?;
            Ok(Some(Batch { entries, opened }))
        }
        Err(refusal) => {
            refuse(stream, refusal).await;
            Err(refusal.into())
        }
    }
}

/// Says how each page arrived.
pub(crate) async fn report<S: AsyncWrite + Unpin>(stream: &mut S, states: &[PageState]) -> Result<(), SendError> {
    let bytes: Vec<u8> = states.iter().map(|s| *s as u8).collect();
    Ok(within(stream.write_all(&bytes)).await?)
}

/// Says no, and listens for a moment: closing at once would take the word away from a peer that is still sending.
async fn refuse<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, refusal: Refusal) {
    let _ = timeout(LINGER, async {
        stream.write_all(&[refusal as u8]).await?;
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(LINGER_BYTES), &mut tokio::io::sink()).await
    })
    .await;
}

/// Nothing of a peer is waited for longer than [`IDLE`].
pub(crate) async fn within<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(IDLE, work)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}
