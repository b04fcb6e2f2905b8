//! A client that checks what it gets: every token, as it comes, against what the simulated engine must write.

use futures::StreamExt as _;
use pinion_gpu_agent::engine::sim::continuation;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Token ids of the clusters under test.
pub const VOCAB: u32 = 50_000;

/// What the engine must write after `context`, computed without any engine.
pub fn expected(context: &[u32], n: usize) -> Vec<u32> {
    continuation(context, n, VOCAB)
}

/// Tokens that no two sessions share.
pub fn prompt(session: u32, from: u32, length: u32) -> Vec<u32> {
    (from..from + length)
        .map(|i| (session.wrapping_mul(7_919) ^ i.wrapping_mul(31)) % VOCAB)
        .collect()
}

/// What became of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// All tokens came, and they were the right ones.
    Completed {
        /// How it was served.
        path: String,
    },
    /// It was not accepted: the client was told to try again.
    Refused(String),
    /// It failed after it was accepted, with this error.
    Failed(String),
    /// A token was wrong, lost or repeated, or the stream ended without an end.
    Wrong(String),
}

/// One turn as the client saw it.
#[derive(Clone, Debug)]
pub struct Record {
    /// When it was sent.
    pub begun: Instant,
    /// When tokens came.
    pub arrivals: Vec<Instant>,
    /// When it ended.
    pub ended: Instant,
    /// How.
    pub end: End,
}

impl Record {
    /// The longest wait for the next token that began or went on after `fault` and began before `until`.
    pub fn longest_wait(&self, fault: Instant, until: Instant) -> Duration {
        let times: Vec<Instant> = [self.begun]
            .into_iter()
            .chain(self.arrivals.iter().copied())
            .chain([self.ended])
            .collect();
        times
            .windows(2)
            .filter(|w| w[1] > fault && w[0] < until)
            .map(|w| w[1].saturating_duration_since(w[0].max(fault)))
            .max()
            .unwrap_or_default()
    }
}

/// How far a conversation is, for whoever waits for a moment to break something.
#[derive(Debug, Default)]
pub struct Progress {
    turns: AtomicUsize,
    tokens: AtomicUsize,
}

impl Progress {
    /// Turns completed, and tokens of the running one.
    pub fn now(&self) -> (usize, usize) {
        (self.turns.load(Ordering::SeqCst), self.tokens.load(Ordering::SeqCst))
    }
}

/// A session and what was said in it.
pub struct Talk {
    /// Its name.
    pub session: String,
    number: u32,
    /// The whole context so far.
    pub context: Vec<u32>,
    /// How far it is.
    pub progress: Arc<Progress>,
    /// Its turns.
    pub records: Vec<Record>,
    url: String,
    http: reqwest::Client,
}

impl Talk {
    /// A session that begins with `length` tokens.
    pub fn new(url: &str, number: u32, length: u32) -> Self {
        Self {
            session: format!("talk-{number}"),
            number,
            context: prompt(number, 0, length),
            progress: Arc::default(),
            records: Vec::new(),
            url: url.to_owned(),
            http: reqwest::Client::new(),
        }
    }

    /// One turn of `n` tokens, and `append` more tokens for the next one. Refused, it is tried again a few times.
    pub async fn turn(&mut self, n: usize, append: u32) -> End {
        for _ in 0..5 {
            let record = self.once(n).await;
            let end = record.end.clone();
            self.records.push(record);
            self.progress.tokens.store(0, Ordering::SeqCst);
            match &end {
                End::Completed { .. } => {
                    self.context.extend(expected(&self.context, n));
                    self.context
                        .extend(prompt(self.number, self.context.len() as u32, append));
                    self.progress.turns.fetch_add(1, Ordering::SeqCst);
                    return end;
                }
                End::Refused(_) => tokio::time::sleep(Duration::from_millis(500)).await,
                End::Failed(_) | End::Wrong(_) => return end,
            }
        }
        End::Refused("five times".to_owned())
    }

    /// Begins a turn, reads some of its tokens and goes away.
    ///
    /// # Panics
    /// If there is no answer at all.
    pub async fn leave_after(&mut self, n: usize, tokens: usize) {
        let begun = Instant::now();
        let (record, progress) = (self.once(n), self.progress.clone());
        tokio::select! {
            record = record => panic!("the turn has ended: {record:?}"),
            () = async {
                while progress.now().1 < tokens || begun.elapsed() < Duration::from_millis(300) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            } => {}
        }
        self.progress.tokens.store(0, Ordering::SeqCst);
    }

    async fn once(&self, n: usize) -> Record {
        let (begun, mut arrivals) = (Instant::now(), Vec::new());
        let end = match self.ask(n, &mut arrivals).await {
            Ok(end) | Err(end) => end,
        };
        Record {
            begun,
            arrivals,
            ended: Instant::now(),
            end,
        }
    }

    async fn ask(&self, n: usize, arrivals: &mut Vec<Instant>) -> Result<End, End> {
        let want = expected(&self.context, n);
        let body = json!({
            "model": "pinion-sim", "prompt": self.context, "max_tokens": n, "stream": true, "return_token_ids": true,
        });
        let wrong = |what: String| End::Wrong(format!("{}: {what}", self.session));
        let response = self
            .http
            .post(format!("{}/v1/completions", self.url))
            .header("x-session-id", &self.session)
            .body(body.to_string())
            .send()
            .await
            .map_err(|error| wrong(format!("no answer: {error}")))?;
        let status = response.status();
        if !status.is_success() {
            let text = response.text().await.unwrap_or_default();
            let error: Value = serde_json::from_str(&text).unwrap_or_default();
            return Err(match error["error"]["code"].as_str() {
                Some("no-control" | "bus-down" | "too_many_turns") => End::Refused(text),
                _ => End::Failed(format!("{status}: {text}")),
            });
        }
        let (mut bytes, mut line, mut have, mut end) = (response.bytes_stream(), Vec::new(), 0, None);
        while let Some(part) = bytes.next().await {
            let part = part.map_err(|error| wrong(format!("after {have} tokens: {error}")))?;
            for byte in part {
                if byte != b'\n' {
                    line.push(byte);
                    continue;
                }
                let text = String::from_utf8_lossy(&std::mem::take(&mut line)).into_owned();
                let Some(data) = text.strip_prefix("data: ") else {
                    continue;
                };
                if data == "[DONE]" {
                    return end.ok_or_else(|| wrong(format!("[DONE] after {have} tokens, without an end")));
                }
                let event: Value = serde_json::from_str(data).map_err(|e| wrong(format!("{e}: {data}")))?;
                if event["error"].is_object() {
                    return Err(End::Failed(format!("after {have} tokens: {}", event["error"])));
                }
                let tokens: Vec<u32> =
                    serde_json::from_value(event["choices"][0]["token_ids"].clone()).unwrap_or_default();
                if !tokens.is_empty() {
                    if want.get(have..have + tokens.len()) != Some(&tokens[..]) {
                        return Err(wrong(format!("at token {have} of {n} came {tokens:?}")));
                    }
                    have += tokens.len();
                    arrivals.push(Instant::now());
                    self.progress.tokens.store(have, Ordering::SeqCst);
                }
                if let Some(path) = event["pinion"]["path"].as_str() {
                    if have != n {
                        return Err(wrong(format!("an end after {have} tokens of {n}")));
                    }
                    end = Some(End::Completed { path: path.to_owned() });
                }
            }
        }
        Err(wrong(format!("the stream broke off after {have} tokens")))
    }
}
