//! Heartbeats and silent workers.

use std::time::Duration;

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{DisconnectedStatus, RankStep, WorkerId};

use super::super::*;
use super::directed::{actions, at, connect, launch_at, started};
use crate::job::testing::spec;

/// A started job with a worker timeout of one second; heartbeats are checked every 50 ms.
fn watched() -> Job {
    started(
        JobSpec {
            options: WorkerOptions {
                worker_timeout: Some(Duration::from_secs(1)),
                ..spec().options
            },
            ..spec()
        },
        &[20],
    )
}

/// Advances the time to `until` in checks of 50 ms; before each, `beating` send a heartbeat.
fn pass(job: &mut Job, from: u64, until: u64, beating: &[u64]) {
    pass_waiting(job, from, until, beating, None);
}

/// As [`pass`]; the heartbeats report that the worker has waited for its neighbours since
/// `stopped`.
fn pass_waiting(job: &mut Job, from: u64, until: u64, beating: &[u64], stopped: Option<u64>) {
    for ms in (from..=until).step_by(50) {
        for &worker in beating {
            let stall = stopped.filter(|&since| since <= ms).map(|since| Stall {
                generation: job.group.generation(),
                operation: 5,
                received: 0,
                sent: 0,
                waits_for_next: false,
                far: [None; 2],
                since: Duration::from_millis(ms - since),
            });
            job.handle(
                at(ms),
                Event::Message {
                    worker: WorkerId(worker),
                    message: WorkerMessage::Heartbeat(Heartbeat { stall, ..Heartbeat::default() }),
                },
            );
        }
        job.handle_timeout(at(ms));
    }
}

fn abort_of(actions: &[Action]) -> Option<(Vec<WorkerId>, bool)> {
    actions.iter().find_map(|action| match action {
        Action::Send { message: MasterMessage::Membership(m), .. } => {
            Some((m.members.iter().map(|(id, _)| *id).collect(), m.abort))
        }
        _ => None,
    })
}

fn no_worker_is_evicted(actions: &[Action]) -> bool {
    !actions.iter().any(|a| matches!(a, Action::Disconnect { .. } | Action::Kill { .. }))
}

#[test]
fn a_silent_worker_is_evicted_killed_and_replaced() {
    let mut job = watched();
    pass_waiting(&mut job, 50, 1100, &[1, 3], Some(100));
    assert_eq!(
        abort_of(&actions(&mut job)),
        None,
        "a second is not too long, nor a heartbeat more"
    );
    pass_waiting(&mut job, 1150, 1150, &[1, 3], Some(100));
    let done = actions(&mut job);
    assert_eq!(abort_of(&done), Some((vec![WorkerId(1), WorkerId(3)], true)));
    assert!(done.contains(&Action::Disconnect { worker: WorkerId(2) }), "{done:?}");
    assert!(done.contains(&Action::Kill { launch: LaunchId(2) }), "{done:?}");
    let record = job.summary(at(1150)).memberships.pop().unwrap();
    assert_eq!((record.cause, record.lost), (Cause::Hung, vec![WorkerId(2)]));
    job.handle(at(1200), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Signal(9) });
    assert!(actions(&mut job).contains(&launch_at(4, 1)));
}

#[test]
fn any_message_counts_as_a_heartbeat() {
    let mut job = watched();
    pass(&mut job, 50, 900, &[]);
    for worker in 1..=3 {
        let message = WorkerMessage::StorageWait { storage: None, waited: Duration::ZERO };
        job.handle(at(950), Event::Message { worker: WorkerId(worker), message });
    }
    pass(&mut job, 1000, 2000, &[]);
    assert!(no_worker_is_evicted(&actions(&mut job)));
}

#[test]
fn a_master_that_was_cut_off_from_all_workers_counts_their_silence_anew() {
    let spec = JobSpec {
        num_workers: 2,
        options: WorkerOptions { worker_timeout: Some(Duration::from_secs(1)), ..spec().options },
        ..spec()
    };
    let mut job = started(spec, &[20]);
    job.handle(at(0), Event::Scale(3.into()));
    connect(&mut job, 3);
    pass(&mut job, 50, 300, &[1, 2, 3]);
    pass(&mut job, 350, 15_000, &[]);
    // The members are heard first; the joining worker would be evicted after 10 s of silence.
    pass(&mut job, 15_050, 24_950, &[1, 2]);
    assert!(no_worker_is_evicted(&actions(&mut job)));
    pass(&mut job, 25_000, 25_300, &[1, 2]);
    assert!(actions(&mut job).contains(&Action::Disconnect { worker: WorkerId(3) }));
}

#[test]
fn a_master_that_was_suspended_evicts_no_worker() {
    let mut job = watched();
    pass(&mut job, 50, 300, &[1, 2, 3]);
    job.handle_timeout(at(60_000));
    pass(&mut job, 60_050, 60_900, &[1, 2, 3]);
    assert!(no_worker_is_evicted(&actions(&mut job)));
}

#[test]
fn a_worker_that_falls_silent_before_it_is_a_member_causes_no_membership_change() {
    let mut job = started(
        JobSpec {
            max_workers: 4,
            options: WorkerOptions {
                worker_timeout: Some(Duration::from_secs(1)),
                ..spec().options
            },
            ..spec()
        },
        &[20],
    );
    job.handle(at(100), Event::Scale(4.into()));
    let address = super::directed::address(4);
    let (connection, launch) = (ConnectionId(4), LaunchId(4));
    job.handle(at(100), Event::Connected { connection, launch, address, pid: 104, resume: None });
    actions(&mut job);
    pass(&mut job, 150, 10_200, &[1, 2, 3]);
    assert!(no_worker_is_evicted(&actions(&mut job)), "the joiner delays no worker");
    pass(&mut job, 10_250, 10_300, &[1, 2, 3]);
    let done = actions(&mut job);
    assert_eq!(abort_of(&done), None, "{done:?}");
    assert!(done.contains(&Action::Kill { launch: LaunchId(4) }), "{done:?}");
}

#[test]
fn a_member_unreachable_only_for_the_master_stays() {
    let mut job = watched();
    pass(&mut job, 50, 1000, &[1, 3]);
    assert_eq!(job.status(at(1000)).workers_disconnected, []);
    pass(&mut job, 1050, 30_000, &[1, 3]);
    assert!(no_worker_is_evicted(&actions(&mut job)), "the others make progress, so it lives");
    let status = job.status(at(30_000));
    let shown: Vec<_> = status.workers.iter().map(|w| &*w.state).collect();
    assert_eq!(shown, ["training", "disconnected", "training"]);
    let silent = DisconnectedStatus { worker: WorkerId(2), rank: Some(1), disconnected_s: 30.0 };
    assert_eq!(status.workers_disconnected, [silent]);
    // Without a master the worker exits after 30 s.
    pass(&mut job, 30_050, 32_100, &[1, 3]);
    assert_eq!(abort_of(&actions(&mut job)), Some((vec![WorkerId(1), WorkerId(3)], true)));
}

#[test]
fn a_master_without_any_heartbeat_evicts_no_worker() {
    let mut job = watched();
    pass(&mut job, 50, 200, &[1, 2, 3]);
    pass(&mut job, 250, 29_000, &[]);
    // Some heartbeats arrive before others.
    pass(&mut job, 29_050, 29_200, &[2]);
    pass(&mut job, 29_250, 40_000, &[1, 2, 3]);
    assert!(no_worker_is_evicted(&actions(&mut job)));
    assert_eq!(job.status(at(40_000)).generation.0, 1);
}

#[test]
fn a_member_that_computes_for_long_does_not_count_as_stopped() {
    let mut job = watched();
    for step in 1..=3 {
        let ranges = vec![];
        let rank = RankStep { compute_us: 3_000_000, ..RankStep::default() };
        let ranks = vec![rank; 3];
        let committed = Committed {
            generation: job.group.generation(),
            step,
            ranges,
            loss_sum: 0.0,
            records: 0,
            ranks,
            times: StepTimes::default(),
            steps_skipped: 0,
            ..Committed::default()
        };
        job.handle(
            at(0),
            Event::Message { worker: WorkerId(1), message: WorkerMessage::Committed(committed) },
        );
    }
    pass_waiting(&mut job, 50, 3000, &[1, 3], Some(100));
    assert!(no_worker_is_evicted(&actions(&mut job)));
    pass_waiting(&mut job, 3050, 3100, &[1, 3], Some(100));
    assert_eq!(abort_of(&actions(&mut job)), Some((vec![WorkerId(1), WorkerId(3)], true)));
}
