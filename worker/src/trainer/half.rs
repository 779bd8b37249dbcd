//! Parameters that a model has in bf16, and no one else.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use half::slice::HalfFloatSliceExt as _;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Trainer;
use super::sharded::ShardedOptimizer;
use crate::failure::{Failure, call_user};
use crate::model::Model;
use crate::tensor::{Tensor, window};

impl<M: Model> Trainer<'_, M> {
    /// The parameters on the host, for an export: those that the model computes with, in f32.
    pub(super) fn exported_parameters(&mut self) -> Result<Arc<Vec<f32>>, Failure> {
        if !self.is_half() {
            return Ok(self.tensors.to_host(Tensor::Parameters)?);
        }
        let mut all = vec![0.0; self.tensors.size().parameters];
        for (index, part) in all.chunks_mut(PART_LEN).enumerate() {
            let start = index * PART_LEN;
            self.half(start..start + part.len())?.convert_to_f32_slice(part);
        }
        Ok(Arc::new(all))
    }

    /// Whether no parameter that the model computes with is NaN or infinite.
    pub(super) fn parameters_are_finite(&mut self) -> Result<bool, Failure> {
        if !self.is_half() {
            return Ok(self.tensors.parameters_are_finite()?);
        }
        let parameters = self.tensors.size().parameters;
        for start in (0..parameters).step_by(PART_LEN) {
            let part = self.half(start..(start + PART_LEN).min(parameters))?;
            if !part.iter().all(|parameter| parameter.is_finite()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Digest of the step's window of the parameters in bf16; 0 if there are none.
    pub(super) fn half_window_digest(&mut self) -> Result<u64, Failure> {
        if !self.is_half() {
            return Ok(0);
        }
        let step = self.session.step();
        let window = self.half(window(step, self.tensors.size().parameters))?;
        Ok(xxh3_64_with_seed(bytemuck::cast_slice(&window), step))
    }

    /// Whether the model alone has the parameters.
    fn is_half(&self) -> bool {
        self.sharded.as_ref().is_some_and(ShardedOptimizer::has_masters)
    }

    /// These parameters.
    fn half(&mut self, range: Range<usize>) -> Result<Vec<bf16>, Failure> {
        let mut part = vec![bf16::ZERO; range.len()];
        let half = self.model.as_half_model().expect("the model has begun to use bf16");
        call_user("read()", || half.read(range.start, bytemuck::cast_slice_mut(&mut part)))
            .map_err(Failure::local)?;
        Ok(part)
    }
}

/// Number of parameters that are converted at a time.
const PART_LEN: usize = 1 << 20;
