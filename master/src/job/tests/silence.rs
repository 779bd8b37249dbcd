//! Silence.

use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::super::testing::spec;
use super::super::*;
use super::directed::{actions, at, started};

/// A started job whose workers may be silent for a second; looks are due every 50 ms.
fn watched() -> Job {
    started(JobSpec { worker_timeout: Some(Duration::from_secs(1)), ..spec() }, &[20])
}

/// Lets the time pass to `until` in looks of 50 ms; before each, `beating` are heard.
fn pass(job: &mut Job, from: u64, until: u64, beating: &[u64]) {
    for ms in (from..=until).step_by(50) {
        for &worker in beating {
            job.handle(at(ms), Event::Message { worker: WorkerId(worker), message: FromWorker::Alive(None) });
        }
        job.handle_timeout(at(ms));
    }
}

fn abort_of(actions: &[Action]) -> Option<(Vec<WorkerId>, bool)> {
    actions.iter().find_map(|action| match action {
        Action::Send { message: ToWorker::Membership(m), .. } => {
            Some((m.members.iter().map(|(id, _)| *id).collect(), m.abort))
        }
        _ => None,
    })
}

fn nobody_is_out(actions: &[Action]) -> bool {
    !actions.iter().any(|a| matches!(a, Action::Disconnect { .. } | Action::Kill { .. }))
}

#[test]
fn a_silent_worker_is_taken_out_killed_and_replaced() {
    let mut job = watched();
    pass(&mut job, 50, 1100, &[1, 3]);
    assert_eq!(abort_of(&actions(&mut job)), None, "a second is not too long, nor a beat more");
    pass(&mut job, 1150, 1150, &[1, 3]);
    let done = actions(&mut job);
    assert_eq!(abort_of(&done), Some((vec![WorkerId(1), WorkerId(3)], true)));
    assert!(done.contains(&Action::Disconnect { worker: WorkerId(2) }), "{done:?}");
    assert!(done.contains(&Action::Kill { launch: LaunchId(2) }), "{done:?}");
    let record = job.summary(at(1150)).memberships.pop().unwrap();
    assert_eq!((record.cause, record.lost), (Cause::Hung, vec![WorkerId(2)]));
    job.handle(at(1200), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Signal(9) });
    assert!(actions(&mut job).contains(&Action::Launch { launch: LaunchId(4), index: 1 }));
}

#[test]
fn any_word_is_a_sign_of_life() {
    let mut job = watched();
    pass(&mut job, 50, 900, &[]);
    for worker in 1..=3 {
        let message = FromWorker::LeaseRequest { epoch: 0, records: 1 };
        job.handle(at(950), Event::Message { worker: WorkerId(worker), message });
    }
    pass(&mut job, 1000, 2000, &[]);
    assert!(nobody_is_out(&actions(&mut job)));
}

#[test]
fn a_master_that_was_kept_from_running_takes_nobody_out() {
    let mut job = watched();
    pass(&mut job, 50, 300, &[1, 2, 3]);
    job.handle_timeout(at(60_000));
    pass(&mut job, 60_050, 60_900, &[1, 2, 3]);
    assert!(nobody_is_out(&actions(&mut job)));
}

#[test]
fn a_worker_that_falls_silent_before_it_is_a_member_changes_no_group() {
    let mut job =
        started(JobSpec { worker_timeout: Some(Duration::from_secs(1)), max_workers: 4, ..spec() }, &[20]);
    job.handle(at(100), Event::Scale { num_workers: 4 });
    let address = super::directed::address(4);
    let (connection, launch) = (ConnectionId(4), LaunchId(4));
    job.handle(at(100), Event::Connected { connection, launch, address, pid: 104, resume: None });
    actions(&mut job);
    pass(&mut job, 150, 1300, &[1, 2, 3]);
    let done = actions(&mut job);
    assert_eq!(abort_of(&done), None, "{done:?}");
    assert!(done.contains(&Action::Kill { launch: LaunchId(4) }), "{done:?}");
}
