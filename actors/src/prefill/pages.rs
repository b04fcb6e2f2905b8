//! A seed's pages leave: offered, granted, sent, committed. What does not get there is computed by the D: slower, never wrong.
//!
//! Pages of the simulated engine have no bytes: their time passes on the simulated link, and they come with the commit.

use super::{Prefill, Stage};
use crate::effect::{Effect, Effects};
use crate::engine::Engine;
use crate::grants::{self, ANSWER_PATIENCE};
use pinion_bus::{BusError, Message};
use pinion_schemas::messages::{Pages, PagesAck, PagesGrant, PagesOffer, Reject, SeedDone};
use pinion_schemas::subject::Kind;
use pinion_schemas::{AbortReason, ChainHasher, Micros, PageHash, RejectReason, RequestId, wire};
use pinion_transfer::MoveError;
use std::time::Duration;

/// How long a transfer may take: a start, and its bytes at the pace of the slowest link that is of use.
const SEND_START: Micros = Micros::from_secs(2);
const SEND_BYTES_PER_S: u64 = 50_000_000;
/// The longest one: what is not there then is computed faster.
const SEND_PATIENCE: Micros = Micros::from_secs(45);

impl<E: Engine> Prefill<E> {
    /// The KV is there: the pages that the D misses leave.
    pub(super) fn computed(&mut self, now: Micros, request: RequestId, out: &mut Effects) {
        let Some(work) = self.work.get_mut(&request) else {
            return;
        };
        let Stage::Computing { cached } = work.stage else {
            return;
        };
        let namespace = [work.seed.tenant.as_deref()];
        let chain: Vec<PageHash> = ChainHasher::new(self.engine.page_tokens(), &namespace).push(&work.seed.tokens);
        let skip = (work.seed.skip_pages as usize).min(chain.len());
        let computed = (work.seed.tokens.len() as u32).saturating_sub(cached as u32);
        let mut pages = Pages {
            request,
            permit: work.seed.permit,
            epoch: work.seed.decode_epoch,
            parent: skip.checked_sub(1).map(|i| chain[i]),
            names: Vec::new(),
            contents: Vec::new(),
            grant: None,
        };
        let (names, bytes): (Vec<_>, Vec<_>) = self.engine.export_pages(&chain).into_iter().skip(skip).unzip();
        if !bytes.is_empty() {
            pages.names = names;
            work.stage = Stage::Offering { pages, bytes, computed };
            return self.offer(now, request, out);
        }
        (pages.names, pages.contents) = self.engine.export(&chain).into_iter().skip(skip).unzip();
        let bytes = self.engine.page_bytes().saturating_mul(pages.names.len() as u64);
        self.link.begin(now, request, bytes);
        work.stage = Stage::Moving { pages, computed };
    }

    fn offer(&mut self, now: Micros, request: RequestId, out: &mut Effects) {
        let Some(work) = self.work.get(&request) else { return };
        let Stage::Offering { pages, .. } = &work.stage else {
            return;
        };
        let offer = PagesOffer {
            request,
            permit: pages.permit,
            epoch: pages.epoch,
            pages: pages.names.len() as u32,
        };
        let subject = self.subjects.worker(Kind::Decode, &work.seed.decode, "pages");
        let token = self.asks(request);
        if !out.request(token, subject, &offer, ANSWER_PATIENCE) {
            self.fail(now, request, AbortReason::TransferFailed, out);
        }
    }

    /// A number for what the seed waits for from now on.
    fn asks(&mut self, request: RequestId) -> u64 {
        self.next_token += 1;
        self.asked.insert(self.next_token, request);
        if let Some(work) = self.work.get_mut(&request) {
            work.awaits = self.next_token;
        }
        self.next_token
    }

    /// The seed that waits for `token`, if it still does.
    fn asker(&mut self, token: u64) -> Option<RequestId> {
        let request = self.asked.remove(&token)?;
        self.work.get(&request).filter(|w| w.awaits == token).map(|_| request)
    }

    pub(super) fn on_reply(&mut self, now: Micros, token: u64, result: Result<Message, BusError>, out: &mut Effects) {
        let Some(request) = self.asker(token) else { return };
        let offering = matches!(self.work.get(&request).map(|w| &w.stage), Some(Stage::Offering { .. }));
        match result {
            Ok(answer) if offering => self.on_offered(now, request, &answer, out),
            Ok(answer) => self.on_ack(now, request, &answer, out),
            Err(_) => self.fail(now, request, AbortReason::TransferFailed, out),
        }
    }

    fn on_offered(&mut self, now: Micros, request: RequestId, answer: &Message, out: &mut Effects) {
        if let Ok(granted) = wire::decode::<PagesGrant>(&answer.payload) {
            return self.send(request, granted, out);
        }
        match wire::decode::<Reject>(&answer.payload) {
            Ok(no) if no.reason == RejectReason::NoSpace => self.send_none(now, request, out),
            _ => self.fail(now, request, AbortReason::TransferFailed, out),
        }
    }

    fn send(&mut self, request: RequestId, granted: PagesGrant, out: &mut Effects) {
        let token = self.asks(request);
        let Some(work) = self.work.get_mut(&request) else {
            return;
        };
        let Stage::Offering { pages, bytes, computed } = &mut work.stage else {
            return;
        };
        let (mut pages, bytes, computed) = (pages.clone(), std::mem::take(bytes), *computed);
        let total = self.engine.page_bytes().saturating_mul(bytes.len() as u64);
        let patience = SEND_START.plus(Micros::for_amount(total.into(), SEND_BYTES_PER_S));
        let (to, grant) = grants::granted(granted.slots);
        pages.grant = Some(grant.id);
        out.0.push(Effect::Send {
            token,
            to,
            grant,
            pages: (0..grant.pages).zip(bytes).collect(),
            patience: Duration::from_micros(patience.min(SEND_PATIENCE).0),
        });
        work.stage = Stage::Sending { pages, computed };
    }

    /// The D has no slots for them: it has promised the turn its room, and computes.
    fn send_none(&mut self, now: Micros, request: RequestId, out: &mut Effects) {
        let Some(work) = self.work.get_mut(&request) else {
            return;
        };
        let Stage::Offering { pages, computed, .. } = &mut work.stage else {
            return;
        };
        let (mut pages, computed) = (pages.clone(), *computed);
        pages.names.clear();
        work.stage = Stage::Sending { pages, computed };
        self.commit(now, request, out);
    }

    pub(super) fn on_sent(&mut self, now: Micros, token: u64, result: Result<(), MoveError>, out: &mut Effects) {
        let Some(request) = self.asker(token) else { return };
        if let Err(error) = result {
            tracing::warn!(request = %request, %error, "not all pages of a seed arrived: the decode worker computes the rest");
        }
        self.commit(now, request, out);
    }

    /// The bytes are there, as far as they will be: the D is told which pages they are.
    pub(super) fn commit(&mut self, now: Micros, request: RequestId, out: &mut Effects) {
        let token = self.asks(request);
        let Some(work) = self.work.get_mut(&request) else {
            return;
        };
        let (Stage::Moving { pages, computed } | Stage::Sending { pages, computed }) = &work.stage else {
            return;
        };
        let subject = self.subjects.worker(Kind::Decode, &work.seed.decode, "pages");
        let sent = out.request(token, subject, pages, ANSWER_PATIENCE);
        let computed = *computed;
        work.stage = Stage::Acking { computed };
        if !sent {
            self.fail(now, request, AbortReason::TransferFailed, out);
        }
    }

    fn on_ack(&mut self, now: Micros, request: RequestId, answer: &Message, out: &mut Effects) {
        let Ok(ack) = wire::decode::<PagesAck>(&answer.payload) else {
            return self.fail(now, request, AbortReason::TransferFailed, out);
        };
        let Some(work) = self.work.remove(&request) else { return };
        let Stage::Acking { computed } = work.stage else {
            return;
        };
        let done = SeedDone {
            request,
            attempt: work.seed.attempt,
            permit: work.seed.permit,
            moved_pages: ack.stored,
            computed_tokens: computed,
        };
        out.publish(work.seed.notify, &done);
    }
}
