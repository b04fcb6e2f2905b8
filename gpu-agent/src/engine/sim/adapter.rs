//! The simulated engine behind the trait that the roles know.

use super::{ContextHash, FinishReason, Output, Page, PageEvent, SimEngine, SubmitError};
use crate::engine::tree::Tier;
use pinion_actors::engine::MovedPage;
use pinion_actors::{Engine, EngineError, EngineOutput, Job};
use pinion_schemas::{Micros, PageHash, RequestId};

impl From<SubmitError> for EngineError {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::TooManyJobs { .. } | SubmitError::Pool(_) => Self::NoRoom(error.to_string()),
            SubmitError::EmptyPrompt | SubmitError::Duplicate(_) => Self::Refused(error.to_string()),
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "one form becomes the other")]
fn output(output: Output) -> EngineOutput {
    match output {
        Output::Token { request, token } => EngineOutput::Token(request, token),
        Output::Finished {
            request,
            reason,
            committed_tokens,
            tip,
        } => EngineOutput::Finished {
            request,
            ok: reason == FinishReason::Length,
            committed_tokens: committed_tokens as u32,
            tip,
        },
        Output::Page(PageEvent::Stored(page) | PageEvent::Promoted(page)) => EngineOutput::Stored(page),
        // A page in host memory is not resident for routing: fetching it back costs a transfer.
        Output::Page(PageEvent::Demoted(page) | PageEvent::Dropped(page)) => EngineOutput::Evicted(page),
    }
}

impl Engine for SimEngine {
    fn page_tokens(&self) -> u32 {
        self.config().page_tokens
    }

    fn page_bytes(&self) -> u64 {
        self.config().cost.kv_bytes(u64::from(self.config().page_tokens))
    }

    fn pool_pages(&self) -> u64 {
        self.config().device_pages
    }

    fn free_pages(&self) -> u64 {
        self.tree().free()
    }

    fn submit(&mut self, now: Micros, job: Job) -> Result<u64, EngineError> {
        let namespace = vec![job.tenant];
        let job = super::Job {
            request: job.request,
            prompt: job.tokens,
            max_new_tokens: job.max_new_tokens,
            namespace,
        };
        Ok(Self::submit(self, now, job)?)
    }

    fn cancel(&mut self, request: RequestId) -> bool {
        Self::cancel(self, request).is_some()
    }

    fn next_wakeup(&self) -> Option<Micros> {
        Self::next_wakeup(self)
    }

    fn advance(&mut self, now: Micros) -> Vec<EngineOutput> {
        Self::advance(self, now).into_iter().map(output).collect()
    }

    fn resident(&self, chain: &[PageHash]) -> usize {
        self.tree().match_any(chain)
    }

    fn pages(&self) -> Vec<PageHash> {
        self.tree().pages(Tier::Device).collect()
    }

    fn export(&self, chain: &[PageHash]) -> Vec<MovedPage> {
        Self::export(self, chain)
            .into_iter()
            .map(|p| (p.name, p.content.0))
            .collect()
    }

    fn import(&mut self, parent: Option<PageHash>, pages: &[MovedPage]) -> Result<u64, EngineError> {
        let pages: Vec<Page> = pages
            .iter()
            .map(|(name, content)| Page {
                name: *name,
                content: ContextHash(*content),
            })
            .collect();
        Self::import(self, parent, &pages).map_err(|error| EngineError::NoRoom(error.to_string()))
    }

    fn touch(&mut self, tip: PageHash) {
        Self::touch(self, tip);
    }

    fn queued_tokens(&self) -> u64 {
        self.waiting_prefill_tokens()
    }

    fn running(&self) -> u32 {
        self.jobs() as u32
    }
}
