//! Sets of workers, each stored once and named by a number.

use std::collections::BTreeMap;

/// Workers a set can hold.
pub(super) const SLOTS: usize = 256;

/// A set of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Holders([u64; SLOTS / 64]);

impl Holders {
    /// Nobody.
    pub(super) const NONE: Self = Self([0; SLOTS / 64]);
    /// Everybody.
    pub(super) const ALL: Self = Self([u64::MAX; SLOTS / 64]);

    pub(super) fn is_empty(self) -> bool {
        self == Self::NONE
    }
    pub(super) fn contains(self, slot: usize) -> bool {
        self.0[slot / 64] >> (slot % 64) & 1 == 1
    }
    pub(super) fn with(mut self, slot: usize) -> Self {
        self.0[slot / 64] |= 1 << (slot % 64);
        self
    }
    pub(super) fn and(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }
    pub(super) fn without(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }
    /// The members, ascending.
    pub(super) fn slots(self) -> impl Iterator<Item = usize> {
        self.0.into_iter().enumerate().flat_map(|(word, bits)| {
            let next = |b: &u64| Some(b & (b - 1)).filter(|b| *b > 0);
            let first = Some(bits).filter(|b| *b > 0);
            std::iter::successors(first, next).map(move |b| word * 64 + b.trailing_zeros() as usize)
        })
    }
}

/// Name of an interned set.
pub(super) type SetId = u32;

/// The sets in use, counted.
#[derive(Debug, Clone)]
pub(super) struct Sets {
    max: usize,
    /// By name: the set, and the pages that have it.
    by_id: Vec<(Holders, u32)>,
    free: Vec<SetId>,
    names: BTreeMap<Holders, SetId>,
}

impl Sets {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max,
            by_id: Vec::new(),
            free: Vec::new(),
            names: BTreeMap::new(),
        }
    }

    /// Distinct sets in use.
    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn get(&self, id: SetId) -> Holders {
        self.by_id[id as usize].0
    }

    /// One more page has `holders`; none if that would be one distinct set too many.
    pub(super) fn intern(&mut self, holders: Holders) -> Option<SetId> {
        if let Some(&id) = self.names.get(&holders) {
            self.by_id[id as usize].1 += 1;
            return Some(id);
        }
        if self.names.len() >= self.max {
            return None;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.by_id.push((Holders::NONE, 0));
            (self.by_id.len() - 1) as SetId
        });
        self.by_id[id as usize] = (holders, 1);
        self.names.insert(holders, id);
        Some(id)
    }

    /// One page fewer has the set.
    pub(super) fn release(&mut self, id: SetId) {
        let (holders, pages) = &mut self.by_id[id as usize];
        *pages -= 1;
        if *pages == 0 {
            self.names.remove(holders);
            self.free.push(id);
        }
    }

    /// Moves one page from `set` to the set without `slot`. Returns whether it still has a holder worth knowing: not if
    /// nobody is left, nor if there is no room for the new set (then the page is forgotten, which is safe).
    pub(super) fn replace_without(&mut self, set: &mut SetId, slot: usize) -> bool {
        let rest = self.get(*set).without(Holders::NONE.with(slot));
        self.release(*set);
        match Some(rest).filter(|r| !r.is_empty()).and_then(|r| self.intern(r)) {
            Some(new) => {
                *set = new;
                true
            }
            None => false,
        }
    }
}
