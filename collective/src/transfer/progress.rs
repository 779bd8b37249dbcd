//! Counts the bytes of one operation, and shows them while the operation waits.

use crate::net::frame::OpTag;
use crate::net::progress::{FAR_MAX, Progress, WaitPoint};

/// Progress of one operation, and its part that is shown. The clock is read once per wait, and
/// nothing is shown between two waits.
pub(crate) struct TransferProgress<'a> {
    progress: &'a Progress,
    pub(super) received: u64,
    pub(super) sent: u64,
    /// Whether a wait is recorded and no byte has moved since.
    waits: bool,
    /// Whether the byte counts are shown as well.
    is_shown: bool,
}

impl<'a> TransferProgress<'a> {
    /// Progress of an operation whose bytes come from the previous member and go to the next one.
    pub(super) fn one_way(progress: &'a Progress) -> Self {
        Self { progress, received: 0, sent: 0, waits: false, is_shown: true }
    }

    /// Progress of an operation that uses its links in both directions. Bytes received from the
    /// next member are subtracted from `sent`, and bytes sent to the previous member are subtracted
    /// from `received`, from a sufficiently large start value. So the two ends of a link still
    /// differ by the bytes in flight, in either direction.
    pub(crate) fn both_ways(progress: &'a Progress) -> Self {
        Self {
            progress,
            received: BOTH_WAYS_START,
            sent: BOTH_WAYS_START,
            waits: false,
            is_shown: true,
        }
    }

    /// Shows waits without the byte counts.
    pub(crate) fn hide_bytes(&mut self) {
        self.is_shown = false;
    }

    pub(super) fn on_received(&mut self, bytes: usize) {
        self.received += bytes as u64;
        self.end_wait();
    }

    pub(super) fn on_received_back(&mut self, bytes: usize) {
        self.sent -= bytes as u64;
        self.end_wait();
    }

    pub(super) fn on_sent(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        self.end_wait();
    }

    pub(super) fn on_sent_back(&mut self, bytes: usize) {
        self.received -= bytes as u64;
        self.end_wait();
    }

    pub(crate) fn wait(&mut self, op_tag: &OpTag, waits_for_next: bool) {
        self.wait_far(op_tag, waits_for_next, Default::default());
    }

    /// `far`: members that are no neighbours in the ring, and from which something is awaited.
    pub(super) fn wait_far(
        &mut self,
        op_tag: &OpTag,
        waits_for_next: bool,
        far: [Option<u64>; FAR_MAX],
    ) {
        self.wait_with(op_tag, [self.received, self.sent], waits_for_next, far);
    }

    /// `others`: bytes received and sent over other channels of the operation.
    pub(super) fn wait_alongside(&mut self, op_tag: &OpTag, others: [u64; 2]) {
        let bytes = [self.received + others[0], self.sent + others[1]];
        self.wait_with(op_tag, bytes, false, Default::default());
    }

    fn wait_with(
        &mut self,
        op_tag: &OpTag,
        bytes: [u64; 2],
        waits_for_next: bool,
        far: [Option<u64>; FAR_MAX],
    ) {
        if !self.waits {
            let (generation, operation) = (op_tag.generation, op_tag.sequence + 1);
            let [received, sent] = if self.is_shown { bytes } else { [0; 2] };
            self.progress.begin_wait(WaitPoint {
                generation,
                operation,
                received,
                sent,
                waits_for_next,
                far,
            });
            self.waits = true;
        }
    }

    pub(super) fn end_wait(&mut self) {
        if self.waits {
            self.progress.end_wait();
            self.waits = false;
        }
    }
}

impl Drop for TransferProgress<'_> {
    fn drop(&mut self) {
        self.end_wait();
    }
}

const BOTH_WAYS_START: u64 = 1 << 62;
