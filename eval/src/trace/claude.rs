//! Claude Code sessions: one session per line, sub-agents inside.
//!
//! Pinion writes this format too ([`super::write_session`]), with what else a trace may hold in fields that the public
//! corpus does not have: `start` (s from the start of the trace, 0 if absent), `hash_id_scope` `"global"` (block ids mean
//! the same in all such sessions), and `block_size` 0 where no blocks are known.

use super::error::LineError;
use super::fields::{Fields, invalid};
use super::tokens::namespace_of;
use super::{Session, Sink, Turn};
use pinion_schemas::Micros;
use serde_json::Value;
use std::collections::BTreeSet;

#[derive(Default)]
pub(super) struct Reader {
    seen: BTreeSet<String>,
    /// Sessions and agents handed on.
    sessions: usize,
}

fn time_or_zero(fields: &Fields<'_>, key: &str) -> Result<Micros, LineError> {
    fields.get(key).map_or(Ok(Micros::ZERO), |_| fields.time(key, 1.0))
}

fn turn(fields: &Fields<'_>, block_tokens: u32) -> Result<Turn, LineError> {
    let input_tokens = fields.tokens("in")?;
    let blocks = fields.runs("hash_runs")?;
    if block_tokens == 0 && !blocks.is_empty() {
        return Err(invalid(
            "block_size".to_owned(),
            "1 token or more, as there are blocks",
            "0",
        ));
    }
    fields.check_room("hash_runs", &blocks, input_tokens, block_tokens)?;
    Ok(Turn {
        input_tokens,
        output_tokens: fields.tokens("out")?,
        at: fields.time("t", 1.0)?,
        think: time_or_zero(fields, "think_time")?,
        blocks,
        block_tokens,
    })
}

fn head(fields: &Fields<'_>) -> Result<u32, LineError> {
    Ok(fields
        .tokens_or_zero("tool_tokens")?
        .saturating_add(fields.tokens_or_zero("system_tokens")?))
}

fn starts_alike(a: &[Turn], b: &[Turn]) -> bool {
    let first = |turns: &[Turn]| turns.first().and_then(|t| t.blocks.first()).map(|r| r.start);
    first(a).is_some() && first(a) == first(b)
}

/// A sub-agent entry at `fields`; `number` makes its id unique.
fn agent(fields: &Fields<'_>, parent: &Session, block: u32, number: usize) -> Result<Session, LineError> {
    let mut turns = Vec::new();
    for (i, value) in fields.list("requests")?.iter().enumerate() {
        let entry = Fields::new(value, fields.path(&format!("requests[{i}].")))?;
        turns.push(turn(&entry, block)?);
    }
    let name = if fields.get("agent_id").is_some() {
        fields.text("agent_id")?
    } else {
        "agent"
    };
    Ok(Session {
        id: format!("{}/{number}-{name}", parent.id),
        start: fields.time("t", 1.0)?,
        turns,
        namespace: parent.namespace,
        head_tokens: head(fields)?,
        parent: Some(parent.id.clone()),
        agent_head: true,
    })
}

impl Reader {
    pub(super) fn line(&mut self, value: &Value, sink: &mut impl Sink) -> Result<(), LineError> {
        let fields = Fields::new(value, String::new())?;
        let id = fields.text("id")?.to_owned();
        if self.seen.contains(&id) {
            return Err(LineError::Duplicate {
                field: "id".to_owned(),
                value: id,
            });
        }
        let block = fields.tokens("block_size")?;
        let namespace = match fields.get("hash_id_scope").and_then(Value::as_str) {
            Some("global") => 0,
            _ => namespace_of(&id),
        };
        let mut session = Session {
            namespace,
            id,
            start: time_or_zero(&fields, "start")?,
            turns: Vec::new(),
            head_tokens: head(&fields)?,
            parent: None,
            agent_head: false,
        };
        let mut agents = Vec::new();
        for (i, value) in fields.list("requests")?.iter().enumerate() {
            let entry = Fields::new(value, format!("requests[{i}]."))?;
            if entry.get("type").and_then(Value::as_str) == Some("subagent") {
                agents.push(agent(&entry, &session, block, i)?);
            } else {
                session.turns.push(turn(&entry, block)?);
            }
        }
        // Equal ids must give equal tokens: an agent that starts on the parent's blocks has the parent's head.
        for agent in &mut agents {
            if starts_alike(&agent.turns, &session.turns) {
                agent.head_tokens = session.head_tokens;
                agent.agent_head = false;
            }
        }
        self.seen.insert(session.id.clone());
        for session in std::iter::once(session).chain(agents) {
            sink.whole(self.sessions, session);
            self.sessions += 1;
        }
        Ok(())
    }
}
