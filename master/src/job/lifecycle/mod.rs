//! The life of a job: launches, restarts, take-over, shutdown, and the persisted job.

pub(crate) mod launching;
pub(crate) mod persisted;
pub(crate) mod restart;
pub(crate) mod shutdown;
pub(crate) mod state_loss;
pub(crate) mod takeover;
