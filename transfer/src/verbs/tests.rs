//! A peer that does what it should not, over real queue pairs. Skipped where there is no device.

use super::device::Devices;
use super::lane::Piece;
use super::sender::Work;
use super::wire::{Target, encode_ends, read_ends, read_targets};
use super::*;
use crate::frame::PageState;
use crate::grant::{Grant, Inbox};
use crate::pool::{PageRef, Pool, Usage};
use crate::send::{Placed, announce, exchange_hello, read_states, read_taken};
use crate::testing::{page, pool};
use pinion_schemas::{Epoch, Micros};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::task::AbortHandle;

const LATER: Micros = Micros(1_000);

async fn devices(of: &str) -> Option<Devices> {
    let choice = std::env::var(of).unwrap_or_else(|_| "auto".into()).parse().unwrap();
    match Devices::open(&choice).await {
        Ok(devices) => devices,
        Err(why) => {
            assert!(std::env::var(of).is_err(), "{why}");
            eprintln!("SKIPPED, nothing was tested: {why}");
            None
        }
    }
}

/// A receiver with its slots, and a peer that speaks the protocol by hand.
struct Scene {
    from: Pool,
    inbox: Inbox,
    stream: TcpStream,
    work: EndsOnThread<Work>,
    server: AbortHandle,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Scene {
    async fn new(pages: u32) -> Option<Self> {
        let (a, b) = (devices("RDMA_A_DEV").await?, devices("RDMA_B_DEV").await?);
        let (from, inbox) = (pool(pages), Inbox::new(pool(pages), Epoch(1)));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let server = tokio::spawn(serve(listener, inbox.clone(), b)).abort_handle();
        let mut stream = TcpStream::connect(at).await.unwrap();
        exchange_hello(&mut stream, &from).await.unwrap();
        let sender = VerbsSender::new(from.clone(), &a).await.unwrap();
        let mut work = Work::new(&a, sender.sources().clone()).unwrap();
        stream
            .write_all(&encode_ends(&[work.lanes[0].end(&a.0[0])]))
            .await
            .unwrap();
        let theirs = read_ends(&mut stream).await.unwrap().unwrap();
        work.lanes[0].connect(&a.0[0], &theirs[0]).unwrap();
        work.lanes[0].ready_to_send().unwrap();
        Some(Self {
            from,
            inbox,
            stream,
            work,
            server,
        })
    }

    /// Announces pages and gets their targets.
    async fn begin(&mut self, grant: &Grant, pages: &[Placed]) -> Vec<Target> {
        self.stream.write_all(&announce(grant, pages)).await.unwrap();
        read_taken(&mut self.stream).await.unwrap();
        read_targets(&mut self.stream, pages.len()).await.unwrap().unwrap()
    }

    /// Writes one page somewhere, and a commit.
    async fn write(&mut self, page: &PageRef, to: Target, number: u32) -> io::Result<()> {
        let piece = Piece {
            from: self.from.span().0 + page.offset(),
            bytes: page.len() as u32,
            to: to.at,
            rkey: to.rkey,
        };
        let lkey = self.work.lkey(0);
        self.work.pages.push(page.clone());
        #[allow(unsafe_code, reason = "a device reads the memory")]
        // SAFETY: the page is kept by `work`.
        unsafe {
            self.work.lanes[0].write(&[piece], lkey, number).await
        }
    }

    /// All slots of the receiver are free, and no grant is open.
    async fn rests(&self) {
        for _ in 0..1_000 {
            let free = self.inbox.pool().usage().free;
            if (free, self.inbox.grants()) == (self.inbox.pool().capacity(), 0) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{:?}, {} grants", self.inbox.pool().usage(), self.inbox.grants());
    }
}

fn refused(result: &io::Result<()>) -> bool {
    result
        .as_ref()
        .is_err_and(|e| e.to_string().contains("RemoteAccessError"))
}

/// The peer keeps place and key of a page and writes there after the batch's end: it fails, and the page is what it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_write_changes_nothing() {
    let Some(mut scene) = Scene::new(2).await else { return };
    let (good, bad) = (page(&scene.from, 1), page(&scene.from, 2));
    let grant = scene.inbox.grant(2, 7, LATER).unwrap();
    let targets = scene.begin(&grant, &[(0, good.clone())]).await;
    scene.write(&good, targets[0], 0).await.unwrap();
    let states = read_states(&mut scene.stream, 1).await.unwrap();
    assert_eq!(states, [PageState::Stored]);
    let late = scene.write(&bad, targets[0], 1).await;
    assert!(refused(&late), "{late:?}");
    let got = scene.inbox.take(grant.id);
    assert!(got[0].as_deref() == Some(&*good), "the page has changed");
    drop(got);
    scene.rests().await;
}

/// In mid-batch: beside the granted slots, with a key that was never given, and with the key of another connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stray_write_is_refused() {
    for stray in 0..4 {
        let Some(mut scene) = Scene::new(3).await else { return };
        let (page, other) = (page(&scene.from, 1), page(&scene.from, 2));
        let bytes = page.len() as u64;
        // Others have the slots before and behind the granted one.
        let mut theirs = scene.inbox.pool().take(1).unwrap();
        let grant = scene.inbox.grant(1, 7, LATER).unwrap();
        theirs.extend(scene.inbox.pool().take(1).unwrap());
        for slot in &mut theirs {
            slot.fill(9);
        }
        let right = scene.begin(&grant, &[(0, page.clone())]).await[0];
        let mut second = None;
        let wrong = match stray {
            0 => Target {
                at: right.at - bytes,
                ..right
            },
            1 => Target {
                at: right.at + 1,
                ..right
            },
            2 => Target {
                rkey: right.rkey ^ 1,
                ..right
            },
            _ => {
                let second = second.insert(Scene::new(3).await.unwrap());
                let grant = second.inbox.grant(1, 7, LATER).unwrap();
                second.begin(&grant, &[(0, other.clone())]).await[0]
            }
        };
        let result = scene.write(&page, wrong, 0).await;
        assert!(refused(&result), "{stray}: {result:?}");
        assert!(
            theirs.iter().all(|slot| slot.iter().all(|b| *b == 9)),
            "{stray}: somebody's bytes have changed"
        );
        scene.stream.shutdown().await.unwrap();
        assert_eq!(scene.inbox.take(grant.id).into_iter().flatten().count(), 0);
        drop(theirs);
        scene.rests().await;
    }
}

/// Bytes that are not those of the digest, or that never came, are no page; nor is a batch that is committed under another number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_false_commit_is_seen() {
    let Some(mut scene) = Scene::new(2).await else { return };
    let (good, bad) = (page(&scene.from, 1), page(&scene.from, 2));
    let grant = scene.inbox.grant(2, 7, LATER).unwrap();
    let targets = scene.begin(&grant, &[(0, good.clone()), (1, bad.clone())]).await;
    scene.write(&bad, targets[0], 0).await.unwrap();
    let states = read_states(&mut scene.stream, 2).await.unwrap();
    assert_eq!(states, [PageState::Corrupt; 2]);
    let targets = scene.begin(&grant, &[(0, good.clone())]).await;
    scene.write(&good, targets[0], 5).await.unwrap();
    assert!(read_states(&mut scene.stream, 1).await.is_err());
    assert_eq!(scene.inbox.take(grant.id).into_iter().flatten().count(), 0);
    scene.rests().await;
}

/// A page that is being written into when its grant ends is given to nobody until the device has let it go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_come_back_when_the_device_has_let_go() {
    let Some(mut scene) = Scene::new(1).await else { return };
    let good = page(&scene.from, 1);
    let grant = scene.inbox.grant(1, 7, LATER).unwrap();
    let targets = scene.begin(&grant, &[(0, good.clone())]).await;
    scene.inbox.expire(LATER);
    let writing = Usage {
        writing: 1,
        ..Usage::default()
    };
    assert_eq!(scene.inbox.pool().usage(), writing);
    scene.server.abort();
    scene.rests().await;
    let mut slot = scene.inbox.pool().take(1).unwrap().remove(0);
    slot.fill(3);
    let late = scene.write(&good, targets[0], 0).await;
    assert!(late.is_err(), "there was nobody to write to");
    assert!(slot.iter().all(|b| *b == 3));
}
