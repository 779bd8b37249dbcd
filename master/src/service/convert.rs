//! Conversions between the messages of the schema and the types of the core.
//!
//! Each field of an incoming message is checked. An invalid message is refused with the name of the
//! field and its valid values, so the core receives no message that would be invalid in every
//! state. The core itself checks fields whose validity depends on the job's state, such as
//! generations and ledgers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{FileLimits, FileList, Generation, ListedFile, RecordRange, WorkerId, v1};
use tonic::Status;
use v1::{master_message, worker_message};

use crate::job::{
    self, Batch, CheckpointEvery, CheckpointNews, CheckpointSpec, Committed, Evaluated, Failure,
    Finished, Format, FromWorker, JobSpec, LaunchId, LedgerReport, Membership, MembershipChange,
    OnNonfinite, Phases, Resume, Stall, StepTimes, ToWorker, ValidationSpec, WireDtype, Work,
};
use crate::limits::{
    DATASET_FILES_MAX, DATASET_RECORDS_MAX, EPOCHS_MAX, ERROR_BYTES_MAX, PARAMETERS_MAX,
    PATH_BYTES_MAX, PHASE_US_MAX, STEPS_MAX, SUMMARY_BYTES_MAX, WORKERS_MAX,
};

/// The first message of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) launch: LaunchId,
    pub(crate) address: SocketAddr,
    pub(crate) pid: u32,
    pub(crate) resume: Option<Resume>,
    /// Highest incarnation of a master that has welcomed this worker; 0 for none.
    pub(crate) incarnation: u64,
}

/// Converts a stream's first message, which must be the hello of a worker of `job`.
pub(super) fn hello(message: v1::WorkerMessage, job: &str) -> Result<Hello, Status> {
    let Some(worker_message::Kind::Hello(hello)) = message.kind else {
        return Err(invalid("the first message must be `hello`"));
    };
    if hello.job != job {
        let theirs = clip(hello.job, JOB_NAME_SHOWN_MAX);
        return Err(invalid(&format!(
            "hello.job: this is the master of `{job}`, not of `{theirs}`"
        )));
    }
    let address = peer_address("hello.address", &hello.address)?;
    if hello.pid == 0 {
        return Err(invalid("hello.pid: must not be 0"));
    }
    let incarnation = hello.resume.as_ref().map_or(0, |resume| resume.incarnation);
    let resume = match hello.resume {
        Some(v1::Resume { worker, membership, parameters, incarnation: _ }) => {
            let parameters = parameters
                .map(|n| within("hello.resume.parameters", n, 1, PARAMETERS_MAX))
                .transpose()?;
            let membership = membership.map(|m| known_membership(&m)).transpose()?;
            Some(Resume { worker: WorkerId(worker), membership, parameters })
        }
        None => None,
    };
    Ok(Hello { launch: LaunchId(hello.launch), address, pid: hello.pid, resume, incarnation })
}

/// Converts the newest membership that a worker has received.
fn known_membership(membership: &v1::Membership) -> Result<Membership, Status> {
    let generation = Generation(within(
        "hello.resume.membership.generation",
        membership.generation,
        1,
        STEPS_MAX,
    )?);
    let name = "hello.resume.membership.members";
    within(name, membership.members.len() as u64, 1, u64::from(WORKERS_MAX))?;
    let member = |m: &v1::Member| Ok((WorkerId(m.worker), peer_address(name, &m.address)?));
    let members = membership.members.iter().map(member).collect::<Result<Vec<_>, Status>>()?;
    let distinct: BTreeSet<WorkerId> = members.iter().map(|(id, _)| *id).collect();
    if distinct.len() < members.len() {
        return Err(invalid(&format!("{name}: must name each worker once")));
    }
    Ok(Membership { generation, members, abort: membership.abort })
}

fn peer_address(name: &str, text: &str) -> Result<SocketAddr, Status> {
    let address: SocketAddr =
        text.parse().map_err(|_| invalid(&format!("{name}: must be `ip:port`")))?;
    if address.port() == 0 || address.ip().is_unspecified() {
        return Err(invalid(&format!("{name}: must be one that peers can dial, not a wildcard")));
    }
    Ok(address)
}

/// Converts any later message of a worker.
pub(super) fn from_worker(message: v1::WorkerMessage) -> Result<FromWorker, Status> {
    use worker_message::Kind;
    let kind =
        message.kind.ok_or_else(|| invalid("a message must have a kind that this master knows"))?;
    Ok(match kind {
        Kind::Hello(_) => return Err(invalid("`hello` comes first, and once")),
        Kind::Described(described) => FromWorker::Described(description(described)?),
        Kind::Ready(ready) => FromWorker::Ready {
            parameters: within("ready.parameters", ready.parameters, 1, PARAMETERS_MAX)?,
        },
        Kind::LeaseRequest(request) => FromWorker::LeaseRequest {
            epoch: epoch("lease_request.epoch", request.epoch)?,
            records: within("lease_request.records", request.records, 1, DATASET_RECORDS_MAX)?,
        },
        Kind::StorageWait(wait) => FromWorker::StorageWait {
            storage: wait.storage.map(|storage| clip(storage, ERROR_BYTES_MAX)),
            waited: Duration::from_micros(wait.waited_ms.saturating_mul(1000).min(PHASE_US_MAX)),
        },
        Kind::AllreduceTransport(sums) => FromWorker::AllreduceTransport {
            generation: generation("allreduce_transport.generation", sums.generation)?,
            what: clip(sums.what, ERROR_BYTES_MAX),
        },
        Kind::Evaluated(report) => FromWorker::Evaluated(evaluated(report)?),
        Kind::Formed(formed) => FromWorker::Formed {
            generation: generation("formed.generation", formed.generation)?,
            step: within("formed.step", formed.step, 0, STEPS_MAX)?,
            ledger: ledger("formed.ledger", formed.ledger)?,
        },
        Kind::Checkpoint(news) => FromWorker::Checkpoint(checkpoint_news(news)?),
        Kind::Done(message) => done(message)?,
        Kind::Committed(message) => FromWorker::Committed(committed(message)?),
        Kind::Resumed(resumed) => FromWorker::Resumed {
            generation: generation("resumed.generation", resumed.generation)?,
            step: within("resumed.step", resumed.step, 1, STEPS_MAX)?,
            phases: phases(resumed.phases)?,
        },
        Kind::Broken(broken) => FromWorker::Broken {
            generation: generation("broken.generation", broken.generation)?,
            suspect: broken.suspect.map(WorkerId),
            error: clip(broken.error, ERROR_BYTES_MAX),
            unreachable: broken.unreachable,
        },
        Kind::Failed(failed) => FromWorker::Failed {
            error: clip(failed.error, ERROR_BYTES_MAX),
            ranges: ranges("failed.ranges", failed.ranges)?,
            fatal: failed.fatal,
        },
        Kind::Heartbeat(beat) => FromWorker::Heartbeat(beat.stall.map(stall).transpose()?),
        Kind::HeldLeases(held) => FromWorker::HeldLeases {
            step: within("held_leases.step", held.step, 0, STEPS_MAX)?,
            ranges: ranges("held_leases.ranges", held.ranges)?,
        },
        Kind::Leaving(v1::Leaving {}) => FromWorker::Leaving,
        Kind::CaughtUp(caught_up) => {
            FromWorker::CaughtUp { step: within("caught_up.step", caught_up.step, 0, STEPS_MAX)? }
        }
        Kind::Finished(message) => FromWorker::Finished(finished(message)?),
    })
}

/// The welcome of an admitted worker by the master with this incarnation.
pub(crate) fn welcome(worker: WorkerId, spec: &JobSpec, incarnation: u64) -> v1::MasterMessage {
    let batch = match spec.batch {
        Batch::Global(records) => v1::options::Batch::GlobalBatchSize(records.get()),
        Batch::PerWorker(records) => v1::options::Batch::MinibatchSize(records.get()),
    };
    let wire_dtype = match spec.wire_dtype {
        WireDtype::Bf16 => v1::WireDtype::Bf16,
        WireDtype::F16 => v1::WireDtype::F16,
        WireDtype::F32 => v1::WireDtype::F32,
    };
    let options = v1::Options {
        training_data: spec.training_data.clone(),
        epochs: spec.epochs,
        max_steps: spec.max_steps,
        batch: Some(batch),
        shuffle: spec.shuffle,
        seed: spec.seed,
        heartbeat_ms: spec.heartbeat().map(to_millis),
        worker_timeout_ms: spec.worker_timeout.map(to_millis),
        checkpoints: spec.checkpoints.as_ref().map(to_checkpoint_options),
        resume_from: spec.resume_from.clone(),
        work: Some(match &spec.work {
            Work::Evaluate { model } => {
                v1::options::Work::Evaluate(v1::Evaluate { model: model.clone() })
            }
            Work::Predict { model, output, format } => v1::options::Work::Predict(v1::Predict {
                model: model.clone(),
                output: output.clone(),
                format: match format {
                    Format::Csv => v1::Format::Csv,
                    Format::Jsonl => v1::Format::Jsonl,
                    Format::Parquet => v1::Format::Parquet,
                }
                .into(),
            }),
            Work::Train { export } => {
                let validation = spec.validation.as_ref().map(to_validation);
                v1::options::Work::Train(v1::Train { export: export.clone(), validation })
            }
        }),
        wire_dtype: wire_dtype.into(),
        channels: spec.channels.into(),
        skip_nonfinite: spec.on_nonfinite == OnNonfinite::Skip,
        leave_timeout_ms: Some(to_millis(spec.leave_timeout())),
    };
    let welcome = v1::Welcome { worker: worker.0, options: Some(options), incarnation };
    to_message(master_message::Kind::Welcome(welcome))
}

/// Converts a message of the core to a worker.
pub(crate) fn to_worker(message: ToWorker) -> v1::MasterMessage {
    use master_message::Kind;
    to_message(match message {
        ToWorker::Describe => Kind::Describe(v1::Describe {}),
        ToWorker::Drain => Kind::Drain(v1::Drain { suspend: false }),
        ToWorker::Fetch(donors) => {
            Kind::Fetch(v1::Fetch { donors: donors.into_iter().map(to_member).collect() })
        }
        ToWorker::KeepCheckpoint => Kind::KeepCheckpoint(v1::KeepCheckpoint {}),
        ToWorker::Lease(ranges) => {
            Kind::Lease(v1::Lease { ranges: ranges.into_iter().map(to_range).collect() })
        }
        ToWorker::Membership(membership) => Kind::Membership(to_membership(membership)),
        ToWorker::Prepare(dataset) => {
            Kind::Prepare(v1::Prepare { dataset: Some(to_dataset(&dataset)) })
        }
        ToWorker::Shutdown(reason) => Kind::Shutdown(v1::Shutdown { reason }),
        ToWorker::Suspend => Kind::Drain(v1::Drain { suspend: true }),
    })
}

/// Converts the status of a job.
pub(crate) fn status_reply(status: job::Status) -> v1::StatusReply {
    let to_worker_status = |worker: job::WorkerStatus| v1::WorkerStatus {
        worker: worker.worker.0,
        pid: worker.pid,
        rank: worker.rank,
        state: worker.state.into(),
        compute_us: worker.compute_us,
        leased_records: worker.leased_records,
        step: worker.step,
        straggler: worker.straggler,
    };
    let to_counts = |shards: job::ShardCounts| v1::ShardCounts {
        todo: shards.todo,
        leased: shards.leased,
        done: shards.done,
    };
    v1::StatusReply {
        job: status.job,
        state: status.state.into(),
        generation: status.generation.0,
        step: status.step,
        epoch: status.epoch,
        epochs: status.epochs,
        records_counted: status.records_counted,
        records_expected: status.records_expected,
        loss: status.loss,
        records_per_s: status.records_per_s,
        workers_desired: status.workers_desired,
        workers: status.workers.into_iter().map(to_worker_status).collect(),
        workers_pending: status.workers_pending.into_iter().map(to_launch_status).collect(),
        priority_tiers: status.priority_tiers.into_iter().map(to_priority_tier_status).collect(),
        events: status.events,
        progress: status.progress,
        shards: status.shards.map(to_counts),
        memberships: status.memberships.into_iter().map(to_membership_record).collect(),
        events_emitted: status.events_emitted,
        allreduce_transport: status.allreduce_transport,
        evaluated: status.evaluated.map(to_evaluated),
        checkpoints: status
            .checkpoints
            .filter(|known| known.dir.is_some())
            .map(to_checkpoint_status),
    }
}

fn to_validation(spec: &ValidationSpec) -> v1::Validation {
    let ValidationSpec { data, every, metric, highest, patience } = spec.clone();
    v1::Validation { data, every, metric, highest, patience }
}

fn to_evaluated(evaluated: Evaluated) -> v1::Evaluated {
    let Evaluated { step, records, metrics } = evaluated;
    let metrics = metrics.into_iter().map(|(name, mean)| (name, mean.unwrap_or(f64::NAN)));
    v1::Evaluated { step, records, metrics: metrics.collect() }
}

fn to_checkpoint_options(spec: &CheckpointSpec) -> v1::CheckpointOptions {
    let every = match spec.every {
        CheckpointEvery::Steps(steps) => v1::checkpoint_options::Every::Steps(steps.get()),
        CheckpointEvery::Time(time) => v1::checkpoint_options::Every::Ms(to_millis(time)),
    };
    v1::CheckpointOptions {
        dir: spec.dir.clone(),
        every: Some(every),
        keep: spec.keep,
        exclusive: spec.exclusive,
    }
}

fn to_checkpoint_status(known: job::CheckpointsSummary) -> v1::CheckpointStatus {
    let job::CheckpointsSummary { dir, newest, saved, failed, error, .. } = known;
    let newest = newest.map(|job::SavedCheckpoint { step, name, bytes }| v1::CheckpointSaved {
        step,
        name,
        bytes,
    });
    v1::CheckpointStatus { dir: dir.unwrap_or_default(), newest, saved, failed, error }
}

fn to_launch_status(launch: job::LaunchStatus) -> v1::LaunchStatus {
    let job::LaunchStatus { launch, slot, state, reason } = launch;
    v1::LaunchStatus { launch: launch.0, slot, state: state.into(), reason }
}

fn to_priority_tier_status(tier: job::PriorityTierStatus) -> v1::PriorityTierStatus {
    let job::PriorityTierStatus { class, launches, workers } = tier;
    v1::PriorityTierStatus { class, launches, workers }
}

fn to_membership_record(record: MembershipChange) -> v1::MembershipChange {
    // The values were whole microseconds before their conversion to milliseconds.
    let us = |ms: Option<f64>| ms.map_or(0, |ms| (ms * 1000.0).round() as u64);
    let phases = record.gap_ms.map(|_| v1::Phases {
        detect_us: us(record.detect_ms),
        abort_us: us(record.abort_ms),
        agree_us: us(record.agree_ms),
        connect_us: us(record.connect_ms),
        state_us: us(record.state_ms),
        first_step_us: us(record.first_step_ms),
    });
    let ids = |workers: Vec<WorkerId>| workers.into_iter().map(|worker| worker.0).collect();
    v1::MembershipChange {
        generation: record.generation.0,
        cause: record.cause.name().into(),
        world_size: record.world_size,
        at_step: record.at_step,
        phases,
        lost: ids(record.lost),
        left: ids(record.left),
        joined: ids(record.joined),
    }
}

fn evaluated(report: v1::Evaluated) -> Result<Evaluated, Status> {
    within("evaluated.metrics", report.metrics.len() as u64, 0, METRICS_MAX)?;
    // A value that is not finite is valid: it shows the user that the model diverges.
    let metrics = report
        .metrics
        .into_iter()
        .map(|(name, mean)| (clip(name, METRIC_NAME_BYTES_MAX), mean.is_finite().then_some(mean)));
    Ok(Evaluated {
        step: within("evaluated.step", report.step, 1, STEPS_MAX)?,
        records: within("evaluated.records", report.records, 1, DATASET_RECORDS_MAX)?,
        metrics: metrics.collect(),
    })
}

fn checkpoint_news(news: v1::CheckpointNews) -> Result<CheckpointNews, Status> {
    use v1::checkpoint_news::Kind;
    let step = |step| within("checkpoint.step", step, 0, STEPS_MAX);
    let name = |name| clip(name, CHECKPOINT_NAME_BYTES_MAX);
    let kind =
        news.kind.ok_or_else(|| invalid("checkpoint.kind: must be one that this master knows"))?;
    Ok(match kind {
        Kind::Damaged(news) => CheckpointNews::Damaged {
            name: name(news.name),
            reason: clip(news.reason, ERROR_BYTES_MAX),
        },
        Kind::Failed(news) => CheckpointNews::Failed {
            step: step(news.step)?,
            error: clip(news.error, ERROR_BYTES_MAX),
        },
        Kind::Restored(news) => {
            CheckpointNews::Restored { step: step(news.step)?, name: name(news.name) }
        }
        Kind::Saved(news) => CheckpointNews::Saved {
            step: step(news.step)?,
            name: name(news.name),
            bytes: news.bytes,
        },
    })
}

fn description(described: v1::Described) -> Result<Result<FileList, String>, Status> {
    match described.outcome {
        None => Err(invalid("described.outcome: must be a data set or an error")),
        Some(v1::described::Outcome::Error(error)) => Ok(Err(clip(error, ERROR_BYTES_MAX))),
        Some(v1::described::Outcome::Dataset(described)) if described.packed.is_empty() => {
            file_list(described).map(Ok)
        }
        Some(v1::described::Outcome::Dataset(described)) => {
            let limits = FileLimits {
                files: DATASET_FILES_MAX,
                path_bytes: PATH_BYTES_MAX,
                records: DATASET_RECORDS_MAX,
            };
            let list = FileList::unpack(described.packed, limits);
            Ok(list.map_err(|error| {
                format!("the list of the data set's files can't be used: {error}")
            }))
        }
    }
}

fn file_list(described: v1::Dataset) -> Result<FileList, Status> {
    if described.files.len() > DATASET_FILES_MAX {
        return Err(invalid(&format!("described.dataset.files: at most {DATASET_FILES_MAX}")));
    }
    let mut total = 0;
    for file in &described.files {
        if file.path.is_empty() || file.path.len() > PATH_BYTES_MAX {
            return Err(invalid(&format!("file.path: must have 1 to {PATH_BYTES_MAX} bytes")));
        }
        total += within("file.records", file.records, 0, DATASET_RECORDS_MAX)?;
        within("records of all files", total, 0, DATASET_RECORDS_MAX)?;
    }
    Ok(FileList::pack(described.files.into_iter().map(|f| {
        let v1::File { path, records, version } = f;
        ListedFile { path, records, version }
    })))
}

fn committed(message: v1::Committed) -> Result<Committed, Status> {
    within(
        "committed.compute_us (ranks)",
        message.compute_us.len() as u64,
        0,
        u64::from(WORKERS_MAX),
    )?;
    Ok(Committed {
        generation: generation("committed.generation", message.generation)?,
        step: within("committed.step", message.step, 0, STEPS_MAX)?,
        ranges: ranges("committed.ranges", message.ranges)?,
        // A value that is not finite is valid: it shows the user that the model diverges.
        loss_sum: message.loss_sum,
        records: within("committed.records", message.records, 0, DATASET_RECORDS_MAX)?,
        compute_us: message.compute_us,
        times: step_times(message.times.unwrap_or_default())?,
        steps_skipped: within("committed.steps_skipped", message.steps_skipped, 0, STEPS_MAX)?,
    })
}

fn done(message: v1::Done) -> Result<FromWorker, Status> {
    within("done.metrics", message.metrics.len() as u64, 0, METRICS_MAX)?;
    let metrics = BTreeMap::from_iter(message.metrics);
    for (name, sum) in &metrics {
        if name.is_empty() || name.len() > METRIC_NAME_BYTES_MAX {
            return Err(invalid(&format!(
                "done.metrics: names must have 1 to {METRIC_NAME_BYTES_MAX} bytes"
            )));
        }
        if !sum.is_finite() {
            return Err(invalid(&format!(
                "done.metrics: {name} is {sum} where a finite number should be"
            )));
        }
    }
    let [range] = ranges("done.range", message.range.into_iter().collect())?
        .try_into()
        .map_err(|_| invalid("done.range: must be there"))?;
    Ok(FromWorker::ShardDone { range, metrics })
}

fn step_times(times: v1::StepTimes) -> Result<StepTimes, Status> {
    Ok(StepTimes {
        steps: within("times.steps", times.steps, 0, STEPS_MAX)?,
        step_us: within("times.step_us", times.step_us, 0, PHASE_US_MAX)?,
        reduce_us: within("times.reduce_us", times.reduce_us, 0, PHASE_US_MAX)?,
    })
}

fn finished(message: v1::Finished) -> Result<Finished, Status> {
    Ok(Finished {
        generation: generation("finished.generation", message.generation)?,
        step: within("finished.step", message.step, 0, STEPS_MAX)?,
        digest: message.digest,
        ledger: ledger("finished.ledger", message.ledger)?,
        records_trained: message.records_trained,
        stopped_early: message.stopped_early,
        summary: message.summary.map(|text| clip(text, SUMMARY_BYTES_MAX)),
        failure: message.failure.map(failure).transpose()?,
        suspended: message.suspended,
        steps_skipped: within("finished.steps_skipped", message.steps_skipped, 0, STEPS_MAX)?,
        exported: message.exported,
    })
}

fn failure(message: v1::FinishedFailure) -> Result<Failure, Status> {
    let v1::FinishedFailure { error, ranges: found } = message;
    Ok(Failure {
        error: clip(error, ERROR_BYTES_MAX),
        ranges: ranges("finished.failure.ranges", found)?,
    })
}

fn phases(phases: Option<v1::Phases>) -> Result<Phases, Status> {
    let phases = phases.ok_or_else(|| invalid("resumed.phases: must be there"))?;
    let phase = |name, us| within(name, us, 0, PHASE_US_MAX);
    Ok(Phases {
        detect_us: phase("phases.detect_us", phases.detect_us)?,
        abort_us: phase("phases.abort_us", phases.abort_us)?,
        agree_us: phase("phases.agree_us", phases.agree_us)?,
        connect_us: phase("phases.connect_us", phases.connect_us)?,
        state_us: phase("phases.state_us", phases.state_us)?,
        first_step_us: phase("phases.first_step_us", phases.first_step_us)?,
    })
}

fn stall(stall: v1::Stall) -> Result<Stall, Status> {
    Ok(Stall {
        generation: generation("stall.generation", stall.generation)?,
        // These numbers are only compared, so they need no bounds.
        operation: stall.operation,
        received: stall.received,
        sent: stall.sent,
        waits_for_next: stall.waits_for_next,
        since: Duration::from_millis(stall.for_ms),
    })
}

fn ledger(name: &str, ledger: Option<v1::Ledger>) -> Result<LedgerReport, Status> {
    let ledger = ledger.ok_or_else(|| invalid(&format!("{name}: must be there")))?;
    Ok(LedgerReport {
        // When all epochs are complete, this is one more than the number of the last epoch.
        epochs_complete: within_u32(name, ledger.epochs_complete, EPOCHS_MAX)?,
        ranges: ranges(name, ledger.ranges)?,
        repeated: ledger.repeated_records,
    })
}

fn ranges(name: &str, ranges: Vec<v1::Range>) -> Result<Vec<RecordRange>, Status> {
    ranges.into_iter().map(|range| record_range(name, range)).collect()
}

fn record_range(name: &str, range: v1::Range) -> Result<RecordRange, Status> {
    let v1::Range { epoch: number, start, end } = range;
    if start >= end {
        return Err(invalid(&format!("{name}: {start}..{end} holds no record")));
    }
    within(name, end, 1, DATASET_RECORDS_MAX)?;
    Ok(RecordRange { epoch: epoch(name, number)?, start, end })
}

fn epoch(name: &str, epoch: u32) -> Result<u32, Status> {
    within_u32(name, epoch, EPOCHS_MAX - 1)
}

fn generation(name: &str, generation: u64) -> Result<Generation, Status> {
    within(name, generation, 1, u64::MAX - 1).map(Generation)
}

fn within_u32(name: &str, value: u32, max: u32) -> Result<u32, Status> {
    if value > max {
        return Err(invalid(&format!("{name}: {value} is more than {max}")));
    }
    Ok(value)
}

fn within(name: &str, value: u64, min: u64, max: u64) -> Result<u64, Status> {
    if !(min..=max).contains(&value) {
        return Err(invalid(&format!("{name}: {value} is not between {min} and {max}")));
    }
    Ok(value)
}

/// Truncates `text` to at most `bytes_max` bytes at a character boundary, and marks the cut.
fn clip(mut text: String, bytes_max: usize) -> String {
    if text.len() > bytes_max {
        let end =
            (0..=bytes_max).rev().find(|&end| text.is_char_boundary(end)).expect("0 is a boundary");
        text.truncate(end);
        text.push('…');
    }
    text
}

fn invalid(what: &str) -> Status {
    Status::invalid_argument(what)
}

fn to_message(kind: master_message::Kind) -> v1::MasterMessage {
    v1::MasterMessage { kind: Some(kind) }
}

fn to_millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn to_member((worker, address): (WorkerId, SocketAddr)) -> v1::Member {
    v1::Member { worker: worker.0, address: address.to_string() }
}

fn to_membership(membership: Membership) -> v1::Membership {
    v1::Membership {
        generation: membership.generation.0,
        members: membership.members.into_iter().map(to_member).collect(),
        abort: membership.abort,
    }
}

fn to_file(file: ListedFile) -> v1::File {
    let ListedFile { path, records, version } = file;
    v1::File { path, records, version }
}

fn to_dataset(list: &FileList) -> v1::Dataset {
    if list.bytes() >= FILES_PACKED_FROM {
        return v1::Dataset { files: Vec::new(), packed: list.packed().clone() };
    }
    let files = list.iter().map(to_file).collect();
    v1::Dataset { files, ..v1::Dataset::default() }
}

fn to_range(range: RecordRange) -> v1::Range {
    v1::Range { epoch: range.epoch, start: range.start, end: range.end }
}

/// Size in bytes from which a list of files is sent packed.
const FILES_PACKED_FROM: u64 = 4 << 20;
const CHECKPOINT_NAME_BYTES_MAX: usize = 256;
const METRICS_MAX: u64 = 100;
const METRIC_NAME_BYTES_MAX: usize = 100;
const JOB_NAME_SHOWN_MAX: usize = 64;

#[cfg(test)]
mod tests;
