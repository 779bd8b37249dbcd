//! Checkpoints of the trainer: it hands its part of the state to the writer, and restores the state
//! from a checkpoint.

use std::sync::Arc;

use bytes::Bytes;
use elasticdl_collective::Secret;
use elasticdl_proto::{CheckpointNews, WorkerMessage, WorkerOptions};

use super::{Stopped, Trainer};
use crate::checkpoint::{
    CheckpointWriter, Completion, JobFingerprint, Locations, RestoreError, check, restore,
};
use crate::core::checkpoint::Task;
use crate::failure::{Failure, call_user};
use crate::model::Model;
use crate::reader::Dataset;
use crate::storage::Storage;
use crate::tensors::Tensor;

/// Locations of checkpoints, and their writer.
#[derive(Debug)]
pub(crate) struct Checkpointing {
    locations: Locations,
    fingerprint: Arc<JobFingerprint>,
    /// `None` if the job writes none.
    writer: Option<CheckpointWriter>,
}

impl Checkpointing {
    /// Checks that a new job could start from the configured checkpoint.
    ///
    /// # Errors
    /// The fault and the remedy.
    pub(crate) fn check<M: Model>(
        options: &WorkerOptions,
        (job, secret): (&str, &Secret),
        dataset: &Dataset,
        model: &M,
    ) -> Result<(), String> {
        if options.checkpoints.is_none() && options.resume_from.is_none() {
            return Ok(());
        }
        let parameters = call_user("parameter_count()", || Ok(model.parameter_count()))?;
        let size = (parameters, parameters * call_user("slots()", || Ok(model.slots()))?);
        let (locations, fingerprint) =
            look(options, (job, secret), dataset.clone(), size).map_err(|f| f.error)?;
        check(&locations, &fingerprint).map_err(|error| match error {
            RestoreError::Refused(error) | RestoreError::Storage(error) => error,
        })?;
        // Finds a location without write access before there is work to lose.
        let Some(own) = &locations.own else { return Ok(()) };
        own.write(PROBE, vec![Bytes::from_static(b"a test of write access")])
            .map_err(|error| format!("--checkpoint-dir can't be written to: {error}"))?;
        if let Err(error) = own.remove(PROBE) {
            tracing::warn!(%error, "checkpoints can be written, but not removed");
        }
        Ok(())
    }

    /// Opens the locations that the job's `options` name, for the worker of the job with this name
    /// and secret. `parameters` and `slots`: lengths of the model's parameters and optimizer state,
    /// in floats.
    pub(crate) fn new(
        options: &WorkerOptions,
        (job, secret): (&str, &Secret),
        dataset: Dataset,
        (parameters, slots): (usize, usize),
    ) -> Result<Self, Failure> {
        let (locations, fingerprint) = look(options, (job, secret), dataset, (parameters, slots))?;
        let fingerprint = Arc::new(fingerprint);
        let writer = match (&locations.own, &options.checkpoints) {
            (Some(own), Some(kept)) => {
                let writer = CheckpointWriter::new(
                    own.clone(),
                    Arc::clone(&fingerprint),
                    (kept.keep as usize, kept.exclusive),
                );
                Some(writer.map_err(|error| {
                    Failure::fatal(format!("no thread for checkpoints: {error}"))
                })?)
            }
            _ => None,
        };
        Ok(Self { locations, fingerprint, writer })
    }

    /// A group of `world_size` has formed.
    pub(super) fn prepare(&mut self, world_size: usize) {
        if let Some(writer) = &mut self.writer {
            writer.prepare(world_size);
        }
    }
}

/// Opens the possible locations of checkpoints, and builds the fingerprint that they must match.
fn look(
    options: &WorkerOptions,
    (job, secret): (&str, &Secret),
    dataset: Dataset,
    (parameters, slots): (usize, usize),
) -> Result<(Locations, JobFingerprint), Failure> {
    let open = |option: &str, address: &str| {
        Storage::open(address).map_err(|error| Failure::fatal(format!("{option} {error}")))
    };
    let own =
        options.checkpoints.as_ref().map(|kept| open("--checkpoint-dir", &kept.dir)).transpose()?;
    let from = options.resume_from.as_ref().map(|from| open("--resume-from", from)).transpose()?;
    let fingerprint = JobFingerprint {
        job: job.to_owned(),
        run: format!("{:08x}", secret.fingerprint("checkpoints")),
        parameters,
        slots,
        dataset,
        training_data: options.training_data.clone(),
        epochs: options.epochs,
        max_steps: options.max_steps,
        batch: options.batch,
        seed: options.seed,
    };
    let exclusive = options.checkpoints.as_ref().is_some_and(|kept| kept.exclusive);
    Ok((Locations { own, from, exclusive }, fingerprint))
}

impl<M: Model> Trainer<'_, M> {
    /// Executes the session's checkpoint tasks. To be called before the state changes again.
    pub(super) fn poll_checkpoint_writer(&mut self) -> Result<(), Failure> {
        let Some(writer) = &mut self.checkpoints.writer else { return Ok(()) };
        let tell = |news| self.outbox.send(WorkerMessage::Checkpoint(news));
        while let Some(done) = writer.poll() {
            match done {
                Completion::Committed { step, name, result } => {
                    self.session.committed_checkpoint(step, result.is_ok());
                    match result {
                        Ok(bytes) => tell(CheckpointNews::Saved { step, name, bytes }),
                        Err(error) => tell(CheckpointNews::Failed { step, error }),
                    }
                }
                Completion::Written { step, result } => {
                    if let Err(error) = &result {
                        tell(CheckpointNews::Failed { step, error: error.clone() });
                    }
                    self.session.wrote_part(step, result.map_err(drop));
                }
            }
        }
        while let Some(task) = self.session.poll_checkpoint() {
            match task {
                Task::Commit { step, parts } => writer.commit(step, &parts),
                Task::Write { step, generation, rank, world_size } => {
                    let state = self.session.state().expect("a state was just committed");
                    assert_eq!(state.step, step, "a checkpoint is of the state as it is now");
                    let parameters = self.tensors.to_host(Tensor::Parameters)?;
                    let slots = self.tensors.to_host(Tensor::Slots)?;
                    let shard = (rank, world_size);
                    writer.write((step, generation), shard, state.record(), (&parameters, &slots));
                }
            }
        }
        Ok(())
    }

    /// Creates the state of a group without one: from the newest complete checkpoint, or the
    /// initial one.
    pub(super) fn begin(&mut self) -> Result<(), Stopped> {
        let Self { model, tensors, checkpoints, outbox, session, .. } = self;
        let mut damaged = |name: &str, reason: &str| {
            tracing::warn!(name, reason, "a checkpoint does not match its digests");
            let (name, reason) = (name.to_owned(), reason.to_owned());
            outbox.send(WorkerMessage::Checkpoint(CheckpointNews::Damaged { name, reason }));
        };
        let Checkpointing { locations, fingerprint, .. } = checkpoints;
        let seed = self.seed;
        let restored = tensors.fill_state(|parameters, slots| {
            let restored =
                restore(locations, fingerprint, (&mut *parameters, &mut *slots), &mut damaged)
                    .map_err(|error| match error {
                        RestoreError::Refused(error) => Failure::fatal(error),
                        RestoreError::Storage(error) => {
                            Failure { error, ranges: Vec::new(), fatal: false }
                        }
                    })?;
            if restored.is_none() {
                slots.fill(0.0);
                call_user("initialize()", || model.initialize(seed, parameters))
                    .map_err(Failure::fatal)?;
            }
            Ok::<_, Failure>(restored)
        })?;
        if let Some(restored) = restored {
            let step = restored.state.step;
            if !session.restore(restored.state, restored.same_run) {
                let error = format!("{} holds an inconsistent ledger", restored.name);
                return Err(Stopped::Failed(Failure::fatal(error)));
            }
            tracing::info!(step, name = restored.name, "the group starts from a checkpoint");
            outbox.send(WorkerMessage::Checkpoint(CheckpointNews::Restored {
                step,
                name: restored.name,
            }));
            return Ok(());
        }
        session.begin();
        Ok(())
    }
}

/// Name of the file that tests write access. It is not a valid name of a checkpoint.
const PROBE: &str = "probe";
