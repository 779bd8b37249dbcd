//! Unschedulable launches, and launches that are removed.

use elasticdl_proto::WorkerId;

use super::super::*;
use super::directed::{
    actions, at, connect, deliver, launch, launch_at, leaves, membership, memberships, send,
    started,
};
use crate::job::testing::{dataset, spec};

/// A job that has just requested launches 2 to `wanted`; the first launch has a worker.
fn asked(wanted: u32, min: u32) -> Job {
    let spec = JobSpec { num_workers: wanted, min_workers: min, max_workers: wanted, ..spec() };
    let mut job = Job::new(spec);
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[1000])), None));
    let asked = actions(&mut job).iter().filter(|a| matches!(a, Action::Launch { .. })).count();
    assert_eq!(asked as u32, wanted);
    job
}

fn unschedulable(job: &mut Job, ms: u64, launch: u64) {
    let wait = Wait::Capacity("0/3 nodes are available".into());
    job.handle(at(ms), Event::LaunchWaits { launch: LaunchId(launch), wait });
}

fn scheduled(job: &mut Job, ms: u64, launch: u64) {
    job.handle(at(ms), Event::LaunchWaits { launch: LaunchId(launch), wait: Wait::Start(None) });
}

fn ended(job: &mut Job, ms: u64, launch: u64) {
    let exit = Exit::reclaimed(ReclaimCause::Unwanted, "it is not wanted any more");
    job.handle(at(ms), Event::ProcessEnded { launch: LaunchId(launch), exit });
}

fn done(job: &mut Job) -> Vec<Action> {
    let mut actions = actions(job);
    actions.retain(|a| matches!(a, Action::Launch { .. } | Action::Kill { .. }));
    actions
}

fn kill(launch: u64) -> Action {
    Action::Kill { launch: LaunchId(launch) }
}

#[test]
fn a_full_cluster_is_probed_by_two_launches_and_the_rest_is_withdrawn_from_the_highest_slot() {
    let mut job = asked(6, 1);
    scheduled(&mut job, 5, 2);
    (4..=6).rev().for_each(|launch| unschedulable(&mut job, 10, launch));
    assert_eq!(done(&mut job), [kill(6)]);
    unschedulable(&mut job, 10, 3);
    assert_eq!(done(&mut job), [kill(5)]);
    [5, 6].iter().for_each(|&launch| ended(&mut job, 20, launch));
    assert_eq!((done(&mut job), job.lifecycle.failures()), (vec![], 0));
    // Two probes are still pending, so time alone changes nothing.
    job.handle_timeout(at(120_000));
    assert_eq!(done(&mut job), []);
}

#[test]
fn a_job_grows_by_one_with_each_scheduled_probe() {
    let mut job = asked(6, 1);
    scheduled(&mut job, 5, 2);
    (3..=6).for_each(|launch| unschedulable(&mut job, 10, launch));
    [5, 6].iter().for_each(|&launch| ended(&mut job, 20, launch));
    assert_eq!(done(&mut job), [kill(5), kill(6)]);
    scheduled(&mut job, 30, 3);
    assert_eq!(done(&mut job), [launch_at(7, 4)]);
    scheduled(&mut job, 30, 7);
    assert_eq!(done(&mut job), [launch_at(8, 5)]);
    scheduled(&mut job, 40, 4);
    scheduled(&mut job, 40, 8);
    assert_eq!(done(&mut job), []);
}

/// A higher slot may have a lower priority class: other pods would take the capacity of the slots
/// below while a probe waits there.
#[test]
fn probes_move_down_to_free_slots() {
    let mut job = asked(6, 1);
    (2..=4).for_each(|launch| scheduled(&mut job, 5, launch));
    (5..=6).for_each(|launch| unschedulable(&mut job, 10, launch));
    ended(&mut job, 20, 3);
    assert_eq!(done(&mut job), [kill(6), launch_at(7, 2)]);
    ended(&mut job, 21, 6);
    // The scheduler has not answered for launch 7 yet; then it is pending in the lower of both
    // slots.
    ended(&mut job, 22, 2);
    assert_eq!(done(&mut job), [kill(5), launch_at(8, 1)]);
    ended(&mut job, 23, 5);
    (7..=8).for_each(|launch| unschedulable(&mut job, 24, launch));
    ended(&mut job, 25, 4);
    assert_eq!((done(&mut job), job.lifecycle.failures()), (vec![], 0));
}

#[test]
fn probes_do_not_take_slots_below_min_workers() {
    let mut job = asked(4, 2);
    scheduled(&mut job, 5, 2);
    (3..=4).for_each(|launch| unschedulable(&mut job, 10, launch));
    ended(&mut job, 20, 2);
    assert_eq!(done(&mut job), [launch_at(5, 1)]);
}

#[test]
fn launches_below_min_workers_are_requested_regardless_of_capacity() {
    let mut job = asked(6, 4);
    (2..=6).for_each(|launch| unschedulable(&mut job, 10, launch));
    assert_eq!(done(&mut job), []);
    ended(&mut job, 20, 2);
    assert_eq!(done(&mut job), [launch_at(7, 1)]);
    ended(&mut job, 20, 6);
    assert_eq!(done(&mut job), [launch_at(8, 5)]);
}

#[test]
fn all_missing_launches_are_requested_at_once_if_none_is_unschedulable() {
    let mut job = asked(40, 1);
    (2..=40).for_each(|launch| scheduled(&mut job, 10, launch));
    (1..=30).for_each(|launch| ended(&mut job, 20, launch));
    assert_eq!(done(&mut job).len(), 30);
    // A wait that ended long ago has no effect.
    unschedulable(&mut job, 30, 41);
    scheduled(&mut job, 40, 41);
    (31..=40).for_each(|launch| ended(&mut job, 50, launch));
    assert!(done(&mut job).len() < 10);
    (41..=80).for_each(|launch| scheduled(&mut job, 60, launch));
    job.handle_timeout(at(60_030));
    let asked = job.workers.launches().filter(|(_, l)| l.stays()).count();
    assert_eq!(asked, 40);
}

#[test]
fn a_job_that_waits_for_a_scheduler_doubles_until_it_has_all_its_pods() {
    let spec = JobSpec { num_workers: 60, min_workers: 2, max_workers: 60, ..spec() };
    let mut job = Job::new(spec);
    let wait = Wait::Scheduling(None);
    job.handle(at(1), Event::LaunchWaits { launch: LaunchId(1), wait });
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[1000])), None));
    // Two core workers and six probes; then as many as are scheduled, so twice as many in all.
    let mut rounds = Vec::new();
    loop {
        let launched = done(&mut job).len();
        if launched == 0 {
            break;
        }
        rounds.push(launched);
        let first = 2 + job.workers.scheduled() as u64 - 1;
        (first..first + launched as u64 - u64::from(rounds.len() == 1))
            .for_each(|launch| scheduled(&mut job, 10, launch));
    }
    assert_eq!(rounds, [8, 8, 16, 28]);
    // A job that has had so many pods may request as many at once.
    (1..=50).for_each(|launch| ended(&mut job, 20, launch));
    assert_eq!(done(&mut job).len(), 50);
}

#[test]
fn a_scale_down_withdraws_pending_launches_first_and_then_the_highest_slots() {
    let mut job = started(JobSpec { num_workers: 4, max_workers: 5, ..spec() }, &[20]);
    job.handle(at(1), Event::Scale(5.into()));
    unschedulable(&mut job, 2, 5);
    actions(&mut job);
    job.handle(at(3), Event::Scale(4.into()));
    assert_eq!(done(&mut job), [kill(5)]);
    // Worker 6 replaces worker 2 in the same slot, so it is not the one that is retired.
    job.handle(at(4), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Signal(9) });
    assert_eq!(done(&mut job), [launch_at(6, 1)]);
    connect(&mut job, 6);
    job.handle(at(5), Event::Scale(3.into()));
    let leaves = job.status(at(5)).workers.iter().find(|w| w.state == "leaving").map(|w| w.worker);
    assert_eq!(leaves, Some(WorkerId(4)));
}

#[test]
fn a_reclaimed_worker_leaves_at_a_step_boundary_and_its_slot_is_filled_at_once() {
    let mut job = started(JobSpec { max_workers: 4, ..spec() }, &[20]);
    leaves(&mut job, 2, ReclaimCause::Preempted);
    let next = membership(2, &[1, 3], false);
    let done = actions(&mut job);
    assert!(done.contains(&launch_at(4, 1)), "{done:?}");
    assert!(done.contains(&send(2, MasterMessage::Membership(next))), "{done:?}");
    // The worker's own `Leaving` has no further effect.
    deliver(&mut job, 2, WorkerMessage::Leaving);
    assert_eq!((actions(&mut job), memberships(&mut job)), (vec![], vec![]));
    job.handle(at(2), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Code(1) });
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (vec![], 0));
}

#[test]
fn a_launch_reclaimed_before_its_hello_is_replaced_and_refused() {
    let mut job = Job::new(spec());
    assert_eq!(actions(&mut job), [launch(1)]);
    leaves(&mut job, 1, ReclaimCause::Evicted);
    assert_eq!(actions(&mut job), [launch_at(2, 0)]);
    connect(&mut job, 1);
    assert!(matches!(actions(&mut job)[..], [Action::Refuse { .. }]));
    ended(&mut job, 2, 1);
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (vec![], 0));
}

#[test]
fn a_status_shows_why_launches_wait_and_their_priority_classes() {
    let mut job = asked(3, 1);
    for (launch, class) in [(1, "core"), (2, "tier-1"), (3, "tier-1")] {
        job.handle(
            at(1),
            Event::LaunchMade { launch: LaunchId(launch), class: Some(class.into()) },
        );
    }
    unschedulable(&mut job, 2, 3);
    let status = job.status(at(3));
    let pending: Vec<_> = status
        .workers_pending
        .iter()
        .map(|l| (l.launch.0, &*l.state, l.reason.as_deref()))
        .collect();
    assert_eq!(
        pending,
        [(2, "requested", None), (3, "unschedulable", Some("0/3 nodes are available"))]
    );
    let tiers: Vec<_> =
        status.priority_tiers.iter().map(|r| (r.class.as_str(), r.launches, r.workers)).collect();
    assert_eq!(tiers, [("core", 1, 1), ("tier-1", 2, 0)]);
    job.handle(
        at(4),
        Event::LaunchExplained { launch: LaunchId(9), explanation: "preempted by a/b".into() },
    );
    assert!(job.status(at(4)).events.last().unwrap().ends_with("worker 9 was preempted by a/b"));
}

fn queued(job: &mut Job, ms: u64, launch: u64) {
    let wait = Wait::Queue("Kueue has not admitted it yet".into());
    job.handle(at(ms), Event::LaunchWaits { launch: LaunchId(launch), wait });
}

/// A gang is placed when all of its pods exist. Processes of one machine cost nothing.
#[test]
fn the_workers_of_a_gang_are_started_together_and_so_are_processes() {
    let started = |policies| {
        let spec = JobSpec { num_workers: 4, min_workers: 3, max_workers: 4, policies, ..spec() };
        let mut job = Job::new(spec);
        (actions(&mut job), job)
    };
    let together = Policies { starts_together: true, ..Policies::default() };
    assert_eq!(started(together).0, [1, 2, 3, 4].map(launch));
    let policies = Policies { starts_core_together: true, ..Policies::default() };
    let (launched, mut job) = started(policies);
    assert_eq!(launched, [1, 2, 3].map(launch));
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[1000])), None));
    assert!(actions(&mut job).contains(&launch(4)));
}

#[test]
fn a_job_whose_core_waits_in_a_queue_is_queued() {
    let mut job = Job::new(spec());
    queued(&mut job, 0, 1);
    let status = job.status(at(0));
    assert_eq!((&*status.state, &*status.workers_pending[0].state), ("queued", "queued"));
    assert_eq!(status.events, ["worker 1 waits: Kueue has not admitted it yet"]);
    // It may wait for long.
    job.handle_timeout(at(3_600_000));
    assert!(!done(&mut job).contains(&kill(1)));
    scheduled(&mut job, 3_600_000, 1);
    assert_eq!(&*job.status(at(3_600_000)).state, "starting");
    // A job that trains is not queued.
    let mut job = started(JobSpec { max_workers: 4, ..spec() }, &[20]);
    job.handle(at(0), Event::Scale(4.into()));
    queued(&mut job, 0, 4);
    assert_eq!(&*job.status(at(0)).state, "running");
}

#[test]
fn a_queue_holds_few_pods_beyond_the_core() {
    let mut job = asked(6, 1);
    scheduled(&mut job, 5, 2);
    (4..=6).rev().for_each(|launch| queued(&mut job, 10, launch));
    assert_eq!(done(&mut job), [kill(6)]);
}
