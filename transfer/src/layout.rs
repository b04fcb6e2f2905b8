//! What a page of KV looks like in memory. Nodes may exchange pages only if theirs look alike.

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;

/// Longest page, bytes: what one slot of the largest models needs (128 layers × 2 × 16 heads × 256 × 2 bytes × 64 tokens is
/// 128 MiB), and little enough that nobody can ask for a buffer that hurts.
pub const PAGE_BYTES_MAX: u64 = 1 << 28;

/// How a number of the KV is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl Dtype {
    /// Bytes of one number.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Shape of a page: `[layer][K, then V][kv head][token][dim]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Names the model's weights: KV of other weights means something else.
    pub model: u128,
    /// Transformer layers.
    pub layers: u32,
    /// Key-value heads per layer.
    pub kv_heads: u32,
    /// Numbers per head.
    pub head_dim: u32,
    /// Tokens per page.
    pub page_tokens: u32,
    /// Type of the numbers.
    pub dtype: Dtype,
}

/// Two nodes cannot exchange pages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the peer's pages are {theirs:032x} of {their_bytes} bytes, ours {ours:032x} of {our_bytes}: run the same model, dtype and page size on both"
)]
pub struct Mismatch {
    /// Fingerprint here.
    pub ours: u128,
    /// Bytes of a page here.
    pub our_bytes: u64,
    /// Fingerprint there.
    pub theirs: u128,
    /// Bytes of a page there.
    pub their_bytes: u64,
}

/// A layout without a byte, or with pages too long for anyone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a page of {0} bytes is not possible: between 1 and {PAGE_BYTES_MAX} are")]
pub struct BadLayout(pub u64);

impl Layout {
    /// Bytes of one page, without any padding.
    ///
    /// # Errors
    /// [`BadLayout`]
    pub fn page_bytes(&self) -> Result<u64, BadLayout> {
        let numbers = [self.layers, 2, self.kv_heads, self.head_dim, self.page_tokens];
        let bytes = numbers
            .iter()
            .try_fold(self.dtype.bytes(), |sum, n| sum.checked_mul(u64::from(*n)))
            .unwrap_or(u64::MAX);
        if (1..=PAGE_BYTES_MAX).contains(&bytes) {
            Ok(bytes)
        } else {
            Err(BadLayout(bytes))
        }
    }

    /// A number that is the same on two nodes only if everything here is.
    pub fn fingerprint(&self) -> u128 {
        let mut bytes = self.model.to_le_bytes().to_vec();
        for n in [
            self.layers,
            self.kv_heads,
            self.head_dim,
            self.page_tokens,
            self.dtype as u32,
        ] {
            bytes.extend(n.to_le_bytes());
        }
        XxHash3_128::oneshot(&bytes)
    }
}

/// The digest of a page's bytes. It finds errors, not forgers: peers are known by the keys of their grants.
pub fn digest(page: &[u8]) -> u128 {
    XxHash3_128::oneshot(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn smollm() -> Layout {
        Layout {
            model: 7,
            layers: 30,
            kv_heads: 3,
            head_dim: 64,
            page_tokens: 64,
            dtype: Dtype::Bf16,
        }
    }

    #[test]
    fn a_page_is_as_long_as_a_real_server_says() {
        // Measured on SGLang with this model: 64-token pages of 1,474,560 bytes.
        assert_eq!(smollm().page_bytes(), Ok(1_474_560));
    }

    #[test]
    fn every_field_changes_the_fingerprint() {
        let base = smollm();
        let others = [
            Layout {
                model: 8,
                ..base.clone()
            },
            Layout {
                layers: 29,
                ..base.clone()
            },
            Layout {
                kv_heads: 4,
                ..base.clone()
            },
            Layout {
                head_dim: 63,
                ..base.clone()
            },
            Layout {
                page_tokens: 65,
                ..base.clone()
            },
            Layout {
                dtype: Dtype::F16,
                ..base.clone()
            },
        ];
        for other in others {
            assert_ne!(other.fingerprint(), base.fingerprint(), "{other:?}");
        }
    }

    #[test]
    fn impossible_pages_are_refused() {
        assert_eq!(Layout { layers: 0, ..smollm() }.page_bytes(), Err(BadLayout(0)));
        let huge = Layout {
            layers: u32::MAX,
            kv_heads: u32::MAX,
            head_dim: u32::MAX,
            ..smollm()
        };
        assert_eq!(huge.page_bytes(), Err(BadLayout(u64::MAX)));
    }
}
