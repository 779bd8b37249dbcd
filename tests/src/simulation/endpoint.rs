//! A worker's end of all links: the real [`Admission`] decides which dials are refused, pending or
//! taken; around it stands what `elasticdl_collective`'s endpoint, acceptor and fence do with
//! sockets.
//!
//! * A ring is two links of each rank: one dialled to the next member, one accepted from the
//!   previous member. The dialling rank sends its id and its generation.
//! * The fence closes the links of older generations at once, and their ends propagate around the
//!   ring.

use std::io::ErrorKind::UnexpectedEof;
use std::time::Duration;

use elasticdl::session::transport_switch::NcclBuild;
use elasticdl_collective::testing::Purpose;
use elasticdl_collective::testing::admission::DialKey;
use elasticdl_collective::testing::schedule::RankInfo;
use elasticdl_collective::{CollectiveError, GroupSpec};
use elasticdl_master::job::Stall;
use elasticdl_proto::{Generation, WorkerId};

use super::clock::Micros;
use super::state::endpoint::{Endpoint, Ring, TransferError, WaitPoint};
use super::state::network::LinkId;
use super::state::packet::Packet;
use super::state::process::{Process, process_at};
use super::state::thread::{Doing, StateRequest, TRAINER, ThreadId};
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
                self.on_state_request(p, StateRequest { member: from, link, position })
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
        if matches!(self.processes[p].threads[TRAINER].doing, Doing::Connecting) {
            self.wake_trainer(p);
        }
    }

    fn shut_all(&mut self, p: usize, links: Vec<LinkId>) {
        links.into_iter().for_each(|link| self.shut(link, p + 1));
    }

    /// Closes the listener, all pending dials, and the requests of joiners.
    pub(super) fn close_endpoint(&mut self, p: usize) {
        let Process { endpoint, trainer, .. } = &mut self.processes[p];
        endpoint.open = false;
        let mut dropped = endpoint.admission.abort_before(u64::MAX);
        dropped.extend(trainer.requests.borrow_mut().drain(..).map(|request| request.link));
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
            self.close_source(p);
            self.wake_trainer(p);
        }
        if is_aborted {
            self.shut_ring(p);
            self.wake_trainer(p);
        }
    }

    // ---- building a ring ----

    /// Begins to build the links of `group`.
    pub(super) fn connect(&mut self, p: usize, group: &GroupSpec) -> Result<(), CollectiveError> {
        let process = &mut self.processes[p];
        let generation = group.generation;
        let members: Vec<WorkerId> = group.members.iter().map(|m| WorkerId(m.id)).collect();
        let Some(rank) = members.iter().position(|m| Some(*m) == process.worker) else {
            return Err(CollectiveError::Invalid("not a member".into()));
        };
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
            aborted: false,
            nccl: NcclBuild::Absent,
            lineage: 0,
        };
        let Ok(dropped) = process.endpoint.admission.begin(generation) else {
            process.trainer.ring = Some(ring);
            return Err(self.broke(p, TransferError::Aborted));
        };
        if seat.world > 1 {
            let address = group.members[(rank + 1) % seat.world].address;
            let link = self.net.open(p + 1, process_at(address) + 1, false);
            ring.next = Some(link);
            self.send(link, p + 1, Packet::Dial);
        }
        self.processes[p].trainer.ring = Some(ring);
        self.shut_all(p, dropped);
        Ok(())
    }

    /// Continues to build the links of a group. `None`: it waits for them.
    pub(super) fn continue_connect(
        &mut self,
        p: usize,
    ) -> Option<Result<RankInfo, CollectiveError>> {
        let ring = self.processes[p].trainer.ring.as_mut().expect("the group has been begun");
        let Some(next) = ring.next else { return Some(Ok(self.connected(p))) };
        if ring.aborted {
            return Some(Err(self.broke(p, TransferError::Aborted)));
        }
        if !ring.introduced {
            match self.net.take(next, p + 1) {
                Some(Packet::Accepted) => {
                    ring.introduced = true;
                    let (generation, from) = (ring.generation, ring.members[ring.seat.rank]);
                    let generation = Some(generation);
                    let dial = Packet::Introduction { generation, from, position: None };
                    self.send(next, p + 1, dial);
                }
                Some(_) => return Some(Err(self.broke(p, TransferError::Next))),
                None => return self.wait_for_answer(p).map(Err),
            }
        }
        let process = &mut self.processes[p];
        let ring = process.trainer.ring.as_mut()?;
        let prev = ring.neighbour(&TransferError::Prev)?;
        let taken = process.endpoint.admission.take(dial_key(ring.generation, prev));
        if taken.is_some() {
            ring.prev = taken;
            return Some(Ok(self.connected(p)));
        }
        if self.net.has_ended(next, p + 1) {
            return Some(Err(self.broke(p, TransferError::Next)));
        }
        let generation = ring.generation;
        process.threads[TRAINER].doing = Doing::Connecting;
        self.wait_at(p, [generation, 0, 0, 0]);
        None
    }

    /// Waits until the dialled host's kernel answers, which it does at once, whatever its process
    /// does.
    fn wait_for_answer(&mut self, p: usize) -> Option<CollectiveError> {
        let Process { threads, trainer, .. } = &mut self.processes[p];
        threads[TRAINER].doing = Doing::Connecting;
        let (limit, ring) = (self.setting.spec.options.worker_timeout?, trainer.ring.as_ref()?);
        let due = ring.dialled + limit.as_micros() as Micros;
        if self.clock.now() >= due {
            return Some(self.broke(p, TransferError::Unanswered));
        }
        self.continue_at(ThreadId { p, number: TRAINER }, due);
        None
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
        let Process { threads, trainer, .. } = &self.processes[p];
        let waits = matches!(threads[TRAINER].doing, Doing::Connecting | Doing::Operating(_));
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
            far: [None; 2],
            since,
        })
    }

    fn connected(&mut self, p: usize) -> RankInfo {
        self.note_nccl_regrouped(p);
        let ring = self.processes[p].trainer.ring.as_ref().expect("the group has been begun");
        let (generation, seat) = (ring.generation, ring.seat);
        trace!(self, "{}: has its links of generation {generation}", self.name(p));
        seat
    }

    /// The ring, or the attempt to build one, has failed.
    pub(super) fn broke(&mut self, p: usize, error: TransferError) -> CollectiveError {
        let trainer = &mut self.processes[p].trainer;
        let Some(ring) = &trainer.ring else { return CollectiveError::Aborted { generation: 0 } };
        let (generation, RankInfo { rank, world }) = (ring.generation, ring.seat);
        let suspect = ring.neighbour(&error).filter(|_| !ring.aborted);
        trainer.has_broken = true;
        let why = match error {
            TransferError::Next => "the next member ended the link",
            TransferError::Prev => "the previous member ended the link",
            TransferError::Unanswered => "the next member does not answer the dial",
            TransferError::Aborted | TransferError::Nccl => "the generation is over",
        };
        trace!(self, "{}: links broke, {why}, suspects {suspect:?}", self.name(p));
        self.check_break(p, why);
        self.leave_ring(p);
        let Some(WorkerId(member)) = suspect else {
            return CollectiveError::Aborted { generation };
        };
        match error {
            TransferError::Unanswered => {
                let waited = self.setting.spec.options.worker_timeout.unwrap_or_default();
                let rank = (rank + 1) % world;
                CollectiveError::Unreachable { rank, member, waited }
            }
            TransferError::Prev => {
                let rank = (rank + world - 1) % world;
                CollectiveError::PeerLost { rank, member, source: UnexpectedEof.into() }
            }
            TransferError::Aborted | TransferError::Next | TransferError::Nccl => {
                let rank = (rank + 1) % world;
                CollectiveError::PeerLost { rank, member, source: UnexpectedEof.into() }
            }
        }
    }
}

/// Key of the dial of `from` for the ring of `generation`.
fn dial_key(generation: u64, from: WorkerId) -> DialKey {
    DialKey { generation, member: from.0, purpose: Purpose::Ring }
}
