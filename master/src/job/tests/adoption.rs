//! Another master takes over.

use elasticdl_proto::{Generation, RecordRange, WorkerId};

use super::super::testing::spec;
use super::super::*;
use super::directed::{
    actions, address, ask, at, broken, committed, connect, finished, formed, launch_at, membership,
    memberships, say, send, started,
};

/// The job of another master that knows of this one what it wrote.
fn next_master(job: &Job, ms: u64) -> Job {
    Job::restore(job.record(), at(ms)).unwrap()
}

fn come_back(job: &mut Job, ms: u64, i: u64, generation: u64) {
    let resume = Resume { worker: WorkerId(i), generation: Generation(generation), parameters: Some(10) };
    let (connection, launch, address) = (ConnectionId(i), LaunchId(i), address(i));
    let pid = 100 + i as u32;
    job.handle(at(ms), Event::Connected { connection, launch, address, pid, resume: Some(resume) });
}

fn holding(step: u64, ranges: &[(u64, u64)]) -> FromWorker {
    let ranges = ranges.iter().map(|&(start, end)| RecordRange { epoch: 0, start, end }).collect();
    FromWorker::Holding { step, ranges }
}

fn admit(i: u64) -> Action {
    Action::Admit { connection: ConnectionId(i), worker: WorkerId(i) }
}

fn refused(actions: &[Action]) -> bool {
    matches!(actions, [Action::Refuse { .. }])
}

fn lease(ranges: &[(u64, u64)]) -> ToWorker {
    ToWorker::Lease(ranges.iter().map(|&(start, end)| RecordRange { epoch: 0, start, end }).collect())
}

/// Shards of one record each, in order: what is leased can be foretold.
fn in_order(num_workers: u32) -> JobSpec {
    JobSpec { num_workers, shuffle: false, ..spec() }
}

#[test]
fn a_group_is_taken_over_in_its_generation_and_nothing_that_it_holds_is_leased_again() {
    let mut job = next_master(&started(in_order(2), &[8]), 1000);
    assert_eq!((actions(&mut job), job.status(at(1000)).state), (vec![], "resuming"));
    come_back(&mut job, 1010, 1, 1);
    say(&mut job, 1, holding(2, &[(4, 5)]));
    say(&mut job, 1, formed(1, 2, &[(0, 2)]));
    say(&mut job, 1, ask(4));
    come_back(&mut job, 1020, 2, 1);
    assert_eq!(actions(&mut job), [admit(1), admit(2)]);
    // Worker 2 is a step ahead of what is known, so nobody knows where the records of that step are.
    say(&mut job, 2, holding(3, &[(5, 6)]));
    assert_eq!((actions(&mut job), job.status(at(1020)).state), (vec![], "resuming"));
    say(&mut job, 1, committed(1, 3, &[(2, 4)]));
    assert_eq!(actions(&mut job), [send(1, lease(&[(6, 7)]))]);
    assert_eq!((job.status(at(1020)).state, job.status(at(1020)).generation), ("running", Generation(1)));
    assert_eq!(job.summary(at(1020)).memberships.len(), 1);
}

/// The lowest rank alone has committed step 1, and is lost with it.
#[test]
fn records_of_a_step_that_is_undone_are_still_those_of_who_holds_them() {
    let mut job = next_master(&started(in_order(2), &[8]), 1000);
    come_back(&mut job, 1010, 1, 1);
    come_back(&mut job, 1010, 2, 1);
    say(&mut job, 1, holding(1, &[]));
    say(&mut job, 1, formed(1, 1, &[(0, 4)]));
    say(&mut job, 2, holding(0, &[(2, 4)]));
    assert_eq!(job.status(at(1010)).state, "running");
    job.handle(at(1020), Event::Disconnected { worker: WorkerId(1) });
    say(&mut job, 2, formed(2, 0, &[]));
    actions(&mut job);
    say(&mut job, 2, ask(8));
    let free = [(0, 1), (1, 2)];
    assert_eq!(actions(&mut job), [send(2, lease(&free))]);
    assert_eq!(job.status(at(1020)).workers[0].leased_records, 4);
}

#[test]
fn who_does_not_come_back_in_time_is_lost() {
    let mut job = next_master(&started(in_order(3), &[20]), 1000);
    come_back(&mut job, 1010, 1, 1);
    come_back(&mut job, 1020, 3, 1);
    say(&mut job, 1, broken(1, 2));
    job.handle_timeout(at(1500));
    assert_eq!(memberships(&mut job), []);
    assert_eq!(job.poll_timeout(), Some(at(4000)));
    job.handle_timeout(at(4000));
    let next = membership(2, &[1, 3], true);
    let kill = Action::Kill { launch: LaunchId(2) };
    let told = [send(1, ToWorker::Membership(next.clone())), send(3, ToWorker::Membership(next))];
    assert_eq!(actions(&mut job), [vec![kill], told.to_vec()].concat());
    come_back(&mut job, 4001, 2, 1);
    assert!(refused(&actions(&mut job)));
}

#[test]
fn whose_process_has_ended_is_lost_at_once_and_not_counted() {
    let mut job = next_master(&started(in_order(3), &[20]), 1000);
    job.handle(at(1000), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Unknown });
    assert_eq!(actions(&mut job), [launch_at(4, 1)]);
    come_back(&mut job, 1010, 1, 1);
    come_back(&mut job, 1020, 3, 1);
    let next = membership(2, &[1, 3], true);
    assert_eq!(memberships(&mut job), [(1, next.clone()), (3, next)]);
    assert_eq!(job.restarts.counted(), 0);
}

#[test]
fn newcomers_are_refused_and_replaced_and_names_are_not_used_again() {
    let mut job = started(in_order(2), &[20]);
    job.handle(at(1), Event::Scale { num_workers: 3 });
    connect(&mut job, 3);
    let mut job = next_master(&job, 1000);
    assert_eq!(actions(&mut job), [Action::Kill { launch: LaunchId(3) }]);
    come_back(&mut job, 1010, 3, 0);
    assert!(refused(&actions(&mut job)));
    job.handle(at(1020), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Unknown });
    assert_eq!(actions(&mut job), [launch_at(4, 2)]);
    connect(&mut job, 4);
    assert_eq!(actions(&mut job)[0], Action::Admit { connection: ConnectionId(4), worker: WorkerId(4) });
    assert_eq!(job.restarts.counted(), 0);
}

#[test]
fn a_worker_whose_stream_broke_while_its_master_lives_was_given_up() {
    let mut job = started(in_order(2), &[20]);
    job.handle(at(1), Event::Disconnected { worker: WorkerId(2) });
    actions(&mut job);
    come_back(&mut job, 2, 2, 1);
    assert!(refused(&actions(&mut job)));
    // And the next master knows.
    let mut job = next_master(&job, 1000);
    assert_eq!(actions(&mut job)[0], Action::Kill { launch: LaunchId(2) });
    come_back(&mut job, 1010, 2, 1);
    assert!(refused(&actions(&mut job)));
}

#[test]
fn a_membership_that_not_all_have_heard_of_is_told_again() {
    let mut job = started(in_order(3), &[20]);
    job.handle(at(1), Event::Disconnected { worker: WorkerId(2) });
    let second = membership(2, &[1, 3], true);
    let mut job = next_master(&job, 1000);
    actions(&mut job);
    come_back(&mut job, 1010, 1, 2);
    come_back(&mut job, 1010, 3, 1);
    assert_eq!(actions(&mut job), [admit(1), admit(3), send(3, ToWorker::Membership(second))]);
}

#[test]
fn a_record_that_is_older_than_the_group_takes_nobody_over_and_no_generation_is_used_twice() {
    let old = started(in_order(1), &[20]);
    let mut job = next_master(&old, 1000);
    come_back(&mut job, 1010, 1, 7);
    assert!(refused(&actions(&mut job)));
    job.handle(at(1020), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Unknown });
    connect(&mut job, 2);
    say(&mut job, 2, FromWorker::Ready { parameters: 10 });
    assert_eq!(memberships(&mut job), [(2, membership(8, &[2], true))]);
}

#[test]
fn what_a_worker_cannot_hold_fails_it() {
    for wrong in [[(0, 4), (19, 21)], [(0, 4), (3, 5)]] {
        let mut job = next_master(&started(in_order(2), &[20]), 1000);
        come_back(&mut job, 1010, 1, 1);
        come_back(&mut job, 1010, 2, 1);
        say(&mut job, 2, holding(0, &wrong));
        assert!(actions(&mut job).contains(&Action::Disconnect { worker: WorkerId(2) }), "{wrong:?}");
    }
    let mut job = next_master(&started(in_order(2), &[20]), 1000);
    come_back(&mut job, 1010, 1, 1);
    come_back(&mut job, 1010, 2, 1);
    say(&mut job, 1, holding(0, &[(0, 4)]));
    say(&mut job, 2, holding(0, &[(3, 5)]));
    assert!(actions(&mut job).contains(&Action::Disconnect { worker: WorkerId(2) }));
}

#[test]
fn fewer_workers_are_wanted_before_all_are_back() {
    let mut job = next_master(&started(in_order(3), &[20]), 1000);
    job.handle(at(1001), Event::Scale { num_workers: 2 });
    assert_eq!(actions(&mut job), []);
    (1..=3).for_each(|i| come_back(&mut job, 1010, i, 1));
    (1..=3).for_each(|i| say(&mut job, i, holding(0, &[])));
    say(&mut job, 1, formed(1, 0, &[]));
    let next = membership(2, &[1, 2], false);
    assert_eq!(memberships(&mut job), [(1, next.clone()), (2, next.clone()), (3, next)]);
}

#[test]
fn a_job_that_was_over_ends_under_the_next_master_as_it_would_have() {
    let mut job = started(JobSpec { epochs: 2, ..in_order(1) }, &[20]);
    say(&mut job, 1, finished(1, 10, 5));
    assert_eq!(job.status(at(0)).state, "ending");
    let mut next = next_master(&job, 1000);
    assert_eq!(actions(&mut next), [Action::Kill { launch: LaunchId(1) }, Action::End(Outcome::Completed)]);
    job.handle(at(1000), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Code(0) });
    assert_eq!(next.summary(at(1000)), job.summary(at(1000)));
}

#[test]
fn a_group_that_has_finished_says_so_again() {
    let mut job = started(JobSpec { epochs: 2, ..in_order(2) }, &[20]);
    say(&mut job, 1, finished(1, 10, 5));
    let mut job = next_master(&job, 1000);
    for i in 1..=2 {
        come_back(&mut job, 1010, i, 1);
        say(&mut job, i, holding(10, &[]));
        say(&mut job, i, finished(1, 10, 5));
    }
    assert_eq!((job.status(at(1010)).state, job.summary(at(1010)).records.missing), ("ending", 0));
}

#[test]
fn a_record_that_cannot_be_true_makes_no_job() {
    let good = started(in_order(2), &[20]).record();
    type Wrong = fn(&mut JobRecord);
    let wrongs: [Wrong; 8] = [
        |r| r.spec.num_workers = 0,
        |r| r.wanted = 9,
        |r| r.dataset = None,
        |r| r.generation = Generation(0),
        |r| r.launches_made = 1,
        |r| r.workers_made = 1,
        |r| r.launches[1].launch = LaunchId(1),
        |r| r.membership.as_mut().unwrap().members[1].0 = WorkerId(1),
    ];
    for (i, wrong) in wrongs.into_iter().enumerate() {
        let mut record = good.clone();
        wrong(&mut record);
        assert!(Job::restore(record, at(0)).is_err(), "{i}");
    }
    assert!(Job::restore(good, at(0)).is_ok());
}
