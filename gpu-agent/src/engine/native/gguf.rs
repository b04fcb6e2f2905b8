//! Reads the container of the weights. The bytes are anybody's: each count is paid for with bytes that are there, and nothing is
//! allocated by a number that a file merely states.

use super::error::LoadError;
use super::quant::Kind;
use std::collections::BTreeMap;

/// A value of the metadata. What this engine does not ask for (arrays, negative numbers) is skipped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Whole(u64),
    Real(f32),
    Text(&'a str),
    Other,
}

/// Where a tensor's numbers are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor<'a> {
    /// How they are stored.
    pub(crate) kind: Kind,
    /// Numbers per row first, as the file has them.
    pub(crate) shape: Vec<u64>,
    /// All of them.
    pub(crate) bytes: &'a [u8],
}

/// A file whose header made sense.
#[derive(Debug)]
pub(crate) struct Gguf<'a> {
    metadata: BTreeMap<&'a str, Value<'a>>,
    tensors: BTreeMap<&'a str, Info>,
    /// Everything behind the header.
    data: &'a [u8],
}

#[derive(Debug)]
struct Info {
    kind: u32,
    shape: Vec<u64>,
    offset: u64,
}

/// Bytes not read yet.
struct Cursor<'a>(&'a [u8]);

/// What is wrong with a file.
type Read<T> = Result<T, &'static str>;

impl<'a> Cursor<'a> {
    fn take(&mut self, bytes: u64) -> Read<&'a [u8]> {
        let at = usize::try_from(bytes).map_err(|_| "it ends too early")?;
        let (head, rest) = self.0.split_at_checked(at).ok_or("it ends too early")?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Read<[u8; N]> {
        self.take(N as u64)?.try_into().map_err(|_| "it ends too early")
    }

    fn u32(&mut self) -> Read<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Read<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Read<&'a str> {
        let len = self.u64()?;
        // Names are text; a token of a vocabulary may be any bytes, and nobody asks for it.
        Ok(std::str::from_utf8(self.take(len)?).unwrap_or_default())
    }

    fn value(&mut self, kind: u32) -> Read<Value<'a>> {
        Ok(match kind {
            0 | 7 => Value::Whole(self.array::<1>()?[0].into()),
            2 => Value::Whole(u16::from_le_bytes(self.array()?).into()),
            4 => Value::Whole(self.u32()?.into()),
            10 => Value::Whole(self.u64()?),
            1 => signed(i8::from_le_bytes(self.array()?).into()),
            3 => signed(i16::from_le_bytes(self.array()?).into()),
            5 => signed(i32::from_le_bytes(self.array()?).into()),
            11 => signed(i64::from_le_bytes(self.array()?)),
            6 => Value::Real(f32::from_le_bytes(self.array()?)),
            12 => Value::Real(f64::from_le_bytes(self.array()?) as f32),
            8 => Value::Text(self.text()?),
            9 => self.skip_array()?,
            _ => return Err("a metadata value has an unknown type"),
        })
    }

    fn skip_array(&mut self) -> Read<Value<'a>> {
        let (kind, count) = (self.u32()?, self.u64()?);
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => {
                // Each has at least the eight bytes of its length, so the file's end bounds this.
                for _ in 0..count {
                    self.text()?;
                }
                return Ok(Value::Other);
            }
            _ => return Err("a metadata array has an unknown type"),
        };
        self.take(count.checked_mul(width).ok_or("it ends too early")?)?;
        Ok(Value::Other)
    }

    fn info(&mut self) -> Read<Info> {
        let dimensions = self.u32()?;
        if dimensions > 4 {
            return Err("a tensor has more than four dimensions");
        }
        let shape = (0..dimensions).map(|_| self.u64()).collect::<Read<_>>()?;
        Ok(Info {
            shape,
            kind: self.u32()?,
            offset: self.u64()?,
        })
    }
}

fn signed<'a>(n: i64) -> Value<'a> {
    u64::try_from(n).map_or(Value::Other, Value::Whole)
}

impl<'a> Gguf<'a> {
    /// Reads the header.
    ///
    /// # Errors
    /// [`LoadError::NotGguf`]
    pub(crate) fn read(bytes: &'a [u8]) -> Result<Self, LoadError> {
        Self::parse(bytes).map_err(LoadError::NotGguf)
    }

    fn parse(bytes: &'a [u8]) -> Read<Self> {
        let mut cursor = Cursor(bytes);
        if cursor.take(4) != Ok(b"GGUF") {
            return Err("it does not begin with GGUF");
        }
        if !matches!(cursor.u32()?, 2 | 3) {
            return Err("its version is neither 2 nor 3");
        }
        let (tensor_count, value_count) = (cursor.u64()?, cursor.u64()?);
        let mut metadata = BTreeMap::new();
        for _ in 0..value_count {
            let (key, kind) = (cursor.text()?, cursor.u32()?);
            metadata.insert(key, cursor.value(kind)?);
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let name = cursor.text()?;
            tensors.insert(name, cursor.info()?);
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Whole(n)) if n.is_power_of_two() && *n <= 1 << 16 => *n as usize,
            Some(_) => return Err("its alignment is not a power of two"),
        };
        let begin = (bytes.len() - cursor.0.len()).next_multiple_of(alignment);
        let data = bytes.get(begin..).unwrap_or_default();
        Ok(Self {
            metadata,
            tensors,
            data,
        })
    }

    /// The value behind a key; [`Value::Other`] if there is none.
    pub(crate) fn value(&self, key: &str) -> Value<'a> {
        self.metadata.get(key).copied().unwrap_or(Value::Other)
    }

    /// Whether there is such a tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A tensor whose bytes are all there.
    ///
    /// # Errors
    /// [`LoadError::NoTensor`], [`LoadError::Kind`], [`LoadError::Short`]
    pub(crate) fn tensor(&self, name: &str) -> Result<Tensor<'a>, LoadError> {
        let info = self.tensors.get(name).ok_or_else(|| LoadError::NoTensor(name.into()))?;
        let kind = Kind::from_number(info.kind).ok_or_else(|| LoadError::Kind {
            name: name.into(),
            kind: info.kind,
        })?;
        let short = || LoadError::Short(name.into());
        let numbers = info.shape.iter().try_fold(1_u64, |product, n| product.checked_mul(*n));
        let bytes = numbers.and_then(|n| kind.bytes(n)).ok_or_else(short)?;
        let begin = usize::try_from(info.offset).map_err(|_| short())?;
        let end = begin.checked_add(bytes).ok_or_else(short)?;
        Ok(Tensor {
            kind,
            shape: info.shape.clone(),
            bytes: self.data.get(begin..end).ok_or_else(short)?,
        })
    }
}
