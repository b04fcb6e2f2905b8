//! Our messages and the client library's, each made from the other.

use std::collections::BTreeMap;

use async_nats::{HeaderMap, HeaderName, HeaderValue};

use crate::{BusError, Headers, Message};

pub(super) fn outgoing(headers: &Headers) -> Result<Option<HeaderMap>, BusError> {
    let mut map = HeaderMap::new();
    for (name, value) in &headers.0 {
        let name: HeaderName = name.parse().map_err(|_| BusError::BadHeaders)?;
        map.append(name, value.parse::<HeaderValue>().map_err(|_| BusError::BadHeaders)?);
    }
    Ok(if map.is_empty() { None } else { Some(map) })
}

pub(super) fn incoming(message: async_nats::Message) -> Message {
    let mut sorted: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, values) in message.headers.iter().flat_map(HeaderMap::iter) {
        sorted
            .entry(name.to_string())
            .or_default()
            .extend(values.iter().map(ToString::to_string));
    }
    let flat = sorted
        .into_iter()
        .flat_map(|(name, values)| values.into_iter().map(move |value| (name.clone(), value)));
    Message {
        subject: message.subject.to_string(),
        reply: message.reply.map(|reply| reply.to_string()),
        headers: Headers(flat.collect()),
        payload: message.payload,
    }
}
