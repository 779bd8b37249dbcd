//! Parts that the master's and the workers' pods share.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Capabilities, EmptyDirVolumeSource, EnvVar, EnvVarSource, HTTPGetAction, KeyToPath,
    LocalObjectReference, ObjectFieldSelector, PodSecurityContext, PodSpec, Probe,
    ResourceFieldSelector, ResourceRequirements, SeccompProfile, SecretVolumeSource,
    SecurityContext, Toleration, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{CA_FILE, LOST_NODE_S, TOKEN_FILE, Task, master_name};
use crate::kube::options::{LIMITS, PodOptions, Resources};

/// Builds a pod's spec without containers. `grace`: termination grace period.
pub(super) fn pod_spec(pods: &PodOptions, grace: Duration) -> PodSpec {
    let secrets =
        pods.image_pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    PodSpec {
        enable_service_links: Some(false),
        image_pull_secrets: Some(secrets.collect()).filter(|s: &Vec<_>| !s.is_empty()),
        node_selector: Some(pods.node_selector.clone()).filter(|n| !n.is_empty()),
        restart_policy: Some("Never".into()),
        scheduler_name: pods.scheduler_name.clone(),
        security_context: Some(PodSecurityContext {
            fs_group: Some(USER),
            fs_group_change_policy: Some("OnRootMismatch".into()),
            run_as_group: Some(USER),
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".into(),
                localhost_profile: None,
            }),
            ..PodSecurityContext::default()
        }),
        termination_grace_period_seconds: Some(
            i64::try_from(grace.as_secs().max(1)).unwrap_or(i64::MAX),
        ),
        tolerations: Some(pods.tolerations.clone()).filter(|t| !t.is_empty()),
        ..PodSpec::default()
    }
}

/// Adds tolerations for nodes that don't answer to the user's own, unless these name the same
/// taints.
pub(super) fn master_tolerations(own: &[Toleration]) -> Vec<Toleration> {
    let lost =
        ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"].map(|key| Toleration {
            key: Some(key.into()),
            operator: Some("Exists".into()),
            effect: Some("NoExecute".into()),
            toleration_seconds: Some(LOST_NODE_S),
            value: None,
        });
    let is_own = |toleration: &Toleration| own.iter().any(|other| other.key == toleration.key);
    own.iter().cloned().chain(lost.into_iter().filter(|toleration| !is_own(toleration))).collect()
}

/// Liveness probe: a master that does not answer for a minute is killed, so that another replaces
/// it.
pub(super) fn liveness(port: &str) -> Probe {
    Probe {
        period_seconds: Some(10),
        timeout_seconds: Some(5),
        failure_threshold: Some(6),
        ..probe(crate::metrics::HEALTH, port)
    }
}

/// Readiness probe: the Service selects only the master that holds the Lease and listens. Its
/// period is short, because workers wait for it.
pub(super) fn readiness(port: &str) -> Probe {
    Probe {
        period_seconds: Some(1),
        timeout_seconds: Some(2),
        failure_threshold: Some(2),
        ..probe(crate::metrics::READY, port)
    }
}

fn probe(path: &str, port: &str) -> Probe {
    let port = IntOrString::String(port.into());
    let get = HTTPGetAction { path: Some(path.into()), port, ..HTTPGetAction::default() };
    Probe { http_get: Some(get), ..Probe::default() }
}

pub(super) fn locked_down() -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        capabilities: Some(Capabilities { drop: Some(vec!["ALL".into()]), add: None }),
        privileged: Some(false),
        read_only_root_filesystem: Some(true),
        ..SecurityContext::default()
    }
}

/// Volumes with these keys of the secret, and a writable one: the root file system is read-only.
pub(super) fn volumes(job: &str, keys: &[&str]) -> Vec<Volume> {
    let item = |key: &&str| KeyToPath { key: (*key).into(), path: (*key).into(), mode: None };
    let secret = SecretVolumeSource {
        secret_name: Some(job.into()),
        default_mode: Some(OWNER_AND_GROUP_READ),
        items: Some(keys.iter().map(item).collect()),
        ..SecretVolumeSource::default()
    };
    vec![
        Volume { name: "token".into(), secret: Some(secret), ..Volume::default() },
        Volume {
            name: "tmp".into(),
            empty_dir: Some(EmptyDirVolumeSource::default()),
            ..Volume::default()
        },
    ]
}

pub(super) fn mounts() -> Vec<VolumeMount> {
    let folder = TOKEN_FILE.rsplit_once('/').map_or("/", |(folder, _)| folder);
    vec![
        VolumeMount {
            name: "token".into(),
            mount_path: folder.into(),
            read_only: Some(true),
            ..VolumeMount::default()
        },
        VolumeMount { name: "tmp".into(), mount_path: "/tmp".into(), ..VolumeMount::default() },
    ]
}

/// Shared memory for the NCCL ranks of a pod: limited by the pod's memory only, not by the
/// containers' default of 64 MiB.
pub(super) fn shared_memory(volumes: &mut Vec<Volume>, mounts: &mut Vec<VolumeMount>) {
    if mounts.iter().any(|mount| mount.mount_path == SHARED_MEMORY) {
        return;
    }
    let memory =
        EmptyDirVolumeSource { medium: Some("Memory".into()), ..EmptyDirVolumeSource::default() };
    volumes.push(Volume { name: "shm".into(), empty_dir: Some(memory), ..Volume::default() });
    let mount_path = SHARED_MEMORY.into();
    mounts.push(VolumeMount { name: "shm".into(), mount_path, ..VolumeMount::default() });
}

/// Memory and devices are limited to the requested amount. CPUs are not, because a throttled rank
/// slows down all others, unless the user sets a limit (`limits.cpu`).
pub(super) fn requirements(resources: &Resources) -> ResourceRequirements {
    let amounts = |limits: bool| {
        let own =
            resources.iter().filter_map(move |(name, amount)| match name.strip_prefix(LIMITS) {
                Some(name) => limits.then_some((name, amount)),
                None => (!limits).then_some((name.as_str(), amount)),
            });
        own.map(|(name, amount)| (name.to_owned(), Quantity(amount.clone())))
    };
    let requests: BTreeMap<String, Quantity> = amounts(false).collect();
    let mut limits = requests.clone();
    limits.remove("cpu");
    limits.extend(amounts(true));
    ResourceRequirements {
        limits: Some(limits).filter(|l| !l.is_empty()),
        requests: Some(requests).filter(|r| !r.is_empty()),
        claims: None,
    }
}

/// Environment that is the same for all workers.
pub(super) fn worker_environment(task: &Task) -> Vec<EnvVar> {
    let mut env = vec![
        variable("ELASTICDL_CA_FILE", CA_FILE),
        variable("ELASTICDL_JOB", &task.job.name),
        variable("ELASTICDL_MASTER_NAME", &master_name(&task.job.name)),
        variable("ELASTICDL_MASTER_TIMEOUT_MS", &task.master_timeout.as_millis().to_string()),
        variable("ELASTICDL_TOKEN_FILE", TOKEN_FILE),
        field("ELASTICDL_NAMESPACE", "metadata.namespace"),
        field("ELASTICDL_NODE_NAME", "spec.nodeName"),
        field("ELASTICDL_POD_IP", "status.podIP"),
        field("ELASTICDL_POD_NAME", "metadata.name"),
        field("ELASTICDL_POD_UID", "metadata.uid"),
    ];
    if task.job.workers_per_pod > 1 {
        env.push(variable("ELASTICDL_WORKERS", &task.job.workers_per_pod.to_string()));
    }
    env
}

/// Number of threads: the requested CPUs, not the node's. Several workers of a pod divide them.
pub(super) fn threads(workers_per_pod: u32) -> EnvVar {
    EnvVar {
        name: if workers_per_pod > 1 { "ELASTICDL_CPUS" } else { RAYON_THREADS }.into(),
        value: None,
        value_from: Some(EnvVarSource {
            resource_field_ref: Some(ResourceFieldSelector {
                resource: "requests.cpu".into(),
                ..ResourceFieldSelector::default()
            }),
            ..EnvVarSource::default()
        }),
    }
}

/// A variable whose value is a field of the pod.
pub(super) fn field(name: &str, path: &str) -> EnvVar {
    EnvVar {
        name: name.into(),
        value: None,
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { api_version: None, field_path: path.into() }),
            ..EnvVarSource::default()
        }),
    }
}

pub(super) fn variable(name: &str, value: &str) -> EnvVar {
    EnvVar { name: name.into(), value: Some(value.into()), value_from: None }
}

pub(super) const RAYON_THREADS: &str = "RAYON_NUM_THREADS";

const SHARED_MEMORY: &str = "/dev/shm";
const OWNER_AND_GROUP_READ: i32 = 0o440;
/// An unprivileged user without a name.
const USER: i64 = 65532;
