//! Checkpoints and evaluations of a session. Both happen at the end of a step and are decided from
//! the headers of all ranks.

use std::time::Duration;

use elasticdl_proto::{Evaluated, WorkerMessage};

use super::phase::Phase;
use super::{Session, Task, checkpoint_headers};
use crate::session::checkpoint::{self, Written};
use crate::session::evaluation::{Evaluation, Plan, Scores};
use crate::session::header::{StateRecord, StepHeader};

impl Session {
    /// Takes in the scores of all ranks for an evaluation.
    ///
    /// # Errors
    /// The scores are inconsistent; the job cannot continue.
    pub fn evaluated(&mut self, scores: &[Scores]) -> Result<(), String> {
        let (Phase::Evaluating { group, headers, committed }, Some(plan), Some(state)) =
            (&self.phase, &self.job.evaluation, &mut self.state)
        else {
            return Ok(());
        };
        let means = plan.combine(scores)?;
        plan.note(&mut state.evaluation, state.step, &means);
        let (group, headers, committed) = (group.clone(), headers.clone(), *committed);
        if group.rank == 0 {
            // A mean that is not finite shows the user that the model diverges.
            let metrics = means
                .into_iter()
                .map(|(name, mean)| (name, mean.is_finite().then_some(mean)))
                .collect();
            let (step, records) = (state.step, plan.records);
            self.reports.push_back(WorkerMessage::Evaluated(Evaluated { step, records, metrics }));
        }
        self.phase = Phase::Round { group, assigned: None, computed: false };
        self.end_round(&headers, committed);
        Ok(())
    }

    /// Next task of a checkpoint. To be polled before the state changes: a checkpoint holds the
    /// state as it is now.
    pub fn poll_checkpoint(&mut self) -> Option<checkpoint::Task> {
        self.checkpoints.poll()
    }

    /// This rank has loaded the state of a checkpoint. Returns `false` for an inconsistent record.
    /// `ours`: whether the checkpoint belongs to this job.
    pub fn restore(&mut self, mut record: StateRecord, ours: bool) -> bool {
        if !ours {
            // The best value of another job may stem from other data and another metric.
            record.evaluation = Evaluation { at: record.evaluation.at, ..Evaluation::default() };
        }
        self.checkpoints.restored(record.step, ours);
        self.end_task(&Task::CreateState);
        self.install(record, None)
    }

    /// This rank's part of the checkpoint of `step` is written, or could not be.
    pub fn wrote_part(&mut self, step: u64, part: Result<Written, ()>) {
        self.checkpoints.wrote(step, part);
    }

    /// Training has stopped for this time, to copy the state for a checkpoint.
    pub fn copied_for_checkpoint(&mut self, took: Duration) {
        self.checkpoints.copied(took);
    }

    /// The manifest of the checkpoint of `step` is written, or could not be.
    pub fn committed_checkpoint(&mut self, step: u64, is_written: bool) {
        self.checkpoints.committed(step, is_written);
    }

    /// Whether the job ends before its data does, because evaluations no longer improve.
    pub fn stops_early(&self) -> bool {
        self.job.evaluation.as_ref().is_some_and(|plan| plan.stops_early(&self.evaluation()))
    }

    pub(super) fn evaluation(&self) -> Evaluation {
        self.state.as_ref().map_or_else(Evaluation::default, |s| s.evaluation)
    }

    pub(super) fn is_to_be_evaluated(&self) -> bool {
        let due = |plan: &Plan| plan.is_due(&self.evaluation(), self.step(), self.at_end());
        self.job.evaluation.as_ref().is_some_and(due)
    }

    /// Whether the current model is the best so far.
    pub fn is_best(&self) -> bool {
        self.evaluation().best.is_some_and(|(step, _)| step == self.step())
    }

    pub(super) fn handle_checkpoint_headers(&mut self, headers: &[StepHeader]) {
        if let Some(state) = &mut self.state {
            // A rank that has evaluated a later step than others did so with the same parameters.
            let newest = headers.iter().map(|h| h.evaluation).max_by_key(|e| e.at);
            state.evaluation =
                newest.filter(|e| e.at > state.evaluation.at).unwrap_or(state.evaluation);
        }
        if let Phase::Round { group, .. } = &self.phase {
            self.checkpoints.handle_headers(&group.members, &checkpoint_headers(headers));
        }
    }
}
