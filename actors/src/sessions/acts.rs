//! What is done about the machine's actions: who is told what.

use super::view::Said;
use super::{ANSWER_PATIENCE, Asked, Pending, RETRY_AFTER_MILLIS, ROUTER, SESSIONS, Sessions, snapshot_key};
use crate::effect::{Body, Effect, Effects, Local, RouteAsk, Tried};
use bytes::Bytes;
use pinion_core::session::{Action, Outcome, TurnFact};
use pinion_schemas::messages::{Abort, Completed, Failed, Run};
use pinion_schemas::subject::Kind;
use pinion_schemas::{
    AbortReason, BackupTargets, Micros, MigrationReason, RejectReason, RequestId, SeedReason, SessionId, WorkerId,
    shard_of,
};

/// Backups of one session at most: a fifth would cost more link than it saves prefill.
const BACKUPS_MAX: usize = 4;

impl Sessions {
    pub(super) fn perform(&mut self, now: Micros, session: &SessionId, action: Action, out: &mut Effects) {
        match action {
            Action::Route {
                request,
                attempt,
                avoid,
                rejects,
            } => {
                let Some(turn) = self.turns.get(&request) else { return };
                let pin = self.held.get(session).and_then(|e| e.machine.pin().cloned());
                out.tell(
                    ROUTER,
                    Local::RouteAsk(RouteAsk {
                        from: SESSIONS.to_owned(),
                        session: session.clone(),
                        request,
                        attempt,
                        pin,
                        chain: turn.chain.clone(),
                        context_tokens: turn.submit.prompt.len() as u64,
                        avoid,
                        rejects,
                    }),
                );
            }
            Action::AskRun {
                worker,
                request,
                attempt,
                fallback,
                already_sent,
            } => {
                self.ask_run(
                    now,
                    session,
                    &worker,
                    (request, attempt),
                    fallback.is_none(),
                    already_sent,
                    out,
                );
            }
            Action::Seed {
                worker,
                request,
                attempt,
                permit,
            } => {
                self.ask_seed(now, session, &worker, (request, attempt), permit, out);
            }
            Action::Abort {
                worker,
                request,
                attempt,
                reason,
            } => {
                self.abort(now, session, (request, attempt), &worker, reason, out);
            }
            Action::Relay { request, tokens, .. } => {
                // The client has them from the worker's own stream; here they are kept for a fail-over.
                if let Some(turn) = self.turns.get_mut(&request) {
                    turn.answer.extend(tokens);
                }
            }
            Action::Bind { to, reason, .. } => {
                let said = Said {
                    worker: Some(&to),
                    detail: reason.map(MigrationReason::label),
                    ..Said::of("bound")
                };
                self.say(now, session, said, out);
            }
            Action::Persist => self.persist(session, out),
            Action::Finish { request, outcome } => self.finish(now, session, request, outcome, out),
            Action::FinishAgain { request, outcome } => {
                self.finish_again(request, outcome, out);
            }
        }
    }

    fn abort(
        &mut self,
        now: Micros,
        session: &SessionId,
        (request, attempt): (RequestId, u64),
        worker: &WorkerId,
        reason: AbortReason,
        out: &mut Effects,
    ) {
        self.send_abort(session, (request, attempt), reason, (Kind::Decode, worker), out);
        if let Some((kind, source)) = self.turns.get_mut(&request).and_then(|t| t.seeding_on.take()) {
            self.send_abort(session, (request, attempt), reason, (kind, &source), out);
        }
        self.left(request, attempt, Tried::Ended, out);
        let said = Said {
            request: Some(request),
            worker: Some(worker),
            detail: Some(reason.label()),
            ..Said::of("aborted")
        };
        self.say(now, session, said, out);
    }

    /// Tells one worker to stop its leg.
    pub(super) fn send_abort(
        &self,
        session: &SessionId,
        (request, attempt): (RequestId, u64),
        reason: AbortReason,
        (kind, worker): (Kind, &WorkerId),
        out: &mut Effects,
    ) {
        let epoch = self.epoch_of(session);
        let abort = Abort {
            request,
            attempt,
            epoch,
            reason,
        };
        out.publish(self.subjects.worker(kind, worker, "abort"), &abort);
    }

    /// Sends a request whose answer comes to `on_reply` with what is kept of it. Returns whether it could be sent.
    pub(super) fn ask(&mut self, subject: String, message: &impl Body, pending: Pending, out: &mut Effects) -> bool {
        self.next_token += 1;
        let sent = out.request(self.next_token, subject, message, ANSWER_PATIENCE);
        if sent {
            self.pending.insert(self.next_token, pending);
        }
        sent
    }

    /// The client asks about a turn that has ended.
    fn finish_again(&mut self, request: RequestId, outcome: Outcome, out: &mut Effects) {
        let Some(turn) = self.turns.remove(&request) else {
            return;
        };
        let reason = match (outcome, self.completed.get(request)) {
            (Outcome::Completed(_), Some(done)) => return out.publish(turn.submit.stream, done),
            // Its answer is forgotten: the client has to ask anew.
            (Outcome::Completed(_), None) => AbortReason::RetriesSpent,
            _ => abort_reason(outcome).unwrap_or(AbortReason::RetriesSpent),
        };
        let failed = Failed {
            request,
            reason,
            retry_after_millis: RETRY_AFTER_MILLIS,
        };
        out.publish(turn.submit.stream, &failed);
    }

    #[expect(clippy::too_many_arguments, reason = "one message's worth of fields, used once")]
    fn ask_run(
        &mut self,
        now: Micros,
        session: &SessionId,
        worker: &WorkerId,
        (request, attempt): (RequestId, u64),
        keep: bool,
        already_sent: u32,
        out: &mut Effects,
    ) {
        let epoch = self.epoch_of(session);
        let Some(entry) = self.held.get(session) else {
            return;
        };
        let Some(turn) = self.turns.get(&request) else { return };
        let sent = &turn.answer[..turn.answer.len().min(already_sent as usize)];
        let run = Run {
            request,
            attempt,
            session: session.clone(),
            turn: entry.machine.next_turn(),
            epoch,
            class: turn.submit.class,
            tenant: turn.submit.tenant.clone(),
            time_left: turn.deadline.since(now),
            prefix_pages: entry.machine.committed_tokens() / self.config.costs.page_tokens.max(1),
            pinned: entry.machine.pin() == Some(worker),
            prefix_changed: entry.machine.prefix_changed(&turn.chain),
            tokens: [&turn.submit.prompt[..], sent].concat(),
            already_sent: sent.len() as u32,
            max_new_tokens: turn.submit.max_new_tokens.saturating_sub(sent.len() as u32),
            sampling: turn.submit.sampling,
            keep,
            backups: if keep { self.backups(session, turn) } else { Vec::new() },
            stream: turn.submit.stream.clone(),
            notify: self.notify.clone(),
        };
        let subject = self.subjects.worker(Kind::Decode, worker, "run");
        let pending = Pending {
            request,
            attempt,
            session: session.clone(),
            asked: Asked::Run { worker: worker.clone() },
        };
        if self.ask(subject.into(), &run, pending, out) {
            let what = Tried::Assigned;
            let before = self
                .turns
                .get_mut(&request)
                .and_then(|t| t.asked.replace((worker.clone(), attempt)));
            if let Some((worker, _)) = before {
                let what = Tried::Ended;
                out.tell(ROUTER, Local::Outcome { worker, what });
            }
            let worker = worker.clone();
            out.tell(ROUTER, Local::Outcome { worker, what });
        } else {
            self.fact(now, request, attempt, TurnFact::Rejected(RejectReason::NeverFits), out);
        }
    }

    /// Prefill workers that are to hold the session's pages too.
    fn backups(&self, session: &SessionId, turn: &super::Turn) -> Vec<WorkerId> {
        let last = self.held.get(session).and_then(|e| e.seeded_by.as_ref());
        let all = turn.prefill.iter().map(|s| &s.worker);
        let known = |w: &&WorkerId| all.clone().any(|known| known == *w);
        let first = all.clone().next();
        match self.config.backups {
            BackupTargets::Off => Vec::new(),
            BackupTargets::LastPrefill => last.filter(known).or(first).cloned().into_iter().collect(),
            BackupTargets::RoundRobin => {
                let mut all: Vec<&WorkerId> = all.collect();
                all.sort_unstable();
                let dealt = usize::from(shard_of(session)).checked_rem(all.len());
                dealt.map(|i| all[i].clone()).into_iter().collect()
            }
            BackupTargets::Broadcast => all.take(BACKUPS_MAX).cloned().collect(),
        }
    }

    pub(super) fn finish(
        &mut self,
        now: Micros,
        session: &SessionId,
        request: RequestId,
        outcome: Outcome,
        out: &mut Effects,
    ) {
        let Some(turn) = self.turns.remove(&request) else {
            return;
        };
        let (what, detail) = match outcome {
            Outcome::Completed(path) => ("completed", path.label()),
            Outcome::Cancelled => ("cancelled", AbortReason::ClientGone.label()),
            Outcome::Failed(reason) => ("failed", reason.label()),
            Outcome::Refused => ("refused", RejectReason::QueueFull.label()),
        };
        let worker = turn.asked.map(|(worker, _)| worker);
        if let Some(worker) = worker.clone() {
            let what = Tried::Ended;
            out.tell(ROUTER, Local::Outcome { worker, what });
        }
        let why = turn.end.as_ref().and_then(|end| end.why).map(SeedReason::label);
        if let Outcome::Completed(path) = outcome {
            let done = turn.end.unwrap_or_else(|| {
                // No D said so: the client had the whole answer when its D or its session's owner died.
                let context_tokens = (turn.submit.prompt.len() + turn.answer.len()) as u32;
                let done = Completed {
                    request,
                    attempt: 0,
                    path,
                    why: None,
                    context_tokens,
                    committed_tokens: 0,
                    tip: None,
                    cached_tokens: 0,
                    answer: turn.answer,
                };
                out.publish(turn.submit.stream.clone(), &done);
                done
            });
            self.completed.push(done);
        } else if let Some(reason) = abort_reason(outcome) {
            let failed = Failed {
                request,
                reason,
                retry_after_millis: RETRY_AFTER_MILLIS,
            };
            out.publish(turn.submit.stream, &failed);
        }
        if let Some(entry) = self.held.get_mut(session) {
            entry.turns += 1;
        }
        if let Some(entry) = self.held.get(session).filter(|e| e.machine.is_idle()) {
            self.idle.insert((entry.last_used, session.clone()));
        }
        let said = Said {
            request: Some(request),
            worker: worker.as_ref(),
            detail: Some(detail),
            why,
            ..Said::of(what)
        };
        self.say(now, session, said, out);
    }

    /// Writes what the session's next owner needs.
    fn persist(&self, session: &SessionId, out: &mut Effects) {
        let Some(entry) = self.held.get(session) else {
            return;
        };
        match serde_json::to_vec(&entry.machine.snapshot()) {
            Ok(text) => out.0.push(Effect::Put(
                snapshot_key(session),
                self.epoch_of(session),
                Bytes::from(text),
            )),
            Err(error) => tracing::error!(%error, "a snapshot cannot be written as JSON"),
        }
    }
}

/// What the client of a turn that did not complete is told.
fn abort_reason(outcome: Outcome) -> Option<AbortReason> {
    match outcome {
        Outcome::Completed(_) => None,
        Outcome::Cancelled => Some(AbortReason::ClientGone),
        Outcome::Failed(reason) => Some(reason),
        Outcome::Refused => Some(AbortReason::SessionBusy),
    }
}
