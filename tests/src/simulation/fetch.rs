//! The joiner's end of a transfer, modelled after `elasticdl`'s trainer. A joiner whose link breaks
//! dials its donor again and goes on where the link broke, or begins again with another donor.
//!
//! **Oracle:** what a joiner has fetched is a state that the donor's group has committed.

use std::net::SocketAddr;

use elasticdl::session::Session;
use elasticdl::session::header::StateRecord;
use elasticdl_proto::{Generation, WorkerId};

use super::clock::Micros;
use super::state::event::Event;
use super::state::fetch::{FETCH_PAUSE_US, Incoming, Source};
use super::state::packet::{Packet, Position, StateMessage};
use super::state::process::process_at;
use super::state::trainer::Doing;
use super::trace::trace;
use super::world::World;

impl World {
    /// Takes the next message from `donor`; dials `donor` first if there is no link to it.
    pub(super) fn fetch(&mut self, p: usize, donor: WorkerId, address: SocketAddr) {
        let trainer = &mut self.processes[p].trainer;
        let has_state = trainer.state().is_some();
        drop(trainer.incoming.take_if(|i| i.donor != donor || (i.is_complete() && !has_state)));
        let source = trainer.source.as_ref();
        if source.is_none_or(|source| source.donor != donor) {
            self.drop_source(p);
            let (host, last_received) = (process_at(address) + 1, self.clock.now());
            let link = self.net.open(p + 1, host, false);
            let source = Source {
                donor,
                host,
                link,
                introduced: false,
                last_received,
                has_sent_state: false,
            };
            self.processes[p].trainer.source = Some(source);
            self.send(link, p + 1, Packet::Dial);
        }
        self.continue_fetch(p);
    }

    /// A packet has arrived, or one is overdue.
    pub(super) fn continue_fetch(&mut self, p: usize) {
        let now = self.clock.now();
        let Some(source) = &mut self.processes[p].trainer.source else {
            return self.turn_later(p);
        };
        let link = source.link;
        let packet = self.net.take(link, p + 1);
        if packet.is_some() {
            source.last_received = now;
        }
        match packet {
            Some(Packet::Accepted) => {
                source.introduced = true;
                let position = self.fetch_position(p);
                let Some(from) = self.processes[p].worker else { return };
                let request = Packet::Introduction { generation: None, from, position };
                self.send(link, p + 1, request);
                self.turn_later(p);
            }
            Some(Packet::StateMessage(message)) => {
                source.has_sent_state = true;
                self.apply_state_message(p, &message);
            }
            Some(_) => self.fetch_link_broke(p, "the donor ended the link"),
            None => self.wait_for_source(p),
        }
    }

    fn wait_for_source(&mut self, p: usize) {
        let now = self.clock.now();
        let Some(source) = &mut self.processes[p].trainer.source else { return };
        let silence_max = if source.introduced { SILENCE_MAX_US } else { DIAL_LIMIT_US };
        let donor = source.host - 1;
        // A live donor sends keep-alives; before its first message it may be within a long step.
        let is_responsive = !self.net.is_cut(source.host, p + 1) && !self.processes[donor].paused;
        let Some(source) = &mut self.processes[p].trainer.source else { return };
        if source.has_sent_state && is_responsive {
            source.last_received = now;
        }
        if (source.has_sent_state || !source.introduced) && now > source.last_received + silence_max
        {
            return self.fetch_link_broke(p, "the donor is silent");
        }
        let introduced = source.introduced;
        self.processes[p].trainer.doing = Doing::Fetching;
        if introduced && !self.processes[p].inbox.is_empty() {
            return self.wake_trainer(p);
        }
        let ticket = self.processes[p].trainer.ticket();
        self.clock.after(silence_max / 2 + 1, Event::Trainer { p, ticket });
    }

    fn apply_state_message(&mut self, p: usize, message: &StateMessage) {
        match message {
            StateMessage::Part { from, parameters } => self.take_part(p, *from, parameters),
            StateMessage::Start { generation, record, from, lineage } => {
                self.begin_snapshot(p, (*generation, *lineage), record, *from);
            }
            StateMessage::Result { generation, headers, sum, .. } => {
                let trainer = &mut self.processes[p].trainer;
                let Some(session) = &mut trainer.session else { return };
                trainer.model.reduced.clone_from(sum);
                if !session.result_fetched(*generation, headers.clone(), true) {
                    return self.fetch_broke(p, "the donor sent the result of another step");
                }
            }
            StateMessage::CaughtUp | StateMessage::End { .. } => {
                let Some(session) = &mut self.processes[p].trainer.session else { return };
                match message {
                    StateMessage::End { generation } => session.fetch_ended(*generation),
                    _ => {
                        session.fetch_resumed();
                        session.caught_up();
                    }
                }
            }
        }
        self.turn_later(p);
    }

    /// A snapshot begins, or the rest of one.
    fn begin_snapshot(
        &mut self,
        p: usize,
        (generation, lineage): (Generation, u64),
        record: &StateRecord,
        from: usize,
    ) {
        let trainer = &mut self.processes[p].trainer;
        let (Some(session), Some(source)) = (&mut trainer.session, &trainer.source) else { return };
        if trainer.incoming.as_ref().is_some_and(|i| i.is_continued_by(record, from)) {
            return session.fetch_resumed();
        }
        let (donor, len) = (source.donor, trainer.model.parameters.len());
        let record = record.clone();
        trainer.incoming = Some(Incoming { donor, generation, record, lineage, len, received: 0 });
        session.fetch_begins();
        if from != 0 {
            let what = format!("the snapshot of worker {donor} begins at {from}");
            self.violate(format!("{}: {what}", self.name(p)));
        }
    }

    fn take_part(&mut self, p: usize, from: usize, part: &[u8]) {
        let trainer = &mut self.processes[p].trainer;
        let (Some(session), Some(incoming)) = (&mut trainer.session, &mut trainer.incoming) else {
            return;
        };
        if from != incoming.received {
            let what = format!("a part from {from} on, not {}", incoming.received);
            return self.violate(format!("{}: gets {what}", self.name(p)));
        }
        trainer.model.parameters[from..from + part.len()].copy_from_slice(part);
        incoming.received += part.len();
        session.fetch_advanced();
        if incoming.is_complete() {
            trainer.model.lineage = incoming.lineage;
            let is_wrong = trainer.model.is_wrong();
            self.oracle.is_void |= is_wrong;
            let is_consistent = session.install(incoming.record.clone(), None);
            session.fetched(incoming.generation);
            let (generation, step) = (incoming.generation, incoming.record.step);
            let is_committed =
                self.oracle.has_committed(generation.0, step, trainer.model.digest());
            self.oracle.coverage.fetched += 1;
            if !is_consistent || !(is_committed || is_wrong) {
                let what = format!("has fetched a state of step {step}");
                return self.violate(format!("{}: {what} that no rank has", self.name(p)));
            }
        }
        self.report_position(p);
    }

    /// Tells the donor what has arrived and is applied.
    pub(super) fn report_position(&mut self, p: usize) {
        let link = self.processes[p].trainer.source.as_ref().map(|source| source.link);
        if let (Some(link), Some(position)) = (link, self.fetch_position(p)) {
            self.send(link, p + 1, Packet::Position(position));
        }
    }

    fn fetch_position(&self, p: usize) -> Option<Position> {
        let trainer = &self.processes[p].trainer;
        let step = trainer.state().map_or(0, |state| state.step);
        trainer.incoming.as_ref().map(|incoming| incoming.position(step))
    }

    /// The link to the donor broke: the transfer goes on over another one, if that makes sense.
    fn fetch_link_broke(&mut self, p: usize, why: &str) {
        let trainer = &mut self.processes[p].trainer;
        let session = trainer.session.as_mut().filter(|_| trainer.incoming.is_some());
        if !session.is_some_and(Session::fetch_interrupted) {
            return self.fetch_broke(p, why);
        }
        trace!(self, "{}: dials its donor again, {why}", self.name(p));
        self.oracle.coverage.fetches_interrupted += 1;
        self.rest(p);
    }

    fn fetch_broke(&mut self, p: usize, why: &str) {
        trace!(self, "{}: the fetch failed, {why}", self.name(p));
        self.processes[p].trainer.incoming = None;
        if let Some(session) = &mut self.processes[p].trainer.session {
            session.fetch_broke();
        }
        self.rest(p);
    }

    /// Pauses before the next dial.
    fn rest(&mut self, p: usize) {
        self.drop_source(p);
        // A message of the master that arrives meanwhile may be needed for the next attempt.
        self.processes[p].trainer.doing = Doing::Resting;
        if !self.processes[p].inbox.is_empty() {
            return self.wake_trainer(p);
        }
        let ticket = self.processes[p].trainer.ticket();
        self.clock.after(FETCH_PAUSE_US, Event::Trainer { p, ticket });
    }

    pub(super) fn drop_source(&mut self, p: usize) {
        if let Some(source) = self.processes[p].trainer.source.take() {
            self.shut(source.link, p + 1);
        }
    }

    /// Whether `p` fetches the state, or has just fetched it.
    pub(super) fn is_joining(&self, p: usize) -> bool {
        let trainer = &self.processes[p].trainer;
        trainer.source.is_some() && trainer.session.as_ref().and_then(Session::group_rank).is_none()
    }
}

/// How long a joiner tolerates silence of a donor that has begun to send, whatever the worker
/// timeout is.
const SILENCE_MAX_US: Micros = 30_000_000;
const DIAL_LIMIT_US: Micros = 2_000_000;
