//! Jobs in a Kubernetes cluster.
//!
//! ```text
//!  options ─► objects ─► submit ──► API server ◄── follow        the user's command
//!                                   ▲      │
//!                       anchor, pods└──────┴─► verdict           the master, in a pod
//! ```
//!
//! A job consists of a batch/v1 Job that runs the master; the anchor, a ConfigMap that holds the
//! task, the job's state and the user's requests; a Secret; a Service; and worker pods that the
//! master creates. The Job owns the anchor, and the anchor owns the rest. Each object has one
//! owner, so that deleting the Job deletes all.
//!
//! **Invariants:** Kubernetes types stop here: the job's core receives events about launches only.
//! Decisions (`verdict`, [`objects`], [`priority_tiers`], [`gang`]) are pure. The name of a pod
//! is never reused.

pub mod anchor;
pub mod client;
pub mod declaration;
pub mod differences;
pub(crate) mod events;
pub mod existing;
pub mod facts;
pub(crate) mod file_list;
pub mod gang;
pub mod inspection;
pub mod leader_lease;
pub mod logs;
pub(crate) mod master_address;
pub mod master_pods;
pub(crate) mod master_service;
mod names;
pub mod objects;
pub mod options;
pub(crate) mod persisted_job;
pub mod pods;
pub mod priority_tiers;
pub mod requests;
pub(crate) mod retry;
pub mod rights;
pub mod route;
pub mod scaling;
pub mod schedulers;
pub mod silence;
pub(crate) mod state_labels;
pub mod submit;
pub(crate) mod succession;
#[cfg(test)]
pub(crate) mod testing;
pub mod train_job;
pub(crate) mod verdict;
pub mod watch;
