//! A `Run` comes in: is it known, may it run here, and when does it start.

use super::{Decode, EPOCHS_MAX, Turn};
use crate::effect::Effects;
use crate::engine::{Engine, Job};
use pinion_bus::Message;
use pinion_core::admit::{Action, Ask, Decision, Fact};
use pinion_schemas::messages::{Completed, Permit, PermitExpired, PermitQueued, Reject, Run, Started};
use pinion_schemas::{ChainHasher, Epoch, Micros, Path, RejectReason, RequestId, SessionId, TurnIndex};

impl Turn {
    /// Whether `run` is this turn, further on than the new owner knows.
    fn goes_on_for(&self, run: &Run) -> bool {
        self.submitted && self.is_prompt_of(run) && self.answer.len() >= run.already_sent as usize
    }

    fn is_prompt_of(&self, run: &Run) -> bool {
        prompt_tokens(&self.run) == prompt_tokens(run)
    }
}

/// Tokens before the answer.
pub(super) fn prompt_tokens(run: &Run) -> usize {
    run.tokens.len().saturating_sub(run.already_sent as usize)
}

fn started(run: &Run, pause_millis: u32) -> Started {
    Started {
        request: run.request,
        attempt: run.attempt,
        resident_pages: 0,
        pause_millis,
    }
}

impl<E: Engine> Decode<E> {
    pub(super) fn on_run(&mut self, now: Micros, run: Run, message: &Message, out: &mut Effects) {
        let (request, attempt) = (run.request, run.attempt);
        let newest = self.heard_of(&run.session, run.epoch);
        let reject = |reason| Reject {
            request,
            attempt,
            reason,
            pause_millis: 0,
        };
        if run.epoch < newest {
            return out.respond(message, &reject(RejectReason::StaleEpoch));
        }
        if self.has_completed(&run, message, out) {
            return;
        }
        if let Some(known) = self.turns.get(&request) {
            if attempt < known.run.attempt {
                return out.respond(message, &reject(RejectReason::StaleEpoch));
            }
            if known.goes_on_for(&run) {
                return self.go_on(run, message, out);
            }
            // One that waits for its permit or its pages keeps its place: the ledger gives the same answer again.
            if known.submitted || !known.is_prompt_of(&run) {
                self.end(now, request, out);
            }
        }
        let ask = self.ask(now, run, newest);
        self.step(now, Fact::Ask(ask), Some(message), out);
    }

    /// The newest epoch of the session's owner that this worker has heard of, `epoch` included.
    fn heard_of(&mut self, session: &SessionId, epoch: Epoch) -> Epoch {
        let newest = self.owners.get(session).copied().unwrap_or_default().max(epoch);
        if self.owners.len() >= EPOCHS_MAX && !self.owners.contains_key(session) {
            self.owners.pop_first();
        }
        self.owners.insert(session.clone(), newest);
        newest
    }

    /// The turn has completed here, and the owner that heard of it is gone, or did not hear: it is told again.
    fn has_completed(&self, run: &Run, message: &Message, out: &mut Effects) -> bool {
        let mut all = self.completed.iter();
        let Some((done, _)) = all.find(|(c, s)| c.request == run.request && *s == run.session) else {
            return false;
        };
        let done = Completed {
            attempt: run.attempt,
            ..done.clone()
        };
        out.respond(message, &started(run, 0));
        out.publish(run.notify.clone(), &done);
        out.publish(run.stream.clone(), &done);
        true
    }

    /// The turn runs here for an earlier attempt or owner: it goes on, and tells the new one.
    fn go_on(&mut self, run: Run, message: &Message, out: &mut Effects) {
        out.respond(message, &started(&run, self.pause_millis));
        let request = run.request;
        if let Some(turn) = self.turns.get_mut(&request) {
            turn.flushed = run.already_sent as usize;
            (turn.run.attempt, turn.run.epoch) = (run.attempt, run.epoch);
            (turn.run.notify, turn.run.stream) = (run.notify, run.stream);
        }
        self.flush(request, out);
    }

    /// Notes the turn, and says what it asks of the ledger.
    fn ask(&mut self, now: Micros, run: Run, newest_epoch: Epoch) -> Ask {
        let namespace = [run.tenant.as_deref()];
        let page = self.engine.page_tokens().max(1);
        let mut hasher = ChainHasher::new(page, &namespace);
        let chain = hasher.push(&run.tokens);
        let resident = self.engine.resident(&chain) as u32;
        let tokens = run.tokens.len() as u32;
        let prefix_pages = match resident {
            // Nothing of it is here: a new session, or one that comes from elsewhere.
            0 => run.prefix_pages.min(tokens / page),
            // A new session is seeded, whatever others have left here; but one of which most is here is not new: its owner
            // and the store have lost what they knew of it.
            _ if run.turn == TurnIndex(0) && resident <= tokens / page / 2 => run.prefix_pages.min(resident),
            // Less than the session's prefix if the tail was evicted: then what is lost counts as append. More if the turn
            // was here before and did not end.
            _ => resident,
        };
        let ask = Ask {
            request: run.request,
            session: run.session.clone(),
            turn: run.turn,
            epoch: run.epoch,
            newest_epoch,
            prefix_pages,
            resident_pages: resident,
            append_tokens: tokens - prefix_pages * page,
            output_tokens: run.max_new_tokens,
            class: run.class,
            deadline: now.plus(run.time_left),
        };
        let answer = run.tokens[prompt_tokens(&run)..].to_vec();
        let why = self
            .ledger
            .why_seeded(&ask, run.prefix_pages, run.pinned, run.prefix_changed);
        let turn = Turn {
            flushed: answer.len(),
            chain,
            hasher,
            path: Path::Direct,
            why,
            cached_tokens: resident * page,
            answer,
            submitted: false,
            permit: None,
            // A turn that waits keeps its slots: they are being filled.
            grant: self.turns.get(&ask.request).and_then(|t| t.grant),
            run,
        };
        self.turns.insert(ask.request, turn);
        ask
    }

    /// Feeds the ledger and does what it says. `message` is the one to answer, if the fact came with one.
    pub(super) fn step(&mut self, now: Micros, fact: Fact, message: Option<&Message>, out: &mut Effects) {
        let asked = match &fact {
            Fact::Ask(ask) => Some(ask.request),
            _ => None,
        };
        for action in self.ledger.step(now, fact) {
            match action {
                Action::Answer { request, decision, .. } => {
                    let to = message.filter(|_| asked == Some(request));
                    self.answer(now, request, decision, to, out);
                }
                // With its pages here it runs as if they had always been: its owner is told by a message of its own.
                Action::Start(request) => self.answer(now, request, Decision::Direct, None, out),
                Action::PermitExpired { request, permit } => {
                    // An older promise of the turn: the present one stands.
                    if self
                        .turns
                        .get(&request)
                        .is_some_and(|t| t.permit.is_some_and(|(p, _)| p != permit))
                    {
                        continue;
                    }
                    if let Some(turn) = self.forget(request) {
                        let attempt = turn.run.attempt;
                        out.publish(
                            turn.run.notify,
                            &PermitExpired {
                                request,
                                attempt,
                                permit,
                            },
                        );
                    }
                }
                Action::TurnExpired(request) => {
                    self.forget(request);
                }
            }
        }
    }

    fn answer(&mut self, now: Micros, request: RequestId, decision: Decision, to: Option<&Message>, out: &mut Effects) {
        let Some(turn) = self.turns.get_mut(&request) else {
            return;
        };
        let (attempt, pause_millis) = (turn.run.attempt, self.pause_millis);
        let notify = turn.run.notify.clone();
        let resident_pages = self.engine.resident(&turn.chain) as u32;
        macro_rules! send {
            ($body:expr) => {
                match to {
                    Some(message) => out.respond(message, &$body),
                    None => out.publish(notify, &$body),
                }
            };
        }
        match decision {
            Decision::Direct => {
                if self.submit(now, request) {
                    send!(Started {
                        request,
                        attempt,
                        resident_pages,
                        pause_millis
                    });
                } else {
                    send!(Reject {
                        request,
                        attempt,
                        reason: RejectReason::NoSpace,
                        pause_millis
                    });
                    self.end(now, request, out);
                }
            }
            Decision::Permit { permit, expires } => {
                turn.permit = Some((permit, expires));
                turn.path = if turn.run.turn == TurnIndex(0) {
                    Path::Seed
                } else {
                    Path::Reseed
                };
                // The seed's pages will come behind what is here.
                if let Some(tip) = turn.chain[..resident_pages as usize].last() {
                    self.engine.touch(*tip);
                }
                let (epoch, ttl) = (self.config.epoch, expires.since(now));
                send!(Permit {
                    request,
                    attempt,
                    permit,
                    epoch,
                    ttl,
                    resident_pages,
                    pause_millis
                });
            }
            Decision::Wait { position, eta } => send!(PermitQueued {
                request,
                attempt,
                position,
                eta
            }),
            Decision::Reject(reason) => {
                send!(Reject {
                    request,
                    attempt,
                    reason,
                    pause_millis
                });
                self.forget(request);
            }
        }
    }

    fn submit(&mut self, now: Micros, request: RequestId) -> bool {
        let Some(turn) = self.turns.get_mut(&request) else {
            return false;
        };
        let job = Job {
            request,
            tokens: turn.run.tokens.clone(),
            max_new_tokens: turn.run.max_new_tokens,
            sampling: turn.run.sampling,
            tenant: turn.run.tenant.clone(),
        };
        match self.engine.submit(now, job) {
            Ok(cached) => {
                turn.submitted = true;
                if turn.path == Path::Direct {
                    turn.cached_tokens = cached as u32;
                }
                true
            }
            Err(error) => {
                tracing::warn!(request = %request, %error, "the engine did not take an admitted turn");
                false
            }
        }
    }
}
