use super::tokens::Vocab;
use super::*;
use proptest::prelude::*;

const SAMPLE: &str = include_str!("../../../tests/data/claude_code_first4.jsonl");

fn parse(text: &str, format: Format) -> Report {
    read(text.as_bytes(), format, false).unwrap()
}

const PROTOTYPE: Format = Format::Prototype {
    block_tokens: PROTOTYPE_BLOCK_TOKENS,
};

#[test]
fn sample_facts() {
    // (id, requests, input, output, blocks), counted by a Python script over the same file.
    let facts = [
        ("trace_0473", 4, 625_447, 2_778, 9_772),
        ("trace_0189", 4, 543_181, 1_526, 8_485),
        ("trace_0347", 5, 716_730, 3_405, 11_197),
        ("trace_0034", 7, 1_001_205, 4_815, 15_641),
    ];
    assert_eq!(detect(SAMPLE.lines().next().unwrap()), Some(Format::ClaudeCode));
    let report = read(SAMPLE.as_bytes(), Format::ClaudeCode, true).unwrap();
    assert!(report.broken.is_empty());
    let found = report.trace.sessions.iter().map(|s| {
        let input: u32 = s.turns.iter().map(|t| t.input_tokens).sum();
        let output: u32 = s.turns.iter().map(|t| t.output_tokens).sum();
        let blocks: u64 = s.turns.iter().map(Turn::block_count).sum();
        (s.id.as_str(), s.turns.len(), input, output, blocks)
    });
    assert_eq!(found.collect::<Vec<_>>(), facts);
    let first = &report.trace.sessions[0];
    assert_eq!(first.head_tokens, 12_573);
    assert_eq!(first.turns[1].at, Micros::from_secs(16));
    assert_eq!(first.turns[1].think, Micros::from_secs(8));
    assert_eq!(first.turns[1].shared_tokens(&first.turns[0]), 2392 * 64);
}

#[test]
fn broken_lines_have_numbers_and_do_not_stop_the_rest() {
    let mut lines: Vec<&str> = SAMPLE.lines().collect();
    let bad = r#"{"id":"x","block_size":64,"requests":[{"t":0,"in":-5,"out":1,"hash_runs":[]}]}"#;
    let big = r#"{"id":"y","block_size":64,"requests":[{"t":0,"in":64,"out":1,"hash_runs":[[0,4000000000]]}]}"#;
    lines.insert(1, "{oops");
    lines.insert(2, "");
    lines.insert(3, bad);
    lines.push(big);
    let text = lines.join("\n");
    let report = parse(&text, Format::ClaudeCode);
    assert_eq!(report.trace.sessions.len(), 4);
    assert_eq!(report.broken.iter().map(|b| b.line).collect::<Vec<_>>(), [2, 4, 8]);
    assert!(
        report.broken[1].to_string().contains("requests[0].in"),
        "{}",
        report.broken[1]
    );
    assert!(matches!(
        report.broken[2].error,
        LineError::TooManyBlocks {
            blocks: 4_000_000_000,
            room: 1,
            ..
        }
    ));
    assert!(matches!(
        read(text.as_bytes(), Format::ClaudeCode, true),
        Err(ReadError::Broken(BrokenLine { line: 2, .. }))
    ));
}

#[test]
fn agents_are_sessions_in_the_namespace_of_the_parent() {
    let line = r#"{"id":"p","block_size":4,"tool_tokens":3,"system_tokens":2,"requests":[
        {"t":0,"type":"n","in":8,"out":1,"hash_runs":[[1,2]]},
        {"t":5.5,"type":"subagent","agent_id":"a","tool_tokens":1,"requests":[{"t":0,"in":8,"out":1,"hash_runs":[[9,2]]}]},
        {"t":6,"type":"subagent","agent_id":"b","requests":[{"t":0,"in":8,"out":1,"hash_runs":[[1,1],[20,1]]}]}]}"#;
    let trace = parse(&line.replace('\n', " "), Format::ClaudeCode).trace;
    let [parent, a, b] = trace.sessions.as_slice() else {
        panic!("{trace:?}")
    };
    assert_eq!(
        (a.id.as_str(), a.start, a.namespace),
        ("p/1-a", Micros(5_500_000), parent.namespace)
    );
    assert!(a.agent_head && !b.agent_head);
    let vocab = Vocab { first: 10, size: 1000 };
    for common in [false, true] {
        let (x, y) = (
            vocab.prompt(parent, 0, common).unwrap(),
            vocab.prompt(b, 0, common).unwrap(),
        );
        assert_eq!(x[..4], y[..4]);
        assert_ne!(x[5..], y[5..]);
        assert!(x.iter().all(|t| (10..1010).contains(t)));
    }
}

#[test]
fn heads_are_common_only_by_option() {
    let trace = parse(SAMPLE, Format::ClaudeCode).trace;
    let vocab = Vocab {
        first: 0,
        size: 150_000,
    };
    let (a, b) = (&trace.sessions[0], &trace.sessions[1]);
    let head = a.head_tokens.min(b.head_tokens) as usize;
    let prompt = |s, common| vocab.prompt(s, 0, common).unwrap();
    assert_eq!(prompt(a, true)[..head], prompt(b, true)[..head]);
    assert_ne!(prompt(a, false)[..64], prompt(b, false)[..64]);
    assert_eq!(prompt(a, true).len(), 153_155);
    let next = vocab.prompt(a, 1, false).unwrap();
    assert_eq!(prompt(a, false)[..2392 * 64], next[..2392 * 64]);
    assert_eq!(vocab.prompt(a, 99, false), None);
}

#[test]
fn mooncake_sessions_are_inferred() {
    let text = r#"{"timestamp":0,"input_length":1100,"output_length":5,"hash_ids":[0,1,2]}
{"timestamp":100,"input_length":1100,"output_length":5,"hash_ids":[0,3,4]}
{"timestamp":2500,"input_length":2000,"output_length":5,"hash_ids":[0,1,5,6]}"#;
    let trace = parse(text, Format::Mooncake).trace;
    assert_eq!(trace.sessions.iter().map(|s| s.turns.len()).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(trace.sessions[0].turns[1].think, Micros::from_millis(2500));
    assert_eq!(trace.sessions[1].start, Micros::from_millis(100));
}

#[test]
fn prototype_follows_parents() {
    let text = r#"{"chat_id":160,"parent_chat_id":-1,"timestamp":1.5,"turn":0,"input_length":48,"output_length":2,"type":"chat","hash_ids":[0,1]}
{"chat_id":161,"parent_chat_id":160,"timestamp":4.0,"turn":1,"input_length":72,"output_length":2,"type":"chat","hash_ids":[0,1,2]}
{"chat_id":9,"parent_chat_id":8,"timestamp":4.0,"turn":1,"input_length":72,"output_length":2,"type":"chat","hash_ids":[]}"#;
    assert_eq!(detect(text.lines().next().unwrap()), Some(PROTOTYPE));
    let report = parse(text, PROTOTYPE);
    assert_eq!(report.trace.request_count(), 2);
    assert_eq!(report.trace.sessions[0].id, "160");
    assert_eq!(
        report.broken,
        [BrokenLine {
            line: 3,
            error: LineError::UnknownParent { parent: 8 }
        }]
    );
}

#[test]
fn azure_times_and_lengths() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 23:59:59.5000000,374,44\r\n2023-11-17 00:00:01.2500000,396,109\r\nx,1\r\n";
    assert_eq!(
        detect("TIMESTAMP,ContextTokens,GeneratedTokens\r"),
        Some(Format::AzureCsv)
    );
    let report = parse(text, Format::AzureCsv);
    assert_eq!(report.trace.sessions[1].start, Micros(1_750_000));
    assert_eq!(
        report.broken,
        [BrokenLine {
            line: 4,
            error: LineError::Columns { found: 2 }
        }]
    );
}

/// What is written is read as it was, whatever the trace came from.
#[test]
fn written_traces_are_read_back() {
    let mooncake = r#"{"timestamp":0,"input_length":1100,"output_length":5,"hash_ids":[0,1,2]}
{"timestamp":2500,"input_length":2000,"output_length":5,"hash_ids":[0,1,5,6]}"#;
    let azure =
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5,374,44\n2023-11-17 00:00:01.25,396,109\n";
    let agents = r#"{"id":"p","block_size":4,"tool_tokens":3,"requests":[{"t":0,"in":8,"out":1,"hash_runs":[[1,2]]},{"t":5.5,"type":"subagent","agent_id":"a-b","tool_tokens":1,"requests":[{"t":0,"in":8,"out":1,"hash_runs":[[9,2]]}]},{"t":6,"in":8,"out":1,"think_time":0.25,"hash_runs":[[1,2]]},{"t":7,"type":"subagent","requests":[{"t":0,"in":8,"out":1,"hash_runs":[[1,1],[20,1]]}]}]}"#;
    for (text, format) in [
        (SAMPLE, Format::ClaudeCode),
        (mooncake, Format::Mooncake),
        (azure, Format::AzureCsv),
        (agents, Format::ClaudeCode),
    ] {
        let trace = parse(text, format).trace;
        let mut bytes = Vec::new();
        write(&trace, &mut bytes).unwrap();
        let (format, reader) = open(bytes.as_slice()).unwrap();
        let again = read(reader, format, true).unwrap().trace;
        assert!(trace.request_count() > 0);
        assert_eq!(trace, again);
    }
}

const FORMATS: [Format; 4] = [Format::ClaudeCode, Format::Mooncake, PROTOTYPE, Format::AzureCsv];

proptest! {
    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        for format in FORMATS {
            prop_assert!(read(bytes.as_slice(), format, false).is_ok());
        }
        let _ = detect(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn damaged_lines_are_survived(at in 0usize..1100, byte in any::<u8>()) {
        let mut bytes = SAMPLE.as_bytes().to_vec();
        bytes[at] = byte;
        for format in FORMATS {
            prop_assert!(read(bytes.as_slice(), format, false).is_ok());
        }
    }
}
