//! Small pools for tests.

use crate::layout::{Dtype, Layout};
use crate::pool::{PageRef, Pool};

/// Pages of 256 bytes.
pub fn layout() -> Layout {
    Layout {
        model: 1,
        layers: 2,
        kv_heads: 1,
        head_dim: 4,
        page_tokens: 4,
        dtype: Dtype::F32,
    }
}

/// A pool of such pages.
pub fn pool(pages: u32) -> Pool {
    Pool::new(layout(), pages).expect("no pool")
}

/// A finished page whose bytes nobody else has.
pub fn page(pool: &Pool, seed: u8) -> PageRef {
    let mut slot = pool.take(1).expect("no room").remove(0);
    for (at, byte) in slot.iter_mut().enumerate() {
        *byte = (at as u8).wrapping_mul(31) ^ seed;
    }
    slot.finish()
}
