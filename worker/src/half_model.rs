//! The trait of models that compute with parameters in bf16.

use crate::metrics::UserError;

/// Parameters in bf16, in memory of a model, for jobs with `--param-dtype bf16`.
///
/// The workers of such a job divide the f32 parameters that the optimizer changes, and give each
/// other the rounded ones, which are nowhere but here: the flat slice of parameters that methods of
/// [`Model`](crate::Model) get is empty. A number is the upper half of the bits of an f32.
pub trait HalfModel {
    /// Allocates all parameters, before training. From here on the model computes with them.
    ///
    /// # Errors
    /// An error ends the job.
    fn begin(&mut self) -> Result<(), UserError>;

    /// Copies the parameters from element `start` on.
    ///
    /// # Errors
    /// An error ends this worker.
    fn read(&self, start: usize, bits: &mut [u16]) -> Result<(), UserError>;

    /// Overwrites the parameters from element `start` on.
    ///
    /// # Errors
    /// An error ends this worker.
    fn write(&mut self, start: usize, bits: &[u16]) -> Result<(), UserError>;
}
