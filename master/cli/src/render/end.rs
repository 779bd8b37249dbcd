//! What a command prints of a job that has ended.

use std::io::{Write as _, stdout};
use std::time::{Duration, SystemTime};

use elasticdl_master::job::{Summary, Time};
use elasticdl_proto::LogFormat;

use super::summary::{Paths, metrics, to_table};
use crate::process::{Console, print_error};
use crate::progress::{json_error, write_line};

/// Prints the summary to standard output, which may be closed. The error is omitted, because
/// [`print_job_error`] prints it.
pub(crate) fn print_summary(console: Console, summary: &Summary, paths: Paths<'_>) {
    let text = match console.progress() {
        // What an evaluation was asked for, and nothing else.
        None => metrics(summary).map(|text| text + "\n").collect(),
        Some(LogFormat::Json) => summary.to_json_line(),
        Some(LogFormat::Text) => to_table(&Summary { error: None, ..summary.clone() }, paths),
    };
    let _ = stdout().write_all(text.as_bytes());
}

/// Prints why a job failed, `seconds` after its start.
pub(crate) fn print_job_error(console: Console, seconds: f64, error: &str) {
    match console.format {
        LogFormat::Json => {
            let age = Duration::try_from_secs_f64(seconds).unwrap_or_default();
            write_line(&json_error(SystemTime::now(), Time(age), error));
        }
        LogFormat::Text => print_error(error),
    }
}
