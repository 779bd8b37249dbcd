//! What a rank has computed of a step.

use std::time::Duration;

use elasticdl_proto::RecordRange;

/// What this rank has computed of a task.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Sum of the loss over the records.
    pub(super) loss_sum: f64,
    /// Time in the model's code.
    pub(super) busy: Duration,
    /// Time spent waiting for the records to be read.
    pub(super) input: Duration,
    /// Pairs of one of the records and a row of a table that it touches.
    pub(super) row_touches: u64,
    /// Trailing records that could not be read yet; of several parts of one range, the last one
    /// comes first.
    pub(super) unread: Vec<RecordRange>,
}
