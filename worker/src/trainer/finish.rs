//! End of a job on the trainer: the finding of a gradient that is not finite, and the final state.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use elasticdl_proto::{MasterMessage, WorkerMessage};

use super::Trainer;
use super::row_export::RowExport;
use super::stopped::Stopped;
use crate::exports::{self, Patience, SavedBest};
use crate::external::{Progress, observe};
use crate::failure::{Failure, call_user};
use crate::machine::{Machine, receive};
use crate::messages::ControlEvent;
use crate::model::Model;
use crate::session::FinalState;
use crate::session::halt::Ending;
use crate::tensor::Tensor;

impl<M: Model> Trainer<'_, M> {
    /// The sum of a step's gradients is not finite, and such steps end the job.
    pub(super) fn inspect_gradient(&mut self) -> Result<(), Stopped> {
        // The only rank's gradient is the sum.
        let is_alone = self.tensors.group_mut()?.world_size() == 1;
        let is_finite = !is_alone && self.tensors.gradient_is_finite()?;
        let step = self.session.step() + 1;
        tracing::error!(step, is_finite, "the step's gradient is not finite; the job ends");
        let order = &self.order;
        self.session.inspected(is_finite, |positions| order.ranges(positions));
        Ok(())
    }

    /// Hands the final state of a group to the session, which reports it. If it `is_published`,
    /// this worker exports the model and describes it.
    pub(super) fn finish(&mut self, is_published: bool) -> Result<(), Stopped> {
        let Some(step) = self.session.state().map(|state| state.step) else { return Ok(()) };
        let rows = match &mut self.tables {
            Some(tables) => Some(tables.count(self.tensors.group_mut()?)?),
            None => None,
        };
        let chunks = match &mut self.sharded {
            Some(sharded) => Some(sharded.count(self.tensors.group_mut()?)?),
            None => None,
        };
        let parameters_are_finite =
            self.parameters_are_finite()? && rows.is_none_or(|rows| rows.are_finite);
        let arrived = RefCell::default();
        let exported = match self.tables.as_ref().and_then(|tables| tables.exported.clone()) {
            Some(exported) => {
                if is_published {
                    self.tell_best(self.saved_best());
                }
                exported
            }
            None => self.export_at_end((step, parameters_are_finite), is_published, &arrived)?,
        };
        if let Some(tables) = &mut self.tables {
            tables.exported = Some(exported.clone());
        }
        let model = &mut self.model;
        let mut summary = None;
        if is_published && self.session.ended() != Some(&Ending::ProgramFailed) {
            let parameters = self.tensors.to_host(Tensor::Parameters)?;
            summary = call_user("summary()", || model.summary(&parameters)).unwrap_or_else(Some);
        }
        let state = self.session.state().expect("it was there above");
        let digest = match chunks {
            Some(chunks) => self.tensors.digest_beside_chunks(state)?.wrapping_add(chunks),
            None => self.tensors.digest(state)?,
        };
        let last = FinalState {
            digest: rows.map_or(digest, |rows| digest.wrapping_add(rows.digest)),
            parameters_are_finite,
            summary,
            is_exported: exported == Some(Ok(())),
            export_error: exported.and_then(Result::err),
            row_touches: rows.map(|rows| rows.touches),
        };
        match self.session.ended() {
            Some(Ending::Done) => observe(&mut self.model, Progress::Finished { error: None }),
            Some(Ending::Failed(error)) => {
                observe(&mut self.model, Progress::Finished { error: Some(error) });
            }
            Some(Ending::ProgramFailed) => {
                let Some(of_program) = self.session.program_failure() else { return Ok(()) };
                let failure = Failure { exported: last.is_exported, ..of_program.into() };
                return Err(failure.into());
            }
            Some(Ending::Suspended) | None => {}
        }
        self.session.finish(last);
        arrived.into_inner().into_iter().for_each(|event| self.handle(event));
        Ok(())
    }

    /// Exports the model of the job's last step, and the best one if it is not written yet, if the
    /// state `is_published`. Returns what became of the model. Events of the master that arrive
    /// meanwhile are moved to `arrived`.
    fn export_at_end(
        &mut self,
        (step, is_finite): (u64, bool),
        is_published: bool,
        arrived: &RefCell<Vec<ControlEvent>>,
    ) -> Result<Option<Result<(), String>>, Stopped> {
        if self.session.ended() == Some(&Ending::Suspended) {
            return Ok(None);
        }
        if !is_published {
            if let Some(tables) = self.tables.as_mut().filter(|_| self.exports.is_any()) {
                tables.follow_export(self.tensors.group_mut()?)?;
            }
            return Ok(None);
        }
        let limit = match self.session.ended() {
            // The next group waits for this one's end, which has stored the state.
            Some(Ending::ProgramFailed) => PATIENCE_OF_STOP,
            _ => self.patience_of_end(),
        };
        let (inbox, machine) = (self.inbox, Arc::clone(&self.machine));
        let parameters = self.exported_parameters()?;
        let rows = match self.tables.as_mut().filter(|_| self.exports.is_any()) {
            Some(tables) => RowExport::new(Some((tables, self.tensors.group_mut()?))),
            None => RowExport::new(None),
        };
        let sleep =
            |pause| rows.has_stopped() || wait_unless_stopped(&*machine, inbox, pause, arrived);
        let patience = Patience { limit, sleep: &sleep };
        let saved = self.exports.save_best_at_end(&|address| rows.write(address, true), patience);
        // The model is exported before the report that ends the job: a rank that fails to report is
        // replaced, and the next lowest rank exports. Its last checkpoint is written already. A
        // group that has made no step has nothing to export.
        let mut exported = None;
        if is_finite && step > 0 && self.exports.has_last() {
            let ended = self.session.ended();
            let has_failed = matches!(ended, Some(Ending::Failed(_) | Ending::ProgramFailed));
            let write = |address: &str| rows.write(address, false);
            let model = exports::Model { parameters: &parameters, rows: &write };
            exported = Some(self.exports.save_last(step, has_failed, model, patience));
        }
        rows.end(false)?;
        self.tell_best(saved.or_else(|| self.saved_best()));
        Ok(exported)
    }

    /// How long what is written at the end of the job is tried.
    pub(super) fn patience_of_end(&self) -> Duration {
        match self.exports.has_fallback() {
            true if self.session.is_stopping() => PATIENCE_OF_STOP,
            false if self.session.is_stopping() => PATIENCE_OF_STOP_WITHOUT_FALLBACK,
            true => PATIENCE_OF_END,
            false => PATIENCE_WITHOUT_FALLBACK,
        }
    }

    /// How long the last checkpoint is tried, which no later one makes up for.
    pub(super) fn patience_of_last_checkpoint(&self) -> Duration {
        match self.session.is_stopping() {
            true => PATIENCE_OF_CHECKPOINT_AT_STOP,
            false => self.patience_of_end(),
        }
    }

    /// The lowest rank exports the model if it is the best so far and all ranks hold the same
    /// state, or an earlier one that could not be written. The next step needs that rank, so if it
    /// is lost meanwhile, the next group is still at this step and exports the model again.
    /// `is_new`: whether that may have changed since the last call.
    pub(super) fn export_best(&mut self, is_new: bool) -> Result<(), Stopped> {
        if !self.exports.has_best() {
            return Ok(());
        }
        let is_lowest = match &mut self.tables {
            Some(tables) => {
                // The session may have left the group, whose ranks are still together.
                let group = self.tensors.group_mut()?;
                if group.rank() > 0 {
                    tables.follow_export(group)?;
                }
                group.rank() == 0
            }
            None => self.session.group_rank().is_some_and(|(_, rank)| rank == 0),
        };
        if !is_lowest {
            return Ok(());
        }
        let best = self.session.best_now().filter(|_| is_new && self.session.is_verified());
        let parameters = best.map(|_| self.exported_parameters()).transpose()?;
        let rows = match &mut self.tables {
            Some(tables) => RowExport::new(Some((tables, self.tensors.group_mut()?))),
            None => RowExport::new(None),
        };
        if let Some((best, parameters)) = best.zip(parameters)
            && rows.keep_best().is_ok()
        {
            self.exports.take_best(best, parameters);
        }
        let write = |address: &str| rows.write(address, true);
        let saved = if is_new { self.exports.save_best(&write) } else { None };
        rows.end(self.exports.has_unsaved_best())?;
        self.tell_best(saved);
        Ok(())
    }

    /// What this job has made of the best model: what an earlier rank or an earlier master knew may
    /// be lost.
    fn saved_best(&self) -> Option<SavedBest> {
        self.exports.saved_best(self.session.best()?)
    }

    /// Tells the master what became of the best model.
    fn tell_best(&mut self, saved: Option<SavedBest>) {
        if let Some(SavedBest { step, kept }) = saved {
            let (kept, error) = kept.map_or_else(|error| (None, Some(error)), |kept| (kept, None));
            if let Some(error) = &error {
                tracing::warn!(step, error, "the best model is not exported");
            }
            // The evaluation comes first.
            self.send_reports();
            self.outbox.send(WorkerMessage::BestExport { step, kept, error });
        }
    }
}

/// Waits for `pause`, and moves events from `inbox` to `arrived`. Returns whether the job stops.
fn wait_unless_stopped(
    machine: &dyn Machine,
    inbox: &Receiver<ControlEvent>,
    pause: Duration,
    arrived: &RefCell<Vec<ControlEvent>>,
) -> bool {
    let until = machine.now() + pause;
    loop {
        match receive(machine, inbox, until.saturating_duration_since(machine.now())) {
            Ok(event) => {
                let stops = matches!(
                    event,
                    ControlEvent::Message(MasterMessage::Drain | MasterMessage::Shutdown { .. }, _)
                );
                arrived.borrow_mut().push(event);
                if stops {
                    return true;
                }
            }
            Err(error) => return error == RecvTimeoutError::Disconnected,
        }
    }
}

/// How long an export or a checkpoint at the end of a job is repeated: enough to free a full disk
/// by hand.
const PATIENCE_OF_END: Duration = Duration::from_secs(60);
/// As [`PATIENCE_OF_END`], in a pod, which has no other place for the model: as long as a read of
/// data is retried.
const PATIENCE_WITHOUT_FALLBACK: Duration = Duration::from_secs(600);
/// As [`PATIENCE_OF_END`], for a job that is stopped: the model is on this machine.
const PATIENCE_OF_STOP: Duration = Duration::from_secs(3);
/// The master waits for a minute, and the state is in no other place.
const PATIENCE_OF_CHECKPOINT_AT_STOP: Duration = Duration::from_secs(50);
/// As [`PATIENCE_OF_STOP`], in a pod: the master waits for a minute.
const PATIENCE_OF_STOP_WITHOUT_FALLBACK: Duration = Duration::from_secs(20);
