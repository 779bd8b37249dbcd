//! The collective operations of a group, piece by piece.
//!
//! The order of sends and receives is that of the real [`Schedule`]. Around it stands what
//! `elasticdl_collective`'s `transfer` does with sockets:
//!
//! * A rank that has all pieces is done, though other ranks may still miss some. What it has sent
//!   is in its kernel's hands: the rank may proceed, or die, and the peers still receive it.
//! * The end of a link counts only while the operation still needs the link.

use std::rc::Rc;

use elasticdl::session::transport_switch::Transport;
use elasticdl_collective::testing::schedule::{Content, Piece, Schedule, Span};

use super::state::network::LinkId;
use super::state::operation::{Collective, Done, Frame, Note, Operation};
use super::state::packet::Packet;
use super::state::ring::{Ring, TransferError};
use super::state::trainer::Doing;
use super::world::World;

impl World {
    /// Starts the group's next operation.
    pub(super) fn operate(&mut self, p: usize, what: Collective) {
        if matches!(what, Collective::Step | Collective::IdleRound) {
            self.limit_readable(p);
        }
        let path = match what {
            Collective::Step => self.path_of(p),
            // The header reports the current state of NCCL, too.
            Collective::IdleRound => {
                self.path_of(p);
                Transport::Host
            }
            _ => Transport::Host,
        };
        let mut nccl_fails_after = None;
        if path == Transport::Nccl {
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
        let extent = |len| Span { len, segment_len };
        let schedule = match what {
            Collective::Step => Schedule::all_reduce(seat, extent(len)),
            Collective::Synchronize | Collective::IdleRound => Schedule::all_gather(seat),
            Collective::Broadcast { root, what } if what.is_of_tensors() => {
                Schedule::broadcast(seat, root, extent(len), false)
            }
            Collective::Broadcast { root, .. } => Schedule::broadcast(seat, root, extent(0), true),
            Collective::NcclId => Schedule::broadcast(seat, 0, extent(0), true),
        };
        let digest = session.state().map_or(0, |s| trainer.model.window_digest(s.step));
        let (note, body) = match what {
            Collective::Step | Collective::IdleRound => {
                (Some(Note::Step(Box::new(session.header(digest)))), Vec::new())
            }
            Collective::Synchronize => {
                (Some(Note::Sync(session.sync_header(digest), self.nccl_failures(p))), Vec::new())
            }
            Collective::Broadcast { what, .. } if is_root => self.root_part(p, what),
            Collective::Broadcast { what, .. } if what.is_of_tensors() => (None, vec![0; len]),
            Collective::Broadcast { .. } | Collective::NcclId => (None, Vec::new()),
        };
        let mut notes = vec![None; seat.world];
        notes[seat.rank] = note.map(Rc::new);
        if seat.world == 1 {
            self.check_copy(p);
        }
        let trainer = &mut self.processes[p].trainer;
        if seat.world == 1 && what == Collective::Step {
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

    /// Sends and receives as many pieces as possible.
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
            Err(TransferError::Nccl) => self.nccl_broke(p),
            Err(error) => {
                let Some(ring) = &mut self.processes[p].trainer.ring else { return };
                ring.failed = true;
                let suspect = if ring.aborted { None } else { ring.neighbour(&error) };
                let why = match error {
                    TransferError::Aborted | TransferError::Nccl => "the generation is over",
                    TransferError::Next => "the next member ended the link",
                    TransferError::Prev => "the previous member ended the link",
                };
                self.broke(p, suspect, why);
            }
        }
    }

    /// Returns whether the operation is complete; `false`: it waits for a peer.
    fn transfer(&mut self, p: usize, operation: &mut Operation) -> Result<bool, TransferError> {
        let Some(ring) = &self.processes[p].trainer.ring else {
            return Err(TransferError::Aborted);
        };
        let (Some(next), Some(prev)) = (ring.next, ring.prev) else { return Ok(true) };
        loop {
            if operation.nccl_fails() {
                return Err(TransferError::Nccl);
            }
            while let Some(piece) = operation.schedule.next_send() {
                if self.net.is_reset(next, p + 1) {
                    return Err(TransferError::Next);
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
                return Err(TransferError::Aborted);
            }
            if operation.schedule.has_sends_left() && self.net.has_ended(next, p + 1) {
                return Err(TransferError::Next);
            }
            return Ok(false);
        }
    }

    /// Returns whether a piece has arrived.
    fn receive(
        &mut self,
        p: usize,
        operation: &mut Operation,
        prev: LinkId,
    ) -> Result<bool, TransferError> {
        let Some(piece) = operation.schedule.next_receive() else { return Ok(false) };
        if self.net.has_ended(prev, p + 1) {
            return Err(TransferError::Prev);
        }
        let Some(packet) = self.net.take(prev, p + 1) else { return Ok(false) };
        let Packet::Frame(frame) = packet else {
            self.violate(format!("{} got {packet:?} within a ring", self.name(p)));
            return Err(TransferError::Prev);
        };
        let expected = self.op_tag(p, operation, &piece);
        let Frame { generation, sequence, kind, step, segment, origin, .. } = *frame;
        if expected != (generation, sequence, kind, step, segment, origin) {
            self.violate(format!(
                "{} expects {expected:?} in its ring, got {frame:?}",
                self.name(p)
            ));
            return Err(TransferError::Prev);
        }
        if operation.schedule.next_receive_is_early() {
            self.violate(format!("{} got a total that its part is not in", self.name(p)));
        }
        if piece.note {
            operation.notes[piece.origin].clone_from(&frame.note);
        }
        let model = &mut self.processes[p].trainer.model;
        if operation.what == Collective::Step {
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
        let (generation, sequence, kind, step, segment, origin) = self.op_tag(p, operation, piece);
        let note = if piece.note { operation.notes[piece.origin].clone() } else { None };
        let model = &self.processes[p].trainer.model;
        let from = match (operation.what, piece.content) {
            (Collective::Step, Content::Own) => &model.gradient,
            (Collective::Step, _) => &model.reduced,
            _ => &operation.body,
        };
        let body = from[piece.range.clone()].to_vec();
        Frame { generation, sequence, kind, step, segment, origin, note, body }
    }

    fn op_tag(
        &self,
        p: usize,
        operation: &Operation,
        piece: &Piece,
    ) -> (u64, u64, u8, usize, usize, usize) {
        let generation = self.processes[p].trainer.ring.as_ref().map_or(0, Ring::generation);
        (generation, operation.sequence, operation.kind(), piece.step, piece.segment, piece.origin)
    }
}
