//! Identifiers. Each is its own type, checked once where it enters, so that it can be trusted afterwards.

use crate::limits::{NAME_BYTES_MAX, SESSION_ID_BYTES_MAX};
use rkyv::rancor::{Fallible, Source};
use rkyv::ser::Writer;
use rkyv::string::{ArchivedString, StringResolver};
use rkyv::with::{ArchiveWith, DeserializeWith, SerializeWith};
use rkyv::{Archive, Deserialize, Place, Serialize};
use std::fmt;
use std::sync::Arc;

/// Why a text is not an identifier.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// Nothing was given.
    #[error("{what} is empty: give it at least one character")]
    Empty {
        /// Name of the field.
        what: &'static str,
    },
    /// More bytes than the limit.
    #[error("{what} has {got} bytes: use at most {max}")]
    TooLong {
        /// Name of the field.
        what: &'static str,
        /// Bytes given.
        got: usize,
        /// Bytes allowed.
        max: usize,
    },
    /// A character that cannot stand in one token of a NATS subject.
    #[error("{what} contains {bad:?}: use letters, digits, '-' and '_' only")]
    BadCharacter {
        /// Name of the field.
        what: &'static str,
        /// The first offending character.
        bad: char,
    },
}

fn check_name(what: &'static str, text: &str) -> Result<(), IdError> {
    if text.is_empty() {
        return Err(IdError::Empty { what });
    }
    if text.len() > NAME_BYTES_MAX {
        return Err(IdError::TooLong {
            what,
            got: text.len(),
            max: NAME_BYTES_MAX,
        });
    }
    match text
        .chars()
        .find(|c| !(c.is_ascii_alphanumeric() || *c == '-' || *c == '_'))
    {
        Some(bad) => Err(IdError::BadCharacter { what, bad }),
        None => Ok(()),
    }
}

/// On the wire a shared text is a text. Names are cloned with every message and every candidate, so in memory they are shared.
#[derive(Debug)]
pub struct AsText;

impl ArchiveWith<Arc<str>> for AsText {
    type Archived = ArchivedString;
    type Resolver = StringResolver;

    fn resolve_with(text: &Arc<str>, resolver: StringResolver, out: Place<ArchivedString>) {
        ArchivedString::resolve_from_str(text, resolver, out);
    }
}

impl<S: Fallible<Error: Source> + Writer + ?Sized> SerializeWith<Arc<str>, S> for AsText {
    fn serialize_with(text: &Arc<str>, serializer: &mut S) -> Result<StringResolver, S::Error> {
        ArchivedString::serialize_from_str(text, serializer)
    }
}

impl<D: Fallible + ?Sized> DeserializeWith<ArchivedString, Arc<str>, D> for AsText {
    fn deserialize_with(text: &ArchivedString, _: &mut D) -> Result<Arc<str>, D::Error> {
        Ok(text.as_str().into())
    }
}

fn as_text<S: serde::Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

macro_rules! name_id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Archive, Serialize, Deserialize, serde::Serialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[serde(transparent)]
        pub struct $name(#[rkyv(with = AsText)] #[serde(serialize_with = "as_text")] Arc<str>);

        impl $name {
            /// Checks and wraps `text`.
            ///
            /// # Errors
            /// [`IdError`] if it is empty, longer than [`NAME_BYTES_MAX`], or not one token of a NATS subject.
            pub fn new(text: impl Into<String>) -> Result<Self, IdError> {
                let text = text.into();
                check_name($what, &text)?;
                Ok(Self(text.into()))
            }
            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name_id!(
    /// Names one Pinion cluster: the second token of every subject.
    ClusterId,
    "cluster name"
);
name_id!(
    /// Names a prefill, decode or fused worker, or a node. One token of a NATS subject.
    WorkerId,
    "worker name"
);

/// A conversation. Clients choose it, so it may hold any characters; [`SessionId::token`] is its form in subjects.
#[derive(Archive, Serialize, Deserialize, serde::Serialize, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[serde(transparent)]
pub struct SessionId(
    #[rkyv(with = AsText)]
    #[serde(serialize_with = "as_text")]
    Arc<str>,
);

impl SessionId {
    /// Checks and wraps `text`.
    ///
    /// # Errors
    /// [`IdError`] if it is empty or longer than [`SESSION_ID_BYTES_MAX`] bytes with a tenant's name before it.
    pub fn new(text: impl Into<String>) -> Result<Self, IdError> {
        let text = text.into();
        if text.is_empty() {
            return Err(IdError::Empty { what: "session id" });
        }
        let max = SESSION_ID_BYTES_MAX + 1 + NAME_BYTES_MAX;
        if text.len() > max {
            return Err(IdError::TooLong {
                what: "session id",
                got: text.len(),
                max,
            });
        }
        Ok(Self(text.into()))
    }
    /// The text as the client gave it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
    /// One token of a NATS subject: the text itself where it is a plain name, else `=` and the first 16 bytes of
    /// its SHA-256 in hex (`=` never occurs in a plain name, so the two forms cannot meet).
    pub fn token(&self) -> String {
        use sha2::Digest;
        if check_name("session id", &self.0).is_ok() {
            return self.0.to_string();
        }
        let digest = sha2::Sha256::digest(self.0.as_bytes());
        let mut out = String::with_capacity(33);
        out.push('='); // allowed in subjects and in keys
        crate::hash::push_hex(&mut out, &digest[..16]);
        out
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Archive, Serialize, Deserialize, serde::Serialize, serde::Deserialize,
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number_id!(
    /// Grows whenever an owner (of a shard, a worker, a node) is replaced; messages of older ones change nothing (I7).
    Epoch(u64)
);
number_id!(
    /// Position of a turn in its session, from 0 (digest T1: the prototype was bitten by "turn 1").
    TurnIndex(u32)
);
number_id!(
    /// A decode worker's promise of room for one seed, unique within the worker's epoch.
    PermitId(u64)
);
/// One request of a client; a UUID's 128 bits. Retries of the same request carry the same id. Everywhere it is shown, in
/// subjects, views, events, logs and answers, it is 32 hex digits.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u128);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl serde::Serialize for RequestId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Epoch {
    /// The epoch after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl TurnIndex {
    /// The turn after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_must_be_one_subject_token() {
        for bad in ["", "a.b", "a b", "a*", ">", "ä"] {
            assert!(WorkerId::new(bad).is_err(), "{bad:?}");
        }
        assert!(WorkerId::new("x".repeat(NAME_BYTES_MAX + 1)).is_err());
        assert_eq!(WorkerId::new("d-0_1").unwrap().as_str(), "d-0_1");
    }

    #[test]
    fn a_session_id_is_bounded_and_always_has_a_safe_token() {
        assert!(SessionId::new("").is_err());
        assert!(SessionId::new("x".repeat(SESSION_ID_BYTES_MAX)).is_ok());
        let max = SESSION_ID_BYTES_MAX + 1 + NAME_BYTES_MAX;
        assert!(SessionId::new("x".repeat(max)).is_ok());
        assert!(SessionId::new("x".repeat(max + 1)).is_err());
        assert_eq!(SessionId::new("abc-1").unwrap().token(), "abc-1");
        let odd = SessionId::new("user@host > *").unwrap().token();
        assert!(odd.starts_with('=') && odd.len() == 33 && !odd.contains(['.', '*', '>', ' ']));
    }
}
