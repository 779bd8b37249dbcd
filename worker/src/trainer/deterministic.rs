//! Steps whose sum does not depend on the ranks: gradients per micro-batch, summed exactly.

use std::mem;
use std::sync::Arc;

use elasticdl_proto::RecordRange;

use super::Trainer;
use super::stopped::Stopped;
use super::work::Work;
use crate::exact_sum;
use crate::failure::Failure;
use crate::model::Model;
use crate::session::InvalidData;
use crate::tensors::Tensors;

impl<M: Model> Trainer<'_, M> {
    /// Computes the gradient of each micro-batch of `ranges` by itself. A micro-batch that cannot
    /// be read completely is not computed. With tables, each waits for the others, as in
    /// [`compute`](Self::compute).
    pub(super) fn compute_micro_batches(
        &mut self,
        ranges: &[RecordRange],
        is_first: bool,
    ) -> Result<(), Stopped> {
        if let (true, Some(exact)) = (is_first, &mut self.exact) {
            exact.clear();
        }
        let order = Arc::clone(&self.order);
        let micro_batches = self.session.micro_batches(ranges);
        let mut work = Work::default();
        let mut waiting = Vec::new();
        if let Some(tables) = &mut self.tables {
            tables.begin_batches::<M::Batch>(is_first);
            let pieces: Vec<_> = micro_batches.iter().map(|range| vec![*range]).collect();
            if let Some(fed) = self.take_fed(&pieces) {
                waiting = micro_batches.into_iter().zip(fed).collect();
                self.compute_micro_batches_with_rows(waiting, ranges, &mut work)?;
                return Ok(self.computed(work)?);
            }
        }
        for (i, micro_batch) in micro_batches.iter().enumerate() {
            let started = self.machine.now();
            let Some(taken) = self.take(*micro_batch)? else { return Ok(()) };
            work.input += self.machine.now() - started;
            if taken.rest.is_some() {
                work.unread.extend(micro_batches[i..].iter().rev());
                break;
            }
            let started = self.machine.now();
            let fail = |error| Failure::on_records(error, order.ranges(&[*micro_batch]));
            let parts = self.parts_of(*micro_batch, taken.records);
            if let Some(tables) = &self.tables {
                let mut batches = tables.no_batches();
                for (records, part) in parts {
                    batches.push(&mut self.model, records, vec![part]).map_err(fail)?;
                }
                waiting.push((*micro_batch, batches));
            } else {
                self.begin_micro_batch();
                for (records, part) in parts {
                    work.loss_sum += self.gradients(records, &[part]).map_err(fail)?;
                }
                self.end_micro_batch();
            }
            work.busy += self.machine.now() - started;
        }
        if self.tables.is_some() {
            self.compute_micro_batches_with_rows(waiting, ranges, &mut work)?;
        }
        Ok(self.computed(work)?)
    }

    /// The records of a micro-batch, in as many parts as the model's memory asks for.
    fn parts_of(
        &self,
        range: RecordRange,
        mut records: Vec<Record<M>>,
    ) -> Vec<(Vec<Record<M>>, RecordRange)> {
        let most = self.model.max_micro_batch().unwrap_or(usize::MAX).max(1);
        let (mut parts, mut start) = (Vec::new(), range.start);
        while !records.is_empty() {
            let rest = records.split_off(records.len().min(most));
            let end = start + records.len() as u64;
            parts.push((mem::replace(&mut records, rest), RecordRange { start, end, ..range }));
            start = end;
        }
        parts
    }

    /// The gradients that follow are those of one micro-batch.
    pub(super) fn begin_micro_batch(&mut self) {
        if let Some(exact) = &mut self.exact {
            exact.add();
        }
        if let Some(bridge) = self.model.as_bridge() {
            bridge.begin_gradient();
        }
    }

    /// The gradient of the micro-batch is complete.
    pub(super) fn end_micro_batch(&mut self) {
        if let Some(exact) = &mut self.exact {
            exact.complete_last();
        }
    }

    /// Writes the sum of this rank's micro-batches to its gradient, rounded as all ranks agree.
    pub(super) fn sum_micro_batches(&mut self, is_empty: bool) -> Result<(), Stopped> {
        let Some(exact) = &mut self.exact else { return Ok(()) };
        if is_empty {
            exact.clear();
        }
        let mut exponents = exact.exponents().to_vec();
        let group = self.tensors.group_mut()?;
        if group.world_size() > 1 {
            let all = group.all_gather(&exponents)?;
            if all.iter().any(|others| others.len() != exponents.len()) {
                return Err(InvalidData("the exponents of a gradient").into());
            }
            all.iter().for_each(|others| exact_sum::raise(&mut exponents, others));
        }
        if let Tensors::Host { state, .. } = &mut self.tensors {
            exact.sum(&exponents, &mut state.gradient);
        }
        Ok(())
    }
}

type Record<M> = <<M as Model>::Reader as elasticdl_data::Reader>::Record;
