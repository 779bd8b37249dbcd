//! Labels of a job's Jobs that tell its state, so that `kubectl get jobs -L elasticdl/state` shows
//! it and selectors find it: of the Job that runs the master, and of the Job that declares the job,
//! if one does.
//!
//! Conditions in the status of a Job would need the right to write `jobs/status`, by which a master
//! could forge the end of any Job, and `kubectl get` has no columns for them.

use std::convert::Infallible;
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use super::client::Cluster;
use super::objects;
use crate::job::{Snapshot, Status};

/// Writes the labels.
#[derive(Debug)]
pub(crate) struct StateLabels {
    jobs: Api<Job>,
    /// Job that runs the master.
    master: String,
    /// Job that declares the job.
    declaring: Option<String>,
    /// What was written last, and when.
    written: Option<(Instant, Labels)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Labels {
    state: String,
    workers: String,
}

impl StateLabels {
    /// Finds the Jobs of the job `name`.
    pub(crate) async fn of_job(cluster: &Cluster, name: &str) -> Self {
        let jobs: Api<Job> = cluster.api();
        let master = objects::master_name(name);
        let found = timeout(CALL_TIMEOUT, jobs.get_opt(&master)).await;
        let found = found.ok().and_then(Result::ok).flatten();
        let owners = found.and_then(|job| job.metadata.owner_references).unwrap_or_default();
        let declaring = owners.into_iter().find(|owner| owner.kind == "Job");
        Self { jobs, master, declaring: declaring.map(|owner| owner.name), written: None }
    }

    /// Writes the state and the number of workers after each change, at most every five seconds.
    pub(crate) async fn keep(
        &mut self,
        mut published: watch::Receiver<Option<Snapshot>>,
    ) -> Infallible {
        loop {
            let status = published.borrow_and_update().as_ref().map(|known| known.status.clone());
            let due = status.as_ref().and_then(|status| self.due(&Labels::of(status)));
            tokio::select! {
                changed = published.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    self.write(&status.expect("it is due")).await;
                }
            }
        }
    }

    fn due(&self, labels: &Labels) -> Option<Instant> {
        match &self.written {
            None => Some(Instant::now()),
            Some((_, known)) if known == labels => None,
            Some((at, _)) => Some(*at + CHANGE_INTERVAL),
        }
    }

    /// Writes the labels of a status.
    pub(crate) async fn write(&mut self, status: &Status) {
        let labels = Labels::of(status);
        let Labels { state, workers } = &labels;
        let told = json!({"elasticdl/state": state, "elasticdl/workers": workers});
        self.patch(&self.master, patch_of(status)).await;
        if let Some(declaring) = &self.declaring {
            self.patch(declaring, json!({"metadata": {"labels": told}})).await;
        }
        self.written = Some((Instant::now(), labels));
    }

    async fn patch(&self, job: &str, patch: Value) {
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        match timeout(CALL_TIMEOUT, self.jobs.patch(job, &params, &patch)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => debug!(%error, job, "the Job's labels are not written"),
            Err(_) => debug!(job, "the Job's labels are not written: no answer"),
        }
    }
}

impl Labels {
    fn of(status: &Status) -> Self {
        Self {
            state: status.state.clone().into_owned(),
            workers: format!("{}-of-{}", status.members().count(), status.workers_desired),
        }
    }
}

/// The patch of the master's Job that tells a status. A leading master applies it each minute in
/// place of reading the Job, so that progress costs no call.
pub(crate) fn patch_of(status: &Status) -> Value {
    let Labels { state, workers } = Labels::of(status);
    let labels = json!({
        "elasticdl/state": state,
        "elasticdl/workers": workers,
        "elasticdl/progress": format!("{:.0}", (status.progress * 100.0).floor()),
    });
    json!({"metadata": {"labels": labels}})
}

const CALL_TIMEOUT: Duration = Duration::from_secs(5);
const CHANGE_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::super::testing::FakeServer;
    use super::*;
    use crate::job::testing::spec;
    use crate::job::{Job as TrainingJob, Time};

    #[tokio::test(start_paused = true)]
    async fn the_jobs_of_a_declared_job_tell_each_change_of_its_state_and_of_its_workers() {
        let (fake, cluster) = FakeServer::start();
        let template = json!({"spec": {"containers": []}});
        let put = |name: &str, owners: Value| {
            let metadata = json!({"name": name, "ownerReferences": owners});
            fake.put("jobs", name, json!({"metadata": metadata, "spec": {"template": template}}));
        };
        put("j", json!([]));
        let owner = json!({"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "doc"});
        put("j-master", json!([owner]));
        let mut labels = StateLabels::of_job(&cluster, "j").await;
        let mut snapshot = TrainingJob::new(spec()).snapshot(Time::default());
        let (publish, published) = watch::channel(None);
        let keeping = tokio::spawn(async move { labels.keep(published).await });
        let mut shown = async |state: &'static str, progress: f64, wait_s: u64| {
            (snapshot.status.state, snapshot.status.progress) = (state.into(), progress);
            publish.send_replace(Some(snapshot.clone()));
            tokio::time::sleep(Duration::from_secs(wait_s)).await;
            let labels = ["j", "j-master"].map(|name| {
                let job = fake.state().object("jobs", name).unwrap();
                job["metadata"]["labels"].clone()
            });
            let [declaring, master] = labels;
            for key in ["elasticdl/state", "elasticdl/workers"] {
                assert_eq!(declaring[key], master[key]);
            }
            ["state", "progress"].map(|key| master[format!("elasticdl/{key}")].clone())
        };
        assert_eq!(shown("running", 0.0, 1).await, ["running", "0"]);
        // Mere progress is written with the look for a standby.
        assert_eq!(shown("running", 0.429, 60).await, ["running", "0"]);
        assert_eq!(shown("suspended", 0.439, 1).await, ["suspended", "43"]);
        assert_eq!(shown("running", 0.44, 2).await, ["suspended", "43"]);
        assert_eq!(shown("running", 0.44, 3).await, ["running", "44"]);
        keeping.abort();
        let calls = fake.state().calls.iter().filter(|(_, kind)| kind == "PATCH jobs").count();
        assert_eq!(calls, 6);
    }
}
