//! Reports on a job: history, counters, status and summary. Nothing here decides anything.

pub(crate) mod checkpoints;
pub(crate) mod counters;
pub(crate) mod evaluations;
pub(crate) mod history;
pub(crate) mod status;
pub(crate) mod storage_waits;
pub(crate) mod summary;
