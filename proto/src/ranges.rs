//! Ranges of records, and sets of ranges.
//!
//! **Invariant:** a [`RangeSet`] holds sorted, disjoint, non-empty, non-touching ranges, so equal
//! sets have equal representations.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Records `start..end` of one epoch, numbered over all files of the data set in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RecordRange {
    /// Epoch, from 0.
    pub epoch: u32,
    /// First record.
    pub start: u64,
    /// One past the last record.
    pub end: u64,
}

impl RecordRange {
    /// Number of records; 0 if `end` is less than `start`.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether the range contains no record.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The records without their epoch.
    #[must_use]
    pub fn records(&self) -> Range<u64> {
        self.start..self.end
    }
}

impl fmt::Display for RecordRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {} records {}..{}", self.epoch, self.start, self.end)
    }
}

/// A set of records of one epoch. To insert, remove or look up a range takes `O(log n)` in the
/// number of the set's ranges, plus the number of ranges that overlap it. An epoch in random order
/// consists of very many ranges half-way through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    /// Ends of the ranges by start.
    ranges: BTreeMap<u64, u64>,
    /// Number of records in all ranges; cached because ledgers need it at each commit.
    records: u64,
}

impl RangeSet {
    /// Inserts `range`. Returns the number of its records that were already in the set.
    pub fn insert(&mut self, range: Range<u64>) -> u64 {
        if range.start >= range.end {
            return 0;
        }
        let mut merged = range.clone();
        let mut there = 0;
        if let Some(before) = self.before(range.start).filter(|r| r.end >= range.start) {
            there += overlap(&before, &range);
            merged = before.start..before.end.max(range.end);
        }
        while let Some((&start, &end)) = self.ranges.range(range.start..=range.end).next() {
            there += overlap(&(start..end), &range);
            merged.end = merged.end.max(end);
            self.ranges.remove(&start);
        }
        self.ranges.insert(merged.start, merged.end);
        self.records += range.end - range.start - there;
        there
    }

    /// Removes `range`. Returns the number of its records that were in the set.
    pub fn remove(&mut self, range: Range<u64>) -> u64 {
        if range.start >= range.end {
            return 0;
        }
        let mut removed = 0;
        if let Some(before) = self.before(range.start).filter(|r| r.end > range.start) {
            removed += overlap(&before, &range);
            self.ranges.insert(before.start, range.start);
            if before.end > range.end {
                self.ranges.insert(range.end, before.end);
            }
        }
        while let Some((&start, &end)) = self.ranges.range(range.clone()).next() {
            removed += overlap(&(start..end), &range);
            self.ranges.remove(&start);
            if end > range.end {
                self.ranges.insert(range.end, end);
            }
        }
        self.records -= removed;
        removed
    }

    /// The parts of `range` that are not in the set, in order.
    #[must_use]
    pub fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for r in self.meeting(&range) {
            if r.start > at {
                gaps.push(at..r.start);
            }
            at = at.max(r.end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// Number of records of `range` that are in the set.
    #[must_use]
    pub fn count_in(&self, range: Range<u64>) -> u64 {
        self.meeting(&range).map(|r| overlap(&r, &range)).sum()
    }

    /// Number of records in the set.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.records
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The ranges of the set, sorted and not adjacent.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }

    /// The last range of the set that starts before `record`.
    fn before(&self, record: u64) -> Option<Range<u64>> {
        self.ranges.range(..record).next_back().map(|(&start, &end)| start..end)
    }

    /// The ranges of the set that overlap `range`, in order.
    fn meeting(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let before = self.before(range.start).filter(|r| r.end > range.start);
        let inside = range.start..range.end.max(range.start);
        before.into_iter().chain(self.ranges.range(inside).map(|(&start, &end)| start..end))
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> u64 {
    a.end.min(b.end).saturating_sub(a.start.max(b.start))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares every sequence of three insertions and removals over 7 records with a bit set.
    #[test]
    fn a_range_set_agrees_with_a_bit_set() {
        let ranges: Vec<Range<u64>> = (0..7).flat_map(|s| (s..=7).map(move |e| s..e)).collect();
        let ops: Vec<(bool, Range<u64>)> =
            ranges.iter().flat_map(|r| [(true, r.clone()), (false, r.clone())]).collect();
        for a in &ops {
            for b in &ops {
                for c in &ops {
                    let (mut set, mut bits) = (RangeSet::default(), [false; 7]);
                    for (insert, r) in [a, b, c] {
                        let there = r.clone().filter(|&i| bits[i as usize]).count() as u64;
                        let said =
                            if *insert { set.insert(r.clone()) } else { set.remove(r.clone()) };
                        assert_eq!(said, there, "{a:?} {b:?} {c:?}");
                        r.clone().for_each(|i| bits[i as usize] = *insert);
                    }
                    let members: Vec<u64> = set.iter().flatten().collect();
                    let expected: Vec<u64> = (0..7).filter(|&i| bits[i as usize]).collect();
                    assert_eq!(members, expected, "{a:?} {b:?} {c:?}");
                    let missing: Vec<u64> = set.gaps(1..6).into_iter().flatten().collect();
                    let expected: Vec<u64> = (1..6).filter(|&i| !bits[i as usize]).collect();
                    assert_eq!(missing, expected, "{a:?} {b:?} {c:?}");
                    assert_eq!(set.count_in(1..6), 5 - missing.len() as u64);
                    assert_eq!(set.len(), members.len() as u64);
                    let ranges = Vec::from_iter(set.iter());
                    assert!(ranges.windows(2).all(|w| w[0].end < w[1].start));
                    assert!(ranges.iter().all(|r| r.start < r.end));
                }
            }
        }
    }
}
