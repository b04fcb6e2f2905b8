//! What is said over the rendezvous connection beside [`crate::frame`]: the ends of lanes, and where pages may be written. All
//! numbers are little-endian, and each message ends with the checksum of what is before it.

use super::LANES_MAX;
use crate::frame::{FrameError, checksum, u32_at, u64_at};
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// A port's address, as it is on the wire.
pub(super) type Gid = [u8; 16];

const END_BYTES: usize = 32;
const TARGET_BYTES: usize = 16;
const SUM_BYTES: usize = 8;

/// One end of a lane: what the other one must know to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// Number of its queue pair.
    pub(super) queue_pair: u32,
    /// Where its packets begin to count.
    pub(super) psn: u32,
    /// Its port's, on InfiniBand.
    pub(super) lid: u16,
    /// Bytes of a packet, as verbs number them: 1 is 256, 5 is 4096.
    pub(super) mtu: u8,
    pub(super) gid: Gid,
}

/// Where a page may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// [`NOWHERE`]: this page is not to be sent.
    pub(super) lane: u32,
    pub(super) rkey: u32,
    pub(super) at: u64,
}

/// Not a lane.
pub(super) const NOWHERE: u32 = u32::MAX;

impl Target {
    pub(super) const NONE: Self = Self {
        lane: NOWHERE,
        rkey: 0,
        at: 0,
    };
}

fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.extend(checksum(&bytes).to_le_bytes());
    bytes
}

/// Reads `bytes` of a message, which has begun with `begin`, and its checksum.
async fn read_sealed<R: AsyncRead + Unpin>(
    stream: &mut R,
    begin: &[u8],
    bytes: usize,
) -> io::Result<Result<Vec<u8>, FrameError>> {
    let mut message = begin.to_vec();
    message.resize(begin.len() + bytes + SUM_BYTES, 0);
    stream.read_exact(&mut message[begin.len()..]).await?;
    let sum = u64_at(&message, message.len() - SUM_BYTES);
    message.truncate(message.len() - SUM_BYTES);
    Ok(if checksum(&message) == sum {
        message.drain(..begin.len());
        Ok(message)
    } else {
        Err(FrameError::Garbled)
    })
}

/// The ends of a connection's lanes.
pub(super) fn encode_ends(ends: &[End]) -> Vec<u8> {
    let mut out = (ends.len() as u32).to_le_bytes().to_vec();
    for end in ends {
        out.extend(end.queue_pair.to_le_bytes());
        out.extend(end.psn.to_le_bytes());
        out.extend(end.lid.to_le_bytes());
        out.extend([end.mtu, 0, 0, 0, 0, 0]);
        out.extend(end.gid);
    }
    sealed(out)
}

/// Reads them from the other side.
pub(super) async fn read_ends<R: AsyncRead + Unpin>(stream: &mut R) -> io::Result<Result<Vec<End>, FrameError>> {
    let mut begin = [0; 4];
    stream.read_exact(&mut begin).await?;
    let count = u32::from_le_bytes(begin);
    if !(1..=LANES_MAX as u32).contains(&count) {
        return Ok(Err(FrameError::Lanes(count)));
    }
    let message = read_sealed(stream, &begin, count as usize * END_BYTES).await?;
    let end = |bytes: &[u8]| {
        let mut gid = Gid::default();
        gid.copy_from_slice(&bytes[16..32]);
        End {
            queue_pair: u32_at(bytes, 0),
            psn: u32_at(bytes, 4),
            lid: u16::from_le_bytes([bytes[8], bytes[9]]),
            mtu: bytes[10],
            gid,
        }
    };
    Ok(message.map(|m| m.chunks_exact(END_BYTES).map(end).collect()))
}

/// Where the pages of a batch may be written, in its order.
pub(super) fn encode_targets(targets: &[Target]) -> Vec<u8> {
    let mut out = Vec::with_capacity(targets.len() * TARGET_BYTES + SUM_BYTES);
    for target in targets {
        out.extend(target.lane.to_le_bytes());
        out.extend(target.rkey.to_le_bytes());
        out.extend(target.at.to_le_bytes());
    }
    sealed(out)
}

/// Reads them for `count` pages.
pub(super) async fn read_targets<R: AsyncRead + Unpin>(
    stream: &mut R,
    count: usize,
) -> io::Result<Result<Vec<Target>, FrameError>> {
    let message = read_sealed(stream, &[], count * TARGET_BYTES).await?;
    let target = |bytes: &[u8]| Target {
        lane: u32_at(bytes, 0),
        rkey: u32_at(bytes, 4),
        at: u64_at(bytes, 8),
    };
    Ok(message.map(|m| m.chunks_exact(TARGET_BYTES).map(target).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(work)
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(numbers in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u64>()), 1..LANES_MAX + 1), lid: u16, mtu: u8, gid: Gid) {
            let ends: Vec<End> = numbers.iter().map(|(queue_pair, psn, _)| End { queue_pair: *queue_pair, psn: *psn, lid, mtu, gid }).collect();
            let read = block(read_ends(&mut &encode_ends(&ends)[..])).unwrap();
            prop_assert_eq!(read, Ok(ends));
            let targets: Vec<Target> = numbers.iter().map(|(lane, rkey, at)| Target { lane: *lane, rkey: *rkey, at: *at }).collect();
            let read = block(read_targets(&mut &encode_targets(&targets)[..], targets.len())).unwrap();
            prop_assert_eq!(read, Ok(targets));
        }

        /// A page must not be written to another place than was told, nor a lane end elsewhere.
        #[test]
        fn one_wrong_bit_is_seen(lanes in 1..LANES_MAX, bit: prop::sample::Index) {
            let end = End { queue_pair: 7, psn: 8, lid: 9, mtu: 5, gid: [3; 16] };
            let mut bytes = encode_ends(&vec![end; lanes]);
            // The number of lanes is in the first four bytes: a wrong one asks for more bytes than there are, or for fewer.
            let bit = 32 + bit.index(bytes.len() * 8 - 32);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(block(read_ends(&mut &bytes[..])).unwrap(), Err(FrameError::Garbled));
            let mut bytes = encode_targets(&[Target::NONE]);
            let bit = bit % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(block(read_targets(&mut &bytes[..], 1)).unwrap(), Err(FrameError::Garbled));
        }
    }

    #[test]
    fn too_many_lanes_are_refused_before_they_are_read() {
        for count in [0, LANES_MAX as u32 + 1, u32::MAX] {
            let read = block(read_ends(&mut &count.to_le_bytes()[..])).unwrap();
            assert_eq!(read, Err(FrameError::Lanes(count)));
        }
    }
}
