//! What the simulated world consists of: data, and the questions that it answers by itself.
//!
//! What happens in the world are methods of [`World`](super::world::World), in the files beside
//! this folder: what happens to links in `network.rs`, and so on.

pub(super) mod checkpoints;
pub(super) mod coverage;
pub(super) mod endpoint;
pub(super) mod event;
pub(super) mod faults;
pub(super) mod master;
pub(super) mod nccl;
pub(super) mod network;
pub(super) mod operation;
pub(super) mod oracle;
pub(super) mod packet;
pub(super) mod process;
pub(super) mod setting;
pub(super) mod thread;
pub(super) mod trainer;
