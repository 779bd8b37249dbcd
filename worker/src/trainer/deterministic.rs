//! Steps whose sum does not depend on the ranks: gradients per micro-batch, summed exactly.

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
    /// be read completely is not computed.
    pub(super) fn compute_micro_batches(
        &mut self,
        ranges: &[RecordRange],
        is_first: bool,
    ) -> Result<(), Failure> {
        if let (true, Some(exact)) = (is_first, &mut self.exact) {
            exact.clear();
        }
        let micro_batches = self.session.micro_batches(ranges);
        let mut work = Work::default();
        for (i, micro_batch) in micro_batches.iter().enumerate() {
            let started = self.machine.now();
            let Some(taken) = self.take(*micro_batch)? else { return Ok(()) };
            work.input += self.machine.now() - started;
            if taken.rest.is_some() {
                work.unread.extend(micro_batches[i..].iter().rev());
                break;
            }
            let started = self.machine.now();
            work.loss_sum += self.micro_batch(*micro_batch, taken.records)?;
            work.busy += self.machine.now() - started;
        }
        self.computed(work)
    }

    /// Adds the gradient of a micro-batch, in as many calls of the model as its memory asks for.
    /// Returns the sum of its loss.
    fn micro_batch(
        &mut self,
        range: RecordRange,
        mut records: Vec<Record<M>>,
    ) -> Result<f64, Failure> {
        let Some(exact) = &mut self.exact else { return Ok(0.0) };
        exact.add();
        // The micro-batch's own gradient is zero.
        if let Some(bridge) = self.model.as_bridge() {
            bridge.begin_gradient();
        }
        let most = self.model.max_micro_batch().unwrap_or(usize::MAX).max(1);
        let (mut loss_sum, mut start) = (0.0, range.start);
        while !records.is_empty() {
            let rest = records.split_off(records.len().min(most));
            let end = start + records.len() as u64;
            let part = RecordRange { start, end, ..range };
            let loss = self.gradients(std::mem::replace(&mut records, rest), &[part]);
            loss_sum +=
                loss.map_err(|error| Failure::on_records(error, self.order.ranges(&[range])))?;
            start = end;
        }
        if let Some(exact) = &mut self.exact {
            exact.complete_last();
        }
        Ok(loss_sum)
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
