//! End of a job on the trainer: the finding of a gradient that is not finite, and the final state.

use elasticdl_collective::Communicator as _;

use super::Trainer;
use super::stopped::{Stopped, ring};
use crate::failure::{Failure, call_user};
use crate::model::{Model, Progress};
use crate::session::FinalState;
use crate::session::halt::Ending;
use crate::tensor::Tensor;
use crate::weights;

impl<M: Model> Trainer<'_, M> {
    /// The sum of a step's gradients is not finite, and such steps end the job.
    pub(super) fn inspect_gradient(&mut self) -> Result<(), Stopped> {
        // The only rank's gradient is the sum.
        let is_alone = ring(&mut self.ring)?.host().world_size() == 1;
        let is_finite = !is_alone && self.tensors.gradient_is_finite()?;
        let step = self.session.step() + 1;
        tracing::error!(step, is_finite, "the step's gradient is not finite; the job ends");
        let order = &self.order;
        self.session.inspected(is_finite, |positions| order.ranges(positions));
        Ok(())
    }

    /// Hands the final state of a group to the session, which reports it. If it `is_published`,
    /// this worker exports the model and describes it.
    pub(super) fn finish(&mut self, is_published: bool) -> Result<(), Failure> {
        let Some(state) = self.session.state() else { return Ok(()) };
        let parameters_are_finite = self.tensors.parameters_are_finite()?;
        // The model is exported before the report that ends the job: a rank that fails to report is
        // replaced, and the next lowest rank exports.
        let export = self.exports.last.as_deref();
        let export = export.filter(|_| is_published && parameters_are_finite);
        if let Some(address) = export {
            self.export(address, state.step)?;
        }
        let model = &mut self.model;
        let mut summary = None;
        if is_published {
            let parameters = self.tensors.to_host(Tensor::Parameters)?;
            summary = call_user("summary()", || model.summary(&parameters)).unwrap_or_else(Some);
        }
        let last = FinalState {
            digest: self.tensors.digest(state)?,
            parameters_are_finite,
            summary,
            is_exported: export.is_some(),
        };
        match self.session.ended() {
            Some(Ending::Done) => self.model.observe(Progress::Finished { error: None }),
            Some(Ending::Failed(error)) => {
                self.model.observe(Progress::Finished { error: Some(error) });
            }
            Some(Ending::Suspended) | None => {}
        }
        self.session.finish(last);
        Ok(())
    }

    /// The lowest rank exports the model if it is the best so far. The next step needs that rank,
    /// so if it is lost meanwhile, the next group is still at this step and exports the model
    /// again.
    pub(super) fn export_best(&self) -> Result<(), Failure> {
        let is_lowest = self.session.group_rank().is_some_and(|(_, rank)| rank == 0);
        match self.exports.best.as_deref() {
            Some(address) if is_lowest && self.session.is_best() => {
                self.export(address, self.session.step())
            }
            _ => Ok(()),
        }
    }

    fn export(&self, address: &str, step: u64) -> Result<(), Failure> {
        let parameters = self.tensors.to_host(Tensor::Parameters)?;
        weights::save(address, &self.exports.layout, &parameters)
            .map_err(|error| Failure::fatal(format!("the model was not exported: {error}")))?;
        tracing::info!(address, step, "the model is exported");
        Ok(())
    }
}
