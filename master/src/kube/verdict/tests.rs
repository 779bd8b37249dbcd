//! One row per way in which a cluster reports the end of a pod; the JSON is that of real servers.

use serde_json::{Value, json};

use super::*;
use crate::job::{self, Exit};

/// Whether the job counts this end as a failure of the worker.
fn is_own_fault(cause: Cause) -> bool {
    job::is_own_fault(&exit_of(End { cause, detail: String::new() }))
}

fn pod(status: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "j-w-1", "uid": "u"}, "status": status}))
        .unwrap()
}

fn deleted_pod(status: Value) -> Pod {
    let metadata = json!({
        "name": "j-w-1", "uid": "u",
        "deletionTimestamp": "2024-05-01T10:00:00Z", "deletionGracePeriodSeconds": 10
    });
    serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap()
}

fn terminated(phase: &str, terminated: Value) -> Value {
    json!({"phase": phase, "containerStatuses": [container(json!({"terminated": terminated}))]})
}

fn waiting(reason: &str, message: &str) -> Value {
    let state = json!({"waiting": {"reason": reason, "message": message}});
    let scheduled = json!({"type": "PodScheduled", "status": "True"});
    json!({"phase": "Pending", "conditions": [scheduled], "containerStatuses": [container(state)]})
}

fn container(state: Value) -> Value {
    json!({
        "name": "worker", "image": "i", "imageID": "",
        "ready": false, "restartCount": 0, "state": state
    })
}

fn unscheduled(reason: &str, message: &str) -> Value {
    let condition =
        json!({"type": "PodScheduled", "status": "False", "reason": reason, "message": message});
    json!({"phase": "Pending", "conditions": [condition]})
}

fn failed(reason: &str, message: &str) -> Value {
    json!({"phase": "Failed", "reason": reason, "message": message})
}

fn ended(cause: Cause, detail: &str) -> Verdict {
    Verdict::Ended(End { cause, detail: detail.into() })
}

fn running() -> Value {
    container(json!({"running": {"startedAt": "2024-05-01T10:00:00Z"}}))
}

/// A pod whose program runs, with a condition that the cluster has set.
fn condition(name: &str, reason: &str, message: &str) -> Value {
    json!({"phase": "Running", "containerStatuses": [running()], "conditions": [
        {"type": "Ready", "status": "True"},
        {"type": name, "status": "True", "reason": reason, "message": message}
    ]})
}

fn terminating(cause: Cause, detail: &str) -> Verdict {
    let end = End { cause, detail: detail.into() };
    Verdict::Terminating(Termination { end, grace: Duration::from_secs(10), ready: true })
}

#[test]
fn a_pod_that_the_cluster_removes_terminates_and_ends_with_the_clusters_message() {
    let preempting = "preempting to accommodate a higher priority pod";
    let table = [
        ("DisruptionTarget", "PreemptionByScheduler", preempting, Cause::Preempted),
        ("DisruptionTarget", "PreemptionByKubeScheduler", preempting, Cause::Preempted),
        ("DisruptionTarget", "EvictionByEvictionAPI", "Eviction API: evicting", Cause::Drained),
        (
            "DisruptionTarget",
            "DeletionByTaintManager",
            "Taint manager: deleting due to NoExecute taint",
            Cause::Drained,
        ),
        (
            "DisruptionTarget",
            "TerminationByKubelet",
            "The node was low on resource: memory",
            Cause::Evicted,
        ),
        ("TerminationTarget", "WorkloadEvictedDueToPreempted", "queue", Cause::Reclaimed),
    ];
    for (name, reason, message, cause) in table {
        let mut status = condition(name, reason, message);
        // Announced, and perhaps never carried out.
        assert_eq!(classify(&pod(status.clone())), Verdict::Running, "{status}");
        let detail = format!("{reason}: {message}");
        assert_eq!(classify(&deleted_pod(status.clone())), terminating(cause, &detail), "{status}");
        // A drained worker exits with 0, or by the kubelet's signal.
        for code in [0, 137, 143] {
            let state = json!({"terminated": {"exitCode": code, "reason": "Error"}});
            status["containerStatuses"] = json!([container(state)]);
            assert_eq!(
                classify(&deleted_pod(status.clone())),
                ended(cause, &detail),
                "{code}: {status}"
            );
        }
        assert!(!is_own_fault(cause));
    }
    // The node of this pod does not exist any more, so no kubelet stops its program.
    let deleted = condition("DisruptionTarget", "DeletionByPodGC", "PodGC: node no longer exists");
    let lost = ended(Cause::Lost, "DeletionByPodGC: PodGC: node no longer exists");
    assert_eq!(classify(&deleted_pod(deleted)), lost);
}

#[test]
fn a_pod_that_its_node_removes_has_ended_by_its_phase() {
    let table = [
        ("Evicted", "The node was low on resource: memory. ", Cause::Evicted),
        ("Preempting", "Preempted in order to admit critical pod", Cause::Preempted),
        ("Shutdown", "Node is shutting, evicting pods", Cause::Drained),
        ("NodeShutdown", "Pod was rejected as the node is shutting down.", Cause::Drained),
        ("Terminated", "Pod was terminated in response to imminent node shutdown.", Cause::Drained),
    ];
    for (reason, message, cause) in table {
        let expected = ended(cause, &format!("{reason}: {}", message.trim()));
        assert_eq!(classify(&pod(failed(reason, message))), expected, "{reason}");
    }
}

#[test]
fn a_deletion_takes_precedence_over_the_containers_exit() {
    for code in [0, 1, 137, 143] {
        let status = terminated("Failed", json!({"exitCode": code, "reason": "Error"}));
        assert_eq!(
            classify(&deleted_pod(status)),
            ended(Cause::Deleted, "its pod is being deleted"),
            "{code}"
        );
    }
    // A condition with status False is ignored.
    let mut status = terminated("Succeeded", json!({"exitCode": 0, "reason": "Completed"}));
    status["conditions"] = json!([{"type": "DisruptionTarget", "status": "False", "reason": "X"}]);
    assert_eq!(classify(&pod(status)), ended(Cause::Exited(0), "exited with code 0"));
}

#[test]
fn a_deleted_pod_terminates_if_its_program_runs_and_has_ended_otherwise() {
    let runs = condition("ContainersReady", "", "");
    assert_eq!(
        classify(&deleted_pod(runs)),
        terminating(Cause::Deleted, "its pod is being deleted")
    );
    let deleted = ended(Cause::Deleted, "its pod is being deleted");
    assert_eq!(classify(&deleted_pod(unscheduled("Unschedulable", "0/1 nodes"))), deleted);
    assert_eq!(classify(&deleted_pod(waiting("ImagePullBackOff", "Back-off"))), deleted);
    assert_eq!(classify(&deleted_pod(waiting("ContainerCreating", ""))), deleted);
    assert_eq!(vanished().cause, Cause::Deleted);
}

#[test]
fn pods_of_an_unresponsive_node_terminate_unready_or_are_lost() {
    // The taint manager deletes these pods; without a kubelet they terminate forever.
    let status = json!({"phase": "Running", "containerStatuses": [running()], "conditions": [
        {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
    ]});
    let Verdict::Terminating(leave) = classify(&deleted_pod(status.clone())) else {
        panic!("{status}")
    };
    assert!(!leave.ready && leave.grace == Duration::from_secs(10), "{leave:?}");
    // Some servers also set the reason.
    let mut status = status;
    status["reason"] = "NodeLost".into();
    status["message"] = "Node n which was running pod p is unresponsive".into();
    let detail = "NodeLost: Node n which was running pod p is unresponsive";
    assert_eq!(classify(&deleted_pod(status)), ended(Cause::Lost, detail));
}

#[test]
fn a_running_sidecar_is_detected_once_the_worker_has_ended() {
    let with_sidecar = |own: Value| {
        let mut sidecar = running();
        sidecar["name"] = "proxy".into();
        pod(json!({"phase": "Running", "containerStatuses": [sidecar, own]}))
    };
    let over =
        with_sidecar(container(json!({"terminated": {"exitCode": 0, "reason": "Completed"}})));
    assert_eq!(classify(&over), ended(Cause::Exited(0), "exited with code 0"));
    assert!(has_running_sidecar(&over));
    let alive = with_sidecar(running());
    assert_eq!((classify(&alive), has_running_sidecar(&alive)), (Verdict::Running, false));
    assert!(!has_running_sidecar(&pod(terminated("Failed", json!({"exitCode": 1})))));
    assert!(!has_running_sidecar(&Pod::default()));
}

#[test]
fn processes_have_terminated_only_if_their_end_was_observed() {
    let exited = json!({"exitCode": 1, "reason": "Error"});
    assert!(has_terminated(&pod(terminated("Failed", exited.clone()))));
    assert!(has_terminated(&pod(terminated("Succeeded", json!({"exitCode": 0})))));
    // Other containers may still run, or restart.
    assert!(!has_terminated(&pod(terminated("Running", exited))));
    let unknown =
        terminated("Failed", json!({"exitCode": 137, "reason": "ContainerStatusUnknown"}));
    let by_collector = json!({"phase": "Failed", "containerStatuses": [running()]});
    for status in [unknown, by_collector, failed("Evicted", ""), json!({"phase": "Unknown"})] {
        assert!(!has_terminated(&pod(status.clone())), "{status}");
    }
}

#[test]
fn a_pod_that_its_node_does_not_admit_is_not_at_fault() {
    let table = [
        (
            "OutOfcpu",
            "Node didn't have enough resource: cpu, requested: 1000, used: 1900, capacity: 2000",
        ),
        ("OutOfmemory", "Node didn't have enough resource: memory"),
        (
            "OutOfpods",
            "Node didn't have enough capacity: pods, requested: 1, used: 110, capacity: 110",
        ),
        ("NodeAffinity", "Predicate NodeAffinity failed"),
        (
            "UnexpectedAdmissionError",
            "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu",
        ),
    ];
    for (reason, message) in table {
        let verdict = classify(&pod(failed(reason, message)));
        assert_eq!(verdict, ended(Cause::Refused, &format!("{reason}: {message}")));
    }
    assert!(!is_own_fault(Cause::Refused) && !is_own_fault(Cause::Lost));
}

#[test]
fn a_program_that_the_image_does_not_have_is_named() {
    let message = "exec: \"cuonting\": executable file not found in $PATH";
    for reason in ["StartError", "ContainerCannotRun"] {
        let state = json!({"exitCode": 128, "reason": reason, "message": message});
        let detail = format!("its program can't be executed: {message}");
        let verdict = classify(&pod(terminated("Failed", state)));
        assert_eq!(verdict, ended(Cause::NotExecuted, &detail));
        let end = End { cause: Cause::NotExecuted, detail: detail.clone() };
        assert_eq!(exit_of(end), Exit::NotStarted(detail));
    }
    assert!(is_own_fault(Cause::NotExecuted));
}

#[test]
fn a_pod_that_exceeds_its_own_limits_is_at_fault() {
    let oom = terminated("Failed", json!({"exitCode": 137, "reason": "OOMKilled"}));
    assert_eq!(
        classify(&pod(oom)),
        ended(Cause::OutOfMemory, "it used more memory than its limit")
    );
    let messages = [
        "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. ",
        "Usage of EmptyDir volume \"tmp\" exceeds the limit \"1Mi\". ",
        "Container worker exceeded its local ephemeral storage limit \"1Mi\". ",
    ];
    for message in messages {
        let detail = format!("Evicted: {}", message.trim());
        assert_eq!(classify(&pod(failed("Evicted", message))), ended(Cause::OverLimit, &detail));
    }
    // Newer servers add what has ended it, and may omit the reason.
    let own = "Usage of EmptyDir volume \"tmp\" exceeds the limit \"1Mi\". ";
    let condition = json!([{
        "type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet",
        "message": own
    }]);
    let detail = format!("Evicted: {}", own.trim());
    let pod = pod(json!({"phase": "Failed", "conditions": condition}));
    assert_eq!(classify(&pod), ended(Cause::OverLimit, &detail));
    assert!(is_own_fault(Cause::OverLimit) && is_own_fault(Cause::OutOfMemory));
}

/// The objects as the kubelet of Kubernetes 1.36 writes them.
#[test]
fn newer_kubelets_tell_by_the_condition_whether_an_evicted_pod_is_at_fault() {
    let evicted = |message: &str, condition: bool, code: i32| {
        let state = json!({"terminated": {"exitCode": code, "reason": "Error"}});
        let mut status = failed("Evicted", message);
        status["containerStatuses"] = json!([container(state)]);
        if condition {
            status["conditions"] = json!([{
                "type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet",
                "message": message
            }]);
        }
        match classify(&pod(status)) {
            Verdict::Ended(end) => end.cause,
            other => panic!("{other:?}"),
        }
    };
    let own = "Usage of EmptyDir volume \"tmp\" exceeds the limit \"1Mi\". ";
    let node = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 9Mi. ";
    // A worker that leaves on SIGTERM exits with 0 or 143; one that does not is killed.
    for code in [0, 137, 143] {
        assert_eq!(evicted(own, false, code), Cause::OverLimit, "{code}");
        assert_eq!(evicted("Disk use is beyond what is granted", false, code), Cause::OverLimit);
        assert_eq!(evicted(node, true, code), Cause::Evicted, "{code}");
        assert_eq!(evicted("Short of inodes", true, code), Cause::Evicted, "{code}");
        // Older servers have no such condition.
        assert_eq!(evicted(node, false, code), Cause::Evicted, "{code}");
        assert_eq!(evicted("The node had condition: [DiskPressure]. ", false, 0), Cause::Evicted);
    }
}

#[test]
fn the_end_of_a_container_by_sigterm_may_be_explained_while_the_pod_has_not_ended() {
    let may = |pod: &Pod| match classify(pod) {
        Verdict::Ended(end) => may_be_explained(pod, &end),
        other => panic!("{other:?}"),
    };
    let exited = |phase: &str, code: i32| terminated(phase, json!({"exitCode": code}));
    for code in [0, 137, 143] {
        assert!(may(&pod(exited("Running", code))), "{code}");
        assert!(!may(&pod(exited("Failed", code))), "{code}");
        assert!(!may(&deleted_pod(exited("Running", code))), "{code}");
    }
    assert!(!may(&pod(exited("Running", 1))) && !may(&pod(exited("Running", 139))));
}

#[test]
fn images_of_another_architecture_are_reported_with_the_option_that_selects_nodes() {
    let messages = [
        ("ErrImagePull", "no match for platform in manifest: not found"),
        ("ImagePullBackOff", "no matching manifest for linux/arm64/v8 in the manifest list"),
        ("RunContainerError", "exec /usr/bin/train: exec format error"),
    ];
    for (reason, message) in messages {
        match classify(&pod(waiting(reason, message))) {
            Verdict::CannotStart(why) => {
                assert!(
                    why.contains(message) && why.contains("nodeSelector: {kubernetes.io/arch"),
                    "{why}"
                );
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn exit_codes_distinguish_crashes_from_kills() {
    let table = [
        (0, Cause::Exited(0), true),
        (1, Cause::Exited(1), true),
        (42, Cause::Exited(42), true),
        (127, Cause::Exited(127), true),
        (128, Cause::Exited(128), true),
        (134, Cause::Signalled(6), true),
        (136, Cause::Signalled(8), true),
        (137, Cause::Signalled(9), false),
        (139, Cause::Signalled(11), true),
        (143, Cause::Signalled(15), false),
        (255, Cause::Exited(255), true),
    ];
    for (code, cause, own) in table {
        let status = terminated("Failed", json!({"exitCode": code, "reason": "Error"}));
        let Verdict::Ended(end) = classify(&pod(status)) else { panic!("{code}") };
        assert_eq!((end.cause, is_own_fault(end.cause)), (cause, own), "{code}");
    }
    let log = " 1.4 s  a\n 2.1 s  b\n";
    let how = json!({"exitCode": 137, "signal": 9, "reason": "Error", "message": log});
    let named = terminated("Failed", how);
    let Verdict::Ended(end) = classify(&pod(named.clone())) else { panic!("{named}") };
    assert_eq!(
        (end.cause, end.brief()),
        (Cause::Signalled(9), "ended by signal 9: 2.1 s  b".into())
    );
    assert_eq!(output_tail(&pod(named)).as_deref(), Some(" 1.4 s  a\n 2.1 s  b"));
    let killed =
        terminated("Failed", json!({"exitCode": 137, "reason": "OOMKilled", "message": "a"}));
    let what = "it used more memory than its limit";
    assert_eq!(
        classify(&pod(killed)),
        ended(Cause::OutOfMemory, what),
        "its log says nothing of it"
    );
}

#[test]
fn a_pod_has_ended_with_its_container_before_its_phase_changes() {
    let status = terminated("Running", json!({"exitCode": 1, "reason": "Error"}));
    assert_eq!(classify(&pod(status)), ended(Cause::Exited(1), "exited with code 1"));
}

#[test]
fn an_end_without_a_status_is_a_loss() {
    let message = "The container could not be located when the pod was terminated";
    let unknown = terminated(
        "Failed",
        json!({"exitCode": 137, "reason": "ContainerStatusUnknown", "message": message}),
    );
    let detail = format!("its node does not know how it ended: {message}");
    assert_eq!(classify(&pod(unknown)), ended(Cause::Lost, &detail));
    let silent = ended(Cause::Lost, "it ended, and its node does not say how");
    assert_eq!(classify(&pod(json!({"phase": "Failed"}))), silent);
    assert_eq!(
        classify(&pod(failed(
            "DeadlineExceeded",
            "Pod was active on the node longer than the specified deadline"
        ))),
        ended(
            Cause::Lost,
            "DeadlineExceeded: Pod was active on the node longer than the specified deadline"
        )
    );
}

#[test]
fn permanent_start_failures_are_distinguished_from_temporary_ones() {
    for reason in [
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
    ] {
        let expected = Verdict::CannotStart(format!("{reason}: Back-off pulling image \"x\""));
        assert_eq!(classify(&pod(waiting(reason, "Back-off pulling image \"x\""))), expected);
    }
    for reason in ["ContainerCreating", "PodInitializing"] {
        assert_eq!(classify(&pod(waiting(reason, ""))), Verdict::Starting, "{reason}");
    }
    assert_eq!(classify(&pod(json!({"phase": "Pending"}))), Verdict::Created);
    let bound =
        json!({"spec": {"nodeName": "n", "containers": []}, "status": {"phase": "Pending"}});
    assert_eq!(classify(&serde_json::from_value(bound).unwrap()), Verdict::Starting);
    assert_eq!(classify(&Pod::default()), Verdict::Created);
    let state = container(json!({"running": {"startedAt": "2024-05-01T10:00:00Z"}}));
    let running = json!({"phase": "Running", "containerStatuses": [state]});
    assert_eq!(classify(&pod(running)), Verdict::Running);
}

#[test]
fn an_unschedulable_pod_has_not_ended() {
    let (reason, message) = ("Unschedulable", "0/1 nodes are available: 1 Insufficient cpu.");
    let expected = Verdict::Unschedulable(format!("{reason}: {message}"));
    assert_eq!(classify(&pod(unscheduled(reason, message))), expected);
}

#[test]
fn a_pod_that_waits_for_a_queue_or_for_its_gang_is_queued() {
    let message = "Scheduling is blocked due to non-empty scheduling gates";
    let gated = |gates: &[&str]| {
        let mut pod = pod(unscheduled("SchedulingGated", message));
        let gates: Vec<Value> = gates.iter().map(|name| json!({"name": name})).collect();
        let spec = json!({"containers": [], "schedulingGates": gates});
        pod.spec = Some(serde_json::from_value(spec).unwrap());
        classify(&pod)
    };
    let queued = |why: &str| Verdict::Queued(why.into());
    assert_eq!(gated(&["kueue.x-k8s.io/admission"]), queued("Kueue has not admitted it yet"));
    let both = "it is held by the scheduling gates kueue.x-k8s.io/admission, a.b/c";
    assert_eq!(gated(&["kueue.x-k8s.io/admission", "a.b/c"]), queued(both));
    assert_eq!(gated(&[]), queued(&format!("SchedulingGated: {message}")));
    let message = "pod group is not ready, 2 Pending, 2 minAvailable";
    let mut member = pod(unscheduled("Unschedulable", message));
    member.metadata.labels = Some([("elasticdl/gang".into(), "j-g1".into())].into());
    assert_eq!(classify(&member), queued(&format!("Unschedulable: {message}")));
}

#[test]
fn preemptions_by_queues_and_gang_schedulers_are_no_failures() {
    let condition = |kind: &str, reason: &str, message: &str| {
        let c = json!({"type": kind, "status": "True", "reason": reason, "message": message});
        json!({"phase": "Running", "conditions": [c], "containerStatuses": [running()]})
    };
    let preempted = "Preempted to accommodate a workload (UID: 7) due to prioritization";
    let table = [
        ("TerminationTarget", "WorkloadEvicted", preempted, Cause::Preempted),
        ("TerminationTarget", "Preempted", "by a workload", Cause::Preempted),
        ("TerminationTarget", "WorkloadEvicted", "The ClusterQueue is stopped", Cause::Reclaimed),
        ("TerminationTarget", "NotAdmitted", "No quota", Cause::Reclaimed),
        (
            "DisruptionTarget",
            "PreemptionByScheduler",
            "volcano: preempting to accommodate a higher priority pod",
            Cause::Preempted,
        ),
    ];
    for (kind, reason, message, cause) in table {
        let Verdict::Terminating(termination) =
            classify(&deleted_pod(condition(kind, reason, message)))
        else {
            panic!("{reason}")
        };
        let detail = format!("{reason}: {message}");
        assert_eq!(termination.end, End { cause, detail }, "{kind}");
    }
    // Older versions of Volcano set the condition Ready alone.
    let c = json!({
        "type": "Ready", "status": "False", "reason": "Evict",
        "message": "Pod is evicted, because of preempt"
    });
    let status = json!({"phase": "Running", "conditions": [c], "containerStatuses": [running()]});
    let Verdict::Terminating(termination) = classify(&deleted_pod(status.clone())) else {
        panic!()
    };
    assert_eq!(termination.end.cause, Cause::Preempted);
    assert_eq!(classify(&pod(status)), Verdict::Running, "it is not deleted");
}
