//! `elasticdl dashboard` for a job in a cluster: serves its page.

use elasticdl_master::cluster_page::ClusterPage;
use tokio::signal::unix::{SignalKind, signal};

use super::ClusterHandle;
use crate::process::{EXIT_INTERRUPTED, EXIT_OK, Failure, cannot, print, print_line};

/// Serves the page of a job at `port` until the job ends or the user ends the command. Returns the
/// exit code.
pub(super) async fn serve(job: &ClusterHandle, port: u16) -> Result<u8, Failure> {
    let no_signals = cannot("handle signals");
    let mut interrupt = signal(SignalKind::interrupt()).map_err(&no_signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(&no_signals)?;
    let page = ClusterPage::open(&job.cluster, &job.name, port).await?;
    print(&format!("{}\n", page.link()))?;
    print_line("The page is served until the job ends, or until Ctrl-C; the job continues.");
    tokio::select! {
        followed = page.follow() => followed?,
        _ = interrupt.recv() => return Ok(EXIT_INTERRUPTED),
        _ = terminate.recv() => return Ok(EXIT_INTERRUPTED),
    }
    let name = &job.name;
    print_line(&format!(
        "the job {name} has ended; `elasticdl report {name} --namespace {} --html FILE` writes its \
         page",
        job.cluster.namespace
    ));
    Ok(EXIT_OK)
}
