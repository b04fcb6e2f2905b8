//! How weights are stored in a GGUF, and the one form that this engine computes with: blocks of 32 numbers, each
//! `number[i] = scale * int[i] + offset`. The formats of 32-blocks and `Q4_K` come over exactly; the others are rounded to 8 bits.

use half::{bf16, f16};

/// Numbers of a block.
pub(crate) const BLOCK: usize = 32;
/// Numbers of a block of the K formats.
const SUPER: usize = 256;

/// Format of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q6K,
}

/// 32 numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Block {
    pub(crate) ints: [i8; BLOCK],
    pub(crate) scale: f32,
    pub(crate) offset: f32,
}

impl Kind {
    /// The format of a GGUF type number, if this engine reads it.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            14 => Self::Q6K,
            30 => Self::Bf16,
            _ => return None,
        })
    }

    /// Numbers and bytes of the smallest piece that stands alone and is whole blocks.
    fn piece(self) -> (usize, usize) {
        match self {
            Self::F32 => (BLOCK, 128),
            Self::F16 | Self::Bf16 => (BLOCK, 64),
            Self::Q4_0 => (BLOCK, 18),
            Self::Q4_1 => (BLOCK, 20),
            Self::Q5_0 => (BLOCK, 22),
            Self::Q5_1 => (BLOCK, 24),
            Self::Q8_0 => (BLOCK, 34),
            Self::Q4K => (SUPER, 144),
            Self::Q6K => (SUPER, 210),
        }
    }

    /// Bytes of `numbers` numbers; `None` if they are no whole number of blocks.
    pub(crate) fn bytes(self, numbers: u64) -> Option<usize> {
        let numbers = usize::try_from(numbers).ok()?;
        match self {
            Self::F32 => numbers.checked_mul(4),
            Self::F16 | Self::Bf16 => numbers.checked_mul(2),
            _ => {
                let (per, bytes) = self.piece();
                numbers
                    .is_multiple_of(per)
                    .then(|| (numbers / per).checked_mul(bytes))?
            }
        }
    }

    /// Whether rows of this many numbers are whole pieces.
    pub(crate) fn divides(self, numbers: usize) -> bool {
        numbers.is_multiple_of(self.piece().0)
    }

    /// Whether all ints of its blocks are from 0 to 15.
    pub(crate) fn is_four_bits(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q4_1 | Self::Q4K)
    }

    /// The blocks of whole pieces, in order.
    pub(crate) fn blocks(self, bytes: &[u8]) -> impl Iterator<Item = Block> {
        bytes.chunks_exact(self.piece().1).flat_map(move |piece| match self {
            Self::Q4K => q4k(piece),
            Self::Q6K => q6k(piece),
            _ => vec![self.block(piece)],
        })
    }

    fn block(self, piece: &[u8]) -> Block {
        let half = |at| half_at(piece, at);
        let (scale, offset) = match self {
            Self::Q4_1 | Self::Q5_1 => (half(0), half(2)),
            // Exactly the same numbers, from ints that are not negative.
            Self::Q4_0 => (half(0), -8.0 * half(0)),
            _ => (half(0), 0.0),
        };
        let ints = match self {
            Self::Q4_0 => nibbles(&piece[2..], 0, 0),
            Self::Q4_1 => nibbles(&piece[4..], 0, 0),
            Self::Q5_0 => nibbles(&piece[6..], word_at(piece, 2), 16),
            Self::Q5_1 => nibbles(&piece[8..], word_at(piece, 4), 0),
            Self::Q8_0 => std::array::from_fn(|i| piece[2 + i].cast_signed()),
            _ => return round(&self.floats(piece)),
        };
        Block { ints, scale, offset }
    }

    /// Numbers that are not quantised; empty for the formats that are.
    pub(crate) fn floats(self, bytes: &[u8]) -> Vec<f32> {
        let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self {
            Self::F32 => {
                let word = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                bytes.chunks_exact(4).map(word).collect()
            }
            Self::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
            Self::Bf16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            _ => Vec::new(),
        }
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Low halves of 16 bytes, then high halves, each with a fifth bit from `high`, less `zero`.
fn nibbles(bytes: &[u8], high: u32, zero: i8) -> [i8; BLOCK] {
    std::array::from_fn(|i| {
        let byte = bytes[i % 16];
        let low = if i < 16 { byte & 15 } else { byte >> 4 };
        let fifth = (high >> i & 1) as u8;
        (low | fifth << 4).cast_signed() - zero
    })
}

/// Rounds to 8 bits.
fn round(numbers: &[f32]) -> Block {
    let largest = numbers.iter().fold(0.0_f32, |most, n| most.max(n.abs()));
    let scale = largest / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    Block {
        ints: std::array::from_fn(|i| numbers.get(i).map_or(0, |n| (n * inverse).round() as i8)),
        scale,
        offset: 0.0,
    }
}

/// Scale and minimum number `j` of a `Q4_K` piece, six bits each, packed in twelve bytes.
fn scale_and_minimum(packed: &[u8], j: usize) -> (f32, f32) {
    let (scale, minimum) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (
            packed[j + 4] & 15 | packed[j - 4] >> 6 << 4,
            packed[j + 4] >> 4 | packed[j] >> 6 << 4,
        )
    };
    (scale.into(), minimum.into())
}

fn q4k(piece: &[u8]) -> Vec<Block> {
    let (scale, minimum) = (half_at(piece, 0), half_at(piece, 2));
    let block = |j: usize| {
        let (s, m) = scale_and_minimum(&piece[4..16], j);
        let bytes = &piece[16 + j / 2 * BLOCK..];
        Block {
            ints: std::array::from_fn(|i| (bytes[i] >> (j % 2 * 4) & 15).cast_signed()),
            scale: scale * s,
            offset: -minimum * m,
        }
    };
    (0..SUPER / BLOCK).map(block).collect()
}

fn q6k(piece: &[u8]) -> Vec<Block> {
    let scale = half_at(piece, 208);
    let number = |j: usize, i: usize| {
        let (side, quarter) = (j / 4, j % 4);
        let low = piece[side * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4) & 15;
        let high = piece[128 + side * 32 + i] >> (quarter * 2) & 3;
        let own = piece[192 + side * 8 + quarter * 2 + i / 16].cast_signed();
        scale * f32::from(own) * (f32::from(low | high << 4) - 32.0)
    };
    let block = |j| round(&std::array::from_fn::<f32, BLOCK, _>(|i| number(j, i)));
    (0..SUPER / BLOCK).map(block).collect()
}
