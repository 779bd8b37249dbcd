//! The life of a job: launches and their ends, removal of workers, take-over, shutdown, and the
//! persisted job.

mod autoscale;
pub(crate) mod bad_hosts;
pub(crate) mod disconnected;
mod exits;
mod failed_slots;
mod fatal_reports;
mod host_checks;
mod launching;
mod missing_results;
pub(crate) mod persisted;
pub(crate) mod removal;
pub(crate) mod restart;
pub(crate) mod shutdown;
mod slow_links;
pub(crate) mod state;
pub(crate) mod state_loss;
mod suspension;
mod takeover;
mod takeover_state;
