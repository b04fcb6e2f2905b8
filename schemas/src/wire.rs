//! Framing of every message on the bus: a 16-byte prefix, then an rkyv archive.
//!
//! | bytes | field |
//! |---|---|
//! | 0-1 | magic `0x4E50` ("PN"), little-endian like all numbers here |
//! | 2-3 | schema id, one per message type |
//! | 4-5 | version of that schema |
//! | 6-7 | reserved, 0 |
//! | 8-11 | length of the body in bytes |
//! | 12-15 | low 32 bits of the body's xxh3 |
//!
//! rkyv has no schema evolution and accepts most bit flips (style B.2 rows 3, 4), hence id, version and checksum in front.
//! The format features `unaligned` and `little_endian` make an archive readable at any address of a NATS payload.

use crate::limits::MESSAGE_BYTES_MAX;
use rkyv::api::high::{HighDeserializer, HighSerializer, HighValidator};
use rkyv::bytecheck::CheckBytes;
use rkyv::rancor;
use rkyv::ser::allocator::ArenaHandle;
use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize};

const MAGIC: u16 = 0x4E50;
/// Bytes in front of the body.
pub const PREFIX_BYTES: usize = 16;

/// A message type with its place in the wire's catalogue. A changed layout is a new `VERSION`, never an edited old one.
pub trait Schema {
    /// Number of the schema; never reused.
    const ID: u16;
    /// Version of the layout.
    const VERSION: u16;
    /// Name in headers, errors and documents.
    const NAME: &'static str;
}

/// Why bytes are not the message that was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Fewer bytes than the prefix, or than it announces; or more.
    #[error("message of {got} bytes, expected {expected}: it was cut or padded on the way")]
    Length {
        /// Bytes given.
        got: usize,
        /// Bytes expected.
        expected: usize,
    },
    /// More than [`MESSAGE_BYTES_MAX`].
    #[error(
        "message of {0} bytes exceeds the limit of {MESSAGE_BYTES_MAX}: send KV over the transfer plane, not the bus"
    )]
    TooLarge(usize),
    /// Not a Pinion message.
    #[error("not a Pinion message (magic {0:#06x})")]
    Magic(u16),
    /// Another message type.
    #[error("schema {got} where {expected} ({name}) was expected")]
    Schema {
        /// Schema id given.
        got: u16,
        /// Schema id expected.
        expected: u16,
        /// Its name.
        name: &'static str,
    },
    /// None of the message types of this version.
    #[error("{}", .0.map_or("not a Pinion message".into(), |id| format!("schema {id} is unknown here: upgrade this side")))]
    Unknown(Option<u16>),
    /// Another version of the same type.
    #[error("version {got} of {name}, this node speaks {spoken}: upgrade the older side")]
    Version {
        /// Version given.
        got: u16,
        /// Version spoken here.
        spoken: u16,
        /// Name of the schema.
        name: &'static str,
    },
    /// The body does not match its checksum.
    #[error("body of {0} does not match its checksum: it was damaged on the way")]
    Checksum(&'static str),
    /// The body is not a valid archive.
    #[error("body of {0} is not a valid archive")]
    Invalid(&'static str),
}

/// Schema id of a frame, to choose what to [`decode`] it as where several messages share a subject.
pub fn schema_of(bytes: &[u8]) -> Option<u16> {
    let prefix = bytes.first_chunk::<PREFIX_BYTES>()?;
    (u16::from_le_bytes([prefix[0], prefix[1]]) == MAGIC).then(|| u16::from_le_bytes([prefix[2], prefix[3]]))
}

fn checksum(body: &[u8]) -> u32 {
    xxhash_rust::xxh3::xxh3_64(body) as u32
}

/// Frames `message`.
///
/// # Errors
/// [`WireError::TooLarge`] if it would not fit the bus, [`WireError::Invalid`] if it cannot be archived.
pub fn encode<T>(message: &T) -> Result<Vec<u8>, WireError>
where
    T: Schema + for<'a> Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, rancor::Error>>,
{
    let body = rkyv::to_bytes::<rancor::Error>(message).map_err(|_| WireError::Invalid(T::NAME))?;
    let total = PREFIX_BYTES + body.len();
    if total > MESSAGE_BYTES_MAX {
        return Err(WireError::TooLarge(total));
    }
    let mut out = Vec::with_capacity(total);
    out.extend_from_slice(&MAGIC.to_le_bytes());
    out.extend_from_slice(&T::ID.to_le_bytes());
    out.extend_from_slice(&T::VERSION.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    // The body is below MESSAGE_BYTES_MAX, so its length fits u32.
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(&checksum(&body).to_le_bytes());
    out.extend_from_slice(&body);
    Ok(out)
}

/// Checks the frame and the archive in it, and reads the message out.
///
/// # Errors
/// Every [`WireError`]; hostile bytes get one of them, never a panic.
pub fn decode<T>(bytes: &[u8]) -> Result<T, WireError>
where
    T: Schema + Archive,
    T::Archived: for<'a> CheckBytes<HighValidator<'a, rancor::Error>> + Deserialize<T, HighDeserializer<rancor::Error>>,
{
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(WireError::TooLarge(bytes.len()));
    }
    let Some((prefix, body)) = bytes.split_first_chunk::<PREFIX_BYTES>() else {
        return Err(WireError::Length {
            got: bytes.len(),
            expected: PREFIX_BYTES,
        });
    };
    let u16_at = |i: usize| u16::from_le_bytes([prefix[i], prefix[i + 1]]);
    let u32_at = |i: usize| u32::from_le_bytes([prefix[i], prefix[i + 1], prefix[i + 2], prefix[i + 3]]);
    if u16_at(0) != MAGIC {
        return Err(WireError::Magic(u16_at(0)));
    }
    if u16_at(2) != T::ID {
        return Err(WireError::Schema {
            got: u16_at(2),
            expected: T::ID,
            name: T::NAME,
        });
    }
    if u16_at(4) != T::VERSION {
        return Err(WireError::Version {
            got: u16_at(4),
            spoken: T::VERSION,
            name: T::NAME,
        });
    }
    let expected = PREFIX_BYTES + u32_at(8) as usize;
    if bytes.len() != expected {
        return Err(WireError::Length {
            got: bytes.len(),
            expected,
        });
    }
    if u32_at(12) != checksum(body) {
        return Err(WireError::Checksum(T::NAME));
    }
    let archived = rkyv::access::<T::Archived, rancor::Error>(body).map_err(|_| WireError::Invalid(T::NAME))?;
    rkyv::deserialize::<T, rancor::Error>(archived).map_err(|_| WireError::Invalid(T::NAME))
}
