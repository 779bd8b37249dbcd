//! Sums complete buckets of the gradient while the rest is computed.

use std::sync::Arc;
use std::time::Duration;

use elasticdl_data::Reader;
use elasticdl_proto::RecordRange;

use super::Trainer;
use super::device::device_of;
use crate::buckets::{self, Gradients, RecordKeys};
use crate::failure::call_user;
use crate::metrics;
use crate::model::Model;
use crate::session::transport_switch::Transport;
use crate::tensors::{HostState, Tensors};

impl<M: Model> Trainer<'_, M> {
    /// Like `gradients`, for the last records of a step: the gradient is complete afterwards, and
    /// the group's next operation on every rank is to sum it. Also returns the time spent in the
    /// model, without waiting for other ranks.
    pub(super) fn last_gradients(
        &mut self,
        records: Vec<<M::Reader as Reader>::Record>,
        positions: &[RecordRange],
        bucket_len: usize,
    ) -> Result<(f64, Duration), String> {
        let machine = Arc::clone(&self.machine);
        let started = machine.now();
        let took = || machine.now() - started;
        let has_peers = self.tensors.group().is_some_and(|group| group.world_size() > 1)
            && !self.session.is_switching();
        let is_over_nccl = self.session.transport() == Transport::Nccl;
        let (model, count) = (&mut self.model, records.len());
        let (computed, summed) = match &mut self.tensors {
            Tensors::Host { group: Some(group), state } if has_peers && !state.is_on_gpu() => {
                let Some(group) = group.host_mut() else {
                    return Ok((self.gradients(records, positions)?, took()));
                };
                let batch = call_user("feed()", || model.feed(records))?;
                let HostState { parameters, gradient, reduced, .. } = state;
                let batch_of = (count, RecordKeys::new(self.seed, positions));
                let compute = |gradients: &mut Gradients<'_>| {
                    let compute = || model.gradients(parameters, batch, gradients);
                    let loss = metrics::reporting(count, || call_user("gradients()", compute));
                    (loss, took())
                };
                match &mut self.sharded {
                    Some(sharded) => {
                        let sums = sharded.begin_sums();
                        buckets::overlap_with(group, gradient, sums, batch_of, compute)
                    }
                    None => {
                        buckets::overlap(group, gradient, reduced, batch_of, bucket_len, compute)
                    }
                }
            }
            // The host path copies a gradient when it is complete.
            Tensors::Device { group: Some(group), state, .. } if has_peers && is_over_nccl => {
                let batch = call_user("feed()", || model.feed(records))?;
                state.overlap(group, count, bucket_len, |parameters, gradients| {
                    let compute = || device_of(model)?.gradients(parameters, batch, gradients);
                    let loss = metrics::reporting(count, || call_user("gradients()", compute));
                    (loss, took())
                })
            }
            _ => return Ok((self.gradients(records, positions)?, took())),
        };
        self.summed = summed;
        let (loss, took) = computed;
        Ok((loss.map_err(|error| self.in_own_words(error))?.sum_over(count), took))
    }
}
