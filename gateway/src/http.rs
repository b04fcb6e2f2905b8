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
use tokio::sync::OwnedSemaphorePermit;

use crate::error::ApiError;
use crate::openai::{Common, read};
use crate::reply::{Reply, Shape};
use crate::stop::Stop;
use crate::turn::Turn;
use crate::{BODY_TIMEOUT, Gateway, HEALTH_TIMEOUT, identity, params, prompt};

/// Bytes of a `Submit` besides its tokens: ids, tenant, subject, framing.
const SUBMIT_OVERHEAD: usize = 2_048;
/// Tokens that prompt and answer together may have, so that a `Submit` with the whole answer behind it fits one message.
pub const TURN_TOKENS_MAX: usize = (MESSAGE_BYTES_MAX - SUBMIT_OVERHEAD) / 4;

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
    let context = gateway.turn_tokens_max().min(gateway.config.max_prompt_tokens as usize);
    let model = json!({
        "id": gateway.config.model, "object": "model", "created": gateway.started, "owned_by": "pinion",
        "max_model_len": context,
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
    let mut common: Common = read(&body)?;
    params::check_model(gateway, &common)?;
    params::refuse_unserved(&common)?;
    let request = RequestId(uuid::Uuid::new_v4().as_u128());
    let sampling = params::sampling(&common, request)?;
    let stop = Stop::new(common.stop.take())?;
    let prompt = prompt::tokens(gateway, shape, body).await?;
    let max_new_tokens = params::max_new_tokens(gateway, &common, prompt.len())?;
    let class = identity::class(&headers)?;
    let tenant = identity::tenant(&headers)?;
    let (session, learn) = session(gateway, &headers, &common, tenant.as_deref(), &prompt)?;
    let permit = permit(gateway)?;
    let submit = Submit {
        request,
        session,
        class,
        tenant,
        time_left: Micros::ZERO,
        prompt,
        max_new_tokens,
        sampling,
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
        stop,
        turn,
        learn,
        permit,
    ))
}

/// The session, by what the request names or else by its longest known prefix; and whether to learn its context for that.
fn session(
    gateway: &Gateway,
    headers: &HeaderMap,
    common: &Common,
    tenant: Option<&str>,
    prompt: &[u32],
) -> Result<(SessionId, bool), ApiError> {
    let user = common.metadata.as_ref();
    let user = user.and_then(|metadata| metadata.user_id.as_deref());
    if let Some(named) = identity::named(headers, common.prompt_cache_key.as_deref(), user)? {
        return Ok((identity::of_tenant(tenant, named)?, false));
    }
    let known = gateway.tips.find(tenant, prompt);
    let session = match known {
        Some(session) => session,
        None => identity::of_tenant(tenant, fresh_session()?)?,
    };
    Ok((session, true))
}

fn permit(gateway: &Gateway) -> Result<OwnedSemaphorePermit, ApiError> {
    Arc::clone(&gateway.turns).try_acquire_owned().map_err(|_| {
        let most = gateway.config.max_turns;
        let message = format!("{most} turns run in this gateway already: try again");
        ApiError {
            retry_after: Some(1),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_turns", message)
        }
    })
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
