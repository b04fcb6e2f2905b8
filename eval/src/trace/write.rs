//! Traces as files: the Claude Code session format, one session per line, which `pinion replay` and all else here read.

use super::{BlockRun, Session, Trace, Turn};
use pinion_schemas::Micros;
use serde::{Serialize, Serializer};
use std::io::{self, Write};

#[derive(Serialize)]
struct Line<'a> {
    id: &'a str,
    #[serde(skip_serializing_if = "is_zero", serialize_with = "seconds")]
    start: Micros,
    block_size: u32,
    hash_id_scope: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_tokens: Option<u32>,
    requests: Vec<Entry<'a>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Entry<'a> {
    Turn {
        #[serde(serialize_with = "seconds")]
        t: Micros,
        #[serde(rename = "in")]
        input: u32,
        out: u32,
        #[serde(serialize_with = "seconds")]
        think_time: Micros,
        #[serde(serialize_with = "pairs")]
        hash_runs: &'a [BlockRun],
    },
    Agent {
        #[serde(serialize_with = "seconds")]
        t: Micros,
        r#type: &'static str,
        agent_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        system_tokens: Option<u32>,
        requests: Vec<Entry<'a>>,
    },
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(time: &Micros) -> bool {
    *time == Micros::ZERO
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn seconds<S: Serializer>(time: &Micros, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.0 as f64 / 1e6)
}

fn pairs<S: Serializer>(runs: &&[BlockRun], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(runs.iter().map(|r| [r.start, u64::from(r.len)]))
}

fn entry(turn: &Turn) -> Entry<'_> {
    Entry::Turn {
        t: turn.at,
        input: turn.input_tokens,
        out: turn.output_tokens,
        think_time: turn.think,
        hash_runs: &turn.blocks,
    }
}

fn some(tokens: u32) -> Option<u32> {
    (tokens > 0).then_some(tokens)
}

/// Place among the parent's entries and name of a sub-agent, from its id `<parent>/<place>-<name>`.
fn place<'a>(agent: &'a Session, parent: &str) -> Option<(usize, &'a str)> {
    let (place, name) = agent.id.strip_prefix(parent)?.strip_prefix('/')?.split_once('-')?;
    Some((place.parse().ok()?, name))
}

/// Writes one line: `session` with its `agents` inside, which keep their place among the requests and so their ids (as far as
/// there are enough requests around them).
///
/// # Errors
/// Those of `writer`.
pub fn write_session(session: &Session, agents: &[&Session], writer: &mut (impl Write + ?Sized)) -> io::Result<()> {
    let mut placed: Vec<(usize, &str, &Session)> = agents
        .iter()
        .map(|agent| {
            let (place, name) = place(agent, &session.id).unwrap_or((usize::MAX, &agent.id));
            (place, name, *agent)
        })
        .collect();
    placed.sort_by_key(|(place, _, _)| *place);
    let mut turns = session.turns.iter();
    let mut requests = Vec::with_capacity(session.turns.len() + agents.len());
    for (place, agent_id, agent) in placed {
        let missing = place.saturating_sub(requests.len());
        requests.extend(turns.by_ref().take(missing).map(entry));
        requests.push(Entry::Agent {
            t: agent.start,
            r#type: "subagent",
            agent_id,
            system_tokens: some(agent.head_tokens),
            requests: agent.turns.iter().map(entry).collect(),
        });
    }
    requests.extend(turns.map(entry));
    let line = Line {
        id: &session.id,
        start: session.start,
        block_size: session.turns.first().map_or(0, |t| t.block_tokens),
        hash_id_scope: if session.namespace == 0 { "global" } else { "local" },
        system_tokens: some(session.head_tokens),
        requests,
    };
    serde_json::to_writer(&mut *writer, &line)?;
    writer.write_all(b"\n")
}

/// Writes a trace, one session per line. Sub-agents go into the line of their parent; those without one are left out.
///
/// # Errors
/// Those of `writer`.
pub fn write(trace: &Trace, writer: &mut (impl Write + ?Sized)) -> io::Result<()> {
    let mut agents = std::collections::HashMap::<&str, Vec<&Session>>::new();
    for (parent, agent) in trace.sessions.iter().filter_map(|s| Some((s.parent.as_deref()?, s))) {
        agents.entry(parent).or_default().push(agent);
    }
    for session in trace.sessions.iter().filter(|s| s.parent.is_none()) {
        let inside = agents.get(session.id.as_str()).map_or(&[][..], Vec::as_slice);
        write_session(session, inside, writer)?;
    }
    Ok(())
}
