//! HTTP in, HTTP out: a request is checked field by field and becomes a turn; the turn becomes one body or a stream.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use pinion_schemas::limits::MESSAGE_BYTES_MAX;
use pinion_schemas::messages::Submit;
use pinion_schemas::trace_context::{self, TraceContext};
use pinion_schemas::{Micros, RequestId, SessionId};
use serde_json::json;

use crate::error::ApiError;
use crate::openai::{ChatBody, Common, CompletionBody, Prompt, read};
use crate::reply::{Reply, Shape};
use crate::turn::Turn;
use crate::{BODY_TIMEOUT, Gateway, HEALTH_TIMEOUT, identity};

/// Bytes of a `Submit` besides its tokens: ids, tenant, subject, framing.
const SUBMIT_OVERHEAD: usize = 2_048;
/// Tokens that prompt and answer together may have, so that a `Submit` with the whole answer behind it fits one message.
pub const TURN_TOKENS_MAX: usize = (MESSAGE_BYTES_MAX - SUBMIT_OVERHEAD) / 4;
/// Bodies up to this are tokenised where they arrive: a millisecond or so.
const INLINE_BODY_BYTES: usize = 4 << 10;

pub(crate) fn router(gateway: Arc<Gateway>) -> Router {
    let limit = DefaultBodyLimit::max(gateway.config.max_body_bytes);
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(async || {
            let message = "no such path: use /v1/chat/completions, /v1/completions, /v1/models, /health or /metrics";
            ApiError::new(StatusCode::NOT_FOUND, "unknown_path", message)
        })
        .method_not_allowed_fallback(async || {
            let message = "no such method here: POST to the completions, GET the rest";
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "unknown_method", message)
        })
        .layer(limit)
        .with_state(gateway)
}

async fn chat(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    answer(gateway, Shape::Chat, request).await
}

async fn completions(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    answer(gateway, Shape::Completion, request).await
}

async fn models(State(gateway): State<Arc<Gateway>>) -> Response {
    let model = json!({
        "id": gateway.config.model, "object": "model", "created": gateway.started, "owned_by": "pinion",
        "max_model_len": gateway.config.max_prompt_tokens,
    });
    Json(json!({"object": "list", "data": [model]})).into_response()
}

/// 200 if the bus and its leases can be read, for a balancer in front.
async fn health(State(gateway): State<Arc<Gateway>>) -> Response {
    let read = gateway.reach.bus.kv_get("shard.0");
    let status = match tokio::time::timeout(HEALTH_TIMEOUT, read).await {
        Ok(Ok(_)) => return Json(json!({"status": "ok", "gateway": gateway.config.id.as_str()})).into_response(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer in time".to_owned(),
    };
    ApiError::unavailable("bus-down", format!("the message bus is down ({status})"), 1).into_response()
}

async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    ([(header::CONTENT_TYPE, kind)], gateway.reach.metrics.text()).into_response()
}

async fn answer(gateway: Arc<Gateway>, shape: Shape, request: Request) -> Response {
    match begin(&gateway, shape, request).await {
        Ok(reply) => reply.into_response().await,
        Err(error) => {
            gateway.reach.metrics.request("none", error.code);
            error.into_response()
        }
    }
}

/// Everything between a request and its running turn.
async fn begin(gateway: &Arc<Gateway>, shape: Shape, request: Request) -> Result<Reply, ApiError> {
    let headers = request.headers().clone();
    let body = body(gateway, request).await?;
    let common: Common = read(&body)?;
    check_model(gateway, &common)?;
    refuse_unserved(&common)?;
    let prompt = tokens(gateway, shape, body).await?;
    let max_new_tokens = max_new_tokens(gateway, &common, prompt.len())?;
    let class = identity::class(&headers)?;
    let tenant = identity::tenant(&headers)?;
    let user = common
        .metadata
        .as_ref()
        .and_then(|metadata| metadata.user_id.as_deref());
    let named = identity::named(&headers, common.prompt_cache_key.as_deref(), user)?;
    let learn = named.is_none();
    let session = match named {
        Some(session) => identity::of_tenant(tenant.as_deref(), session)?,
        None => match gateway.tips.find(tenant.as_deref(), &prompt) {
            Some(session) => session,
            None => identity::of_tenant(tenant.as_deref(), fresh_session()?)?,
        },
    };
    let permit = Arc::clone(&gateway.turns).try_acquire_owned().map_err(|_| ApiError {
        retry_after: Some(1),
        ..ApiError::new(
            StatusCode::TOO_MANY_REQUESTS,
            "too_many_turns",
            format!(
                "{} turns run in this gateway already: try again",
                gateway.config.max_turns
            ),
        )
    })?;
    let request = RequestId(uuid::Uuid::new_v4().as_u128());
    let submit = Submit {
        request,
        session,
        class,
        tenant,
        time_left: Micros::ZERO,
        prompt,
        max_new_tokens,
        sampling: pinion_schemas::Sampling::GREEDY,
        answer_so_far: Vec::new(),
        stream: String::new(),
    };
    let (timeout, patience) = (gateway.config.request_timeout, gateway.config.accept_timeout);
    let turn = Turn::open(
        Arc::clone(&gateway.reach),
        submit,
        trace(&headers, request),
        timeout,
        patience,
    )
    .await?;
    gateway.reach.metrics.running.fetch_add(1, Ordering::Relaxed);
    Ok(Reply::new(
        Arc::clone(gateway),
        shape,
        &common,
        turn,
        learn,
        permit,
        unix_seconds(),
    ))
}

pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// The client's trace, or one of our own that is the request.
fn trace(headers: &HeaderMap, request: RequestId) -> TraceContext {
    let given = headers.get(trace_context::HEADER).and_then(|value| value.to_str().ok());
    given.and_then(TraceContext::parse).unwrap_or(TraceContext {
        trace: request.0.max(1),
        span: (request.0 as u64).max(1),
        sampled: false,
    })
}

fn fresh_session() -> Result<SessionId, ApiError> {
    SessionId::new(uuid::Uuid::new_v4().to_string())
        .map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "session", error.to_string()))
}

/// The whole body, in time and within its limit.
async fn body(gateway: &Gateway, request: Request) -> Result<Bytes, ApiError> {
    let Ok(read) = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, &())).await else {
        let message = format!(
            "the body did not arrive within {} s: send it faster",
            BODY_TIMEOUT.as_secs()
        );
        return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", message));
    };
    read.map_err(|rejection| {
        let status = rejection.status();
        if status == StatusCode::PAYLOAD_TOO_LARGE {
            let most = gateway.config.max_body_bytes;
            let message = format!("the body has more than {most} bytes: send a shorter conversation");
            return ApiError::new(status, "body_too_large", message);
        }
        ApiError::new(status, "unreadable_body", rejection.body_text())
    })
}

fn check_model(gateway: &Gateway, common: &Common) -> Result<(), ApiError> {
    let known = &gateway.config.model;
    match &common.model {
        None => Err(ApiError::field(
            "model",
            "missing",
            format!("name the model: {known:?}"),
        )),
        Some(model) if model != known => {
            let message = format!("the model {model:?} does not exist here: use {known:?} (see /v1/models)");
            Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model"))
        }
        Some(_) => Ok(()),
    }
}

fn refuse_unserved(common: &Common) -> Result<(), ApiError> {
    if common.n.is_some_and(|n| n != 1) {
        return Err(ApiError::field(
            "n",
            "unsupported",
            "one choice is served per request: send 1 or leave it out",
        ));
    }
    let empty = |stop: &serde_json::Value| stop.is_null() || stop.as_array().is_some_and(Vec::is_empty);
    if common.stop.as_ref().is_some_and(|stop| !empty(stop)) {
        return Err(ApiError::field(
            "stop",
            "unsupported",
            "stop texts are not served: leave it out",
        ));
    }
    Ok(())
}

/// The prompt's tokens; a long body is read beside the async workers, which have other turns to serve.
async fn tokens(gateway: &Arc<Gateway>, shape: Shape, body: Bytes) -> Result<Vec<u32>, ApiError> {
    if body.len() <= INLINE_BODY_BYTES {
        return prompt(gateway, shape, &body);
    }
    let gateway = Arc::clone(gateway);
    tokio::task::spawn_blocking(move || prompt(&gateway, shape, &body))
        .await
        .unwrap_or_else(|error| {
            tracing::error!(%error, "a prompt could not be tokenised");
            let message = "the prompt could not be tokenised: see the gateway's log";
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "tokenizer", message))
        })
}

/// The prompt's tokens, within vocabulary and length.
fn prompt(gateway: &Gateway, shape: Shape, body: &[u8]) -> Result<Vec<u32>, ApiError> {
    let most = gateway.prompt_tokens_max();
    let (field, tokens) = match shape {
        Shape::Chat => ("messages", conversation(gateway, read(body)?)?),
        Shape::Completion => match read::<CompletionBody>(body)?.prompt {
            None => ("prompt", Vec::new()),
            Some(Prompt::Text(text)) => {
                check_bytes(gateway, "prompt", text.len())?;
                ("prompt", gateway.tokenizer.encode(&text))
            }
            Some(Prompt::Tokens(tokens)) => ("prompt", in_vocabulary(gateway, tokens)?),
        },
    };
    if tokens.is_empty() {
        return Err(ApiError::field(field, "empty", "give at least one token"));
    }
    if tokens.len() > most {
        let message = format!("{} tokens, at most {most} are served: shorten it", tokens.len());
        return Err(ApiError::field(field, "context_length_exceeded", message));
    }
    Ok(tokens)
}

fn conversation(gateway: &Gateway, body: ChatBody) -> Result<Vec<u32>, ApiError> {
    let spoken = body.spoken()?;
    let bytes = spoken.iter().map(|message| message.content.len()).sum();
    check_bytes(gateway, "messages", bytes)?;
    gateway
        .tokenizer
        .chat(&spoken)
        .map_err(|error| ApiError::field("messages", "template_refused", error))
}

/// Refuses what is too long whatever its tokens are, before work and memory go into them.
fn check_bytes(gateway: &Gateway, field: &str, bytes: usize) -> Result<(), ApiError> {
    let (most, longest) = (gateway.prompt_tokens_max(), gateway.tokenizer.token_bytes_max().max(1));
    if bytes / longest > most {
        let message = format!(
            "{bytes} bytes are more than {} tokens, at most {most} are served: shorten it",
            bytes / longest
        );
        return Err(ApiError::field(field, "context_length_exceeded", message));
    }
    Ok(())
}

fn in_vocabulary(gateway: &Gateway, tokens: Vec<u32>) -> Result<Vec<u32>, ApiError> {
    let vocab = gateway.tokenizer.vocab();
    match tokens.iter().enumerate().find(|(_, id)| **id >= vocab) {
        None => Ok(tokens),
        Some((index, id)) => {
            let message = format!("{id} is no token id: this model's are 0 to {}", vocab - 1);
            let field = format!("prompt[{index}]");
            Err(ApiError::field(&field, "token_out_of_range", message))
        }
    }
}

fn max_new_tokens(gateway: &Gateway, common: &Common, prompt: usize) -> Result<u32, ApiError> {
    let most = gateway.turn_tokens_max();
    let room = most.saturating_sub(prompt);
    let (field, asked) = match (common.max_completion_tokens, common.max_tokens) {
        (Some(asked), _) => ("max_completion_tokens", asked),
        (None, Some(asked)) => ("max_tokens", asked),
        (None, None) => return Ok(gateway.config.default_max_tokens.clamp(1, room as u32)),
    };
    if asked < 1 {
        return Err(ApiError::field(
            field,
            "invalid_value",
            format!("{asked}: ask for at least 1"),
        ));
    }
    u32::try_from(asked)
        .ok()
        .filter(|asked| *asked as usize <= room)
        .ok_or_else(|| {
            let message = format!("{asked}: prompt and answer may have {most} tokens, ask for at most {room}");
            ApiError::field(field, "invalid_value", message)
        })
}
