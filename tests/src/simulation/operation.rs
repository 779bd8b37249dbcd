//! The operations of a group, piece by piece.
//!
//! What is sent and received in which order is the real [`Schedule`]; around it stands what
//! `elasticdl_collective`'s `transfer` does with sockets:
//!
//! * A rank that has all pieces is done, though others may still miss some. What it has sent is in
//!   its kernel's hands: it may go on, or die, and they still get it.
//! * A link's end counts only while the operation still needs the link.

use std::collections::BTreeSet;
use std::rc::Rc;

use elasticdl_collective::schedule::{Content, Extent, Piece, Schedule};
use elasticdl_worker::core::header::{StateRecord, StepHeader, SyncHeader};
use elasticdl_worker::core::swap::Path;

use super::network::{LinkId, Packet};
use super::ring::{Fault, Ring};
use super::trainer::Doing;
use super::world::World;

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

/// An operation that is complete on one rank.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) what: What,
    pub(super) notes: Vec<Option<Rc<Note>>>,
    pub(super) body: Vec<u8>,
    pub(super) is_root: bool,
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

impl World {
    /// Enters the group's next operation.
    pub(super) fn operate(&mut self, p: usize, what: What) {
        let path = match what {
            What::Step => self.path_of(p),
            // Its words are of now, too.
            What::Talk => {
                self.path_of(p);
                Path::Host
            }
            _ => Path::Host,
        };
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
            What::NcclId | What::ResultHeaders { .. } | What::StateRecord { .. } => {
                (None, Vec::new())
            }
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
                let generation =
                    self.processes[p].trainer.ring.as_ref().map_or(0, Ring::generation);
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
    fn receive(
        &mut self,
        p: usize,
        operation: &mut Operation,
        prev: LinkId,
    ) -> Result<bool, Fault> {
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
            self.violate(format!(
                "{} expects {expected:?} in its ring, got {frame:?}",
                self.name(p)
            ));
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
            let (own, sum) =
                (&model.gradient[piece.range.clone()], &mut model.reduced[piece.range.clone()]);
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

    fn stamp(
        &self,
        p: usize,
        operation: &Operation,
        piece: &Piece,
    ) -> (u64, u64, u8, usize, usize, usize) {
        let generation = self.processes[p].trainer.ring.as_ref().map_or(0, Ring::generation);
        (generation, operation.sequence, operation.kind(), piece.step, piece.segment, piece.origin)
    }
}
