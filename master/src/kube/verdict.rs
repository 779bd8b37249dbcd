//! Classifies a worker by its pod's object. Pure: a pod in, a verdict out.
//!
//! A cluster reports the end of a pod in many ways, and the same exit code means different things
//! in each: a drained worker can end with code 0, an evicted one with 137. So the evidence is
//! weighed in a fixed order: first the cluster's actions, then how the container ended, then what
//! prevents it from starting. The worker's own messages (finished, leaving, failed) take precedence
//! over all of it; the job, which receives them, applies that.
//!
//! | what the pod shows | verdict | counts as the worker's failure |
//! |---|---|---|
//! | being deleted, and its container runs | terminating | |
//! | condition `DisruptionTarget`, `TerminationTarget` | preempted, drained, evicted, … | no |
//! | being deleted, and condition `Ready` false for `Evict` | preempted by Volcano | no |
//! | `status.reason` `Evicted` with the condition, or because the node is short of a resource | evicted | no |
//! | `status.reason` `Evicted` otherwise: over its own disk limit | over a limit | yes |
//! | `status.reason` `Preempting` | preempted | no |
//! | `status.reason` `Shutdown`, `NodeShutdown`, `Terminated` | drained | no |
//! | `status.reason` `NodeLost` | lost | no |
//! | `status.reason` `OutOf…`, `NodeAffinity`, … | refused by its node | no |
//! | being deleted, and its container has ended or never ran | deleted | no |
//! | container `OOMKilled` | out of memory | yes |
//! | container `StartError`, `ContainerCannotRun` | its program can't be executed | yes |
//! | container ended by signal 1, 2, 9 or 15 (exit code 128 + n) | killed | no |
//! | container ended by another signal, or with a code | failed | yes |
//! | failed without a container status | lost | no |
//! | waiting: `ErrImagePull`, … | cannot start | after a while, fatal |
//! | `PodScheduled` false because of a scheduling gate, or in a gang | queued | no |
//! | `PodScheduled` false otherwise | unschedulable | no |
//! | pending, with a node | starting | no |
//! | pending, without conditions | created | no |
//!
//! A condition alone does not end a pod: a preemption that the scheduler announced and did not
//! carry out leaves one behind.

use std::time::Duration;

use elasticdl_proto::log_line_as_text;
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateTerminated, Pod, PodCondition, PodStatus,
};

use super::gang::gang_of;
use crate::job::{Exit, ReclaimCause};
use crate::worker_output;

/// State of a pod, as its object shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The pod can't start without a change, on this node or on any. The reason, for the user.
    CannotStart(String),
    /// The object exists; the scheduler has not considered it yet.
    Created,
    /// The pod has ended, or will never run.
    Ended(End),
    /// A queue, or the scheduler of its gang, holds it back. The reason.
    Queued(String),
    /// Its program runs.
    Running,
    /// The pod has a node, which pulls its image or prepares its volumes.
    Starting,
    /// The pod is being deleted, and its program still runs.
    Terminating(Termination),
    /// No node has capacity for the pod. The reason.
    Unschedulable(String),
}

/// A pod that is being deleted while its program runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Termination {
    /// The end that the cluster announces.
    pub end: End,
    /// Time from the deletion until the program is killed.
    pub grace: Duration,
    /// Whether the pod still has the condition `Ready`: its node answers.
    pub ready: bool,
}

/// How a pod ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// Cause, for decisions.
    pub cause: Cause,
    /// Message of the cluster or of the container, for the user.
    pub detail: String,
}

/// Why a pod ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// A user or controller deleted it, or its object does not exist.
    Deleted,
    /// Its node was drained: an eviction by the API, a taint, a shutdown.
    Drained,
    /// Its node ran short of a resource.
    Evicted,
    /// Its program exited with this code.
    Exited(i32),
    /// Its node does not exist any more, or has not reported how it ended.
    Lost,
    /// Its program could not be executed, such as one that the image does not have.
    NotExecuted,
    /// It exceeded its memory limit.
    OutOfMemory,
    /// It exceeded another of its limits.
    OverLimit,
    /// A pod of higher priority needed its capacity.
    Preempted,
    /// The cluster removed it for another reason.
    Reclaimed,
    /// Its node's kubelet did not admit it.
    Refused,
    /// Its program was ended by this signal.
    Signalled(i32),
}

impl End {
    /// The end in one line: of what the program printed, the last one.
    pub(crate) fn brief(&self) -> String {
        let Some((first, rest)) = self.detail.trim_end().split_once('\n') else {
            return self.detail.clone();
        };
        let what = first.split_once(": ").map_or(first, |(what, _)| what);
        format!("{what}: {}", rest.rsplit('\n').next().unwrap_or_default().trim())
    }
}

/// Classifies a pod by its object.
pub(crate) fn classify(pod: &Pod) -> Verdict {
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
        let is_running = container.is_some_and(|state| state.running.is_some());
        // A lost pod is not terminating: no kubelet is left to stop its program.
        if !is_running || end.cause == Cause::Lost {
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
    waiting(pod, status).unwrap_or_else(|| match status.phase.as_deref() {
        Some("Running") => Verdict::Running,
        _ if has_node(pod, status) => Verdict::Starting,
        _ => Verdict::Created,
    })
}

/// The end of a worker's process by the end of its pod.
pub(super) fn exit_of(end: End) -> Exit {
    match end.cause {
        Cause::Exited(code) => Exit::Code(code),
        Cause::Signalled(signal) => Exit::Signal(signal),
        Cause::NotExecuted => Exit::NotStarted(end.detail),
        Cause::OutOfMemory | Cause::OverLimit => Exit::OverLimit(format!(
            "{}; --worker-resources sets what a worker may use",
            end.detail
        )),
        cause => Exit::reclaimed(reclaim_cause(cause), end.detail),
    }
}

/// The last lines of the log of a pod whose program ended by itself.
pub(super) fn output_tail(pod: &Pod) -> Option<String> {
    let ended = container(pod.status.as_ref()?)?.terminated.as_ref()?;
    worker_output::last_lines(ended.message.as_deref()?)
}

/// The cause of a pod's end that is not its program's, for the job.
pub(super) fn reclaim_cause(cause: Cause) -> ReclaimCause {
    match cause {
        Cause::Drained | Cause::Evicted | Cause::Reclaimed => ReclaimCause::Evicted,
        Cause::Lost => ReclaimCause::NodeLost,
        Cause::Preempted => ReclaimCause::Preempted,
        Cause::Refused => ReclaimCause::NotStarted,
        Cause::Deleted
        | Cause::Exited(_)
        | Cause::NotExecuted
        | Cause::OutOfMemory
        | Cause::OverLimit
        | Cause::Signalled(_) => ReclaimCause::Deleted,
    }
}

/// Returns whether another container of the pod runs although the worker's has ended. Such a pod
/// does not end by itself.
pub(crate) fn has_running_sidecar(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    let own_has_ended = container(status).is_some_and(|state| state.terminated.is_some());
    let mut all = status.container_statuses.iter().flatten().filter_map(|c| c.state.as_ref());
    own_has_ended && all.any(|state| state.running.is_some())
}

/// Returns whether the cluster may still report why a pod's container ended. The kubelet of newer
/// servers ends an evicted pod by SIGTERM, and may report the end of the container before the
/// eviction.
pub(crate) fn may_be_explained(pod: &Pod, end: &End) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let is_open = !matches!(phase, Some("Failed" | "Succeeded"));
    let is_by_signal =
        matches!(end.cause, Cause::Exited(0 | 143) | Cause::Signalled(SIGKILL | SIGTERM));
    let is_explained = pod.metadata.deletion_timestamp.is_some() || has_running_sidecar(pod);
    is_open && is_by_signal && !is_explained
}

/// Returns whether a pod's processes have certainly ended: the end of its container was observed. A
/// phase alone can be set by a controller for a node that is unreachable.
pub(crate) fn has_terminated(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    let ended = container(status).and_then(|state| state.terminated.as_ref());
    let is_seen = ended.is_some_and(|e| e.reason.as_deref() != Some("ContainerStatusUnknown"));
    is_seen && matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"))
}

/// The end of a pod whose object was removed without an explanation.
pub(crate) fn vanished() -> End {
    End { cause: Cause::Deleted, detail: "its pod is gone".into() }
}

/// Returns the end of a pod that the cluster reports to have removed.
fn reclaimed(status: &PodStatus) -> Option<End> {
    let condition =
        ["DisruptionTarget", "TerminationTarget"].iter().find_map(|name| holds(status, name));
    if let Some(condition) = condition {
        let reason = condition.reason.as_deref().unwrap_or("no reason given");
        let messages = [condition.message.as_deref(), status.message.as_deref()];
        let is_own =
            messages.iter().flatten().any(|m| OWN_LIMITS.iter().any(|own| m.contains(own)));
        let cause = match reason {
            // Newer servers report both that the kubelet has ended it, and the reason.
            "TerminationByKubelet" if is_own => {
                let message = messages[0].or(messages[1]);
                return Some(End {
                    cause: Cause::OverLimit,
                    detail: with_message("Evicted", message),
                });
            }
            "PreemptionByScheduler" | "PreemptionByKubeScheduler" => Cause::Preempted,
            "EvictionByEvictionAPI" | "DeletionByTaintManager" => Cause::Drained,
            "TerminationByKubelet" => Cause::Evicted,
            // The garbage collector sets this when a pod's node does not exist any more.
            "DeletionByPodGC" => Cause::Lost,
            // Kueue. Its message tells a preemption from other evictions.
            "Preempted" => Cause::Preempted,
            "WorkloadEvicted" if condition.message.as_deref().is_some_and(is_preemption) => {
                Cause::Preempted
            }
            _ => Cause::Reclaimed,
        };
        return Some(End { cause, detail: with_message(reason, condition.message.as_deref()) });
    }
    let reason = status.reason.as_deref()?;
    let message = status.message.as_deref();
    let cause = match reason {
        // Newer kubelets set the condition where the node is short of a resource, and no condition
        // where the pod exceeds its own limit. Older ones set none; their messages tell.
        "Evicted" if message.is_some_and(|m| NODE_IS_SHORT.iter().any(|of| m.contains(of))) => {
            Cause::Evicted
        }
        "Evicted" if message.is_some_and(|m| !m.trim().is_empty()) => Cause::OverLimit,
        "Evicted" => Cause::Evicted,
        "Preempting" => Cause::Preempted,
        "Shutdown" | "NodeShutdown" | "Terminated" => Cause::Drained,
        "NodeLost" => Cause::Lost,
        _ => return None,
    };
    Some(End { cause, detail: with_message(reason, message) })
}

/// Returns the end of a pod that its node's kubelet did not admit.
fn refused(status: &PodStatus) -> Option<End> {
    let reason = status.reason.as_deref()?;
    let known =
        ["NodeAffinity", "UnexpectedAdmissionError", "PodOSNotSupported", "TopologyAffinityError"];
    (reason.starts_with("OutOf") || known.contains(&reason)).then(|| End {
        cause: Cause::Refused,
        detail: with_message(reason, status.message.as_deref()),
    })
}

fn deleted(pod: &Pod) -> Option<End> {
    pod.metadata.deletion_timestamp.as_ref()?;
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    // Volcano before 1.13 says nothing else.
    let mut evictions = conditions.filter(|c| c.type_ == "Ready" && c.status == "False");
    if let Some(evicted) = evictions.find(|c| c.reason.as_deref() == Some("Evict")) {
        let detail = with_message("Evict", evicted.message.as_deref());
        return Some(End { cause: Cause::Preempted, detail });
    }
    Some(End { cause: Cause::Deleted, detail: "its pod is being deleted".into() })
}

fn how_it_ended(ended: &ContainerStateTerminated) -> End {
    let reason = ended.reason.as_deref().unwrap_or_default();
    let code = ended.exit_code;
    let signal = ended
        .signal
        .filter(|&signal| signal > 0)
        .or_else(|| Some(code - 128).filter(|n| (1..=64).contains(n)));
    let (cause, what) = match (reason, signal) {
        ("OOMKilled", _) => (Cause::OutOfMemory, "it used more memory than its limit".to_owned()),
        // Container runtimes make the exit code up.
        ("StartError" | "ContainerCannotRun", _) => {
            (Cause::NotExecuted, "its program can't be executed".to_owned())
        }
        // The kubelet has lost the container; the exit code is made up.
        ("ContainerStatusUnknown", _) => {
            (Cause::Lost, "its node does not know how it ended".to_owned())
        }
        (_, Some(signal)) => (Cause::Signalled(signal), format!("ended by signal {signal}")),
        (_, None) => (Cause::Exited(code), format!("exited with code {code}")),
    };
    // The end of its log, which says nothing of its memory.
    let as_text = |line: &str| log_line_as_text(line).unwrap_or_else(|| line.into());
    let message = ended.message.as_deref().filter(|_| cause != Cause::OutOfMemory);
    let message = message.map(|log| log.lines().map(as_text).collect::<Vec<_>>().join("\n"));
    End { cause, detail: with_message(&what, message.as_deref()) }
}

fn lost(status: &PodStatus) -> End {
    let reason = status.reason.as_deref().unwrap_or("it ended, and its node does not say how");
    End { cause: Cause::Lost, detail: with_message(reason, status.message.as_deref()) }
}

/// Returns what prevents a pod from running, if anything.
fn waiting(pod: &Pod, status: &PodStatus) -> Option<Verdict> {
    if let Some(scheduled) = status.conditions.iter().flatten().find(|c| c.type_ == "PodScheduled")
        && scheduled.status == "False"
    {
        let reason = scheduled.reason.as_deref().unwrap_or("not scheduled");
        let why = with_message(reason, scheduled.message.as_deref());
        return Some(match reason {
            "SchedulingGated" => Verdict::Queued(gated(pod).unwrap_or(why)),
            _ if gang_of(pod).is_some() => Verdict::Queued(why),
            _ => Verdict::Unschedulable(why),
        });
    }
    let waiting = container(status)?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref()?;
    CANNOT_START
        .contains(&reason)
        .then(|| Verdict::CannotStart(with_message(reason, waiting.message.as_deref())))
}

/// Names the scheduling gates of a pod.
fn gated(pod: &Pod) -> Option<String> {
    let gates = pod.spec.as_ref()?.scheduling_gates.as_ref()?;
    let names: Vec<&str> = gates.iter().map(|gate| gate.name.as_str()).collect();
    match names[..] {
        [] => None,
        ["kueue.x-k8s.io/admission"] => Some("Kueue has not admitted it yet".into()),
        _ => Some(format!("it is held by the scheduling gates {}", names.join(", "))),
    }
}

/// Whether a message of Kueue says that another workload gets the capacity.
fn is_preemption(message: &str) -> bool {
    message.starts_with("Preempted")
}

/// Returns the state of the pod's own container. There may be sidecars.
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

fn with_message(what: &str, message: Option<&str>) -> String {
    match message.map(str::trim).filter(|message| !message.is_empty()) {
        Some(message) if WRONG_ARCHITECTURE.iter().any(|of| message.contains(of)) => {
            format!("{what}: {message}; {SELECT_ARCHITECTURE}")
        }
        Some(message) => format!("{what}: {message}"),
        None => what.to_owned(),
    }
}

const SELECT_ARCHITECTURE: &str = "`nodeSelector: {kubernetes.io/arch: ARCH}` in \
                                   --worker-pod-template FILE selects the nodes that the image \
                                   was built for";
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;
/// Parts of messages about an image, or a program in it, of another processor architecture.
const WRONG_ARCHITECTURE: [&str; 3] =
    ["exec format error", "no match for platform in manifest", "no matching manifest for"];

/// Parts of the kubelet's messages for a pod that exceeds its own disk limit: of a volume, of a
/// container, or in total.
const OWN_LIMITS: [&str; 3] =
    ["exceeds the limit", "exceeded its local ephemeral storage limit", "exceeds the total limit"];

/// Parts of the kubelet's messages for a pod that is evicted because its node is short of a
/// resource.
const NODE_IS_SHORT: [&str; 2] = ["node was low on resource", "node had condition"];

/// Reasons of a waiting container that time alone does not resolve.
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
