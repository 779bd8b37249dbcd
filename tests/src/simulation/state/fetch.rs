//! The joiner's end of a transfer of the state.

use elasticdl::session::header::StateRecord;
use elasticdl_proto::{Generation, WorkerId};

use super::network::LinkId;
use super::packet::Position;
use crate::simulation::clock::Micros;

/// The donor that a joiner fetches the state from.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) donor: WorkerId,
    pub(crate) host: usize,
    pub(crate) link: LinkId,
    pub(crate) introduced: bool,
    /// Time of the last packet from the donor; before the first packet, the time of the dial.
    pub(crate) last_received: Micros,
    pub(crate) has_sent_state: bool,
}

/// The parts of a donor's snapshot that a joiner has received, over one link or several.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) donor: WorkerId,
    pub(crate) generation: Generation,
    pub(crate) record: StateRecord,
    pub(crate) lineage: u64,
    /// Number of parameters, and how many of them have arrived.
    pub(crate) len: usize,
    pub(crate) received: usize,
}

impl Incoming {
    pub(crate) fn is_complete(&self) -> bool {
        self.received == self.len
    }

    /// Whether the rest of this snapshot is announced.
    pub(crate) fn is_continued_by(&self, record: &StateRecord, from: usize) -> bool {
        !self.is_complete() && self.record.step == record.step && self.received == from
    }

    /// Position to report to the donor; `step`: of the joiner's state, if it has one.
    pub(crate) fn position(&self, step: u64) -> Position {
        let snapshot = self.record.step;
        Position { snapshot, received: self.received, step: step.max(snapshot) }
    }
}

/// Pause before the next dial of a donor.
pub(crate) const FETCH_PAUSE_US: Micros = 50_000;
