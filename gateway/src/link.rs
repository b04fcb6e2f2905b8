//! The single steps a turn takes about its owner: find, submit, probe, cancel. Each is a future of its own; what follows
//! from how it ended is decided in [`crate::turn`].

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use pinion_bus::{Bus, BusError, Headers};
use pinion_schemas::messages::{Accepted, Cancel, Failed, Probe, ProbeAck, Submit};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::trace_context::{self, TraceContext};
use pinion_schemas::wire::{self, Schema};
use pinion_schemas::{Epoch, RequestId, SessionId, WorkerId};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::owners::Owners;

/// How long an owner may take to accept; accepting is only writing down.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an owner may take to answer a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest and longest rest before the owner is looked up again, without jitter.
const REST: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// What every turn needs.
pub struct Reach {
    /// The bus.
    pub bus: Arc<dyn Bus>,
    /// Names on it.
    pub subjects: Subjects,
    /// Who owns what.
    pub owners: Arc<dyn Owners>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// The gateway ends now: turns that still run are given up.
    pub closing: CancellationToken,
}

/// How a step ended.
pub(crate) enum Link {
    /// The owner has the turn.
    Accepted(Epoch),
    /// The owner does not take the turn.
    Refused(Failed),
    /// Nobody answered, or nothing readable.
    Unreachable(String),
    /// No owner could ever get it.
    Impossible(ApiError),
    /// The owner was looked up.
    Found,
    /// It was quiet long enough.
    Quiet,
    /// The owner answers probes.
    Alive(Epoch),
}

/// A step on its way.
pub(crate) type Step = BoxFuture<'static, Link>;

/// Gives the turn to `owner`.
pub(crate) fn submit(reach: &Reach, owner: &WorkerId, submit: &Submit, trace: TraceContext, left: Duration) -> Step {
    let subject = reach.subjects.worker(Kind::Router, owner, "submit");
    let encoded = wire::encode(submit);
    let bus = Arc::clone(&reach.bus);
    async move {
        let payload = match encoded {
            Ok(payload) => Bytes::from(payload),
            Err(error) => return Link::Impossible(too_large(&error.to_string())),
        };
        let headers = Headers::new().with(trace_context::HEADER, &trace.to_string());
        let asked = bus.request(subject.as_str(), headers, payload, SUBMIT_TIMEOUT.min(left));
        match asked.await {
            Ok(reply) => read_reply(&reply.payload),
            Err(error @ BusError::TooLarge { .. }) => Link::Impossible(too_large(&error.to_string())),
            Err(error) => Link::Unreachable(error.to_string()),
        }
    }
    .boxed()
}

/// Asks `owner` whether it is there.
pub(crate) fn probe(reach: &Reach, owner: &WorkerId, request: RequestId) -> Step {
    let subject = reach.subjects.worker(Kind::Router, owner, "probe");
    let nonce = request.0 as u64;
    let encoded = wire::encode(&Probe { nonce });
    let bus = Arc::clone(&reach.bus);
    async move {
        let payload = Bytes::from(encoded.unwrap_or_default());
        let asked = bus.request(subject.as_str(), Headers::new(), payload, PROBE_TIMEOUT);
        match asked.await.map(|reply| wire::decode::<ProbeAck>(&reply.payload)) {
            Ok(Ok(ack)) => Link::Alive(ack.epoch),
            Ok(Err(error)) => Link::Unreachable(error.to_string()),
            Err(error) => Link::Unreachable(error.to_string()),
        }
    }
    .boxed()
}

/// Looks the owner up after `rest`. If that fails, what was known is still known.
pub(crate) fn find(reach: Arc<Reach>, session: SessionId, rest: Duration) -> Step {
    async move {
        tokio::time::sleep(rest).await;
        if let Err(error) = reach.owners.refresh(&session).await {
            tracing::debug!(%error, "the owner could not be looked up");
        }
        Link::Found
    }
    .boxed()
}

/// Waits until the turn could have been quiet for `quiet`.
pub(crate) fn wait_for_quiet(since: Instant, quiet: Duration) -> Step {
    sleep_until(since + quiet).map(|()| Link::Quiet).boxed()
}

/// The rest after so many fails: doubling, between half and all of it by bits of the request's random id, so that turns
/// do not march in step.
pub(crate) fn rest(request: RequestId, fails: u32) -> Duration {
    let whole = REST.0.saturating_mul(1 << fails.min(10)).min(REST.1);
    let bits = (request.0 >> (fails % 8 * 8)) as u8;
    whole / 2 + whole / 2 * u32::from(bits) / 255
}

/// Tells the owner that nobody waits for the turn any more. If it does not hear it, its own deadline ends the turn.
pub(crate) fn cancel(reach: &Reach, owner: &WorkerId, submit: &Submit) {
    let cancel = Cancel {
        request: submit.request,
        session: submit.session.clone(),
    };
    let subject = reach.subjects.worker(Kind::Router, owner, "cancel");
    let bus = Arc::clone(&reach.bus);
    if let (Ok(payload), Ok(runtime)) = (wire::encode(&cancel), tokio::runtime::Handle::try_current()) {
        runtime.spawn(async move {
            if let Err(error) = bus.publish(subject.as_str(), Headers::new(), payload.into()).await {
                tracing::warn!(%error, "a cancel was not sent");
            }
        });
    }
}

fn read_reply(payload: &[u8]) -> Link {
    if wire::schema_of(payload) == Some(Failed::ID) {
        return match wire::decode::<Failed>(payload) {
            Ok(failed) => Link::Refused(failed),
            Err(error) => Link::Unreachable(error.to_string()),
        };
    }
    match wire::decode::<Accepted>(payload) {
        Ok(accepted) => Link::Accepted(accepted.epoch),
        Err(error) => Link::Unreachable(error.to_string()),
    }
}

fn too_large(why: &str) -> ApiError {
    let message = format!("the prompt does not fit one message ({why}): shorten it");
    ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_double_up_to_a_cap_and_differ_between_turns() {
        let a = RequestId(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        assert!(rest(a, 0) >= REST.0 / 2 && rest(a, 0) <= REST.0);
        assert!(rest(a, 3) >= REST.0 * 4);
        for fails in 0..100 {
            assert!(rest(a, fails) <= REST.1);
            assert_ne!(rest(a, fails), rest(RequestId(!a.0), fails));
        }
    }
}
