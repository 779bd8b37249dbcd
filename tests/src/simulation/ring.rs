//! A worker's end of all links: dials, and the fence; what `elasticdl_collective`'s `endpoint`,
//! `porter` and `fence` do with sockets.
//!
//! * A ring is two links: one dialled to the next member, one taken from the previous member's
//!   dial. Who dials says its name and generation; what is older than the fence is refused at the
//!   door, what is newer waits.
//! * The fence ends the links of older generations at once; the news runs around the ring.

use std::time::Duration;

use elasticdl_collective::schedule::Seat;
use elasticdl_master::job::Stall;
use elasticdl_proto::{Generation, WorkerId};
use elasticdl_worker::core::header::StateRecord;
use elasticdl_worker::core::session::Membership;
use elasticdl_worker::core::swap::Build;

use super::clock::Micros;
use super::network::{LinkId, Packet};
use super::process::process_at;
use super::story::tell;
use super::trainer::Doing;
use super::world::{Event, World};

/// The listener and the fence of one process.
#[derive(Debug, Default)]
pub(super) struct Endpoint {
    pub(super) open: bool,
    /// What is below is over.
    floor: u64,
    /// The newest generation that a group was begun for.
    newest: u64,
    /// The last dial that was handed over.
    taken: Option<(u64, WorkerId)>,
    /// Dials that nobody has come for yet.
    parked: Vec<(u64, WorkerId, LinkId)>,
}

/// The ring of one generation, or the attempt to build it.
#[derive(Debug)]
pub(super) struct Ring {
    generation: u64,
    members: Vec<WorkerId>,
    pub(super) seat: Seat,
    pub(super) next: Option<LinkId>,
    pub(super) prev: Option<LinkId>,
    introduced: bool,
    /// When the next member was dialled.
    dialled: Micros,
    /// Of the next operation.
    pub(super) sequence: u64,
    pub(super) failed: bool,
    pub(super) aborted: bool,
    /// How far the group's communicator is on this rank.
    pub(super) nccl: Build,
    /// A state's record that has come, while the parameters have not. Oracles' era beside it.
    pub(super) record: Option<(StateRecord, u64)>,
}

/// Where a rank waits for its neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiting {
    generation: u64,
    operation: u64,
    received: u64,
    sent: u64,
    since: Micros,
}

/// Why an operation stopped.
pub(super) enum Fault {
    Aborted,
    Nccl,
    Next,
    Prev,
}

impl Endpoint {
    fn oldest_welcome(&self) -> u64 {
        self.floor.max(self.newest)
    }
}

impl Ring {
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn world(&self) -> usize {
        self.seat.world
    }

    pub(super) fn members(&self) -> &[WorkerId] {
        &self.members
    }

    pub(super) fn neighbour(&self, fault: &Fault) -> Option<WorkerId> {
        let Seat { rank, world } = self.seat;
        match fault {
            Fault::Aborted | Fault::Nccl => None,
            Fault::Next => Some(self.members[(rank + 1) % world]),
            Fault::Prev => Some(self.members[(rank + world - 1) % world]),
        }
    }
}

impl World {
    // ---- the door ----

    /// A dialler has said who it is.
    pub(super) fn on_porter(&mut self, p: usize, link: LinkId) {
        let Some(Packet::Introduction { generation, from }) = self.net.take(link, p + 1) else {
            return;
        };
        let Some(generation) = generation else {
            return match self.processes[p].endpoint.open {
                true => self.on_visitor(p, from, link),
                false => self.shut(link, p + 1),
            };
        };
        let endpoint = &mut self.processes[p].endpoint;
        let is_taken = endpoint.taken == Some((generation, from));
        if !endpoint.open || generation < endpoint.oldest_welcome() || is_taken {
            return self.shut(link, p + 1);
        }
        let before =
            endpoint.parked.iter().position(|&(g, member, _)| (g, member) == (generation, from));
        let given_up = before.map(|at| endpoint.parked.remove(at).2);
        endpoint.parked.push((generation, from, link));
        self.net.settle(link);
        if let Some(link) = given_up {
            self.shut(link, p + 1);
        }
        if matches!(self.processes[p].trainer.doing, Doing::Connecting) {
            self.wake_trainer(p);
        }
    }

    fn drop_parked_before(&mut self, p: usize, generation: u64) {
        let parked = &mut self.processes[p].endpoint.parked;
        let old: Vec<LinkId> = parked.iter().filter(|d| d.0 < generation).map(|d| d.2).collect();
        parked.retain(|d| d.0 >= generation);
        old.into_iter().for_each(|link| self.shut(link, p + 1));
    }

    pub(super) fn close_endpoint(&mut self, p: usize) {
        self.processes[p].endpoint.open = false;
        self.drop_parked_before(p, u64::MAX);
    }

    /// Ends everything older than `generation`, whatever the trainer is doing.
    pub(super) fn abort_before(&mut self, p: usize, generation: u64) {
        let endpoint = &mut self.processes[p].endpoint;
        endpoint.floor = endpoint.floor.max(generation);
        let floor = endpoint.floor;
        self.drop_parked_before(p, floor);
        // Everything is over.
        if floor == u64::MAX {
            self.leave_source(p);
            self.wake_trainer(p);
        }
        if let Some(ring) = self.processes[p].trainer.ring.as_mut().filter(|r| r.generation < floor)
        {
            ring.aborted = true;
            self.shut_ring(p);
            self.wake_trainer(p);
        }
    }

    // ---- building a ring ----

    pub(super) fn connect(&mut self, p: usize, membership: &Membership) {
        self.leave_ring(p);
        self.leave_source(p);
        let generation = membership.generation.0;
        let members: Vec<WorkerId> = membership.members.iter().map(|(id, _)| *id).collect();
        self.switch_fetchers(p, membership.generation, &members);
        let process = &mut self.processes[p];
        let Some(rank) = members.iter().position(|m| Some(*m) == process.worker) else { return };
        let seat = Seat { rank, world: members.len() };
        let mut ring = Ring {
            generation,
            members,
            seat,
            next: None,
            prev: None,
            introduced: false,
            dialled: self.clock.now(),
            sequence: 0,
            failed: false,
            aborted: false,
            nccl: Build::Absent,
            record: None,
        };
        if generation < process.endpoint.oldest_welcome() {
            return self.broke(p, None, "the generation is over");
        }
        process.endpoint.newest = generation;
        if seat.world > 1 {
            let (_, address) = membership.members[(rank + 1) % seat.world];
            let link = self.net.open(p + 1, process_at(address) + 1, false);
            ring.next = Some(link);
            self.send(link, p + 1, Packet::Dial);
        }
        self.processes[p].trainer.ring = Some(ring);
        self.drop_parked_before(p, generation);
        match seat.world {
            1 => self.connected(p),
            _ => self.wait_for_answer(p),
        }
    }

    pub(super) fn go_on_connecting(&mut self, p: usize) {
        let process = &mut self.processes[p];
        let Some(ring) = &mut process.trainer.ring else { return };
        let Some(next) = ring.next else { return };
        if ring.aborted {
            return self.broke(p, None, "the generation is over");
        }
        if !ring.introduced && matches!(self.net.link(next).ends, [h, _] if h == p + 1) {
            match self.net.take(next, p + 1) {
                Some(Packet::Accepted) => {
                    ring.introduced = true;
                    let (generation, from) = (ring.generation, ring.members[ring.seat.rank]);
                    self.send(
                        next,
                        p + 1,
                        Packet::Introduction { generation: Some(generation), from },
                    );
                }
                Some(_) => {
                    let suspect = ring.neighbour(&Fault::Next);
                    return self.broke(p, suspect, "the next member refused the dial");
                }
                None => return self.wait_for_answer(p),
            }
        }
        let process = &mut self.processes[p];
        let Some(ring) = &mut process.trainer.ring else { return };
        let Some(prev) = ring.neighbour(&Fault::Prev) else { return };
        let parked = &mut process.endpoint.parked;
        if let Some(at) = parked.iter().position(|d| (d.0, d.1) == (ring.generation, prev)) {
            ring.prev = Some(parked.remove(at).2);
            process.endpoint.taken = Some((ring.generation, prev));
            return self.connected(p);
        }
        if self.net.has_ended(next, p + 1) {
            let suspect = ring.neighbour(&Fault::Next);
            return self.broke(p, suspect, "the next member ended the link");
        }
        let generation = ring.generation;
        process.trainer.doing = Doing::Connecting;
        self.wait_at(p, [generation, 0, 0, 0]);
    }

    /// A kernel answers at once, whatever its process does.
    fn wait_for_answer(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        let (Some(limit), Some(ring)) = (self.setting.spec.worker_timeout, &trainer.ring) else {
            trainer.doing = Doing::Connecting;
            return;
        };
        let due = ring.dialled + limit.as_micros() as Micros;
        match ring.neighbour(&Fault::Next) {
            Some(suspect) if self.clock.now() >= due => self.unanswered(p, suspect),
            _ => {
                trainer.doing = Doing::Connecting;
                let ticket = trainer.ticket();
                self.clock.at(due, Event::Trainer { p, ticket });
            }
        }
    }

    pub(super) fn wait_at(&mut self, p: usize, place: [u64; 4]) {
        let [generation, operation, received, sent] = place;
        let waiting = &mut self.processes[p].trainer.waiting;
        let is_same = |w: &Waiting| [w.generation, w.operation, w.received, w.sent] == place;
        if !waiting.as_ref().is_some_and(is_same) {
            let since = self.clock.now();
            *waiting = Some(Waiting { generation, operation, received, sent, since });
        }
    }

    /// How long no byte has moved for `p` in its group, if it is for longer than a beat.
    pub(super) fn stall(&self, p: usize, beat: Duration) -> Option<Stall> {
        let trainer = &self.processes[p].trainer;
        let waits = matches!(trainer.doing, Doing::Connecting | Doing::Operating(_));
        let waiting = trainer.waiting.filter(|_| waits)?;
        let since = Duration::from_micros(self.clock.now() - waiting.since);
        let Waiting { generation, operation, received, sent, .. } = waiting;
        let generation = Generation(generation);
        (since >= beat).then_some(Stall {
            generation,
            operation,
            received,
            sent,
            waits_for_next: false,
            since,
        })
    }

    fn connected(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        let generation = trainer.ring.as_ref().map_or(0, Ring::generation);
        if let Some(session) = &mut trainer.session {
            session.connected();
        }
        self.note_nccl_regrouped(p);
        tell!(self, "{}: has its links of generation {generation}", self.name(p));
        self.turn_later(p);
    }

    /// Drops the ring: peers see its end behind all that was sent.
    pub(super) fn leave_ring(&mut self, p: usize) {
        self.shut_ring(p);
        self.processes[p].trainer.ring = None;
        self.processes[p].trainer.waiting = None;
    }

    fn shut_ring(&mut self, p: usize) {
        let ring = self.processes[p].trainer.ring.as_ref();
        let links = ring.map(|ring| [ring.next, ring.prev]);
        for link in links.into_iter().flatten().flatten() {
            self.shut(link, p + 1);
        }
    }
}
