use super::super::{open, stream};
use super::*;

const SAMPLE: &str = include_str!("../../../../tests/data/claude_code_sample40.jsonl");

fn stats(text: &str) -> TraceStats {
    let (format, reader) = open(text.as_bytes()).unwrap();
    let mut collector = Collector::new(vec![1_000]);
    stream(reader, format, true, &mut collector).unwrap();
    collector.finish()
}

#[test]
fn mooncake_by_hand() {
    let s = stats(
        r#"{"timestamp":0,"input_length":1100,"output_length":100,"hash_ids":[0,1,2]}
{"timestamp":100,"input_length":1100,"output_length":50,"hash_ids":[0,3,4]}
{"timestamp":2500,"input_length":2000,"output_length":5,"hash_ids":[0,1,5,6]}"#,
    );
    assert_eq!((s.requests, s.sessions, s.multi_turn, s.pairs), (3, 2, 1, 1));
    assert!((s.span_s - 2.5).abs() < 1e-9 && (s.requests_per_s.unwrap() - 1.2).abs() < 1e-9);
    assert_eq!(
        s.input_over[0],
        Over {
            limit: 1_000,
            requests: 3
        }
    );
    // The third prompt shares two blocks with the first, 1,024 tokens.
    let append = s.append.unwrap();
    assert_eq!((append.count, append.mean), (1, 976.0));
    assert!((s.append_generated.unwrap() - 100.0 / 976.0).abs() < 1e-12);
    let cache = s.cache.unwrap();
    assert_eq!(
        (cache.blocks, cache.unique, cache.shared, cache.over_ten),
        (10, 7, 2, 0)
    );
    assert!((cache.block_hit_rate - 0.3).abs() < 1e-12);
    assert!((cache.token_hit_rate - (512.0 + 1024.0) / 4200.0).abs() < 1e-12);
    assert!((cache.from_session - 1024.0 / 4200.0).abs() < 1e-12);
    assert!((cache.cold - 1.0 / 3.0).abs() < 1e-12 && cache.warm == 0.0);
    assert_eq!(cache.cold_new, Some(1100.0));
    assert!((cache.top_ten - 10.0 / 7.0).abs() < 1e-12);
}

fn near(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() <= 1e-3 * expected.abs().max(0.01),
        "{found} is not {expected}"
    );
}

/// Against a Python script that expands every block id.
#[test]
fn the_sample_as_another_program_counts_it() {
    let s = stats(SAMPLE);
    assert_eq!(
        (s.requests, s.sessions, s.agents, s.resets, s.pairs),
        (2_705, 40, 0, 40, 2_665)
    );
    let figures = [
        (s.turns, [67.625, 46.5, 330.0]),
        (s.input, [110_301.161, 96_350.0, 819_909.0]),
        (s.output, [446.689, 216.0, 13_736.0]),
        (s.append, [1_637.660, 696.0, 105_766.0]),
        (s.think_s, [151.909, 10.0, 39_529.0]),
        (s.gap_s, [138.842, 19.0, 39_538.0]),
        (s.first_input, [91_995.375, 24_402.0, 716_145.0]),
    ];
    for (found, [mean, p50, max]) in figures {
        let found = found.unwrap();
        near(found.mean, mean);
        near(found.p50, p50);
        near(found.max, max);
    }
    near(s.append.unwrap().p90, 3_234.6);
    near(s.append_up_to[1].share, 0.386_285);
    near(s.append_up_to[2].share, 0.825_904);
    near(s.think_up_to[0].share, 0.239_399);
    near(s.append_generated.unwrap(), 0.256_259);
    near(s.append_generated_by_turn.unwrap().p50, 0.478_221);
    let cache = s.cache.unwrap();
    assert_eq!((cache.blocks, cache.unique), (4_660_596, 181_643));
    near(cache.block_hit_rate, 0.961_025);
}

/// Against the figures told beside the public traces. They are not shipped: say where they are with `PINION_TRACES`.
#[test]
#[ignore = "needs the public traces"]
fn public_traces_as_their_notes_tell() {
    let folder = std::env::var("PINION_TRACES").expect("PINION_TRACES names the folder of the traces");
    let file = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).unwrap();
    let mooncake = stats(&file("mooncake_fast25_conversation_trace.jsonl"));
    assert_eq!(mooncake.requests, 12_031);
    assert!((mooncake.span_s - 3_537.0).abs() < 0.5);
    assert!((mooncake.input.unwrap().mean - 12_035.0).abs() < 0.5);
    assert!((mooncake.input.unwrap().max - 126_195.0).abs() < 0.5);
    assert!((mooncake.output.unwrap().mean - 343.0).abs() < 0.5);
    let cache = mooncake.cache.unwrap();
    assert_eq!(cache.unique, 182_790);
    // The notes' 37.36 % is of tokens; of blocks it is what NVIDIA Dynamo prints for this file.
    near(cache.token_hit_rate, 0.373_624);
    near(cache.block_hit_rate, 0.366_412);
    // Both infer sessions, by rules that differ in detail.
    for (found, told) in [(mooncake.sessions, 8_057.0), (mooncake.multi_turn, 2_012.0)] {
        assert!((found as f64 / told - 1.0).abs() < 0.01, "{found} is not about {told}");
    }
    assert_eq!(stats(&file("azure_2023_conv.csv")).requests, 19_366);
}
