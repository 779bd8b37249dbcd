//! A declared job: a batch/v1 Job that a user applies, whose annotation [`OPTIONS`] has the options
//! of the training job. Its pod runs `elasticdl declare`, which submits the training job, carries
//! changes of the annotation over to it, and ends as it ends.
//!
//! ```text
//!  Job <job>, the document ──owns──► Job <job>-master ──owns──► anchor ──owns──► the rest
//! ```
//!
//! **Invariant:** of the document only `spec.backoffLimit` is written, which users leave out, so
//! that what they have applied stays what the cluster has.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use serde::{Deserialize, Serialize};
use tracing::debug;

use super::anchor::{Anchor, Data, SUSPEND};
use super::client::{Cluster, ClusterError};
use super::objects::{self, Objects, Task};
use super::requests::request;
use super::retry::retry;
use super::scaling::{self, Rescaling};
use super::watch::{Change, Selection, Watch};
use super::{events, succession};
use crate::job::Scaling;

/// The Job to which the pod of this process belongs.
#[derive(Clone, Debug)]
pub struct Declaration {
    cluster: Cluster,
    /// Name of the Job.
    pub name: String,
    uid: String,
    /// Image of the pod.
    pub image: String,
}

/// Who has the name of a declared job in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// No job, but a ConfigMap has the name of the job's own.
    ConfigMap,
    /// This declaration, whose submission was cut off.
    CutOff,
    /// This declaration, whose submission is complete.
    Declaration,
    /// A job that was deleted, whose objects the cluster still removes.
    Former,
    /// No job.
    None,
    /// Another job.
    Other,
}

/// What a declaration asks for that a job can change while it runs; `None`: what stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Number of workers, and its limits.
    pub scaling: Scaling,
    /// Whether the job is suspended.
    pub suspend: Option<bool>,
}

/// What has become of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Requested {
    /// What has changed.
    pub changed: Vec<String>,
    /// Why the number of workers and its limits stay.
    pub refused: Option<String>,
}

/// What a declaration has requested last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Changeable {
    #[serde(flatten)]
    scaling: Scaling,
    suspend: bool,
}

impl Declaration {
    /// Finds the Job that has created this pod. `None`: the pod belongs to no Job.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn of_pod(cluster: &Cluster, pod: &str) -> Result<Option<Self>, ClusterError> {
        let doing = format!("read the pod {pod}");
        let pods: Api<Pod> = cluster.api();
        let read = async || pods.get(pod).await.map_err(|error| cluster.explain(&doing, error));
        let Pod { metadata, spec, .. } = retry(&doing, read).await?;
        let owners = metadata.owner_references.unwrap_or_default();
        let job = owners.into_iter().find(|o| o.kind == "Job" && o.controller == Some(true));
        let image = spec.and_then(|spec| spec.containers.into_iter().next()?.image);
        Ok(job.map(|OwnerReference { name, uid, .. }| Self {
            cluster: cluster.clone(),
            name,
            uid,
            image: image.unwrap_or_default(),
        }))
    }

    /// Reads the options that the Job has. `None`: it has none.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn options(&self) -> Result<Option<String>, ClusterError> {
        let doing = format!("read the Job {}", self.name);
        let jobs: Api<Job> = self.cluster.api();
        let read = async || {
            jobs.get(&self.name).await.map_err(|error| self.cluster.explain(&doing, error))
        };
        Ok(options(&retry(&doing, read).await?))
    }

    /// Watches the options. Must be called within a runtime.
    #[must_use]
    pub fn watch(&self) -> OptionsWatch {
        let fields = Some(format!("metadata.name={}", self.name));
        let watch = Watch::start(self.cluster.api(), Selection { fields, labels: None });
        OptionsWatch { watch, uid: self.uid.clone() }
    }

    /// Makes the Job the owner of the job that has these objects.
    pub fn own(&self, objects: &mut Objects) {
        objects.job.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "batch/v1".into(),
            kind: "Job".into(),
            name: self.name.clone(),
            uid: self.uid.clone(),
            // The Job controller takes Jobs for none of its own.
            controller: None,
            block_owner_deletion: None,
        }]);
    }

    /// Returns who has the name of the training job `job`.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn holder(&self, job: &str) -> Result<Holder, ClusterError> {
        let doing = "read the master's Job";
        let jobs: Api<Job> = self.cluster.api();
        let master = objects::master_name(job);
        let read = async || {
            jobs.get_opt(&master).await.map_err(|error| self.cluster.explain(doing, error))
        };
        let Some(found) = retry(doing, read).await? else {
            let doing = "read the job's ConfigMap";
            let anchors: Api<ConfigMap> = self.cluster.api();
            let read = async || {
                anchors.get_opt(job).await.map_err(|error| self.cluster.explain(doing, error))
            };
            return Ok(match retry(doing, read).await? {
                None => Holder::None,
                Some(anchor) if is_left(&anchor.metadata, &master, None) => Holder::Former,
                Some(_) => Holder::ConfigMap,
            });
        };
        let is_ours = owners(&found.metadata).any(|owner| owner.uid == self.uid);
        let waits = found.spec.is_some_and(|spec| spec.parallelism == Some(0));
        Ok(match (is_ours, waits) {
            (true, true) => Holder::CutOff,
            (true, false) => Holder::Declaration,
            (false, _) if is_left(&found.metadata, &self.name, Some(&self.uid)) => Holder::Former,
            (false, _) => Holder::Other,
        })
    }

    /// Requests of the running job `job` what the options ask for now and did not ask for before:
    /// what users have requested meanwhile by other means stays.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn request(
        &self,
        job: &str,
        task: &Task,
        asked: Asked,
    ) -> Result<Requested, ClusterError> {
        let anchor = Anchor::new(&self.cluster, job);
        let data = anchor.read().await?.data.unwrap_or_default();
        let before = data.get(DECLARED).and_then(|text| serde_json::from_str(text).ok());
        let mut known = before.unwrap_or_else(|| Changeable {
            scaling: Scaling::default(),
            suspend: task.job.policies.starts_suspended,
        });
        known.scaling = known.scaling.or(Scaling::from(&task.job));
        let mut done = Requested::default();
        let change = asked.scaling.since(known.scaling);
        let present = scaling::task(&data).map_or_else(|| task.job.clone(), |task| task.job);
        match scaling::rescale(&data, &present, change) {
            _ if change == Scaling::default() => {}
            Ok(Rescaling { keys, .. }) => {
                done.changed = keys.iter().map(|(key, value)| format!("{key} = {value}")).collect();
                known.scaling = change.or(known.scaling);
                request(&self.cluster, &anchor, keys).await?;
            }
            Err(why) => done.refused = Some(why),
        }
        if let Some(suspend) = asked.suspend.filter(|suspend| *suspend != known.suspend) {
            known.suspend = suspend;
            done.changed.push(format!("{SUSPEND} = {suspend}"));
            let keys = Data::from([(SUSPEND.into(), suspend.to_string())]);
            request(&self.cluster, &anchor, keys).await?;
        }
        if !done.changed.is_empty() {
            let text = serde_json::to_string(&known).expect("its keys are strings");
            anchor.write(&Data::from([(DECLARED.into(), text)])).await?;
        }
        Ok(done)
    }

    /// Records an Event about the Job, as far as the service account may.
    pub async fn record(&self, reason: &str, message: &str) {
        let about = ObjectReference {
            api_version: Some("batch/v1".into()),
            kind: Some("Job".into()),
            name: Some(self.name.clone()),
            namespace: Some(self.cluster.namespace.clone()),
            uid: Some(self.uid.clone()),
            ..ObjectReference::default()
        };
        let message = message.chars().take(events::MESSAGE_MAX).collect();
        let mut event = events::event(&about, reason, message, Time(Timestamp::now()));
        event.metadata.generate_name = Some(format!("{}.", self.name));
        if let Err(error) = self.cluster.api().create(&PostParams::default(), &event).await {
            debug!(%error, reason, "an Event is dropped");
        }
    }

    /// Lets the Job replace any number of lost pods.
    pub async fn outlive_pods(&self) {
        succession::raise_backoff_limit(&self.cluster, &self.name).await;
    }

    /// Lets the Job fail with this pod.
    pub async fn fail(&self) {
        succession::stop_replacements(&self.cluster, &self.name, true).await;
    }
}

/// A running watch of the options of a declared job.
#[derive(Debug)]
pub struct OptionsWatch {
    watch: Watch<Job>,
    uid: String,
}

impl OptionsWatch {
    /// Returns the present options, and then those after each change of the Job. Cancel-safe.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            if let Change::Applied(job) = self.watch.next().await
                && job.metadata.uid.as_ref() == Some(&self.uid)
            {
                return options(&job);
            }
        }
    }
}

fn owners(object: &ObjectMeta) -> impl Iterator<Item = &OwnerReference> {
    object.owner_references.iter().flatten()
}

/// Whether the cluster removes an object: it is being deleted, or the Job `owner` that owns it is
/// gone. `uid`: that of the Job of this name; `None`: there is none.
fn is_left(object: &ObjectMeta, owner: &str, uid: Option<&str>) -> bool {
    let is_gone = |found: &OwnerReference| {
        found.kind == "Job" && found.name == owner && Some(&*found.uid) != uid
    };
    object.deletion_timestamp.is_some() || owners(object).any(is_gone)
}

fn options(job: &Job) -> Option<String> {
    job.metadata.annotations.as_ref()?.get(OPTIONS).cloned()
}

/// Annotation of a Job with the options of the training job that it declares, in the form of a file
/// of options.
pub const OPTIONS: &str = "elasticdl/options";
/// Key of an anchor: the [`Changeable`] that the declaration has requested last.
const DECLARED: &str = "declared";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::super::anchor::{MAX_WORKERS, MIN_WORKERS, NUM_WORKERS};
    use super::super::testing::FakeServer;
    use super::*;
    use crate::job::JobSpec;
    use crate::job::testing::spec;

    fn document(options: &str) -> Value {
        let metadata = json!({"name": "j", "uid": "doc", "annotations": {OPTIONS: options}});
        json!({"metadata": metadata, "spec": {"template": {"spec": {"containers": []}}}})
    }

    async fn declaration(fake: &std::sync::Arc<FakeServer>, cluster: &Cluster) -> Declaration {
        let owner = json!({
            "apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "doc", "controller": true,
        });
        fake.put(
            "pods",
            "j-x1",
            json!({
                "metadata": {"name": "j-x1", "uid": "p", "ownerReferences": [owner]},
                "spec": {"containers": [{"name": "declare", "image": "model:1"}]},
            }),
        );
        Declaration::of_pod(cluster, "j-x1").await.unwrap().unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_finds_its_job_and_sees_each_change_of_its_options() {
        let (fake, cluster) = FakeServer::start();
        let declaration = declaration(&fake, &cluster).await;
        assert_eq!((&*declaration.name, &*declaration.image), ("j", "model:1"));
        fake.put("jobs", "j", document("seed = 1"));
        assert_eq!(declaration.options().await.unwrap().unwrap(), "seed = 1");
        let mut watch = declaration.watch();
        assert_eq!(watch.next().await.unwrap(), "seed = 1");
        fake.put("jobs", "j", document("seed = 2"));
        assert_eq!(watch.next().await.unwrap(), "seed = 2");
        fake.put("pods", "alone", json!({"metadata": {"name": "alone", "uid": "q"}}));
        assert!(Declaration::of_pod(&cluster, "alone").await.unwrap().is_none());
    }

    #[tokio::test]
    async fn the_name_of_a_job_is_held_by_the_declaration_that_owns_its_master() {
        let (fake, cluster) = FakeServer::start();
        let declaration = declaration(&fake, &cluster).await;
        let owned = |name: &str, uid: &str| {
            let owner = json!({"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid});
            json!([owner])
        };
        assert_eq!(declaration.holder("j").await.unwrap(), Holder::None);
        for (owner, expected) in [("other", Holder::ConfigMap), ("j-master", Holder::Former)] {
            let metadata = json!({"name": "j", "ownerReferences": owned(owner, "u")});
            fake.put("configmaps", "j", json!({"metadata": metadata}));
            assert_eq!(declaration.holder("j").await.unwrap(), expected, "{owner}");
        }
        for (owner, uid, parallelism, expected) in [
            ("j", "doc", 0, Holder::CutOff),
            ("j", "doc", 1, Holder::Declaration),
            ("j", "former", 1, Holder::Former),
            ("k", "another", 1, Holder::Other),
        ] {
            let mut master = document("");
            master["metadata"] = json!({"name": "j-master", "ownerReferences": owned(owner, uid)});
            master["spec"]["parallelism"] = parallelism.into();
            fake.put("jobs", "j-master", master);
            assert_eq!(declaration.holder("j").await.unwrap(), expected, "{uid} {parallelism}");
        }
    }

    fn task() -> Task {
        Task {
            job: JobSpec { max_workers: 8, ..spec() },
            master_timeout: Duration::from_secs(30),
            priority_tiers: None,
            metrics_port: 7071,
            serve_metrics: false,
            tensorboard_dir: None,
            gang: None,
        }
    }

    /// Values of these keys of the anchor of the job.
    fn set<const N: usize>(fake: &FakeServer, keys: [&str; N]) -> [String; N] {
        let data = fake.state().object("configmaps", "j").unwrap()["data"].clone();
        keys.map(|key| data[key].as_str().unwrap_or_default().to_owned())
    }

    #[tokio::test]
    async fn what_a_user_has_set_stays_until_the_declaration_asks_for_something_else() {
        let (fake, cluster) = FakeServer::start();
        let (declaration, task) = (declaration(&fake, &cluster).await, task());
        let data = json!({objects::TASK: "{}", NUM_WORKERS: "5"});
        fake.put("configmaps", "j", json!({"metadata": {"name": "j"}, "data": data}));
        let ask = async |num_workers: u32, suspend: Option<bool>| {
            let asked = Asked { scaling: num_workers.into(), suspend };
            let done = declaration.request("j", &task, asked).await.unwrap();
            assert_eq!(done.refused, None);
            done.changed
        };
        let set = || set(&fake, [NUM_WORKERS, SUSPEND]);
        let (no, yes) = (Some(false), Some(true));
        assert_eq!(ask(3, no).await, [""; 0]);
        assert_eq!(set(), ["5", ""]);
        assert_eq!(ask(4, no).await, ["num-workers = 4"]);
        assert_eq!(set(), ["4", ""]);
        // `elasticdl scale`.
        fake.put("configmaps", "j", {
            let mut anchor = fake.state().object("configmaps", "j").unwrap();
            anchor["data"][NUM_WORKERS] = "6".into();
            anchor
        });
        assert_eq!(ask(4, no).await, [""; 0]);
        assert_eq!(ask(4, yes).await, ["suspend = true"]);
        assert_eq!(set(), ["6", "true"]);
        assert_eq!(ask(4, no).await, ["suspend = false"]);
        assert_eq!(
            (ask(4, yes).await, ask(4, None).await),
            (vec!["suspend = true".into()], vec![])
        );
        assert_eq!(set(), ["6", "true"]);
    }

    #[tokio::test]
    async fn limits_are_requested_together_with_the_number_or_refused_with_it() {
        let (fake, cluster) = FakeServer::start();
        let (declaration, task) = (declaration(&fake, &cluster).await, task());
        // An earlier release has noted what it has requested.
        let noted = json!({"num-workers": 3, "suspend": false}).to_string();
        let json = serde_json::to_string(&task).unwrap();
        let data = json!({objects::TASK: json, DECLARED: noted});
        fake.put("configmaps", "j", json!({"metadata": {"name": "j"}, "data": data}));
        let ask = async |number: u32, min: u32, max: Option<u32>| {
            let limits = Scaling { num_workers: None, min_workers: Some(min), max_workers: max };
            let asked = Asked { scaling: limits.or(number.into()), suspend: Some(false) };
            declaration.request("j", &task, asked).await.unwrap()
        };
        let set = || set(&fake, [NUM_WORKERS, MIN_WORKERS, MAX_WORKERS]);
        assert_eq!(ask(3, 1, Some(8)).await, Requested::default());
        assert_eq!(ask(3, 1, None).await, Requested::default());
        let done = ask(12, 2, None).await;
        assert_eq!((done.changed, set()), (vec![], [""; 3].map(String::from)));
        assert!(done.refused.unwrap().starts_with("this job takes 2 to 8 workers, not 12"));
        let done = ask(12, 2, Some(16)).await;
        let changed = ["max-workers = 16", "min-workers = 2", "num-workers = 12"];
        assert_eq!((done.changed, done.refused), (changed.map(String::from).into(), None));
        assert_eq!(set(), ["12", "2", "16"]);
        assert_eq!(ask(12, 2, None).await, Requested::default(), "a maximum stays");
        assert_eq!(ask(15, 2, None).await.changed, ["num-workers = 15"]);
        // The number that was requested before does not contradict the maximum.
        let most = Scaling { max_workers: Some(9), ..Scaling::default() };
        let done = declaration.request("j", &task, Asked { scaling: most, suspend: None }).await;
        assert_eq!(done.unwrap().changed, ["max-workers = 9", "num-workers = 9"]);
        assert_eq!(set(), ["9", "2", "9"]);
    }
}
