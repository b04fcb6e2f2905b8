//! Which control node owns which shard: leases in the key-value bucket, taken and renewed by compare-and-set, each take-over
//! with a higher epoch (design §2).
//!
//! Nodes that are there share the shards by rendezvous hashing, so one that joins is handed its part and one that leaves hands
//! its own back. A node that dies says nothing: its leases run out. A lease that cannot be renewed in time is given up before
//! another node may take it, so that two owners never overlap by more than what epochs fence off (I6, I7).
//!
//! Epochs are milliseconds of the wall clock, or one more than the last if that is greater: so they grow even over a store
//! that has lost what was written to it.

use crate::effect::Local;
use crate::sessions::SESSIONS;
use crate::shell::Context;
use futures::future::join_all;
use pinion_bus::BusError;
use pinion_schemas::shard::{Lease, SHARDS, lease_key};
use pinion_schemas::{Epoch, WorkerId};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// A lease not renewed for so long may be taken. Times are measured by who looks: no clocks are compared.
pub const LEASE: Duration = Duration::from_secs(3);
/// Time between renewals.
pub const RENEW: Duration = Duration::from_millis(800);
/// How long one look at one lease may take; the rest of the lease's time is for the next tries.
const LOOK: Duration = Duration::from_millis(500);
/// Without a renewal for so long a lease is given up: with one [`LOOK`] and one [`CHECK`] on top it is still ours.
const GIVE_UP: Duration = Duration::from_millis(2_200);
/// How often that is checked.
const CHECK: Duration = Duration::from_millis(200);
/// Shards handed over in one round: their running turns have to find the new owner.
const HAND_OVERS: usize = 4;
/// Keys of the nodes that are there.
const MEMBER: &str = "control.";

/// What the keeper knows of one shard.
#[derive(Clone, Copy)]
struct Shard {
    number: u16,
    /// Of the key as seen last; 0 is none.
    revision: u64,
    /// Since when the key has that revision.
    since: Instant,
    /// Our epoch and the time of our last renewal, while it is ours.
    ours: Option<(Epoch, Instant)>,
}

/// A node as this one sees it.
struct Member {
    revision: u64,
    changed: Instant,
    first: Instant,
}

/// Keeps the leases of one node.
pub struct Keeper {
    control: WorkerId,
    /// The key that says that this node is here.
    member: String,
    birth: Epoch,
    context: Context,
    members: BTreeMap<String, Member>,
    member_revision: Option<u64>,
    /// Looks in a row that failed.
    failed: u32,
}

impl Keeper {
    /// A keeper for `control`, whose life `birth` is: milliseconds of the wall clock at [`Context::origin`].
    pub fn new(control: WorkerId, birth: Epoch, context: Context) -> Self {
        Self {
            member: format!("{MEMBER}{control}"),
            control,
            birth,
            context,
            members: BTreeMap::new(),
            member_revision: None,
            failed: 0,
        }
    }

    /// Takes, renews, hands over and gives up leases until it is told to leave; then it frees them all.
    pub async fn keep(mut self, mut leave: watch::Receiver<bool>) {
        let mut shards: Vec<Shard> = (0..SHARDS)
            .map(|number| Shard {
                number,
                revision: 0,
                since: Instant::now(),
                ours: None,
            })
            .collect();
        // Says that it is here, and sees who has come at the same time, before it takes anything.
        self.announce().await;
        let mut next_round = Instant::now() + 2 * CHECK;
        loop {
            self.context.awake().await;
            if Instant::now() >= next_round {
                next_round = Instant::now() + RENEW;
                self.announce().await;
                self.round(&mut shards).await;
            } else {
                // What another node is handing over should not wait for the next round: turns wait for it.
                let awaited = shards
                    .iter_mut()
                    .filter(|s| s.ours.is_none() && self.prefers_us(s.number));
                join_all(awaited.map(|shard| self.look(shard, false))).await;
            }
            self.give_up_late(&mut shards);
            tokio::select! {
                biased; // or a simulation would not repeat itself
                () = tokio::time::sleep(CHECK) => {}
                // An error means that nobody can tell us any more: then it is over too.
                _ = leave.wait_for(|leave| *leave) => break,
            }
        }
        self.leave(&mut shards).await;
    }

    async fn announce(&mut self) {
        let error = match timeout(LOOK, self.look_around()).await {
            Ok(Ok(())) => {
                self.failed = 0;
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it does not answer".to_owned(),
        };
        self.failed += 1;
        // The third, the sixth, the twelfth: a store that is restarted is not worth a word.
        if self.failed.is_multiple_of(3) && (self.failed / 3).is_power_of_two() {
            tracing::warn!(%error, "the key-value store cannot be used: without it this node owns no session");
        }
    }

    async fn round(&self, shards: &mut [Shard]) {
        let mine = shards.iter().filter(|s| s.ours.is_some());
        let misplaced = mine.filter(|s| !self.prefers_us(s.number)).map(|s| s.number);
        let hand_over: Vec<u16> = misplaced.take(HAND_OVERS).collect();
        let looks = shards.iter_mut().map(|shard| {
            let goes = hand_over.contains(&shard.number);
            self.look(shard, goes)
        });
        join_all(looks).await;
    }

    async fn look(&self, shard: &mut Shard, hand_over: bool) {
        let number = shard.number;
        match timeout(LOOK, self.tend(shard, hand_over)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(shard = number, %error, "lease not looked at"),
            Err(_) => tracing::debug!(shard = number, "lease not looked at: the store does not answer"),
        }
    }

    /// Says that this node is here, and sees who else is.
    async fn look_around(&mut self) -> Result<(), BusError> {
        let (bus, key) = (&self.context.bus, &self.member);
        let value = bytes::Bytes::from(self.birth.0.to_string());
        let written = match self.member_revision {
            Some(revision) => bus.kv_update(key, value, revision).await,
            None => match bus.kv_get(key).await? {
                Some(entry) => bus.kv_update(key, value, entry.revision).await,
                None => bus.kv_create(key, value).await,
            },
        };
        self.member_revision = written.as_ref().ok().copied();
        let now = Instant::now();
        let keys = bus.kv_keys(MEMBER).await?;
        self.members.retain(|name, _| keys.iter().any(|(key, _)| key == name));
        for (key, revision) in keys {
            let member = self.members.entry(key).or_insert(Member {
                revision,
                changed: now,
                first: now,
            });
            if member.revision != revision {
                (member.revision, member.changed) = (revision, now);
            }
        }
        written.map(drop)
    }

    /// Whether this node should own the shard: of those that are there, it has the highest hash with it. One that has come
    /// just now is waited for: it may be restarting again and again.
    fn prefers_us(&self, shard: u16) -> bool {
        let weight = |name: &str| xxhash_rust::xxh3::xxh3_64_with_seed(name.as_bytes(), u64::from(shard));
        let us = self.member.as_str();
        let now = Instant::now();
        let there = self.members.iter().filter(|(name, m)| {
            let alive = now.duration_since(m.changed) < LEASE;
            let settled = now.duration_since(m.first) >= LEASE || now.duration_since(self.context.origin) < LEASE;
            *name != us && alive && settled
        });
        let best = there.map(|(name, _)| (weight(name), name.as_str())).max();
        best.is_none_or(|best| (weight(us), us) > best)
    }

    async fn tend(&self, shard: &mut Shard, hand_over: bool) -> Result<(), BusError> {
        let key = lease_key(shard.number);
        let now = Instant::now();
        let entry = self.context.bus.kv_get(&key).await?;
        let revision = entry.as_ref().map_or(0, |e| e.revision);
        if revision != shard.revision {
            (shard.revision, shard.since) = (revision, now);
            if shard.ours.take().is_some() {
                tracing::warn!(
                    shard = shard.number,
                    "lease lost: another node or the store has changed it"
                );
                self.tell(shard.number, None);
            }
        }
        let lease: Option<Lease> = entry.and_then(|e| serde_json::from_slice(&e.value).ok());
        if let Some((epoch, _)) = shard.ours {
            if hand_over {
                return self.free(shard, epoch).await;
            }
            return self.write(shard, self.control.as_str(), epoch).await;
        }
        let free = lease.as_ref().is_none_or(|l| l.owner.is_empty());
        let ran_out = now.duration_since(shard.since) > LEASE;
        if ran_out || free && self.prefers_us(shard.number) {
            let wall = Epoch(self.birth.0 + self.context.now().as_millis());
            let epoch = wall.max(lease.map_or(Epoch(0), |l| l.epoch).next());
            self.write(shard, self.control.as_str(), epoch).await?;
            self.tell(shard.number, Some(epoch));
        }
        Ok(())
    }

    /// Writes the lease; if it is for us, it is ours from before the write on.
    async fn write(&self, shard: &mut Shard, owner: &str, epoch: Epoch) -> Result<(), BusError> {
        let begun = Instant::now();
        let lease = Lease {
            owner: owner.to_owned(),
            epoch,
        };
        // A struct of a string and a number always has a JSON form.
        let value = serde_json::to_vec(&lease).unwrap_or_default().into();
        let (bus, key) = (&self.context.bus, lease_key(shard.number));
        shard.revision = match shard.revision {
            0 => bus.kv_create(&key, value).await?,
            revision => bus.kv_update(&key, value, revision).await?,
        };
        shard.since = begun;
        shard.ours = (!owner.is_empty()).then_some((epoch, begun));
        Ok(())
    }

    /// Lets go first and then says so: between the two the shard has no owner, never two.
    async fn free(&self, shard: &mut Shard, epoch: Epoch) -> Result<(), BusError> {
        shard.ours = None;
        self.tell(shard.number, None);
        self.write(shard, "", epoch).await
    }

    /// Another node may take a shard [`LEASE`] after it saw our last renewal; we stop before.
    fn give_up_late(&self, shards: &mut [Shard]) {
        for shard in shards {
            if shard.ours.is_some_and(|(_, renewed)| renewed.elapsed() > GIVE_UP) {
                tracing::warn!(shard = shard.number, "lease not renewed in time: given up");
                (shard.ours, shard.since) = (None, Instant::now());
                self.tell(shard.number, None);
            }
        }
    }

    async fn leave(&self, shards: &mut [Shard]) {
        let mine = shards.iter_mut().filter_map(|s| s.ours.map(|(epoch, _)| (s, epoch)));
        let frees = mine.map(|(shard, epoch)| timeout(LOOK, self.free(shard, epoch)));
        join_all(frees).await;
        // What is left of either is noticed by its age.
        let _ = timeout(LOOK, self.context.bus.kv_delete(&self.member, None)).await;
    }

    fn tell(&self, shard: u16, epoch: Option<Epoch>) {
        self.context.directory.tell(SESSIONS, Local::Shard(shard, epoch));
    }
}
