//! What needs no server: the plan, and the report.

use super::*;
use pinion_schemas::reasons::Path;

#[test]
fn arrivals_are_seeded_and_ids_fit_a_header() {
    let t = trace(
        (0..50)
            .map(|i| session(&format!("s{i}"), vec![turn(8, 0, 0)]))
            .collect(),
    );
    let with = |seed| {
        let options = ReplayOptions {
            arrival_gap: Duration::from_secs(2),
            seed,
            ..options("http://x")
        };
        pacing::plan(&t, &options)
            .into_iter()
            .map(|p| p.start)
            .collect::<Vec<_>>()
    };
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2));
    let Start::At(last) = with(1)[49] else {
        panic!("no parent here")
    };
    assert!((50..200).contains(&last.as_secs()), "49 gaps of 2 s: {last:?}");
    for id in ["é", "a b", &"x".repeat(300), "tab\t"] {
        let header = session_header(&options("http://x"), &session(id, vec![]));
        assert!(header["x-session-id"].to_str().unwrap().starts_with("hash-"), "{id}");
    }
}

#[test]
fn the_table_fits() {
    let record = |i: usize, path, error: Option<Failure>| TurnRecord {
        session: "a-rather-long-session-id/17-sub-agent".to_owned(),
        turn: i,
        at_s: 1.0,
        input: 100_000,
        carried: 90_000,
        requested: 10,
        output: 10,
        ttft_ms: Some(1_234_567.8),
        latency_ms: 99_999_999.9,
        path,
        cached_tokens: Some(80_000),
        retries: 1,
        error,
        ..TurnRecord::default()
    };
    let mut records: Vec<TurnRecord> = Path::ALL
        .iter()
        .enumerate()
        .map(|(i, p)| record(i, Some(*p), None))
        .collect();
    records.push(record(
        4,
        None,
        Some(Failure::new(Reason::UsageMismatch, "word\n".repeat(100))),
    ));
    let summary = Summary::of(records, 12.0);
    assert_eq!((summary.cached_share, summary.carried_share), (Some(0.8), Some(0.9)));
    assert_eq!(serde_json::to_value(&summary).unwrap()["paths_after_first"]["turns"], 4);
    let table = summary.render_table();
    assert!(table.lines().all(|l| l.chars().count() <= 80), "{table}");
    assert!(Summary::of(Vec::new(), 0.0).render_table().contains('-'));
}
