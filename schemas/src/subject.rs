//! The subject grammar (design §7): `pinion.<cluster>.<kind>.<id>.<verb>`, and events under
//! `pinion.<cluster>.event.<topic>.<id>`.

use crate::ids::{ClusterId, RequestId, SessionId, WorkerId};
use std::fmt;

/// What answers on a subject.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A session actor; the id is [`SessionId::token`].
    Session,
    /// The router actor of a control node.
    Router,
    /// A decode actor.
    Decode,
    /// A prefill actor.
    Prefill,
    /// A node's GPU agent.
    Node,
    /// A gateway.
    Gateway,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::Session,
        Self::Router,
        Self::Decode,
        Self::Prefill,
        Self::Node,
        Self::Gateway,
    ];

    /// The token in the subject.
    pub const fn token(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Router => "router",
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Node => "node",
            Self::Gateway => "gateway",
        }
    }
}

/// A concrete subject or a pattern, already in NATS syntax.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject(String);

impl Subject {
    /// The text for NATS.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<Subject> for String {
    fn from(subject: Subject) -> Self {
        subject.0
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Builds the subjects of one cluster.
#[derive(Clone, Debug)]
pub struct Subjects {
    prefix: String,
}

impl Subjects {
    /// The subjects of `cluster`.
    pub fn new(cluster: &ClusterId) -> Self {
        Self {
            prefix: format!("pinion.{cluster}"),
        }
    }
    /// `pinion.<cluster>.<kind>.<worker>.<verb>`, a request to one worker, node, router or gateway.
    pub fn worker(&self, kind: Kind, worker: &WorkerId, verb: &'static str) -> Subject {
        Subject(format!("{}.{}.{worker}.{verb}", self.prefix, kind.token()))
    }
    /// `pinion.<cluster>.session.<token>.<verb>`, a request to the owner of a session.
    pub fn session(&self, session: &SessionId, verb: &'static str) -> Subject {
        Subject(format!("{}.session.{}.{verb}", self.prefix, session.token()))
    }
    /// `pinion.<cluster>.turn.<request>.stream`: the answer of one turn, heard by its gateway.
    pub fn stream(&self, request: RequestId) -> Subject {
        Subject(format!("{}.turn.{request}.stream", self.prefix))
    }
    /// `pinion.<cluster>.<kind>.*.<verb>`, the same verb of all of a kind.
    pub fn all(&self, kind: Kind, verb: &'static str) -> Subject {
        Subject(format!("{}.{}.*.{verb}", self.prefix, kind.token()))
    }
    /// `pinion.<cluster>.event.<kind>.<id>`, the transitions of one thing, for observers.
    pub fn event(&self, topic: Kind, id: &str) -> Subject {
        Subject(format!("{}.event.{}.{id}", self.prefix, topic.token()))
    }
    /// `pinion.<cluster>.event.<kind>.*`, the events of all of a kind.
    pub fn all_events_of(&self, topic: Kind) -> Subject {
        Subject(format!("{}.event.{}.*", self.prefix, topic.token()))
    }
    /// `pinion.<cluster>.event.>`, everything observers can see.
    pub fn all_events(&self) -> Subject {
        Subject(format!("{}.event.>", self.prefix))
    }
}

/// A subject taken apart again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parsed<'a> {
    /// Cluster token.
    pub cluster: &'a str,
    /// What answers.
    pub kind: Kind,
    /// Id token.
    pub id: &'a str,
    /// Verb, or `None` for an event.
    pub verb: Option<&'a str>,
}

/// Takes a subject of this grammar apart; `None` for anything else.
pub fn parse(subject: &str) -> Option<Parsed<'_>> {
    let tokens: Vec<&str> = subject.split('.').collect();
    let [root, cluster, third, fourth, fifth] = tokens.as_slice() else {
        return None;
    };
    if *root != "pinion" || tokens.iter().any(|t| t.is_empty()) {
        return None;
    }
    let kind_of = |token: &str| Kind::ALL.into_iter().find(|k| k.token() == token);
    if *third == "event" {
        return Some(Parsed {
            cluster,
            kind: kind_of(fourth)?,
            id: fifth,
            verb: None,
        });
    }
    Some(Parsed {
        cluster,
        kind: kind_of(third)?,
        id: fourth,
        verb: Some(fifth),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_can_be_taken_apart() {
        let subjects = Subjects::new(&ClusterId::new("demo").unwrap());
        let d0 = WorkerId::new("d0").unwrap();
        for kind in Kind::ALL {
            let s = subjects.worker(kind, &d0, "inspect");
            let expected = Parsed {
                cluster: "demo",
                kind,
                id: "d0",
                verb: Some("inspect"),
            };
            assert_eq!(parse(s.as_str()), Some(expected));
        }
        let odd = SessionId::new("a.b *").unwrap();
        let s = subjects.session(&odd, "inspect");
        assert_eq!(parse(s.as_str()).unwrap().id, odd.token());
        assert_eq!(parse(subjects.event(Kind::Decode, "d0").as_str()).unwrap().verb, None);
    }

    #[test]
    fn foreign_subjects_are_not_ours() {
        for s in [
            "",
            "pinion",
            "pinion.a.b.c.d.e",
            "pinion.a.nokind.c.d",
            "other.a.session.c.d",
            "pinion..session.c.d",
        ] {
            assert_eq!(parse(s), None, "{s:?}");
        }
    }
}
