//! What the transports say to each other, before and between the bytes of pages. All numbers are little-endian.
//!
//! Hello (40 bytes): magic, version, layout's fingerprint, bytes of a page. Answer: the same, from the other side; who sees a
//! difference ends the connection. Batch (48 bytes): grant, key, epoch, number of pages, checksum of the entries, checksum of all
//! that; then an entry of 28 bytes for each page: place in the grant, offset in the sender's memory (shared memory only), digest.
//! Over TCP the pages' bytes follow.
//! Answer: one byte for the batch (0, or a [`Refusal`]), then one for each page. Over RDMA the ends of lanes follow the hello, and
//! the receiver says between the two answers where pages may be written (`verbs/wire.rs`).

use crate::grant::{GRANT_PAGES_MAX, Grant, Refusal};
use crate::layout::{Mismatch, digest};
use crate::pool::Pool;
use pinion_schemas::Epoch;

/// First bytes of a connection.
const MAGIC: [u8; 8] = *b"PinionKV";
/// Version of all that is here.
const VERSION: u64 = 1;

pub(crate) const HELLO_BYTES: usize = 40;
pub(crate) const BATCH_BYTES: usize = 48;
pub(crate) const ENTRY_BYTES: usize = 28;

/// Why bytes of a peer are no message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not a peer of ours.
    #[error("the other side does not speak Pinion's page protocol: is this the right address?")]
    Magic,
    /// A peer of another version.
    #[error("the other side speaks version {0} of the page protocol, this one {VERSION}: run the same version on both")]
    Version(u64),
    /// Its pages are not like ours.
    #[error(transparent)]
    Layout(#[from] Mismatch),
    /// More pages than a grant can have.
    #[error("a batch of {0} pages: at most {GRANT_PAGES_MAX} are possible")]
    TooLong(u32),
    /// Bytes changed on the way.
    #[error("a batch arrived other than it was sent")]
    Garbled,
    /// Not the end of an RDMA connection.
    #[error("a connection of {0} lanes is not possible: is this the right address?")]
    Lanes(u32),
    /// An answer with a number that means nothing.
    #[error("the answer {0} means nothing")]
    Answer(u8),
}

/// How a page arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageState {
    /// It is in its slot.
    Stored = 0,
    /// Its bytes are not those of its digest: send it again.
    Corrupt = 1,
    /// It is there already.
    Known = 2,
    /// Its grant ended meanwhile.
    Ended = 3,
    /// Another connection has its slot, and may be about to bring it, or broken: ask again.
    Busy = 4,
}

impl PageState {
    /// The state of a number.
    ///
    /// # Errors
    /// [`FrameError::Answer`]
    pub(crate) fn from_wire(byte: u8) -> Result<Self, FrameError> {
        let all = [Self::Stored, Self::Corrupt, Self::Known, Self::Ended, Self::Busy];
        all.into_iter()
            .find(|s| *s as u8 == byte)
            .ok_or(FrameError::Answer(byte))
    }
}

/// The batch's answer.
pub(crate) fn refusal_from_wire(byte: u8) -> Result<Option<Refusal>, FrameError> {
    match byte {
        0 => Ok(None),
        _ => Refusal::from_wire(byte).map(Some).ok_or(FrameError::Answer(byte)),
    }
}

pub(crate) fn hello(pool: &Pool) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..16].copy_from_slice(&VERSION.to_le_bytes());
    out[16..32].copy_from_slice(&pool.layout().fingerprint().to_le_bytes());
    out[32..].copy_from_slice(&(pool.page_bytes() as u64).to_le_bytes());
    out
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

fn u128_at(bytes: &[u8], at: usize) -> u128 {
    u128::from(u64_at(bytes, at)) | u128::from(u64_at(bytes, at + 8)) << 64
}

/// Checks what the other side said of itself.
pub(crate) fn check_hello(bytes: &[u8; HELLO_BYTES], pool: &Pool) -> Result<(), FrameError> {
    if bytes[..8] != MAGIC {
        return Err(FrameError::Magic);
    }
    let version = u64_at(bytes, 8);
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    let (theirs, their_bytes) = (u128_at(bytes, 16), u64_at(bytes, 32));
    let (ours, our_bytes) = (pool.layout().fingerprint(), pool.page_bytes() as u64);
    if (theirs, their_bytes) != (ours, our_bytes) {
        return Err(Mismatch {
            ours,
            our_bytes,
            theirs,
            their_bytes,
        }
        .into());
    }
    Ok(())
}

/// Pages that are about to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchHead {
    pub(crate) id: u64,
    pub(crate) key: u64,
    pub(crate) epoch: Epoch,
    pub(crate) pages: u32,
    /// Of the entries' bytes: a page must not come to another place than it was sent to.
    pub(crate) entries_sum: u64,
}

/// Of a batch's own bytes.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    digest(bytes) as u64
}

impl BatchHead {
    pub(crate) fn new(grant: &Grant, pages: usize, entries: &[u8]) -> Self {
        Self {
            id: grant.id,
            key: grant.key,
            epoch: grant.epoch,
            pages: pages as u32,
            entries_sum: checksum(entries),
        }
    }

    pub(crate) fn encode(&self) -> [u8; BATCH_BYTES] {
        let numbers = [self.id, self.key, self.epoch.0, u64::from(self.pages), self.entries_sum];
        let mut out = [0; BATCH_BYTES];
        for (place, number) in out.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let sum = checksum(&out[..BATCH_BYTES - 8]);
        out[BATCH_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8; BATCH_BYTES]) -> Result<Self, FrameError> {
        if checksum(&bytes[..BATCH_BYTES - 8]) != u64_at(bytes, BATCH_BYTES - 8) {
            return Err(FrameError::Garbled);
        }
        let pages = u32::try_from(u64_at(bytes, 24)).unwrap_or(u32::MAX);
        if pages as usize > GRANT_PAGES_MAX {
            return Err(FrameError::TooLong(pages));
        }
        Ok(Self {
            id: u64_at(bytes, 0),
            key: u64_at(bytes, 8),
            epoch: Epoch(u64_at(bytes, 16)),
            pages,
            entries_sum: u64_at(bytes, 32),
        })
    }
}

/// One page of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) place: u32,
    /// In the sender's memory; over TCP without meaning.
    pub(crate) offset: u64,
    pub(crate) digest: u128,
}

impl Entry {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.place.to_le_bytes());
        out.extend(self.offset.to_le_bytes());
        out.extend(self.digest.to_le_bytes());
    }

    /// `bytes`: [`ENTRY_BYTES`] of them.
    pub(crate) fn decode(bytes: &[u8]) -> Self {
        Self {
            place: u32_at(bytes, 0),
            offset: u64_at(bytes, 4),
            digest: u128_at(bytes, 12),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Layout;
    use crate::testing::{layout, pool};
    use proptest::prelude::*;

    #[test]
    fn nodes_with_other_pages_are_told_what_differs() {
        let ours = pool(1);
        assert_eq!(check_hello(&hello(&pool(9)), &ours), Ok(()));
        let theirs = Pool::new(
            Layout {
                page_tokens: 8,
                ..layout()
            },
            1,
        )
        .unwrap();
        let error = check_hello(&hello(&theirs), &ours).unwrap_err();
        assert!(
            error.to_string().contains("of 512 bytes") && error.to_string().contains("page size"),
            "{error}"
        );
        assert_eq!(check_hello(&[7; HELLO_BYTES], &ours), Err(FrameError::Magic));
        let mut newer = hello(&ours);
        newer[8] = 2;
        assert_eq!(check_hello(&newer, &ours), Err(FrameError::Version(2)));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(id: u64, key: u64, epoch: u64, pages in 0..GRANT_PAGES_MAX as u32, place: u32, offset: u64, digest: u128) {
            let entry = Entry { place, offset, digest };
            let mut bytes = Vec::new();
            entry.encode(&mut bytes);
            prop_assert_eq!(bytes.len(), ENTRY_BYTES);
            prop_assert_eq!(Entry::decode(&bytes), entry);
            let head = BatchHead { id, key, epoch: Epoch(epoch), pages, entries_sum: checksum(&bytes) };
            prop_assert_eq!(BatchHead::decode(&head.encode()), Ok(head));
        }

        /// One wrong bit anywhere in a head is seen before anything is done about it.
        #[test]
        fn a_garbled_head_is_none(id: u64, key: u64, bit in 0..BATCH_BYTES * 8) {
            let mut bytes = BatchHead { id, key, epoch: Epoch(1), pages: 3, entries_sum: 5 }.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(BatchHead::decode(&bytes), Err(FrameError::Garbled));
        }

        #[test]
        fn any_bytes_are_a_batch_or_an_error(bytes: [u8; BATCH_BYTES]) {
            if let Ok(head) = BatchHead::decode(&bytes) {
                prop_assert!(head.pages as usize <= GRANT_PAGES_MAX);
            }
        }
    }
}
