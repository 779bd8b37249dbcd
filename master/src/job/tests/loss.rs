//! Lost states, groups that end with a failure, and groups that all members leave.

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{RecordRange, WorkerId};

use super::super::*;
use super::directed::{
    actions, at, committed, connect, deliver, finished, formed, launch_at, started,
};
use crate::job::testing::spec;

/// A job with a single worker, which is also its minimum. Its first checkpoint is due before any
/// state of these tests is lost.
fn alone(checkpoints: bool) -> JobSpec {
    let every = CheckpointEvery::Time(std::time::Duration::from_secs(60));
    let kept = CheckpointSpec { dir: "/c".into(), every, keep: 3, exclusive: false };
    JobSpec {
        num_workers: 1,
        max_workers: 1,
        restart_without_checkpoint: false,
        options: WorkerOptions { checkpoints: checkpoints.then_some(kept), ..spec().options },
        ..spec()
    }
}

/// The group commits three steps when the first checkpoint should long have been written.
fn trains_late(job: &mut Job) {
    let (worker, message) = (WorkerId(1), committed(1, 3, &[(0, 12)]));
    job.handle(at(3_600_000), Event::Message { worker, message });
}

fn lose(job: &mut Job, worker: u64) {
    job.handle(at(0), Event::Disconnected { worker: WorkerId(worker) });
    job.handle(at(0), Event::ProcessEnded { launch: LaunchId(worker), exit: Exit::Signal(9) });
}

/// A new worker joins, after its back-off, and forms the next group at `step`.
fn replaced(job: &mut Job, worker: u64, generation: u64, step: u64) {
    job.handle_timeout(at(1000));
    connect(job, worker);
    deliver(job, worker, WorkerMessage::Ready { parameters: 10 });
    deliver(job, worker, formed(generation, step, &[]));
}

fn ends(job: &mut Job) -> Option<String> {
    let summary = job.summary(at(0));
    actions(job);
    (summary.state == "ending" || summary.state == "failed").then_some(summary.error).flatten()
}

#[test]
fn a_state_without_any_checkpoint_is_lost_with_its_last_worker_at_once() {
    let mut job = started(alone(false), &[20]);
    trains_late(&mut job);
    lose(&mut job, 1);
    let error = ends(&mut job).unwrap();
    assert!(
        error.contains("the state of step 3") && error.contains("--restart-without-checkpoint"),
        "{error}"
    );
    assert_eq!(
        job.summary(at(0)).state_lost,
        Some(StateLoss { count: 1, at_step: 3, steps: 3, records: 12 })
    );
    // Nothing was trained, so nothing is lost.
    let mut job = started(alone(false), &[20]);
    lose(&mut job, 1);
    assert_eq!(ends(&mut job), None);
}

#[test]
fn with_checkpoints_the_next_group_reports_whether_one_existed() {
    for (restored, step, lost) in [(true, 2, false), (true, 0, false), (false, 0, true)] {
        let mut job = started(alone(true), &[20]);
        trains_late(&mut job);
        lose(&mut job, 1);
        assert_eq!(ends(&mut job), None);
        connect(&mut job, 2);
        deliver(&mut job, 2, WorkerMessage::Ready { parameters: 10 });
        let said = job.status(at(0)).events.join("\n");
        assert!(said.contains("restarts from step 0, as the state is lost"), "{said}");
        if restored {
            let news = CheckpointNews::Restored {
                step,
                name: "step".into(),
                row_touches: 0,
                differences: String::new(),
            };
            deliver(&mut job, 2, WorkerMessage::Checkpoint(news));
        }
        deliver(&mut job, 2, formed(2, step, &[]));
        assert_eq!(ends(&mut job).is_some(), lost, "restored: {restored}, at step {step}");
        assert_eq!(job.summary(at(0)).state_lost.is_some(), lost);
    }
}

#[test]
fn a_job_whose_checkpoints_were_removed_says_so() {
    for (written, advice) in [(true, "some were written, and /c must"), (false, "more often")] {
        let mut job = started(alone(true), &[20]);
        if written {
            let news = CheckpointNews::Saved {
                step: 2,
                name: "step-2".into(),
                bytes: 1,
                times: Default::default(),
            };
            deliver(&mut job, 1, WorkerMessage::Checkpoint(news));
        }
        trains_late(&mut job);
        lose(&mut job, 1);
        replaced(&mut job, 2, 2, 0);
        let error = ends(&mut job).unwrap();
        assert!(error.contains(advice), "{error}");
    }
}

#[test]
fn lost_rows_are_told_with_the_touches_that_are_made_again() {
    let rows_lost = |step, row_touches| {
        WorkerMessage::Checkpoint(CheckpointNews::RowsLost { step, shards: 5, row_touches })
    };
    let restored = |step, row_touches| {
        let (name, differences) = ("step".into(), String::new());
        WorkerMessage::Checkpoint(CheckpointNews::Restored { step, name, row_touches, differences })
    };
    let mut job = started(alone(true), &[20]);
    trains_late(&mut job);
    lose(&mut job, 1);
    connect(&mut job, 2);
    deliver(&mut job, 2, WorkerMessage::Ready { parameters: 10 });
    // The first rank is lost before it has read the checkpoint, and the next one says it again.
    for message in [rows_lost(3, 90), rows_lost(3, 90), restored(2, 60), formed(2, 2, &[])] {
        deliver(&mut job, 2, message);
    }
    assert_eq!(ends(&mut job), None);
    let summary = job.summary(at(0));
    let lost = RowsLoss { count: 1, at_step: 3, row_touches: 30, missing: None };
    assert_eq!((summary.rows_lost, summary.state_lost), (Some(lost), None));
    // The lost lowest rank had reported step 2.
    assert_eq!(summary.checkpoints.unwrap().restored[0].lost_steps, 1);
    let events = job.status(at(0)).events;
    let said =
        ["5 parts of the model's tables are lost", "30 row touches are lost, and made again"];
    let places = said.map(|text| events.iter().position(|event| event.contains(text)).unwrap());
    assert!(places[0] < places[1], "{events:?}");
    let next = Job::restore(job.to_persisted(), at(5)).unwrap();
    assert_eq!(next.summary(at(5)).rows_lost, Some(lost));
    // Without a checkpoint, all touches are lost with the state.
    deliver(&mut job, 2, rows_lost(3, 90));
    lose(&mut job, 2);
    replaced(&mut job, 3, 3, 0);
    let error = ends(&mut job).unwrap();
    assert!(error.contains("workers with all copies of rows are lost"), "{error}");
    let lost = RowsLoss { count: 2, at_step: 3, row_touches: 120, missing: None };
    assert_eq!(job.summary(at(0)).rows_lost, Some(lost));
}

#[test]
fn a_group_that_goes_on_with_older_rows_tells_what_is_missing() {
    let rows_lost = |step, row_touches| {
        WorkerMessage::Checkpoint(CheckpointNews::RowsLost { step, shards: 5, row_touches })
    };
    let older = |missing| {
        let name = Some("step-2".into());
        WorkerMessage::Checkpoint(CheckpointNews::OlderRows { name, missing })
    };
    let spec = JobSpec {
        options: WorkerOptions { on_rows_lost: OnRowsLost::Stale, ..alone(true).options },
        ..alone(true)
    };
    let mut job = started(spec, &[20]);
    trains_late(&mut job);
    // Another worker is lost before the next step, with rows of its own.
    for message in [rows_lost(2, 90), older(30), rows_lost(2, 90), older(45)] {
        deliver(&mut job, 1, message);
    }
    let lost = RowsLoss { count: 1, at_step: 2, row_touches: 0, missing: Some(45) };
    assert_eq!(job.summary(at(0)).rows_lost, Some(lost));
    let events = job.status(at(0)).events;
    let said = "the group goes on, with those of checkpoint step-2 in their place; 45 row touches \
                are missing";
    assert!(events.iter().any(|event| event.contains(said)), "{events:?}");
    assert!(!events.iter().any(|event| event.contains("goes back")), "{events:?}");
    deliver(&mut job, 1, rows_lost(3, 120));
    deliver(&mut job, 1, older(50));
    let lost = RowsLoss { count: 2, at_step: 3, row_touches: 0, missing: Some(50) };
    assert_eq!(job.summary(at(0)).rows_lost, Some(lost));
}

#[test]
fn with_restart_without_checkpoint_training_starts_again_and_each_loss_is_counted() {
    for checkpoints in [false, true] {
        let mut job =
            started(JobSpec { restart_without_checkpoint: true, ..alone(checkpoints) }, &[20]);
        trains_late(&mut job);
        lose(&mut job, 1);
        replaced(&mut job, 2, 2, 0);
        deliver(&mut job, 2, committed(2, 1, &[(0, 4)]));
        lose(&mut job, 2);
        replaced(&mut job, 3, 3, 0);
        assert_eq!(ends(&mut job), None);
        let lost = job.summary(at(0)).state_lost;
        let both = StateLoss { count: 2, at_step: 1, steps: 4, records: 16 };
        assert_eq!(lost, Some(both), "checkpoints: {checkpoints}");
        // The successor master knows it.
        let next = Job::restore(job.to_persisted(), at(5)).unwrap();
        assert_eq!(next.summary(at(5)).state_lost, lost);
    }
}

#[test]
fn a_joiner_that_has_fetched_the_state_may_provide_it() {
    let mut job = started(JobSpec { max_workers: 2, ..alone(false) }, &[20]);
    trains_late(&mut job);
    job.handle(at(0), Event::Scale(2.into()));
    connect(&mut job, 2);
    deliver(&mut job, 2, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 2, WorkerMessage::CaughtUp { step: Some(3) });
    lose(&mut job, 1);
    assert_eq!(ends(&mut job), None);
    let said = job.status(at(0)).events.join("\n");
    assert!(said.contains("1 worker continues") && !said.contains("the state is lost"), "{said}");
    lose(&mut job, 2);
    assert!(ends(&mut job).is_some());
}

#[test]
fn a_group_that_reports_a_failure_fails_the_job_with_its_error_and_records() {
    let mut job = started(
        JobSpec {
            options: WorkerOptions {
                work: Work::Train { export: Some("/m".into()) },
                ..spec().options
            },
            ..spec()
        },
        &[20],
    );
    for worker in 1..=3 {
        let WorkerMessage::Finished(mut word) = finished(1, 4, 9) else { unreachable!() };
        word.ledger = LedgerReport { epochs_complete: 0, ranges: Vec::new(), repeated: 0 };
        let at_fault = RecordRange { epoch: 0, start: 4, end: 6 };
        let ranges = if worker == 2 { vec![at_fault] } else { Vec::new() };
        word.failure =
            Some(Failure { error: "the gradient of step 5 is not finite".into(), ranges });
        word.steps_skipped = 2;
        word.exported = worker == 1;
        deliver(&mut job, worker, WorkerMessage::Finished(word));
    }
    let error = ends(&mut job);
    assert_eq!(error.as_deref(), Some("the gradient of step 5 is not finite"));
    let summary = job.summary(at(0));
    assert_eq!(
        (summary.steps, summary.steps_skipped, summary.export.as_deref()),
        (4, 2, Some("/m.failed"))
    );
    let failed: Vec<_> = summary.failed_shards.iter().map(|s| (s.worker, s.start, s.end)).collect();
    assert_eq!(failed, [(WorkerId(2), 4, 6)]);
}

fn of_bad_record(exported: bool) -> WorkerMessage {
    let error = "bad record".to_owned();
    WorkerMessage::Failed { error, ranges: Vec::new(), fatal: false, exported }
}

#[test]
fn a_job_gives_up_when_the_workers_that_remain_have_stored_its_newest_state() {
    let given_up = |checkpoints, export: Option<&str>| {
        let spec = JobSpec {
            num_workers: 2,
            max_workers: 2,
            max_worker_restarts: 0,
            options: WorkerOptions {
                work: Work::Train { export: export.map(str::to_owned) },
                ..alone(checkpoints).options
            },
            ..alone(checkpoints)
        };
        let mut job = started(spec, &[20]);
        trains_late(&mut job);
        actions(&mut job);
        deliver(&mut job, 1, of_bad_record(false));
        job
    };
    assert!(ends(&mut given_up(false, None)).unwrap().contains("bad record"));
    for (checkpoints, export) in [(true, None), (false, Some("/m")), (true, Some("/m"))] {
        let mut job = given_up(checkpoints, export);
        assert_eq!(messages_to(&mut job, &MasterMessage::GiveUp), [2]);
        job.count_failure(at(0), None, "worker 7 failed", &[]);
        deliver(&mut job, 2, formed(2, 3, &[(0, 12)]));
        assert_eq!(ends(&mut job), None);
        let WorkerMessage::Finished(mut word) = finished(2, 3, 9) else { unreachable!() };
        let error = "the job gives up".to_owned();
        word.failure = Some(Failure { error, ranges: Vec::new() });
        word.exported = export.is_some();
        deliver(&mut job, 2, WorkerMessage::Finished(word));
        let error = ends(&mut job).unwrap();
        assert!(error.contains("bad record; giving up after 1 failure"), "{error}");
        assert_eq!(job.summary(at(0)).export.is_some(), export.is_some());
    }
    // The last of them fails as well, when it has exported the model.
    let mut job = given_up(true, Some("/m"));
    deliver(&mut job, 2, of_bad_record(true));
    assert!(ends(&mut job).is_some());
    assert_eq!(job.summary(at(0)).export.as_deref(), Some("/m.failed"));
    // Replacements that fail as well do not follow each other at once, except the first.
    let mut job = given_up(true, None);
    let mut end = |launch, ms| {
        job.handle(at(ms), Event::ProcessEnded { launch: LaunchId(launch), exit: Exit::Code(1) });
        let at_once = actions(&mut job).contains(&launch_at(launch.max(2) + 1, 0));
        job.handle_timeout(at(ms + 2500));
        (at_once, actions(&mut job).contains(&launch_at(launch.max(2) + 1, 0)))
    };
    assert_eq!(end(1, 3000), (true, false));
    assert_eq!([3, 4, 5].map(|launch| end(launch, launch * 3000)), [(false, true); 3]);
    // Nor does it wait for ever.
    let mut job = given_up(true, None);
    job.handle_timeout(at(3_700_000));
    assert!(ends(&mut job).unwrap().contains("bad record"));
}

#[test]
fn the_last_member_stores_the_state_first_if_the_others_have_ended_by_themselves() {
    let asked = |exit| {
        let spec = JobSpec { num_workers: 2, max_workers: 2, ..alone(true) };
        let mut job = started(spec, &[20]);
        trains_late(&mut job);
        actions(&mut job);
        job.handle(at(0), Event::ProcessEnded { launch: LaunchId(1), exit });
        messages_to(&mut job, &MasterMessage::KeepCheckpoint)
    };
    assert_eq!(asked(Exit::Code(9)), [2]);
    assert_eq!(asked(Exit::Signal(9)), [0; 0], "a kill says nothing about the step");
}

#[test]
fn skipped_steps_are_logged_periodically() {
    let mut job = started(spec(), &[20]);
    let mut lines = 0;
    for step in 1..=5 {
        let start = 4 * (step - 1);
        let WorkerMessage::Committed(report) = committed(1, step, &[(start, start + 4)]) else {
            unreachable!()
        };
        let report = Committed { steps_skipped: step, loss_sum: f64::NAN, ..report };
        deliver(&mut job, 1, WorkerMessage::Committed(report));
        let told = |a: &&Action| matches!(a, Action::Log(line) if line.contains("skipped"));
        lines += actions_with_log_events(&mut job).iter().filter(told).count();
    }
    let status = job.status(at(0));
    assert_eq!((lines, status.steps_skipped, status.loss), (3, 5, None));
}

fn actions_with_log_events(job: &mut Job) -> Vec<Action> {
    std::iter::from_fn(|| job.poll_action()).collect()
}

fn messages_to(job: &mut Job, wanted: &MasterMessage) -> Vec<u64> {
    let sent = actions(job).into_iter().filter_map(|action| match action {
        Action::Send { worker, message } if message == *wanted => Some(worker.0),
        _ => None,
    });
    sent.collect()
}

#[test]
fn a_group_whose_members_all_leave_without_replacements_is_suspended_at_once() {
    let mut job = started(JobSpec { num_workers: 2, max_workers: 2, ..alone(true) }, &[20]);
    deliver(&mut job, 1, WorkerMessage::Leaving);
    // The first leaver is released by a generation without it; the second one leaves while that
    // generation forms.
    deliver(&mut job, 2, WorkerMessage::Leaving);
    assert_eq!(messages_to(&mut job, &MasterMessage::Suspend), [0; 0]);
    deliver(&mut job, 2, formed(2, 2, &[(0, 8)]));
    assert_eq!(messages_to(&mut job, &MasterMessage::Suspend), [2]);
    let WorkerMessage::Finished(mut word) = finished(2, 3, 9) else { unreachable!() };
    word.suspended = true;
    deliver(&mut job, 2, WorkerMessage::Finished(word));
    let shut =
        |a: &Action| matches!(a, Action::Send { message: MasterMessage::Shutdown { .. }, .. });
    assert_eq!(actions(&mut job).iter().filter(|a| shut(a)).count(), 1);
    // Other workers resume from the checkpoint.
    for worker in [1, 2] {
        lose(&mut job, worker);
    }
    assert_eq!(actions(&mut job).iter().filter(|a| matches!(a, Action::Launch { .. })).count(), 2);
    [3, 4].into_iter().for_each(|worker| connect(&mut job, worker));
    [3, 4]
        .into_iter()
        .for_each(|worker| deliver(&mut job, worker, WorkerMessage::Ready { parameters: 10 }));
    let news = CheckpointNews::Restored {
        step: 3,
        name: "step".into(),
        row_touches: 0,
        differences: String::new(),
    };
    deliver(&mut job, 3, WorkerMessage::Checkpoint(news));
    deliver(&mut job, 3, formed(3, 3, &[(0, 12)]));
    let summary = job.summary(at(0));
    assert_eq!(
        (summary.state_lost, summary.checkpoints.unwrap().restored[0].lost_steps),
        (None, 0)
    );
    assert_eq!(&*job.status(at(0)).state, "running");
}

#[test]
fn with_pending_replacements_the_group_waits_for_half_of_the_grace_period() {
    let mut job = started(JobSpec { max_workers: 2, ..alone(true) }, &[20]);
    deliver(&mut job, 1, WorkerMessage::Leaving);
    let sent = actions(&mut job);
    let asks =
        |a: &Action| matches!(a, Action::Send { message: MasterMessage::KeepCheckpoint, .. });
    assert!(
        sent.iter().any(asks) && sent.iter().any(|a| matches!(a, Action::Launch { .. })),
        "{sent:?}"
    );
    job.handle_timeout(at(4999));
    assert_eq!(messages_to(&mut job, &MasterMessage::Suspend), [0; 0]);
    job.handle_timeout(at(5000));
    assert_eq!(messages_to(&mut job, &MasterMessage::Suspend), [1]);
    // A replacement that fetches the state in time makes the suspension unnecessary.
    let mut job = started(JobSpec { max_workers: 2, ..alone(true) }, &[20]);
    deliver(&mut job, 1, WorkerMessage::Leaving);
    connect(&mut job, 2);
    deliver(&mut job, 2, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 2, WorkerMessage::CaughtUp { step: Some(1) });
    deliver(&mut job, 1, formed(2, 1, &[]));
    job.handle_timeout(at(5000));
    assert_eq!(messages_to(&mut job, &MasterMessage::Suspend), [0; 0]);
}

fn diverged(has_majority: bool) -> WorkerMessage {
    WorkerMessage::Diverged { error: "replicas differ".into(), has_majority, by_audit: false }
}

#[test]
fn replicas_that_differ_are_one_failure_however_many_give_up_their_states() {
    let mut job = started(JobSpec { max_worker_restarts: 1, ..spec() }, &[20]);
    deliver(&mut job, 2, diverged(true));
    deliver(&mut job, 3, diverged(true));
    assert_eq!(job.lifecycle.failures(), 1);
    // The majority stays.
    assert!(job.workers.is_connected(WorkerId(1)) && job.lifecycle.is_running());
}

#[test]
fn the_summary_has_what_audits_have_found() {
    let audit = |has_majority| {
        let mut spec = JobSpec { max_worker_restarts: 9, ..spec() };
        spec.options.audit = 1;
        let mut job = started(spec, &[20]);
        let WorkerMessage::Committed(report) = committed(1, 3, &[(0, 12)]) else { panic!() };
        let report = Committed { steps_audited: 2, ..report };
        deliver(&mut job, 1, WorkerMessage::Committed(report));
        for worker in [2, 3] {
            let error = "wrong arithmetic".into();
            let found = WorkerMessage::Diverged { error, has_majority, by_audit: true };
            deliver(&mut job, worker, found);
        }
        let found = job.summary(at(1)).audit.unwrap();
        (found.steps, found.disagreements, found.workers_replaced)
    };
    assert_eq!((audit(true), audit(false)), ((2, 1, 2), (2, 1, 3)));
    assert_eq!(started(spec(), &[20]).summary(at(1)).audit, None);
}

#[test]
fn without_a_majority_no_state_is_trusted_and_repeated_differences_end_the_job() {
    let mut job = started(JobSpec { max_worker_restarts: 1, ..spec() }, &[20]);
    deliver(&mut job, 2, diverged(false));
    // Workers 1 and 3 have not learned of it.
    let holders = job.workers.select(|w| w.has_state() && !w.is_released());
    assert_eq!((holders, job.lifecycle.failures()), (Vec::new(), 1));
    job.lifecycle.close_divergence();
    deliver(&mut job, 3, diverged(false));
    let error = job.summary(at(1)).error.unwrap();
    assert!(error.contains("is not deterministic"), "{error}");
}
