//! The take-over of a job by a successor master.

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{Generation, WorkerId};

use super::super::*;
use super::directed::{
    actions, address, at, broken, committed, connect, deliver, finished, formed, launch_at, lose,
    membership, memberships, published, send, started,
};
use crate::job::testing::{dataset, spec};

/// The job of a successor master, restored from what this one persisted.
fn next_master(job: &Job, ms: u64) -> Job {
    Job::restore(job.to_persisted(), at(ms)).unwrap()
}

/// A resume of a worker that has received this generation, if any; its members are those that the
/// former job published last.
pub(super) fn reconnect(job: &mut Job, ms: u64, i: u64, generation: u64) {
    let members =
        job.group.published().map_or(vec![], |m| m.members.iter().map(|m| m.0.0).collect());
    let known = (generation > 0).then(|| membership(generation, &members, true));
    reconnect_with(job, ms, i, known);
}

pub(super) fn reconnect_with(job: &mut Job, ms: u64, i: u64, membership: Option<Membership>) {
    reconnect_as(
        job,
        ms,
        Resume { worker: WorkerId(i), membership, parameters: Some(10), holds_state: false },
    );
}

pub(super) fn reconnect_as(job: &mut Job, ms: u64, resume: Resume) {
    let i = resume.worker.0;
    let (connection, launch, address) = (ConnectionId(i), LaunchId(i), address(i));
    let pid = 100 + i as u32;
    job.handle(at(ms), Event::Connected { connection, launch, address, pid, resume: Some(resume) });
}

pub(super) fn returned(step: u64) -> WorkerMessage {
    WorkerMessage::Reconnected { step }
}

pub(super) fn admit(i: u64) -> Action {
    Action::Admit { connection: ConnectionId(i), worker: WorkerId(i) }
}

pub(super) fn refused(actions: &[Action]) -> bool {
    matches!(actions, [Action::Refuse { .. }])
}

pub(super) fn spec_of(num_workers: u32) -> JobSpec {
    JobSpec { num_workers, ..spec() }
}

#[test]
fn a_group_is_taken_over_in_its_generation_once_the_ledger_has_reached_every_member() {
    let mut job = next_master(&started(spec_of(2), &[8]), 1000);
    assert_eq!((actions(&mut job), &*job.status(at(1000)).state), (vec![], "resuming"));
    reconnect(&mut job, 1010, 1, 1);
    deliver(&mut job, 1, returned(2));
    deliver(&mut job, 1, formed(1, 2, &[(0, 2)]));
    reconnect(&mut job, 1020, 2, 1);
    assert_eq!(actions(&mut job), [admit(1), admit(2)]);
    assert_eq!(&*job.status(at(1020)).state, "resuming", "the step of worker 2 is not known");
    // Worker 2 is a step ahead of the known ledger.
    deliver(&mut job, 2, returned(3));
    assert_eq!(&*job.status(at(1020)).state, "resuming");
    deliver(&mut job, 1, committed(1, 3, &[(2, 4)]));
    assert_eq!(actions(&mut job), []);
    let status = job.status(at(1020));
    assert_eq!((&*status.state, status.generation), ("running", Generation(1)));
    assert_eq!((status.step, status.records_counted), (3, 4));
    assert_eq!(job.summary(at(1020)).memberships.len(), 1);
}

/// The stream that carried the report of step 3 is reset.
#[test]
fn a_report_that_is_lost_during_a_take_over_is_made_up_for() {
    let mut job = next_master(&started(spec_of(2), &[8]), 1000);
    reconnect(&mut job, 1010, 1, 1);
    deliver(&mut job, 1, returned(2));
    deliver(&mut job, 1, formed(1, 2, &[(0, 2)]));
    job.handle(at(1020), Event::Disconnected { worker: WorkerId(1) });
    reconnect(&mut job, 1030, 1, 1);
    deliver(&mut job, 1, returned(3));
    deliver(&mut job, 1, formed(1, 3, &[(0, 4)]));
    reconnect(&mut job, 1040, 2, 1);
    deliver(&mut job, 2, returned(3));
    let status = job.status(at(1040));
    assert_eq!((&*status.state, status.step), ("running", 3));
}

/// The former master has noted the first report, or not even that the group had formed.
#[test]
fn the_first_loss_after_a_take_over_is_that_of_the_first_step_or_none() {
    for (is_noted, was_formed) in [(true, true), (false, true), (false, false)] {
        let mut former = match was_formed {
            true => started(spec_of(2), &[8]),
            false => published(spec_of(2), &[8]),
        };
        if is_noted {
            deliver(&mut former, 1, with_losses(committed(1, 1, &[(0, 2)]), 9.0));
        }
        let mut job = next_master(&former, 1000);
        (1..=2).for_each(|i| reconnect(&mut job, 1010, i, 1));
        (1..=2).for_each(|i| deliver(&mut job, i, returned(2)));
        deliver(&mut job, 1, formed(1, 2, &[(0, 4)]));
        deliver(&mut job, 1, with_losses(committed(1, 3, &[(4, 6)]), 5.0));
        let loss = job.summary(at(1020)).loss;
        assert_eq!((loss.first, loss.last), (is_noted.then_some(9.0), Some(5.0)), "{was_formed}");
        assert_eq!(job.to_persisted().begun_with(), Some((0, 0)), "{was_formed}");
    }
}

fn with_losses(report: WorkerMessage, loss: f64) -> WorkerMessage {
    let WorkerMessage::Committed(report) = report else { panic!("{report:?}") };
    let (first_loss, last_loss) = (Some(loss), Some(loss));
    WorkerMessage::Committed(Committed { first_loss, last_loss, ..report })
}

/// Worker 3 had completed a step that the others have not, and leaves.
#[test]
fn the_step_of_a_worker_that_has_left_is_not_waited_for() {
    let mut job = next_master(&started(spec_of(3), &[8]), 1000);
    (1..=3).for_each(|i| reconnect(&mut job, 1010, i, 1));
    (1..=2).for_each(|i| deliver(&mut job, i, returned(2)));
    deliver(&mut job, 3, returned(3));
    deliver(&mut job, 1, formed(1, 2, &[(0, 4)]));
    assert_eq!(&*job.status(at(1010)).state, "resuming");
    deliver(&mut job, 3, WorkerMessage::Leaving);
    assert_eq!(job.group.generation(), Generation(2));
    deliver(&mut job, 1, formed(2, 2, &[(0, 4)]));
    assert_eq!(&*job.status(at(1010)).state, "running");
}

#[test]
fn a_worker_that_reconnects_after_the_group_has_formed_also_holds_its_state() {
    // The master died before the group had formed.
    let mut record = started(spec_of(2), &[20]).to_persisted();
    record.formed = false;
    record.launches.iter_mut().for_each(|l| l.holds_state = false);
    let mut job = Job::restore(record, at(1000)).unwrap();
    reconnect(&mut job, 1010, 1, 1);
    deliver(&mut job, 1, returned(0));
    deliver(&mut job, 1, formed(1, 0, &[]));
    reconnect(&mut job, 1020, 2, 1);
    deliver(&mut job, 2, returned(0));
    actions(&mut job);
    // Only a member that holds the state serves it to a joiner.
    job.handle(at(1030), Event::Scale(3.into()));
    connect(&mut job, 3);
    deliver(&mut job, 3, WorkerMessage::Ready { parameters: 10 });
    let donors = MasterMessage::Fetch(membership(0, &[2, 1], false).members.to_vec());
    assert!(actions(&mut job).contains(&send(3, donors)));
}

/// Only the lowest rank has committed step 1, and it is lost.
#[test]
fn records_of_an_undone_step_are_counted_again() {
    let mut job = next_master(&started(spec_of(2), &[8]), 1000);
    reconnect(&mut job, 1010, 1, 1);
    reconnect(&mut job, 1010, 2, 1);
    deliver(&mut job, 1, returned(1));
    deliver(&mut job, 1, formed(1, 1, &[(0, 4)]));
    deliver(&mut job, 2, returned(0));
    assert_eq!(&*job.status(at(1010)).state, "running");
    lose(&mut job, 1020, 1);
    deliver(&mut job, 2, formed(2, 0, &[]));
    assert_eq!((job.step(), job.status(at(1020)).records_counted), (0, 0));
    deliver(&mut job, 2, committed(2, 1, &[(0, 4)]));
    let records = job.summary(at(1020)).records;
    assert_eq!((records.counted, records.repeated), (4, 0));
}

#[test]
fn a_worker_that_does_not_reconnect_in_time_is_lost() {
    let mut job = next_master(&started(spec_of(3), &[20]), 1000);
    reconnect(&mut job, 1010, 1, 1);
    reconnect(&mut job, 1020, 3, 1);
    deliver(&mut job, 1, broken(1, 2));
    job.handle_timeout(at(1500));
    assert_eq!(memberships(&mut job), []);
    assert_eq!(job.poll_timeout(), Some(at(4000)));
    job.handle_timeout(at(4000));
    let next = membership(2, &[1, 3], true);
    let kill = Action::Kill { launch: LaunchId(2) };
    let told = [
        send(1, MasterMessage::Membership(next.clone())),
        send(3, MasterMessage::Membership(next)),
    ];
    assert_eq!(actions(&mut job), [vec![kill], told.to_vec()].concat());
    reconnect(&mut job, 4001, 2, 1);
    assert!(refused(&actions(&mut job)));
}

#[test]
fn a_worker_whose_process_has_ended_is_lost_at_once_and_not_counted() {
    let mut job = next_master(&started(spec_of(3), &[20]), 1000);
    job.handle(at(1000), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Unknown });
    assert_eq!(actions(&mut job), [launch_at(4, 1)]);
    reconnect(&mut job, 1010, 1, 1);
    reconnect(&mut job, 1020, 3, 1);
    let next = membership(2, &[1, 3], true);
    assert_eq!(memberships(&mut job), [(1, next.clone()), (3, next)]);
    assert_eq!(job.lifecycle.failures(), 0);
}

#[test]
fn workers_that_have_no_model_yet_are_refused_and_replaced_and_ids_are_not_reused() {
    let mut job = started(JobSpec { max_workers: 4, ..spec_of(2) }, &[20]);
    job.handle(at(1), Event::Scale(3.into()));
    connect(&mut job, 3);
    let mut job = next_master(&job, 1000);
    assert_eq!(actions(&mut job), []);
    let (worker, membership) = (WorkerId(3), None);
    let resume = Resume { worker, membership, parameters: None, holds_state: false };
    reconnect_as(&mut job, 1010, resume);
    let done = actions(&mut job);
    assert!(refused(&done[..1]) && done[1..] == [launch_at(4, 2)], "{done:?}");
    job.handle(at(1020), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Code(70) });
    connect(&mut job, 4);
    assert_eq!(actions(&mut job)[0], admit(4));
    assert_eq!(job.lifecycle.failures(), 0);
}

#[test]
fn the_exit_of_a_worker_that_only_the_lost_master_knew_is_no_failure() {
    let mut job = Job::new(spec());
    assert_eq!(actions(&mut job), [launch_at(1, 0)]);
    let record = job.to_persisted();
    connect(&mut job, 1);
    let mut job = Job::restore(record, at(1000)).unwrap();
    reconnect(&mut job, 1010, 1, 0);
    assert!(refused(&actions(&mut job)));
    job.handle(at(1020), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Code(70) });
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (vec![launch_at(2, 0)], 0));
}

#[test]
fn a_membership_that_not_all_members_have_received_is_published_again() {
    let mut job = started(spec_of(3), &[20]);
    lose(&mut job, 1, 2);
    let second = membership(2, &[1, 3], true);
    let mut job = next_master(&job, 1000);
    actions(&mut job);
    reconnect(&mut job, 1010, 1, 2);
    reconnect(&mut job, 1010, 3, 1);
    assert_eq!(actions(&mut job), [admit(1), admit(3), send(3, MasterMessage::Membership(second))]);
}

/// A successor master that resumes from the outdated `old`, and finds the launches that run.
fn late_master(old: &Job, there: &[u64], ms: u64) -> Job {
    let mut record = old.to_persisted();
    let there = there.iter().map(|&i| (LaunchId(i), i as u32 - 1)).collect();
    assert_eq!(record.observe_pods(&there), []);
    Job::restore(record, at(ms)).unwrap()
}

#[test]
fn with_an_outdated_persisted_job_the_newest_membership_that_a_worker_knows_counts() {
    // Worker 2 was lost and worker 4 joined; the persisted job contains neither event.
    let mut job = late_master(&started(spec_of(3), &[20]), &[1, 3, 4], 1000);
    job.handle(at(1000), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Unknown });
    actions(&mut job);
    reconnect(&mut job, 1010, 1, 1);
    assert_eq!(actions(&mut job), [admit(1)]);
    let third = membership(3, &[1, 3, 4], false);
    reconnect_with(&mut job, 1010, 4, Some(third.clone()));
    assert_eq!(actions(&mut job), [send(1, MasterMessage::Membership(third.clone())), admit(4)]);
    reconnect_with(&mut job, 1020, 3, Some(membership(2, &[1, 3], true)));
    assert_eq!(actions(&mut job), [admit(3), send(3, MasterMessage::Membership(third))]);
    [1, 3, 4].iter().for_each(|&i| deliver(&mut job, i, returned(2)));
    deliver(&mut job, 1, formed(3, 2, &[(0, 2)]));
    let status = job.status(at(1020));
    assert_eq!((&*status.state, status.generation, status.step), ("running", Generation(3), 2));
}

#[test]
fn workers_outside_the_newest_membership_leave_and_absent_members_are_lost() {
    let mut job = late_master(&started(spec_of(3), &[20]), &[1, 2, 3], 1000);
    reconnect(&mut job, 1010, 2, 1);
    reconnect_with(&mut job, 1010, 1, Some(membership(2, &[1, 3, 5], false)));
    reconnect(&mut job, 1010, 3, 1);
    let told = memberships(&mut job);
    let second = membership(2, &[1, 3, 5], false);
    // Worker 5 is absent, so the master publishes another generation at once. It skips the
    // generations from 3 on that the former master may have used.
    // Whether worker 2 holds rows of tables is not known yet.
    let next = membership(18, &[1, 3, 2], true);
    let expected = [(2, second.clone()), (3, second)];
    let expected = [&expected[..], &[1, 3, 2].map(|i| (i, next.clone()))].concat();
    assert_eq!(told, expected);
    assert_eq!(
        job.status(at(1010)).workers.iter().find(|w| w.worker.0 == 2).unwrap().state,
        "leaving"
    );
    // No id of the former master is reused.
    job.handle(at(1020), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Code(0) });
    assert!(actions(&mut job).contains(&launch_at(18, 1)));
}

/// Worker 3, which was ahead of the others when it was evicted, does not delay them.
#[test]
fn the_step_of_a_worker_outside_the_newer_group_is_not_waited_for() {
    let of_two = membership(2, &[1, 2], true);
    for out_is_mute in [true, false] {
        let mut job = late_master(&started(spec_of(3), &[20]), &[1, 2, 3], 1000);
        reconnect(&mut job, 1010, 3, 1);
        if !out_is_mute {
            deliver(&mut job, 3, returned(4));
        }
        reconnect_with(&mut job, 1020, 1, Some(of_two.clone()));
        deliver(&mut job, 1, returned(2));
        if out_is_mute {
            deliver(&mut job, 3, returned(4));
        }
        reconnect_with(&mut job, 1030, 2, Some(of_two.clone()));
        deliver(&mut job, 2, returned(2));
        deliver(&mut job, 1, formed(2, 2, &[(0, 4)]));
        assert_eq!(
            (&*job.status(at(1030)).state, job.lifecycle.failures()),
            ("running", 0),
            "{out_is_mute}"
        );
    }
}

#[test]
fn a_membership_reported_after_this_masters_own_is_refused_and_its_generation_is_not_reused() {
    let mut job = late_master(&started(spec_of(2), &[20]), &[1, 2, 3], 1000);
    actions(&mut job);
    reconnect(&mut job, 1010, 1, 1);
    job.handle(at(1010), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Unknown });
    job.handle_timeout(at(4000));
    assert_eq!(memberships(&mut job), [(1, membership(18, &[1], true))]);
    reconnect_with(&mut job, 4010, 3, Some(membership(20, &[1, 2, 3], false)));
    assert!(refused(&actions(&mut job)));
    deliver(&mut job, 1, formed(18, 0, &[]));
    deliver(&mut job, 1, broken(18, 3));
    job.handle_timeout(at(9000));
    assert_eq!(job.status(at(9000)).generation, Generation(21));
}

#[test]
fn a_worker_that_has_joined_since_the_outdated_record_of_a_local_master_stays() {
    let mut record = started(spec_of(2), &[20]).to_persisted();
    (record.launches[1].worker, record.launches[1].joined) = (None, None);
    record.membership = Some(membership(1, &[1], true));
    record.note_outdated(LaunchId(2));
    let mut job = Job::restore(record, at(1000)).unwrap();
    let second = membership(2, &[1, 2], false);
    reconnect_with(&mut job, 1010, 1, Some(second.clone()));
    // It stays too if that master dies as well, having heard of it by another member.
    let mut third = next_master(&job, 2000);
    for (job, ms, left) in [(&mut job, 1010, &[2][..]), (&mut third, 2010, &[1, 2])] {
        actions(job);
        left.iter().for_each(|&i| reconnect_with(job, ms, i, Some(second.clone())));
        assert_eq!(actions(job), left.iter().map(|&i| admit(i)).collect::<Vec<_>>());
    }
}

#[test]
fn a_launch_missing_in_the_persisted_job_is_adopted_or_removed() {
    let old = started(spec_of(2), &[20]);
    let mut record = old.to_persisted();
    let there = [(LaunchId(1), 0), (LaunchId(2), 1), (LaunchId(4), 2)].into();
    assert_eq!(record.observe_pods(&there), []);
    let mut job = Job::restore(record.clone(), at(1000)).unwrap();
    // The launch is unschedulable, so it is not a member, and the master does not wait for it.
    job.handle(
        at(1000),
        Event::LaunchWaits { launch: LaunchId(4), wait: Wait::Capacity("full".into()) },
    );
    reconnect(&mut job, 1010, 1, 1);
    reconnect(&mut job, 1010, 2, 1);
    [1, 2].iter().for_each(|&i| deliver(&mut job, i, returned(0)));
    deliver(&mut job, 1, formed(1, 0, &[]));
    assert_eq!(&*job.status(at(1010)).state, "running");
    connect(&mut job, 4);
    assert!(actions(&mut job).contains(&admit(4)));
    record.launches.retain(|l| l.launch.0 != 2);
    assert_eq!(record.observe_pods(&there), [LaunchId(2)]);
}

#[test]
fn facts_without_another_source_are_durable_before_further_actions() {
    let mut job = Job::new(spec_of(1));
    let first = job.durable_before();
    connect(&mut job, 1);
    assert!(job.version() > first && job.durable_before() == first);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
    let described = job.durable_before();
    assert!(described > first);
    let mut job = started(spec_of(1), &[20]);
    let started = job.durable_before();
    assert!(job.version() > started);
    deliver(&mut job, 1, finished(1, 10, 5));
    assert_eq!((&*job.status(at(0)).state, job.durable_before()), ("ending", job.version()));
}

#[test]
fn a_scale_down_applies_before_all_workers_have_reconnected() {
    let mut job = next_master(&started(spec_of(3), &[20]), 1000);
    job.handle(at(1001), Event::Scale(2.into()));
    assert_eq!(actions(&mut job), []);
    (1..=3).for_each(|i| reconnect(&mut job, 1010, i, 1));
    (1..=3).for_each(|i| deliver(&mut job, i, returned(0)));
    deliver(&mut job, 1, formed(1, 0, &[]));
    let next = membership(2, &[1, 2], false);
    assert_eq!(memberships(&mut job), [(1, next.clone()), (2, next.clone()), (3, next)]);
}

#[test]
fn a_job_that_was_ending_ends_the_same_way_under_the_next_master() {
    let mut job = started(
        JobSpec { options: WorkerOptions { epochs: 2, ..spec_of(1).options }, ..spec_of(1) },
        &[20],
    );
    deliver(&mut job, 1, finished(1, 10, 5));
    assert_eq!(&*job.status(at(0)).state, "ending");
    // Its program has as much time again.
    let mut next = next_master(&job, 1000);
    assert_eq!(actions(&mut next), []);
    next.handle_timeout(at(3000));
    assert_eq!(
        actions(&mut next),
        [Action::Kill { launch: LaunchId(1) }, Action::End(Outcome::Completed)]
    );
    let mut other = next_master(&job, 1000);
    for job in [&mut job, &mut other] {
        let exit = Exit::Code(0);
        job.handle(at(1000), Event::ProcessEnded { launch: LaunchId(1), exit });
        assert!(actions(job).contains(&Action::End(Outcome::Completed)));
    }
    assert_eq!(next.summary(at(1000)), job.summary(at(1000)));
}

#[test]
fn a_finished_group_repeats_its_final_report() {
    let mut job = started(
        JobSpec { options: WorkerOptions { epochs: 2, ..spec_of(2).options }, ..spec_of(2) },
        &[20],
    );
    deliver(&mut job, 1, finished(1, 10, 5));
    let mut job = next_master(&job, 1000);
    for i in 1..=2 {
        reconnect(&mut job, 1010, i, 1);
        deliver(&mut job, i, returned(10));
        deliver(&mut job, i, finished(1, 10, 5));
    }
    assert_eq!(
        (&*job.status(at(1010)).state, job.summary(at(1010)).records.missing),
        ("ending", 0)
    );
}

#[test]
fn an_inconsistent_persisted_job_is_refused() {
    let good = started(spec_of(2), &[20]).to_persisted();
    type Wrong = fn(&mut PersistedJob);
    let wrongs: [Wrong; 7] = [
        |r| r.spec.num_workers = 0,
        |r| r.wanted = 9,
        |r| r.dataset = None,
        |r| r.generation = Generation(0),
        |r| r.launches_made = 1,
        |r| r.launches[1].launch = LaunchId(1),
        |r| {
            let membership = r.membership.as_mut().unwrap();
            let mut members = membership.members.to_vec();
            members[1].0 = WorkerId(1);
            membership.members = members.into();
        },
    ];
    for (i, wrong) in wrongs.into_iter().enumerate() {
        let mut record = good.clone();
        wrong(&mut record);
        assert!(Job::restore(record, at(0)).is_err(), "{i}");
    }
    assert!(Job::restore(good, at(0)).is_ok());
}

/// A job of two workers whose next master finds none of them, is told step 650 by the former
/// master's status, and is asked to stop.
fn stopped_without_members() -> Job {
    let mut record = started(spec_of(2), &[20]).to_persisted();
    record.note_step(650);
    record.note_step(3);
    let mut job = Job::restore(record, at(1000)).unwrap();
    job.handle(at(2000), Event::Stop);
    actions(&mut job);
    for ms in (3..=28).map(|s| s * 1000) {
        job.handle_timeout(at(ms));
    }
    job
}

#[test]
fn a_stop_waits_for_members_that_have_not_returned() {
    let mut job = stopped_without_members();
    assert_eq!(actions(&mut job), []);
    assert_eq!(&*job.status(at(28_000)).state, "stopping");
    for i in 1..=2 {
        reconnect(&mut job, 28_000, i, 1);
        deliver(&mut job, i, returned(700));
    }
    let drain = |i| send(i, MasterMessage::Drain);
    assert_eq!(actions(&mut job), [admit(1), drain(1), admit(2), drain(2)]);
    for i in 1..=2 {
        deliver(&mut job, i, finished(1, 700, 5));
    }
    let summary = job.summary(at(28_000));
    assert_eq!((summary.steps, summary.records.missing, summary.state_lost), (700, 0, None));
}

#[test]
fn a_stop_that_loses_the_members_tells_which_state_is_lost() {
    // By time, and at the user's request.
    for is_forced in [false, true] {
        let mut job = stopped_without_members();
        if is_forced {
            job.handle(at(28_000), Event::StopNow);
        } else {
            (29..=60).for_each(|s| job.handle_timeout(at(s * 1000)));
        }
        let summary = job.summary(at(60_000));
        assert_eq!(job.outcome(), Some(Outcome::Stopped));
        assert_eq!(
            summary.state_lost,
            Some(StateLoss { count: 1, at_step: 650, steps: 650, records: 0 })
        );
        let records = &summary.records;
        assert_eq!((records.expected, records.counted, records.not_trained), (40, 0, 40));
    }
}

#[test]
fn what_was_counted_is_shown_until_a_group_reports_its_own_ledger() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    deliver(&mut job, 1, committed(1, 2, &[(4, 8)]));
    let mut next = Job::restore(job.to_persisted(), at(10)).unwrap();
    let shown = |job: &Job| {
        let (status, records) = (job.status(at(10)), job.summary(at(10)).records);
        (status.step, status.records_counted, records.counted)
    };
    assert_eq!(shown(&next), (2, 8, 8));
    actions(&mut next);
    next.handle(at(11), Event::StopNow);
    assert_eq!(shown(&next), (2, 8, 8));
    let records = next.summary(at(11)).records;
    assert_eq!((records.missing, records.not_trained), (0, 32));
}
