//! What senders of all transports share: the trait, the errors, and the exchange of a batch.

use crate::frame::{
    BATCH_BYTES, BatchHead, Entry, FrameError, HELLO_BYTES, PageState, check_hello, hello, refusal_from_wire,
};
use crate::grant::{Grant, Refusal};
use crate::pool::{PageRef, Pool};
use std::future::Future;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// How long a peer may take to say who it is.
pub(crate) const HELLO_PATIENCE: Duration = Duration::from_secs(5);

/// A page to send, and its place in the grant.
pub type Placed = (u32, PageRef);

/// Why pages did not get there. Those that arrived before stay in the grant: sending again sends only what is missing.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The connection failed.
    #[error("the connection to the peer failed: {0}")]
    Connection(#[from] io::Error),
    /// The peer says what cannot be.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The peer does not take them.
    #[error("the peer refused: {0}")]
    Refused(#[from] Refusal),
}

impl SendError {
    /// Whether no other path can help: the peer said no, or its pages are of another kind.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::Frame(FrameError::Layout(_)))
    }
}

/// A way to the pages of a peer.
pub trait Transport: Send + Sync {
    /// Where a peer is.
    type Address: Send + Sync;

    /// Sends pages into a grant of the peer's, and says of each how it arrived, in the order given. Whoever drops the future
    /// breaks the transfer off: nothing is half there afterwards.
    ///
    /// # Errors
    /// [`SendError`]
    fn send(
        &self,
        to: &Self::Address,
        grant: &Grant,
        pages: &[Placed],
    ) -> impl Future<Output = Result<Vec<PageState>, SendError>> + Send;
}

/// Both sides say who they are, and check it.
pub(crate) async fn exchange_hello<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    pool: &Pool,
) -> Result<(), SendError> {
    let both = async {
        stream.write_all(&hello(pool)).await?;
        let mut theirs = [0; HELLO_BYTES];
        stream.read_exact(&mut theirs).await?;
        Ok(check_hello(&theirs, pool)?)
    };
    tokio::time::timeout(HELLO_PATIENCE, both)
        .await
        .unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

/// Head and entries of a batch.
pub(crate) fn announce(grant: &Grant, pages: &[Placed]) -> Vec<u8> {
    let mut out = vec![0; BATCH_BYTES];
    for (place, page) in pages {
        Entry {
            place: *place,
            offset: page.offset(),
            digest: page.digest(),
        }
        .encode(&mut out);
    }
    let (head, entries) = out.split_at_mut(BATCH_BYTES);
    head.copy_from_slice(&BatchHead::new(grant, pages.len(), entries).encode());
    out
}

/// Reads what the peer says of a batch of `pages`: first whether it takes it, and when it has all, how each arrived.
pub(crate) async fn read_answer<R: AsyncRead + Unpin>(
    stream: &mut R,
    pages: usize,
) -> Result<Vec<PageState>, SendError> {
    read_taken(stream).await?;
    read_states(stream, pages).await
}

/// Reads whether the peer takes a batch.
pub(crate) async fn read_taken<R: AsyncRead + Unpin>(stream: &mut R) -> Result<(), SendError> {
    match refusal_from_wire(stream.read_u8().await?)? {
        Some(refusal) => Err(refusal.into()),
        None => Ok(()),
    }
}

/// Reads how each page arrived.
pub(crate) async fn read_states<R: AsyncRead + Unpin>(
    stream: &mut R,
    pages: usize,
) -> Result<Vec<PageState>, SendError> {
    let mut states = vec![0; pages];
    stream.read_exact(&mut states).await?;
    Ok(states.into_iter().map(PageState::from_wire).collect::<Result<_, _>>()?)
}
