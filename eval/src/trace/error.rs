//! What can be wrong with a trace, said with the field and with what to do.

use thiserror::Error;

/// What is wrong with one line of a trace.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LineError {
    /// The line is longer than [`super::MAX_LINE_BYTES`].
    #[error("line has more than {limit} bytes; split the session or check that the file has line ends")]
    TooLong {
        /// Largest accepted line, bytes.
        limit: u64,
    },
    /// The line is not UTF-8.
    #[error("line is not UTF-8; decompress the file (gzip?) or convert it")]
    NotUtf8,
    /// The line is not JSON.
    #[error("line is not JSON ({message}); write one JSON object per line")]
    Json {
        /// The parser's words.
        message: String,
    },
    /// A field is not there.
    #[error("field {field} is missing; add it, or check that the format was chosen rightly")]
    Missing {
        /// Path of the field, such as `requests[3].in`.
        field: String,
    },
    /// A field has another type or lies outside its range.
    #[error("field {field} should be {expected} but is {found}; correct the value")]
    Invalid {
        /// Path of the field.
        field: String,
        /// What is accepted, with its unit.
        expected: &'static str,
        /// What was found, shortened.
        found: String,
    },
    /// More blocks than the input has room for.
    #[error(
        "field {field} names {blocks} blocks but the input has room for {room}; check the block size and the input length"
    )]
    TooManyBlocks {
        /// Path of the field.
        field: String,
        /// Blocks named.
        blocks: u64,
        /// Blocks of the input, the last one possibly partial.
        room: u64,
    },
    /// A turn points at a turn that was not read.
    #[error("field parent_chat_id names chat {parent}, which no earlier line has; put the parent first or write -1")]
    UnknownParent {
        /// The id it points at.
        parent: i64,
    },
    /// Two lines have the same id.
    #[error("field {field} repeats {value}; ids must be unique in a file")]
    Duplicate {
        /// Path of the field.
        field: String,
        /// The repeated value.
        value: String,
    },
    /// A CSV line has another number of columns.
    #[error("line has {found} columns instead of 3; write TIMESTAMP,ContextTokens,GeneratedTokens")]
    Columns {
        /// Columns found.
        found: usize,
    },
}

/// A line that was left out of the trace.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("line {line}: {error}")]
pub struct BrokenLine {
    /// Number of the line, from 1, empty lines counted.
    pub line: u64,
    /// What is wrong with it.
    pub error: LineError,
}

/// Why reading stopped.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The source failed.
    #[error("trace could not be read after line {line}: {source}; check the file or the connection")]
    Io {
        /// Last line that was read whole, from 1; 0 if none.
        line: u64,
        /// The failure.
        source: std::io::Error,
    },
    /// The first line is of no known format.
    #[error(
        "the first line is of no known trace format; convert audit logs and ShareGPT files with `pinion trace convert`, \
         decompress what is compressed"
    )]
    UnknownFormat,
    /// More lines than [`super::MAX_LINES`].
    #[error("the trace has more than {} lines; split it", super::MAX_LINES)]
    TooManyLines,
    /// More broken lines than [`super::MAX_BROKEN_LINES`].
    #[error(
        "more than {} lines are broken, the last one being {last}; the file is not what its first line says",
        super::MAX_BROKEN_LINES
    )]
    TooManyBroken {
        /// The line at which reading stopped.
        last: BrokenLine,
    },
    /// Strict reading met a broken line.
    #[error("{0}; or read without strict to skip such lines")]
    Broken(#[from] BrokenLine),
}
