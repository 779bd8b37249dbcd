//! A list of jobs, as a table and as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use crate::progress::{format_duration, one_line};

/// One job of the list. The names of the fields are a public format.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct JobRow {
    /// Namespace in the cluster; `None` for a job of this machine.
    pub(crate) namespace: Option<String>,
    pub(crate) job: String,
    pub(crate) state: String,
    /// Why the job is in this state, if it waits for something.
    pub(crate) reason: Option<String>,
    pub(crate) has_ended: bool,
    /// Completed part of the job, 0 to 1.
    pub(crate) progress: Option<f64>,
    /// Size of the group.
    pub(crate) workers: Option<u64>,
    pub(crate) workers_desired: Option<u32>,
    /// Seconds since the job was started.
    pub(crate) age_s: Option<f64>,
}

/// Sorts the jobs: running ones first, and newer ones before older ones. Of the jobs that have
/// ended, the newest `ended_max` are kept. Returns how many were removed.
pub(crate) fn arrange(rows: &mut Vec<JobRow>, ended_max: usize) -> usize {
    let age = |row: &JobRow| row.age_s.unwrap_or(f64::INFINITY);
    rows.sort_by(|a, b| {
        let by_age = age(a).total_cmp(&age(b));
        a.has_ended.cmp(&b.has_ended).then(by_age).then_with(|| a.job.cmp(&b.job))
    });
    let running = rows.iter().filter(|row| !row.has_ended).count();
    let kept = running.saturating_add(ended_max).min(rows.len());
    let removed = rows.len() - kept;
    rows.truncate(kept);
    removed
}

/// The list as a table.
pub(crate) fn to_table(rows: &[JobRow]) -> String {
    let reason = if rows.iter().any(|row| row.reason.is_some()) { "REASON" } else { "" };
    let head =
        ["NAMESPACE", "JOB", "STATE", "PROGRESS", "WORKERS", "AGE", reason].map(String::from);
    let cells: Vec<[String; 7]> = std::iter::once(head).chain(rows.iter().map(to_cells)).collect();
    let width =
        |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    // The last column may be long.
    let widths = [0, 1, 2, 3, 4, 5].map(width).into_iter().chain([0]);
    let mut text = String::new();
    for row in cells {
        let cells: Vec<String> =
            row.iter().zip(widths.clone()).map(|(cell, width)| format!("{cell:<width$}")).collect();
        writeln!(text, "{}", cells.join("  ").trim_end()).expect("a string takes any text");
    }
    text
}

/// The list as JSON: an array with an object per job.
pub(crate) fn to_json(rows: &[JobRow]) -> String {
    serde_json::to_string_pretty(rows).expect("the keys of a job are strings") + "\n"
}

fn to_cells(row: &JobRow) -> [String; 7] {
    let dash = || "-".to_owned();
    let workers = match (row.workers, row.workers_desired) {
        (None, None) => dash(),
        (workers, desired) => {
            let text = |number: Option<u64>| number.map_or_else(dash, |number| number.to_string());
            format!("{}/{}", text(workers), text(desired.map(u64::from)))
        }
    };
    [
        row.namespace.clone().unwrap_or_else(|| THIS_MACHINE.into()),
        one_line(&row.job),
        one_line(&row.state),
        row.progress.map_or_else(dash, |part| format!("{:.1} %", part * 100.0)),
        workers,
        row.age_s.map_or_else(dash, format_duration),
        row.reason.as_deref().map(one_line).unwrap_or_default(),
    ]
}

const THIS_MACHINE: &str = "(this machine)";

#[cfg(test)]
mod tests {
    use super::*;

    fn row(job: &str, state: &str, age_s: f64) -> JobRow {
        let has_ended = state != "running";
        JobRow {
            namespace: None,
            job: job.into(),
            state: state.into(),
            reason: None,
            has_ended,
            progress: Some(0.25),
            workers: (!has_ended).then_some(3),
            workers_desired: (!has_ended).then_some(4),
            age_s: Some(age_s),
        }
    }

    #[test]
    fn the_columns_of_a_list_are_aligned() {
        let in_cluster = JobRow {
            namespace: Some("ml".into()),
            progress: None,
            workers: None,
            age_s: None,
            ..row("tabular", "running", 0.0)
        };
        let expected = "\
NAMESPACE       JOB      STATE      PROGRESS  WORKERS  AGE
(this machine)  mnist    completed  25.0 %    -        1 h 40 min
ml              tabular  running    -         -/4      -
";
        assert_eq!(to_table(&[row("mnist", "completed", 6000.0), in_cluster]), expected);
    }

    #[test]
    fn reasons_are_the_last_column_and_make_no_other_one_wider() {
        let reason = Some("InvalidImageName: a:b:c is no image".into());
        let waits = JobRow { reason, ..row("mnist", "submitted", 10.0) };
        let expected = "\
NAMESPACE       JOB    STATE      PROGRESS  WORKERS  AGE   REASON
(this machine)  mnist  submitted  25.0 %    -        10 s  InvalidImageName: a:b:c is no image
(this machine)  count  completed  25.0 %    -        20 s
";
        assert_eq!(to_table(&[waits, row("count", "completed", 20.0)]), expected);
    }

    #[test]
    fn running_jobs_and_the_newest_ended_ones_are_listed() {
        let mut rows = vec![
            row("a", "completed", 9.0),
            row("b", "running", 30.0),
            row("c", "failed", 5.0),
            row("d", "running", 7.0),
            JobRow { age_s: None, ..row("e", "completed", 0.0) },
        ];
        assert_eq!(arrange(&mut rows.clone(), usize::MAX), 0);
        assert_eq!(arrange(&mut rows, 2), 1);
        let names: Vec<&str> = rows.iter().map(|row| row.job.as_str()).collect();
        assert_eq!(names, ["d", "b", "c", "a"]);
    }

    #[test]
    fn the_keys_of_the_json_list_are_stable() {
        let json: serde_json::Value =
            serde_json::from_str(&to_json(&[row("mnist", "running", 1.5)])).unwrap();
        let expected = serde_json::json!([{
            "namespace": null, "job": "mnist", "state": "running", "reason": null,
            "has_ended": false, "progress": 0.25, "workers": 3, "workers_desired": 4, "age_s": 1.5,
        }]);
        assert_eq!(json, expected);
    }
}
