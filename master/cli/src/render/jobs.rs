//! A list of jobs, as a table and as JSON.

use std::fmt::Write as _;

use elasticdl_master::job::format_value;
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
    pub(crate) step: Option<u64>,
    /// Mean loss per record of the last steps.
    pub(crate) loss: Option<f64>,
    /// The best evaluation.
    pub(crate) best: Option<BestValue>,
    /// Size of the group.
    pub(crate) workers: Option<u64>,
    pub(crate) workers_desired: Option<u32>,
    /// Seconds since the job was started.
    pub(crate) age_s: Option<f64>,
}

/// The value of the best evaluation of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct BestValue {
    pub(crate) metric: String,
    pub(crate) value: f64,
}

/// Sorts the jobs: running ones first, then those without a master, which can be resumed, then
/// ended ones, and newer ones before older ones. Of the jobs that have ended, the newest
/// `ended_max` are kept. Returns how many were removed.
pub(crate) fn arrange(rows: &mut Vec<JobRow>, ended_max: usize) -> usize {
    let age = |row: &JobRow| row.age_s.unwrap_or(f64::INFINITY);
    rows.sort_by(|a, b| {
        let by_age = age(a).total_cmp(&age(b));
        a.place().cmp(&b.place()).then(by_age).then_with(|| a.job.cmp(&b.job))
    });
    let running = rows.iter().filter(|row| !row.has_ended).count();
    let kept = running.saturating_add(ended_max).min(rows.len());
    let removed = rows.len() - kept;
    rows.truncate(kept);
    removed
}

impl JobRow {
    /// Whether the process of its master is gone, and the job has not ended.
    pub(crate) fn is_lost(&self) -> bool {
        self.state == LOST
    }

    fn place(&self) -> u8 {
        if self.has_ended { 2 } else { self.is_lost().into() }
    }
}

/// The list as a table. A column that no job has anything for is left out.
pub(crate) fn to_table(rows: &[JobRow]) -> String {
    let cells: Vec<[String; COLUMNS.len()]> = rows.iter().map(to_cells).collect();
    let is_shown =
        |column: &usize| *column < ALWAYS || cells.iter().any(|row| row[*column] != NONE);
    let columns: Vec<usize> = (0..COLUMNS.len()).filter(is_shown).collect();
    let head = COLUMNS.map(String::from);
    let cells: Vec<_> = std::iter::once(head).chain(cells).collect();
    let mut text = String::new();
    for row in &cells {
        let mut line = String::new();
        for &column in &columns {
            // The reason may be long.
            let longest = cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
            let width = if column == REASON { 0 } else { longest };
            let cell = if column == REASON && row[column] == NONE { "" } else { &row[column] };
            write!(line, "{cell:<width$}  ").expect("a string takes any text");
        }
        writeln!(text, "{}", line.trim_end()).expect("a string takes any text");
    }
    text
}

/// The list as JSON: an array with an object per job.
pub(crate) fn to_json(rows: &[JobRow]) -> String {
    serde_json::to_string_pretty(rows).expect("the keys of a job are strings") + "\n"
}

fn to_cells(row: &JobRow) -> [String; COLUMNS.len()] {
    let dash = || NONE.to_owned();
    let workers = match (row.workers, row.workers_desired) {
        (None, None) => dash(),
        (workers, desired) => {
            let text = |number: Option<u64>| number.map_or_else(dash, |number| number.to_string());
            format!("{}/{}", text(workers), text(desired.map(u64::from)))
        }
    };
    let best =
        |best: &BestValue| one_line(&format!("{} {}", best.metric, format_value(best.value)));
    [
        row.namespace.clone().unwrap_or_else(|| THIS_MACHINE.into()),
        one_line(&row.job),
        one_line(&row.state),
        row.progress.map_or_else(dash, |part| format!("{:.1} %", part * 100.0)),
        workers,
        row.age_s.map_or_else(dash, format_duration),
        row.loss.map_or_else(dash, format_value),
        row.best.as_ref().map_or_else(dash, best),
        row.reason.as_deref().map_or_else(dash, one_line),
    ]
}

const COLUMNS: [&str; 9] =
    ["NAMESPACE", "JOB", "STATE", "PROGRESS", "WORKERS", "AGE", "LOSS", "BEST", "REASON"];
/// The number of columns that are always shown.
const ALWAYS: usize = 6;
const REASON: usize = 8;
const NONE: &str = "-";
/// State of a local job whose master is gone.
pub(crate) const LOST: &str = "lost";
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
            step: None,
            loss: None,
            best: None,
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
    fn losses_and_best_values_are_shown_if_a_job_has_them() {
        let best = Some(BestValue { metric: "accuracy".into(), value: 0.75 });
        let trains = JobRow { loss: Some(0.25), best, ..row("mnist", "completed", 10.0) };
        let expected = "\
NAMESPACE       JOB    STATE      PROGRESS  WORKERS  AGE   LOSS    BEST
(this machine)  mnist  completed  25.0 %    -        10 s  0.2500  accuracy 0.7500
(this machine)  count  completed  25.0 %    -        20 s  -       -
";
        assert_eq!(to_table(&[trains, row("count", "completed", 20.0)]), expected);
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
            JobRow { has_ended: false, ..row("f", LOST, 1.0) },
        ];
        assert_eq!(arrange(&mut rows.clone(), usize::MAX), 0);
        assert_eq!(arrange(&mut rows, 2), 1);
        let names: Vec<&str> = rows.iter().map(|row| row.job.as_str()).collect();
        assert_eq!(names, ["d", "b", "f", "c", "a"]);
    }

    #[test]
    fn the_keys_of_the_json_list_are_stable() {
        let json: serde_json::Value =
            serde_json::from_str(&to_json(&[row("mnist", "running", 1.5)])).unwrap();
        let expected = serde_json::json!([{
            "namespace": null, "job": "mnist", "state": "running", "reason": null,
            "has_ended": false, "progress": 0.25, "step": null, "loss": null, "best": null,
            "workers": 3, "workers_desired": 4, "age_s": 1.5,
        }]);
        assert_eq!(json, expected);
    }
}
