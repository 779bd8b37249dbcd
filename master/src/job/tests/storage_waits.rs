//! Workers that wait for storage.

use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::super::testing::spec;
use super::super::*;
use super::directed::*;

fn waits(storage: Option<&str>, ms: u64) -> FromWorker {
    FromWorker::StorageWait {
        storage: storage.map(str::to_owned),
        waited: Duration::from_millis(ms),
    }
}

/// What was said of storage.
fn told(job: &Job) -> Vec<String> {
    job.status(at(99)).events.into_iter().filter(|line| line.contains("storage")).collect()
}

#[test]
fn an_outage_is_told_once_and_its_end_once_and_the_time_is_counted() {
    let mut job = started(spec(), &[20]);
    say(&mut job, 3, waits(Some("s3://b/x: no answer"), 100));
    say(&mut job, 1, waits(Some("s3://b/y: no answer"), 200));
    say(&mut job, 3, waits(Some("s3://b/x: no answer"), 5000));
    assert_eq!(told(&job), ["worker 3 waits for storage: s3://b/x: no answer"]);
    say(&mut job, 1, waits(None, 5800));
    assert_eq!(told(&job).len(), 1, "one still waits");
    say(&mut job, 3, waits(None, 0));
    assert_eq!(told(&job)[1..], ["storage answers again; workers waited for up to 6.0 s"]);
    assert_eq!(job.snapshot(at(1)).counters.storage_wait, Duration::from_millis(11_100));
    say(&mut job, 2, waits(Some("s3://b/x: no answer"), 100));
    assert_eq!(told(&job).len(), 3, "the next one is another one");
}

#[test]
fn who_is_gone_waits_no_longer_and_nothing_is_counted_against_who_waits() {
    let mut job = started(spec(), &[20]);
    say(&mut job, 3, waits(Some("s3://b"), 100));
    job.handle(at(1), Event::Disconnected { worker: WorkerId(3) });
    say(&mut job, 1, waits(Some("s3://b"), 100));
    say(&mut job, 1, waits(None, 100));
    let told = told(&job);
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[1].starts_with("storage answers again"), "{told:?}");
    assert_eq!(job.summary(at(2)).failed_shards, []);
}
