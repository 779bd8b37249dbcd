//! Pods of two workers, which are requested, lost, released and taken over as a unit.

use std::time::Duration;

use elasticdl_proto::WorkerId;
use elasticdl_proto::WorkerOptions;

use super::super::*;
use super::directed::{
    actions, at, committed, connect, deliver, finished, formed, launch_at, leaves, lose,
    membership, send, started,
};
use super::takeover::reconnect_with;
use crate::job::lifecycle::restart::EXIT_MASTER_LOST;
use crate::job::testing::{dataset, spec};

/// A job of two pods, and of three at most.
fn pods() -> JobSpec {
    JobSpec { num_workers: 4, min_workers: 2, max_workers: 6, workers_per_pod: 2, ..spec() }
}

fn kill(launch: u64) -> Action {
    Action::Kill { launch: LaunchId(launch) }
}

fn ended(job: &mut Job, ms: u64, launch: u64, exit: Exit) {
    job.handle(at(ms), Event::ProcessEnded { launch: LaunchId(launch), exit });
}

fn broadcast_membership(workers: &[u64], of: &Membership) -> Vec<Action> {
    workers.iter().map(|&worker| send(worker, MasterMessage::Membership(of.clone()))).collect()
}

#[test]
fn launches_and_slots_come_in_whole_pods_and_one_pod_until_the_data_is_known() {
    let mut job = Job::new(pods());
    assert_eq!(actions(&mut job), [launch_at(1, 0)]);
    connect(&mut job, 2);
    connect(&mut job, 1);
    deliver(&mut job, 2, WorkerMessage::Described(Ok(dataset(&[20])), None));
    let launched: Vec<_> =
        actions(&mut job).into_iter().filter(|a| matches!(a, Action::Launch { .. })).collect();
    assert_eq!(launched, [launch_at(3, 2)]);
    let places: Vec<_> =
        job.status(at(0)).workers_pending.iter().map(|l| (l.launch.0, l.slot)).collect();
    assert_eq!(places, [(3, 2), (4, 3)]);
}

#[test]
fn worker_counts_are_multiples_of_workers_per_pod() {
    assert_eq!(pods().check(), Ok(()));
    let wrong = [
        JobSpec { min_workers: 1, ..pods() },
        JobSpec { num_workers: 3, ..pods() },
        JobSpec { max_workers: 5, ..pods() },
        JobSpec { workers_per_pod: 0, ..pods() },
        JobSpec {
            num_workers: 65,
            min_workers: 65,
            max_workers: 65,
            workers_per_pod: 65,
            ..pods()
        },
    ];
    let options = [
        "--min-workers",
        "--num-workers",
        "--max-workers",
        "--workers-per-pod",
        "--workers-per-pod",
    ];
    assert_eq!(wrong.map(|spec| spec.check().unwrap_err().option), options);
}

#[test]
fn a_job_is_scaled_to_multiples_of_workers_per_pod() {
    let scaled = |change: Scaling| pods().scaled(4, change).map(|spec| spec.num_workers);
    assert_eq!(scaled(4.into()), Ok(4));
    assert!(scaled(8.into()).unwrap_err().contains("2 to 6 workers"));
    let expected = "a pod of this job holds 2 workers, so it takes a multiple of 2, not 3: 2 or 4";
    assert_eq!(scaled(3.into()).unwrap_err(), expected);
    let odd = Scaling { max_workers: Some(3), ..Scaling::default() };
    assert_eq!(scaled(odd).unwrap_err(), expected);
}

#[test]
fn a_worker_of_an_ended_pod_does_not_describe_the_data_set_instead_of_another_one() {
    let mut job = Job::new(pods());
    connect(&mut job, 1);
    connect(&mut job, 2);
    assert!(actions(&mut job).contains(&send(1, MasterMessage::Describe)));
    ended(&mut job, 1, 1, Exit::Unknown);
    assert_eq!(actions(&mut job), [launch_at(3, 0)]);
    connect(&mut job, 4);
    assert!(actions(&mut job).contains(&send(4, MasterMessage::Describe)));
}

/// The other worker leaves in the same membership change. The end of the pod counts as one failure,
/// and its slots are filled only then.
#[test]
fn a_crash_ends_the_pod_and_counts_once() {
    let mut job = started(pods(), &[20]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    lose(&mut job, 1, 1);
    assert_eq!(actions(&mut job), broadcast_membership(&[3, 4, 2], &membership(2, &[3, 4], true)));
    // The worker has been released, so its end is not a loss.
    lose(&mut job, 2, 2);
    assert_eq!(actions(&mut job), []);
    ended(&mut job, 3, 1, Exit::Signal(11));
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (vec![launch_at(5, 0)], 1));
    assert_eq!(job.summary(at(3)).workers.restarts, 1);
    assert_eq!(job.reporting.counters().ends, [(End::Crashed, 1)].into());
}

#[test]
fn a_failure_reported_by_a_worker_is_not_counted_again_at_its_pods_end() {
    let mut job = started(pods(), &[20]);
    deliver(
        &mut job,
        2,
        WorkerMessage::Failed {
            error: "no".into(),
            ranges: Vec::new(),
            fatal: false,
            exported: false,
        },
    );
    ended(&mut job, 3, 1, Exit::Code(1));
    assert_eq!(job.lifecycle.failures(), 1);
    assert!(actions(&mut job).contains(&launch_at(5, 0)));
}

/// The pod's own supervisor ends it sooner, and its exit code is informative.
#[test]
fn a_pod_that_lost_a_worker_has_three_seconds_to_end_by_itself() {
    let mut job = started(pods(), &[20]);
    lose(&mut job, 0, 4);
    actions(&mut job);
    job.handle_timeout(at(2999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(3000));
    assert_eq!(actions(&mut job), [kill(3)]);
    job.handle_timeout(at(30_000));
    assert_eq!(actions(&mut job), []);
}

#[test]
fn a_pod_that_ends_without_notice_loses_all_its_workers_at_once() {
    let mut job = started(pods(), &[20]);
    ended(&mut job, 1, 3, Exit::reclaimed(ReclaimCause::NodeLost, "its node is gone"));
    let expected =
        [vec![launch_at(5, 2)], broadcast_membership(&[1, 2], &membership(2, &[1, 2], true))]
            .concat();
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (expected, 0));
    let summary = job.summary(at(1));
    assert_eq!(summary.memberships[1].lost, [WorkerId(3), WorkerId(4)]);
}

#[test]
fn a_leaving_worker_releases_its_pod_and_its_slots_are_filled_at_once() {
    let mut job = started(pods(), &[20]);
    deliver(&mut job, 4, WorkerMessage::Leaving);
    let expected = [
        vec![launch_at(5, 2)],
        broadcast_membership(&[1, 2, 3, 4], &membership(2, &[1, 2], false)),
    ]
    .concat();
    assert_eq!(actions(&mut job), expected);
    // The worker also receives SIGTERM; its `Leaving` has no further effect.
    deliver(&mut job, 3, WorkerMessage::Leaving);
    leaves(&mut job, 3, ReclaimCause::Preempted);
    assert_eq!(actions(&mut job), []);
    ended(&mut job, 2, 3, Exit::Code(143));
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (vec![], 0));
}

#[test]
fn a_scale_down_retires_whole_pods_from_the_highest_slot_down() {
    let mut job = started(pods(), &[20]);
    job.handle(at(1), Event::Scale(6.into()));
    assert_eq!(actions(&mut job), [launch_at(5, 4)]);
    connect(&mut job, 5);
    actions(&mut job);
    // Worker 6 has not sent a hello. Its pod must not be killed before worker 5 has left in order.
    job.handle(at(2), Event::Scale(4.into()));
    assert_eq!(actions(&mut job), [send(5, MasterMessage::release("the job is scaled down"))]);
    job.handle(at(3), Event::Scale(2.into()));
    assert_eq!(
        actions(&mut job),
        broadcast_membership(&[1, 2, 3, 4], &membership(2, &[1, 2], false))
    );
}

#[test]
fn an_unschedulable_pod_counts_as_one_probe() {
    let mut job = Job::new(JobSpec { num_workers: 12, max_workers: 12, ..pods() });
    (1..=2).for_each(|launch| connect(&mut job, launch));
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[1000])), None));
    let mut asked = actions(&mut job);
    asked.retain(|a| matches!(a, Action::Launch { .. }));
    assert_eq!(asked, [1, 3, 5, 7, 9, 11].map(|launch| launch_at(launch, launch as u32 - 1)));
    for launch in [5, 7, 9, 11] {
        let wait = Wait::Capacity("full".into());
        job.handle(at(1), Event::LaunchWaits { launch: LaunchId(launch), wait });
    }
    assert_eq!(actions(&mut job), [kill(9), kill(11)]);
    [9, 11].iter().for_each(|&launch| {
        ended(&mut job, 2, launch, Exit::reclaimed(ReclaimCause::Unwanted, "withdrawn"))
    });
    job.handle(at(3), Event::LaunchWaits { launch: LaunchId(3), wait: Wait::Start(None) });
    job.handle(at(3), Event::LaunchWaits { launch: LaunchId(5), wait: Wait::Start(None) });
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (vec![launch_at(13, 8)], 0));
}

#[test]
fn a_launch_without_a_hello_is_counted_and_its_pod_is_released_in_order() {
    let mut job = Job::new(pods());
    connect(&mut job, 1);
    actions(&mut job);
    job.handle_timeout(at(60_000));
    let shutdown = send(1, MasterMessage::release("another worker of its pod goes"));
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (vec![shutdown, kill(1)], 1));
}

#[test]
fn a_stopping_job_keeps_a_pod_with_a_worker_that_it_needs() {
    let mut job = started(JobSpec { num_workers: 2, ..pods() }, &[20]);
    job.handle(at(1), Event::Scale(4.into()));
    connect(&mut job, 3);
    actions(&mut job);
    job.handle(at(2), Event::Stop);
    let drained = [1, 2].map(|worker| send(worker, MasterMessage::Drain));
    let shutdown = send(3, MasterMessage::release("the job is stopping"));
    assert_eq!(actions(&mut job), [drained[0].clone(), drained[1].clone(), shutdown]);
    connect(&mut job, 4);
    assert!(matches!(
        actions(&mut job)[..],
        [Action::Admit { .. }, Action::Send { worker: WorkerId(4), .. }]
    ));
    (1..=2).for_each(|worker| deliver(&mut job, worker, finished(1, 10, 5)));
    assert_eq!(&*job.status(at(3)).state, "ending");
}

/// Worker 4 has not fetched the state and exits; worker 3 finishes its step and writes the last
#[test]
fn a_pod_is_not_killed_while_one_of_its_workers_finishes() {
    let every = CheckpointEvery::Time(Duration::from_secs(60));
    let checkpoints = Some(CheckpointSpec { dir: "kept".into(), every, keep: 1, exclusive: false });
    let mut job =
        Job::new(JobSpec { options: WorkerOptions { checkpoints, ..pods().options }, ..pods() });
    (1..=2).for_each(|i| connect(&mut job, i));
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
    (3..=4).for_each(|i| connect(&mut job, i));
    (1..=3).for_each(|i| deliver(&mut job, i, WorkerMessage::Ready { parameters: 10 }));
    job.handle_timeout(at(1000));
    deliver(&mut job, 1, formed(1, 0, &[]));
    actions(&mut job);
    job.handle(at(1000), Event::Stop);
    let sent = actions(&mut job);
    assert!(sent.contains(&send(3, MasterMessage::Drain)), "{sent:?}");
    assert!(sent.contains(&send(4, MasterMessage::release("the job is stopping"))), "{sent:?}");
    lose(&mut job, 1001, 4);
    job.handle_timeout(at(30_000));
    assert_eq!(actions(&mut job), []);
}

fn reconnect(job: &mut Job, ms: u64, i: u64, members: &[u64]) {
    reconnect_with(job, ms, i, Some(membership(1, members, true)));
}

#[test]
fn a_successor_adopts_whole_pods_and_reuses_no_id() {
    let mut record = started(pods(), &[20]).to_persisted();
    assert_eq!(record.launches_reserved % 2, 0);
    // The third pod was created after the write; the fourth one is an orphan.
    record.launches.retain(|l| l.launch.0 <= 4);
    let there = [(LaunchId(1), 0), (LaunchId(5), 4)].into();
    assert_eq!(record.observe_pods(&there), []);
    assert_eq!(record.launches().collect::<Vec<_>>(), [LaunchId(1), LaunchId(3), LaunchId(5)]);
    let made = record.launches_made;
    let mut job = Job::restore(record, at(1000)).unwrap();
    ended(&mut job, 1000, 3, Exit::Unknown);
    (1..=2).for_each(|i| reconnect(&mut job, 1010, i, &[1, 2, 3, 4]));
    assert_eq!(job.status(at(1010)).generation.0, 1);
    connect(&mut job, 5);
    connect(&mut job, 6);
    let done = actions(&mut job);
    let admitted = done.iter().filter(|a| matches!(a, Action::Admit { .. })).count();
    let launched: Vec<_> = done.iter().filter(|a| matches!(a, Action::Launch { .. })).collect();
    assert_eq!((admitted, launched), (4, vec![]));
    ended(&mut job, 1020, 5, Exit::reclaimed(ReclaimCause::Evicted, "drained"));
    assert!(actions(&mut job).contains(&launch_at(made + 1, 2)));
}

/// The former master evicted worker 1, so worker 2 is evicted too, although no other worker
/// remains.
#[test]
fn a_successor_adopts_no_half_pod() {
    let mut job = started(JobSpec { num_workers: 2, ..pods() }, &[20]);
    lose(&mut job, 1, 1);
    assert_eq!(actions(&mut job), []);
    let mut job = Job::restore(job.to_persisted(), at(1000)).unwrap();
    assert_eq!(actions(&mut job), [kill(1), launch_at(3, 0)]);
    reconnect(&mut job, 1010, 2, &[1, 2]);
    assert!(matches!(actions(&mut job)[..], [Action::Refuse { .. }]));
}

/// The master died before it had stored that the workers had connected.
#[test]
fn a_pod_that_ends_because_a_worker_was_refused_is_no_failure() {
    let mut record = started(JobSpec { num_workers: 2, ..pods() }, &[20]).to_persisted();
    record.membership = None;
    record.launches.iter_mut().for_each(|launch| launch.worker = None);
    let mut job = Job::restore(record, at(1000)).unwrap();
    actions(&mut job);
    reconnect_with(&mut job, 1010, 1, None);
    assert!(actions(&mut job).iter().any(|a| matches!(a, Action::Refuse { .. })));
    ended(&mut job, 1020, 1, Exit::Code(EXIT_MASTER_LOST));
    assert_eq!(job.to_persisted().failures, 0);
}

#[test]
fn a_pod_with_a_worker_that_does_not_reconnect_is_released_in_order() {
    let mut job = Job::restore(started(pods(), &[20]).to_persisted(), at(1000)).unwrap();
    for i in [1, 2, 3] {
        reconnect(&mut job, 1010, i, &[1, 2, 3, 4]);
        deliver(&mut job, i, WorkerMessage::Reconnected { step: 0 });
    }
    deliver(&mut job, 1, formed(1, 0, &[]));
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    actions(&mut job);
    job.handle_timeout(at(32_999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(33_000));
    let expected =
        [vec![kill(3)], broadcast_membership(&[1, 2, 3], &membership(2, &[1, 2], true))].concat();
    let mut done = actions(&mut job);
    done.retain(|a| !matches!(a, Action::Launch { .. }));
    assert_eq!(done, expected);
}

#[test]
fn ids_are_reserved_in_whole_pods() {
    let three = JobSpec { num_workers: 3, min_workers: 3, workers_per_pod: 3, ..pods() };
    let mut record = started(three, &[20]).to_persisted();
    assert_eq!(record.observe_pods(&[(LaunchId(1), 0)].into()), []);
    assert!(Job::restore(record, at(0)).is_ok());
}

#[test]
fn a_persisted_job_with_half_a_pod_is_refused() {
    let good = started(pods(), &[20]).to_persisted();
    assert!(Job::restore(good.clone(), at(0)).is_ok());
    let wrongs: [fn(&mut PersistedJob); 2] = [|r| r.wanted = 3, |r| r.launches_made = 5];
    for wrong in wrongs {
        let mut record = good.clone();
        wrong(&mut record);
        assert!(Job::restore(record, at(0)).is_err());
    }
}
