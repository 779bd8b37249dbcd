//! What the trainer's thread asks of the program's, and the replies.

use std::time::Duration;

use elasticdl_data::{Predictions, Purpose};
use elasticdl_tables::{BatchRows, Ids};

use super::bridge::Comparison;
use super::lent::{Lent, LentChunk, LentMut};
#[cfg(doc)]
use super::model::Shape;
use super::numbers::Record;

/// What the trainer asks of the program.
#[derive(Debug)]
pub(super) enum Call {
    /// To add the ids of these records, which are evaluated or predicted next.
    AppliedIds { purpose: Purpose, records: Vec<Record>, ids: Ids },
    /// The metrics of these records, with the rows of their ids.
    Evaluate { records: Vec<Record>, rows: BatchRows },
    /// To add the gradient of these records, in micro-batches, to `gradient`, which already has
    /// that of `before` records; if there are none, its elements have any values. Its parts are
    /// summed as they are complete, if it `is_overlapped`. `loads`: the parameters are new.
    Gradient {
        records: Vec<Record>,
        before: u64,
        gradient: LentMut,
        rows: BatchRows,
        is_overlapped: bool,
        comparison: Comparison,
        loads: bool,
    },
    /// To add the ids of these records, in micro-batches. The gradients of all records whose ids
    /// were requested are requested next, unless the group changes. `starts_over`: it has.
    Ids { records: Vec<Record>, ids: Ids, starts_over: bool },
    /// The parameters are those of the step, in a job whose optimizer's state is divided. `loads`:
    /// parameters and state are new.
    Gathered { loads: bool },
    /// The initial parameters.
    Initialize { seed: u64, parameters: LentMut },
    /// Predictions for these records, with the rows of their ids.
    Predict { records: Vec<Record>, rows: BatchRows },
    /// The update by the gradient, a sum over this many records.
    Update(Change),
}

/// What an update changes. `loads`: parameters and state are new.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) step: u64,
    pub(super) records: u64,
    pub(super) sum: Lent,
    /// Of [`Shape::clipped_from`].
    pub(super) norm: Option<f64>,
    pub(super) parameters: LentMut,
    pub(super) state: LentMut,
    /// Of a state that is divided, those of this worker, with their sums in the place of `sum`.
    pub(super) chunks: Vec<LentChunk>,
    pub(super) loads: bool,
}

impl Change {
    /// The change by the sum of a step: its number, and its number of records.
    pub(super) fn new(
        (step, records): (u64, u64),
        sum: Lent,
        parameters: LentMut,
        state: LentMut,
    ) -> Self {
        let (norm, chunks, loads) = (None, Vec::new(), false);
        Self { step, records, sum, norm, parameters, state, chunks, loads }
    }
}

/// What the program replies.
#[derive(Debug)]
pub(super) enum Reply {
    /// The gradient from this element on is complete. The call continues.
    CompleteFrom(usize),
    /// The call is done.
    Done,
    /// The gradient of all records is there.
    Gradient(Sums),
    /// The ids of all records are there.
    Ids(Ids),
    /// The metrics, each a mean over the records; and the rows of the call.
    Metrics(Vec<(String, f64)>, BatchRows),
    /// One row for each record.
    Predictions(Predictions),
}

/// What a program reports with a gradient, in sums over its records.
#[derive(Debug, Default)]
pub(super) struct Sums {
    pub(super) loss: f64,
    /// Time spent on micro-batches that were discarded.
    pub(super) discarded: Duration,
    /// By name, which may occur several times.
    pub(super) metrics: Vec<(String, f64)>,
    /// By name, which may occur several times.
    pub(super) tally: Vec<(String, f64)>,
    /// The rows of the call, with their gradients.
    pub(super) rows: BatchRows,
}
