//! `elasticdl train --replay-step`: makes a step of a job once more, and compares its loss.
//!
//! The step is that of a job with these options: one worker on this machine trains from the newest
//! checkpoint before the step to the step, in a directory that is removed.
//!
//! **Invariant:** nothing that the job has written is changed, and nothing is exported.

use std::fmt::Display;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use elasticdl_master::job::{Batch, JobSpec, Work};
use elasticdl_master::jobdir::{self, JobDir, complete_checkpoints};
use elasticdl_master::lineage::{CompleteCheckpoint, JobFacts, StepRecords};
use elasticdl_proto::{RecordRange, Summary};
use serde::Serialize;

use super::local_job::LocalJob;
use super::local_master::{lead, master_of};
use super::outputs::local;
use super::request::{StartRequest, WorkOptions};
use crate::args::DashboardPort;
use crate::process::{EXIT_FAILED, EXIT_OK, Failure, cannot, print};
use crate::progress::LogFormat;

/// A step that was made once more. The names of the fields are a public format.
#[derive(Debug, PartialEq, Serialize)]
struct Replay {
    step: u64,
    epoch: u32,
    /// First position of the step's records in the epoch's order, and one past the last.
    positions: (u64, u64),
    /// The records at these positions, in this order.
    records: Vec<u64>,
    /// Name of the checkpoint that was loaded; `None`: training began anew.
    checkpoint: Option<String>,
    /// Mean loss per record.
    loss: f64,
    /// As the job has recorded it; `None` if it has not.
    loss_recorded: Option<f64>,
    /// Whether both are the same, bit for bit.
    is_equal: Option<bool>,
}

/// Makes step `step` of the job that the request is about once more. Returns the exit code.
pub(crate) fn replay(mut request: StartRequest, step: u64) -> Result<u8, Failure> {
    let scratch = Scratch::create()?;
    let origin = origin_of(&request);
    let console = request.output.console();
    strip(&mut request, &scratch.0);
    let mut job = LocalJob::new(request)?;
    let is_deterministic = job.spec.options.deterministic;
    let from = narrow(&mut job.spec, step, origin.as_deref())?;
    let dir = JobDir::create(&job.job_dir).map_err(|e| Failure::failed(e.to_string()))?;
    let ended = lead(master_of(job, None)?.apart(), &dir, console)?.result.summary;
    let loss = loss_of(&ended, step)?;
    let (found, records) = records_of(&dir, ended, step)?;
    let loss_recorded = origin.as_deref().and_then(|origin| recorded_loss(origin, step));
    let replay = Replay {
        step,
        epoch: found.epoch,
        positions: (found.start, found.end),
        records,
        checkpoint: from,
        loss,
        loss_recorded,
        is_equal: loss_recorded.map(|known| known.to_bits() == loss.to_bits()),
    };
    print(&match console.format {
        LogFormat::Json => serde_json::to_string(&replay).expect("its keys are strings") + "\n",
        LogFormat::Text => to_text(&replay, is_deterministic),
    })?;
    Ok(if is_deterministic && replay.is_equal == Some(false) { EXIT_FAILED } else { EXIT_OK })
}

/// The directory of the job whose step it is, as far as the options name it.
fn origin_of(request: &StartRequest) -> Option<PathBuf> {
    let named = request.job.job_name.as_ref().map(|name| jobdir::directory_of(Path::new(name)));
    let origin = request.job.job_dir.clone().or(named)?;
    Some(std::path::absolute(&origin).unwrap_or(origin))
}

/// Takes what a job writes from its options, and all workers but one.
fn strip(request: &mut StartRequest, scratch: &Path) {
    let StartRequest { job, work, workers, output, .. } = request;
    job.local = true;
    (job.job_dir, job.job_name) = (Some(scratch.join("job")), Some("replay".into()));
    (output.summary, output.tensorboard_dir, output.metrics_port) = (None, None, None);
    output.dashboard_port = Some(DashboardPort::Closed);
    (workers.num_workers, workers.max_workers) = (Some(1), Some(1));
    if let WorkOptions::Training(training, tuning) = work {
        (training.min_workers, training.export) = (None, None);
        tuning.table_servers = 0;
    }
}

/// Makes `spec` that of a job that ends with step `step`, and begins with the newest checkpoint
/// before it. Returns the checkpoint's name.
fn narrow(spec: &mut JobSpec, step: u64, origin: Option<&Path>) -> Result<Option<String>, Failure> {
    if let Batch::PerWorker(_) = spec.options.batch {
        return Err(Failure::usage(
            "--replay-step: with --minibatch-size the records of a step depend on the number of \
             workers, which one process does not have; only jobs with --global-batch-size can be \
             replayed",
        ));
    }
    let own = spec.options.checkpoints.take().map(|spec| spec.dir);
    let own = own.or_else(|| Some(origin?.join(jobdir::CHECKPOINTS).to_str()?.to_owned()));
    let begun = spec.options.resume_from.take();
    let places: Vec<String> = own.into_iter().chain(begun.clone()).collect();
    let from = newest_before(&places, step)?;
    if let (None, Some(begun)) = (&from, begun) {
        return Err(Failure::usage(format!(
            "--replay-step {step}: there is no checkpoint of fewer steps in {begun}, with which \
             the job begins"
        )));
    }
    spec.options.resume_from = from.as_ref().map(|(address, _)| address.clone());
    spec.options.max_steps = Some(step);
    spec.options.work = Work::Train { export: None };
    spec.policies.deadline = None;
    spec.policies.starts_suspended = false;
    // A split decides which records are trained. Nothing else of an evaluation matters.
    spec.options.validation =
        spec.options.validation.take().filter(|validation| validation.split.is_some());
    if let Some(validation) = &mut spec.options.validation {
        (validation.every, validation.patience, validation.export_best) = (None, None, None);
    }
    Ok(from.map(|(_, name)| name))
}

/// The address and the name of the newest checkpoint of fewer than `step` steps in these places:
/// each is a folder of checkpoints, or a checkpoint.
fn newest_before(places: &[String], step: u64) -> Result<Option<(String, String)>, Failure> {
    let mut found = Vec::new();
    for place in places {
        let place = place.trim_end_matches('/');
        let name = place.rsplit('/').next().unwrap_or_default();
        if let Some(known) = CompleteCheckpoint::parse(name) {
            found.push((known, place.to_owned()));
        } else if let Some(folder) = local(place) {
            let there = complete_checkpoints(&folder);
            let address = |name: &str| folder.join(name).display().to_string();
            found.extend(there.into_iter().map(|known| (known.clone(), address(&known.name))));
        } else {
            return Err(Failure::usage(format!(
                "--replay-step: an object store is not searched for checkpoints; name one of fewer \
                 than {step} steps, as --resume-from {place}/step-…, and --checkpoint-dir none"
            )));
        }
    }
    let before = found.into_iter().filter(|(known, _)| known.step < step);
    let newest = before.max_by_key(|(known, _)| known.step);
    Ok(newest.map(|(known, address)| (address, known.name)))
}

/// The loss of the job's last step, which must be `step`.
fn loss_of(ended: &Summary, step: u64) -> Result<f64, Failure> {
    match (ended.steps, ended.loss.last, &ended.error) {
        (_, _, Some(error)) => Err(Failure::failed(format!("step {step} was not made: {error}"))),
        (steps, Some(loss), None) if steps == step => Ok(loss),
        (steps, ..) => Err(Failure::failed(format!(
            "step {step} was not made: the job ends with step {steps}"
        ))),
    }
}

/// The records of step `step`, by the record of the job in `dir`.
fn records_of(dir: &JobDir, ended: Summary, step: u64) -> Result<(StepRecords, Vec<u64>), Failure> {
    let record = jobdir::read_record(dir.path()).map_err(|e| Failure::failed(e.to_string()))?;
    let unknown = |why: &dyn Display| Failure::failed(format!("the records of step {step}: {why}"));
    let facts = JobFacts::of_record(&record, ended.into())
        .ok_or_else(|| unknown(&"the job has no data"))?;
    let steps = facts.steps().map_err(|error| unknown(&error))?;
    let found = steps.records_of(step).ok_or_else(|| unknown(&"it is no step"))?;
    let StepRecords { epoch, start, end, .. } = found;
    let order = facts.order().map_err(|error| unknown(&error))?;
    Ok((found, order.records(RecordRange { epoch, start, end })))
}

/// The loss of step `step` that the summary of the job in `origin` has.
fn recorded_loss(origin: &Path, step: u64) -> Option<f64> {
    let summary = fs::read(origin.join("summary.json")).ok()?;
    let summary: Summary = serde_json::from_slice(&summary).ok()?;
    let (steps, loss) = (summary.steps, summary.loss);
    let record = jobdir::read_record(origin).ok()?;
    let begun = JobFacts::of_record(&record, summary.into())?.begun?;
    match step {
        _ if step == steps => loss.last,
        _ if step == begun.step + 1 => loss.first,
        _ => None,
    }
}

fn to_text(replay: &Replay, is_deterministic: bool) -> String {
    let Replay { step, epoch, positions: (start, end), records, loss, .. } = replay;
    let from = match &replay.checkpoint {
        Some(name) => format!("from {name}"),
        None => "from the beginning".into(),
    };
    let numbers: Vec<String> = records.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = if records.len() > SHOWN { ", …" } else { "" };
    let verdict = match (replay.loss_recorded, replay.is_equal) {
        (None, _) => {
            "the job has recorded no loss of this step alone: it does so of its first and \
                      its last one"
                .into()
        }
        (Some(known), Some(true)) => format!("as the job has recorded it, bit for bit: {known}"),
        (Some(known), _) => format!(
            "the job has recorded {known}{}",
            match is_deterministic {
                true => ": it differs, although the job is deterministic",
                false => ": without --deterministic the last digits depend on the workers",
            }
        ),
    };
    format!(
        "step {step}, {from}: {} records, positions {start} to {} of epoch {epoch}: {}{more}\n\
         loss {loss}\n{verdict}\n",
        records.len(),
        end - 1,
        numbers.join(", ")
    )
}

/// A folder that is removed in the end.
struct Scratch(PathBuf);

impl Scratch {
    fn create() -> Result<Self, Failure> {
        let mut random = [0; 6];
        getrandom::fill(&mut random)
            .map_err(|e| Failure::failed(format!("the system gives no random bytes: {e}")))?;
        let digits: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let folder = std::env::temp_dir().join(format!("elasticdl-replay-{digits}"));
        let made = DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(cannot(&format!("create {}", folder.display())))?;
        Ok(Self(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Number of records that the text names.
const SHOWN: usize = 16;
