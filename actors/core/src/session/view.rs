//! What others see of a session, and how it is begun and carried over to its next owner.

use super::running::State;
use super::{Outcome, SILENCE_MAX, Session, Snapshot};
use crate::dispatch::Rejects;
use pinion_schemas::{Epoch, Micros, PageHash, RequestId, TurnIndex, WorkerId};
use serde::Serialize;
use std::collections::VecDeque;

impl Session {
    /// A session without history, owned in `epoch`.
    pub fn new(epoch: Epoch) -> Self {
        Self {
            epoch,
            superseded: false,
            next_turn: TurnIndex(0),
            pin: None,
            committed_tokens: 0,
            tip: None,
            prompt_end: None,
            waiting: VecDeque::new(),
            active: None,
            rejects: Rejects::default(),
            away: 0,
            migrations: VecDeque::new(),
            ended: VecDeque::new(),
        }
    }

    /// A session as an earlier owner left it, now owned in `epoch`. The snapshot may be old: what it says is only where to
    /// look first, and the D that is asked decides by what it holds.
    pub fn restore(epoch: Epoch, snapshot: &Snapshot) -> Self {
        Self {
            next_turn: snapshot.next_turn,
            pin: snapshot.pin.as_deref().and_then(|w| WorkerId::new(w).ok()),
            committed_tokens: snapshot.committed_tokens,
            rejects: Rejects::after(snapshot.migrations),
            ..Self::new(epoch)
        }
    }

    /// What the next owner needs: written after each commit.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            epoch: self.epoch,
            next_turn: self.next_turn,
            pin: self.pin.as_ref().map(|w| w.as_str().to_owned()),
            committed_tokens: self.committed_tokens,
            migrations: self.rejects.migrations(),
        }
    }

    /// The D the session belongs to.
    pub fn pin(&self) -> Option<&WorkerId> {
        self.pin.as_ref()
    }

    /// Turns committed so far.
    pub fn next_turn(&self) -> TurnIndex {
        self.next_turn
    }

    /// Whether it has no turn.
    pub fn is_idle(&self) -> bool {
        self.active.is_none() && self.waiting.is_empty()
    }

    /// Committed tokens.
    pub fn committed_tokens(&self) -> u32 {
        self.committed_tokens
    }

    /// Whether a prompt with these full pages does not go on from the last one, as after a compaction. (How much of that one's
    /// answer it takes over is not asked.)
    pub fn prefix_changed(&self, chain: &[PageHash]) -> bool {
        let changed = |(pages, end): (u32, PageHash)| chain.get((pages as usize).wrapping_sub(1)) != Some(&end);
        self.prompt_end.is_some_and(changed)
    }

    /// What the session remembers of the workers that rejected it, and of its migrations.
    pub fn rejects(&self) -> &Rejects {
        &self.rejects
    }

    /// Number of the attempt that `request` is in, while it is the running turn.
    pub fn attempt(&self, request: RequestId) -> Option<u64> {
        self.active
            .as_ref()
            .filter(|a| a.turn.request == request)
            .map(|a| a.attempt)
    }

    /// How `request` ended, if it did so lately.
    pub fn ended(&self, request: RequestId) -> Option<Outcome> {
        let found = self.ended.iter().find(|(ended, _)| *ended == request);
        found.map(|(_, outcome)| *outcome)
    }

    /// The state for `inspect`, `explain` and tests.
    pub fn view(&self) -> &impl Serialize {
        self
    }

    /// When a [`Fact::Tick`](super::Fact::Tick) is due at the latest.
    pub fn next_deadline(&self) -> Option<Micros> {
        let state = self.active.as_ref().and_then(|a| match a.state {
            State::Backoff { until } | State::Paused { until } => Some(until),
            State::Running { heard, .. } | State::Waiting { heard, .. } | State::Seeding { heard, .. } => {
                Some(heard.plus(SILENCE_MAX))
            }
            _ => None,
        });
        let turns = self.active.iter().map(|a| &a.turn).chain(&self.waiting);
        turns.map(|t| t.deadline).chain(state).min()
    }
}
