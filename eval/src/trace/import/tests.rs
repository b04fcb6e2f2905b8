use super::super::stats::Collector;
use super::super::{Session, Sink};
use super::*;
use pinion_schemas::Micros;
use proptest::prelude::*;

/// A token per byte.
fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn small() -> ShareGptOptions {
    ShareGptOptions {
        block_tokens: 4,
        ..ShareGptOptions::default()
    }
}

fn said(text: &str, options: &ShareGptOptions) -> Result<(Vec<Session>, Conversations), ImportError> {
    let mut sessions = Vec::new();
    let done = sharegpt(text.as_bytes(), bytes, options, |session| {
        sessions.push(session);
        Ok(())
    })?;
    Ok((sessions, done))
}

const TWO: &str = r#" [{"id": "a", "conversations": [
    {"from": "human", "value": "0123456789"}, {"from": "gpt", "value": "abc"},
    {"from": "human", "value": "de"}, {"from": "gpt", "value": "f"}]},
  {"conversations": []},
  {"id": "b", "conversations": [
    {"from": "system", "value": "0123"}, {"from": "human", "value": "4567"}, {"from": "gpt", "value": "x"}]}]"#;

#[test]
fn conversations_become_sessions() {
    let (sessions, done) = said(TWO, &small()).unwrap();
    assert_eq!((done.sessions, done.left_out), (2, 1));
    let [a, b] = sessions.as_slice() else {
        panic!("{sessions:?}")
    };
    assert_eq!((a.id.as_str(), b.start), ("0-a", Micros::from_secs(1)));
    let lengths = |s: &Session| {
        s.turns
            .iter()
            .map(|t| (t.input_tokens, t.output_tokens))
            .collect::<Vec<_>>()
    };
    assert_eq!(lengths(a), [(10, 3), (15, 1)]);
    assert_eq!(a.turns[1].at, Micros::from_millis(2_500));
    // Two full blocks stay; the partial one "89" is another once it has grown.
    assert_eq!((a.turns[0].block_count(), a.turns[1].block_count()), (3, 4));
    assert_eq!(a.turns[1].shared_tokens(&a.turns[0]), 8);
    // The other conversation begins with the same eight letters.
    assert_eq!(lengths(b), [(8, 1)]);
    assert_eq!(b.turns[0].shared_tokens(&a.turns[0]), 8);
    let values: Vec<serde_json::Value> = serde_json::from_str(TWO).unwrap();
    let lines: Vec<String> = values.iter().map(ToString::to_string).collect();
    assert_eq!(said(&lines.join("\n"), &small()).unwrap().0, sessions);
}

#[test]
fn what_is_wrong_is_said_with_its_place() {
    let first = ShareGptOptions {
        max_conversations: 1,
        ..small()
    };
    assert_eq!(said(TWO, &first).unwrap().1.sessions, 1);
    let wrong = TWO.replace(r#""system""#, r#""narrator""#);
    let error = said(&wrong, &small()).unwrap_err().to_string();
    assert!(
        error.contains("conversation 3") && error.contains("conversations[0].from"),
        "{error}"
    );
    let cut = said(&TWO[..90], &small()).unwrap_err().to_string();
    assert!(cut.contains("line 2"), "{cut}");
    assert!(said("7", &small()).is_err());
}

const AUDIT: &str = r#"{"instance_id":"b","ts":103.5,"messages":[],"audit":{"prompt_tokens":100,"completion_tokens":7}}
{"instance_id":"a","ts":100,"messages":[{"role":"user","content":"0123456789abcdef"}]}
{"instance_id":"b","ts":"1970-01-01T00:01:41Z","messages":[],"audit":{"prompt_tokens":50,"completion_tokens":0}}
{"instance_id":"b","ts":110,"messages":[],"audit":{"prompt_tokens":48,"completion_tokens":3}}
{"instance_id":"b","ts":-1,"audit":{}}"#;

#[test]
fn audits_become_sessions() {
    let report = audit(AUDIT.as_bytes(), false).unwrap();
    assert_eq!(report.broken.iter().map(|b| b.line).collect::<Vec<_>>(), [5]);
    let [a, b] = report.trace.sessions.as_slice() else {
        panic!("{report:?}")
    };
    assert_eq!(
        (
            a.turns[0].input_tokens,
            a.turns[0].output_tokens,
            a.turns[0].block_count()
        ),
        (4, 128, 0)
    );
    assert_eq!((b.id.as_str(), b.start), ("b", Micros::from_secs(1)));
    let inputs: Vec<u32> = b.turns.iter().map(|t| t.input_tokens).collect();
    assert_eq!(inputs, [50, 100, 48], "by time, not by line");
    assert_eq!(b.turns[1].shared_tokens(&b.turns[0]), 48);
    assert_eq!(b.turns[2].shared_tokens(&b.turns[1]), 0, "a shorter prompt starts anew");
    assert_eq!(b.turns[1].think, Micros::from_millis(2_500));
    assert!(audit(AUDIT.as_bytes(), true).is_err());
}

#[test]
fn a_converted_trace_has_its_figures() {
    let (sessions, _) = said(TWO, &small()).unwrap();
    let mut collector = Collector::new(Vec::new());
    for (number, session) in sessions.into_iter().enumerate() {
        collector.whole(number, session);
    }
    let stats = collector.finish();
    assert_eq!((stats.requests, stats.multi_turn), (3, 1));
    // 8 of 10, 15 and 8 tokens each had been named before, but for the first.
    assert!((stats.cache.unwrap().token_hit_rate - 16.0 / 33.0).abs() < 1e-12);
}

proptest! {
    #[test]
    fn any_bytes_are_survived(bytes_of_file in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = audit(bytes_of_file.as_slice(), false);
        let _ = sharegpt(bytes_of_file.as_slice(), bytes, &small(), |_| Ok(()));
    }

    #[test]
    fn damaged_files_are_survived(at in 0usize..300, byte in any::<u8>()) {
        for text in [TWO, AUDIT] {
            let mut damaged = text.as_bytes().to_vec();
            let at = at % damaged.len();
            damaged[at] = byte;
            let _ = audit(damaged.as_slice(), false);
            let _ = sharegpt(damaged.as_slice(), bytes, &small(), |_| Ok(()));
        }
    }
}
