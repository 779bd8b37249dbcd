//! Names, labels, ports and paths of a job's objects.

use std::time::Duration;

use crate::job::LaunchId;

/// Returns the name of a worker pod. Launches are numbered across all masters of a job, so a name
/// is never reused.
pub(crate) fn worker_name(job: &str, launch: LaunchId) -> String {
    format!("{job}-w-{}", launch.0)
}

/// Returns the name of a job's batch/v1 Job and of its Service.
#[must_use]
pub fn master_name(job: &str) -> String {
    format!("{job}-master")
}

/// Returns the name of the ConfigMap with the address of a job's master.
pub(crate) fn address_name(job: &str) -> String {
    format!("{job}-master-address")
}

/// Selector of the pods of a job's master.
pub(crate) fn master_selector(job: &str) -> String {
    format!("{JOB_LABEL}={job},{ROLE_LABEL}=master")
}

/// Selector of the workers of the job whose anchor has this uid.
#[must_use]
pub fn worker_selector(anchor_uid: &str) -> String {
    format!("{ANCHOR_LABEL}={anchor_uid}")
}

/// Selector of the anchors of all jobs.
pub(crate) fn anchors_selector() -> String {
    format!("app.kubernetes.io/managed-by={ELASTICDL},{ROLE_LABEL}=anchor")
}

/// Port on which the master listens in its pod.
pub const PORT: i32 = 7070;
/// Default port of the master's metrics.
pub const METRICS_PORT: u16 = 7071;
/// Variable of the master's pod with its address.
pub(crate) const POD_IP: &str = "POD_IP";
/// Folder of pods with the token and the certificates.
pub(super) const TOKEN_FOLDER: &str = "/etc/elasticdl";
/// Path of the token in pods.
pub const TOKEN_FILE: &str = "/etc/elasticdl/token";
/// Path of the CA certificate in worker pods.
pub(crate) const CA_FILE: &str = "/etc/elasticdl/ca.crt";
/// Folder of worker pods with the master's [`ADDRESS`].
pub(super) const ADDRESS_FOLDER: &str = "/etc/elasticdl-master";
/// Key of the ConfigMap with the address of the master's pod, `IP:PORT`.
pub(crate) const ADDRESS: &str = "address";
/// Path of the master's certificate in its pod.
pub const CERTIFICATE_FILE: &str = "/etc/elasticdl/tls.crt";
/// Path of the master's private key in its pod.
pub const KEY_FILE: &str = "/etc/elasticdl/tls.key";
/// The anchor's key for the [`Task`](super::Task), as JSON.
pub(crate) const TASK: &str = "task";
/// The anchor's key for the worker pod template, as JSON.
pub(crate) const WORKER_POD: &str = "worker-pod";
/// The anchor's key for the template of the table servers' pods, as JSON.
pub(crate) const TABLE_SERVER_POD: &str = "table-server-pod";
/// Label of a worker pod: its slot; for a pod of several workers, the first one's.
pub(crate) const SLOT_LABEL: &str = "elasticdl/index";
/// Label of a worker pod: its launch; for a pod of several workers, the first one's.
pub(crate) const LAUNCH_LABEL: &str = "elasticdl/launch";
pub(super) const ANCHOR_LABEL: &str = "elasticdl/anchor";
/// Number of masters that may fail before one has led the job; after that the Job fails. The first
/// master that leads raises the limit beyond reach ([`crate::kube::succession`]).
///
/// A pod failure policy is no alternative: with one, the master of a lost node is not replaced
/// until the node is deleted (`podReplacementPolicy` must be `Failed` then), and pods that the
/// policy ignores still double the Job's back-off.
pub(super) const BACKOFF_LIMIT: i32 = 6;
/// Seconds that a pod stays bound to a node that does not answer, before the cluster deletes it.
/// For a master, the Job then creates another.
///
/// Workers survive the loss of the master's node with their state, because the following times add
/// up to less than the 15 min (`--master-timeout`) after which workers without a master end: 40 to
/// 50 s until the cluster declares the node lost, these 20 s, at most 10 min of the Job's back-off
/// (6 min before Kubernetes 1.27; 10 s for a Job that has lost no master before), 45 s until the
/// lost master's Lease has expired, and a few seconds for the image and the start: 12 min at most.
pub(super) const LOST_NODE_S: i64 = 20;
pub(super) const ELASTICDL: &str = "elasticdl";
/// Grace period of a master's pod.
pub(super) const MASTER_GRACE: Duration = Duration::from_secs(10);
/// Name of the port for workers: gRPC within TLS.
pub(super) const CONTROL: &str = "tls-grpc";
pub(super) const METRICS: &str = "metrics";
/// Label of all objects of a job: its name.
pub(crate) const JOB_LABEL: &str = "elasticdl/job";
/// Label of all objects of a job: what they are for.
pub(crate) const ROLE_LABEL: &str = "elasticdl/role";
pub(super) const TOKEN: &str = "token";
pub(super) const CA: &str = "ca.crt";
pub(super) const CERTIFICATE: &str = "tls.crt";
pub(super) const KEY: &str = "tls.key";
/// Name of the container of the master.
pub(crate) const MASTER: &str = "master";
/// Name of the container of a worker.
pub(crate) const WORKER: &str = "worker";
