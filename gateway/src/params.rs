//! What a request may set about its answer: model, length, sampling. Each is checked, and refused by name.

use pinion_schemas::{RequestId, Sampling};

use crate::Gateway;
use crate::error::ApiError;
use crate::openai::Common;
use axum::http::StatusCode;

/// Highest temperature, as in the API of `OpenAI`.
const TEMPERATURE_MAX: f64 = 2.0;
/// A sampling is in thousandths.
const MILLI: f64 = 1_000.0;

pub(crate) fn check_model(gateway: &Gateway, common: &Common) -> Result<(), ApiError> {
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

pub(crate) fn refuse_unserved(common: &Common) -> Result<(), ApiError> {
    if common.n.is_some_and(|n| n != 1) {
        return Err(ApiError::field(
            "n",
            "unsupported",
            "one choice is served per request: send 1 or leave it out",
        ));
    }
    Ok(())
}

/// Most tokens of the answer to a prompt of `prompt` tokens.
pub(crate) fn max_new_tokens(gateway: &Gateway, common: &Common, prompt: usize) -> Result<u32, ApiError> {
    let most = gateway.turn_tokens_max();
    let room = most.saturating_sub(prompt);
    let (field, asked) = match (common.max_completion_tokens, common.max_tokens) {
        (Some(asked), _) => ("max_completion_tokens", asked),
        (None, Some(asked)) => ("max_tokens", asked),
        (None, None) => return Ok(gateway.config.default_max_tokens.min(room as u32).max(1)),
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

/// How tokens are chosen. Greedy without `temperature` (`OpenAI`'s default of 1 is for chats; agents want the likeliest
/// answer, and repeatable). A request that names no seed gets one that is its own, and keeps it on every worker.
pub(crate) fn sampling(common: &Common, request: RequestId) -> Result<Sampling, ApiError> {
    let temperature = thousandths("temperature", common.temperature, TEMPERATURE_MAX)?;
    let top_p = thousandths("top_p", common.top_p, 1.0)?;
    let Some(temperature_milli @ 1..) = temperature else {
        return Ok(Sampling::GREEDY);
    };
    Ok(Sampling {
        temperature_milli,
        // 0 would be all of the mass, and means the likeliest token alone.
        top_p_milli: top_p.map_or(Sampling::GREEDY.top_p_milli, |p| p.max(1)),
        seed: common.seed.map_or(request.0 as u64, i64::cast_unsigned),
    })
}

fn thousandths(field: &str, value: Option<f64>, most: f64) -> Result<Option<u32>, ApiError> {
    let Some(value) = value else { return Ok(None) };
    if !(0.0..=most).contains(&value) {
        let message = format!("{value}: use a number from 0 to {most}, or leave it out");
        return Err(ApiError::field(field, "invalid_value", message));
    }
    Ok(Some((value * MILLI).round() as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &str) -> Result<Sampling, ApiError> {
        sampling(&crate::openai::read(body.as_bytes())?, RequestId(77))
    }

    #[test]
    fn sampling_is_greedy_until_asked() {
        let is = |temperature_milli, top_p_milli, seed| Sampling {
            temperature_milli,
            top_p_milli,
            seed,
        };
        for (body, want) in [
            ("{}", Sampling::GREEDY),
            (r#"{"temperature": 0, "top_p": 0.5, "seed": 3}"#, Sampling::GREEDY),
            (r#"{"temperature": null, "top_p": 0.5}"#, Sampling::GREEDY),
            (r#"{"temperature": 1}"#, is(1_000, 1_000, 77)),
            (r#"{"temperature": 0.7, "top_p": 0.95, "seed": 3}"#, is(700, 950, 3)),
            (r#"{"temperature": 2, "top_p": 0, "seed": -1}"#, is(2_000, 1, u64::MAX)),
        ] {
            assert_eq!(of(body).unwrap(), want, "{body}");
        }
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        for (body, field) in [
            (r#"{"temperature": -0.1}"#, "temperature"),
            (r#"{"temperature": 2.1}"#, "temperature"),
            (r#"{"top_p": 1.01}"#, "top_p"),
            (r#"{"top_p": -1}"#, "top_p"),
            (r#"{"seed": 1.5}"#, "seed"),
            (r#"{"temperature": "hot"}"#, "temperature"),
        ] {
            assert_eq!(of(body).unwrap_err().param.as_deref(), Some(field), "{body}");
        }
    }
}
