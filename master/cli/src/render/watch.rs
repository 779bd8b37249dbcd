//! What `elasticdl status --watch` shows of a job of this machine.

use std::fs;
use std::io::stdout;
use std::path::{Path, PathBuf};

use elasticdl_master::job::{counted, format_value};
use elasticdl_proto::Status;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::table::to_table;
use crate::process::{Failure, print};
use crate::progress::{can_redraw, format_rate, one_line};

/// Fields of the summary that are printed at the end of a job.
#[derive(Debug, Deserialize)]
pub(crate) struct JobEnd {
    job: String,
    state: String,
    steps: u64,
    epochs: u32,
    wall_s: f64,
    records: JobEndRecords,
    error: Option<String>,
    #[serde(skip)]
    path: PathBuf,
    /// The whole summary.
    #[serde(skip)]
    summary: Value,
    /// The last status that the master has stored.
    #[serde(skip)]
    last: Option<Status>,
}

/// What `elasticdl status --json` prints: the status, and the summary of a job that has ended.
#[derive(Serialize)]
struct StatusDocument<'a> {
    #[serde(flatten)]
    status: &'a Status,
    has_ended: bool,
    summary: Option<&'a Value>,
}

impl<'a> StatusDocument<'a> {
    fn running(status: &'a Status) -> Self {
        Self { status, has_ended: false, summary: None }
    }

    fn to_line(&self) -> String {
        serde_json::to_string(self).expect("its keys are strings") + "\n"
    }

    fn to_pretty(&self) -> String {
        serde_json::to_string_pretty(self).expect("its keys are strings") + "\n"
    }
}

/// The status of a running job as indented JSON.
pub(crate) fn status_to_json(status: &Status) -> String {
    StatusDocument::running(status).to_pretty()
}

#[derive(Debug, Deserialize)]
struct JobEndRecords {
    expected: u64,
    counted: u64,
}

impl JobEnd {
    /// Reads the summary at `path` of a job whose last status is known or not.
    pub(crate) fn read(path: &Path, last: Option<Status>) -> Result<Self, Failure> {
        let unreadable = |e: &dyn std::fmt::Display| {
            Failure::failed(format!(
                "the job has ended, but its summary {} can't be read: {e}",
                path.display()
            ))
        };
        let bytes = fs::read(path).map_err(|e| unreadable(&e))?;
        let ending = Self::parse(&bytes, last).map_err(|e| unreadable(&e))?;
        Ok(Self { path: path.into(), ..ending })
    }

    /// The end of a job with this summary.
    pub(crate) fn parse(summary: &[u8], last: Option<Status>) -> serde_json::Result<Self> {
        let ending: Self = serde_json::from_slice(summary)?;
        Ok(Self { summary: serde_json::from_slice(summary)?, last, ..ending })
    }

    /// The final status and the summary as indented JSON.
    pub(crate) fn to_json(&self) -> String {
        let status = self.to_status(None);
        self.document(&status).to_pretty()
    }

    fn document<'a>(&'a self, status: &'a Status) -> StatusDocument<'a> {
        StatusDocument { status, has_ended: true, summary: Some(&self.summary) }
    }

    /// The end of the job in one line.
    fn describe(&self) -> String {
        let error =
            self.error.as_ref().map(|error| format!(": {}", one_line(error))).unwrap_or_default();
        format!(
            "job {}: {} after {:.2} s, {}, {} of {} records{error}; the summary is in {}",
            self.job,
            self.state,
            self.wall_s,
            counted(self.steps, "step"),
            self.records.counted,
            self.records.expected,
            self.path.display()
        )
    }

    /// The final status, based on the `last` one that was seen, or else stored.
    fn to_status(&self, last: Option<Status>) -> Status {
        let last = last.or_else(|| self.last.clone()).unwrap_or_default();
        Status {
            job: self.job.clone(),
            state: self.state.clone().into(),
            progress: if self.state == "completed" { 1.0 } else { last.progress },
            step: self.steps,
            epoch: self.epochs,
            records_counted: self.records.counted,
            records_expected: self.records.expected,
            records_per_s: 0.0,
            eta_s: None,
            workers: Vec::new(),
            ..last
        }
    }
}

/// Output of `--watch`.
pub(crate) enum Display {
    /// One JSON document per line.
    Json { last: Option<Box<Status>> },
    /// One change per line.
    Lines { reported: Option<Reported> },
    /// A table that is redrawn in place.
    Table { bar: ProgressBar, table: String },
}

/// Parts of a status that have been printed as lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reported {
    events_emitted: u64,
    state: String,
    generation: u64,
    epoch: u32,
    stragglers: Vec<u64>,
}

impl Display {
    pub(crate) fn new(json: bool) -> Self {
        if json {
            return Self::Json { last: None };
        }
        if !can_redraw(&stdout()) {
            return Self::Lines { reported: None };
        }
        let style = ProgressStyle::with_template("{msg}").expect("the template is valid");
        let bar =
            ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout()).with_style(style);
        Self::Table { bar, table: String::new() }
    }

    pub(crate) fn show(&mut self, status: Status) -> Result<(), Failure> {
        match self {
            Self::Json { last } => {
                print(&StatusDocument::running(&status).to_line())?;
                *last = Some(Box::new(status));
            }
            Self::Lines { reported } => {
                let now = Reported::of(&status);
                let lines = lines(&status, reported.as_ref(), &now);
                *reported = Some(now);
                print(&lines)?;
            }
            Self::Table { bar, table } => {
                *table = to_table(&status);
                bar.set_message(table.trim_end().to_owned());
            }
        }
        Ok(())
    }

    /// Shows that `missed` queries in a row had no answer.
    pub(crate) fn no_master(&self, missed: u32) -> Result<(), Failure> {
        const NO_MASTER: &str = "no master answers; waiting for one";
        match self {
            Self::Json { .. } => {}
            Self::Lines { .. } if missed == 1 => {
                print(&format!("{NO_MASTER}\n"))?;
            }
            Self::Lines { .. } => {}
            Self::Table { bar, table } => bar.set_message(format!("{table}{NO_MASTER}")),
        }
        Ok(())
    }

    pub(crate) fn end(self, ending: &JobEnd) -> Result<(), Failure> {
        let text = match self {
            Self::Json { last } => {
                ending.document(&ending.to_status(last.map(|last| *last))).to_line()
            }
            Self::Lines { .. } => ending.describe() + "\n",
            Self::Table { bar, .. } => {
                bar.abandon();
                ending.describe() + "\n"
            }
        };
        print(&text).map(|_| ())
    }
}

impl Reported {
    fn of(status: &Status) -> Self {
        let stragglers =
            status.workers.iter().filter(|w| w.straggler).map(|w| w.worker.0).collect();
        Self {
            events_emitted: status.events_emitted,
            state: status.state.clone().into_owned(),
            generation: status.generation.0,
            epoch: status.epoch,
            stragglers,
        }
    }
}

/// Changes since `reported`: new event lines, and a line with the state of the job if the state has
/// changed.
fn lines(status: &Status, reported: Option<&Reported>, now: &Reported) -> String {
    // A new master counts event lines from 0.
    let known = reported.map_or(0, |reported| reported.events_emitted);
    let new = now.events_emitted.checked_sub(known).unwrap_or(now.events_emitted);
    let new = usize::try_from(new).unwrap_or(usize::MAX).min(status.events.len());
    let mut text = String::new();
    for event in &status.events[status.events.len() - new..] {
        text.push_str(&one_line(event));
        text.push('\n');
    }
    let has_moved = reported.is_none_or(|reported| {
        Reported { events_emitted: now.events_emitted, ..reported.clone() } != *now
    });
    if has_moved {
        let members = status.members().count();
        let loss =
            status.loss.map(|loss| format!(" · loss {}", format_value(loss))).unwrap_or_default();
        let named: Vec<String> =
            now.stragglers.iter().take(STRAGGLERS_NAMED).map(u64::to_string).collect();
        let slow = if named.is_empty() {
            String::new()
        } else {
            format!(" · slow: {}", named.join(", "))
        };
        text.push_str(&format!(
            "{} · epoch {}/{} · step {} · {:.1} %{loss} · {} records/s · members {members} · \
             generation {}{slow}\n",
            status.state,
            status.epoch.saturating_add(1).min(status.epochs),
            status.epochs,
            status.step,
            status.progress * 100.0,
            format_rate(status.records_per_s),
            status.generation,
        ));
    }
    text
}

const STRAGGLERS_NAMED: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::table::tests::reply;

    #[test]
    fn each_event_line_is_printed_once() {
        let first = reply();
        let reported = Reported::of(&first);
        let state = "running · epoch 1/3 · step 10 · 33.3 % · loss 0.2500 · 20.0 k records/s · \
                     members 1 · generation 2 · slow: 1\n";
        assert_eq!(lines(&first, None, &reported), format!("generation 2: 1 worker\n{state}"));
        assert_eq!(lines(&first, Some(&reported), &reported), "");
        let events = ["a", "b", "c"].map(String::from).to_vec();
        let more = Status { events_emitted: 9, events, step: 11, ..first };
        assert_eq!(lines(&more, Some(&reported), &Reported::of(&more)), "b\nc\n");
        let many = Status { events_emitted: 900, ..more.clone() };
        assert_eq!(lines(&many, Some(&reported), &Reported::of(&many)), "a\nb\nc\n");
        let replaced = Status { events_emitted: 1, ..more.clone() };
        assert_eq!(lines(&replaced, Some(&reported), &Reported::of(&replaced)), "c\n");
        let waits = Status { events_emitted: 9, state: "waiting".into(), ..more.clone() };
        let reported = lines(&waits, Some(&Reported::of(&more)), &Reported::of(&waits));
        assert!(
            reported.starts_with("waiting · epoch 1/3 · step 11") && reported.lines().count() == 1,
            "{reported}"
        );
    }

    #[test]
    fn the_final_status_is_that_of_the_summary() {
        let ending = JobEnd {
            job: "mnist".into(),
            state: "completed".into(),
            steps: 30,
            epochs: 3,
            wall_s: 1.25,
            records: JobEndRecords { expected: 1920, counted: 1920 },
            error: None,
            path: "/j/summary.json".into(),
            summary: Value::Null,
            last: None,
        };
        let expected = "job mnist: completed after 1.25 s, 30 steps, 1920 of 1920 records; \
                        the summary is in /j/summary.json";
        assert_eq!(ending.describe(), expected);
        let last = ending.to_status(Some(reply()));
        assert_eq!((&*last.state, last.step, last.epoch, last.progress), ("completed", 30, 3, 1.0));
        assert_eq!(
            (last.records_counted, last.workers, last.generation),
            (1920, vec![], reply().generation)
        );
        let unseen = ending.to_status(None);
        assert_eq!((&*unseen.state, unseen.records_expected), ("completed", 1920));
    }

    #[test]
    fn the_json_of_an_ended_job_has_the_keys_of_a_running_one_and_its_summary() {
        let keys = |json: &str| {
            let read: serde_json::Map<String, Value> = serde_json::from_str(json).unwrap();
            (read.keys().cloned().collect::<Vec<_>>(), read)
        };
        let summary = br#"{"job": "mnist", "state": "stopped", "steps": 7, "epochs": 0,
            "wall_s": 1.5, "records": {"expected": 9, "counted": 7}, "digest": "d"}"#;
        let ended = JobEnd::parse(summary, Some(reply())).unwrap();
        let ((all, end), (running, now)) =
            (keys(&ended.to_json()), keys(&status_to_json(&reply())));
        assert_eq!(all, running);
        assert_eq!((&end["has_ended"], &now["has_ended"]), (&true.into(), &false.into()));
        assert_eq!((&end["state"], &end["step"]), (&"stopped".into(), &7.into()));
        assert_eq!((&end["run_id"], &end["summary"]["digest"]), (&now["run_id"], &"d".into()));
        assert_eq!(now["summary"], Value::Null);
    }
}
