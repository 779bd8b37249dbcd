//! Reports on a job: history, counters, status and summary. Nothing here decides anything.

mod changes;
pub(crate) mod counters;
pub(crate) mod epochs;
pub(crate) mod history;
pub(crate) mod late_checkpoints;
pub(crate) mod lifetimes;
mod lost_rows;
mod news;
mod smoothed;
pub(crate) mod speed;
mod steps;
mod storage_waits;
pub(crate) mod traced;
pub(crate) mod views;
