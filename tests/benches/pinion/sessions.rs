//! What idle sessions cost: the sessions role driven as the bus would, one completed direct turn per session.

use crate::alloc;
use crate::table::{Row, Section};
use pinion_actors::effect::{Effect, Effects, Input, Local, Role, RouteAnswer};
use pinion_actors::sessions::{Sessions, SessionsConfig};
use pinion_bus::{Headers, Message};
use pinion_core::session::{Offer, Ranking};
use pinion_schemas::messages::{Completed, Run, Started, Submit};
use pinion_schemas::shard::SHARDS;
use pinion_schemas::wire;
use pinion_schemas::{Class, ClusterId, Epoch, Micros, Path, RequestId, SessionId, WorkerId};
use std::time::{Duration, Instant};

const SUBJECT: &str = "pinion.bench.router.control-0.submit";

fn message(payload: Vec<u8>) -> Message {
    Message {
        subject: SUBJECT.to_owned(),
        reply: Some("_INBOX.bench".to_owned()),
        headers: Headers::new(),
        payload: payload.into(),
    }
}

fn role() -> Sessions {
    let config = SessionsConfig {
        cluster: ClusterId::new("bench").expect("a name"),
        control: WorkerId::new("control-0").expect("a name"),
        page_tokens: 64,
    };
    let mut sessions = Sessions::new(config);
    for shard in 0..SHARDS {
        let owned = Local::Shard(shard, Some(Epoch(1)));
        sessions.handle(Micros(1), Input::Local(owned), &mut Effects::default());
    }
    sessions
}

/// Session number `i` with one completed turn of 200 tokens.
fn serve(sessions: &mut Sessions, i: u64, decode: &WorkerId) {
    let (now, request) = (Micros(i + 2), RequestId(u128::from(i) << 64 | 7));
    let submit = Submit {
        request,
        session: SessionId::new(format!("{i:08x}-6d0a-4f8e-9a53-1c7f7b0e0001")).expect("an id"),
        class: Class::Interactive,
        tenant: None,
        time_left: Micros::from_secs(600),
        prompt: vec![7; 200],
        max_new_tokens: 4,
        answer_so_far: Vec::new(),
        stream: format!("pinion.bench.turn.{:032x}.stream", request.0),
    };
    let mut out = Effects::default();
    let mut tell = |input: Input| {
        sessions.handle(now, input, &mut out);
        std::mem::take(&mut out).0
    };
    let first = tell(Input::Message(message(wire::encode(&submit).expect("a submit"))));
    let attempt = first.iter().find_map(|e| match e {
        Effect::Tell(_, Local::RouteAsk(ask)) => Some(ask.attempt),
        _ => None,
    });
    let answer = RouteAnswer {
        session: submit.session,
        request,
        attempt: attempt.expect("a question to the router"),
        decode: Ranking {
            offers: vec![Offer {
                worker: decode.clone(),
                not_before: Micros::ZERO,
            }],
            pin_gone: None,
            workers: 1,
            rejects_max: 3,
        },
        prefill: Vec::new(),
    };
    let asked = tell(Input::Local(Local::RouteAnswer(answer)));
    let (token, run) = asked
        .iter()
        .find_map(|e| match e {
            Effect::Request { token, payload, .. } => Some((*token, wire::decode::<Run>(payload).expect("a run"))),
            _ => None,
        })
        .expect("a run");
    let started = Started {
        request,
        attempt: run.attempt,
        resident_pages: 0,
        pause_millis: 0,
    };
    let result = Ok(message(wire::encode(&started).expect("a started")));
    tell(Input::Reply { token, result });
    let done = Completed {
        request,
        attempt: run.attempt,
        path: Path::Direct,
        context_tokens: 204,
        committed_tokens: 192,
        tip: None,
        cached_tokens: 0,
        why: None,
        answer: vec![1; 4],
    };
    let ended = tell(Input::Message(message(wire::encode(&done).expect("a completed"))));
    assert!(
        ended.iter().any(|e| matches!(e, Effect::Put(..))),
        "the turn is committed"
    );
}

/// Measures.
pub fn run() -> Vec<Row> {
    let decode = WorkerId::new("decode-0").expect("a name");
    let mut rows = Vec::new();
    let mut sessions = role();
    let (mut made, mut heap, mut resident, mut spent) = (0, 0, 0, Duration::ZERO);
    for target in [10_000, 100_000] {
        eprintln!("sessions: {target}");
        let (rss, begun) = (alloc::resident("self"), Instant::now());
        let (bytes, ()) = alloc::left_by(|| (made..target).for_each(|i| serve(&mut sessions, i, &decode)));
        spent += begun.elapsed();
        heap += bytes;
        resident += alloc::resident("self").saturating_sub(rss);
        made = target;
        let per = |bytes: f64| bytes / target as f64;
        rows.push(
            Row::value(
                format!("heap per idle session, {target} sessions"),
                "B",
                per(heap as f64),
            )
            .goal(4096.0, None),
        );
        rows.push(
            Row::value(
                format!("RSS per idle session, {target} sessions"),
                "B",
                per(resident as f64),
            )
            .goal(4096.0, None),
        );
        rows.push(Row::value(
            format!("time to make {target}, a whole turn each"),
            "s",
            spent.as_secs_f64(),
        ));
    }
    rows
}

/// Title and method of the section.
pub fn section(rows: Vec<Row>) -> Section {
    Section {
        title: "memory of idle sessions",
        how: "sessions role in this process; \"real\": the control process under `pinion up`, turns over HTTP"
            .to_owned(),
        rows,
    }
}
