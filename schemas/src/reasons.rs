//! Why something happened: closed enums with one stable label each. Reports, metrics and events take their words from
//! here; nothing ever matches on a substring (design §3 rule 3, digest chain B).

use rkyv::{Archive, Deserialize, Serialize};

macro_rules! labelled {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $label:literal,)+ }) => {
        $(#[$doc])*
        #[derive(
            Archive, Serialize, Deserialize, serde::Serialize, serde::Deserialize,
            Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash,
        )]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $label)] $variant,)+
        }

        impl $name {
            /// Every variant, in order of declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The stable label.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.label())
            }
        }
    };
}

labelled!(
    /// Service class of a turn; permits are shared between classes by weight (design §5).
    Class {
        /// A person waits.
        Interactive = "interactive",
        /// A job waits.
        Batch = "batch",
        /// Nobody waits.
        Background = "background",
    }
);

labelled!(
    /// How a turn was served.
    Path {
        /// On the D that already held the prefix: no prefill worker, no transfer.
        Direct = "direct",
        /// First placement of a session's KV on a D.
        Seed = "seed",
        /// Placement after loss or migration.
        Reseed = "reseed",
        /// Plain prefill to decode for one turn; the session was not kept.
        Fallback = "fallback",
    }
);

labelled!(
    /// Why a turn was not direct: why its D wanted a seed first.
    SeedReason {
        /// The session's first turn.
        NewSession = "new-session",
        /// The session's pages are on another worker, which was not to be had.
        Moved = "moved",
        /// The prompt does not continue the committed context, as after a compaction.
        PrefixChanged = "prefix-changed",
        /// The worker had dropped the session's pages, all or so many that the rest is too long an append.
        Evicted = "evicted",
        /// The prefix is here, and what comes after it is longer than `τ_append`.
        AppendTooLong = "append-too-long",
        /// All of it could have run here directly, but the room was promised to others.
        NoRoom = "no-room",
    }
);

labelled!(
    /// Why a decode worker said no. Only a decode worker ever says so for capacity (digest R3).
    RejectReason {
        /// Not enough free and evictable pages for append and output.
        NoSpace = "no-space",
        /// Asked to run directly, but the prefix is not here.
        NotResident = "not-resident",
        /// The append is longer than `τ_append`; it wants a seed.
        AppendTooLong = "append-too-long",
        /// The permit queue of the class is full.
        QueueFull = "queue-full",
        /// The worker asked for a pause and it has not passed.
        Paused = "paused",
        /// The worker is draining.
        Draining = "draining",
        /// The turn could never fit this worker's pool.
        NeverFits = "never-fits",
        /// The message carried an old epoch.
        StaleEpoch = "stale-epoch",
        /// The turn's deadline had passed on arrival.
        DeadlinePassed = "deadline-passed",
    }
);

labelled!(
    /// Why a turn ran without keeping the session.
    FallbackReason {
        /// Every candidate rejected the turn.
        AllRejected = "all-rejected",
        /// Retries were used up with candidates left.
        RetriesSpent = "retries-spent",
        /// No decode worker is known to be alive.
        NoCandidate = "no-candidate",
    }
);

labelled!(
    /// Which prefill workers back a session up (design §5, digest §1.10).
    BackupTargets {
        /// None: a lost D costs a whole prefill.
        Off = "off",
        /// The one that seeded it last.
        LastPrefill = "last-p",
        /// Sessions are dealt to all in turn.
        RoundRobin = "round-robin",
        /// All, up to four.
        Broadcast = "broadcast",
    }
);

labelled!(
    /// Why a session's pin moved.
    MigrationReason {
        /// The old D rejected the session `τ_reject` times.
        Rejected = "rejected",
        /// The old D died or cannot be reached.
        WorkerLost = "worker-lost",
        /// The old D is draining.
        Drain = "drain",
        /// The old D lost the session's pages.
        Evicted = "evicted",
        /// An operator or policy asked for it.
        Rebalance = "rebalance",
    }
);

labelled!(
    /// Why a turn, or one leg of it, ended early.
    AbortReason {
        /// The client went away.
        ClientGone = "client-gone",
        /// The deadline passed.
        Deadline = "deadline",
        /// The partner leg failed.
        PartnerFailed = "partner-failed",
        /// The decode worker died or stopped answering.
        DecodeLost = "decode-lost",
        /// The prefill worker died or stopped answering.
        PrefillLost = "prefill-lost",
        /// The worker that was to send the session's pages does not have them any more.
        SourceLost = "source-lost",
        /// Pages did not arrive or did not match their digest.
        TransferFailed = "transfer-failed",
        /// A newer owner took over.
        Superseded = "superseded",
        /// The engine refused or failed the request.
        EngineFailed = "engine-failed",
        /// Every retry was used up.
        RetriesSpent = "retries-spent",
        /// The session has too many turns waiting already.
        SessionBusy = "session-busy",
        /// No decode worker's pool could ever hold the turn.
        TooLong = "too-long",
    }
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_unique_and_lower_case_words() {
        fn check(labels: Vec<&str>) {
            let mut seen = std::collections::BTreeSet::new();
            for l in labels {
                assert!(seen.insert(l.to_owned()), "{l} twice");
                assert!(l.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{l}");
            }
        }
        check(RejectReason::ALL.iter().map(|r| r.label()).collect());
        check(FallbackReason::ALL.iter().map(|r| r.label()).collect());
        check(MigrationReason::ALL.iter().map(|r| r.label()).collect());
        check(AbortReason::ALL.iter().map(|r| r.label()).collect());
        check(Path::ALL.iter().map(|r| r.label()).collect());
        assert_eq!(serde_json::to_string(&RejectReason::NoSpace).unwrap(), "\"no-space\"");
    }
}
