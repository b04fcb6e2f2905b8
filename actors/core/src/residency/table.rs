//! The table from a page's name to the set of its holders.
//!
//! At ten million pages it is far larger than any cache, and a lookup costs what its waits for memory cost. So it is one
//! array of cache lines with four 16-byte entries each, and an entry stands in the line that its name says or, if that is
//! full, in those behind (linear probing): one wait, where a table with separate control bytes has two. At most 3/4 of the
//! places are taken, so that few entries are away from home: 21 to 43 bytes a page.

use super::sets::SetId;
use pinion_schemas::PageHash;

/// First 12 bytes of a page's name: at 2^24 pages, two meet with a chance of 2^-49, and then an estimate is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key(u64, u32);

impl Key {
    pub(super) fn of(page: &PageHash) -> Self {
        let wide = u128::from_le_bytes(std::array::from_fn(|i| page.0[i]));
        Self(wide as u64, (wide >> 64) as u32)
    }
}

/// What stands in a place of the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    low: u64,
    high: u32,
    set: SetId,
}

/// The set of an entry that is none.
const NOBODY: SetId = SetId::MAX;
const VACANT: Entry = Entry {
    low: 0,
    high: 0,
    set: NOBODY,
};
/// Entries of a cache line.
const LINE: usize = 4;
/// Lines of the smallest table.
const LINES_MIN: usize = 16;

#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
struct Line([Entry; LINE]);

impl Entry {
    fn is(&self, key: Key) -> bool {
        (self.low, self.high) == (key.0, key.1) && self.set != NOBODY
    }
}

/// The table. The same events build the same one: names are SHA-256, so they need no mixing and no seed.
#[derive(Debug, Clone, Default)]
pub(super) struct Table {
    /// A power of two of them, or none yet.
    lines: Vec<Line>,
    len: usize,
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn places(&self) -> usize {
        self.lines.len() * LINE
    }

    fn entry(&self, place: usize) -> Option<&Entry> {
        self.lines.get(place / LINE).map(|line| &line.0[place % LINE])
    }

    fn entry_mut(&mut self, place: usize) -> Option<&mut Entry> {
        self.lines.get_mut(place / LINE).map(|line| &mut line.0[place % LINE])
    }

    fn put(&mut self, place: usize, entry: Entry) {
        if let Some(old) = self.entry_mut(place) {
            *old = entry;
        }
    }

    /// The first place of the line where `key` is to be.
    fn home(&self, key: Key) -> usize {
        (key.0 as usize & self.lines.len().saturating_sub(1)).wrapping_mul(LINE)
    }

    fn behind(&self, place: usize) -> usize {
        (place + 1) & self.places().saturating_sub(1)
    }

    /// Brings the lines of all these keys near, so that looking them up afterwards does not wait. The loop is as short as can
    /// be, so that a core gets many of its loads under way at once; nothing is done with what they bring.
    pub(super) fn fetch(&self, keys: impl Iterator<Item = Key>) {
        let mask = self.lines.len().saturating_sub(1);
        let first = |key: Key| self.lines.get(key.0 as usize & mask).map_or(0, |line| line.0[0].low);
        std::hint::black_box(keys.fold(0, |all, key| all ^ first(key)));
    }

    pub(super) fn get(&self, key: Key) -> Option<SetId> {
        self.place(key).ok().and_then(|place| self.entry(place)).map(|e| e.set)
    }

    /// Where `key` is, or else where it would go if the table did not have to grow.
    fn place(&self, key: Key) -> Result<usize, usize> {
        let mut place = self.home(key);
        while let Some(entry) = self.entry(place) {
            if entry.is(key) {
                return Ok(place);
            }
            if entry.set == NOBODY {
                break;
            }
            place = self.behind(place);
        }
        Err(place)
    }

    /// Sets the set of `key`.
    pub(super) fn insert(&mut self, key: Key, set: SetId) {
        let entry = Entry {
            low: key.0,
            high: key.1,
            set,
        };
        match self.place(key) {
            Ok(place) => return self.put(place, entry),
            Err(place) if (self.len + 1) * 4 <= self.places() * 3 => self.put(place, entry),
            Err(_) => {
                let lines = vec![Line([VACANT; LINE]); (self.lines.len() * 2).max(LINES_MIN)];
                let old = std::mem::replace(&mut self.lines, lines);
                let entries = old.iter().flat_map(|line| line.0);
                for entry in entries.filter(|e| e.set != NOBODY).chain([entry]) {
                    let (Ok(place) | Err(place)) = self.place(Key(entry.low, entry.high));
                    self.put(place, entry);
                }
            }
        }
        self.len += 1;
    }

    /// Lets `change` change the set of `key`, if it is there, or say with `false` that it shall go.
    pub(super) fn update(&mut self, key: Key, change: impl FnOnce(&mut SetId) -> bool) {
        let Ok(place) = self.place(key) else { return };
        if self.entry_mut(place).is_some_and(|entry| !change(&mut entry.set)) {
            self.vacate(place);
        }
    }

    /// The same for all; `change` may see an entry twice, the second time as it left it.
    pub(super) fn retain(&mut self, mut change: impl FnMut(&mut SetId) -> bool) {
        let mut place = 0;
        while let Some(entry) = self.entry_mut(place) {
            if entry.set == NOBODY || change(&mut entry.set) {
                place += 1;
            } else {
                self.vacate(place);
            }
        }
    }

    /// Empties a place, and moves those behind it forward that would not be found over the gap.
    fn vacate(&mut self, mut gap: usize) {
        let mask = self.places().saturating_sub(1);
        let mut at = self.behind(gap);
        while let Some(entry) = self.entry(at).copied().filter(|e| e.set != NOBODY) {
            let home = self.home(Key(entry.low, entry.high));
            // Its way from home to here leads over the gap.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.put(gap, entry);
                gap = at;
            }
            at = self.behind(at);
        }
        self.put(gap, VACANT);
        self.len -= 1;
    }
}
