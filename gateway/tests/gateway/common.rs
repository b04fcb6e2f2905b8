//! A gateway on a simulated bus in real time (it has real sockets), and control nodes that follow a script.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt;
use pinion_bus::sim::{Faults, SimNet};
use pinion_bus::{Bus, Headers, Message};
use pinion_gateway::tokenizer::{ByteTokenizer, Tokenizer};
use pinion_gateway::{GatewayConfig, serve};
use pinion_schemas::messages::{Accepted, Cancel, Chunk, Completed, Failed, Probe, ProbeAck, Submit};
use pinion_schemas::shard::{SHARDS, lease_key};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{AbortReason, ClusterId, Epoch, Path, WorkerId, wire};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};

pub const MODEL: &str = "sim";
pub const VOCAB: u32 = 1_000;

pub fn subjects() -> Subjects {
    Subjects::new(&ClusterId::new("test").unwrap())
}

/// Gives all shards to `owner`.
pub async fn lease(bus: &dyn Bus, owner: &str) {
    for shard in 0..SHARDS {
        let value = json!({"owner": owner, "epoch": 1}).to_string().into();
        let key = lease_key(shard);
        match bus.kv_get(&key).await.unwrap() {
            Some(entry) => bus.kv_update(&key, value, entry.revision).await.unwrap(),
            None => bus.kv_create(&key, value).await.unwrap(),
        };
    }
}

/// A gateway and the network it is on.
pub struct World {
    pub net: SimNet,
    pub address: SocketAddr,
    pub client: reqwest::Client,
    /// Ends the gateway; dropped, too.
    pub stop: DropGuard,
    pub server: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl World {
    pub async fn start() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut GatewayConfig)) -> Self {
        let net = SimNet::new(1, Faults::default());
        let bus = Arc::new(net.endpoint("g0"));
        Self::on(net, bus, change).await
    }

    /// A gateway of a model with its own tokenizer.
    pub async fn of_model(tokenizer: Arc<dyn Tokenizer>) -> Self {
        let net = SimNet::new(1, Faults::default());
        let bus = Arc::new(net.endpoint("g0"));
        Self::serving(net, bus, tokenizer, |_| {}).await
    }

    /// A gateway on another bus; then `net` only serves the helpers.
    pub async fn on(net: SimNet, bus: Arc<dyn Bus>, change: impl FnOnce(&mut GatewayConfig)) -> Self {
        Self::serving(net, bus, Arc::new(ByteTokenizer::new(VOCAB)), change).await
    }

    async fn serving(
        net: SimNet,
        bus: Arc<dyn Bus>,
        tokenizer: Arc<dyn Tokenizer>,
        change: impl FnOnce(&mut GatewayConfig),
    ) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (cluster, id) = (ClusterId::new("test").unwrap(), WorkerId::new("g0").unwrap());
        let mut config = GatewayConfig::new(address, cluster, id, MODEL);
        config.request_timeout = Duration::from_secs(20);
        change(&mut config);
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(config, tokenizer, bus, listener, stop.clone()));
        let client = reqwest::Client::new();
        Self {
            net,
            address,
            client,
            stop: stop.drop_guard(),
            server,
        }
    }

    pub fn post(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        self.raw(path, body.to_string())
    }

    pub fn raw(&self, path: &str, body: impl Into<reqwest::Body>) -> reqwest::RequestBuilder {
        self.client.post(format!("http://{}{path}", self.address)).body(body)
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        let got = self
            .client
            .get(format!("http://{}{path}", self.address))
            .send()
            .await
            .unwrap();
        (got.status().as_u16(), got.text().await.unwrap())
    }

    /// Gives all shards to `owner`.
    pub async fn lease(&self, owner: &str) {
        lease(&self.net.endpoint("kv"), owner).await;
    }

    /// A control node that owns everything and follows `script`.
    pub async fn owner<F, R>(&self, name: &str, script: F) -> Owner
    where
        F: Fn(Say, Submit) -> R + Send + Sync + 'static,
        R: Future<Output = ()> + Send,
    {
        let owner = Owner::start(Arc::new(self.net.endpoint(name)), name, script).await;
        self.lease(name).await;
        owner
    }
}

/// A control node; dropped or killed, it subscribes to nothing any more.
pub struct Owner {
    pub submits: Arc<Mutex<Vec<Submit>>>,
    pub cancels: Arc<Mutex<Vec<Cancel>>>,
    pub probes: Arc<Mutex<u32>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Owner {
    pub fn kill(&self) {
        self.task.abort();
    }

    pub async fn start<F, R>(bus: Arc<dyn Bus>, name: &str, script: F) -> Self
    where
        F: Fn(Say, Submit) -> R + Send + Sync + 'static,
        R: Future<Output = ()> + Send,
    {
        let id = WorkerId::new(name).unwrap();
        let hear = async |verb| {
            let subject = subjects().worker(Kind::Router, &id, verb);
            bus.subscribe(subject.as_str(), None).await.unwrap()
        };
        let (mut submit, mut cancel, mut probe) = (hear("submit").await, hear("cancel").await, hear("probe").await);
        let submits: Arc<Mutex<Vec<Submit>>> = Arc::default();
        let cancels: Arc<Mutex<Vec<Cancel>>> = Arc::default();
        let probes: Arc<Mutex<u32>> = Arc::default();
        let (s, c, p) = (Arc::clone(&submits), Arc::clone(&cancels), Arc::clone(&probes));
        let task = tokio::spawn(async move {
            // The scripts run in this task, so that they die with it.
            let mut scripts = futures::stream::FuturesUnordered::new();
            loop {
                tokio::select! {
                    Some(message) = submit.next() => {
                        let asked: Submit = wire::decode(&message.payload).unwrap();
                        s.lock().unwrap().push(asked.clone());
                        scripts.push(script(Say::new(Arc::clone(&bus), message, &asked), asked));
                    }
                    Some(message) = cancel.next() => {
                        c.lock().unwrap().push(wire::decode(&message.payload).unwrap());
                    }
                    Some(message) = probe.next() => {
                        *p.lock().unwrap() += 1;
                        let nonce = wire::decode::<Probe>(&message.payload).unwrap().nonce;
                        let ack = wire::encode(&ProbeAck { nonce, epoch: Epoch(1) }).unwrap();
                        bus.respond(&message, Headers::new(), ack.into()).await.unwrap();
                    }
                    Some(()) = scripts.next() => {}
                }
            }
        });
        Self {
            submits,
            cancels,
            probes,
            task,
        }
    }
}

/// What a script can say about its turn.
#[derive(Clone)]
pub struct Say {
    bus: Arc<dyn Bus>,
    message: Message,
    asked: Submit,
}

impl Say {
    fn new(bus: Arc<dyn Bus>, message: Message, asked: &Submit) -> Self {
        Self {
            bus,
            message,
            asked: asked.clone(),
        }
    }

    async fn stream<T>(&self, bytes: Result<Vec<u8>, T>)
    where
        T: std::fmt::Debug,
    {
        let payload = bytes.unwrap().into();
        self.bus
            .publish(&self.asked.stream, Headers::new(), payload)
            .await
            .unwrap();
    }

    pub async fn accepted(&self) {
        let reply = Accepted {
            request: self.asked.request,
            epoch: Epoch(1),
            waiting: 0,
        };
        let payload = wire::encode(&reply).unwrap().into();
        self.bus.respond(&self.message, Headers::new(), payload).await.unwrap();
    }

    fn failure(&self, reason: AbortReason) -> Vec<u8> {
        let failed = Failed {
            request: self.asked.request,
            reason,
            retry_after_millis: 1_500,
        };
        wire::encode(&failed).unwrap()
    }

    pub async fn refused(&self, reason: AbortReason) {
        let payload = self.failure(reason).into();
        self.bus.respond(&self.message, Headers::new(), payload).await.unwrap();
    }

    pub async fn failed(&self, reason: AbortReason) {
        self.stream(Ok::<_, ()>(self.failure(reason))).await;
    }

    pub async fn chunk(&self, attempt: u64, offset: usize, tokens: &[u32]) {
        let chunk = Chunk {
            request: self.asked.request,
            attempt,
            offset: offset as u32,
            tokens: tokens.to_vec(),
        };
        self.stream(wire::encode(&chunk)).await;
    }

    pub async fn completed(&self, attempt: u64, answer: &[u32]) {
        let end = Completed {
            request: self.asked.request,
            attempt,
            path: Path::Direct,
            why: None,
            context_tokens: (self.asked.prompt.len() + answer.len()) as u32,
            committed_tokens: 0,
            tip: None,
            cached_tokens: 7,
            answer: answer.to_vec(),
        };
        self.stream(wire::encode(&end)).await;
    }

    /// Accepts, says `answer` token by token, completes.
    pub async fn all(&self, answer: &[u32]) {
        self.accepted().await;
        for (offset, token) in answer.iter().enumerate() {
            self.chunk(1, offset, &[*token]).await;
        }
        self.completed(1, answer).await;
    }
}

pub fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The data of a stream's events, and how many comments came between.
pub struct Streamed {
    pub events: Vec<String>,
    pub comments: usize,
}

impl Streamed {
    pub async fn read(response: reqwest::Response) -> Self {
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let (mut bytes, mut body) = (response.bytes_stream(), Vec::new());
        while let Some(next) = bytes.next().await {
            body.extend(next.unwrap());
        }
        let body = String::from_utf8(body).unwrap();
        let (mut events, mut comments) = (Vec::new(), 0);
        for line in body.lines() {
            match line.strip_prefix("data: ") {
                Some(data) => events.push(data.to_owned()),
                None => comments += usize::from(line.starts_with(':')),
            }
        }
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{body}");
        Self { events, comments }
    }

    pub fn json(&self) -> Vec<Value> {
        let data = &self.events[..self.events.len() - 1];
        data.iter().map(|d| serde_json::from_str(d).unwrap()).collect()
    }

    pub fn deltas(&self) -> Vec<String> {
        let text = |v: &Value| {
            let choice = &v["choices"][0];
            let text = choice["delta"]["content"].as_str().or(choice["text"].as_str());
            text.unwrap_or_default().to_owned()
        };
        self.json().iter().map(text).filter(|t| !t.is_empty()).collect()
    }

    pub fn text(&self) -> String {
        self.deltas().concat()
    }

    /// The chunk that ends the answer.
    pub fn last(&self) -> Value {
        let ended = |v: &Value| v["choices"][0]["finish_reason"].is_string();
        self.json().into_iter().find(ended).unwrap()
    }
}

pub fn ask(stream: bool) -> Value {
    json!({"model": MODEL, "stream": stream, "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]})
}

/// Waits until `what` holds, at most two seconds.
pub async fn soon(what: impl Fn() -> bool) -> Duration {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < Duration::from_secs(2), "it did not come");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}
