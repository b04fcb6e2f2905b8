//! Every bad request gets an error in `OpenAI`'s shape that names the field and says what to do; none reaches the bus.

use crate::common::{World, ask, ids};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A field of a good chat request | what it is replaced by (`LONG`: 300 letters) | status | code | field that is named.
const CHAT_CASES: &str = r#"
    model                 | "gpt-9"                                        | 404 | model_not_found         | model
    model                 | null                                           | 400 | missing                 | model
    model                 | 7                                              | 400 | invalid_type            | model
    messages              | null                                           | 400 | empty                   | messages
    messages              | "hi"                                           | 400 | invalid_type            | messages
    messages              | []                                             | 400 | empty                   | messages
    messages              | [{"role": "user", "content": 5}]               | 400 | invalid_type            | messages[0].content
    messages              | [{"content": "x"}]                             | 400 | invalid_type            | messages[0]
    messages              | [{"role": "user", "content": [{"type": "image_url"}]}] | 400 | unsupported_content | messages[0].content[0]
    messages              | [{"role": "user", "content": "LONG"}]          | 400 | context_length_exceeded | messages
    max_tokens            | 0                                              | 400 | invalid_value           | max_tokens
    max_tokens            | -3                                             | 400 | invalid_value           | max_tokens
    max_tokens            | 1099511627776                                  | 400 | invalid_value           | max_tokens
    max_tokens            | "5"                                            | 400 | invalid_type            | max_tokens
    max_tokens            | 1.5                                            | 400 | invalid_type            | max_tokens
    max_completion_tokens | 0                                              | 400 | invalid_value           | max_completion_tokens
    stream                | "yes"                                          | 400 | invalid_type            | stream
    stream_options        | {"include_usage": 1}                           | 400 | invalid_type            | stream_options.include_usage
    n                     | 2                                              | 400 | unsupported             | n
    stop                  | ""                                             | 400 | invalid_value           | stop
    stop                  | ["x", ""]                                      | 400 | invalid_value           | stop[1]
    stop                  | ["a", "b", "c", "d", "e"]                      | 400 | invalid_value           | stop
    stop                  | "LONGLONGLONGLONG"                             | 400 | invalid_value           | stop
    stop                  | 7                                              | 400 | invalid_type            | stop
    stop                  | ["x", 7]                                       | 400 | invalid_type            | stop[1]
    temperature           | -0.5                                           | 400 | invalid_value           | temperature
    temperature           | 2.5                                            | 400 | invalid_value           | temperature
    temperature           | "hot"                                          | 400 | invalid_type            | temperature
    top_p                 | 1.5                                            | 400 | invalid_value           | top_p
    seed                  | 0.5                                            | 400 | invalid_type            | seed
    seed                  | "x"                                            | 400 | invalid_type            | seed
    prompt_cache_key      | "LONG"                                         | 400 | invalid_session_id      | prompt_cache_key
    metadata              | {"user_id": "LONG"}                            | 400 | invalid_session_id      | metadata.user_id
"#;

/// A prompt of `/v1/completions` | the rest as above.
const PROMPT_CASES: &str = r#"
    null       | 400 | empty                   | prompt
    ""         | 400 | empty                   | prompt
    []         | 400 | empty                   | prompt
    "LONG"     | 400 | context_length_exceeded | prompt
    [1, 1000]  | 400 | token_out_of_range      | prompt[1]
    [1, -1]    | 400 | invalid_type            | prompt[1]
    ["a", "b"] | 400 | invalid_type            | prompt[0]
    {"a": 1}   | 400 | invalid_type            | prompt
"#;

fn rows(table: &str) -> impl Iterator<Item = Vec<&str>> {
    let filled = table.lines().filter(|line| !line.trim().is_empty());
    filled.map(|line| line.split('|').map(str::trim).collect())
}

fn value(text: &str) -> Value {
    serde_json::from_str(&text.replace("LONG", &"x".repeat(300))).unwrap()
}

async fn check(request: reqwest::RequestBuilder, status: &str, code: &str, param: Option<&str>) {
    let response = request.send().await.unwrap();
    let got = response.status().as_str().to_owned();
    let body: Value = response.json().await.unwrap();
    let error = &body["error"];
    let seen = (got.as_str(), error["code"].as_str(), error["param"].as_str());
    assert_eq!(seen, (status, Some(code), param), "{body}");
    let message = error["message"].as_str().unwrap();
    assert!(message.len() > 20, "{message}");
    assert_eq!(error["type"], "invalid_request_error");
    assert!(param.is_none_or(|param| message.contains(param)), "{message}");
}

#[tokio::test]
async fn bad_requests_are_named() {
    let change = |c: &mut pinion_gateway::GatewayConfig| (c.max_prompt_tokens, c.max_body_bytes) = (100, 10_000);
    let world = World::with(change).await;
    let script = |say: crate::common::Say, _| async move { say.all(&ids("never")).await };
    let owner = world.owner("c0", script).await;
    for row in rows(CHAT_CASES) {
        let mut body = ask(false);
        body[row[0]] = value(row[1]);
        check(world.post(CHAT, &body), row[2], row[3], Some(row[4])).await;
    }
    for row in rows(PROMPT_CASES) {
        let body = json!({"model": "sim", "prompt": value(row[0])});
        check(world.post(COMPLETIONS, &body), row[1], row[2], Some(row[3])).await;
    }
    for broken in ["", "{", "{\"model\": \"sim\"", "not json", "{\"model\":\"sim\"} x"] {
        check(world.raw(CHAT, broken), "400", "malformed_json", None).await;
    }
    check(world.raw(CHAT, vec![b'"', 0xff, b'"']), "400", "malformed_json", None).await;
    for no_object in ["[1]", "[\"sim\"]", "7", "\"sim\"", "null"] {
        check(world.raw(CHAT, no_object), "400", "invalid_type", None).await;
    }
    check(world.raw(CHAT, "x".repeat(20_000)), "413", "body_too_large", None).await;
    check(world.post("/v1/nothing", &ask(false)), "404", "unknown_path", None).await;
    check(world.post("/v1/models", &ask(false)), "405", "unknown_method", None).await;
    for (name, value, code) in [
        ("x-session-id", "s".repeat(257), "invalid_session_id"),
        ("x-claude-code-session-id", "s".repeat(257), "invalid_session_id"),
        ("session_id", "s".repeat(257), "invalid_session_id"),
        ("session-id", "s".repeat(257), "invalid_session_id"),
        ("x-session-affinity", "s".repeat(257), "invalid_session_id"),
        ("x-session-id", "ü".to_owned(), "invalid_header"),
        ("x-pinion-class", "urgent".to_owned(), "invalid_class"),
        ("x-pinion-tenant", "t".repeat(65), "invalid_tenant"),
    ] {
        let request = world.post(CHAT, &ask(false)).header(name, value);
        check(request, "400", code, Some(name)).await;
    }
    assert!(
        owner.submits.lock().unwrap().is_empty(),
        "nothing of it reached the bus"
    );
    let good = world.post(CHAT, &ask(false)).send().await.unwrap();
    assert_eq!(good.status(), 200, "and it still serves");
}

/// A prompt that fits no bus message is refused before it is sent, whatever the configuration says; the longest that is
/// let through does fit, with the longest names.
#[tokio::test]
async fn a_prompt_beyond_one_bus_message_is_refused() {
    let world = World::with(|c| c.max_prompt_tokens = u32::MAX).await;
    let owner = world
        .owner("c0", |say, _| async move { say.all(&ids("ok")).await })
        .await;
    let most = pinion_gateway::http::TURN_TOKENS_MAX;
    let ask = |tokens, max_tokens| {
        let body = json!({"model": "sim", "prompt": vec![1; tokens], "max_tokens": max_tokens});
        let request = world.post(COMPLETIONS, &body).header("x-session-id", "s".repeat(256));
        request.header("x-pinion-tenant", "t".repeat(64))
    };
    check(ask(most, 1), "400", "context_length_exceeded", Some("prompt")).await;
    check(ask(most - 1, 2), "400", "invalid_value", Some("max_tokens")).await;
    assert_eq!(ask(most - 1, 1).send().await.unwrap().status(), 200);
    assert_eq!(owner.submits.lock().unwrap()[0].prompt.len(), most - 1);
}
