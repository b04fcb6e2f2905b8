//! The metadata of a GGUF file, read with bounds: a header is a file's word, and files come from anywhere. A general
//! reader allocates what a length field says and recurses as deep as arrays nest; here both have limits, and what is
//! beyond them is an error. Arrays that nobody asks for are read over and not kept.

use std::collections::HashMap;
use std::io::Read;

/// All metadata together, in bytes. Vocabularies of 256,000 entries take 15 MB.
const BYTES_MAX: u64 = 64 << 20;
/// One text, in bytes: chat templates are the longest.
const TEXT_BYTES_MAX: u64 = 1 << 20;
/// Keys of a file.
const KEYS_MAX: u64 = 4_096;
/// Entries of one array.
const ENTRIES_MAX: u64 = 1 << 20;
/// Kinds of values: a text, and an array.
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

/// Why a header cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// The file ends too soon, or cannot be read.
    #[error("cannot read the header: {0}")]
    Read(#[from] std::io::Error),
    /// It begins with something else.
    #[error("this is no GGUF file (it does not begin with GGUF)")]
    Magic,
    /// A version other than 2 and 3.
    #[error("GGUF version {0} is not supported: use a file of version 2 or 3")]
    Version(u32),
    /// A count or length beyond its limit.
    #[error("{what}: {value}, at most {most} are accepted")]
    TooMany {
        /// What was counted.
        what: &'static str,
        /// How many there are.
        value: u64,
        /// How many are accepted.
        most: u64,
    },
    /// A kind of value that there is not, or an array of arrays.
    #[error("value kind {0} is not supported here")]
    Kind(u32),
    /// A text that is no UTF-8.
    #[error("a text of the header is not UTF-8")]
    Text,
    /// A key that is needed and not there.
    #[error("the key {0} is missing")]
    Missing(String),
    /// A key whose value is of another kind than it should be.
    #[error("the key {key} should be {want}")]
    Wrong {
        /// The key.
        key: String,
        /// What it should be.
        want: &'static str,
    },
}

/// A value; numbers of all widths are one kind.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Number(i64),
    Float,
    Bool(bool),
    Text(String),
    Numbers(Vec<i64>),
    Texts(Vec<String>),
    /// An array that nothing here needs.
    Skipped,
}

/// The metadata of a file.
#[derive(Debug, Default)]
pub(super) struct Header {
    values: HashMap<String, Value>,
}

impl Header {
    /// Reads the metadata at the beginning of a file; little-endian, versions 2 and 3. Only the arrays at `arrays` are kept.
    pub(super) fn read(file: impl Read, arrays: &[&str]) -> Result<Self, HeaderError> {
        let mut source = Source(file.take(BYTES_MAX));
        if source.bytes::<4>()? != *b"GGUF" {
            return Err(HeaderError::Magic);
        }
        let version = source.u32()?;
        if !(2..=3).contains(&version) {
            return Err(HeaderError::Version(version));
        }
        let _tensors = source.u64()?;
        let keys = at_most("keys of the header", source.u64()?, KEYS_MAX)?;
        let mut values = HashMap::new();
        for _ in 0..keys {
            let key = source.text()?;
            let value = match source.u32()? {
                ARRAY => source.array(arrays.contains(&key.as_str()))?,
                kind => source.value(kind)?,
            };
            values.insert(key, value);
        }
        Ok(Self { values })
    }

    /// A text, if the key is there.
    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, HeaderError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(wrong(key, "a text")),
        }
    }

    /// A number that is a u32, if the key is there.
    pub(super) fn number(&self, key: &str) -> Result<Option<u32>, HeaderError> {
        let want = "a number of 32 bits";
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Number(n)) => u32::try_from(*n).map(Some).map_err(|_| wrong(key, want)),
            Some(_) => Err(wrong(key, want)),
        }
    }

    /// A truth, if the key is there.
    pub(super) fn truth(&self, key: &str) -> Result<Option<bool>, HeaderError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(truth)) => Ok(Some(*truth)),
            Some(_) => Err(wrong(key, "true or false")),
        }
    }

    /// An array of texts, which is taken out.
    pub(super) fn take_texts(&mut self, key: &str) -> Result<Vec<String>, HeaderError> {
        match self.values.remove(key) {
            None => Err(HeaderError::Missing(key.to_owned())),
            Some(Value::Texts(texts)) => Ok(texts),
            Some(_) => Err(wrong(key, "an array of texts")),
        }
    }

    /// An array of whole numbers, which is taken out, if the key is there.
    pub(super) fn take_numbers(&mut self, key: &str) -> Result<Option<Vec<i64>>, HeaderError> {
        match self.values.remove(key) {
            None => Ok(None),
            Some(Value::Numbers(numbers)) => Ok(Some(numbers)),
            Some(_) => Err(wrong(key, "an array of whole numbers")),
        }
    }
}

fn wrong(key: &str, want: &'static str) -> HeaderError {
    HeaderError::Wrong {
        key: key.to_owned(),
        want,
    }
}

fn at_most(what: &'static str, value: u64, most: u64) -> Result<u64, HeaderError> {
    if value > most {
        return Err(HeaderError::TooMany { what, value, most });
    }
    Ok(value)
}

struct Source<R>(R);

impl<R: Read> Source<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, HeaderError> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, HeaderError> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }

    fn text(&mut self) -> Result<String, HeaderError> {
        let length = at_most("bytes of a text", self.u64()?, TEXT_BYTES_MAX)?;
        let mut bytes = vec![0; length as usize];
        self.0.read_exact(&mut bytes)?;
        String::from_utf8(bytes).map_err(|_| HeaderError::Text)
    }

    /// A whole number of one of the eight kinds.
    fn number(&mut self, kind: u32) -> Result<i64, HeaderError> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.bytes()?).into(),
            1 => i8::from_le_bytes(self.bytes()?).into(),
            2 => u16::from_le_bytes(self.bytes()?).into(),
            3 => i16::from_le_bytes(self.bytes()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.bytes()?).into(),
            // Larger ones mean nothing here.
            10 => i64::try_from(self.u64()?).unwrap_or(i64::MAX),
            11 => i64::from_le_bytes(self.bytes()?),
            other => return Err(HeaderError::Kind(other)),
        })
    }

    fn value(&mut self, kind: u32) -> Result<Value, HeaderError> {
        Ok(match kind {
            6 => {
                self.bytes::<4>()?;
                Value::Float
            }
            12 => {
                self.bytes::<8>()?;
                Value::Float
            }
            7 => Value::Bool(self.bytes::<1>()? != [0]),
            TEXT => Value::Text(self.text()?),
            number => Value::Number(self.number(number)?),
        })
    }

    fn array(&mut self, keep: bool) -> Result<Value, HeaderError> {
        let kind = self.u32()?;
        let entries = at_most("entries of an array", self.u64()?, ENTRIES_MAX)?;
        Ok(match kind {
            TEXT if keep => Value::Texts((0..entries).map(|_| self.text()).collect::<Result<_, _>>()?),
            0..=5 | 10..=11 if keep => {
                Value::Numbers((0..entries).map(|_| self.number(kind)).collect::<Result<_, _>>()?)
            }
            // Arrays of arrays are refused there: following them would take a hostile file's depth.
            other => {
                for _ in 0..entries {
                    self.value(other)?;
                }
                Value::Skipped
            }
        })
    }
}
