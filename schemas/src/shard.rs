//! Which shard a session belongs to. A shard is owned by one control node through a lease in the key-value bucket.

use crate::ids::{Epoch, SessionId, WorkerId};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Shards of a cluster: enough to spread over tens of control nodes, few enough that each can renew its leases.
/// It is part of the wire: all nodes of a cluster must agree.
pub const SHARDS: u16 = 64;

/// The shard of `session`: the first 8 bytes (little-endian) of the SHA-256 of its text, modulo [`SHARDS`].
pub fn shard_of(session: &SessionId) -> u16 {
    let digest = Sha256::digest(session.as_str().as_bytes());
    let head = digest
        .iter()
        .take(8)
        .rev()
        .fold(0u64, |number, byte| (number << 8) | u64::from(*byte));
    (head % u64::from(SHARDS)) as u16
}

/// Value of a shard's lease in the bucket, as JSON: `{"owner":"<control node>","epoch":n}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The control node; empty while the shard is between two owners.
    pub owner: String,
    /// Its epoch, or that of the last owner.
    pub epoch: Epoch,
}

impl Lease {
    /// The control node that owns the shard, if one does.
    pub fn holder(&self) -> Option<WorkerId> {
        WorkerId::new(self.owner.as_str()).ok()
    }
}

/// Key of a shard's [`Lease`] in the bucket: `shard.<n>`.
pub fn lease_key(shard: u16) -> String {
    format!("shard.{shard}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_match_values_computed_elsewhere() {
        // Python: int.from_bytes(hashlib.sha256(s.encode()).digest()[:8], "little") % 64
        for (session, shard) in [("s-1", 42), ("a", 10), ("user@host > *", 23)] {
            assert_eq!(shard_of(&SessionId::new(session).unwrap()), shard, "{session}");
        }
        assert_eq!(lease_key(7), "shard.7");
    }

    #[test]
    fn a_lease_between_two_owners_has_none() {
        let read = |text: &str| serde_json::from_str::<Lease>(text).unwrap();
        let held = read(r#"{"owner":"c0","epoch":7}"#);
        assert_eq!((held.holder().unwrap().as_str(), held.epoch), ("c0", Epoch(7)));
        assert_eq!(read(r#"{"owner":"","epoch":7}"#).holder(), None);
    }
}
