//! Evaluation by the trainer: it reads its blocks of the validation data and has the model evaluate
//! them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Trainer;
use super::device::device_of;
use super::stopped::{Stopped, decode_all, ring};
use crate::failure::{Failure, call_user, causes};
use crate::metrics::Metrics;
use crate::model::Model;
use crate::ordered_reader::ReadError;
use crate::session::evaluation::Scores;
use crate::session::header;
use crate::tensors::Tensors;

impl<M: Model> Trainer<'_, M> {
    /// Evaluates these blocks and exchanges the scores with the other ranks.
    pub(super) fn evaluate(&mut self, blocks: Range<u64>) -> Result<(), Stopped> {
        let failed = |error: ReadError| Failure {
            error: error.text,
            ranges: Vec::new(),
            fatal: error.ends_job,
        };
        let mine =
            header::encode(&self.scores(blocks).map_err(|error| Stopped::Failed(failed(error)))?);
        let ring = ring(&mut self.ring)?.host_mut();
        let scores: Vec<Scores> = decode_all(ring.all_gather(&mine).map_err(Stopped::Broken)?)?;
        self.session.evaluated(&scores).map_err(|error| Stopped::Failed(Failure::fatal(error)))?;
        self.export_best().map_err(Stopped::Failed)
    }

    fn scores(&mut self, blocks: Range<u64>) -> Result<Scores, ReadError> {
        let Self { model, tensors, validation, .. } = self;
        let validation =
            validation.as_mut().ok_or_else(|| "there is no validation data".to_owned())?;
        let most = model.max_micro_batch().unwrap_or(usize::MAX).max(1);
        // A model with non-finite parameters is never the best one, whatever its scores.
        let is_finite = tensors.parameters_are_finite().map_err(|error| causes(&error))?;
        let records = validation.plan.records;
        let mut scores = Scores { records, first_block: blocks.start, blocks: Vec::new() };
        for block in blocks {
            let mut rest = validation.read(validation.plan.block(block))?;
            let mut sums = BTreeMap::new();
            while !rest.is_empty() {
                let later = rest.split_off(rest.len().min(most));
                let now = std::mem::replace(&mut rest, later);
                let mut metrics = Metrics::new(&mut sums, now.len());
                let batch = call_user("feed()", || model.feed(now))?;
                call_user("evaluate()", || match tensors {
                    Tensors::Device(state) => {
                        device_of(model)?.evaluate(state.parameters(), batch, &mut metrics)
                    }
                    Tensors::Host(state) => model.evaluate(&state.parameters, batch, &mut metrics),
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
