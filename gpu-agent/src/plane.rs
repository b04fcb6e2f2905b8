//! This node on the transfer plane: page servers that fill its pool, and the paths by which its pages leave.

use pinion_transfer::sim::LinkModel;
use pinion_transfer::{Address, Inbox, Paths, paths, shm, tcp};
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
    #[error("no page server at {at}: {source}; choose another plane.listen")]
    Listen {
        /// Where.
        at: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// Nobody could be told where it is.
    #[error("the page server listens on all addresses: say in plane.advertise which one peers reach")]
    NoAddress,
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
        let at = config.listen;
        let listen = |source| PlaneError::Listen { at, source };
        let listener = TcpListener::bind(at).await.map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        let ip = config.advertise.unwrap_or(bound.ip());
        if ip.is_unspecified() {
            return Err(PlaneError::NoAddress);
        }
        addresses.push(Address::Tcp(SocketAddr::new(ip, bound.port())).to_string());
        servers.spawn(tcp::serve(listener, inbox.clone()));
        Ok(Self {
            addresses,
            paths: Arc::new(Paths::new(inbox.pool())),
            _servers: servers,
            socket,
        })
    }
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
        let config = PlaneConfig {
            sockets: Some(folder),
            ..PlaneConfig::default()
        };
        let plane = Plane::open(&inbox(), "d0", &config).await.unwrap();
        let read: Vec<Address> = plane.addresses.iter().map(|a| a.parse().unwrap()).collect();
        assert!(matches!(&read[..], [Address::Shm { .. }, Address::Tcp(_)]), "{read:?}");
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
            ..everywhere
        };
        let plane = Plane::open(&inbox(), "d0", &told).await.unwrap();
        assert!(plane.addresses.len() == 1 && plane.addresses[0].starts_with("tcp://10.0.0.7:"));
    }
}
