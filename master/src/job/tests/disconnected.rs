//! Workers whose stream ends while they continue to train.

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{DisconnectedStatus, Generation, WorkerId};

use super::super::*;
use super::directed::{
    actions, at, broken, committed, connect, deliver, finished, formed, launch_at, membership,
    memberships, send, started,
};
use super::takeover::{admit, reconnect, reconnect_as, reconnect_with, refused, returned, spec_of};
use crate::job::testing::dataset;

fn disconnect(job: &mut Job, ms: u64, i: u64) {
    job.handle(at(ms), Event::Disconnected { worker: WorkerId(i) });
}

fn counted(job: &Job) -> u32 {
    job.lifecycle.failures()
}

/// While a member may return, no membership excludes the leaving one: it is released as a member.
#[test]
fn a_member_that_leaves_while_another_one_is_disconnected_is_excluded_when_that_one_is_back() {
    let mut job = started(spec_of(3), &[20]);
    disconnect(&mut job, 0, 3);
    deliver(&mut job, 2, WorkerMessage::Leaving);
    assert_eq!(memberships(&mut job), []);
    job.handle_timeout(at(10_000));
    let shutdown = |action: &Action| {
        let Action::Send { worker: WorkerId(2), message } = action else { return false };
        matches!(message, MasterMessage::Shutdown { .. })
    };
    assert!(actions(&mut job).iter().any(shutdown));
    disconnect(&mut job, 10_001, 2);
    assert_eq!(memberships(&mut job), []);
    reconnect(&mut job, 10_010, 3, 1);
    let next = membership(2, &[1, 3], true);
    assert_eq!(memberships(&mut job), [(1, next.clone()), (3, next)]);
    assert_eq!(counted(&job), 0);
}

#[test]
fn a_worker_that_reconnects_keeps_its_id_and_generation() {
    let mut job = started(spec_of(2), &[20]);
    disconnect(&mut job, 1, 2);
    assert_eq!(actions(&mut job), []);
    reconnect(&mut job, 50, 2, 1);
    deliver(&mut job, 2, returned(0));
    assert_eq!(actions(&mut job), [admit(2)]);
    let status = job.status(at(50));
    assert_eq!((&*status.state, status.generation, counted(&job)), ("running", Generation(1), 0));
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    assert_eq!(job.status(at(50)).records_counted, 4);
}

#[test]
fn a_status_shows_who_is_disconnected_and_since_when() {
    let mut job = started(spec_of(3), &[20]);
    disconnect(&mut job, 1000, 2);
    let shown = |job: &Job, ms| {
        let of = |d: &DisconnectedStatus| (d.worker.0, d.rank, d.disconnected_s);
        job.status(at(ms)).workers_disconnected.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(shown(&job, 3500), [(2, Some(1), 2.5)]);
    let status = job.status(at(3500));
    let others: Vec<_> = status.workers.iter().map(|w| (w.worker.0, &*w.state)).collect();
    assert_eq!((&*status.state, others), ("running", vec![(1, "training"), (3, "training")]));
    reconnect(&mut job, 4000, 2, 1);
    assert_eq!(shown(&job, 4000), []);
    // The next master knows them all, and waits for them.
    disconnect(&mut job, 5000, 3);
    let mut job = Job::restore(job.to_persisted(), at(6000)).unwrap();
    let awaited = [(1, Some(0), 1.0), (2, Some(1), 1.0), (3, Some(2), 1.0)];
    assert_eq!(shown(&job, 7000), awaited);
    reconnect(&mut job, 7000, 1, 1);
    assert_eq!(shown(&job, 7000), awaited[1..]);
    // A lost worker is not shown.
    job.handle(at(7000), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Unknown });
    assert_eq!(shown(&job, 7000), awaited[1..2]);
}

#[test]
fn all_streams_may_end_at_once_again_and_again() {
    let mut job = started(spec_of(3), &[20]);
    for round in 0..10 {
        let ms = 1000 * round;
        (1..=3).for_each(|i| disconnect(&mut job, ms, i));
        job.handle_timeout(at(ms + 900));
        (1..=3).for_each(|i| reconnect(&mut job, ms + 900, i, 1));
        (1..=3).for_each(|i| deliver(&mut job, i, returned(round)));
        deliver(&mut job, 1, formed(1, round, &[(0, round + 1)]));
        assert_eq!(actions(&mut job), [admit(1), admit(2), admit(3)], "{round}");
    }
    assert_eq!((job.status(at(9900)).generation, job.step(), counted(&job)), (Generation(1), 9, 0));
}

#[test]
fn a_worker_may_reconnect_before_its_master_notices_the_disconnect() {
    let mut job = started(spec_of(2), &[20]);
    reconnect(&mut job, 50, 2, 1);
    deliver(&mut job, 2, returned(0));
    assert_eq!((actions(&mut job), counted(&job)), (vec![admit(2)], 0));
    assert_eq!(job.status(at(50)).workers.len(), 2);
}

#[test]
fn a_worker_without_stream_and_links_is_lost_at_once_in_either_order() {
    for stream_first in [true, false] {
        let mut job = started(spec_of(3), &[20]);
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
        let mut job = started(spec_of(3), &[20]);
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
    let mut job = started(spec_of(2), &[20]);
    (1..=2).for_each(|i| disconnect(&mut job, 0, i));
    job.handle_timeout(at(31_999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(32_000));
    let kill = |i| Action::Kill { launch: LaunchId(i) };
    assert_eq!(actions(&mut job), [kill(1), kill(2)]);
}

/// The reports of the lowest rank after the end of its stream were lost.
#[test]
fn the_lowest_rank_reports_the_whole_ledger_when_it_returns() {
    let mut job = started(spec_of(2), &[20]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    disconnect(&mut job, 1, 1);
    reconnect(&mut job, 50, 1, 1);
    deliver(&mut job, 1, returned(3));
    deliver(&mut job, 1, formed(1, 3, &[(0, 12)]));
    assert_eq!((job.step(), job.status(at(50)).records_counted), (3, 12));
    // Once.
    deliver(&mut job, 1, formed(1, 2, &[(0, 8)]));
    assert_eq!((job.step(), job.status(at(50)).records_counted), (3, 12));
    assert_eq!(memberships(&mut job), []);
}

#[test]
fn joiners_reconnect_too_and_receive_possibly_lost_messages_again() {
    let data = dataset(&[20]);
    let mut job = Job::new(spec_of(2));
    connect(&mut job, 1);
    disconnect(&mut job, 1, 1);
    actions(&mut job);
    let unprepared =
        Resume { worker: WorkerId(1), membership: None, parameters: None, holds_state: false };
    reconnect_as(&mut job, 50, unprepared.clone());
    assert_eq!(actions(&mut job), [admit(1), send(1, MasterMessage::Describe)]);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(data.clone()), None));
    disconnect(&mut job, 60, 1);
    actions(&mut job);
    reconnect_as(&mut job, 50, unprepared);
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
    let mut job = started(JobSpec { max_workers: 4, ..spec_of(2) }, &[20]);
    job.handle(at(0), Event::Scale(4.into()));
    (3..=4).for_each(|i| connect(&mut job, i));
    disconnect(&mut job, 0, 4);
    actions(&mut job);
    deliver(&mut job, 3, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 3, WorkerMessage::CaughtUp { step: None });
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1, 2, 3], false));
    job.handle_timeout(at(10_000));
    assert_eq!(actions(&mut job), [Action::Kill { launch: LaunchId(4) }]);
}

#[test]
fn a_disconnected_worker_repeats_its_final_report_when_it_reconnects() {
    let mut job = started(
        JobSpec { options: WorkerOptions { epochs: 2, ..spec_of(2).options }, ..spec_of(2) },
        &[20],
    );
    disconnect(&mut job, 0, 2);
    deliver(&mut job, 1, finished(1, 10, 5));
    assert_eq!(&*job.status(at(0)).state, "running");
    reconnect(&mut job, 50, 2, 1);
    deliver(&mut job, 2, returned(10));
    deliver(&mut job, 2, finished(1, 10, 5));
    assert_eq!(&*job.status(at(50)).state, "ending");
}

#[test]
fn the_wait_for_a_disconnected_member_begins_when_steps_no_longer_show_that_it_is_alive() {
    let mut job = started(
        JobSpec { options: WorkerOptions { epochs: 2, ..spec_of(2).options }, ..spec_of(2) },
        &[20],
    );
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
    let mut job = started(spec_of(2), &[20]);
    disconnect(&mut job, 0, 2);
    let mut job = Job::restore(job.to_persisted(), at(1000)).unwrap();
    reconnect(&mut job, 1010, 1, 1);
    deliver(&mut job, 1, returned(0));
    job.handle_timeout(at(20_000));
    assert_eq!(memberships(&mut job), []);
    reconnect_with(&mut job, 20_000, 2, Some(membership(1, &[1, 2], true)));
    deliver(&mut job, 2, returned(0));
    deliver(&mut job, 1, formed(1, 0, &[]));
    assert_eq!((&*job.status(at(20_000)).state, counted(&job)), ("running", 0));
}
