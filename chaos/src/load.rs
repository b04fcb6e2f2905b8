//! Clients: each session sends turn after turn through the code of a gateway, and reports what it gets.

use crate::observed::{End, Observed, Observer, Right};
use crate::plan::{CONTEXT_MAX, PAGE_TOKENS, Talk};
use pinion_bus::Bus;
use pinion_gateway::metrics::Metrics;
use pinion_gateway::owners::LeaseOwners;
use pinion_gateway::turn::{Event, Reach, Turn};
use pinion_gpu_agent::world::{Dice, prompt};
use pinion_schemas::messages::Submit;
use pinion_schemas::subject::Subjects;
use pinion_schemas::trace_context::TraceContext;
use pinion_schemas::{Micros, RequestId, Sampling, SessionId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

/// Longest a turn may take.
pub const DEADLINE: Duration = Duration::from_mins(1);
/// Within this somebody must accept it.
const ACCEPT: Duration = Duration::from_secs(30);
/// Tokens of the prompt that sessions share: four pages.
const SHARED: u32 = 64;
/// Number of the prompt that they share.
const SHARED_NUMBER: u32 = 999_983;

/// What a gateway needs of its process.
pub fn reach(bus: Arc<dyn Bus>, subjects: Subjects) -> Arc<Reach> {
    Arc::new(Reach {
        owners: Arc::new(LeaseOwners::new(bus.clone())),
        bus,
        subjects,
        metrics: Arc::new(Metrics::default()),
        closing: CancellationToken::new(),
    })
}

/// One session, until `until`.
pub async fn talk(talk: Talk, reach: Arc<Reach>, until: Instant, observer: Observer) {
    let mut dice = Dice(talk.seed);
    sleep(talk.begins).await;
    let (mut turn, mut fresh, mut context) = (0, 0, Vec::new());
    while Instant::now() < until {
        if context.is_empty() {
            // A compaction, or a new conversation: another prompt.
            if talk.shares {
                context = prompt(SHARED_NUMBER, SHARED);
            }
            context.extend(prompt(
                number(&talk, fresh),
                dice.between(20, talk.prompt.into()) as u32,
            ));
        }
        let n = 1 + dice.between(0, talk.answer.into()) as u32;
        let one = One {
            request: RequestId(u128::from(dice.any()) << 64 | u128::from(dice.any())),
            turn,
            leaves_after: (dice.between(0, 100) < talk.cancels).then(|| dice.millis(0, 3_000)),
            reads_slowly: dice.between(0, 100) < talk.slow,
        };
        let answer = one.run(&talk, &reach, &context, n, &observer, &mut dice).await;
        turn += 1;
        fresh += 1;
        context.extend(answer.unwrap_or_default());
        context.extend(prompt(
            number(&talk, fresh),
            1 + dice.between(0, talk.append.into()) as u32,
        ));
        if context.len() as u32 > CONTEXT_MAX - talk.append - talk.answer {
            context.clear();
        }
        sleep(dice.millis(0, talk.pause)).await;
    }
}

/// What a session says for the `fresh`th time is like nothing else.
fn number(talk: &Talk, fresh: u32) -> u32 {
    talk.number * 10_007 + fresh + 1
}

/// One turn.
struct One {
    request: RequestId,
    turn: u32,
    leaves_after: Option<Duration>,
    reads_slowly: bool,
}

impl One {
    /// Follows it to its end; the answer, if there is one.
    async fn run(
        &self,
        talk: &Talk,
        reach: &Arc<Reach>,
        context: &[u32],
        n: u32,
        observer: &Observer,
        dice: &mut Dice,
    ) -> Option<Vec<u32>> {
        let name = format!("s{}", talk.number);
        let request = self.request;
        observer.see(Observed::Begun {
            request,
            session: name.clone(),
            turn: self.turn,
            right: Arc::new(Right::of(context, n, PAGE_TOKENS)),
            deadline: Micros(DEADLINE.as_micros() as u64),
        });
        let submit = Submit {
            request,
            session: SessionId::new(name).ok()?,
            class: talk.class,
            tenant: None,
            time_left: Micros::ZERO,
            prompt: context.to_vec(),
            max_new_tokens: n,
            sampling: Sampling::GREEDY,
            answer_so_far: Vec::new(),
            stream: String::new(),
        };
        let leaves = self.leaves_after.map(|after| Instant::now() + after);
        let trace = TraceContext {
            trace: request.0.max(1),
            span: 1,
            sampled: false,
        };
        let opened = Turn::open(reach.clone(), submit, trace, DEADLINE, ACCEPT).await;
        let end = match opened {
            Ok(mut turn) => self.follow(&mut turn, leaves, observer, dice).await,
            Err(error) => End::Failed(error.code),
        };
        let answer = if let End::Done(answer) = &end {
            Some(answer.clone())
        } else {
            None
        };
        observer.see(Observed::Ended { request, end });
        answer
    }

    async fn follow(&self, turn: &mut Turn, leaves: Option<Instant>, observer: &Observer, dice: &mut Dice) -> End {
        let request = self.request;
        loop {
            let next = match leaves {
                Some(at) => match timeout_at(at, turn.next()).await {
                    Ok(event) => event,
                    Err(_) => return End::Left,
                },
                None => turn.next().await,
            };
            match next {
                Event::Tokens(tokens) => observer.see(Observed::Tokens { request, tokens }),
                Event::Done(done) => return End::Done(done.answer),
                Event::Failed(error) => return End::Failed(error.code),
            }
            if self.reads_slowly {
                sleep(dice.millis(0, 400)).await;
            }
        }
    }
}
