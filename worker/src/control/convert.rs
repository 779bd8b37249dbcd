//! Converts between the messages of the protobuf schema and those of the trainer.

use std::time::{Duration, Instant};

use elasticdl_collective::{Stall, WireDtype};
use elasticdl_proto::{
    FileLimits, FileList, Generation, Ledger, ListedFile, RecordRange, WorkerId, v1,
};

use super::{CheckpointOptions, ValidationOptions, Welcome, Work};
use crate::core::checkpoint::Interval;
use crate::core::plan::Batch;
use crate::core::session::{Membership, Report, StepTimes};
use crate::inference::Format;
use crate::messages::{CheckpointEvent, Finished, FromMaster, ToMaster};
use crate::reader::{Dataset, File};

pub(super) fn decode_welcome(welcome: v1::Welcome) -> Option<Welcome> {
    let options = welcome.options?;
    let batch = match options.batch? {
        v1::options::Batch::GlobalBatchSize(records) => Batch::Global(records.max(1)),
        v1::options::Batch::MinibatchSize(records) => Batch::PerWorker(records.max(1)),
    };
    let wire_dtype = match options.wire_dtype() {
        v1::WireDtype::Bf16 => WireDtype::Bf16,
        v1::WireDtype::F16 => WireDtype::F16,
        v1::WireDtype::F32 => WireDtype::F32,
    };
    Some(Welcome {
        worker: WorkerId(welcome.worker),
        incarnation: welcome.incarnation,
        training_data: options.training_data,
        epochs: options.epochs,
        max_steps: options.max_steps,
        batch,
        seed: options.seed,
        heartbeat: options.heartbeat_ms.map(|ms| Duration::from_millis(ms.max(1))),
        worker_timeout: options.worker_timeout_ms.map(Duration::from_millis),
        checkpoints: match options.checkpoints {
            Some(checkpoints) => Some(decode_checkpoints(checkpoints)?),
            None => None,
        },
        resume_from: options.resume_from,
        skips_nonfinite: options.skip_nonfinite,
        leave_timeout: options.leave_timeout_ms.map(Duration::from_millis),
        wire_dtype,
        channels: u8::try_from(options.channels.max(1)).ok()?,
        work: match options.work? {
            v1::options::Work::Evaluate(v1::Evaluate { model }) => Work::Evaluate { model },
            v1::options::Work::Predict(predict) => {
                let format = match predict.format() {
                    v1::Format::Csv => Format::Csv,
                    v1::Format::Jsonl => Format::Jsonl,
                    v1::Format::Parquet => Format::Parquet,
                    v1::Format::Unspecified => return None,
                };
                Work::Predict { model: predict.model, output: predict.output, format }
            }
            v1::options::Work::Train(v1::Train { export, validation }) => {
                Work::Train { export, validation: validation.map(decode_validation) }
            }
        },
    })
}

fn decode_validation(validation: v1::Validation) -> ValidationOptions {
    let v1::Validation { data, every, metric, highest, patience } = validation;
    ValidationOptions { data, every: every.map(|steps| steps.max(1)), metric, highest, patience }
}

fn decode_checkpoints(options: v1::CheckpointOptions) -> Option<CheckpointOptions> {
    let every = match options.every? {
        v1::checkpoint_options::Every::Steps(steps) => Interval::Steps(steps.max(1)),
        v1::checkpoint_options::Every::Ms(ms) => Interval::Time(Duration::from_millis(ms)),
    };
    let v1::CheckpointOptions { dir, keep, exclusive, .. } = options;
    Some(CheckpointOptions { dir, every, keep: keep as usize, exclusive })
}

pub(super) fn decode(message: v1::MasterMessage) -> Option<FromMaster> {
    use v1::master_message::Kind;
    let member = |m: &v1::Member| Some((WorkerId(m.worker), m.address.parse().ok()?));
    Some(match message.kind? {
        Kind::Describe(_) => FromMaster::Describe,
        Kind::Drain(v1::Drain { suspend: true }) => FromMaster::Suspend,
        Kind::Drain(_) => FromMaster::Drain,
        Kind::Fetch(fetch) => {
            FromMaster::Fetch(fetch.donors.iter().map(member).collect::<Option<_>>()?)
        }
        Kind::KeepCheckpoint(_) => FromMaster::KeepCheckpoint,
        Kind::Lease(lease) => FromMaster::Lease(lease.ranges.iter().map(decode_range).collect()),
        Kind::Membership(membership) => {
            let arrived = Instant::now();
            let generation = Generation(membership.generation);
            let members = membership.members.iter().map(member).collect::<Option<_>>()?;
            FromMaster::Membership(
                Membership { generation, members, abort: membership.abort },
                arrived,
            )
        }
        Kind::Prepare(prepare) => FromMaster::Prepare(decode_dataset(prepare.dataset?)?),
        Kind::Shutdown(shutdown) => FromMaster::Shutdown(shutdown.reason),
        Kind::Welcome(_) => return None,
    })
}

pub(super) fn encode(message: ToMaster) -> v1::worker_message::Kind {
    use v1::worker_message::Kind;
    match message {
        ToMaster::Checkpoint(news) => {
            Kind::Checkpoint(v1::CheckpointNews { kind: Some(encode_checkpoint(news)) })
        }
        ToMaster::Described(outcome) => {
            use v1::described::Outcome;
            let outcome = match outcome.and_then(encode_dataset) {
                Ok(dataset) => Outcome::Dataset(dataset),
                Err(error) => Outcome::Error(error),
            };
            Kind::Described(v1::Described { outcome: Some(outcome) })
        }
        ToMaster::Done { range, metrics } => {
            let (range, metrics) = (Some(encode_range(&range)), metrics.into_iter().collect());
            Kind::Done(v1::Done { range, metrics })
        }
        ToMaster::Failed(failure) => Kind::Failed(v1::Failed {
            error: failure.error,
            ranges: failure.ranges.iter().map(encode_range).collect(),
            fatal: failure.fatal,
        }),
        ToMaster::Finished(finished) => Kind::Finished(encode_finished(finished)),
        ToMaster::Ready { parameters } => Kind::Ready(v1::Ready { parameters }),
        ToMaster::Report(report) => encode_report(report),
        ToMaster::AllreduceTransport { generation, what } => {
            Kind::AllreduceTransport(v1::AllreduceTransport { generation: generation.0, what })
        }
        ToMaster::Resumed { generation, step, phases } => Kind::Resumed(v1::Resumed {
            generation: generation.0,
            step,
            phases: Some(v1::Phases {
                detect_us: phases.detect_us,
                abort_us: phases.abort_us,
                agree_us: phases.agree_us,
                connect_us: phases.connect_us,
                state_us: phases.state_us,
                first_step_us: phases.first_step_us,
            }),
        }),
    }
}

fn decode_dataset(dataset: v1::Dataset) -> Option<Dataset> {
    if dataset.packed.is_empty() {
        let file = |f: v1::File| File { path: f.path, records: f.records, version: f.version };
        return Some(Dataset { files: dataset.files.into_iter().map(file).collect() });
    }
    let unlimited =
        FileLimits { files: usize::MAX, path_bytes: u32::MAX as usize, records: u64::MAX };
    let list = FileList::unpack(dataset.packed, unlimited).ok()?;
    let file = |f: ListedFile| File { path: f.path, records: f.records, version: f.version };
    Some(Dataset { files: list.iter().map(file).collect() })
}

/// Encodes the list of files, or returns why it cannot be sent.
fn encode_dataset(dataset: Dataset) -> Result<v1::Dataset, String> {
    let Dataset { files } = dataset;
    let bytes: usize = files.iter().map(|f| f.path.len()).sum();
    if bytes < FILES_PACKED_FROM {
        let file = |f: File| v1::File { path: f.path, records: f.records, version: f.version };
        return Ok(v1::Dataset {
            files: files.into_iter().map(file).collect(),
            ..v1::Dataset::default()
        });
    }
    let packed = FileList::pack(files.iter().map(|f| ListedFile {
        path: f.path.clone(),
        records: f.records,
        version: f.version,
    }))
    .packed()
    .clone();
    if packed.len() > FILES_PACKED_MAX {
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        return Err(format!(
            "the data set has {} files, whose paths take {} MiB, and {} MiB when they are \
             compressed; at most {} MiB can be sent to the master: put more records into each \
             file, or shorten the paths",
            files.len(),
            mib(bytes),
            mib(packed.len()),
            mib(FILES_PACKED_MAX)
        ));
    }
    Ok(v1::Dataset { files: Vec::new(), packed })
}

fn encode_report(report: Report) -> v1::worker_message::Kind {
    use v1::worker_message::Kind;
    match report {
        Report::Broken { generation, suspect, error, unreachable } => Kind::Broken(v1::Broken {
            generation: generation.0,
            suspect: suspect.map(|s| s.0),
            error,
            unreachable,
        }),
        Report::Committed(progress) => Kind::Committed(v1::Committed {
            generation: progress.generation.0,
            step: progress.step,
            ranges: progress.ranges.iter().map(encode_range).collect(),
            loss_sum: progress.loss_sum,
            records: progress.records,
            compute_us: progress.compute_us,
            times: Some(encode_times(progress.times)),
            steps_skipped: progress.steps_skipped,
        }),
        Report::Evaluated { step, records, means } => {
            Kind::Evaluated(v1::Evaluated { step, records, metrics: means.into_iter().collect() })
        }
        Report::Formed { generation, step, ledger } => Kind::Formed(v1::Formed {
            generation: generation.0,
            step,
            ledger: Some(encode_ledger(&ledger)),
        }),
        Report::HeldLeases { step, ranges } => Kind::HeldLeases(v1::HeldLeases {
            step,
            ranges: ranges.iter().map(encode_range).collect(),
        }),
        Report::CaughtUp { step } => Kind::CaughtUp(v1::CaughtUp { step }),
        Report::LeaseRequest { epoch, records } => {
            Kind::LeaseRequest(v1::LeaseRequest { epoch, records })
        }
    }
}

fn encode_checkpoint(news: CheckpointEvent) -> v1::checkpoint_news::Kind {
    use v1::checkpoint_news::Kind;
    match news {
        CheckpointEvent::Damaged { name, reason } => {
            Kind::Damaged(v1::CheckpointDamaged { name, reason })
        }
        CheckpointEvent::Failed { step, error } => {
            Kind::Failed(v1::CheckpointFailed { step, error })
        }
        CheckpointEvent::Restored { step, name } => {
            Kind::Restored(v1::CheckpointRestored { step, name })
        }
        CheckpointEvent::Saved { step, name, bytes } => {
            Kind::Saved(v1::CheckpointSaved { step, name, bytes })
        }
    }
}

fn encode_times(times: StepTimes) -> v1::StepTimes {
    let StepTimes { steps, step_us, reduce_us } = times;
    v1::StepTimes { steps, step_us, reduce_us }
}

pub(super) fn encode_stall(stall: Stall) -> v1::Stall {
    let Stall { generation, operation, received, sent, waits_for_next, since } = stall;
    let for_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    v1::Stall { generation, operation, received, for_ms, sent, waits_for_next }
}

fn encode_finished(finished: Finished) -> v1::Finished {
    v1::Finished {
        generation: finished.generation.0,
        step: finished.step,
        digest: finished.digest,
        ledger: Some(encode_ledger(&finished.ledger)),
        records_trained: finished.records_trained,
        stopped_early: finished.stopped_early,
        summary: finished.summary,
        failure: finished.failure.map(|failure| v1::FinishedFailure {
            error: failure.error,
            ranges: failure.ranges.iter().map(encode_range).collect(),
        }),
        suspended: finished.suspended,
        steps_skipped: finished.steps_skipped,
        exported: finished.exported,
    }
}

fn encode_ledger(ledger: &Ledger) -> v1::Ledger {
    v1::Ledger {
        epochs_complete: ledger.epoch(),
        ranges: ledger.ranges().map(|r| encode_range(&r)).collect(),
        repeated_records: ledger.repeated(),
    }
}

fn encode_range(range: &RecordRange) -> v1::Range {
    v1::Range { epoch: range.epoch, start: range.start, end: range.end }
}

fn decode_range(range: &v1::Range) -> RecordRange {
    RecordRange { epoch: range.epoch, start: range.start, end: range.end }
}

/// Total length of paths, in bytes, from which a list of files is sent packed.
const FILES_PACKED_FROM: usize = 4 << 20;
/// Maximum length of a packed list: a little less than a message may hold.
const FILES_PACKED_MAX: usize = 60 << 20;
