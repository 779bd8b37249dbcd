//! Follows a job in a cluster through the API server: the port of the master is not reachable from
//! outside.

use std::path::PathBuf;
use std::time::Duration;

use elasticdl_master::job::Summary;
use elasticdl_master::jobdir;
use elasticdl_master::kube::anchor::{Anchor, AnchorEvent, Data, STATUS, SUMMARY};
use elasticdl_master::kube::client::Cluster;
use elasticdl_master::kube::master_pods::{MasterPods, MasterStatus};
use elasticdl_proto::Status;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

use super::unreadable;
use crate::process::{
    Console, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, Failure, cannot, code_of_summary,
    print_line,
};
use crate::render::{Paths, Printer, print_job_error, print_summary};

/// Output of [`follow`].
#[derive(Clone, Debug, Default)]
pub(crate) struct FollowOutput {
    /// What is printed.
    pub(crate) console: Console,
    /// Additional path for the summary.
    pub(crate) summary: Option<PathBuf>,
    /// What gets each status.
    pub(crate) statuses: Option<watch::Sender<Option<Status>>>,
}

/// Reason to stop following a job.
enum FollowEnd {
    /// The job has ended, with this summary.
    Summary(String),
    /// The user has ended the command.
    Detached,
}

/// Shows a job until it ends or the user ends the command. Returns the exit code.
pub(crate) async fn follow(
    cluster: &Cluster,
    job: &str,
    output: FollowOutput,
) -> Result<u8, Failure> {
    let mut printer = Printer::new(output.console.progress());
    let seen = observe(cluster, job, &mut printer, output.statuses.as_ref()).await;
    printer.end();
    match seen? {
        FollowEnd::Summary(summary) => end(&output, &summary),
        FollowEnd::Detached => Ok(detach(job, &cluster.namespace)),
    }
}

async fn observe(
    cluster: &Cluster,
    job: &str,
    printer: &mut Printer,
    statuses: Option<&watch::Sender<Option<Status>>>,
) -> Result<FollowEnd, Failure> {
    let no_signals = cannot("handle signals");
    let mut interrupt = signal(SignalKind::interrupt()).map_err(&no_signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(&no_signals)?;
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
                    Anchor::new(cluster, job).read().await?;
                }
                AnchorEvent::Data(data) => {
                    is_there = true;
                    show(printer, statuses, &data);
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
                    let anchor = Anchor::new(cluster, job).read().await?;
                    let data = anchor.data.unwrap_or_default();
                    if let Some(summary) = data.get(SUMMARY) {
                        show(printer, statuses, &data);
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

fn show(printer: &mut Printer, statuses: Option<&watch::Sender<Option<Status>>>, data: &Data) {
    if let Some(Ok(status)) = data.get(STATUS).map(|text| serde_json::from_str::<Status>(text)) {
        if let Some(statuses) = statuses {
            statuses.send_replace(Some(status.clone()));
        }
        printer.show(status);
    }
}

/// Says what becomes of a job that this command no longer follows. Returns the exit code.
pub(crate) fn detach(job: &str, namespace: &str) -> u8 {
    print_line(&format!(
        "\nThe job continues. Follow it with `elasticdl status {job} --namespace {namespace} \
         --watch`, stop it with `elasticdl stop {job} --namespace {namespace}`, delete it with \
         `elasticdl delete {job} --namespace {namespace}`."
    ));
    EXIT_INTERRUPTED
}

/// The exit code, by that of the master, as for a job of this machine: what runs after a completed
/// job must not run after one that a user has stopped.
fn code_of(master: u8, state: &str, stop_reason: Option<&str>) -> u8 {
    match (master, state, stop_reason) {
        (EXIT_OK, "stopped", None) => EXIT_TERMINATED,
        (code, ..) => code,
    }
}

fn end(output: &FollowOutput, text: &str) -> Result<u8, Failure> {
    let summary: Summary =
        serde_json::from_str(text).map_err(|error| unreadable("summary", &error))?;
    print_summary(output.console, &summary, Paths::default());
    if let Some(path) = &output.summary {
        jobdir::write_output(path, text.as_bytes())
            .map_err(cannot(&format!("write the summary {}", path.display())))?;
    }
    if let Some(error) = &summary.error {
        print_job_error(output.console, summary.wall_s, error);
    }
    let code = code_of_summary(&summary);
    Ok(code_of(code, &summary.state, summary.stop_reason.as_deref()))
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

/// Time after which the command fails if the master is unable to start.
const STUCK_MAX: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_a_user_has_stopped_has_a_code_of_its_own() {
        assert_eq!(code_of(EXIT_OK, "completed", None), EXIT_OK);
        assert_eq!(code_of(EXIT_OK, "stopped", None), EXIT_TERMINATED);
        assert_eq!(code_of(EXIT_OK, "stopped", Some("the deadline has passed")), EXIT_OK);
        assert_eq!(code_of(1, "stopped", None), 1);
    }
}
