//! What is read ahead, and what can be read.

use elasticdl_proto::RecordRange;

use super::Trainer;
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
            self.records.replace(task.records(), upcoming);
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
        match self.records.readable(self.session.assignment.upcoming()) {
            Ok(readable) => self.session.assignment.limit_readable(readable),
            Err(ReadError { text, records, ends_job: true }) => {
                self.session.halt(Halt { reason: Reason::Error(text), ranges: records });
            }
            Err(error) => return Err(error.into()),
        }
        let digest = match self.session.state().filter(|_| self.session.is_verifying()) {
            Some(state) => self.tensors.digest(state)?,
            None => self.tensors.window_digest(self.session.step())?,
        };
        let mut mine = self.session.header(digest);
        mine.leaves = self.tables.is_some() && self.session.is_leaving();
        let step = self.session.step();
        mine.tables = self.tables.as_mut().map(|tables| tables.held(step));
        Ok(header::encode(&mine))
    }
}
