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
pub mod client;
pub mod credentials;
pub(crate) mod events;
pub(crate) mod kept;
pub mod ladder;
pub mod lease;
pub(crate) mod lists;
pub mod logs;
pub mod masters;
pub mod objects;
pub mod options;
pub(crate) mod pods;
pub mod submit;
pub mod succession;
#[cfg(test)]
pub(crate) mod testing;
pub mod verdict;
mod watch;
