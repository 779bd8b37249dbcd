//! Failures of servers, nodes and networks, one per test.

use std::collections::BTreeSet;

use serde_json::json;

use super::tests::{
    ONE, container, ended, exited, next, pods, pods_of, running, start_one, started, until,
};
use super::*;
use crate::job::testing::spec;
use crate::job::{Action, Event as JobEvent, Exit, Job, JobSpec, ReclaimCause, Time};
use crate::kube::leader_lease::{Holder, LeaderLease};
use crate::kube::priority_tiers::PriorityTiers;
use crate::kube::testing::FakeServer;

const DELETED: &str = "its pod is being deleted";

fn terminating() -> (LaunchId, BackendEvent) {
    (ONE, BackendEvent::Terminating(ReclaimCause::Deleted, DELETED.into()))
}

fn reclaimed(cause: ReclaimCause, message: &str) -> (LaunchId, BackendEvent) {
    ended(Exit::reclaimed(cause, message))
}

async fn is_quiet(pods: &mut Pods, time: Duration) -> bool {
    timeout(time, pods.next()).await.is_err()
}

/// Waits until each of these launches has a class, and returns the classes by launch.
async fn classes(pods: &mut Pods, count: usize) -> BTreeMap<u64, Option<String>> {
    let mut classes = BTreeMap::new();
    while classes.len() < count {
        if let (launch, BackendEvent::Created(class)) = pods.next().await {
            classes.insert(launch.0, class);
        }
    }
    classes
}

#[tokio::test(start_paused = true)]
async fn a_running_pod_that_is_deleted_terminates_and_ends_with_its_object() {
    let (fake, mut pods) = started().await;
    fake.terminate("j-w-1");
    assert_eq!(next(&mut pods).await, terminating());
    assert!(is_quiet(&mut pods, Duration::from_secs(9)).await);
    fake.remove("j-w-1");
    assert_eq!(next(&mut pods).await, reclaimed(ReclaimCause::Deleted, DELETED));
    assert!(is_quiet(&mut pods, Duration::from_secs(60)).await);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_deleted_has_ended_when_its_container_has() {
    let (fake, mut pods) = started().await;
    fake.terminate("j-w-1");
    assert_eq!(next(&mut pods).await, terminating());
    // With another client's finalizer the object may stay for long.
    fake.set_status("j-w-1", exited(0));
    assert_eq!(next(&mut pods).await, reclaimed(ReclaimCause::Deleted, DELETED));
}

/// The kubelet of newer servers sends SIGTERM before it reports an eviction.
#[tokio::test(start_paused = true)]
async fn an_eviction_that_is_reported_after_the_containers_end_decides() {
    for code in [0, 143] {
        let (fake, mut pods) = started().await;
        fake.set_status("j-w-1", container("Running", json!({"terminated": {"exitCode": code}})));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut evicted = exited(code);
        evicted["reason"] = "Evicted".into();
        evicted["message"] = "Usage of EmptyDir volume \"tmp\" exceeds the limit \"1Mi\". ".into();
        fake.set_status("j-w-1", evicted);
        match next(&mut pods).await {
            (ONE, BackendEvent::Ended(Exit::OverLimit(why))) => {
                assert!(why.contains("Evicted"), "{why}")
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_end_by_sigterm_that_is_not_explained_is_reported_in_time_and_once() {
    let (fake, mut pods) = started().await;
    let before = Instant::now();
    fake.set_status("j-w-1", container("Running", json!({"terminated": {"exitCode": 143}})));
    assert_eq!(next(&mut pods).await, ended(Exit::Signal(15)));
    assert!(before.elapsed() <= Duration::from_secs(4), "{:?}", before.elapsed());
    fake.set_status("j-w-1", exited(143));
    assert!(is_quiet(&mut pods, Duration::from_secs(60)).await);
    // The end of a program that fails by itself is not delayed.
    let (fake, mut pods) = started().await;
    let before = Instant::now();
    fake.set_status("j-w-1", container("Running", json!({"terminated": {"exitCode": 3}})));
    assert_eq!(next(&mut pods).await, ended(Exit::Code(3)));
    assert!(before.elapsed() < Duration::from_millis(100), "{:?}", before.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_events_of_an_older_scheduler_are_read_once_per_deletion() {
    let (fake, mut pods) = started().await;
    let message = "Preempted by ns/high on node n";
    let event =
        json!({"metadata": {"name": "e"}, "involvedObject": {"uid": "uid-1"}, "message": message});
    fake.terminate("j-w-1");
    // The reason is not waited for.
    assert_eq!(next(&mut pods).await, terminating());
    fake.put("events", "e", event);
    let explained = BackendEvent::Explained("preempted by ns/high on node n".into());
    assert_eq!(next(&mut pods).await, (ONE, explained));
    fake.remove("j-w-1");
    let preempted = reclaimed(ReclaimCause::Preempted, "preempted by ns/high on node n");
    assert_eq!(next(&mut pods).await, preempted);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(fake.state().count("LIST events"), 1);
    let recorded = fake.state().all("events");
    let recorded: Vec<_> = recorded.iter().filter(|e| e["reason"] == "WorkerPreempted").collect();
    assert_eq!(recorded.len(), 1, "{recorded:?}");
    assert_eq!(recorded[0]["message"], "worker pod j-w-1: preempted by ns/high on node n");
}

#[tokio::test(start_paused = true)]
async fn only_unrequested_ends_are_recorded_as_events() {
    let (fake, mut pods) = started().await;
    for launch in 2..=4 {
        pods.start(LaunchId(launch), 0);
    }
    until(|| fake.state().names().len() == 4).await;
    fake.set_status("j-w-1", exited(3));
    fake.set_status("j-w-2", exited(0));
    fake.set_status(
        "j-w-3",
        container("Failed", json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}})),
    );
    pods.kill(LaunchId(4));
    while next(&mut pods).await.0 != LaunchId(4) {}
    tokio::time::sleep(Duration::from_secs(10)).await;
    let events = fake.state().all("events");
    let reasons: BTreeSet<_> = events.iter().filter_map(|event| event["reason"].as_str()).collect();
    assert_eq!(reasons, BTreeSet::from(["WorkerFailed", "WorkerOOMKilled"]));
}

#[tokio::test(start_paused = true)]
async fn sidecars_are_deleted_when_their_worker_has_ended() {
    let (fake, mut pods) = started().await;
    let mut status = container("Running", json!({"terminated": {"exitCode": 0}}));
    let mut sidecar = running()["containerStatuses"][0].clone();
    sidecar["name"] = "proxy".into();
    status["containerStatuses"].as_array_mut().unwrap().push(sidecar);
    fake.set_status("j-w-1", status);
    assert_eq!(next(&mut pods).await, ended(Exit::Code(0)));
    until(|| fake.state().deleted == ["j-w-1"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_expires_midway_misses_nothing() {
    let (fake, mut pods) = started().await;
    fake.set_status("j-w-1", exited(3));
    fake.forget();
    let before = Instant::now();
    assert_eq!(next(&mut pods).await, ended(Exit::Code(3)));
    assert!(before.elapsed() < Duration::from_secs(2), "{:?}", before.elapsed());
    assert_eq!(fake.state().count("LIST pods"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_throttling_server_is_not_called_before_its_retry_after() {
    let (fake, mut pods) = pods();
    fake.state().throttles.extend([("POST pods", 429, 7), ("POST pods", 429, 8)]);
    start_one(&mut pods).await;
    let before = Instant::now();
    until(|| fake.state().names() == ["j-w-1"]).await;
    assert_eq!((before.elapsed().as_secs(), fake.state().count("POST pods")), (15, 3));
}

#[tokio::test(start_paused = true)]
async fn a_watch_on_a_dead_connection_is_restarted() {
    let (fake, mut pods) = started().await;
    fake.state().black_hole = true;
    let before = Instant::now();
    fake.set_status("j-w-1", exited(3));
    assert_eq!(next(&mut pods).await, ended(Exit::Code(3)));
    assert!(before.elapsed() <= Duration::from_secs(301), "{:?}", before.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_watch_from_an_expired_version_is_restarted() {
    let (fake, mut pods) = started().await;
    for _ in 0..10 {
        fake.put("pods", "another", json!({"metadata": {"name": "another", "uid": "x"}}));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    // A backup was restored: versions restart from there, and the watch waits for one in the far
    // future.
    fake.state().travel_back(10);
    let before = Instant::now();
    fake.set_status("j-w-1", exited(3));
    assert_eq!(next(&mut pods).await, ended(Exit::Code(3)));
    assert!(before.elapsed() <= Duration::from_secs(241), "{:?}", before.elapsed());
}

#[tokio::test(start_paused = true)]
async fn repeated_and_reordered_events_change_nothing() {
    let (fake, mut pods) = started().await;
    fake.repeat(2);
    assert!(timeout(Duration::from_secs(60), next(&mut pods)).await.is_err());
    fake.set_status("j-w-1", exited(3));
    assert_eq!(next(&mut pods).await, ended(Exit::Code(3)));
    fake.repeat(3);
    assert!(is_quiet(&mut pods, Duration::from_secs(60)).await);
}

#[tokio::test(start_paused = true)]
async fn thirty_pods_that_are_lost_at_once_are_replaced_at_once() {
    let (fake, mut pods) = pods();
    for launch in 1..=30 {
        pods.start(LaunchId(launch), launch as u32 - 1);
    }
    classes(&mut pods, 30).await;
    fake.state().slow.insert("POST pods", Duration::from_secs(2));
    let lost: Vec<String> = fake.state().names().into_iter().map(Into::into).collect();
    for name in lost {
        fake.remove(&name);
    }
    let before = Instant::now();
    let mut ends = 0;
    while ends < 30 {
        if let (launch, BackendEvent::Ended(_)) = next(&mut pods).await {
            ends += 1;
            pods.start(LaunchId(launch.0 + 30), launch.0 as u32 - 1);
        }
    }
    classes(&mut pods, 30).await;
    assert_eq!((fake.state().in_flight_max["POST pods"], before.elapsed().as_secs()), (30, 2));
}

#[tokio::test(start_paused = true)]
async fn at_a_slow_server_deletions_precede_creations() {
    let (fake, pods) = started().await;
    fake.state().slow.insert("POST pods", Duration::from_secs(10));
    fake.state().calls.clear();
    for launch in 2..=101 {
        pods.start(LaunchId(launch), launch as u32);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    pods.kill(ONE);
    until(|| fake.state().deleted == ["j-w-1"]).await;
    let state = fake.state();
    let before = state.calls.iter().take_while(|(_, kind)| kind != "DELETE pods");
    assert_eq!(before.filter(|(_, kind)| kind == "POST pods").count(), 32);
}

#[tokio::test(start_paused = true)]
async fn a_call_without_an_answer_is_retried() {
    let (fake, mut pods) = pods();
    until(|| fake.state().count("LIST pods") == 1).await;
    fake.state().unreachable = true;
    start_one(&mut pods).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    fake.state().unreachable = false;
    until(|| fake.state().names() == ["j-w-1"]).await;
    assert_eq!(fake.state().count("POST pods"), 2);
}

#[tokio::test(start_paused = true)]
async fn a_master_without_its_lease_neither_creates_nor_deletes_pods() {
    let (fake, cluster) = FakeServer::start();
    let anchor =
        serde_json::from_value(json!({"name": "j", "namespace": "ns", "uid": "anchor"})).unwrap();
    let identity = Holder { pod: "one".into(), uid: "u".into() };
    let mut lease = LeaderLease::acquire(&cluster, &anchor, &identity).await.unwrap();
    let mut pods = pods_of(&cluster, lease.guard(), None);
    pods.start(ONE, 0);
    until(|| fake.state().names() == ["j-w-1"]).await;
    let mut object = fake.state().object("leases", "j").unwrap();
    object["spec"]["holderIdentity"] = "two/x".into();
    object["spec"]["leaseTransitions"] = 1.into();
    fake.put("leases", "j", object);
    lease.lost().await;
    pods.start(LaunchId(2), 1);
    pods.kill(ONE);
    while next(&mut pods).await.0 != LaunchId(2) {}
    pods.end().await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(fake.state().names(), ["j-w-1"]);
    assert_eq!(fake.state().deleted, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_missing_class_reduces_the_tiers_for_all_launches_and_is_reported_once() {
    let (fake, cluster) = FakeServer::start();
    let mut pods = pods_of(&cluster, LeaseGuard::unlimited(), Some(PriorityTiers::shipped()));
    let no_tier =
        "pods \"j-w-1\" is forbidden: no PriorityClass with name elasticdl-tier-1 was found";
    fake.state().refusals.extend([(403, no_tier), (403, no_tier)]);
    pods.start(LaunchId(1), 2);
    pods.start(LaunchId(2), 3);
    let (mut classes, mut messages) = (Vec::new(), Vec::new());
    while classes.len() < 2 {
        match pods.next().await.1 {
            BackendEvent::Created(class) => classes.push(class.unwrap()),
            BackendEvent::Noted(message) => messages.push(message),
            _ => {}
        }
    }
    assert_eq!(classes, ["elasticdl-tier-10", "elasticdl-tier-10"]);
    let told = "not accepted, and is created again: there is no PriorityClass \
                elasticdl-tier-1, so workers have elasticdl-core or elasticdl-tier-10; ";
    assert!(messages.len() == 1 && messages[0].starts_with(told), "{messages:?}");
    // The core's class is missing, too: no worker has a class.
    let no_core =
        "pods \"j-w-3\" is forbidden: no PriorityClass with name elasticdl-core was found";
    fake.state().refusals.push_back((403, no_core));
    pods.start(LaunchId(3), 0);
    assert_eq!(self::classes(&mut pods, 1).await, BTreeMap::from([(3, None)]));
    pods.start(LaunchId(4), 2);
    assert_eq!(self::classes(&mut pods, 1).await, BTreeMap::from([(4, None)]));
}

#[tokio::test(start_paused = true)]
async fn a_missing_class_of_the_users_choice_ends_the_launch() {
    let (fake, mut pods) = pods();
    let message = "pods \"j-w-1\" is forbidden: no PriorityClass with name mine was found";
    fake.state().refusals.push_back((403, message));
    start_one(&mut pods).await;
    let why = "there is no PriorityClass mine: create it, or name another";
    assert_eq!(next(&mut pods).await, ended(Exit::NotStarted(why.into())));
    assert_eq!(fake.state().count("POST pods"), 1);
}

/// The minimum counts workers, whereas the cluster counts pods: a pod has the class of its first
/// worker's slot.
#[tokio::test(start_paused = true)]
async fn pods_of_several_workers_are_created_and_replaced_as_one() {
    let (fake, mut pods) = pods();
    let spec =
        JobSpec { num_workers: 4, max_workers: 4, workers_per_pod: 2, min_workers: 2, ..spec() };
    let mut job = Job::new(spec);
    let act = |job: &mut Job, pods: &Pods| {
        while let Some(action) = job.poll_action() {
            match action {
                Action::Launch { launch, slot, .. } => pods.start(launch, slot),
                Action::Kill { launch } => pods.kill(launch),
                _ => {}
            }
        }
    };
    act(&mut job, &pods);
    until(|| fake.state().names() == ["j-w-1"]).await;
    fake.set_status("j-w-1", exited(139));
    loop {
        let (launch, happening) = next(&mut pods).await;
        if let BackendEvent::Ended(exit) = happening {
            assert_eq!((launch, &exit), (ONE, &Exit::Signal(11)));
            job.handle(Time::default(), JobEvent::ProcessEnded { launch, exit });
            break;
        }
    }
    act(&mut job, &pods);
    until(|| fake.state().names() == ["j-w-1", "j-w-3"]).await;
    let labels = fake.state().pod("j-w-3")["metadata"]["labels"].clone();
    assert_eq!(
        (&labels["elasticdl/launch"], &labels["elasticdl/index"]),
        (&json!("3"), &json!("0"))
    );
}
