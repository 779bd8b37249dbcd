use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::super::testing::FakeServer;
use super::tracker::{END_WAIT, STUCK_MAX};
use super::*;
use crate::job::{Exit, ReclaimCause, Wait};
use crate::kube::priority_tiers::PriorityTiers;

pub(super) const ONE: LaunchId = LaunchId(1);

/// Pods of a job `j` at a fake server.
pub(super) fn pods() -> (Arc<FakeServer>, Pods) {
    let (fake, cluster) = FakeServer::start();
    let pods = pods_of(&cluster, LeaseGuard::unlimited(), None);
    (fake, pods)
}

pub(super) fn pods_of(
    cluster: &Cluster,
    guard: LeaseGuard,
    priority_tiers: Option<PriorityTiers>,
) -> Pods {
    let anchor = json!({"name": "j", "uid": "anchor", "ownerReferences": [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "j-master", "uid": "job"}
    ]});
    let anchor: ObjectMeta = serde_json::from_value(anchor).unwrap();
    let recorder = EventRecorder::start(cluster, &anchor);
    let factory = PodFactory { priority_tiers, ..PodFactory::for_tests(anchor, 2) };
    Pods::new(cluster, factory, guard, recorder)
}

pub(super) fn container(phase: &str, state: Value) -> Value {
    let container = json!({
        "name": "worker", "image": "i", "imageID": "",
        "ready": false, "restartCount": 0, "state": state
    });
    json!({"phase": phase, "containerStatuses": [container]})
}

pub(super) fn running() -> Value {
    container("Running", json!({"running": {}}))
}

pub(super) fn exited(code: i32) -> Value {
    container("Failed", json!({"terminated": {"exitCode": code, "reason": "Error"}}))
}

pub(super) fn ended(exit: Exit) -> (LaunchId, BackendEvent) {
    (ONE, BackendEvent::Ended(exit))
}

fn pod_is_gone() -> Exit {
    Exit::reclaimed(ReclaimCause::Deleted, "its pod is gone")
}

/// Returns the next event within an hour of the paused clock; skips the creation of pods.
pub(super) async fn next(pods: &mut Pods) -> (LaunchId, BackendEvent) {
    loop {
        let happening =
            timeout(Duration::from_secs(3600), pods.next()).await.expect("something happens");
        if !matches!(happening.1, BackendEvent::Created(_)) {
            return happening;
        }
    }
}

/// Starts a launch, which waits for its pod.
pub(super) async fn start_one(pods: &mut Pods) {
    pods.start(ONE, 0);
    assert_eq!(next(pods).await, (ONE, BackendEvent::Waiting(Wait::Scheduling(None))));
}

/// Starts a pod that is not scheduled yet.
async fn created() -> (Arc<FakeServer>, Pods) {
    let (fake, mut pods) = pods();
    start_one(&mut pods).await;
    until(|| fake.state().names() == ["j-w-1"]).await;
    (fake, pods)
}

/// Starts a pod that runs.
pub(super) async fn started() -> (Arc<FakeServer>, Pods) {
    let (fake, mut pods) = created().await;
    fake.set_status("j-w-1", running());
    assert_eq!(next(&mut pods).await, (ONE, BackendEvent::Running));
    (fake, pods)
}

/// Lets the tasks run until the condition holds. The clock advances only when all tasks wait.
pub(super) async fn until(is_so: impl Fn() -> bool) {
    for _ in 0..100_000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("it never was so");
}

#[tokio::test(start_paused = true)]
async fn a_creation_whose_answer_was_lost_creates_no_second_pod() {
    let (fake, mut pods) = pods();
    fake.state().lost = 1;
    start_one(&mut pods).await;
    let (_, lost) = next(&mut pods).await;
    assert!(matches!(lost, BackendEvent::Waiting(Wait::Scheduling(Some(_)))), "{lost:?}");
    until(|| fake.state().count("GET pods") == 1).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    fake.set_status("j-w-1", running());
    let running = (ONE, BackendEvent::Running);
    assert_eq!(next(&mut pods).await, running);
    fake.set_status("j-w-1", exited(0));
    assert_eq!(next(&mut pods).await, ended(Exit::Code(0)));
    assert_eq!(fake.state().created, 1);
}

#[tokio::test(start_paused = true)]
async fn an_exceeded_quota_is_waited_out() {
    let (fake, mut pods) = pods();
    let message = "pods \"j-w-1\" is forbidden: exceeded quota: q";
    fake.state().refusals.extend([(403, message), (403, message)]);
    start_one(&mut pods).await;
    assert_eq!(next(&mut pods).await, (ONE, BackendEvent::Waiting(Wait::Capacity(message.into()))));
    until(|| fake.state().names() == ["j-w-1"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_permanent_refusal_ends_the_launch_with_the_servers_message() {
    let (fake, mut pods) = pods();
    fake.state().refusals.extend([(403, "pods is forbidden: User x cannot create resource pods")]);
    start_one(&mut pods).await;
    let why = "pods is forbidden: User x cannot create resource pods";
    assert_eq!(next(&mut pods).await, ended(Exit::NotStarted(why.into())));
    assert_eq!(fake.state().created, 0);
}

#[tokio::test(start_paused = true)]
async fn events_that_a_watch_has_missed_are_found_by_the_next_list() {
    let (fake, mut pods) = started().await;
    // The pod is removed without a watch event.
    fake.state().refuses_watches = true;
    fake.remove("j-w-1");
    fake.forget();
    fake.state().refuses_watches = false;
    assert_eq!(next(&mut pods).await, ended(pod_is_gone()));
    assert!(fake.state().count("LIST pods") >= 2);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_was_removed_between_two_lists_has_ended() {
    let (fake, mut pods) = pods();
    until(|| fake.state().count("LIST pods") == 1).await;
    fake.state().refuses_watches = true;
    fake.forget();
    start_one(&mut pods).await;
    until(|| fake.state().created == 1).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    fake.remove("j-w-1");
    fake.forget();
    fake.state().refuses_watches = false;
    assert_eq!(next(&mut pods).await, ended(pod_is_gone()));
}

#[tokio::test(start_paused = true)]
async fn a_killed_launch_that_ends_by_itself_is_reported_with_its_exit_and_its_pod_is_retained() {
    let (fake, mut pods) = started().await;
    pods.kill(ONE);
    tokio::time::sleep(END_WAIT / 2).await;
    fake.set_status("j-w-1", exited(3));
    assert_eq!(next(&mut pods).await, ended(Exit::Code(3)));
    tokio::time::sleep(END_WAIT * 2).await;
    assert_eq!(fake.state().deleted, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_killed_launch_may_have_run_before_its_node_reports_it() {
    let (fake, mut pods) = created().await;
    fake.set_status(
        "j-w-1",
        container("Pending", json!({"waiting": {"reason": "ContainerCreating"}})),
    );
    assert_eq!(next(&mut pods).await, (ONE, BackendEvent::Waiting(Wait::Start(None))));
    pods.kill(ONE);
    tokio::time::sleep(END_WAIT / 2).await;
    fake.set_status("j-w-1", exited(3));
    assert_eq!(next(&mut pods).await, ended(Exit::Code(3)));
}

#[tokio::test(start_paused = true)]
async fn a_killed_launch_without_a_node_is_deleted_at_once() {
    let (_fake, mut pods) = created().await;
    let before = Instant::now();
    pods.kill(ONE);
    assert_eq!(
        next(&mut pods).await,
        ended(Exit::reclaimed(ReclaimCause::Unwanted, "it is not wanted any more"))
    );
    assert!(before.elapsed() < END_WAIT / 2);
}

#[tokio::test(start_paused = true)]
async fn pods_of_an_earlier_master_are_adopted_in_their_present_state() {
    let (fake, before) = started().await;
    before.start(LaunchId(2), 5);
    until(|| fake.state().names().len() == 2).await;
    let cluster = fake.cluster();
    drop(before);
    let left = list(&cluster, "anchor").await.unwrap();
    let there: Vec<_> = left.iter().filter_map(objects::launch_and_slot).collect();
    assert_eq!(there, [(ONE, 0), (LaunchId(2), 5)]);
    let mut pods = pods_of(&cluster, LeaseGuard::unlimited(), None);
    for pod in left {
        pods.adopt(objects::launch_and_slot(&pod).unwrap().0, Some(pod));
    }
    pods.adopt(LaunchId(3), None);
    assert_eq!(next(&mut pods).await, (ONE, BackendEvent::Running));
    assert_eq!(next(&mut pods).await, (LaunchId(2), BackendEvent::Waiting(Wait::Scheduling(None))));
    assert_eq!(next(&mut pods).await, (LaunchId(3), BackendEvent::Ended(pod_is_gone())));
    fake.set_status("j-w-1", exited(3));
    assert_eq!(next(&mut pods).await, ended(Exit::Code(3)));
    let state = fake.state();
    assert_eq!((state.created, state.deleted.len()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_launch_that_is_killed_before_its_pod_exists_leaves_no_pod() {
    let (fake, mut pods) = pods();
    fake.state().refusals.extend([(500, "not now"), (500, "not now")]);
    start_one(&mut pods).await;
    pods.kill(ONE);
    loop {
        if let (_, BackendEvent::Ended(_)) = next(&mut pods).await {
            break;
        }
    }
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(fake.state().names(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_cannot_start_is_evicted_after_a_while() {
    let (fake, mut pods) = created().await;
    let stuck = json!({"waiting": {"reason": "ErrImagePull", "message": "no such image"}});
    fake.set_status("j-w-1", container("Pending", stuck));
    let why = "ErrImagePull: no such image";
    assert_eq!(next(&mut pods).await, (ONE, BackendEvent::Waiting(Wait::Start(Some(why.into())))));
    let before = Instant::now();
    // The kubelet's back-off says less, and is no news.
    let message = "Back-off pulling image \"x\"";
    let waits = json!({"waiting": {"reason": "ImagePullBackOff", "message": message}});
    fake.set_status("j-w-1", container("Pending", waits));
    assert_eq!(next(&mut pods).await, ended(Exit::NotStarted(why.into())));
    let waited = before.elapsed();
    assert!(waited >= STUCK_MAX - TICK && waited <= STUCK_MAX + TICK, "{waited:?}");
    until(|| fake.state().deleted == ["j-w-1"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_program_that_the_image_lacks_is_at_fault_unless_it_has_run_in_another_pod() {
    let message = "exec: \"cuonting\": executable file not found in $PATH";
    let state = json!({"exitCode": 128, "reason": "StartError", "message": message});
    let status = container("Failed", json!({"terminated": state}));
    let why = format!("its program can't be executed: {message}");
    for has_run in [false, true] {
        let (fake, mut pods) = if has_run { started().await } else { pods() };
        pods.start(LaunchId(2), 0);
        until(|| fake.state().names().contains(&"j-w-2")).await;
        fake.set_status("j-w-2", status.clone());
        let exit = match has_run {
            true => Exit::reclaimed(ReclaimCause::NotStarted, why.clone()),
            false => Exit::NotStarted(why.clone()),
        };
        let event = loop {
            if let (LaunchId(2), event @ BackendEvent::Ended(_)) = next(&mut pods).await {
                break event;
            }
        };
        assert_eq!(event, BackendEvent::Ended(exit));
    }
}

#[tokio::test(start_paused = true)]
async fn a_volume_that_cannot_be_mounted_is_what_its_pod_waits_for() {
    let (fake, mut pods) = created().await;
    let mut pod = fake.state().pod("j-w-1");
    let scheduled = json!({"type": "PodScheduled", "status": "True"});
    pod["spec"]["nodeName"] = "a".into();
    pod["status"] = json!({
        "phase": "Pending", "conditions": [scheduled], "startTime": "2024-05-01T10:00:00Z"
    });
    let uid = pod["metadata"]["uid"].clone();
    fake.put("pods", "j-w-1", pod);
    let event = json!({
        "metadata": {"name": "e"}, "involvedObject": {"uid": uid}, "type": "Warning",
        "reason": "FailedMount", "message": "no secret s",
    });
    fake.put("events", "e", event);
    let why = Some("node a: FailedMount: no secret s".into());
    while next(&mut pods).await != (ONE, BackendEvent::Waiting(Wait::Start(why.clone()))) {}
}

#[tokio::test(start_paused = true)]
async fn once_a_worker_has_run_pods_that_cannot_start_are_replaced_with_back_off_and_without_blame()
{
    // By this master, or by an earlier one.
    for by_this_master in [true, false] {
        let (fake, mut pods) = if by_this_master {
            started().await
        } else {
            let (fake, pods) = pods();
            pods.has_trained();
            (fake, pods)
        };
        let why = "ImagePullBackOff: the registry is unreachable";
        for (launch, seconds) in (2..).zip([20_u64, 40, 80, 160, 320, 320]) {
            let name = format!("j-w-{launch}");
            pods.start(LaunchId(launch), 0);
            until(|| fake.state().names().contains(&name.as_str())).await;
            let message = "the registry is unreachable";
            let stuck = json!({"waiting": {"reason": "ImagePullBackOff", "message": message}});
            fake.set_status(&name, container("Pending", stuck));
            let wait = BackendEvent::Waiting(Wait::Start(Some(why.into())));
            while next(&mut pods).await != (LaunchId(launch), wait.clone()) {}
            let before = Instant::now();
            let exit = Exit::reclaimed(
                ReclaimCause::NotStarted,
                format!("it could not start in {seconds} s: {why}"),
            );
            assert_eq!(next(&mut pods).await, (LaunchId(launch), BackendEvent::Ended(exit)));
            let waited = before.elapsed();
            let expected = Duration::from_secs(seconds);
            assert!(waited >= expected - TICK && waited <= expected + TICK, "{launch}: {waited:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn once_a_worker_has_run_a_refusal_is_retried() {
    let (fake, mut pods) = started().await;
    fake.state().refusals.extend([(403, "denied the request: not on Fridays"); 3]);
    pods.start(LaunchId(2), 0);
    let denied =
        BackendEvent::Waiting(Wait::Scheduling(Some("denied the request: not on Fridays".into())));
    while next(&mut pods).await != (LaunchId(2), denied.clone()) {}
    until(|| fake.state().names().contains(&"j-w-2")).await;
}

#[tokio::test(start_paused = true)]
async fn a_quota_that_requires_limits_is_reported_with_the_option_that_helps() {
    let (fake, mut pods) = pods();
    fake.state()
        .refusals
        .push_back((403, "pods \"j-w-1\" is forbidden: failed quota: q: must specify limits.cpu"));
    start_one(&mut pods).await;
    match next(&mut pods).await {
        (ONE, BackendEvent::Waiting(Wait::Capacity(why))) => {
            assert!(why.contains("--worker-resources"), "{why}")
        }
        other => panic!("{other:?}"),
    }
    until(|| fake.state().names() == ["j-w-1"]).await;
}

#[tokio::test(start_paused = true)]
async fn the_last_16_ended_pods_are_retained() {
    let (fake, mut pods) = pods();
    for launch in 1..=20 {
        pods.start(LaunchId(launch), 0);
        let name = format!("j-w-{launch}");
        until(|| fake.state().names().contains(&name.as_str())).await;
        fake.set_status(&name, exited(1));
        while next(&mut pods).await != (LaunchId(launch), BackendEvent::Ended(Exit::Code(1))) {}
    }
    until(|| fake.state().deleted.len() == 4).await;
    assert_eq!(fake.state().deleted, ["j-w-1", "j-w-2", "j-w-3", "j-w-4"]);
}

#[tokio::test(start_paused = true)]
async fn the_end_deletes_running_pods_and_no_others() {
    let (fake, mut pods) = started().await;
    pods.start(LaunchId(2), 0);
    until(|| fake.state().names().len() == 2).await;
    fake.set_status("j-w-2", exited(0));
    while next(&mut pods).await != (LaunchId(2), BackendEvent::Ended(Exit::Code(0))) {}
    pods.end().await;
    assert_eq!(fake.state().names(), ["j-w-2"]);
}
