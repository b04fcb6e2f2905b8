//! A TCP proxy whose connections can be cut, for a network that fails while both ends live.

use std::sync::Arc;
use std::time::Duration;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Passes bytes on between `port` and a server, until it is cut.
pub struct Proxy {
    /// Where it listens, on 127.0.0.1.
    pub port: u16,
    up: Arc<watch::Sender<bool>>,
}

impl Proxy {
    /// A proxy in front of `server`.
    ///
    /// # Panics
    /// If it cannot listen.
    pub async fn start(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("cannot listen");
        let port = listener.local_addr().expect("no address").port();
        let (up, watched) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (mut watched, server) = (watched.clone(), server.clone());
                if !*watched.borrow_and_update() {
                    continue;
                }
                tokio::spawn(async move {
                    let Ok(mut server) = TcpStream::connect(server).await else {
                        return;
                    };
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => {}
                        _ = watched.changed() => {}
                    }
                });
            }
        });
        Self { port, up: Arc::new(up) }
    }

    /// Cuts all connections, and lets nobody through for this long.
    pub async fn cut(&self, time: Duration) {
        self.up.send_replace(false);
        tokio::time::sleep(time).await;
        self.up.send_replace(true);
    }
}
