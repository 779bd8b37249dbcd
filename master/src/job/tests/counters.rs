//! The counters behind the metrics, and the records of the summary.

use std::collections::BTreeMap;

use elasticdl_proto::{Failure, Generation, RecordRange, WorkerOptions};

use super::super::*;
use super::directed::*;
use crate::job::testing::spec;

fn resumed(generation: u64, detect_us: u64) -> WorkerMessage {
    let phases = Phases { detect_us, ..Phases::default() };
    WorkerMessage::Resumed { generation: Generation(generation), step: 1, phases }
}

fn counters(job: &Job) -> Counters {
    job.snapshot(at(0)).counters
}

#[test]
fn steps_records_and_times_are_those_of_the_reports() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    deliver(&mut job, 1, committed(1, 3, &[(4, 12)]));
    // A commit of another generation is ignored.
    deliver(&mut job, 1, committed(2, 9, &[(12, 16)]));
    let times = StepTimes { steps: 2, step_us: 6000, reduce_us: 2000 };
    assert_eq!(counters(&job), Counters { steps: 3, records: 12, times, ..Counters::default() });
    assert_eq!(job.summary(at(0)).throughput.all_reduce_ms, 1.0);
}

#[test]
fn a_change_is_counted_once_with_the_largest_gap_and_the_start_is_not_counted() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, resumed(1, 10));
    lose(&mut job, 1, 3);
    deliver(&mut job, 1, resumed(2, 1500));
    assert_eq!(counters(&job).recoveries, BTreeMap::new(), "not all members have reported");
    deliver(&mut job, 2, resumed(2, 7000));
    deliver(&mut job, 2, resumed(2, 9000));
    let recoveries = counters(&job).recoveries;
    assert_eq!(recoveries.keys().collect::<Vec<_>>(), [&Cause::Lost]);
    let gap = &recoveries[&Cause::Lost].gap;
    assert_eq!((gap.count(), gap.sum_ms, gap.buckets[3]), (1, 7.0, 1), "{gap:?}");
    let [detect, others @ ..] = &recoveries[&Cause::Lost].phases;
    assert_eq!((detect.count(), detect.sum_ms), (1, 7.0));
    assert!(others.iter().all(|phase| (phase.count(), phase.sum_ms) == (1, 0.0)));
}

#[test]
fn a_change_overtaken_by_the_next_one_counts_if_any_member_has_reported() {
    let mut job = started(spec(), &[20]);
    lose(&mut job, 1, 3);
    deliver(&mut job, 1, formed(2, 0, &[]));
    deliver(&mut job, 1, resumed(2, 1500));
    lose(&mut job, 2, 2);
    assert_eq!(counters(&job).recoveries[&Cause::Lost].gap.count(), 1);
    deliver(&mut job, 1, formed(3, 0, &[]));
    lose(&mut job, 3, 1);
    assert_eq!(
        counters(&job).recoveries[&Cause::Lost].gap.count(),
        1,
        "no member has reported the third"
    );
}

#[test]
fn a_change_whose_first_report_is_late_counts_once() {
    let mut job = started(spec(), &[20]);
    lose(&mut job, 1, 3);
    deliver(&mut job, 1, formed(2, 0, &[]));
    lose(&mut job, 2, 2);
    assert_eq!(counters(&job).recoveries, BTreeMap::new());
    deliver(&mut job, 1, resumed(2, 1500));
    deliver(&mut job, 1, resumed(2, 2500));
    let gap = &counters(&job).recoveries[&Cause::Lost].gap;
    assert_eq!((gap.count(), gap.sum_ms), (1, 1.5));
}

#[test]
fn exits_are_counted_by_reason() {
    let mut job = started(spec(), &[20]);
    let end = |job: &mut Job, launch: u64, exit| {
        job.handle(at(5), Event::ProcessEnded { launch: LaunchId(launch), exit });
    };
    end(&mut job, 1, Exit::Signal(9));
    end(&mut job, 2, Exit::Signal(11));
    deliver(
        &mut job,
        3,
        WorkerMessage::Failed {
            error: "no".into(),
            ranges: Vec::new(),
            fatal: false,
            exported: false,
        },
    );
    end(&mut job, 3, Exit::Code(1));
    let expected = [(End::Crashed, 1), (End::Failed, 1), (End::Killed, 1)];
    assert_eq!(counters(&job).ends, BTreeMap::from(expected));
    assert_eq!(counters(&job).restarts, job.summary(at(5)).workers.restarts);
    end(&mut job, 4, Exit::reclaimed(ReclaimCause::Preempted, "preempted"));
    assert_eq!(counters(&job).ends[&End::Reclaimed], 1);
    // The exits of workers after the end of the job are not classified.
    job.handle(at(6), Event::Stop);
    end(&mut job, 5, Exit::Code(0));
    let told = counters(&job).ends.get(&End::Terminated).copied();
    assert_eq!(told, None, "{:?}", counters(&job).ends);
}

/// The first member has trained 8 records in two steps when the job is stopped.
fn stopped(spec: JobSpec, error: Option<&str>) -> Summary {
    let mut job = started(spec, &[20]);
    job.handle(at(100), Event::Stop);
    let WorkerMessage::Finished(word) = finished(1, 2, 7) else { unreachable!() };
    let ranges = vec![RecordRange { epoch: 0, start: 0, end: 8 }];
    let ledger = LedgerReport { epochs_complete: 0, ranges, ..word.ledger };
    let failure = error.map(|error| Failure { error: error.into(), ranges: Vec::new() });
    for i in 1..=3 {
        let (ledger, failure) = (ledger.clone(), failure.clone());
        let word = Finished { records_trained: 8, ledger, failure, ..word.clone() };
        deliver(&mut job, i, WorkerMessage::Finished(word));
    }
    job.handle_timeout(at(10_100));
    job.summary(at(10_100))
}

#[test]
fn the_rest_of_a_stopped_job_is_not_trained_and_is_expected() {
    let summary = stopped(spec(), None);
    let records =
        RecordsSummary { expected: 40, counted: 8, missing: 0, not_trained: 32, repeated: 0 };
    assert_eq!((&*summary.state, summary.records), ("stopped", records));
    let unexported = stopped(spec(), Some("can't write the model"));
    assert_eq!((&*unexported.state, unexported.records), ("failed", records));
    // The last step of an epoch has 2 records.
    let batch = Batch::Global(std::num::NonZeroU64::new(6).unwrap());
    let asked = JobSpec {
        options: WorkerOptions { max_steps: Some(5), batch, ..spec().options },
        ..spec()
    };
    let asked = stopped(asked, None).records;
    assert_eq!(asked, RecordsSummary { expected: 26, not_trained: 18, ..records });
}
