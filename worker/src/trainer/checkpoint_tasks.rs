//! The session's checkpoint tasks: [`Trainer::poll_checkpoint_writer`] hands this rank's part of
//! the state to the writer's thread and reports what has been written; [`Trainer::create_state`]
//! fills the state of a group without one from the newest complete checkpoint.
//!
//! **Invariant:** while a group trains, its steps do not wait for the storage of a checkpoint.

use std::mem;
use std::time::Duration;

use elasticdl_proto::{CheckpointNews, Evaluated, WorkerMessage};
use elasticdl_tables::SavedShards;

use super::Trainer;
use super::job_checkpoints::{Checkpointing, TimedCheckpoint};
use super::row_tables::{LostRows, RowTables};
use super::sharded::ShardedOptimizer;
use super::stopped::Stopped;
use crate::checkpoint::{Completion, OwnShard, RestoreError, SavedPart};
use crate::digests::digest_of;
use crate::failure::{Failure, call_user};
use crate::model::Model;
use crate::session::checkpoint::Task;
use crate::session::evaluation::Evaluation;
use crate::tensor::Tensor;

impl<M: Model> Trainer<'_, M> {
    /// Executes the session's checkpoint tasks. To be called before the state changes again.
    pub(super) fn poll_checkpoint_writer(&mut self) -> Result<(), Failure> {
        let patience_of_last = self.patience_of_last_checkpoint();
        let Checkpointing { store, timed, .. } = &mut self.checkpoints;
        if !store.is_written() {
            return Ok(());
        }
        let tell = |news| self.outbox.send(WorkerMessage::Checkpoint(news));
        while let Some(done) = store.poll() {
            let is_told = self.session.has_hung_checkpoint();
            if is_told {
                tracing::info!(?done, "a checkpoint's write that has hung is over");
            }
            match done {
                Completion::Committed { step, name, result } => {
                    self.session.committed_checkpoint(step, result.is_ok());
                    match result {
                        Ok(bytes) => {
                            let times = timed.published(step, self.machine.now() - self.started);
                            tell(CheckpointNews::Saved { step, name, bytes, times });
                        }
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
        let now = self.machine.now() - self.started;
        if let Some(step) = self.session.poll_hung_checkpoint(now) {
            let then = match self.session.is_stopping() {
                true => "the job stops without a checkpoint unless the write ends soon",
                false => "no other one is begun before it has",
            };
            let why = store.repeated_error().unwrap_or_else(|| HANGS.into());
            tell(CheckpointNews::Failed { step, error: format!("{why}, and {then}") });
        }
        store.note_wait(self.session.waits_for_checkpoint(), self.session.is_stopping());
        let has_parameters = self.sharded.as_ref().is_none_or(ShardedOptimizer::is_gathered);
        while let Some(task) = self.session.poll_checkpoint() {
            match task {
                Task::Commit { step, parts } => {
                    timed.written(step, self.machine.now() - self.started);
                    store.commit(step, &parts);
                }
                // The links broke before the parameters of the step were here.
                Task::Write { step, .. } if !has_parameters => {
                    self.session.wrote_part(step, Err(()));
                }
                Task::Write { step, generation, rank, world_size, is_last } => {
                    let state = self.session.state().expect("a state was just committed");
                    assert_eq!(state.step, step, "a checkpoint is of the state as it is now");
                    let begun = self.machine.now();
                    let parameters = self.tensors.to_host(Tensor::Parameters)?;
                    let slots = self.tensors.to_host(Tensor::Slots)?;
                    let patience = if is_last { patience_of_last } else { Duration::ZERO };
                    let shard = OwnShard { step, generation, rank, world_size, patience };
                    let rows = self.tables.as_ref().map(|tables| {
                        let SavedShards { of_ranks, owned } = tables.save(step);
                        (of_ranks, SavedPart::Rows(owned, tables.compared()))
                    });
                    let chunks = self.sharded.as_ref().map(|sharded| {
                        let (of_ranks, owned) = sharded.chunks().save();
                        (of_ranks, SavedPart::Chunks(owned, sharded.chunks().compared()))
                    });
                    store.write(shard, state.record(), (&parameters, &slots), rows.or(chunks));
                    // A copy of one rank's memory proves nothing about the others'.
                    let digest = digest_of(&parameters, &slots, state);
                    let copied = self.machine.now();
                    let took = copied - begun;
                    *timed = TimedCheckpoint::copied(step, took, copied - self.started);
                    self.session.copied_for_checkpoint(took, digest);
                }
            }
        }
        Ok(())
    }

    /// Creates the state of a group without one: from the newest complete checkpoint, or the
    /// initial one.
    pub(super) fn create_state(&mut self) -> Result<(), Stopped> {
        let Self { model, tensors, checkpoints, outbox, session, exports, tables, .. } = self;
        let sharded = &mut self.sharded;
        let lost = tables.as_ref().and_then(RowTables::lost);
        let lost = lost.or_else(|| sharded.as_ref().and_then(ShardedOptimizer::lost));
        if let Some(LostRows { step, shards, row_touches }) = lost {
            let news = CheckpointNews::RowsLost { step, shards, row_touches };
            outbox.send(WorkerMessage::Checkpoint(news));
        }
        let mut damaged = |name: &str, reason: &str| {
            tracing::warn!(name, reason, "a checkpoint does not match its digests");
            let (name, reason) = (name.to_owned(), reason.to_owned());
            outbox.send(WorkerMessage::Checkpoint(CheckpointNews::Damaged { name, reason }));
        };
        let Checkpointing { store, best_metric, allows_mixed_builds, .. } = checkpoints;
        let seed = self.seed;
        let is_used = mem::replace(&mut self.is_used, true);
        // The initial values of a program are in this memory, and nowhere else.
        let is_program = model.as_bridge().is_some();
        let restored = tensors.fill_state(|parameters, slots| {
            let initial = (is_program && !is_used).then(|| parameters.to_vec());
            let restored = store.restore(parameters, slots, &mut damaged);
            let restored = restored.map_err(|error| match error {
                RestoreError::Refused(error) => Failure::fatal(error),
                RestoreError::Storage(error) => Failure::local(error),
            })?;
            if restored.is_none() {
                if is_program && is_used {
                    return Err(Failure::without_state(INITIAL_IS_GONE.into()));
                }
                // A damaged checkpoint may have been read in part.
                initial.iter().for_each(|initial| parameters.copy_from_slice(initial));
                slots.fill(0.0);
                call_user("initialize()", || model.initialize(seed, parameters))
                    .map_err(Failure::fatal)?;
            }
            Ok::<_, Failure>(restored)
        })?;
        if let Some(mut restored) = restored {
            let (step, row_touches) = (restored.state.step, restored.state.row_touches);
            if !restored.same_run {
                let known = &mut restored.state.evaluation;
                let is_held = known.best.is_some_and(|best| exports.holds_best(best));
                if exports.has_best() && !is_held {
                    // The file that the user asks for is that of the best state from here on.
                    *known = Evaluation::default();
                }
                if let (Some(metric), Some((step, value))) = (&*best_metric, known.best) {
                    // This job continues as if it had evaluated that state.
                    let (records, name) = (metric.records, metric.name.clone());
                    let metrics = [(name, Some(value))].into();
                    let report = Evaluated { step, records, metrics };
                    outbox.send(WorkerMessage::Evaluated(report, Duration::ZERO));
                    if is_held {
                        let (kept, error) = (None, None);
                        outbox.send(WorkerMessage::BestExport { step, kept, error });
                    }
                }
            }
            if !session.restore(restored.state, restored.same_run) {
                let error = format!("{} holds an inconsistent ledger", restored.name);
                return Err(Failure::fatal(error).into());
            }
            let generation = tensors.group_mut()?.generation();
            let of_tables = tables.iter_mut().map(|tables| &mut tables.peers);
            for peers in of_tables.chain(sharded.iter_mut().map(|sharded| &mut sharded.peers)) {
                peers.restored(generation, restored.name.clone(), restored.same_run);
            }
            let mut differences = restored.differences;
            if *allows_mixed_builds {
                differences.clear();
            }
            let (name, differences) = (restored.name, differences.join(" and its "));
            tracing::info!(step, name, differences, "the group starts from a checkpoint");
            let news = CheckpointNews::Restored { step, name, row_touches, differences };
            outbox.send(WorkerMessage::Checkpoint(news));
            return Ok(());
        }
        let absorbed = model.as_bridge().map_or(0, |bridge| bridge.absorbed());
        session.begin_after(absorbed);
        Ok(())
    }
}

/// The error of a write that hangs.
const HANGS: &str = "the storage of checkpoints hangs: a write has not ended";

/// A program's initial values are on no worker that had another state since.
const INITIAL_IS_GONE: &str = "the state of the group is lost, no checkpoint can be read, and this \
    program no longer has the values that it began with; all workers begin anew, from step 0 \
    (`--checkpoint-every` says how much is lost at most)";
