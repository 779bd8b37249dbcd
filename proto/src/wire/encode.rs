//! From the types of this crate to the messages of the schema.

use std::net::SocketAddr;
use std::time::Duration;

use super::difference::Difference;
use super::order;
use super::requests::JoinRequest;
use super::v1::{self, master_message, worker_message};
use crate::files::FileList;
use crate::ids::WorkerId;
use crate::job::Welcome;
use crate::membership::{Hello, Location, Membership, Phases, Resume, Stall};
use crate::message::{
    CheckpointNews, CheckpointTimes, Committed, Evaluated, Failure, Finished, Heartbeat,
    LedgerReport, MasterMessage, RankStep, StepTimes, Usage, WorkerMessage,
};
use crate::ranges::RecordRange;
use crate::row_touches::{RowTouches, TablesStatus};
use crate::summary::SkippedRecords;

pub(super) fn join_request(request: JoinRequest) -> v1::WorkerMessage {
    let kind = match request {
        JoinRequest::Hello(sent) => Some(worker_message::Kind::Hello(hello(*sent))),
        JoinRequest::Invalid(_) => None,
        JoinRequest::Message(message) => Some(worker_message(message)),
    };
    v1::WorkerMessage { kind }
}

fn hello(hello: Hello) -> v1::Hello {
    let Hello { job, launch, address, pid, resume, incarnation, location } = hello;
    let resume = resume.map(|Resume { worker, membership: known, parameters, holds_state }| {
        let membership = known.as_ref().map(membership);
        v1::Resume { worker: worker.0, membership, parameters, incarnation, holds_state }
    });
    let Location { zone, rack, node } = location;
    let location = v1::Location { zone, rack, node };
    let location = Some(location).filter(|location| *location != v1::Location::default());
    v1::Hello { job, launch: launch.0, address: address.to_string(), pid, resume, location }
}

fn worker_message(message: WorkerMessage) -> worker_message::Kind {
    use worker_message::Kind;
    match message {
        WorkerMessage::AllreduceTransport { generation, what } => {
            Kind::AllreduceTransport(v1::AllreduceTransport { generation: generation.0, what })
        }
        WorkerMessage::Broken { generation, suspect, error, unreachable } => {
            let (generation, suspect) = (generation.0, suspect.map(|id| id.0));
            Kind::Broken(v1::Broken { generation, suspect, error, unreachable })
        }
        WorkerMessage::CaughtUp { step } => Kind::CaughtUp(v1::CaughtUp { step }),
        WorkerMessage::Checkpoint(news) => {
            Kind::Checkpoint(v1::CheckpointNews { kind: Some(checkpoint_news(news)) })
        }
        WorkerMessage::Committed(report) => Kind::Committed(committed(report)),
        WorkerMessage::RecordsSkipped(skipped) => {
            let SkippedRecords { bad, nulls, first, files, first_file } = skipped;
            Kind::RecordsSkipped(v1::RecordsSkipped { bad, nulls, first, files, first_file })
        }
        WorkerMessage::Described(described, order) => {
            use v1::described::Outcome;
            let outcome = match described {
                Ok(list) => Outcome::Dataset(dataset(&list)),
                Err(error) => Outcome::Error(error),
            };
            let order = order.map(order::encode);
            Kind::Described(v1::Described { outcome: Some(outcome), order })
        }
        WorkerMessage::Diverged { error, has_majority, by_audit } => {
            Kind::Diverged(v1::Diverged { error, has_majority, by_audit })
        }
        WorkerMessage::Evaluated(report, took) => Kind::Evaluated(evaluated(report, took)),
        WorkerMessage::Failed { error, ranges: found, fatal, exported } => {
            Kind::Failed(v1::Failed { error, ranges: ranges(&found), fatal, exported })
        }
        WorkerMessage::Finished(report) => Kind::Finished(finished(report)),
        WorkerMessage::Formed { generation, step, ledger: report } => {
            let ledger = Some(ledger(report));
            Kind::Formed(v1::Formed { generation: generation.0, step, ledger })
        }
        WorkerMessage::Heartbeat(Heartbeat {
            stall: waits,
            holds_state,
            usage,
            step,
            link_pace,
        }) => {
            let usage = usage.map(|Usage { cpu_millicores, memory_bytes }| v1::Usage {
                cpu_millicores,
                memory_bytes,
            });
            let link_pace = link_pace.map(|pace| v1::LinkPace {
                to: pace.to.0,
                measured_us: micros(pace.measured),
                limited_us: micros(pace.limited),
                bytes: pace.bytes,
            });
            let stall = waits.map(stall);
            Kind::Heartbeat(v1::Heartbeat { stall, holds_state, usage, step, link_pace })
        }
        WorkerMessage::BestExport { step, kept, error } => {
            let kept_value = kept.as_ref().and_then(|kept| kept.value);
            let kept = kept.map(|kept| kept.address);
            Kind::BestExport(v1::BestExport { step, error, kept, kept_value })
        }
        WorkerMessage::LeaseRequest { shards } => Kind::LeaseRequest(v1::LeaseRequest { shards }),
        WorkerMessage::Leaving => Kind::Leaving(v1::Leaving {}),
        WorkerMessage::Ready { parameters } => Kind::Ready(v1::Ready { parameters }),
        WorkerMessage::Reconnected { step } => Kind::Reconnected(v1::Reconnected { step }),
        WorkerMessage::HostChecked(report) => {
            let json = serde_json::to_string(&report).expect("its keys are strings");
            Kind::HostChecked(v1::HostChecked { json })
        }
        WorkerMessage::Report { request, report } => {
            let json = serde_json::to_string(&report).expect("its keys are strings");
            Kind::Report(v1::Report { request, json })
        }
        WorkerMessage::Resumed { generation, step, phases: took } => {
            let phases = Some(phases(took));
            Kind::Resumed(v1::Resumed { generation: generation.0, step, phases })
        }
        WorkerMessage::ShardDone { range: done, metrics } => {
            let metrics = metrics.into_iter().collect();
            Kind::Done(v1::Done { range: Some(range(&done)), metrics })
        }
        WorkerMessage::StorageWait { storage, waited } => {
            Kind::StorageWait(v1::StorageWait { storage, waited_ms: millis(waited) })
        }
    }
}

fn checkpoint_news(news: CheckpointNews) -> v1::checkpoint_news::Kind {
    use v1::checkpoint_news::Kind;
    match news {
        CheckpointNews::Damaged { name, reason } => {
            Kind::Damaged(v1::CheckpointDamaged { name, reason })
        }
        CheckpointNews::Failed { step, error } => {
            Kind::Failed(v1::CheckpointFailed { step, error })
        }
        CheckpointNews::OlderRows { name, missing } => {
            Kind::OlderRows(v1::CheckpointOlderRows { name, missing })
        }
        CheckpointNews::Restored { step, name, row_touches, differences } => {
            Kind::Restored(v1::CheckpointRestored { step, name, differences, row_touches })
        }
        CheckpointNews::RowsLost { step, shards, row_touches } => {
            Kind::RowsLost(v1::CheckpointRowsLost { step, shards, row_touches })
        }
        CheckpointNews::Saved { step, name, bytes, times } => {
            let CheckpointTimes { copy_us, write_us, publish_us } = times;
            Kind::Saved(v1::CheckpointSaved { step, name, bytes, copy_us, write_us, publish_us })
        }
    }
}

fn committed(report: Committed) -> v1::Committed {
    let of_ranks = |value: fn(&RankStep) -> u64| report.ranks.iter().map(value).collect();
    v1::Committed {
        generation: report.generation.0,
        step: report.step,
        ranges: ranges(&report.ranges),
        loss_sum: report.loss_sum,
        records: report.records,
        metrics: report.metrics.into_iter().collect(),
        compute_us: of_ranks(|rank| rank.compute_us),
        input_us: of_ranks(|rank| rank.input_us),
        rank_records: of_ranks(|rank| rank.records),
        checkpoint_us: of_ranks(|rank| rank.checkpoint_us),
        table_bytes: of_ranks(|rank| rank.table_bytes),
        times: Some(step_times(report.times)),
        last: report.last.map(|last| step_times(*last)),
        steps_skipped: report.steps_skipped,
        learning_rate: report.learning_rate,
        first_loss: report.first_loss,
        last_loss: report.last_loss,
        epoch_step: report.epoch_step,
        tables: report.tables.map(|tables| {
            let TablesStatus { rows, touches, shards_at_risk } = *tables;
            v1::Tables { rows, touches, shards_at_risk }
        }),
        steps_audited: report.steps_audited,
    }
}

fn step_times(StepTimes { steps, step_us, reduce_us }: StepTimes) -> v1::StepTimes {
    v1::StepTimes { steps, step_us, reduce_us }
}

fn evaluated(report: Evaluated, took: Duration) -> v1::Evaluated {
    let took_us = micros(took);
    let Evaluated { step, records, metrics } = report;
    let metrics = metrics.into_iter().map(|(name, mean)| (name, mean.unwrap_or(f64::NAN)));
    v1::Evaluated { step, records, metrics: metrics.collect(), took_us }
}

fn finished(report: Finished) -> v1::Finished {
    let failure = report.failure.map(|Failure { error, ranges: found }| v1::FinishedFailure {
        error,
        ranges: ranges(&found),
    });
    v1::Finished {
        generation: report.generation.0,
        step: report.step,
        digest: report.digest,
        ledger: Some(ledger(report.ledger)),
        records_trained: report.records_trained,
        stopped_early: report.stopped_early,
        summary: report.summary,
        failure,
        suspended: report.suspended,
        steps_skipped: report.steps_skipped,
        exported: report.exported,
        row_touches: report.row_touches.map(|touches| {
            let RowTouches { expected, counted } = touches;
            v1::RowTouches { expected, counted }
        }),
    }
}

fn ledger(report: LedgerReport) -> v1::Ledger {
    let LedgerReport { epochs_complete, ranges: absorbed, repeated } = report;
    v1::Ledger { epochs_complete, ranges: ranges(&absorbed), repeated_records: repeated }
}

fn stall(stall: Stall) -> v1::Stall {
    let Stall { generation, operation, received, sent, waits_for_next, far, since } = stall;
    let (generation, for_ms) = (generation.0, millis(since));
    let far = far.into_iter().flatten().map(|worker| worker.0).collect();
    v1::Stall { generation, operation, received, for_ms, sent, waits_for_next, far }
}

fn phases(phases: Phases) -> v1::Phases {
    let Phases { detect_us, abort_us, agree_us, connect_us, state_us, first_step_us } = phases;
    v1::Phases { detect_us, abort_us, agree_us, connect_us, state_us, first_step_us }
}

// ---- master to worker ----

pub(super) fn master_message(message: &MasterMessage) -> v1::MasterMessage {
    use master_message::Kind;
    let kind = match message {
        MasterMessage::Describe => Kind::Describe(v1::Describe {}),
        MasterMessage::Drain => Kind::Drain(v1::Drain::default()),
        MasterMessage::Fetch(donors) => {
            Kind::Fetch(v1::Fetch { donors: donors.iter().map(member).collect() })
        }
        MasterMessage::GiveUp => Kind::Drain(v1::Drain { suspend: false, fail: true }),
        MasterMessage::Inspect { request, bytes_max } => {
            Kind::Inspect(v1::Inspect { request: *request, bytes_max: *bytes_max })
        }
        MasterMessage::Joiners(joiners) => {
            Kind::Joiners(v1::Joiners { workers: joiners.iter().map(|id| id.0).collect() })
        }
        MasterMessage::KeepCheckpoint => Kind::KeepCheckpoint(v1::KeepCheckpoint {}),
        MasterMessage::Lease(leased) => Kind::Lease(v1::Lease { ranges: ranges(leased) }),
        MasterMessage::Membership(published) => Kind::Membership(membership(published)),
        MasterMessage::Prepare(list) => Kind::Prepare(v1::Prepare { dataset: Some(dataset(list)) }),
        MasterMessage::CheckHost => Kind::CheckHost(v1::CheckHost {}),
        MasterMessage::ReportStacks => Kind::ReportStacks(v1::ReportStacks {}),
        MasterMessage::Shutdown { reason, job_is_over } => {
            Kind::Shutdown(v1::Shutdown { reason: reason.clone(), job_is_over: *job_is_over })
        }
        MasterMessage::Suspend => Kind::Drain(v1::Drain { suspend: true, fail: false }),
    };
    v1::MasterMessage { kind: Some(kind) }
}

pub(super) fn welcome(welcome: Welcome) -> v1::MasterMessage {
    let Welcome { worker, incarnation, serves_tables, options: of_job } = welcome;
    let options = serde_json::to_string(&of_job).expect("the options' keys are strings");
    let welcome = v1::Welcome { worker: worker.0, options, incarnation, serves_tables };
    v1::MasterMessage { kind: Some(master_message::Kind::Welcome(welcome)) }
}

// ---- both ----

fn membership(membership: &Membership) -> v1::Membership {
    let Membership { generation, members, abort } = membership;
    let members = members.iter().map(member).collect();
    v1::Membership { generation: generation.0, members, abort: *abort }
}

pub(super) fn membership_change(
    after: &Membership,
    Difference { left, joined }: Difference,
) -> v1::MasterMessage {
    let joined = joined.iter().map(|(rank, new)| v1::membership_change::Joined {
        rank: *rank,
        member: Some(member(new)),
    });
    let Membership { generation, abort, .. } = after;
    let (generation, abort, joined) = (generation.0, *abort, joined.collect());
    let change = v1::MembershipChange { generation, abort, left, joined };
    v1::MasterMessage { kind: Some(master_message::Kind::MembershipChange(change)) }
}

fn member((worker, address): &(WorkerId, SocketAddr)) -> v1::Member {
    v1::Member { worker: worker.0, address: address.to_string() }
}

fn dataset(list: &FileList) -> v1::Dataset {
    if list.bytes() >= FILES_PACKED_FROM {
        return v1::Dataset { files: Vec::new(), packed: list.packed().clone() };
    }
    let files = list.iter().map(|file| v1::File {
        path: file.path,
        records: file.records,
        version: file.version,
    });
    v1::Dataset { files: files.collect(), ..v1::Dataset::default() }
}

fn ranges(ranges: &[RecordRange]) -> Vec<v1::Range> {
    ranges.iter().map(range).collect()
}

fn range(&RecordRange { epoch, start, end }: &RecordRange) -> v1::Range {
    v1::Range { epoch, start, end }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Size in bytes from which a list of files is sent packed.
const FILES_PACKED_FROM: u64 = 4 << 20;
