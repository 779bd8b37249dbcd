//! The life of a job: launches and their ends, removal of workers, take-over, shutdown, and the
//! persisted job.

pub(crate) mod disconnected;
mod exits;
mod launching;
pub(crate) mod persisted;
mod reconnected;
pub(crate) mod removal;
pub(crate) mod restart;
pub(crate) mod shutdown;
pub(crate) mod state;
mod state_loss;
mod takeover;
