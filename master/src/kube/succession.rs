//! Ensures that another master follows one that is ending, or that none does.
//!
//! The Job replaces each master that ends, but doubles its back-off each time: from Kubernetes 1.26
//! on a pod that is deleted or evicted counts as a failure, and a job that runs for weeks is
//! drained and preempted often. So a master that receives SIGTERM creates the next one itself: a
//! pod like the Job's own, which the anchor owns. If the Job creates one too, that one waits for
//! the leader Lease, and becomes the master after the next.
//!
//! A master that is lost without SIGTERM (it crashed, or its node is gone) is replaced by the Job,
//! for the first time after ten seconds. From then on the Job would wait twice as long each time,
//! so a master that leads keeps a *standby*: another pod, on another node if there is one, that
//! waits for the leader Lease and takes it within seconds after the end of its holder.

use std::convert::Infallible;
use std::time::Duration;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Pod, PodAffinityTerm, WeightedPodAffinityTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::client::{Cluster, ClusterError};
use super::leader_lease::{Holder, LeaseGuard};
use super::objects;
use super::state_labels::patch_of;
use super::verdict::{Verdict, classify};
use crate::job::Snapshot;

/// What follows a master that is ending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NextMaster {
    /// Another master: it exists, or the Job will create it.
    Expected,
    /// None: the Job has ended for good, or is about to. The reason.
    Unwanted(String),
}

/// Ensures that another master follows this one, `holder`, which is ending.
///
/// # Errors
/// The server refuses, or does not answer. The Job creates another master later.
pub(crate) async fn ensure_successor(
    cluster: &Cluster,
    anchor: &ObjectMeta,
    holder: &Holder,
) -> Result<NextMaster, ClusterError> {
    let name = anchor.name.as_deref().unwrap_or_default();
    let doing = "create the next master";
    let jobs: Api<Job> = cluster.api();
    let job =
        jobs.get_opt(&objects::master_name(name)).await.map_err(|e| cluster.explain(doing, e))?;
    let Some(job) = job.filter(|job| job.metadata.deletion_timestamp.is_none()) else {
        return Ok(NextMaster::Unwanted("the job is being deleted".into()));
    };
    let now = cluster.now().await;
    if let Some(why) = failure_of(&job).or_else(|| overdue(&job, now)) {
        return Ok(NextMaster::Unwanted(why));
    }
    if may_have_masters(&job) {
        create_if_missing(cluster, &job, anchor, holder).await?;
    }
    Ok(NextMaster::Expected)
}

/// Keeps a standby while this master, `holder`, leads, from the first failed master of the Job on,
/// and tells what is `published` in the labels of the Job. Never completes.
pub(crate) async fn keep_standby(
    cluster: &Cluster,
    anchor: &ObjectMeta,
    holder: &Holder,
    mut guard: LeaseGuard,
    published: watch::Receiver<Option<Snapshot>>,
) -> Infallible {
    let mut was_refused = false;
    loop {
        let labels = published.borrow().as_ref().map(|known| patch_of(&known.status));
        let ensured = guard.during(ensure_standby(cluster, anchor, holder, labels)).await;
        if let Some(Err(error)) = &ensured
            && !was_refused
        {
            warn!(%error, "a lost master will be replaced by the Job, after its back-off");
        }
        was_refused = matches!(ensured, Some(Err(_)));
        sleep(STANDBY_INTERVAL).await;
    }
}

/// `patch`: what the Job is to tell. With it, the Job is patched in place of being read.
async fn ensure_standby(
    cluster: &Cluster,
    anchor: &ObjectMeta,
    holder: &Holder,
    patch: Option<Value>,
) -> Result<(), ClusterError> {
    let name = objects::master_name(anchor.name.as_deref().unwrap_or_default());
    let jobs: Api<Job> = cluster.api();
    let patched = match patch {
        Some(patch) => jobs.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await.ok(),
        None => None,
    };
    let job = match patched {
        Some(job) => Some(job),
        None => jobs
            .get_opt(&name)
            .await
            .map_err(|error| cluster.explain("read the master's Job", error))?,
    };
    let has_failures = |job: &Job| job.status.as_ref().and_then(|status| status.failed) > Some(0);
    let is_over =
        |job: &Job| job.metadata.deletion_timestamp.is_some() || failure_of(job).is_some();
    match job.filter(|job| has_failures(job) && !is_over(job) && may_have_masters(job)) {
        Some(job) => create_if_missing(cluster, &job, anchor, holder).await,
        None => Ok(()),
    }
}

/// Whether the user lets the Job run.
fn may_have_masters(job: &Job) -> bool {
    let spec = job.spec.as_ref();
    !spec.is_some_and(|spec| spec.suspend == Some(true) || spec.parallelism == Some(0))
}

/// Creates another master than `holder`, unless there is one.
async fn create_if_missing(
    cluster: &Cluster,
    job: &Job,
    anchor: &ObjectMeta,
    holder: &Holder,
) -> Result<(), ClusterError> {
    let doing = "create the next master";
    let selector = objects::master_selector(anchor.name.as_deref().unwrap_or_default());
    let pods: Api<Pod> = cluster.api();
    let list = pods.list(&ListParams::default().labels(&selector)).await;
    let list = list.map_err(|e| cluster.explain(doing, e))?;
    let follows = |pod: &Pod| {
        let is_other = pod.metadata.uid.as_ref() != Some(&holder.uid);
        is_other
            && pod.metadata.deletion_timestamp.is_none()
            && !matches!(classify(pod), Verdict::Ended(_))
    };
    if list.items.iter().any(follows) {
        return Ok(());
    }
    if let Some(pod) = successor(job, anchor, &selector) {
        let created = pods.create(&PostParams::default(), &pod).await;
        let created = created.map_err(|e| cluster.explain(doing, e))?;
        info!(pod = created.metadata.name, "the next master is created");
    }
    Ok(())
}

/// Returns why a Job has failed, or is about to. `None`: it has not failed.
pub(crate) fn failure_of(job: &Job) -> Option<String> {
    let mut conditions = job.status.as_ref()?.conditions.iter().flatten();
    let failed = conditions
        .rfind(|c| ["Failed", "FailureTarget"].contains(&c.type_.as_str()) && c.status == "True")?;
    let parts = [&failed.reason, &failed.message].map(|text| text.clone().unwrap_or_default());
    Some(parts.join(": "))
}

/// Returns an error if the Job's deadline has passed, even if its status does not show that yet.
fn overdue(job: &Job, now: Timestamp) -> Option<String> {
    let limit = job.spec.as_ref()?.active_deadline_seconds?;
    let start = &job.status.as_ref()?.start_time.as_ref()?.0;
    let age = now.as_second().saturating_sub(start.as_second());
    (age >= limit).then(|| format!("DeadlineExceeded: the job has run for longer than {limit} s"))
}

/// Builds a pod like the Job's own that does not belong to the Job. It prefers another node than
/// the other masters, whose labels are `selector`.
fn successor(job: &Job, anchor: &ObjectMeta, selector: &str) -> Option<Pod> {
    let template = &job.spec.as_ref()?.template;
    let mut metadata = objects::owned(anchor, "", "master");
    metadata.name = None;
    metadata.generate_name = Some(format!("{}-", job.metadata.name.as_deref()?));
    if let Some(of) = &template.metadata {
        metadata.annotations.clone_from(&of.annotations);
        let labels = metadata.labels.get_or_insert_default();
        for (key, value) in of.labels.iter().flatten() {
            if !JOB_CONTROLLER_LABELS.contains(&key.as_str()) {
                labels.entry(key.clone()).or_insert_with(|| value.clone());
            }
        }
    }
    let mut spec = template.spec.clone()?;
    let labels = selector.split(',').filter_map(|label| label.split_once('='));
    let others = LabelSelector {
        match_labels: Some(labels.map(|(key, value)| (key.into(), value.into())).collect()),
        ..LabelSelector::default()
    };
    let apart = WeightedPodAffinityTerm {
        pod_affinity_term: PodAffinityTerm {
            label_selector: Some(others),
            topology_key: "kubernetes.io/hostname".into(),
            ..PodAffinityTerm::default()
        },
        weight: 100,
    };
    let affinity = spec.affinity.get_or_insert_default().pod_anti_affinity.get_or_insert_default();
    let preferred = &mut affinity.preferred_during_scheduling_ignored_during_execution;
    preferred.get_or_insert_default().push(apart);
    Some(Pod { metadata, spec: Some(spec), status: None })
}

/// Raises the back-off limit of the Job `job`: once a master leads the training job, no number of
/// lost masters makes the Job fail.
pub(crate) async fn raise_backoff_limit(cluster: &Cluster, job: &str) {
    if let Err(error) = limit(cluster, job, BACKOFF_LIMIT).await {
        warn!(%error, "lost masters count against the Job's backoffLimit");
    }
}

/// Lowers the back-off limit of the Job `job`, so that it fails with this master's exit and creates
/// no other. `led`: this master has led the training job to its failure; otherwise an earlier one
/// has, and the Job may fail at once.
pub(crate) async fn stop_replacements(cluster: &Cluster, job: &str, led: bool) {
    let start = Instant::now();
    loop {
        let error = match try_stop_replacements(cluster, job, led).await {
            Ok(()) => return,
            Err(error) => error,
        };
        if !matches!(error, ClusterError::Unreachable { .. }) || start.elapsed() >= RETRY_TIME_MAX {
            warn!(
                %error,
                "can't lower the Job's backoffLimit: more masters are created, and find it ended"
            );
            return;
        }
        sleep(PAUSE).await;
    }
}

/// Fails the Job of a job whose anchor was deleted, and all objects of the job with it: no master
/// can start without them. A Job that is deleted too is left alone.
pub(crate) async fn fail_without_anchor(cluster: &Cluster, name: &str) {
    let jobs: Api<Job> = cluster.api();
    let master = objects::master_name(name);
    let job = jobs.get_opt(&master).await;
    if matches!(&job, Ok(Some(job)) if job.metadata.deletion_timestamp.is_none()) {
        warn!(
            "the job's ConfigMap was deleted without its Job: the Job fails; delete it with \
             `elasticdl delete {name}`"
        );
        stop_replacements(cluster, &master, true).await;
    }
}

async fn try_stop_replacements(
    cluster: &Cluster,
    job: &str,
    led: bool,
) -> Result<(), ClusterError> {
    let failed = if led {
        let jobs: Api<Job> = cluster.api();
        let found = jobs.get(job).await;
        let found = found.map_err(|error| cluster.explain("read the Job", error))?;
        // A limit below the number of failed pods would end this pod at once, and its log with
        // it.
        found.status.and_then(|status| status.failed).unwrap_or(0)
    } else {
        0
    };
    limit(cluster, job, failed).await
}

async fn limit(cluster: &Cluster, job: &str, limit: i32) -> Result<(), ClusterError> {
    let jobs: Api<Job> = cluster.api();
    let patch = Patch::Merge(json!({"spec": {"backoffLimit": limit}}));
    let patched = jobs.patch(job, &PatchParams::default(), &patch).await;
    patched.map(drop).map_err(|error| cluster.explain("set the Job's backoffLimit", error))
}

/// Labels by which the Job controller finds the pods of a Job.
const JOB_CONTROLLER_LABELS: [&str; 4] = [
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-name",
    "controller-uid",
    "job-name",
];
/// Back-off limit of a Job that a master has led.
pub(crate) const BACKOFF_LIMIT: i32 = 1_000_000;
/// Interval at which a leading master looks for its standby.
const STANDBY_INTERVAL: Duration = Duration::from_secs(60);
const RETRY_TIME_MAX: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::super::testing::FakeServer;
    use super::*;

    fn job(spec: &Value, status: &Value) -> Value {
        let mut spec = spec.clone();
        spec["template"] = json!({
            "metadata": {
                "labels": {
                    "controller-uid": "x", "job-name": "j-master", "elasticdl/role": "master",
                    "sidecar.istio.io/inject": "false"
                },
                "annotations": {"a": "b"}
            },
            "spec": {"containers": [{"name": "master", "image": "i"}], "priorityClassName": "high"}
        });
        json!({"metadata": {"name": "j-master", "uid": "job"}, "spec": spec, "status": status})
    }

    fn anchor() -> ObjectMeta {
        serde_json::from_value(json!({"name": "j", "namespace": "ns", "uid": "anchor"})).unwrap()
    }

    fn master(name: &str, status: &Value) -> Value {
        json!({"metadata": {"name": name, "uid": format!("uid-of-{name}")}, "status": status})
    }

    /// Returns what follows the master `one`, and the pods that were created.
    async fn terminated_master(job: Value, others: &[Value]) -> (NextMaster, Vec<Value>) {
        let (fake, cluster) = FakeServer::start();
        fake.put("jobs", "j-master", job);
        fake.put("pods", "one", master("one", &json!({"phase": "Running"})));
        for other in others {
            fake.put("pods", other["metadata"]["name"].as_str().unwrap(), other.clone());
        }
        let holder = Holder { pod: "one".into(), uid: "uid-of-one".into() };
        let next = ensure_successor(&cluster, &anchor(), &holder).await.unwrap();
        let created = |pod: &Value| !pod["metadata"]["generateName"].is_null();
        let pods = fake.state().all("pods").into_iter().filter(created).collect();
        (next, pods)
    }

    #[tokio::test(start_paused = true)]
    async fn a_master_that_is_terminated_creates_a_successor_that_the_job_does_not_count() {
        let (next, created) =
            terminated_master(job(&json!({"parallelism": 1}), &json!({})), &[]).await;
        assert_eq!((next, created.len()), (NextMaster::Expected, 1));
        let meta = &created[0]["metadata"];
        assert_eq!(
            (&meta["generateName"], &meta["annotations"]),
            (&json!("j-master-"), &json!({"a": "b"}))
        );
        let labels = &meta["labels"];
        assert_eq!(
            (&labels["controller-uid"], &labels["elasticdl/role"]),
            (&Value::Null, &json!("master"))
        );
        assert_eq!((&labels["elasticdl/job"], &labels["job-name"]), (&json!("j"), &Value::Null));
        assert_eq!(labels["sidecar.istio.io/inject"], "false");
        let owner = &meta["ownerReferences"][0];
        assert_eq!((&owner["kind"], &owner["uid"]), (&json!("ConfigMap"), &json!("anchor")));
        assert_eq!(created[0]["spec"]["priorityClassName"], "high");
    }

    #[tokio::test(start_paused = true)]
    async fn no_successor_is_created_where_one_exists_or_none_is_wanted() {
        let runs = json!({"phase": "Running"});
        let mut dying = master("two", &runs);
        dying["metadata"]["deletionTimestamp"] = "2024-05-01T10:00:00Z".into();
        let spec = json!({"parallelism": 1});
        let failed = json!({"conditions": [
            {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "m"}
        ]});
        let old = json!({"startTime": "2020-01-01T00:00:00Z"});
        let unwanted = |why: &str| NextMaster::Unwanted(why.into());
        let late = "DeadlineExceeded: the job has run for longer than 60 s";
        // Specification of the Job, its status, another pod, what follows, and the number of
        // created pods.
        let table = [
            (spec.clone(), json!({}), Some(master("two", &runs)), NextMaster::Expected, 0),
            (
                spec.clone(),
                json!({}),
                Some(master("two", &json!({"phase": "Pending"}))),
                NextMaster::Expected,
                0,
            ),
            (
                spec.clone(),
                json!({}),
                Some(master("two", &json!({"phase": "Failed"}))),
                NextMaster::Expected,
                1,
            ),
            (spec.clone(), json!({}), Some(dying), NextMaster::Expected, 1),
            (json!({"parallelism": 1, "suspend": true}), json!({}), None, NextMaster::Expected, 0),
            (spec.clone(), failed, None, unwanted("BackoffLimitExceeded: m"), 0),
            (json!({"parallelism": 1, "activeDeadlineSeconds": 60}), old, None, unwanted(late), 0),
        ];
        for (spec, status, other, next, count) in table {
            let others: Vec<Value> = other.into_iter().collect();
            let (found, created) = terminated_master(job(&spec, &status), &others).await;
            assert_eq!((found, created.len()), (next, count), "{spec} {status} {others:?}");
        }
        let mut deleted = job(&spec, &json!({}));
        deleted["metadata"]["deletionTimestamp"] = "2024-05-01T10:00:00Z".into();
        assert_eq!(terminated_master(deleted, &[]).await.0, unwanted("the job is being deleted"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_leading_master_keeps_one_standby_once_a_master_has_failed() {
        let (fake, cluster) = FakeServer::start();
        fake.put("pods", "one", master("one", &json!({"phase": "Running"})));
        let holder = Holder { pod: "one".into(), uid: "uid-of-one".into() };
        let spec = json!({"parallelism": 1});
        let standbys = || {
            let pods = fake.state().all("pods");
            pods.into_iter().filter(|pod| pod["metadata"]["generateName"].is_string()).collect()
        };
        let failed = json!({"failed": 1});
        let over = json!({"failed": 1, "conditions": [{"type": "Failed", "status": "True"}]});
        let told = json!({"metadata": {"labels": {"told": "1"}}});
        for (status, expected) in [(json!({}), 0), (over, 0), (failed.clone(), 1), (failed, 1)] {
            fake.put("jobs", "j-master", job(&spec, &status));
            let patch = (expected == 1).then(|| told.clone());
            ensure_standby(&cluster, &anchor(), &holder, patch).await.unwrap();
            let labels = fake.state().object("jobs", "j-master").unwrap()["metadata"].clone();
            assert_eq!(labels["labels"]["told"] == "1", expected == 1);
            let found: Vec<Value> = standbys();
            assert_eq!(found.len(), expected, "{status}: {found:?}");
        }
        let standby: Vec<Value> = standbys();
        let apart = &standby[0]["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
            [0]["podAffinityTerm"];
        assert_eq!(apart["topologyKey"], "kubernetes.io/hostname");
        let labels = json!({"elasticdl/job": "j", "elasticdl/role": "master"});
        assert_eq!(apart["labelSelector"]["matchLabels"], labels);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_jobs_back_off_limit_is_its_number_of_failures_or_0_if_seen_again() {
        let (fake, cluster) = FakeServer::start();
        fake.put("jobs", "j-master", job(&json!({"backoffLimit": 6}), &json!({"failed": 4})));
        let limit =
            || fake.state().object("jobs", "j-master").unwrap()["spec"]["backoffLimit"].clone();
        raise_backoff_limit(&cluster, "j-master").await;
        assert_eq!(limit(), 1_000_000);
        stop_replacements(&cluster, "j-master", true).await;
        assert_eq!(limit(), 4);
        stop_replacements(&cluster, "j-master", false).await;
        assert_eq!(limit(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_job_of_a_deleted_anchor_fails_unless_it_is_being_deleted_too() {
        let (fake, cluster) = FakeServer::start();
        for (deleted_at, limit) in [(Value::Null, 4), ("2024-05-01T10:00:00Z".into(), 6)] {
            let mut left = job(&json!({"backoffLimit": 6}), &json!({"failed": 4}));
            left["metadata"]["deletionTimestamp"] = deleted_at;
            fake.put("jobs", "j-master", left);
            fail_without_anchor(&cluster, "j").await;
            let job = fake.state().object("jobs", "j-master").unwrap();
            assert_eq!(job["spec"]["backoffLimit"], limit);
        }
    }
}
