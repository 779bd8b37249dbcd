//! Evaluation by the trainer: it reads its blocks of the validation data and has the model evaluate
//! them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Trainer;
use super::device::device_of;
use super::stopped::{Stopped, decode_all};
use crate::failure::{Failure, call_user};
use crate::metrics::Metrics;
use crate::model::Model;
use crate::ordered_reader::ReadError;
use crate::session::evaluation::Scores;
use crate::session::halt::{Halt, Reason};
use crate::session::header;
use crate::tensors::Tensors;

impl<M: Model> Trainer<'_, M> {
    /// Evaluates these blocks and exchanges the scores with the other ranks. If the model or the
    /// data is at fault, the group ends with its state.
    pub(super) fn evaluate(&mut self, blocks: Range<u64>) -> Result<(), Stopped> {
        // The master knows from the step that this is an evaluation, which may take long.
        self.session.reports.flush();
        self.send_reports();
        let mine = match self.scores(blocks) {
            Ok(scores) => scores,
            Err(Unscored::Halts(error)) => {
                tracing::error!(error, "the evaluation failed; the job ends");
                self.session.halt(Halt { reason: Reason::Error(error), ranges: Vec::new() });
                Scores { failed: true, ..Scores::default() }
            }
            Err(Unscored::Fails(failure)) => return Err(failure.into()),
        };
        let all = self.tensors.group_mut()?.all_gather(&header::encode(&mine))?;
        let scores: Vec<Scores> = decode_all(all)?;
        self.session.evaluated(&scores);
        if scores.iter().any(|scores| scores.failed) {
            return Ok(());
        }
        Ok(self.export_best()?)
    }

    fn scores(&mut self, blocks: Range<u64>) -> Result<Scores, Unscored> {
        let Self { model, tensors, validation, .. } = self;
        let Some(validation) = validation else { return Ok(Scores::default()) };
        let most = model.max_micro_batch().unwrap_or(usize::MAX).max(1);
        // A model with non-finite parameters is never the best one, whatever its scores.
        let is_finite = tensors.parameters_are_finite().map_err(Failure::from)?;
        let records = validation.plan.records;
        let mut scores = Scores { records, first_block: blocks.start, ..Scores::default() };
        for block in blocks {
            let mut rest = validation.read(validation.plan.block(block))?;
            let mut sums = BTreeMap::new();
            while !rest.is_empty() {
                let later = rest.split_off(rest.len().min(most));
                let now = std::mem::replace(&mut rest, later);
                let mut metrics = Metrics::new(&mut sums, now.len());
                let batch = call_user("feed()", || model.feed(now))?;
                call_user("evaluate()", || match tensors {
                    Tensors::Device { state, .. } => {
                        device_of(model)?.evaluate(state.parameters(), batch, &mut metrics)
                    }
                    Tensors::Host { state, .. } => {
                        model.evaluate(&state.parameters, batch, &mut metrics)
                    }
                })?;
            }
            if !is_finite {
                sums.values_mut().for_each(|sum| *sum = f64::NAN);
            }
            scores.blocks.push(sums);
        }
        Ok(scores)
    }
}

/// Why a rank has no scores.
enum Unscored {
    /// This worker cannot evaluate; another one may.
    Fails(Failure),
    /// Every worker would find the same.
    Halts(String),
}

impl From<Failure> for Unscored {
    fn from(failure: Failure) -> Self {
        Self::Fails(failure)
    }
}

impl From<ReadError> for Unscored {
    fn from(error: ReadError) -> Self {
        if error.ends_job { Self::Halts(error.text) } else { Self::Fails(error.into()) }
    }
}

impl From<String> for Unscored {
    fn from(error: String) -> Self {
        Self::Halts(error)
    }
}
