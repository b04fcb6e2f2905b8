//! D→P sync, this side (design §5): after each committed turn the pages that the session's backup lacks go to its prefill workers,
//! so that a reseed finds them there. What is owed to whom is [`pinion_core::staleness`]; here it is offered, sent and
//! committed, a few at a time, behind everything that a client waits for.

use super::Decode;
use crate::effect::{Effect, Effects};
use crate::engine::Engine;
use crate::grants::{self, ANSWER_PATIENCE};
use pinion_bus::{BusError, Message};
use pinion_core::staleness::{Action, Book, Fact, Flight, Range, SyncId};
use pinion_schemas::messages::{Slots, SyncAck, SyncCommit, SyncDecline, SyncGrant, SyncOffer};
use pinion_schemas::subject::Kind;
use pinion_schemas::{Epoch, Micros, PageHash, RejectReason, SessionId, WorkerId, wire};
use pinion_transfer::sim::{Link, LinkModel};
use pinion_transfer::{Grant, MoveError};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Syncs on their way at once: low priority means that a seed never waits behind more than these.
const ACTIVE_MAX: usize = 2;
/// Backups remembered; one that is forgotten is offered from its start, and P says what it has.
const BOOKS_MAX: usize = 4_096;
/// How long the bytes may take: a backup that is later than the next turn is of little use.
const SEND_PATIENCE: Duration = Duration::from_secs(20);
/// Longer than all three steps of a sync together: each of them ends by itself.
const SYNC_TIMEOUT: Micros = Micros::from_secs(60);

/// A session on a prefill worker.
type Key = (SessionId, WorkerId);

struct Backup {
    book: Book,
    /// Names of the committed pages.
    chain: Vec<PageHash>,
    /// What goes or went to P in the sync in flight.
    commit: Option<SyncCommit>,
}

enum Asked {
    Offer,
    Bytes,
    Commit,
}

/// The backups of this worker's sessions.
pub(super) struct Syncs {
    books: BTreeMap<Key, Backup>,
    asked: BTreeMap<u64, (Key, SyncId, Asked)>,
    active: BTreeSet<Key>,
    waiting: VecDeque<(Key, SyncId, Range)>,
    /// Pages of the simulated engine pass it.
    pub(super) link: Link<u64>,
    next_token: u64,
}

#[derive(Serialize)]
pub(super) struct BackupView<'a> {
    session: &'a SessionId,
    prefill: &'a WorkerId,
    backup_tokens: u64,
    staleness: u64,
}

/// Event: how far a session's backup reaches now.
#[derive(Serialize)]
struct BackupAdvanced<'a> {
    event: &'static str,
    worker: &'a WorkerId,
    #[serde(flatten)]
    backup: BackupView<'a>,
}

impl Syncs {
    pub(super) fn new(link: LinkModel) -> Self {
        Self {
            books: BTreeMap::new(),
            asked: BTreeMap::new(),
            active: BTreeSet::new(),
            waiting: VecDeque::new(),
            link: Link::new(link),
            next_token: 0,
        }
    }

    pub(super) fn view(&self) -> Vec<BackupView<'_>> {
        self.books.iter().map(|(key, backup)| backup.view(key)).collect()
    }

    fn token(&mut self, key: &Key, sync: SyncId, asked: Asked) -> u64 {
        self.next_token += 1;
        self.asked.insert(self.next_token, (key.clone(), sync, asked));
        self.next_token
    }

    /// Names in a range of the session, and the one in front.
    fn names(&self, key: &Key, range: Range, page: u64) -> (Option<PageHash>, Vec<PageHash>) {
        let chain = self.books.get(key).map_or(&[][..], |b| &b.chain);
        let (from, to) = ((range.from / page) as usize, (range.to / page) as usize);
        let parent = from.checked_sub(1).and_then(|i| chain.get(i)).copied();
        (
            parent,
            chain.get(from..to.min(chain.len())).unwrap_or_default().to_vec(),
        )
    }
}

impl Backup {
    fn view<'a>(&self, key: &'a Key) -> BackupView<'a> {
        BackupView {
            session: &key.0,
            prefill: &key.1,
            backup_tokens: self.book.backup(),
            staleness: self.book.staleness(),
        }
    }
}

impl<E: Engine> Decode<E> {
    /// A turn has committed `chain`: its backups on `targets` are to follow.
    pub(super) fn back_up(
        &mut self,
        now: Micros,
        session: &SessionId,
        targets: &[WorkerId],
        chain: &[PageHash],
        out: &mut Effects,
    ) {
        let page = self.page();
        for target in targets {
            let key = (session.clone(), target.clone());
            if self.syncs.books.len() >= BOOKS_MAX && !self.syncs.books.contains_key(&key) {
                let idle = self.syncs.books.iter().find(|(_, b)| b.book.flight().is_none());
                let Some(idle) = idle.map(|(key, _)| key.clone()) else {
                    return;
                };
                self.syncs.books.remove(&idle);
            }
            let backup = self.syncs.books.entry(key.clone()).or_insert_with(|| Backup {
                book: Book::new(page as u32, SYNC_TIMEOUT, Epoch(0)),
                chain: Vec::new(),
                commit: None,
            });
            let same = backup.chain.iter().zip(chain).take_while(|(a, b)| a == b).count() as u64;
            backup.chain = chain.to_vec();
            let len = chain.len() as u64 * page;
            self.sync_step(now, &key, Fact::Rewound { len: same * page }, out);
            self.sync_step(now, &key, Fact::Committed { len }, out);
        }
    }

    fn page(&self) -> u64 {
        u64::from(self.engine.page_tokens().max(1))
    }

    /// Feeds the book and does what it says. Returns what is to be sent, which only who has P's answer can do.
    fn sync_step(&mut self, now: Micros, key: &Key, fact: Fact, out: &mut Effects) -> Option<Range> {
        let mut send = None;
        let actions = self.syncs.books.get_mut(key).map(|b| b.book.step(now, fact));
        for action in actions.unwrap_or_default() {
            match action {
                Action::Offer { sync, range, .. } => {
                    // It waits like any other, also if it follows the sync that has just ended.
                    self.syncs.active.remove(key);
                    self.syncs.waiting.push_back((key.clone(), sync, range));
                }
                Action::Send { range, .. } => send = Some(range),
                Action::Abort { .. } => {
                    self.syncs.waiting.retain(|(waiting, ..)| waiting != key);
                }
                Action::BackupMoved { .. } => self.tell_backup(key, "backup-advanced", out),
                Action::MarkStale { .. } => self.tell_backup(key, "backup-stale", out),
                Action::MarkFresh => {}
            }
        }
        let in_flight = self.syncs.books.get(key).is_some_and(|b| b.book.flight().is_some());
        if !in_flight {
            self.syncs.active.remove(key);
        }
        self.offer_waiting(now, out);
        send
    }

    fn tell_backup(&self, key: &Key, event: &'static str, out: &mut Effects) {
        if let Some(backup) = self.syncs.books.get(key) {
            let told = BackupAdvanced {
                event,
                worker: &self.config.worker,
                backup: backup.view(key),
            };
            out.event(&self.subjects.event(Kind::Session, &key.0.token()), &told);
        }
    }

    fn offer_waiting(&mut self, now: Micros, out: &mut Effects) {
        while self.syncs.active.len() < ACTIVE_MAX
            && let Some((key, sync, range)) = self.syncs.waiting.pop_front()
        {
            let (parent, pages) = self.syncs.names(&key, range, self.page());
            let offer = SyncOffer {
                session: key.0.clone(),
                sync: sync.0,
                epoch: self.config.epoch,
                parent,
                pages,
            };
            let token = self.syncs.token(&key, sync, Asked::Offer);
            let subject = self.subjects.worker(Kind::Prefill, &key.1, "sync");
            if out.request(token, subject, &offer, ANSWER_PATIENCE) {
                self.syncs.active.insert(key);
            } else {
                self.syncs.asked.remove(&token);
                self.sync_step(now, &key, Fact::Declined { sync }, out);
            }
        }
    }

    /// Gives up syncs that somebody has forgotten; each step has a deadline of its own, so there should be none.
    pub(super) fn sync_tick(&mut self, now: Micros, out: &mut Effects) {
        let late = |f: Flight| f.deadline <= now;
        let books = self.syncs.books.iter();
        let overdue = books.filter(|(_, b)| b.book.flight().is_some_and(late));
        let overdue: Vec<Key> = overdue.map(|(key, _)| key.clone()).collect();
        for key in overdue {
            self.sync_step(now, &key, Fact::Tick, out);
        }
    }

    pub(super) fn on_sync_reply(
        &mut self,
        now: Micros,
        token: u64,
        result: Result<Message, BusError>,
        out: &mut Effects,
    ) {
        let Some((key, sync, asked)) = self.syncs.asked.remove(&token) else {
            return;
        };
        let payload = result.map(|m| m.payload).unwrap_or_default();
        match asked {
            Asked::Offer => self.on_sync_offered(now, &key, sync, &payload, out),
            Asked::Commit => {
                let ack = wire::decode::<SyncAck>(&payload).ok();
                let fact = ack.and_then(|ack| self.acked(&key, sync, ack.held_pages));
                self.sync_step(now, &key, fact.unwrap_or(Fact::SyncFailed { sync }), out);
            }
            Asked::Bytes => {}
        }
    }

    fn acked(&mut self, key: &Key, sync: SyncId, held: u32) -> Option<Fact> {
        let page = self.page();
        let backup = self.syncs.books.get_mut(key)?;
        let flight = backup.book.flight().filter(|f| f.sync == sync)?;
        let names = backup.commit.take()?.names.len() as u64;
        // What is missing is missing at the end.
        let missing = names.saturating_sub(u64::from(held)) * page;
        Some(Fact::Acked {
            sync,
            len: flight.range.to.saturating_sub(missing),
        })
    }

    fn on_sync_offered(&mut self, now: Micros, key: &Key, sync: SyncId, payload: &[u8], out: &mut Effects) {
        if let Ok(grant) = wire::decode::<SyncGrant>(payload) {
            if let Some(range) = self.sync_step(now, key, Fact::Granted { sync }, out) {
                self.sync_send(now, key, sync, range, grant, out);
            }
            return;
        }
        let no = wire::decode::<SyncDecline>(payload).ok();
        let behind = self
            .syncs
            .books
            .get(key)
            .and_then(|b| b.book.flight())
            .is_some_and(|f| f.range.from > 0);
        if behind && no.is_some_and(|no| no.reason == RejectReason::NotResident) {
            // P has lost what stood in front: it is offered all from the start, which has nothing in front.
            let epoch = Epoch(sync.0 + 1);
            self.sync_step(now, key, Fact::PeerEpochChanged { epoch }, out);
        } else {
            self.sync_step(now, key, Fact::Declined { sync }, out);
        }
    }

    /// P takes them, less what it has.
    fn sync_send(&mut self, now: Micros, key: &Key, sync: SyncId, range: Range, grant: SyncGrant, out: &mut Effects) {
        let page = self.page();
        let (_, names) = self.syncs.names(key, range, page);
        let skip = (grant.skip_pages as usize).min(names.len());
        if skip == names.len() {
            self.sync_step(now, key, Fact::Acked { sync, len: range.to }, out);
            return;
        }
        let from = (range.from / page) as usize + skip;
        let Some(backup) = self.syncs.books.get(key) else {
            return;
        };
        let chain = &backup.chain[..(from + names.len() - skip).min(backup.chain.len())];
        let mut commit = SyncCommit {
            session: key.0.clone(),
            sync: sync.0,
            epoch: self.config.epoch,
            parent: from.checked_sub(1).and_then(|i| chain.get(i)).copied(),
            names: names[skip..].to_vec(),
            contents: Vec::new(),
            grant: grant.slots.as_ref().map(|s| s.grant),
        };
        let over_plane = grant.slots.map(|slots| self.bytes(chain, from, slots));
        if over_plane.is_none() {
            let pages = self.engine.export(chain);
            commit.contents = grants::sealed(pages.get(from..).unwrap_or_default());
            self.syncs.link.model().carry(&mut commit.contents);
        }
        let token = self.syncs.token(key, sync, Asked::Bytes);
        let bytes = self.engine.page_bytes().saturating_mul(commit.names.len() as u64);
        if let Some(backup) = self.syncs.books.get_mut(key) {
            backup.commit = Some(commit);
        }
        match over_plane {
            Some((to, grant, pages)) => out.0.push(Effect::Send {
                token,
                to,
                grant,
                pages,
                patience: SEND_PATIENCE,
            }),
            None => self.syncs.link.begin(now, token, bytes),
        }
    }

    /// The pages from `from` on that are still here, each for its place in the grant.
    fn bytes(
        &self,
        chain: &[PageHash],
        from: usize,
        slots: Slots,
    ) -> (Vec<String>, Grant, Vec<(u32, pinion_transfer::PageRef)>) {
        let pages = self.engine.export_pages(chain).into_iter().skip(from).map(|p| p.1);
        let (to, grant) = grants::granted(slots);
        (to, grant, (0..grant.pages).zip(pages).collect())
    }

    /// The bytes are there, as far as they will be.
    pub(super) fn on_sync_sent(&mut self, now: Micros, token: u64, result: Result<(), MoveError>, out: &mut Effects) {
        let Some((key, sync, _)) = self.syncs.asked.remove(&token) else {
            return;
        };
        if let Err(error) = result {
            tracing::debug!(session = %key.0, prefill = %key.1, %error, "not all pages of a backup arrived");
        }
        let flight = |b: &&Backup| b.book.flight().is_some_and(|f| f.sync == sync);
        let Some(commit) = self.syncs.books.get(&key).filter(flight).and_then(|b| b.commit.clone()) else {
            self.sync_step(now, &key, Fact::SyncFailed { sync }, out);
            return;
        };
        let token = self.syncs.token(&key, sync, Asked::Commit);
        let subject = self.subjects.worker(Kind::Prefill, &key.1, "sync");
        if !out.request(token, subject, &commit, ANSWER_PATIENCE) {
            self.syncs.asked.remove(&token);
            self.sync_step(now, &key, Fact::SyncFailed { sync }, out);
        }
    }
}
