//! The state of a world as a number, so that a search notices where it has been.
//!
//! Two worlds are in the same state if everything that decides what happens next is the same, apart
//! from times: the job, the sessions, what their threads wait for, the packets on links, which
//! events are due in which order, and what the oracle has seen. Threads between two turns of a
//! trainer are at the same place if they had the same session at the begin of the turn, and as many
//! answers since.

use std::sync::atomic::Ordering;

use super::state::event::Event;
use super::state::network::{Direction, Link, LinkId};
use super::state::packet::Packet;
use super::state::process::Process;
use super::state::thread::{Doing, Thread};
use super::timeless::Timeless;
use super::world::World;

impl World {
    /// A number that is the same in equal states.
    pub(super) fn identity(&self) -> u64 {
        let mut all = Timeless::default();
        self.add_master(&mut all);
        for p in 0..self.processes.len() {
            self.add_process(p, &mut all);
        }
        for link in 0..self.net.links.len() {
            if self.is_in_use(link) {
                all.add(&self.link_name(link));
                self.net.links[link].directions.iter().for_each(|one| add_direction(one, &mut all));
            }
        }
        all.add(&self.net.cuts);
        self.add_due(&mut all);
        self.add_oracle(&mut all);
        all.number()
    }

    fn add_master(&self, all: &mut Timeless) {
        let master = &self.master;
        all.add(&master.job);
        let names = |links: &mut dyn Iterator<Item = LinkId>| {
            links.map(|link| self.link_name(link)).collect::<Vec<_>>()
        };
        all.add(&names(&mut master.peers.keys().copied()));
        all.add(&names(&mut master.inputs.iter().copied()));
        all.add(&(
            master.is_alive,
            master.woken,
            master.paused,
            master.deferred,
            master.incarnation,
        ));
        all.add(&(&master.ended, &master.commands, master.dies_after, master.records.len()));
        all.add(&(self.fault_plan.links_may_break, self.fault_plan.unhealed));
        all.add(&self.checkpoint_store.complete.keys());
        all.add(&self.checkpoint_store.parts.keys());
    }

    fn add_process(&self, p: usize, all: &mut Timeless) {
        let process = &self.processes[p];
        all.add(&(process.launch, &process.exit, process.is_kill_requested));
        if !process.is_alive() {
            return;
        }
        let Process { paused, is_degraded, lost_contact, is_adopted, is_unknown, .. } = process;
        all.add(&(paused, is_degraded, lost_contact, is_adopted, is_unknown, process.broke_in));
        all.add(&(process.worker, process.control, process.woken, &process.control_state));
        all.add(&process.returned_late);
        all.add(&(&process.outbox, &process.endpoint, process.deferred.len()));
        all.add(&process.stream.map(|link| self.link_name(link)));
        let trainer = &process.trainer;
        all.add(&(trainer.is_hung, trainer.told, trainer.holds_state.load(Ordering::Relaxed)));
        all.add(&(trainer.identity, trainer.seen.digest, trainer.lineage, trainer.ended));
        all.add(&(trainer.has_created, trainer.has_installed, trainer.has_broken));
        all.add(&(trainer.committed_in, trainer.snapshot, &trainer.part_written));
        all.add(&trainer.requests.borrow().iter().map(|r| r.member).collect::<Vec<_>>());
        all.add(&trainer.completions.borrow().len());
        if let Some(ring) = &trainer.ring {
            all.add(&(ring.generation, ring.sequence, ring.aborted, ring.introduced));
            all.add(&[ring.next, ring.prev].map(|link| link.map(|link| self.link_name(link))));
        }
        if let Some(source) = &trainer.source {
            all.add(&(self.link_name(source.link), source.is_closed, source.snapshot));
        }
        process.threads.iter().for_each(|thread| add_thread(thread, all));
    }

    /// The events that are due, in their order.
    fn add_due(&self, all: &mut Timeless) {
        for event in self.clock.in_order() {
            match *event {
                Event::Heartbeat { .. } | Event::InjectFault | Event::KeepAlive { .. } => {}
                Event::Arrive { link, to } => all.add(&(self.link_name(link), to)),
                Event::Acceptor { p, link } => all.add(&(p, self.link_name(link))),
                Event::Thread { thread, .. } if self.is_effective(thread.p, event) => {
                    all.add(&thread);
                }
                Event::Thread { .. } => {}
                _ if event.runs_in().is_some_and(|p| !self.is_effective(p, event)) => {}
                _ => all.add(event),
            }
        }
    }

    fn add_oracle(&self, all: &mut Timeless) {
        let oracle = &self.oracle;
        all.add(&(&oracle.newest, oracle.generation, &oracle.gone, &oracle.lost));
        all.add(&(&oracle.finals, &oracle.shut_down, oracle.failures_max, oracle.suspended));
        all.add(&(&oracle.stable, oracle.is_master_stale, oracle.may_be_outdated));
        let newest = oracle.histories.iter().next_back();
        all.add(&newest.map(|(number, history)| (number, &history.base, &history.commits)));
    }

    /// Whether anything on the link may still reach a process.
    fn is_in_use(&self, link: LinkId) -> bool {
        let Link { directions, .. } = self.net.link(link);
        let is_over =
            |one: &Direction| one.shut && one.in_flight.is_empty() && one.arrived.is_empty();
        !directions.iter().all(is_over) && {
            let ends = self.net.link(link).ends;
            !ends
                .iter()
                .all(|host| host.checked_sub(1).is_some_and(|p| !self.processes[p].is_alive()))
        }
    }

    /// The hosts of a link, and its number among those between them that are in use.
    fn link_name(&self, link: LinkId) -> ([usize; 2], bool, usize) {
        let Link { ends, is_control, .. } = self.net.link(link);
        let is_alike = |&other: &LinkId| {
            let other_link = self.net.link(other);
            (other_link.ends, other_link.is_control) == (*ends, *is_control)
                && self.is_in_use(other)
        };
        (*ends, *is_control, (0..link).filter(is_alike).count())
    }
}

fn add_thread(thread: &Thread, all: &mut Timeless) {
    let Thread { doing, woken, lineage, links, answers, .. } = thread;
    all.add(&(woken, lineage, links, answers));
    match doing {
        Doing::Operating(operation) => {
            all.add(&(operation.what, operation.sequence, operation.received, operation.sent));
        }
        other => all.add(other),
    }
}

fn add_direction(direction: &Direction, all: &mut Timeless) {
    all.add(&(direction.shut, direction.stalled));
    for packet in direction.in_flight.iter().chain(&direction.arrived) {
        match packet {
            Packet::Frame(frame) => {
                let bytes = frame.note.as_ref().map(|note| &note.bytes);
                let body: Vec<u32> = frame.body.iter().map(|float| float.to_bits()).collect();
                all.add(&(frame.generation, frame.sequence, frame.kind, frame.step, bytes, body));
            }
            other => all.add(other),
        }
    }
    all.add(&direction.in_flight.len());
}
