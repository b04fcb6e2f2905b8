//! Every message of a turn (design §4) and of the flows beside it (design §5).
//!
//! Wire types hold integers, strings, vectors, options and enums only: no maps and no shared pointers (style B.2 row 5).
//! Text ids are those of the sender; who takes one for a name of its own compares it with the subject. A [`PageHash`] is any 32 bytes.

use crate::hash::PageHash;
use crate::ids::{Epoch, PermitId, RequestId, SessionId, TurnIndex, WorkerId};
use crate::reasons::{AbortReason, Class, MigrationReason, Path, RejectReason, SeedReason};
use crate::sampling::Sampling;
use crate::time::Micros;
use crate::wire::{self, Schema, WireError};
use rkyv::{Archive, Deserialize, Serialize};

macro_rules! messages {
    ($($(#[$doc:meta])* $id:literal / $version:literal $name:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty,)* })+) => {
        $(
            $(#[$doc])*
            #[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
            pub struct $name { $($(#[$fdoc])* pub $field: $ty,)* }

            impl Schema for $name {
                const ID: u16 = $id;
                const VERSION: u16 = $version;
                const NAME: &'static str = stringify!($name);
            }
        )+

        /// `(id, version, name)` of every message, for tests and documents.
        pub const CATALOGUE: &[(u16, u16, &str)] = &[$(($id, $version, stringify!($name))),+];

        /// Checks a frame that may be any message. Returns the message's name.
        ///
        /// # Errors
        /// [`WireError`]
        pub fn check(bytes: &[u8]) -> Result<&'static str, WireError> {
            match wire::schema_of(bytes) {
                $(Some($id) => wire::decode::<$name>(bytes).map(|_| $name::NAME),)+
                other => Err(WireError::Unknown(other)),
            }
        }
    };
}

/// Slots of a pool that a peer may fill over the transfer plane.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Slots {
    /// Number of the grant.
    pub grant: u64,
    /// Its secret.
    pub key: u64,
    /// Life of the pool.
    pub epoch: Epoch,
    /// Places in it.
    pub pages: u32,
    /// Where the pool's page server is, nearest first.
    pub addresses: Vec<String>,
}

messages! {
    /// Session actor to decode actor: run this turn, directly if you can. Answered by [`Started`], [`Permit`],
    /// [`PermitQueued`] or [`Reject`]; what follows goes to `notify`.
    1 / 3 Run {
        /// The client's request.
        request: RequestId,
        /// Attempt of the turn; facts of older attempts change nothing.
        attempt: u64,
        /// The session.
        session: SessionId,
        /// Position in the session.
        turn: TurnIndex,
        /// Epoch of the session's owner.
        epoch: Epoch,
        /// Service class.
        class: Class,
        /// Tenant, which separates page names; `None` is the common one.
        tenant: Option<String>,
        /// Time left until the deadline when this was sent: clocks of two machines need not agree.
        time_left: Micros,
        /// Full pages of the session's committed prefix.
        prefix_pages: u32,
        /// Whether the session's pin is this worker.
        pinned: bool,
        /// Whether the prompt does not continue the committed context.
        prefix_changed: bool,
        /// The whole context, the answer so far included.
        tokens: Vec<u32>,
        /// How many of `tokens` are the answer so far (after a fail-over); they must not be sent again.
        already_sent: u32,
        /// Most tokens to generate beyond `tokens`.
        max_new_tokens: u32,
        /// How they are chosen.
        sampling: Sampling,
        /// Whether the session stays here.
        keep: bool,
        /// Prefill workers that back the session up.
        backups: Vec<WorkerId>,
        /// Subject for [`Chunk`] and [`Completed`].
        stream: String,
        /// Subject for what the owner must know.
        notify: String,
    }
    /// Decode actor to session actor: the turn runs here, directly.
    2 / 2 Started {
        /// The client's request.
        request: RequestId,
        /// Attempt it answers.
        attempt: u64,
        /// Pages of the prefix found here.
        resident_pages: u32,
        /// Pause asked of every sender, in milliseconds; 0 is none.
        pause_millis: u32,
    }
    /// Decode actor to session actor: room is promised for one seed.
    3 / 2 Permit {
        /// The client's request.
        request: RequestId,
        /// Attempt it answers.
        attempt: u64,
        /// The promise.
        permit: PermitId,
        /// Epoch of the decode worker.
        epoch: Epoch,
        /// Time until the promise ends by itself.
        ttl: Micros,
        /// Pages of the prefix already here: only the others move.
        resident_pages: u32,
        /// Pause asked of every sender, in milliseconds.
        pause_millis: u32,
    }
    /// Decode actor to session actor: wait in the permit queue.
    4 / 2 PermitQueued {
        /// The client's request.
        request: RequestId,
        /// Attempt it answers.
        attempt: u64,
        /// Seeds of the class in front.
        position: u32,
        /// Estimate until the permit, in microseconds.
        eta: Micros,
    }
    /// Decode actor to session actor: a promise ended unused.
    5 / 2 PermitExpired {
        /// The client's request.
        request: RequestId,
        /// Attempt it answers.
        attempt: u64,
        /// The promise.
        permit: PermitId,
    }
    /// Decode actor to session actor: not here, not now.
    6 / 2 Reject {
        /// The client's request.
        request: RequestId,
        /// Attempt it answers.
        attempt: u64,
        /// Why.
        reason: RejectReason,
        /// Pause asked of every sender, in milliseconds.
        pause_millis: u32,
    }
    /// Session actor to prefill actor: compute these pages and send them to the permit's owner.
    7 / 2 Seed {
        /// The client's request.
        request: RequestId,
        /// Attempt of the turn.
        attempt: u64,
        /// The session.
        session: SessionId,
        /// Epoch of the session's owner.
        epoch: Epoch,
        /// Where the pages go.
        decode: WorkerId,
        /// Epoch of that worker.
        decode_epoch: Epoch,
        /// The promise that covers them.
        permit: PermitId,
        /// Tenant, which separates page names.
        tenant: Option<String>,
        /// All tokens of the context.
        tokens: Vec<u32>,
        /// Leading pages that `decode` already holds.
        skip_pages: u32,
        /// Time left until the seed is given up.
        time_left: Micros,
        /// Subject for what the owner must know.
        notify: String,
    }
    /// Prefill actor to session actor: all pages are on the D. Also its answer to a `Seed` it has finished before.
    8 / 2 SeedDone {
        /// The client's request.
        request: RequestId,
        /// Attempt of the turn.
        attempt: u64,
        /// The promise.
        permit: PermitId,
        /// Pages moved.
        moved_pages: u32,
        /// Tokens computed for it.
        computed_tokens: u32,
    }
    /// Decode actor to the turn's stream: tokens of the answer.
    9 / 2 Chunk {
        /// The client's request.
        request: RequestId,
        /// Attempt of the turn.
        attempt: u64,
        /// Position of the first token in the answer, from 0: a gap or a repeat shows (I2).
        offset: u32,
        /// The tokens.
        tokens: Vec<u32>,
    }
    /// Decode actor to the turn's stream: the turn is complete and its pages are committed. It carries the whole answer, so
    /// that a lost chunk costs nobody a token.
    10 / 2 Completed {
        /// The client's request.
        request: RequestId,
        /// Attempt of the turn.
        attempt: u64,
        /// How it was served.
        path: Path,
        /// Why it was not direct.
        why: Option<SeedReason>,
        /// Tokens of the context with the answer.
        context_tokens: u32,
        /// Tokens of it that are in named pages.
        committed_tokens: u32,
        /// Name of the last full page, if there is one.
        tip: Option<PageHash>,
        /// Prompt tokens that this worker had when the turn came.
        cached_tokens: u32,
        /// The answer from its first token on.
        answer: Vec<u32>,
    }
    /// Either side to the other: stop this leg.
    11 / 2 Abort {
        /// The client's request.
        request: RequestId,
        /// Attempt of the turn.
        attempt: u64,
        /// Epoch of the session's owner.
        epoch: Epoch,
        /// Why.
        reason: AbortReason,
    }
    /// Session actor to decode actor: this session now belongs to you.
    12 / 1 Bind {
        /// The session.
        session: SessionId,
        /// Epoch of the session's owner.
        epoch: Epoch,
        /// Why it moved, if it did.
        reason: Option<MigrationReason>,
    }
    /// Session actor to decode actor: this session is not yours any more; its pages stay evictable.
    13 / 1 Unbind {
        /// The session.
        session: SessionId,
        /// Epoch of the session's owner.
        epoch: Epoch,
    }
    /// Decode actor to prefill actor: pages for backup. Answered by [`SyncGrant`] or [`SyncDecline`].
    14 / 2 SyncOffer {
        /// The session.
        session: SessionId,
        /// Number of the sync, of the session on this pair of workers.
        sync: u64,
        /// Epoch of the decode worker.
        epoch: Epoch,
        /// Page in front of the first one, if there is one.
        parent: Option<PageHash>,
        /// Names of the pages, in order of the chain.
        pages: Vec<PageHash>,
    }
    /// Prefill actor to decode actor: send these.
    15 / 2 SyncGrant {
        /// The session.
        session: SessionId,
        /// Number of the sync.
        sync: u64,
        /// Leading pages of the offer that are already there.
        skip_pages: u32,
        /// Where the others go; without it their simulated contents come with the commit.
        slots: Option<Slots>,
    }
    /// Prefill actor to decode actor: not now; or not these, if what stands in front of them is not there.
    16 / 2 SyncDecline {
        /// The session.
        session: SessionId,
        /// Number of the sync.
        sync: u64,
        /// Why.
        reason: RejectReason,
    }
    /// Prefill actor to decode actor: so much of what was committed is there.
    17 / 2 SyncAck {
        /// The session.
        session: SessionId,
        /// Number of the sync.
        sync: u64,
        /// Leading pages of the commit.
        held_pages: u32,
    }
    /// Event of a worker: pages became resident.
    18 / 1 PagesStored {
        /// The worker.
        worker: WorkerId,
        /// Its epoch.
        epoch: Epoch,
        /// Number of this event in the epoch, dense from 1.
        sequence: u64,
        /// The pages.
        pages: Vec<PageHash>,
    }
    /// Event of a worker: pages are gone.
    19 / 1 PagesEvicted {
        /// The worker.
        worker: WorkerId,
        /// Its epoch.
        epoch: Epoch,
        /// Number of this event in the epoch, shared with [`PagesStored`].
        sequence: u64,
        /// The pages.
        pages: Vec<PageHash>,
    }
    /// Answer to a router that saw a gap: everything that is resident.
    20 / 1 ResidencySnapshot {
        /// The worker.
        worker: WorkerId,
        /// Its epoch.
        epoch: Epoch,
        /// Number of the last event that is contained.
        sequence: u64,
        /// Whether more parts follow.
        more: bool,
        /// The pages of this part.
        pages: Vec<PageHash>,
    }
    /// A worker is alive, and how busy.
    21 / 2 Heartbeat {
        /// The worker.
        worker: WorkerId,
        /// Its epoch.
        epoch: Epoch,
        /// Turns running.
        running: u32,
        /// Tokens waiting for prefill.
        queued_tokens: u64,
        /// Pages of the pool.
        pool_pages: u32,
        /// Pages free or evictable.
        room_pages: u32,
        /// Whether it takes nothing new.
        draining: bool,
        /// Pause asked of every sender, in milliseconds.
        pause_millis: u32,
        /// Number of its last residency event: a reader that has fewer has lost some.
        residency_sequence: u64,
    }
    /// Are you there? On its own subject and task, so that admission never implies liveness.
    22 / 1 Probe {
        /// Number of the probe.
        nonce: u64,
    }
    /// Yes.
    23 / 1 ProbeAck {
        /// Number of the probe.
        nonce: u64,
        /// Epoch of who answers.
        epoch: Epoch,
    }
    /// Gateway to the control node that owns the session: serve this turn. Answered by [`Accepted`] or [`Failed`].
    24 / 2 Submit {
        /// The client's request; the same id again is the same turn.
        request: RequestId,
        /// The session.
        session: SessionId,
        /// Service class.
        class: Class,
        /// Tenant, which separates page names.
        tenant: Option<String>,
        /// Time left until the deadline.
        time_left: Micros,
        /// The whole prompt.
        prompt: Vec<u32>,
        /// Most tokens to generate, the answer so far included.
        max_new_tokens: u32,
        /// How they are chosen.
        sampling: Sampling,
        /// Tokens of the answer the client has, when an owner is replaced in mid-turn.
        answer_so_far: Vec<u32>,
        /// Subject for the stream.
        stream: String,
    }
    /// The turn is accepted: it will end exactly once, on the stream (I1).
    25 / 1 Accepted {
        /// The client's request.
        request: RequestId,
        /// Epoch of the owner.
        epoch: Epoch,
        /// Turns of the session in front.
        waiting: u32,
    }
    /// To the stream, or instead of [`Accepted`]: the turn has failed.
    26 / 1 Failed {
        /// The client's request.
        request: RequestId,
        /// Why.
        reason: AbortReason,
        /// When a new try makes sense, in milliseconds.
        retry_after_millis: u32,
    }
    /// Gateway to the owner: the client has gone.
    27 / 1 Cancel {
        /// The client's request.
        request: RequestId,
        /// The session.
        session: SessionId,
    }
    /// Prefill or decode actor to the session's owner: this leg has failed.
    28 / 2 LegFailed {
        /// The client's request.
        request: RequestId,
        /// Attempt of the turn.
        attempt: u64,
        /// Why.
        reason: AbortReason,
    }
    /// Prefill actor to decode actor: pages of a seed. Their bytes travelled on the transfer plane; here are their names.
    29 / 2 Pages {
        /// The client's request.
        request: RequestId,
        /// The promise that covers them.
        permit: PermitId,
        /// Epoch of the decode worker the promise is from.
        epoch: Epoch,
        /// Page in front of the first one, if there is one.
        parent: Option<PageHash>,
        /// Names, in order of the chain.
        names: Vec<PageHash>,
        /// Simulated contents, one for each name (engine `sim` only).
        contents: Vec<u64>,
        /// The grant that the bytes went into: the page of each name is in the place of its position.
        grant: Option<u64>,
    }
    /// The pages are in place.
    30 / 1 PagesAck {
        /// The client's request.
        request: RequestId,
        /// The promise.
        permit: PermitId,
        /// Pages that were new.
        stored: u32,
    }
    /// Prefill actor to decode actor: where may the bytes of these pages of a seed go? Answered by [`PagesGrant`] or [`Reject`].
    32 / 1 PagesOffer {
        /// The client's request.
        request: RequestId,
        /// The promise that covers them.
        permit: PermitId,
        /// Epoch of the decode worker the promise is from.
        epoch: Epoch,
        /// How many.
        pages: u32,
    }
    /// Decode actor to prefill actor: into this grant of my pool.
    33 / 1 PagesGrant {
        /// The client's request.
        request: RequestId,
        /// Where they go.
        slots: Slots,
    }
    /// Session actor to a decode actor that has pages of the session: send these to another one. Answered by [`Accepted`] or
    /// [`LegFailed`]; it ends with [`SeedDone`] or [`LegFailed`].
    35 / 1 PagesMove {
        /// The client's request.
        request: RequestId,
        /// Attempt of the turn.
        attempt: u64,
        /// Decode worker the pages go to.
        decode: WorkerId,
        /// Epoch of that worker.
        decode_epoch: Epoch,
        /// The promise that covers them.
        permit: PermitId,
        /// Page in front of the first one, if there is one.
        parent: Option<PageHash>,
        /// Names, in order of the chain.
        names: Vec<PageHash>,
        /// Time left until the move is given up.
        time_left: Micros,
        /// Subject for what the owner must know.
        notify: String,
    }
    /// Decode actor to prefill actor: the pages of a sync have been sent; these they are. Answered by [`SyncAck`].
    34 / 1 SyncCommit {
        /// The session.
        session: SessionId,
        /// Number of the sync.
        sync: u64,
        /// Epoch of the decode worker.
        epoch: Epoch,
        /// Page in front of the first one, if there is one.
        parent: Option<PageHash>,
        /// Names, in order of the chain.
        names: Vec<PageHash>,
        /// Simulated contents, one for each name (engine `sim` only).
        contents: Vec<u64>,
        /// The grant that the bytes went into: the page of each name is in the place of its position.
        grant: Option<u64>,
    }
    /// Router to worker: which pages do you hold? Answered by one [`ResidencySnapshot`].
    31 / 1 SnapshotAsk {
        /// Pages to skip, when an earlier part said that more follow.
        skip: u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, encode};
    use proptest::prelude::*;

    fn run() -> Run {
        Run {
            request: RequestId(7),
            attempt: 1,
            session: SessionId::new("s-1").unwrap(),
            turn: TurnIndex(3),
            epoch: Epoch(2),
            class: Class::Interactive,
            tenant: Some("a".into()),
            time_left: Micros::from_secs(30),
            prefix_pages: 2,
            pinned: true,
            prefix_changed: false,
            tokens: (0..140).collect(),
            already_sent: 0,
            max_new_tokens: 16,
            sampling: Sampling::GREEDY,
            keep: true,
            backups: vec![WorkerId::new("p0").unwrap()],
            stream: "pinion.c.turn.7.stream".into(),
            notify: "pinion.c.router.r0.notify".into(),
        }
    }

    fn chunk() -> Chunk {
        Chunk {
            request: RequestId(1),
            attempt: 2,
            offset: 3,
            tokens: vec![4, 5],
        }
    }

    #[test]
    fn ids_are_unique() {
        let ids: std::collections::BTreeSet<u16> = CATALOGUE.iter().map(|m| m.0).collect();
        assert_eq!(ids.len(), CATALOGUE.len());
    }

    #[test]
    fn the_wire_has_not_changed() {
        // A change of these bytes breaks running clusters: add a version instead of editing the expectation.
        let mut hex = String::new();
        crate::hash::push_hex(&mut hex, &encode(&chunk()).unwrap());
        assert_eq!(hex, include_str!("../golden/chunk.v2.hex").trim());
        let sum = xxhash_rust::xxh3::xxh3_64(&encode(&run()).unwrap());
        assert_eq!(format!("{sum:016x}"), include_str!("../golden/run.v3.xxh3").trim());
    }

    #[test]
    fn the_wrong_message_is_refused_by_name() {
        let bytes = encode(&chunk()).unwrap();
        assert_eq!(
            decode::<Run>(&bytes),
            Err(WireError::Schema {
                got: 9,
                expected: 1,
                name: "Run"
            })
        );
        let mut newer = bytes.clone();
        newer[4] = 3;
        assert_eq!(
            decode::<Chunk>(&newer),
            Err(WireError::Version {
                got: 3,
                spoken: 2,
                name: "Chunk"
            })
        );
        let padded = [&bytes[..], &[0]].concat();
        assert!(matches!(decode::<Chunk>(&padded), Err(WireError::Length { .. })));
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded_at_any_address(
            offset: u32, tokens in prop::collection::vec(any::<u32>(), 0..99), shift in 0usize..16,
        ) {
            let message = Chunk { request: RequestId(9), attempt: 1, offset, tokens };
            let mut moved = vec![0; shift];
            moved.extend(encode(&message).unwrap());
            prop_assert_eq!(decode::<Chunk>(&moved[shift..]).unwrap(), message);
        }

        #[test]
        fn every_single_bit_flip_is_noticed(bit in 0usize..2_000) {
            let mut bytes = encode(&run()).unwrap();
            let bit = bit % (bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            // Bytes 6 and 7 are reserved and not read.
            if !(48..64).contains(&bit) {
                prop_assert!(decode::<Run>(&bytes).is_err());
            }
        }

        #[test]
        fn any_bytes_give_an_error_not_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), frame: bool) {
            let bytes = if frame { reframe(&bytes) } else { bytes };
            let _ = decode::<Run>(&bytes);
        }
    }

    /// A frame that passes every check in front of the archive, so that the archive's own validation is exercised.
    fn reframe(body: &[u8]) -> Vec<u8> {
        let mut out = encode(&run()).unwrap()[..12].to_vec();
        out[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
        out.extend((xxhash_rust::xxh3::xxh3_64(body) as u32).to_le_bytes());
        out.extend_from_slice(body);
        out
    }
}
