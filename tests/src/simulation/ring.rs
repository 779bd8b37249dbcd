//! A worker's end of all links: the real [`Admission`] decides which dials are refused, pending or
//! taken; around it stands what `elasticdl_collective`'s endpoint, acceptor and fence do with
//! sockets.
//!
//! * A ring is two links of each rank: one dialled to the next member, one accepted from the
//!   previous member. The dialling rank sends its id and its generation.
//! * The fence closes the links of older generations at once, and their ends propagate around the
//!   ring.

use std::time::Duration;

use elasticdl::session::transport_switch::NcclBuild;
use elasticdl_collective::testing::Purpose;
use elasticdl_collective::testing::admission::DialKey;
use elasticdl_collective::testing::schedule::RankInfo;
use elasticdl_master::job::Stall;
use elasticdl_proto::{Generation, Membership, WorkerId};

use super::clock::Micros;
use super::state::donor::Request;
use super::state::event::Event;
use super::state::network::LinkId;
use super::state::packet::Packet;
use super::state::process::{Process, process_at};
use super::state::ring::{Endpoint, Ring, TransferError, WaitPoint};
use super::state::trainer::Doing;
use super::trace::trace;
use super::world::World;

impl World {
    // ---- the acceptor ----

    /// The acceptor reads the handshake of a dialling peer.
    pub(super) fn on_acceptor(&mut self, p: usize, link: LinkId) {
        let Some(Packet::Introduction { generation, from, position }) = self.net.take(link, p + 1)
        else {
            return;
        };
        let Some(generation) = generation else {
            return if self.processes[p].endpoint.open {
                self.on_state_request(p, Request { member: from, link, position })
            } else {
                self.shut(link, p + 1)
            };
        };
        let now = Duration::from_micros(self.clock.now());
        let endpoint = &mut self.processes[p].endpoint;
        let mut dropped = endpoint.admission.expire(now);
        match endpoint.admission.admit(dial_key(generation, from), link, now) {
            Ok(replaced) => {
                dropped.extend(replaced);
                self.net.mark_established(link);
            }
            Err(_) => dropped.push(link),
        }
        self.shut_all(p, dropped);
        if matches!(self.processes[p].trainer.doing, Doing::Connecting) {
            self.wake_trainer(p);
        }
    }

    fn shut_all(&mut self, p: usize, links: Vec<LinkId>) {
        links.into_iter().for_each(|link| self.shut(link, p + 1));
    }

    /// Closes the listener and all pending dials.
    pub(super) fn close_endpoint(&mut self, p: usize) {
        let endpoint = &mut self.processes[p].endpoint;
        endpoint.open = false;
        let dropped = endpoint.admission.abort_before(u64::MAX);
        self.shut_all(p, dropped);
    }

    /// Closes all links of generations older than `generation`, whatever the trainer is doing.
    pub(super) fn abort_before(&mut self, p: usize, generation: u64) {
        let dropped = self.processes[p].endpoint.admission.abort_before(generation);
        self.shut_all(p, dropped);
        let Process { endpoint: Endpoint { admission, .. }, trainer, .. } = &mut self.processes[p];
        let is_closed = admission.is_closed();
        let aborted = trainer.ring.as_mut().filter(|ring| admission.is_aborted(ring.generation));
        let is_aborted = aborted.map(|ring| ring.aborted = true).is_some();
        // Shutdown: all generations are over.
        if is_closed {
            self.drop_source(p);
            self.wake_trainer(p);
        }
        if is_aborted {
            self.shut_ring(p);
            self.wake_trainer(p);
        }
    }

    // ---- building a ring ----

    pub(super) fn connect(&mut self, p: usize, membership: &Membership) {
        self.leave_ring(p);
        self.drop_source(p);
        self.processes[p].trainer.incoming = None;
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
            lineage: 0,
        };
        let Ok(dropped) = process.endpoint.admission.begin(generation) else {
            return self.broke(p, None, "the generation is over");
        };
        if seat.world > 1 {
            let (_, address) = membership.members[(rank + 1) % seat.world];
            let link = self.net.open(p + 1, process_at(address) + 1, false);
            ring.next = Some(link);
            self.send(link, p + 1, Packet::Dial);
        }
        self.processes[p].trainer.ring = Some(ring);
        self.shut_all(p, dropped);
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
                    let generation = Some(generation);
                    let dial = Packet::Introduction { generation, from, position: None };
                    self.send(next, p + 1, dial);
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
        let taken = process.endpoint.admission.take(dial_key(ring.generation, prev));
        if taken.is_some() {
            ring.prev = taken;
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

/// Key of the dial of `from` for the ring of `generation`.
fn dial_key(generation: u64, from: WorkerId) -> DialKey {
    DialKey { generation, member: from.0, purpose: Purpose::Ring }
}
