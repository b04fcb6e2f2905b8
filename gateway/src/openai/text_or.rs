//! Fields that are a text or a list. An untagged enum of serde would do, but its errors do not name the entry at fault.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor};

use super::Part;

/// A text, or a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextOr<T> {
    /// A text.
    Text(String),
    /// A list.
    List(Vec<T>),
}

/// What may be in such a list.
pub trait Listed: for<'de> Deserialize<'de> {
    /// What the field should be, for errors.
    const EXPECTED: &'static str;
}

impl Listed for Part {
    const EXPECTED: &'static str = "a string or an array of text parts";
}

impl Listed for u32 {
    const EXPECTED: &'static str = "a string or one array of token ids";
}

impl Listed for String {
    const EXPECTED: &'static str = "a string or an array of strings";
}

struct TextOrVisitor<T>(PhantomData<T>);

impl<'de, T: Listed> Visitor<'de> for TextOrVisitor<T> {
    type Value = TextOr<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E>(self, text: &str) -> Result<TextOr<T>, E> {
        Ok(TextOr::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<TextOr<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(entry) = seq.next_element()? {
            list.push(entry);
        }
        Ok(TextOr::List(list))
    }
}

impl<'de, T: Listed> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrVisitor(PhantomData))
    }
}
