//! Continuous batching with chunked prefill, in discrete steps.
//!
//! A step is fixed when it starts: one token for every turn that decodes, and up to `chunk_tokens` of prefill, first come first
//! served, over those that do not yet. Its effects (tokens, committed pages) appear when it ends. A token's KV exists once a step
//! has read the token, so the last token of a turn is never in the KV, as in real engines; the next turn brings it.

use super::text::ContextHash;
use super::{FinishReason, Job, Output, Page, PageEvent, PageTree, SimConfig, SubmitError, TreeError};
use crate::engine::tree::Tier;
use pinion_schemas::hash::{ChainHasher, PageHash};
use pinion_schemas::ids::RequestId;
use pinion_schemas::time::Micros;

/// A turn in the engine.
#[derive(Debug, Clone)]
struct Running {
    serial: u64,
    request: RequestId,
    /// Prompt, and behind it what was written.
    tokens: Vec<u32>,
    prompt_len: usize,
    max_new: u32,
    written: u32,
    /// First tokens whose KV exists.
    computed: usize,
    content: ContextHash,
    chain: ChainHasher,
    /// Last named page; locked, with all above it.
    tip: Option<PageHash>,
    committed_pages: u64,
    /// Pages still set aside in the tree.
    reserved: u64,
    ready_at: Micros,
}

/// A step under way: for each turn in it, the tokens it reads.
#[derive(Debug, Clone)]
struct Step {
    ends: Micros,
    reads: Vec<(u64, usize)>,
}

/// A simulated engine. It keeps to its pool and leaves admission to its caller.
#[derive(Debug, Clone)]
pub struct SimEngine {
    config: SimConfig,
    tree: PageTree,
    jobs: Vec<Running>,
    step: Option<Step>,
    /// No step starts before this point: the end of the last one.
    idle_since: Micros,
    serial: u64,
    pending: Vec<PageEvent>,
}

impl SimEngine {
    /// An engine without any KV.
    pub fn new(config: SimConfig) -> Self {
        let tree = PageTree::new([config.device_pages, config.host_pages, 0]);
        Self {
            config,
            tree,
            jobs: Vec::new(),
            step: None,
            idle_since: Micros::ZERO,
            serial: 0,
            pending: Vec::new(),
        }
    }

    /// Its configuration.
    pub fn config(&self) -> &SimConfig {
        &self.config
    }
    /// Marks the pages up to `tip` as just used.
    pub fn touch(&mut self, tip: PageHash) {
        self.tree.touch(tip);
    }

    /// Its pages.
    pub fn tree(&self) -> &PageTree {
        &self.tree
    }
    /// Turns in the engine, waiting and running.
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }
    /// Prompt tokens that still have to be prefilled: the queue as a router wants it.
    pub fn waiting_prefill_tokens(&self) -> u64 {
        self.jobs
            .iter()
            .map(|j| j.prompt_len.saturating_sub(j.computed) as u64)
            .sum()
    }

    fn page_len(&self) -> usize {
        self.config.page_tokens.max(1) as usize
    }

    /// Takes a turn: finds its longest cached prefix, locks it, sets aside pages for the rest and for all it may write, and fetches
    /// back what host memory holds of it. Returns the number of prompt tokens that need no prefill. Page changes appear in the
    /// next [`SimEngine::advance`], which is due at once.
    ///
    /// # Errors
    /// [`SubmitError`]; the engine is then as before.
    pub fn submit(&mut self, now: Micros, job: Job) -> Result<u64, SubmitError> {
        if job.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if self.jobs.iter().any(|j| j.request == job.request) {
            return Err(SubmitError::Duplicate(job.request));
        }
        if self.jobs.len() >= self.config.max_jobs {
            return Err(SubmitError::TooManyJobs {
                max: self.config.max_jobs,
            });
        }
        let page = self.page_len();
        let namespace: Vec<Option<&str>> = job.namespace.iter().map(Option::as_deref).collect();
        // The last prompt token is always read, because the first new token comes from it.
        let mut names = ChainHasher::new(self.config.page_tokens, &namespace).push(&job.prompt);
        names.truncate((job.prompt.len() - 1) / page);
        let on_device = self.tree.match_device(&names);
        let mut tip = on_device.checked_sub(1).map(|i| names[i]);
        if let Some(tip) = tip {
            self.tree.lock(tip, None)?;
        }
        let total = (job.prompt.len() as u64)
            .saturating_add(u64::from(job.max_new_tokens))
            .div_ceil(page as u64);
        let mut reserved = total.saturating_sub(on_device as u64);
        if let Err(e) = self.tree.reserve(reserved, &mut self.pending) {
            if let Some(tip) = tip {
                self.tree.unlock(tip)?;
            }
            return Err(e.into());
        }
        let mut cached = on_device;
        let back: Vec<Page> = names[on_device..self.tree.match_any(&names)]
            .iter()
            .filter_map(|n| {
                Some(Page {
                    name: *n,
                    content: *self.tree.content(*n)?.1,
                })
            })
            .collect();
        if let Some(last) = back.last().map(|p| p.name) {
            reserved -= self.tree.commit(tip, &back, &mut self.pending)?;
            self.tree.lock(last, tip)?;
            tip = Some(last);
            cached += back.len();
        }
        let fetched = self.config.cost.promote((back.len() * page) as u64);
        let chain = match tip {
            Some(tip) => ChainHasher::resume(self.config.page_tokens, tip),
            None => ChainHasher::new(self.config.page_tokens, &namespace),
        };
        self.serial += 1;
        self.jobs.push(Running {
            serial: self.serial,
            request: job.request,
            prompt_len: job.prompt.len(),
            tokens: job.prompt,
            max_new: job.max_new_tokens,
            written: 0,
            computed: cached * page,
            content: tip
                .and_then(|t| self.tree.content(t))
                .map_or_else(ContextHash::default, |c| *c.1),
            chain,
            tip,
            committed_pages: cached as u64,
            reserved,
            ready_at: now.plus(self.config.cost.ttft_base).plus(fetched),
        });
        Ok((cached * page) as u64)
    }

    /// When [`SimEngine::advance`] will next have something to do; `None`: nothing is running. A point in the past means at once.
    pub fn next_wakeup(&self) -> Option<Micros> {
        if !self.pending.is_empty() {
            return Some(Micros::ZERO);
        }
        match &self.step {
            Some(step) => Some(step.ends),
            None => self
                .jobs
                .iter()
                .map(|j| j.ready_at)
                .min()
                .map(|t| t.max(self.idle_since)),
        }
    }

    /// Does everything that is due at `now`, step by step, and returns what came of it.
    pub fn advance(&mut self, now: Micros) -> Vec<Output> {
        let mut out: Vec<Output> = self.pending.drain(..).map(Output::Page).collect();
        while let Some(due) = self.next_wakeup().filter(|t| *t <= now) {
            if let Some(step) = self.step.take() {
                self.idle_since = step.ends;
                for (serial, reads) in step.reads {
                    self.apply(serial, reads, &mut out);
                }
                if self.jobs.iter().any(|j| j.ready_at <= due) {
                    self.start_step(due);
                }
            } else {
                self.start_step(due);
            }
        }
        out
    }

    fn start_step(&mut self, at: Micros) {
        let mut budget = self.config.chunk_tokens.max(1) as usize;
        let (mut reads, mut prefill, mut decoding) = (Vec::new(), 0u64, 0u64);
        for job in self.jobs.iter().filter(|j| j.ready_at <= at) {
            let left = job.tokens.len() - job.computed;
            if job.computed >= job.prompt_len {
                decoding += 1;
                reads.push((job.serial, left));
            } else if budget > 0 {
                let chunk = left.min(budget);
                budget -= chunk;
                prefill += chunk as u64;
                reads.push((job.serial, chunk));
            }
        }
        let cost = self
            .config
            .cost
            .prefill(prefill)
            .plus(self.config.cost.decode(decoding));
        self.step = Some(Step {
            ends: at.plus(Micros(cost.0.max(1))),
            reads,
        });
    }

    /// A turn has read `reads` tokens: names the pages that became full, and writes a token if the whole context is read.
    fn apply(&mut self, serial: u64, reads: usize, out: &mut Vec<Output>) {
        let Some(at) = self.jobs.iter().position(|j| j.serial == serial) else {
            return;
        };
        let (page, vocab) = (self.page_len(), self.config.vocab);
        let job = &mut self.jobs[at];
        let end = (job.computed + reads).min(job.tokens.len());
        let mut pages = Vec::new();
        for i in job.computed..end {
            job.content.push(job.tokens[i]);
            for name in job.chain.push(&job.tokens[i..=i]) {
                pages.push(Page {
                    name,
                    content: job.content,
                });
            }
        }
        job.computed = end;
        debug_assert_eq!(end / page, job.committed_pages as usize + pages.len());
        let mut events = Vec::new();
        let done = Self::commit(&mut self.tree, job, &pages, &mut events);
        out.extend(events.into_iter().map(Output::Page));
        if done.is_err() {
            return self.end(at, FinishReason::Broken, out);
        }
        if job.computed < job.tokens.len() {
            return;
        }
        if job.written < job.max_new {
            let token = job.content.next_token(vocab);
            job.written += 1;
            job.tokens.push(token);
            out.push(Output::Token {
                request: job.request,
                token,
            });
        }
        if job.written >= job.max_new {
            self.end(at, FinishReason::Length, out);
        }
    }

    fn commit(
        tree: &mut PageTree,
        job: &mut Running,
        pages: &[Page],
        events: &mut Vec<PageEvent>,
    ) -> Result<(), TreeError> {
        let Some(last) = pages.last() else { return Ok(()) };
        let taken = tree.commit(job.tip, pages, events)?;
        tree.release(pages.len() as u64 - taken)?; // another turn had named them: they are shared now
        job.reserved = job.reserved.saturating_sub(pages.len() as u64);
        tree.lock(last.name, job.tip)?;
        job.tip = Some(last.name);
        job.committed_pages += pages.len() as u64;
        keep(tree, last.name, events);
        Ok(())
    }

    /// Removes a turn and gives back all it holds.
    fn end(&mut self, at: usize, reason: FinishReason, out: &mut Vec<Output>) {
        let job = self.jobs.remove(at);
        // Both can fail only if the books are broken already; the turn ends all the same.
        let _ = self.tree.release(job.reserved);
        let _ = job.tip.map(|tip| self.tree.unlock(tip));
        let committed_tokens = job.committed_pages * self.page_len() as u64;
        out.push(Output::Finished {
            request: job.request,
            reason,
            committed_tokens,
            tip: job.tip,
        });
    }

    /// Ends a turn at once and frees all it holds; the pages it has named stay, evictable. `None` if it is not in the engine.
    /// A step under way keeps its length: the GPU cannot be called back.
    pub fn cancel(&mut self, request: RequestId) -> Option<Output> {
        let at = self.jobs.iter().position(|j| j.request == request)?;
        let mut out = Vec::with_capacity(1);
        self.end(at, FinishReason::Cancelled, &mut out);
        out.pop()
    }

    /// Adds pages that came from another node behind `parent`, unlocked; evicts as needed, never a running turn's pages.
    /// Returns how many were new on the device. Page changes appear in the next [`SimEngine::advance`].
    ///
    /// # Errors
    /// [`TreeError`]; whatever was set aside is returned.
    pub fn import(&mut self, parent: Option<PageHash>, pages: &[Page]) -> Result<u64, TreeError> {
        // Lock the parent, or making room might evict it.
        let mut known: Vec<PageHash> = pages.iter().map(|p| p.name).collect();
        known.truncate(self.tree.match_device(&known));
        let held = known.last().copied().or(parent);
        if let Some(held) = held {
            self.tree.lock(held, None)?;
        }
        let missing = (pages.len() - known.len()) as u64;
        let done = self.tree.reserve(missing, &mut self.pending).and_then(|()| {
            let before = self.tree.reserved();
            let taken = self.tree.commit(held, &pages[known.len()..], &mut self.pending);
            self.tree
                .release(missing.saturating_sub(before - self.tree.reserved()))?;
            taken
        });
        if let Some(held) = held {
            self.tree.unlock(held)?;
        }
        if let Some(last) = pages.last().filter(|_| done.is_ok()) {
            keep(&mut self.tree, last.name, &mut self.pending);
        }
        done
    }

    /// Pages of this worker with their content, for another node: the first of `names` that are here, in any tier.
    pub fn export(&self, names: &[PageHash]) -> Vec<Page> {
        let held = self.tree.match_any(names);
        names[..held]
            .iter()
            .filter_map(|n| {
                Some(Page {
                    name: *n,
                    content: *self.tree.content(*n)?.1,
                })
            })
            .collect()
    }
}

/// Copies the pages up to `tip` to host memory, if there is any; what has no room there stays without a copy.
fn keep(tree: &mut PageTree, tip: PageHash, events: &mut Vec<PageEvent>) {
    if tree.capacity(Tier::Host) == 0 {
        return;
    }
    for name in tree.lacking(Tier::Host, tip) {
        let Some(content) = tree.content(name).map(|c| *c.1) else {
            return;
        };
        let parent = tree.parent(name);
        if tree.keep(Tier::Host, parent, Page { name, content }, events).is_err() {
            return;
        }
    }
}
