//! Checkpoints as files: how they are written beside the training, found again, checked, and
//! cleared away.
//!
//! ```text
//!   DIR/step-000000000200-7f3a9c21-g3/shard-00000-of-00002.safetensors   floats 0..n of the state, by rank 0
//!                                     shard-00001-of-00002.safetensors   the rest, by rank 1
//!                                     manifest.json                      written last: the checkpoint counts
//! ```
//!
//! The state is parameters and optimizer state one behind the other, as f32. The name says the
//! step, the run of a job and the group that wrote it, so that no two attempts meet in one folder.
//!
//! **Invariant:** a manifest is written after all that it names, and holds the digest of each shard
//! and its own. **Invariant:** nothing of another run is changed.

mod load;
mod manifest;
mod name;
mod writer;

pub(crate) use load::{
    CheckpointLookup, Locations, RestoreError, check, inspect, load_parameters, restore,
};
pub(crate) use manifest::JobFingerprint;
pub(crate) use writer::{CheckpointWriter, Completion};

#[cfg(test)]
mod tests;
