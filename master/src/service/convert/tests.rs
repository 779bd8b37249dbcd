//! Tests of the conversions between the schema and the core.

use std::num::NonZeroU64;

use super::*;
use worker_message::Kind;

fn range(epoch: u32, start: u64, end: u64) -> v1::Range {
    v1::Range { epoch, start, end }
}

fn full_ledger() -> v1::Ledger {
    v1::Ledger { epochs_complete: 1, ranges: vec![range(1, 2, 5)], repeated_records: 3 }
}

fn report() -> LedgerReport {
    let ranges = vec![RecordRange { epoch: 1, start: 2, end: 5 }];
    LedgerReport { epochs_complete: 1, ranges, repeated: 3 }
}

fn described(files: Vec<(&str, u64)>) -> Kind {
    let files = files
        .into_iter()
        .map(|(path, records)| v1::File { path: path.into(), records, version: None })
        .collect();
    let dataset = v1::described::Outcome::Dataset(v1::Dataset { files, ..Default::default() });
    Kind::Described(v1::Described { outcome: Some(dataset) })
}

fn done(metrics: &[(&str, f64)]) -> Kind {
    let metrics = metrics.iter().map(|&(name, sum)| (name.into(), sum)).collect();
    Kind::Done(v1::Done { range: Some(range(0, 0, 8)), metrics })
}

fn commit() -> v1::Committed {
    v1::Committed {
        generation: 4,
        step: 9,
        ranges: vec![range(0, 0, 8)],
        loss_sum: 2.5,
        records: 8,
        compute_us: vec![10, 20],
        times: Some(v1::StepTimes { steps: 2, step_us: 900, reduce_us: 300 }),
        steps_skipped: 1,
    }
}

fn end() -> v1::Finished {
    v1::Finished {
        generation: 4,
        step: 9,
        digest: u64::MAX,
        ledger: Some(full_ledger()),
        records_trained: 8,
        stopped_early: false,
        summary: Some("done".into()),
        failure: Some(v1::FinishedFailure { error: "NaN".into(), ranges: vec![range(0, 0, 8)] }),
        suspended: true,
        steps_skipped: 1,
        exported: true,
    }
}

fn convert(kind: Kind) -> Result<FromWorker, String> {
    from_worker(v1::WorkerMessage { kind: Some(kind) }).map_err(|status| status.message().into())
}

#[test]
fn every_message_keeps_every_field() {
    let generation = Generation(4);
    let error = v1::described::Outcome::Error("no such file".into());
    let phases = v1::Phases {
        detect_us: 1,
        abort_us: 6,
        agree_us: 2,
        connect_us: 3,
        state_us: 4,
        first_step_us: 5,
    };
    let table = [
        (
            described(vec![("a", 3), ("b", 0)]),
            FromWorker::Described(Ok(FileList::pack([("a", 3), ("b", 0)]))),
        ),
        (
            Kind::Described(v1::Described { outcome: Some(error) }),
            FromWorker::Described(Err("no such file".into())),
        ),
        (Kind::Ready(v1::Ready { parameters: 5 }), FromWorker::Ready { parameters: 5 }),
        (
            Kind::LeaseRequest(v1::LeaseRequest { epoch: 2, records: 64 }),
            FromWorker::LeaseRequest { epoch: 2, records: 64 },
        ),
        (
            Kind::Formed(v1::Formed { generation: 4, step: 0, ledger: Some(full_ledger()) }),
            FromWorker::Formed { generation, step: 0, ledger: report() },
        ),
        (
            Kind::AllreduceTransport(v1::AllreduceTransport { generation: 4, what: "TCP".into() }),
            FromWorker::AllreduceTransport { generation, what: "TCP".into() },
        ),
        (
            Kind::Committed(commit()),
            FromWorker::Committed(Committed {
                generation,
                step: 9,
                ranges: vec![RecordRange { epoch: 0, start: 0, end: 8 }],
                loss_sum: 2.5,
                records: 8,
                compute_us: vec![10, 20],
                times: StepTimes { steps: 2, step_us: 900, reduce_us: 300 },
                steps_skipped: 1,
            }),
        ),
        (
            Kind::Resumed(v1::Resumed { generation: 4, step: 9, phases: Some(phases) }),
            FromWorker::Resumed {
                generation,
                step: 9,
                phases: Phases {
                    detect_us: 1,
                    abort_us: 6,
                    agree_us: 2,
                    connect_us: 3,
                    state_us: 4,
                    first_step_us: 5,
                },
            },
        ),
        (Kind::Heartbeat(v1::Heartbeat { stall: None }), FromWorker::Heartbeat(None)),
        (
            Kind::Heartbeat(v1::Heartbeat {
                stall: Some(v1::Stall {
                    generation: 4,
                    operation: 7,
                    received: 32,
                    for_ms: 900,
                    sent: 40,
                    waits_for_next: true,
                }),
            }),
            FromWorker::Heartbeat(Some(Stall {
                generation,
                operation: 7,
                received: 32,
                sent: 40,
                waits_for_next: true,
                since: Duration::from_millis(900),
            })),
        ),
        (
            Kind::Broken(v1::Broken {
                generation: 4,
                suspect: Some(3),
                error: "reset".into(),
                unreachable: true,
            }),
            FromWorker::Broken {
                generation,
                suspect: Some(WorkerId(3)),
                error: "reset".into(),
                unreachable: true,
            },
        ),
        (
            Kind::Failed(v1::Failed {
                error: "bad".into(),
                ranges: vec![range(1, 2, 3)],
                fatal: true,
            }),
            FromWorker::Failed {
                error: "bad".into(),
                ranges: vec![RecordRange { epoch: 1, start: 2, end: 3 }],
                fatal: true,
            },
        ),
        (Kind::Leaving(v1::Leaving {}), FromWorker::Leaving),
        (
            done(&[("loss", 0.5), ("a", -1.0)]),
            FromWorker::ShardDone {
                range: RecordRange { epoch: 0, start: 0, end: 8 },
                metrics: [("loss".into(), 0.5), ("a".into(), -1.0)].into(),
            },
        ),
        (
            Kind::Finished(end()),
            FromWorker::Finished(Finished {
                generation,
                step: 9,
                digest: u64::MAX,
                ledger: report(),
                records_trained: 8,
                stopped_early: false,
                summary: Some("done".into()),
                failure: Some(Failure {
                    error: "NaN".into(),
                    ranges: vec![RecordRange { epoch: 0, start: 0, end: 8 }],
                }),
                suspended: true,
                steps_skipped: 1,
                exported: true,
            }),
        ),
    ];
    for (message, expected) in table {
        assert_eq!(convert(message.clone()), Ok(expected), "{message:?}");
    }
}

#[test]
fn a_field_out_of_bounds_is_refused_by_name() {
    let names: Vec<String> = (0..300).map(|i| i.to_string()).collect();
    let many: Vec<(&str, f64)> = names.iter().map(|name| (name.as_str(), 1.0)).collect();
    let endless = v1::StepTimes { reduce_us: u64::MAX, ..v1::StepTimes::default() };
    let long = "x".repeat(PATH_BYTES_MAX + 1);
    let huge = DATASET_RECORDS_MAX;
    let formed = |ledger| Kind::Formed(v1::Formed { generation: 1, step: 1, ledger });
    let with_ranges = |ranges| Kind::Committed(v1::Committed { ranges, ..commit() });
    let slow = v1::Phases { state_us: u64::MAX, ..Default::default() };
    let table = [
        (Kind::Hello(v1::Hello::default()), "hello"),
        (Kind::Described(v1::Described { outcome: None }), "described.outcome"),
        (described(vec![("", 1)]), "file.path"),
        (described(vec![(&long, 1)]), "file.path"),
        (described(vec![("a", huge + 1)]), "file.records"),
        (described(vec![("a", huge), ("b", 1)]), "records of all files"),
        (described(vec![("a", u64::MAX), ("b", u64::MAX)]), "file.records"),
        (Kind::Ready(v1::Ready { parameters: 0 }), "ready.parameters"),
        (Kind::Ready(v1::Ready { parameters: u64::MAX }), "ready.parameters"),
        (Kind::LeaseRequest(v1::LeaseRequest { epoch: 0, records: 0 }), "lease_request.records"),
        (
            Kind::LeaseRequest(v1::LeaseRequest { epoch: EPOCHS_MAX, records: 1 }),
            "lease_request.epoch",
        ),
        (formed(None), "formed.ledger"),
        (formed(Some(v1::Ledger { epochs_complete: u32::MAX, ..full_ledger() })), "formed.ledger"),
        (Kind::Formed(v1::Formed { generation: 0, step: 1, ledger: None }), "formed.generation"),
        (Kind::Formed(v1::Formed { generation: 1, step: u64::MAX, ledger: None }), "formed.step"),
        (with_ranges(vec![range(0, 3, 3)]), "committed.ranges"),
        (with_ranges(vec![range(0, 4, 3)]), "committed.ranges"),
        (with_ranges(vec![range(0, 0, huge + 1)]), "committed.ranges"),
        (with_ranges(vec![range(u32::MAX, 0, 1)]), "committed.ranges"),
        (
            Kind::Committed(v1::Committed { generation: u64::MAX, ..commit() }),
            "committed.generation",
        ),
        (Kind::Committed(v1::Committed { records: u64::MAX, ..commit() }), "committed.records"),
        (
            Kind::Committed(v1::Committed { compute_us: vec![0; 2000], ..commit() }),
            "committed.compute_us",
        ),
        (Kind::Committed(v1::Committed { times: Some(endless), ..commit() }), "times.reduce_us"),
        (Kind::Done(v1::Done::default()), "done.range"),
        (done(&[("", 1.0)]), "done.metrics: names"),
        (done(&[("a", f64::NAN)]), "done.metrics: a"),
        (done(&[(&"a".repeat(300), 1.0)]), "done.metrics: names"),
        (done(&many), "done.metrics"),
        (Kind::Resumed(v1::Resumed { generation: 1, step: 0, phases: None }), "resumed.step"),
        (Kind::Resumed(v1::Resumed { generation: 1, step: 1, phases: None }), "resumed.phases"),
        (
            Kind::Resumed(v1::Resumed { generation: 1, step: 1, phases: Some(slow) }),
            "phases.state_us",
        ),
        (Kind::Broken(v1::Broken::default()), "broken.generation"),
        (
            Kind::AllreduceTransport(v1::AllreduceTransport::default()),
            "allreduce_transport.generation",
        ),
        (Kind::Heartbeat(v1::Heartbeat { stall: Some(v1::Stall::default()) }), "stall.generation"),
        (Kind::Finished(v1::Finished { ledger: None, ..end() }), "finished.ledger"),
        (Kind::Finished(v1::Finished { step: u64::MAX, ..end() }), "finished.step"),
    ];
    for (message, field) in table {
        let shown = format!("{message:?}").chars().take(200).collect::<String>();
        let error = convert(message).expect_err(&shown);
        assert!(error.contains(field), "{shown}: {error}");
    }
    assert!(from_worker(v1::WorkerMessage { kind: None }).is_err());
}

#[test]
fn a_long_text_is_truncated_at_a_character_boundary() {
    let error = "ä".repeat(ERROR_BYTES_MAX);
    let failed = convert(Kind::Failed(v1::Failed { error, ranges: Vec::new(), fatal: false }));
    let Ok(FromWorker::Failed { error, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!(error, format!("{}…", "ä".repeat(ERROR_BYTES_MAX / 2)));
}

#[test]
fn a_welcome_carries_the_jobs_options() {
    let records = NonZeroU64::new(64).unwrap();
    let spec = JobSpec {
        name: "j".into(),
        training_data: "d".into(),
        num_workers: 2,
        min_workers: 1,
        max_workers: 4,
        workers_per_pod: 1,
        epochs: 3,
        max_steps: Some(9),
        batch: Batch::PerWorker(records),
        records_per_shard: None,
        shuffle: true,
        seed: 5,
        max_worker_restarts: 1,
        worker_timeout: Some(Duration::from_secs(1)),
        master_timeout: Duration::from_secs(30),
        checkpoints: Some(CheckpointSpec {
            dir: "/c".into(),
            every: CheckpointEvery::Time(Duration::from_secs(30)),
            keep: 4,
            exclusive: true,
        }),
        resume_from: Some("s3://b".into()),
        validation: Some(ValidationSpec {
            data: "v".into(),
            every: Some(7),
            metric: "accuracy".into(),
            highest: true,
            patience: Some(2),
        }),
        work: Work::Train { export: Some("/m".into()) },
        wire_dtype: WireDtype::F16,
        channels: 4,
        on_nonfinite: OnNonfinite::Skip,
        restart_without_checkpoint: false,
        grace_period: Duration::from_secs(30),
    };
    let expected = |batch| v1::Welcome {
        worker: 8,
        options: Some(v1::Options {
            training_data: "d".into(),
            epochs: 3,
            max_steps: Some(9),
            batch: Some(batch),
            shuffle: true,
            seed: 5,
            heartbeat_ms: Some(100),
            worker_timeout_ms: Some(1000),
            checkpoints: Some(v1::CheckpointOptions {
                dir: "/c".into(),
                every: Some(v1::checkpoint_options::Every::Ms(30_000)),
                keep: 4,
                exclusive: true,
            }),
            resume_from: Some("s3://b".into()),
            work: Some(v1::options::Work::Train(v1::Train {
                export: Some("/m".into()),
                validation: Some(v1::Validation {
                    data: "v".into(),
                    every: Some(7),
                    metric: "accuracy".into(),
                    highest: true,
                    patience: Some(2),
                }),
            })),
            wire_dtype: v1::WireDtype::F16.into(),
            channels: 4,
            skip_nonfinite: true,
            leave_timeout_ms: Some(28_000),
        }),
        incarnation: 3,
    };
    let converted = |spec: &JobSpec| welcome(WorkerId(8), spec, 3).kind;
    let per_worker = expected(v1::options::Batch::MinibatchSize(64));
    assert_eq!(converted(&spec), Some(master_message::Kind::Welcome(per_worker)));
    let global = expected(v1::options::Batch::GlobalBatchSize(64));
    let spec = JobSpec { batch: Batch::Global(records), ..spec };
    assert_eq!(converted(&spec), Some(master_message::Kind::Welcome(global)));
}

#[test]
fn a_membership_names_members_in_ring_order() {
    let members = vec![
        (WorkerId(2), "127.0.0.1:2".parse().unwrap()),
        (WorkerId(1), "127.0.0.1:1".parse().unwrap()),
    ];
    let membership = Membership { generation: Generation(3), members, abort: true };
    let member = |worker, address: &str| v1::Member { worker, address: address.into() };
    let expected = v1::Membership {
        generation: 3,
        members: vec![member(2, "127.0.0.1:2"), member(1, "127.0.0.1:1")],
        abort: true,
    };
    let sent = to_worker(ToWorker::Membership(membership)).kind;
    assert_eq!(sent, Some(master_message::Kind::Membership(expected)));
}

#[test]
fn a_status_keeps_every_field() {
    let record = MembershipChange {
        generation: Generation(3),
        cause: job::Cause::Hung,
        world_size: 2,
        at_step: 40,
        gap_ms: Some(21.006),
        detect_ms: Some(1.001),
        abort_ms: Some(2.001),
        agree_ms: Some(3.001),
        connect_ms: Some(4.001),
        state_ms: Some(5.001),
        first_step_ms: Some(6.001),
        lost: vec![WorkerId(4)],
        left: vec![WorkerId(5)],
        joined: vec![WorkerId(6), WorkerId(7)],
    };
    let unfinished = MembershipChange {
        generation: Generation(4),
        gap_ms: None,
        abort_ms: None,
        ..record.clone()
    };
    let worker = job::WorkerStatus {
        worker: WorkerId(6),
        pid: 77,
        rank: Some(1),
        state: "training",
        step: Some(41),
        compute_us: 1500,
        straggler: true,
        leased_records: 64,
    };
    let status = job::Status {
        job: "mnist".into(),
        state: "running",
        generation: Generation(4),
        step: 41,
        steps_skipped: 0,
        epoch: 1,
        epochs: 3,
        records_counted: 100,
        records_expected: 300,
        loss: Some(0.5),
        records_per_s: 12.5,
        workers_desired: 2,
        workers_pending: vec![job::LaunchStatus {
            launch: LaunchId(8),
            slot: 2,
            state: "unschedulable",
            reason: Some("full".into()),
        }],
        priority_tiers: vec![job::PriorityTierStatus {
            class: "core".into(),
            launches: 3,
            workers: 2,
        }],
        allreduce_transport: Some("TCP".into()),
        evaluated: Some(Evaluated {
            step: 40,
            records: 5,
            metrics: [("loss".into(), Some(0.5))].into(),
        }),
        checkpoints: Some(job::CheckpointsSummary {
            dir: Some("/c".into()),
            newest: Some(job::SavedCheckpoint { step: 40, name: "n".into(), bytes: 9 }),
            saved: 2,
            failed: 1,
            error: Some("full".into()),
            ..job::CheckpointsSummary::default()
        }),
        shards: Some(job::ShardCounts { todo: 5, leased: 3, done: 2 }),
        memberships: vec![record, unfinished],
        workers: vec![worker],
        events: vec!["generation 3".into()],
        events_emitted: 30,
        progress: 0.25,
    };
    let phases = v1::Phases {
        detect_us: 1001,
        abort_us: 2001,
        agree_us: 3001,
        connect_us: 4001,
        state_us: 5001,
        first_step_us: 6001,
    };
    let record = v1::MembershipChange {
        generation: 3,
        cause: "hung".into(),
        world_size: 2,
        at_step: 40,
        phases: Some(phases),
        lost: vec![4],
        left: vec![5],
        joined: vec![6, 7],
    };
    let worker = v1::WorkerStatus {
        worker: 6,
        pid: 77,
        rank: Some(1),
        state: "training".into(),
        compute_us: 1500,
        leased_records: 64,
        step: Some(41),
        straggler: true,
    };
    let expected = v1::StatusReply {
        job: "mnist".into(),
        state: "running".into(),
        generation: 4,
        step: 41,
        epoch: 1,
        epochs: 3,
        records_counted: 100,
        records_expected: 300,
        loss: Some(0.5),
        records_per_s: 12.5,
        workers_desired: 2,
        workers_pending: vec![v1::LaunchStatus {
            launch: 8,
            slot: 2,
            state: "unschedulable".into(),
            reason: Some("full".into()),
        }],
        priority_tiers: vec![v1::PriorityTierStatus {
            class: "core".into(),
            launches: 3,
            workers: 2,
        }],
        workers: vec![worker],
        events: vec!["generation 3".into()],
        progress: 0.25,
        shards: Some(v1::ShardCounts { todo: 5, leased: 3, done: 2 }),
        memberships: vec![
            record.clone(),
            v1::MembershipChange { generation: 4, phases: None, ..record },
        ],
        events_emitted: 30,
        allreduce_transport: Some("TCP".into()),
        evaluated: Some(v1::Evaluated {
            step: 40,
            records: 5,
            metrics: [("loss".into(), 0.5)].into(),
        }),
        checkpoints: Some(v1::CheckpointStatus {
            dir: "/c".into(),
            newest: Some(v1::CheckpointSaved { step: 40, name: "n".into(), bytes: 9 }),
            saved: 2,
            failed: 1,
            error: Some("full".into()),
        }),
    };
    assert_eq!(status_reply(status), expected);
}

#[test]
fn checkpoint_reports_are_checked_and_truncated() {
    use v1::checkpoint_news::Kind as News;
    let converted = |kind| convert(Kind::Checkpoint(v1::CheckpointNews { kind }));
    let name = "x".repeat(300);
    let saved = converted(Some(News::Saved(v1::CheckpointSaved { step: 3, name, bytes: 9 })));
    let Ok(FromWorker::Checkpoint(CheckpointNews::Saved { step: 3, name, bytes: 9 })) = saved
    else {
        panic!("{saved:?}")
    };
    assert_eq!(name, format!("{}…", "x".repeat(256)));
    assert!(converted(None).is_err());
    let restored =
        |step| converted(Some(News::Restored(v1::CheckpointRestored { step, name: "n".into() })));
    assert!(restored(STEPS_MAX).is_ok() && restored(STEPS_MAX + 1).is_err());
}

#[test]
fn an_evaluation_is_checked() {
    let metrics =
        |n: usize| (0..n).map(|i| (format!("{i}{}", "x".repeat(200)), f64::NAN)).collect();
    let converted = |n, records| {
        convert(Kind::Evaluated(v1::Evaluated { step: 3, records, metrics: metrics(n) }))
    };
    let Ok(FromWorker::Evaluated(Evaluated { step: 3, metrics, .. })) = converted(100, 1) else {
        panic!()
    };
    assert!(metrics.len() == 100 && metrics.keys().all(|name| name.len() <= 100 + '…'.len_utf8()));
    assert!(converted(101, 1).is_err() && converted(1, 0).is_err());
}

#[test]
fn a_long_list_of_files_is_sent_packed_and_a_short_one_unpacked() {
    let list = |files: u64| {
        FileList::pack((0..files).map(|i| (format!("/a/long/path/to/some/part-{i:080}"), i)))
    };
    let dataset = |list: &FileList| match to_worker(ToWorker::Prepare(list.clone())).kind {
        Some(master_message::Kind::Prepare(prepare)) => prepare.dataset.unwrap(),
        other => panic!("{other:?}"),
    };
    let short = list(10);
    assert_eq!((dataset(&short).files.len(), dataset(&short).packed.len()), (10, 0));
    let long = list(40_000);
    assert!(long.bytes() > 4 << 20);
    let sent = dataset(&long);
    assert!(sent.files.is_empty() && sent.packed.len() < 1 << 20);
    let described = |dataset| {
        let outcome = Some(v1::described::Outcome::Dataset(dataset));
        from_worker(v1::WorkerMessage { kind: Some(Kind::Described(v1::Described { outcome })) })
            .unwrap()
    };
    assert_eq!(described(sent), FromWorker::Described(Ok(long)));
    // A list that can't be read is reported as an error of the data set.
    let torn = v1::Dataset { packed: "nonsense".into(), ..v1::Dataset::default() };
    let FromWorker::Described(Err(error)) = described(torn) else {
        panic!("the list was accepted")
    };
    assert!(error.contains("the list of the data set's files can't be used"), "{error}");
}
