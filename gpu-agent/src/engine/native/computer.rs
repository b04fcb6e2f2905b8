//! The thread that computes. It gets one step at a time and knows nothing of turns beyond it.

use super::error::StartError;
use super::forward::{Forward, Read};
use super::kv::Shape;
use super::model::Model;
use super::threads::Threads;
use pinion_actors::engine::Wake;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What became of a step; the error is what a panic said.
pub(crate) type Outcome = Result<Vec<Read>, String>;

#[derive(Default)]
struct Shared {
    outcome: Option<Outcome>,
    wake: Option<Wake>,
}

/// A handle on the thread, which ends with it.
pub(crate) struct Computer {
    steps: SyncSender<Vec<Read>>,
    shared: Arc<Mutex<Shared>>,
    busy: bool,
}

fn locked(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // Its critical sections move one value.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Computer {
    /// Starts the thread.
    ///
    /// # Errors
    /// [`StartError::Thread`]
    pub(crate) fn start(model: Arc<Model>, shape: Shape, threads: usize) -> Result<Self, StartError> {
        let threads = Threads::new(threads)?;
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (steps, inbox) = sync_channel(1);
        let theirs = shared.clone();
        let run = move || compute(&model, shape, &threads, &inbox, &theirs);
        let spawned = std::thread::Builder::new().name("engine".into()).spawn(run);
        spawned.map_err(|error| StartError::Thread(error.to_string()))?;
        Ok(Self {
            steps,
            shared,
            busy: false,
        })
    }

    /// Whom to wake when a step has ended.
    pub(crate) fn wake_with(&self, wake: Wake) {
        locked(&self.shared).wake = Some(wake);
    }

    /// Whether a step is under way, or its outcome not fetched.
    pub(crate) fn busy(&self) -> bool {
        self.busy
    }

    /// Whether there is an outcome to fetch.
    pub(crate) fn has_outcome(&self) -> bool {
        locked(&self.shared).outcome.is_some()
    }

    /// Begins a step. Call it only when not busy.
    pub(crate) fn begin(&mut self, reads: Vec<Read>) {
        self.busy = true;
        // One place and one step at a time: this never waits. The thread outlives its handle, so it fails only after a bug.
        if self.steps.try_send(reads).is_err() {
            locked(&self.shared).outcome = Some(Err("the thread is gone".into()));
        }
    }

    /// Takes the outcome of the step, if it has ended.
    pub(crate) fn take(&mut self) -> Option<Outcome> {
        let outcome = locked(&self.shared).outcome.take();
        self.busy &= outcome.is_none();
        outcome
    }
}

fn compute(model: &Model, shape: Shape, threads: &Threads, steps: &Receiver<Vec<Read>>, shared: &Mutex<Shared>) {
    let forward = Forward { model, shape, threads };
    while let Ok(mut reads) = steps.recv() {
        // Nothing of a step that stopped half-way is used again: its pages are dropped.
        let outcome = catch_unwind(AssertUnwindSafe(move || {
            forward.step(&mut reads);
            reads
        }));
        let wake = {
            let mut shared = locked(shared);
            shared.outcome = Some(outcome.map_err(|panic| reason(&*panic)));
            shared.wake.clone()
        };
        if let Some(wake) = wake {
            wake();
        }
    }
}

fn reason(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default()
}
