//! Evaluation by the trainer: it reads its blocks of the validation data and has the model evaluate
//! them.

use std::collections::BTreeMap;
use std::ops::Range;

use elasticdl_data::Reader;
use elasticdl_tables::{BatchRows, Ids};

use super::Trainer;
use super::device::device_of;
use super::feed::feed;
use super::row_tables::RowTables;
use super::stopped::{Stopped, decode_all};
use crate::failure::{Failure, call_user};
use crate::metrics::Metrics;
use crate::model::Model;
use crate::ordered_reader::ReadError;
use crate::session::evaluation::Scores;
use crate::session::halt::{Halt, Reason};
use crate::session::header;
use crate::tensors::Place;

impl<M: Model> Trainer<'_, M> {
    /// Evaluates these blocks and exchanges the scores with the other ranks. If the model or the
    /// data is at fault, the group ends with its state.
    pub(super) fn evaluate(&mut self, blocks: Range<u64>) -> Result<(), Stopped> {
        let began = self.machine.now();
        // The master knows from the step that this is an evaluation, which may take long.
        self.session.reports.flush();
        self.send_reports();
        let failed = Scores { failed: true, ..Scores::default() };
        let (mine, outage) = match self.scores(blocks)? {
            Ok(scores) => (scores, None),
            Err(Unscored::Halts(error)) => {
                tracing::error!(error, "the evaluation failed; the job ends");
                self.session.halt(Halt { reason: Reason::Error(error), ranges: Vec::new() });
                (failed, None)
            }
            Err(Unscored::Waited(error)) => (failed, Some(error)),
            Err(Unscored::Fails(failure)) => return Err(failure.into()),
        };
        let all = self.tensors.group_mut()?.all_gather(&header::encode(&mine))?;
        let scores: Vec<Scores> = decode_all(all)?;
        if let Some(error) = outage {
            self.halt_or_fail(error, scores.iter().all(|scores| scores.failed))?;
        }
        self.session.evaluated(&scores, self.machine.now() - began);
        if scores.iter().any(|scores| scores.failed) {
            return Ok(());
        }
        self.export_best(true)
    }

    fn scores(&mut self, blocks: Range<u64>) -> Result<Result<Scores, Unscored>, Stopped> {
        let Some(records) = self.validation.as_ref().map(|validation| validation.plan.records)
        else {
            return Ok(Ok(Scores::default()));
        };
        // A model with non-finite parameters is never the best one, whatever its scores.
        let is_finite = self.parameters_are_finite()?;
        let mut scores = Scores { records, first_block: blocks.start, ..Scores::default() };
        let mut failed = None;
        for block in self.rounds(&blocks) {
            // A rank looks rows up as often as the others, also if it has no block or has failed.
            let block = Some(block).filter(|block| blocks.contains(block) && failed.is_none());
            let sums = match &self.tables {
                Some(_) => self.evaluate_with_rows(block)?,
                None => self.evaluate_block(block.expect("all ranks have all of their blocks")),
            };
            match sums {
                Ok(mut sums) => {
                    if !is_finite {
                        sums.values_mut().for_each(|sum| *sum = f64::NAN);
                    }
                    scores.blocks.extend(block.map(|_| sums));
                }
                Err(error) => failed = Some(error),
            }
            if self.tables.is_none() && failed.is_some() {
                break;
            }
        }
        Ok(failed.map_or(Ok(scores), Err))
    }

    /// The blocks from the first of `blocks` on, one for each time that rows are looked up: all
    /// ranks do that equally often.
    fn rounds(&self, blocks: &Range<u64>) -> Range<u64> {
        if self.tables.is_none() {
            return blocks.clone();
        }
        let shares = self.session.evaluation_shares().into_iter();
        let most = shares.map(|share| share.end - share.start).max();
        blocks.start..blocks.start + most.unwrap_or(0)
    }

    /// Sums of the metrics over a block.
    fn evaluate_block(&mut self, block: u64) -> Result<Sums, Unscored> {
        let mut sums = Sums::new();
        for records in self.read_block(block)? {
            let count = records.len();
            let batch = call_user("feed()", || self.model.feed(records))?;
            self.evaluate_batch((batch, count), None, &mut sums)?;
        }
        Ok(sums)
    }

    /// As [`evaluate_block`](Self::evaluate_block), for a model with tables. Without a block, this
    /// rank looks up no rows.
    fn evaluate_with_rows(
        &mut self,
        block: Option<u64>,
    ) -> Result<Result<Sums, Unscored>, Stopped> {
        let Some(mut ids) = self.tables.as_ref().map(RowTables::ids) else {
            return Ok(Ok(Sums::new()));
        };
        let fed = block.map_or(Ok(Vec::new()), |block| self.feed_block(block, &mut ids));
        if fed.is_err() {
            ids = Ids::new(ids.tables());
        }
        let Some(tables) = &mut self.tables else { return Ok(Ok(Sums::new())) };
        let mut rows = tables.look_up(self.tensors.group_mut()?, &ids)?;
        let evaluate = || {
            let mut sums = Sums::new();
            for batch in fed? {
                self.evaluate_batch(batch, Some(&mut rows), &mut sums)?;
            }
            Ok(sums)
        };
        Ok(evaluate())
    }

    /// The batches of a block, with their numbers of records.
    fn feed_block(
        &mut self,
        block: u64,
        ids: &mut Ids,
    ) -> Result<Vec<(M::Batch, usize)>, Unscored> {
        let mut batches = Vec::new();
        for records in self.read_block(block)? {
            let count = records.len();
            batches.push((feed(&mut self.model, records, ids)?, count));
        }
        Ok(batches)
    }

    /// The records of a block, as many at a time as the model takes.
    fn read_block(
        &mut self,
        block: u64,
    ) -> Result<Vec<Vec<<M::Reader as Reader>::Record>>, Unscored> {
        let most = self.model.max_micro_batch().unwrap_or(usize::MAX).max(1);
        let Some(validation) = &mut self.validation else { return Ok(Vec::new()) };
        let mut rest = validation.read(validation.plan.block(block))?;
        let mut parts = Vec::new();
        while !rest.is_empty() {
            let later = rest.split_off(rest.len().min(most));
            parts.push(std::mem::replace(&mut rest, later));
        }
        Ok(parts)
    }

    fn evaluate_batch(
        &mut self,
        (batch, count): (M::Batch, usize),
        rows: Option<&mut BatchRows>,
        sums: &mut Sums,
    ) -> Result<(), Unscored> {
        let model = &mut self.model;
        let place = self.tensors.place().map_err(Failure::from)?;
        let mut metrics = Metrics::new(sums, count).with_rows(rows);
        Ok(call_user("evaluate()", || match place {
            Place::Gpu(state) => {
                device_of(model)?.evaluate(state.parameters(), batch, &mut metrics)
            }
            Place::Host(state) => model.evaluate(&state.parameters, batch, &mut metrics),
        })?)
    }
}

/// Sums of metrics, by name.
type Sums = BTreeMap<String, f64>;

/// Why a rank has no scores.
enum Unscored {
    /// This worker cannot evaluate; another one may.
    Fails(Failure),
    /// Every worker would find the same.
    Halts(String),
    /// Storage was waited for, in vain.
    Waited(ReadError),
}

impl From<Failure> for Unscored {
    fn from(failure: Failure) -> Self {
        Self::Fails(failure)
    }
}

impl From<ReadError> for Unscored {
    fn from(error: ReadError) -> Self {
        match error {
            error if error.is_outage => Self::Waited(error),
            ReadError { text, ends_job: true, .. } => Self::Halts(text),
            error => Self::Fails(error.into()),
        }
    }
}

impl From<String> for Unscored {
    fn from(error: String) -> Self {
        Self::Halts(error)
    }
}
