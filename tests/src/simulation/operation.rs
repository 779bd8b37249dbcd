//! The collective operations of a group, piece by piece.
//!
//! The order of sends and receives is that of the real [`Schedule`]. Around it stands what
//! `elasticdl_collective`'s `transfer` does with sockets:
//!
//! * A rank that has all pieces is done, though other ranks may still miss some. What it has sent
//!   is in its kernel's hands: the rank may proceed, or die, and the peers still receive it.
//! * The end of a link counts only while the operation still needs the link.

use std::mem;
use std::rc::Rc;

use elasticdl_collective::CollectiveError;
use elasticdl_collective::device::{DeviceError, Path};
use elasticdl_collective::testing::schedule::{Content, Piece, Schedule, Span};

use super::model;
use super::state::endpoint::TransferError;
use super::state::network::LinkId;
use super::state::operation::{Collective, Frame, Note, Operated, Operation};
use super::state::packet::Packet;
use super::state::thread::{Doing, TRAINER};
use super::trace::trace;
use super::world::World;

impl World {
    /// Starts the group's next operation. `note`, `body`: what this rank contributes.
    pub(super) fn operate(
        &mut self,
        p: usize,
        what: Collective,
        note: Option<Vec<u8>>,
        body: Vec<f32>,
    ) -> Result<(), CollectiveError> {
        let mut nccl_fails_after = None;
        if let Collective::Step(path) = what {
            self.check_path_agreement(p, path);
            if path == Path::Nccl {
                self.check_path(p);
                nccl_fails_after = self.draw_nccl_failure();
            }
        }
        let failures = match what {
            Collective::Synchronize => self.nccl_failures(p),
            _ => Default::default(),
        };
        let (len, segment_len) = (body.len(), self.setting.segment_len);
        let trainer = &mut self.processes[p].trainer;
        let lineage = trainer.lineage;
        let Some(ring) = &mut trainer.ring else {
            return Err(CollectiveError::Aborted { generation: 0 });
        };
        if ring.aborted {
            return Err(self.broke(p, TransferError::Aborted));
        }
        let seat = ring.seat;
        let span = |len| Span { len, segment_len };
        let (schedule, root) = match what {
            Collective::Broadcast { root } => {
                (Schedule::broadcast(seat, root, span(len), false), Some(root))
            }
            Collective::BroadcastBytes { root } => {
                (Schedule::broadcast(seat, root, span(0), true), Some(root))
            }
            // What a rank gives to all others travels together, and each takes its part.
            Collective::Exchange | Collective::IdleRound | Collective::Synchronize => {
                (Schedule::all_gather(seat), None)
            }
            Collective::NcclId => (Schedule::broadcast(seat, 0, span(0), true), None),
            Collective::Step(_) => (Schedule::all_reduce(seat, span(len)), None),
        };
        let nccl = ring.nccl;
        let mut notes = vec![None; seat.world];
        notes[seat.rank] = note.map(|bytes| Rc::new(Note { bytes, nccl, failures, lineage }));
        let sequence = ring.sequence;
        ring.sequence += 1;
        // A wrong state that is copied.
        if root == Some(seat.rank) && self.oracle.coverage.flipped > 0 {
            self.oracle.is_void |= model::is_wrong(&model::counts(&body));
        }
        let (own, body) = match what {
            Collective::Step(_) => (body, vec![0.0; len]),
            _ => (Vec::new(), body),
        };
        self.processes[p].threads[TRAINER].doing = Doing::Operating(Box::new(Operation {
            what,
            nccl_fails_after,
            sequence,
            schedule,
            notes,
            received: 0,
            sent: 0,
            own,
            body,
        }));
        Ok(())
    }

    /// Sends and receives as many pieces as possible. `None`: the operation waits for a peer.
    pub(super) fn advance(&mut self, p: usize) -> Option<Result<Operated, CollectiveError>> {
        let doing = mem::take(&mut self.processes[p].threads[TRAINER].doing);
        let Doing::Operating(mut operation) = doing else { unreachable!("it has begun") };
        match self.transfer(p, &mut operation) {
            Ok(true) => {
                self.processes[p].trainer.waiting = None;
                self.operated(p, operation.what, &operation.notes);
                let bytes = |note: &Option<Rc<Note>>| {
                    note.as_ref().map(|note| note.bytes.clone()).unwrap_or_default()
                };
                let Operation { notes, body, .. } = *operation;
                Some(Ok(Operated { notes: notes.iter().map(bytes).collect(), body }))
            }
            Ok(false) => {
                let generation =
                    self.processes[p].trainer.ring.as_ref().map_or(0, |r| r.generation);
                let Operation { sequence, received, sent, .. } = *operation;
                self.wait_at(p, [generation, sequence + 1, received, sent]);
                self.processes[p].threads[TRAINER].doing = Doing::Operating(operation);
                None
            }
            Err(TransferError::Nccl) => {
                self.nccl_broke(p);
                let (action, code) = ("all-reduce", 1);
                let source = DeviceError::Nccl { action, code, reason: "simulated".into() };
                Some(Err(CollectiveError::Device { source }))
            }
            Err(error) => {
                let (what, sequence) = (operation.what, operation.sequence);
                trace!(self, "{}: in {what:?}, operation {sequence}", self.name(p));
                Some(Err(self.broke(p, error)))
            }
        }
    }

    /// An operation of the group is complete on this rank.
    fn operated(&mut self, p: usize, what: Collective, notes: &[Option<Rc<Note>>]) {
        match what {
            Collective::BroadcastBytes { root } => {
                if let (Some(ring), Some(note)) =
                    (&mut self.processes[p].trainer.ring, &notes[root])
                {
                    ring.lineage = note.lineage;
                }
            }
            Collective::IdleRound | Collective::Step(_) => {
                let builds = notes.iter().flatten().map(|note| note.nccl).collect();
                self.processes[p].trainer.builds = Some(builds);
            }
            Collective::Synchronize => {
                self.note_nccl_met(p, notes.iter().flatten().map(|note| &note.failures));
            }
            Collective::Broadcast { .. } | Collective::Exchange | Collective::NcclId => {}
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
        if expected != (generation, sequence, kind, step, segment, origin)
            || frame.body.len() != piece.range.len()
        {
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
        let Operation { own, body, .. } = operation;
        let sum = &mut body[piece.range.clone()];
        sum.copy_from_slice(&frame.body);
        if piece.content == Content::Sum {
            sum.iter_mut().zip(&own[piece.range]).for_each(|(sum, own)| *sum += own);
        }
        operation.schedule.on_received();
        operation.received += 1;
        Ok(true)
    }

    fn frame(&self, p: usize, operation: &Operation, piece: &Piece) -> Frame {
        let (generation, sequence, kind, step, segment, origin) = self.op_tag(p, operation, piece);
        let note = if piece.note { operation.notes[piece.origin].clone() } else { None };
        let from = match (operation.what, piece.content) {
            (Collective::Step(_), Content::Own) => &operation.own,
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
        let generation = self.processes[p].trainer.ring.as_ref().map_or(0, |ring| ring.generation);
        let kind = operation.what.kind();
        (generation, operation.sequence, kind, piece.step, piece.segment, piece.origin)
    }
}
