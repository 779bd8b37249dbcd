//! Operations along a [tree](topology) of links, for groups of many ranks: sums of short buffers,
//! notes, and broadcasts. A message is forwarded while it arrives.
//!
//! ```text
//!   up     frame header | notes of the sender's subtree, each after its length (u32) | partial sums
//!   down   frame header | notes of all ranks, likewise                               | totals
//! ```
//!
//! A sum takes two messages in sequence for each level of the tree, where a ring takes 2·(world−1).
//! A rank receives its children's sums and the total, 3 times the buffer, where a ring takes 2
//! times. In a group all ranks together send 2·(world−1) messages, not world·2·(world−1).
//!
//! A broadcast flows from its root to all others along the same links.
//!
//! **Invariant:** a total is computed once, at rank 0, and copied from there. Each rank adds its
//! children's sums in the same order.
//!
//! **Invariant:** a rank gets the total of an element only when the contribution of every rank is
//! in it, so its own partial sum of the element is sent before.
//!
//! **Invariant:** a rank that sends on a link waits for an answer on the same link before it sends
//! there again, unless the answer was before: so every message is expected, and of a port whose
//! message is complete no more is read.

use std::io::ErrorKind;

use rustix::event::{PollFd, PollFlags};

use self::port::{Place, Port, SCRATCH_BYTES};
use super::chain::{NOTE_LEN_BYTES, split_notes};
use super::{Fault, TransferProgress};
use crate::algorithm::schedule::RankInfo;
use crate::algorithm::tree_topology::{self as topology, TreePosition};
use crate::net::fence::GroupRegistration;
use crate::net::frame::{FRAME_BYTES, Frame, OpTag, to_wire};
use crate::net::link::Link;
use crate::net::neighbours::{LinkFault, Links, Neighbour, check_idle_link, check_unused_link};
use crate::net::progress::Progress;
use crate::net::socket::poll_until;
use crate::net::spin_wait::SpinWait;

mod port;

/// The links of a rank in the tree that are not of the ring.
#[derive(Debug, Default)]
pub(crate) struct TreeLinks {
    /// To the right child.
    pub(crate) right: Option<Neighbour>,
    /// From the rank whose right child this rank is.
    pub(crate) parent: Option<Neighbour>,
}

/// One operation in progress.
pub(crate) struct TreeTransfer<'a> {
    registration: &'a GroupRegistration,
    op_tag: OpTag,
    rank_info: RankInfo,
    position: TreePosition,
    progress: TransferProgress<'a>,
    /// The children in rank order, then the parent.
    ports: Vec<Port<'a>>,
    /// The link from the previous member, if a sum does not use it. A frame of this operation on it
    /// comes from a rank that runs another operation; the mismatch may not show on any other link.
    unused: Option<&'a Link>,
}

/// A part of a broadcast.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) root: usize,
    pub(crate) segment: usize,
    /// Length of the whole buffer.
    pub(crate) total_bytes: usize,
    /// Whether the root sends a note; it is at most as long as a block.
    pub(crate) has_note: bool,
}

impl<'a> TreeTransfer<'a> {
    pub(crate) fn new(
        (ring, tree): (&'a Links, &'a TreeLinks),
        registration: &'a GroupRegistration,
        progress: &'a Progress,
        op_tag: OpTag,
        rank_info: RankInfo,
    ) -> Self {
        let position = topology::position(rank_info.rank, rank_info.world);
        let far = |neighbour: &'a Option<Neighbour>| {
            neighbour.as_ref().map(|neighbour| Port::new(neighbour, Place::Far))
        };
        let mut ports = Vec::with_capacity(3);
        ports.extend(position.left.map(|_| Port::new(&ring.next, Place::Next)));
        ports.extend(far(&tree.right));
        let mut unused = Some(&*ring.prev.link);
        if position.is_right_child() {
            ports.extend(far(&tree.parent));
        } else if position.parent.is_some() {
            ports.push(Port::new(&ring.prev, Place::Prev));
            unused = None;
        }
        let progress = TransferProgress::both_ways(progress);
        Self { registration, op_tag, rank_info, position, progress, ports, unused }
    }

    /// Writes the sum of all ranks' `src` to `dst`, and returns the notes in rank order. `note`:
    /// that of this rank.
    pub(crate) fn all_reduce(
        mut self,
        note: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, Fault> {
        let RankInfo { rank, world } = self.rank_info;
        dst.copy_from_slice(src);
        let bytes = size_of_val(dst);
        for at in 0..self.ports.len() {
            let peer = self.ports[at].rank;
            let (step, origin, ranks) = match self.position.parent {
                Some(parent) if parent == peer => (DOWN, 0, 0..world),
                _ => (UP, peer, topology::position(peer, world).subtree),
            };
            let frame = Frame { step, origin: to_wire(origin), ..self.frame(bytes) };
            self.ports[at].expect(frame, Some(ranks));
            self.ports[at].scratch = vec![0; if step == UP { bytes.min(SCRATCH_BYTES) } else { 0 }];
        }
        let (mut head, mut spin_wait) = (None, SpinWait::for_bytes(0));
        loop {
            let has_moved = self.step_of_sum(note, &mut head, dst)?;
            if self.is_done() {
                break;
            }
            self.spin_or_wait(has_moved, &mut spin_wait)?;
        }
        let all = match self.ports.last().filter(|_| rank > 0) {
            Some(parent) => &parent.head,
            None => head.as_ref().expect("rank 0 has sent the notes of all"),
        };
        let notes = split_notes(0..world, &all[FRAME_BYTES..]);
        let notes = notes.map_err(|reason| self.broken(self.ports.len() - 1, reason))?;
        Ok(notes.into_iter().map(<[u8]>::to_vec).collect())
    }

    /// Sends and receives as much of a sum as possible without blocking. `head`: what this rank
    /// sends before elements, with the notes of its subtree, once these are complete. Returns
    /// whether anything has moved.
    fn step_of_sum(
        &mut self,
        note: &[u8],
        head: &mut Option<Vec<u8>>,
        dst: &mut [f32],
    ) -> Result<bool, Fault> {
        let (mut has_moved, mut summed) = (false, dst.len());
        let children = self.ports.len() - usize::from(self.position.parent.is_some());
        for at in 0..children {
            let had_head = self.ports[at].has_head();
            has_moved |= self.receive(at, None)?;
            if self.ports[at].has_head() && !had_head {
                let ranks = topology::position(self.ports[at].rank, self.rank_info.world).subtree;
                let checked = split_notes(ranks, &self.ports[at].head[FRAME_BYTES..]).map(drop);
                checked.map_err(|reason| self.broken(at, reason))?;
            }
            has_moved |= self.ports[at].add_to(dst, summed);
            summed = self.ports[at].added;
        }
        if head.is_none() && self.ports[..children].iter().all(Port::has_head) {
            *head = Some(self.head_of_subtree(note, children, size_of_val(dst)));
        }
        let own_head = head.as_deref().unwrap_or_default();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(dst);
        let mut ready = size_of::<f32>() * summed;
        if children < self.ports.len() {
            has_moved |= self.receive(children, Some(&mut *bytes))?;
            let parent = &self.ports[children];
            let early = parent.head_read > 0 && parent.sent < own_head.len().max(1);
            if early || parent.body_read > parent.sent.saturating_sub(own_head.len()) {
                let reason = "got a total without this rank's part".to_owned();
                return Err(self.broken(children, reason));
            }
            if head.is_some() {
                has_moved |= self.send(children, own_head, bytes, ready)?;
            }
            ready = self.ports[children].body_read;
        }
        if head.is_none() {
            return Ok(has_moved);
        }
        let (of_children, parent) = self.ports.split_at_mut(children);
        let (down, whole) = match parent {
            [parent, ..] => (&parent.head[..parent.head_read], parent.head_bytes),
            [] => (own_head, Some(own_head.len())),
        };
        let mut fault = None;
        for (at, child) in of_children.iter_mut().enumerate() {
            child.sends = whole.map(|whole| whole + bytes.len());
            match child.send(&mut self.progress, down, &bytes[..ready]) {
                Ok(sent) => has_moved |= sent,
                Err(lost) => fault = Some((at, lost)),
            }
        }
        match fault {
            Some((at, fault)) => Err(self.root_cause(at, fault)),
            None => Ok(has_moved),
        }
    }

    /// Frame header and notes of this rank's subtree; the children's are complete.
    fn head_of_subtree(&self, note: &[u8], children: usize, bytes: usize) -> Vec<u8> {
        let below = || self.ports[..children].iter().map(|port| &port.head[FRAME_BYTES..]);
        let note_bytes = NOTE_LEN_BYTES + note.len() + below().map(<[u8]>::len).sum::<usize>();
        let RankInfo { rank, .. } = self.rank_info;
        let step = if rank == 0 { DOWN } else { UP };
        let note_len = to_wire(note_bytes);
        let frame =
            Frame { step, origin: to_wire(rank), note_bytes: note_len, ..self.frame(bytes) };
        let mut head = Vec::with_capacity(FRAME_BYTES + note_bytes);
        head.extend_from_slice(&frame.encode());
        head.extend_from_slice(&to_wire(note.len()).to_le_bytes());
        head.extend_from_slice(note);
        below().for_each(|notes| head.extend_from_slice(notes));
        head
    }

    /// Replaces `note` and `body` with those of the root. `body`: as long on all ranks.
    pub(crate) fn broadcast(
        mut self,
        part: Part,
        note: &mut Vec<u8>,
        body: &mut [u8],
    ) -> Result<(), Fault> {
        let Part { root, segment, total_bytes, has_note } = part;
        let RankInfo { rank, world } = self.rank_info;
        self.unused = None;
        let is_below = |port: &Port<'_>| {
            let is_child = self.position.parent != Some(port.rank);
            is_child && topology::position(port.rank, world).subtree.contains(&root)
        };
        let source = match self.ports.iter().position(is_below) {
            None if rank != root => Some(self.ports.len() - 1),
            child => child.filter(|_| rank != root),
        };
        let frame = Frame {
            step: DOWN,
            segment: to_wire(segment),
            origin: to_wire(root),
            total_bytes: total_bytes as u64,
            note_bytes: to_wire(note.len()),
            ..self.frame(body.len())
        };
        let mut head = Vec::new();
        match source {
            Some(source) => self.ports[source].expect(frame, has_note.then_some(root..root + 1)),
            None => head = [&frame.encode()[..], note].concat(),
        }
        let mut spin_wait = SpinWait::for_bytes(body.len());
        loop {
            let mut has_moved = false;
            let (mut ready, mut whole) = (body.len(), Some(head.len()));
            if let Some(source) = source {
                has_moved |= self.receive(source, Some(&mut *body))?;
                let port = &mut self.ports[source];
                port.sends = Some(0);
                head.extend_from_slice(&port.head[head.len()..port.head_read]);
                (ready, whole) = (port.body_read, port.head_bytes);
            }
            for at in (0..self.ports.len()).filter(|at| Some(*at) != source) {
                self.ports[at].sends = whole.map(|whole| whole + body.len());
                has_moved |= self.send_part(at, &head, &body[..ready])?;
            }
            if self.is_done() {
                break;
            }
            self.spin_or_wait(has_moved, &mut spin_wait)?;
        }
        if source.is_some() {
            head.drain(..FRAME_BYTES);
            *note = head;
        }
        Ok(())
    }

    fn frame(&self, bytes: usize) -> Frame {
        let OpTag { kind, generation, sequence } = self.op_tag;
        Frame {
            kind,
            generation,
            sequence,
            step: 0,
            segment: 0,
            origin: 0,
            note_bytes: 0,
            total_bytes: bytes as u64,
            body_bytes: to_wire(bytes),
        }
    }

    fn is_done(&self) -> bool {
        self.ports.iter().all(|port| port.has_sent() && port.has_received())
    }

    /// Receives on a port; `None` for the body: into its scratch memory.
    fn receive(&mut self, at: usize, body: Option<&mut [u8]>) -> Result<bool, Fault> {
        let received = self.ports[at].receive(&mut self.progress, body);
        received.map_err(|fault| self.root_cause(at, fault))
    }

    /// Sends to the parent what of a sum is ready.
    fn send(&mut self, at: usize, head: &[u8], body: &[u8], ready: usize) -> Result<bool, Fault> {
        self.ports[at].sends = Some(head.len() + body.len());
        self.send_part(at, head, &body[..ready])
    }

    fn send_part(&mut self, at: usize, head: &[u8], body: &[u8]) -> Result<bool, Fault> {
        let sent = self.ports[at].send(&mut self.progress, head, body);
        sent.map_err(|fault| self.root_cause(at, fault))
    }

    fn broken(&self, at: usize, reason: String) -> Fault {
        Fault::Rank(self.ports[at].rank, LinkFault::Broken(reason))
    }

    fn spin_or_wait(&mut self, has_moved: bool, spin_wait: &mut SpinWait) -> Result<(), Fault> {
        if has_moved {
            spin_wait.reset();
        } else if !spin_wait.should_spin() {
            spin_wait.reset();
            self.wait()?;
        }
        Ok(())
    }

    /// Blocks until a link or the fence has an event.
    fn wait(&mut self) -> Result<(), Fault> {
        for port in self.ports.iter().filter(|port| port.is_idle() && port.link.has_unread()) {
            check_idle_link(port.link).map_err(|fault| Fault::Rank(port.rank, fault))?;
        }
        if self.unused.is_some_and(Link::has_unread) {
            check_unused_link(&mut self.unused, &self.op_tag).map_err(Fault::Prev)?;
        }
        self.show_wait();
        let mut fds = vec![PollFd::new(self.registration.notifier(), PollFlags::IN)];
        fds.extend(self.unused.map(|unused| PollFd::new(unused, PollFlags::IN)));
        let watched = fds.len();
        let ports = || self.ports.iter().filter(|port| !port.flags().is_empty());
        fds.extend(ports().map(|port| PollFd::new(port.link, port.flags())));
        poll_until(&mut fds, None).map_err(Fault::Wait)?;
        if !fds[0].revents().is_empty() {
            self.registration.notifier().clear();
            if self.registration.check().is_err() {
                return Err(Fault::Wait(ErrorKind::Interrupted.into()));
            }
        }
        let ended = |(port, fd): (&Port<'_>, &PollFd<'_>)| {
            let has_event = !(fd.revents() - PollFlags::OUT).is_empty();
            if !has_event || port.reads() {
                return Ok(());
            }
            let error = |fault| Fault::Rank(port.rank, fault);
            if port.is_idle() {
                return check_idle_link(port.link).map_err(error);
            }
            let lost = port.link.take_error().unwrap_or_else(|| ErrorKind::UnexpectedEof.into());
            Err(error(LinkFault::Lost(lost)))
        };
        ports().zip(&fds[watched..]).try_for_each(ended)?;
        let speaks = self.unused.is_some() && !fds[1].revents().is_empty();
        drop(fds);
        if speaks {
            check_unused_link(&mut self.unused, &self.op_tag).map_err(Fault::Prev)?;
        }
        Ok(())
    }

    /// Shows for whom this rank waits.
    fn show_wait(&mut self) {
        let parent = self.position.parent;
        let awaits = |port: &Port<'_>| port.awaits(parent == Some(port.rank));
        let of = |place| self.ports.iter().filter(move |p: &&Port<'_>| p.place == place);
        let waits_for_next = of(Place::Next).any(awaits);
        let mut far = of(Place::Far).filter(|port| awaits(port)).map(|port| port.member);
        let far = [far.next(), far.next()];
        self.progress.wait_far(&self.op_tag, waits_for_next, far);
    }

    /// Returns the root cause of a fault of the port at `at`. A neighbour may have closed its link
    /// because of a protocol violation that is also visible in data from others. The violation is
    /// reported in preference to the closed link.
    fn root_cause(&mut self, at: usize, fault: LinkFault) -> Fault {
        let rank = self.ports[at].rank;
        if matches!(fault, LinkFault::Lost(_)) {
            let others = self.ports.iter_mut().filter(|port| port.rank != rank);
            for port in others.filter(|port| !port.has_head()) {
                if let Err(broken @ LinkFault::Broken(_)) =
                    port.receive(&mut self.progress, Some(&mut []))
                {
                    return Fault::Rank(port.rank, broken);
                }
            }
        }
        Fault::Rank(rank, fault)
    }
}

const UP: u32 = 0;

const DOWN: u32 = 1;

#[cfg(test)]
mod tests;
