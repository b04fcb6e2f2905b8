//! Turns over real HTTP against scripted control nodes: what is lost, repeated, killed, cancelled.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Streamed, World, ask, ids, soon};
use futures::StreamExt;
use pinion_schemas::{AbortReason, Class};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

async fn stream(world: &World) -> Streamed {
    Streamed::read(world.post(CHAT, &ask(true)).send().await.unwrap()).await
}

#[tokio::test]
async fn a_turn_streams_and_tells_its_story() {
    let world = World::start().await;
    let owner = world
        .owner("c0", |say, _| async move {
            say.all(&[&ids("hé")[..], &[0x1ff]].concat()).await;
        })
        .await;
    let mut body = ask(true);
    body["stream_options"] = json!({"include_usage": true});
    let request = world.post(CHAT, &body).header("x-session-id", "s-1");
    let response = request
        .header("x-pinion-class", "batch")
        .header("x-pinion-tenant", "t")
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["x-session-id"], "s-1");
    let streamed = Streamed::read(response).await;
    assert_eq!(streamed.deltas(), ["h", "é", "<|1ff|>"]);
    assert_eq!(streamed.json()[0]["choices"][0]["delta"]["role"], "assistant");
    let last = streamed.last();
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert_eq!(last["pinion"]["session"], "s-1");
    assert_eq!(last["pinion"]["path"], "direct");
    assert_eq!(last["pinion"]["cached_tokens"], 7);
    let usage = &streamed.json().last().unwrap().clone()["usage"];
    assert_eq!(usage["completion_tokens"], 4);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 7);
    let submit = owner.submits.lock().unwrap()[0].clone();
    assert_eq!((submit.class, submit.tenant.as_deref()), (Class::Batch, Some("t")));
    assert_eq!(
        submit.session.as_str(),
        "t/s-1",
        "another tenant's s-1 is another session"
    );
    assert_eq!(submit.prompt, ids("<user>\nhello\n<assistant>\n"));
    let text = world.get("/metrics").await.1;
    assert!(
        text.contains("pinion_gateway_requests_total{path=\"direct\",outcome=\"ok\"} 1"),
        "{text}"
    );
    assert!(text.contains("pinion_gateway_ttft_seconds_count 1"), "{text}");
}

#[tokio::test]
async fn the_whole_body_holds_the_same() {
    let world = World::start().await;
    let _owner = world
        .owner("c0", |say, _| async move { say.all(&ids("hello")).await })
        .await;
    let body: Value = world
        .post(CHAT, &ask(false))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["choices"][0]["message"]["content"], "hello");
    assert_eq!(body["usage"]["completion_tokens"], 5);
    assert_eq!(body["pinion"]["path"], "direct");

    let ask = json!({"model": "sim", "prompt": [1, 2, 999], "max_tokens": 5, "return_token_ids": true});
    let body: Value = world
        .post("/v1/completions", &ask)
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(body["choices"][0]["text"], "hello");
    assert_eq!(body["choices"][0]["token_ids"], json!(ids("hello")));
    assert_eq!(body["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_lost_chunk_comes_with_the_end() {
    let world = World::start().await;
    let script = |say: crate::common::Say, _| async move {
        say.accepted().await;
        say.chunk(1, 0, &ids("ab")).await;
        say.chunk(1, 4, &ids("ef")).await; // "cd" was lost
        say.completed(1, &ids("abcdefgh")).await;
    };
    let _owner = world.owner("c0", script).await;
    assert_eq!(stream(&world).await.deltas(), ["ab", "cdefgh"]);
}

#[tokio::test]
async fn repeats_and_older_attempts_are_dropped() {
    let world = World::start().await;
    let script = |say: crate::common::Say, _| async move {
        say.accepted().await;
        say.chunk(1, 0, &ids("ab")).await;
        say.chunk(1, 0, &ids("ab")).await;
        say.chunk(1, 1, &ids("bc")).await;
        say.chunk(2, 3, &ids("d")).await;
        say.chunk(1, 4, &ids("X")).await;
        say.completed(1, &ids("abcX")).await;
        say.chunk(2, 2, &ids("cde")).await;
        say.completed(2, &ids("abcdef")).await;
    };
    let _owner = world.owner("c0", script).await;
    assert_eq!(stream(&world).await.deltas(), ["ab", "c", "d", "e", "f"]);
}

#[tokio::test]
async fn an_end_that_contradicts_the_stream_is_an_error() {
    let world = World::start().await;
    let script = |say: crate::common::Say, _| async move {
        say.accepted().await;
        say.chunk(1, 0, &ids("ab")).await;
        say.completed(1, &ids("aX")).await;
    };
    let _owner = world.owner("c0", script).await;
    assert_eq!(
        stream(&world).await.json().last().unwrap()["error"]["code"],
        "answer-changed"
    );
}

/// The owner is killed in mid-turn, another takes its shards half a second later: one stream, nothing twice.
#[tokio::test]
async fn a_turn_survives_its_owner() {
    let world = World::start().await;
    let script = |say: crate::common::Say, _| async move {
        say.accepted().await;
        say.chunk(3, 0, &ids("abc")).await;
    };
    let first = world.owner("c0", script).await;
    let response = world.post(CHAT, &ask(true)).send().await.unwrap();
    first.kill();
    let killed = Instant::now();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let script = |say: crate::common::Say, asked: pinion_schemas::messages::Submit| async move {
        say.accepted().await;
        say.chunk(0, asked.answer_so_far.len(), &ids("de")).await;
        say.completed(0, &ids("abcdef")).await;
    };
    let second = world.owner("c1", script).await;
    assert_eq!(Streamed::read(response).await.text(), "abcdef");
    assert!(killed.elapsed() < Duration::from_secs(3), "{:?}", killed.elapsed());
    let (before, after) = (
        first.submits.lock().unwrap()[0].clone(),
        second.submits.lock().unwrap()[0].clone(),
    );
    assert_eq!((before.request, &before.prompt), (after.request, &after.prompt));
    assert_eq!(after.answer_so_far, ids("abc"));
}

/// Only the end was lost and the owner lives: it gets the turn again and says the end again.
#[tokio::test]
async fn a_lost_end_is_asked_for() {
    let world = World::start().await;
    let count = AtomicU32::new(0);
    let script = move |say: crate::common::Say, _| {
        let first = count.fetch_add(1, Ordering::Relaxed) == 0;
        async move {
            say.accepted().await;
            if first {
                say.chunk(1, 0, &ids("ab")).await;
            } else {
                say.completed(1, &ids("abc")).await;
            }
        }
    };
    let owner = world.owner("c0", script).await;
    assert_eq!(stream(&world).await.text(), "abc");
    assert!(*owner.probes.lock().unwrap() >= 1);
    assert_eq!(owner.submits.lock().unwrap().len(), 2);
}

#[tokio::test]
async fn who_is_not_the_owner_any_more_is_asked_no_further() {
    let world = World::start().await;
    let old = world
        .owner("c0", |say, _| async move { say.refused(AbortReason::Superseded).await })
        .await;
    let _new = world
        .owner("c1", |say, _| async move { say.all(&ids("ok")).await })
        .await;
    world.lease("c0").await;
    let request = tokio::spawn(world.post(CHAT, &ask(true)).send());
    soon(|| old.submits.lock().unwrap().len() >= 2).await;
    world.lease("c1").await;
    assert_eq!(Streamed::read(request.await.unwrap().unwrap()).await.text(), "ok");
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_at_once() {
    let world = World::start().await;
    let script = |say: crate::common::Say, _| async move {
        say.accepted().await;
        say.chunk(1, 0, &ids("ab")).await;
    };
    let owner = world.owner("c0", script).await;
    // In mid-stream.
    let response = world.post(CHAT, &ask(true)).send().await.unwrap();
    let mut bytes = response.bytes_stream();
    bytes.next().await.unwrap().unwrap();
    drop(bytes);
    soon(|| owner.cancels.lock().unwrap().len() == 1).await;
    // While a whole body is awaited.
    let waiting = tokio::spawn(world.post(CHAT, &ask(false)).send());
    soon(|| owner.submits.lock().unwrap().len() == 2).await;
    waiting.abort();
    let took = soon(|| owner.cancels.lock().unwrap().len() == 2).await;
    assert!(took < Duration::from_millis(500), "{took:?}");
    let requests = |i: usize| owner.submits.lock().unwrap()[i].request;
    let cancelled: Vec<_> = owner.cancels.lock().unwrap().iter().map(|c| c.request).collect();
    assert_eq!(cancelled, [requests(0), requests(1)]);
    let text = world.get("/metrics").await.1;
    assert!(
        text.contains("outcome=\"client-gone\"} 2") && text.contains("turns_running 0"),
        "{text}"
    );
}

#[tokio::test]
async fn a_finished_turn_is_not_cancelled() {
    let world = World::start().await;
    let owner = world
        .owner("c0", |say, _| async move { say.all(&ids("ok")).await })
        .await;
    stream(&world).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(owner.cancels.lock().unwrap().is_empty());
}

#[tokio::test]
async fn reasons_become_statuses() {
    for (reason, status) in [
        (AbortReason::Deadline, 504),
        (AbortReason::RetriesSpent, 503),
        (AbortReason::DecodeLost, 503),
        (AbortReason::EngineFailed, 502),
        (AbortReason::TooLong, 400),
    ] {
        for in_stream in [false, true] {
            let world = World::start().await;
            let script = move |say: crate::common::Say, _| async move {
                if in_stream {
                    say.accepted().await;
                    say.failed(reason).await;
                } else {
                    say.refused(reason).await;
                }
            };
            let _owner = world.owner("c0", script).await;
            let response = world.post(CHAT, &ask(in_stream)).send().await.unwrap();
            assert_eq!(response.status(), status, "{reason}");
            let retry = response
                .headers()
                .get("retry-after")
                .map(|v| v.to_str().unwrap().to_owned());
            assert_eq!(retry.as_deref(), (status == 503).then_some("2"));
            let body: Value = response.json().await.unwrap();
            let code = match reason {
                AbortReason::TooLong => "context_length_exceeded", // what clients of the OpenAI API look for
                _ => reason.label(),
            };
            assert_eq!(body["error"]["code"], code);
        }
    }
}

/// Nobody owns the session, or the bus is away: a typed error in bounded time, and `/health` says so.
#[tokio::test]
async fn nobody_there_is_a_503_and_never_a_hang() {
    let world = World::with(|c| c.accept_timeout = Duration::from_millis(300)).await;
    let response = world.post(CHAT, &ask(true)).send().await.unwrap();
    assert_eq!(
        (
            response.status().as_u16(),
            response.headers()["retry-after"].to_str().unwrap()
        ),
        (503, "1")
    );
    assert_eq!(world.get("/health").await.0, 200);
    world.net.partition("g0", pinion_bus::sim::SERVER);
    assert_eq!(world.get("/health").await.0, 503);
    assert_eq!(world.post(CHAT, &ask(false)).send().await.unwrap().status(), 503);
}

/// The deadline ends a turn that is accepted and says nothing; its owner hears of it.
#[tokio::test]
async fn the_deadline_ends_a_silent_turn() {
    let world = World::with(|c| c.request_timeout = Duration::from_millis(400)).await;
    let owner = world.owner("c0", |say, _| async move { say.accepted().await }).await;
    let response = world.post(CHAT, &ask(true)).send().await.unwrap();
    assert_eq!(response.status(), 504);
    soon(|| owner.cancels.lock().unwrap().len() == 1).await;
}

#[tokio::test]
async fn silence_is_bridged_by_comments() {
    let world = World::with(|c| c.keep_alive = Duration::from_millis(100)).await;
    let script = |say: crate::common::Say, _| async move {
        say.accepted().await;
        tokio::time::sleep(Duration::from_millis(600)).await;
        say.completed(1, &ids("late")).await;
    };
    let _owner = world.owner("c0", script).await;
    let streamed = stream(&world).await;
    assert_eq!(streamed.text(), "late");
    assert!(streamed.comments >= 2, "{}", streamed.comments);
}

#[tokio::test]
async fn too_many_turns_are_told_to_wait() {
    let world = World::with(|c| c.max_turns = 1).await;
    let script = |say: crate::common::Say, _| async move {
        say.accepted().await;
        say.chunk(1, 0, &ids("a")).await;
    };
    let _owner = world.owner("c0", script).await;
    let _first = world.post(CHAT, &ask(true)).send().await.unwrap();
    let second = world.post(CHAT, &ask(true)).send().await.unwrap();
    assert_eq!(
        (
            second.status().as_u16(),
            second.headers()["retry-after"].to_str().unwrap()
        ),
        (429, "1")
    );
}

/// A client without any session id: its second turn is found by its prefix, and its prompt goes on from the first.
#[tokio::test]
async fn a_conversation_is_known_by_its_prefix() {
    let world = World::start().await;
    let owner = world
        .owner("c0", |say, _| async move {
            say.all(&[0xff, 60, 124, 49, 124, 62, 0x1ff]).await;
        })
        .await;
    let mut body = ask(false);
    body["messages"][0]["content"] = json!("x".repeat(100));
    let first: Value = world.post(CHAT, &body).send().await.unwrap().json().await.unwrap();
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(first["choices"][0]["message"].clone());
    messages.push(json!({"role": "user", "content": [{"type": "text", "text": "go on"}]}));
    let second: Value = world.post(CHAT, &body).send().await.unwrap().json().await.unwrap();
    assert_eq!(first["pinion"]["session"], second["pinion"]["session"]);
    assert_ne!(first["pinion"]["request"], second["pinion"]["request"]);
    let submits = owner.submits.lock().unwrap();
    let context = [&submits[0].prompt[..], &[0xff, 60, 124, 49, 124, 62, 0x1ff]].concat();
    assert!(submits[1].prompt.starts_with(&context));
}

#[tokio::test]
async fn a_shutdown_lets_running_turns_end() {
    let world = World::start().await;
    let script = |say: crate::common::Say, _| async move {
        say.accepted().await;
        say.chunk(1, 0, &ids("ab")).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        say.completed(1, &ids("abcd")).await;
    };
    let _owner = world.owner("c0", script).await;
    let response = world.post(CHAT, &ask(true)).send().await.unwrap();
    drop(world.stop);
    assert_eq!(Streamed::read(response).await.text(), "abcd");
    let ended = tokio::time::timeout(Duration::from_secs(2), world.server).await;
    ended.unwrap().unwrap().unwrap();
}

/// A quiet owner that answers probes keeps its turn: no second submit within the first silence.
#[tokio::test]
async fn a_quiet_owner_is_probed_and_keeps_its_turn() {
    let world = World::start().await;
    let script = |say: crate::common::Say, _| async move {
        say.accepted().await;
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        say.completed(1, &ids("slow")).await;
    };
    let owner = world.owner("c0", script).await;
    assert_eq!(stream(&world).await.text(), "slow");
    assert_eq!(
        (*owner.probes.lock().unwrap(), owner.submits.lock().unwrap().len()),
        (1, 1)
    );
}
