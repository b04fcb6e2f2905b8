//! RDMA as a plane: from one device to another where the environment names two, else over the first that works.

use crate::planes::{Plane, Tcp};
use pinion_transfer::verbs::{self, Devices, VerbsSender};
use pinion_transfer::{DeviceError, Inbox, Pool};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, block_in_place};

/// Over RDMA.
pub struct Verbs;

fn var(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The devices named by a variable.
pub async fn devices(of: &str) -> Result<Devices, DeviceError> {
    let choice = var(of).unwrap_or_else(|| "auto".into()).parse().unwrap();
    Ok(Devices::open(&choice).await?.expect("off was not asked for"))
}

/// The address of the receiver's device, over whose link the rendezvous goes then, too.
pub fn receiver_address() -> IpAddr {
    var("RDMA_B_ADDR").map_or(IpAddr::from([127, 0, 0, 1]), |a| a.parse().unwrap())
}

pub fn sender_over(pool: &Pool, devices: &Devices) -> VerbsSender {
    block_in_place(|| Handle::current().block_on(VerbsSender::new(pool.clone(), devices))).unwrap()
}

impl Plane for Verbs {
    type Sender = VerbsSender;
    type Address = SocketAddr;

    async fn missing() -> Option<String> {
        let why = devices("RDMA_A_DEV").await.err()?;
        assert!(var("RDMA_A_DEV").is_none(), "{why}");
        Some(why.to_string())
    }
    fn sender(pool: &Pool) -> VerbsSender {
        let devices = block_in_place(|| Handle::current().block_on(devices("RDMA_A_DEV"))).unwrap();
        sender_over(pool, &devices)
    }
    fn fresh() -> SocketAddr {
        (receiver_address(), 0).into()
    }
    async fn listen(at: &SocketAddr) -> (OwnedFd, SocketAddr) {
        Tcp::listen(at).await
    }
    fn run(listener: OwnedFd, inbox: Inbox) -> JoinHandle<()> {
        let listener = TcpListener::from_std(listener.into()).unwrap();
        tokio::spawn(async move {
            let devices = devices("RDMA_B_DEV").await.unwrap();
            verbs::serve(listener, inbox, devices).await;
        })
    }
}
