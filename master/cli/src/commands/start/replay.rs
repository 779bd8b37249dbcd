//! `elasticdl train --replay-step`: makes a step of a job once more, and compares its loss.
//!
//! The step is that of a job with these options: one worker on this machine trains from the newest
//! checkpoint before the step to the step, in a directory that is removed.
//!
//! **Invariant:** nothing that the job has written is changed, and nothing is exported.

mod checkpoints;
mod origin;

use std::fmt::Display;
use std::path::Path;

use elasticdl_master::changes::changes_since;
use elasticdl_master::event_loop::JobResult;
use elasticdl_master::job::{Batch, JobSpec, Outcome, Work};
use elasticdl_master::jobdir::{self, JobDir};
use elasticdl_master::lineage::{JobFacts, StepRecords};
use elasticdl_master::local_master::LocalEnd;
use elasticdl_proto::{LogFormat, RecordRange, Summary};
use serde::Serialize;

use self::origin::Origin;
use super::local_job::LocalJob;
use super::local_master::{lead, master_of};
use super::request::{StartRequest, WorkOptions};
use crate::args::DashboardPort;
use crate::process::{EXIT_FAILED, EXIT_OK, Failure, print, print_warning};
use crate::scratch::Scratch;

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
    /// What has changed since the job began: sentences.
    changes: Vec<String>,
}

/// Makes step `step` of the job that the request is about once more. `is_given` tells whether the
/// user gives the option of an id. Returns the exit code.
pub(crate) fn replay(
    mut request: StartRequest,
    step: u64,
    is_given: &dyn Fn(&str) -> bool,
) -> Result<u8, Failure> {
    let origin = Origin::find(&request.job)?;
    if let Some(origin) = &origin {
        origin.check_step(step)?;
        if let WorkOptions::Training(training, _) = &mut request.work {
            origin.complete_data(training);
        }
    }
    let scratch = Scratch::create(&std::env::temp_dir(), SCRATCH)?;
    let console = request.output.console();
    strip(&mut request, &scratch.path);
    let mut job = LocalJob::new(request)?;
    if let Some(origin) = &origin {
        origin.complete(&mut job.spec, is_given)?;
    }
    let changes = origin.as_ref().map_or(Vec::new(), |Origin { facts, root }| {
        changes_since(root, &facts.files, &job.program, &job.args)
    });
    changes.iter().for_each(|change| print_warning(&format!("--replay-step: {change}")));
    let is_deterministic = job.spec.options.deterministic;
    let links = scratch.path.join("checkpoints");
    narrow(&mut job.spec, step, origin.as_ref(), is_given, &links)?;
    let dir = JobDir::create(&job.job_dir).map_err(|e| Failure::failed(e.to_string()))?;
    let LocalEnd { result: ended, stop, .. } = lead(master_of(job, None)?.apart(), &dir, console)?;
    if let (Outcome::Stopped, Some(stop)) = (ended.outcome, stop) {
        let text = format!("step {step} was not made: a signal has ended it");
        return Err(Failure { code: stop.exit_code(), text });
    }
    let facts = facts_of(&dir, &ended.summary, step);
    if let (Some(origin), Ok(facts)) = (&origin, &facts)
        && let Some(difference) = origin.facts.difference_from(facts)
    {
        return Err(Failure::usage(format!("--replay-step: {difference}")));
    }
    let loss = loss_of(&ended, step)?;
    let (found, records) = records_of(&facts?, step)?;
    let loss_recorded = origin.as_ref().and_then(|origin| origin.loss_of(step));
    let restored = ended.summary.checkpoints.and_then(|known| known.restored.into_iter().next());
    let replay = Replay {
        step,
        epoch: found.epoch,
        positions: (found.start, found.end),
        records,
        checkpoint: restored.map(|restored| restored.name),
        loss,
        loss_recorded,
        is_equal: loss_recorded.map(|known| known.to_bits() == loss.to_bits()),
        changes,
    };
    let has_ended = origin.is_none_or(|origin| origin.facts.progress.has_ended);
    print(&match console.format {
        LogFormat::Json => serde_json::to_string(&replay).expect("its keys are strings") + "\n",
        LogFormat::Text => to_text(&replay, is_deterministic, has_ended),
    })?;
    Ok(if is_deterministic && replay.is_equal == Some(false) { EXIT_FAILED } else { EXIT_OK })
}

/// Takes what a job writes from its options, and all workers but one.
fn strip(request: &mut StartRequest, scratch: &Path) {
    let StartRequest { job, work, workers, output, .. } = request;
    (job.local, job.hosts) = (true, None);
    (job.job_dir, job.job_name) = (Some(scratch.join("job")), Some("replay".into()));
    (output.summary, output.tensorboard_dir, output.metrics_port) = (None, None, None);
    output.dashboard_port = Some(DashboardPort::Closed);
    (workers.num_workers, workers.max_workers) = (Some(1), Some(1));
    if let WorkOptions::Training(training, tuning) = work {
        (training.min_workers, training.export) = (None, None);
        (training.resilience.spares, tuning.table_servers) = (0, 0);
        training.autoscale = false;
    }
}

/// Makes `spec` that of a job that ends with step `step`, and begins with the newest checkpoint
/// before it. `links`: a folder to make, with links to checkpoints.
fn narrow(
    spec: &mut JobSpec,
    step: u64,
    origin: Option<&Origin>,
    is_given: &dyn Fn(&str) -> bool,
    links: &Path,
) -> Result<(), Failure> {
    if let Batch::PerWorker(_) = spec.options.batch {
        return Err(Failure::usage(
            "--replay-step: with --minibatch-size the records of a step depend on the number of \
             workers, which one process does not have; only jobs with --global-batch-size can be \
             replayed",
        ));
    }
    let (own, begun) =
        (spec.options.checkpoints.take().map(|spec| spec.dir), spec.options.resume_from.take());
    let job = origin.map(|origin| &origin.facts.spec);
    let own = match job.filter(|_| !is_given("checkpoint_dir")) {
        Some(job) => job.options.checkpoints.as_ref().map(|spec| spec.dir.clone()),
        None => own,
    };
    let begun = match job.filter(|_| !is_given("resume_from")) {
        Some(job) => job.options.resume_from.clone(),
        None => begun,
    };
    let places: Vec<String> = own.into_iter().chain(begun.clone()).collect();
    spec.options.resume_from = checkpoints::before(step, &places, origin, links)?;
    if let (None, Some(begun)) = (&spec.options.resume_from, begun) {
        return Err(Failure::usage(format!(
            "--replay-step {step}: there is no checkpoint of the job of fewer steps in {begun}, \
             with which it begins"
        )));
    }
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
    Ok(())
}

/// The loss of the job's last step, which must be `step`.
fn loss_of(ended: &JobResult, step: u64) -> Result<f64, Failure> {
    let JobResult { outcome, summary, .. } = ended;
    match (summary.steps, summary.loss.last, &summary.error) {
        (_, _, Some(error)) => {
            let text = format!("step {step} was not made: {error}");
            Err(match outcome {
                Outcome::InvalidInput => Failure::usage(text),
                _ => Failure::failed(text),
            })
        }
        (steps, Some(loss), None) if steps == step => Ok(loss),
        (steps, ..) => Err(Failure::failed(format!(
            "step {step} was not made: the job ends with step {steps}"
        ))),
    }
}

/// What is known of the job in `dir`, which has ended.
fn facts_of(dir: &JobDir, ended: &Summary, step: u64) -> Result<JobFacts, Failure> {
    let record = jobdir::read_record(dir.path()).map_err(|e| Failure::failed(e.to_string()))?;
    JobFacts::of_record(&record, ended.clone().into())
        .ok_or_else(|| Failure::failed(format!("step {step} was not made: the job has no data")))
}

/// The records of step `step` of the job.
fn records_of(facts: &JobFacts, step: u64) -> Result<(StepRecords, Vec<u64>), Failure> {
    let unknown = |why: &dyn Display| Failure::failed(format!("the records of step {step}: {why}"));
    let steps = facts.steps().map_err(|error| unknown(&error))?;
    let found = steps.records_of(step).ok_or_else(|| unknown(&"it is no step"))?;
    let StepRecords { epoch, start, end, .. } = found;
    let order = facts.order().map_err(|error| unknown(&error))?;
    Ok((found, order.records(RecordRange { epoch, start, end })))
}

fn to_text(replay: &Replay, is_deterministic: bool, has_ended: bool) -> String {
    let Replay { step, epoch, positions: (start, end), records, loss, .. } = replay;
    let from = match &replay.checkpoint {
        Some(name) => format!("from {name}"),
        None => "from the beginning".into(),
    };
    let numbers: Vec<String> = records.iter().take(SHOWN).map(ToString::to_string).collect();
    let more = if records.len() > SHOWN { ", …" } else { "" };
    let verdict = match (replay.loss_recorded, replay.is_equal) {
        (None, _) if !has_ended => {
            "the job has recorded no loss of this step yet: it does so of its first and its last \
             one when it ends"
                .into()
        }
        (None, _) => {
            "the job has recorded no loss of this step alone: it does so of its first and its \
             last one"
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

/// Names of the folders begin with this.
const SCRATCH: &str = "elasticdl-replay-";
/// Number of records that the text names.
const SHOWN: usize = 16;
