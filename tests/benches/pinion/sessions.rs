//! What idle sessions cost: the sessions role driven as the bus would, with completed direct turns.

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
use std::time::Instant;

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
        costs: pinion_core::plan::Costs {
            page_tokens: 64,
            page_bytes: 6_291_456,
            prefill_tokens_per_s: 25_000,
            link_bytes_per_s: 2_500_000_000,
            direct_append_tokens_max: 8_192,
        },
        birth: Epoch(1),
        backups: pinion_schemas::BackupTargets::LastPrefill,
    };
    let mut sessions = Sessions::new(config);
    for shard in 0..SHARDS {
        let owned = Local::Shard(shard, Some(Epoch(1)));
        sessions.handle(Micros(1), Input::Local(owned), &mut Effects::default());
    }
    sessions
}

/// Turn number `turn` of session number `i`: 200 tokens, completed.
fn serve(sessions: &mut Sessions, i: u64, turn: u64, decode: &WorkerId) {
    let (now, request) = (
        Micros(i + 2 + 1_000_000 * turn),
        RequestId(u128::from(i) << 64 | u128::from(turn)),
    );
    let submit = Submit {
        request,
        session: SessionId::new(format!("{i:08x}-6d0a-4f8e-9a53-1c7f7b0e0001")).expect("an id"),
        class: Class::Interactive,
        tenant: None,
        time_left: Micros::from_secs(600),
        prompt: vec![7; 200],
        max_new_tokens: 4,
        sampling: pinion_schemas::Sampling::GREEDY,
        answer_so_far: Vec::new(),
        stream: format!("pinion.bench.turn.{:032x}.stream", request.0),
    };
    let mut out = Effects::default();
    let mut tell = |input: Input| {
        sessions.handle(now, input, &mut out);
        std::mem::take(&mut out).0
    };
    let mut first = tell(Input::Message(message(wire::encode(&submit).expect("a submit"))));
    // A session not known here may stand in the key-value bucket: it does not.
    if let Some(token) = first.iter().find_map(|e| match e {
        Effect::Get { token, .. } => Some(*token),
        _ => None,
    }) {
        first = tell(Input::Got { token, value: None });
    }
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
        holders: Vec::new(),
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

/// Sessions as one process holds them, from the first turn to the last.
const MANY: u64 = 100_000;
/// Turns after which what a session remembers of its past is full.
const LONG: u64 = 40;

/// Measures.
pub fn run() -> Vec<Row> {
    let decode = WorkerId::new("decode-0").expect("a name");
    let mut rows = Vec::new();
    for (count, turns) in [(10_000, 1), (MANY, 1), (10_000, LONG)] {
        eprintln!("sessions: {count} with {turns} turns");
        let (rss, begun) = (alloc::resident("self"), Instant::now());
        let (heap, kept) = alloc::left_by(|| {
            let mut sessions = role();
            for turn in 0..turns {
                (0..count).for_each(|i| serve(&mut sessions, i, turn, &decode));
            }
            sessions
        });
        let spent = begun.elapsed().as_secs_f64();
        let resident = alloc::resident("self").saturating_sub(rss);
        drop(kept);
        let per = |bytes: f64| bytes / count as f64;
        let what = format!("{count} sessions, {turns} turn{}", if turns > 1 { "s" } else { "" });
        rows.push(Row::value(format!("heap each: {what}"), "B", per(heap as f64)).goal(4096.0, None));
        if count == MANY {
            rows.push(Row::value("  heap in total", "MB", heap as f64 / 1e6));
            rows.push(Row::value("  RSS each", "B", per(resident as f64)));
            rows.push(Row::value("  time, a whole turn each", "s", spent));
        }
    }
    rows
}

/// Title and method of the section.
pub fn section(rows: Vec<Row>) -> Section {
    Section {
        title: "memory of idle sessions",
        how: vec![
            "heap: the sessions role in this process, by a counting allocator. RSS of a real control node: of a"
                .to_owned(),
            "fresh `pinion up`, turns over HTTP; it also grows by the buffers that 8 turns at once need".to_owned(),
        ],
        rows,
    }
}
