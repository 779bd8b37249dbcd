//! Workers that leave, until the group that goes on without them has formed.

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{TablesStatus, WorkerId};

use super::super::*;
use super::directed::{
    actions, at, committed, deliver, formed, lose, membership, memberships, started,
};
use super::takeover::{reconnect_as, returned};
use crate::job::testing::spec;

/// A job of this many workers that has made three steps. Without checkpoints, it fails if its state
/// is lost.
fn trained(num_workers: u32, has_tables: bool) -> Job {
    let base = JobSpec { num_workers, max_workers: num_workers, ..spec() };
    let spec = JobSpec { restart_without_checkpoint: false, ..base };
    let mut job = started(spec, &[80]);
    let WorkerMessage::Committed(report) = committed(1, 3, &[(0, 12)]) else { unreachable!() };
    let tables = TablesStatus { rows: 9, touches: 12, shards_at_risk: 0 };
    let tables = has_tables.then(|| Box::new(tables));
    let message = WorkerMessage::Committed(Committed { tables, ..report });
    job.handle(at(3_600_000), Event::Message { worker: WorkerId(1), message });
    actions(&mut job);
    job
}

/// The newest membership that was sent, without the other actions.
fn newest(job: &mut Job) -> Option<Membership> {
    memberships(job).pop().map(|(_, membership)| membership)
}

/// The workers that are shut down.
fn released(job: &mut Job) -> Vec<u64> {
    let sent = actions(job).into_iter().filter_map(|action| match action {
        Action::Send { worker, message: MasterMessage::Shutdown { .. } } => Some(worker.0),
        _ => None,
    });
    sent.collect()
}

fn scale(job: &mut Job, num_workers: u32) {
    job.handle(at(0), Event::Scale(num_workers.into()));
}

#[test]
fn a_leaver_is_released_when_the_group_without_it_has_formed() {
    let mut job = trained(3, false);
    deliver(&mut job, 1, WorkerMessage::Leaving);
    assert_eq!(newest(&mut job), Some(membership(2, &[2, 3], false)));
    job.handle_timeout(at(9999));
    assert_eq!(released(&mut job), [0; 0]);
    deliver(&mut job, 2, formed(2, 3, &[(0, 12)]));
    assert_eq!(released(&mut job), [1]);
}

#[test]
fn a_leaver_is_taken_back_if_the_only_other_worker_is_lost_before_its_group_has_formed() {
    let mut job = trained(2, false);
    scale(&mut job, 1);
    assert_eq!(newest(&mut job), Some(membership(2, &[1], false)));
    lose(&mut job, 0, 1);
    assert_eq!(newest(&mut job), Some(membership(3, &[2], true)));
    deliver(&mut job, 2, formed(3, 3, &[(0, 12)]));
    assert_eq!((released(&mut job), job.summary(at(0)).state_lost), (vec![], None));
}

#[test]
fn a_leaver_that_others_can_do_without_is_not_taken_back_and_is_released_later() {
    let mut job = trained(3, false);
    scale(&mut job, 2);
    assert_eq!(newest(&mut job), Some(membership(2, &[1, 2], false)));
    lose(&mut job, 0, 2);
    assert_eq!(newest(&mut job), Some(membership(3, &[1], true)));
    // The last one that has the state.
    lose(&mut job, 0, 1);
    assert_eq!(newest(&mut job), Some(membership(4, &[3], true)));
}

#[test]
fn with_tables_a_group_that_has_lost_a_member_goes_on_with_those_that_leave() {
    for is_excluded in [false, true] {
        let mut job = trained(4, true);
        if is_excluded {
            deliver(&mut job, 4, WorkerMessage::Leaving);
            assert_eq!(newest(&mut job), Some(membership(2, &[1, 2, 3], false)));
            lose(&mut job, 0, 3);
        } else {
            job.handle(at(0), Event::Disconnected { worker: WorkerId(3) });
            deliver(&mut job, 4, WorkerMessage::Leaving);
            job.handle(at(0), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Signal(9) });
        }
        let generation = 2 + u64::from(is_excluded);
        assert_eq!(newest(&mut job), Some(membership(generation, &[1, 2, 4], true)));
        deliver(&mut job, 1, formed(generation, 3, &[(0, 12)]));
        assert_eq!(newest(&mut job), Some(membership(generation + 1, &[1, 2], false)));
        deliver(&mut job, 1, formed(generation + 1, 3, &[(0, 12)]));
        assert_eq!(released(&mut job), [4]);
    }
}

#[test]
fn a_leaver_with_a_deadline_is_released_before_it_though_no_group_has_formed() {
    let mut job = trained(2, false);
    deliver(&mut job, 2, WorkerMessage::Leaving);
    job.handle_timeout(at(9999));
    assert_eq!(released(&mut job), [0; 0]);
    job.handle_timeout(at(10_000));
    assert_eq!(released(&mut job), [2]);
}

#[test]
fn a_job_that_stops_or_is_suspended_keeps_the_reserve_until_the_group_has_formed() {
    for event in [Event::Stop, Event::Suspend] {
        let is_stopping = event == Event::Stop;
        let every = CheckpointEvery::Time(std::time::Duration::from_secs(60));
        let kept = CheckpointSpec { dir: "/c".into(), every, keep: 3, exclusive: false };
        let spec = JobSpec {
            num_workers: 2,
            options: WorkerOptions { checkpoints: Some(kept), ..spec().options },
            ..spec()
        };
        let mut job = started(spec, &[80]);
        deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
        scale(&mut job, 1);
        actions(&mut job);
        job.handle(at(0), event);
        let sent = actions(&mut job);
        let drain =
            |worker| Action::Send { worker: WorkerId(worker), message: MasterMessage::Drain };
        let drained = [1, 2].map(|worker| sent.contains(&drain(worker)));
        assert_eq!(drained, [is_stopping; 2], "{sent:?}");
        lose(&mut job, 0, 1);
        assert_eq!(newest(&mut job), Some(membership(3, &[2], true)));
        deliver(&mut job, 2, formed(3, 3, &[(0, 12)]));
        let suspends = Action::Send { worker: WorkerId(2), message: MasterMessage::Suspend };
        assert_eq!(actions(&mut job).contains(&suspends), !is_stopping);
    }
}

#[test]
fn the_next_master_knows_the_reserve_by_those_that_return() {
    for has_formed in [false, true] {
        let mut job = trained(2, false);
        scale(&mut job, 1);
        let known = newest(&mut job);
        let mut job = Job::restore(job.to_persisted(), at(1000)).unwrap();
        let resume = |worker| Resume {
            worker: WorkerId(worker),
            membership: known.clone(),
            parameters: Some(10),
            holds_state: true,
        };
        reconnect_as(&mut job, 1010, resume(2));
        deliver(&mut job, 2, returned(3));
        if has_formed {
            reconnect_as(&mut job, 1010, resume(1));
            deliver(&mut job, 1, returned(3));
            deliver(&mut job, 1, formed(2, 3, &[(0, 12)]));
            assert_eq!(released(&mut job), [2]);
        } else {
            job.handle(at(1010), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Unknown });
            assert_eq!(newest(&mut job), Some(membership(3, &[2], true)));
        }
    }
}
