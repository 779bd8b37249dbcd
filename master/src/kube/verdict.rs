//! What a pod's object says about its worker. Pure: a pod in, a verdict out.
//!
//! The cluster tells a pod's end in many ways, and the same exit code means different things in
//! each: a drained worker can end with code 0, an evicted one with 137. So the evidence is weighed
//! in a fixed order: what the cluster says it did, then how the container ended, then what keeps it
//! from starting. What the worker itself has said (done, leaving, failed) is stronger than all of
//! it; that is the job's affair, which has heard it.
//!
//! | what the pod shows | verdict | counts as the worker's failure |
//! |---|---|---|
//! | being deleted, and its container runs | leaves | |
//! | condition `DisruptionTarget`, `TerminationTarget` | taken by the cluster: preempted, drained, evicted, … | no |
//! | `status.reason` `Evicted`, over its own limit of disk | over a limit | yes |
//! | `status.reason` `Evicted`, `Preempting`, `Shutdown`, `NodeShutdown`, `Terminated`, `NodeLost` | taken by the cluster | no |
//! | `status.reason` `OutOf…`, `NodeAffinity`, `UnexpectedAdmissionError`, … | refused by its node | no |
//! | being deleted, and its container has ended or never ran | deleted | no |
//! | container `OOMKilled` | over a limit | yes |
//! | container ended by signal 1, 2, 9 or 15 (exit code 128 + n) | killed | no |
//! | container ended by another signal, or with a code | failed | yes |
//! | failed without a container's word | lost | no |
//! | waiting: `ErrImagePull`, `CreateContainerConfigError`, … | cannot start | after a while, fatal |
//! | `PodScheduled` false, `Unschedulable` or gated | waits for room | no |
//! | pending, with a node | starts | no |
//! | pending, without a word | asked for | no |
//!
//! A condition alone ends nothing: a preemption that the scheduler announced and did not carry out
//! leaves one behind.

use std::time::Duration;

use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateTerminated, Pod, PodCondition, PodStatus,
};

/// What one look at a pod says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It has been asked for; nobody has looked for a node yet.
    Created,
    /// It can't start as things are, on this node or any: what stands in the way, for the user.
    CannotStart(String),
    /// It ended, or will never run.
    Ended(End),
    /// Its program runs, and was told to end.
    Terminating(Termination),
    /// Its program runs.
    Running,
    /// It has a node, which fetches its image or prepares its volumes.
    Starting,
    /// No node has room for it, or somebody holds it back: why.
    Unschedulable(String),
}

/// A pod that is being deleted while its program runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Termination {
    /// What its end will be by the cluster's word.
    pub end: End,
    /// How long after its deletion its program is killed.
    pub grace: Duration,
    /// The cluster still hears of it.
    pub ready: bool,
}

/// How a pod ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// In a word.
    pub cause: Cause,
    /// For the user: the cluster's or the container's words.
    pub detail: String,
}

/// Why a pod ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Somebody deleted it, or its object is gone.
    Deleted,
    /// Its node was emptied: an eviction by the API, a taint, a shutdown.
    Drained,
    /// Its node ran short of something.
    Evicted,
    /// Its program ended with this code.
    Exited(i32),
    /// Its node is gone, or has said nothing about how it ended.
    Lost,
    /// It used more memory than it may.
    OutOfMemory,
    /// It used more of something else than it may.
    OverLimit,
    /// Its place was needed for a pod of higher priority.
    Preempted,
    /// Its node did not let it start.
    Refused,
    /// Its program was ended by this signal.
    Signalled(i32),
    /// The cluster took its place for another reason.
    Reclaimed,
}

impl Cause {
    /// Whether it is the worker's own failure, which counts against the job's limit.
    #[must_use]
    pub fn is_own_fault(self) -> bool {
        match self {
            Self::Exited(_) | Self::OutOfMemory | Self::OverLimit => true,
            // Somebody else's doing: what a program does to itself ends in other signals.
            Self::Signalled(signal) => !matches!(signal, 1 | 2 | 9 | 15),
            _ => false,
        }
    }
}

/// Judges a pod by its object.
#[must_use]
pub fn classify(pod: &Pod) -> Verdict {
    let nothing = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&nothing);
    let container = container(status);
    let ended = container.and_then(|state| state.terminated.as_ref());
    let by_cluster = || reclaimed(status).or_else(|| refused(status)).or_else(|| deleted(pod));
    let is_over = matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"));
    // The kubelet reports a container's end before the pod's.
    if is_over || ended.is_some() {
        let by_itself = || ended.map_or_else(|| lost(status), how_it_ended);
        return Verdict::Ended(by_cluster().unwrap_or_else(by_itself));
    }
    if let Some(end) = deleted(pod) {
        let end = reclaimed(status).unwrap_or(end);
        let runs = container.is_some_and(|state| state.running.is_some());
        // What the cluster has lost does not leave: nobody is there to tell its program.
        if !runs || end.cause == Cause::Lost {
            return Verdict::Ended(end);
        }
        let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or_default();
        let grace = Duration::from_secs(u64::try_from(grace).unwrap_or_default());
        return Verdict::Terminating(Termination {
            end,
            grace,
            ready: holds(status, "Ready").is_some(),
        });
    }
    waiting(status).unwrap_or_else(|| match status.phase.as_deref() {
        Some("Running") => Verdict::Running,
        _ if has_node(pod, status) => Verdict::Starting,
        _ => Verdict::Created,
    })
}

/// Whether another container of the pod runs although its own has ended: such a pod does not end by
/// itself.
#[must_use]
pub fn has_running_sidecar(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    let own_has_ended = container(status).is_some_and(|state| state.terminated.is_some());
    let mut all = status.container_statuses.iter().flatten().filter_map(|c| c.state.as_ref());
    own_has_ended && all.any(|state| state.running.is_some())
}

/// Whether a pod's processes are over for certain: its container's end was seen. A phase alone can
/// be what somebody says of a node that is out of reach.
#[must_use]
pub fn has_terminated(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    let ended = container(status).and_then(|state| state.terminated.as_ref());
    let is_seen = ended.is_some_and(|e| e.reason.as_deref() != Some("ContainerStatusUnknown"));
    is_seen && matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"))
}

/// What is known of a pod whose object is gone without a word.
#[must_use]
pub fn vanished() -> End {
    End { cause: Cause::Deleted, detail: "its pod is gone".into() }
}

/// The cluster says that it took the pod's place.
fn reclaimed(status: &PodStatus) -> Option<End> {
    let condition =
        ["DisruptionTarget", "TerminationTarget"].iter().find_map(|name| holds(status, name));
    if let Some(condition) = condition {
        let reason = condition.reason.as_deref().unwrap_or("no reason given");
        let told = [condition.message.as_deref(), status.message.as_deref()];
        let is_own = told.iter().flatten().any(|m| OWN_LIMITS.iter().any(|own| m.contains(own)));
        let cause = match reason {
            // Newer servers say both that the kubelet has ended it and what for.
            "TerminationByKubelet" if is_own => {
                let message = told[0].or(told[1]);
                return Some(End { cause: Cause::OverLimit, detail: words("Evicted", message) });
            }
            "PreemptionByScheduler" | "PreemptionByKubeScheduler" => Cause::Preempted,
            "EvictionByEvictionAPI" | "DeletionByTaintManager" => Cause::Drained,
            "TerminationByKubelet" => Cause::Evicted,
            // The collector does so when a pod's node is no more.
            "DeletionByPodGC" => Cause::Lost,
            _ => Cause::Reclaimed,
        };
        return Some(End { cause, detail: words(reason, condition.message.as_deref()) });
    }
    let reason = status.reason.as_deref()?;
    let message = status.message.as_deref();
    let cause = match reason {
        "Evicted" if message.is_some_and(|m| OWN_LIMITS.iter().any(|own| m.contains(own))) => {
            Cause::OverLimit
        }
        "Evicted" => Cause::Evicted,
        "Preempting" => Cause::Preempted,
        "Shutdown" | "NodeShutdown" | "Terminated" => Cause::Drained,
        "NodeLost" => Cause::Lost,
        _ => return None,
    };
    Some(End { cause, detail: words(reason, message) })
}

/// The node's kubelet did not admit the pod.
fn refused(status: &PodStatus) -> Option<End> {
    let reason = status.reason.as_deref()?;
    let known =
        ["NodeAffinity", "UnexpectedAdmissionError", "PodOSNotSupported", "TopologyAffinityError"];
    (reason.starts_with("OutOf") || known.contains(&reason))
        .then(|| End { cause: Cause::Refused, detail: words(reason, status.message.as_deref()) })
}

fn deleted(pod: &Pod) -> Option<End> {
    pod.metadata.deletion_timestamp.as_ref()?;
    Some(End { cause: Cause::Deleted, detail: "its pod is being deleted".into() })
}

fn how_it_ended(ended: &ContainerStateTerminated) -> End {
    let reason = ended.reason.as_deref().unwrap_or_default();
    let (code, message) = (ended.exit_code, ended.message.as_deref());
    let signal = ended
        .signal
        .filter(|&signal| signal > 0)
        .or_else(|| Some(code - 128).filter(|n| (1..=64).contains(n)));
    let (cause, what) = match (reason, signal) {
        ("OOMKilled", _) => (Cause::OutOfMemory, "it used more memory than its limit".to_owned()),
        // The kubelet has lost sight of it; the code is made up.
        ("ContainerStatusUnknown", _) => {
            (Cause::Lost, "its node does not know how it ended".to_owned())
        }
        (_, Some(signal)) => (Cause::Signalled(signal), format!("ended by signal {signal}")),
        (_, None) => (Cause::Exited(code), format!("exited with code {code}")),
    };
    End { cause, detail: words(&what, message) }
}

fn lost(status: &PodStatus) -> End {
    let reason = status.reason.as_deref().unwrap_or("it ended, and its node does not say how");
    End { cause: Cause::Lost, detail: words(reason, status.message.as_deref()) }
}

/// What keeps a pod from running, if anything does.
fn waiting(status: &PodStatus) -> Option<Verdict> {
    if let Some(scheduled) = status.conditions.iter().flatten().find(|c| c.type_ == "PodScheduled")
        && scheduled.status == "False"
    {
        let reason = scheduled.reason.as_deref().unwrap_or("not scheduled");
        return Some(Verdict::Unschedulable(words(reason, scheduled.message.as_deref())));
    }
    let waiting = container(status)?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref()?;
    CANNOT_START
        .contains(&reason)
        .then(|| Verdict::CannotStart(words(reason, waiting.message.as_deref())))
}

/// The state of the pod's own container, which others may stand beside.
fn container(status: &PodStatus) -> Option<&ContainerState> {
    let mut all = status.container_statuses.iter().flatten();
    let own = all.clone().find(|c| ["master", "worker"].contains(&c.name.as_str()));
    own.or_else(|| all.next())?.state.as_ref()
}

fn has_node(pod: &Pod, status: &PodStatus) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) || container(status).is_some()
}

fn holds<'a>(status: &'a PodStatus, name: &str) -> Option<&'a PodCondition> {
    status.conditions.iter().flatten().find(|c| c.type_ == name && c.status == "True")
}

fn words(what: &str, message: Option<&str>) -> String {
    match message.map(str::trim).filter(|message| !message.is_empty()) {
        Some(message) => format!("{what}: {message}"),
        None => what.to_owned(),
    }
}

/// In the kubelet's words, that a pod has used more disk than it may itself: its volumes, its
/// containers, all together.
const OWN_LIMITS: [&str; 3] =
    ["exceeds the limit", "exceeded its local ephemeral storage limit", "exceeds the total limit"];

/// Reasons for which a container waits that waiting alone does not mend.
const CANNOT_START: [&str; 8] = [
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
];

#[cfg(test)]
mod tests;
