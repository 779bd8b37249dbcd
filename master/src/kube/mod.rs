//! Jobs in a Kubernetes cluster.
//!
//! ```text
//!  options ─► objects ─► submit ──► API server ◄── follow        the user's command
//!                                   ▲      │
//!                       anchor, pods└──────┴─► verdict           the master, in a pod
//! ```
//!
//! A job is a batch/v1 Job that runs the master, an anchor (a ConfigMap that holds what was asked
//! for, how far it is, and what the user wants changed), a Secret, a Service, and worker pods that
//! the master makes. The Job owns the anchor, the anchor owns the rest; each has one owner, so that
//! deleting the Job removes all.
//!
//! **Invariants:** Kubernetes types stop here: the job's core hears of launches and how they ended.
//! What decides ([`verdict`], [`objects`]) is pure. No name of a pod is used twice.

pub mod anchor;
pub mod certificates;
pub mod client;
pub(crate) mod events;
pub(crate) mod file_list;
pub mod leader_lease;
pub mod logs;
pub mod master_pods;
pub mod objects;
pub mod options;
pub(crate) mod persisted_job;
pub(crate) mod pods;
pub mod priority_tiers;
pub mod submit;
pub mod succession;
#[cfg(test)]
pub(crate) mod testing;
pub mod verdict;
mod watch;
