//! What is read ahead, and what can be read.

use elasticdl_proto::RecordRange;

use super::Trainer;
use super::stopped::Stopped;
use crate::failure::Failure;
use crate::model::Model;
use crate::ordered_reader::ReadError;
use crate::session::Task;
use crate::session::halt::{Halt, Reason};
use crate::session::header;

impl<M: Model> Trainer<'_, M> {
    /// Announces the records of the next steps, if they have changed, after those of `task`.
    pub(super) fn look_ahead(&mut self, task: &Task) {
        if let Some(upcoming) = self.session.assignment.take_upcoming() {
            match &self.fed {
                Some(fed) => {
                    self.records.replace(&fed.without(task.records()), &fed.without(upcoming));
                }
                None => self.records.replace(task.records(), upcoming),
            }
            if let Some(bridge) = self.model.as_bridge() {
                let records = |range: &RecordRange| {
                    let epoch = range.epoch;
                    self.order.records(*range).into_iter().map(move |record| (epoch, record))
                };
                bridge.upcoming(&mut upcoming.iter().flat_map(records));
            }
        }
    }

    /// Header of this rank for the round.
    pub(super) fn header(&mut self) -> Result<Vec<u8>, Failure> {
        let readable = match &self.fed {
            Some(fed) => fed.readable(&*self.records, self.session.assignment.upcoming()),
            None => self.records.readable(self.session.assignment.upcoming()),
        };
        match readable {
            Ok(readable) => self.session.assignment.limit_readable(readable),
            Err(error) => self.halt_or_fail(error, self.session.assignment.all_wait())?,
        }
        let step = self.session.step();
        let held = self.tables.as_mut().map(|tables| tables.held(step));
        if let Some((tables, held)) = self.tables.as_ref().zip(held)
            && let Some(error) = tables.excess(held)
        {
            self.session.halt(Halt { reason: Reason::Error(error), ranges: Vec::new() });
        }
        let digest = match self.session.state().filter(|_| self.session.is_verifying()) {
            Some(state) => self.tensors.digest(state)?,
            None => self.tensors.window_digest(self.session.step())?,
        };
        let digest = digest ^ self.half_window_digest()?;
        let mut mine = self.session.header(digest);
        let leaves = self.session.is_leaving() || self.session.program_failure().is_some();
        let owns = self.tables.is_some() || self.sharded.is_some();
        mine.leaves = owns && leaves;
        if let Some(sharded) = &self.sharded {
            mine.has_nonfinite_sum = sharded.has_nonfinite_sum();
            mine.chunk_digest = sharded.chunks().window_digest();
        }
        if self.session.is_summing() {
            self.renew_own_digest(&mut mine);
        }
        mine.tables = held;
        mine.has_looked_ahead = self.has_looked_ahead();
        Ok(header::encode(&mine))
    }

    /// The program has failed on records: this rank takes part in the round, without the step, so
    /// that all ranks know. With tables it hands its shards over before it ends.
    ///
    /// # Errors
    /// This worker fails at once.
    pub(super) fn halt_of_program(&mut self, stopped: Stopped) -> Result<(), Stopped> {
        match stopped {
            Stopped::Failed(Failure { error, ranges, fatal: false, divergence: None, .. })
                if !ranges.is_empty() =>
            {
                tracing::error!(error, "the program has failed; this worker ends with the round");
                self.session.halt(Halt { reason: Reason::Program(error), ranges });
                Ok(())
            }
            other => Err(other),
        }
    }

    /// The job ends with its state if no worker could continue: the data has changed, or this rank
    /// has waited for storage for as long as it may, and `all_wait`.
    ///
    /// # Errors
    /// This worker fails, and the others continue.
    pub(super) fn halt_or_fail(&mut self, error: ReadError, all_wait: bool) -> Result<(), Failure> {
        let ReadError { ref text, ref records, ends_job, is_outage } = error;
        let reason = match is_outage && all_wait {
            true => format!("{text}; all workers have waited for it"),
            false if ends_job => text.clone(),
            false => return Err(error.into()),
        };
        self.session.halt(Halt { reason: Reason::Error(reason), ranges: records.clone() });
        Ok(())
    }
}
