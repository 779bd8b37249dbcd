//! Directed scenarios, one per test.

use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{Generation, RankStep, RecordRange, WorkerId};

use super::super::*;
use crate::job::testing::{dataset, spec};

/// A job whose first group has formed; worker n is launch n. Its earlier actions are consumed.
pub(super) fn started(spec: JobSpec, files: &[u64]) -> Job {
    let mut job = published(spec, files);
    deliver(&mut job, 1, formed(1, 0, &[]));
    actions(&mut job);
    job
}

/// A job whose first group has not formed yet.
pub(super) fn published(spec: JobSpec, files: &[u64]) -> Job {
    let workers = u64::from(spec.num_workers);
    let mut job = Job::new(spec);
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(files)), None));
    (2..=workers).for_each(|i| connect(&mut job, i));
    (1..=workers).for_each(|i| deliver(&mut job, i, WorkerMessage::Ready { parameters: 10 }));
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
    let rank = |compute_us| RankStep { records: 1, compute_us, ..RankStep::default() };
    let ranks = [5, 6, 7].map(rank).to_vec();
    let generation = Generation(generation);
    WorkerMessage::Committed(Committed {
        generation,
        step,
        ranges,
        loss_sum: records as f64,
        records,
        ranks,
        times: StepTimes { steps: 1, step_us: 3000, reduce_us: 1000 },
        steps_skipped: 0,
        learning_rate: Some(0.5),
        ..Committed::default()
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
        summary: Some("loss 0.5".into()),
        ..Finished::default()
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

/// The pending actions of the job, without log events.
/// The cluster terminates the pod of `launch`, which still runs, at 1 ms.
pub(super) fn leaves(job: &mut Job, launch: u64, cause: ReclaimCause) {
    let (launch, reason) = (LaunchId(launch), format!("{cause:?} by the cluster"));
    job.handle(at(1), Event::LaunchLeaves { launch, cause, reason });
}

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
    Action::Launch { launch: LaunchId(i), slot, avoid: Vec::new() }
}

#[test]
fn nothing_else_is_started_until_the_data_set_is_known() {
    let mut job = Job::new(spec());
    assert_eq!(actions(&mut job), [launch(1)]);
    connect(&mut job, 1);
    let admit = Action::Admit { connection: ConnectionId(1), worker: WorkerId(1) };
    assert_eq!(actions(&mut job), [admit, send(1, MasterMessage::Describe)]);
    // It may take long.
    let told = |job: &Job| {
        let events = job.status(at(0)).events;
        events.iter().filter(|event| event.contains("worker 1 still lists the data")).count()
    };
    for (seconds, times) in [(9, 0), (10, 1), (19, 1), (20, 2), (39, 2), (40, 3)] {
        job.handle_timeout(at(1000 * seconds));
        assert_eq!(told(&job), times, "after {seconds} s");
    }
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
    let prepare = send(1, MasterMessage::Prepare(dataset(&[20])));
    assert_eq!(actions(&mut job), [prepare, launch(2), launch(3)]);
}

#[test]
fn data_that_cannot_be_used_refuses_the_job() {
    for answer in [Err("no such folder".to_owned()), Ok(dataset(&[]))] {
        let mut job = Job::new(spec());
        connect(&mut job, 1);
        deliver(&mut job, 1, WorkerMessage::Described(answer, None));
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
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
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
fn a_loss_is_published_at_once_and_the_next_groups_ledger_replaces_the_masters() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    deliver(&mut job, 1, committed(1, 2, &[(4, 8)]));
    lose(&mut job, 5, 2);
    let next = membership(2, &[1, 3], true);
    assert_eq!(memberships(&mut job), [(1, next.clone()), (3, next)]);
    // Only the lost worker had committed step 2.
    deliver(&mut job, 1, formed(2, 1, &[(0, 4)]));
    assert_eq!((job.step(), job.status(at(5)).records_counted), (1, 4));
    deliver(&mut job, 1, committed(2, 2, &[(4, 8)]));
    assert_eq!((job.step(), job.status(at(5)).records_counted), (2, 8));
    assert_eq!(job.summary(at(5)).records.repeated, 0);
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
fn an_epoch_whose_end_is_undone_ends_again() {
    let spec = JobSpec { num_workers: 2, ..spec() };
    let mut job = started(spec, &[8]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    assert_eq!(job.status(at(0)).epoch, 0);
    deliver(&mut job, 1, committed(1, 2, &[(4, 8)]));
    assert_eq!(job.status(at(0)).epoch, 1);
    lose(&mut job, 5, 1);
    deliver(&mut job, 2, formed(2, 1, &[(0, 4)]));
    assert_eq!(job.status(at(5)).epoch, 0);
    deliver(&mut job, 2, committed(2, 2, &[(4, 8)]));
    let status = job.status(at(5));
    assert_eq!((status.epoch, status.records_counted), (1, 8));
}

/// The group has formed, whatever became of a member since: its state is known.
#[test]
fn a_report_of_a_group_that_has_lost_a_member_counts() {
    let mut job = started(JobSpec { min_workers: 3, ..spec() }, &[20]);
    lose(&mut job, 5, 3);
    let exit = Exit::Signal(9);
    job.handle(at(6), Event::ProcessEnded { launch: LaunchId(3), exit });
    connect(&mut job, 4);
    deliver(&mut job, 4, WorkerMessage::Ready { parameters: 10 });
    assert_eq!(memberships(&mut job).last().unwrap().1, membership(2, &[1, 2, 4], true));
    lose(&mut job, 7, 4);
    deliver(&mut job, 1, formed(2, 3, &[(0, 12)]));
    let status = job.status(at(7));
    assert_eq!((&*status.state, status.step, status.records_counted), ("waiting", 3, 12));
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
    job.handle(at(1), Event::Scale(4.into()));
    connect(&mut job, 3);
    connect(&mut job, 4);
    deliver(&mut job, 3, WorkerMessage::Ready { parameters: 10 });
    assert_eq!(memberships(&mut job), []);
    deliver(&mut job, 3, WorkerMessage::CaughtUp { step: None });
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1, 2, 3], false));
    deliver(&mut job, 4, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 4, WorkerMessage::CaughtUp { step: None });
    assert_eq!(memberships(&mut job), []);
    lose(&mut job, 2, 3);
    assert_eq!(memberships(&mut job)[0].1, membership(3, &[1, 2, 4], true));
    // A message of a former group has no effect.
    deliver(&mut job, 1, formed(2, 9, &[(0, 20)]));
    assert_eq!((job.status(at(2)).step, job.status(at(2)).records_counted), (0, 0));
}

#[test]
fn a_joiner_receives_donors_and_joins_only_after_it_has_fetched() {
    let donors = |ids: &[u64]| MasterMessage::Fetch(membership(0, ids, false).members.to_vec());
    let mut job = started(JobSpec { num_workers: 3, max_workers: 6, ..spec() }, &[20]);
    job.handle(at(1), Event::Scale(4.into()));
    connect(&mut job, 4);
    actions(&mut job);
    deliver(&mut job, 4, WorkerMessage::Ready { parameters: 10 });
    // The lowest rank is the last choice, because it also reports to the master.
    // Each of them serves the joiner only if it is named.
    let named = || MasterMessage::Joiners(vec![WorkerId(4)]);
    let naming = [3, 2, 1].map(|donor| send(donor, named()));
    assert_eq!(actions(&mut job), [&naming[..], &[send(4, donors(&[3, 2, 1]))]].concat());
    lose(&mut job, 2, 3);
    let sent = actions(&mut job);
    assert!(
        sent.contains(&send(1, MasterMessage::Membership(membership(2, &[1, 2], true)))),
        "{sent:?}"
    );
    assert!(sent.contains(&send(4, donors(&[2, 1]))), "{sent:?}");
    assert!([1, 2].iter().all(|donor| sent.contains(&send(*donor, named()))), "{sent:?}");
    // With fewer members than `min_workers` the group waits anyway, so the joiner need not fetch.
    let mut job = started(JobSpec { min_workers: 3, max_workers: 6, ..spec() }, &[20]);
    job.handle(at(1), Event::Scale(4.into()));
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
    deliver(&mut alone, 2, WorkerMessage::CaughtUp { step: None });
    assert_eq!(memberships(&mut alone)[0].1, membership(2, &[1, 2], false));
    // Worker 1 has sent the state, which worker 2 has for certain when a step is committed.
    deliver(&mut alone, 1, formed(2, 3, &[]));
    assert_eq!(memberships(&mut alone), []);
    deliver(&mut alone, 1, committed(2, 4, &[(0, 4)]));
    assert_eq!(memberships(&mut alone)[0].1, membership(3, &[2], false));
}

#[test]
fn a_worker_that_exceeds_a_limit_is_counted_even_if_it_was_told_to_end_and_left() {
    let told = |exit: Exit| {
        let mut job = started(spec(), &[20]);
        deliver(&mut job, 1, WorkerMessage::Leaving);
        job.handle(at(1), Event::ProcessEnded { launch: LaunchId(1), exit });
        job.lifecycle.failures()
    };
    assert_eq!(told(Exit::OverLimit("Evicted: its volume is full".into())), 1);
    let drained = Exit::reclaimed(ReclaimCause::Evicted, "drained");
    for exit in [Exit::Code(0), Exit::Code(143), Exit::Signal(9), drained] {
        assert_eq!(told(exit.clone()), 0, "{exit:?}");
    }
}

#[test]
fn scaling_down_retires_the_youngest_worker() {
    let mut job = started(spec(), &[20]);
    job.handle(at(1), Event::Scale(1.into()));
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
        WorkerMessage::Failed { error: "bad record".into(), ranges, fatal: false, exported: false },
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
fn a_fatal_failure_at_the_start_ends_the_job_at_once() {
    let mut job = Job::new(spec());
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
    (2..=3).for_each(|i| connect(&mut job, i));
    actions(&mut job);
    let error = "x".repeat(10_000);
    deliver(
        &mut job,
        2,
        WorkerMessage::Failed { error, ranges: Vec::new(), fatal: true, exported: false },
    );
    let sent = actions(&mut job);
    assert_eq!(
        sent.iter()
            .filter(|a| matches!(a, Action::Send { message: MasterMessage::Shutdown { .. }, .. }))
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
    let records = RecordsSummary { expected: 40, counted: 40, ..RecordsSummary::default() };
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
fn a_job_that_is_stopped_at_once_has_ended_whatever_state_it_was_in() {
    let end = |outcome| {
        let kill = |i| Action::Kill { launch: LaunchId(i) };
        [kill(1), kill(2), kill(3), Action::End(outcome)]
    };
    for is_stopping in [false, true] {
        let mut job = started(spec(), &[20]);
        if is_stopping {
            job.handle(at(100), Event::Stop);
            actions(&mut job);
        }
        job.handle(at(200), Event::StopNow);
        assert_eq!(actions(&mut job), end(Outcome::Stopped));
        assert_eq!((job.poll_timeout(), &*job.status(at(200)).state), (None, "stopped"));
    }
    // A job that waits for the exits of its workers keeps its outcome.
    let mut job = started(spec(), &[21]);
    let fatal =
        WorkerMessage::Failed { error: "e".into(), ranges: vec![], fatal: true, exported: false };
    [1, 2].into_iter().for_each(|worker| deliver(&mut job, worker, fatal.clone()));
    actions(&mut job);
    job.handle(at(200), Event::StopNow);
    assert_eq!(actions(&mut job), end(Outcome::Failed)[1..]);
}
