//! Workers whose stream ends while they train on.

use elasticdl_proto::{Generation, WorkerId};

use super::super::testing::dataset;
use super::super::*;
use super::directed::{
    actions, ask, at, broken, committed, connect, finished, formed, launch_at, membership,
    memberships, say, send, started,
};
use super::takeover::{admit, come_back, come_back_from, holding, in_order, lease, refused};

fn disconnect(job: &mut Job, ms: u64, i: u64) {
    job.handle(at(ms), Event::Disconnected { worker: WorkerId(i) });
}

fn counted(job: &Job) -> u32 {
    job.restarts.budget().counted
}

#[test]
fn a_worker_that_returns_goes_on_under_its_name_in_the_same_generation() {
    let mut job = started(in_order(2), &[20]);
    disconnect(&mut job, 1, 2);
    assert_eq!(actions(&mut job), []);
    come_back(&mut job, 50, 2, 1);
    say(&mut job, 2, holding(0, &[]));
    assert_eq!(actions(&mut job), [admit(2)]);
    let status = job.status(at(50));
    assert_eq!((status.state, status.generation, counted(&job)), ("running", Generation(1), 0));
    say(&mut job, 2, ask(1));
    assert_eq!(actions(&mut job), [send(2, lease(&[(0, 1)]))]);
}

#[test]
fn all_streams_may_end_at_once_again_and_again() {
    let mut job = started(in_order(3), &[20]);
    for round in 0..10 {
        let ms = 1000 * round;
        (1..=3).for_each(|i| disconnect(&mut job, ms, i));
        job.handle_timeout(at(ms + 900));
        (1..=3).for_each(|i| come_back(&mut job, ms + 900, i, 1));
        (1..=3).for_each(|i| say(&mut job, i, holding(round, &[])));
        say(&mut job, 1, formed(1, round, &[(0, round + 1)]));
        assert_eq!(actions(&mut job), [admit(1), admit(2), admit(3)], "{round}");
    }
    assert_eq!((job.status(at(9900)).generation, job.step, counted(&job)), (Generation(1), 9, 0));
}

#[test]
fn a_worker_may_return_before_its_master_has_noticed() {
    let mut job = started(in_order(2), &[20]);
    come_back(&mut job, 50, 2, 1);
    say(&mut job, 2, holding(0, &[]));
    assert_eq!((actions(&mut job), counted(&job)), (vec![admit(2)], 0));
    assert_eq!(job.status(at(50)).workers.len(), 2);
}

#[test]
fn one_that_has_neither_a_stream_nor_its_links_is_lost_at_once_whatever_comes_first() {
    for stream_first in [true, false] {
        let mut job = started(in_order(3), &[20]);
        if stream_first {
            disconnect(&mut job, 1, 2);
        }
        say(&mut job, 3, broken(1, 2));
        if !stream_first {
            disconnect(&mut job, 1, 2);
        }
        let next = membership(2, &[1, 3], true);
        assert_eq!(memberships(&mut job), [(1, next.clone()), (3, next)], "{stream_first}");
        come_back(&mut job, 20, 2, 1);
        assert!(refused(&actions(&mut job)));
        job.handle_timeout(at(251));
        assert_eq!(actions(&mut job), [Action::Kill { launch: LaunchId(2) }]);
        assert_eq!(job.summary(at(251)).memberships[1].cause, Cause::Lost);
    }
}

#[test]
fn another_members_loss_is_published_when_who_is_disconnected_has_returned_or_has_not_for_3_s() {
    for returns in [true, false] {
        let mut job = started(in_order(3), &[20]);
        disconnect(&mut job, 0, 2);
        job.handle(at(10), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Signal(9) });
        assert_eq!(actions(&mut job), [launch_at(4, 2)]);
        let members: &[u64] = if returns {
            come_back(&mut job, 60, 2, 1);
            &[1, 2]
        } else {
            job.handle_timeout(at(2999));
            assert_eq!(memberships(&mut job), []);
            job.handle_timeout(at(3000));
            &[1]
        };
        let next = membership(2, members, true);
        let expected: Vec<_> = members.iter().map(|&i| (i, next.clone())).collect();
        assert_eq!(memberships(&mut job), expected);
    }
}

#[test]
fn a_whole_group_without_contact_is_waited_for_as_long_as_it_looks_for_its_master() {
    let mut job = started(in_order(2), &[20]);
    (1..=2).for_each(|i| disconnect(&mut job, 0, i));
    job.handle_timeout(at(31_999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(32_000));
    let kill = |i| Action::Kill { launch: LaunchId(i) };
    assert_eq!(actions(&mut job), [kill(1), kill(2)]);
}

/// Worker 2 holds records 2 to 4 by the master's table. It has put record 2 into a step, and never
/// heard of record 3.
#[test]
fn leases_that_never_arrived_are_given_again_once_the_ledger_has_reached_the_workers_step() {
    let mut job = started(in_order(2), &[20]);
    say(&mut job, 1, ask(2));
    say(&mut job, 2, ask(2));
    let leases = [send(1, lease(&[(0, 1), (1, 2)])), send(2, lease(&[(2, 3), (3, 4)]))];
    assert_eq!(actions(&mut job), leases);
    disconnect(&mut job, 1, 2);
    come_back(&mut job, 50, 2, 1);
    say(&mut job, 2, holding(1, &[]));
    say(&mut job, 2, ask(4));
    assert_eq!(actions(&mut job), [admit(2), send(2, lease(&[(4, 5), (5, 6)]))]);
    say(&mut job, 1, committed(1, 1, &[(0, 1), (2, 3)]));
    assert_eq!(actions(&mut job), [send(2, lease(&[(3, 4), (6, 7)]))]);
}

/// What the lowest rank has reported since its stream ended was lost.
#[test]
fn the_lowest_rank_reports_the_whole_ledger_when_it_returns() {
    let mut job = started(in_order(2), &[20]);
    say(&mut job, 1, committed(1, 1, &[(0, 4)]));
    disconnect(&mut job, 1, 1);
    come_back(&mut job, 50, 1, 1);
    say(&mut job, 1, holding(3, &[]));
    say(&mut job, 1, formed(1, 3, &[(0, 12)]));
    assert_eq!((job.step, job.status(at(50)).records_counted), (3, 12));
    // Once.
    say(&mut job, 1, formed(1, 2, &[(0, 8)]));
    assert_eq!((job.step, job.status(at(50)).records_counted), (3, 12));
    assert_eq!(memberships(&mut job), []);
}

#[test]
fn what_a_returned_worker_cannot_hold_fails_it() {
    let mut job = started(in_order(2), &[20]);
    say(&mut job, 1, ask(2));
    disconnect(&mut job, 1, 2);
    come_back(&mut job, 50, 2, 1);
    say(&mut job, 2, holding(0, &[(1, 2)]));
    assert!(actions(&mut job).contains(&Action::Disconnect { worker: WorkerId(2) }));
    assert_eq!(counted(&job), 1);
}

#[test]
fn newcomers_return_too_and_are_told_again_what_they_may_not_have_heard() {
    let data = dataset(&[20]);
    let mut job = Job::new(in_order(2));
    connect(&mut job, 1);
    disconnect(&mut job, 1, 1);
    actions(&mut job);
    let unprepared = Resume { worker: WorkerId(1), membership: None, parameters: None };
    let return_unprepared = |job: &mut Job, i: u64| {
        let resume = Some(Resume { worker: WorkerId(i), ..unprepared.clone() });
        let (connection, launch, address) =
            (ConnectionId(i), LaunchId(i), super::directed::address(i));
        job.handle(at(50), Event::Connected { connection, launch, address, pid: 1, resume });
    };
    return_unprepared(&mut job, 1);
    assert_eq!(actions(&mut job), [admit(1), send(1, ToWorker::Describe)]);
    say(&mut job, 1, FromWorker::Described(Ok(data.clone())));
    disconnect(&mut job, 60, 1);
    actions(&mut job);
    return_unprepared(&mut job, 1);
    assert_eq!(actions(&mut job), [admit(1), send(1, ToWorker::Prepare(data))]);
    // It was ready, and may have said so to nobody.
    disconnect(&mut job, 70, 1);
    come_back(&mut job, 80, 1, 0);
    say(&mut job, 1, FromWorker::Ready { parameters: 10 });
    job.handle_timeout(at(1100));
    assert_eq!(memberships(&mut job), [(1, membership(1, &[1], false))]);
    assert_eq!(counted(&job), 0);
}

#[test]
fn a_newcomer_that_does_not_return_is_replaced_and_holds_nobody_up() {
    let mut job = started(JobSpec { max_workers: 4, ..in_order(2) }, &[20]);
    job.handle(at(0), Event::Scale { num_workers: 4 });
    (3..=4).for_each(|i| connect(&mut job, i));
    disconnect(&mut job, 0, 4);
    actions(&mut job);
    say(&mut job, 3, FromWorker::Ready { parameters: 10 });
    say(&mut job, 3, FromWorker::CaughtUp { step: 0 });
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1, 2, 3], false));
    job.handle_timeout(at(10_000));
    assert_eq!(actions(&mut job), [Action::Kill { launch: LaunchId(4) }]);
}

#[test]
fn a_disconnected_worker_that_had_finished_says_so_when_it_returns() {
    let mut job = started(JobSpec { epochs: 2, ..in_order(2) }, &[20]);
    disconnect(&mut job, 0, 2);
    say(&mut job, 1, finished(1, 10, 5));
    assert_eq!(job.status(at(0)).state, "running");
    come_back(&mut job, 50, 2, 1);
    say(&mut job, 2, holding(10, &[]));
    say(&mut job, 2, finished(1, 10, 5));
    assert_eq!(job.status(at(50)).state, "ending");
}

#[test]
fn the_next_master_waits_for_a_disconnected_worker_too() {
    let mut job = started(in_order(2), &[20]);
    disconnect(&mut job, 0, 2);
    let mut job = Job::restore(job.to_persisted(), at(1000)).unwrap();
    come_back(&mut job, 1010, 1, 1);
    say(&mut job, 1, holding(0, &[]));
    job.handle_timeout(at(20_000));
    assert_eq!(memberships(&mut job), []);
    come_back_from(&mut job, 20_000, 2, Some(membership(1, &[1, 2], true)));
    say(&mut job, 2, holding(0, &[]));
    say(&mut job, 1, formed(1, 0, &[]));
    assert_eq!((job.status(at(20_000)).state, counted(&job)), ("running", 0));
}
