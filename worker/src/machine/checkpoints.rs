//! The storage of checkpoints.

use std::fmt::Debug;
use std::sync::Arc;

use elasticdl_tables::SavedChunk;

use crate::checkpoint::{
    CheckpointWriter, Completion, JobFingerprint, Locations, OwnShard, RestoreError, Restored,
    SavedPart, TakeShard, newest, read_chunks, read_rows, restore,
};
use crate::session::checkpoint::Written;
use crate::session::header::StateRecord;

/// Where a trainer writes checkpoints, and from where a group starts. What reads from storage
/// blocks; writes do not.
pub trait CheckpointStore: Debug {
    /// Whether the job writes checkpoints.
    fn is_written(&self) -> bool;

    /// A group of `world_size` has formed.
    fn prepare(&mut self, world_size: usize);

    /// Copies this rank's shard of the state, and writes it. `tensors`: parameters and optimizer
    /// state. `owned`: of what is divided over the group, the numbers of the shards that each rank
    /// owns, and this rank's.
    fn write(
        &mut self,
        shard: OwnShard,
        state: StateRecord,
        tensors: (&[f32], &[f32]),
        owned: Option<(Vec<Vec<u32>>, SavedPart)>,
    );

    /// Writes the manifest of the checkpoint that this rank takes part in.
    fn commit(&mut self, step: u64, parts: &[Written]);

    /// The next result of a write, if there is one.
    fn poll(&mut self) -> Option<Completion>;

    /// Loads the newest complete checkpoint into `parameters` and `slots`; `None`: there is none.
    /// `damaged` is called for each damaged one, with the reason.
    ///
    /// # Errors
    /// No worker can load a state, or the storage does not answer.
    fn restore(
        &mut self,
        parameters: &mut [f32],
        slots: &mut [f32],
        damaged: &mut dyn FnMut(&str, &str),
    ) -> Result<Option<Restored>, RestoreError>;

    /// The newest complete checkpoint of at most `step` steps, which is read no further: its name,
    /// and whether this run wrote it. `None`: there is none. `damaged` is called for each damaged
    /// one, with the reason.
    ///
    /// # Errors
    /// As for [`restore`](Self::restore).
    fn newest(
        &mut self,
        step: u64,
        damaged: &mut dyn FnMut(&str, &str),
    ) -> Result<Option<(String, bool)>, RestoreError>;

    /// Reads the rows of these shards from a checkpoint that a rank of the group has restored or
    /// found, and gives each to `take`, with its number. `checkpoint`: its name, and whether this
    /// run wrote it.
    ///
    /// # Errors
    /// As for [`restore`](Self::restore); `take` refuses a shard.
    fn read_rows(
        &mut self,
        checkpoint: (&str, bool),
        shards: &[u32],
        take: &mut TakeShard<'_>,
    ) -> Result<(), RestoreError>;

    /// The rows of this rank are others from now on than steps have made of those that it has
    /// written: its next part of a checkpoint has all of them, not what has changed.
    fn forget_rows(&mut self) {}

    /// Reads these chunks of the optimizer's state from a checkpoint that a rank of the group has
    /// restored. `checkpoint`: as for [`read_rows`](Self::read_rows).
    ///
    /// # Errors
    /// As for [`restore`](Self::restore).
    fn read_chunks(
        &mut self,
        checkpoint: (&str, bool),
        chunks: &[u32],
    ) -> Result<Vec<SavedChunk>, RestoreError>;

    /// A rank of the group can't read its rows from this checkpoint, for this reason: it counts as
    /// damaged.
    fn pass_over(&mut self, checkpoint: (&str, bool), reason: &str);
}

/// Checkpoints in the storage of a job.
#[derive(Debug)]
pub(crate) struct StoredCheckpoints {
    pub(crate) locations: Locations,
    pub(crate) fingerprint: Arc<JobFingerprint>,
    /// `None` if the job writes none.
    pub(crate) writer: Option<CheckpointWriter>,
}

impl CheckpointStore for StoredCheckpoints {
    fn is_written(&self) -> bool {
        self.writer.is_some()
    }

    fn prepare(&mut self, world_size: usize) {
        if let Some(writer) = &mut self.writer {
            writer.prepare(world_size);
        }
    }

    fn write(
        &mut self,
        shard: OwnShard,
        state: StateRecord,
        tensors: (&[f32], &[f32]),
        owned: Option<(Vec<Vec<u32>>, SavedPart)>,
    ) {
        if let Some(writer) = &mut self.writer {
            writer.write(shard, state, tensors, owned);
        }
    }

    fn commit(&mut self, step: u64, parts: &[Written]) {
        if let Some(writer) = &mut self.writer {
            writer.commit(step, parts);
        }
    }

    fn poll(&mut self) -> Option<Completion> {
        self.writer.as_mut()?.poll()
    }

    fn restore(
        &mut self,
        parameters: &mut [f32],
        slots: &mut [f32],
        damaged: &mut dyn FnMut(&str, &str),
    ) -> Result<Option<Restored>, RestoreError> {
        restore(&self.locations, &self.fingerprint, parameters, slots, damaged)
    }

    fn newest(
        &mut self,
        step: u64,
        damaged: &mut dyn FnMut(&str, &str),
    ) -> Result<Option<(String, bool)>, RestoreError> {
        newest(&self.locations, &self.fingerprint, step, damaged)
    }

    fn read_rows(
        &mut self,
        checkpoint: (&str, bool),
        shards: &[u32],
        take: &mut TakeShard<'_>,
    ) -> Result<(), RestoreError> {
        read_rows(&self.locations, &self.fingerprint, checkpoint, shards, take)
    }

    fn forget_rows(&mut self) {
        self.writer.iter_mut().for_each(CheckpointWriter::forget_rows);
    }

    fn read_chunks(
        &mut self,
        checkpoint: (&str, bool),
        chunks: &[u32],
    ) -> Result<Vec<SavedChunk>, RestoreError> {
        read_chunks(&self.locations, &self.fingerprint, checkpoint, chunks)
    }

    fn pass_over(&mut self, checkpoint: (&str, bool), reason: &str) {
        self.locations.pass_over(checkpoint, reason);
    }
}
