//! All-reduces of ranks that share memory.

mod all_reduce;
mod hierarchy;
mod link_monitor;
mod memory;
mod op_headers;
mod pipe_notifier;
mod region;

pub(crate) use all_reduce::{ShmGroup, WORLD_MAX};
pub(crate) use hierarchy::{Hierarchy, LeaderRing, LeaderSide};
pub(crate) use link_monitor::LinkMonitor;
pub(crate) use memory::{Address, Memory};
pub(crate) use op_headers::Notes;
pub(crate) use pipe_notifier::PipeNotifier;
pub(crate) use region::{SharedFault, SharedRegion, WaitContext};
