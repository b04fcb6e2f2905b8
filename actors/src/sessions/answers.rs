//! Ends of turns, kept for a while.

use pinion_schemas::RequestId;
use pinion_schemas::messages::Completed;
use std::collections::{BTreeMap, VecDeque};

/// Completed turns whose answer is kept for a client that has not heard of it; it asks again within seconds.
const ANSWERS_MAX: usize = 4_096;
/// Tokens of them: 16 MB.
const ANSWER_TOKENS_MAX: usize = 4 << 20;

/// The ends of turns that completed lately, for clients that have not heard of theirs. The oldest go first.
#[derive(Default)]
pub(super) struct Answers {
    by_request: BTreeMap<RequestId, Completed>,
    order: VecDeque<RequestId>,
    tokens: usize,
}

impl Answers {
    /// Keeps one.
    pub(super) fn push(&mut self, done: Completed) {
        if self.by_request.contains_key(&done.request) {
            return;
        }
        self.tokens += done.answer.len();
        self.order.push_back(done.request);
        self.by_request.insert(done.request, done);
        while self.order.len() > ANSWERS_MAX || self.tokens > ANSWER_TOKENS_MAX {
            let Some(oldest) = self.order.pop_front() else { return };
            if let Some(old) = self.by_request.remove(&oldest) {
                self.tokens -= old.answer.len();
            }
        }
    }

    /// The end of `request`, if it is still kept.
    pub(super) fn get(&self, request: RequestId) -> Option<&Completed> {
        self.by_request.get(&request)
    }
}
