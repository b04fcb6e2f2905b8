//! I5, first half: a D that says how far a session's backup reaches is right: the prefill worker has had all these pages.

use super::{Checker, Found, Invariant, Rules};
use crate::observed::{Body, Observed, Right};
use pinion_schemas::{Micros, PageHash};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Turns of a session that a backup may be of: it follows within seconds.
const TURNS: usize = 8;

/// See the module's text.
pub(super) struct Backups {
    page_tokens: u64,
    /// Contexts of each session, the newest last.
    contexts: BTreeMap<String, VecDeque<Arc<Right>>>,
    /// Pages that each worker has had.
    had: BTreeMap<String, BTreeSet<PageHash>>,
}

impl Backups {
    pub(super) fn new(rules: &Rules) -> Self {
        Self {
            page_tokens: rules.page_tokens,
            contexts: BTreeMap::new(),
            had: BTreeMap::new(),
        }
    }
}

impl Checker for Backups {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        match seen {
            Observed::Begun { session, right, .. } => {
                let contexts = self.contexts.entry(session.clone()).or_default();
                if contexts.len() >= TURNS {
                    contexts.pop_front();
                }
                contexts.push_back(right.clone());
            }
            Observed::Heard {
                arrived: false,
                from,
                body,
                ..
            } => match body {
                Body::Stored(pages) if from.starts_with('p') => {
                    self.had.entry(from.clone()).or_default().extend(pages);
                }
                Body::Said(said) if said.event == "backup-advanced" => {
                    let pages = (said.backup_tokens / self.page_tokens) as usize;
                    let had = self.had.get(&said.prefill);
                    let has = |name: &PageHash| had.is_some_and(|had| had.contains(name));
                    let all = |context: &Arc<Right>| context.names.iter().take(pages).all(has);
                    let contexts = self.contexts.get(&said.session);
                    if !contexts.is_some_and(|contexts| contexts.iter().any(all)) {
                        let (session, prefill, tokens) = (&said.session, &said.prefill, said.backup_tokens);
                        let what = format!("{from} says that {prefill} has {tokens} tokens of {session}: it never had");
                        out.breach(Invariant::I5, at, what);
                    }
                }
                _ => {}
            },
            _ => {}
        }
    }
}
