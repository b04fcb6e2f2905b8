//! A turn on a real `nats-server` that is killed in mid-stream.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::common::{Owner, Say, Streamed, World, ask, ids, lease};
use pinion_bus::nats::{NatsBus, NatsOptions};
use pinion_bus::sim::{Faults, SimNet};

fn binary() -> PathBuf {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/bin/nats-server");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join("nats-server"));
    let named = std::env::var_os("NATS_SERVER").map(PathBuf::from).into_iter();
    let mut places = named.chain([beside]).chain(on_path);
    places
        .find(|place| place.is_file())
        .expect("nats-server >= 2.10: set NATS_SERVER, or put it into .tools/bin or on PATH")
}

/// A server with its own port and folder; both go with it.
struct Server {
    child: Child,
    port: u16,
    folder: PathBuf,
}

impl Server {
    fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let folder = std::env::temp_dir().join(format!("pinion-gateway-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let child = Self::spawn(port, &folder);
        Self { child, port, folder }
    }

    fn spawn(port: u16, folder: &Path) -> Child {
        let mut command = Command::new(binary());
        command
            .args(["-a", "127.0.0.1", "-p", &port.to_string(), "-js", "-sd"])
            .arg(folder);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    async fn connect(&self, name: &str) -> Arc<NatsBus> {
        let mut options = NatsOptions::new(&format!("nats://127.0.0.1:{}", self.port), name);
        options.kv_bucket = Some("pinion".to_owned());
        Arc::new(NatsBus::connect(options).await.unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// What was said while the server was away is lost, the end too; the client gets every token once.
#[tokio::test(flavor = "multi_thread")]
async fn a_turn_survives_its_bus() {
    let mut server = Server::start();
    let control = server.connect("c0").await;
    lease(&*control, "c0").await;
    let count = AtomicU32::new(0);
    let script = move |say: Say, _| {
        let first = count.fetch_add(1, Ordering::Relaxed) == 0;
        async move {
            say.accepted().await;
            if first {
                say.chunk(1, 0, &ids("abc")).await;
            } else {
                say.completed(1, &ids("abcdef")).await;
            }
        }
    };
    let owner = Owner::start(control, "c0", script).await;
    let (net, gateway) = (SimNet::new(1, Faults::default()), server.connect("g0").await);
    let world = World::on(net, gateway, |_| {}).await;
    assert_eq!(world.get("/health").await.0, 200);
    let response = world.post("/v1/chat/completions", &ask(true)).send().await.unwrap();
    server.kill();
    assert_eq!(world.get("/health").await.0, 503);
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    server.child = Server::spawn(server.port, &server.folder);
    assert_eq!(Streamed::read(response).await.text(), "abcdef");
    let submits = owner.submits.lock().unwrap();
    assert_eq!(submits[0].request, submits[1].request);
    assert_eq!(submits[1].answer_so_far, ids("abc"));
}
