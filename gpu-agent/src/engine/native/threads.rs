//! The threads of one engine. Not the process's: several engines share a process, and each keeps to its own.

use super::error::StartError;
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// What computes.
#[derive(Debug)]
pub(crate) struct Threads(Option<ThreadPool>);

impl Threads {
    /// `count` threads; 0 is taken as 1, and 1 is the caller's own.
    ///
    /// # Errors
    /// [`StartError::Thread`]
    pub(crate) fn new(count: usize) -> Result<Self, StartError> {
        if count <= 1 {
            return Ok(Self(None));
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(count)
            .thread_name(|n| format!("engine-{n}"))
            .build();
        Ok(Self(Some(pool.map_err(|error| StartError::Thread(error.to_string()))?)))
    }

    /// How many.
    pub(crate) fn count(&self) -> usize {
        self.0.as_ref().map_or(1, ThreadPool::current_num_threads)
    }

    /// Does `work` on each item, in any order.
    pub(crate) fn each<T: Send>(&self, items: Vec<T>, work: impl Fn(T) + Send + Sync) {
        match &self.0 {
            None => items.into_iter().for_each(work),
            Some(pool) => pool.install(|| items.into_par_iter().for_each(work)),
        }
    }
}
