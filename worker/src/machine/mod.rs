//! What a trainer and its donor touch outside of themselves: clock and threads, links, records, and
//! the storage of checkpoints.
//!
//! A worker's process has the parts of the operating system. The simulation of jobs has its own, so
//! that the trainer that is shipped runs in simulated time. Not for users.

mod checkpoints;
mod links;
mod records;
mod threads;

pub use crate::checkpoint::{Completion, OwnShard, RestoreError, Restored, SavedPart, TakeShard};
pub use crate::ordered_reader::ReadError;
pub use crate::prefetch::Taken;
pub use checkpoints::CheckpointStore;
pub(crate) use checkpoints::StoredCheckpoints;
pub use links::{Group, Links, Receiver, Request, RequestLink, Sender};
pub use records::Records;
pub use threads::Machine;
pub(crate) use threads::{System, receive};
