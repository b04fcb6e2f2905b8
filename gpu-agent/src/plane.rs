//! This node on the transfer plane: page servers that fill its pool, and the paths by which its pages leave.

use pinion_transfer::sim::LinkModel;
use pinion_transfer::verbs::{self, Devices, VerbsSender};
use pinion_transfer::{Address, Choice, DeviceError, Inbox, Paths, Pool, paths, shm, tcp};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;

/// Section `[plane]`: how pages of KV reach this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlaneConfig {
    /// Where the page server listens; port 0 takes a free one. Default 127.0.0.1:0, which only this machine reaches: set it
    /// on every node of a cluster of several.
    pub listen: SocketAddr,
    /// The address that peers are told. Default: the one in `listen`; needed if that is `0.0.0.0` or `[::]`.
    pub advertise: Option<IpAddr>,
    /// Folder for the sockets through which workers of one machine find each other's memory. Default: `pinion-pages` in the
    /// system's folder for temporary files.
    pub sockets: Option<PathBuf>,
    /// RDMA devices over which pages come and leave: `auto`, `off`, or names (`mlx5_0`, with port and GID index `mlx5_0:1:3`, several with commas
    /// between). Named ones must work, or the node does not start. Default: as `auto`, but nothing is said if there are none.
    pub verbs: Option<Choice>,
    /// Where RDMA connections begin: a TCP port at the IP of `listen`. Default 0: a free one.
    pub verbs_port: u16,
    /// What the link to other nodes carries, bytes per second: a decode worker promises seeds for one second of it at a time. Default
    /// 2.5 GB/s.
    pub link_bytes_per_s: u64,
}

impl Default for PlaneConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            sockets: None,
            verbs: None,
            verbs_port: 0,
            link_bytes_per_s: 2_500_000_000,
        }
    }
}

impl PlaneConfig {
    /// The link, as the workers' budgets know it.
    pub fn link(&self) -> LinkModel {
        LinkModel {
            bytes_per_sec: self.link_bytes_per_s.max(1),
            setup: pinion_schemas::Micros::ZERO,
            trouble: None,
        }
    }
}

/// Why a node is not on the plane.
#[derive(Debug, thiserror::Error)]
pub enum PlaneError {
    /// The port is taken, or not this machine's.
    #[error("no page server at {at}: {source}; choose another plane.listen or plane.verbs_port")]
    Listen {
        /// Where.
        at: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// Nobody could be told where it is.
    #[error("the page server listens on all addresses: say in plane.advertise which one peers reach")]
    NoAddress,
    /// They were asked for by name.
    #[error("the RDMA devices of plane.verbs cannot be used: correct it, or say auto")]
    Devices(#[from] DeviceError),
    /// A device does not take the pool.
    #[error("no pages over RDMA: {0}; or set plane.verbs to off")]
    Memory(io::Error),
}

/// A node's page servers; they end when this is dropped.
pub struct Plane {
    /// Where peers reach them, nearest first.
    pub addresses: Vec<String>,
    /// How this node's pages leave.
    pub paths: Arc<Paths>,
    _servers: JoinSet<()>,
    socket: Option<PathBuf>,
}

impl Drop for Plane {
    fn drop(&mut self) {
        if let Some(path) = &self.socket {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Plane {
    /// Serves the pool of `inbox`, which belongs to `worker`.
    ///
    /// # Errors
    /// [`PlaneError`]. Without shared memory it goes on: TCP reaches the same machine too.
    pub async fn open(inbox: &Inbox, worker: &str, config: &PlaneConfig) -> Result<Self, PlaneError> {
        let mut servers = JoinSet::new();
        let (mut addresses, mut socket) = (Vec::new(), None);
        match open_socket(worker, config.sockets.as_deref()) {
            Ok((listener, path)) => {
                let host = paths::host().unwrap_or_default();
                socket = Some(path.clone());
                addresses.push(Address::Shm { host, path }.to_string());
                servers.spawn(shm::serve(listener, inbox.clone()));
            }
            Err(error) => tracing::warn!(%error, "no shared memory for pages: they go over TCP"),
        }
        let mut paths = Paths::new(inbox.pool());
        if let Some((devices, sender)) = rdma(inbox.pool(), config.verbs.as_ref()).await? {
            let (listener, at) =
                listen(SocketAddr::new(config.listen.ip(), config.verbs_port), config.advertise).await?;
            paths = paths.with_verbs(sender);
            tracing::info!(devices = ?devices.names(), %at, "pages over RDMA");
            addresses.push(Address::Verbs(at).to_string());
            servers.spawn(verbs::serve(listener, inbox.clone(), devices));
        }
        let (listener, at) = listen(config.listen, config.advertise).await?;
        addresses.push(Address::Tcp(at).to_string());
        servers.spawn(tcp::serve(listener, inbox.clone()));
        Ok(Self {
            addresses,
            paths: Arc::new(paths),
            _servers: servers,
            socket,
        })
    }
}

/// A listening socket, and what peers are told of it.
async fn listen(at: SocketAddr, advertise: Option<IpAddr>) -> Result<(TcpListener, SocketAddr), PlaneError> {
    let failed = |source| PlaneError::Listen { at, source };
    let listener = TcpListener::bind(at).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let ip = advertise.unwrap_or(bound.ip());
    if ip.is_unspecified() {
        return Err(PlaneError::NoAddress);
    }
    Ok((listener, SocketAddr::new(ip, bound.port())))
}

/// The RDMA devices to use, if any, and a sender over them. Named ones must work. Only who asked hears that there are none, and everybody
/// of one that is there and cannot be used.
async fn rdma(pool: &Pool, choice: Option<&Choice>) -> Result<Option<(Devices, VerbsSender)>, PlaneError> {
    match (choice, open_rdma(pool, choice.unwrap_or(&Choice::Auto)).await) {
        (_, Ok(found)) => return Ok(found),
        (Some(Choice::Named(_)), Err(error)) => return Err(error),
        (None, Err(PlaneError::Devices(error))) => tracing::debug!(%error, "no RDMA: pages go over TCP"),
        (Some(_), Err(PlaneError::Devices(error))) => tracing::info!(%error, "no RDMA: pages go over TCP"),
        (_, Err(error)) => tracing::warn!(%error, "no RDMA: pages go over TCP"),
    }
    Ok(None)
}

async fn open_rdma(pool: &Pool, choice: &Choice) -> Result<Option<(Devices, VerbsSender)>, PlaneError> {
    let Some(devices) = Devices::open(choice).await? else {
        return Ok(None);
    };
    let sender = VerbsSender::new(pool.clone(), &devices).await;
    Ok(Some((devices, sender.map_err(PlaneError::Memory)?)))
}

fn open_socket(worker: &str, folder: Option<&Path>) -> io::Result<(UnixListener, PathBuf)> {
    let folder = folder.map_or_else(|| std::env::temp_dir().join("pinion-pages"), Path::to_path_buf);
    // Only this user's processes are peers.
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
    let path = folder.join(format!("{worker}-{}.sock", std::process::id()));
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    Ok((UnixListener::bind(&path)?, path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pinion_schemas::Epoch;
    use pinion_transfer::{Dtype, Layout, Pool};

    fn inbox() -> Inbox {
        let layout = Layout {
            model: 1,
            layers: 1,
            kv_heads: 1,
            head_dim: 8,
            page_tokens: 4,
            dtype: Dtype::F16,
        };
        Inbox::new(Pool::new(layout, 4).unwrap(), Epoch(1))
    }

    #[tokio::test]
    async fn a_node_says_where_it_is() {
        let folder = std::env::temp_dir().join(format!("pinion-plane-{}", std::process::id()));
        let config = |verbs| PlaneConfig {
            sockets: Some(folder.clone()),
            verbs,
            ..PlaneConfig::default()
        };
        let addresses = async |verbs| {
            let plane = Plane::open(&inbox(), "d0", &config(verbs)).await.unwrap();
            plane
                .addresses
                .iter()
                .map(|a| a.parse().unwrap())
                .collect::<Vec<Address>>()
        };
        let without = addresses(Some(Choice::Off)).await;
        assert!(
            matches!(&without[..], [Address::Shm { .. }, Address::Tcp(_)]),
            "{without:?}"
        );
        let found = addresses(None).await;
        let is_there = Devices::open(&Choice::Auto).await.is_ok();
        assert_eq!(found.len(), if is_there { 3 } else { 2 }, "{found:?}");
        assert!(found.is_sorted(), "nearest first: {found:?}");
    }

    /// Names that are not there are an error; `auto` and `off` go on without.
    #[tokio::test]
    async fn rdma_devices_are_needed_only_by_name() {
        let with = |verbs: &str| PlaneConfig {
            sockets: Some("/proc/nowhere".into()),
            verbs: Some(verbs.parse().unwrap()),
            ..PlaneConfig::default()
        };
        let error = Plane::open(&inbox(), "d0", &with("nobody0")).await.err().unwrap();
        assert!(error.to_string().contains("plane.verbs"), "{error}");
        for choice in ["off", "auto"] {
            let plane = Plane::open(&inbox(), "d0", &with(choice)).await.unwrap();
            let last = plane.addresses.last().unwrap();
            assert!(last.starts_with("tcp://"), "{choice}: {:?}", plane.addresses);
        }
    }

    #[tokio::test]
    async fn an_address_that_nobody_reaches_is_an_error_and_no_shared_memory_is_none() {
        let everywhere = PlaneConfig {
            listen: SocketAddr::from(([0, 0, 0, 0], 0)),
            sockets: Some("/proc/nowhere".into()),
            ..PlaneConfig::default()
        };
        let error = Plane::open(&inbox(), "d0", &everywhere).await.err().unwrap();
        assert!(error.to_string().contains("plane.advertise"), "{error}");
        let told = PlaneConfig {
            advertise: Some([10, 0, 0, 7].into()),
            verbs: Some(Choice::Off),
            ..everywhere
        };
        let plane = Plane::open(&inbox(), "d0", &told).await.unwrap();
        assert!(plane.addresses.len() == 1 && plane.addresses[0].starts_with("tcp://10.0.0.7:"));
    }
}
