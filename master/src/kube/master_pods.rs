//! State of a job's master in the cluster: its pods, and the Job that creates them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;

use super::client::Cluster;
use super::verdict::{Cause, Verdict, classify};
use super::watch::{Change, Selection, Watch};
use super::{anchor, objects, succession};

/// A running watch of a job's masters.
#[derive(Debug)]
pub struct MasterPods {
    job: Watch<Job>,
    pods: Watch<Pod>,
    events: Watch<Event>,
    known: JobUids,
}

/// Uids of the job's objects. Earlier jobs may have had objects of the same names.
#[derive(Debug, Default)]
struct JobUids {
    uids: BTreeSet<String>,
}

/// State of a master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MasterStatus {
    /// The master can't start without a change. The reason.
    CannotStart(String),
    /// The master has ended; another one may follow. The reason.
    Ended(String),
    /// The Job has failed; no other master will follow. The reason.
    Failed(String),
    /// The master is unschedulable. The reason.
    Pending(String),
    /// The master runs.
    Running,
}

impl MasterPods {
    /// Watches the masters of `job`. Must be called within a runtime.
    #[must_use]
    pub fn watch(cluster: &Cluster, job: &str) -> Self {
        let fields = Some(format!("metadata.name={}", objects::master_name(job)));
        let labels = Some(objects::master_selector(job));
        Self {
            job: Watch::start(cluster.api(), Selection { fields, labels: None }),
            pods: Watch::start(cluster.api(), Selection { fields: None, labels }),
            events: Watch::start(
                cluster.api(),
                Selection { fields: Some(WARNINGS.into()), labels: None },
            ),
            known: JobUids::default(),
        }
    }

    /// Returns the next state. Cancel-safe.
    pub async fn next(&mut self) -> MasterStatus {
        loop {
            let status = tokio::select! {
                change = self.pods.next() => match change {
                    Change::Applied(pod) => {
                        let status = status_of_pod(&pod);
                        let uid = pod.metadata.uid.unwrap_or_default();
                        // What has been mounted once may be gone without harm.
                        if status == Some(MasterStatus::Running) {
                            self.known.uids.remove(&uid);
                        } else {
                            self.known.uids.insert(uid);
                        }
                        status
                    }
                    _ => None,
                },
                change = self.job.next() => match change {
                    Change::Applied(job) => {
                        self.known.uids.extend(job.metadata.uid.clone());
                        status_of_job(&job)
                    }
                    _ => None,
                },
                // Without permission to read Events they are ignored.
                change = self.events.next() => match change {
                    Change::Applied(event) => self.known.warning(&event).map(MasterStatus::Pending),
                    _ => None,
                },
            };
            if let Some(status) = status {
                return status;
            }
        }
    }
}

impl JobUids {
    /// Returns the message of an Event that prevents a master from being created or started.
    fn warning(&self, event: &Event) -> Option<String> {
        let is_ours = event.involved_object.uid.as_ref().is_some_and(|uid| self.uids.contains(uid));
        let reason =
            event.reason.as_deref().filter(|reason| is_ours && REASONS.contains(reason))?;
        let message = event.message.as_deref().unwrap_or_default();
        Some(format!("{reason}: {message}"))
    }
}

/// State of a job's masters, read once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MasterHealth {
    /// Why the Job has failed and creates no more masters.
    pub failed: Option<String>,
    /// What prevents a master from running. `None` also if a master runs.
    pub obstacle: Option<String>,
}

/// Reads the state of the masters of `job`. Objects that the user has no permission to read are
/// left out.
pub async fn inspect(cluster: &Cluster, job: &str) -> MasterHealth {
    let mut known = JobUids::default();
    let jobs: Api<Job> = cluster.api();
    let Ok(Some(found)) = jobs.get_opt(&objects::master_name(job)).await else {
        return MasterHealth::default();
    };
    known.uids.extend(found.metadata.uid.clone());
    let failed = succession::failure_of(&found);
    if found.spec.as_ref().is_some_and(|spec| spec.suspend == Some(true)) {
        let obstacle = Some(format!(
            "the Job {} is suspended, so that no master runs; its workers go on alone for up to \
             --master-timeout: kubectl patch job {0} -p '{{\"spec\":{{\"suspend\":false}}}}' lets \
             it go on (`elasticdl suspend {job}` suspends a job with its workers)",
            objects::master_name(job)
        ));
        return MasterHealth { failed, obstacle };
    }
    if is_cut_off(&found, cluster.now().await) {
        let obstacle = format!(
            "its submission was cut off: `elasticdl delete {job} --namespace {}` removes what \
             there is of it",
            cluster.namespace
        );
        return MasterHealth { failed, obstacle: Some(obstacle) };
    }
    let pods: Api<Pod> = cluster.api();
    let list = pods.list(&ListParams::default().labels(&objects::master_selector(job))).await;
    let mut obstacle = None;
    for pod in list.map(|list| list.items).unwrap_or_default() {
        known.uids.extend(pod.metadata.uid.clone());
        match status_of_pod(&pod) {
            Some(MasterStatus::Running) => return MasterHealth { failed, obstacle: None },
            Some(MasterStatus::CannotStart(why) | MasterStatus::Pending(why)) => {
                obstacle = Some(why)
            }
            _ => {}
        }
    }
    if obstacle.is_none() {
        let events: Api<Event> = cluster.api();
        let list = events.list(&ListParams::default().fields(WARNINGS)).await;
        let mut list = list.map(|list| list.items).unwrap_or_default();
        list.sort_by_key(|event| event.last_timestamp.clone());
        obstacle = list.iter().rev().find_map(|event| known.warning(event));
    }
    MasterHealth { failed, obstacle }
}

/// Whether the command that submitted the job of this Job has ended before all objects of the job
/// existed: its last step lets the Job create a master.
pub(crate) fn is_cut_off(job: &Job, now: Timestamp) -> bool {
    let waits = job.spec.as_ref().is_some_and(|spec| spec.parallelism == Some(0));
    waits && anchor::age(&job.metadata, now) >= SUBMISSION_MAX
}

/// Whether the first pod of a master has been created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Creation {
    /// It exists.
    Created,
    /// The cluster refused it. Its message.
    Refused(String),
    /// Neither is known yet.
    Unknown,
}

/// Looks for the first pod of the master of `job`, whose Job has this uid.
pub(crate) async fn creation(cluster: &Cluster, job: &str, uid: &str) -> Creation {
    let pods: Api<Pod> = cluster.api();
    let list = pods.list(&ListParams::default().labels(&objects::master_selector(job))).await;
    if list.is_ok_and(|list| !list.items.is_empty()) {
        return Creation::Created;
    }
    let events: Api<Event> = cluster.api();
    let of_job = format!("reason=FailedCreate,involvedObject.uid={uid}");
    let list = events.list(&ListParams::default().fields(&of_job)).await;
    let messages = list.map(|list| list.items).unwrap_or_default();
    let mut messages = messages.into_iter().filter_map(|event| event.message);
    messages.find(|message| !is_transient(message)).map_or(Creation::Unknown, Creation::Refused)
}

/// Returns whether the controller's next attempt may succeed: servers before 1.24 create the token
/// of a new service account in the background.
fn is_transient(message: &str) -> bool {
    let refusals = ["forbidden", "denied", "webhook", "invalid"];
    message.contains("No API token found") || !refusals.iter().any(|word| message.contains(word))
}

/// Returns the jobs of the namespace whose Jobs have failed, and why. Objects that the user has no
/// permission to read are left out.
pub async fn failed_jobs(cluster: &Cluster) -> BTreeMap<String, String> {
    let jobs: Api<Job> = cluster.api();
    let list = jobs.list(&ListParams::default().labels(MANAGED)).await;
    let failed = |job: Job| {
        let name = job.metadata.labels.as_ref()?.get("app.kubernetes.io/instance")?.clone();
        Some((name, succession::failure_of(&job)?))
    };
    list.map(|list| list.items).unwrap_or_default().into_iter().filter_map(failed).collect()
}

fn status_of_pod(pod: &Pod) -> Option<MasterStatus> {
    match classify(pod) {
        Verdict::Created | Verdict::Starting => None,
        Verdict::CannotStart(why) => Some(MasterStatus::CannotStart(why)),
        Verdict::Ended(end) if end.cause == Cause::Exited(0) => None,
        Verdict::Ended(end) => Some(MasterStatus::Ended(end.brief())),
        Verdict::Terminating(leave) => Some(MasterStatus::Ended(leave.end.detail)),
        Verdict::Running => Some(MasterStatus::Running),
        Verdict::Queued(why) | Verdict::Unschedulable(why) => Some(MasterStatus::Pending(why)),
    }
}

fn status_of_job(job: &Job) -> Option<MasterStatus> {
    succession::failure_of(job).map(MasterStatus::Failed)
}

/// A submission takes a few seconds. While the API server can't answer, each of its calls is
/// repeated for a minute.
pub(crate) const SUBMISSION_MAX: Duration = Duration::from_secs(180);
const MANAGED: &str = "app.kubernetes.io/managed-by=elasticdl";
/// Reasons of Events about a Job that can't create a pod, or about a pod that can't start.
const REASONS: [&str; 3] = ["FailedCreate", "FailedCreatePodSandBox", "FailedMount"];
/// Field selector of these Events, as far as a server can select them.
const WARNINGS: &str = "type=Warning";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::kube::testing::FakeServer;

    #[test]
    fn a_failed_job_is_distinguished_from_a_running_one() {
        let job = |conditions: serde_json::Value| {
            let job: Job =
                serde_json::from_value(json!({"status": {"conditions": conditions}})).unwrap();
            status_of_job(&job)
        };
        let failed = json!([{
            "type": "Failed", "status": "True", "reason": "BackoffLimitExceeded",
            "message": "too many"
        }]);
        assert_eq!(
            job(failed),
            Some(MasterStatus::Failed("BackoffLimitExceeded: too many".into()))
        );
        assert_eq!(job(json!([{"type": "Failed", "status": "False"}])), None);
        assert_eq!(job(json!([{"type": "Complete", "status": "True"}])), None);
        assert_eq!(status_of_job(&Job::default()), None);
    }

    #[tokio::test]
    async fn a_submission_that_was_cut_off_is_known_by_its_job() {
        let (fake, cluster) = FakeServer::start();
        let put = |created: &str, parallelism: u32| {
            let metadata = json!({"name": "j-master", "creationTimestamp": created});
            let template = json!({"spec": {"containers": []}});
            let spec = json!({"parallelism": parallelism, "template": template});
            fake.put("jobs", "j-master", json!({"metadata": metadata, "spec": spec}));
        };
        // The clock of this host is years ahead.
        fake.state().date = Some("Wed, 01 May 2024 10:03:00 GMT");
        for (created, parallelism, is_cut) in [
            ("2024-05-01T10:00:00Z", 0, true),
            ("2024-05-01T10:00:01Z", 0, false),
            ("2024-05-01T10:00:00Z", 1, false),
        ] {
            put(created, parallelism);
            let health = inspect(&cluster, "j").await;
            let told = health.obstacle.is_some_and(|why| {
                why.contains("its submission was cut off: `elasticdl delete j --namespace ns`")
            });
            assert_eq!(told, is_cut, "{created} {parallelism}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_warning_about_the_pod_of_a_master_that_runs_is_no_news() {
        let (fake, cluster) = FakeServer::start();
        let pod = |status: serde_json::Value| {
            let labels = json!({"app.kubernetes.io/instance": "j"});
            let metadata = json!({"name": "j-master-1", "uid": "pod", "labels": labels});
            fake.put("pods", "j-master-1", json!({"metadata": metadata, "status": status}));
        };
        let warn = |name: &str| {
            let event = json!({
                "metadata": {"name": name, "uid": name}, "involvedObject": {"uid": "pod"},
                "type": "Warning", "reason": "FailedMount", "message": "no secret s",
            });
            fake.put("events", name, event);
        };
        let mut masters = MasterPods::watch(&cluster, "j");
        let next = async |masters: &mut MasterPods| {
            tokio::time::timeout(Duration::from_secs(20), masters.next()).await.ok()
        };
        pod(json!({"phase": "Pending"}));
        assert_eq!(next(&mut masters).await, None);
        warn("1");
        let why = MasterStatus::Pending("FailedMount: no secret s".into());
        assert_eq!(next(&mut masters).await, Some(why));
        let running = json!({
            "name": "master", "image": "i", "imageID": "", "ready": true, "restartCount": 0,
            "state": {"running": {}},
        });
        pod(json!({"phase": "Running", "containerStatuses": [running]}));
        assert_eq!(next(&mut masters).await, Some(MasterStatus::Running));
        warn("2");
        assert_eq!(next(&mut masters).await, None);
    }

    #[test]
    fn only_events_that_block_the_jobs_own_master_are_reported() {
        let mut known = JobUids::default();
        known.uids.extend(["job".to_owned()]);
        let event = |uid: &str, reason: &str| {
            let about = json!({"kind": "Job", "uid": uid});
            let event = json!({
                "metadata": {}, "involvedObject": about, "reason": reason, "message": "no quota"
            });
            known.warning(&serde_json::from_value(event).unwrap())
        };
        assert_eq!(event("job", "FailedCreate").unwrap(), "FailedCreate: no quota");
        assert_eq!(event("another", "FailedCreate"), None);
        assert_eq!(event("job", "BackOff"), None);
    }

    #[test]
    fn a_refusal_of_the_masters_pod_is_final_unless_its_account_is_being_prepared() {
        for refusal in [
            "Error creating: pods \"j-master-x\" is forbidden: failed quota: q: must specify",
            "Error creating: admission webhook \"p.example.com\" denied the request: no",
            "Error creating: Internal error occurred: failed calling webhook \"p\": no service",
            "Error creating: Pod \"j-master-x\" is invalid: spec",
        ] {
            assert!(!is_transient(refusal), "{refusal}");
        }
        assert!(is_transient("Error creating: etcdserver: request timed out"));
        assert!(is_transient(
            "Error creating: No API token found for service account \"j-master\", retry after the \
             token is automatically created and added to the service account"
        ));
    }

    #[test]
    fn a_master_that_exited_with_0_is_not_reported() {
        let pod = |code: i32| {
            let status = json!({"phase": "Failed", "containerStatuses": [{
                "name": "master", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": code, "message": "error: forbidden"}}
            }]});
            status_of_pod(&serde_json::from_value::<Pod>(json!({"status": status})).unwrap())
        };
        assert_eq!(pod(0), None);
        assert_eq!(
            pod(1),
            Some(MasterStatus::Ended("exited with code 1: error: forbidden".into()))
        );
    }
}
