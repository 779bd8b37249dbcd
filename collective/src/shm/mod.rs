//! All-reduces and exchanges of ranks that share memory.

mod all_reduce;
mod hierarchy;
mod host_region;
mod leader_side;
mod link_monitor;
mod mailboxes;
mod memory;
mod notes;
mod op_headers;
mod pipe_notifier;
mod region;

pub(crate) use all_reduce::{HOST_RANKS_MAX, ShmGroup};
pub(crate) use hierarchy::{Hierarchy, LeaderRing};
pub(crate) use mailboxes::Mail;
pub(crate) use memory::{Address, Memory};
pub(crate) use notes::Notes;
pub(crate) use pipe_notifier::PipeNotifier;
pub(crate) use region::{SharedRegion, WaitContext};
