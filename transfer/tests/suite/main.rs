//! What every transport must do, over real sockets between real pools: each test of [`suite!`] runs once for each of them. A test
//! ends with the books: both pools have all their slots again.
#![allow(clippy::unwrap_used, reason = "a test may")]

mod faults;
mod planes;
mod verbs_plane;

use pinion_schemas::{Epoch, Micros};
use pinion_transfer::grant::{GrantError, Refusal};
use pinion_transfer::{Dtype, FrameError, Grant, Inbox, Layout, PageRef, PageState, Pool, SendError, Transport};
use planes::{Plane, Receiver, Shm, Tcp};
use std::time::Duration;
use verbs_plane::Verbs;

const KEY: u64 = 7;
const LATER: Micros = Micros(1_000);

/// Pages of 64 KiB.
pub fn layout() -> Layout {
    Layout {
        model: 3,
        layers: 8,
        kv_heads: 1,
        head_dim: 64,
        page_tokens: 32,
        dtype: Dtype::Bf16,
    }
}

fn pool(pages: u32) -> Pool {
    Pool::new(layout(), pages).unwrap()
}

/// `count` finished pages, each with bytes of its own.
fn pages(pool: &Pool, count: usize) -> Vec<PageRef> {
    let fill = |(number, mut slot): (usize, pinion_transfer::pool::SlotMut)| {
        for (at, byte) in slot.iter_mut().enumerate() {
            *byte = (at.wrapping_mul(number + 3) >> 3) as u8;
        }
        slot.finish()
    };
    pool.take(count).unwrap().into_iter().enumerate().map(fill).collect()
}

fn placed(pages: &[PageRef]) -> Vec<(u32, PageRef)> {
    (0..).zip(pages.iter().cloned()).collect()
}

/// A sender with its pool, a receiver with its.
struct Pair<P: Plane> {
    from: Pool,
    inbox: Inbox,
    receiver: Receiver<P>,
    sender: P::Sender,
}

impl<P: Plane> Pair<P> {
    async fn new(send: u32, receive: u32) -> Self {
        let from = pool(send);
        let inbox = Inbox::new(pool(receive), Epoch(1));
        let receiver = P::serve(inbox.clone()).await;
        let sender = P::sender(&from);
        Self {
            from,
            inbox,
            receiver,
            sender,
        }
    }

    async fn send(&self, grant: &Grant, pages: &[(u32, PageRef)]) -> Result<Vec<PageState>, SendError> {
        self.sender.send(&self.receiver.address, grant, pages).await
    }

    /// All slots are free, at the latest when connections that were broken off have noticed.
    async fn rests(self) {
        for _ in 0..500 {
            let (from, to) = (self.from.usage(), self.inbox.pool().usage());
            if (from.free, to.free) == (self.from.capacity(), self.inbox.pool().capacity()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!(
            "not free: sender {:?}, receiver {:?}",
            self.from.usage(),
            self.inbox.pool().usage()
        );
    }
}

/// Scattered pages into scattered places, in one batch; then again.
async fn pages_arrive_as_they_are<P: Plane>() {
    let pair = Pair::<P>::new(9, 9).await;
    let grant = pair.inbox.grant(5, KEY, LATER).unwrap();
    let all = pages(&pair.from, 9);
    let sent: Vec<_> = [4_u32, 0, 3, 1]
        .into_iter()
        .zip([&all[8], &all[2], &all[5], &all[0]].map(Clone::clone))
        .collect();
    assert_eq!(pair.send(&grant, &sent).await.unwrap(), [PageState::Stored; 4]);
    assert_eq!(
        pair.send(&grant, &sent).await.unwrap(),
        [PageState::Known; 4],
        "a page is taken once"
    );
    assert_eq!(pair.send(&grant, &[]).await.unwrap(), []);
    let got = pair.inbox.take(grant.id);
    assert!(got[2].is_none(), "nothing was sent to it");
    for (place, page) in &sent {
        assert!(got[*place as usize].as_deref() == Some(&**page), "place {place}");
    }
    let after = pair.send(&grant, &sent).await;
    assert!(matches!(after, Err(SendError::Refused(Refusal::Unknown))), "{after:?}");
    drop((got, sent, all));
    pair.rests().await;
}

async fn only_granted_slots_can_be_written<P: Plane>() {
    let pair = Pair::<P>::new(2, 4).await;
    let grant = pair.inbox.grant(2, KEY, LATER).unwrap();
    let page = pages(&pair.from, 1).remove(0);
    let wrong = [
        (Grant { key: 8, ..grant }, 0, Refusal::Key),
        (
            Grant {
                epoch: Epoch(0),
                ..grant
            },
            0,
            Refusal::Epoch,
        ),
        (Grant { id: 99, ..grant }, 0, Refusal::Unknown),
        (grant, 2, Refusal::Page),
        (grant, u32::MAX, Refusal::Page),
    ];
    for (grant, place, refusal) in wrong {
        let answer = pair.send(&grant, &[(place, page.clone())]).await;
        assert!(
            matches!(&answer, Err(SendError::Refused(r)) if *r == refusal),
            "{refusal:?}: {answer:?}"
        );
    }
    let twice = pair.send(&grant, &[(1, page.clone()), (1, page.clone())]).await;
    assert!(matches!(twice, Err(SendError::Refused(Refusal::Page))), "{twice:?}");
    assert_eq!(pair.inbox.take(grant.id).into_iter().flatten().count(), 0);
    drop(page);
    pair.rests().await;
}

async fn other_pages_are_refused_by_name<P: Plane>() {
    let pair = Pair::<P>::new(1, 1).await;
    let other = Layout {
        dtype: Dtype::F16,
        ..layout()
    };
    let other = Pool::new(other, 1).unwrap();
    let grant = pair.inbox.grant(1, KEY, LATER).unwrap();
    let answer = P::sender(&other)
        .send(&pair.receiver.address, &grant, &placed(&pages(&other, 1)))
        .await;
    assert!(
        matches!(answer, Err(SendError::Frame(FrameError::Layout(_)))),
        "{answer:?}"
    );
    pair.inbox.take(grant.id);
    pair.rests().await;
}

/// A receiver that was started again honours nothing of before, and the sender finds it without help.
async fn a_receiver_starts_again<P: Plane>() {
    let mut pair = Pair::<P>::new(3, 3).await;
    let old = pair.inbox.grant(3, KEY, LATER).unwrap();
    let sent = placed(&pages(&pair.from, 3));
    pair.send(&old, &sent[..1]).await.unwrap();
    pair.receiver.stop().await;
    assert!(matches!(pair.send(&old, &sent).await, Err(SendError::Connection(_))));
    pair.inbox = Inbox::new(pool(3), Epoch(2));
    pair.receiver.start_again(pair.inbox.clone()).await;
    let stale = pair.send(&old, &sent).await;
    assert!(matches!(stale, Err(SendError::Refused(Refusal::Epoch))), "{stale:?}");
    let grant = pair.inbox.grant(3, KEY, LATER).unwrap();
    assert_eq!(pair.send(&grant, &sent).await.unwrap(), [PageState::Stored; 3]);
    pair.inbox.take(grant.id);
    drop(sent);
    pair.rests().await;
}

/// A transfer is given up at some point, and another sender finishes it.
async fn a_sender_breaks_off<P: Plane>() {
    let pair = Pair::<P>::new(128, 128).await;
    for patience in [0, 20, 200, 1_000, 5_000, 20_000] {
        let grant = pair.inbox.grant(128, KEY, LATER).unwrap();
        let sent = placed(&pages(&pair.from, 128));
        let _ = tokio::time::timeout(Duration::from_micros(patience), pair.send(&grant, &sent)).await;
        let second = P::sender(&pair.from);
        for attempt in 0.. {
            let states = second.send(&pair.receiver.address, &grant, &sent).await.unwrap();
            let there = pair.inbox.filled(grant.id);
            let wrong = |s: &PageState| matches!(s, PageState::Corrupt | PageState::Ended);
            assert!(!states.iter().any(wrong), "{states:?}");
            if there == 128 {
                break;
            }
            // The first connection still has some slots.
            assert!(attempt < 500, "{there} of 128 pages after many tries");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let got = pair.inbox.take(grant.id);
        assert!(
            got.iter()
                .zip(&sent)
                .all(|(got, (_, sent))| got.as_deref() == Some(&**sent))
        );
    }
    pair.rests().await;
}

/// A receiver that is not listening yet loses nothing; one that never does is left by dropping the transfer.
async fn a_slow_receiver_costs_only_time<P: Plane>() {
    let mut pair = Pair::<P>::new(64, 64).await;
    let grant = pair.inbox.grant(64, KEY, LATER).unwrap();
    let sent = placed(&pages(&pair.from, 64));
    pair.receiver.pause().await;
    let given_up = tokio::time::timeout(Duration::from_millis(50), pair.send(&grant, &sent)).await;
    assert!(given_up.is_err(), "nobody was there to answer: {given_up:?}");
    let (sender, address) = (P::sender(&pair.from), pair.receiver.address.clone());
    let (states, ()) = tokio::join!(sender.send(&address, &grant, &sent), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        pair.receiver.go_on(pair.inbox.clone());
    });
    assert_eq!(states.unwrap().len(), 64);
    pair.inbox.take(grant.id);
    drop(sent);
    pair.rests().await;
}

async fn a_full_pool_grants_nothing<P: Plane>() {
    let pair = Pair::<P>::new(1, 2).await;
    let first = pair.inbox.grant(2, KEY, LATER).unwrap();
    assert!(matches!(pair.inbox.grant(1, KEY, LATER), Err(GrantError::NoRoom(_))));
    assert_eq!(pair.inbox.expire(LATER), [first.id]);
    let late = pair.send(&first, &placed(&pages(&pair.from, 1))).await;
    assert!(matches!(late, Err(SendError::Refused(Refusal::Unknown))), "{late:?}");
    pair.rests().await;
}

/// Several transfers at once between the same nodes, two of them into one grant.
async fn transfers_do_not_disturb_each_other<P: Plane>() {
    let pair = Pair::<P>::new(48, 48).await;
    let sent: Vec<_> = (0..3).map(|_| placed(&pages(&pair.from, 16))).collect();
    let grants: Vec<Grant> = sent.iter().map(|_| pair.inbox.grant(16, KEY, LATER).unwrap()).collect();
    let [a, b, c] = [0, 1, 2].map(|i| pair.send(&grants[i], &sent[i]));
    let again = pair.send(&grants[0], &sent[0]);
    let (a, b, c, again) = tokio::join!(a, b, c, again);
    let (a, again) = (a.unwrap(), again.unwrap());
    for (first, second) in a.iter().zip(&again) {
        let stored = [first, second].into_iter().filter(|s| **s == PageState::Stored).count();
        assert_eq!(stored, 1, "each page once: {first:?}, {second:?}");
    }
    assert_eq!(
        (b.unwrap(), c.unwrap()),
        (vec![PageState::Stored; 16], vec![PageState::Stored; 16])
    );
    for (grant, sent) in grants.iter().zip(&sent) {
        let got = pair.inbox.take(grant.id);
        assert!(
            got.iter()
                .zip(sent)
                .all(|(got, (_, sent))| got.as_deref() == Some(&**sent))
        );
    }
    drop(sent);
    pair.rests().await;
}

macro_rules! suite {
    ($($plane:ident: $module:ident),+ / $($test:ident),+ $(,)?) => {
        suite!(@ $($plane: $module),+ / [$($test),+]);
    };
    (@ $($plane:ident: $module:ident),+ / $tests:tt) => {
        $(suite!(# $plane: $module $tests);)+
    };
    (# $plane:ident: $module:ident [$($test:ident),+]) => {
        mod $module {
            use super::planes::Plane as _;
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                match super::$plane::missing().await {
                    None => super::$test::<super::$plane>().await,
                    Some(why) => eprintln!("SKIPPED, nothing was tested: {why}"),
                }
            })+
        }
    };
}

suite!(
    Tcp: tcp, Shm: shm, Verbs: verbs /
    pages_arrive_as_they_are,
    only_granted_slots_can_be_written,
    other_pages_are_refused_by_name,
    a_receiver_starts_again,
    a_sender_breaks_off,
    a_slow_receiver_costs_only_time,
    a_full_pool_grants_nothing,
    transfers_do_not_disturb_each_other,
);
