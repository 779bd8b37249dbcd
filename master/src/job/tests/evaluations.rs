//! Evaluations of the model.

use std::time::Duration;

use elasticdl_proto::Kept;
use elasticdl_proto::WorkerOptions;

use super::super::*;
use super::directed::{actions, at, deliver, finished, started};
use crate::job::testing::spec;

fn judged() -> JobSpec {
    let (data, metric) = ("v".into(), "loss".into());
    JobSpec {
        options: WorkerOptions {
            validation: Some(ValidationSpec {
                split: None,
                data,
                every: Some(10),
                metric,
                highest: false,
                patience: Some(2),
                export_best: Some("/best".into()),
            }),
            ..spec().options
        },
        ..spec()
    }
}

fn evaluated(job: &mut Job, step: u64, loss: Option<f64>) {
    deliver(
        job,
        1,
        WorkerMessage::Evaluated(
            Evaluated { step, records: 5, metrics: [("loss".into(), loss)].into() },
            Duration::from_millis(20),
        ),
    );
}

fn known(job: &Job) -> (Vec<u64>, Option<u64>) {
    let known = job.summary(at(0)).evaluations.unwrap();
    (known.all.iter().map(|e| e.step).collect(), known.best.map(|best| best.step))
}

#[test]
fn the_best_evaluation_is_remembered_and_repeated_steps_are_evaluated_again() {
    let mut job = started(judged(), &[20]);
    for (step, loss, best) in
        [(10, Some(3.0), 10), (20, Some(1.0), 20), (30, Some(2.0), 20), (40, None, 20)]
    {
        evaluated(&mut job, step, loss);
        assert_eq!(known(&job).1, Some(best));
    }
    let next = Job::restore(super::persisted::read_back(&job.to_persisted()), at(5)).unwrap();
    assert_eq!(known(&next), known(&job));
    // The group has restarted from a checkpoint of step 15.
    evaluated(&mut job, 20, Some(4.0));
    assert_eq!(known(&job), (vec![10, 20], Some(10)));
    assert_eq!(job.status(at(0)).evaluated.unwrap().step, 20);
    assert_eq!(started(spec(), &[20]).summary(at(0)).evaluations, None);
}

#[test]
fn a_best_model_is_named_once_it_is_written_and_what_was_there_before_too() {
    let mut job = started(judged(), &[20]);
    let export = |job: &Job| job.summary(at(0)).evaluations.unwrap().best.unwrap().export;
    let exported =
        |step: u64, kept: Option<Kept>| WorkerMessage::BestExport { step, kept, error: None };
    let kept = Some(Kept { address: "/best.previous".into(), value: Some(0.5) });
    evaluated(&mut job, 10, Some(3.0));
    assert_eq!(export(&job), None);
    deliver(&mut job, 1, exported(10, kept.clone()));
    evaluated(&mut job, 20, Some(4.0));
    assert_eq!(export(&job).as_deref(), Some("/best"));
    // The next exporter says it again, to whichever master there is.
    let mut next = Job::restore(super::persisted::read_back(&job.to_persisted()), at(5)).unwrap();
    let told = |job: &Job| {
        let is_of_kept = |event: &String| event.contains("is kept as");
        job.status(at(0)).events.into_iter().filter(is_of_kept).collect::<Vec<_>>()
    };
    let better = "/best held a better model, of loss 0.5000, which is kept as /best.previous";
    for (job, expected) in [(&mut job, 1), (&mut next, 0)] {
        deliver(job, 1, exported(10, kept.clone()));
        let told = told(job);
        assert!(
            told.len() == expected && told.iter().all(|line| line.ends_with(better)),
            "{told:?}"
        );
        assert_eq!(job.summary(at(0)).evaluations.unwrap().kept, kept.clone());
    }
    let other = Kept { address: "/best.previous.2".into(), value: None };
    deliver(&mut job, 1, exported(10, Some(other)));
    assert!(told(&job)[1].ends_with("it can't be compared with those of this job"));
    evaluated(&mut job, 30, Some(1.0));
    assert_eq!(export(&job), None);
    // That of an earlier step says nothing about this one.
    deliver(&mut job, 1, exported(10, None));
    assert_eq!(export(&job), None);
    deliver(&mut job, 1, exported(30, None));
    assert_eq!(export(&job).as_deref(), Some("/best"));
    // The group has restarted from a checkpoint of step 15.
    evaluated(&mut job, 20, Some(4.0));
    assert_eq!((known(&job).1, export(&job)), (Some(10), None));
}

/// A full disk, for example.
#[test]
fn a_best_model_that_is_not_exported_is_said_once_and_once_when_it_is() {
    let mut job = started(judged(), &[20]);
    let said = |job: &Job| {
        let is_of_export = |event: &&String| event.contains("exported");
        job.status(at(0)).events.iter().filter(is_of_export).count()
    };
    let export = |job: &mut Job, step: u64, error: Option<&str>| {
        evaluated(job, step, Some(1.0 / step as f64));
        let error = error.map(str::to_owned);
        deliver(job, 1, WorkerMessage::BestExport { step, kept: None, error });
    };
    for step in [10, 20] {
        export(&mut job, step, Some("/best: No space left on device"));
        let known = job.summary(at(0)).evaluations.unwrap();
        assert_eq!(known.best.unwrap().export, None);
        assert!(known.export_error.unwrap().contains("No space"));
        assert_eq!(said(&job), 1);
    }
    for step in [30, 40] {
        export(&mut job, step, None);
        let known = job.summary(at(0)).evaluations.unwrap();
        assert_eq!(
            (known.best.unwrap().export.as_deref(), known.export_error),
            (Some("/best"), None)
        );
        assert_eq!(said(&job), 2);
    }
}

#[test]
fn a_stop_tells_that_the_last_model_is_not_evaluated() {
    let stopped = |evaluations: &[u64]| {
        let mut job = started(judged(), &[20]);
        evaluations.iter().for_each(|&step| evaluated(&mut job, step, Some(1.0)));
        job.handle(at(0), Event::Stop);
        for worker in 1..=3 {
            let WorkerMessage::Finished(mut word) = finished(1, 20, 9) else { unreachable!() };
            word.ledger = LedgerReport::default();
            deliver(&mut job, worker, WorkerMessage::Finished(word));
        }
        assert_eq!(job.outcome(), Some(Outcome::Stopped));
        let events = job.status(at(0)).events;
        events.into_iter().filter(|event| event.contains("not evaluated")).collect::<Vec<_>>()
    };
    assert_eq!(stopped(&[10, 20]), [""; 0]);
    let told = |evaluations: &[u64], text: &str| {
        let events = stopped(evaluations);
        assert!(events.len() == 1 && events[0].contains(text), "{events:?}");
    };
    told(&[], "step 20, at the stop, is not evaluated: none was evaluated before, so /best is not");
    told(&[10], "the last evaluation was that of step 10, and /best is as it was then");
}

#[test]
fn a_job_that_stops_early_is_complete_and_expects_no_more_than_it_trained() {
    let mut job = started(JobSpec { num_workers: 1, max_workers: 1, ..judged() }, &[20]);
    let WorkerMessage::Finished(word) = finished(1, 3, 7) else { panic!() };
    let ledger = LedgerReport { epochs_complete: 1, ..LedgerReport::default() };
    let word = Finished { stopped_early: true, records_trained: 20, ledger, ..word };
    deliver(&mut job, 1, WorkerMessage::Finished(word));
    actions(&mut job);
    let summary = job.summary(at(0));
    assert_eq!((summary.error, summary.records.expected, summary.records.missing), (None, 20, 0));
    assert!(summary.evaluations.unwrap().stopped_early);
}
