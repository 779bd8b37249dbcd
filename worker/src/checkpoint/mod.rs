//! Checkpoints: writing them concurrently with training, finding, verifying and deleting them.
//!
//! ```text
//!   DIR/step-000000000200-7f3a9c21-g3/
//!     shard-00000-of-00002.safetensors   floats 0..n of the state, written by rank 0
//!     shard-00001-of-00002.safetensors   the other floats, written by rank 1
//!     rows-00000-of-00002                rows of tables that rank 0 owns, if there are tables
//!     manifest.json                      written last: completes the checkpoint
//! ```
//!
//! Until the first of them is complete, `step-000000000000-7f3a9c21-g0/probe` shows the workers
//! whether they see the same folder.
//!
//! The state is the parameters followed by the optimizer state, as f32. The name contains the step,
//! the run of the job and the generation of the group that wrote it, so no two attempts share a
//! folder.
//!
//! **Invariant:** a manifest is written after all the shards that it names, and holds the digest of
//! each shard and its own digest. **Invariant:** a job does not change checkpoints of other runs
//! (unless the folder is exclusive to the job).

mod chunks;
#[cfg(feature = "simulation")]
mod fuzzing;
mod load;
mod manifest;
mod name;
mod probe;
mod retention;
mod rows;
mod state_parts;
mod table_rows;
mod writer;

#[cfg(feature = "simulation")]
pub(crate) use fuzzing::fuzz_manifest;
pub(crate) use load::{
    CheckpointLookup, Locations, check, inspect, is_checkpoint, load_parameters, newest,
    read_chunks, read_rows, restore,
};
pub use load::{RestoreError, Restored};
pub(crate) use manifest::{BestMetric, JobFingerprint};
pub(crate) use probe::Probe;
pub(crate) use retention::Retention;
pub use rows::{SavedPart, TakeShard};
pub(crate) use writer::CheckpointWriter;
pub use writer::{Completion, OwnShard};

#[cfg(test)]
mod tests;
