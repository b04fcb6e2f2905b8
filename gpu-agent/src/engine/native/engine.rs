//! The books of a native engine.

use super::computer::{Computer, Outcome};
use super::error::StartError;
use super::forward::Read;
use super::kv::Shape;
use super::mover::Held;
use super::tiers::Tiers;
use super::turn::{Stage, Turn};
use super::{Model, NativeConfig};
use crate::engine::tree::{PageEvent, PageTree};
use pinion_actors::{EngineError, EngineOutput, Job};
use pinion_schemas::{ChainHasher, Epoch, PageHash, WorkerId};
use pinion_transfer::{Inbox, PageRef, Pool};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A native engine. Dropping it ends its turns; a forward pass under way ends by itself.
pub struct NativeEngine {
    pub(super) model: Arc<Model>,
    pub(super) config: NativeConfig,
    pub(super) inbox: Inbox,
    pub(super) tree: PageTree<Held>,
    pub(super) turns: Vec<Turn>,
    /// Grants that have not ended.
    pub(super) grants: BTreeMap<u64, super::grants::Granted>,
    /// Page changes that `advance` has still to tell.
    pub(super) events: Vec<PageEvent>,
    pub(super) computer: Computer,
    pub(super) tiers: Tiers,
    serial: u64,
}

impl NativeEngine {
    /// An engine with nothing in its pool, and in its lower tiers what an earlier one of this worker has left. `epoch` is the life of
    /// its pool: grants of another are not honoured.
    ///
    /// # Errors
    /// [`StartError`]
    pub fn new(
        model: Arc<Model>,
        mut config: NativeConfig,
        worker: &WorkerId,
        epoch: Epoch,
    ) -> Result<Self, StartError> {
        config.chunk_tokens = config.chunk_tokens.max(1);
        let pool = Pool::new(model.layout(config.page_tokens), config.pool_pages)?;
        let computer = Computer::start(model.clone(), Shape::of(pool.layout()), config.threads)?;
        let mut events = Vec::new();
        let (tiers, tree) = Tiers::open(&config, pool.layout(), worker, &mut events)?;
        Ok(Self {
            tree,
            inbox: Inbox::new(pool, epoch),
            model,
            config,
            turns: Vec::new(),
            grants: BTreeMap::new(),
            events,
            computer,
            tiers,
            serial: 0,
        })
    }

    /// Its model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Its pages and the grants on them, for the transports that fill them.
    pub fn inbox(&self) -> &Inbox {
        &self.inbox
    }

    pub(super) fn page_len(&self) -> usize {
        // The pool refuses pages of zero tokens.
        self.config.page_tokens as usize
    }

    /// Turns that somebody wants.
    pub(super) fn live(&self) -> impl Iterator<Item = &Turn> {
        self.turns.iter().filter(|t| !t.cancelled)
    }

    /// Whether the job makes sense to this model.
    pub(super) fn check(&self, job: &Job) -> Result<(), EngineError> {
        let (tokens, context) = (job.tokens.len(), self.model.context_tokens());
        let refused = |why: String| Err(EngineError::Refused(why));
        if tokens == 0 {
            return refused("the context is empty: give it at least one token".into());
        }
        if tokens > context {
            return refused(format!(
                "the context has {tokens} tokens and this model takes {context}: shorten it"
            ));
        }
        let vocabulary = self.model.vocabulary();
        if let Some(token) = job.tokens.iter().find(|t| **t as usize >= vocabulary) {
            return refused(format!(
                "token {token} is none of this model's {vocabulary}: use its tokenizer"
            ));
        }
        if self.live().any(|t| t.request == job.request) {
            return refused(format!("request {} is already running: cancel it first", job.request));
        }
        if self.live().count() >= self.config.max_jobs {
            let max = self.config.max_jobs;
            return Err(EngineError::NoRoom(format!(
                "{max} turns are in the engine: wait for one to end"
            )));
        }
        Ok(())
    }

    pub(super) fn next_serial(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Takes a turn whose prefix in the pool ends in `tip` and is locked, and goes on with the pages `load` of lower tiers. The
    /// caller unlocks it if this fails.
    pub(super) fn place(
        &mut self,
        job: Job,
        tip: Option<PageHash>,
        pages: Vec<PageRef>,
        load: Vec<PageHash>,
    ) -> Result<(), EngineError> {
        let page_len = self.page_len();
        // What is behind the longest context cannot be written.
        let wanted = (job.max_new_tokens as usize).min(self.model.context_tokens() - job.tokens.len() + 1);
        // The last token that is written has no KV.
        let held = (job.tokens.len() + wanted.saturating_sub(1)).div_ceil(page_len);
        let missing = held.saturating_sub(pages.len());
        self.tree.reserve(missing as u64, &mut self.events)?;
        if !self.slots_come(missing) {
            // An evicted page is still being sent, and its slot is not free before that has ended.
            self.tree.release(missing as u64)?;
            let why = format!("{missing} slots are needed, and some hold evicted pages that are being sent");
            return Err(EngineError::NoRoom(why));
        }
        let chain = match tip {
            Some(tip) => ChainHasher::resume(self.config.page_tokens, tip),
            None => ChainHasher::new(self.config.page_tokens, &[job.tenant.as_deref()]),
        };
        let serial = self.next_serial();
        self.turns.push(Turn {
            serial,
            request: job.request,
            prompt_tokens: job.tokens.len(),
            tokens: job.tokens,
            wanted,
            sampling: job.sampling,
            computed: (pages.len() + load.len()) * page_len,
            chain,
            tip,
            pages,
            slots: Vec::new(),
            reserved: missing as u64,
            cancelled: false,
            stage: Stage::Waiting { load },
        });
        self.give_slots(self.turns.len() - 1);
        Ok(())
    }

    /// One token for each turn that writes, and prefill first come first served up to the chunk.
    pub(super) fn begin_step(&mut self) {
        let (page_len, mut left) = (self.page_len(), self.config.chunk_tokens as usize);
        let mut reads = Vec::new();
        for turn in self.turns.iter_mut().filter(|t| t.is_ready()) {
            if turn.decodes() {
                reads.push(turn.lend(1, page_len));
            } else if left > 0 {
                let count = turn.unread().min(left);
                left -= count;
                reads.push(turn.lend(count, page_len));
            }
        }
        if !reads.is_empty() {
            self.computer.begin(reads);
        }
    }

    pub(super) fn end_step(&mut self, outcome: Outcome, out: &mut Vec<EngineOutput>) {
        match outcome {
            Ok(reads) => {
                for read in reads {
                    self.apply(read, out);
                }
            }
            Err(error) => {
                tracing::error!(error, turns = self.turns.len(), "a forward pass failed: all turns end");
                while !self.turns.is_empty() {
                    self.end(0, false, out);
                }
            }
        }
    }

    fn apply(&mut self, read: Read, out: &mut Vec<EngineOutput>) {
        let Some(at) = self.turns.iter().position(|t| t.serial == read.serial) else {
            return;
        };
        let (page_len, next) = (self.page_len(), read.next);
        let turn = &mut self.turns[at];
        let tip = turn.tip;
        let done = turn.take_back(read, page_len, &mut self.tree, &mut self.events);
        if let Some(named) = turn.tip.filter(|_| turn.tip != tip) {
            self.tiers.note(&self.tree, named);
        }
        self.tell(out);
        let turn = &mut self.turns[at];
        if let Err(error) = done {
            tracing::error!(request = %turn.request, %error, "the page books are wrong: the turn ends");
            return self.end(at, false, out);
        }
        if turn.cancelled {
            return self.end(at, false, out);
        }
        if turn.unread() > 0 {
            return;
        }
        let token = next.filter(|t| !self.model.stop_tokens().contains(t));
        turn.wanted = if token.is_some() { turn.wanted - 1 } else { 0 };
        if let Some(token) = token {
            turn.tokens.push(token);
            out.push(EngineOutput::Token(turn.request, token));
        }
        if turn.wanted == 0 {
            self.end(at, true, out);
        }
    }

    /// Removes a turn and gives back all it holds; its pages stay, evictable.
    pub(super) fn end(&mut self, at: usize, ok: bool, out: &mut Vec<EngineOutput>) {
        let turn = self.turns.remove(at);
        if !turn.cancelled {
            out.push(EngineOutput::Finished {
                request: turn.request,
                ok,
                committed_tokens: (turn.pages.len() * self.page_len()) as u32,
                tip: turn.tip,
            });
        }
        turn.end(&mut self.tree);
    }

    /// Tells what became of pages. One that only lower tiers hold is as good as resident: it is loaded sooner than it is computed.
    pub(super) fn tell(&mut self, out: &mut Vec<EngineOutput>) {
        for event in self.events.drain(..) {
            self.tiers.count(event);
            match event {
                PageEvent::Stored(page) => out.push(EngineOutput::Stored(page)),
                PageEvent::Dropped(page) => out.push(EngineOutput::Evicted(page)),
                PageEvent::Promoted(_) | PageEvent::Demoted(_) => {}
            }
        }
    }
}
