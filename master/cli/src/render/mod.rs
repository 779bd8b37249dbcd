//! Statuses, summaries and lineages of jobs, as tables, lines and JSON. Knows nothing about where a
//! job runs.

mod end;
mod follow;
pub mod fuzzing;
mod jobs;
mod lineage;
mod summary;
mod table;
mod watch;

pub(crate) use end::{print_job_error, print_summary};
pub(crate) use follow::Printer;
pub(crate) use jobs::{
    BestValue, JobRow, LOST, arrange as arrange_jobs, to_json as jobs_to_json,
    to_table as jobs_to_table,
};
pub(crate) use lineage::{to_json as lineage_to_json, to_table as lineage_to_table};
pub(crate) use summary::{Paths, to_table as summary_to_table, warnings};
pub(crate) use table::to_table;
pub(crate) use watch::{Display, JobEnd, status_to_json};
