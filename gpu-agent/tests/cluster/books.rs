//! One decode worker's permits as an observer counts them: what is out, who waits, and whether the rules hold (I4).
//!
//! It knows nothing of the worker's own ledger, so that an error there cannot hide here.

use pinion_schemas::{Class, RequestId};
use std::collections::{BTreeMap, VecDeque};

/// What a D may promise at once.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Seeds.
    pub seeds: usize,
    /// Bytes they carry, unless there is only one.
    pub bytes: u64,
}

/// A rule that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breach {
    /// More seeds than allowed.
    TooManySeeds {
        /// Permits out.
        seeds: usize,
    },
    /// More bytes than allowed, by several seeds.
    TooManyBytes {
        /// Bytes of the permits out.
        bytes: u64,
    },
    /// A permit went to somebody while another of the same class waited longer.
    OutOfTurn {
        /// Who got it.
        got: RequestId,
        /// Whose turn it was.
        first: RequestId,
    },
    /// Somebody was told a place in the queue that is not theirs.
    WrongPlace {
        /// Who.
        request: RequestId,
        /// What was said.
        said: u32,
        /// What it is.
        is: u32,
    },
}

/// The books of one D.
#[derive(Debug)]
pub struct Books {
    budget: Budget,
    out: BTreeMap<RequestId, u64>,
    waiting: BTreeMap<Class, VecDeque<RequestId>>,
    /// What went wrong, in order.
    pub breaches: Vec<Breach>,
    /// Most permits out at once.
    pub most_seeds: usize,
    /// Most bytes of permits out at once.
    pub most_bytes: u64,
    /// Longest queue of each class.
    pub longest: BTreeMap<Class, usize>,
    /// Permits given, by class, in order.
    pub granted: Vec<(Class, RequestId)>,
}

impl Books {
    /// Empty books.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            out: BTreeMap::new(),
            waiting: BTreeMap::new(),
            breaches: Vec::new(),
            most_seeds: 0,
            most_bytes: 0,
            longest: BTreeMap::new(),
            granted: Vec::new(),
        }
    }

    /// The D told somebody to wait, and the place. Who waits already keeps the place when told again.
    pub fn queued(&mut self, request: RequestId, class: Class, said: u32) {
        let queue = self.waiting.entry(class).or_default();
        let is = queue.iter().position(|r| *r == request).unwrap_or_else(|| {
            queue.push_back(request);
            queue.len() - 1
        }) as u32;
        let longest = self.longest.entry(class).or_default();
        *longest = queue.len().max(*longest);
        if said != is {
            self.breaches.push(Breach::WrongPlace { request, said, is });
        }
    }

    /// The D gave a permit for so many bytes, at once or after a wait.
    pub fn granted(&mut self, request: RequestId, class: Class, bytes: u64) {
        if self.out.contains_key(&request) {
            return; // the answer to a repeated question
        }
        let queue = self.waiting.entry(class).or_default();
        if let Some(first) = queue.front().copied().filter(|first| *first != request) {
            self.breaches.push(Breach::OutOfTurn { got: request, first });
        }
        queue.retain(|r| *r != request);
        self.granted.push((class, request));
        self.out.insert(request, bytes);
        let (seeds, bytes) = (self.seeds(), self.bytes());
        self.most_seeds = self.most_seeds.max(seeds);
        self.most_bytes = self.most_bytes.max(bytes);
        if seeds > self.budget.seeds {
            self.breaches.push(Breach::TooManySeeds { seeds });
        }
        if seeds > 1 && bytes > self.budget.bytes {
            self.breaches.push(Breach::TooManyBytes { bytes });
        }
    }

    /// The permit or the wait of this request is over, for whatever reason.
    pub fn over(&mut self, request: RequestId) {
        self.out.remove(&request);
        for queue in self.waiting.values_mut() {
            queue.retain(|r| *r != request);
        }
    }

    /// Permits out.
    pub fn seeds(&self) -> usize {
        self.out.len()
    }

    /// Bytes of the permits out.
    pub fn bytes(&self) -> u64 {
        self.out.values().sum()
    }

    /// Asks that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.values().map(VecDeque::len).sum()
    }
}

fn request(n: u128) -> RequestId {
    RequestId(n)
}

fn two_seeds_of_100_bytes() -> Books {
    Books::new(Budget { seeds: 2, bytes: 100 })
}

#[test]
fn a_third_permit_is_one_too_many_until_one_is_over() {
    let mut books = two_seeds_of_100_bytes();
    for n in 0..3 {
        books.granted(request(n), Class::Batch, 10);
    }
    assert_eq!(books.breaches, [Breach::TooManySeeds { seeds: 3 }]);
    books.over(request(0));
    books.over(request(1));
    books.granted(request(4), Class::Batch, 10);
    assert_eq!(books.breaches.len(), 1);
    assert_eq!((books.most_seeds, books.most_bytes), (3, 30));
}

#[test]
fn too_many_bytes_are_seen_but_one_seed_may_always_go() {
    let mut books = two_seeds_of_100_bytes();
    books.granted(request(1), Class::Interactive, 1_000);
    assert_eq!(books.breaches, []);
    books.granted(request(2), Class::Interactive, 1);
    assert_eq!(books.breaches, [Breach::TooManyBytes { bytes: 1_001 }]);
}

#[test]
fn a_swapped_order_is_seen_in_one_class_and_allowed_between_two() {
    let mut books = two_seeds_of_100_bytes();
    books.queued(request(1), Class::Batch, 0);
    books.queued(request(2), Class::Batch, 1);
    books.queued(request(3), Class::Interactive, 0);
    books.granted(request(3), Class::Interactive, 1);
    assert_eq!(books.breaches, []);
    books.granted(request(2), Class::Batch, 1);
    let (got, first) = (request(2), request(1));
    assert_eq!(books.breaches, [Breach::OutOfTurn { got, first }]);
}

#[test]
fn a_newcomer_that_passes_the_queue_is_seen() {
    let mut books = two_seeds_of_100_bytes();
    books.queued(request(1), Class::Batch, 0);
    books.granted(request(9), Class::Batch, 1);
    let (got, first) = (request(9), request(1));
    assert_eq!(books.breaches, [Breach::OutOfTurn { got, first }]);
}

#[test]
fn a_wrong_place_is_seen_and_a_repeated_question_changes_nothing() {
    let mut books = two_seeds_of_100_bytes();
    books.queued(request(1), Class::Batch, 0);
    books.queued(request(2), Class::Batch, 1);
    books.queued(request(2), Class::Batch, 1);
    books.granted(request(1), Class::Batch, 10);
    books.granted(request(1), Class::Batch, 10);
    books.queued(request(2), Class::Batch, 0);
    assert_eq!(books.breaches, []);
    assert_eq!((books.seeds(), books.bytes(), books.waiting()), (1, 10, 1));
    books.queued(request(3), Class::Batch, 5);
    let (request, said, is) = (request(3), 5, 1);
    assert_eq!(books.breaches, [Breach::WrongPlace { request, said, is }]);
}
