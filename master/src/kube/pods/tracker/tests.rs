use std::sync::LazyLock;

use serde_json::{Value, json};

use super::timeouts::{EVENT_DELAY, GRACE_SLACK};
use super::*;
use crate::kube::priority_tiers::{PriorityTiers, parse_weight};

const ONE: LaunchId = LaunchId(1);
const SCHEDULING: BackendEvent = BackendEvent::Waiting(Wait::Scheduling(None));

fn tracker_with(priority_tiers: Option<PriorityTiers>) -> PodTracker {
    let anchor = serde_json::from_value(json!({"name": "j", "uid": "anchor"})).unwrap();
    PodTracker::new(PodFactory { priority_tiers, ..PodFactory::for_tests(anchor, 1) })
}

fn pod(uid: &str, status: Value) -> Box<Pod> {
    let labels = json!({LAUNCH_LABEL: "1"});
    let metadata = json!({"name": "j-w-1", "uid": uid, "labels": labels});
    Box::new(serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap())
}

fn terminating(status: Value) -> Box<Pod> {
    let mut pod = pod("a", status);
    let deletion = json!({
        "deletionTimestamp": "2024-05-01T10:00:00Z", "deletionGracePeriodSeconds": 10
    });
    let deletion: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta =
        serde_json::from_value(deletion).unwrap();
    pod.metadata.deletion_timestamp = deletion.deletion_timestamp;
    pod.metadata.deletion_grace_period_seconds = deletion.deletion_grace_period_seconds;
    pod
}

fn container(phase: &str, state: Value) -> Value {
    let container = json!({
        "name": "worker", "image": "i", "imageID": "",
        "ready": false, "restartCount": 0, "state": state
    });
    json!({"phase": phase, "containerStatuses": [container]})
}

fn running() -> Value {
    container("Running", json!({"running": {}}))
}

fn exited(code: i32) -> Value {
    container("Failed", json!({"terminated": {"exitCode": code, "reason": "Error"}}))
}

fn a() -> PodRef {
    PodRef { name: "j-w-1".into(), uid: "a".into() }
}

fn report(event: BackendEvent) -> PodAction {
    PodAction::Report(ONE, event)
}

fn reclaimed(cause: ReclaimCause, why: &str) -> PodAction {
    report(BackendEvent::Ended(Exit::reclaimed(cause, why)))
}

/// Hands an event in, and returns the actions.
fn handle(tracker: &mut PodTracker, seconds: u64, event: PodEvent) -> Vec<PodAction> {
    tracker.handle(Duration::from_secs(seconds), event);
    std::iter::from_fn(|| tracker.poll_action()).collect()
}

/// The priority class of a new pod.
fn class(tracker: &mut PodTracker, launch: u64, slot: u32) -> Option<String> {
    let actions = handle(tracker, 0, PodEvent::Start(LaunchId(launch), slot));
    match actions.last() {
        Some(PodAction::Create(_, pod)) => pod.spec.clone()?.priority_class_name,
        _ => panic!("{actions:?}"),
    }
}

#[test]
fn a_pod_that_is_created_after_a_change_of_the_core_has_the_class_of_its_slot() {
    let mut tracker = tracker_with(Some(PriorityTiers::shipped()));
    let before = [class(&mut tracker, 1, 0), class(&mut tracker, 2, 1)];
    assert_eq!(handle(&mut tracker, 0, PodEvent::Core(2)), []);
    assert_eq!(before, ["elasticdl-core", "elasticdl-tier-1"].map(|name| Some(name.into())));
    assert_eq!([class(&mut tracker, 3, 1), class(&mut tracker, 4, 2)], before);
}

#[test]
fn a_pod_that_is_created_after_a_change_of_the_weight_has_the_class_of_it() {
    for (tiers, expected) in [
        (Some(PriorityTiers::shipped()), ["elasticdl-tier-3", "elasticdl-tier-1"].map(Some)),
        (None, [None; 2]),
    ] {
        let mut tracker = tracker_with(tiers);
        let before = class(&mut tracker, 1, 7);
        assert_eq!(handle(&mut tracker, 0, PodEvent::Weight(parse_weight("2").unwrap())), []);
        assert_eq!([before.as_deref(), class(&mut tracker, 2, 7).as_deref()], expected);
    }
}

/// A tracker whose launch is being created.
fn started() -> PodTracker {
    let mut tracker = tracker_with(None);
    let actions = handle(&mut tracker, 0, PodEvent::Start(ONE, 0));
    let [PodAction::Report(ONE, SCHEDULING), PodAction::Create(ONE, pod)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(pod.metadata.name.as_deref(), Some("j-w-1"));
    tracker
}

fn created() -> PodTracker {
    let mut tracker = started();
    let outcome = CreateOutcome::Created(pod("a", json!({})));
    let actions = handle(&mut tracker, 1, PodEvent::Created(ONE, outcome));
    assert_eq!(actions, [report(BackendEvent::Created(None))]);
    tracker
}

fn run() -> PodTracker {
    let mut tracker = created();
    let actions = handle(&mut tracker, 2, PodEvent::Applied(pod("a", running())));
    assert_eq!(actions, [PodAction::NoteRun, report(BackendEvent::Running)]);
    tracker
}

#[test]
fn a_launch_ends_once_and_by_its_own_pod() {
    let mut tracker = run();
    let another = PodEvent::Applied(pod("b", exited(1)));
    assert_eq!(handle(&mut tracker, 3, another.clone()), []);
    let own = PodEvent::Applied(pod("a", exited(3)));
    let actions = handle(&mut tracker, 3, own.clone());
    let [PodAction::RecordEvent("WorkerFailed", _), ended] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(*ended, report(BackendEvent::Ended(Exit::Code(3))));
    for event in [own, another, PodEvent::Deleted(pod("a", exited(3))), PodEvent::Kill(ONE)] {
        assert_eq!(handle(&mut tracker, 4, event), []);
    }
}

#[test]
fn a_launch_that_is_not_wanted_any_more_has_not_failed() {
    for (code, events) in [(70, 0), (1, 1)] {
        let mut tracker = run();
        assert_eq!(handle(&mut tracker, 3, PodEvent::Kill(ONE)), []);
        let actions = handle(&mut tracker, 3, PodEvent::Applied(pod("a", exited(code))));
        let is_event = |action: &&PodAction| matches!(action, PodAction::RecordEvent(..));
        assert_eq!(actions.iter().filter(is_event).count(), events, "{actions:?}");
    }
}

#[test]
fn the_pod_of_a_launch_that_ended_meanwhile_is_deleted() {
    let mut tracker = started();
    let actions = handle(&mut tracker, 1, PodEvent::Kill(ONE));
    assert_eq!(
        actions,
        [PodAction::CancelCreation(ONE), reclaimed(ReclaimCause::Unwanted, NOT_WANTED)]
    );
    let outcome = CreateOutcome::Created(pod("a", json!({})));
    let actions = handle(&mut tracker, 2, PodEvent::Created(ONE, outcome));
    assert_eq!(actions, [PodAction::Delete(a())]);
}

#[test]
fn a_pod_may_be_missing_from_a_list_that_is_older_than_its_creation() {
    let mut tracker = created();
    let none = |at| PodEvent::Listed(Duration::from_secs(at), BTreeSet::new());
    assert_eq!(handle(&mut tracker, 3, none(1)), []);
    let there = BTreeSet::from(["a".to_owned()]);
    assert_eq!(handle(&mut tracker, 3, PodEvent::Listed(Duration::from_secs(2), there)), []);
    assert_eq!(
        handle(&mut tracker, 3, none(2)).last(),
        Some(&reclaimed(ReclaimCause::Deleted, "its pod is gone"))
    );
}

#[test]
fn a_running_pod_is_given_two_seconds_to_end_by_itself_before_it_is_killed() {
    let mut tracker = run();
    assert_eq!(tracker.poll_timeout(), None);
    assert_eq!(handle(&mut tracker, 10, PodEvent::Kill(ONE)), []);
    assert_eq!(handle(&mut tracker, 11, PodEvent::Kill(ONE)), []);
    let due = Duration::from_secs(10) + END_WAIT;
    assert_eq!(tracker.poll_timeout(), Some(due));
    assert_eq!(handle(&mut tracker, 11, PodEvent::Tick), []);
    let actions = handle(&mut tracker, due.as_secs(), PodEvent::Tick);
    assert_eq!(actions, [PodAction::Delete(a()), reclaimed(ReclaimCause::Unwanted, NOT_WANTED)]);
    assert_eq!(tracker.poll_timeout(), None);
}

#[test]
fn a_creation_that_waits_is_reported_until_it_is_answered() {
    let mut tracker = started();
    let wait = Wait::Capacity("exceeded quota: q".into());
    let waits = PodEvent::CreationWaits(ONE, wait.clone());
    let event = PodAction::RecordEvent("QuotaExceeded", "exceeded quota: q".into());
    let expected = [event, report(BackendEvent::Waiting(wait))];
    assert_eq!(handle(&mut tracker, 1, waits.clone()), expected);
    let rejected = CreateOutcome::Rejected("no".into());
    let ended = BackendEvent::Ended(Exit::NotStarted("no".into()));
    assert_eq!(handle(&mut tracker, 2, PodEvent::Created(ONE, rejected)), [report(ended)]);
    assert_eq!(handle(&mut tracker, 3, waits), []);
}

#[test]
fn a_node_that_does_not_end_a_pod_in_time_is_given_up() {
    let mut tracker = run();
    let actions = handle(&mut tracker, 5, PodEvent::Applied(terminating(running())));
    assert!(matches!(actions[..], [PodAction::Report(ONE, BackendEvent::Terminating(..))]));
    let due = 5 + 10 + GRACE_SLACK.as_secs();
    // Further events do not restart the time limit.
    assert_eq!(handle(&mut tracker, 15, PodEvent::Applied(terminating(running()))), []);
    // Its reason is asked for once.
    let asked = handle(&mut tracker, due - 1, PodEvent::Tick);
    let [PodAction::Investigate(pods)] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!((pods.len(), &pods[0].pod), (1, &a()));
    let actions = handle(&mut tracker, due, PodEvent::Tick);
    let [PodAction::RecordEvent(_, _), ended] = &actions[..] else { panic!("{actions:?}") };
    let why = "it was to end in 10 s, and its node does not answer: its pod is being deleted";
    assert_eq!(*ended, reclaimed(ReclaimCause::NodeLost, why));
}

#[test]
fn deletions_are_investigated_together_and_their_reasons_reported_after_the_end() {
    let mut tracker = run();
    let actions = handle(&mut tracker, 5, PodEvent::Deleted(pod("a", running())));
    assert_eq!(actions, [reclaimed(ReclaimCause::Deleted, "its pod is gone")]);
    let at = 5 + EVENT_DELAY.as_secs();
    assert_eq!(handle(&mut tracker, at - 1, PodEvent::Tick), []);
    let mut actions = handle(&mut tracker, at, PodEvent::Tick);
    let Some(PodAction::Investigate(due)) = actions.pop() else { panic!("{actions:?}") };
    let preemptors = BTreeMap::from([("a".to_owned(), "Preempted by ns/high".to_owned())]);
    let actions = handle(&mut tracker, at, PodEvent::Explained(due, preemptors));
    let [PodAction::RecordEvent("WorkerPreempted", _), explained] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(*explained, report(BackendEvent::Explained("preempted by ns/high".into())));
}

/// Every history of five events of one launch: it ends once, says nothing after that but the
/// reason of a deletion, and leaves no pod behind that still runs.
#[test]
fn every_launch_ends_once_and_leaves_no_running_pod() {
    static EVENTS: LazyLock<[(PodEvent, u64); 10]> = LazyLock::new(|| {
        let ready = || pod("a", running());
        [
            (PodEvent::Created(ONE, CreateOutcome::Created(pod("a", json!({})))), 0),
            (PodEvent::CreationWaits(ONE, Wait::Capacity("quota".into())), 0),
            (PodEvent::Applied(ready()), 0),
            (PodEvent::Applied(pod("a", exited(143))), 0),
            (PodEvent::Applied(terminating(running())), 0),
            (PodEvent::Deleted(ready()), 0),
            (PodEvent::Listed(Duration::MAX, BTreeSet::new()), 0),
            (PodEvent::Kill(ONE), 0),
            (PodEvent::Tick, 2),
            (PodEvent::Tick, 60),
        ]
    });
    let mut coverage = [0_u32; 3];
    for history in 0..EVENTS.len().pow(5) {
        let mut tracker = started();
        let mut seen = Seen::default();
        let (mut rest, mut now) = (history, 1);
        for _ in 0..5 {
            let (event, seconds) = &EVENTS[rest % EVENTS.len()];
            rest /= EVENTS.len();
            now += seconds;
            if seen.admits(event) {
                seen.note(event, handle(&mut tracker, now, event.clone()), history);
            }
        }
        let confirm = CreateOutcome::Created(pod("a", json!({})));
        for event in [PodEvent::End, PodEvent::Created(ONE, confirm)] {
            if seen.admits(&event) {
                seen.note(&event, handle(&mut tracker, now, event.clone()), history);
            }
        }
        assert_eq!(seen.ends, 1, "history {history}");
        assert!(seen.is_gone || seen.is_deleted, "history {history}: its pod runs on");
        coverage[usize::from(seen.is_gone) + usize::from(seen.is_deleted)] += 1;
    }
    assert!(coverage[0] == 0 && coverage[1] > 10_000 && coverage[2] > 1_000, "{coverage:?}");
}

/// What a history has shown of its pod.
#[derive(Default)]
struct Seen {
    is_confirmed: bool,
    /// The program of the pod has ended, or the pod does not exist any more.
    is_gone: bool,
    is_deleted: bool,
    ends: u32,
}

impl Seen {
    /// Whether the cluster can report this now.
    fn admits(&self, event: &PodEvent) -> bool {
        match event {
            PodEvent::Created(..) | PodEvent::CreationWaits(..) => !self.is_confirmed,
            PodEvent::Applied(_) | PodEvent::Deleted(_) => self.is_confirmed && !self.is_gone,
            _ => true,
        }
    }

    fn note(&mut self, event: &PodEvent, actions: Vec<PodAction>, history: usize) {
        match event {
            PodEvent::Created(..) => self.is_confirmed = true,
            PodEvent::Applied(pod) => self.is_gone |= pod.status == pod_status(exited(143)),
            PodEvent::Deleted(_) | PodEvent::Listed(..) => self.is_gone |= self.is_confirmed,
            _ => {}
        }
        for action in actions {
            match action {
                PodAction::Delete(pod) => {
                    assert_eq!(pod, a(), "history {history}");
                    self.is_deleted = true;
                }
                PodAction::Report(_, BackendEvent::Ended(_)) => self.ends += 1,
                PodAction::Report(_, event) => {
                    assert_eq!(self.ends, 0, "history {history}: {event:?} after its end");
                }
                // The node of a terminating pod is given up: the pod is deleted already.
                PodAction::RecordEvent("NodeLost", _) => self.is_deleted = true,
                _ => {}
            }
        }
    }
}

fn pod_status(status: Value) -> Option<k8s_openapi::api::core::v1::PodStatus> {
    pod("a", status).status
}

#[test]
fn the_place_of_a_node_is_asked_for_once_per_launch() {
    let mut tracker = created();
    let mut on_node = pod("a", running());
    on_node.spec.get_or_insert_default().node_name = Some("n".into());
    let actions = handle(&mut tracker, 2, PodEvent::Applied(on_node.clone()));
    let locate = PodAction::Locate(ONE, "n".into());
    assert_eq!(actions, [PodAction::NoteRun, locate, report(BackendEvent::Running)]);
    assert_eq!(handle(&mut tracker, 3, PodEvent::Applied(on_node)), []);
}

fn on_node(status: Value) -> Box<Pod> {
    let mut pod = pod("a", status);
    pod.spec.get_or_insert_default().node_name = Some("n1".into());
    pod
}

fn started_at(tracker: &mut PodTracker, now: Duration, launch: LaunchId) -> Value {
    tracker.handle(now, PodEvent::Start(launch, 0));
    let pods = std::iter::from_fn(|| tracker.poll_action()).find_map(|action| match action {
        PodAction::Create(_, pod) => Some(pod),
        _ => None,
    });
    let affinity = pods.unwrap().spec.unwrap().affinity;
    serde_json::to_value(affinity).unwrap()
}

#[test]
fn a_pod_that_its_node_does_not_acknowledge_is_replaced_elsewhere() {
    let mut tracker = tracker_with(None);
    let at = Duration::from_secs;
    assert_eq!(started_at(&mut tracker, at(0), ONE), Value::Null);
    tracker.handle(at(1), PodEvent::Applied(on_node(json!({"phase": "Pending"}))));
    let wait = "node n1 has not acknowledged it yet".to_owned();
    let wait = BackendEvent::Waiting(Wait::Start(Some(wait)));
    assert_eq!(tracker.poll_action(), Some(PodAction::Report(ONE, wait)));
    tracker.handle(at(30), PodEvent::Tick);
    assert_eq!(tracker.poll_action(), None);
    tracker.handle(at(31), PodEvent::Tick);
    let actions: Vec<_> = std::iter::from_fn(|| tracker.poll_action()).collect();
    assert!(actions.contains(&PodAction::Delete(a())), "{actions:?}");
    let ended = |action: &PodAction| {
        matches!(
            action,
            PodAction::Report(_, BackendEvent::Ended(Exit::Reclaimed { cause, .. }))
                if *cause == ReclaimCause::NodeLost
        )
    };
    assert!(actions.iter().any(ended), "{actions:?}");
    let affinity = started_at(&mut tracker, at(31), LaunchId(2));
    let other = &affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0];
    let expected = json!({"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1"]});
    assert_eq!(other["preference"]["matchExpressions"][0], expected);
    // The cluster has noticed by then.
    assert_eq!(started_at(&mut tracker, at(120), LaunchId(3)), Value::Null);
}

#[test]
fn a_pod_that_pulls_its_image_for_long_is_not_given_up() {
    let mut tracker = tracker_with(None);
    let at = Duration::from_secs;
    started_at(&mut tracker, at(0), ONE);
    let pulling = json!({"phase": "Pending", "startTime": "2024-05-01T10:00:00Z"});
    tracker.handle(at(1), PodEvent::Applied(on_node(pulling)));
    let wait = "node n1 pulls its image or prepares its volumes".to_owned();
    let wait = BackendEvent::Waiting(Wait::Start(Some(wait)));
    assert_eq!(tracker.poll_action(), Some(PodAction::Report(ONE, wait)));
    let actions = handle(&mut tracker, 600, PodEvent::Tick);
    assert!(matches!(&actions[..], [PodAction::ReadWarnings(_)]), "{actions:?}");
}

#[test]
fn the_clusters_warning_says_what_a_pod_waits_for() {
    let mut tracker = tracker_with(None);
    let starting = json!({"phase": "Pending", "startTime": "2024-05-01T10:00:00Z"});
    started_at(&mut tracker, Duration::ZERO, ONE);
    handle(&mut tracker, 1, PodEvent::Applied(on_node(starting.clone())));
    let asked = vec![on_node(starting.clone()).metadata.uid.unwrap()];
    let ask = || PodAction::ReadWarnings(asked.clone());
    assert_eq!(handle(&mut tracker, 10, PodEvent::Tick), []);
    assert_eq!(handle(&mut tracker, 11, PodEvent::Tick), [ask()]);
    assert_eq!(handle(&mut tracker, 12, PodEvent::Tick), []);
    let warned = |reason: &str, message: &str| {
        let warning = PodWarning { reason: reason.into(), message: message.into() };
        PodEvent::Warned(asked.clone(), [(asked[0].clone(), warning)].into())
    };
    let waits = |why: &str| {
        PodAction::Report(ONE, BackendEvent::Waiting(Wait::Start(Some(format!("node n1 {why}")))))
    };
    let says = |why: &str| {
        PodAction::Report(ONE, BackendEvent::Waiting(Wait::Start(Some(format!("node n1: {why}")))))
    };
    let actions = handle(&mut tracker, 12, warned("FailedMount", "no secret s"));
    assert_eq!(actions, [says("FailedMount: no secret s")]);
    // Neither the next attempt nor a change of the pod is news.
    assert_eq!(handle(&mut tracker, 13, warned("FailedMount", "no secret s (2)")), []);
    assert_eq!(handle(&mut tracker, 14, PodEvent::Applied(on_node(starting))), []);
    assert_eq!(handle(&mut tracker, 31, PodEvent::Tick), [ask()]);
    let none = PodEvent::Warned(asked.clone(), BTreeMap::new());
    let actions = handle(&mut tracker, 32, none);
    assert_eq!(actions, [waits("pulls its image or prepares its volumes")]);
    handle(&mut tracker, 33, PodEvent::Applied(on_node(running())));
    assert_eq!(handle(&mut tracker, 34, warned("FailedMount", "late")), []);
    assert_eq!(handle(&mut tracker, 90, PodEvent::Tick), []);
}

#[test]
fn a_replacement_prefers_other_nodes_than_that_of_a_worker_which_was_given_up() {
    let mut tracker = tracker_with(None);
    let at = Duration::from_secs;
    started_at(&mut tracker, at(0), ONE);
    tracker.handle(at(1), PodEvent::Applied(on_node(running())));
    tracker.handle(at(50), PodEvent::Kill(ONE));
    assert_ne!(started_at(&mut tracker, at(50), LaunchId(2)), Value::Null);
}

#[test]
fn pods_prefer_other_nodes_than_that_of_a_failure_for_a_while() {
    let mut tracker = tracker_with(None);
    let at = Duration::from_secs;
    tracker.handle(at(0), PodEvent::Avoid("node-1".into()));
    tracker.handle(at(1), PodEvent::Avoid("node-2".into()));
    let expected = json!({"nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [{
            "weight": 100,
            "preference": {"matchExpressions": [{
                "key": "kubernetes.io/hostname",
                "operator": "NotIn",
                "values": ["node-1", "node-2"],
            }]},
        }],
    }});
    assert_eq!(started_at(&mut tracker, at(1), ONE), expected);
    assert_eq!(started_at(&mut tracker, at(61), LaunchId(2)), Value::Null);
}
