//! Tests of the encoding and of the checks.

use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU64};
use std::time::Duration;

use super::{JoinRequest, JoinResponse, SharedMessage, Wire};
use crate::files::FileList;
use crate::ids::{Generation, LaunchId, WorkerId};
use crate::job::{
    Batch, CheckpointEvery, CheckpointSpec, Format, ValidationSpec, Welcome, WireDtype, Work,
    WorkerOptions,
};
use crate::limits::{DATASET_RECORDS_MAX, ERROR_BYTES_MAX, STEPS_MAX, WORKERS_MAX};
use crate::members::Members;
use crate::membership::{Hello, Location, Membership, Phases, Resume, Stall};
use crate::message::{
    CheckpointNews, Committed, Evaluated, Failure, Finished, Heartbeat, Kept, LedgerReport,
    MasterMessage, RankStep, StepTimes, WorkerMessage,
};
use crate::ranges::RecordRange;
use crate::row_touches::TablesStatus;
use crate::status::tests::full_status;

mod differences;

fn restored(step: u64, row_touches: u64) -> WorkerMessage {
    let (name, differences) = ("step-9".into(), "executable".into());
    WorkerMessage::Checkpoint(CheckpointNews::Restored { step, name, row_touches, differences })
}

/// What the other side receives.
fn received<M: Wire>(message: M) -> M {
    let mut bytes = Vec::new();
    message.encode(&mut None, &mut bytes);
    M::decode(&mut Members::default(), &mut &bytes[..]).unwrap()
}

/// What a master receives, or why it is invalid.
fn checked(message: WorkerMessage) -> Result<WorkerMessage, String> {
    match received(JoinRequest::Message(message)) {
        JoinRequest::Hello(hello) => panic!("{hello:?}"),
        JoinRequest::Invalid(reason) => Err(reason),
        JoinRequest::Message(message) => Ok(message),
    }
}

fn full_ledger() -> LedgerReport {
    let ranges = vec![RecordRange { epoch: 1, start: 2, end: 5 }];
    LedgerReport { epochs_complete: 1, ranges, repeated: 3 }
}

fn commit() -> Committed {
    let rank = |records, compute_us| RankStep {
        records,
        compute_us,
        input_us: 1,
        checkpoint_us: 7,
        table_bytes: 3_000,
    };
    Committed {
        generation: Generation(4),
        step: 9,
        ranges: vec![RecordRange { epoch: 0, start: 0, end: 8 }],
        loss_sum: 2.5,
        records: 8,
        metrics: [("accuracy".into(), 6.0)].into(),
        ranks: vec![rank(5, 10), rank(3, 20)],
        times: StepTimes { steps: 2, step_us: 900, reduce_us: 300 },
        steps_skipped: 1,
        learning_rate: Some(0.5),
        first_loss: Some(0.75),
        last_loss: Some(0.25),
        epoch_step: Some(8),
        tables: Some(Box::new(TablesStatus { rows: 30, touches: 64, shards_at_risk: 5 })),
    }
}

fn end() -> Finished {
    let ranges = vec![RecordRange { epoch: 0, start: 0, end: 8 }];
    Finished {
        generation: Generation(4),
        step: 9,
        digest: u64::MAX,
        ledger: full_ledger(),
        records_trained: 8,
        stopped_early: true,
        summary: Some("done".into()),
        failure: Some(Failure { error: "NaN".into(), ranges }),
        suspended: true,
        steps_skipped: 1,
        exported: true,
        row_touches: Some(crate::RowTouches { expected: 9, counted: 8 }),
    }
}

fn membership() -> Membership {
    let members = vec![
        (WorkerId(2), "127.0.0.1:2".parse().unwrap()),
        (WorkerId(1), "[::1]:1".parse().unwrap()),
    ];
    Membership { generation: Generation(3), members: members.into(), abort: true }
}

fn hello() -> Hello {
    Hello {
        job: "j".into(),
        launch: LaunchId(7),
        address: "127.0.0.1:9".parse().unwrap(),
        pid: 77,
        resume: Some(Resume {
            worker: WorkerId(8),
            membership: Some(membership()),
            parameters: Some(10),
            holds_state: true,
        }),
        incarnation: 3,
        location: Location { zone: "z".into(), rack: "r".into(), node: "n".into() },
    }
}

fn worker_messages() -> Vec<WorkerMessage> {
    let generation = Generation(4);
    let ranges = vec![RecordRange { epoch: 1, start: 2, end: 5 }];
    let ledger = full_ledger();
    let phases = Phases {
        detect_us: 1,
        abort_us: 6,
        agree_us: 2,
        connect_us: 3,
        state_us: 4,
        first_step_us: 5,
    };
    let stall = Stall {
        generation,
        operation: 7,
        received: 32,
        sent: 40,
        waits_for_next: true,
        since: Duration::from_millis(900),
    };
    let name = || "step-9".to_owned();
    vec![
        WorkerMessage::AllreduceTransport { generation, what: "TCP".into() },
        WorkerMessage::BestExport {
            step: 9,
            kept: Some(Kept { address: "/best.previous".into(), value: Some(0.25) }),
            error: None,
        },
        WorkerMessage::BestExport {
            step: 9,
            kept: None,
            error: Some("No space left on device".into()),
        },
        WorkerMessage::Broken {
            generation,
            suspect: Some(WorkerId(3)),
            error: "reset".into(),
            unreachable: true,
        },
        WorkerMessage::CaughtUp { step: 9 },
        WorkerMessage::Checkpoint(CheckpointNews::Damaged { name: name(), reason: "torn".into() }),
        WorkerMessage::Checkpoint(CheckpointNews::Failed { step: 9, error: "full".into() }),
        WorkerMessage::Checkpoint(CheckpointNews::OlderRows { name: Some(name()), missing: 7 }),
        restored(9, 8),
        WorkerMessage::Checkpoint(CheckpointNews::RowsLost { step: 9, shards: 2, row_touches: 7 }),
        WorkerMessage::Checkpoint(CheckpointNews::Saved { step: 9, name: name(), bytes: 7 }),
        WorkerMessage::Committed(commit()),
        WorkerMessage::Described(Ok(FileList::pack([("a", 3), ("b", 0)]))),
        WorkerMessage::Described(Err("no such file".into())),
        WorkerMessage::RecordsSkipped(crate::SkippedRecords {
            bad: 2,
            nulls: 1,
            first: vec!["a line 3: no".into()],
            files: 3,
            first_file: "_SUCCESS".into(),
        }),
        WorkerMessage::Evaluated(Evaluated {
            step: 9,
            records: 5,
            metrics: [("loss".into(), Some(0.5)), ("nan".into(), None)].into(),
        }),
        WorkerMessage::Diverged { error: "replicas differ".into(), has_majority: true },
        WorkerMessage::Failed { error: "bad".into(), ranges: ranges.clone(), fatal: true },
        WorkerMessage::Finished(end()),
        WorkerMessage::Formed { generation, step: 2, ledger },
        WorkerMessage::Heartbeat(Heartbeat::default()),
        WorkerMessage::Heartbeat(Heartbeat { stall: Some(stall), holds_state: true }),
        WorkerMessage::LeaseRequest { shards: 64 },
        WorkerMessage::Leaving,
        WorkerMessage::Ready { parameters: 5 },
        WorkerMessage::Reconnected { step: 9 },
        WorkerMessage::Resumed { generation, step: 9, phases },
        WorkerMessage::ShardDone {
            range: ranges[0],
            metrics: [("loss".into(), 0.5), ("a".into(), -1.0)].into(),
        },
        WorkerMessage::StorageWait { storage: None, waited: Duration::from_millis(5) },
        WorkerMessage::StorageWait { storage: Some("s3://b".into()), waited: Duration::ZERO },
    ]
}

#[test]
fn every_message_of_a_worker_keeps_every_field() {
    for message in worker_messages().into_iter().map(JoinRequest::Message) {
        assert_eq!(received(message.clone()), message);
    }
    let first = Hello { resume: None, incarnation: 0, location: Location::default(), ..hello() };
    for hello in [first, hello()] {
        let hello = JoinRequest::Hello(hello.into());
        assert_eq!(received(hello.clone()), hello);
    }
}

fn master_messages() -> Vec<MasterMessage> {
    vec![
        MasterMessage::Describe,
        MasterMessage::Drain,
        MasterMessage::Fetch(membership().members.to_vec()),
        MasterMessage::GiveUp,
        MasterMessage::Joiners(vec![WorkerId(4), WorkerId(5)]),
        MasterMessage::KeepCheckpoint,
        MasterMessage::Lease(vec![RecordRange { epoch: 1, start: 2, end: 5 }]),
        MasterMessage::Membership(membership()),
        MasterMessage::Prepare(FileList::pack([("a", 3), ("b", 0)])),
        MasterMessage::ReportStacks,
        MasterMessage::Shutdown("the end".into()),
        MasterMessage::Suspend,
    ]
}

#[test]
fn every_message_of_a_master_keeps_every_field() {
    for message in master_messages() {
        let message = JoinResponse::Message(message.into());
        assert_eq!(received(message.clone()), message);
        // The second worker receives the bytes that were encoded for the first.
        assert_eq!(received(message.clone()), message);
    }
}

fn options() -> WorkerOptions {
    let records = NonZeroU64::new(64).unwrap();
    WorkerOptions {
        training_data: "d".into(),
        epochs: 3,
        max_steps: Some(9),
        batch: Batch::PerWorker(records),
        seed: 5,
        heartbeat: Some(Duration::from_millis(100)),
        worker_timeout: Some(Duration::from_secs(1)),
        leave_timeout: Some(Duration::from_secs(28)),
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
            split: NonZeroU16::new(100),
            export_best: Some("/best".into()),
        }),
        work: Work::Train { export: Some("/m".into()) },
        wire_dtype: WireDtype::F16,
        channels: 4,
        skips_nonfinite: true,
        allows_mixed_builds: true,
        link_encryption: crate::LinkEncryption::On,
        bad_records_max: 6,
        table_replicas: 3,
        stale_rows: true,
        shard_optimizer: true,
        table_memory: Some(1 << 20),
        export_changes_since: Some(7),
        shuffle: crate::Shuffle { mode: crate::ShuffleMode::Block, buffer: NonZeroU64::new(9) },
        micro_batch: NonZeroU64::new(3),
        deterministic: false,
    }
}

/// Options with each kind of work, batch and checkpoints.
fn all_options() -> Vec<WorkerOptions> {
    let records = NonZeroU64::new(64).unwrap();
    let predict = |format| Work::Predict { model: "/m".into(), output: "/o".into(), format };
    let inference = |work| WorkerOptions { work, validation: None, ..options() };
    let steps = CheckpointEvery::Steps(records);
    let checkpoints = options().checkpoints.map(|spec| CheckpointSpec { every: steps, ..spec });
    vec![
        options(),
        WorkerOptions { batch: Batch::Global(records), checkpoints, ..options() },
        WorkerOptions { wire_dtype: WireDtype::Bf16, validation: None, ..options() },
        WorkerOptions { wire_dtype: WireDtype::F32, checkpoints: None, ..options() },
        inference(Work::Evaluate { model: "/m".into() }),
        inference(predict(Format::Csv)),
        inference(predict(Format::Jsonl)),
        inference(predict(Format::Parquet)),
    ]
}

#[test]
fn a_welcome_keeps_every_option() {
    for options in all_options() {
        let welcome = Welcome { worker: WorkerId(8), incarnation: 3, options };
        let welcome = JoinResponse::Welcome(welcome.into());
        assert_eq!(received(welcome.clone()), welcome);
    }
}

#[test]
fn another_encoding_has_another_version() {
    let mut bytes = Vec::new();
    for message in worker_messages() {
        // The bytes of a list of files are those of the compression.
        if !matches!(message, WorkerMessage::Described(Ok(_))) {
            JoinRequest::Message(message).encode(&mut None, &mut bytes);
        }
    }
    for message in master_messages() {
        if !matches!(message, MasterMessage::Prepare(_)) {
            JoinResponse::Message(message.into()).encode(&mut None, &mut bytes);
        }
    }
    JoinRequest::Hello(hello().into()).encode(&mut None, &mut bytes);
    for options in all_options() {
        let welcome = Welcome { worker: WorkerId(8), incarnation: 3, options };
        JoinResponse::Welcome(welcome.into()).encode(&mut None, &mut bytes);
    }
    let digest = xxhash_rust::xxh3::xxh3_64(&bytes);
    // Where a message changes on purpose, so does the version of the package in `build.rs`.
    assert_eq!((digest, bytes.len()), (0, 0), "of elasticdl.v2");
}

#[test]
fn a_status_keeps_every_field() {
    let status = full_status();
    assert_eq!(received(status.clone()), status);
}

#[test]
fn a_field_out_of_bounds_is_refused_by_name() {
    use WorkerMessage as W;
    let generation = Generation(1);
    let phases = Phases::default;
    let formed = |generation, step, ledger| W::Formed { generation, step, ledger };
    let with_ranges = |epoch, start, end| {
        W::Committed(Committed { ranges: vec![RecordRange { epoch, start, end }], ..commit() })
    };
    let with_times = |times| W::Committed(Committed { times, ..commit() });
    let with_ranks = |rank, count| {
        let ranks = vec![rank; count as usize];
        W::Committed(Committed { ranks, ..commit() })
    };
    let endless = StepTimes { reduce_us: u64::MAX, ..StepTimes::default() };
    let slow = RankStep { input_us: u64::MAX, ..RankStep::default() };
    let huge = DATASET_RECORDS_MAX;
    let range = RecordRange { epoch: 0, start: 0, end: 8 };
    let done = |metrics: &[(&str, f64)]| {
        let metrics = metrics.iter().map(|&(name, sum)| (name.into(), sum)).collect();
        W::ShardDone { range, metrics }
    };
    let names: Vec<String> = (0..300).map(|i| i.to_string()).collect();
    let many: Vec<(&str, f64)> = names.iter().map(|name| (name.as_str(), 1.0)).collect();
    let stall = Stall {
        generation: Generation(0),
        operation: 0,
        received: 0,
        sent: 0,
        waits_for_next: false,
        since: Duration::ZERO,
    };
    let resumed = |step, phases| W::Resumed { generation, step, phases };
    let (none, error) = (Generation(0), String::new);
    let over = LedgerReport { epochs_complete: u32::MAX, ..full_ledger() };
    let table = [
        (W::Ready { parameters: 0 }, "ready.parameters"),
        (W::Ready { parameters: u64::MAX }, "ready.parameters"),
        (W::LeaseRequest { shards: 0 }, "lease_request.shards"),
        (W::LeaseRequest { shards: u64::MAX }, "lease_request.shards"),
        (W::Reconnected { step: u64::MAX }, "reconnected.step"),
        (formed(generation, 1, over), "formed.ledger"),
        (formed(none, 1, full_ledger()), "formed.generation"),
        (formed(generation, u64::MAX, full_ledger()), "formed.step"),
        (with_ranges(0, 3, 3), "committed.ranges"),
        (with_ranges(0, 4, 3), "committed.ranges"),
        (with_ranges(0, 0, huge + 1), "committed.ranges"),
        (with_ranges(u32::MAX, 0, 1), "committed.ranges"),
        (
            W::Committed(Committed { generation: Generation(u64::MAX), ..commit() }),
            "committed.generation",
        ),
        (W::Committed(Committed { records: u64::MAX, ..commit() }), "committed.records"),
        (with_ranks(RankStep::default(), WORKERS_MAX + 1), "committed.ranks"),
        (with_ranks(slow, 1), "committed.ranks.input_us"),
        (with_times(endless), "times.reduce_us"),
        (W::ShardDone { range: RecordRange { end: 0, ..range }, metrics: [].into() }, "done.range"),
        (done(&[("", 1.0)]), "done.metrics: names"),
        (done(&[("a", f64::NAN)]), "done.metrics: a"),
        (done(&[(&"a".repeat(300), 1.0)]), "done.metrics: names"),
        (done(&many), "done.metrics"),
        (resumed(0, phases()), "resumed.step"),
        (resumed(1, Phases { state_us: u64::MAX, ..phases() }), "phases.state_us"),
        (
            W::Broken { generation: none, suspect: None, error: error(), unreachable: false },
            "broken.generation",
        ),
        (
            W::AllreduceTransport { generation: none, what: error() },
            "allreduce_transport.generation",
        ),
        (W::Heartbeat(Heartbeat { stall: Some(stall), holds_state: false }), "stall.generation"),
        (W::Finished(Finished { step: u64::MAX, ..end() }), "finished.step"),
    ];
    for (message, field) in table {
        let shown = format!("{message:?}").chars().take(200).collect::<String>();
        let error = checked(message).expect_err(&shown);
        assert!(error.contains(field), "{shown}: {error}");
    }
}

#[test]
fn a_hello_or_welcome_out_of_bounds_is_refused_by_name() {
    let hello = |change: &dyn Fn(&mut Hello)| {
        let mut hello = hello();
        change(&mut hello);
        match received(JoinRequest::Hello(hello.into())) {
            JoinRequest::Invalid(reason) => reason,
            other => panic!("{other:?}"),
        }
    };
    assert!(hello(&|h| h.pid = 0).contains("hello.pid"));
    for address in ["127.0.0.1:0", "0.0.0.0:9", "[::]:9"] {
        let reason = hello(&|h| h.address = address.parse().unwrap());
        assert!(reason.contains("hello.address"), "{address}: {reason}");
    }
    // A membership of the workers 1, 2 and so on.
    let known = |generation, addresses: &[&str]| {
        let member = |(id, address): (u64, &&str)| (WorkerId(id), address.parse().unwrap());
        let members = (1..).zip(addresses).map(member).collect();
        Membership { generation: Generation(generation), members, abort: true }
    };
    let mut twice = known(1, &["127.0.0.1:9", "127.0.0.1:8"]);
    let first = twice.members[0];
    twice.members = vec![first, first].into();
    let resumes = [
        (known(u64::MAX, &["127.0.0.1:9"]), 1, "membership.generation"),
        (known(0, &["127.0.0.1:9"]), 1, "membership.generation"),
        (known(1, &[]), 1, "membership.members"),
        (known(1, &["127.0.0.1:0"]), 1, "membership.members"),
        (twice, 1, "membership.members"),
        (known(1, &["127.0.0.1:9"]), 0, "resume.parameters"),
    ];
    for (membership, parameters, field) in resumes {
        let (worker, parameters) = (WorkerId(3), Some(parameters));
        let membership = Some(membership);
        let resume = Resume { worker, membership, parameters, holds_state: false };
        let reason = hello(&|h| h.resume = Some(resume.clone()));
        assert!(reason.contains(field), "{field}: {reason}");
    }
    let welcome = |change: fn(&mut WorkerOptions)| {
        let mut options = options();
        change(&mut options);
        let welcome = Welcome { worker: WorkerId(8), incarnation: 3, options };
        match received(JoinResponse::Welcome(welcome.into())) {
            JoinResponse::Invalid(reason) => reason,
            other => panic!("{other:?}"),
        }
    };
    let endless = |o: &mut WorkerOptions| o.batch = Batch::Global(NonZeroU64::MAX);
    assert!(welcome(endless).contains("options.batch"));
    assert!(welcome(|o| o.channels = 17).contains("options.channels"));
    assert!(welcome(|o| o.table_replicas = 0).contains("options.table_replicas"));
    let all_of_it =
        |o: &mut WorkerOptions| o.validation.as_mut().unwrap().split = NonZeroU16::new(1000);
    assert!(welcome(all_of_it).contains("validation.split"));
}

#[test]
fn bytes_that_are_no_message_are_invalid() {
    let decode = |mut bytes: &[u8]| JoinRequest::decode(&mut Members::default(), &mut bytes);
    let mut bytes = Vec::new();
    JoinRequest::Message(WorkerMessage::Finished(end())).encode(&mut None, &mut bytes);
    for cut in 0..bytes.len() {
        let cut = decode(&bytes[..cut]).unwrap();
        assert!(matches!(&cut, JoinRequest::Invalid(why) if why.contains("decoded")), "{cut:?}");
    }
    bytes.push(0);
    let longer = decode(&bytes).unwrap();
    assert!(matches!(&longer, JoinRequest::Invalid(why) if why.contains("1 more")), "{longer:?}");
    let unknown = decode(&[1, 99]).unwrap();
    assert!(matches!(unknown, JoinRequest::Invalid(_)), "{unknown:?}");
}

#[test]
fn a_long_text_is_truncated_at_a_character_boundary() {
    let error = "ä".repeat(ERROR_BYTES_MAX);
    let failed = checked(WorkerMessage::Failed { error, ranges: Vec::new(), fatal: false });
    let Ok(WorkerMessage::Failed { error, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!(error, format!("{}…", "ä".repeat(ERROR_BYTES_MAX / 2)));
}

#[test]
fn checkpoint_reports_are_checked_and_truncated() {
    let name = "x".repeat(300);
    let saved = CheckpointNews::Saved { step: 3, name, bytes: 9 };
    let saved = checked(WorkerMessage::Checkpoint(saved));
    let Ok(WorkerMessage::Checkpoint(news)) = saved else { panic!("{saved:?}") };
    let CheckpointNews::Saved { step: 3, name, bytes: 9 } = news else { panic!("{news:?}") };
    assert_eq!(name, format!("{}…", "x".repeat(256)));
    assert!(
        checked(restored(STEPS_MAX, 0)).is_ok() && checked(restored(STEPS_MAX + 1, 0)).is_err()
    );
}

#[test]
fn an_evaluation_is_checked() {
    let evaluated = |n: usize, records| {
        let metrics = (0..n).map(|i| (format!("{i}{}", "x".repeat(200)), Some(f64::NAN)));
        checked(WorkerMessage::Evaluated(Evaluated {
            step: 3,
            records,
            metrics: metrics.collect(),
        }))
    };
    let Ok(WorkerMessage::Evaluated(Evaluated { step: 3, metrics, .. })) = evaluated(100, 1) else {
        panic!()
    };
    assert!(metrics.len() == 100 && metrics.keys().all(|name| name.len() <= 100 + '…'.len_utf8()));
    assert!(metrics.values().all(Option::is_none));
    assert!(evaluated(101, 1).is_err() && evaluated(1, 0).is_err());
}
