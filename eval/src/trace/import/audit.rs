//! Audit logs of an LLM proxy: one request a line with `instance_id`, `ts`, `messages` and `audit.prompt_tokens`,
//! `audit.completion_tokens` (digest §4.2, `convert_audit_to_trace`).
//!
//! Nothing of the text is kept, and nothing is known of sharing but lengths: a prompt that is no shorter than the one
//! before continues it; a shorter one starts anew. (The prototype's converter lets it keep all blocks, more than it has
//! room for, and drops the tokens that do not fill a block in each turn; here the blocks are those of the whole prompt.)

use super::super::error::LineError;
use super::super::fields::{Fields, invalid};
use super::super::flat::timestamp;
use super::super::read::for_each_line;
use super::super::tokens::namespace_of;
use super::super::{BlockRun, MAX_TOKENS, PROTOTYPE_BLOCK_TOKENS, Report, Session, Trace, Turn};
use super::ImportError;
use pinion_schemas::Micros;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::BufRead;

/// Answer of a request whose log has none, tokens (the prototype's).
const OUTPUT_UNKNOWN: u32 = 128;
/// Characters that are taken for a token where the log does not count the prompt (the prototype's).
const CHARS_PER_TOKEN: usize = 4;

struct Request {
    at: Micros,
    input: u32,
    output: u32,
}

fn characters(message: &Value) -> usize {
    match message {
        Value::String(text) => text.chars().count(),
        Value::Array(parts) => parts.iter().map(characters).sum(),
        Value::Object(fields) => fields.values().map(characters).sum(),
        _ => 0,
    }
}

fn time(fields: &Fields<'_>) -> Result<Micros, LineError> {
    match fields.get("ts") {
        Some(Value::String(text)) => timestamp(text.trim_end_matches('Z'))
            .map(Micros)
            .ok_or_else(|| invalid("ts".to_owned(), "seconds, or a time like 2026-01-31T23:59:59.5Z", text)),
        _ => fields.time("ts", 1.0),
    }
}

/// A count that is there and above 0.
fn count(audit: Option<&Value>, key: &str) -> Result<Option<u32>, LineError> {
    let Some(value) = audit.and_then(|a| a.get(key)).filter(|v| !v.is_null()) else {
        return Ok(None);
    };
    let wrong = || {
        invalid(
            format!("audit.{key}"),
            "a whole number of tokens up to 16777216",
            &value.to_string(),
        )
    };
    let number = value
        .as_i64()
        .filter(|n| *n <= i64::from(MAX_TOKENS))
        .ok_or_else(wrong)?;
    Ok(u32::try_from(number).ok().filter(|n| *n > 0))
}

fn request(text: &str) -> Result<(String, Request), LineError> {
    let value: Value = serde_json::from_str(text).map_err(|e| LineError::Json { message: e.to_string() })?;
    let fields = Fields::new(&value, String::new())?;
    let instance = fields.text("instance_id")?.to_owned();
    let input = if let Some(input) = count(fields.get("audit"), "prompt_tokens")? {
        input
    } else {
        let contents = fields.list("messages")?.iter().filter_map(|m| m.get("content"));
        let letters: usize = contents.map(characters).sum();
        u32::try_from(letters / CHARS_PER_TOKEN)
            .unwrap_or(MAX_TOKENS)
            .min(MAX_TOKENS)
    };
    let output = count(fields.get("audit"), "completion_tokens")?.unwrap_or(OUTPUT_UNKNOWN);
    let at = time(&fields)?;
    Ok((instance, Request { at, input, output }))
}

fn session(id: String, mut requests: Vec<Request>, origin: Micros) -> Session {
    requests.sort_by_key(|r| r.at);
    let first = requests.first().map_or(origin, |r| r.at);
    let mut session = Session {
        namespace: namespace_of(&id),
        id,
        start: first.since(origin),
        turns: Vec::with_capacity(requests.len()),
        head_tokens: 0,
        parent: None,
        agent_head: false,
    };
    // Ids of the prompt: from `base` on. What starts anew starts behind all that was used.
    let (mut base, mut used, mut before) = (0, 0, (first, 0));
    for request in requests {
        let blocks = request.input / PROTOTYPE_BLOCK_TOKENS;
        if request.input < before.1 {
            base = used;
        }
        used = used.max(base + u64::from(blocks));
        session.turns.push(Turn {
            input_tokens: request.input,
            output_tokens: request.output,
            at: request.at.since(first),
            think: request.at.since(before.0),
            blocks: (blocks > 0)
                .then_some(BlockRun {
                    start: base,
                    len: blocks,
                })
                .into_iter()
                .collect(),
            block_tokens: PROTOTYPE_BLOCK_TOKENS,
        });
        before = (request.at, request.input);
    }
    session
}

/// Reads an audit log: each instance is a session, its requests in the order of their times, in blocks of 24 tokens that no
/// other session shares. Holds three numbers for each request. Broken lines are left out, or, if `strict`, end it.
///
/// # Errors
/// [`ImportError::Read`], as [`super::super::stream`].
pub fn audit(reader: impl BufRead, strict: bool) -> Result<Report, ImportError> {
    let mut instances = BTreeMap::<String, Vec<Request>>::new();
    let broken = for_each_line(reader, strict, |text| {
        let (instance, request) = request(text)?;
        instances.entry(instance).or_default().push(request);
        Ok(())
    })?;
    let origin = instances.values().flatten().map(|r| r.at).min().unwrap_or_default();
    let mut sessions: Vec<Session> = instances.into_iter().map(|(id, r)| session(id, r, origin)).collect();
    sessions.sort_by_key(|s| s.start);
    Ok(Report {
        trace: Trace { sessions },
        broken,
    })
}
