//! Members whose trainer thread does not return.

use std::time::Duration;

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{Evaluated, Generation, WorkerId};

use super::super::*;
use super::directed::{actions, at, committed, connect, finished, formed, published, started};
use super::takeover::{reconnect, reconnect_as, returned};
use crate::job::testing::spec;

fn job(workers: u32, step_timeout: Option<u64>) -> Job {
    let spec = JobSpec {
        num_workers: workers,
        step_timeout: step_timeout.map(Duration::from_secs),
        options: WorkerOptions { worker_timeout: Some(Duration::from_secs(1)), ..spec().options },
        ..spec()
    };
    started(spec, &[40])
}

fn validation(every: Option<u64>) -> ValidationSpec {
    ValidationSpec {
        data: "v".into(),
        every,
        metric: "loss".into(),
        highest: false,
        patience: None,
        split: None,
        export_best: None,
    }
}

fn deliver(job: &mut Job, ms: u64, worker: u64, message: WorkerMessage) {
    job.handle(at(ms), Event::Message { worker: WorkerId(worker), message });
}

/// Passes the seconds from `from` to `until`. All `workers` send heartbeats; those of `waiting`
/// have waited since the second that is given.
pub(super) fn pass(
    job: &mut Job,
    (from, until): (u64, u64),
    workers: &[u64],
    waiting: &[(u64, u64)],
) {
    for ms in (from * 1000..until * 1000).step_by(50) {
        for &worker in workers {
            let since = waiting.iter().find(|w| w.0 == worker).map(|w| w.1 * 1000);
            let stall = since.map(|since| Stall {
                generation: job.group.generation(),
                operation: 5,
                received: 0,
                sent: 0,
                waits_for_next: false,
                far: [None; 2],
                since: Duration::from_millis(ms.saturating_sub(since)),
            });
            let heartbeat = Heartbeat { stall, ..Heartbeat::default() };
            deliver(job, ms, worker, WorkerMessage::Heartbeat(heartbeat));
        }
        job.handle_timeout(at(ms));
    }
}

/// The workers that were asked for their stacks, and those that were killed.
pub(super) fn asked_and_killed(job: &mut Job) -> (Vec<u64>, Vec<u64>) {
    let (mut asked, mut killed) = (Vec::new(), Vec::new());
    for action in actions(job) {
        match action {
            Action::Send { worker, message: MasterMessage::ReportStacks } => asked.push(worker.0),
            Action::Kill { launch } => killed.push(launch.0),
            _ => {}
        }
    }
    (asked, killed)
}

#[test]
fn a_member_for_which_all_others_wait_too_long_reports_its_stacks_and_is_evicted() {
    let mut job = job(3, Some(30));
    pass(&mut job, (0, 30), &[1, 2, 3], &[(1, 0), (3, 0)]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
    pass(&mut job, (30, 31), &[1, 2, 3], &[(1, 0), (3, 0)]);
    assert_eq!(asked_and_killed(&mut job), (vec![2], vec![]));
    pass(&mut job, (31, 33), &[1, 2, 3], &[(1, 0), (3, 0)]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![2]));
    // A hang is a failure of the program.
    assert_eq!(job.lifecycle.failures(), 1);
    job.handle(at(33_000), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Signal(9) });
    assert_eq!(job.lifecycle.failures(), 1);
    let launched = |a: &Action| matches!(a, Action::Launch { .. });
    assert!(actions(&mut job).iter().any(launched));
    // The repair of the others' state takes a while.
    pass(&mut job, (33, 62), &[1, 3], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
}

#[test]
fn a_member_that_has_reported_its_stacks_is_evicted_at_once() {
    let mut job = job(3, Some(30));
    let report = || WorkerMessage::Report { request: 0, report: Default::default() };
    deliver(&mut job, 0, 2, report());
    pass(&mut job, (0, 31), &[1, 2, 3], &[(1, 0), (3, 0)]);
    assert_eq!(asked_and_killed(&mut job), (vec![2], vec![]));
    deliver(&mut job, 31_000, 2, report());
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![2]));
    assert_eq!(job.lifecycle.failures(), 1);
}

#[test]
fn a_member_that_finishes_its_part_meanwhile_stays() {
    let mut job = job(3, Some(30));
    pass(&mut job, (0, 31), &[1, 2, 3], &[(1, 0), (3, 0)]);
    assert_eq!(asked_and_killed(&mut job).0, [2]);
    deliver(&mut job, 31_000, 1, committed(1, 1, &[(0, 4)]));
    pass(&mut job, (31, 40), &[1, 2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
}

#[test]
fn a_worker_that_trains_alone_is_evicted_as_well() {
    let mut job = job(1, Some(30));
    deliver(&mut job, 0, 1, committed(1, 1, &[(0, 4)]));
    pass(&mut job, (0, 29), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
    pass(&mut job, (29, 34), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![1], vec![1]));
}

#[test]
fn the_default_is_learned_from_the_job_and_not_below_ten_minutes() {
    let mut job = job(1, None);
    pass(&mut job, (0, 3590), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job).0, [0; 0], "no step is known yet");
    for (step, compute_us) in (1..=3).map(|step| (step, 60_000_000)) {
        let WorkerMessage::Committed(mut report) =
            committed(1, step, &[(4 * (step - 1), 4 * step)])
        else {
            unreachable!()
        };
        report.ranks[0].compute_us = compute_us;
        deliver(&mut job, 3_590_000, 1, WorkerMessage::Committed(report));
    }
    // 20 times a minute.
    pass(&mut job, (3590, 4790), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job).0, [0; 0]);
    pass(&mut job, (4790, 4792), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job).0, [1]);
}

#[test]
fn an_evaluation_is_not_a_step() {
    let validation = validation(Some(1));
    let spec = JobSpec {
        num_workers: 1,
        step_timeout: Some(Duration::from_secs(30)),
        options: WorkerOptions {
            worker_timeout: Some(Duration::from_secs(1)),
            validation: Some(validation),
            ..spec().options
        },
        ..spec()
    };
    let mut job = started(spec, &[40]);
    deliver(&mut job, 0, 1, committed(1, 1, &[(0, 4)]));
    pass(&mut job, (0, 600), &[1], &[]);
    let evaluated = Evaluated { step: 1, records: 4, metrics: Default::default() };
    deliver(&mut job, 600_000, 1, WorkerMessage::Evaluated(evaluated, Duration::ZERO));
    assert_eq!(asked_and_killed(&mut job).0, [0; 0]);
    pass(&mut job, (600, 632), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job).0, [1]);
}

#[test]
fn a_worker_that_waits_for_storage_does_not_hang() {
    let mut job = job(1, Some(30));
    let wait =
        WorkerMessage::StorageWait { storage: Some("s3".into()), waited: Duration::from_secs(1) };
    deliver(&mut job, 0, 1, wait);
    pass(&mut job, (0, 100), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job).0, [0; 0]);
}

#[test]
fn a_stop_evicts_a_member_for_which_all_others_wait_before_it_gives_up() {
    let mut job = job(3, None);
    deliver(&mut job, 0, 1, committed(1, 1, &[(0, 4)]));
    job.handle(at(0), Event::Stop);
    let waiting = [(1, 0), (3, 0)];
    pass(&mut job, (0, 5), &[1, 2, 3], &waiting);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
    pass(&mut job, (5, 9), &[1, 2, 3], &waiting);
    assert_eq!(asked_and_killed(&mut job), (vec![2], vec![2]));
    // The others have the whole time to finish.
    pass(&mut job, (9, 16), &[1, 3], &[]);
    assert!(job.lifecycle.is_stopping());
    pass(&mut job, (16, 20), &[1, 3], &[]);
    assert!(!job.lifecycle.is_active());
}

#[test]
fn a_stop_does_not_evict_the_only_member_before_its_time() {
    let mut job = job(1, None);
    deliver(&mut job, 0, 1, committed(1, 1, &[(0, 4)]));
    job.handle(at(0), Event::Stop);
    pass(&mut job, (0, 9), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
}

#[test]
fn a_member_that_hangs_after_the_last_step_is_evicted() {
    let mut job = job(3, Some(30));
    job.spec.options.max_steps = Some(1);
    deliver(&mut job, 0, 1, committed(1, 1, &[(0, 4)]));
    // While no member waits, it may do anything.
    pass(&mut job, (0, 40), &[1, 2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
    pass(&mut job, (40, 74), &[1, 2, 3], &[(1, 40), (3, 40)]);
    assert_eq!(asked_and_killed(&mut job), (vec![2], vec![2]));
    assert_eq!(job.group.members(), [WorkerId(1), WorkerId(3)]);
}

#[test]
fn the_last_evaluation_is_not_a_step() {
    let mut job = job(3, Some(30));
    job.spec.options.validation = Some(validation(None));
    job.spec.options.max_steps = Some(1);
    deliver(&mut job, 0, 1, committed(1, 1, &[(0, 4)]));
    pass(&mut job, (0, 600), &[1, 2, 3], &[(1, 0), (3, 0)]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
}

/// Members 2 and 3, without 1, end the job in generation 2.
fn assert_ends_without_first(mut job: Job, ms: u64) {
    assert_eq!(job.group.members(), [WorkerId(2), WorkerId(3)]);
    [2, 3].into_iter().for_each(|i| deliver(&mut job, ms, i, finished(2, 20, 7)));
    assert_eq!(job.outcome(), Some(Outcome::Completed));
    assert_eq!(job.step(), 20);
}

#[test]
fn a_stop_evicts_the_members_for_whose_final_reports_all_others_wait() {
    let mut job = job(3, None);
    deliver(&mut job, 0, 1, committed(1, 1, &[(0, 4)]));
    job.handle(at(0), Event::Stop);
    pass(&mut job, (0, 9), &[1, 2, 3], &[]);
    [2, 3].into_iter().for_each(|i| deliver(&mut job, 9_000, i, finished(1, 1, 7)));
    // The export of the lowest rank may take longer than the step.
    pass(&mut job, (9, 39), &[1, 2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
    pass(&mut job, (39, 43), &[1, 2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![1], vec![1]));
    assert_ends_without_first(job, 43_000);
}

#[test]
fn a_silent_member_for_whose_final_report_all_others_wait_is_evicted() {
    let mut job = job(3, None);
    [2, 3].into_iter().for_each(|i| deliver(&mut job, 0, i, finished(1, 20, 7)));
    pass(&mut job, (0, 2), &[2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![1]));
    assert_ends_without_first(job, 2_000);
}

#[test]
fn a_stop_without_heartbeats_gives_up_a_member_and_not_the_state() {
    let mut job = job(3, None);
    job.spec.options.worker_timeout = None;
    job.handle(at(0), Event::Stop);
    [2, 3].into_iter().for_each(|i| deliver(&mut job, 0, i, finished(1, 20, 7)));
    job.handle_timeout(at(60_000));
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![1]));
    assert_ends_without_first(job, 60_000);
}

#[test]
fn the_export_at_the_end_of_a_job_is_not_a_step() {
    let mut job = job(3, Some(30));
    [2, 3].into_iter().for_each(|i| deliver(&mut job, 0, i, finished(1, 20, 7)));
    pass(&mut job, (0, 3600), &[1, 2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
    pass(&mut job, (3600, 3603), &[1, 2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![1], vec![1]));
}

#[test]
fn a_final_report_without_an_export_is_judged_as_a_step() {
    let mut job = job(3, Some(30));
    [1, 3].into_iter().for_each(|i| deliver(&mut job, 0, i, finished(1, 20, 7)));
    pass(&mut job, (0, 33), &[1, 2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![2], vec![2]));
}

#[test]
fn an_only_member_that_stands_still_at_links_of_an_earlier_generation_is_evicted() {
    for has_formed in [true, false] {
        let mut job = published(watched(2), &[40]);
        if has_formed {
            deliver(&mut job, 0, 1, formed(1, 0, &[]));
        }
        job.handle(at(0), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Signal(9) });
        actions(&mut job);
        assert_eq!(job.group.members(), [WorkerId(2)]);
        for ms in (0..34_000).step_by(50) {
            let stall = Stall {
                generation: Generation(1),
                operation: 5,
                received: 0,
                sent: 0,
                waits_for_next: false,
                far: [None; 2],
                since: Duration::from_millis(ms),
            };
            let heartbeat = Heartbeat { stall: Some(stall), ..Heartbeat::default() };
            deliver(&mut job, ms, 2, WorkerMessage::Heartbeat(heartbeat));
            job.handle_timeout(at(ms));
        }
        assert_eq!(asked_and_killed(&mut job), (vec![2], vec![2]));
    }
}

/// The job of a master that takes over at second 1, once its members have returned.
fn taken_over(job: &Job, members: &[u64]) -> Job {
    let mut next = Job::restore(job.to_persisted(), at(1000)).unwrap();
    members.iter().for_each(|&i| reconnect(&mut next, 1000, i, 1));
    next
}

#[test]
fn a_member_that_hangs_during_a_take_over_is_evicted_by_the_next_master() {
    let mut job = taken_over(&job(3, Some(30)), &[1, 2, 3]);
    // Those that wait in a step can't report it.
    pass(&mut job, (1, 31), &[1, 2, 3], &[(2, 1), (3, 1)]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
    pass(&mut job, (31, 34), &[1, 2, 3], &[(2, 1), (3, 1)]);
    assert_eq!(asked_and_killed(&mut job), (vec![1], vec![1]));
    [2, 3].into_iter().for_each(|i| deliver(&mut job, 34_000, i, returned(7)));
    let next = job.group.generation().0;
    deliver(&mut job, 34_000, 2, formed(next, 7, &[(0, 28)]));
    assert_eq!((&*job.status(at(34_000)).state, job.step()), ("running", 7));
}

#[test]
fn an_only_member_that_does_not_report_to_the_next_master_gets_longer() {
    let mut job = taken_over(&job(1, Some(30)), &[1]);
    pass(&mut job, (1, 600), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
    pass(&mut job, (600, 605), &[1], &[]);
    assert_eq!(asked_and_killed(&mut job), (vec![1], vec![1]));
}

/// The job, as its master persisted it before it learned that its group had formed.
fn before_it_formed(job: &Job) -> PersistedJob {
    let mut record = job.to_persisted();
    record.formed = false;
    record.launches.iter_mut().for_each(|l| l.holds_state = false);
    record
}

#[test]
fn a_member_that_says_that_it_holds_a_state_is_not_at_its_beginning() {
    let former = job(3, Some(30));
    let mut job = Job::restore(before_it_formed(&former), at(1000)).unwrap();
    for worker in [1, 2, 3].map(WorkerId) {
        let membership = Some(former.group.published().unwrap().clone());
        // One that waits has not reached the end of the repair.
        let holds_state = worker != WorkerId(1);
        reconnect_as(
            &mut job,
            1000,
            Resume { worker, membership, parameters: Some(10), holds_state },
        );
    }
    pass(&mut job, (1, 34), &[1, 2, 3], &[(1, 1), (3, 1)]);
    assert_eq!(asked_and_killed(&mut job), (vec![2], vec![2]));
}

#[test]
fn the_next_master_does_not_take_an_evaluation_or_a_beginning_for_a_step() {
    let waiting = [(1, 1), (3, 1)];
    let mut evaluates = job(3, Some(30));
    evaluates.spec.options.validation = Some(validation(None));
    let begins = Job::restore(before_it_formed(&job(3, Some(30))), at(0)).unwrap();
    for former in [evaluates, begins] {
        let mut job = taken_over(&former, &[1, 2, 3]);
        pass(&mut job, (1, 600), &[1, 2, 3], &waiting);
        assert_eq!(asked_and_killed(&mut job), (vec![], vec![]));
    }
}

fn watched(num_workers: u32) -> JobSpec {
    JobSpec {
        num_workers,
        step_timeout: Some(Duration::from_secs(30)),
        options: WorkerOptions { worker_timeout: Some(Duration::from_secs(1)), ..spec().options },
        ..spec()
    }
}

/// Generation 2 of a job whose lowest rank is killed before it has reported the first group. The
/// other members send heartbeats; they hold a state, or not.
fn without_the_reporter(holds_state: bool) -> Job {
    let mut job = published(watched(3), &[40]);
    for worker in [2, 3] {
        let heartbeat = Heartbeat { holds_state, ..Heartbeat::default() };
        deliver(&mut job, 0, worker, WorkerMessage::Heartbeat(heartbeat));
    }
    job.handle(at(0), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Signal(9) });
    actions(&mut job);
    assert_eq!(job.group.members(), [2, 3].map(WorkerId));
    job
}

#[test]
fn members_say_that_they_hold_a_state_if_the_lowest_rank_dies_before_it_has() {
    let mut job = without_the_reporter(true);
    pass(&mut job, (0, 34), &[2, 3], &[(3, 0)]);
    assert_eq!(asked_and_killed(&mut job), (vec![2], vec![2]));
    let mut job = without_the_reporter(false);
    pass(&mut job, (0, 50), &[2, 3], &[(3, 0)]);
    assert_eq!(asked_and_killed(&mut job), (vec![], vec![]), "it may create the state");
}

#[test]
fn a_joiner_that_awaits_the_end_of_a_hung_members_step_is_not_evicted() {
    for others in [&[][..], &[(1, 0)]] {
        let mut job = job(1 + others.len() as u32, Some(30));
        let hung = others.len() as u64 + 1;
        let joiner = hung + 1;
        job.handle(at(0), Event::Scale((joiner as u32).into()));
        connect(&mut job, joiner);
        deliver(&mut job, 0, joiner, WorkerMessage::Ready { parameters: 10 });
        deliver(&mut job, 0, joiner, WorkerMessage::CaughtUp { step: None });
        actions(&mut job);
        assert!(job.group.members().contains(&WorkerId(joiner)));
        let all: Vec<u64> = (1..=joiner).collect();
        pass(&mut job, (0, 32), &all, others);
        assert_eq!(asked_and_killed(&mut job), (vec![hung], vec![]));
        pass(&mut job, (32, 33), &all, &[]);
        assert_eq!(asked_and_killed(&mut job), (vec![], vec![hung]));
    }
}
