//! Parts that the master's and the workers' pods share.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::LogFormat;
use k8s_openapi::api::core::v1::{
    Capabilities, ConfigMapVolumeSource, EmptyDirVolumeSource, EnvFromSource, EnvVar, EnvVarSource,
    HTTPGetAction, KeyToPath, LocalObjectReference, ObjectFieldSelector, PodSecurityContext,
    PodSpec, Probe, ResourceFieldSelector, ResourceRequirements, SeccompProfile, SecretEnvSource,
    SecretKeySelector, SecretVolumeSource, SecurityContext, Toleration, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::names::{
    ADDRESS, ADDRESS_FOLDER, CA_FILE, LOST_NODE_S, TOKEN_FILE, TOKEN_FOLDER, address_name,
    master_name,
};
use super::request::Task;
use crate::kube::options::{LIMITS, PodOptions, Resources, SecretEnv};

/// Builds a pod's spec without containers. `grace`: termination grace period.
pub(super) fn pod_spec(pods: &PodOptions, grace: Duration) -> PodSpec {
    let secrets =
        pods.image_pull_secrets.iter().map(|name| LocalObjectReference { name: name.clone() });
    let user = Some(USER).filter(|_| !pods.cluster_assigns_ids);
    PodSpec {
        enable_service_links: Some(false),
        image_pull_secrets: Some(secrets.collect()).filter(|s: &Vec<_>| !s.is_empty()),
        node_selector: Some([("kubernetes.io/os".into(), "linux".into())].into()),
        restart_policy: Some("Never".into()),
        security_context: Some(PodSecurityContext {
            fs_group: user,
            fs_group_change_policy: user.map(|_| "OnRootMismatch".into()),
            run_as_group: user,
            run_as_non_root: Some(true),
            run_as_user: user,
            seccomp_profile: Some(SeccompProfile {
                type_: "RuntimeDefault".into(),
                localhost_profile: None,
            }),
            ..PodSecurityContext::default()
        }),
        termination_grace_period_seconds: Some(
            i64::try_from(grace.as_secs().max(1)).unwrap_or(i64::MAX),
        ),
        tolerations: Some(LOST_NODE.map(lost_node).into()),
        ..PodSpec::default()
    }
}

/// A toleration for nodes that don't answer. Without it a cluster leaves pods on such nodes for
/// five minutes.
fn lost_node(taint: &str) -> Toleration {
    Toleration {
        key: Some(taint.into()),
        operator: Some("Exists".into()),
        effect: Some("NoExecute".into()),
        toleration_seconds: Some(LOST_NODE_S),
        value: None,
    }
}

/// Lets any user read the files of the job's Secret if they have no group of the pod's user. No
/// other user is in the pod.
pub(super) fn make_readable(spec: &mut PodSpec) {
    if spec.security_context.as_ref().is_some_and(|context| context.fs_group.is_some()) {
        return;
    }
    let volumes = spec.volumes.iter_mut().flatten().filter(|volume| volume.name == "token");
    for secret in volumes.filter_map(|volume| volume.secret.as_mut()) {
        secret.default_mode = Some(ALL_READ);
    }
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

/// Volumes with these keys of the secret, and a writable one of at most `tmp` bytes: the root file
/// system is read-only.
pub(super) fn volumes(job: &str, keys: &[&str], tmp: &str) -> Vec<Volume> {
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
            empty_dir: Some(EmptyDirVolumeSource {
                size_limit: Some(Quantity(tmp.into())),
                ..EmptyDirVolumeSource::default()
            }),
            ..Volume::default()
        },
    ]
}

pub(super) fn mounts() -> Vec<VolumeMount> {
    vec![
        VolumeMount {
            name: "token".into(),
            mount_path: TOKEN_FOLDER.into(),
            read_only: Some(true),
            ..VolumeMount::default()
        },
        VolumeMount { name: "tmp".into(), mount_path: "/tmp".into(), ..VolumeMount::default() },
    ]
}

/// Mounts the address of the master's pod, which each master writes. Workers that find no master at
/// its Service dial this address: it depends on the kubelet alone, not on the cluster's controllers
/// and proxies, which may be out of date after an outage of the API server.
pub(super) fn master_address(job: &str, volumes: &mut Vec<Volume>, mounts: &mut Vec<VolumeMount>) {
    let address = ConfigMapVolumeSource {
        name: address_name(job),
        optional: Some(true),
        ..ConfigMapVolumeSource::default()
    };
    volumes.push(Volume { name: "master".into(), config_map: Some(address), ..Volume::default() });
    mounts.push(VolumeMount {
        name: "master".into(),
        mount_path: ADDRESS_FOLDER.into(),
        read_only: Some(true),
        ..VolumeMount::default()
    });
}

/// Size of the writable volume of a worker: what it may use of its node's disk.
pub(super) fn tmp_size(resources: &Resources) -> &str {
    let amount = |name: &str| resources.get(name).map(String::as_str);
    amount("limits.ephemeral-storage").or_else(|| amount("ephemeral-storage")).unwrap_or(TMP_SIZE)
}

/// Keeps meshes from adding sidecars, unless the template's metadata asks for them: the
/// job's connections are authenticated already, sidecars would slow down the ring, and those of
/// older kinds outlive the pod's own container.
pub(super) fn refuse_sidecars(metadata: &mut ObjectMeta) {
    let labels = metadata.labels.get_or_insert_default();
    for (key, value) in [("kuma.io/sidecar-injection", "disabled"), (ISTIO, "false")] {
        labels.entry(key.into()).or_insert_with(|| value.into());
    }
    let is_asked_for = labels[ISTIO] != "false";
    let annotations = metadata.annotations.get_or_insert_default();
    let consul = "consul.hashicorp.com/connect-inject";
    for (key, value) in [(consul, "false"), ("linkerd.io/inject", "disabled")] {
        annotations.entry(key.into()).or_insert_with(|| value.into());
    }
    if !is_asked_for {
        annotations.entry(ISTIO.into()).or_insert_with(|| "false".into());
    }
}

/// Lets the cluster autoscaler remove the pod's node, unless the template's metadata says
/// otherwise: it keeps nodes with pods of controllers that it does not know, or local volumes.
pub(super) fn allow_scale_down(metadata: &mut ObjectMeta) {
    let annotations = metadata.annotations.get_or_insert_default();
    annotations.entry(SAFE_TO_EVICT.into()).or_insert_with(|| "true".into());
}

/// Annotation that the cluster autoscaler reads.
const SAFE_TO_EVICT: &str = "cluster-autoscaler.kubernetes.io/safe-to-evict";

/// Shared memory for the NCCL ranks of a pod: limited by the pod's memory, not by the containers'
/// default of 64 MiB.
pub(super) fn shared_memory(
    resources: &Resources,
    volumes: &mut Vec<Volume>,
    mounts: &mut Vec<VolumeMount>,
) {
    if mounts.iter().any(|mount| mount.mount_path == SHARED_MEMORY) {
        return;
    }
    let size = resources.get("limits.memory").or_else(|| resources.get("memory"));
    let memory = EmptyDirVolumeSource {
        medium: Some("Memory".into()),
        size_limit: size.cloned().map(Quantity),
    };
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
        variable(LogFormat::VARIABLE, task.job.log_format.name()),
        variable("ELASTICDL_MASTER_FILE", &format!("{ADDRESS_FOLDER}/{ADDRESS}")),
        variable("ELASTICDL_MASTER_NAME", &master_name(&task.job.name)),
        variable("ELASTICDL_MASTER_TIMEOUT_MS", &task.master_timeout.as_millis().to_string()),
        variable("ELASTICDL_TOKEN_FILE", TOKEN_FILE),
        field("ELASTICDL_NAMESPACE", "metadata.namespace"),
        field("ELASTICDL_NODE_NAME", "spec.nodeName"),
        field("ELASTICDL_POD_IP", "status.podIP"),
        field("ELASTICDL_POD_NAME", "metadata.name"),
        field("ELASTICDL_POD_UID", "metadata.uid"),
        // The API server copies the zone of the node from 1.35 on. Without the label it is empty.
        field("ELASTICDL_RACK", "metadata.labels['topology.kubernetes.io/rack']"),
        field("ELASTICDL_ZONE", "metadata.labels['topology.kubernetes.io/zone']"),
    ];
    if task.job.workers_per_pod > 1 {
        env.push(variable("ELASTICDL_WORKERS", &task.job.workers_per_pod.to_string()));
    }
    env
}

/// Variables from single keys of Secrets, and Secrets whose keys are all variables. The variables
/// of [`worker_environment`] take precedence over the latter.
pub(super) fn secret_environment(all: &[SecretEnv]) -> (Vec<EnvVar>, Vec<EnvFromSource>) {
    let of_key = |SecretEnv { secret, variable }: &SecretEnv| {
        let (name, key) = variable.clone()?;
        let reference = SecretKeySelector { name: secret.clone(), key, optional: None };
        let source = EnvVarSource { secret_key_ref: Some(reference), ..EnvVarSource::default() };
        Some(EnvVar { name, value: None, value_from: Some(source) })
    };
    let whole = |SecretEnv { secret, variable }: &SecretEnv| {
        let reference = SecretEnvSource { name: secret.clone(), optional: None };
        let source = EnvFromSource { secret_ref: Some(reference), ..EnvFromSource::default() };
        variable.is_none().then_some(source)
    };
    (all.iter().filter_map(of_key).collect(), all.iter().filter_map(whole).collect())
}

/// Variables of the workers that the master gets too: those of MLflow, to whose server it sends the
/// job's metrics, and of OpenTelemetry, to whose collector it sends traces.
pub(super) fn tracking_environment(pods: &PodOptions) -> Vec<EnvVar> {
    let plain = pods.env.iter().map(|(name, value)| variable(name, value));
    let (secret, _) = secret_environment(&pods.env_from_secret);
    let is_of_master = |variable: &EnvVar| {
        ["MLFLOW_", "OTEL_"].iter().any(|prefix| variable.name.starts_with(prefix))
    };
    plain.chain(secret).filter(is_of_master).collect()
}

/// Variables that the user may set otherwise. Numbers of threads: the requested CPUs, not the
/// node's; several workers of a pod divide them. With a GPU, the folder of the kernels that the
/// CUDA driver compiles: its own default, in the home folder, can't be written to.
pub(super) fn default_environment(workers_per_pod: u32, resources: &Resources) -> Vec<EnvVar> {
    let names: &[&str] = if workers_per_pod > 1 { &["ELASTICDL_CPUS"] } else { &THREADS };
    let mut env: Vec<EnvVar> = names.iter().map(|name| requested_cpus(name)).collect();
    if resources.keys().any(|resource| resource.starts_with("nvidia.com/")) {
        env.push(variable("CUDA_CACHE_PATH", "/tmp/cuda"));
    }
    env
}

fn requested_cpus(name: &str) -> EnvVar {
    EnvVar {
        name: name.into(),
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
    EnvVar { name: name.into(), value: Some(literal(value)), value_from: None }
}

/// The text from which the kubelet, which replaces `$(NAME)` and `$$` in commands, arguments and
/// values of variables, makes `text`.
pub(super) fn literal(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(character) = rest.next() {
        escaped.push(character);
        if character == '$' && matches!(rest.peek(), Some('$' | '(')) {
            escaped.push('$');
        }
    }
    escaped
}

/// Adds the volumes that the user has asked for.
pub(super) fn add_volumes(
    pods: &PodOptions,
    volumes: &mut Vec<Volume>,
    mounts: &mut Vec<VolumeMount>,
) {
    for (index, mounted) in pods.volumes.iter().enumerate() {
        let (mut volume, mut mount) = (mounted.volume.clone(), mounted.mount.clone());
        volume.name = format!("volume-{index}");
        mount.name.clone_from(&volume.name);
        volumes.push(volume);
        mounts.push(mount);
    }
}

/// Variables with the number of threads of rayon, and of OpenMP and BLAS libraries.
const THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];

/// Keys of the taints of nodes that do not answer.
const LOST_NODE: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
/// User and group of the pods: an unprivileged user without a name.
const USER: i64 = 65532;
const SHARED_MEMORY: &str = "/dev/shm";
const ALL_READ: i32 = 0o444;
/// Label, and annotation of older versions, that asks Istio for a sidecar.
const ISTIO: &str = "sidecar.istio.io/inject";
const OWNER_AND_GROUP_READ: i32 = 0o440;
/// Size of a worker's writable volume, unless its resources have `ephemeral-storage`.
const TMP_SIZE: &str = "10Gi";
