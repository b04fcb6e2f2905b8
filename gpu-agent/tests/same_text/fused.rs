//! One engine for all of it, driven by hand.

use crate::talk::{Talks, Tokens};
use crate::{ANSWER, TURNS_MOST, rig};
use pinion_actors::{Engine as _, EngineOutput, Job};
use pinion_gpu_agent::engine::native::{Model, NativeEngine};
use pinion_schemas::{Epoch, Micros, RequestId, Sampling, WorkerId};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// What it answers: `[turn][conversation]`.
pub fn answers(model: Arc<Model>, mut talks: Talks) -> Vec<Vec<Tokens>> {
    let mut engine =
        NativeEngine::new(model, rig::engine_config(), &WorkerId::new("fused").unwrap(), Epoch(1)).unwrap();
    let (wake, woken) = channel();
    engine.wake_with(Arc::new(move || {
        let _ = wake.send(());
    }));
    let mut turn = || {
        let answers = run(&mut engine, &woken, talks.prompts());
        talks.said(answers.clone());
        answers
    };
    let answers = (0..TURNS_MOST).map(|_| turn()).collect();
    let usage = engine.inbox().pool().usage();
    assert_eq!((usage.writing, engine.inbox().grants()), (0, 0));
    answers
}

fn run(engine: &mut NativeEngine, woken: &Receiver<()>, prompts: Vec<Tokens>) -> Vec<Tokens> {
    let mut answers = vec![Tokens::new(); prompts.len()];
    for (at, tokens) in prompts.into_iter().enumerate() {
        let job = Job {
            request: RequestId(at as u128),
            tokens,
            max_new_tokens: ANSWER,
            sampling: Sampling::GREEDY,
            tenant: None,
        };
        engine.submit(Micros::ZERO, job).unwrap();
    }
    let mut open = answers.len();
    while open > 0 {
        for output in engine.advance(Micros::ZERO) {
            match output {
                EngineOutput::Token(request, token) => answers[request.0 as usize].push(token),
                EngineOutput::Finished { ok, .. } => {
                    assert!(ok, "a forward pass failed");
                    open -= 1;
                }
                EngineOutput::Stored(_) | EngineOutput::Evicted(_) => {}
            }
        }
        if engine.next_wakeup().is_none() && open > 0 {
            woken.recv_timeout(Duration::from_mins(2)).unwrap();
        }
    }
    answers
}
