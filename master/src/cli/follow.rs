//! Follows a job in a cluster through the API server: the port of the master is not reachable from
//! outside.

use std::io::{Write as _, stderr, stdout};
use std::path::PathBuf;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use super::cluster::to_failure;
use super::master::code_of_state;
use super::render::StatusJson;
use super::{EXIT_INTERRUPTED, Failure};
use crate::job::{Summary, Time};
use crate::jobdir;
use crate::kube::anchor::{Anchor, AnchorEvent, Data, STATUS, SUMMARY};
use crate::kube::client::Cluster;
use crate::kube::master_pods::{MasterPods, MasterStatus};
use crate::progress::{Progress, ProgressLine, format_rate};
use crate::report::{self, Paths};

/// Output of [`follow`].
#[derive(Clone, Debug)]
pub(super) struct OutputMode {
    /// Print errors only.
    pub(super) quiet: bool,
    /// Additional path for the summary.
    pub(super) summary: Option<PathBuf>,
}

/// Reason to stop following a job.
enum FollowEnd {
    /// The job has ended, with this summary.
    Summary(String),
    /// The user has ended the command.
    Detached,
}

/// Shows a job until it ends or the user ends the command. Returns the exit code.
pub(super) async fn follow(
    cluster: &Cluster,
    job: &str,
    output: OutputMode,
) -> Result<u8, Failure> {
    let mut printer = Printer::new(output.quiet);
    let seen = observe(cluster, job, &mut printer).await;
    printer.progress.end();
    match seen? {
        FollowEnd::Summary(summary) => end(&output, &summary),
        FollowEnd::Detached => Ok(detach(job, &cluster.namespace)),
    }
}

async fn observe(
    cluster: &Cluster,
    job: &str,
    printer: &mut Printer,
) -> Result<FollowEnd, Failure> {
    let no_signals = |e| Failure::failed(format!("can't handle signals: {e}"));
    let mut interrupt = signal(SignalKind::interrupt()).map_err(no_signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(no_signals)?;
    let namespace = &cluster.namespace;
    let mut anchor = Anchor::new(cluster, job).watch();
    let mut masters = MasterPods::watch(cluster, job);
    let mut stuck = Stuck::default();
    let mut is_there = false;
    loop {
        tokio::select! {
            event = anchor.next() => match event {
                AnchorEvent::Forbidden(message) => {
                    return Err(Failure::failed(format!("can't follow the job: {message}")));
                }
                AnchorEvent::Deleted if is_there => {
                    return Err(Failure::failed(format!("the job {job} has been deleted")));
                }
                AnchorEvent::Deleted => {
                    let absent = Anchor::new(cluster, job).read().await;
                    absent.map_err(to_failure)?;
                }
                AnchorEvent::Data(data) => {
                    is_there = true;
                    printer.show(&data);
                    if let Some(summary) = data.get(SUMMARY) {
                        return Ok(FollowEnd::Summary(summary.clone()));
                    }
                }
            },
            status = masters.next() => match status {
                MasterStatus::CannotStart(why) => {
                    stuck.since.get_or_insert_with(Instant::now);
                    printer.print(&format!("the master can't start: {why}"));
                    stuck.why = why;
                }
                MasterStatus::Ended(why) => printer.print(&format!("a master has ended: {why}")),
                MasterStatus::Failed(why) => {
                    // The summary may have been written in the meantime.
                    let anchor = Anchor::new(cluster, job).read().await.map_err(to_failure)?;
                    let data = anchor.data.unwrap_or_default();
                    if let Some(summary) = data.get(SUMMARY) {
                        printer.show(&data);
                        return Ok(FollowEnd::Summary(summary.clone()));
                    }
                    let text = format!("no master could finish the job {job}: {why}");
                    return Err(Failure::failed(text));
                }
                MasterStatus::Running => {
                    stuck = Stuck::default();
                    printer.print("the master is running");
                }
                MasterStatus::Pending(why) => {
                    printer.print(&format!("the master is pending: {why}"));
                }
            },
            () = stuck.due() => {
                return Err(Failure::failed(format!(
                    "the master can't start: {}; `elasticdl delete {job} --namespace {namespace}` \
                     deletes the job",
                    stuck.why
                )));
            }
            _ = interrupt.recv() => return Ok(FollowEnd::Detached),
            _ = terminate.recv() => return Ok(FollowEnd::Detached),
        }
    }
}

fn detach(job: &str, namespace: &str) -> u8 {
    let text = format!(
        "\nThe job continues. Follow it with `elasticdl status {job} --namespace {namespace} \
         --watch`, stop it with `elasticdl stop {job} --namespace {namespace}`, delete it with \
         `elasticdl delete {job} --namespace {namespace}`."
    );
    // Standard error may be closed.
    let _ = writeln!(stderr(), "{text}");
    EXIT_INTERRUPTED
}

fn end(output: &OutputMode, text: &str) -> Result<u8, Failure> {
    let summary: Summary = serde_json::from_str(text).map_err(|e| {
        Failure::failed(format!("the summary in the job's anchor can't be read: {e}"))
    })?;
    if !output.quiet {
        let mut table = Vec::new();
        report::write_table(&mut table, &summary, Paths::default())
            .expect("a vector takes any bytes");
        let _ = stdout().write_all(&table);
    }
    if let Some(path) = &output.summary {
        jobdir::write_atomically(path, text.as_bytes()).map_err(|e| {
            Failure::failed(format!("can't write the summary {}: {e}", path.display()))
        })?;
    }
    if let Some(error) = &summary.error {
        super::print_error(error);
    }
    Ok(code_of_state(&summary.state))
}

/// Start failure of the master.
#[derive(Default)]
struct Stuck {
    since: Option<Instant>,
    why: String,
}

impl Stuck {
    /// Completes when the master has been unable to start for too long.
    async fn due(&self) {
        match self.since {
            Some(since) => tokio::time::sleep_until(since + STUCK_MAX).await,
            None => std::future::pending().await,
        }
    }
}

/// Prints the changes between statuses.
struct Printer {
    progress: Progress,
    start: Instant,
    events: Vec<String>,
    /// Number of event lines up to the last status.
    events_emitted: u64,
    last: String,
}

impl Printer {
    fn new(quiet: bool) -> Self {
        let progress = if quiet { Progress::quiet() } else { Progress::on_stderr() };
        Self {
            progress,
            start: Instant::now(),
            events: Vec::new(),
            events_emitted: 0,
            last: String::new(),
        }
    }

    fn now(&self) -> Time {
        Time(self.start.elapsed())
    }

    fn show(&mut self, data: &Data) {
        let Some(status) =
            data.get(STATUS).and_then(|text| serde_json::from_str::<StatusJson>(text).ok())
        else {
            return;
        };
        let new = unseen(&self.events, &status.events).to_vec();
        // A status holds only the newest lines, and is written at intervals.
        let missed = status
            .events_emitted
            .saturating_sub(self.events_emitted)
            .saturating_sub(new.len() as u64);
        if missed > 0 {
            self.print(&format!("({missed} lines before this are in the master's log)"));
        }
        let first = status.events.len() - new.len();
        for (index, event) in new.iter().enumerate() {
            let at = status
                .events_at_s
                .get(first + index)
                .copied()
                .filter(|at| at.is_finite() && *at >= 0.0);
            match at.and_then(|at| Duration::try_from_secs_f64(at).ok()) {
                Some(at) => self.print_at(Time(at), event),
                None => self.print(event),
            }
        }
        self.events_emitted = status.events_emitted;
        self.progress.show_line(self.now(), glance(&status));
        self.events = status.events;
    }

    /// Prints a line, unless it equals the previous one.
    fn print(&mut self, text: &str) {
        self.print_at(self.now(), text);
    }

    /// Like [`Printer::print`], with the time of the event.
    fn print_at(&mut self, time: Time, text: &str) {
        if self.last != text {
            self.last = text.into();
            self.progress.notice(time, text.into());
        }
    }
}

fn glance(status: &StatusJson) -> ProgressLine {
    let members = status.workers.iter().filter(|worker| worker.rank.is_some()).count();
    let loss = status.loss.map(|loss| format!(" · loss {loss:.4}")).unwrap_or_default();
    let text = format!(
        "{} · step {}{loss} · {} records/s · workers {members} of {} · generation {}",
        status.state,
        status.step,
        format_rate(status.records_per_s),
        status.workers_desired,
        status.generation
    );
    ProgressLine { progress: status.progress, step: status.step, text }
}

/// Lines of `now` that `before` does not have; both are the newest lines of one event log.
fn unseen<'a>(before: &[String], now: &'a [String]) -> &'a [String] {
    let overlap =
        (0..=before.len().min(now.len())).rev().find(|&len| before.ends_with(&now[..len]));
    &now[overlap.unwrap_or(0)..]
}

/// Time after which the command fails if the master is unable to start.
const STUCK_MAX: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.split_whitespace().map(Into::into).collect()
    }

    #[test]
    fn each_event_line_is_printed_once() {
        for (before, now, new) in [
            ("", "a b", "a b"),
            ("a b", "a b", ""),
            ("a b", "a b c", "c"),
            ("a b c", "c d", "d"),
            ("a b", "c d", "c d"),
            ("a a", "a a a", "a"),
            ("a b", "", ""),
        ] {
            assert_eq!(unseen(&lines(before), &lines(now)), lines(new), "{before} / {now}");
        }
    }
}
