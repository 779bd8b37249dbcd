//! Gangs at a fake server: what is created, in which order, and what stand-ins of the schedulers do
//! to it.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Value, json};

use super::tests::{container, next, running, until};
use super::*;
use crate::job::{Exit, ReclaimCause, Wait};
use crate::kube::gang::{GangOptions, GangScheduler};
use crate::kube::testing::FakeServer;

/// Pods of a job `j` whose core has two pods.
fn pods_with(fake: &Arc<FakeServer>, scheduler: GangScheduler) -> Pods {
    let cluster = fake.cluster();
    let anchor: ObjectMeta = serde_json::from_value(json!({"name": "j", "uid": "anchor"})).unwrap();
    let recorder = EventRecorder::start(&cluster, &anchor);
    let queue = scheduler.has_queues().then(|| "team".to_owned());
    let class = Some("elasticdl-core".to_owned());
    let template = json!({"spec": {"containers": [{"name": "worker"}]}});
    let mut template: Pod = serde_json::from_value(template).unwrap();
    let gang = GangOptions::new(scheduler, queue, 2, &Default::default(), class);
    gang.mark_template(&mut template.metadata);
    let factory = PodFactory { template, gang: Some(gang), ..PodFactory::for_tests(anchor, 2) };
    Pods::new(&cluster, factory, LeaseGuard::unlimited(), recorder)
}

fn calls(fake: &FakeServer) -> Vec<String> {
    let state = fake.state();
    let posted = state.calls.iter().map(|(_, call)| call.clone());
    posted.filter(|call| ["POST pods", "POST podgroups"].contains(&call.as_str())).collect()
}

/// Waits for an event of the launch for which `is` holds; skips the others.
async fn expect(pods: &mut Pods, launch: u64, is: impl Fn(&BackendEvent) -> bool) -> BackendEvent {
    loop {
        let (of, event) = next(pods).await;
        if of == LaunchId(launch) && is(&event) {
            return event;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_group_is_created_once_before_its_pods_and_deleted_after_them() {
    for (scheduler, group) in [
        (GangScheduler::Volcano, "scheduling.volcano.sh/v1beta1"),
        (GangScheduler::Native, "scheduling.k8s.io/v1beta1"),
    ] {
        let (fake, _) = FakeServer::start();
        let pods = pods_with(&fake, scheduler);
        pods.start(LaunchId(1), 0);
        pods.start(LaunchId(2), 1);
        until(|| fake.state().names().len() == 2).await;
        assert_eq!(calls(&fake)[0], "POST podgroups");
        assert_eq!(fake.state().all("podgroups").len(), 1);
        let created = fake.state().object("podgroups", "j-g1").unwrap();
        assert_eq!(created["apiVersion"], group);
        let pod = fake.state().pod("j-w-2");
        assert_eq!(pod["metadata"]["labels"]["elasticdl/gang"], "j-g1");
        let native = scheduler == GangScheduler::Native;
        let named = pod["spec"]["schedulingGroup"]["podGroupName"] == "j-g1";
        assert_eq!(named, native, "{scheduler:?}: {pod}");
        pods.end().await;
        assert_eq!(fake.state().all("podgroups"), [] as [Value; 0], "{scheduler:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_group_without_an_answer_is_awaited_before_its_pods() {
    let (fake, _) = FakeServer::start();
    fake.state().throttles.push_back(("POST podgroups", 500, 0));
    let pods = pods_with(&fake, GangScheduler::Volcano);
    pods.start(LaunchId(1), 0);
    until(|| fake.state().names().len() == 1).await;
    assert_eq!(fake.state().all("podgroups").len(), 1);
    assert_eq!(calls(&fake).last().map(String::as_str), Some("POST pods"));
}

/// A stand-in for Kueue: its webhook gates pods, its controller admits, evicts and deletes them.
struct Kueue(Arc<FakeServer>);

impl Kueue {
    /// What the webhook and the API server do to a new pod.
    fn gate(&self, name: &str) {
        let mut pod = self.0.state().pod(name);
        assert_eq!(pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"], "team");
        pod["spec"]["schedulingGates"] = json!([{"name": "kueue.x-k8s.io/admission"}]);
        pod["metadata"]["finalizers"] = json!(["kueue.x-k8s.io/managed"]);
        let gated = json!({
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates"
        });
        pod["status"] = json!({"phase": "Pending", "conditions": [gated]});
        self.0.put("pods", name, pod);
    }

    /// Removes the gate; the pod starts.
    fn admit(&self, name: &str) {
        let mut pod = self.0.state().pod(name);
        pod["spec"]["schedulingGates"] = json!([]);
        pod["spec"]["nodeName"] = "n".into();
        pod["status"] = running();
        self.0.put("pods", name, pod);
    }

    /// Evicts the pod of a workload: the condition first, then the deletion. The finalizer keeps
    /// the object.
    fn evict(&self, name: &str) {
        let mut status = running();
        status["conditions"] = json!([{
            "type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted",
            "message": "Preempted to accommodate a workload (UID: 7)"
        }]);
        self.0.set_status(name, status);
        self.0.terminate(name);
    }

    /// Active pods of a group, as Kueue counts them.
    fn active(&self, group: &str) -> usize {
        let pods = self.0.state().all("pods");
        let is_active = |pod: &&Value| {
            pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == group
                && pod["status"]["phase"] != "Failed"
        };
        pods.iter().filter(is_active).count()
    }
}

fn is_queued(event: &BackendEvent) -> bool {
    matches!(event, BackendEvent::Waiting(Wait::Queue(_)))
}

#[tokio::test(start_paused = true)]
async fn kueue_admits_the_core_and_takes_single_pods_from_the_others() {
    let (fake, _) = FakeServer::start();
    let kueue = Kueue(Arc::clone(&fake));
    let mut pods = pods_with(&fake, GangScheduler::Kueue);
    (1..=3).for_each(|launch| pods.start(LaunchId(launch), launch as u32 - 1));
    until(|| fake.state().names().len() == 3).await;
    assert_eq!((kueue.active("j-g1"), fake.state().all("podgroups").len()), (2, 0));
    for launch in 1..=3 {
        kueue.gate(&format!("j-w-{launch}"));
        let queued = expect(&mut pods, launch, is_queued).await;
        let expected = Wait::Queue("Kueue has not admitted it yet".into());
        assert_eq!(queued, BackendEvent::Waiting(expected));
    }
    (1..=3).for_each(|launch| kueue.admit(&format!("j-w-{launch}")));
    for launch in 1..=3 {
        expect(&mut pods, launch, |event| *event == BackendEvent::Running).await;
    }
    // The surplus pod is a workload by itself: its eviction is announced, and no failure.
    kueue.evict("j-w-3");
    let reason = "WorkloadEvicted: Preempted to accommodate a workload (UID: 7)";
    let terminating = BackendEvent::Terminating(ReclaimCause::Preempted, reason.into());
    expect(&mut pods, 3, |event| *event == terminating).await;
    let mut ended = container("Failed", json!({"terminated": {"exitCode": 0}}));
    ended["conditions"] = fake.state().pod("j-w-3")["status"]["conditions"].clone();
    fake.set_status("j-w-3", ended);
    let exit = expect(&mut pods, 3, |event| matches!(event, BackendEvent::Ended(_))).await;
    assert_eq!(exit, BackendEvent::Ended(Exit::reclaimed(ReclaimCause::Preempted, reason)));
}

#[tokio::test(start_paused = true)]
async fn replacements_in_the_core_never_exceed_the_group_that_kueue_counts() {
    let (fake, _) = FakeServer::start();
    let kueue = Kueue(Arc::clone(&fake));
    let mut pods = pods_with(&fake, GangScheduler::Kueue);
    [1, 2].into_iter().for_each(|launch| pods.start(LaunchId(launch), launch as u32 - 1));
    until(|| fake.state().names().len() == 2).await;
    ["j-w-1", "j-w-2"].into_iter().for_each(|name| kueue.admit(name));
    // The whole group is preempted. Replacements are wanted at once.
    ["j-w-1", "j-w-2"].into_iter().for_each(|name| kueue.evict(name));
    [3, 4].into_iter().for_each(|launch| pods.start(LaunchId(launch), launch as u32 - 3));
    expect(&mut pods, 4, is_queued).await;
    assert_eq!((kueue.active("j-g1"), fake.state().names().len()), (2, 2));
    // The finalizer is removed when the containers have ended.
    for (gone, replacement) in [("j-w-1", "j-w-3"), ("j-w-2", "j-w-4")] {
        fake.set_status(gone, container("Failed", json!({"terminated": {"exitCode": 0}})));
        fake.remove(gone);
        until(|| fake.state().names().contains(&replacement)).await;
        assert_eq!(kueue.active("j-g1"), 2);
    }
}
