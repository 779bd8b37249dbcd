//! Checks of received messages.
//!
//! Each field of a message is checked. An invalid message is refused with the name of the field and
//! its valid values; a text that is too long is truncated. What depends on the state of the
//! receiver is checked by the receiver.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::time::Duration;

use super::requests::JoinRequest;
use crate::ids::{Generation, WorkerId};
use crate::job::{Batch, Deterministic, ValidationSpec, WorkerOptions};
use crate::limits::{
    BATCH_RECORDS_MAX, CHANNELS_MAX, CHECKPOINT_NAME_BYTES_MAX, DATASET_RECORDS_MAX, EPOCHS_MAX,
    ERROR_BYTES_MAX, METRIC_NAME_BYTES_MAX, METRICS_MAX, PARAMETERS_MAX, PHASE_US_MAX,
    PLACE_BYTES_MAX, SKIPPED_LISTED_MAX, SKIPPED_TEXT_BYTES_MAX, STEPS_MAX, SUMMARY_BYTES_MAX,
    TABLE_REPLICAS_MAX, WORKERS_MAX, clip,
};
use crate::membership::{Hello, Membership, Phases};
use crate::message::{
    CheckpointNews, Committed, Evaluated, Finished, LedgerReport, MasterMessage, WorkerMessage,
};
use crate::ranges::RecordRange;

/// `Err`: why the message is invalid.
type Checked = Result<(), String>;

pub(super) fn join_request(request: &mut JoinRequest) -> Checked {
    match request {
        JoinRequest::Hello(sent) => hello(sent),
        JoinRequest::Invalid(reason) => Err(clip(mem::take(reason), ERROR_BYTES_MAX)),
        JoinRequest::Message(message) => worker_message(message),
    }
}

fn hello(hello: &mut Hello) -> Checked {
    peer_address("hello.address", hello.address)?;
    if hello.pid == 0 {
        return Err("hello.pid: must not be 0".into());
    }
    let location = &mut hello.location;
    for place in [&mut location.zone, &mut location.rack, &mut location.node] {
        shorten(place, PLACE_BYTES_MAX);
    }
    let Some(resume) = &hello.resume else { return Ok(()) };
    if let Some(parameters) = resume.parameters {
        within("hello.resume.parameters", parameters, 1, PARAMETERS_MAX)?;
    }
    resume.membership.as_ref().map_or(Ok(()), |known| membership("hello.resume.membership", known))
}

fn worker_message(message: &mut WorkerMessage) -> Checked {
    match message {
        WorkerMessage::AllreduceTransport { generation: number, what } => {
            shorten(what, ERROR_BYTES_MAX);
            generation("allreduce_transport.generation", *number)
        }
        WorkerMessage::BestExport { step, kept, error } => {
            if let Some(kept) = kept {
                shorten(&mut kept.address, ERROR_BYTES_MAX);
                kept.value = kept.value.filter(|value| value.is_finite());
            }
            shorten_any(error, ERROR_BYTES_MAX);
            within("best_export.step", *step, 0, STEPS_MAX)
        }
        WorkerMessage::Broken { generation: number, error, .. } => {
            shorten(error, ERROR_BYTES_MAX);
            generation("broken.generation", *number)
        }
        WorkerMessage::CaughtUp { step } => within("caught_up.step", *step, 0, STEPS_MAX),
        WorkerMessage::Checkpoint(news) => checkpoint_news(news),
        WorkerMessage::Committed(report) => committed(report),
        WorkerMessage::Described(description) => {
            if let Err(error) = description {
                shorten(error, ERROR_BYTES_MAX);
            }
            Ok(())
        }
        WorkerMessage::Diverged { error, .. } => {
            shorten(error, ERROR_BYTES_MAX);
            Ok(())
        }
        WorkerMessage::Evaluated(report) => evaluated(report),
        WorkerMessage::Failed { error, ranges: records, .. } => {
            shorten(error, ERROR_BYTES_MAX);
            ranges("failed.ranges", records)
        }
        WorkerMessage::Finished(report) => finished(report),
        WorkerMessage::Formed { generation: number, step, ledger: absorbed } => {
            generation("formed.generation", *number)?;
            within("formed.step", *step, 0, STEPS_MAX)?;
            ledger("formed.ledger", absorbed)
        }
        // The other numbers of a stall are only compared, so they need no bounds.
        WorkerMessage::Heartbeat(heartbeat) => {
            let stall = heartbeat.stall;
            stall.map_or(Ok(()), |stall| generation("stall.generation", stall.generation))
        }
        WorkerMessage::LeaseRequest { shards } => {
            within("lease_request.shards", *shards, 1, DATASET_RECORDS_MAX)
        }
        WorkerMessage::Leaving => Ok(()),
        WorkerMessage::Ready { parameters } => {
            within("ready.parameters", *parameters, 1, PARAMETERS_MAX)
        }
        WorkerMessage::Reconnected { step } => within("reconnected.step", *step, 0, STEPS_MAX),
        WorkerMessage::RecordsSkipped(skipped) => {
            skipped.first.truncate(SKIPPED_LISTED_MAX);
            for text in skipped.first.iter_mut().chain([&mut skipped.first_file]) {
                shorten(text, SKIPPED_TEXT_BYTES_MAX);
            }
            Ok(())
        }
        WorkerMessage::Resumed { generation: number, step, phases: took } => {
            generation("resumed.generation", *number)?;
            within("resumed.step", *step, 1, STEPS_MAX)?;
            phases(took)
        }
        WorkerMessage::ShardDone { range: records, metrics } => {
            shard_metrics(metrics)?;
            range("done.range", records)
        }
        WorkerMessage::StorageWait { storage, waited } => {
            shorten_any(storage, ERROR_BYTES_MAX);
            *waited = (*waited).min(Duration::from_micros(PHASE_US_MAX));
            Ok(())
        }
    }
}

fn checkpoint_news(news: &mut CheckpointNews) -> Checked {
    let check_step = |step: u64| within("checkpoint.step", step, 0, STEPS_MAX);
    match news {
        CheckpointNews::Damaged { name, reason } => {
            shorten(name, CHECKPOINT_NAME_BYTES_MAX);
            shorten(reason, ERROR_BYTES_MAX);
            Ok(())
        }
        CheckpointNews::Failed { step, error } => {
            shorten(error, ERROR_BYTES_MAX);
            check_step(*step)
        }
        CheckpointNews::OlderRows { name, .. } => {
            shorten_any(name, CHECKPOINT_NAME_BYTES_MAX);
            Ok(())
        }
        CheckpointNews::Restored { step, name, differences, .. } => {
            shorten(name, CHECKPOINT_NAME_BYTES_MAX);
            shorten(differences, ERROR_BYTES_MAX);
            check_step(*step)
        }
        CheckpointNews::RowsLost { step, .. } => check_step(*step),
        CheckpointNews::Saved { step, name, .. } => {
            shorten(name, CHECKPOINT_NAME_BYTES_MAX);
            check_step(*step)
        }
    }
}

/// Losses and sums of metrics that are not finite are valid: they show the user that the model
/// diverges.
fn committed(report: &mut Committed) -> Checked {
    generation("committed.generation", report.generation)?;
    within("committed.step", report.step, 0, STEPS_MAX)?;
    ranges("committed.ranges", &report.ranges)?;
    within("committed.records", report.records, 0, DATASET_RECORDS_MAX)?;
    within("committed.ranks", report.ranks.len() as u64, 0, WORKERS_MAX.into())?;
    for rank in &report.ranks {
        within("committed.ranks.records", rank.records, 0, DATASET_RECORDS_MAX)?;
        within("committed.ranks.compute_us", rank.compute_us, 0, PHASE_US_MAX)?;
        within("committed.ranks.input_us", rank.input_us, 0, PHASE_US_MAX)?;
        within("committed.ranks.checkpoint_us", rank.checkpoint_us, 0, PHASE_US_MAX)?;
    }
    within("committed.times.steps", report.times.steps, 0, STEPS_MAX)?;
    within("committed.times.step_us", report.times.step_us, 0, PHASE_US_MAX)?;
    within("committed.times.reduce_us", report.times.reduce_us, 0, PHASE_US_MAX)?;
    within("committed.steps_skipped", report.steps_skipped, 0, STEPS_MAX)?;
    let metrics = mem::take(&mut report.metrics).into_iter().take(METRICS_MAX);
    report.metrics = metrics.map(|(name, sum)| (clip(name, METRIC_NAME_BYTES_MAX), sum)).collect();
    for value in [&mut report.learning_rate, &mut report.first_loss, &mut report.last_loss] {
        *value = value.filter(|value| value.is_finite());
    }
    report.epoch_step = report.epoch_step.filter(|&step| step <= report.step);
    Ok(())
}

fn shard_metrics(metrics: &BTreeMap<String, f64>) -> Checked {
    within("done.metrics", metrics.len() as u64, 0, METRICS_MAX as u64)?;
    for (name, sum) in metrics {
        if name.is_empty() || name.len() > METRIC_NAME_BYTES_MAX {
            return Err(format!(
                "done.metrics: names must have 1 to {METRIC_NAME_BYTES_MAX} bytes"
            ));
        }
        if !sum.is_finite() {
            return Err(format!("done.metrics: {name} is {sum} where a finite number should be"));
        }
    }
    Ok(())
}

fn evaluated(report: &mut Evaluated) -> Checked {
    within("evaluated.metrics", report.metrics.len() as u64, 0, METRICS_MAX as u64)?;
    within("evaluated.step", report.step, 1, STEPS_MAX)?;
    within("evaluated.records", report.records, 1, DATASET_RECORDS_MAX)?;
    let metrics = mem::take(&mut report.metrics).into_iter();
    let metrics = metrics.map(|(name, mean)| {
        (clip(name, METRIC_NAME_BYTES_MAX), mean.filter(|mean| mean.is_finite()))
    });
    report.metrics = metrics.collect();
    Ok(())
}

fn finished(report: &mut Finished) -> Checked {
    generation("finished.generation", report.generation)?;
    within("finished.step", report.step, 0, STEPS_MAX)?;
    within("finished.steps_skipped", report.steps_skipped, 0, STEPS_MAX)?;
    shorten_any(&mut report.summary, SUMMARY_BYTES_MAX);
    if let Some(failure) = &mut report.failure {
        shorten(&mut failure.error, ERROR_BYTES_MAX);
        ranges("finished.failure.ranges", &failure.ranges)?;
    }
    ledger("finished.ledger", &report.ledger)
}

fn ledger(name: &str, ledger: &LedgerReport) -> Checked {
    // When all epochs are complete, this is one more than the number of the last epoch.
    within(name, ledger.epochs_complete.into(), 0, EPOCHS_MAX.into())?;
    ranges(name, &ledger.ranges)
}

fn phases(phases: &Phases) -> Checked {
    let Phases { detect_us, abort_us, agree_us, connect_us, state_us, first_step_us } = *phases;
    within("phases.detect_us", detect_us, 0, PHASE_US_MAX)?;
    within("phases.abort_us", abort_us, 0, PHASE_US_MAX)?;
    within("phases.agree_us", agree_us, 0, PHASE_US_MAX)?;
    within("phases.connect_us", connect_us, 0, PHASE_US_MAX)?;
    within("phases.state_us", state_us, 0, PHASE_US_MAX)?;
    within("phases.first_step_us", first_step_us, 0, PHASE_US_MAX)
}

pub(super) fn master_message(message: &mut MasterMessage) -> Checked {
    match message {
        MasterMessage::Fetch(donors) => members("fetch.donors", donors),
        MasterMessage::Joiners(workers) => {
            within("joiners", workers.len() as u64, 0, WORKERS_MAX.into())
        }
        MasterMessage::Lease(leased) => ranges("lease.ranges", leased),
        MasterMessage::Membership(published) => membership("membership", published),
        MasterMessage::Describe
        | MasterMessage::Drain
        | MasterMessage::GiveUp
        | MasterMessage::KeepCheckpoint
        | MasterMessage::Prepare(_)
        | MasterMessage::ReportStacks
        | MasterMessage::Shutdown(_)
        | MasterMessage::Suspend => Ok(()),
    }
}

/// Checks the options of a welcome.
pub(super) fn options(options: &mut WorkerOptions) -> Checked {
    let (Batch::Global(records) | Batch::PerWorker(records)) = options.batch;
    within("options.batch", records.get(), 1, BATCH_RECORDS_MAX)?;
    within("options.epochs", options.epochs.into(), 0, EPOCHS_MAX.into())?;
    within("options.channels", options.channels.into(), 1, CHANNELS_MAX.into())?;
    let replicas = options.table_replicas.into();
    within("options.table_replicas", replicas, 1, TABLE_REPLICAS_MAX.into())?;
    let micro_batch = options.micro_batch.map_or(0, NonZeroU64::get);
    within("options.micro_batch", micro_batch, 0, BATCH_RECORDS_MAX)?;
    if options.deterministic {
        let WorkerOptions { batch, micro_batch, wire_dtype, .. } = *options;
        let deterministic = Deterministic { batch, micro_batch, wire_dtype };
        deterministic.check().map_err(|error| format!("options.deterministic: {error}"))?;
    }
    options.heartbeat = options.heartbeat.map(|time| time.max(Duration::from_millis(1)));
    if let Some(ValidationSpec { every, split, .. }) = &mut options.validation {
        *every = every.map(|steps| steps.max(1));
        within("validation.split", split.map_or(0, |split| split.get().into()), 0, 999)?;
    }
    Ok(())
}

fn membership(name: &str, membership: &Membership) -> Checked {
    let Membership { generation, members: sent, .. } = membership;
    within(&format!("{name}.generation"), generation.0, 1, STEPS_MAX)?;
    within(&format!("{name}.members"), sent.len() as u64, 1, WORKERS_MAX.into())?;
    let distinct: BTreeSet<WorkerId> = sent.iter().map(|(id, _)| *id).collect();
    if distinct.len() < sent.len() {
        return Err(format!("{name}.members: must name each worker once"));
    }
    members(&format!("{name}.members"), sent)
}

fn members(name: &str, members: &[(WorkerId, SocketAddr)]) -> Checked {
    members.iter().try_for_each(|(_, address)| peer_address(name, *address))
}

fn peer_address(name: &str, address: SocketAddr) -> Checked {
    if address.port() == 0 || address.ip().is_unspecified() {
        return Err(format!("{name}: must be one that peers can dial, not a wildcard"));
    }
    Ok(())
}

fn ranges(name: &str, ranges: &[RecordRange]) -> Checked {
    ranges.iter().try_for_each(|records| range(name, records))
}

fn range(name: &str, range: &RecordRange) -> Checked {
    let RecordRange { epoch, start, end } = *range;
    if start >= end {
        return Err(format!("{name}: {start}..{end} holds no record"));
    }
    within(name, end, 1, DATASET_RECORDS_MAX)?;
    within(name, epoch.into(), 0, u64::from(EPOCHS_MAX) - 1)
}

fn generation(name: &str, generation: Generation) -> Checked {
    within(name, generation.0, 1, u64::MAX - 1)
}

fn within(name: &str, value: u64, min: u64, max: u64) -> Checked {
    if !(min..=max).contains(&value) {
        return Err(format!("{name}: {value} is not between {min} and {max}"));
    }
    Ok(())
}

fn shorten(text: &mut String, bytes_max: usize) {
    *text = clip(mem::take(text), bytes_max);
}

fn shorten_any(text: &mut Option<String>, bytes_max: usize) {
    *text = text.take().map(|text| clip(text, bytes_max));
}
