//! I6: what is written of a session and of a shard's owner only goes forward: turns in order, epochs never down, no epoch with two owners,
//! no turn completed twice by one owner.

use super::{Checker, Found, Invariant};
use crate::observed::{Body, Observed};
use pinion_schemas::shard::shard_of;
use pinion_schemas::{Epoch, Micros, SessionId};
use std::collections::{BTreeMap, BTreeSet};

/// See the module's text.
#[derive(Default)]
pub(super) struct Order {
    /// Epoch and turns of each session's snapshot.
    sessions: BTreeMap<String, (Epoch, u64)>,
    /// Epoch and owner of each shard: the highest there ever was, also if the store has lost it.
    shards: BTreeMap<u16, (Epoch, String)>,
    /// Turns completed, by owner and its epoch.
    completed: BTreeSet<(String, Epoch, String)>,
    /// Turns that clients have sent, by session.
    begun: BTreeMap<String, u64>,
}

impl Checker for Order {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        let mut breach = |what| out.breach(Invariant::I6, at, what);
        match seen {
            Observed::Snapshot { session, epoch, turns } => {
                let begun = self.begun.get(session).copied().unwrap_or_default();
                if *turns > begun {
                    breach(format!(
                        "{session}: {turns} turns are said to be committed, of {begun} sent"
                    ));
                }
                let last = self.sessions.insert(session.clone(), (*epoch, *turns));
                if let Some(last) = last.filter(|last| (*epoch, *turns) <= *last) {
                    breach(format!(
                        "{session}: turn {turns} of epoch {epoch} is written over turn {} of epoch {}",
                        last.1, last.0
                    ));
                }
            }
            Observed::StoreLost => self.sessions.clear(),
            Observed::Leased { shard, owner, epoch } if !owner.is_empty() => {
                let last = self.shards.get(shard);
                let renews = last.is_none_or(|(e, o)| epoch > e || epoch == e && owner == o);
                if !renews && let Some((e, o)) = last {
                    breach(format!(
                        "shard {shard}: {owner} took it in epoch {epoch} after {o} in {e}"
                    ));
                }
                self.shards.insert(*shard, (*epoch, owner.clone()));
            }
            Observed::Heard {
                arrived: false,
                from,
                body: Body::Said(said),
                ..
            } if said.what == "completed" => {
                let Some(request) = &said.request else { return };
                let shard = SessionId::new(&*said.session).map_or(0, |session| shard_of(&session));
                let epoch = self.shards.get(&shard).map(|(epoch, _)| *epoch).unwrap_or_default();
                if !self.completed.insert((from.clone(), epoch, request.clone())) {
                    breach(format!("{from} completed {request} twice"));
                }
            }
            Observed::Begun { session, .. } => *self.begun.entry(session.clone()).or_default() += 1,
            _ => {}
        }
    }
}
