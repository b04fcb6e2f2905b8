//! Named limits and the reason for each. A queue, map or stream without a cap is a bug (design §3 rule 5).

/// Tokens in one page of KV unless configured otherwise (design §1). `SGLang`'s `--page-size` is set to match.
pub const PAGE_TOKENS: u32 = 64;
/// Bytes of a session id: the field's common bound (field §1.3), enough for a UUID with a prefix.
pub const SESSION_ID_BYTES_MAX: usize = 256;
/// Bytes of a worker, node or cluster name: it is one token of a NATS subject.
pub const NAME_BYTES_MAX: usize = 64;
/// Bytes of one bus message: a context of a million tokens has 4 MiB, twice that for what may come. NATS takes 1 MiB by default,
/// so the cluster's servers need `max_payload: 8MB` (`deploy/nats.conf`); against a smaller one, long prompts are refused
/// with a typed error. KV bytes never travel on the bus.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;
/// Pages in one prefix chain: 16,384 pages of 64 tokens are a context of 1 Mi tokens.
pub const CHAIN_PAGES_MAX: usize = 16_384;
/// Seeds a decode worker has promised and not yet received (design §5).
pub const PENDING_SEEDS_MAX: u32 = 4;
/// Rejects of a (session, D) pair after which Route ranks that D behind all others (`τ_reject`, digest §1.7).
pub const REJECTS_MAX: u32 = 3;
/// Longest append that runs directly on D, in tokens (`τ_append`, digest §1.7).
pub const DIRECT_APPEND_TOKENS_MAX: u32 = 8_192;
/// Upper bound of the staleness bound β, in tokens (digest §1.10).
pub const STALENESS_TOKENS_MAX: u32 = 4_096;
/// Longest pause a decode worker may ask for, in milliseconds (digest §1.7).
pub const PAUSE_MILLIS_MAX: u32 = 2_000;
/// No leg of a turn outlives the turn by more than this (design §4).
pub const LEG_OUTLIVES_TURN_MILLIS: u64 = 2_000;
