//! The model of `make model`, through HTTP: its template, its tokens, its end.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use crate::common::{MODEL, Say, Streamed, World};
use pinion_gateway::tokenizer::{GgufTokenizer, Tokenizer};
use pinion_schemas::messages::Submit;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const FILE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../.tools/models/SmolLM2-135M-Instruct.Q4_1.gguf"
);
const IM_START: u32 = 1;
const IM_END: u32 = 2;

fn model() -> Arc<GgufTokenizer> {
    static OPEN: OnceLock<Arc<GgufTokenizer>> = OnceLock::new();
    let open = || GgufTokenizer::open(Path::new(FILE)).map(Arc::new);
    Arc::clone(
        OPEN.get_or_init(|| open().unwrap_or_else(|e| panic!("the tests need the model, run `make model`: {e}"))),
    )
}

fn ask(stream: bool, text: &str) -> Value {
    json!({"model": MODEL, "stream": stream, "max_tokens": 40, "messages": [{"role": "user", "content": text}]})
}

#[tokio::test]
async fn a_chat_is_templated_and_its_end_is_not_shown() {
    let world = World::of_model(model()).await;
    let script = |say: Say, _: Submit| async move {
        let answer = [model().encode("Grüße 🦀🦀!"), vec![IM_END]].concat();
        say.all(&answer).await;
    };
    let owner = world.owner("c0", script).await;
    let streamed = Streamed::read(world.post(CHAT, &ask(true, "Hi <|im_end|>")).send().await.unwrap()).await;
    assert_eq!(streamed.text(), "Grüße 🦀🦀!");
    assert!(
        !streamed.deltas().concat().contains('\u{fffd}'),
        "characters of several tokens come whole"
    );
    assert_eq!(streamed.last()["choices"][0]["finish_reason"], "stop");
    let prompt = owner.submits.lock().unwrap()[0].prompt.clone();
    let control: Vec<u32> = prompt.into_iter().filter(|id| *id < 17).collect();
    let template = [IM_START, IM_END, IM_START, IM_END, IM_START];
    assert_eq!(control, template, "what the user wrote is plain text");
}

/// A stop text that is spread over tokens and ends in the middle of one.
#[tokio::test]
async fn a_stop_text_knows_no_tokens() {
    let world = World::of_model(model()).await;
    let script = |say: Say, _: Submit| async move {
        let answer = model().encode("Thought: easy.\nObservation: it is hot.");
        say.all(&answer).await;
    };
    let _owner = world.owner("c0", script).await;
    for stream in [false, true] {
        let mut body = ask(stream, "How is it?");
        body["stop"] = json!(["\nObs"]);
        let response = world.post(CHAT, &body).send().await.unwrap();
        if stream {
            let streamed = Streamed::read(response).await;
            assert_eq!(streamed.text(), "Thought: easy.");
            assert_eq!(streamed.last()["choices"][0]["finish_reason"], "stop");
        } else {
            let body: Value = response.json().await.unwrap();
            assert_eq!(body["choices"][0]["message"]["content"], "Thought: easy.");
            assert_eq!(body["choices"][0]["finish_reason"], "stop");
        }
    }
}

#[tokio::test]
async fn a_text_is_completed_and_a_full_answer_is_cut_off() {
    let world = World::of_model(model()).await;
    let script = |say: Say, asked: Submit| async move {
        let answer = model().encode(" jumps over the lazy dog and the next one and one more");
        say.all(&answer[..asked.max_new_tokens as usize]).await;
    };
    let owner = world.owner("c0", script).await;
    let body = json!({"model": MODEL, "prompt": "The quick brown fox", "max_tokens": 3});
    let response = world.post("/v1/completions", &body).send().await.unwrap();
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["choices"][0]["text"], " jumps over the");
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let prompt = owner.submits.lock().unwrap()[0].prompt.clone();
    assert_eq!(prompt, model().encode("The quick brown fox"));
}
