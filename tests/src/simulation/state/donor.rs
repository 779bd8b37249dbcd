//! The donor's end of a transfer to a joiner: a delivery per joiner. A delivery whose link breaks
//! waits for the joiner's next dial and goes on at the joiner's position.

use std::collections::VecDeque;

use elasticdl::session::header::StateRecord;
use elasticdl_proto::{Generation, WorkerId};

use super::network::LinkId;
use super::packet::{Position, StateMessage};
use crate::simulation::clock::Micros;

/// The joiners that a process serves, and those whose requests are pending.
#[derive(Debug, Default)]
pub(crate) struct Donor {
    pub(crate) waiting: VecDeque<Request>,
    pub(crate) deliveries: Vec<Delivery>,
}

/// A joiner's request for the state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) member: WorkerId,
    pub(crate) link: LinkId,
    /// What the joiner has received over earlier links.
    pub(crate) position: Option<Position>,
}

/// The transfer to one joiner.
#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) member: WorkerId,
    /// `None` since `broke_at`.
    pub(crate) link: Option<LinkId>,
    pub(crate) broke_at: Micros,
    pub(crate) generation: Generation,
    pub(crate) record: StateRecord,
    pub(crate) lineage: u64,
    /// Number of parameters of the snapshot.
    pub(crate) len: usize,
    /// `None` when the joiner has all of it.
    pub(crate) snapshot: Option<Vec<u8>>,
    /// Whether the snapshot is announced over this link, and how much of it is sent.
    pub(crate) has_begun: bool,
    pub(crate) sent: usize,
    /// Results that the joiner has not applied, as far as is known, and how many of them are sent.
    pub(crate) results: VecDeque<StateMessage>,
    pub(crate) sent_results: usize,
    /// Step of the first result that is, or will be, in `results`.
    pub(crate) first_step: u64,
    pub(crate) caught_up_sent: bool,
    /// Whether the trainer adds results. If not, the delivery ends when everything is sent.
    pub(crate) is_fed: bool,
    pub(crate) woken: bool,
}

impl Donor {
    pub(crate) fn is_serving(&self) -> bool {
        self.deliveries.iter().any(|delivery| delivery.is_fed)
    }

    /// Whether a joiner is served over this link.
    pub(crate) fn serves_over(&self, link: LinkId) -> bool {
        self.deliveries.iter().any(|delivery| delivery.link == Some(link))
    }

    pub(crate) fn delivery(&mut self, link: LinkId) -> Option<&mut Delivery> {
        self.deliveries.iter_mut().find(|delivery| delivery.link == Some(link))
    }
}

impl Delivery {
    /// The next message; `None` if everything is sent.
    pub(crate) fn next_message(&mut self) -> Option<StateMessage> {
        if let Some(snapshot) = self.snapshot.as_ref().filter(|_| self.sent < self.len) {
            let from = self.sent;
            if !std::mem::replace(&mut self.has_begun, true) {
                let Self { generation, record, lineage, .. } = self;
                let (generation, record) = (*generation, record.clone());
                return Some(StateMessage::Start { generation, record, from, lineage: *lineage });
            }
            let end = self.len.min(from + self.len.div_ceil(PARTS));
            self.sent = end;
            return Some(StateMessage::Part { from, parameters: snapshot[from..end].to_vec() });
        }
        if let Some(result) = self.results.get(self.sent_results) {
            self.sent_results += 1;
            self.caught_up_sent = false;
            return Some(result.clone());
        }
        let is_news = self.is_fed && !std::mem::replace(&mut self.caught_up_sent, true);
        is_news.then_some(StateMessage::CaughtUp)
    }

    /// Resumes over another link. `false` if data that the joiner needs is no longer retained.
    pub(crate) fn resume(&mut self, link: LinkId, position: Option<Position>) -> bool {
        self.link = Some(link);
        (self.has_begun, self.caught_up_sent, self.woken) = (false, false, false);
        self.sent_results = 0;
        match position.filter(|position| position.snapshot == self.record.step) {
            Some(Position { received, step, .. }) if received == self.len => {
                self.sent = self.len;
                self.snapshot = None;
                self.drop_before(step);
                return step == self.first_step;
            }
            Some(Position { received, .. }) => self.sent = received,
            None => self.sent = 0,
        }
        self.snapshot.is_some() && self.first_step == self.record.step
    }

    /// Drops what the joiner reports as received.
    pub(crate) fn forget_applied(&mut self, position: Position) {
        if position.snapshot == self.record.step && position.received == self.len {
            self.snapshot = None;
            self.sent_results -= self.drop_before(position.step);
        }
    }

    /// Drops the results of steps before `step`. Returns their number.
    fn drop_before(&mut self, step: u64) -> usize {
        let is_before = |result: &StateMessage| match result {
            StateMessage::Result { step: of, .. } => *of < step,
            _ => false,
        };
        let applied = self.results.iter().take_while(|result| is_before(result)).count();
        self.results.drain(..applied);
        self.first_step += applied as u64;
        applied
    }
}

/// Number of parts of a snapshot.
const PARTS: usize = 6;
