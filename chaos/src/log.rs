//! What was seen, one line each, for people.

use crate::observed::{Body, End, Observed};
use pinion_schemas::{Micros, RequestId};

/// The line of one fact.
pub(crate) fn line(at: Micros, seen: &Observed) -> String {
    format!("{:>11.6} {}", at.0 as f64 / 1e6, what(seen))
}

/// The first digits of a request's id, which are random.
fn short(request: RequestId) -> String {
    request.to_string().chars().take(6).collect()
}

fn what(seen: &Observed) -> String {
    match seen {
        Observed::Begun {
            request,
            session,
            turn,
            right,
            ..
        } => {
            let (request, pages) = (short(*request), right.names.len());
            format!(
                "client begins {request}: {session} turn {turn}, {pages} pages, answer {}",
                right.answer.len()
            )
        }
        Observed::Tokens { request, tokens } => format!("client got {} of {}", tokens.len(), short(*request)),
        Observed::Ended { request, end } => {
            let how = match end {
                End::Done(answer) => format!("done, {} tokens", answer.len()),
                End::Failed(code) => format!("failed: {code}"),
                End::Left => "left".to_owned(),
            };
            format!("client ends {}: {how}", short(*request))
        }
        Observed::Heard {
            arrived,
            from,
            to,
            body,
        } => {
            let way = if *arrived { "=>" } else { "->" };
            format!("{from} {way} {to}: {}", said(body))
        }
        Observed::Imported { worker, .. } => format!("{worker} imported a page"),
        Observed::Ledger(ledger) => format!(
            "view of {}: {} running, {} permits, {} waiting, room {} of {}",
            ledger.worker,
            ledger.running.len(),
            ledger.permits.len(),
            ledger.waiting,
            ledger.room,
            ledger.pool
        ),
        Observed::Leased { shard, owner, epoch } => format!("shard {shard} of {owner:?} in epoch {epoch}"),
        Observed::Fault(begins, kind) => format!("*** {kind} {}", if *begins { "begins" } else { "ends" }),
        other => format!("{other:?}"),
    }
}

fn said(body: &Body) -> String {
    let of = |what: &str, request: &RequestId, attempt: &u64| format!("{what} {} #{attempt}", short(*request));
    match body {
        Body::Run(run) => format!(
            "{} of {}, {} tokens",
            of("run", &run.request, &run.attempt),
            run.session,
            run.tokens
        ),
        Body::Started(request, attempt) => of("started", request, attempt),
        Body::Permit(request, attempt) => of("permit", request, attempt),
        Body::Queued(request, attempt) => of("queued", request, attempt),
        Body::PermitExpired(request, attempt) => of("permit expired", request, attempt),
        Body::Reject(no) => format!("{}: {}", of("reject", &no.request, &no.attempt), no.reason),
        Body::LegFailed(no) => format!("{}: {}", of("leg failed", &no.request, &no.attempt), no.reason),
        Body::Abort(no) => format!("{}: {}", of("abort", &no.request, &no.attempt), no.reason),
        Body::Completed(done) => {
            let (of, path, tokens) = (
                of("completed", &done.request, &done.attempt),
                done.path,
                done.answer.len(),
            );
            format!("{of}: {path}, {tokens} tokens")
        }
        Body::Pages(request, epoch) => format!("pages of {} for epoch {epoch}", short(*request)),
        Body::PagesAck(request) => format!("took pages of {}", short(*request)),
        Body::Stored(pages) => format!("stored {}", pages.len()),
        Body::Evicted(pages) => format!("evicted {}", pages.len()),
        Body::Said(said) if !said.event.is_empty() => {
            let (event, session, prefill) = (&said.event, &said.session, &said.prefill);
            format!(
                "{event} {session} on {prefill}: {} tokens, lags {}",
                said.backup_tokens, said.staleness
            )
        }
        Body::Said(said) => {
            let request = said.request.as_deref().unwrap_or_default().get(..6).unwrap_or_default();
            let detail = said.detail.as_deref().unwrap_or_default();
            format!("{} says {} {request} {detail}", said.session, said.what)
        }
    }
}
