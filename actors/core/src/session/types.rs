//! What goes into and comes out of the session machine: facts, actions, and what is kept of a session.

use pinion_schemas::{
    AbortReason, Class, Epoch, FallbackReason, Micros, MigrationReason, PageHash, Path, PermitId, RejectReason,
    RequestId, TurnIndex, WorkerId,
};
use serde::Serialize;

/// A turn as it was accepted.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Turn {
    /// The client's request; a repeat of a known one changes nothing.
    pub request: RequestId,
    /// Service class.
    pub class: Class,
    /// When it fails if it has not ended.
    pub deadline: Micros,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Number and name of the prompt's last full page, if it has one.
    pub prompt_end: Option<(u32, PageHash)>,
    /// Most tokens of the whole answer.
    pub answer_max: u32,
    /// Tokens of the answer the client has from an earlier owner.
    pub already_sent: u32,
}

/// What a completed turn leaves on its D.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Commit {
    /// Tokens of the context with the answer.
    pub tokens: u32,
    /// Name of the last full page.
    pub tip: Option<PageHash>,
    /// How the D served it.
    pub path: Path,
    /// The whole answer; it fills what was lost of the stream on the bus.
    pub answer: Vec<u32>,
}

/// A worker the router offers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Offer {
    /// The D.
    pub worker: WorkerId,
    /// It asked for a pause until then (`route::Ranked::not_before`).
    pub not_before: Micros,
}

/// What the router answers to [`Action::Route`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ranking {
    /// Candidates, best first; none means that no D is known to be alive.
    pub offers: Vec<Offer>,
    /// Why the pinned D is not among them, if it is lost or leaves; one that failed this turn only is neither.
    pub pin_gone: Option<MigrationReason>,
    /// |D|: decode workers of the cluster.
    pub workers: usize,
    /// `τ_reject`; 0 is off.
    pub rejects_max: u32,
}

/// One thing that happened to the turn that is running, in its attempt number `attempt`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TurnFact {
    /// The router ranked the candidates.
    Ranked(Ranking),
    /// The D runs the turn.
    Started,
    /// The D promised room; a seed may start.
    Permit(PermitId),
    /// The D put the turn into its permit queue.
    Queued,
    /// The D said no.
    Rejected(RejectReason),
    /// A leg (decode, prefill or the transfer between them) failed.
    LegFailed(AbortReason),
    /// Tokens of the answer, the first at `offset`.
    Progress {
        /// Position of the first token in the answer.
        offset: u32,
        /// The tokens.
        tokens: Vec<u32>,
    },
    /// The D completed and committed the turn.
    Completed(Commit),
}

/// What the shell tells the machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Fact {
    /// The gateway handed over a turn.
    Arrived(Turn),
    /// Something happened to an attempt of a turn.
    Turn {
        /// The turn.
        request: RequestId,
        /// The attempt.
        attempt: u64,
        /// What happened.
        fact: TurnFact,
    },
    /// The client went away.
    Cancelled(RequestId),
    /// A D died or is unreachable.
    WorkerLost(WorkerId),
    /// Another owner has taken the session over, in this epoch.
    Superseded(Epoch),
    /// Time passed.
    Tick,
}

/// How a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Outcome {
    /// The answer is complete.
    Completed(Path),
    /// The client went away.
    Cancelled,
    /// With a reason the client is told.
    Failed(AbortReason),
    /// Not accepted: too many turns are waiting.
    Refused,
}

/// What the machine tells the shell to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Ask the router for candidates, without those in `avoid`.
    Route {
        /// The turn.
        request: RequestId,
        /// Its attempt.
        attempt: u64,
        /// Workers that are lost to this turn.
        avoid: Vec<WorkerId>,
        /// How often which D has rejected the session ([`Rejects`](crate::dispatch::Rejects)).
        rejects: Vec<(WorkerId, u32)>,
    },
    /// Send `Run` to the D. `already_sent` tokens of the answer are part of its context and must not come again.
    AskRun {
        /// The D.
        worker: WorkerId,
        /// The turn.
        request: RequestId,
        /// Its attempt.
        attempt: u64,
        /// Whether the session stays there; `Some` reason makes it a fallback.
        fallback: Option<FallbackReason>,
        /// Tokens of the answer the client has.
        already_sent: u32,
    },
    /// Choose a P and have it send what is missing on the D.
    Seed {
        /// The D.
        worker: WorkerId,
        /// The turn.
        request: RequestId,
        /// Its attempt.
        attempt: u64,
        /// The D's promise.
        permit: PermitId,
    },
    /// Stop every leg of this attempt that touches the D.
    Abort {
        /// The D.
        worker: WorkerId,
        /// The turn.
        request: RequestId,
        /// The attempt.
        attempt: u64,
        /// Why.
        reason: AbortReason,
    },
    /// Give the client these tokens, the first at `offset`.
    Relay {
        /// The turn.
        request: RequestId,
        /// Position of the first token in the answer.
        offset: u32,
        /// The tokens.
        tokens: Vec<u32>,
    },
    /// Tell the D that the session is its own; tell the old one that it is not.
    Bind {
        /// The new D.
        to: WorkerId,
        /// The old one.
        from: Option<WorkerId>,
        /// Why it moved, if it did.
        reason: Option<MigrationReason>,
    },
    /// Write the snapshot; the commit is durable as a cache of truth only (design §7).
    Persist,
    /// The turn has ended. Once for each accepted turn (I1).
    Finish {
        /// The turn.
        request: RequestId,
        /// How.
        outcome: Outcome,
    },
    /// The client asks about a turn that ended earlier, because it has not heard so: tell it again.
    FinishAgain {
        /// The turn.
        request: RequestId,
        /// How it ended.
        outcome: Outcome,
    },
}

/// A move of the pin, for `explain`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Migration {
    /// When it was committed.
    pub at: Micros,
    /// From where.
    pub from: WorkerId,
    /// To where.
    pub to: WorkerId,
    /// Why.
    pub reason: MigrationReason,
}

/// What is kept of a session outside its owner's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Snapshot {
    /// Epoch of the owner that wrote it.
    pub epoch: Epoch,
    /// Turns committed.
    pub next_turn: TurnIndex,
    /// The D the session belongs to.
    pub pin: Option<String>,
    /// Committed tokens.
    pub committed_tokens: u32,
    /// Moves of the pin charged to the session's budget.
    #[serde(default)]
    pub migrations: u32,
}
