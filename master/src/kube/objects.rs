//! The objects of a job. Pure: a request in, objects out.
//!
//! ```text
//!  Job <job>-master ──owns──► ConfigMap <job> (the anchor) ──owns──► Secret, Service, worker pods
//! ```
//!
//! The Job is created with a parallelism of 0, which is raised to 1 when all objects exist: until
//! then nothing runs.
//!
//! **Invariants:** each object has one owner. Secrets are in the Secret only, and each pod mounts
//! only the keys that it needs: the master's private key is mounted by the master alone. No rank
//! and no world size is in any environment: both change during a pod's life.

mod parts;
mod template;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::batch::v1::{Job, JobSpec as BatchJobSpec};
use k8s_openapi::api::core::v1::{
    ConfigMap, Container, ContainerPort, Pod, PodSpec, PodTemplateSpec, Secret, Service,
    ServicePort, ServiceSpec, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::{Deserialize, Serialize};

pub use template::TemplateError;

use super::certificates::Certificates;
use super::options::PodOptions;
use super::priority_tiers::PriorityTiers;
use crate::job::{JobSpec, LaunchId};
use crate::token::Token;

/// A job to be run in a cluster.
#[derive(Clone, Debug)]
pub struct Request {
    /// Namespace of its objects.
    pub namespace: String,
    /// What to train.
    pub task: Task,
    /// The training program and its arguments.
    pub program: Vec<String>,
    /// Options of its pods.
    pub pods: PodOptions,
}

/// The master's input, stored in the anchor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Specification of the job.
    pub job: JobSpec,
    /// Workers end by themselves when their master has been silent for this long.
    pub master_timeout: Duration,
    /// The workers' priority classes by slot.
    #[serde(default, rename = "ladder")]
    pub priority_tiers: Option<PriorityTiers>,
    /// Port on which the master serves metrics.
    #[serde(default = "metrics_port_default")]
    pub metrics_port: u16,
    /// Folder in which the master writes events for TensorBoard. It is in a volume of the workers,
    /// which the master then mounts, too.
    #[serde(default)]
    pub tensorboard_dir: Option<PathBuf>,
}

/// Credentials that are generated for a job at its submission.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// Token that clients present to the master.
    pub token: Token,
    /// Certificates by which clients authenticate the master.
    pub certificates: Certificates,
}

/// The objects of a job, without its workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Objects {
    /// Job that runs the master.
    pub job: Job,
    /// Anchor: holds the task, the worker pod template, and later the status.
    pub anchor: ConfigMap,
    /// Secret that holds the token and the certificates.
    pub secret: Secret,
    /// Service that selects the master.
    pub service: Service,
}

/// Why a job has no objects. Correct the options of the job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectsError {
    /// The worker pod template is invalid.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The options do not fit into the job's ConfigMap.
    #[error(
        "the options of the job take {} KiB, and its ConfigMap holds at most {} KiB of them; \
         shorten the arguments of the program, --env or --worker-pod-template, or put their \
         content into a file of a --volume",
        bytes.div_ceil(1 << 10),
        REQUEST_BYTES_MAX >> 10
    )]
    TooLong {
        /// Length of the task and the worker pod as JSON.
        bytes: usize,
    },
}

impl Objects {
    /// Builds the objects of a job. The owners are still missing, since they are named by uids that
    /// the server assigns.
    ///
    /// # Errors
    /// [`ObjectsError`].
    pub fn new(request: &Request, credentials: Credentials) -> Result<Self, ObjectsError> {
        let name = &request.task.job.name;
        let worker = serde_json::to_string_pretty(&worker_template(request)?)
            .expect("a pod's keys are strings");
        let task = serde_json::to_string_pretty(&request.task).expect("a task's keys are strings");
        let bytes = task.len() + worker.len();
        if bytes > REQUEST_BYTES_MAX {
            return Err(ObjectsError::TooLong { bytes });
        }
        let mut anchor =
            ConfigMap { metadata: metadata(request, name, "anchor"), ..ConfigMap::default() };
        anchor.data = Some(BTreeMap::from([(TASK.into(), task), (WORKER_POD.into(), worker)]));
        let mut selector = own_labels(name, "master");
        selector.retain(|key, _| [JOB_LABEL, ROLE_LABEL].contains(&key.as_str()));
        let port = |name: &str, port| ServicePort {
            name: Some(name.into()),
            port,
            target_port: Some(IntOrString::Int(port)),
            ..ServicePort::default()
        };
        let ports = vec![port("grpc", PORT), port(METRICS, request.task.metrics_port.into())];
        let service = Service {
            metadata: metadata(request, &master_name(name), "master"),
            spec: Some(ServiceSpec {
                ports: Some(ports),
                selector: Some(selector),
                // Only the leading master is ready: one that is ending, or waits for the Lease,
                // is not. A connection to it would be lost, or hang.
                ..ServiceSpec::default()
            }),
            ..Service::default()
        };
        Ok(Self { job: master_job(request), anchor, secret: secret(request, credentials), service })
    }

    /// Makes the Job, as created by the server, the owner of the anchor.
    pub fn own_anchor(&mut self, job: &ObjectMeta) {
        self.anchor.metadata.owner_references = Some(vec![owner("batch/v1", "Job", job)]);
    }

    /// Makes the anchor, as created by the server, the owner of the other objects.
    pub fn own_rest(&mut self, anchor: &ObjectMeta) {
        let owners = Some(vec![anchor_owner(anchor)]);
        self.secret.metadata.owner_references.clone_from(&owners);
        self.service.metadata.owner_references = owners;
    }

    /// Returns all objects as YAML, with placeholders for secrets and for the owners' uids.
    #[must_use]
    pub fn to_yaml(mut self) -> String {
        let unknown = |mut meta: ObjectMeta| {
            meta.uid = Some("(given by the server)".into());
            meta
        };
        self.own_anchor(&unknown(self.job.metadata.clone()));
        self.own_rest(&unknown(self.anchor.metadata.clone()));
        let secrets = self.secret.data.take().unwrap_or_default();
        let placeholders = secrets.into_keys().map(|key| (key, "(drawn at submission)".into()));
        self.secret.string_data = Some(placeholders.collect());
        let documents = [
            serde_saphyr::to_string(&self.job),
            serde_saphyr::to_string(&self.anchor),
            serde_saphyr::to_string(&self.secret),
            serde_saphyr::to_string(&self.service),
        ];
        documents.map(|text| text.expect("objects have YAML forms")).join("---\n")
    }
}

/// Returns the DNS names of a job's master; workers use the first.
#[must_use]
pub fn master_dns_names(job: &str, namespace: &str) -> [String; 2] {
    let name = master_name(job);
    let longer = format!("{name}.{namespace}.svc");
    [name, longer]
}

/// Builds the pod of `launch` in `slot` from `template`; `master` is the master's address. For a
/// pod of several workers, launch and slot are those of the first.
#[must_use]
pub fn worker_pod(
    template: &Pod,
    launch: LaunchId,
    slot: u32,
    anchor: &ObjectMeta,
    master: &str,
) -> Pod {
    let mut pod = template.clone();
    let job = anchor.name.as_deref().unwrap_or_default();
    pod.metadata.name = Some(worker_name(job, launch));
    pod.metadata.owner_references = Some(vec![anchor_owner(anchor)]);
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(LAUNCH_LABEL.into(), launch.0.to_string());
    labels.insert(SLOT_LABEL.into(), slot.to_string());
    labels.insert(ANCHOR_LABEL.into(), anchor.uid.clone().unwrap_or_default());
    let spec = pod.spec.get_or_insert_default();
    if let Some(worker) = spec.containers.iter_mut().find(|c| c.name == WORKER) {
        let env = worker.env.get_or_insert_default();
        env.push(parts::variable("ELASTICDL_LAUNCH", &launch.0.to_string()));
        env.push(parts::variable("ELASTICDL_MASTER", master));
    }
    pod
}

/// Returns the launch and the slot of a worker pod, from its labels.
#[must_use]
pub fn launch_and_slot(pod: &Pod) -> Option<(LaunchId, u32)> {
    let labels = pod.metadata.labels.as_ref()?;
    Some((LaunchId(labels.get(LAUNCH_LABEL)?.parse().ok()?), labels.get(SLOT_LABEL)?.parse().ok()?))
}

/// Returns the name of a worker pod. Launches are numbered across all masters of a job, so a name
/// is never reused.
#[must_use]
pub fn worker_name(job: &str, launch: LaunchId) -> String {
    format!("{job}-w-{}", launch.0)
}

/// Returns the name of a job's batch/v1 Job and of its Service.
#[must_use]
pub fn master_name(job: &str) -> String {
    format!("{job}-master")
}

/// Selector of the pods of a job's master.
#[must_use]
pub fn master_selector(job: &str) -> String {
    format!("{JOB_LABEL}={job},{ROLE_LABEL}=master")
}

/// Selector of the workers of the job whose anchor has this uid.
#[must_use]
pub fn worker_selector(anchor_uid: &str) -> String {
    format!("{ANCHOR_LABEL}={anchor_uid}")
}

/// Selector of the anchors of all jobs.
#[must_use]
pub fn anchors_selector() -> String {
    format!("app.kubernetes.io/managed-by={ELASTICDL},{ROLE_LABEL}=anchor")
}

fn secret(request: &Request, credentials: Credentials) -> Secret {
    let Credentials { token, certificates: Certificates { ca, certificate, key } } = credentials;
    let values = [(TOKEN, token.to_hex()), (CA, ca), (CERTIFICATE, certificate), (KEY, key)];
    Secret {
        metadata: metadata(request, &request.task.job.name, "token"),
        data: Some(values.map(|(key, value)| (key.into(), ByteString(value.into()))).into()),
        type_: Some("Opaque".into()),
        ..Secret::default()
    }
}

fn master_job(request: &Request) -> Job {
    let name = &request.task.job.name;
    let pods = &request.pods;
    let port = |name: &str, container_port| ContainerPort {
        container_port,
        name: Some(name.into()),
        ..ContainerPort::default()
    };
    let (mut mounts, mut volumes) =
        (parts::mounts(), parts::volumes(name, &[TOKEN, CERTIFICATE, KEY]));
    if request.task.tensorboard_dir.is_some() {
        add_volumes(pods, &mut volumes, &mut mounts);
    }
    let container = Container {
        name: "master".into(),
        image: Some(pods.master_image.clone()),
        image_pull_policy: pods.image_pull_policy.clone(),
        command: Some(vec![ELASTICDL.into()]),
        args: Some(
            ["master", "--job-name", name, "--pod", "$(POD_NAME)/$(POD_UID)"]
                .map(Into::into)
                .into(),
        ),
        env: Some(vec![
            parts::field("POD_NAME", "metadata.name"),
            parts::field("POD_UID", "metadata.uid"),
        ]),
        ports: Some(vec![port("grpc", PORT), port(METRICS, request.task.metrics_port.into())]),
        liveness_probe: Some(parts::liveness(METRICS)),
        readiness_probe: Some(parts::readiness(METRICS)),
        resources: Some(parts::requirements(&pods.master_resources)),
        security_context: Some(parts::locked_down()),
        // Commands that follow the job then show the last lines of its log.
        termination_message_policy: Some("FallbackToLogsOnError".into()),
        volume_mounts: Some(mounts),
        ..Container::default()
    };
    let spec = PodSpec {
        containers: vec![container],
        priority_class_name: pods.priority_class.clone(),
        service_account_name: Some(pods.service_account.clone()),
        automount_service_account_token: Some(true),
        tolerations: Some(parts::master_tolerations(&pods.tolerations)),
        volumes: Some(volumes),
        // Short: a preempting pod has to wait for it.
        ..parts::pod_spec(pods, MASTER_GRACE)
    };
    let mut template = metadata(request, "", "master");
    template.name = None;
    template.namespace = None;
    // Prometheus installations without the operator discover pods by these annotations.
    let scrape = [
        ("prometheus.io/path", "/metrics".into()),
        ("prometheus.io/port", request.task.metrics_port.to_string()),
        ("prometheus.io/scrape", "true".into()),
    ];
    let annotations = template.annotations.get_or_insert_default();
    for (key, value) in scrape {
        annotations.entry(key.into()).or_insert(value);
    }
    Job {
        metadata: metadata(request, &master_name(name), "master"),
        spec: Some(BatchJobSpec {
            active_deadline_seconds: pods.active_deadline_s,
            backoff_limit: Some(BACKOFF_LIMIT),
            completions: Some(1),
            parallelism: Some(0),
            ttl_seconds_after_finished: pods.ttl_s,
            template: PodTemplateSpec { metadata: Some(template), spec: Some(spec) },
            ..BatchJobSpec::default()
        }),
        ..Job::default()
    }
}

/// Builds the template that all worker pods share.
fn worker_template(request: &Request) -> Result<Pod, TemplateError> {
    let name = &request.task.job.name;
    let pods = &request.pods;
    let (program, args) = request.program.split_first().expect("a request has a program");
    let mut env = parts::worker_environment(&request.task);
    if !pods.env.iter().any(|(name, _)| name == parts::RAYON_THREADS) {
        env.push(parts::threads(request.task.job.workers_per_pod));
    }
    env.extend(pods.env.iter().map(|(name, value)| parts::variable(name, value)));
    let mut mounts = parts::mounts();
    let mut volumes = parts::volumes(name, &[TOKEN, CA]);
    add_volumes(pods, &mut volumes, &mut mounts);
    if request.task.job.workers_per_pod > 1 {
        parts::shared_memory(&mut volumes, &mut mounts);
    }
    let container = Container {
        name: WORKER.into(),
        image: Some(pods.image.clone()),
        image_pull_policy: pods.image_pull_policy.clone(),
        command: Some(vec![program.clone()]),
        args: Some(args.to_vec()).filter(|args| !args.is_empty()),
        env: Some(env),
        resources: Some(parts::requirements(&pods.worker_resources)),
        security_context: Some(parts::locked_down()),
        volume_mounts: Some(mounts),
        ..Container::default()
    };
    let spec = PodSpec {
        containers: vec![container],
        priority_class_name: pods.worker_priority_class.clone(),
        automount_service_account_token: Some(false),
        volumes: Some(volumes),
        ..parts::pod_spec(pods, request.task.job.grace_period)
    };
    let spec = match &pods.worker_pod_template {
        Some(template) => template::merge(&spec, template)?,
        None => spec,
    };
    let mut metadata = metadata(request, "", "worker");
    metadata.name = None;
    Ok(Pod { metadata, spec: Some(spec), status: None })
}

/// Adds the user's volumes.
fn add_volumes(pods: &PodOptions, volumes: &mut Vec<Volume>, mounts: &mut Vec<VolumeMount>) {
    for (index, mounted) in pods.volumes.iter().enumerate() {
        let (mut volume, mut mount) = (mounted.volume.clone(), mounted.mount.clone());
        volume.name = format!("volume-{index}");
        mount.name.clone_from(&volume.name);
        volumes.push(volume);
        mounts.push(mount);
    }
}

fn metadata(request: &Request, name: &str, role: &str) -> ObjectMeta {
    let mut labels = request.pods.labels.clone();
    labels.extend(own_labels(&request.task.job.name, role));
    ObjectMeta {
        name: Some(name.into()),
        namespace: Some(request.namespace.clone()),
        labels: Some(labels),
        annotations: Some(request.pods.annotations.clone()).filter(|a| !a.is_empty()),
        ..ObjectMeta::default()
    }
}

/// Builds the metadata of an object that the anchor owns.
#[must_use]
pub fn owned(anchor: &ObjectMeta, name: &str, role: &str) -> ObjectMeta {
    let mut labels = anchor.labels.clone().unwrap_or_default();
    labels.extend(own_labels(anchor.name.as_deref().unwrap_or_default(), role));
    ObjectMeta {
        name: Some(name.into()),
        namespace: anchor.namespace.clone(),
        labels: Some(labels),
        owner_references: Some(vec![anchor_owner(anchor)]),
        ..ObjectMeta::default()
    }
}

fn own_labels(job: &str, role: &str) -> BTreeMap<String, String> {
    let labels = [
        ("app.kubernetes.io/component", role),
        ("app.kubernetes.io/instance", job),
        ("app.kubernetes.io/managed-by", ELASTICDL),
        ("app.kubernetes.io/name", ELASTICDL),
        ("app.kubernetes.io/part-of", ELASTICDL),
        ("app.kubernetes.io/version", env!("CARGO_PKG_VERSION")),
        (JOB_LABEL, job),
        (ROLE_LABEL, role),
    ];
    labels.map(|(key, value)| (key.into(), value.into())).into()
}

fn anchor_owner(anchor: &ObjectMeta) -> OwnerReference {
    owner("v1", "ConfigMap", anchor)
}

/// `blockOwnerDeletion` stays unset: where it is checked, it needs a permission that users usually
/// lack.
fn owner(api_version: &str, kind: &str, meta: &ObjectMeta) -> OwnerReference {
    OwnerReference {
        api_version: api_version.into(),
        kind: kind.into(),
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

/// Default for tasks that were submitted before the port could be chosen.
fn metrics_port_default() -> u16 {
    METRICS_PORT
}

/// Port on which the master listens in its pod.
pub const PORT: i32 = 7070;
/// Default port of the master's metrics.
pub const METRICS_PORT: u16 = 7071;
/// Path of the token in pods.
pub const TOKEN_FILE: &str = "/etc/elasticdl/token";
/// Path of the CA certificate in worker pods.
pub const CA_FILE: &str = "/etc/elasticdl/ca.crt";
/// Path of the master's certificate in its pod.
pub const CERTIFICATE_FILE: &str = "/etc/elasticdl/tls.crt";
/// Path of the master's private key in its pod.
pub const KEY_FILE: &str = "/etc/elasticdl/tls.key";
/// The anchor's key for the [`Task`], as JSON.
pub const TASK: &str = "task";
/// The anchor's key for the worker pod template, as JSON.
pub const WORKER_POD: &str = "worker-pod";
/// Label of a worker pod: its slot; for a pod of several workers, the first one's.
pub const SLOT_LABEL: &str = "elasticdl/index";
/// Label of a worker pod: its launch; for a pod of several workers, the first one's.
pub const LAUNCH_LABEL: &str = "elasticdl/launch";

/// Bytes of the keys `task` and `worker-pod` together: what the anchor's other keys leave of 1 MiB.
const REQUEST_BYTES_MAX: usize = 240 << 10;
const ANCHOR_LABEL: &str = "elasticdl/anchor";
/// Number of masters that may fail before one has led the job; after that the Job fails. The first
/// master that leads raises the limit beyond reach ([`super::succession`]).
///
/// A pod failure policy is no alternative: with one, the master of a lost node is not replaced
/// until the node is deleted (`podReplacementPolicy` must be `Failed` then), and pods that the
/// policy ignores still double the Job's back-off.
const BACKOFF_LIMIT: i32 = 6;
/// Seconds that a master stays bound to a node that does not answer, before the cluster deletes its
/// pod and the Job creates another.
///
/// Workers survive the loss of the master's node with their state, because the following times add
/// up to less than the 15 min (`--master-timeout`) after which workers without a master end: 40 to
/// 50 s until the cluster declares the node lost, these 20 s, at most 10 min of the Job's back-off
/// (6 min before Kubernetes 1.27; 10 s for a Job that has lost no master before), 45 s until the
/// lost master's Lease has expired, and a few seconds for the image and the start: 12 min at most.
const LOST_NODE_S: i64 = 20;
const ELASTICDL: &str = "elasticdl";
/// Grace period of a master's pod.
const MASTER_GRACE: Duration = Duration::from_secs(10);
const METRICS: &str = "metrics";
const JOB_LABEL: &str = "elasticdl/job";
const ROLE_LABEL: &str = "elasticdl/role";
const TOKEN: &str = "token";
const CA: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const WORKER: &str = "worker";

#[cfg(test)]
mod tests;
