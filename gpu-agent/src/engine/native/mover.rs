//! A thread that moves pages between tiers, so that nobody else waits for a device. It knows nothing of books.

use super::error::StartError;
use crate::engine::tree::Tier;
use pinion_actors::engine::Wake;
use pinion_schemas::PageHash;
use pinion_transfer::PageRef;
use pinion_transfer::file::{Buffer, FilePage, FileSlot, FileTier, PageName, ReadError};
use pinion_transfer::pool::SlotMut;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// What a tier holds of a page.
#[derive(Clone, Debug)]
pub(crate) enum Held {
    /// The page, in the engine's pool or in the host tier's. A lower tier "holds" the pool's own page while the copy is made.
    Memory(PageRef),
    /// The page in the file.
    File(FilePage),
}

/// Where a copy goes.
pub(crate) enum Target {
    Host(SlotMut),
    File(FileSlot),
}

/// A page to load, and where to.
pub(crate) struct Load {
    pub(crate) name: PageHash,
    pub(crate) from: Tier,
    pub(crate) held: Held,
    pub(crate) into: SlotMut,
}

/// A page that was loaded, or the slot it was to go to; with an error if it was tried.
pub(crate) struct Loaded {
    pub(crate) name: PageHash,
    pub(crate) from: Tier,
    pub(crate) page: Result<PageRef, (SlotMut, Option<ReadError>)>,
}

/// What to do.
pub(crate) enum Task {
    /// Copy a page of the pool to a lower tier.
    Copy {
        name: PageName,
        page: PageRef,
        target: Target,
    },
    /// Load pages of one chain, in order, for the turn with this number, until one fails or `stop` is set.
    Load {
        serial: u64,
        pages: Vec<Load>,
        stop: Arc<AtomicBool>,
    },
}

/// What became of it.
pub(crate) enum Moved {
    Copied {
        name: PageHash,
        tier: Tier,
        held: io::Result<Held>,
    },
    Loaded {
        serial: u64,
        pages: Vec<Loaded>,
    },
}

impl Task {
    fn run(self, buffer: &mut Buffer) -> Moved {
        match self {
            Self::Copy { name, page, target } => {
                let (tier, held) = match target {
                    Target::Host(mut slot) => {
                        slot.copy_from_slice(&page);
                        (Tier::Host, Ok(Held::Memory(slot.finish())))
                    }
                    Target::File(slot) => (Tier::File, slot.write(name, &page, buffer).map(Held::File)),
                };
                let name = name.name;
                Moved::Copied { name, tier, held }
            }
            Self::Load { serial, pages, stop } => {
                let mut failed = false;
                let mut load = |Load {
                                    name,
                                    from,
                                    held,
                                    mut into,
                                }| {
                    let page = match held {
                        _ if failed || stop.load(Ordering::Relaxed) => Err((into, None)),
                        Held::Memory(page) => {
                            into.copy_from_slice(&page);
                            Ok(into.finish())
                        }
                        Held::File(page) => page.read(into, buffer).map_err(|(slot, error)| (slot, Some(error))),
                    };
                    failed |= page.is_err();
                    Loaded { name, from, page }
                };
                let pages = pages.into_iter().map(&mut load).collect();
                Moved::Loaded { serial, pages }
            }
        }
    }
}

#[derive(Default)]
struct Shared {
    done: Vec<Moved>,
    wake: Option<Wake>,
    ends: bool,
}

fn locked(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // Its critical sections move one value.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handle on the thread. Dropping it waits for the task under way; the others are not done.
pub(crate) struct Mover {
    tasks: Option<Sender<Task>>,
    shared: Arc<Mutex<Shared>>,
    thread: Option<JoinHandle<()>>,
}

impl Mover {
    /// Starts the thread. Only with a file is its buffer of use.
    ///
    /// # Errors
    /// [`StartError::Thread`]
    pub(crate) fn start(name: &str, file: Option<&FileTier>) -> Result<Self, StartError> {
        let (shared, buffer) = (
            Arc::<Mutex<Shared>>::default(),
            file.map(FileTier::buffer).unwrap_or_default(),
        );
        let (tasks, inbox) = channel();
        let theirs = shared.clone();
        let spawned = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || work(&inbox, buffer, &theirs));
        Ok(Self {
            tasks: Some(tasks),
            shared,
            thread: Some(spawned.map_err(|error| StartError::Thread(error.to_string()))?),
        })
    }

    /// Whom to wake when a task is done.
    pub(crate) fn wake_with(&self, wake: Wake) {
        locked(&self.shared).wake = Some(wake);
    }

    /// Queues a task. Who calls bounds how many there are.
    pub(crate) fn begin(&self, task: Task) {
        // The thread ends only with this handle.
        let _ = self.tasks.as_ref().map(|tasks| tasks.send(task));
    }

    /// Whether something was done.
    pub(crate) fn has_done(&self) -> bool {
        !locked(&self.shared).done.is_empty()
    }

    /// What was done.
    pub(crate) fn take_done(&self) -> Vec<Moved> {
        std::mem::take(&mut locked(&self.shared).done)
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        locked(&self.shared).ends = true;
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(tasks: &Receiver<Task>, mut buffer: Buffer, shared: &Mutex<Shared>) {
    while let Ok(task) = tasks.recv() {
        if locked(shared).ends {
            return;
        }
        let moved = task.run(&mut buffer);
        let wake = {
            let mut shared = locked(shared);
            shared.done.push(moved);
            shared.wake.clone()
        };
        if let Some(wake) = wake {
            wake();
        }
    }
}
