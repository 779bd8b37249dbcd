//! Positions of the records that wait to be computed.

use std::mem;

use elasticdl_proto::RecordRange;

/// Ranges of positions, in the order of the records.
#[derive(Debug, Default)]
pub(super) struct Parts(Vec<RecordRange>);

impl Parts {
    /// Adds the first `records` positions of `range`.
    pub(super) fn push(&mut self, range: RecordRange, records: u64) {
        self.0.push(RecordRange { end: range.start + records, ..range });
    }

    /// Removes and returns the first `records` positions.
    pub(super) fn split_off(&mut self, mut records: u64) -> Vec<RecordRange> {
        let mut first = Vec::new();
        for range in mem::take(&mut self.0) {
            let middle = range.start + records.min(range.len());
            records -= middle - range.start;
            let parts =
                [RecordRange { end: middle, ..range }, RecordRange { start: middle, ..range }];
            for (part, to) in parts.into_iter().zip([&mut first, &mut self.0]) {
                to.extend((!part.is_empty()).then_some(part));
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_split_where_batches_are() {
        let range = |start, end| RecordRange { epoch: 0, start, end };
        let mut parts = Parts::default();
        parts.push(range(0, 5), 5);
        parts.push(range(20, 30), 4);
        assert_eq!(parts.split_off(3), [range(0, 3)]);
        assert_eq!(parts.split_off(4), [range(3, 5), range(20, 22)]);
        assert_eq!(parts.split_off(9), [range(22, 24)]);
        assert_eq!(parts.split_off(1), []);
    }
}
