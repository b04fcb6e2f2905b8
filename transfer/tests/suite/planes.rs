//! The transports under test, with receivers that can be stopped and started again.

use pinion_transfer::shm::{self, ShmSender};
use pinion_transfer::tcp::{self, TcpSender};
use pinion_transfer::{Inbox, Pool, Transport};
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinHandle;

/// A transport.
pub trait Plane: Sized + 'static {
    type Sender: Transport<Address = Self::Address>;
    type Address: Clone + Send + Sync + 'static;

    /// Why it cannot be tested here.
    async fn missing() -> Option<String> {
        None
    }
    /// A new receiver at an address of its own.
    async fn serve(inbox: Inbox) -> Receiver<Self> {
        let address = Self::fresh();
        let (listener, address) = Self::listen(&address).await;
        let mut receiver = Receiver {
            address,
            listener: Some(listener),
            task: None,
        };
        receiver.go_on(inbox);
        receiver
    }
    fn sender(pool: &Pool) -> Self::Sender;
    fn fresh() -> Self::Address;
    /// A listening socket, and where it is.
    async fn listen(at: &Self::Address) -> (OwnedFd, Self::Address);
    fn run(listener: OwnedFd, inbox: Inbox) -> JoinHandle<()>;
}

/// A receiver.
pub struct Receiver<P: Plane> {
    pub address: P::Address,
    listener: Option<OwnedFd>,
    task: Option<JoinHandle<()>>,
}

impl<P: Plane> Receiver<P> {
    /// It listens and takes nobody.
    pub async fn pause(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            let _ = task.await;
        }
    }

    pub fn go_on(&mut self, inbox: Inbox) {
        let listener = self.listener.as_ref().expect("stopped");
        self.task = Some(P::run(listener.as_fd().try_clone_to_owned().unwrap(), inbox));
    }

    /// It is gone, with its connections.
    pub async fn stop(&mut self) {
        self.pause().await;
        self.listener = None;
    }

    pub async fn start_again(&mut self, inbox: Inbox) {
        self.listener = Some(P::listen(&self.address).await.0);
        self.go_on(inbox);
    }
}

impl<P: Plane> Drop for Receiver<P> {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Over TCP.
pub struct Tcp;

impl Plane for Tcp {
    type Sender = TcpSender;
    type Address = SocketAddr;

    fn sender(pool: &Pool) -> TcpSender {
        TcpSender::new(pool.clone(), tcp::STREAMS)
    }
    fn fresh() -> SocketAddr {
        ([127, 0, 0, 1], 0).into()
    }
    async fn listen(at: &SocketAddr) -> (OwnedFd, SocketAddr) {
        let listener = TcpListener::bind(at).await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener.into_std().unwrap().into(), address)
    }
    fn run(listener: OwnedFd, inbox: Inbox) -> JoinHandle<()> {
        let listener = TcpListener::from_std(listener.into()).unwrap();
        tokio::spawn(tcp::serve(listener, inbox))
    }
}

/// Through shared memory.
pub struct Shm;

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Plane for Shm {
    type Sender = ShmSender;
    type Address = PathBuf;

    fn sender(pool: &Pool) -> ShmSender {
        ShmSender::new(pool.clone())
    }
    fn fresh() -> PathBuf {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        std::env::temp_dir().join(format!("pinion-suite-{}-{number}.sock", std::process::id()))
    }
    async fn listen(at: &PathBuf) -> (OwnedFd, PathBuf) {
        let _ = std::fs::remove_file(at);
        let listener = UnixListener::bind(at).unwrap();
        (listener.into_std().unwrap().into(), at.clone())
    }
    fn run(listener: OwnedFd, inbox: Inbox) -> JoinHandle<()> {
        let listener = UnixListener::from_std(listener.into()).unwrap();
        tokio::spawn(shm::serve(listener, inbox))
    }
}
