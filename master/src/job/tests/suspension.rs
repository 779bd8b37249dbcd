//! Jobs that the user suspends and resumes.

use std::time::Duration;

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{Generation, WorkerId};

use super::super::*;
use super::directed::{
    actions, at, committed, connect, deliver, finished, formed, launch, launch_at, lose, started,
};
use super::takeover::{reconnect, returned};
use crate::job::testing::{dataset, spec};

fn with_checkpoints(num_workers: u32) -> JobSpec {
    let every = CheckpointEvery::Time(Duration::from_secs(60));
    let kept = CheckpointSpec { dir: "/c".into(), every, keep: 3, exclusive: false };
    JobSpec {
        num_workers,
        max_workers: num_workers,
        restart_without_checkpoint: false,
        options: WorkerOptions { checkpoints: Some(kept), ..spec().options },
        ..spec()
    }
}

fn state(job: &Job) -> String {
    job.status(at(0)).state.into_owned()
}

fn asked_to_suspend(actions: &[Action]) -> Vec<u64> {
    let asked = actions.iter().filter_map(|action| match action {
        Action::Send { worker, message: MasterMessage::Suspend } => Some(worker.0),
        _ => None,
    });
    asked.collect()
}

fn released(actions: &[Action]) -> Vec<u64> {
    let released = actions.iter().filter_map(|action| match action {
        Action::Send { worker, message: MasterMessage::Shutdown { .. } } => Some(worker.0),
        _ => None,
    });
    released.collect()
}

fn launches(actions: &[Action]) -> Vec<u64> {
    let launches = actions.iter().filter_map(|action| match action {
        Action::Launch { launch, .. } => Some(launch.0),
        _ => None,
    });
    launches.collect()
}

/// The member reports that the group has ended with a checkpoint of `step`.
fn end_with_checkpoint(job: &mut Job, worker: u64, generation: u64, step: u64) {
    let WorkerMessage::Finished(mut word) = finished(generation, step, 9) else { unreachable!() };
    word.suspended = true;
    word.ledger.epochs_complete = 0;
    deliver(job, worker, WorkerMessage::Finished(word));
}

fn end_process(job: &mut Job, worker: u64) {
    job.handle(at(0), Event::Disconnected { worker: WorkerId(worker) });
    job.handle(at(0), Event::ProcessEnded { launch: LaunchId(worker), exit: Exit::Code(0) });
}

/// A suspended job that had two workers and has committed three steps.
fn suspended() -> Job {
    let mut job = started(with_checkpoints(2), &[20]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
    job.handle(at(0), Event::Suspend);
    let news = CheckpointNews::Saved {
        step: 3,
        name: "step-3".into(),
        bytes: 1,
        times: Default::default(),
    };
    deliver(&mut job, 1, WorkerMessage::Checkpoint(news));
    [1, 2].into_iter().for_each(|worker| end_with_checkpoint(&mut job, worker, 1, 3));
    [1, 2].into_iter().for_each(|worker| end_process(&mut job, worker));
    actions(&mut job);
    job
}

#[test]
fn workers_end_with_a_checkpoint_and_none_is_started_before_the_job_is_resumed() {
    let mut job = started(with_checkpoints(2), &[20]);
    deliver(&mut job, 1, committed(1, 2, &[(0, 8)]));
    let message = committed(1, 3, &[(8, 12)]);
    job.handle(at(900), Event::Message { worker: WorkerId(1), message });
    assert!(job.status(at(1000)).records_per_s > 0.0);
    job.handle(at(0), Event::Suspend);
    let sent = actions(&mut job);
    assert_eq!((asked_to_suspend(&sent), released(&sent)), (vec![1, 2], vec![]));
    assert_eq!(state(&job), "suspending");
    // The group continues until both have written the checkpoint.
    let news = CheckpointNews::Saved {
        step: 3,
        name: "step-3".into(),
        bytes: 1,
        times: Default::default(),
    };
    deliver(&mut job, 1, WorkerMessage::Checkpoint(news));
    end_with_checkpoint(&mut job, 1, 1, 3);
    assert_eq!(released(&actions(&mut job)), [0; 0]);
    end_with_checkpoint(&mut job, 2, 1, 3);
    assert_eq!(released(&actions(&mut job)), [1, 2]);
    end_process(&mut job, 1);
    assert_eq!(state(&job), "suspending");
    end_process(&mut job, 2);
    assert_eq!((launches(&actions(&mut job)), state(&job).as_str()), (vec![], "suspended"));
    assert_eq!(job.status(at(1000)).records_per_s, 0.0);
    job.handle_timeout(at(3_600_000));
    assert_eq!((launches(&actions(&mut job)), job.outcome()), (vec![], None));

    job.handle(at(0), Event::Resume);
    assert_eq!(launches(&actions(&mut job)), [3, 4]);
    [3, 4].into_iter().for_each(|worker| connect(&mut job, worker));
    for worker in [3, 4] {
        deliver(&mut job, worker, WorkerMessage::Ready { parameters: 10 });
    }
    let told = job.status(at(0)).events;
    let told = told.iter().find(|event| event.contains("generation 2: ")).unwrap();
    assert!(told.ends_with("2 workers restart from the newest checkpoint"), "{told}");
    let news = CheckpointNews::Restored {
        step: 3,
        name: "step".into(),
        row_touches: 0,
        differences: String::new(),
    };
    deliver(&mut job, 3, WorkerMessage::Checkpoint(news));
    deliver(&mut job, 3, formed(2, 3, &[(0, 12)]));
    let summary = job.summary(at(0));
    assert_eq!((state(&job).as_str(), summary.state_lost), ("running", None));
    assert_eq!(summary.checkpoints.unwrap().restored[0].lost_steps, 0);
    assert_eq!(summary.workers.restarts, 0, "no worker was replaced");
}

#[test]
fn a_job_whose_checkpoint_cannot_be_written_is_not_suspended() {
    let mut job = started(with_checkpoints(2), &[20]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
    job.handle(at(0), Event::Suspend);
    let failed = |step| {
        WorkerMessage::Checkpoint(CheckpointNews::Failed { step, error: "no space left".into() })
    };
    // The members still write that of the last step.
    deliver(&mut job, 1, failed(2));
    assert_eq!(state(&job), "suspending");
    deliver(&mut job, 1, failed(3));
    assert_eq!((state(&job).as_str(), job.is_suspended()), ("running", false));
    actions(&mut job);
    job.handle(at(0), Event::Suspend);
    assert_eq!(asked_to_suspend(&actions(&mut job)), [1, 2]);
}

#[test]
fn a_job_is_resumed_at_once_unless_its_workers_have_not_ended() {
    let said = |mut job: Job| {
        job.handle(at(0), Event::Resume);
        job.status(at(0)).events.last().unwrap().clone()
    };
    assert!(said(suspended()).ends_with("the job is resumed"));
    let mut job = started(with_checkpoints(2), &[20]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
    job.handle(at(0), Event::Suspend);
    assert!(said(job).contains("as soon as its workers have ended"));
}

#[test]
fn a_job_that_is_complete_before_it_is_suspended_says_so() {
    let mut job = started(with_checkpoints(2), &[12]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
    job.handle(at(0), Event::Suspend);
    [1, 2].into_iter().for_each(|worker| deliver(&mut job, worker, finished(1, 3, 9)));
    let line = "the job completed at step 3, before it could be suspended";
    assert!(job.status(at(0)).events.iter().any(|event| event.ends_with(line)));
}

#[test]
fn workers_without_the_state_are_released_at_once() {
    let mut job = started(JobSpec { max_workers: 4, ..with_checkpoints(2) }, &[20]);
    job.handle(at(0), Event::Scale(4.into()));
    connect(&mut job, 3);
    deliver(&mut job, 3, WorkerMessage::Ready { parameters: 10 });
    actions(&mut job);
    job.handle(at(0), Event::Suspend);
    let sent = actions(&mut job);
    assert_eq!((asked_to_suspend(&sent), released(&sent)), (vec![1, 2], vec![3]));
    assert!(sent.contains(&Action::Kill { launch: LaunchId(4) }), "{sent:?}");
    // One that connects now is not needed.
    connect(&mut job, 4);
    assert_eq!(launches(&actions(&mut job)), [0; 0]);
    // Before the first group there is no state to keep.
    let mut job = Job::new(with_checkpoints(2));
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
    actions(&mut job);
    job.handle(at(0), Event::Suspend);
    let sent = actions(&mut job);
    assert_eq!((asked_to_suspend(&sent), released(&sent)), (vec![], vec![1]));
    assert!(sent.contains(&Action::Kill { launch: LaunchId(2) }), "{sent:?}");
}

/// The report of the lowest rank may be on its way, and its members may have made steps.
#[test]
fn a_group_that_has_not_reported_that_it_has_formed_ends_with_a_checkpoint_too() {
    let mut job = Job::new(with_checkpoints(1));
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
    deliver(&mut job, 1, WorkerMessage::Ready { parameters: 10 });
    actions(&mut job);
    job.handle(at(0), Event::Suspend);
    job.handle(at(0), Event::Resume);
    job.handle(at(0), Event::Suspend);
    let sent = actions(&mut job);
    assert_eq!((asked_to_suspend(&sent), released(&sent)), (vec![], vec![]));
    deliver(&mut job, 1, formed(1, 0, &[]));
    let sent = actions(&mut job);
    assert_eq!((asked_to_suspend(&sent), released(&sent)), (vec![1], vec![]));
}

#[test]
fn a_group_that_loses_a_member_forms_again_below_the_minimum_and_is_asked_again() {
    let mut job = started(JobSpec { min_workers: 3, ..with_checkpoints(3) }, &[20]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
    job.handle(at(0), Event::Suspend);
    actions(&mut job);
    lose(&mut job, 1, 3);
    let exit = Exit::Signal(9);
    job.handle(at(1), Event::ProcessEnded { launch: LaunchId(3), exit });
    assert_eq!(launches(&actions(&mut job)), [0; 0]);
    deliver(&mut job, 1, formed(2, 3, &[(0, 12)]));
    assert_eq!(asked_to_suspend(&actions(&mut job)), [1, 2]);
    [1, 2].into_iter().for_each(|worker| end_with_checkpoint(&mut job, worker, 2, 4));
    [1, 2].into_iter().for_each(|worker| end_process(&mut job, worker));
    assert_eq!((state(&job).as_str(), job.step()), ("suspended", 4));
}

#[test]
fn a_job_that_is_resumed_while_it_is_suspended_starts_its_next_workers_from_the_checkpoint() {
    let mut job = started(with_checkpoints(2), &[20]);
    job.handle(at(0), Event::Suspend);
    job.handle(at(0), Event::Resume);
    assert_eq!(launches(&actions(&mut job)), [0; 0], "both workers are there");
    [1, 2].into_iter().for_each(|worker| end_with_checkpoint(&mut job, worker, 1, 1));
    assert_eq!(released(&actions(&mut job)), [1, 2]);
    [1, 2].into_iter().for_each(|worker| end_process(&mut job, worker));
    assert_eq!(launches(&actions(&mut job)), [3, 4]);
}

#[test]
fn a_resumption_ends_the_pause_of_a_replacement() {
    let mut job = started(JobSpec { min_workers: 1, ..with_checkpoints(2) }, &[20]);
    for launch in [2, 3] {
        actions(&mut job);
        let exit = Exit::Signal(9);
        job.handle(at(0), Event::ProcessEnded { launch: LaunchId(launch), exit });
    }
    assert_eq!(launches(&actions(&mut job)), [0; 0], "it was killed right after its start");
    job.handle(at(0), Event::Suspend);
    job.handle(at(0), Event::Resume);
    assert_eq!(launches(&actions(&mut job)), [4]);
}

#[test]
fn a_training_job_without_checkpoints_is_not_suspended() {
    let mut job = started(spec(), &[20]);
    let obstacle = job.obstacle_to_suspension().unwrap();
    assert!(obstacle.contains("--checkpoint-dir"), "{obstacle}");
    job.handle(at(0), Event::Suspend);
    assert_eq!((actions(&mut job), state(&job).as_str()), (vec![], "running"));
}

#[test]
fn a_job_may_start_suspended() {
    let policies = Policies { starts_suspended: true, ..Policies::default() };
    let mut job = Job::new(JobSpec { policies, ..spec() });
    assert_eq!((actions(&mut job), state(&job).as_str()), (vec![], "suspended"));
    job.handle(at(0), Event::Resume);
    assert_eq!(actions(&mut job), [launch(1)]);
    assert_eq!(state(&job), "starting");
}

#[test]
fn a_suspended_job_stays_suspended_under_its_next_master() {
    let mut next = Job::restore(suspended().to_persisted(), at(1000)).unwrap();
    next.handle_timeout(at(3_600_000));
    assert_eq!((launches(&actions(&mut next)), state(&next).as_str()), (vec![], "suspended"));
    next.handle(at(3_600_000), Event::Resume);
    assert_eq!(launches(&actions(&mut next)), [3, 4]);
    // None of its workers was lost.
    for worker in [3, 4] {
        connect(&mut next, worker);
        deliver(&mut next, worker, WorkerMessage::Ready { parameters: 10 });
    }
    let summary = next.summary(at(3_600_000));
    let second =
        summary.memberships.iter().find(|change| change.generation == Generation(2)).unwrap();
    assert_eq!((second.cause, &*second.lost), (Cause::Leave, &[][..]));
    // A job that was started suspended and resumed is not suspended again.
    let policies = Policies { starts_suspended: true, ..Policies::default() };
    let mut job = Job::new(JobSpec { policies, ..spec() });
    job.handle(at(0), Event::Resume);
    let next = Job::restore(job.to_persisted(), at(1000)).unwrap();
    assert!(!next.is_suspended());
}

#[test]
fn the_next_master_asks_a_group_again_that_was_being_suspended() {
    let mut job = started(with_checkpoints(2), &[20]);
    job.handle(at(0), Event::Suspend);
    let mut next = Job::restore(job.to_persisted(), at(1000)).unwrap();
    actions(&mut next);
    for worker in [1, 2] {
        reconnect(&mut next, 1010, worker, 1);
        deliver(&mut next, worker, returned(2));
    }
    assert_eq!(asked_to_suspend(&actions(&mut next)), [0; 0], "its ledger is not known yet");
    deliver(&mut next, 1, formed(1, 2, &[(0, 8)]));
    assert_eq!(asked_to_suspend(&actions(&mut next)), [1, 2]);
}

#[test]
fn a_member_that_reconnects_is_asked_again() {
    let mut job = started(with_checkpoints(2), &[20]);
    job.handle(at(0), Event::Suspend);
    actions(&mut job);
    job.handle(at(1), Event::Disconnected { worker: WorkerId(2) });
    reconnect(&mut job, 10, 2, 1);
    assert_eq!(asked_to_suspend(&actions(&mut job)), [1, 2]);
}

#[test]
fn a_suspended_job_stops_at_once() {
    let mut job = suspended();
    job.handle(at(0), Event::Stop);
    assert_eq!(actions(&mut job), [Action::End(Outcome::Stopped)]);
}

#[test]
fn a_suspended_job_that_is_stopped_tells_how_its_model_is_exported() {
    let mut job = suspended();
    job.spec.options.work = Work::Train { export: Some("/m".into()) };
    job.handle(at(0), Event::Stop);
    let events = job.status(at(0)).events;
    let told = |event: &String| {
        event.contains("/m is not written") && event.contains("elasticdl convert /c/step")
    };
    assert!(events.iter().any(told), "{events:?}");
}

#[test]
fn an_inference_job_gives_its_shards_to_its_next_workers() {
    let work = Work::Evaluate { model: "m".into() };
    let mut job = started(
        JobSpec { num_workers: 1, options: WorkerOptions { work, ..spec().options }, ..spec() },
        &[20],
    );
    deliver(&mut job, 1, WorkerMessage::LeaseRequest { shards: 1 });
    actions(&mut job);
    job.handle(at(0), Event::Suspend);
    assert_eq!(released(&actions(&mut job)), [1]);
    end_process(&mut job, 1);
    assert_eq!(state(&job), "suspended");
    job.handle(at(0), Event::Resume);
    assert_eq!(actions(&mut job), [launch_at(2, 0)]);
    connect(&mut job, 2);
    deliver(&mut job, 2, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 2, WorkerMessage::LeaseRequest { shards: 1 });
    let leases =
        |action: &Action| matches!(action, Action::Send { message: MasterMessage::Lease(_), .. });
    assert!(actions(&mut job).iter().any(leases), "the first shard is leased again");
}

#[test]
fn a_job_that_has_trained_everything_is_told_to_have_an_unsaved_model_until_it_stops() {
    let mut job = started(spec(), &[20]);
    assert_eq!(job.unsaved_model(), None);
    deliver(&mut job, 1, committed(1, 10, &[(0, 1)]));
    assert_eq!(job.unsaved_model(), None);
    deliver(&mut job, 1, finished(1, 10, 7));
    assert_eq!(job.unsaved_model(), Some(10));
    job.handle(at(100), Event::Stop);
    assert_eq!(job.unsaved_model(), None);
    let asked =
        JobSpec { options: WorkerOptions { max_steps: Some(10), ..spec().options }, ..spec() };
    let mut job = started(asked, &[20]);
    deliver(&mut job, 1, committed(1, 10, &[(0, 1)]));
    assert_eq!(job.unsaved_model(), Some(10));
}
