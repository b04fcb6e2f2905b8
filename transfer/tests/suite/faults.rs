//! RDMA over a link that fails. Only where there are two devices with a link between them that `rdma-link` breaks: in a VM.

use crate::planes::{Plane as _, Receiver};
use crate::verbs_plane::{Verbs, devices, receiver_address, sender_over};
use crate::{KEY, LATER, Pair, pages, placed, pool};
use pinion_schemas::Epoch;
use pinion_transfer::verbs::{self, Devices};
use pinion_transfer::{Address, Inbox, PageState, Paths, Pool, SendError, tcp};
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;
use tokio::net::TcpListener;

/// A transfer's, with all its tries: a dead link shows after some seconds, and emulation is slow.
const PATIENCE: Duration = Duration::from_mins(1);

/// The link between the two devices, whole again at the end.
struct Link;

impl Link {
    fn here() -> Option<Self> {
        // So says the guest.
        if std::env::var("RDMA_VM").is_ok_and(|v| v == "1") {
            return Some(Self);
        }
        eprintln!("SKIPPED, nothing was tested: there is no link here that may be broken");
        None
    }

    fn set(what: &str) {
        let done = Command::new("rdma-link").args(what.split(' ')).status().unwrap();
        assert!(done.success(), "rdma-link {what}");
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        Self::set("up");
        Self::set("heal");
    }
}

/// Sends again until it works.
async fn goes_on(pair: &Pair<Verbs>, grant: &pinion_transfer::Grant, sent: &[(u32, pinion_transfer::PageRef)]) {
    let mut last = None;
    for _ in 0..200 {
        match pair.send(grant, sent).await {
            Ok(states) if pair.inbox.filled(grant.id) == sent.len() => {
                assert!(!states.contains(&PageState::Corrupt), "{states:?}");
                return;
            }
            other => last = Some(other),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{last:?}");
}

/// A transfer is under way while something happens to the link; it fails, and works when the link is there again.
async fn fails_and_goes_on(break_it: &str, says: &str) {
    let Some(_mended) = Link::here() else { return };
    let pair = Pair::<Verbs>::new(512, 512).await;
    let sent = placed(&pages(&pair.from, 512));
    let first = pair.inbox.grant(1, KEY, LATER).unwrap();
    assert_eq!(pair.send(&first, &sent[..1]).await.unwrap(), [PageState::Stored]);
    let grant = pair.inbox.grant(511, KEY, LATER).unwrap();
    let rest = placed(&sent[1..].iter().map(|(_, page)| page.clone()).collect::<Vec<_>>());
    // 32 MiB take more than a second then: time to break it in the middle.
    Link::set("netem rate 200mbit limit 100000");
    let (failed, ()) = tokio::join!(pair.send(&grant, &rest), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        Link::set(break_it);
    });
    let Err(SendError::Connection(error)) = &failed else {
        panic!("{failed:?}")
    };
    assert!(error.to_string().contains(says), "{error}");
    Link::set("up");
    Link::set("heal");
    goes_on(&pair, &grant, &rest).await;
    let got = pair.inbox.take(grant.id);
    assert!(
        got.iter()
            .zip(&rest)
            .all(|(got, (_, sent))| got.as_deref() == Some(&**sent))
    );
    assert_eq!(pair.inbox.take(first.id).len(), 1);
    drop((got, sent, rest));
    assert_eq!(pair.inbox.grants(), 0);
    pair.rests().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_that_goes_down_is_said_at_once() {
    fails_and_goes_on("down", "is down").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_cut_is_noticed() {
    fails_and_goes_on("cut", "RetryCounterExceeded").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_packets_are_sent_again() {
    let Some(_mended) = Link::here() else { return };
    let pair = Pair::<Verbs>::new(64, 64).await;
    Link::set("netem loss 5%");
    let grant = pair.inbox.grant(64, KEY, LATER).unwrap();
    let sent = placed(&pages(&pair.from, 64));
    goes_on(&pair, &grant, &sent).await;
    let got = pair.inbox.take(grant.id);
    assert!(
        got.iter()
            .zip(&sent)
            .all(|(got, (_, sent))| got.as_deref() == Some(&**sent))
    );
    drop((got, sent));
    pair.rests().await;
}

/// RDMA first; over loopback when its link is down; and RDMA again when it is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_path_takes_over_and_gives_back() {
    let Some(_mended) = Link::here() else { return };
    let (from, inbox) = (pool(8), Inbox::new(pool(32), Epoch(1)));
    let receiver: Receiver<Verbs> = Verbs::serve(inbox.clone()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let loopback = Address::Tcp(listener.local_addr().unwrap());
    let over_tcp = tokio::spawn(tcp::serve(listener, inbox.clone()));
    let both = [loopback.clone(), Address::Verbs(receiver.address)];
    let rdma = &both[1..];
    let mine = devices("RDMA_A_DEV").await.unwrap();
    let paths = Paths::new(&from).with_verbs(sender_over(&from, &mine));
    let sent = placed(&pages(&from, 8));
    let transfer = async |to: &[Address]| {
        let grant = inbox.grant(8, KEY, LATER).unwrap();
        let done = paths.send(to, &grant, &sent, PATIENCE).await;
        (done, inbox.take(grant.id).into_iter().flatten().count())
    };
    // Only RDMA is named: it works.
    assert!(matches!(transfer(rdma).await, (Ok(()), 8)));
    Link::set("down");
    for _ in 0..4 {
        let (done, arrived) = transfer(&both).await;
        assert!(done.is_ok() && arrived == 8, "{done:?}, {arrived} pages");
    }
    assert!(transfer(rdma).await.0.is_err(), "its link is down");
    Link::set("up");
    // Nobody to take over: what arrives went over RDMA.
    over_tcp.abort();
    let _ = over_tcp.await;
    let mut again = transfer(&both).await;
    for _ in 0..100 {
        if again.0.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        again = transfer(&both).await;
    }
    assert!(matches!(again, (Ok(()), 8)), "{again:?}");
    drop(sent);
    rest(&from, &inbox).await;
}

/// Only one side has RDMA: a sender without passes the address over, and one with finds somebody there who does not speak it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_and_without_rdma_use_tcp() {
    if let Some(why) = Verbs::missing().await {
        eprintln!("SKIPPED, nothing was tested: {why}");
        return;
    }
    let (from, inbox) = (pool(8), Inbox::new(pool(8), Epoch(1)));
    let receiver: Receiver<Verbs> = Verbs::serve(inbox.clone()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let over_tcp = tokio::spawn(tcp::serve(listener, inbox.clone()));
    let mine = devices("RDMA_A_DEV").await.unwrap();
    let with = Paths::new(&from).with_verbs(sender_over(&from, &mine));
    let sent = placed(&pages(&from, 8));
    for (paths, rdma) in [(Paths::new(&from), receiver.address), (with, at)] {
        let grant = inbox.grant(8, KEY, LATER).unwrap();
        let both = [Address::Verbs(rdma), Address::Tcp(at)];
        paths.send(&both, &grant, &sent, PATIENCE).await.unwrap();
        let got = inbox.take(grant.id);
        assert!(
            got.iter()
                .zip(&sent)
                .all(|(got, (_, sent))| got.as_deref() == Some(&**sent))
        );
    }
    over_tcp.abort();
    drop(sent);
    rest(&from, &inbox).await;
}

/// Two lanes: each device of the one node with another one of the other node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_dealt_over_two_lanes() {
    if Link::here().is_none() {
        return;
    }
    let (a, b) = (
        std::env::var("RDMA_A_DEV").unwrap(),
        std::env::var("RDMA_B_DEV").unwrap(),
    );
    let open = async |names: String| Devices::open(&names.parse().unwrap()).await.unwrap().unwrap();
    let (mine, theirs) = (open(format!("{a},{b}")).await, open(format!("{b},{a}")).await);
    let (from, inbox) = (pool(33), Inbox::new(pool(33), Epoch(1)));
    let listener = TcpListener::bind((receiver_address(), 0)).await.unwrap();
    let at: SocketAddr = listener.local_addr().unwrap();
    let server = tokio::spawn(verbs::serve(listener, inbox.clone(), theirs));
    let sender = sender_over(&from, &mine);
    let sent = placed(&pages(&from, 33));
    let before = [packets(&a), packets(&b)];
    for _ in 0..2 {
        let grant = inbox.grant(33, KEY, LATER).unwrap();
        let states = pinion_transfer::Transport::send(&sender, &at, &grant, &sent)
            .await
            .unwrap();
        assert_eq!(states, [PageState::Stored; 33]);
        let got = inbox.take(grant.id);
        assert!(
            got.iter()
                .zip(&sent)
                .all(|(got, (_, sent))| got.as_deref() == Some(&**sent))
        );
    }
    for (name, before) in [(&a, before[0]), (&b, before[1])] {
        let sent = packets(name) - before;
        // Sixteen pages of 64 KiB, twice, in packets of at most 4 KiB.
        assert!(sent >= 2 * 16 * 16, "{sent} packets over {name}");
    }
    server.abort();
    drop(sent);
    rest(&from, &inbox).await;
}

/// Packets that a device has sent.
fn packets(device: &str) -> u64 {
    let counter = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts");
    std::fs::read_to_string(counter).unwrap().trim().parse().unwrap()
}

async fn rest(from: &Pool, inbox: &Inbox) {
    for _ in 0..1_000 {
        if (from.usage().free, inbox.pool().usage().free) == (from.capacity(), inbox.pool().capacity()) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not free: {:?}, {:?}", from.usage(), inbox.pool().usage());
}
