//! A worker's end of all links: dials, the fence, and the operations of a group, piece by piece.
//!
//! What is sent and received in which order is the real [`Schedule`]; around it stands what `elasticdl_collective`'s
//! `endpoint`, `porter`, `fence` and `transfer` do with sockets:
//!
//! * A ring is two links: one dialled to the next member, one taken from the previous member's dial. Who dials says its
//!   name and generation; what is older than the fence is refused at the door, what is newer waits.
//! * A rank that has all pieces is done, though others may still miss some. What it has sent is in its kernel's hands: it
//!   may go on, or die, and they still get it.
//! * A link's end counts only while the operation still needs the link.
//! * The fence ends the links of older generations at once; the news runs around the ring.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use elasticdl_collective::schedule::{Content, Extent, Piece, Schedule, Seat};
use elasticdl_master::job::Stall;
use elasticdl_proto::{Generation, WorkerId};
use elasticdl_worker::core::header::{StateRecord, StepHeader, SyncHeader};
use elasticdl_worker::core::session::Membership;
use elasticdl_worker::core::swap::{Build, Path};

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
    seat: Seat,
    pub(super) next: Option<LinkId>,
    pub(super) prev: Option<LinkId>,
    introduced: bool,
    /// When the next member was dialled.
    dialled: Micros,
    sequence: u64,
    failed: bool,
    aborted: bool,
    /// How far the group's communicator is on this rank.
    pub(super) nccl: Build,
    /// A state's record that has come, while the parameters have not. Oracles' era beside it.
    pub(super) record: Option<(StateRecord, u64)>,
}

/// What a group does together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Of the communicator that is to be built.
    NcclId,
    Result {
        donor: usize,
        apply: bool,
    },
    ResultHeaders {
        donor: usize,
    },
    State {
        donor: usize,
        take: bool,
    },
    StateRecord {
        donor: usize,
    },
    Step,
    Synchronize,
    Talk,
}

/// What rides on pieces, beside elements.
#[derive(Debug)]
pub(super) enum Note {
    Headers(Vec<StepHeader>),
    Record(StateRecord, u64),
    Step(StepHeader),
    /// With the generations in which NCCL failed, for the oracles.
    Sync(SyncHeader, BTreeSet<u64>),
}

/// One piece, on its way.
#[derive(Debug)]
pub(super) struct Frame {
    generation: u64,
    sequence: u64,
    /// Of the operation, apart from what each rank makes of it.
    kind: u8,
    step: usize,
    segment: usize,
    origin: usize,
    note: Option<Rc<Note>>,
    body: Vec<u8>,
}

/// One operation under way on one rank.
#[derive(Debug)]
pub(super) struct Operation {
    what: What,
    /// What carries a step.
    pub(super) path: Path,
    pub(super) nccl_fails_after: Option<u64>,
    sequence: u64,
    schedule: Schedule,
    notes: Vec<Option<Rc<Note>>>,
    pub(super) received: u64,
    sent: u64,
    /// What a broadcast fills. A step sums into the model's own buffer.
    body: Vec<u8>,
    is_root: bool,
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

/// An operation that is complete on one rank.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) what: What,
    pub(super) notes: Vec<Option<Rc<Note>>>,
    pub(super) body: Vec<u8>,
    pub(super) is_root: bool,
}

/// Why an operation stopped.
enum Fault {
    Aborted,
    Nccl,
    Next,
    Prev,
}

impl What {
    fn kind(&self) -> u8 {
        match self {
            Self::Result { .. } => 0,
            Self::ResultHeaders { .. } => 1,
            Self::State { .. } => 2,
            Self::StateRecord { .. } => 3,
            Self::Step => 4,
            Self::Synchronize => 5,
            Self::Talk => 6,
            Self::NcclId => 7,
        }
    }

    fn root(&self) -> Option<usize> {
        match *self {
            Self::Result { donor, .. } | Self::ResultHeaders { donor } => Some(donor),
            Self::State { donor, .. } | Self::StateRecord { donor } => Some(donor),
            Self::NcclId => Some(0),
            Self::Step | Self::Synchronize | Self::Talk => None,
        }
    }
}

impl Operation {
    /// Apart from what each rank makes of it.
    fn kind(&self) -> u8 {
        match self.path {
            Path::Host => self.what.kind(),
            Path::Nccl => self.what.kind() | 128,
        }
    }

    pub(super) fn what(&self) -> &What {
        &self.what
    }
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

    pub(super) fn fail(&mut self) {
        self.failed = true;
    }

    fn neighbour(&self, fault: &Fault) -> Option<WorkerId> {
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
        let Some(Packet::Introduction { generation, from }) = self.net.take(link, p + 1) else { return };
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
        let before = endpoint.parked.iter().position(|&(g, member, _)| (g, member) == (generation, from));
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
        if let Some(ring) = self.processes[p].trainer.ring.as_mut().filter(|r| r.generation < floor) {
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
                    self.send(next, p + 1, Packet::Introduction { generation: Some(generation), from });
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

    fn wait_at(&mut self, p: usize, place: [u64; 4]) {
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

    // ---- operations ----

    /// Enters the group's next operation.
    pub(super) fn operate(&mut self, p: usize, what: What) {
        let path = if what == What::Step { self.path_of(p) } else { Path::Host };
        let mut nccl_fails_after = None;
        if path == Path::Nccl {
            self.check_path(p);
            nccl_fails_after = self.draw_nccl_failure();
        }
        let trainer = &self.processes[p].trainer;
        let (Some(session), Some(ring)) = (&trainer.session, &trainer.ring) else {
            return self.broke(p, None, "no links");
        };
        if ring.failed || ring.aborted {
            return self.broke(p, None, "the generation is over");
        }
        let (seat, sequence) = (ring.seat, ring.sequence);
        let is_root = what.root() == Some(seat.rank);
        let len = trainer.model.parameters.len();
        let segment_len = self.setting.segment_len;
        let extent = |len| Extent { len, segment_len };
        let schedule = match what {
            What::Step => Schedule::all_reduce(seat, extent(len)),
            What::Synchronize | What::Talk => Schedule::all_gather(seat),
            What::ResultHeaders { donor } | What::StateRecord { donor } => {
                Schedule::broadcast(seat, donor, extent(0), true)
            }
            What::NcclId => Schedule::broadcast(seat, 0, extent(0), true),
            What::Result { donor, .. } | What::State { donor, .. } => {
                Schedule::broadcast(seat, donor, extent(len), false)
            }
        };
        let digest = session.state().map_or(0, |_| trainer.model.digest());
        let (note, body) = match what {
            What::Step | What::Talk => (Some(Note::Step(session.header(digest))), Vec::new()),
            What::Synchronize => {
                (Some(Note::Sync(session.sync_header(digest), self.nccl_failures(p))), Vec::new())
            }
            _ if is_root => self.donated(p, &what),
            What::Result { .. } | What::State { .. } => (None, vec![0; len]),
            What::NcclId | What::ResultHeaders { .. } | What::StateRecord { .. } => (None, Vec::new()),
        };
        let mut notes = vec![None; seat.world];
        notes[seat.rank] = note.map(Rc::new);
        let trainer = &mut self.processes[p].trainer;
        if seat.world == 1 && what == What::Step {
            trainer.model.reduced.copy_from_slice(&trainer.model.gradient);
        }
        if let Some(ring) = &mut trainer.ring {
            ring.sequence += 1;
        }
        self.advance(
            p,
            Box::new(Operation {
                what,
                path,
                nccl_fails_after,
                sequence,
                schedule,
                notes,
                received: 0,
                sent: 0,
                body,
                is_root,
            }),
        );
    }

    /// Sends and receives what can be.
    pub(super) fn advance(&mut self, p: usize, mut operation: Box<Operation>) {
        match self.transfer(p, &mut operation) {
            Ok(true) => {
                let Operation { what, notes, body, is_root, .. } = *operation;
                self.operated(p, Done { what, notes, body, is_root });
            }
            Ok(false) => {
                let generation = self.processes[p].trainer.ring.as_ref().map_or(0, Ring::generation);
                let Operation { sequence, received, sent, .. } = *operation;
                self.wait_at(p, [generation, sequence + 1, received, sent]);
                self.processes[p].trainer.doing = Doing::Operating(operation);
            }
            Err(Fault::Nccl) => self.nccl_broke(p),
            Err(fault) => {
                let Some(ring) = &mut self.processes[p].trainer.ring else { return };
                ring.failed = true;
                let suspect = if ring.aborted { None } else { ring.neighbour(&fault) };
                let why = match fault {
                    Fault::Aborted | Fault::Nccl => "the generation is over",
                    Fault::Next => "the next member ended the link",
                    Fault::Prev => "the previous member ended the link",
                };
                self.broke(p, suspect, why);
            }
        }
    }

    /// Whether the operation is complete; `false`: it waits.
    fn transfer(&mut self, p: usize, operation: &mut Operation) -> Result<bool, Fault> {
        let Some(ring) = &self.processes[p].trainer.ring else { return Err(Fault::Aborted) };
        let (Some(next), Some(prev)) = (ring.next, ring.prev) else { return Ok(true) };
        loop {
            if operation.nccl_fails() {
                return Err(Fault::Nccl);
            }
            while let Some(piece) = operation.schedule.next_send() {
                if self.net.is_reset(next, p + 1) {
                    return Err(Fault::Next);
                }
                let frame = self.frame(p, operation, &piece);
                self.send(next, p + 1, Packet::Frame(Rc::new(frame)));
                operation.schedule.on_sent();
                operation.sent += 1;
            }
            if self.receive(p, operation, prev)? {
                continue;
            }
            if operation.schedule.is_done() {
                return Ok(true);
            }
            if self.processes[p].trainer.ring.as_ref().is_none_or(|ring| ring.aborted) {
                return Err(Fault::Aborted);
            }
            if operation.schedule.has_sends_left() && self.net.has_ended(next, p + 1) {
                return Err(Fault::Next);
            }
            return Ok(false);
        }
    }

    /// Whether a piece has come.
    fn receive(&mut self, p: usize, operation: &mut Operation, prev: LinkId) -> Result<bool, Fault> {
        let Some(piece) = operation.schedule.next_receive() else { return Ok(false) };
        if self.net.has_ended(prev, p + 1) {
            return Err(Fault::Prev);
        }
        let Some(packet) = self.net.take(prev, p + 1) else { return Ok(false) };
        let Packet::Frame(frame) = packet else {
            self.violate(format!("{} got {packet:?} within a ring", self.name(p)));
            return Err(Fault::Prev);
        };
        let expected = self.stamp(p, operation, &piece);
        let Frame { generation, sequence, kind, step, segment, origin, .. } = *frame;
        if expected != (generation, sequence, kind, step, segment, origin) {
            self.violate(format!("{} expects {expected:?} in its ring, got {frame:?}", self.name(p)));
            return Err(Fault::Prev);
        }
        if operation.schedule.next_receive_is_early() {
            self.violate(format!("{} got a total that its part is not in", self.name(p)));
        }
        if piece.note {
            operation.notes[piece.origin].clone_from(&frame.note);
        }
        let model = &mut self.processes[p].trainer.model;
        if operation.what == What::Step {
            let (own, sum) = (&model.gradient[piece.range.clone()], &mut model.reduced[piece.range.clone()]);
            sum.copy_from_slice(&frame.body);
            if piece.content == Content::Sum {
                sum.iter_mut().zip(own).for_each(|(sum, own)| *sum = sum.saturating_add(*own));
            }
        } else {
            operation.body[piece.range].copy_from_slice(&frame.body);
        }
        operation.schedule.on_received();
        operation.received += 1;
        Ok(true)
    }

    fn frame(&self, p: usize, operation: &Operation, piece: &Piece) -> Frame {
        let (generation, sequence, kind, step, segment, origin) = self.stamp(p, operation, piece);
        let note = if piece.note { operation.notes[piece.origin].clone() } else { None };
        let model = &self.processes[p].trainer.model;
        let from = match (operation.what, piece.content) {
            (What::Step, Content::Own) => &model.gradient,
            (What::Step, _) => &model.reduced,
            _ => &operation.body,
        };
        let body = from[piece.range.clone()].to_vec();
        Frame { generation, sequence, kind, step, segment, origin, note, body }
    }

    fn stamp(&self, p: usize, operation: &Operation, piece: &Piece) -> (u64, u64, u8, usize, usize, usize) {
        let generation = self.processes[p].trainer.ring.as_ref().map_or(0, Ring::generation);
        (generation, operation.sequence, operation.kind(), piece.step, piece.segment, piece.origin)
    }
}
