//! From the messages of the schema to the types of this crate.
//!
//! Each field of a message is checked. An invalid message is refused with the name of the field and
//! its valid values. What depends on the state of the receiver is checked by the receiver.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use super::commits::committed;
use super::difference::Difference;
use super::order;
use super::requests::{JoinRequest, JoinResponse};
use super::v1::{self, master_message, worker_message};
use crate::files::{FileList, ListedFile};
use crate::ids::{Generation, LaunchId, WorkerId};
use crate::job::{Welcome, WorkerOptions};
use crate::limits::{
    CHECKPOINT_NAME_BYTES_MAX, DATASET_FILES_MAX, DATASET_RECORDS_MAX, EPOCHS_MAX, ERROR_BYTES_MAX,
    METRIC_NAME_BYTES_MAX, METRICS_MAX, PARAMETERS_MAX, PATH_BYTES_MAX, PHASE_US_MAX,
    PLACE_BYTES_MAX, REPORT_BYTES_MAX, SKIPPED_LISTED_MAX, SKIPPED_TEXT_BYTES_MAX, STALL_FAR_MAX,
    STEPS_MAX, SUMMARY_BYTES_MAX, WORKERS_MAX, clip,
};
use crate::members::Members;
use crate::membership::{Hello, Location, Membership, Phases, Resume, Stall};
use crate::message::{
    CheckpointNews, CheckpointTimes, Evaluated, Failure, Finished, Heartbeat, Kept, LedgerReport,
    LinkPace, MasterMessage, Usage, WorkerMessage,
};
use crate::ranges::RecordRange;
use crate::row_touches::RowTouches;
use crate::summary::SkippedRecords;

/// The decoded part of a message, or why the message is invalid.
pub(super) type Checked<T> = Result<T, String>;

pub(super) fn join_request(message: v1::WorkerMessage) -> JoinRequest {
    let decoded = match message.kind {
        None => Err("a message must have a kind that this master knows".into()),
        Some(worker_message::Kind::Hello(sent)) => {
            hello(sent).map(|hello| JoinRequest::Hello(Box::new(hello)))
        }
        Some(kind) => worker_message(kind).map(JoinRequest::Message),
    };
    decoded.unwrap_or_else(JoinRequest::Invalid)
}

fn hello(sent: v1::Hello) -> Checked<Hello> {
    let v1::Hello { job, launch, address, pid, resume: sent, location } = sent;
    let address = peer_address("hello.address", &address)?;
    if pid == 0 {
        return Err("hello.pid: must not be 0".into());
    }
    let incarnation = sent.as_ref().map_or(0, |resume| resume.incarnation);
    let resume = sent.map(resume).transpose()?;
    let v1::Location { zone, rack, node } = location.unwrap_or_default();
    let [zone, rack, node] = [zone, rack, node].map(|name| clip(name, PLACE_BYTES_MAX));
    let location = Location { zone, rack, node };
    Ok(Hello { job, launch: LaunchId(launch), address, pid, resume, incarnation, location })
}

fn resume(resume: v1::Resume) -> Checked<Resume> {
    let v1::Resume { worker, membership: known, parameters, incarnation: _, holds_state } = resume;
    let parameters =
        parameters.map(|n| within("hello.resume.parameters", n, 1, PARAMETERS_MAX)).transpose()?;
    let membership = known.map(|m| membership("hello.resume.membership", &m)).transpose()?;
    Ok(Resume { worker: WorkerId(worker), membership, parameters, holds_state })
}

fn worker_message(kind: worker_message::Kind) -> Checked<WorkerMessage> {
    use worker_message::Kind;
    Ok(match kind {
        Kind::AllreduceTransport(report) => WorkerMessage::AllreduceTransport {
            generation: generation("allreduce_transport.generation", report.generation)?,
            what: clip(report.what, ERROR_BYTES_MAX),
        },
        Kind::BestExport(v1::BestExport { step, error, kept, kept_value }) => {
            WorkerMessage::BestExport {
                step: within("best_export.step", step, 0, STEPS_MAX)?,
                kept: kept.map(|kept| Kept {
                    address: clip(kept, ERROR_BYTES_MAX),
                    value: kept_value.filter(|value| value.is_finite()),
                }),
                error: error.map(|error| clip(error, ERROR_BYTES_MAX)),
            }
        }
        Kind::Broken(broken) => WorkerMessage::Broken {
            generation: generation("broken.generation", broken.generation)?,
            suspect: broken.suspect.map(WorkerId),
            error: clip(broken.error, ERROR_BYTES_MAX),
            unreachable: broken.unreachable,
        },
        Kind::CaughtUp(v1::CaughtUp { step }) => {
            let step = step.map(|step| within("caught_up.step", step, 0, STEPS_MAX)).transpose()?;
            WorkerMessage::CaughtUp { step }
        }
        Kind::Checkpoint(news) => WorkerMessage::Checkpoint(checkpoint_news(news)?),
        Kind::Committed(report) => WorkerMessage::Committed(committed(report)?),
        Kind::RecordsSkipped(skipped) => {
            let v1::RecordsSkipped { bad, nulls, first, files, first_file } = skipped;
            let clipped = |text| clip(text, SKIPPED_TEXT_BYTES_MAX);
            let first = first.into_iter().take(SKIPPED_LISTED_MAX).map(clipped).collect();
            let first_file = clipped(first_file);
            let skipped = SkippedRecords { bad, nulls, first, files, first_file };
            WorkerMessage::RecordsSkipped(skipped)
        }
        Kind::Described(described) => {
            let order = described.order.map(order::decode).transpose()?;
            WorkerMessage::Described(description(described.outcome)?, order)
        }
        Kind::Diverged(v1::Diverged { error, has_majority, by_audit }) => {
            let error = clip(error, ERROR_BYTES_MAX);
            WorkerMessage::Diverged { error, has_majority, by_audit }
        }
        Kind::Done(done) => shard_done(done)?,
        Kind::Evaluated(report) => {
            let took = Duration::from_micros(report.took_us.min(PHASE_US_MAX));
            WorkerMessage::Evaluated(evaluated(report)?, took)
        }
        Kind::Failed(failed) => WorkerMessage::Failed {
            error: clip(failed.error, ERROR_BYTES_MAX),
            ranges: ranges("failed.ranges", failed.ranges)?,
            fatal: failed.fatal,
            exported: failed.exported,
        },
        Kind::Finished(report) => WorkerMessage::Finished(finished(report)?),
        Kind::Formed(formed) => WorkerMessage::Formed {
            generation: generation("formed.generation", formed.generation)?,
            step: within("formed.step", formed.step, 0, STEPS_MAX)?,
            ledger: ledger("formed.ledger", formed.ledger)?,
        },
        Kind::Heartbeat(beat) => WorkerMessage::Heartbeat(heartbeat(beat)?),
        Kind::Hello(_) => return Err("`hello` comes first, and once".into()),
        Kind::LeaseRequest(v1::LeaseRequest { shards }) => WorkerMessage::LeaseRequest {
            shards: within("lease_request.shards", shards, 1, DATASET_RECORDS_MAX)?,
        },
        Kind::Leaving(v1::Leaving {}) => WorkerMessage::Leaving,
        Kind::Ready(v1::Ready { parameters }) => WorkerMessage::Ready {
            parameters: within("ready.parameters", parameters, 1, PARAMETERS_MAX)?,
        },
        Kind::Reconnected(v1::Reconnected { step }) => {
            WorkerMessage::Reconnected { step: within("reconnected.step", step, 0, STEPS_MAX)? }
        }
        Kind::HostChecked(v1::HostChecked { json }) => {
            within("host_checked.json", json.len() as u64, 0, REPORT_BYTES_MAX)?;
            let report = serde_json::from_str(&json)
                .map_err(|error| format!("host_checked.json: {error}"))?;
            WorkerMessage::HostChecked(Box::new(report))
        }
        Kind::Report(v1::Report { request, json }) => {
            within("report.json", json.len() as u64, 0, REPORT_BYTES_MAX)?;
            let report =
                serde_json::from_str(&json).map_err(|error| format!("report.json: {error}"))?;
            WorkerMessage::Report { request, report: Box::new(report) }
        }
        Kind::Resumed(resumed) => WorkerMessage::Resumed {
            generation: generation("resumed.generation", resumed.generation)?,
            step: within("resumed.step", resumed.step, 1, STEPS_MAX)?,
            phases: phases(resumed.phases)?,
        },
        Kind::StorageWait(wait) => WorkerMessage::StorageWait {
            storage: wait.storage.map(|storage| clip(storage, ERROR_BYTES_MAX)),
            waited: Duration::from_micros(wait.waited_ms.saturating_mul(1000).min(PHASE_US_MAX)),
        },
    })
}

fn checkpoint_news(news: v1::CheckpointNews) -> Checked<CheckpointNews> {
    use v1::checkpoint_news::Kind;
    let step = |step| within("checkpoint.step", step, 0, STEPS_MAX);
    let name = |name| clip(name, CHECKPOINT_NAME_BYTES_MAX);
    let kind = news.kind.ok_or("checkpoint.kind: must be one that this master knows")?;
    Ok(match kind {
        Kind::Damaged(news) => CheckpointNews::Damaged {
            name: name(news.name),
            reason: clip(news.reason, ERROR_BYTES_MAX),
        },
        Kind::Failed(news) => CheckpointNews::Failed {
            step: step(news.step)?,
            error: clip(news.error, ERROR_BYTES_MAX),
        },
        Kind::OlderRows(news) => {
            CheckpointNews::OlderRows { name: news.name.map(name), missing: news.missing }
        }
        Kind::Restored(news) => CheckpointNews::Restored {
            step: step(news.step)?,
            name: name(news.name),
            row_touches: news.row_touches,
            differences: clip(news.differences, ERROR_BYTES_MAX),
        },
        Kind::RowsLost(v1::CheckpointRowsLost { step: at, shards, row_touches }) => {
            CheckpointNews::RowsLost { step: step(at)?, shards, row_touches }
        }
        Kind::Saved(news) => CheckpointNews::Saved {
            step: step(news.step)?,
            name: name(news.name),
            bytes: news.bytes,
            times: CheckpointTimes {
                copy_us: news.copy_us.min(PHASE_US_MAX),
                write_us: news.write_us.min(PHASE_US_MAX),
                publish_us: news.publish_us.min(PHASE_US_MAX),
            },
        },
    })
}

/// The description of a data set. A list that can't be read is an error of the data set.
fn description(outcome: Option<v1::described::Outcome>) -> Checked<Result<FileList, String>> {
    match outcome {
        None => Err("described.outcome: must be a data set or an error".into()),
        Some(v1::described::Outcome::Error(error)) => Ok(Err(clip(error, ERROR_BYTES_MAX))),
        Some(v1::described::Outcome::Dataset(list)) if list.packed.is_empty() => {
            file_list(list).map(Ok)
        }
        Some(v1::described::Outcome::Dataset(list)) => Ok(file_list(list)),
    }
}

fn shard_done(done: v1::Done) -> Checked<WorkerMessage> {
    within("done.metrics", done.metrics.len() as u64, 0, METRICS_MAX as u64)?;
    let metrics = BTreeMap::from_iter(done.metrics);
    for (name, sum) in &metrics {
        if name.is_empty() || name.len() > METRIC_NAME_BYTES_MAX {
            return Err(format!(
                "done.metrics: names must have 1 to {METRIC_NAME_BYTES_MAX} bytes"
            ));
        }
        if !sum.is_finite() {
            return Err(format!("done.metrics: {name} is {sum} where a finite number should be"));
        }
    }
    let range = record_range("done.range", done.range.ok_or("done.range: must be there")?)?;
    Ok(WorkerMessage::ShardDone { range, metrics })
}

fn evaluated(report: v1::Evaluated) -> Checked<Evaluated> {
    within("evaluated.metrics", report.metrics.len() as u64, 0, METRICS_MAX as u64)?;
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

fn finished(report: v1::Finished) -> Checked<Finished> {
    let failure = |v1::FinishedFailure { error, ranges: found }| {
        let ranges = ranges("finished.failure.ranges", found)?;
        Ok::<_, String>(Failure { error: clip(error, ERROR_BYTES_MAX), ranges })
    };
    Ok(Finished {
        generation: generation("finished.generation", report.generation)?,
        step: within("finished.step", report.step, 0, STEPS_MAX)?,
        digest: report.digest,
        ledger: ledger("finished.ledger", report.ledger)?,
        records_trained: report.records_trained,
        stopped_early: report.stopped_early,
        summary: report.summary.map(|text| clip(text, SUMMARY_BYTES_MAX)),
        failure: report.failure.map(failure).transpose()?,
        suspended: report.suspended,
        steps_skipped: within("finished.steps_skipped", report.steps_skipped, 0, STEPS_MAX)?,
        exported: report.exported,
        row_touches: report.row_touches.map(|touches| {
            let v1::RowTouches { expected, counted } = touches;
            RowTouches { expected, counted }
        }),
    })
}

fn ledger(name: &str, ledger: Option<v1::Ledger>) -> Checked<LedgerReport> {
    let ledger = ledger.ok_or_else(|| format!("{name}: must be there"))?;
    Ok(LedgerReport {
        // When all epochs are complete, this is one more than the number of the last epoch.
        epochs_complete: within_u32(name, ledger.epochs_complete, EPOCHS_MAX)?,
        ranges: ranges(name, ledger.ranges)?,
        repeated: ledger.repeated_records,
    })
}

fn phases(phases: Option<v1::Phases>) -> Checked<Phases> {
    let phases = phases.ok_or("resumed.phases: must be there")?;
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

fn heartbeat(beat: v1::Heartbeat) -> Checked<Heartbeat> {
    let within_steps = |step| within("heartbeat.step", step, 0, STEPS_MAX);
    Ok(Heartbeat {
        stall: beat.stall.map(stall).transpose()?,
        holds_state: beat.holds_state,
        usage: beat.usage.map(|v1::Usage { cpu_millicores, memory_bytes }| Usage {
            cpu_millicores,
            memory_bytes,
        }),
        step: beat.step.map(within_steps).transpose()?,
        link_pace: beat.link_pace.map(link_pace).transpose()?,
    })
}

fn stall(stall: v1::Stall) -> Checked<Stall> {
    let mut awaited = stall.far.iter().copied().map(WorkerId);
    let far = std::array::from_fn(|_| awaited.next());
    if awaited.next().is_some() {
        return Err(format!("stall.far: more than {STALL_FAR_MAX} members"));
    }
    Ok(Stall {
        generation: generation("stall.generation", stall.generation)?,
        // These numbers are only compared, so they need no bounds.
        operation: stall.operation,
        received: stall.received,
        sent: stall.sent,
        waits_for_next: stall.waits_for_next,
        far,
        since: Duration::from_millis(stall.for_ms),
    })
}

fn link_pace(pace: v1::LinkPace) -> Checked<LinkPace> {
    let v1::LinkPace { to, measured_us, limited_us, bytes } = pace;
    let measured = within("link_pace.measured_us", measured_us, 1, PHASE_US_MAX)?;
    let limited = within("link_pace.limited_us", limited_us, 0, measured)?;
    let [measured, limited] = [measured, limited].map(Duration::from_micros);
    Ok(LinkPace { to: WorkerId(to), measured, limited, bytes })
}

// ---- master to worker ----

/// `before`: the members of the membership before, on the same stream.
pub(super) fn join_response(before: &Members, message: v1::MasterMessage) -> JoinResponse {
    let decoded = match message.kind {
        None => Err("a message must have a kind that this worker knows".into()),
        Some(master_message::Kind::Welcome(sent)) => {
            welcome(sent).map(|welcome| JoinResponse::Welcome(Box::new(welcome)))
        }
        Some(kind) => {
            master_message(before, kind).map(|message| JoinResponse::Message(message.into()))
        }
    };
    decoded.unwrap_or_else(JoinResponse::Invalid)
}

fn master_message(before: &Members, kind: master_message::Kind) -> Checked<MasterMessage> {
    use master_message::Kind;
    Ok(match kind {
        Kind::Describe(_) => MasterMessage::Describe,
        Kind::Drain(v1::Drain { fail: true, .. }) => MasterMessage::GiveUp,
        Kind::Drain(v1::Drain { suspend: true, .. }) => MasterMessage::Suspend,
        Kind::Drain(_) => MasterMessage::Drain,
        Kind::Fetch(v1::Fetch { donors }) => {
            MasterMessage::Fetch(members("fetch.donors", &donors)?)
        }
        Kind::Inspect(v1::Inspect { request, bytes_max }) => MasterMessage::Inspect {
            request,
            bytes_max: within("inspect.bytes_max", bytes_max, 1, REPORT_BYTES_MAX)?,
        },
        Kind::Joiners(v1::Joiners { workers }) => {
            within("joiners.workers", workers.len() as u64, 0, WORKERS_MAX.into())?;
            MasterMessage::Joiners(workers.into_iter().map(WorkerId).collect())
        }
        Kind::KeepCheckpoint(_) => MasterMessage::KeepCheckpoint,
        Kind::Lease(lease) => MasterMessage::Lease(ranges("lease.ranges", lease.ranges)?),
        Kind::Membership(published) => {
            MasterMessage::Membership(membership("membership", &published)?)
        }
        Kind::MembershipChange(change) => {
            MasterMessage::Membership(membership_after(before, change)?)
        }
        Kind::Prepare(v1::Prepare { dataset }) => {
            MasterMessage::Prepare(file_list(dataset.ok_or("prepare.dataset: must be there")?)?)
        }
        Kind::CheckHost(_) => MasterMessage::CheckHost,
        Kind::ReportStacks(_) => MasterMessage::ReportStacks,
        Kind::Shutdown(v1::Shutdown { reason, job_is_over }) => {
            MasterMessage::Shutdown { reason, job_is_over }
        }
        Kind::Welcome(_) => return Err("`welcome` comes first, and once".into()),
    })
}

fn welcome(welcome: v1::Welcome) -> Checked<Welcome> {
    let v1::Welcome { worker, options: json, incarnation, serves_tables } = welcome;
    let options: WorkerOptions =
        serde_json::from_str(&json).map_err(|error| format!("welcome.options: {error}"))?;
    options.check().map_err(|error| format!("welcome.options: {error}"))?;
    options.check_deterministic().map_err(|error| format!("options.deterministic: {error}"))?;
    Ok(Welcome { worker: WorkerId(worker), incarnation, serves_tables, options })
}

// ---- both ----

fn membership(name: &str, membership: &v1::Membership) -> Checked<Membership> {
    let v1::Membership { generation, members: sent, abort } = membership;
    let members = members(&format!("{name}.members"), sent)?;
    checked_membership(name, *generation, members, *abort)
}

/// The membership that follows one with the members `before`.
fn membership_after(before: &Members, change: v1::MembershipChange) -> Checked<Membership> {
    const NAME: &str = "membership_change";
    let v1::MembershipChange { generation, abort, left, joined } = change;
    let joined = joined.into_iter().map(|v1::membership_change::Joined { rank, member }| {
        let member = member.ok_or_else(|| format!("{NAME}.joined.member: must be there"))?;
        let address = peer_address(&format!("{NAME}.joined.member.address"), &member.address)?;
        Ok((rank, (WorkerId(member.worker), address)))
    });
    let difference = Difference { left, joined: joined.collect::<Checked<_>>()? };
    let members = difference.apply(before).map_err(|error| format!("{NAME}.{error}"))?;
    checked_membership(NAME, generation, members, abort)
}

fn checked_membership(
    name: &str,
    generation: u64,
    members: Vec<(WorkerId, SocketAddr)>,
    abort: bool,
) -> Checked<Membership> {
    let generation = within(&format!("{name}.generation"), generation, 1, STEPS_MAX)?;
    within(&format!("{name}.members"), members.len() as u64, 1, WORKERS_MAX.into())?;
    let distinct: BTreeSet<WorkerId> = members.iter().map(|(id, _)| *id).collect();
    if distinct.len() < members.len() {
        return Err(format!("{name}.members: must name each worker once"));
    }
    Ok(Membership { generation: Generation(generation), members: members.into(), abort })
}

fn members(name: &str, members: &[v1::Member]) -> Checked<Vec<(WorkerId, SocketAddr)>> {
    let member = |m: &v1::Member| Ok((WorkerId(m.worker), peer_address(name, &m.address)?));
    members.iter().map(member).collect()
}

fn peer_address(name: &str, text: &str) -> Checked<SocketAddr> {
    let address: SocketAddr = text.parse().map_err(|_| format!("{name}: must be `ip:port`"))?;
    if address.port() == 0 || address.ip().is_unspecified() {
        return Err(format!("{name}: must be one that peers can dial, not a wildcard"));
    }
    Ok(address)
}

fn file_list(dataset: v1::Dataset) -> Checked<FileList> {
    if !dataset.packed.is_empty() {
        return FileList::unpack(dataset.packed)
            .map_err(|error| format!("the list of the data set's files can't be used: {error}"));
    }
    if dataset.files.len() > DATASET_FILES_MAX {
        return Err(format!("dataset.files: at most {DATASET_FILES_MAX}"));
    }
    let mut total = 0;
    for file in &dataset.files {
        if file.path.is_empty() || file.path.len() > PATH_BYTES_MAX {
            return Err(format!("file.path: must have 1 to {PATH_BYTES_MAX} bytes"));
        }
        total += within("file.records", file.records, 0, DATASET_RECORDS_MAX)?;
        within("records of all files", total, 0, DATASET_RECORDS_MAX)?;
    }
    let listed = |v1::File { path, records, version }| ListedFile { path, records, version };
    FileList::try_pack(dataset.files.into_iter().map(listed))
        .map_err(|error| format!("the list of the data set's files can't be used: {error}"))
}

pub(super) fn ranges(name: &str, ranges: Vec<v1::Range>) -> Checked<Vec<RecordRange>> {
    ranges.into_iter().map(|range| record_range(name, range)).collect()
}

fn record_range(name: &str, range: v1::Range) -> Checked<RecordRange> {
    let v1::Range { epoch: number, start, end } = range;
    if start >= end {
        return Err(format!("{name}: {start}..{end} holds no record"));
    }
    within(name, end, 1, DATASET_RECORDS_MAX)?;
    Ok(RecordRange { epoch: epoch(name, number)?, start, end })
}

fn epoch(name: &str, epoch: u32) -> Checked<u32> {
    within_u32(name, epoch, EPOCHS_MAX - 1)
}

pub(super) fn generation(name: &str, generation: u64) -> Checked<Generation> {
    within(name, generation, 1, u64::MAX - 1).map(Generation)
}

fn within_u32(name: &str, value: u32, max: u32) -> Checked<u32> {
    if value > max {
        return Err(format!("{name}: {value} is more than {max}"));
    }
    Ok(value)
}

pub(super) fn within(name: &str, value: u64, min: u64, max: u64) -> Checked<u64> {
    if !(min..=max).contains(&value) {
        return Err(format!("{name}: {value} is not between {min} and {max}"));
    }
    Ok(value)
}
