//! What the file says of itself and of its slots. All numbers are little-endian.

use super::PageName;
use super::disk::BLOCK;
use crate::layout::digest;
use pinion_schemas::PageHash;

/// Bytes of a record; a block holds a whole number of them.
pub(super) const RECORD_BYTES: usize = 128;
/// Bytes of a record or header that its checksum covers, and that are followed by it.
const RECORD_BODY: usize = 104;
const HEADER_BODY: usize = 48;
/// Bytes of the header; the rest of its block is zero.
pub(super) const HEADER_BYTES: usize = HEADER_BODY + 16;

const MAGIC: &[u8; 8] = b"PinionKF";
/// Version of all that is here.
const VERSION: u64 = 1;

/// What the file must be to be of use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) fingerprint: u128,
    pub(super) page_bytes: u64,
    pub(super) slots: u64,
}

impl Header {
    pub(super) fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..8].copy_from_slice(MAGIC);
        out[8..16].copy_from_slice(&VERSION.to_le_bytes());
        out[16..32].copy_from_slice(&self.fingerprint.to_le_bytes());
        out[32..40].copy_from_slice(&self.page_bytes.to_le_bytes());
        out[40..48].copy_from_slice(&self.slots.to_le_bytes());
        seal(&mut out, HEADER_BODY);
        out
    }

    /// Whether these are the first bytes of a page file, of whatever version.
    pub(super) fn is_ours(bytes: &[u8]) -> bool {
        bytes.starts_with(MAGIC)
    }
}

/// Where the record of a slot is, bytes.
pub(super) fn offset(slot: u32) -> u64 {
    BLOCK + u64::from(slot) * RECORD_BYTES as u64
}

/// What is in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) slot: u32,
    /// Later records have higher ones.
    pub(super) sequence: u64,
    pub(super) name: PageName,
    pub(super) digest: u128,
}

impl Record {
    pub(super) fn bytes(&self) -> [u8; RECORD_BYTES] {
        let mut out = [0; RECORD_BYTES];
        let has_parent = u32::from(self.name.parent.is_some());
        out[..4].copy_from_slice(&self.slot.to_le_bytes());
        out[4..8].copy_from_slice(&has_parent.to_le_bytes());
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16..32].copy_from_slice(&self.digest.to_le_bytes());
        out[32..64].copy_from_slice(&self.name.name.0);
        out[64..96].copy_from_slice(&self.name.parent.map_or([0; 32], |p| p.0));
        seal(&mut out, RECORD_BODY);
        out
    }

    /// The record of `slot` in these bytes; none if it is cleared, torn, or another slot's.
    pub(super) fn read(slot: u32, bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let has_parent = u32::from_le_bytes(*bytes[4..].first_chunk()?) != 0;
        let record = Self {
            slot: u32::from_le_bytes(*bytes.first_chunk()?),
            sequence: u64::from_le_bytes(*bytes[8..].first_chunk()?),
            digest: u128::from_le_bytes(*bytes[16..].first_chunk()?),
            name: PageName {
                name: PageHash(*bytes[32..].first_chunk()?),
                parent: has_parent.then_some(PageHash(*bytes[64..].first_chunk()?)),
            },
        };
        // What it would be written as: its checksum, and nothing where nothing belongs.
        (record.slot == slot && record.bytes() == *bytes).then_some(record)
    }
}

/// Puts the checksum of the first bytes behind them.
fn seal(out: &mut [u8], body: usize) {
    let sum = digest(&out[..body]);
    out[body..body + 16].copy_from_slice(&sum.to_le_bytes());
}
