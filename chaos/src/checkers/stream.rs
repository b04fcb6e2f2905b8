//! I2: a client's tokens are those of the answer, in order, each once, to the last; and the second half of I5: they are what follows
//! from its own context, so that no wrong prefix was served.

use super::{Checker, Found, Invariant};
use crate::observed::{End, Observed, Right};
use pinion_schemas::{Micros, RequestId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Tokens that show by themselves where in an answer they belong.
const TELLING: usize = 3;

/// See the module's text.
#[derive(Default)]
pub(super) struct Streams(BTreeMap<RequestId, (Arc<Right>, usize)>);

impl Checker for Streams {
    fn see(&mut self, at: Micros, seen: &Observed, out: &mut Found) {
        match seen {
            Observed::Begun { request, right, .. } => {
                self.0.insert(*request, (right.clone(), 0));
            }
            Observed::Tokens { request, tokens } => {
                let Some((right, have)) = self.0.get_mut(request) else {
                    return;
                };
                if right.answer[*have..].starts_with(tokens) {
                    *have += tokens.len();
                    return;
                }
                let elsewhere = right.answer.windows(tokens.len().max(1)).any(|part| part == tokens);
                let wrong = tokens.len() >= TELLING && !elsewhere;
                let (invariant, what) = if wrong {
                    (Invariant::I5, "follow from another context")
                } else {
                    (Invariant::I2, "are not the next ones")
                };
                out.breach(
                    invariant,
                    at,
                    format!("{request}: {} tokens at {have} {what}", tokens.len()),
                );
                self.0.remove(request);
            }
            Observed::Ended { request, end } => {
                let Some((right, have)) = self.0.remove(request) else {
                    return;
                };
                let whole = right.answer.len();
                match end {
                    End::Done(_) if have < whole => {
                        out.breach(
                            Invariant::I2,
                            at,
                            format!("{request} is done after {have} of {whole} tokens"),
                        );
                    }
                    End::Failed("answer-changed") => {
                        out.breach(
                            Invariant::I2,
                            at,
                            format!("the answer of {request} changed after {have} tokens"),
                        );
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
}
