//! What a program receives.

use super::bridge::Comparison;
use super::numbers::Record;
#[cfg(doc)]
use super::{Driver, Shape};

/// What the program has to do, or knows, next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// [Announce](Driver::announce_applied) the ids of these records, which are evaluated or, if it
    /// `predicts`, predicted next.
    AppliedIds { predicts: bool, records: Vec<Record> },
    /// The worker has ended.
    Ended(Ended),
    /// The epoch that the wait was for is complete, and nothing of a later one has happened here.
    EpochComplete,
    /// Compute the metrics of these records, then [`Driver::evaluated`]. The parameters are in the
    /// program's memory.
    Evaluate { records: Vec<Record> },
    /// The parameters are those of the step, whose last [update](Self::Update) has changed some of
    /// them here and others elsewhere, in a job whose optimizer's state is
    /// [divided](Shape::division). Finish the step, then [`Driver::done`]. `loads`: parameters and
    /// state are new.
    Gathered { loads: bool },
    /// Add gradients to [`Driver::gradient`], each followed by [`Driver::deliver`]. `loads`: the
    /// parameters are new.
    Gradient { loads: bool },
    /// [Announce](Driver::announce) the ids of the micro-batches of a request, then
    /// [`Driver::look_up`]: for a program with tables, before it computes their gradients.
    /// `starts_over`: what was announced and not computed has to be announced again, first and in
    /// the same order, as the group has changed.
    Ids { starts_over: bool },
    /// Write the initial [parameters](Driver::parameters), then [`Driver::done`].
    Initialize { seed: u64 },
    /// Make predictions for these records, then [`Driver::predicted`]; as for `Evaluate`.
    Predict { records: Vec<Record> },
    /// Change [`Driver::parameters`] and [`Driver::state`] by [`Driver::sum`], a sum over `records`
    /// records, then [`Driver::done`]. Of a [divided](Shape::division) state, change the parameters
    /// and the state of [`Driver::chunks`], by their sums. `loads`: parameters and state are new.
    Update { step: u64, records: u64, loads: bool },
}

/// A part of the parameters whose optimizer's state this worker has, in a job in which that is
/// [divided](Shape::division). The memory belongs to the program while they are updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The first of its parameters.
    pub start: usize,
    /// Number of its parameters.
    pub len: usize,
    /// Address of its state, `[slots, parameters with state]`, initially zero.
    pub slots: usize,
    /// Address of the sum to update by, `[parameters]`. It may have any values afterwards.
    pub sum: usize,
}

/// How a worker has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The job's work is done.
    Complete,
    /// This worker or the job has failed.
    Failed(String),
    /// The job continues without this worker, whose process ends with this exit code.
    Left(u8),
}

/// Answer to a request for a micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextBatch {
    /// The records of a micro-batch.
    Batch(Vec<Record>),
    /// There are no more.
    Ended,
    /// None now, but some later: draw again after a micro-batch was delivered.
    Later,
    /// None before the next event: [`Driver::wait`].
    Wait,
}

/// How a micro-batch counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Number of its records.
    pub records: usize,
    /// Number of records whose gradient [`Driver::gradient`] has; if there are none, its elements
    /// have any values, and the gradient of this micro-batch takes their place.
    pub before: u64,
    /// Whether it is the last one of this rank in the step.
    pub is_last: bool,
    /// Whether the parts that [`Driver::complete_from`] declares complete are summed meanwhile.
    pub is_overlapped: bool,
    /// How its gradient is compared.
    pub comparison: Comparison,
}
