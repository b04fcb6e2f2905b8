//! Typed access to the fields of a JSON object.

use super::error::LineError;
use super::{BlockRun, MAX_TOKENS};
use pinion_schemas::Micros;
use serde_json::{Map, Value};

/// An object of a line, with the path that leads to it (empty, or ending in a dot).
#[derive(Clone)]
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}

/// An error about `field`, which should have been `expected`.
pub(super) fn invalid(field: String, expected: &'static str, found: &str) -> LineError {
    LineError::Invalid {
        field,
        expected,
        found: shorten(found),
    }
}

fn describe(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
        scalar => scalar.to_string(),
    }
}

/// `seconds` as a span; rejects what is negative, not finite or over about 31,000 years.
pub(super) fn micros(seconds: f64) -> Option<Micros> {
    (seconds.is_finite() && (0.0..=1e12).contains(&seconds)).then(|| Micros((seconds * 1e6).round() as u64))
}

impl<'a> Fields<'a> {
    pub(super) fn new(value: &'a Value, path: String) -> Result<Self, LineError> {
        match value {
            Value::Object(map) => Ok(Self { map, path }),
            other => {
                let field = if path.is_empty() {
                    "(line)".to_owned()
                } else {
                    path.trim_end_matches('.').to_owned()
                };
                Err(invalid(field, "an object", &describe(other)))
            }
        }
    }

    pub(super) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    fn need(&self, key: &str) -> Result<&'a Value, LineError> {
        self.get(key)
            .ok_or_else(|| LineError::Missing { field: self.path(key) })
    }

    fn wrong(&self, key: &str, expected: &'static str, found: &Value) -> LineError {
        invalid(self.path(key), expected, &describe(found))
    }

    /// A count of tokens, from 0 to [`MAX_TOKENS`].
    pub(super) fn tokens(&self, key: &str) -> Result<u32, LineError> {
        let value = self.need(key)?;
        let count = value
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .filter(|n| *n <= MAX_TOKENS);
        count.ok_or_else(|| self.wrong(key, "a whole number of tokens from 0 to 16777216", value))
    }

    /// Like [`Self::tokens`], 0 if the field is absent.
    pub(super) fn tokens_or_zero(&self, key: &str) -> Result<u32, LineError> {
        if self.get(key).is_some() {
            self.tokens(key)
        } else {
            Ok(0)
        }
    }

    pub(super) fn integer(&self, key: &str) -> Result<i64, LineError> {
        let value = self.need(key)?;
        value.as_i64().ok_or_else(|| self.wrong(key, "a whole number", value))
    }

    pub(super) fn text(&self, key: &str) -> Result<&'a str, LineError> {
        let value = self.need(key)?;
        value.as_str().ok_or_else(|| self.wrong(key, "a text", value))
    }

    /// A time in units of `unit` seconds.
    pub(super) fn time(&self, key: &str, unit: f64) -> Result<Micros, LineError> {
        let value = self.need(key)?;
        let span = value.as_f64().and_then(|n| micros(n * unit));
        span.ok_or_else(|| self.wrong(key, "a time of 0 or more", value))
    }

    pub(super) fn list(&self, key: &str) -> Result<&'a [Value], LineError> {
        let value = self.need(key)?;
        value
            .as_array()
            .map(Vec::as_slice)
            .ok_or_else(|| self.wrong(key, "a list", value))
    }

    /// A list of `[start, length]` pairs.
    pub(super) fn runs(&self, key: &str) -> Result<Vec<BlockRun>, LineError> {
        let pair = |value: &Value| {
            let [start, len] = value.as_array()?.as_slice() else {
                return None;
            };
            let (start, len) = (start.as_u64()?, u32::try_from(len.as_u64()?).ok()?);
            start.checked_add(u64::from(len))?;
            (len > 0).then_some(BlockRun { start, len })
        };
        let mut runs = Vec::new();
        for (i, value) in self.list(key)?.iter().enumerate() {
            let field = || format!("{}[{i}]", self.path(key));
            let run =
                pair(value).ok_or_else(|| invalid(field(), "a pair [start, length of 1 or more]", &describe(value)))?;
            runs.push(run);
        }
        Ok(runs)
    }

    /// A list of block ids.
    pub(super) fn ids(&self, key: &str) -> Result<Vec<u64>, LineError> {
        let mut ids = Vec::new();
        for (i, value) in self.list(key)?.iter().enumerate() {
            let field = || format!("{}[{i}]", self.path(key));
            let id = value
                .as_u64()
                .ok_or_else(|| invalid(field(), "a block id of 0 or more", &describe(value)))?;
            ids.push(id);
        }
        Ok(ids)
    }

    /// That `runs` fit into `input` tokens.
    pub(super) fn check_room(&self, key: &str, runs: &[BlockRun], input: u32, block: u32) -> Result<(), LineError> {
        let blocks = runs.iter().map(|r| u64::from(r.len)).fold(0, u64::saturating_add);
        let room = u64::from(input.div_ceil(block.max(1)));
        if blocks > room {
            return Err(LineError::TooManyBlocks {
                field: self.path(key),
                blocks,
                room,
            });
        }
        Ok(())
    }
}

/// `ids` written as runs of consecutive numbers.
pub(super) fn to_runs(ids: &[u64]) -> Vec<BlockRun> {
    let mut runs: Vec<BlockRun> = Vec::new();
    for &id in ids {
        match runs.last_mut() {
            Some(run) if run.len < u32::MAX && run.start.checked_add(u64::from(run.len)) == Some(id) => run.len += 1,
            _ => runs.push(BlockRun { start: id, len: 1 }),
        }
    }
    runs
}
