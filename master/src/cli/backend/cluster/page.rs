//! The dashboard of a job in a cluster, served by this process.
//!
//! Status and history come from the job's anchor, and what the user requests goes there: as for the
//! other commands, the API server alone has to be reachable, and the user's own rights apply.

use std::net::Ipv4Addr;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::ConfigMap;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use super::{ClusterHandle, known_status, stored_history, task};
use crate::cli::process::{EXIT_INTERRUPTED, EXIT_OK, Failure, cannot, print, print_line};
use crate::dashboard::{PageCommand, RemotePage, ScaleLimits};
use crate::job::{JobSpec, Status};
use crate::kube::anchor::{AnchorEvent, Data, NUM_WORKERS, STOP, SUMMARY};

/// Serves the page of a job at `port` until the job ends or the user ends the command. Returns the
/// exit code.
pub(super) async fn serve(job: &ClusterHandle, port: u16) -> Result<u8, Failure> {
    let no_signals = cannot("handle signals");
    let mut interrupt = signal(SignalKind::interrupt()).map_err(&no_signals)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(&no_signals)?;
    let anchor = job.anchor.read().await?;
    let age = age_of(&anchor);
    let data = anchor.data.unwrap_or_default();
    let unreadable = || Failure::failed("the task in the job's anchor can't be read");
    let spec = task(&data).ok_or_else(unreadable)?.job;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.map_err(|error| {
        Failure::usage(format!("can't serve the page on --port {port}: {error}; choose another"))
    })?;
    let page =
        RemotePage::open(listener, ScaleLimits::from(&spec)).map_err(cannot("serve the page"))?;
    show(&page, age, &data, known_status(&data));
    print(&format!("{}\n", page.link))?;
    print_line("The page is served until the job ends, or until Ctrl-C; the job continues.");
    tokio::select! {
        followed = follow(job, page, &spec, age) => followed?,
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

/// Shows the anchor on the page, and carries out what users request there, until the job ends.
async fn follow(
    job: &ClusterHandle,
    mut page: RemotePage,
    spec: &JobSpec,
    age: Duration,
) -> Result<(), Failure> {
    let begun = Instant::now();
    let mut watched = job.anchor.watch();
    let mut latest = Data::new();
    // Without a master the anchor does not change.
    let mut checks = tokio::time::interval(SILENCE_CHECK);
    loop {
        tokio::select! {
            _ = checks.tick() => {
                if let Some(mut status) = known_status(&latest) {
                    job.note_silence(&latest, &mut status).await;
                    show(&page, age + begun.elapsed(), &latest, Some(status));
                }
            }
            event = watched.next() => match event {
                AnchorEvent::Forbidden(message) => {
                    return Err(Failure::failed(format!("can't follow the job: {message}")));
                }
                AnchorEvent::Deleted => {
                    return Err(Failure::failed(format!("the job {} has been deleted", job.name)));
                }
                AnchorEvent::Data(data) => {
                    show(&page, age + begun.elapsed(), &data, known_status(&data));
                    if data.contains_key(SUMMARY) {
                        page.end().await;
                        return Ok(());
                    }
                    latest = data;
                }
            },
            Some(request) = page.requests.recv() => {
                let answer = carry_out(job, spec, request.command).await;
                // The page may have been closed.
                let _ = request.reply.send(answer);
            }
        }
    }
}

/// Shows what the anchor holds, and `status`, if its master has reported one.
fn show(page: &RemotePage, age: Duration, data: &Data, status: Option<Status>) {
    if let Some(status) = status {
        let history = stored_history(data).unwrap_or_default().history;
        page.show(age.as_secs_f64(), status, history);
    }
}

async fn carry_out(
    job: &ClusterHandle,
    spec: &JobSpec,
    command: PageCommand,
) -> Result<(), String> {
    let requested = match command {
        PageCommand::Scale(num_workers) => {
            spec.check_scale(num_workers)?;
            job.request(NUM_WORKERS, num_workers.to_string()).await
        }
        PageCommand::Stop => job.request(STOP, "true".into()).await,
    };
    requested.map_err(|failure| failure.text)
}

/// Age of the job with this anchor. The clock of the API server may be ahead.
fn age_of(anchor: &ConfigMap) -> Duration {
    let born = anchor.metadata.creation_timestamp.as_ref().map(|time| SystemTime::from(time.0));
    born.and_then(|born| born.elapsed().ok()).unwrap_or_default()
}

/// Interval at which the page checks whether the job has a master.
const SILENCE_CHECK: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;
    use crate::cli::process::new_runtime;
    use crate::dashboard::{History, pack};
    use crate::job::testing::spec;
    use crate::job::{Job, Time};
    use crate::kube::anchor::{Anchor, HISTORY, STATUS};
    use crate::kube::testing::FakeServer;

    /// Sends a request to the page with this link.
    async fn ask(link: &str, request: &str, body: &str) -> String {
        let (address, key) = link.strip_prefix("http://").unwrap().split_once("/#").unwrap();
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!(
            "{request} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {key}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[test]
    fn a_page_shows_the_anchor_and_its_requests_reach_it() {
        let mut snapshot = Job::new(spec()).snapshot(Time(Duration::from_secs(5)));
        snapshot.status.step = 7;
        let mut history = History::default();
        history.observe(&snapshot);
        let status = snapshot.status.to_json_line();
        let anchor = |summary: &str| {
            let mut data = json!({
                "task": "{}", STATUS: status, HISTORY: pack(&history, 12 << 10).unwrap(),
            });
            if !summary.is_empty() {
                data[SUMMARY] = summary.into();
            }
            json!({"metadata": {"name": "j", "namespace": "ns", "uid": "anchor"}, "data": data})
        };
        let runtime = new_runtime().unwrap();
        let (fake, cluster) = runtime.block_on(async { FakeServer::start() });
        fake.put("configmaps", "j", anchor(""));
        let handle = ClusterHandle {
            anchor: Anchor::new(&cluster, "j"),
            runtime,
            cluster,
            name: "j".into(),
        };
        handle.runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let spec = spec();
            let page = RemotePage::open(listener, ScaleLimits::from(&spec)).unwrap();
            let link = page.link.clone();
            let using = async {
                while !ask(&link, "GET /api/job", "").await.starts_with("HTTP/1.1 200") {
                    tokio::task::yield_now().await;
                }
                let shown = ask(&link, "GET /api/job?wait", "").await;
                assert!(shown.contains("\"live\":true") && shown.contains("\"step\":7"), "{shown}");
                let body = format!("{{\"num_workers\":{}}}", spec.max_workers);
                let answer = ask(&link, "POST /api/scale", &body).await;
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
                let many = format!("{{\"num_workers\":{}}}", spec.max_workers + 1);
                let answer = ask(&link, "POST /api/scale", &many).await;
                assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
                let stored = fake.state().object("configmaps", "j").unwrap();
                assert_eq!(stored["data"][NUM_WORKERS], spec.max_workers.to_string());
                let waiting = ask(&link, "GET /api/job?wait", "");
                fake.put("configmaps", "j", anchor("{}"));
                assert!(waiting.await.contains("\"live\":false"));
            };
            let (followed, ()) = tokio::join!(follow(&handle, page, &spec, Duration::ZERO), using);
            assert!(followed.is_ok());
        });
    }
}
