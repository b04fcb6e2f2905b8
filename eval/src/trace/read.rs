//! Line by line through a trace, whatever its format.

use super::error::{BrokenLine, LineError, ReadError};
use super::{Format, PROTOTYPE_BLOCK_TOKENS, Sink, Trace, claude, flat};
use serde_json::Value;
use std::io::{BufRead, Cursor, Read};

/// Longest accepted line, bytes. The longest of the public traces has under 1 MiB.
pub const MAX_LINE_BYTES: u64 = 64 << 20;
/// Most lines: 50 million. Readers keep some 50 bytes for each request or session, so this bounds them to a few GB; the
/// largest trace known has 2.1 million requests.
pub const MAX_LINES: u64 = 50_000_000;
/// Most broken lines that are passed over. A file with more of them is not what its first line says.
pub const MAX_BROKEN_LINES: usize = 1_000;

/// What was read, and what had to be left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The sound lines.
    pub trace: Trace,
    /// The other lines.
    pub broken: Vec<BrokenLine>,
}

/// The format whose first line (not the whole file) is `first_line`; `None` if it is none of them.
pub fn detect(first_line: &str) -> Option<Format> {
    let line = first_line.trim_start_matches('\u{feff}').trim();
    if flat::is_azure_header(line) {
        return Some(Format::AzureCsv);
    }
    let Ok(Value::Object(map)) = serde_json::from_str::<Value>(line) else {
        return None;
    };
    let has = |key: &str| map.contains_key(key);
    if has("requests") && has("block_size") {
        Some(Format::ClaudeCode)
    } else if has("chat_id") && has("parent_chat_id") {
        Some(Format::Prototype {
            block_tokens: PROTOTYPE_BLOCK_TOKENS,
        })
    } else if has("timestamp") && has("input_length") && has("hash_ids") {
        Some(Format::Mooncake)
    } else {
        None
    }
}

enum Parser {
    Claude(claude::Reader),
    Mooncake(flat::Mooncake),
    Prototype(flat::Prototype),
    Azure(flat::Azure),
}

impl Parser {
    fn line(&mut self, text: &str, sink: &mut impl Sink) -> Result<(), LineError> {
        if let Self::Azure(reader) = self {
            return reader.line(text, sink);
        }
        let value: Value = serde_json::from_str(text).map_err(|e| LineError::Json { message: e.to_string() })?;
        match self {
            Self::Claude(reader) => reader.line(&value, sink),
            Self::Mooncake(reader) => reader.line(&value, sink),
            Self::Prototype(reader) => reader.line(&value, sink),
            Self::Azure(_) => Ok(()),
        }
    }
}

/// Reads one line into `buffer`, without its end. `Ok(None)` at the end of the source, `Ok(Some(false))` if the line
/// was too long and has been skipped.
fn next_line(reader: &mut impl BufRead, buffer: &mut Vec<u8>) -> std::io::Result<Option<bool>> {
    buffer.clear();
    let read = reader.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', buffer)?;
    if read == 0 {
        return Ok(None);
    }
    if buffer.last() == Some(&b'\n') || (buffer.len() as u64) <= MAX_LINE_BYTES {
        return Ok(Some(true));
    }
    loop {
        buffer.clear();
        let read = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', buffer)?;
        if read == 0 || buffer.last() == Some(&b'\n') {
            return Ok(Some(false));
        }
    }
}

/// Finds out the format from the first line and gives the reader back as it was.
///
/// # Errors
/// [`ReadError::UnknownFormat`] if the first line is of no known format; [`ReadError::Io`] if the source fails.
pub fn open<R: BufRead>(mut reader: R) -> Result<(Format, impl BufRead + use<R>), ReadError> {
    let mut first = Vec::new();
    let read = reader.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut first);
    read.map_err(|source| ReadError::Io { line: 0, source })?;
    let format = detect(&String::from_utf8_lossy(&first)).ok_or(ReadError::UnknownFormat)?;
    Ok((format, Cursor::new(first).chain(reader)))
}

/// Reads a whole trace. Empty lines are passed over; a broken line is reported and left out, or, if `strict`, ends it.
///
/// # Errors
/// As [`stream`].
pub fn read(reader: impl BufRead, format: Format, strict: bool) -> Result<Report, ReadError> {
    let mut trace = Trace::default();
    let broken = stream(reader, format, strict, &mut trace)?;
    Ok(Report { trace, broken })
}

/// Reads a trace and hands it to `sink` as it goes: only one line is held at a time, and some bytes per request or
/// session to know whose turn it is. Returns the lines that were left out; such a line adds nothing at all.
///
/// # Errors
/// [`ReadError::Io`] if the source fails; [`ReadError::Broken`] at the first broken line if `strict`; else
/// [`ReadError::TooManyBroken`] beyond [`MAX_BROKEN_LINES`], and [`ReadError::TooManyLines`] beyond [`MAX_LINES`].
pub fn stream(
    reader: impl BufRead,
    format: Format,
    strict: bool,
    sink: &mut impl Sink,
) -> Result<Vec<BrokenLine>, ReadError> {
    let mut parser = match format {
        Format::ClaudeCode => Parser::Claude(claude::Reader::default()),
        Format::Mooncake => Parser::Mooncake(flat::Mooncake::default()),
        Format::Prototype { block_tokens } => Parser::Prototype(flat::Prototype::new(block_tokens)),
        Format::AzureCsv => Parser::Azure(flat::Azure::default()),
    };
    for_each_line(reader, strict, |text| parser.line(text, sink))
}

/// Gives `each` every line that is not empty, and collects what it says of the broken ones.
pub(super) fn for_each_line(
    mut reader: impl BufRead,
    strict: bool,
    mut each: impl FnMut(&str) -> Result<(), LineError>,
) -> Result<Vec<BrokenLine>, ReadError> {
    let mut broken = Vec::new();
    let mut buffer = Vec::new();
    for line in 1..=MAX_LINES {
        let whole = match next_line(&mut reader, &mut buffer) {
            Ok(None) => return Ok(broken),
            Ok(Some(whole)) => whole,
            Err(source) => return Err(ReadError::Io { line: line - 1, source }),
        };
        let result = if whole {
            match std::str::from_utf8(&buffer) {
                Ok(text) => match text.trim_start_matches('\u{feff}').trim() {
                    "" => Ok(()),
                    text => each(text),
                },
                Err(_) => Err(LineError::NotUtf8),
            }
        } else {
            Err(LineError::TooLong { limit: MAX_LINE_BYTES })
        };
        let Err(error) = result else { continue };
        let error = BrokenLine { line, error };
        if strict {
            return Err(error.into());
        }
        if broken.len() == MAX_BROKEN_LINES {
            return Err(ReadError::TooManyBroken { last: error });
        }
        broken.push(error);
    }
    Err(ReadError::TooManyLines)
}
