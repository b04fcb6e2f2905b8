//! A client that follows one turn to its end, as the gateway does: it keeps what it has of the answer, asks again when all is
//! silent, and asks the next control node when the last one is not the owner or not there.

use pinion_bus::{Bus, Headers, Message};
use pinion_schemas::messages::{Accepted, Chunk, Completed, Failed, Probe, Submit};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::wire::{self, Schema};
use pinion_schemas::{AbortReason, Class, Micros, Path, RequestId, SessionId, WorkerId};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Longest a turn of these tests may take.
const DEADLINE: Duration = Duration::from_mins(1);
/// How long a control node may take to accept a turn.
const ACCEPT_PATIENCE: Duration = Duration::from_secs(1);
/// Rest before the next control node is asked.
const REST: Duration = Duration::from_millis(100);
/// First silence after which an accepted turn is submitted again; it doubles each time.
const SILENCE: Duration = Duration::from_secs(2);
/// What a turn may take beyond its deadline before the test says that it hangs.
const LENIENCE: Duration = Duration::from_secs(30);

/// How a turn was served.
#[derive(Debug)]
pub struct Answer {
    /// The path its last D took.
    pub path: Path,
    /// The whole answer.
    pub tokens: Vec<u32>,
    /// Prompt tokens found in cache.
    pub cached: u32,
}

/// How a turn ended.
pub type End = Result<Answer, AbortReason>;

/// Whoever sends turns, over one endpoint. Clones number their requests together.
#[derive(Clone)]
pub struct Clients {
    bus: Arc<dyn Bus>,
    subjects: Subjects,
    controls: Vec<WorkerId>,
    requests: Arc<AtomicU64>,
}

impl Clients {
    /// Clients that know of these control nodes.
    pub fn new(bus: Arc<dyn Bus>, subjects: Subjects, controls: Vec<WorkerId>) -> Self {
        Self {
            bus,
            subjects,
            controls,
            requests: Arc::default(),
        }
    }

    /// Sends a turn, and gives back a future of its end.
    pub fn submit(
        &self,
        class: Class,
        session: &str,
        prompt: Vec<u32>,
        n: u32,
    ) -> impl Future<Output = End> + Send + use<> {
        let request = RequestId(u128::from(self.requests.fetch_add(1, Ordering::Relaxed)) + 1);
        let submit = Submit {
            request,
            session: SessionId::new(session).unwrap(),
            class,
            tenant: None,
            time_left: Micros(DEADLINE.as_micros() as u64),
            prompt,
            max_new_tokens: n,
            sampling: pinion_schemas::Sampling::GREEDY,
            answer_so_far: Vec::new(),
            stream: self.subjects.stream(request).as_str().to_owned(),
        };
        let to = |name| self.subjects.worker(Kind::Router, name, "submit").as_str().to_owned();
        let turn = Turn {
            bus: self.bus.clone(),
            controls: self.controls.iter().map(to).collect(),
            at: 0,
            submit,
        };
        turn.run()
    }
}

/// A turn on its way.
struct Turn {
    bus: Arc<dyn Bus>,
    /// Where each control node takes turns.
    controls: Vec<String>,
    /// Which of them is asked.
    at: usize,
    submit: Submit,
}

impl Turn {
    /// Sends it, again and again if need be, and follows its stream.
    async fn run(mut self) -> End {
        let mut stream = self.bus.subscribe(&self.submit.stream, None).await.unwrap();
        let begun = Instant::now();
        let mut silence = SILENCE;
        loop {
            assert!(begun.elapsed() < DEADLINE + LENIENCE, "the turn hangs");
            self.submit.time_left = Micros(DEADLINE.saturating_sub(begun.elapsed()).as_micros() as u64);
            let patience = match self.ask().await {
                Ok(true) => {
                    silence *= 2;
                    silence / 2
                }
                Ok(false) => {
                    self.at = (self.at + 1) % self.controls.len();
                    REST
                }
                Err(reason) => return Err(reason),
            };
            while let Ok(message) = timeout(patience, stream.next()).await {
                match self.heard(&message.expect("the bus is gone")) {
                    Some(Err(AbortReason::Superseded)) => break,
                    Some(end) => return end,
                    None => silence = SILENCE,
                }
            }
        }
    }

    /// Submits to one control node; whether it accepted. A lost exchange is asked again: the request's id makes that harmless.
    async fn ask(&self) -> Result<bool, AbortReason> {
        let payload = wire::encode(&self.submit).unwrap().into();
        let asked = self
            .bus
            .request(&self.controls[self.at], Headers::new(), payload, ACCEPT_PATIENCE);
        let Ok(message) = asked.await else { return Ok(false) };
        if wire::decode::<Accepted>(&message.payload).is_ok() {
            return Ok(true);
        }
        match wire::decode::<Failed>(&message.payload).unwrap().reason {
            AbortReason::Superseded => Ok(false),
            reason => Err(reason),
        }
    }

    /// Takes one message of the stream. Tokens may be repeated or missing in chunks, never wrong (I2).
    fn heard(&mut self, message: &Message) -> Option<End> {
        let tokens = &mut self.submit.answer_so_far;
        match wire::schema_of(&message.payload) {
            Some(Chunk::ID) => {
                let chunk: Chunk = wire::decode(&message.payload).unwrap();
                if let Some(known) = tokens.len().checked_sub(chunk.offset as usize) {
                    tokens.extend(chunk.tokens.get(known..).unwrap_or_default());
                }
                None
            }
            Some(Completed::ID) => {
                let done: Completed = wire::decode(&message.payload).unwrap();
                assert!(
                    done.answer.starts_with(tokens),
                    "the stream is not a prefix of the answer"
                );
                Some(Ok(Answer {
                    path: done.path,
                    tokens: done.answer,
                    cached: done.cached_tokens,
                }))
            }
            Some(Failed::ID) => Some(Err(wire::decode::<Failed>(&message.payload).unwrap().reason)),
            // Its owner asks whether anybody listens.
            Some(Probe::ID) => None,
            other => panic!("unexpected schema {other:?}"),
        }
    }
}
