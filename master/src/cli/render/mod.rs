//! Statuses and summaries of jobs, as tables, lines and JSON. Knows nothing about where a job runs.

mod follow;
mod jobs;
mod summary;
mod table;
mod watch;

pub(crate) use follow::Printer;
pub(crate) use jobs::{JobRow, to_table as jobs_to_table};
pub(crate) use summary::{
    Paths, into_json_within as summary_into_json_within, to_json as summary_to_json,
    to_table as summary_to_table, warnings,
};
pub(crate) use table::to_table;
pub(crate) use watch::{Display, JobEnd};
