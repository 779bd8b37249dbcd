//! End of a job on the trainer: steps that must not be applied, and the report of the final state.

use elasticdl_collective::Communicator as _;
use elasticdl_proto::{Failure as JobFailure, Finished, LedgerReport, WorkerMessage};

use super::{Export, Stopped, Trainer, ring};
use crate::core::halt::{Ending, Halt, Reason};
use crate::core::header::StepHeader;
use crate::core::session::Session;
use crate::failure::{Failure, call_user};
use crate::model::Model;
use crate::tensors::Tensor;
use crate::weights;

impl<M: Model> Trainer<'_, M> {
    /// Whether a step can be applied: its losses and the sum of its gradients (in `reduced`) are
    /// finite. All ranks see the same bits, so all decide alike.
    pub(super) fn is_finite(&mut self, headers: &[StepHeader]) -> Result<bool, Stopped> {
        if headers.iter().all(|header| header.ranges.is_empty()) {
            return Ok(true);
        }
        Ok(headers.iter().all(|header| header.loss_sum.is_finite())
            && self.tensors.sum_is_finite()?)
    }

    /// Withholds a step for good, because a rank halts, or because the step is not finite and such
    /// steps end the job. In the latter case this rank halts, and names its records if they are at
    /// fault.
    pub(super) fn withhold(&mut self, headers: &[StepHeader]) -> Result<(), Stopped> {
        if !Session::is_withheld(headers) {
            let mine = &headers[self.rank()];
            let is_alone = ring(&mut self.ring)?.host().world_size() == 1;
            let is_mine =
                is_alone || !mine.loss_sum.is_finite() || !self.tensors.gradient_is_finite()?;
            let ranges = if is_mine { mine.ranges.clone() } else { Vec::new() };
            tracing::error!(
                step = mine.step + 1,
                is_mine,
                "the gradient is not finite; the job ends"
            );
            self.session.halt(Halt { reason: Reason::Nonfinite, ranges });
        }
        self.session.withheld(headers);
        Ok(())
    }

    /// Sends the final report of a group: the final state, and how it ended.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        let Some((generation, rank)) = self.session.group_rank() else { return Ok(()) };
        let ending = self.session.ended().cloned().unwrap_or_default();
        let is_finite = self.tensors.parameters_are_finite()?;
        let Some(state) = self.session.state() else { return Ok(()) };
        let failure = match &ending {
            Ending::Failed(error) if is_finite => Some(error.clone()),
            Ending::Failed(error) => Some(format!("{error}; {}", broken_parameters(state.step))),
            Ending::Done | Ending::Suspended if is_finite => None,
            Ending::Done | Ending::Suspended => Some(broken_parameters(state.step)),
        };
        // The model is exported before the report that ends the job: a rank that fails to report is
        // replaced, and the next lowest rank exports.
        let exports = rank == 0 && is_finite && ending != Ending::Suspended;
        if let (true, Some(Export { address, layout })) = (exports, &self.export) {
            weights::save(address, layout, &self.tensors.to_host(Tensor::Parameters)?)
                .map_err(|error| Failure::fatal(format!("the model was not exported: {error}")))?;
            tracing::info!(address, step = state.step, "the model is exported");
        }
        let model = &mut self.model;
        let summary = match rank {
            0 if ending != Ending::Suspended => {
                let parameters = self.tensors.to_host(Tensor::Parameters)?;
                call_user("summary()", || model.summary(&parameters)).unwrap_or_else(Some)
            }
            _ => None,
        };
        let ranges = self.session.halted().map(|halt| halt.ranges.clone()).unwrap_or_default();
        self.outbox.send(WorkerMessage::Finished(Finished {
            generation,
            step: state.step,
            digest: self.tensors.digest(state)?,
            ledger: LedgerReport::from(&state.ledger),
            records_trained: state.records_trained,
            stopped_early: self.session.stops_early(),
            summary,
            failure: failure.map(|error| JobFailure { error, ranges }),
            suspended: ending == Ending::Suspended,
            steps_skipped: state.steps_skipped,
            exported: exports && self.export.is_some(),
        }));
        self.session.finish_reported();
        Ok(())
    }
}

fn broken_parameters(step: u64) -> String {
    format!(
        "the parameters after step {step} hold a NaN or an infinity, so they are neither \
         exported nor in any checkpoint; lower the learning rate, or clip the gradient"
    )
}
