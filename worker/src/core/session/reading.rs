//! What a session does while its worker's storage does not answer: it offers the group the records
//! that have been read, and stays in the ring with none where there are none.

use elasticdl_proto::RecordRange;

use super::Session;

impl Session {
    /// Leased records of the epoch, in the order in which they will be computed.
    pub fn held(&self) -> impl Iterator<Item = RecordRange> + '_ {
        let epoch = self.state.as_ref().map_or(0, |s| s.ledger.epoch());
        self.leases.all().filter(move |range| range.epoch == epoch)
    }

    /// Only the first `readable` records of those that are [held](Self::held) can be had now;
    /// `None`: all can.
    pub fn limit_held(&mut self, readable: Option<u64>) {
        self.readable = readable;
    }

    /// These records of the last [`Task::Compute`](super::Task::Compute), its last ones, could not
    /// be read yet: the pending gradient does not contain them, and they are computed later.
    pub fn not_read(&mut self, unread: &[RecordRange]) {
        let ends_with = |range: &RecordRange, rest: &RecordRange| {
            range.epoch == rest.epoch && range.end == rest.end && range.start <= rest.start
        };
        for rest in unread {
            let computed =
                self.pending.ranges.iter_mut().rev().find(|range| ends_with(range, rest));
            computed.expect("what is computed is pending").end = rest.start;
        }
        self.pending.ranges.retain(|range| !range.is_empty());
        self.leases.put_back(unread.iter().copied());
    }
}

/// What a rank offers of the records that it holds, by epoch, where it can have so many of `epoch`
/// now.
pub(super) fn limited(held: Vec<(u32, u64)>, epoch: u32, readable: Option<u64>) -> Vec<(u32, u64)> {
    let Some(readable) = readable else { return held };
    let now = held.into_iter().filter(|&(of, _)| of == epoch);
    now.map(|(of, records)| (of, records.min(readable)))
        .filter(|&(_, records)| records > 0)
        .collect()
}
