//! One transfer over a stream that is cut, or garbles a bit, at any place in either direction. Whatever happens: what is in a slot
//! is what was sent to it, the rest comes with a second try, and at the end every slot is free.

use super::*;
use crate::testing::{page, pool};
use pinion_schemas::{Epoch, Micros};
use proptest::prelude::*;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{DuplexStream, ReadBuf, duplex};

const PAGES: u32 = 3;
const KEY: u64 = 5;
/// All that goes to the receiver: hello, batch, pages.
const UP: usize = 40 + 48 + PAGES as usize * (28 + 256);
/// All that comes back: hello, answer, a state for each page.
const DOWN: usize = 40 + 1 + PAGES as usize;

/// What is wrong with one direction of the stream.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    /// Ends after so many bytes.
    Cut(usize),
    /// The byte in this place has a wrong bit.
    Flip(usize),
}

struct Faulty {
    inner: DuplexStream,
    written: usize,
    fault: Fault,
}

impl AsyncRead for Faulty {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, into)
    }
}

impl AsyncWrite for Faulty {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut bytes = bytes.to_vec();
        match self.fault {
            Fault::Cut(at) if self.written >= at => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            Fault::Cut(at) => bytes.truncate(at - self.written),
            Fault::Flip(at) if (self.written..self.written + bytes.len()).contains(&at) => {
                // At most up to there, so that the byte is written for certain.
                bytes.truncate(at - self.written + 1);
                if let Some(last) = bytes.last_mut() {
                    *last ^= 1 << (at % 8);
                }
            }
            Fault::Flip(_) | Fault::None => {}
        }
        let written = Pin::new(&mut self.inner).poll_write(cx, &bytes);
        if let Poll::Ready(Ok(n)) = written {
            self.written += n;
        }
        written
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

/// One connection, one batch.
async fn transfer(
    inbox: &Inbox,
    from: &Pool,
    grant: &Grant,
    pages: &[Placed],
    faults: [Fault; 2],
) -> Option<Vec<PageState>> {
    let (near, far) = duplex(64);
    let [mut near, far] = [(near, faults[0]), (far, faults[1])].map(|(inner, fault)| Faulty {
        inner,
        written: 0,
        fault,
    });
    let receiver = serve_stream(far, inbox.clone());
    let sender = async move {
        exchange_hello(&mut near, from).await?;
        exchange(&mut near, grant, pages).await
    };
    let (states, _) = tokio::join!(sender, receiver);
    states.ok()
}

/// Sends three pages over a faulty stream and then over a good one.
async fn two_tries(faults: [Fault; 2]) -> Result<(), TestCaseError> {
    let (from, to) = (pool(PAGES), pool(PAGES));
    let inbox = Inbox::new(to.clone(), Epoch(1));
    let grant = inbox.grant(PAGES as usize, KEY, Micros(1)).unwrap();
    let sent: Vec<Placed> = (0..PAGES).map(|i| (i, page(&from, i as u8))).collect();
    let first = transfer(&inbox, &from, &grant, &sent, faults).await;
    prop_assert_eq!(
        to.usage().free,
        0,
        "all slots are in the grant when the connection has ended"
    );
    if matches!(faults, [Fault::None, Fault::None]) {
        prop_assert_eq!(first, Some(vec![PageState::Stored; 3]));
    }
    let again = transfer(&inbox, &from, &grant, &sent, [Fault::None; 2])
        .await
        .expect("a good stream failed");
    prop_assert!(
        again.iter().all(|s| matches!(s, PageState::Stored | PageState::Known)),
        "{:?}",
        again
    );
    let got = inbox.take(grant.id);
    for (page, (_, original)) in got.iter().zip(&sent) {
        prop_assert_eq!(page.as_deref(), Some(&**original));
    }
    prop_assert!(inbox.take(grant.id).is_empty(), "a second commit takes nothing");
    drop((got, sent));
    prop_assert_eq!((from.usage().free, to.usage().free), (PAGES, PAGES));
    Ok(())
}

fn run(faults: [Fault; 2]) -> Result<(), TestCaseError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    runtime.expect("no runtime").block_on(two_tries(faults))
}

#[test]
fn a_cut_at_any_byte_loses_only_what_was_not_there_yet() {
    for at in 0..=UP {
        run([Fault::Cut(at), Fault::None]).unwrap();
    }
    for at in 0..=DOWN {
        run([Fault::None, Fault::Cut(at)]).unwrap();
    }
}

#[test]
fn a_wrong_bit_in_any_byte_never_makes_a_wrong_page() {
    for at in 0..UP {
        run([Fault::Flip(at), Fault::None]).unwrap();
    }
    for at in 0..DOWN {
        run([Fault::None, Fault::Flip(at)]).unwrap();
    }
}

proptest! {
    #[test]
    fn both_directions_may_fail_at_once(up in 0..UP, down in 0..DOWN, kinds in 0_u8..4) {
        let fault = |flip, at| if flip { Fault::Flip(at) } else { Fault::Cut(at) };
        run([fault(kinds & 1 > 0, up), fault(kinds & 2 > 0, down)])?;
    }

    /// Whatever a stranger sends, the connection ends and nothing is written.
    #[test]
    fn garbage_is_no_transfer(bytes in prop::collection::vec(any::<u8>(), 0..400), polite: bool) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("no runtime").block_on(async {
            let inbox = Inbox::new(pool(2), Epoch(1));
            let grant = inbox.grant(1, KEY, Micros(1)).unwrap();
            let (mut near, far) = duplex(1 << 12);
            if polite {
                near.write_all(&crate::frame::hello(inbox.pool())).await.unwrap();
            }
            near.write_all(&bytes).await.unwrap();
            near.shutdown().await.unwrap();
            let _ = serve_stream(far, inbox.clone()).await;
            prop_assert_eq!(inbox.take(grant.id).into_iter().flatten().count(), 0);
            prop_assert_eq!(inbox.pool().usage().free, 2);
            Ok(())
        })?;
    }
}
