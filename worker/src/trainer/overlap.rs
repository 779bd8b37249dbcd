//! Sums complete buckets of the gradient while the rest is computed.

use std::time::{Duration, Instant};

use elasticdl_collective::Communicator as _;
use elasticdl_proto::RecordRange;

use super::Trainer;
use crate::buckets::{self, RecordKeys};
use crate::failure::call_user;
use crate::model::Model;
use crate::reader::Reader;
use crate::ring::Ring;
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
        let started = Instant::now();
        let (Tensors::Host(state), Some(Ring::Host(ring))) = (&mut self.tensors, &mut self.ring)
        else {
            return Ok((self.gradients(records, positions)?, started.elapsed()));
        };
        if ring.world_size() == 1 {
            return Ok((self.gradients(records, positions)?, started.elapsed()));
        }
        let (model, count) = (&mut self.model, records.len());
        let batch = call_user("feed()", || model.feed(records))?;
        let HostState { parameters, gradient, reduced, .. } = state;
        let buffers = (&mut gradient[..], &mut reduced[..]);
        let batch_of = (count, RecordKeys::new(self.seed, positions));
        let (computed, summed) =
            buckets::overlap(ring, buffers, batch_of, bucket_len, |gradients| {
                let loss =
                    call_user("gradients()", || model.gradients(parameters, batch, gradients));
                (loss, started.elapsed())
            });
        self.summed = summed;
        let (loss, took) = computed;
        Ok((loss?.sum_over(count), took))
    }
}
