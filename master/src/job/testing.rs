//! Fixtures of the tests of this module.

use std::num::NonZeroU64;
use std::time::Duration;

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{Cause, FailedShard, FileList, Generation, MembershipChange, WorkerId};

use super::action::{Membership, Outcome};
use super::event::{Evaluated, Finished, LaunchId};
use super::group::generation::Group;
use super::job::Job;
use super::lifecycle::state::Phase;
use super::spec::{Batch, JobSpec, Work};
use super::time::Time;
use super::workers::slot_use::SlotUse;
use super::workers::state::{Disconnected, Launch, LaunchState};
use super::workers::table::WorkerTable;

/// A job of three workers and two epochs, with four records per step, and seed 7.
pub(crate) fn spec() -> JobSpec {
    JobSpec {
        max_worker_restarts: 3,
        restart_without_checkpoint: true,
        options: WorkerOptions {
            epochs: 2,
            seed: 7,
            // A leaving worker is released after 10 s.
            grace_period: Duration::from_secs(14),
            ..WorkerOptions::new("data", Batch::Global(NonZeroU64::new(4).unwrap()))
        },
        ..JobSpec::new("job", "data", 3, Batch::Global(NonZeroU64::new(4).unwrap()))
    }
}

/// A data set whose files have these numbers of records.
pub(super) fn dataset(files: &[u64]) -> FileList {
    FileList::pack(files.iter().enumerate().map(|(i, &records)| (format!("file-{i}"), records)))
}

/// A job whose persisted form is as large as possible.
pub(crate) fn largest() -> Job {
    const WORKERS: u32 = 1024;
    let long = |what: &str| format!("{what}{}", "\u{e4}\"".repeat(4096 / 3 - what.len()));
    let id = |i: u32| u64::MAX / 4 - u64::from(i) * 7_777_777;
    let mut job = Job::new(JobSpec {
        num_workers: WORKERS,
        max_workers: WORKERS,
        options: WorkerOptions {
            training_data: long("data"),
            resume_from: Some(long("from")),
            work: Work::Train { export: Some(long("export")) },
            ..spec().options
        },
        ..spec()
    });
    let address =
        |i: u32| format!("[fd00:1234:5678:9abc:def0:1234:5678:{i:04x}]:65535").parse().unwrap();
    job.workers = WorkerTable::new(1, 0..0);
    for i in 0..WORKERS {
        let disconnected = Disconnected {
            rank: Some(i),
            joined: Some(Generation(u64::MAX / 4)),
            ..Disconnected::default()
        };
        let launch =
            Launch::restored(i, LaunchState::Disconnected(disconnected), SlotUse::Kept, false);
        job.workers.restore(LaunchId(id(i)), launch);
    }
    let members = (0..WORKERS).map(|i| (WorkerId(id(i)), address(i))).collect();
    let published = Membership { generation: Generation(u64::MAX / 4), members, abort: true };
    let previous_ring = (0..WORKERS).map(|i| WorkerId(id(i))).collect();
    job.group =
        Group::restored(Some(published), Generation::default(), Some(previous_ring), |_| false);
    for generation in 0..10_000 {
        let named = |n: u32| (0..n).map(|i| WorkerId(id(i + generation))).collect();
        let record = MembershipChange {
            generation: Generation(generation.into()),
            cause: Cause::Lost,
            world_size: WORKERS,
            at_step: u64::MAX / 4,
            gap_ms: Some(98765.4375),
            detect_ms: Some(98765.4375),
            abort_ms: Some(98765.4375),
            agree_ms: Some(98765.4375),
            connect_ms: Some(98765.4375),
            state_ms: Some(98765.4375),
            first_step_ms: Some(98765.4375),
            lost: named(if generation == 9990 { WORKERS } else { 2 }),
            left: named(2),
            joined: named(4),
            promoted: named(5),
        };
        job.reporting.publish(Time::default(), record, Default::default());
    }
    for i in 0..100 {
        let (file, error) = (long("file"), "\u{1}".repeat(4096));
        job.reporting.fail_on(FailedShard {
            worker: WorkerId(id(i)),
            epoch: 1,
            file,
            start: 0,
            end: 1,
            error,
        });
    }
    let metrics = (0..100).map(|i| (format!("{i:0100}"), Some(f64::from(i) / 1024.0)));
    let metrics = std::collections::BTreeMap::from_iter(metrics);
    let evaluated = |step| Evaluated { step, records: u64::MAX / 4, metrics: metrics.clone() };
    job.reporting.set_evaluations((0..1000).map(evaluated).collect());
    let list = dataset(&[200_000_000]);
    job.data.describe(list, None, &job.spec).unwrap();
    let report = Finished {
        generation: Generation(u64::MAX / 4),
        step: u64::MAX / 4,
        digest: u64::MAX,
        records_trained: u64::MAX / 4,
        stopped_early: true,
        summary: Some("\u{1}".repeat(64 << 10)),
        steps_skipped: u64::MAX / 4,
        exported: true,
        ..Finished::default()
    };
    job.reporting.restore_ending(Some("\u{1}".repeat(4096)), Some(report));
    job.lifecycle.set_phase(Phase::Ending(Outcome::Failed));
    job
}
