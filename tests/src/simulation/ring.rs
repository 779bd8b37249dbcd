//! A worker's end of all links: dials, the acceptor and the fence, modelled after what
//! `elasticdl_collective`'s endpoint, acceptor and fence do with sockets.
//!
//! * A ring is two links of each rank: one dialled to the next member, one accepted from the
//!   previous member. The dialling rank sends its id and its generation. A dial of a generation
//!   below the fence is refused; one of a newer generation waits.
//! * The fence closes the links of older generations at once, and their ends propagate around the
//!   ring.

use std::time::Duration;

use elasticdl::core::header::StateRecord;
use elasticdl::core::transport_switch::NcclBuild;
use elasticdl_collective::testing::schedule::RankInfo;
use elasticdl_master::job::Stall;
use elasticdl_proto::{Generation, Membership, WorkerId};

use super::clock::Micros;
use super::network::{LinkId, Packet};
use super::process::process_at;
use super::trace::trace;
use super::trainer::Doing;
use super::world::{Event, World};

/// The listener and the fence of one process.
#[derive(Debug, Default)]
pub(super) struct Endpoint {
    pub(super) open: bool,
    /// Generations below this one are over.
    floor: u64,
    /// The newest generation that a group was begun for.
    newest: u64,
    /// The last dial that was handed to the trainer.
    taken: Option<(u64, WorkerId)>,
    /// Dials that the trainer has not asked for yet.
    pending_dials: Vec<(u64, WorkerId, LinkId)>,
}

/// The ring of one generation, or the attempt to build it.
#[derive(Debug)]
pub(super) struct Ring {
    generation: u64,
    members: Vec<WorkerId>,
    pub(super) seat: RankInfo,
    pub(super) next: Option<LinkId>,
    pub(super) prev: Option<LinkId>,
    introduced: bool,
    /// Time at which the next member was dialled.
    dialled: Micros,
    /// Sequence number of the next operation.
    pub(super) sequence: u64,
    pub(super) failed: bool,
    pub(super) aborted: bool,
    /// State of the group's communicator on this rank.
    pub(super) nccl: NcclBuild,
    /// Record of a state whose parameters have not come yet, with the oracle's lineage.
    pub(super) record: Option<(StateRecord, u64)>,
}

/// The point at which a rank waits for its neighbours.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitPoint {
    generation: u64,
    operation: u64,
    received: u64,
    sent: u64,
    since: Micros,
}

/// Why an operation stopped.
pub(super) enum TransferError {
    Aborted,
    Nccl,
    Next,
    Prev,
}

impl Endpoint {
    fn oldest_accepted(&self) -> u64 {
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

    pub(super) fn neighbour(&self, error: &TransferError) -> Option<WorkerId> {
        let RankInfo { rank, world } = self.seat;
        match error {
            TransferError::Aborted | TransferError::Nccl => None,
            TransferError::Next => Some(self.members[(rank + 1) % world]),
            TransferError::Prev => Some(self.members[(rank + world - 1) % world]),
        }
    }
}

impl World {
    // ---- the acceptor ----

    /// The acceptor reads the handshake of a dialling peer.
    pub(super) fn on_acceptor(&mut self, p: usize, link: LinkId) {
        let Some(Packet::Introduction { generation, from }) = self.net.take(link, p + 1) else {
            return;
        };
        let Some(generation) = generation else {
            return if self.processes[p].endpoint.open {
                self.on_state_request(p, from, link)
            } else {
                self.shut(link, p + 1)
            };
        };
        let endpoint = &mut self.processes[p].endpoint;
        let is_taken = endpoint.taken == Some((generation, from));
        if !endpoint.open || generation < endpoint.oldest_accepted() || is_taken {
            return self.shut(link, p + 1);
        }
        let before = endpoint
            .pending_dials
            .iter()
            .position(|&(g, member, _)| (g, member) == (generation, from));
        let given_up = before.map(|at| endpoint.pending_dials.remove(at).2);
        endpoint.pending_dials.push((generation, from, link));
        self.net.mark_established(link);
        if let Some(link) = given_up {
            self.shut(link, p + 1);
        }
        if matches!(self.processes[p].trainer.doing, Doing::Connecting) {
            self.wake_trainer(p);
        }
    }

    fn drop_dials_before(&mut self, p: usize, generation: u64) {
        let pending_dials = &mut self.processes[p].endpoint.pending_dials;
        let old: Vec<LinkId> =
            pending_dials.iter().filter(|d| d.0 < generation).map(|d| d.2).collect();
        pending_dials.retain(|d| d.0 >= generation);
        old.into_iter().for_each(|link| self.shut(link, p + 1));
    }

    pub(super) fn close_endpoint(&mut self, p: usize) {
        self.processes[p].endpoint.open = false;
        self.drop_dials_before(p, u64::MAX);
    }

    /// Closes all links of generations older than `generation`, whatever the trainer is doing.
    pub(super) fn abort_before(&mut self, p: usize, generation: u64) {
        let endpoint = &mut self.processes[p].endpoint;
        endpoint.floor = endpoint.floor.max(generation);
        let floor = endpoint.floor;
        self.drop_dials_before(p, floor);
        // Shutdown: all generations are over.
        if floor == u64::MAX {
            self.drop_source(p);
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
        self.drop_source(p);
        let generation = membership.generation.0;
        let members: Vec<WorkerId> = membership.members.iter().map(|(id, _)| *id).collect();
        self.switch_fetchers(p, membership.generation, &members);
        let process = &mut self.processes[p];
        let Some(rank) = members.iter().position(|m| Some(*m) == process.worker) else { return };
        let seat = RankInfo { rank, world: members.len() };
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
            nccl: NcclBuild::Absent,
            record: None,
        };
        if generation < process.endpoint.oldest_accepted() {
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
        self.drop_dials_before(p, generation);
        match seat.world {
            1 => self.connected(p),
            _ => self.wait_for_answer(p),
        }
    }

    pub(super) fn continue_connect(&mut self, p: usize) {
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
                    let suspect = ring.neighbour(&TransferError::Next);
                    return self.broke(p, suspect, "the next member refused the dial");
                }
                None => return self.wait_for_answer(p),
            }
        }
        let process = &mut self.processes[p];
        let Some(ring) = &mut process.trainer.ring else { return };
        let Some(prev) = ring.neighbour(&TransferError::Prev) else { return };
        let pending_dials = &mut process.endpoint.pending_dials;
        if let Some(at) = pending_dials.iter().position(|d| (d.0, d.1) == (ring.generation, prev)) {
            ring.prev = Some(pending_dials.remove(at).2);
            process.endpoint.taken = Some((ring.generation, prev));
            return self.connected(p);
        }
        if self.net.has_ended(next, p + 1) {
            let suspect = ring.neighbour(&TransferError::Next);
            return self.broke(p, suspect, "the next member ended the link");
        }
        let generation = ring.generation;
        process.trainer.doing = Doing::Connecting;
        self.wait_at(p, [generation, 0, 0, 0]);
    }

    /// Waits until the dialled host's kernel answers, which it does at once, whatever its process
    /// does.
    fn wait_for_answer(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        let (Some(limit), Some(ring)) = (self.setting.spec.worker_timeout, &trainer.ring) else {
            trainer.doing = Doing::Connecting;
            return;
        };
        let due = ring.dialled + limit.as_micros() as Micros;
        match ring.neighbour(&TransferError::Next) {
            Some(suspect) if self.clock.now() >= due => self.unanswered(p, suspect),
            _ => {
                trainer.doing = Doing::Connecting;
                let ticket = trainer.ticket();
                self.clock.at(due, Event::Trainer { p, ticket });
            }
        }
    }

    pub(super) fn wait_at(&mut self, p: usize, point: [u64; 4]) {
        let [generation, operation, received, sent] = point;
        let waiting = &mut self.processes[p].trainer.waiting;
        let is_same = |w: &WaitPoint| [w.generation, w.operation, w.received, w.sent] == point;
        if !waiting.as_ref().is_some_and(is_same) {
            let since = self.clock.now();
            *waiting = Some(WaitPoint { generation, operation, received, sent, since });
        }
    }

    /// The time for which no byte has moved for `p` in its group, if that is at least one heartbeat
    /// interval.
    pub(super) fn stall(&self, p: usize, heartbeat: Duration) -> Option<Stall> {
        let trainer = &self.processes[p].trainer;
        let waits = matches!(trainer.doing, Doing::Connecting | Doing::Operating(_));
        let waiting = trainer.waiting.filter(|_| waits)?;
        let since = Duration::from_micros(self.clock.now() - waiting.since);
        let WaitPoint { generation, operation, received, sent, .. } = waiting;
        let generation = Generation(generation);
        (since >= heartbeat).then_some(Stall {
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
        trace!(self, "{}: has its links of generation {generation}", self.name(p));
        self.turn_later(p);
    }

    /// Closes the ring: the peers see its end after everything that was sent.
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
