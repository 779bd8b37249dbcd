//! A declared job: a batch/v1 Job that a user applies, whose annotation [`OPTIONS`] has the options
//! of the training job. Its pod runs `elasticdl declare`, which submits the training job, carries
//! changes of the annotation over to it, and ends as it ends.
//!
//! ```text
//!  Job <job>, the document ──owns──► Job <job>-master ──owns──► anchor ──owns──► the rest
//! ```
//!
//! With Kubeflow Trainer the document is a `TrainJob`, from which its controller makes the Job:
//!
//! ```text
//!  TrainJob <job> ──owns──► JobSet <job> ──owns──► Job <job>-node-0 ──owns──► Job <job>-master ─► …
//! ```
//!
//! **Invariant:** of the document only `spec.backoffLimit` of a Job is written, which users leave
//! out, and `status.trainerStatus` of a `TrainJob`, so that what they have applied stays what the
//! cluster has.

use std::fmt::Debug;

use elasticdl_proto::Status;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::debug;

use super::anchor::{Anchor, Data, SUSPEND, WEIGHT};
use super::client::{Cluster, ClusterError};
use super::objects::{self, Objects, Task};
use super::priority_tiers::Weight;
use super::requests::request;
use super::retry::retry;
use super::scaling;
use super::train_job::{self, TrainJob, TrainJobSpec};
use super::watch::{Change, Selection, Watch};
use super::{events, succession};
use crate::job::Scaling;

/// The Job to which the pod of this process belongs, and the `TrainJob` to which the Job does.
#[derive(Clone, Debug)]
pub struct Declaration {
    cluster: Cluster,
    /// Name of the document, and of the training job.
    pub name: String,
    /// Name of the Job.
    job: String,
    uid: String,
    /// Image of the pod.
    pub image: String,
    train_job: Option<DeclaringTrainJob>,
}

/// A `TrainJob` that is a document.
#[derive(Clone, Debug)]
struct DeclaringTrainJob {
    uid: String,
    /// Options that its runtime has, in the annotation of the Job.
    runtime: Option<String>,
}

/// What a document asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document {
    /// The annotation [`OPTIONS`]. `None`: there is none.
    pub options: Option<String>,
    /// Fields of a `TrainJob`. `None`: the document is a Job.
    pub train_job: Option<TrainJobSpec>,
    /// Whether the document is a Job that is suspended.
    pub suspend: bool,
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
    /// The job's share of the cluster.
    pub weight: Option<Weight>,
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
    weight: Option<Weight>,
    suspend: bool,
}

impl Declaration {
    /// Finds the Job that has created this pod, for the `TrainJob` of this name if one is given.
    /// `None`: the pod belongs to no Job.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn of_pod(
        cluster: &Cluster,
        pod: &str,
        train_job: Option<&str>,
    ) -> Result<Option<Self>, ClusterError> {
        let Pod { metadata, spec, .. } = read(cluster, pod).await?;
        let owners = metadata.owner_references.unwrap_or_default();
        let job = owners.into_iter().find(|o| o.kind == "Job" && o.controller == Some(true));
        let Some(OwnerReference { name: job, uid, .. }) = job else { return Ok(None) };
        let image = spec.and_then(|spec| spec.containers.into_iter().next()?.image);
        let (name, train_job) = match train_job {
            None => (job.clone(), None),
            Some(name) => {
                let TrainJob { metadata, .. } = read(cluster, name).await?;
                let runtime = options(&read::<Job>(cluster, &job).await?.metadata);
                let uid = metadata.uid.unwrap_or_default();
                (name.to_owned(), Some(DeclaringTrainJob { uid, runtime }))
            }
        };
        let (cluster, image) = (cluster.clone(), image.unwrap_or_default());
        Ok(Some(Self { cluster, name, job, uid, image, train_job }))
    }

    /// Kind of the document.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        if self.train_job.is_some() { train_job::KIND } else { "Job" }
    }

    /// Options that the runtime of a `TrainJob` has for those that name it.
    #[must_use]
    pub fn runtime_options(&self) -> Option<&str> {
        self.train_job.as_ref()?.runtime.as_deref()
    }

    /// Reads the document.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn document(&self) -> Result<Document, ClusterError> {
        Ok(match self.train_job {
            None => read::<Job>(&self.cluster, &self.name).await?.into(),
            Some(_) => read::<TrainJob>(&self.cluster, &self.name).await?.into(),
        })
    }

    /// Watches the document. Must be called within a runtime.
    #[must_use]
    pub fn watch(&self) -> DocumentWatch {
        let fields = Some(format!("metadata.name={}", self.name));
        let selection = Selection { fields, labels: None };
        let cluster = &self.cluster;
        let (watch, uid) = match &self.train_job {
            None => (KindWatch::Job(Watch::start(cluster.api(), selection)), &self.uid),
            Some(of) => (KindWatch::TrainJob(Watch::start(cluster.api(), selection)), &of.uid),
        };
        DocumentWatch { watch, uid: uid.clone() }
    }

    /// Tells the `statuses` of the job in the status of its `TrainJob`, until their sender is
    /// dropped. `warn` gets what prevents it, once.
    pub async fn report(&self, statuses: watch::Receiver<Option<Status>>, warn: impl Fn(&str)) {
        if self.train_job.is_some() {
            train_job::report(&self.cluster, &self.name, statuses, warn).await;
        }
    }

    /// Makes the Job the owner of the job that has these objects.
    pub fn own(&self, objects: &mut Objects) {
        objects.job.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "batch/v1".into(),
            kind: "Job".into(),
            name: self.job.clone(),
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
            (false, _) if is_left(&found.metadata, &self.job, Some(&self.uid)) => Holder::Former,
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
            weight: None,
            suspend: task.job.policies.starts_suspended,
        });
        known.scaling = known.scaling.or(Scaling::from(&task.job));
        let tiers = task.priority_tiers.as_ref();
        known.weight = known.weight.or_else(|| tiers.map(|tiers| tiers.weight));
        let mut done = Requested::default();
        let mut keys = Data::new();
        let change = asked.scaling.since(known.scaling);
        let present = scaling::task(&data).map_or_else(|| task.job.clone(), |task| task.job);
        match scaling::rescale(&data, &present, change) {
            _ if change == Scaling::default() => {}
            Ok(rescaling) => {
                keys = rescaling.keys;
                known.scaling = change.or(known.scaling);
            }
            Err(why) => done.refused = Some(why),
        }
        // A job without tiers has no weight, whatever the document says.
        let weight = asked.weight.filter(|weight| known.weight.is_some_and(|old| old != *weight));
        if let Some(weight) = weight {
            known.weight = Some(weight);
            keys.insert(WEIGHT.into(), weight.to_string());
        }
        let suspend = asked.suspend.filter(|suspend| *suspend != known.suspend).map(|suspend| {
            known.suspend = suspend;
            Data::from([(SUSPEND.into(), suspend.to_string())])
        });
        for keys in [Some(keys), suspend].into_iter().flatten().filter(|keys| !keys.is_empty()) {
            done.changed.extend(keys.iter().map(|(key, value)| format!("{key} = {value}")));
            request(&self.cluster, &anchor, keys).await?;
        }
        if !done.changed.is_empty() {
            let text = serde_json::to_string(&known).expect("its keys are strings");
            anchor.write(&Data::from([(DECLARED.into(), text)])).await?;
        }
        Ok(done)
    }

    /// Records an Event about the document, as far as the service account may.
    pub async fn record(&self, reason: &str, message: &str) {
        let (api_version, uid) = match &self.train_job {
            None => (Job::api_version(&()), &self.uid),
            Some(train_job) => (TrainJob::api_version(&()), &train_job.uid),
        };
        let about = ObjectReference {
            api_version: Some(api_version.into()),
            kind: Some(self.kind().into()),
            name: Some(self.name.clone()),
            namespace: Some(self.cluster.namespace.clone()),
            uid: Some(uid.clone()),
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
        succession::raise_backoff_limit(&self.cluster, &self.job).await;
    }

    /// Lets the Job fail with this pod.
    pub async fn fail(&self) {
        succession::stop_replacements(&self.cluster, &self.job, true).await;
    }
}

/// A running watch of the document of a declared job.
#[derive(Debug)]
pub struct DocumentWatch {
    watch: KindWatch,
    uid: String,
}

#[derive(Debug)]
enum KindWatch {
    Job(Watch<Job>),
    TrainJob(Watch<TrainJob>),
}

impl DocumentWatch {
    /// Returns the present document, and then that after each change. Cancel-safe.
    pub async fn next(&mut self) -> Document {
        match &mut self.watch {
            KindWatch::Job(watch) => applied(watch, &self.uid).await.into(),
            KindWatch::TrainJob(watch) => applied(watch, &self.uid).await.into(),
        }
    }
}

impl From<Job> for Document {
    fn from(job: Job) -> Self {
        let suspend = job.spec.and_then(|spec| spec.suspend).unwrap_or_default();
        Self { options: options(&job.metadata), train_job: None, suspend }
    }
}

impl From<TrainJob> for Document {
    fn from(train_job: TrainJob) -> Self {
        let options = options(&train_job.metadata);
        Self { options, train_job: Some(train_job.spec), suspend: false }
    }
}

/// Reads an object of the namespace.
async fn read<K>(cluster: &Cluster, name: &str) -> Result<K, ClusterError>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    K: Clone + DeserializeOwned + Debug,
{
    let doing = format!("read the {} {name}", K::kind(&()));
    let objects: Api<K> = cluster.api();
    let explain = |error| explain::<K>(cluster, &doing, error);
    let read = async || objects.get(name).await.map_err(explain);
    retry(&doing, read).await
}

/// As [`Cluster::explain`]. The server has no path of a kind whose definition is not installed.
fn explain<K: Resource<DynamicType = ()>>(
    cluster: &Cluster,
    doing: &str,
    error: kube::Error,
) -> ClusterError {
    match error {
        kube::Error::Api(status) if status.code == 404 && status.reason != "NotFound" => {
            let (plural, group, version) = (K::plural(&()), K::group(&()), K::version(&()));
            let message = format!(
                "the CRD {plural}.{group} with the version {version} is not installed in the \
                 cluster; install Kubeflow Trainer, or declare the job as a Job (see \
                 manifests/README.md)"
            );
            ClusterError::Refused { doing: doing.into(), message }
        }
        error => cluster.explain(doing, error),
    }
}

/// The object with this uid, as it is after the next change.
async fn applied<K>(watch: &mut Watch<K>, uid: &str) -> K
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    loop {
        if let Change::Applied(object) = watch.next().await
            && object.meta().uid.as_deref() == Some(uid)
        {
            return object;
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

fn options(metadata: &ObjectMeta) -> Option<String> {
    metadata.annotations.as_ref()?.get(OPTIONS).cloned()
}

/// Annotation of a document with options of the training job that it declares, in the form of a
/// file of options.
pub const OPTIONS: &str = "elasticdl/options";
/// Key of an anchor: the [`Changeable`] that the declaration has requested last.
const DECLARED: &str = "declared";

#[cfg(test)]
mod tests;
