//! What the trainer and a model whose code is in another language tell each other.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use elasticdl_tables::ChunkUpdate;
use serde::{Deserialize, Serialize};

#[cfg(feature = "gpu")]
use crate::device::DeviceMemory;
use crate::metrics::UserError;
use crate::model::Model;
use crate::state_buffer::StateMemory;

/// Whether a gradient is compared bit for bit with that of another worker, so that it must depend
/// on its records and on the state of the group alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Comparison {
    /// It is compared, and does not count in the step.
    Again,
    /// It is computed once.
    #[default]
    None,
    /// It is compared, and counts.
    Own,
}

/// Hooks of a model whose code is in another language, beyond [`Model`].
pub trait Bridge {
    /// The memory in which the program wants its parameters and optimizer state to be, if it has
    /// any on the host.
    fn take_memory(&mut self) -> Option<StateMemory>;

    /// As [`take_memory`](Self::take_memory), on the GPU.
    #[cfg(feature = "gpu")]
    fn take_device_memory(&mut self) -> Option<DeviceMemory>;

    /// The program's source files.
    fn sources(&self) -> &[SourceFile];

    /// The optimizer and its settings as the program has made it; empty if it does not say.
    fn settings(&self) -> &str;

    /// Number of records that the initial state has absorbed: the first ones of the order.
    fn absorbed(&self) -> u64;

    /// The next evaluation tries it, with the initial parameters, before training.
    fn is_checked(&mut self);

    /// This worker will compute these records next, as epoch and number, if nothing happens to its
    /// group.
    fn upcoming(&mut self, records: &mut dyn Iterator<Item = (u32, u64)>);

    /// A step's gradient begins with the next micro-batch, which sets every element, whatever is
    /// there.
    fn begin_gradient(&mut self);

    /// How the gradients that follow are compared. Those that are computed
    /// [again](Comparison::Again) leave nothing behind: neither records, nor times, nor tallies.
    fn compare(&mut self, comparison: Comparison);

    /// Time in [`Model::gradients`], since the last call, that was spent on what does not count: it
    /// says nothing about the time per record.
    fn take_discarded(&mut self) -> Duration;

    /// What the program has added to the step's tally in [`Model::gradients`], since the last call.
    fn take_tally(&mut self) -> BTreeMap<String, f64>;

    /// How the state of the program's optimizer is divided over the workers; `None` if each worker
    /// has all of it.
    fn division(&self) -> Option<Division>;

    /// What lies where in the state; empty if the program does not say.
    fn state_parts(&self) -> &[StatePart];

    /// With a divided state: applies the gradient of a step, its number and its number of records,
    /// to the chunks that this worker holds, and to `whole`, the state that all workers have.
    ///
    /// # Errors
    /// The program has failed.
    fn update_chunks(
        &mut self,
        step: (u64, u64),
        parameters: &mut [f32],
        whole: &mut [f32],
        chunks: Vec<ChunkUpdate<'_>>,
    ) -> Result<(), UserError>;

    /// With a divided state, after an update: this worker has the parameters of its step. `loads`:
    /// and another state than the program.
    ///
    /// # Errors
    /// The program has failed.
    fn gathered(&mut self, loads: bool) -> Result<(), UserError>;

    /// The worker gives its state up, and with it that of the program.
    fn forget(&mut self);

    /// Whether the program has failed by what no worker accepts.
    fn is_refused(&self) -> bool;

    /// The group has made progress.
    fn observe(&mut self, event: Progress<'_>);
}

/// How the state of a program's optimizer is divided over the workers: `slots` floats of each
/// parameter from `first` on are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Division {
    /// Number of parameters without such state, which come first: no optimizer changes them.
    pub first: usize,
    /// Number of floats of state per parameter.
    pub slots: usize,
}

/// A part of the state of a program, by a name that does not depend on where it lies: jobs whose
/// states have the same parts go on from each other's checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatePart {
    /// What it is, in words.
    pub name: String,
    /// Its first float. Of a state that is divided, the divided floats of all parameters come
    /// first: `[slots, parameters]`.
    pub at: usize,
    /// Number of its floats.
    pub len: usize,
    /// If it may have another number of floats elsewhere, what those are that are missing there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill: Option<f32>,
}

/// A source file of an interpreted program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Its name within the program, the same on all workers.
    pub name: String,
    /// Where it lies.
    pub path: PathBuf,
}

/// Name in the tally of a step for the number that its gradient is a mean of, in the place of its
/// records.
pub(crate) const WEIGHT: &str = "weight";

/// Progress of a worker's group.
#[derive(Clone, Debug, PartialEq)]
pub enum Progress<'a> {
    /// A step is applied next: the sums over all ranks of what their programs have added.
    Applied { tally: BTreeMap<String, f64> },
    /// A step is committed: its number from 1, the epoch of the next, and the number of records
    /// that the state contains.
    Committed { step: u64, epoch: u32, records: u64 },
    /// The work of the group is over, not suspended; the error that ended it.
    Finished { error: Option<&'a str> },
    /// The group of `generation` holds one state.
    Grouped { generation: u64, rank: usize, world_size: usize },
    /// The group holds this state, or this worker has fetched it: as for `Committed`.
    Resumed { step: u64, epoch: u32, records: u64 },
}

/// Tells the program behind `model` the progress of its group, if there is a program.
pub(crate) fn observe<M: Model>(model: &mut M, event: Progress<'_>) {
    if let Some(bridge) = model.as_bridge() {
        bridge.observe(event);
    }
}
