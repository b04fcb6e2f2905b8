//! What operators see: answers to `inspect`, and the events of a session.

use super::Sessions;
use crate::effect::Effects;
use pinion_bus::Message;
use pinion_schemas::subject::Kind;
use pinion_schemas::{Micros, RequestId, SessionId, WorkerId};
use serde::Serialize;

#[derive(Serialize)]
struct View<'a, S: Serialize> {
    session: &'a SessionId,
    owner: &'a WorkerId,
    turns: u32,
    state: &'a S,
}

#[derive(Serialize)]
struct Event<'a> {
    session: &'a SessionId,
    at_micros: u64,
    #[serde(flatten)]
    said: Said<'a>,
}

/// Something that happened to a session, as its event tells it.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Said<'a> {
    /// The turn.
    pub request: Option<RequestId>,
    /// In a word.
    pub what: &'static str,
    /// The worker that had to do with it.
    pub worker: Option<&'a WorkerId>,
    /// Label of the path or of the reason.
    pub detail: Option<&'static str>,
    /// Label of the reason why a completed turn was not direct.
    pub why: Option<&'static str>,
    /// What a seed computed, tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub computed_tokens: Option<u32>,
    /// What a seed moved, pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved_pages: Option<u32>,
}

impl Said<'_> {
    /// Only the word.
    pub(super) fn of(what: &'static str) -> Self {
        Self {
            what,
            ..Self::default()
        }
    }
}

impl Sessions {
    pub(super) fn on_inspect(&self, message: &Message, out: &mut Effects) {
        let Some(parsed) = pinion_schemas::subject::parse(&message.subject) else {
            return;
        };
        if parsed.kind == Kind::Router {
            #[derive(Serialize)]
            struct Node<'a> {
                control: &'a WorkerId,
                shards: usize,
                sessions: Vec<&'a SessionId>,
                running_turns: usize,
            }
            // A list for people: the first thousand by name.
            let sessions = self.held.keys().take(1_000).collect();
            let (shards, running_turns) = (self.owned.len(), self.turns.len());
            return out.respond_json(
                message,
                &Node {
                    control: &self.config.control,
                    shards,
                    sessions,
                    running_turns,
                },
            );
        }
        // Only the owner answers: others stay silent, so that the asker gets one answer.
        let found = self
            .held
            .iter()
            .find(|(id, _)| id.as_str() == parsed.id || id.token() == parsed.id);
        if let Some((session, entry)) = found {
            let (owner, turns, state) = (&self.config.control, entry.turns, entry.machine.view());
            out.respond_json(
                message,
                &View {
                    session,
                    owner,
                    turns,
                    state,
                },
            );
        }
    }

    /// Publishes an event of the session.
    pub(super) fn say(&self, now: Micros, session: &SessionId, said: Said<'_>, out: &mut Effects) {
        let subject = self.subjects.event(Kind::Session, &session.token());
        let event = Event {
            session,
            at_micros: now.0,
            said,
        };
        out.event(&subject, &event);
    }
}
