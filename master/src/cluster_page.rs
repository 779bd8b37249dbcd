//! The page of a job in a cluster, served by this process.
//!
//! Status and history come from the job's anchor, and what the user requests goes there: as for the
//! commands, the API server alone has to be reachable, and the user's own rights apply.

use std::net::Ipv4Addr;
use std::time::Duration;

use elasticdl_proto::{Status, Summary};
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::dashboard::{PageCommand, RemotePage, ScaleLimits, StoredHistory, report_of};
use crate::exit::{Failure, cannot};
use crate::job::JobSpec;
use crate::kube::anchor::{self, Anchor, AnchorEvent, Data, HISTORY, STOP, SUMMARY};
use crate::kube::client::Cluster;
use crate::kube::inspection;
use crate::kube::requests::request;
use crate::kube::{scaling, silence};

/// The page of a job, which this process serves until the value is dropped.
#[derive(Debug)]
pub struct ClusterPage {
    cluster: Cluster,
    job: String,
    anchor: Anchor,
    spec: JobSpec,
    page: RemotePage,
    /// Age of the job at [`ClusterPage::begun`].
    age: Duration,
    begun: Instant,
}

impl ClusterPage {
    /// Serves the page of `job` at `port`.
    ///
    /// # Errors
    /// There is no such job, or the port is taken.
    pub async fn open(cluster: &Cluster, job: &str, port: u16) -> Result<Self, Failure> {
        let anchor = Anchor::new(cluster, job);
        let read = anchor.read().await?;
        let age = anchor::age(&read.metadata, cluster.now().await);
        let data = read.data.unwrap_or_default();
        let unreadable = || Failure::failed("the job's options in its ConfigMap can't be read");
        let spec = scaling::task(&data).ok_or_else(unreadable)?.job;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.map_err(|error| {
            let wanted = "choose another";
            Failure::usage(format!("can't serve the page on --port {port}: {error}; {wanted}"))
        })?;
        let page = RemotePage::open(listener, ScaleLimits::from(&spec))
            .map_err(cannot("serve the page"))?;
        let (cluster, job) = (cluster.clone(), job.to_owned());
        let opened = Self { cluster, job, anchor, spec, page, age, begun: Instant::now() };
        opened.show(&data, anchor::status(&data));
        Ok(opened)
    }

    /// The link of the page, with its key.
    #[must_use]
    pub fn link(&self) -> &str {
        &self.page.link
    }

    /// Shows the anchor on the page, and carries out what users request there, until the job ends.
    ///
    /// # Errors
    /// The job can't be followed, or it was deleted.
    pub async fn follow(mut self) -> Result<(), Failure> {
        let mut watched = self.anchor.watch();
        let mut latest = Data::new();
        // Without a master the anchor does not change.
        let mut checks = tokio::time::interval(SILENCE_CHECK);
        loop {
            tokio::select! {
                _ = checks.tick() => {
                    if let Some(mut status) = anchor::status(&latest) {
                        silence::note(&self.cluster, &self.job, &latest, &mut status).await;
                        self.show(&latest, Some(status));
                    }
                }
                event = watched.next() => match event {
                    AnchorEvent::Forbidden(message) => {
                        return Err(Failure::failed(format!("can't follow the job: {message}")));
                    }
                    AnchorEvent::Deleted => {
                        let job = &self.job;
                        return Err(Failure::failed(format!("the job {job} has been deleted")));
                    }
                    AnchorEvent::Data(data) => {
                        self.show(&data, anchor::status(&data));
                        if data.contains_key(SUMMARY) {
                            self.page.end().await;
                            return Ok(());
                        }
                        if let Some(task) = scaling::task(&data) {
                            self.spec = task.job;
                        }
                        latest = data;
                    }
                },
                Some(request) = self.page.requests.recv() => {
                    let answer = self.carry_out(&latest, request.command).await;
                    // The page may have been closed.
                    let _ = request.reply.send(answer);
                }
            }
        }
    }

    /// Shows what the anchor holds, and `status`, if its master has reported one.
    fn show(&self, data: &Data, status: Option<Status>) {
        if let Some(status) = status {
            let history = stored_history(data).unwrap_or_default().history;
            let age = self.age + self.begun.elapsed();
            self.page.show(age.as_secs_f64(), status, history);
        }
    }

    async fn carry_out(&self, data: &Data, command: PageCommand) -> Result<String, String> {
        let keys = match command {
            PageCommand::Inspect => {
                let asked = inspection::ask(&self.cluster, &self.job).await;
                return asked.map(|found| found.to_string()).map_err(|error| error.to_string());
            }
            PageCommand::Scale(num_workers) => {
                scaling::rescale(data, &self.spec, num_workers.into())?.keys
            }
            PageCommand::Stop => Data::from([(STOP.into(), "true".into())]),
        };
        let requested = request(&self.cluster, &self.anchor, keys).await;
        requested.map(|()| String::new()).map_err(|error| error.to_string())
    }
}

/// The page of a job that has ended with `summary`, from the `data` of its anchor.
#[must_use]
pub fn report(summary: Summary, data: &Data) -> String {
    let stored = stored_history(data).map(|history| StoredHistory {
        status: anchor::status(data).unwrap_or_default(),
        ..history
    });
    report_of(summary, stored)
}

/// The history that the master has stored; `None` if there is none that this release can read.
fn stored_history(data: &Data) -> Option<StoredHistory> {
    StoredHistory::unpack(data.get(HISTORY)?).ok()
}

/// Interval at which the page checks whether the job has a master.
const SILENCE_CHECK: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;
    use crate::dashboard::{History, pack};
    use crate::job::testing::spec;
    use crate::job::{Job, Time};
    use crate::kube::anchor::{NUM_WORKERS, STATUS};
    use crate::kube::objects::{METRICS_PORT, TASK, Task};
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

    #[tokio::test]
    async fn a_page_shows_the_anchor_and_its_requests_reach_it() {
        let mut snapshot = Job::new(spec()).snapshot(Time(Duration::from_secs(5)));
        snapshot.status.step = 7;
        let mut history = History::default();
        history.observe(&snapshot);
        let status = snapshot.status.to_json_line();
        let task = Task {
            job: spec(),
            master_timeout: Duration::from_secs(60),
            priority_tiers: None,
            metrics_port: METRICS_PORT,
            serve_metrics: false,
            tensorboard_dir: None,
            gang: None,
        };
        let task = serde_json::to_string(&task).unwrap();
        let anchor = |summary: &str| {
            let mut data = json!({
                TASK: task, STATUS: status, HISTORY: pack(&history, 12 << 10).unwrap(),
            });
            if !summary.is_empty() {
                data[SUMMARY] = summary.into();
            }
            let labels = json!({"elasticdl/role": "anchor"});
            json!({
                "metadata": {"name": "j", "namespace": "ns", "uid": "anchor", "labels": labels},
                "data": data
            })
        };
        let (fake, cluster) = FakeServer::start();
        fake.put("configmaps", "j", anchor(""));
        let page = ClusterPage::open(&cluster, "j", 0).await.unwrap();
        let (link, most) = (page.link().to_owned(), spec().max_workers);
        let using = async {
            while !ask(&link, "GET /api/job", "").await.starts_with("HTTP/1.1 200") {
                tokio::task::yield_now().await;
            }
            let shown = ask(&link, "GET /api/job?wait", "").await;
            assert!(shown.contains("\"live\":true") && shown.contains("\"step\":7"), "{shown}");
            let body = format!("{{\"num_workers\":{most}}}");
            let answer = ask(&link, "POST /api/scale", &body).await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            let many = format!("{{\"num_workers\":{}}}", most + 1);
            let answer = ask(&link, "POST /api/scale", &many).await;
            assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
            let stored = fake.state().object("configmaps", "j").unwrap();
            assert_eq!(stored["data"][NUM_WORKERS], most.to_string());
            let waiting = ask(&link, "GET /api/job?wait", "");
            fake.put("configmaps", "j", anchor("{}"));
            assert!(waiting.await.contains("\"live\":false"));
        };
        let (followed, ()) = tokio::join!(page.follow(), using);
        assert!(followed.is_ok());
    }
}
