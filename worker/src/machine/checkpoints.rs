//! The storage of checkpoints.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_data::worker::{StorageWait, wait_status};
use elasticdl_tables::SavedChunk;

use crate::checkpoint::{
    CheckpointWriter, Completion, JobFingerprint, Locations, OwnShard, RestoreError, Restored,
    SavedPart, TakeShard, newest, read_chunks, read_rows, restore,
};
use crate::session::checkpoint::{WRITE_AT_STOP, Written};
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

    /// The group has been waiting for a checkpoint for so long, and waits for so long at most;
    /// `None`: it does not wait. Users are told of long waits. To be called again and again.
    fn note_wait(&mut self, _wait: Option<(Duration, Duration)>, _is_stopping: bool) {}

    /// The error of the requests that this process repeats, if there is one.
    fn repeated_error(&self) -> Option<String> {
        None
    }

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
    /// The wait for a checkpoint that users are told of.
    pub(crate) wait: Option<StorageWait>,
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

    fn note_wait(&mut self, wait: Option<(Duration, Duration)>, is_stopping: bool) {
        let long = wait.filter(|(waited, _)| *waited >= SILENCE);
        match (long, &self.locations.own) {
            // A request that has failed is reported already.
            (Some((_, limit)), Some(own))
                if self.wait.is_none() && wait_status().storage.is_none() =>
            {
                let silence = SILENCE.as_secs();
                let text = match is_stopping {
                    true => format!("the last checkpoint is not written after {silence} s"),
                    false => format!(
                        "a checkpoint that training waits for is not written after {silence} s; \
                         it waits for up to {} s, and after a stop for {} s",
                        limit.as_secs(),
                        WRITE_AT_STOP.as_secs()
                    ),
                };
                self.wait = Some(StorageWait::begin(own.address(), &text, limit));
            }
            (None, _) => self.wait.take().into_iter().for_each(|wait| wait.end(true)),
            _ => {}
        }
    }

    fn repeated_error(&self) -> Option<String> {
        wait_status().storage.filter(|_| self.wait.is_none())
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

/// Time after which users are told of a wait.
const SILENCE: Duration = Duration::from_secs(5);
