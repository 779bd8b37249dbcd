//! Checkpoint requests and reports.

use elasticdl_proto::WorkerId;
use elasticdl_proto::WorkerOptions;

use super::super::*;
use super::directed::{actions, at, committed, connect, deliver, finished, formed, lose, started};
use crate::job::testing::spec;

pub(super) fn kept() -> JobSpec {
    let every = CheckpointEvery::Time(std::time::Duration::from_secs(60));
    JobSpec {
        options: WorkerOptions {
            checkpoints: Some(CheckpointSpec {
                dir: "/c".into(),
                every,
                keep: 3,
                exclusive: false,
            }),
            ..spec().options
        },
        ..spec()
    }
}

/// The workers of which these actions request a checkpoint.
pub(super) fn asked(job: &mut Job) -> Vec<u64> {
    let asked = actions(job).into_iter().filter_map(|action| match action {
        Action::Send { worker, message: MasterMessage::KeepCheckpoint } => Some(worker.0),
        _ => None,
    });
    asked.collect()
}

fn news(job: &mut Job, news: CheckpointNews) {
    deliver(job, 1, WorkerMessage::Checkpoint(news));
}

fn saved(step: u64) -> CheckpointNews {
    CheckpointNews::Saved {
        step,
        name: format!("step-{step}"),
        bytes: 8,
        times: Default::default(),
    }
}

#[test]
fn a_checkpoint_request_goes_to_the_first_member_and_to_later_ones_until_it_is_fulfilled() {
    let mut job = started(kept(), &[20]);
    job.handle(at(0), Event::Checkpoint);
    assert_eq!(asked(&mut job), [1]);
    lose(&mut job, 0, 1);
    deliver(&mut job, 2, formed(2, 0, &[]));
    assert_eq!(asked(&mut job), [2]);
    deliver(&mut job, 2, WorkerMessage::Checkpoint(saved(3)));
    lose(&mut job, 0, 2);
    deliver(&mut job, 3, formed(3, 0, &[]));
    assert_eq!(asked(&mut job), [0; 0]);
    let mut without = started(spec(), &[20]);
    without.handle(at(0), Event::Checkpoint);
    assert_eq!(asked(&mut without), [0; 0]);
}

#[test]
fn checkpoint_results_are_kept_for_status_summary_and_the_next_master() {
    let mut job = started(kept(), &[20]);
    deliver(&mut job, 1, committed(1, 2, &[(0, 8)]));
    news(&mut job, CheckpointNews::Failed { step: 1, error: "disk full".into() });
    assert_eq!(job.status(at(0)).checkpoints.unwrap().error.as_deref(), Some("disk full"));
    news(&mut job, saved(2));
    news(&mut job, CheckpointNews::Damaged { name: "step-2".into(), reason: "torn".into() });
    let restored = |step| CheckpointNews::Restored {
        step,
        name: "step-1".into(),
        row_touches: 0,
        differences: String::new(),
    };
    (0..200).for_each(|_| news(&mut job, restored(0)));
    news(&mut job, restored(1));
    let known = job.summary(at(0)).checkpoints.unwrap();
    let newest = SavedCheckpoint { step: 2, name: "step-2".into(), bytes: 8 };
    assert_eq!((known.dir.as_deref(), known.newest.as_ref()), (Some("/c"), Some(&newest)));
    assert_eq!((known.saved, known.failed, known.damaged, known.error.as_ref()), (1, 1, 1, None));
    let last = RestoredCheckpoint { step: 1, name: "step-1".into(), lost_steps: 1 };
    assert_eq!((known.restored.len(), known.restored.last()), (100, Some(&last)));
    let next = Job::restore(super::persisted::read_back(&job.to_persisted()), at(5)).unwrap();
    assert_eq!(next.summary(at(5)).checkpoints, Some(known));
    assert_eq!(started(spec(), &[20]).summary(at(0)).checkpoints, None);
}

#[test]
fn a_checkpoint_of_another_build_is_told_with_what_differs() {
    let mut job = started(kept(), &[20]);
    let mut restored = |differences: &str| {
        let (name, differences) = ("step-1".into(), differences.into());
        news(&mut job, CheckpointNews::Restored { step: 1, name, row_touches: 0, differences });
        job.status(at(0)).events.last().cloned().unwrap_or_default()
    };
    let event = restored("executable and its optimizer settings");
    let expected = "the program that wrote it differs in its executable and its optimizer";
    assert!(event.contains(expected), "{event}");
    assert!(!restored("").contains("build"));
}

#[test]
fn the_ledger_of_a_group_that_starts_from_a_checkpoint_is_adopted() {
    let mut job = started(JobSpec { num_workers: 1, max_workers: 1, ..kept() }, &[20]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
    lose(&mut job, 0, 1);
    job.handle(at(0), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Signal(9) });
    connect(&mut job, 2);
    deliver(&mut job, 2, WorkerMessage::Ready { parameters: 10 });
    news(
        &mut job,
        CheckpointNews::Restored {
            step: 1,
            name: "step-1".into(),
            row_touches: 0,
            differences: String::new(),
        },
    );
    deliver(&mut job, 2, formed(2, 1, &[(0, 4)]));
    let status = job.status(at(0));
    assert_eq!((status.step, status.records_counted), (1, 4));
    // Records that the lost group had committed after the checkpoint are trained, and counted,
    // again.
    deliver(&mut job, 2, committed(2, 2, &[(4, 8)]));
    assert_eq!((job.step(), job.status(at(0)).records_counted), (2, 8));
}

#[test]
fn records_of_another_jobs_checkpoint_do_not_count_towards_the_speed() {
    let mut job = Job::new(JobSpec { num_workers: 1, max_workers: 1, ..kept() });
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(testing::dataset(&[20])), None));
    deliver(&mut job, 1, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 1, formed(1, 3, &[(0, 12)]));
    let message = committed(1, 4, &[(12, 16)]);
    job.handle(at(2000), Event::Message { worker: WorkerId(1), message });
    let ThroughputSummary { records_per_s, steps_per_s, .. } = job.summary(at(2000)).throughput;
    assert_eq!((records_per_s, steps_per_s), (2.0, 0.5));
    // So long the job's clock has stood still, while its workers trained on.
    job.note_away(std::time::Duration::from_secs(2));
    let summary = job.summary(at(2000));
    assert_eq!((summary.wall_s, summary.throughput.records_per_s), (4.0, 1.0));
    let said = job.status(at(2000)).events;
    assert!(
        said.iter().any(|line| line.contains("could not renew its Lease for 2.0 s")),
        "{said:?}"
    );
}

/// Each worker and each attempt has the same to say about a full disk.
#[test]
fn checkpoints_that_cannot_be_written_are_said_once_and_once_when_they_can() {
    let mut job = started(kept(), &[20]);
    let failed = |step| CheckpointNews::Failed { step, error: "disk full".into() };
    let said = |job: &Job| {
        let events = job.status(at(0)).events;
        events.into_iter().filter(|event| event.contains("checkpoint")).collect::<Vec<_>>()
    };
    for step in 1..4 {
        news(&mut job, failed(step));
    }
    assert_eq!(said(&job), ["worker 1 can't write the checkpoint of step 1: disk full"]);
    for step in 4..6 {
        news(&mut job, saved(step));
    }
    assert_eq!(said(&job)[1..], ["checkpoints are written again: that of step 4 is"]);
    news(&mut job, failed(6));
    assert_eq!(said(&job).len(), 3);
}

#[test]
fn a_group_that_has_given_up_a_checkpoint_has_its_time_again_to_end() {
    let mut job = started(kept(), &[20]);
    job.handle(at(0), Event::Stop);
    let news = CheckpointNews::Failed { step: 2, error: "hangs".into() };
    let message = WorkerMessage::Checkpoint(news);
    job.handle(at(50_000), Event::Message { worker: WorkerId(1), message });
    job.handle_timeout(at(109_999));
    assert_eq!(job.outcome(), None);
    job.handle_timeout(at(110_000));
    assert_eq!(job.outcome(), Some(Outcome::Stopped));
}

#[test]
fn a_job_that_ends_says_which_steps_are_in_no_checkpoint_and_why_and_where_its_model_is() {
    let ended = |event: Event, until: u64| {
        let work = Work::Train { export: Some("/m".into()) };
        let mut job =
            started(JobSpec { options: WorkerOptions { work, ..kept().options }, ..kept() }, &[20]);
        deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
        news(&mut job, saved(1));
        job.handle(at(0), event);
        job.handle_timeout(at(until));
        assert_eq!(job.outcome(), Some(Outcome::Stopped));
        (job.status(at(0)).events, job.summary(at(0)).checkpoints.unwrap().error)
    };
    let unsaved = |why: &str| {
        format!("steps 2 to 3 are in no checkpoint{why}; the job can be resumed from /c/step-1")
    };
    let why = "the group has not finished within 60 s";
    let (events, error) = ended(Event::Stop, 60_000);
    assert!(events.contains(&unsaved(&format!(" ({why})"))), "{events:?}");
    assert_eq!(error.as_deref(), Some(why));
    let (events, error) = ended(Event::StopNow, 0);
    assert!(events.contains(&unsaved("")) && error.is_none(), "{events:?}");
    let unexported = "/m is not written by this job: the job has ended before its export was \
                      complete; the model of step 1 is in a checkpoint: elasticdl convert \
                      /c/step-1 /m -- PROGRAM";
    assert!(events.contains(&unexported.to_owned()), "{events:?}");
}

#[test]
fn a_job_whose_model_is_in_no_file_fails_and_any_other_says_what_no_checkpoint_has() {
    let ended = |export: Option<&str>, exclusive| {
        let work = Work::Train { export: export.map(Into::into) };
        let mut options = WorkerOptions { work, ..kept().options };
        options.checkpoints.as_mut().unwrap().exclusive = exclusive;
        let mut job = started(JobSpec { num_workers: 1, options, ..kept() }, &[20]);
        news(&mut job, saved(1));
        news(&mut job, CheckpointNews::Failed { step: 9, error: "disk full".into() });
        let WorkerMessage::Finished(last) = finished(1, 9, 5) else { unreachable!() };
        let exported = export.is_some();
        deliver(&mut job, 1, WorkerMessage::Finished(Finished { exported, ..last }));
        let line = "steps 2 to 9 are in no checkpoint (disk full); the job can be resumed from \
                    /c/step-1";
        let events = job.status(at(0)).events;
        assert!(events.contains(&line.to_owned()), "{events:?}");
        (job.status(at(0)).events, job.summary(at(0)).error)
    };
    let error = ended(None, false).1.unwrap();
    assert_eq!(error, "no checkpoint in /c has the model of step 9: disk full");
    for (export, exclusive) in [(Some("/m"), false), (None, true)] {
        let (events, error) = ended(export, exclusive);
        let completed = "the job completed at step 9".to_owned();
        assert!(error.is_none() && events.contains(&completed), "{events:?}");
    }
}

#[test]
fn a_late_checkpoint_makes_up_for_none_that_a_stopped_job_has_left_out() {
    let mut job = started(kept(), &[20]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
    news(&mut job, CheckpointNews::Failed { step: 2, error: "hangs".into() });
    job.handle(at(0), Event::Stop);
    let error = |job: &Job| job.status(at(0)).checkpoints.unwrap().error;
    news(&mut job, saved(2));
    assert_eq!(error(&job).as_deref(), Some("hangs"));
    news(&mut job, saved(3));
    assert_eq!(error(&job), None);
}

#[test]
fn a_write_that_does_not_end_is_reported_once_and_so_is_its_end() {
    let mut job = started(kept(), &[20_000]);
    // The lines on checkpoints when `message` arrives after so many seconds.
    let mut lines = |seconds: u64, message| {
        job.handle(at(1000 * seconds), Event::Message { worker: WorkerId(1), message });
        let all = std::iter::from_fn(|| job.poll_action());
        let lines = all.filter_map(|action| match action {
            Action::Log(line) if line.contains("checkpoint") => Some(line),
            _ => None,
        });
        lines.collect::<Vec<_>>()
    };
    let commit = |step| committed(1, step, &[(8 * step, 8 * step + 8)]);
    assert_eq!(lines(0, commit(1)), [""; 0]);
    assert_eq!(lines(119, commit(2)), [""; 0], "two intervals of a minute");
    assert_eq!(lines(120, commit(3)), [""; 0]);
    let late = lines(150, commit(4));
    assert!(late.len() == 1 && late[0].ends_with("steps 1 to 4 are in none"), "{late:?}");
    assert_eq!(lines(500, commit(5)), [""; 0]);
    let over = lines(501, WorkerMessage::Checkpoint(saved(4)));
    assert_eq!(over, ["checkpoints are written again: that of step 4 is"]);
    // After a pause of an hour it is begun with the first step.
    assert_eq!(lines(4000, commit(6)), [""; 0]);
    assert_eq!(lines(4029, commit(7)), [""; 0]);
    let late = lines(4030, commit(8));
    assert!(late.len() == 1 && late[0].ends_with("steps 5 to 8 are in none"), "{late:?}");
}
