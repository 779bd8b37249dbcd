//! Behaviour of a session while its worker's storage does not answer: it offers the group the
//! records that are already read, and stays in the ring even if there are none.

use elasticdl_proto::RecordRange;

use super::Session;

impl Session {
    /// Leased records of the epoch, in the order in which they will be computed.
    pub fn held(&self) -> impl Iterator<Item = RecordRange> + '_ {
        let epoch = self.state.as_ref().map_or(0, |s| s.ledger.epoch());
        self.leases.all().filter(move |range| range.epoch == epoch)
    }

    /// Limits the offer to the first `readable` of the [held](Self::held) records; `None`: all can
    /// be read.
    pub fn limit_held(&mut self, readable: Option<u64>) {
        self.readable = readable;
    }

    /// The trailing records of the last [`Task::Compute`](super::Task::Compute) that could not be
    /// read yet. The pending gradient does not contain them; they are computed later.
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

/// The held records that a rank offers, by epoch, if only `readable` records of `epoch` can be read
/// now.
pub(super) fn limited(held: Vec<(u32, u64)>, epoch: u32, readable: Option<u64>) -> Vec<(u32, u64)> {
    let Some(readable) = readable else { return held };
    let now = held.into_iter().filter(|&(of, _)| of == epoch);
    now.map(|(of, records)| (of, records.min(readable)))
        .filter(|&(_, records)| records > 0)
        .collect()
}
