//! Pages that move between engines.

use super::{Bench, job, names};
use pinion_actors::{Engine as _, EngineError, EngineOutput};
use pinion_schemas::{Micros, PageHash};
use pinion_transfer::{Grant, PageRef, PageState, SendError, Transport as _, tcp};

const LATER: Micros = Micros(100);

fn context(len: u32) -> Vec<u32> {
    (0..len).map(|i| (i * i + 3 * i) % 69).collect()
}

/// Sends pages to where they were granted, over a socket, as one node does to another.
fn send(from: &Bench, to: &Bench, grant: &Grant, pages: &[(PageHash, PageRef)]) -> Result<Vec<PageState>, SendError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(tcp::serve(listener, to.engine.inbox().clone()));
        let placed: Vec<_> = (0..).zip(pages.iter().map(|p| p.1.clone())).collect();
        let sender = tcp::TcpSender::new(from.engine.inbox().pool().clone(), 1);
        let states = sender.send(&address, grant, &placed).await;
        server.abort();
        states
    })
}

#[test]
fn moved_pages_serve_the_same_text() {
    let context = context(45);
    let mut prefill = Bench::tiny(20, 16);
    prefill.run(1, &context, 0);
    let chain = names(&prefill.engine, &context);
    let pages = prefill.engine.export_pages(&chain);
    assert_eq!(pages.len(), 5);
    let mut alone = Bench::tiny(20, 256);
    let want = alone.run(1, &context, 20);

    let mut decode = Bench::tiny(20, 16);
    // More is granted than comes.
    let grant = decode.engine.grant(7, 99, LATER).unwrap();
    assert_eq!(decode.engine.tree.reserved(), 7);
    let states = send(&prefill, &decode, &grant, &pages).unwrap();
    assert_eq!(states, [PageState::Stored; 5]);
    assert_eq!(decode.engine.import_granted(grant.id, None, &chain), Ok(5));
    assert_eq!(decode.engine.import_granted(grant.id, None, &chain), Ok(0));
    decode.assert_rest();
    assert_eq!(decode.digests(&context), prefill.digests(&context));
    let stored = decode.advance();
    assert_eq!(stored.len(), 5, "{stored:?}");
    assert_eq!(decode.engine.submit(Micros::ZERO, job(1, &context, 20)), Ok(40));
    assert_eq!(super::answer(&decode.drain(), 1), want);
}

#[test]
fn pages_behind_a_gap_are_not_taken_and_known_ones_not_twice() {
    let context = context(48);
    let mut prefill = Bench::tiny(20, 16);
    prefill.run(1, &context, 0);
    let chain = names(&prefill.engine, &context);
    let pages = prefill.engine.export_pages(&chain);
    let mut decode = Bench::tiny(20, 16);
    decode.run(1, &context[..16], 0);
    let grant = decode.engine.grant(6, 1, LATER).unwrap();
    send(&prefill, &decode, &grant, &pages[..4]).unwrap();
    assert_eq!(decode.engine.import_granted(grant.id, None, &chain), Ok(2));
    assert_eq!(decode.engine.resident(&chain), 4);
    decode.assert_rest();
    // Its parent is not there: nothing is taken, nothing leaks.
    let mut other = Bench::tiny(20, 16);
    let grant = other.engine.grant(2, 1, LATER).unwrap();
    send(&prefill, &other, &grant, &pages[2..4]).unwrap();
    let taken = other.engine.import_granted(grant.id, Some(chain[1]), &chain[2..]);
    assert!(matches!(taken, Err(EngineError::NoRoom(_))));
    other.assert_rest();
}

#[test]
fn a_grant_ends_at_its_deadline() {
    let mut bench = Bench::tiny(10, 16);
    bench.run(1, &context(64), 0);
    // It evicts what nobody uses.
    let grant = bench.engine.grant(6, 1, LATER).unwrap();
    assert!(matches!(bench.engine.grant(5, 1, LATER), Err(EngineError::NoRoom(_))));
    let evicted = bench.advance();
    assert_eq!(evicted.len(), 4);
    assert!(evicted.iter().all(|o| matches!(o, EngineOutput::Evicted(_))));
    assert_eq!(bench.engine.next_wakeup(), Some(LATER));
    bench.now = LATER;
    bench.advance();
    bench.assert_rest();
    assert_eq!(bench.engine.import_granted(grant.id, None, &[]), Ok(0));
    assert_eq!(bench.engine.next_wakeup(), None);
}

#[test]
fn an_evicted_page_that_is_still_being_sent_is_no_room() {
    let mut bench = Bench::tiny(6, 16);
    let context = context(48);
    bench.run(1, &context, 0);
    let chain = names(&bench.engine, &context);
    let sent = bench.engine.export_pages(&chain);
    let digest = sent[5].1.digest();
    let other = vec![60; 20];
    let submit = |bench: &mut Bench| bench.engine.submit(Micros::ZERO, job(2, &other, 1));
    assert!(matches!(submit(&mut bench), Err(EngineError::NoRoom(_))));
    assert!(matches!(bench.engine.grant(1, 1, LATER), Err(EngineError::NoRoom(_))));
    assert_eq!(bench.engine.tree.reserved(), 0);
    assert_eq!(
        pinion_transfer::layout::digest(&sent[5].1),
        digest,
        "nobody has written to it"
    );
    drop(sent);
    assert_eq!(submit(&mut bench), Ok(0));
    bench.drain();
}
