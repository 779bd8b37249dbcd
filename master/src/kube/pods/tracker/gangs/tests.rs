//! Gangs of all kinds, by the pods that are created.

use serde_json::json;

use super::super::{PodEvent, Verdict, classify};
use super::*;
use crate::backend_event::BackendEvent;
use crate::job::Wait;
use crate::kube::gang::{GANG_LABEL, GangScheduler};
use crate::kube::objects::LAUNCH_LABEL;
use crate::kube::pods::calls::CreateOutcome;
use crate::kube::pods::factory::PodFactory;

/// A tracker of a job whose core has two pods.
struct Fixture {
    tracker: PodTracker,
    seconds: u64,
}

impl Fixture {
    fn new(scheduler: GangScheduler) -> Self {
        let options = GangOptions::new(scheduler, None, 2, &Default::default(), None);
        let anchor = serde_json::from_value(json!({"name": "j", "uid": "anchor"})).unwrap();
        let factory = PodFactory { gang: Some(options), ..PodFactory::for_tests(anchor, 2) };
        let tracker = PodTracker::new(factory);
        Self { tracker, seconds: 0 }
    }

    fn handle(&mut self, event: PodEvent) -> Vec<PodAction> {
        self.seconds += 1;
        self.tracker.handle(std::time::Duration::from_secs(self.seconds), event);
        std::iter::from_fn(|| self.tracker.poll_action()).collect()
    }

    /// Starts launches in these slots. Returns the gangs of the pods that are created.
    fn start(&mut self, launches: &[(u64, u32)]) -> Vec<(u64, Option<String>)> {
        let mut created = Vec::new();
        for &(launch, slot) in launches {
            created.extend(creations(&self.handle(PodEvent::Start(LaunchId(launch), slot))));
        }
        for (launch, gang) in &created {
            let outcome =
                CreateOutcome::Created(Box::new(pod(*launch, gang.as_deref(), "Pending")));
            self.handle(PodEvent::Created(LaunchId(*launch), outcome));
        }
        created
    }

    /// The pod of a launch has this phase, with an ended container.
    fn end(&mut self, launch: u64, gang: Option<&str>, phase: &str) -> Vec<PodAction> {
        self.handle(PodEvent::Applied(Box::new(pod(launch, gang, phase))))
    }
}

/// The gangs of the pods that are created, by launch.
fn creations(actions: &[PodAction]) -> Vec<(u64, Option<String>)> {
    let created = actions.iter().filter_map(|action| match action {
        PodAction::Create(launch, pod) => Some((launch.0, gang_of(pod).map(str::to_owned))),
        _ => None,
    });
    created.collect()
}

fn over(actions: &[PodAction]) -> Vec<&str> {
    let over = actions.iter().filter_map(|action| match action {
        PodAction::DeleteGroup(gang) => Some(gang.as_str()),
        _ => None,
    });
    over.collect()
}

fn deleted(actions: &[PodAction]) -> Vec<&str> {
    let deleted = actions.iter().filter_map(|action| match action {
        PodAction::Delete(pod) => Some(pod.name.as_str()),
        _ => None,
    });
    deleted.collect()
}

fn pod(launch: u64, gang: Option<&str>, phase: &str) -> Pod {
    let mut labels = json!({LAUNCH_LABEL: launch.to_string()});
    if let Some(gang) = gang {
        labels[GANG_LABEL] = gang.into();
    }
    let state = match phase {
        "Running" => json!({"running": {}}),
        "Failed" => json!({"terminated": {"exitCode": 9}}),
        "Succeeded" => json!({"terminated": {"exitCode": 0}}),
        _ => json!({}),
    };
    let container = json!({
        "name": "worker", "image": "i", "imageID": "",
        "ready": false, "restartCount": 0, "state": state
    });
    let metadata =
        json!({"name": format!("j-w-{launch}"), "uid": format!("uid-{launch}"), "labels": labels});
    let status = json!({"phase": phase, "containerStatuses": [container]});
    serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap()
}

fn in_gang(launch: u64, gang: &str) -> (u64, Option<String>) {
    (launch, Some(gang.into()))
}

#[test]
fn the_core_is_a_gang_and_further_pods_are_members_for_volcano_alone() {
    for scheduler in [GangScheduler::Kueue, GangScheduler::Native] {
        let created = Fixture::new(scheduler).start(&[(1, 0), (2, 1), (3, 2)]);
        let expected = [in_gang(1, "j-g1"), in_gang(2, "j-g1"), (3, None)];
        assert_eq!(created, expected, "{scheduler:?}");
    }
    let created = Fixture::new(GangScheduler::Volcano).start(&[(1, 0), (2, 1), (3, 2)]);
    assert_eq!(created, [in_gang(1, "j-g1"), in_gang(2, "j-g1"), in_gang(3, "j-g1")]);
}

#[test]
fn a_replacement_joins_the_gang_and_a_gang_without_pods_is_over() {
    for scheduler in [GangScheduler::Native, GangScheduler::Volcano] {
        let mut job = Fixture::new(scheduler);
        job.start(&[(1, 0), (2, 1)]);
        assert_eq!(over(&job.end(1, Some("j-g1"), "Failed")), [""; 0], "{scheduler:?}");
        assert_eq!(job.start(&[(3, 0)]), [in_gang(3, "j-g1")], "{scheduler:?}");
        job.end(2, Some("j-g1"), "Succeeded");
        assert_eq!(over(&job.end(3, Some("j-g1"), "Failed")), ["j-g1"], "{scheduler:?}");
        assert_eq!(job.start(&[(4, 0)]), [in_gang(4, "j-g4")], "{scheduler:?}");
    }
    // At the end of the job, too.
    let mut job = Fixture::new(GangScheduler::Volcano);
    job.start(&[(1, 0), (2, 1)]);
    assert_eq!(over(&job.handle(PodEvent::End)), ["j-g1"]);
}

/// Kueue deletes pods that exceed the size of their group.
#[test]
fn a_gang_of_fixed_size_takes_a_replacement_when_its_predecessor_has_failed_or_is_gone() {
    let gang = Some("j-g1");
    let mut job = Fixture::new(GangScheduler::Kueue);
    job.start(&[(1, 0), (2, 1)]);
    // The worker leaves its group, so its replacement is wanted while it still runs.
    let queued = job.handle(PodEvent::Start(LaunchId(3), 0));
    assert!(creations(&queued).is_empty());
    let waits = |action: &PodAction| {
        matches!(action, PodAction::Report(LaunchId(3), BackendEvent::Waiting(Wait::Queue(_))))
    };
    assert!(queued.iter().any(waits), "{queued:?}");
    assert_eq!(creations(&job.end(1, gang, "Running")), []);
    assert_eq!(creations(&job.end(1, gang, "Failed")), [in_gang(3, "j-g1")]);
    // A pod that has succeeded counts until its object is gone.
    job.handle(PodEvent::Start(LaunchId(4), 1));
    let ended = job.end(2, gang, "Succeeded");
    assert_eq!((creations(&ended), deleted(&ended)), (vec![], vec!["j-w-2"]));
    let gone = job.handle(PodEvent::Deleted(Box::new(pod(2, gang, "Succeeded"))));
    assert_eq!(creations(&gone), [in_gang(4, "j-g1")]);
}

#[test]
fn a_gang_of_fixed_size_that_has_gone_altogether_is_followed_by_another() {
    let mut job = Fixture::new(GangScheduler::Kueue);
    job.start(&[(1, 0), (2, 1)]);
    for launch in [1, 2] {
        let gone = pod(launch, Some("j-g1"), "Succeeded");
        let actions = job.handle(PodEvent::Deleted(Box::new(gone)));
        assert_eq!(over(&actions), if launch == 2 { vec!["j-g1"] } else { vec![] });
    }
    assert_eq!(job.start(&[(3, 0), (4, 1)]), [in_gang(3, "j-g3"), in_gang(4, "j-g3")]);
}

/// The watch was interrupted when the pod went.
#[test]
fn a_place_is_freed_by_a_list_without_the_pod() {
    let mut job = Fixture::new(GangScheduler::Kueue);
    job.start(&[(1, 0), (2, 1)]);
    job.handle(PodEvent::Start(LaunchId(3), 0));
    let late = std::time::Duration::from_secs(1000);
    let uids = BTreeSet::from(["uid-2".to_owned()]);
    job.seconds = 1001;
    let actions = job.handle(PodEvent::Listed(late, uids));
    assert_eq!(creations(&actions), [in_gang(3, "j-g1")]);
}

#[test]
fn a_launch_that_waits_for_a_place_can_be_killed() {
    let mut job = Fixture::new(GangScheduler::Kueue);
    job.start(&[(1, 0), (2, 1)]);
    job.handle(PodEvent::Start(LaunchId(3), 0));
    let killed = job.handle(PodEvent::Kill(LaunchId(3)));
    assert!(
        killed.iter().any(|a| matches!(a, PodAction::Report(LaunchId(3), BackendEvent::Ended(_)))),
        "{killed:?}"
    );
    assert_eq!(creations(&job.end(1, Some("j-g1"), "Failed")), []);
}

#[test]
fn the_next_master_knows_the_gang_of_the_pods_that_it_finds() {
    let mut job = Fixture::new(GangScheduler::Kueue);
    for launch in [7, 8] {
        let pod = pod(launch, Some("j-g5"), "Running");
        assert_eq!(classify(&pod), Verdict::Running);
        job.handle(PodEvent::Adopt(LaunchId(launch), Some(Box::new(pod))));
    }
    assert_eq!(job.start(&[(9, 0)]), [], "both places are taken");
    assert_eq!(creations(&job.end(7, Some("j-g5"), "Failed")), [in_gang(9, "j-g5")]);
}
