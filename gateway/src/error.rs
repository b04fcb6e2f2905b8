//! What a client is told when it does not get its answer: `OpenAI`'s shape, the field's name and what to do.

use std::fmt;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pinion_schemas::AbortReason;
use serde_json::{Value, json};

/// An error as the client sees it, with one stable `code` that also labels the metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status, if the answer has not begun.
    pub status: StatusCode,
    /// Stable word for programs; label of the outcome.
    pub code: &'static str,
    /// The field it is about.
    pub param: Option<String>,
    /// What is wrong and what to do.
    pub message: String,
    /// Seconds until a new try makes sense.
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// An error without field and retry.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            param: None,
            message: message.into(),
            retry_after: None,
        }
    }

    /// 400 about one field.
    pub fn field(param: &str, code: &'static str, message: impl fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, format!("{param}: {message}")).about(param)
    }

    /// 503 with a hint.
    pub fn unavailable(code: &'static str, message: impl Into<String>, retry_after: u32) -> Self {
        Self {
            retry_after: Some(retry_after),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
        }
    }

    /// The same error, about this field.
    #[must_use]
    pub fn about(mut self, param: &str) -> Self {
        self.param = Some(param.to_owned());
        self
    }

    /// How the cluster's reason for a failed turn looks from outside. `Superseded` never gets here: it is retried.
    pub fn failed(reason: AbortReason, retry_after_millis: u32) -> Self {
        let hint = retry_after_millis.div_ceil(1_000).max(1);
        let code = reason.label();
        match reason {
            AbortReason::Deadline => Self::new(
                StatusCode::GATEWAY_TIMEOUT,
                code,
                "the turn did not finish before its deadline: send less, or ask for fewer tokens",
            ),
            AbortReason::EngineFailed => Self::new(
                StatusCode::BAD_GATEWAY,
                code,
                "the engine refused or failed this request: another try may fail the same way",
            ),
            AbortReason::TooLong => Self::field(
                "max_tokens",
                "context_length_exceeded",
                "prompt and answer together do not fit any worker: shorten the prompt, or ask for fewer tokens",
            ),
            AbortReason::SessionBusy => Self {
                status: StatusCode::TOO_MANY_REQUESTS,
                ..Self::unavailable(
                    code,
                    "too many turns of this session are waiting: send them one after the other",
                    hint,
                )
            },
            AbortReason::ClientGone => {
                Self::new(StatusCode::BAD_GATEWAY, code, "the turn was cancelled: send it again")
            }
            AbortReason::PartnerFailed
            | AbortReason::DecodeLost
            | AbortReason::PrefillLost
            | AbortReason::SourceLost
            | AbortReason::TransferFailed
            | AbortReason::Superseded
            | AbortReason::RetriesSpent => Self::unavailable(
                code,
                format!("no worker could finish this turn ({code}): try again in {hint} s"),
                hint,
            ),
        }
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// `{"error": {...}}`.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind(), "param": self.param, "code": self.code,
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
