//! Conversations as `ShareGPT` writes them: `{"id": …, "conversations": [{"from": "human", "value": …}, {"from": "gpt",
//! "value": …}, …]}`, in one JSON list or one a line (digest §4.2, `convert_inferact_to_trace`).
//!
//! Each pair of human and gpt is a turn, whose prompt is all that was said before it. Blocks are named by their tokens and all
//! that stands before them, over the whole file; the last, partial block of a prompt has a name too, which its next turn
//! does not have.

use super::super::error::LineError;
use super::super::fields::{Fields, invalid, to_runs};
use super::super::read::MAX_LINE_BYTES;
use super::super::{MAX_TOKENS, PROTOTYPE_BLOCK_TOKENS, Session, Turn};
use super::ImportError;
use pinion_schemas::Micros;
use pinion_schemas::hash::{ChainHasher, PageHash};
use serde::de::{Deserializer as _, Error as _, SeqAccess, Visitor};
use serde_json::Value;
use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, Read};
use std::ops::ControlFlow;

/// How conversations become sessions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShareGptOptions {
    /// Only the first conversations.
    pub max_conversations: usize,
    /// From the start of one session to that of the next; the prototype's is 1 s.
    pub stagger: Micros,
    /// From one request of a session to the next; the prototype's is 2.5 s.
    pub gap: Micros,
    /// Tokens per block.
    pub block_tokens: u32,
}

impl Default for ShareGptOptions {
    fn default() -> Self {
        Self {
            max_conversations: usize::MAX,
            stagger: Micros::from_secs(1),
            gap: Micros::from_millis(2_500),
            block_tokens: PROTOTYPE_BLOCK_TOKENS,
        }
    }
}

/// What came of a file of conversations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conversations {
    /// Those that became sessions.
    pub sessions: usize,
    /// Those without any answer.
    pub left_out: usize,
}

/// Block ids of a prompt: the first 63 bits of each block's name.
fn ids(tokens: &[u32], block_tokens: u32) -> Vec<u64> {
    let mut chain = ChainHasher::new(block_tokens, &[]);
    let mut names = chain.push(tokens);
    if let Ok(len @ 1..) = u32::try_from(chain.tail().len()) {
        let mut last = names
            .last()
            .map_or_else(|| ChainHasher::new(len, &[]), |tip| ChainHasher::resume(len, *tip));
        names.extend(last.push(chain.tail()));
    }
    let id = |PageHash(name): &PageHash| name.iter().take(8).fold(0, |id, byte| id << 8 | u64::from(*byte)) >> 1;
    names.iter().map(id).collect()
}

fn session(
    value: &Value,
    number: usize,
    encode: &impl Fn(&str) -> Vec<u32>,
    options: &ShareGptOptions,
) -> Result<Session, LineError> {
    let fields = Fields::new(value, String::new())?;
    let mut session = Session {
        // Ids are not unique in every file.
        id: format!("{number}-{}", fields.text("id").unwrap_or("conversation")),
        start: Micros(options.stagger.0.saturating_mul(number as u64)),
        turns: Vec::new(),
        namespace: 0,
        head_tokens: 0,
        parent: None,
        agent_head: false,
    };
    let (mut prompt, mut asked) = (Vec::new(), false);
    for (i, message) in fields.list("conversations")?.iter().enumerate() {
        let message = Fields::new(message, format!("conversations[{i}]."))?;
        let said = encode(message.text("value")?);
        match message.text("from")? {
            "human" | "user" => asked = true,
            "system" => {}
            // An answer to nothing is context, like anything said before.
            "gpt" | "chatgpt" | "assistant" if !asked => {}
            "gpt" | "chatgpt" | "assistant" => {
                session
                    .turns
                    .push(turn(&prompt, said.len(), session.turns.len(), options)?);
                asked = false;
            }
            other => {
                return Err(invalid(
                    message.path("from"),
                    "human, user, gpt, chatgpt, assistant or system",
                    other,
                ));
            }
        }
        prompt.extend(said);
    }
    Ok(session)
}

fn turn(prompt: &[u32], answer: usize, index: usize, options: &ShareGptOptions) -> Result<Turn, LineError> {
    let count = |tokens: usize| {
        let count = u32::try_from(tokens).ok().filter(|n| *n <= MAX_TOKENS);
        count.ok_or_else(|| invalid("value".to_owned(), "at most 16777216 tokens", &tokens.to_string()))
    };
    Ok(Turn {
        input_tokens: count(prompt.len())?,
        output_tokens: count(answer)?,
        at: Micros(options.gap.0.saturating_mul(index as u64)),
        think: if index == 0 { Micros::ZERO } else { options.gap },
        blocks: to_runs(&ids(prompt, options.block_tokens)),
        block_tokens: options.block_tokens,
    })
}

/// Ends with an error when one conversation is longer than [`MAX_LINE_BYTES`].
struct Limited<'a, R> {
    reader: R,
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Limited<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        let left = self.left.get().checked_sub(read as u64);
        self.left
            .set(left.ok_or_else(|| io::Error::other("a conversation has more than 64 MiB"))?);
        Ok(read)
    }
}

/// Words of an error that nobody sees.
const ENOUGH: &str = "enough";

/// Whether to go on.
type Next = Result<ControlFlow<()>, ImportError>;

/// Hands on the items of a JSON list one by one, until it is told to stop.
struct Items<'a, F> {
    each: F,
    stopped: &'a mut Option<ImportError>,
}

impl<'de, F: FnMut(Value) -> Next> Visitor<'de> for Items<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of conversations")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        while let Some(item) = items.next_element()? {
            match (self.each)(item) {
                Ok(ControlFlow::Continue(())) => {}
                // A parser can be left only by an error; the caller knows this one.
                Ok(ControlFlow::Break(())) => return Err(A::Error::custom(ENOUGH)),
                Err(error) => {
                    *self.stopped = Some(error);
                    return Err(A::Error::custom(ENOUGH));
                }
            }
        }
        Ok(())
    }
}

/// Gives `each` the conversations of a file one by one.
fn each_conversation(mut reader: impl BufRead, mut each: impl FnMut(Value) -> Next) -> Result<(), ImportError> {
    let list = loop {
        match reader.fill_buf().map_err(serde_json::Error::io)?.first() {
            Some(byte) if byte.is_ascii_whitespace() => reader.consume(1),
            first => break first == Some(&b'['),
        }
    };
    let left = Cell::new(MAX_LINE_BYTES);
    let limited = Limited { reader, left: &left };
    let mut enough = false;
    let mut each = |value| {
        left.set(MAX_LINE_BYTES);
        let next = each(value)?;
        enough = next.is_break();
        Ok(next)
    };
    if !list {
        for value in serde_json::Deserializer::from_reader(limited).into_iter() {
            if each(value?)?.is_break() {
                break;
            }
        }
        return Ok(());
    }
    let mut stopped = None;
    let mut json = serde_json::Deserializer::from_reader(limited);
    let read = json.deserialize_seq(Items {
        each,
        stopped: &mut stopped,
    });
    match stopped {
        Some(error) => Err(error),
        None if enough => Ok(()),
        None => Ok(read?),
    }
}

/// Reads conversations one by one and hands on those that have an answer as sessions. `encode` makes tokens of a text.
///
/// # Errors
/// [`ImportError::Json`] where the file is none, or holds a conversation of more than 64 MiB;
/// [`ImportError::Conversation`] where one is not as said above; [`ImportError::Write`] what `sink` says.
pub fn sharegpt(
    reader: impl BufRead,
    encode: impl Fn(&str) -> Vec<u32>,
    options: &ShareGptOptions,
    mut sink: impl FnMut(Session) -> io::Result<()>,
) -> Result<Conversations, ImportError> {
    let (mut number, mut done) = (0, Conversations::default());
    each_conversation(reader, |value| {
        if number == options.max_conversations {
            return Ok(ControlFlow::Break(()));
        }
        number += 1;
        let session = session(&value, done.sessions, &encode, options)
            .map_err(|error| ImportError::Conversation { number, error })?;
        if session.turns.is_empty() {
            done.left_out += 1;
        } else {
            done.sessions += 1;
            sink(session).map_err(ImportError::Write)?;
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(done)
}
