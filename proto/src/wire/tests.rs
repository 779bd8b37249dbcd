//! Tests of the conversions between the schema and the types of this crate.

use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU64};
use std::time::Duration;

use serde_json::json;

use super::v1::worker_message::Kind;
use super::{JoinRequest, JoinResponse, SharedMessage, Wire as _, decode, encode, v1};
use crate::files::FileList;
use crate::ids::{Generation, LaunchId, WorkerId};
use crate::job::{
    Batch, CheckpointEvery, CheckpointSpec, Format, ValidationSpec, Welcome, WireDtype, Work,
    WorkerOptions,
};
use crate::limits::{DATASET_RECORDS_MAX, ERROR_BYTES_MAX, PATH_BYTES_MAX, STEPS_MAX, WORKERS_MAX};
use crate::members::Members;
use crate::membership::{Hello, Location, Membership, Phases, Resume, Stall};
use crate::message::{
    CheckpointNews, CheckpointTimes, Committed, Evaluated, Failure, Finished, Heartbeat, Kept,
    LedgerReport, LinkPace, MasterMessage, RankStep, StepTimes, WorkerMessage,
};
use crate::ranges::RecordRange;
use crate::row_touches::TablesStatus;
use crate::status::tests::full_status;

mod differences;

fn range(epoch: u32, start: u64, end: u64) -> v1::Range {
    v1::Range { epoch, start, end }
}

fn restored(step: u64, row_touches: u64) -> WorkerMessage {
    let (name, differences) = ("step-9".into(), "executable".into());
    WorkerMessage::Checkpoint(CheckpointNews::Restored { step, name, row_touches, differences })
}

fn full_ledger() -> v1::Ledger {
    v1::Ledger { epochs_complete: 1, ranges: vec![range(1, 2, 5)], repeated_records: 3 }
}

fn described(files: Vec<(&str, u64)>) -> Kind {
    let files = files
        .into_iter()
        .map(|(path, records)| v1::File { path: path.into(), records, version: None })
        .collect();
    let dataset = v1::described::Outcome::Dataset(v1::Dataset { files, ..Default::default() });
    Kind::Described(v1::Described { outcome: Some(dataset), order: None })
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
        metrics: [("accuracy".into(), 6.0)].into(),
        compute_us: vec![10, 20],
        input_us: vec![1, 2],
        rank_records: vec![5, 3],
        checkpoint_us: vec![7, 8],
        table_bytes: vec![3_000, 4_000],
        times: Some(v1::StepTimes { steps: 2, step_us: 900, reduce_us: 300 }),
        last: Some(v1::StepTimes { steps: 1, step_us: 400, reduce_us: 100 }),
        steps_skipped: 1,
        learning_rate: Some(0.5),
        first_loss: Some(0.75),
        last_loss: Some(0.25),
        epoch_step: Some(8),
        tables: Some(v1::Tables { rows: 30, touches: 64, shards_at_risk: 5 }),
        steps_audited: 2,
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
        row_touches: Some(v1::RowTouches { expected: 9, counted: 8 }),
    }
}

fn convert(kind: Kind) -> Result<WorkerMessage, String> {
    match decode::join_request(v1::WorkerMessage { kind: Some(kind) }) {
        JoinRequest::Hello(hello) => panic!("{hello:?}"),
        JoinRequest::Invalid(reason) => Err(reason),
        JoinRequest::Message(message) => Ok(message),
    }
}

/// What the other side receives.
fn received<M: super::codec::Wire>(message: M) -> M {
    let mut bytes = Vec::new();
    message.encode(&mut M::Sent::default(), &mut bytes);
    M::decode(&mut M::Received::default(), &mut &bytes[..]).unwrap()
}

fn membership() -> Membership {
    let members = vec![
        (WorkerId(2), "127.0.0.1:2".parse().unwrap()),
        (WorkerId(1), "[::1]:1".parse().unwrap()),
    ];
    Membership { generation: Generation(3), members: members.into(), abort: true }
}

#[test]
fn every_message_of_a_worker_keeps_every_field() {
    let times = CheckpointTimes { copy_us: 1, write_us: 2, publish_us: 3 };
    let generation = Generation(4);
    let ranges = vec![RecordRange { epoch: 1, start: 2, end: 5 }];
    let ledger = LedgerReport { epochs_complete: 1, ranges: ranges.clone(), repeated: 3 };
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
        far: [Some(WorkerId(4)), None],
        since: Duration::from_millis(900),
    };
    let rank = |[records, compute_us, input_us, checkpoint_us, table_bytes]: [u64; 5]| RankStep {
        records,
        compute_us,
        input_us,
        checkpoint_us,
        table_bytes,
    };
    let [measured, limited] = [9, 8].map(Duration::from_micros);
    let name = || "step-9".to_owned();
    let messages = [
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
        WorkerMessage::CaughtUp { step: Some(0) },
        WorkerMessage::Checkpoint(CheckpointNews::Damaged { name: name(), reason: "torn".into() }),
        WorkerMessage::Checkpoint(CheckpointNews::Failed { step: 9, error: "full".into() }),
        WorkerMessage::Checkpoint(CheckpointNews::OlderRows { name: Some(name()), missing: 7 }),
        restored(9, 8),
        WorkerMessage::Checkpoint(CheckpointNews::RowsLost { step: 9, shards: 2, row_touches: 7 }),
        WorkerMessage::Checkpoint(CheckpointNews::Saved { step: 9, name: name(), bytes: 7, times }),
        WorkerMessage::Committed(Committed {
            generation,
            step: 9,
            ranges: ranges.clone(),
            loss_sum: 2.5,
            records: 8,
            metrics: [("accuracy".into(), 6.0)].into(),
            ranks: vec![rank([5, 10, 1, 7, 3_000]), rank([3, 20, 2, 8, 4_000])],
            times: StepTimes { steps: 2, step_us: 900, reduce_us: 300 },
            last: Some(Box::new(StepTimes { steps: 1, step_us: 400, reduce_us: 100 })),
            steps_skipped: 1,
            learning_rate: Some(0.5),
            first_loss: Some(0.75),
            last_loss: Some(0.25),
            epoch_step: Some(8),
            tables: Some(Box::new(TablesStatus { rows: 30, touches: 64, shards_at_risk: 5 })),
            steps_audited: 2,
        }),
        WorkerMessage::Described(Ok(FileList::pack([("a", 3), ("b", 0)])), Some(ORDER)),
        WorkerMessage::Described(Err("no such file".into()), None),
        WorkerMessage::RecordsSkipped(crate::SkippedRecords {
            bad: 2,
            nulls: 1,
            first: vec!["a line 3: no".into()],
            files: 3,
            first_file: "_SUCCESS".into(),
        }),
        WorkerMessage::Evaluated(
            Evaluated {
                step: 9,
                records: 5,
                metrics: [("loss".into(), Some(0.5)), ("nan".into(), None)].into(),
            },
            Duration::from_micros(8),
        ),
        WorkerMessage::Diverged {
            error: "replicas differ".into(),
            has_majority: true,
            by_audit: true,
        },
        WorkerMessage::Failed {
            error: "bad".into(),
            ranges: ranges.clone(),
            fatal: true,
            exported: true,
        },
        WorkerMessage::Finished(Finished {
            generation,
            step: 9,
            digest: u64::MAX,
            ledger: ledger.clone(),
            records_trained: 8,
            stopped_early: true,
            summary: Some("done".into()),
            failure: Some(Failure { error: "NaN".into(), ranges: ranges.clone() }),
            suspended: true,
            steps_skipped: 1,
            exported: true,
            row_touches: Some(crate::RowTouches { expected: 9, counted: 8 }),
        }),
        WorkerMessage::Formed { generation, step: 2, ledger },
        WorkerMessage::Heartbeat(Heartbeat::default()),
        WorkerMessage::Heartbeat(Heartbeat {
            stall: Some(stall),
            holds_state: true,
            usage: Some(crate::Usage { cpu_millicores: 1500, memory_bytes: 9 << 30 }),
            step: Some(7),
            link_pace: Some(LinkPace { to: WorkerId(4), measured, limited, bytes: 6 }),
        }),
        WorkerMessage::LeaseRequest { shards: 64 },
        WorkerMessage::Leaving,
        WorkerMessage::Ready { parameters: 5 },
        WorkerMessage::Reconnected { step: 9 },
        WorkerMessage::HostChecked(Box::new(crate::HostReport { gpus: 2, ..Default::default() })),
        WorkerMessage::Report {
            request: 3,
            report: Box::new(crate::WorkerReport { omitted: 5, ..Default::default() }),
        },
        WorkerMessage::Resumed { generation, step: 9, phases },
        WorkerMessage::ShardDone {
            range: ranges[0],
            metrics: [("loss".into(), 0.5), ("a".into(), -1.0)].into(),
        },
        WorkerMessage::StorageWait { storage: None, waited: Duration::from_millis(5) },
        WorkerMessage::StorageWait { storage: Some("s3://b".into()), waited: Duration::ZERO },
    ];
    for message in messages.map(JoinRequest::Message) {
        assert_eq!(received(message.clone()), message);
    }
    let mut hello = Hello {
        job: "j".into(),
        launch: LaunchId(7),
        address: "127.0.0.1:9".parse().unwrap(),
        pid: 77,
        resume: None,
        incarnation: 0,
        location: Default::default(),
    };
    assert_eq!(
        received(JoinRequest::Hello(hello.clone().into())),
        JoinRequest::Hello(hello.clone().into())
    );
    hello.incarnation = 3;
    hello.location = Location { zone: "z".into(), rack: "r".into(), node: "n".into() };
    hello.resume = Some(Resume {
        worker: WorkerId(8),
        membership: Some(membership()),
        parameters: Some(10),
        holds_state: true,
    });
    assert_eq!(
        received(JoinRequest::Hello(hello.clone().into())),
        JoinRequest::Hello(hello.into())
    );
}

#[test]
fn every_message_of_a_master_keeps_every_field() {
    let messages = [
        MasterMessage::Describe,
        MasterMessage::Drain,
        MasterMessage::Fetch(membership().members.to_vec()),
        MasterMessage::GiveUp,
        MasterMessage::Inspect { request: 3, bytes_max: 4096 },
        MasterMessage::Joiners(vec![WorkerId(4), WorkerId(5)]),
        MasterMessage::KeepCheckpoint,
        MasterMessage::Lease(vec![RecordRange { epoch: 1, start: 2, end: 5 }]),
        MasterMessage::Membership(membership()),
        MasterMessage::Prepare(FileList::pack([("a", 3), ("b", 0)])),
        MasterMessage::CheckHost,
        MasterMessage::ReportStacks,
        MasterMessage::Shutdown { reason: "the job failed".into(), job_is_over: true },
        MasterMessage::Suspend,
    ];
    for message in messages.map(|message| JoinResponse::Message(message.into())) {
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
        worker_timeout: Some(Duration::from_secs(1)),
        grace_period: Duration::from_secs(20),
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
        on_nonfinite: crate::OnNonfinite::Skip,
        allow_mixed_builds: true,
        link_encryption: crate::LinkEncryption::On,
        bad_records_max: 6,
        table_replicas: 3,
        on_rows_lost: crate::OnRowsLost::Stale,
        shard_optimizer: true,
        param_dtype: crate::ParamDtype::Bf16,
        table_memory: Some(1 << 20),
        export_changes_since: Some(7),
        table_lag: 2,
        table_servers: 5,
        audit: 10_000,
        shuffle: crate::Shuffle { mode: crate::ShuffleMode::Block, buffer: NonZeroU64::new(9) },
        micro_batch: NonZeroU64::new(3),
        deterministic: false,
    }
}

#[test]
fn a_welcome_keeps_every_option() {
    let records = NonZeroU64::new(64).unwrap();
    let predict = |format| Work::Predict { model: "/m".into(), output: "/o".into(), format };
    let inference = |work| WorkerOptions { work, validation: None, ..options() };
    let steps = CheckpointEvery::Steps(records);
    let checkpoints = options().checkpoints.map(|spec| CheckpointSpec { every: steps, ..spec });
    let all = [
        options(),
        WorkerOptions { batch: Batch::Global(records), checkpoints, ..options() },
        WorkerOptions { wire_dtype: WireDtype::Bf16, validation: None, ..options() },
        WorkerOptions { wire_dtype: WireDtype::F32, checkpoints: None, ..options() },
        inference(Work::Evaluate { model: "/m".into() }),
        inference(predict(Format::Csv)),
        inference(predict(Format::Jsonl)),
        inference(predict(Format::Parquet)),
    ];
    for (options, serves_tables) in all.into_iter().zip([false, true].into_iter().cycle()) {
        let worker = WorkerId(8);
        let welcome = Welcome { worker, incarnation: 3, serves_tables, options };
        let welcome = JoinResponse::Welcome(welcome.into());
        assert_eq!(received(welcome.clone()), welcome);
    }
}

#[test]
fn a_status_keeps_every_field() {
    let status = full_status();
    assert_eq!(received(status.clone()), status);
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
    let beat = v1::Heartbeat { stall: Some(v1::Stall::default()), ..v1::Heartbeat::default() };
    let paced = |measured_us, limited_us| {
        let pace = v1::LinkPace { measured_us, limited_us, ..v1::LinkPace::default() };
        Kind::Heartbeat(v1::Heartbeat { link_pace: Some(pace), ..v1::Heartbeat::default() })
    };
    let table = [
        (Kind::Hello(v1::Hello::default()), "hello"),
        (Kind::Described(v1::Described { outcome: None, order: None }), "described.outcome"),
        (
            Kind::Described(v1::Described {
                outcome: Some(v1::described::Outcome::Error("no".into())),
                order: Some(v1::Order::default()),
            }),
            "described.order.mode",
        ),
        (described(vec![("", 1)]), "file.path"),
        (described(vec![(&long, 1)]), "file.path"),
        (described(vec![("a", huge + 1)]), "file.records"),
        (described(vec![("a", huge), ("b", 1)]), "records of all files"),
        (described(vec![("a", u64::MAX), ("b", u64::MAX)]), "file.records"),
        (Kind::Ready(v1::Ready { parameters: 0 }), "ready.parameters"),
        (Kind::Ready(v1::Ready { parameters: u64::MAX }), "ready.parameters"),
        (Kind::LeaseRequest(v1::LeaseRequest { shards: 0 }), "lease_request.shards"),
        (Kind::LeaseRequest(v1::LeaseRequest { shards: u64::MAX }), "lease_request.shards"),
        (Kind::Reconnected(v1::Reconnected { step: u64::MAX }), "reconnected.step"),
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
            Kind::Committed(v1::Committed {
                compute_us: vec![0; WORKERS_MAX as usize + 1],
                ..commit()
            }),
            "committed.compute_us",
        ),
        (Kind::Committed(v1::Committed { input_us: vec![1], ..commit() }), "committed: a list"),
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
        (Kind::Heartbeat(beat), "stall.generation"),
        (paced(0, 0), "link_pace.measured_us"),
        (paced(5, 6), "link_pace.limited_us"),
        (Kind::Finished(v1::Finished { ledger: None, ..end() }), "finished.ledger"),
        (Kind::Finished(v1::Finished { step: u64::MAX, ..end() }), "finished.step"),
    ];
    for (message, field) in table {
        let shown = format!("{message:?}").chars().take(200).collect::<String>();
        let error = convert(message).expect_err(&shown);
        assert!(error.contains(field), "{shown}: {error}");
    }
    assert!(matches!(
        decode::join_request(v1::WorkerMessage { kind: None }),
        JoinRequest::Invalid(_)
    ));
}

#[test]
fn a_hello_or_welcome_out_of_bounds_is_refused_by_name() {
    let hello = |change: fn(&mut v1::Hello)| {
        let mut hello = v1::Hello {
            job: "j".into(),
            launch: 1,
            address: "127.0.0.1:9".into(),
            pid: 7,
            resume: None,
            location: None,
        };
        change(&mut hello);
        match decode::join_request(v1::WorkerMessage { kind: Some(Kind::Hello(hello)) }) {
            JoinRequest::Invalid(reason) => reason,
            other => panic!("{other:?}"),
        }
    };
    assert!(hello(|h| h.pid = 0).contains("hello.pid"));
    for address in ["", "localhost:9", "127.0.0.1:0", "0.0.0.0:9", "[::]:9"] {
        let sent = v1::Hello { address: address.into(), pid: 7, ..v1::Hello::default() };
        let sent = v1::WorkerMessage { kind: Some(Kind::Hello(sent)) };
        let JoinRequest::Invalid(reason) = decode::join_request(sent) else { panic!("{address}") };
        assert!(reason.contains("hello.address"), "{address}: {reason}");
    }
    // A membership of the workers 1, 2 and so on.
    let known = |generation, addresses: &[&str], parameters| {
        let member =
            |(worker, address): (u64, &&str)| v1::Member { worker, address: (*address).into() };
        let members = (1..).zip(addresses).map(member).collect();
        let membership = Some(v1::Membership { generation, members, abort: true });
        v1::Resume { worker: 3, membership, parameters, ..v1::Resume::default() }
    };
    let mut twice = known(1, &["127.0.0.1:9", "127.0.0.1:8"], None);
    twice.membership.as_mut().unwrap().members[1].worker = 1;
    let resumes = [
        (known(u64::MAX, &["127.0.0.1:9"], None), "membership.generation"),
        (known(0, &["127.0.0.1:9"], None), "membership.generation"),
        (known(1, &[], None), "membership.members"),
        (known(1, &["127.0.0.1:0"], None), "membership.members"),
        (twice, "membership.members"),
        (known(1, &["127.0.0.1:9"], Some(0)), "resume.parameters"),
    ];
    for (resume, field) in resumes {
        let address = "127.0.0.1:9".into();
        let sent = v1::Hello { address, pid: 7, resume: Some(resume), ..v1::Hello::default() };
        let sent = v1::WorkerMessage { kind: Some(Kind::Hello(sent)) };
        let JoinRequest::Invalid(reason) = decode::join_request(sent) else { panic!("{field}") };
        assert!(reason.contains(field), "{field}: {reason}");
    }
    let valid = serde_json::to_value(options()).unwrap();
    let welcome = |field: &str, value: serde_json::Value| {
        let mut options = valid.clone();
        *options.pointer_mut(field).unwrap() = value;
        let sent = v1::Welcome { worker: 8, options: options.to_string(), ..Default::default() };
        let kind = Some(v1::master_message::Kind::Welcome(sent));
        match decode::join_response(&Members::default(), v1::MasterMessage { kind }) {
            JoinResponse::Invalid(reason) => reason,
            other => panic!("{other:?}"),
        }
    };
    assert!(welcome("/batch", json!(null)).contains("welcome.options"));
    assert!(welcome("/batch", json!({"Global": 0})).contains("nonzero"));
    assert!(welcome("/batch", json!({"Global": u64::MAX})).contains("batch"));
    assert!(welcome("/channels", json!(17)).contains("channels"));
    assert!(welcome("/validation/split", json!(1000)).contains("--validation-split"));
    assert!(welcome("/shuffle/mode", json!("Newer")).contains("`Newer`"));
    assert!(welcome("/link_encryption", json!("Newer")).contains("`Newer`"));
    assert!(welcome("/deterministic", json!(true)).contains("--global-batch-size"));
}

#[test]
fn a_long_text_is_truncated_at_a_character_boundary() {
    let error = "ä".repeat(ERROR_BYTES_MAX);
    let failed = convert(Kind::Failed(v1::Failed { error, ..Default::default() }));
    let Ok(WorkerMessage::Failed { error, .. }) = failed else { panic!("{failed:?}") };
    assert_eq!(error, format!("{}…", "ä".repeat(ERROR_BYTES_MAX / 2)));
}

#[test]
fn checkpoint_reports_are_checked_and_truncated() {
    use v1::checkpoint_news::Kind as News;
    let converted = |kind| convert(Kind::Checkpoint(v1::CheckpointNews { kind }));
    let name = "x".repeat(300);
    let news = v1::CheckpointSaved { step: 3, name, bytes: 9, ..Default::default() };
    let saved = converted(Some(News::Saved(news)));
    let Ok(WorkerMessage::Checkpoint(news)) = saved else { panic!("{saved:?}") };
    let CheckpointNews::Saved { step: 3, name, bytes: 9, .. } = news else { panic!("{news:?}") };
    assert_eq!(name, format!("{}…", "x".repeat(256)));
    assert!(converted(None).is_err());
    let restored = |step| {
        let news = v1::CheckpointRestored { step, name: "n".into(), ..Default::default() };
        converted(Some(News::Restored(news)))
    };
    assert!(restored(STEPS_MAX).is_ok() && restored(STEPS_MAX + 1).is_err());
}

#[test]
fn an_evaluation_is_checked() {
    let metrics =
        |n: usize| (0..n).map(|i| (format!("{i}{}", "x".repeat(200)), f64::NAN)).collect();
    let converted = |n, records| {
        let metrics = metrics(n);
        convert(Kind::Evaluated(v1::Evaluated { step: 3, records, metrics, took_us: 1 }))
    };
    let Ok(WorkerMessage::Evaluated(report, _)) = converted(100, 1) else { panic!() };
    let Evaluated { step: 3, metrics, .. } = report else { panic!("{report:?}") };
    assert!(metrics.len() == 100 && metrics.keys().all(|name| name.len() <= 100 + '…'.len_utf8()));
    assert!(converted(101, 1).is_err() && converted(1, 0).is_err());
}

const ORDER: crate::OrderName =
    crate::OrderName { mode: crate::ShuffleMode::Block, seed: 7, block: 64, buffer: 128 };
