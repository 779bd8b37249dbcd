//! Computes the gradient of this rank's part of a step.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_data::Reader;
use elasticdl_proto::RecordRange;
use elasticdl_tables::BatchRows;

use super::Trainer;
use super::device::device_of;
use super::parts::Parts;
use super::stopped::Stopped;
use super::work::Work;
use crate::buckets::{Gradients, RecordKeys};
use crate::exact_sum::ExactSum;
use crate::external::Bridge;
use crate::failure::{Failure, call_user};
use crate::metrics;
use crate::model::Model;
use crate::prefetch::Taken;
use crate::session::Computed;
use crate::tensors::{HostState, Place};

impl<M: Model> Trainer<'_, M> {
    /// Adds the gradient of the records of `ranges` to that of this rank's part of the step.
    ///
    /// A micro-batch is computed as soon as its records are read. With tables it waits for the
    /// others, because the rows of all of them are looked up at once.
    pub(super) fn compute(
        &mut self,
        ranges: &[RecordRange],
        is_first: bool,
    ) -> Result<(), Stopped> {
        // Whether all elements of the gradient are set: a program sets them with its first records.
        let mut is_set = true;
        if is_first {
            match self.model.as_bridge() {
                Some(bridge) => {
                    bridge.begin_gradient();
                    is_set = false;
                }
                None => self.tensors.clear_gradient()?,
            }
        }
        let order = Arc::clone(&self.order);
        let fail = |error| Failure::on_records(error, order.ranges(ranges));
        let most = self.model.max_micro_batch().unwrap_or(usize::MAX).max(1);
        let mut waiting = self.tables.as_mut().map(|tables| tables.begin_batches(is_first));
        let mut work = Work::default();
        if waiting.is_some()
            && let Some(fed) = self.take_fed(&[ranges.to_vec()])
        {
            let fed = fed.into_iter().next().expect("there is one piece");
            self.compute_with_rows(fed, ranges, &mut work)?;
            return Ok(self.computed(work)?);
        }
        let (mut records, mut parts) = (Vec::new(), Parts::default());
        for (i, range) in ranges.iter().enumerate() {
            let started = self.machine.now();
            // Without its records, the job ends.
            let Some(taken) = self.take(*range)? else { return Ok(()) };
            work.input += self.machine.now() - started;
            parts.push(*range, taken.records.len() as u64);
            records.extend(taken.records);
            if let Some(rest) = taken.rest {
                // Storage does not answer: the step consists of the records that have been read.
                work.unread.push(rest);
                work.unread.extend(&ranges[i + 1..]);
            }
            let ends = i + 1 == ranges.len() || !work.unread.is_empty();
            while records.len() >= most || (ends && !records.is_empty()) {
                let rest = records.split_off(records.len().min(most));
                let batch = mem::replace(&mut records, rest);
                let parts = parts.split_off(batch.len() as u64);
                let started = self.machine.now();
                let is_last = ends && records.is_empty();
                if let Some(waiting) = &mut waiting {
                    waiting.push(&mut self.model, batch, parts).map_err(fail)?;
                    work.busy += self.machine.now() - started;
                    continue;
                }
                // A part is computed as the rank that audits it does.
                let may_overlap = is_last && !self.session.assignment.is_audited();
                let (loss, took) = match may_overlap.then(|| self.model.bucket_len()).flatten() {
                    Some(bucket) => self.last_gradients(batch, &parts, bucket).map_err(fail)?,
                    None => {
                        let loss = self.gradients(batch, &parts).map_err(fail)?;
                        (loss, self.machine.now() - started)
                    }
                };
                is_set = true;
                work.loss_sum += loss;
                work.busy += took;
            }
            if !work.unread.is_empty() {
                break;
            }
        }
        if let Some(waiting) = waiting {
            is_set |= !waiting.is_empty();
            self.compute_with_rows(waiting, ranges, &mut work)?;
        }
        if !is_set {
            self.tensors.clear_gradient()?;
        }
        Ok(self.computed(work)?)
    }

    /// The pending gradient contains the work.
    pub(super) fn computed(&mut self, work: Work) -> Result<(), Failure> {
        let Work { loss_sum, busy, input, row_touches, unread } = work;
        self.tensors.end_gradient()?;
        let metrics = metrics::take_reported().map_err(Failure::fatal)?;
        let discarded = self.model.as_bridge().map_or(Duration::ZERO, Bridge::take_discarded);
        let tally = self.model.as_bridge().map(Bridge::take_tally).unwrap_or_default();
        self.session.assignment.computed(Computed {
            loss_sum,
            metrics,
            tally,
            compute_us: busy.saturating_sub(discarded).as_micros() as u64,
            input_us: input.as_micros() as u64,
            row_touches,
        });
        self.session.assignment.not_read(&unread);
        self.note_own_digest();
        Ok(())
    }

    /// Takes records of the step; `None` if the job ends because they cannot be read.
    pub(super) fn take(
        &mut self,
        range: RecordRange,
    ) -> Result<Option<Taken<<M::Reader as Reader>::Record>>, Failure> {
        match self.records.take(range) {
            Ok(taken) => Ok(Some(taken)),
            Err(error) => {
                self.halt_or_fail(error, self.session.assignment.all_wait()).map(|()| None)
            }
        }
    }

    /// Adds the gradient of the records at these positions.
    pub(super) fn gradients(
        &mut self,
        records: Vec<<M::Reader as Reader>::Record>,
        positions: &[RecordRange],
    ) -> Result<f64, String> {
        let (model, count) = (&mut self.model, records.len());
        let batch = call_user("feed()", || model.feed(records))?;
        self.gradients_of((batch, count), positions, None)
    }

    /// Adds the gradient of a batch: of this number of records, at these positions.
    pub(super) fn gradients_of(
        &mut self,
        (batch, count): (M::Batch, usize),
        positions: &[RecordRange],
        rows: Option<&mut BatchRows>,
    ) -> Result<f64, String> {
        let (model, tensors) = (&mut self.model, &mut self.tensors);
        let keys = RecordKeys::new(self.seed, positions);
        // All ranks see a non-finite loss in this rank's header.
        let compute = || match tensors.place()? {
            Place::Gpu(state) => {
                let (parameters, mut gradient) = state.gradient(count, rows);
                device_of(model)?.gradients(parameters, batch, &mut gradient)
            }
            Place::Host(HostState { parameters, gradient, .. }) => {
                let gradient = self.exact.as_mut().and_then(ExactSum::last).unwrap_or(gradient);
                let mut gradients = Gradients::of(gradient, count, keys).with_rows(rows);
                model.gradients(parameters, batch, &mut gradients)
            }
        };
        let loss = metrics::reporting(count, || call_user("gradients()", compute));
        Ok(loss.map_err(|error| self.in_own_words(error))?.sum_over(count))
    }

    /// The error of `gradients()`, a method that a program in Python does not have.
    pub(super) fn in_own_words(&mut self, error: String) -> String {
        match error.strip_prefix("gradients() failed: ") {
            Some(own) if self.model.as_bridge().is_some() => own.to_owned(),
            _ => error,
        }
    }
}
