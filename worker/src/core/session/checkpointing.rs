//! What a session has to do with checkpoints and evaluations: both happen at the end of a step, by
//! what all ranks' headers say.

use super::{Phase, Report, Session, checkpoint_headers};
use crate::core::checkpoint::{self, Written};
use crate::core::evaluation::{Evaluation, Plan, Scores};
use crate::core::header::{StateRecord, StepHeader};

impl Session {
    /// The user wants a checkpoint now.
    pub fn handle_checkpoint(&mut self) {
        self.checkpoints.request();
    }

    /// All ranks' scores of an evaluation.
    ///
    /// # Errors
    /// They make no sense together; the job can't go on.
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
            self.reports.push_back(Report::Evaluated {
                step: state.step,
                records: plan.records,
                means,
            });
        }
        self.phase = Phase::Round { group, quotas: None, computed: false };
        self.end_round(&headers, committed);
        Ok(())
    }

    /// What there is to do for a checkpoint, before anything else: the state is as it is to be
    /// kept.
    pub fn poll_checkpoint(&mut self) -> Option<checkpoint::Task> {
        self.checkpoints.poll()
    }

    /// This rank took over the state of a checkpoint; `false` where the record makes no sense.
    /// `ours`: of this job, and not of another one.
    pub fn restore(&mut self, mut record: StateRecord, ours: bool) -> bool {
        if !ours {
            // Another job's best was found on other data, perhaps, and by another metric.
            record.evaluation = Evaluation { at: record.evaluation.at, ..Evaluation::default() };
        }
        self.checkpoints.restored(record.step, ours);
        self.install(record, None)
    }

    /// This rank's part of the checkpoint of `step` is written, or can't be.
    pub fn wrote_part(&mut self, step: u64, part: Result<Written, ()>) {
        self.checkpoints.wrote(step, part);
    }

    /// The manifest of the checkpoint of `step` is written, or can't be.
    pub fn committed_checkpoint(&mut self, step: u64, is_written: bool) {
        self.checkpoints.committed(step, is_written);
    }

    /// Whether the job ends before its data does, for evaluations get no better.
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

    /// Whether the model as it is now is the best so far.
    pub(super) fn is_best(&self) -> bool {
        self.evaluation().best.is_some_and(|(step, _)| step == self.step())
    }

    pub(super) fn handle_checkpoint_headers(&mut self, headers: &[StepHeader]) {
        if let Some(state) = &mut self.state {
            // Who has evaluated further than others has done it with the same parameters.
            let newest = headers.iter().map(|h| h.evaluation).max_by_key(|e| e.at);
            state.evaluation =
                newest.filter(|e| e.at > state.evaluation.at).unwrap_or(state.evaluation);
        }
        if let Phase::Round { group, .. } = &self.phase {
            self.checkpoints.handle_headers(&group.members, &checkpoint_headers(headers));
        }
    }
}
