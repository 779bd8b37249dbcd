//! The size of the persisted job, and its compatibility with other releases.

use elasticdl_proto::{FileList, RecordRange};
use serde_json::json;

use super::super::*;
use super::directed::{actions, at, started};
use crate::job::data::lease_table::LeaseTable;
use crate::job::data::shards::Shards;
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

/// A job in the middle of a shuffled epoch of 200 million records: every other shard is absorbed.
fn half_way() -> Job {
    let mut job = Job::new(JobSpec { num_workers: 3, ..spec() });
    let list = dataset(&[200_000_000]);
    job.data.describe(list, &job.spec).unwrap();
    let leases = job.data.leases_mut().unwrap();
    let shards = leases.shards();
    let ranges: Vec<RecordRange> = (0..shards.len())
        .step_by(2)
        .map(|shard| shards.range(shard))
        .map(|r| RecordRange { epoch: 0, start: r.start, end: r.end })
        .collect();
    assert!(ranges.len() > 20_000);
    leases.commit(1000, &ranges).unwrap();
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
        "before",
        "story/memberships",
        "story/failed_shards",
        "story/evaluations/all",
    ]
    .map(|path| json.pointer(&format!("/{path}")).unwrap().as_array().unwrap().len());
    assert!(lens[..3] == [1024; 3] && lens[3..].iter().all(|len| *len > 0), "{lens:?}");
    // The newest evaluations and the newest membership changes are retained.
    assert_eq!(json["story"]["evaluations"]["all"][lens[5] - 1]["step"], 999);
    assert_eq!(json["story"]["memberships"][lens[3] - 1]["generation"], 9999);
}

#[test]
fn a_job_that_ended_within_a_shuffled_epoch_persists_only_its_totals() {
    let mut job = half_way();
    let launch = LaunchId(1);
    job.handle(
        at(1),
        Event::Connected {
            connection: ConnectionId(1),
            launch,
            address: "127.0.0.1:1".parse().unwrap(),
            pid: 7,
            resume: None,
        },
    );
    job.end(at(2), Outcome::Stopped, None);
    let record = job.to_persisted();
    assert!(json_bytes(&record) < 8 << 10, "{} bytes", json_bytes(&record));
    let next = Job::restore(read_back(&record), at(3)).unwrap();
    assert_eq!(next.summary(at(3)).records, job.summary(at(3)).records);
    assert!(next.summary(at(3)).records.counted > 99_000_000);
}

#[test]
fn totals_are_those_of_the_ledger_in_every_epoch() {
    for files in [&[1][..], &[2, 3]] {
        let spec = JobSpec { records_per_shard: std::num::NonZeroU64::new(1), ..spec() };
        let list = dataset(files);
        let records = list.records();
        let per_worker = Batch::PerWorker(std::num::NonZeroU64::MIN);
        let spec = JobSpec { batch: per_worker, epochs: 2, ..spec };
        for mask in 0..1u32 << (2 * records) {
            let mut all = LeaseTable::new(Shards::cut(&list, &spec).unwrap(), 2);
            let absorbed = (0..2 * records).filter(|i| mask >> i & 1 == 1);
            let range = |i: u64| RecordRange {
                epoch: (i / records) as u32,
                start: i % records,
                end: i % records + 1,
            };
            all.commit(1, &absorbed.map(range).collect::<Vec<_>>()).unwrap();
            let totals = all.check(&all.totals()).unwrap();
            let counts = |l: &elasticdl_proto::Ledger| (l.epoch(), l.counted(), l.repeated());
            assert_eq!(counts(&totals), counts(all.ledger()), "{mask:b}");
        }
    }
}

#[test]
fn the_file_list_is_persisted_separately_and_only_the_same_list_is_accepted() {
    let list = |n: u64| FileList::pack((0..n).map(|i| (format!("/data/{i:090}"), 1)));
    let mut job = Job::new(JobSpec { shuffle: false, ..spec() });
    job.data.describe(list(15_000), &job.spec).unwrap();
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

#[test]
fn persisted_jobs_of_older_and_newer_releases_are_read() {
    let mut job = started(JobSpec { num_workers: 2, shuffle: false, ..spec() }, &[8, 4]);
    let record = job.to_persisted();
    let mut old = serde_json::to_value(&record).unwrap();
    // Version 1 contained the list of files, and some fields were added later.
    for absent in ["data", "masters", "results"] {
        old.as_object_mut().unwrap().remove(absent);
    }
    let file = |path: &str, records: u64| json!({"path": path, "records": records});
    old["dataset"] = json!({"files": [file("file-0", 8), file("file-1", 4)]});
    let mut read: PersistedJob = serde_json::from_value(old).unwrap();
    assert_eq!(read.file_list(), Some(&dataset(&[8, 4])));
    assert_eq!(Job::restore(read.clone(), at(0)).unwrap().to_persisted().data, record.data);
    (read.data, read.masters) = (record.data, record.masters);
    assert_eq!(read, record);
    let mut newer = serde_json::to_value(&record).unwrap();
    newer["unheard_of"] = json!({"deep": [1, 2]});
    newer["story"]["unheard_of"] = json!(7);
    newer["launches"][0]["unheard_of"] = json!("text");
    let mut read: PersistedJob = serde_json::from_value(newer).unwrap();
    read.attach_file_list(dataset(&[8, 4])).unwrap();
    assert_eq!(read, record);
    assert_eq!(actions(&mut job), []);
}

#[test]
fn a_refused_write_of_the_persisted_job_fails_the_job_with_the_reason() {
    let mut job = started(JobSpec { num_workers: 2, shuffle: false, ..spec() }, &[8]);
    job.handle(at(5), Event::PersistDelayed { reason: "no answer".into() });
    assert_eq!(
        job.status(at(5)).events.last().unwrap(),
        "the job's record is not stored yet: no answer"
    );
    assert_eq!(&*job.status(at(5)).state, "running");
    job.handle(at(6), Event::PersistRefused { reason: "it takes 2000 KiB".into() });
    let summary = job.summary(at(6));
    assert_eq!(summary.error.unwrap(), "the job's record can't be stored: it takes 2000 KiB");
    assert_eq!(&*job.status(at(6)).state, "ending");
}

#[test]
fn the_log_states_the_numbers_of_shards_and_files() {
    let mut job = Job::new(spec());
    job.handle(
        at(1),
        Event::Connected {
            connection: ConnectionId(1),
            launch: LaunchId(1),
            address: "127.0.0.1:1".parse().unwrap(),
            pid: 7,
            resume: None,
        },
    );
    let worker = elasticdl_proto::WorkerId(1);
    let message = WorkerMessage::Described(Ok(dataset(&[1; 15])));
    job.handle(at(2), Event::Message { worker, message });
    let events = job.status(at(2)).events;
    assert!(
        events.contains(&"data set: 15 records in 15 files, 15 shards of 1 record".to_owned()),
        "{events:?}"
    );
}
