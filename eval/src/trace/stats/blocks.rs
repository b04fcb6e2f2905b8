//! Which blocks a trace has named so far, and how often: a cache that forgets nothing.
//!
//! Kept as ranges of ids that were always named together, so that memory follows the number of places where prompts
//! begin, end or part, not the number of blocks.

use super::super::BlockRun;
use std::collections::BTreeMap;

/// What is known of a range of blocks.
#[derive(Clone, Copy, Debug)]
struct Range {
    end: u64,
    /// Prompts that named it.
    references: u64,
}

/// All blocks named so far. A block is its namespace and its id.
#[derive(Debug, Default)]
pub struct Blocks {
    ranges: BTreeMap<(u64, u64), Range>,
}

/// Blocks by how often they were named.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct References {
    /// Different blocks.
    pub unique: u64,
    /// Of these, those of two prompts or more.
    pub shared: u64,
    /// Of these, those of more than ten prompts.
    pub over_ten: u64,
    /// Mean references of the ten blocks that have most.
    pub top_ten: f64,
}

impl Blocks {
    /// Cuts the range that holds `at`, so that one begins there.
    fn cut(&mut self, namespace: u64, at: u64) {
        let before = self.ranges.range_mut((namespace, 0)..(namespace, at)).next_back();
        if let Some((_, range)) = before
            && range.end > at
        {
            let rest = *range;
            range.end = at;
            self.ranges.insert((namespace, at), rest);
        }
    }

    /// Counts a reference to each block of `run`; returns how many of its first blocks had been named before.
    fn run(&mut self, namespace: u64, run: BlockRun) -> u64 {
        let end = run.start.saturating_add(u64::from(run.len));
        self.cut(namespace, run.start);
        self.cut(namespace, end);
        let (mut next, mut known, mut gaps) = (run.start, None, Vec::new());
        for (&(_, start), range) in self.ranges.range_mut((namespace, run.start)..(namespace, end)) {
            if start > next {
                known.get_or_insert(next - run.start);
                gaps.push((next, start));
            }
            range.references += 1;
            next = range.end;
        }
        if next < end {
            known.get_or_insert(next - run.start);
            gaps.push((next, end));
        }
        for (start, end) in gaps {
            self.ranges.insert((namespace, start), Range { end, references: 1 });
        }
        known.unwrap_or_else(|| u64::from(run.len))
    }

    /// Counts the blocks of one prompt; returns how many of its first blocks had been named before, all others then
    /// being misses.
    pub fn prompt(&mut self, namespace: u64, runs: &[BlockRun]) -> u64 {
        let (mut hit, mut whole) = (0, true);
        for run in runs {
            let known = self.run(namespace, *run);
            if whole {
                hit += known;
                whole = known == u64::from(run.len);
            }
        }
        hit
    }

    /// How often blocks were named.
    pub fn references(&self) -> References {
        let mut out = References::default();
        let mut by_count = BTreeMap::<u64, u64>::new();
        for (&(_, start), range) in &self.ranges {
            let len = range.end - start;
            out.unique += len;
            out.shared += if range.references >= 2 { len } else { 0 };
            out.over_ten += if range.references > 10 { len } else { 0 };
            *by_count.entry(range.references).or_default() += len;
        }
        let ten = out.unique.min(10);
        let (mut left, mut sum) = (ten, 0);
        for (references, blocks) in by_count.into_iter().rev() {
            let taken = left.min(blocks);
            sum += taken * references;
            left -= taken;
        }
        out.top_ten = sum as f64 / ten.max(1) as f64;
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn runs() -> impl Strategy<Value = Vec<(u64, u32)>> {
        prop::collection::vec((0u64..40, 1u32..12), 1..5)
    }

    proptest! {
        /// Against a map with one entry a block.
        #[test]
        fn ranges_count_as_single_blocks_do(prompts in prop::collection::vec((0u64..2, runs()), 1..20)) {
            let mut blocks = Blocks::default();
            let mut plain = HashMap::<(u64, u64), u64>::new();
            for (namespace, runs) in prompts {
                let (mut hit, mut whole) = (0, true);
                for (start, len) in &runs {
                    for id in *start..start + u64::from(*len) {
                        let count = plain.entry((namespace, id)).or_default();
                        whole &= *count > 0;
                        hit += u64::from(whole);
                        *count += 1;
                    }
                }
                let runs: Vec<BlockRun> = runs.iter().map(|&(start, len)| BlockRun { start, len }).collect();
                prop_assert_eq!(blocks.prompt(namespace, &runs), hit);
            }
            let mut counts: Vec<u64> = plain.values().copied().collect();
            counts.sort_unstable_by(|a, b| b.cmp(a));
            let top = &counts[..counts.len().min(10)];
            let found = blocks.references();
            prop_assert_eq!(found.unique, counts.len() as u64);
            prop_assert_eq!(found.shared, counts.iter().filter(|n| **n >= 2).count() as u64);
            prop_assert_eq!(found.over_ten, counts.iter().filter(|n| **n > 10).count() as u64);
            prop_assert!((found.top_ten - top.iter().sum::<u64>() as f64 / top.len() as f64).abs() < 1e-9);
        }
    }
}
