//! The objects of a job. Pure: a request in, objects out.
//!
//! ```text
//!  Job <job>-master ──owns──► ConfigMap <job> (the anchor) ──owns──► Secret, Service, policies,
//!                                                                    role, worker pods
//! ```
//!
//! The Job is created with a parallelism of 0, which is raised to 1 when all objects exist: until
//! then nothing runs.
//!
//! **Invariants:** each object has one owner. Secrets are in the Secret only, and each pod mounts
//! only the keys that it needs: the master's private key is mounted by the master alone. No rank
//! and no world size is in any environment: both change during a pod's life.

mod access;
mod credentials;
mod master;
mod metadata;
mod names;
mod network_policy;
mod parts;
mod pod_group;
mod request;
mod template;

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{
    ConfigMap, Container, Pod, PodSpec, Secret, Service, ServicePort, ServiceSpec,
};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

pub use self::access::Access;
pub use self::credentials::PlainCredential;
pub(crate) use self::metadata::owned;
use self::metadata::{anchor_owner, metadata, own_labels, owner};
pub use self::names::*;
use self::parts::add_volumes;
pub(crate) use self::pod_group::{PRIORITY_CLASS, pod_group};
pub use self::request::{Request, Task};
use crate::certificates::Certificates;
use crate::job::LaunchId;
use crate::kube::options::{Resources, TemplateError};
use crate::token::Token;

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
    /// Network policies of the master and of the workers, if there are any.
    pub network_policies: Vec<NetworkPolicy>,
    /// The master's own service account, if it has one.
    pub access: Option<Access>,
}

/// Why a job has no objects. Correct the options of the job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectsError {
    /// A credential would be stored in plain text.
    #[error(transparent)]
    Credential(#[from] PlainCredential),
    /// A pod template is invalid.
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
        let of_worker = &request.pods.worker_resources;
        let (worker, job) = (worker_template(request, of_worker)?, master::job(request)?);
        check_credentials(request, &worker, &job)?;
        let to_json =
            |pod: &Pod| serde_json::to_string_pretty(pod).expect("a pod's keys are strings");
        let task = serde_json::to_string_pretty(&request.task).expect("a task's keys are strings");
        let mut data = BTreeMap::from([(TASK.into(), task), (WORKER_POD.into(), to_json(&worker))]);
        if request.task.job.options.table_servers > 0 {
            let resources = request.pods.table_server_resources.as_ref().unwrap_or(of_worker);
            let server = worker_template(request, resources)?;
            data.insert(TABLE_SERVER_POD.into(), to_json(&server));
        }
        let bytes = data.values().map(String::len).sum();
        if bytes > REQUEST_BYTES_MAX {
            return Err(ObjectsError::TooLong { bytes });
        }
        let mut anchor =
            ConfigMap { metadata: metadata(request, name, "anchor"), ..ConfigMap::default() };
        anchor.data = Some(data);
        let service = service(&request.task, metadata(request, &master_name(name), "master"));
        Ok(Self {
            job,
            anchor,
            secret: secret(request, credentials),
            service,
            network_policies: network_policy::policies(request),
            access: Access::new(request),
        })
    }

    /// Makes the Job, as created by the server, the owner of the anchor.
    pub(crate) fn own_anchor(&mut self, job: &ObjectMeta) {
        self.anchor.metadata.owner_references = Some(vec![owner("batch/v1", "Job", job)]);
    }

    /// Makes the anchor, as created by the server, the owner of the other objects.
    pub(crate) fn own_rest(&mut self, anchor: &ObjectMeta) {
        let owners = Some(vec![anchor_owner(anchor)]);
        let access = self.access.iter_mut().flat_map(|Access { account, role, binding }| {
            [&mut account.metadata, &mut role.metadata, &mut binding.metadata]
        });
        let policies = self.network_policies.iter_mut().map(|policy| &mut policy.metadata);
        let rest = [&mut self.secret.metadata, &mut self.service.metadata];
        for metadata in rest.into_iter().chain(policies).chain(access) {
            metadata.owner_references.clone_from(&owners);
        }
    }

    /// Returns all objects as YAML, to be read, with placeholders for secrets and for the owners'
    /// uids.
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
        let mut documents = vec![
            serde_saphyr::to_string(&self.job),
            serde_saphyr::to_string(&self.anchor),
            serde_saphyr::to_string(&self.secret),
            serde_saphyr::to_string(&self.service),
        ];
        documents.extend(self.network_policies.iter().map(serde_saphyr::to_string));
        documents.extend(self.access.iter().flat_map(|Access { account, role, binding }| {
            [
                serde_saphyr::to_string(account),
                serde_saphyr::to_string(role),
                serde_saphyr::to_string(binding),
            ]
        }));
        let texts = documents.into_iter().map(|text| text.expect("objects have YAML forms"));
        FOR_READING.to_owned() + &texts.collect::<Vec<_>>().join("---\n")
    }
}

/// Builds the Service that selects the master.
pub(crate) fn service(task: &Task, metadata: ObjectMeta) -> Service {
    let mut selector = own_labels(&task.job.name, "master");
    selector.retain(|key, _| [JOB_LABEL, ROLE_LABEL].contains(&key.as_str()));
    // Service meshes take the protocol from the name or the application protocol.
    let port = |name: &str, protocol: &str, port| ServicePort {
        app_protocol: Some(protocol.into()),
        name: Some(name.into()),
        port,
        target_port: Some(IntOrString::Int(port)),
        ..ServicePort::default()
    };
    let metrics = port(METRICS, "http", task.metrics_port.into());
    let metrics = Some(metrics).filter(|_| task.serve_metrics);
    let ports = [Some(port(CONTROL, "tls", PORT)), metrics].into_iter().flatten().collect();
    Service {
        metadata,
        spec: Some(ServiceSpec {
            ports: Some(ports),
            selector: Some(selector),
            // Only the leading master is ready: one that is ending, or waits for the Lease, is
            // not. A connection to it would be lost, or hang.
            ..ServiceSpec::default()
        }),
        ..Service::default()
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
pub(crate) fn worker_pod(
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

/// Refuses credentials in what users write: the task and the pods.
fn check_credentials(request: &Request, worker: &Pod, job: &Job) -> Result<(), PlainCredential> {
    let value = |object: serde_json::Result<serde_json::Value>| object.expect("keys are strings");
    credentials::check("the task", &value(serde_json::to_value(&request.task)))?;
    credentials::check("the worker pod", &value(serde_json::to_value(worker)))?;
    credentials::check("the master's Job", &value(serde_json::to_value(job)))
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

/// Builds the template that all worker pods share, or those of table servers, with these resources.
fn worker_template(request: &Request, resources: &Resources) -> Result<Pod, TemplateError> {
    let name = &request.task.job.name;
    let pods = &request.pods;
    let (program, args) = request.program.split_first().expect("a request has a program");
    let mut env = parts::worker_environment(&request.task);
    let is_free = |variable: &str| !pods.env.iter().any(|(name, _)| name == variable);
    let workers_per_pod = request.task.job.workers_per_pod;
    let defaults = parts::default_environment(workers_per_pod, resources);
    env.extend(defaults.into_iter().filter(|variable| is_free(&variable.name)));
    env.extend(pods.env.iter().map(|(name, value)| parts::variable(name, value)));
    let (from_keys, from_secrets) = parts::secret_environment(&pods.env_from_secret);
    env.extend(from_keys);
    let mut mounts = parts::mounts();
    let tmp = parts::tmp_size(resources);
    let mut volumes = parts::volumes(name, &[TOKEN, CA], tmp);
    parts::master_address(name, &mut volumes, &mut mounts);
    add_volumes(pods, &mut volumes, &mut mounts);
    if workers_per_pod > 1 {
        parts::shared_memory(resources, &mut volumes, &mut mounts);
    }
    let container = Container {
        name: WORKER.into(),
        image: Some(pods.image.clone()),
        command: Some(vec![parts::literal(program)]),
        args: Some(args.iter().map(|arg| parts::literal(arg)).collect())
            .filter(|args: &Vec<_>| !args.is_empty()),
        env: Some(env),
        env_from: Some(from_secrets).filter(|from| !from.is_empty()),
        resources: Some(parts::requirements(resources)),
        security_context: Some(parts::locked_down()),
        // The pod's status then has the last lines of its log.
        termination_message_policy: Some("FallbackToLogsOnError".into()),
        volume_mounts: Some(mounts),
        ..Container::default()
    };
    let gang = request.task.gang.as_ref();
    let spec = PodSpec {
        containers: vec![container],
        service_account_name: pods.worker_service_account.clone(),
        automount_service_account_token: Some(false),
        scheduler_name: gang.and_then(|gang| gang.scheduler.scheduler_name()).map(String::from),
        volumes: Some(volumes),
        ..parts::pod_spec(pods, request.task.job.options.grace_period)
    };
    let of_user = pods.worker_pod_template.as_ref();
    let mut spec = template::merge(spec, of_user, WORKER)?;
    parts::make_readable(&mut spec);
    let mut metadata = metadata(request, "", WORKER);
    metadata.name = None;
    template::mark(&mut metadata, of_user);
    parts::refuse_sidecars(&mut metadata);
    parts::allow_scale_down(&mut metadata);
    if let Some(gang) = gang {
        gang.mark_template(&mut metadata);
    }
    Ok(Pod { metadata, spec: Some(spec), status: None })
}

/// Bytes of the keys `task` and `worker-pod` together: what the anchor's other keys leave of 1 MiB.
const REQUEST_BYTES_MAX: usize = 240 << 10;

const FOR_READING: &str = "\
# To be read: the server gives some of these values, so `kubectl apply` makes no job of it. What it
# can apply is a declared job (manifests/README.md).
";

#[cfg(test)]
mod tests;
