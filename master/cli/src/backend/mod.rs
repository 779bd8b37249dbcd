//! Jobs that have been started, on this machine or in a cluster, behind one handle.

mod checkpoint_wait;
mod cluster;
mod handle;
mod list;
mod local;
mod lookup;

pub(super) use cluster::{FollowOutput, check_suspendable, detach, follow};
pub(super) use handle::{JobLog, WatchOptions};
pub(super) use list::{cluster_jobs, local_jobs};
pub(super) use lookup::{NamedJob, find};
