//! The size of the persisted job, and its compatibility with other releases.

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{FileList, RecordRange};
use serde_json::json;

use super::super::*;
use super::directed::{actions, at, connect, deliver, started};
use crate::job::testing::{dataset, largest, spec};

fn json_bytes(record: &PersistedJob) -> usize {
    serde_json::to_string(record).unwrap().len()
}

fn read(record: &PersistedJob) -> PersistedJob {
    serde_json::from_str(&serde_json::to_string(record).unwrap()).unwrap()
}

/// The persisted job as a successor master reads it.
pub(super) fn read_back(record: &PersistedJob) -> PersistedJob {
    let mut read = read(record);
    if let Some(list) = record.file_list() {
        read.attach_file_list(list.clone()).unwrap();
    }
    read
}

/// A job with a ledger of many ranges, in the middle of an epoch of 200 million records.
fn half_way() -> Job {
    let mut job = Job::new(JobSpec { num_workers: 3, ..spec() });
    let list = dataset(&[200_000_000]);
    job.data.describe(list, None, &job.spec).unwrap();
    let ranges: Vec<RecordRange> = (0..24_400)
        .map(|i| RecordRange { epoch: 0, start: i * 8192, end: i * 8192 + 4096 })
        .collect();
    job.data.cache_mut().unwrap().absorb(&ranges).unwrap();
    job.data.set_step(1000);
    while job.poll_action().is_some() {}
    job
}

#[test]
fn the_largest_persisted_job_is_within_its_documented_size() {
    let record = largest().to_persisted();
    let bytes = json_bytes(&record);
    assert!(bytes < 640 << 10, "{} KiB", bytes >> 10);
    // No part was omitted, except for those that are truncated.
    let json = serde_json::to_value(&record).unwrap();
    let lens = [
        "launches",
        "membership/members",
        "previous_ring",
        "history/memberships",
        "history/failed_shards",
        "history/evaluations/all",
    ]
    .map(|path| json.pointer(&format!("/{path}")).unwrap().as_array().unwrap().len());
    assert!(lens[..3] == [1024; 3] && lens[3..].iter().all(|len| *len > 0), "{lens:?}");
    // The newest evaluations and the newest membership changes are retained.
    assert_eq!(json["history"]["evaluations"]["all"][lens[5] - 1]["step"], 999);
    assert_eq!(json["history"]["memberships"][lens[3] - 1]["generation"], 9999);
}

#[test]
fn a_job_that_ended_within_an_epoch_persists_only_its_totals() {
    let mut job = half_way();
    connect(&mut job, 1);
    job.end(at(2), Outcome::Stopped, None);
    let record = job.to_persisted();
    assert!(json_bytes(&record) < 8 << 10, "{} bytes", json_bytes(&record));
    let next = Job::restore(read_back(&record), at(3)).unwrap();
    assert_eq!(next.summary(at(3)).records, job.summary(at(3)).records);
    assert!(next.summary(at(3)).records.counted > 99_000_000);
}

#[test]
fn the_file_list_is_persisted_separately_and_only_the_same_list_is_accepted() {
    let list = |n: u64| FileList::pack((0..n).map(|i| (format!("/data/{i:090}"), 1)));
    let mut job = Job::new(JobSpec { ..spec() });
    job.data.describe(list(15_000), None, &job.spec).unwrap();
    let record = job.to_persisted();
    assert!(json_bytes(&record) < 4 << 10, "{} bytes", json_bytes(&record));
    let mut read = read(&record);
    assert_eq!(read.data(), Some(DatasetFingerprint::of(&list(15_000))));
    assert!(
        Job::restore(read.clone(), at(0))
            .unwrap_err()
            .contains("list of the data set's files is missing")
    );
    let error = read.attach_file_list(list(15_001)).unwrap_err();
    assert!(error.contains("15001 files") && error.contains("15000 files"), "{error}");
    read.attach_file_list(list(15_000)).unwrap();
    assert_eq!(Job::restore(read, at(0)).unwrap().to_persisted().data, record.data);
}

/// Within one version of the format.
/// The master before had reserved further launches, and generations, and could not write that.
#[test]
fn no_generation_is_used_again_if_a_launch_shows_that_writes_have_failed() {
    let record = half_way().to_persisted();
    let next_after = |noted| {
        let mut record = record.clone();
        record.note_outdated(LaunchId(noted));
        record.generation.0
    };
    let (launches, generations) = (record.launches_reserved, record.generations_reserved.0);
    assert_eq!(next_after(launches), generations);
    assert_eq!(next_after(launches + 1), generations + 16);
}

#[test]
fn persisted_jobs_with_unknown_fields_are_read() {
    let mut job = started(JobSpec { num_workers: 2, ..spec() }, &[8, 4]);
    let record = job.to_persisted();
    let mut newer = serde_json::to_value(&record).unwrap();
    newer["unheard_of"] = json!({"deep": [1, 2]});
    newer["history"]["unheard_of"] = json!(7);
    newer["launches"][0]["unheard_of"] = json!("text");
    let mut read: PersistedJob = serde_json::from_value(newer).unwrap();
    read.attach_file_list(dataset(&[8, 4])).unwrap();
    assert_eq!(read, record);
    assert_eq!(actions(&mut job), []);
}

#[test]
fn a_refused_write_of_the_persisted_job_fails_the_job_with_the_reason() {
    let mut job = started(JobSpec { num_workers: 2, ..spec() }, &[8]);
    job.handle(at(5), Event::PersistDelayed { reason: "no answer".into() });
    assert_eq!(
        job.status(at(5)).events.last().unwrap(),
        "the persisted job is not stored yet: no answer"
    );
    assert_eq!(&*job.status(at(5)).state, "running");
    job.handle(at(6), Event::PersistRefused { reason: "it takes 2000 KiB".into() });
    let summary = job.summary(at(6));
    assert_eq!(summary.error.unwrap(), "the persisted job can't be stored: it takes 2000 KiB");
    assert_eq!(&*job.status(at(6)).state, "ending");
}

#[test]
fn the_log_states_the_numbers_of_records_and_files_and_of_the_shards_of_inference() {
    let work = Work::Evaluate { model: "m".into() };
    let shards = JobSpec {
        records_per_shard: std::num::NonZeroU64::new(1),
        options: WorkerOptions { work, ..spec().options },
        ..spec()
    };
    for (spec, expected) in [
        (spec(), "data set: 15 records in 15 files"),
        (shards, "data set: 15 records in 15 files, 15 shards of 1 record"),
    ] {
        let mut job = Job::new(spec);
        connect(&mut job, 1);
        deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[1; 15])), None));
        let events = job.status(at(0)).events;
        assert!(events.contains(&expected.to_owned()), "{events:?}");
    }
}
