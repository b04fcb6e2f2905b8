//! Formats with one request per line: Mooncake, the prototype's, Azure.

use super::error::LineError;
use super::fields::{Fields, invalid, micros, to_runs};
use super::{MAX_TOKENS, MOONCAKE_BLOCK_TOKENS, Session, Sink, Turn};
use pinion_schemas::Micros;
use serde_json::Value;
use std::collections::BTreeMap;

const AZURE_HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

pub(super) fn is_azure_header(line: &str) -> bool {
    line.eq_ignore_ascii_case(AZURE_HEADER)
}

/// A session without turns that starts at `start`, with block ids of the whole file.
fn empty_session(id: String, start: Micros) -> Session {
    Session {
        id,
        start,
        turns: Vec::new(),
        namespace: 0,
        head_tokens: 0,
        parent: None,
        agent_head: false,
    }
}

/// When the sessions handed on began, and when their last turns were sent.
#[derive(Default)]
struct Open(Vec<(Micros, Micros)>);

impl Open {
    /// The number of a new session.
    fn begin(&mut self, id: impl FnOnce(usize) -> String, at: Micros, sink: &mut impl Sink) -> usize {
        let number = self.0.len();
        sink.session(empty_session(id(number), at));
        self.0.push((at, at));
        number
    }

    /// Hands on a turn that was sent at `at` of the trace.
    fn append(&mut self, number: usize, at: Micros, mut turn: Turn, sink: &mut impl Sink) {
        if let Some((start, last)) = self.0.get_mut(number) {
            turn.at = at.since(*start);
            turn.think = at.since(*last);
            *last = at;
            sink.turn(number, turn);
        }
    }
}

/// The turn of a line with `hash_ids`, its time still unset, and its block ids.
fn hashed_turn(fields: &Fields<'_>, block_tokens: u32) -> Result<(Turn, Vec<u64>), LineError> {
    let input_tokens = fields.tokens("input_length")?;
    let ids = fields.ids("hash_ids")?;
    let blocks = to_runs(&ids);
    fields.check_room("hash_ids", &blocks, input_tokens, block_tokens)?;
    let output_tokens = fields.tokens("output_length")?;
    Ok((
        Turn {
            input_tokens,
            output_tokens,
            at: Micros::ZERO,
            think: Micros::ZERO,
            blocks,
            block_tokens,
        },
        ids,
    ))
}

/// Sessions by longest shared prefix: a request continues the session whose newest end (last block, or the one before,
/// as the last may be partial) lies deepest on the request's own prefix; the first block, which all share, never counts.
#[derive(Default)]
pub(super) struct Mooncake {
    /// Block id at the end of some turn → index of the last session that had it.
    ends: BTreeMap<u64, usize>,
    open: Open,
}

impl Mooncake {
    pub(super) fn line(&mut self, value: &Value, sink: &mut impl Sink) -> Result<(), LineError> {
        let fields = Fields::new(value, String::new())?;
        let at = fields.time("timestamp", 1e-3)?;
        let (turn, ids) = hashed_turn(&fields, MOONCAKE_BLOCK_TOKENS)?;
        let found = ids.iter().skip(1).rev().find_map(|id| self.ends.get(id).copied());
        let index = found.unwrap_or_else(|| self.open.begin(|number| format!("m{number}"), at, sink));
        for id in ids.iter().rev().take(2) {
            self.ends.insert(*id, index);
        }
        self.open.append(index, at, turn, sink);
        Ok(())
    }
}

/// Chains of `parent_chat_id`; −1 starts a session, which is named after its first chat.
pub(super) struct Prototype {
    block_tokens: u32,
    /// Chat id → index of its session.
    chats: BTreeMap<i64, usize>,
    open: Open,
}

impl Prototype {
    pub(super) fn new(block_tokens: u32) -> Self {
        Self {
            block_tokens: block_tokens.max(1),
            chats: BTreeMap::new(),
            open: Open::default(),
        }
    }

    pub(super) fn line(&mut self, value: &Value, sink: &mut impl Sink) -> Result<(), LineError> {
        let fields = Fields::new(value, String::new())?;
        let chat = fields.integer("chat_id")?;
        let parent = fields.integer("parent_chat_id")?;
        let at = fields.time("timestamp", 1.0)?;
        let (turn, _) = hashed_turn(&fields, self.block_tokens)?;
        if self.chats.contains_key(&chat) {
            return Err(LineError::Duplicate {
                field: "chat_id".to_owned(),
                value: chat.to_string(),
            });
        }
        let index = if parent < 0 {
            self.open.begin(|_| chat.to_string(), at, sink)
        } else {
            *self.chats.get(&parent).ok_or(LineError::UnknownParent { parent })?
        };
        self.chats.insert(chat, index);
        self.open.append(index, at, turn, sink);
        Ok(())
    }
}

/// `2023-11-16 18:15:46.6805900` as microseconds since 1970, proleptic Gregorian, no time zone.
pub(super) fn timestamp(text: &str) -> Option<u64> {
    let (date, clock) = text.trim().split_once([' ', 'T'])?;
    let mut date = date.split('-').map(|p| p.parse::<u64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let mut clock = clock.split(':');
    let hour = clock.next()?.parse::<u64>().ok()?;
    let minute = clock.next()?.parse::<u64>().ok()?;
    let second = micros(clock.next()?.parse::<f64>().ok()?)?;
    let sound = (1970..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second.0 < 61_000_000
        && date.next().is_none()
        && clock.next().is_none();
    if !sound {
        return None;
    }
    // Days from civil: years that start in March put the leap day last.
    let (y, m) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = (365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1).checked_sub(719_468)?;
    Some(((days * 24 + hour) * 60 + minute) * 60_000_000 + second.0)
}

#[derive(Default)]
pub(super) struct Azure {
    /// Time of the first request, µs since 1970.
    origin: Option<u64>,
    open: Open,
}

impl Azure {
    pub(super) fn line(&mut self, text: &str, sink: &mut impl Sink) -> Result<(), LineError> {
        if is_azure_header(text) {
            return Ok(());
        }
        let columns: Vec<&str> = text.split(',').collect();
        let [time, input, output] = columns.as_slice() else {
            return Err(LineError::Columns { found: columns.len() });
        };
        let now = timestamp(time)
            .ok_or_else(|| invalid("TIMESTAMP".to_owned(), "a time like 2023-11-16 18:15:46.68", time))?;
        let count = |name: &str, text: &str| {
            let parsed = text.trim().parse::<u32>().ok().filter(|n| *n <= MAX_TOKENS);
            parsed.ok_or_else(|| invalid(name.to_owned(), "a whole number of tokens from 0 to 16777216", text))
        };
        let (input_tokens, output_tokens) = (count("ContextTokens", input)?, count("GeneratedTokens", output)?);
        let start = Micros(now.saturating_sub(*self.origin.get_or_insert(now)));
        let number = self.open.begin(|number| format!("a{number}"), start, sink);
        let turn = Turn {
            input_tokens,
            output_tokens,
            at: Micros::ZERO,
            think: Micros::ZERO,
            blocks: Vec::new(),
            block_tokens: 0,
        };
        self.open.append(number, start, turn, sink);
        Ok(())
    }
}
