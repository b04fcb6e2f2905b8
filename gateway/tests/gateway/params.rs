//! What a request sets about its answer: stop texts, sampling, and why an answer has ended.

use crate::common::{Say, Streamed, World, ask, ids, soon};
use pinion_schemas::Sampling;
use pinion_schemas::messages::Submit;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Says this in chunks of one token, and does not end.
async fn endless(say: Say, text: &str) {
    say.accepted().await;
    for (offset, token) in ids(text).iter().enumerate() {
        say.chunk(1, offset, &[*token]).await;
    }
}

fn with(stream: bool, key: &str, value: Value) -> Value {
    let mut body = ask(stream);
    body[key] = value;
    body["return_token_ids"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

async fn whole(world: &World, body: &Value) -> Value {
    world.post(CHAT, body).send().await.unwrap().json().await.unwrap()
}

#[tokio::test]
async fn a_stop_text_ends_a_stream_and_cancels_its_turn() {
    let world = World::start().await;
    let script = |say: Say, _: Submit| async move { endless(say, "a <EN> b <END> and more").await };
    let owner = world.owner("c0", script).await;
    let body = with(true, "stop", json!(["never", "<END>"]));
    let streamed = Streamed::read(world.post(CHAT, &body).send().await.unwrap()).await;
    assert_eq!(streamed.text(), "a <EN> b ");
    assert!(
        streamed.deltas().iter().all(|delta| !delta.ends_with('<')),
        "what may begin a stop text waits: {:?}",
        streamed.deltas()
    );
    let last = streamed.last();
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    assert!(last["pinion"]["path"].is_null() && last["pinion"]["cached_tokens"].is_null());
    let usage = &streamed.json().last().unwrap().clone()["usage"];
    assert_eq!(
        usage["completion_tokens"], 14,
        "up to the token that completed the stop text"
    );
    soon(|| owner.cancels.lock().unwrap().len() == 1).await;
    let text = world.get("/metrics").await.1;
    assert!(
        text.contains("requests_total{path=\"none\",outcome=\"stopped\"} 1"),
        "{text}"
    );
    assert!(text.contains("pinion_gateway_turns_running 0"), "{text}");
}

#[tokio::test]
async fn a_stop_text_within_a_chunk_ends_a_body() {
    let world = World::start().await;
    let script = |say: Say, _: Submit| async move {
        say.accepted().await;
        say.chunk(1, 0, &ids("one two three")).await;
    };
    let owner = world.owner("c0", script).await;
    let body = whole(&world, &with(false, "stop", json!("tw"))).await;
    let choice = &body["choices"][0];
    assert_eq!(choice["message"]["content"], "one ");
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["token_ids"], json!(ids("one tw")));
    assert_eq!(body["usage"]["completion_tokens"], 6);
    soon(|| owner.cancels.lock().unwrap().len() == 1).await;
}

/// The end is here when the stop text is found: there is nothing to cancel, and the path is known.
#[tokio::test]
async fn a_stop_text_in_the_last_tokens_cancels_nothing() {
    let world = World::start().await;
    let script = |say: Say, _: Submit| async move {
        say.accepted().await;
        say.completed(1, &ids("one two")).await;
    };
    let owner = world.owner("c0", script).await;
    let body = whole(&world, &with(false, "stop", json!("two"))).await;
    assert_eq!(body["choices"][0]["message"]["content"], "one ");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["pinion"]["path"], "direct");
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 7);
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert!(owner.cancels.lock().unwrap().is_empty());
}

#[tokio::test]
async fn what_only_began_a_stop_text_is_said_in_the_end() {
    let world = World::start().await;
    let _owner = world
        .owner("c0", |say, _| async move { say.all(&ids("so <EN")).await })
        .await;
    for (stream, stop) in [
        (true, json!("<END>")),
        (false, json!("<END>")),
        (true, json!([])),
        (true, json!(null)),
    ] {
        let body = with(stream, "stop", stop);
        if stream {
            let streamed = Streamed::read(world.post(CHAT, &body).send().await.unwrap()).await;
            assert_eq!(streamed.text(), "so <EN");
            assert_eq!(streamed.last()["choices"][0]["finish_reason"], "stop");
        } else {
            assert_eq!(whole(&world, &body).await["choices"][0]["message"]["content"], "so <EN");
        }
    }
}

#[tokio::test]
async fn an_answer_that_was_cut_off_says_length() {
    let world = World::start().await;
    let _owner = world
        .owner("c0", |say, _| async move { say.all(&ids("hello")).await })
        .await;
    for (most, reason) in [(5, "length"), (6, "stop")] {
        let body = whole(&world, &with(false, "max_tokens", json!(most))).await;
        assert_eq!(body["choices"][0]["finish_reason"], reason);
        assert_eq!(body["choices"][0]["message"]["content"], "hello");
    }
}

#[tokio::test]
async fn sampling_travels_with_the_turn() {
    let world = World::start().await;
    let owner = world
        .owner("c0", |say, _| async move { say.all(&ids("ok")).await })
        .await;
    let mut body = ask(false);
    whole(&world, &body).await;
    body["temperature"] = json!(0.25);
    body["top_p"] = json!(0.9);
    body["seed"] = json!(42);
    whole(&world, &body).await;
    let sampling: Vec<Sampling> = owner.submits.lock().unwrap().iter().map(|s| s.sampling).collect();
    let asked = Sampling {
        temperature_milli: 250,
        top_p_milli: 900,
        seed: 42,
    };
    assert_eq!(sampling, [Sampling::GREEDY, asked]);
}
