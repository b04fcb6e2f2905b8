//! The real model says something sensible.

use super::super::{Model, NativeConfig};
use super::{Bench, answer, end, job};
use pinion_actors::Engine as _;
use pinion_schemas::Micros;
use std::path::PathBuf;

/// "What is the capital of France?" in the model's chat form, behind its usual system prompt.
const QUESTION: &[u32] = &[
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
];
/// "The capital of France is Paris."
const ANSWER: &[u32] = &[504, 3575, 282, 4649, 314, 7042, 30];

fn path() -> PathBuf {
    let usual = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../.tools/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    );
    std::env::var_os("PINION_MODEL").map_or_else(|| usual.into(), PathBuf::from)
}

#[test]
fn the_real_model_answers() {
    if !path().exists() {
        eprintln!(
            "skipped: there is no model at {} (`make model` fetches one)",
            path().display()
        );
        return;
    }
    let model = Model::load(&path()).unwrap();
    let config = NativeConfig {
        pool_pages: 8,
        ..NativeConfig::default()
    };
    let mut bench = Bench::new(&model, config);
    bench.engine.submit(Micros::ZERO, job(1, QUESTION, 40)).unwrap();
    let out = bench.drain();
    assert_eq!(answer(&out, 1), ANSWER);
    // It ended by its stop token, and the pages are as long as a real server says of half precision.
    assert!(end(&out, 1).unwrap().0);
    assert_eq!(bench.engine.page_bytes(), 1_474_560);
    // The same model again is the same weights.
    assert!(std::sync::Arc::ptr_eq(&Model::load(&path()).unwrap(), &model));
}
