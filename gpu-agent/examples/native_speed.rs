//! How fast the native engine is: `cargo run --release -p pinion-gpu-agent --example native_speed -- MODEL.gguf [THREADS]`.
//!
//! Prefill: a prompt of 512 tokens (and of 2,048). Decode: 64 tokens behind it, for one turn and for eight side by side.
#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on should stop")]

use pinion_actors::{Engine, EngineOutput, Job};
use pinion_gpu_agent::engine::native::{Model, NativeConfig, NativeEngine};
use pinion_schemas::{Epoch, Micros, RequestId, Sampling, WorkerId};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Tokens that are written behind each prompt.
const WRITTEN: u32 = 64;

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("say which GGUF file");
    let threads = args.next().map_or(1, |n| n.parse().expect("THREADS is a number"));
    let begun = Instant::now();
    let model = Model::load(Path::new(&path)).unwrap_or_else(|error| panic!("{error}"));
    println!("load     {:8.2} s", begun.elapsed().as_secs_f64());
    for (prompt, turns) in [(512, 1), (2_048, 1), (128, 8)] {
        measure(&model, threads, prompt, turns);
    }
}

fn measure(model: &Arc<Model>, threads: usize, prompt: u32, turns: u32) {
    let config = NativeConfig {
        threads,
        ..NativeConfig::default()
    };
    let mut engine = NativeEngine::new(model.clone(), config, &WorkerId::new("speed").unwrap(), Epoch(1)).unwrap();
    let (wake, woken) = channel();
    engine.wake_with(Arc::new(move || {
        let _ = wake.send(());
    }));
    let begun = Instant::now();
    for turn in 0..turns {
        let token = |i| 100 + (i * 37 + turn * 1_009) % 20_000;
        let job = Job {
            request: RequestId(turn.into()),
            tokens: (0..prompt).map(token).collect(),
            max_new_tokens: WRITTEN,
            sampling: Sampling::GREEDY,
            tenant: None,
        };
        engine.submit(Micros::ZERO, job).unwrap();
    }
    let (mut written, mut read) = (0, Duration::ZERO);
    while engine.running() > 0 {
        for output in step(&mut engine, &woken) {
            written += u32::from(matches!(output, EngineOutput::Token(..)));
        }
        if read.is_zero() && engine.queued_tokens() == 0 {
            read = begun.elapsed();
        }
    }
    let rate = |tokens: u32, time: Duration| f64::from(tokens) / time.as_secs_f64();
    let (prefill, decode) = (
        rate(prompt * turns, read),
        rate(written - turns, begun.elapsed().saturating_sub(read)),
    );
    println!(
        "{turns} × {prompt:5} tokens, {threads} thread(s): prefill {prefill:7.1} tokens/s, decode {decode:6.1} tokens/s"
    );
}

fn step(engine: &mut NativeEngine, woken: &Receiver<()>) -> Vec<EngineOutput> {
    let mut out = engine.advance(Micros::ZERO);
    if engine.running() > 0 {
        woken.recv().unwrap();
        out.extend(engine.advance(Micros::ZERO));
    }
    out
}
