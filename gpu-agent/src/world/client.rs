//! A client that follows one turn to its end, as the gateway does: it keeps what it has of the answer, asks again when all is
//! silent, and asks the next control node when the last one is not the owner or not there.

use pinion_bus::{Bus, BusError, Headers, Message};
use pinion_schemas::messages::{Accepted, Chunk, Completed, Failed, Probe, Submit};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::wire::{self, Schema};
use pinion_schemas::{AbortReason, Class, IdError, Micros, Path, RequestId, Sampling, SessionId, WorkerId};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Longest a turn may take, unless its [`Ask`] says otherwise.
const DEADLINE: Duration = Duration::from_mins(1);
/// How long a control node may take to accept a turn.
const ACCEPT_PATIENCE: Duration = Duration::from_secs(1);
/// Rest before the next control node is asked.
const REST: Duration = Duration::from_millis(100);
/// First silence after which an accepted turn is submitted again; it doubles each time.
const SILENCE: Duration = Duration::from_secs(2);
/// What a turn may take beyond its deadline before it is said to hang.
const LENIENCE: Duration = Duration::from_secs(30);

/// A turn to be served.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Service class.
    pub class: Class,
    /// Its session.
    pub session: String,
    /// The whole context.
    pub prompt: Vec<u32>,
    /// Tokens wanted.
    pub max_new_tokens: u32,
    /// Longest it may take.
    pub deadline: Duration,
}

/// How a turn was served.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The path its last D took.
    pub path: Path,
    /// The whole answer.
    pub tokens: Vec<u32>,
    /// Prompt tokens found in cache.
    pub cached: u32,
    /// Time to the first token.
    pub ttft: Duration,
    /// Time to the end.
    pub took: Duration,
}

/// Why a turn has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TurnError {
    /// Its owner says so.
    #[error("the turn failed: {0}")]
    Failed(AbortReason),
    /// No end came, long after its deadline (breaks I1).
    #[error("no end came within {0:?}")]
    Hangs(Duration),
    /// The end does not continue what was streamed (breaks I2).
    #[error("the answer changed after {streamed} tokens")]
    Changed {
        /// Tokens the client had.
        streamed: usize,
    },
    /// The stream carried something else.
    #[error("a message on the turn's stream is none of its: {0}")]
    Foreign(String),
    /// A session cannot be called that.
    #[error(transparent)]
    Session(#[from] IdError),
    /// The bus does not do what it must.
    #[error(transparent)]
    Bus(#[from] BusError),
}

/// How a turn ended.
pub type End = Result<Answer, TurnError>;

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
    ///
    /// # Errors
    /// The future gives [`TurnError`].
    pub fn submit(
        &self,
        class: Class,
        session: &str,
        prompt: Vec<u32>,
        n: u32,
    ) -> impl Future<Output = End> + Send + use<> {
        self.ask(Ask {
            class,
            session: session.to_owned(),
            prompt,
            max_new_tokens: n,
            deadline: DEADLINE,
        })
    }

    /// Sends a turn with all its choices, and gives back a future of its end.
    ///
    /// # Errors
    /// The future gives [`TurnError`].
    pub fn ask(&self, ask: Ask) -> impl Future<Output = End> + Send + use<> {
        let request = RequestId(u128::from(self.requests.fetch_add(1, Ordering::Relaxed)) + 1);
        let session = SessionId::new(&*ask.session);
        let stream = self.subjects.stream(request).as_str().to_owned();
        let to = |name| self.subjects.worker(Kind::Router, name, "submit").as_str().to_owned();
        let (bus, controls) = (self.bus.clone(), self.controls.iter().map(to).collect());
        async move {
            let submit = Submit {
                request,
                session: session?,
                class: ask.class,
                tenant: None,
                time_left: Micros::ZERO,
                prompt: ask.prompt,
                max_new_tokens: ask.max_new_tokens,
                sampling: Sampling::GREEDY,
                answer_so_far: Vec::new(),
                stream,
            };
            let turn = Turn {
                bus,
                controls,
                at: 0,
                submit,
                deadline: ask.deadline,
                begun: Instant::now(),
                first: None,
            };
            turn.run().await
        }
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
    deadline: Duration,
    begun: Instant,
    /// How long the first token took.
    first: Option<Duration>,
}

impl Turn {
    /// Sends it, again and again if need be, and follows its stream.
    async fn run(mut self) -> End {
        let mut stream = self.bus.subscribe(&self.submit.stream, None).await?;
        let mut silence = SILENCE;
        loop {
            if self.begun.elapsed() >= self.deadline + LENIENCE {
                return Err(TurnError::Hangs(self.begun.elapsed()));
            }
            let left = self.deadline.saturating_sub(self.begun.elapsed());
            self.submit.time_left = Micros(left.as_micros() as u64);
            let patience = if self.submitted().await? {
                silence *= 2;
                silence / 2
            } else {
                self.at = (self.at + 1) % self.controls.len().max(1);
                REST
            };
            while let Ok(message) = timeout(patience, stream.next()).await {
                let message = message.ok_or(BusError::Disconnected)?;
                match self.heard(&message)? {
                    Heard::Gone => break,
                    Heard::End(answer) => return Ok(*answer),
                    Heard::Life => silence = SILENCE,
                }
            }
        }
    }

    /// Submits to one control node; whether it accepted. A lost exchange is asked again: the request's id makes that harmless.
    async fn submitted(&self) -> Result<bool, TurnError> {
        let Some(control) = self.controls.get(self.at) else {
            return Ok(false);
        };
        let payload = wire::encode(&self.submit).map_err(foreign)?.into();
        let asked = self.bus.request(control, Headers::new(), payload, ACCEPT_PATIENCE);
        let Ok(message) = asked.await else { return Ok(false) };
        if wire::decode::<Accepted>(&message.payload).is_ok() {
            return Ok(true);
        }
        match wire::decode::<Failed>(&message.payload).map_err(foreign)?.reason {
            AbortReason::Superseded => Ok(false),
            reason => Err(TurnError::Failed(reason)),
        }
    }

    /// Takes one message of the stream. Tokens may be repeated or missing in chunks, never wrong (I2).
    fn heard(&mut self, message: &Message) -> Result<Heard, TurnError> {
        let tokens = &mut self.submit.answer_so_far;
        match wire::schema_of(&message.payload) {
            Some(Chunk::ID) => {
                let chunk: Chunk = wire::decode(&message.payload).map_err(foreign)?;
                if let Some(known) = tokens.len().checked_sub(chunk.offset as usize) {
                    tokens.extend(chunk.tokens.get(known..).unwrap_or_default());
                    self.first.get_or_insert_with(|| self.begun.elapsed());
                }
                Ok(Heard::Life)
            }
            Some(Completed::ID) => {
                let done: Completed = wire::decode(&message.payload).map_err(foreign)?;
                if !done.answer.starts_with(tokens) {
                    let streamed = tokens.len();
                    return Err(TurnError::Changed { streamed });
                }
                let took = self.begun.elapsed();
                Ok(Heard::End(Box::new(Answer {
                    path: done.path,
                    tokens: done.answer,
                    cached: done.cached_tokens,
                    ttft: self.first.unwrap_or(took),
                    took,
                })))
            }
            Some(Failed::ID) => match wire::decode::<Failed>(&message.payload).map_err(foreign)?.reason {
                AbortReason::Superseded => Ok(Heard::Gone),
                reason => Err(TurnError::Failed(reason)),
            },
            // Its owner asks whether anybody listens.
            Some(Probe::ID) => Ok(Heard::Life),
            other => Err(TurnError::Foreign(format!("schema {other:?}"))),
        }
    }
}

/// What a message of the stream says.
enum Heard {
    /// Somebody works on the turn.
    Life,
    /// Its owner has lost it: ask the next.
    Gone,
    /// All of the answer is here.
    End(Box<Answer>),
}

fn foreign(error: impl std::fmt::Display) -> TurnError {
    TurnError::Foreign(error.to_string())
}
