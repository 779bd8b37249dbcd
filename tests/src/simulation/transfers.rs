//! Links between donors and joiners, and the start of donors' threads.

use std::io;
use std::io::ErrorKind::{TimedOut, UnexpectedEof};
use std::mem;
use std::rc::Rc;

use elasticdl_collective::{Member, Position};

use super::clock::Micros;
use super::state::network::LinkId;
use super::state::packet::{Packet, StateMessage};
use super::state::process::{Process, process_at};
use super::state::thread::{Doing, Source, StateRequest, TRAINER, ThreadId};
use super::trace::trace;
use super::world::World;

impl World {
    // ---- the donor ----

    /// A joiner requests the state, or the rest of it. A request replaces an earlier one of the
    /// same joiner, whose link is closed.
    pub(super) fn on_state_request(&mut self, p: usize, request: StateRequest) {
        let requests = Rc::clone(&self.processes[p].trainer.requests);
        let mut requests = requests.borrow_mut();
        let former = requests.iter().position(|other| other.member == request.member);
        let former = former.and_then(|at| requests.remove(at));
        requests.push_back(request);
        if let Some(StateRequest { link, .. }) = former {
            self.shut(link, p + 1);
        }
    }

    /// Starts a thread of a donor: one that copies the state, or one that serves a joiner.
    pub(super) fn spawn(&mut self, p: usize, name: &str, work: Box<dyn FnOnce() + Send>) {
        let number = self.start_thread(p, work);
        let Process { threads, trainer, .. } = &mut self.processes[p];
        (threads[number].lineage, threads[number].links) = (trainer.lineage, 0);
        if name == "donor"
            && let (Some((generation, _)), Some(state)) = (trainer.seen.group, trainer.state())
        {
            let step = state.step;
            trace!(self, "{}: serves a joiner the state of step {step}", self.name(p));
            self.check_served_step(p, generation, step);
        }
    }

    /// A donor's thread serves its joiner over a link, the first one or another.
    pub(super) fn serve(&mut self, ThreadId { p, number }: ThreadId) {
        let thread = &mut self.processes[p].threads[number];
        thread.links += 1;
        self.oracle.coverage.fetches_resumed += u64::from(thread.links > 1);
    }

    /// The newest position that the joiner has reported on `link` since the last call.
    pub(super) fn take_positions(
        &mut self,
        p: usize,
        link: LinkId,
    ) -> io::Result<Option<Position>> {
        let mut newest = None;
        while !self.net.has_ended(link, p + 1)
            && let Some(packet) = self.net.take(link, p + 1)
        {
            if let Packet::Position(position) = packet {
                newest = Some(position);
            }
        }
        if self.net.has_ended(link, p + 1) { Err(UnexpectedEof.into()) } else { Ok(newest) }
    }

    /// A donor's thread sends a message, which takes some time.
    pub(super) fn send_state(
        &mut self,
        thread: ThreadId,
        link: LinkId,
        mut message: StateMessage,
    ) -> io::Result<()> {
        let ThreadId { p, number } = thread;
        if self.net.has_ended(link, p + 1) {
            return Err(UnexpectedEof.into());
        }
        message.lineage = self.processes[p].threads[number].lineage;
        self.send(link, p + 1, Packet::StateMessage(Rc::new(message)));
        let span = self.rng.between(5, SEND_US_MAX);
        self.busy(thread, Doing::Busy, span);
        Ok(())
    }

    // ---- the joiner ----

    /// Dials a donor, `again` if a link to it broke.
    pub(super) fn dial_donor(&mut self, p: usize, donor: Member, again: bool) -> LinkId {
        self.oracle.coverage.fetches_interrupted += u64::from(again);
        let link = self.net.open(p + 1, process_at(donor.address) + 1, false);
        let snapshot = mem::take(&mut self.processes[p].trainer.snapshot);
        let snapshot = snapshot.filter(|_| again);
        let source = Source { link, received_at: None, is_closed: false, snapshot };
        self.processes[p].trainer.source = Some(source);
        self.send(link, p + 1, Packet::Dial);
        link
    }

    /// Requests the state once the donor's kernel has answered. `Err(None)`: it has not until the
    /// time `until`.
    pub(super) fn dialled_donor(
        &mut self,
        p: usize,
        until: Micros,
        position: Option<Position>,
    ) -> Option<Result<(), Option<io::Error>>> {
        let link = self.processes[p].trainer.source.as_ref()?.link;
        let answer = match self.net.take(link, p + 1) {
            Some(Packet::Accepted) => {
                let from = self.processes[p].worker?;
                let request = Packet::Introduction { generation: None, from, position };
                self.send(link, p + 1, request);
                return Some(Ok(()));
            }
            Some(_) => Some(UnexpectedEof.into()),
            None if self.clock.now() >= until => None,
            None => {
                self.processes[p].threads[TRAINER].doing = Doing::Fetching;
                self.continue_at(ThreadId { p, number: TRAINER }, until);
                return None;
            }
        };
        self.drop_source(p, link);
        Some(Err(answer))
    }

    /// The donor's next message; `Ok(None)` if messages of the master wait meanwhile.
    pub(super) fn next_state_message(
        &mut self,
        p: usize,
        idle_us: Micros,
    ) -> Option<io::Result<Option<Rc<StateMessage>>>> {
        let now = self.clock.now();
        let trainer = &mut self.processes[p].trainer;
        let Some(source) = trainer.source.as_mut().filter(|source| !source.is_closed) else {
            return Some(Err(UnexpectedEof.into()));
        };
        let is_idle = source.received_at.is_some_and(|at| now > at + idle_us);
        while let Some(packet) = self.net.take(source.link, p + 1) {
            let Packet::StateMessage(message) = packet else {
                return Some(Err(UnexpectedEof.into()));
            };
            source.received_at = Some(now);
            if message.kind == KIND_STATE {
                source.snapshot = Some((message.generation, message.lineage));
            }
            if message.kind != KIND_HEARTBEAT {
                return Some(Ok(Some(message)));
            }
        }
        if is_idle {
            return Some(Err(TimedOut.into()));
        }
        if mem::take(&mut trainer.news) > 0 {
            return Some(Ok(None));
        }
        let overdue = source.received_at.map(|at| at + idle_us + 1);
        self.processes[p].threads[TRAINER].doing = Doing::Fetching;
        if let Some(overdue) = overdue {
            self.continue_at(ThreadId { p, number: TRAINER }, overdue);
        }
        None
    }

    /// Tells the donor what has arrived and is applied.
    pub(super) fn report_position(&mut self, p: usize, position: Position) {
        if let Some(link) = self.processes[p].trainer.source.as_ref().map(|source| source.link) {
            self.send(link, p + 1, Packet::Position(position));
        }
    }

    /// Closes the link to the donor, of which the trainer learns.
    pub(super) fn close_source(&mut self, p: usize) {
        if let Some(source) = &mut self.processes[p].trainer.source {
            source.is_closed = true;
            let link = source.link;
            self.shut(link, p + 1);
        }
    }

    /// The trainer has dropped its link to a donor.
    pub(super) fn drop_source(&mut self, p: usize, link: LinkId) {
        let trainer = &mut self.processes[p].trainer;
        if let Some(source) = trainer.source.take_if(|source| source.link == link) {
            trainer.snapshot = source.snapshot;
        }
        self.shut(link, p + 1);
    }

    /// Whether `p` fetches the state, or has just fetched it.
    pub(super) fn is_joining(&self, p: usize) -> bool {
        let trainer = &self.processes[p].trainer;
        trainer.source.is_some() && trainer.seen.group.is_none()
    }
}

/// Kinds of messages, as the shipped donor numbers them.
const KIND_HEARTBEAT: u32 = 0;
const KIND_STATE: u32 = 1;

/// Maximum time from one message to a joiner to the next.
const SEND_US_MAX: Micros = 400;
