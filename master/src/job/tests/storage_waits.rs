//! Reports of workers that wait for storage.

use std::time::Duration;

use elasticdl_proto::WorkerId;
use elasticdl_proto::WorkerOptions;

use super::super::*;
use super::directed::*;
use crate::job::testing::spec;

fn waits(storage: Option<&str>, ms: u64) -> WorkerMessage {
    WorkerMessage::StorageWait {
        storage: storage.map(str::to_owned),
        waited: Duration::from_millis(ms),
    }
}

/// The log events about storage.
fn storage_events(job: &Job) -> Vec<String> {
    job.status(at(99)).events.into_iter().filter(|line| line.contains("storage")).collect()
}

#[test]
fn an_outage_and_its_end_are_logged_once_and_its_time_is_counted() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 3, waits(Some("s3://b/x: no answer"), 100));
    deliver(&mut job, 1, waits(Some("s3://b/y: no answer"), 200));
    deliver(&mut job, 3, waits(Some("s3://b/x: no answer"), 5000));
    assert_eq!(storage_events(&job), ["worker 3 waits for storage: s3://b/x: no answer"]);
    deliver(&mut job, 1, waits(None, 5800));
    assert_eq!(storage_events(&job).len(), 1, "one still waits");
    deliver(&mut job, 3, waits(None, 0));
    assert_eq!(
        storage_events(&job)[1..],
        ["workers no longer wait for storage; they waited for up to 6.0 s"]
    );
    assert_eq!(job.snapshot(at(1)).counters.storage_wait, Duration::from_millis(11_100));
    assert_eq!(job.summary(at(1)).throughput.storage_wait_s, 11.1);
    deliver(&mut job, 2, waits(Some("s3://b/x: no answer"), 100));
    assert_eq!(storage_events(&job).len(), 3, "the next one is another one");
}

#[test]
fn a_lost_worker_no_longer_waits_and_waiting_is_no_failure() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 3, waits(Some("s3://b"), 100));
    job.handle(at(1), Event::Disconnected { worker: WorkerId(3) });
    deliver(&mut job, 1, waits(Some("s3://b"), 100));
    deliver(&mut job, 1, waits(None, 100));
    let events = storage_events(&job);
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(events[1].starts_with("workers no longer wait for storage"), "{events:?}");
    assert_eq!(job.summary(at(2)).failed_shards, []);
}

#[test]
fn a_stop_says_once_for_which_storage_it_waits_and_for_how_long() {
    let said = "the stop waits for up to 10 s for storage: s3://b/x: no answer; \
                `elasticdl stop --force` ends the job without it";
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 3, waits(Some("s3://b/x: no answer"), 100));
    job.handle(at(1), Event::Stop);
    deliver(&mut job, 1, waits(Some("s3://b/y: no answer"), 100));
    deliver(&mut job, 3, waits(Some("s3://b/x: no answer"), 5000));
    assert_eq!(storage_events(&job)[1..], [said]);
    // An outage that begins during the stop.
    let mut job = started(spec(), &[20]);
    job.handle(at(1), Event::Stop);
    assert_eq!(storage_events(&job).len(), 0);
    deliver(&mut job, 3, waits(Some("s3://b/x: no answer"), 100));
    assert_eq!(storage_events(&job)[1..], [said]);
}

#[test]
fn a_stopped_job_has_a_minute_for_its_export() {
    let work = Work::Train { export: Some("m".into()) };
    let mut job =
        started(JobSpec { options: WorkerOptions { work, ..spec().options }, ..spec() }, &[20]);
    job.handle(at(100), Event::Stop);
    job.handle_timeout(at(59_000));
    assert!(job.lifecycle.is_stopping());
    job.handle_timeout(at(60_100));
    assert_eq!(job.outcome(), Some(Outcome::Stopped));
}
