//! Workers whose stream ends while they continue to train.

use elasticdl_proto::{Generation, WorkerId};

use super::super::*;
use super::directed::{
    actions, ask, at, broken, committed, connect, deliver, finished, formed, launch_at, membership,
    memberships, send, started,
};
use super::takeover::{admit, holding, in_order, lease, reconnect, reconnect_with, refused};
use crate::job::testing::dataset;

fn disconnect(job: &mut Job, ms: u64, i: u64) {
    job.handle(at(ms), Event::Disconnected { worker: WorkerId(i) });
}

fn counted(job: &Job) -> u32 {
    job.lifecycle.failures()
}

#[test]
fn a_worker_that_reconnects_keeps_its_id_and_generation() {
    let mut job = started(in_order(2), &[20]);
    disconnect(&mut job, 1, 2);
    assert_eq!(actions(&mut job), []);
    reconnect(&mut job, 50, 2, 1);
    deliver(&mut job, 2, holding(0, &[]));
    assert_eq!(actions(&mut job), [admit(2)]);
    let status = job.status(at(50));
    assert_eq!((&*status.state, status.generation, counted(&job)), ("running", Generation(1), 0));
    deliver(&mut job, 2, ask(1));
    assert_eq!(actions(&mut job), [send(2, lease(&[(0, 1)]))]);
}

#[test]
fn all_streams_may_end_at_once_again_and_again() {
    let mut job = started(in_order(3), &[20]);
    for round in 0..10 {
        let ms = 1000 * round;
        (1..=3).for_each(|i| disconnect(&mut job, ms, i));
        job.handle_timeout(at(ms + 900));
        (1..=3).for_each(|i| reconnect(&mut job, ms + 900, i, 1));
        (1..=3).for_each(|i| deliver(&mut job, i, holding(round, &[])));
        deliver(&mut job, 1, formed(1, round, &[(0, round + 1)]));
        assert_eq!(actions(&mut job), [admit(1), admit(2), admit(3)], "{round}");
    }
    assert_eq!((job.status(at(9900)).generation, job.step(), counted(&job)), (Generation(1), 9, 0));
}

#[test]
fn a_worker_may_reconnect_before_its_master_notices_the_disconnect() {
    let mut job = started(in_order(2), &[20]);
    reconnect(&mut job, 50, 2, 1);
    deliver(&mut job, 2, holding(0, &[]));
    assert_eq!((actions(&mut job), counted(&job)), (vec![admit(2)], 0));
    assert_eq!(job.status(at(50)).workers.len(), 2);
}

#[test]
fn a_worker_without_stream_and_links_is_lost_at_once_in_either_order() {
    for stream_first in [true, false] {
        let mut job = started(in_order(3), &[20]);
        if stream_first {
            disconnect(&mut job, 1, 2);
        }
        deliver(&mut job, 3, broken(1, 2));
        if !stream_first {
            disconnect(&mut job, 1, 2);
        }
        let next = membership(2, &[1, 3], true);
        assert_eq!(memberships(&mut job), [(1, next.clone()), (3, next)], "{stream_first}");
        reconnect(&mut job, 20, 2, 1);
        assert!(refused(&actions(&mut job)));
        job.handle_timeout(at(251));
        assert_eq!(actions(&mut job), [Action::Kill { launch: LaunchId(2) }]);
        assert_eq!(job.summary(at(251)).memberships[1].cause, Cause::Lost);
    }
}

#[test]
fn a_loss_is_published_when_the_disconnected_member_has_returned_or_after_3_s() {
    for returns in [true, false] {
        let mut job = started(in_order(3), &[20]);
        disconnect(&mut job, 0, 2);
        job.handle(at(10), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Signal(9) });
        assert_eq!(actions(&mut job), [launch_at(4, 2)]);
        let members: &[u64] = if returns {
            reconnect(&mut job, 60, 2, 1);
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
fn a_disconnected_group_is_awaited_for_the_master_timeout() {
    let mut job = started(in_order(2), &[20]);
    (1..=2).for_each(|i| disconnect(&mut job, 0, i));
    job.handle_timeout(at(31_999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(32_000));
    let kill = |i| Action::Kill { launch: LaunchId(i) };
    assert_eq!(actions(&mut job), [kill(1), kill(2)]);
}

/// By the lease table, worker 2 holds records 2 to 4. It has trained record 2 in a step, and has
/// never received the lease of record 3.
#[test]
fn leases_that_never_arrived_are_leased_again_once_the_ledger_has_reached_the_workers_step() {
    let mut job = started(in_order(2), &[20]);
    deliver(&mut job, 1, ask(2));
    deliver(&mut job, 2, ask(2));
    let leases = [send(1, lease(&[(0, 1), (1, 2)])), send(2, lease(&[(2, 3), (3, 4)]))];
    assert_eq!(actions(&mut job), leases);
    disconnect(&mut job, 1, 2);
    reconnect(&mut job, 50, 2, 1);
    deliver(&mut job, 2, holding(1, &[]));
    deliver(&mut job, 2, ask(4));
    assert_eq!(actions(&mut job), [admit(2), send(2, lease(&[(4, 5), (5, 6)]))]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 1), (2, 3)]));
    assert_eq!(actions(&mut job), [send(2, lease(&[(3, 4), (6, 7)]))]);
}

/// The reports of the lowest rank after the end of its stream were lost.
#[test]
fn the_lowest_rank_reports_the_whole_ledger_when_it_returns() {
    let mut job = started(in_order(2), &[20]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    disconnect(&mut job, 1, 1);
    reconnect(&mut job, 50, 1, 1);
    deliver(&mut job, 1, holding(3, &[]));
    deliver(&mut job, 1, formed(1, 3, &[(0, 12)]));
    assert_eq!((job.step(), job.status(at(50)).records_counted), (3, 12));
    // Once.
    deliver(&mut job, 1, formed(1, 2, &[(0, 8)]));
    assert_eq!((job.step(), job.status(at(50)).records_counted), (3, 12));
    assert_eq!(memberships(&mut job), []);
}

#[test]
fn an_impossible_holding_fails_the_reconnected_worker() {
    let mut job = started(in_order(2), &[20]);
    deliver(&mut job, 1, ask(2));
    disconnect(&mut job, 1, 2);
    reconnect(&mut job, 50, 2, 1);
    deliver(&mut job, 2, holding(0, &[(1, 2)]));
    assert!(actions(&mut job).contains(&Action::Disconnect { worker: WorkerId(2) }));
    assert_eq!(counted(&job), 1);
}

#[test]
fn joiners_reconnect_too_and_receive_possibly_lost_messages_again() {
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
    assert_eq!(actions(&mut job), [admit(1), send(1, MasterMessage::Describe)]);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(data.clone())));
    disconnect(&mut job, 60, 1);
    actions(&mut job);
    return_unprepared(&mut job, 1);
    assert_eq!(actions(&mut job), [admit(1), send(1, MasterMessage::Prepare(data))]);
    // The worker was ready, and its message may have been lost.
    disconnect(&mut job, 70, 1);
    reconnect(&mut job, 80, 1, 0);
    deliver(&mut job, 1, WorkerMessage::Ready { parameters: 10 });
    job.handle_timeout(at(1100));
    assert_eq!(memberships(&mut job), [(1, membership(1, &[1], false))]);
    assert_eq!(counted(&job), 0);
}

#[test]
fn a_joiner_that_does_not_reconnect_is_replaced_and_delays_no_worker() {
    let mut job = started(JobSpec { max_workers: 4, ..in_order(2) }, &[20]);
    job.handle(at(0), Event::Scale { num_workers: 4 });
    (3..=4).for_each(|i| connect(&mut job, i));
    disconnect(&mut job, 0, 4);
    actions(&mut job);
    deliver(&mut job, 3, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 3, WorkerMessage::CaughtUp { step: 0 });
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1, 2, 3], false));
    job.handle_timeout(at(10_000));
    assert_eq!(actions(&mut job), [Action::Kill { launch: LaunchId(4) }]);
}

#[test]
fn a_disconnected_worker_repeats_its_final_report_when_it_reconnects() {
    let mut job = started(JobSpec { epochs: 2, ..in_order(2) }, &[20]);
    disconnect(&mut job, 0, 2);
    deliver(&mut job, 1, finished(1, 10, 5));
    assert_eq!(&*job.status(at(0)).state, "running");
    reconnect(&mut job, 50, 2, 1);
    deliver(&mut job, 2, holding(10, &[]));
    deliver(&mut job, 2, finished(1, 10, 5));
    assert_eq!(&*job.status(at(50)).state, "ending");
}

#[test]
fn the_wait_for_a_disconnected_member_begins_when_steps_no_longer_show_that_it_is_alive() {
    let mut job = started(JobSpec { epochs: 2, ..in_order(2) }, &[20]);
    disconnect(&mut job, 0, 2);
    let message = finished(1, 10, 5);
    job.handle(at(8000), Event::Message { worker: WorkerId(1), message });
    job.handle_timeout(at(10_999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(11_000));
    assert_eq!(actions(&mut job)[0], Action::Kill { launch: LaunchId(2) });
}

#[test]
fn the_next_master_waits_for_a_disconnected_worker_too() {
    let mut job = started(in_order(2), &[20]);
    disconnect(&mut job, 0, 2);
    let mut job = Job::restore(job.to_persisted(), at(1000)).unwrap();
    reconnect(&mut job, 1010, 1, 1);
    deliver(&mut job, 1, holding(0, &[]));
    job.handle_timeout(at(20_000));
    assert_eq!(memberships(&mut job), []);
    reconnect_with(&mut job, 20_000, 2, Some(membership(1, &[1, 2], true)));
    deliver(&mut job, 2, holding(0, &[]));
    deliver(&mut job, 1, formed(1, 0, &[]));
    assert_eq!((&*job.status(at(20_000)).state, counted(&job)), ("running", 0));
}

#[test]
fn a_waiting_group_gets_at_once_the_records_that_a_reconnected_worker_never_received() {
    let mut job = started(in_order(2), &[20]);
    deliver(&mut job, 1, committed(1, 9, &[(0, 18)]));
    for (worker, answer) in [(1, Some((18, 19))), (2, Some((19, 20))), (1, None)] {
        deliver(&mut job, worker, ask(1));
        let expected: Vec<_> = answer.map(|r| send(worker, lease(&[r]))).into_iter().collect();
        assert_eq!(actions(&mut job), expected);
    }
    disconnect(&mut job, 1, 2);
    reconnect(&mut job, 50, 2, 1);
    deliver(&mut job, 2, holding(9, &[]));
    // Worker 1 still asks; no step can be made without these records, so no report follows.
    assert_eq!(actions(&mut job), [admit(2), send(1, lease(&[(19, 20)]))]);
}
