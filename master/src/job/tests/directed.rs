//! Directed scenarios, one per test.

use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{Generation, RecordRange, WorkerId};

use super::super::*;
use crate::job::testing::{dataset, spec};

/// A job whose first group has formed; worker n is launch n. Its earlier actions are consumed.
pub(super) fn started(spec: JobSpec, files: &[u64]) -> Job {
    let workers = u64::from(spec.num_workers);
    let mut job = Job::new(spec);
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(files))));
    (2..=workers).for_each(|i| connect(&mut job, i));
    (1..=workers).for_each(|i| deliver(&mut job, i, WorkerMessage::Ready { parameters: 10 }));
    deliver(&mut job, 1, formed(1, 0, &[]));
    actions(&mut job);
    job
}

pub(super) fn at(ms: u64) -> Time {
    Time(Duration::from_millis(ms))
}

pub(super) fn connect(job: &mut Job, i: u64) {
    let address = address(i);
    let (connection, launch) = (ConnectionId(i), LaunchId(i));
    job.handle(
        at(0),
        Event::Connected { connection, launch, address, pid: 100 + i as u32, resume: None },
    );
}

pub(super) fn address(i: u64) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], i as u16))
}

pub(super) fn deliver(job: &mut Job, worker: u64, message: WorkerMessage) {
    job.handle(at(0), Event::Message { worker: WorkerId(worker), message });
}

pub(super) fn formed(generation: u64, step: u64, ranges: &[(u64, u64)]) -> WorkerMessage {
    let ranges = ranges.iter().map(|&(start, end)| RecordRange { epoch: 0, start, end }).collect();
    let ledger = LedgerReport { epochs_complete: 0, ranges, repeated: 0 };
    WorkerMessage::Formed { generation: Generation(generation), step, ledger }
}

pub(super) fn committed(generation: u64, step: u64, ranges: &[(u64, u64)]) -> WorkerMessage {
    let ranges: Vec<_> =
        ranges.iter().map(|&(start, end)| RecordRange { epoch: 0, start, end }).collect();
    let records = ranges.iter().map(RecordRange::len).sum();
    let compute_us = vec![5, 6, 7];
    let generation = Generation(generation);
    WorkerMessage::Committed(Committed {
        generation,
        step,
        ranges,
        loss_sum: records as f64,
        records,
        compute_us,
        times: StepTimes { steps: 1, step_us: 3000, reduce_us: 1000 },
        steps_skipped: 0,
    })
}

pub(super) fn finished(generation: u64, step: u64, digest: u64) -> WorkerMessage {
    let ledger = LedgerReport { epochs_complete: 2, ranges: Vec::new(), repeated: 0 };
    WorkerMessage::Finished(Finished {
        generation: Generation(generation),
        step,
        digest,
        ledger,
        records_trained: 40,
        stopped_early: false,
        summary: Some("loss 0.5".into()),
        failure: None,
        suspended: false,
        steps_skipped: 0,
        exported: false,
    })
}

pub(super) fn broken(generation: u64, suspect: u64) -> WorkerMessage {
    let (generation, suspect) = (Generation(generation), Some(WorkerId(suspect)));
    WorkerMessage::Broken { generation, suspect, error: "reset".into(), unreachable: false }
}

/// Ends the worker's stream, and lets a member report its link to the worker as broken. Without
/// another member, the worker's process ends instead.
pub(super) fn lose(job: &mut Job, ms: u64, i: u64) {
    let worker = WorkerId(i);
    job.handle(at(ms), Event::Disconnected { worker });
    let is_member = job.group.members().contains(&worker);
    let other = job.workers.members().map(|(id, _)| id).find(|id| *id != worker);
    if !is_member {
        return;
    }
    match other {
        Some(other) => {
            let message = broken(job.group.generation().0, i);
            job.handle(at(ms), Event::Message { worker: other, message });
        }
        None => {
            job.handle(at(ms), Event::ProcessEnded { launch: LaunchId(i), exit: Exit::Signal(9) })
        }
    }
}

pub(super) fn ask(records: u64) -> WorkerMessage {
    WorkerMessage::LeaseRequest { epoch: 0, records }
}

/// The pending actions of the job, without log events.
pub(super) fn actions(job: &mut Job) -> Vec<Action> {
    let all = std::iter::from_fn(|| job.poll_action());
    all.filter(|a| !matches!(a, Action::Log(_))).collect()
}

pub(super) fn memberships(job: &mut Job) -> Vec<(u64, Membership)> {
    let sent = actions(job).into_iter().filter_map(|action| match action {
        Action::Send { worker, message: MasterMessage::Membership(membership) } => {
            Some((worker.0, membership))
        }
        _ => None,
    });
    sent.collect()
}

pub(super) fn membership(generation: u64, members: &[u64], abort: bool) -> Membership {
    let members = members.iter().map(|&i| (WorkerId(i), address(i))).collect();
    Membership { generation: Generation(generation), members, abort }
}

pub(super) fn send(worker: u64, message: MasterMessage) -> Action {
    Action::Send { worker: WorkerId(worker), message }
}

/// The action that starts `launch` in its own slot.
pub(super) fn launch(i: u64) -> Action {
    launch_at(i, i as u32 - 1)
}

pub(super) fn launch_at(i: u64, slot: u32) -> Action {
    Action::Launch { launch: LaunchId(i), slot }
}

#[test]
fn nothing_else_is_started_until_the_data_set_is_known() {
    let mut job = Job::new(spec());
    assert_eq!(actions(&mut job), [launch(1)]);
    connect(&mut job, 1);
    let admit = Action::Admit { connection: ConnectionId(1), worker: WorkerId(1) };
    assert_eq!(actions(&mut job), [admit, send(1, MasterMessage::Describe)]);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20]))));
    let prepare = send(1, MasterMessage::Prepare(dataset(&[20])));
    assert_eq!(actions(&mut job), [prepare, launch(2), launch(3)]);
}

#[test]
fn data_that_cannot_be_used_refuses_the_job() {
    for answer in [Err("no such folder".to_owned()), Ok(dataset(&[]))] {
        let mut job = Job::new(spec());
        connect(&mut job, 1);
        deliver(&mut job, 1, WorkerMessage::Described(answer));
        job.handle(at(1), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Code(0) });
        assert_eq!(actions(&mut job).last(), Some(&Action::End(Outcome::InvalidInput)));
        let summary = job.summary(at(1));
        assert_eq!((&*summary.state, summary.error.is_some()), ("refused", true));
    }
}

#[test]
fn the_first_group_waits_one_second_for_starting_workers() {
    let mut job = Job::new(spec());
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20]))));
    connect(&mut job, 2);
    job.handle(
        at(50),
        Event::Message { worker: WorkerId(1), message: WorkerMessage::Ready { parameters: 1 } },
    );
    job.handle(
        at(90),
        Event::Message { worker: WorkerId(2), message: WorkerMessage::Ready { parameters: 1 } },
    );
    actions(&mut job);
    assert_eq!(job.poll_timeout(), Some(at(1050)));
    job.handle_timeout(at(1049));
    assert_eq!(memberships(&mut job), []);
    job.handle_timeout(at(1050));
    let first = membership(1, &[1, 2], false);
    assert_eq!(memberships(&mut job), [(1, first.clone()), (2, first)]);
}

#[test]
fn a_loss_is_published_at_once_and_its_leases_return_when_the_next_group_forms() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 2, ask(4));
    assert_eq!(job.status(at(0)).workers[1].leased_records, 4);
    lose(&mut job, 5, 2);
    let next = membership(2, &[1, 3], true);
    assert_eq!(memberships(&mut job), [(1, next.clone()), (3, next)]);
    let forgotten = job.data.leases().unwrap().leases().count();
    assert_eq!(forgotten, 0);
    deliver(&mut job, 1, formed(2, 0, &[]));
    // All 20 records are available again to the surviving workers: 10 shares of 2 records.
    let mut got = 0;
    for step in 1..=10 {
        deliver(&mut job, 1, ask(2));
        let lease = actions(&mut job).into_iter().find_map(|a| match a {
            Action::Send { message: MasterMessage::Lease(ranges), .. } => Some(ranges),
            _ => None,
        });
        let ranges: Vec<_> = lease.unwrap().iter().map(|r| (r.start, r.end)).collect();
        got += ranges.iter().map(|(s, e)| e - s).sum::<u64>();
        deliver(&mut job, 1, committed(2, step, &ranges));
    }
    assert_eq!(got, 20);
}

#[test]
fn a_commit_of_an_old_generation_has_no_effect() {
    let mut job = started(spec(), &[20]);
    lose(&mut job, 5, 2);
    deliver(&mut job, 1, committed(1, 3, &[(0, 4)]));
    assert_eq!(job.status(at(5)).records_counted, 0);
    deliver(&mut job, 1, committed(2, 3, &[(0, 4)]));
    assert_eq!(job.status(at(5)).records_counted, 0);
    deliver(&mut job, 1, formed(2, 0, &[]));
    deliver(&mut job, 1, committed(1, 3, &[(0, 4)]));
    assert_eq!(job.status(at(5)).records_counted, 0);
    deliver(&mut job, 1, committed(2, 3, &[(0, 4)]));
    assert_eq!(job.status(at(5)).records_counted, 4);
}

/// Only worker 1 has committed the last step of the epoch, and it is lost.
#[test]
fn a_request_for_an_epoch_whose_end_is_undone_is_filled() {
    let spec = JobSpec { num_workers: 2, shuffle: false, ..spec() };
    let mut job = started(spec, &[8]);
    deliver(&mut job, 1, ask(2));
    deliver(&mut job, 2, ask(2));
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    deliver(&mut job, 1, ask(4));
    deliver(&mut job, 1, committed(1, 2, &[(4, 8)]));
    assert_eq!(job.status(at(0)).epoch, 1);
    deliver(&mut job, 2, ask(4));
    actions(&mut job);
    lose(&mut job, 5, 1);
    deliver(&mut job, 2, formed(2, 1, &[(0, 4)]));
    let lease = (4..8).map(|start| RecordRange { epoch: 0, start, end: start + 1 }).collect();
    assert_eq!(actions(&mut job).last(), Some(&send(2, MasterMessage::Lease(lease))));
}

#[test]
fn a_dying_process_is_not_killed_before_its_exit_is_known() {
    let mut job = started(spec(), &[20]);
    lose(&mut job, 5, 2);
    assert!(!actions(&mut job).contains(&Action::Kill { launch: LaunchId(2) }));
    job.handle_timeout(at(255));
    assert_eq!(actions(&mut job), [Action::Kill { launch: LaunchId(2) }]);
    job.handle(at(260), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Signal(9) });
    assert_eq!(actions(&mut job), [launch_at(4, 1)]);
    assert_eq!(job.summary(at(260)).workers.restarts, 1);
}

#[test]
fn joiners_wait_while_a_switch_is_in_flight_and_a_loss_takes_them_along() {
    let mut job = started(JobSpec { num_workers: 2, max_workers: 4, ..spec() }, &[20]);
    job.handle(at(1), Event::Scale { num_workers: 4 });
    connect(&mut job, 3);
    connect(&mut job, 4);
    deliver(&mut job, 3, WorkerMessage::Ready { parameters: 10 });
    assert_eq!(memberships(&mut job), []);
    deliver(&mut job, 3, WorkerMessage::CaughtUp { step: 0 });
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1, 2, 3], false));
    deliver(&mut job, 4, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 4, WorkerMessage::CaughtUp { step: 0 });
    assert_eq!(memberships(&mut job), []);
    lose(&mut job, 2, 3);
    assert_eq!(memberships(&mut job)[0].1, membership(3, &[1, 2, 4], true));
    // A message of a former group has no effect.
    deliver(&mut job, 1, formed(2, 9, &[(0, 20)]));
    assert_eq!((job.status(at(2)).step, job.status(at(2)).records_counted), (0, 0));
}

#[test]
fn a_joiner_receives_donors_and_joins_only_after_it_has_fetched() {
    let donors = |ids: &[u64]| MasterMessage::Fetch(membership(0, ids, false).members);
    let mut job = started(JobSpec { num_workers: 3, max_workers: 6, ..spec() }, &[20]);
    job.handle(at(1), Event::Scale { num_workers: 4 });
    connect(&mut job, 4);
    actions(&mut job);
    deliver(&mut job, 4, WorkerMessage::Ready { parameters: 10 });
    // The lowest rank is the last choice, because it also reports to the master.
    assert_eq!(actions(&mut job), [send(4, donors(&[3, 2, 1]))]);
    lose(&mut job, 2, 3);
    let sent = actions(&mut job);
    assert!(
        sent.contains(&send(1, MasterMessage::Membership(membership(2, &[1, 2], true)))),
        "{sent:?}"
    );
    assert!(sent.contains(&send(4, donors(&[2, 1]))), "{sent:?}");
    // With fewer members than `min_workers` the group waits anyway, so the joiner need not fetch.
    let mut job = started(JobSpec { min_workers: 3, max_workers: 6, ..spec() }, &[20]);
    job.handle(at(1), Event::Scale { num_workers: 4 });
    connect(&mut job, 4);
    deliver(&mut job, 4, WorkerMessage::Ready { parameters: 10 });
    actions(&mut job);
    lose(&mut job, 2, 3);
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1, 2, 4], true));
}

#[test]
fn a_broken_link_waits_20_ms_for_the_loss_that_explains_it() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, broken(0, 2));
    deliver(&mut job, 9, broken(1, 2));
    assert!(!job.group.awaits_explanation());
    deliver(&mut job, 1, broken(1, 2));
    assert_eq!(memberships(&mut job), []);
    assert_eq!(job.poll_timeout(), Some(at(20)));
    job.handle_timeout(at(20));
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1, 2, 3], true));
}

#[test]
fn a_worker_blamed_for_three_broken_generations_in_a_row_is_evicted() {
    let mut job = started(spec(), &[20]);
    for generation in 1..=3 {
        deliver(&mut job, 1, broken(generation, 2));
        deliver(&mut job, 3, broken(generation, 2));
        job.handle_timeout(at(20 * generation));
    }
    let wanted = actions(&mut job);
    assert!(wanted.contains(&Action::Kill { launch: LaunchId(2) }), "{wanted:?}");
    assert!(wanted.contains(&send(1, MasterMessage::Membership(membership(4, &[1, 3], true)))));
    assert_eq!(job.summary(at(60)).memberships[3].cause, Cause::Hung);
}

/// NCCL fails by itself, and closed links propagate around the ring.
#[test]
fn no_worker_is_blamed_for_a_failure_that_another_one_reports_as_its_own() {
    let mut job = started(spec(), &[20]);
    for generation in 1..=3 {
        let own = WorkerMessage::Broken {
            generation: Generation(generation),
            suspect: None,
            error: "NCCL failed".into(),
            unreachable: false,
        };
        deliver(&mut job, 1, own);
        deliver(&mut job, 2, broken(generation, 3));
        deliver(&mut job, 3, broken(generation, 1));
        job.handle_timeout(at(20 * generation));
    }
    assert_eq!(memberships(&mut job).last().unwrap().1, membership(4, &[1, 2, 3], true));
    assert_eq!(job.status(at(60)).workers.len(), 3);
}

#[test]
fn a_leaver_leaves_at_a_step_boundary_but_stays_if_only_it_holds_the_state() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, WorkerMessage::Leaving);
    let next = membership(2, &[2, 3], false);
    assert_eq!(memberships(&mut job), [(2, next.clone()), (3, next.clone()), (1, next)]);
    let mut alone = started(JobSpec { num_workers: 1, max_workers: 2, ..spec() }, &[20]);
    deliver(&mut alone, 1, WorkerMessage::Leaving);
    assert_eq!(actions(&mut alone), [launch_at(2, 0)]);
    connect(&mut alone, 2);
    deliver(&mut alone, 2, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut alone, 2, WorkerMessage::CaughtUp { step: 0 });
    assert_eq!(memberships(&mut alone)[0].1, membership(2, &[1, 2], false));
    deliver(&mut alone, 1, formed(2, 3, &[]));
    assert_eq!(memberships(&mut alone)[0].1, membership(3, &[2], false));
}

#[test]
fn scaling_down_retires_the_youngest_worker() {
    let mut job = started(spec(), &[20]);
    job.handle(at(1), Event::Scale { num_workers: 1 });
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1], false));
    job.handle(at(2), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Code(0) });
    assert_eq!(actions(&mut job), []);
    assert_eq!((job.lifecycle.failures(), job.summary(at(2)).workers.restarts), (0, 0));
}

#[test]
fn one_failure_too_many_fails_the_job_with_the_users_error() {
    let mut job = started(JobSpec { max_worker_restarts: 0, ..spec() }, &[6, 14]);
    let ranges = vec![
        RecordRange { epoch: 1, start: 4, end: 8 },
        RecordRange { epoch: 9, start: 0, end: 1 },
    ];
    deliver(
        &mut job,
        2,
        WorkerMessage::Failed { error: "bad record".into(), ranges, fatal: false },
    );
    let summary = job.summary(at(1));
    assert!(summary.error.unwrap().contains("bad record"));
    let failed = |file: &str, start, end| FailedShard {
        worker: WorkerId(2),
        epoch: 1,
        file: file.into(),
        start,
        end,
        error: "bad record".into(),
    };
    assert_eq!(summary.failed_shards, [failed("file-0", 4, 6), failed("file-1", 0, 2)]);
    job.handle_timeout(at(2000));
    assert_eq!(actions(&mut job).last(), Some(&Action::End(Outcome::Failed)));
}

#[test]
fn a_fatal_failure_ends_the_job_at_once() {
    let mut job = started(spec(), &[20]);
    let error = "x".repeat(10_000);
    deliver(&mut job, 2, WorkerMessage::Failed { error, ranges: Vec::new(), fatal: true });
    let sent = actions(&mut job);
    assert_eq!(
        sent.iter()
            .filter(|a| matches!(a, Action::Send { message: MasterMessage::Shutdown(_), .. }))
            .count(),
        3
    );
    assert!(job.summary(at(0)).error.unwrap().len() < 5000);
}

#[test]
fn a_job_is_done_when_every_member_holds_the_same_final_state() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, finished(1, 10, 7));
    deliver(&mut job, 2, finished(1, 10, 7));
    assert_eq!(actions(&mut job), []);
    deliver(&mut job, 3, finished(1, 10, 7));
    for i in 1..=3 {
        lose(&mut job, 9, i);
        job.handle(at(9), Event::ProcessEnded { launch: LaunchId(i), exit: Exit::Code(0) });
    }
    assert_eq!(actions(&mut job).last(), Some(&Action::End(Outcome::Completed)));
    let summary = job.summary(at(9));
    let records = RecordsSummary { expected: 40, counted: 40, missing: 0, repeated: 0 };
    assert_eq!((summary.records, summary.steps, summary.epochs), (records, 10, 2));
    assert_eq!(
        (summary.digest.as_deref(), summary.model_summary.as_deref()),
        (Some("0000000000000007"), Some("loss 0.5"))
    );
}

#[test]
fn diverged_replicas_fail_the_job_with_their_ids() {
    let mut job = started(spec(), &[20]);
    (1..=3).for_each(|i| deliver(&mut job, i, finished(1, 10, i / 3)));
    let error = job.summary(at(0)).error.unwrap();
    assert!(
        error.contains("replica mismatch")
            && error.contains("worker 1")
            && error.contains("worker 3"),
        "{error}"
    );
}

#[test]
fn a_group_that_ends_without_all_records_fails_the_job() {
    let mut job = started(spec(), &[21]);
    let early = |generation| {
        let WorkerMessage::Finished(mut word) = finished(generation, 10, 7) else { unreachable!() };
        word.ledger.epochs_complete = 1;
        WorkerMessage::Finished(word)
    };
    (1..=3).for_each(|i| deliver(&mut job, i, early(1)));
    let summary = job.summary(at(0));
    assert!(summary.error.unwrap().contains("21 records"));
    assert_eq!((summary.records.expected, summary.records.missing), (42, 21));
}

#[test]
fn a_stopped_job_drains_its_members_and_ends_within_10_s() {
    let mut job = started(spec(), &[20]);
    job.handle(at(100), Event::Stop);
    let drains: Vec<_> = (1..=3).map(|i| send(i, MasterMessage::Drain)).collect();
    assert_eq!(actions(&mut job), drains);
    job.handle_timeout(at(10_100));
    let mut end: Vec<_> = (1..=3).map(|i| Action::Kill { launch: LaunchId(i) }).collect();
    end.push(Action::End(Outcome::Stopped));
    assert_eq!(actions(&mut job), end);
    assert_eq!(job.poll_timeout(), None);
}

#[test]
fn a_job_without_members_stops_at_once() {
    let mut job = Job::new(spec());
    job.handle(at(1), Event::Stop);
    let kill = Action::Kill { launch: LaunchId(1) };
    assert_eq!(actions(&mut job), [launch(1), kill, Action::End(Outcome::Stopped)]);
}

#[test]
fn a_launch_without_a_hello_for_a_minute_is_killed_and_counted() {
    let mut job = Job::new(spec());
    job.handle_timeout(at(60_000));
    assert_eq!(actions(&mut job), [launch(1), Action::Kill { launch: LaunchId(1) }]);
    job.handle(at(60_001), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Signal(9) });
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (vec![launch_at(2, 0)], 1));
}

#[test]
fn the_second_failures_replacement_waits_250_ms() {
    let mut job = started(spec(), &[20]);
    job.handle(at(10), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Code(1) });
    assert!(actions(&mut job).contains(&launch_at(4, 1)));
    job.handle(at(20), Event::ProcessEnded { launch: LaunchId(4), exit: Exit::Signal(11) });
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(270));
    assert_eq!(actions(&mut job), [launch_at(5, 1)]);
}

#[test]
fn a_model_of_another_size_is_refused() {
    let mut job = started(spec(), &[20]);
    job.handle(at(1), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Signal(9) });
    connect(&mut job, 4);
    actions(&mut job);
    deliver(&mut job, 4, WorkerMessage::Ready { parameters: 11 });
    let sent = actions(&mut job);
    assert!(matches!(
        &sent[0],
        Action::Send { message: MasterMessage::Shutdown(why), .. } if why.contains("11 parameters")
    ));
    assert_eq!(
        (&sent[1], job.lifecycle.failures()),
        (&Action::Disconnect { worker: WorkerId(4) }, 1)
    );
}

#[test]
fn an_unscheduled_launch_is_not_silent() {
    let mut job = Job::new(spec());
    assert_eq!(actions(&mut job), [launch(1)]);
    job.handle(
        at(0),
        Event::LaunchWaits { launch: LaunchId(1), wait: Wait::Capacity("no room".into()) },
    );
    assert_eq!(job.status(at(0)).events, ["launch 1 waits: no room"]);
    job.handle_timeout(at(3_600_000));
    assert_eq!(actions(&mut job), []);
    // From the moment that it runs, the usual time limit applies.
    job.handle(at(3_600_000), Event::LaunchRuns { launch: LaunchId(1) });
    job.handle(at(3_630_000), Event::LaunchRuns { launch: LaunchId(1) });
    job.handle_timeout(at(3_659_999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(3_660_000));
    assert!(actions(&mut job).contains(&Action::Kill { launch: LaunchId(1) }));
}

#[test]
fn a_reclaimed_launch_is_replaced_and_not_counted() {
    let mut job = started(spec(), &[20]);
    for round in 0..10 {
        let launch = LaunchId(if round == 0 { 1 } else { 3 + round });
        job.handle(
            at(100),
            Event::ProcessEnded { launch, exit: Exit::Reclaimed("preempted".into()) },
        );
        let next = launch_at(4 + round, 0);
        assert!(actions(&mut job).contains(&next), "round {round}");
    }
    assert_eq!(&*job.status(at(100)).state, "running");
}
