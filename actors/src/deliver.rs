//! Pages leave this worker for a decode worker that has promised room for them: offered, granted, sent in parts as they become
//! ready, committed. What does not get there is computed by the D: slower, never wrong.
//!
//! A prefill worker begins as soon as it computes, so that the pages of one chunk travel while the next is computed; a decode worker
//! that gives a session away has all of them at once. Pages of the simulated engine have no bytes: their time passes on the
//! simulated link, and they come with the commit.

use crate::effect::{Body, Effect, Effects};
use crate::engine::Engine;
use crate::grants::{self, ANSWER_PATIENCE};
use pinion_bus::{BusError, Message};
use pinion_schemas::messages::{Pages, PagesAck, PagesGrant, PagesOffer, Reject};
use pinion_schemas::subject::{Kind, Subjects};
use pinion_schemas::{AbortReason, Epoch, Micros, PageHash, PermitId, RejectReason, RequestId, WorkerId, wire};
use pinion_transfer::sim::{Link, LinkModel};
use pinion_transfer::{Grant, MoveError, PageRef};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a part may take: a start, and its bytes at the pace of the slowest link that is of use.
const SEND_START: Micros = Micros::from_secs(2);
const SEND_BYTES_PER_S: u64 = 50_000_000;
/// The longest one: what is not there then is computed faster.
const SEND_PATIENCE: Micros = Micros::from_secs(45);

/// For whom pages are, and which they will be.
#[derive(Clone, Debug)]
pub(crate) struct Delivery {
    /// The turn that waits for them.
    pub(crate) request: RequestId,
    /// The D.
    pub(crate) to: WorkerId,
    /// Its life.
    pub(crate) epoch: Epoch,
    /// Its promise.
    pub(crate) permit: PermitId,
    /// Page in front of the first one.
    pub(crate) parent: Option<PageHash>,
    /// All that may come, in order of the chain.
    pub(crate) names: Vec<PageHash>,
}

/// How a delivery went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivered {
    /// The D has said so: so many pages were new to it.
    Done(RequestId, u32),
    /// It is over.
    Failed(RequestId, AbortReason),
}

#[derive(Debug)]
enum Stage {
    /// The D is asked for slots.
    Offering,
    /// Parts go out. `sending`: one is on its way.
    Open { sending: bool },
    /// Nothing more is sent: the D has no slots, or a part was lost, and what follows it is of no use.
    Closed,
    /// The D is told which pages came.
    Committing,
}

#[derive(Debug)]
struct Open {
    delivery: Delivery,
    stage: Stage,
    slots: Option<(Vec<String>, Grant)>,
    /// Ready pages with bytes that are not sent yet.
    ready: Vec<PageRef>,
    /// Simulated contents of all pages that are ready.
    contents: Vec<u64>,
    /// How many pages are ready, and how many of them have been sent.
    count: usize,
    sent: usize,
    /// Nothing becomes ready any more.
    complete: bool,
    /// Number of the request or transfer whose end it waits for.
    awaits: u64,
}

/// All deliveries of a worker.
#[derive(Debug)]
pub(crate) struct Deliveries {
    subjects: Subjects,
    link: Link<RequestId>,
    open: BTreeMap<RequestId, Open>,
    asked: BTreeMap<u64, RequestId>,
    next_token: u64,
}

impl Deliveries {
    /// `first_token`: from it on, numbers of requests and transfers are its own.
    pub(crate) fn new(subjects: Subjects, link: LinkModel, first_token: u64) -> Self {
        Self {
            subjects,
            link: Link::new(link),
            open: BTreeMap::new(),
            asked: BTreeMap::new(),
            next_token: first_token,
        }
    }

    /// When the simulated link has something to say.
    pub(crate) fn next_done(&self) -> Option<Micros> {
        self.link.next_done()
    }

    /// Begins to send. Pages with bytes need slots first.
    pub(crate) fn begin(&mut self, engine: &impl Engine, delivery: Delivery, out: &mut Effects) -> Option<Delivered> {
        let request = delivery.request;
        let offer = engine.has_bytes() && !delivery.names.is_empty();
        let message = PagesOffer {
            request,
            permit: delivery.permit,
            epoch: delivery.epoch,
            pages: delivery.names.len() as u32,
        };
        let stage = if offer {
            Stage::Offering
        } else {
            Stage::Open { sending: false }
        };
        let open = Open {
            delivery,
            stage,
            slots: None,
            ready: Vec::new(),
            contents: Vec::new(),
            count: 0,
            sent: 0,
            complete: false,
            awaits: 0,
        };
        self.open.insert(request, open);
        if offer { self.ask(request, &message, out) } else { None }
    }

    /// Takes what has become ready since the last call. `complete`: nothing more will.
    pub(crate) fn advance(
        &mut self,
        now: Micros,
        engine: &impl Engine,
        request: RequestId,
        complete: bool,
        out: &mut Effects,
    ) -> Option<Delivered> {
        let open = self.open.get_mut(&request)?;
        open.complete |= complete;
        let awaited = &open.delivery.names[open.count..];
        if matches!(open.stage, Stage::Closed) {
            // Of no use to anybody.
        } else if engine.has_bytes() {
            let pages = engine.export_pages(awaited);
            open.count += pages.len();
            open.ready.extend(pages.into_iter().map(|p| p.1));
        } else {
            let pages = engine.export(awaited);
            open.count += pages.len();
            open.contents.extend(grants::sealed(&pages));
        }
        self.go_on(now, engine.page_bytes(), request, out)
    }

    /// Sends what is ready, or commits if that was all.
    fn go_on(&mut self, now: Micros, page_bytes: u64, request: RequestId, out: &mut Effects) -> Option<Delivered> {
        let open = self.open.get(&request)?;
        match open.stage {
            Stage::Open { sending: false } if open.sent < open.count => {
                self.send_part(now, page_bytes, request, out);
                None
            }
            Stage::Open { sending: false } | Stage::Closed if open.complete => self.commit(request, out),
            _ => None,
        }
    }

    fn send_part(&mut self, now: Micros, page_bytes: u64, request: RequestId, out: &mut Effects) {
        let Some(open) = self.open.get_mut(&request) else {
            return;
        };
        let from = std::mem::replace(&mut open.sent, open.count);
        let bytes = page_bytes.saturating_mul((open.count - from) as u64);
        open.stage = Stage::Open { sending: true };
        let Some((to, grant)) = open.slots.clone() else {
            return self.link.begin(now, request, bytes);
        };
        let ready = std::mem::take(&mut open.ready);
        let token = self.number(request);
        let patience = SEND_START.plus(Micros::for_amount(bytes.into(), SEND_BYTES_PER_S));
        out.0.push(Effect::Send {
            token,
            to,
            grant,
            pages: (from as u32..).zip(ready).collect(),
            patience: Duration::from_micros(patience.min(SEND_PATIENCE).0),
        });
    }

    /// The D is told which pages they are.
    fn commit(&mut self, request: RequestId, out: &mut Effects) -> Option<Delivered> {
        let open = self.open.get_mut(&request)?;
        open.stage = Stage::Committing;
        self.link.model().carry(&mut open.contents);
        let pages = Pages {
            request,
            permit: open.delivery.permit,
            epoch: open.delivery.epoch,
            parent: open.delivery.parent,
            names: open.delivery.names[..open.sent].to_vec(),
            contents: std::mem::take(&mut open.contents),
            grant: open.slots.as_ref().map(|(_, grant)| grant.id),
        };
        self.ask(request, &pages, out)
    }

    /// Asks the D.
    fn ask(&mut self, request: RequestId, message: &impl Body, out: &mut Effects) -> Option<Delivered> {
        let token = self.number(request);
        let to = &self.open.get(&request)?.delivery.to;
        let subject = self.subjects.worker(Kind::Decode, to, "pages");
        if out.request(token, subject, message, ANSWER_PATIENCE) {
            return None;
        }
        self.asked.remove(&token);
        Some(self.fail(request))
    }

    /// A number for what the delivery waits for from now on.
    fn number(&mut self, request: RequestId) -> u64 {
        self.next_token += 1;
        self.asked.insert(self.next_token, request);
        if let Some(open) = self.open.get_mut(&request) {
            open.awaits = self.next_token;
        }
        self.next_token
    }

    /// The delivery that waits for `token`, if it still does.
    fn asker(&mut self, token: u64) -> Option<RequestId> {
        let request = self.asked.remove(&token)?;
        self.open.get(&request).filter(|o| o.awaits == token).map(|_| request)
    }

    /// Whether a number is one of its own.
    pub(crate) fn asked(&self, token: u64) -> bool {
        self.asked.contains_key(&token)
    }

    /// The D has answered, or not in time.
    pub(crate) fn on_reply(
        &mut self,
        now: Micros,
        engine: &impl Engine,
        token: u64,
        result: Result<Message, BusError>,
        out: &mut Effects,
    ) -> Option<Delivered> {
        let request = self.asker(token)?;
        let open = self.open.get_mut(&request)?;
        let Ok(answer) = result else {
            return Some(self.fail(request));
        };
        if matches!(open.stage, Stage::Committing) {
            let Ok(ack) = wire::decode::<PagesAck>(&answer.payload) else {
                return Some(self.fail(request));
            };
            self.open.remove(&request);
            return Some(Delivered::Done(request, ack.stored));
        }
        if let Ok(granted) = wire::decode::<PagesGrant>(&answer.payload) {
            open.slots = Some(grants::granted(granted.slots));
            open.stage = Stage::Open { sending: false };
        } else if wire::decode::<Reject>(&answer.payload).is_ok_and(|no| no.reason == RejectReason::NoSpace) {
            // It has promised the turn its room, and computes.
            open.ready.clear();
            open.stage = Stage::Closed;
        } else {
            return Some(self.fail(request));
        }
        self.go_on(now, engine.page_bytes(), request, out)
    }

    /// A part has gone over the transfer plane, or not all of it.
    pub(crate) fn on_sent(
        &mut self,
        now: Micros,
        engine: &impl Engine,
        token: u64,
        result: Result<(), MoveError>,
        out: &mut Effects,
    ) -> Option<Delivered> {
        let request = self.asker(token)?;
        let open = self.open.get_mut(&request)?;
        open.stage = Stage::Open { sending: false };
        if let Err(error) = result {
            tracing::warn!(request = %request, %error, "not all pages arrived: the decode worker computes the rest");
            open.stage = Stage::Closed;
        }
        self.go_on(now, engine.page_bytes(), request, out)
    }

    /// A delivery of which a part has passed the simulated link by now: it goes on with [`Deliveries::advance`].
    pub(crate) fn take_passed(&mut self, now: Micros) -> Option<RequestId> {
        let request = self.link.take_done(now)?;
        if let Some(open) = self.open.get_mut(&request) {
            open.stage = Stage::Open { sending: false };
        }
        Some(request)
    }

    fn fail(&mut self, request: RequestId) -> Delivered {
        self.open.remove(&request);
        Delivered::Failed(request, AbortReason::TransferFailed)
    }

    /// Breaks one off. Pages on their way go on to slots that the D ends itself.
    pub(crate) fn cancel(&mut self, now: Micros, request: RequestId) {
        self.link.cancel(now, &request);
        self.open.remove(&request);
    }
}
