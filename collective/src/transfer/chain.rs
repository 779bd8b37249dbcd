//! Double-chain all-reduce for small buffers: partial sums move up the two [chains](topology)
//! of the ring, the total moves down. Two ranks exchange their contributions directly. Four do so
//! twice, first within pairs and then between them (recursive doubling), as their ring is a square.
//!
//! ```text
//! message:  frame header | notes of the contributing ranks, each after its length (u32) | elements
//! ```
//!
//! Latency is bounded by the writes, in each of which the kernel delivers into the receiver's
//! socket, and by the wake-ups. With cost α per message and β per byte, a chain takes world·(α +
//! β·bytes) and a ring 2·(world−1)·(α + β·bytes/world). The two are equal at about α/β bytes: 30 KB
//! at 30 µs and 1 GB/s, more where ranks share cores and α grows, and never for 2 ranks. Measured
//! over the loopback on 2 quiet cores, in turns with the ring, in µs:
//!
//! | ranks | 32 KiB | 64 KiB | 96 KiB | 128 KiB |
//! |---|---|---|---|---|
//! | 2 | 17, ring 22 | 27, 27 | 29, 32 | 42, 51 |
//! | 3 | 49, ring 117 | 89, 144 | 142, 150 | 126, 154 |
//! | 4 | 91, ring 176 | 123, 209 | 210, 219 | 157, 253 |
//! | 6 | 96, ring 440 | 304, 521 | 218, 602 | 303, 472 |
//! | 8 | 184, ring 721 | 235, 766 | 290, 748 | 343, 810 |
//!
//! On networks of 10 Gbit/s the ring would be the faster one above some 64 KiB.
//!
//! **Invariant:** the total is computed once, at rank 0, and copied from there. With two ranks and
//! with four, all add the same contributions in the same order.
//!
//! **Invariant:** a rank has the total only when the contribution of every rank is in it.
//!
//! **Invariant:** a rank that sends on a link waits for an answer on the same link before it sends
//! there again. So every message is expected, and anything readable on a link with no expected
//! message is the end of that link.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::ops::Range;

use rustix::event::{PollFd, PollFlags};

use super::{Fault, TransferProgress};
use crate::algorithm::chain_topology::{self as topology, Side};
use crate::algorithm::schedule::RankInfo;
use crate::communicator::BLOCK_BYTES_MAX;
use crate::net::fence::GroupRegistration;
use crate::net::frame::{FRAME_BYTES, Frame, OpTag, to_wire};
use crate::net::link::Link;
use crate::net::neighbours::{LinkFault, Links, check_idle_link, check_unused_link};
use crate::net::progress::Progress;
use crate::net::socket::poll_until;
use crate::net::spin_wait::SpinWait;

/// One small all-reduce in progress.
pub(crate) struct ChainReduce<'a> {
    links: &'a Links,
    registration: &'a GroupRegistration,
    op_tag: OpTag,
    rank_info: RankInfo,
    progress: TransferProgress<'a>,
    /// The incoming link between the ends of the two chains, which this operation does not use. A
    /// frame of this operation on it comes from a rank that runs another operation; the mismatch
    /// may not show on any other link.
    unused: Option<&'a Link>,
    /// Notes by rank; empty until they arrive.
    notes: Vec<Vec<u8>>,
}

impl<'a> ChainReduce<'a> {
    /// `notes`: one per rank; the entry of this rank is filled in.
    pub(crate) fn new(
        links: &'a Links,
        registration: &'a GroupRegistration,
        progress: &'a Progress,
        op_tag: OpTag,
        rank_info: RankInfo,
        notes: Vec<Vec<u8>>,
    ) -> Self {
        Self {
            links,
            registration,
            op_tag,
            rank_info,
            progress: TransferProgress::both_ways(progress),
            unused: None,
            notes,
        }
    }

    /// Writes the sum to `dst` and returns the notes in rank order.
    pub(crate) fn all_reduce(
        mut self,
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, Fault> {
        match self.rank_info.world {
            2 => self.exchange(src, dst)?,
            4 => self.exchange_twice(src, dst)?,
            _ => self.up_and_down(src, dst)?,
        }
        Ok(self.notes)
    }

    fn exchange(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), Fault> {
        let RankInfo { rank, .. } = self.rank_info;
        let other = 1 - rank;
        let mut ports = [self.port(Side::Next), self.port(Side::Prev)];
        ports[0].outgoing = Some(self.head(UP, rank..rank + 1, src.len()));
        ports[1].incoming = Some(self.expect(UP, Side::Prev, other..other + 1, src.len()));
        self.pump(&mut ports, src)?;
        dst.copy_from_slice(src);
        self.open(&mut ports[1])?.add_to(dst, rank == 0);
        Ok(())
    }

    fn exchange_twice(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), Fault> {
        let RankInfo { rank, .. } = self.rank_info;
        let is_even = rank.is_multiple_of(2);
        let sides = if is_even { [Side::Next, Side::Prev] } else { [Side::Prev, Side::Next] };
        let (pair, other_pair) = (rank & !1, !rank & 2);
        let mut ports = sides.map(|side| Port { needed: true, ..self.port(side) });
        ports[0].outgoing = Some(self.head(UP, rank..rank + 1, src.len()));
        ports[0].incoming = Some(self.expect(UP, sides[0], rank ^ 1..(rank ^ 1) + 1, src.len()));
        // The other pair may be faster.
        let ranks = other_pair..other_pair + 2;
        ports[1].incoming = Some(self.expect(DOWN, sides[1], ranks, src.len()));
        self.pump_first(1, &mut ports, src)?;
        dst.copy_from_slice(src);
        self.open(&mut ports[0])?.add_to(dst, is_even);
        ports[1].outgoing = Some(self.head(DOWN, pair..pair + 2, dst.len()));
        self.pump(&mut ports[1..], dst)?;
        self.open(&mut ports[1])?.add_to(dst, pair == 0);
        Ok(())
    }

    fn up_and_down(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), Fault> {
        let RankInfo { rank, world } = self.rank_info;
        let position = topology::position(rank, world);
        dst.copy_from_slice(src);
        if position.parent == Some(Side::Next) && !position.prev_is_child {
            self.unused = Some(&self.links.prev.link);
        }

        let mut children = Vec::with_capacity(2);
        for (side, is_child) in
            [(Side::Next, position.next_is_child), (Side::Prev, position.prev_is_child)]
        {
            if is_child {
                let ranks = topology::position(self.neighbour(side), world).subtree;
                let incoming = Some(self.expect(UP, side, ranks, src.len()));
                children.push(Port { needed: true, incoming, ..self.port(side) });
            }
        }
        let mut ports = children;
        ports.extend(position.parent.map(|side| Port { needed: true, ..self.port(side) }));
        self.pump(&mut ports, &[])?;
        for child in ports.iter_mut().filter(|port| port.incoming.is_some()) {
            self.open(child)?.add_to(dst, true);
        }

        if let Some(side) = position.parent {
            let parent = ports.last_mut().expect("the parent's port is the last one");
            parent.outgoing = Some(self.head(UP, position.subtree, dst.len()));
            parent.incoming = Some(self.expect(DOWN, side, 0..world, src.len()));
            self.pump(&mut ports, dst)?;
            let mut parent = ports.pop().expect("the parent's port is the last one");
            self.open(&mut parent)?.copy_to(dst);
        }
        if ports.is_empty() {
            return Ok(());
        }
        let head = self.head(DOWN, 0..world, dst.len());
        for child in &mut ports {
            child.outgoing = Some(head.clone());
            child.needed = false;
        }
        self.pump(&mut ports, dst)
    }

    /// Returns when every outgoing message is sent and every incoming one is complete. `elements`:
    /// those of the outgoing ones.
    fn pump(&mut self, ports: &mut [Port<'a>], elements: &[f32]) -> Result<(), Fault> {
        self.pump_first(ports.len(), ports, elements)
    }

    /// As [`pump`](Self::pump), when this is so of the first `count` ports.
    fn pump_first(
        &mut self,
        count: usize,
        ports: &mut [Port<'a>],
        elements: &[f32],
    ) -> Result<(), Fault> {
        let mut spin_wait = SpinWait::for_bytes(0);
        loop {
            let mut moved = false;
            for index in 0..ports.len() {
                match ports[index].step(elements, &mut self.progress) {
                    Ok(flow) => moved |= flow,
                    Err(fault) => {
                        let fault = root_cause(fault, ports, &mut self.progress, index);
                        return Err(fault);
                    }
                }
            }
            if ports[..count].iter().all(|port| !port.is_busy()) {
                return Ok(());
            }
            if moved {
                spin_wait.reset();
            } else if !spin_wait.should_spin() {
                spin_wait.reset();
                self.wait(ports)?;
            }
        }
    }

    /// Blocks until a link or the fence has an event.
    fn wait(&mut self, ports: &[Port<'a>]) -> Result<(), Fault> {
        self.check_unread(ports)?;
        let waits_for_next = ports.iter().any(|port| port.side == Side::Next && port.awaits());
        self.progress.wait(&self.op_tag, waits_for_next);
        let mut fds = vec![PollFd::new(self.registration.notifier(), PollFlags::IN)];
        if let Some(unused) = self.unused {
            fds.push(PollFd::new(unused, PollFlags::IN));
        }
        let watched = fds.len();
        let ports = || ports.iter().filter(|port| port.needed || port.is_busy());
        fds.extend(ports().map(|port| {
            let flags = if port.outgoing.is_some() { PollFlags::OUT } else { PollFlags::empty() };
            PollFd::new(port.link, PollFlags::IN | flags)
        }));
        poll_until(&mut fds, None).map_err(Fault::Wait)?;
        if !fds[0].revents().is_empty() {
            self.registration.notifier().clear();
            if self.registration.check().is_err() {
                return Err(Fault::Wait(ErrorKind::Interrupted.into()));
            }
        }
        for (port, fd) in ports().zip(&fds[watched..]) {
            if !port.awaits() && !(fd.revents() - PollFlags::OUT).is_empty() {
                check_idle_link(port.link).map_err(|fault| port.side.fault(fault))?;
            }
        }
        if self.unused.is_some() && !fds[1].revents().is_empty() {
            check_unused_link(&mut self.unused, &self.op_tag).map_err(Fault::Prev)?;
        }
        Ok(())
    }

    /// Checks the links that should be idle for bytes that `poll` does not show.
    fn check_unread(&mut self, ports: &[Port<'a>]) -> Result<(), Fault> {
        for port in ports.iter().filter(|port| !port.awaits() && port.link.has_unread()) {
            check_idle_link(port.link).map_err(|fault| port.side.fault(fault))?;
        }
        if self.unused.is_some_and(Link::has_unread) {
            check_unused_link(&mut self.unused, &self.op_tag).map_err(Fault::Prev)?;
        }
        Ok(())
    }

    /// A message, up to its elements, of which there are `len`, with the notes of `ranks`.
    fn head(&self, step: u32, ranks: Range<usize>, len: usize) -> Outgoing {
        let notes = &self.notes[ranks];
        let note_bytes = notes.iter().map(|note| NOTE_LEN_BYTES + note.len()).sum();
        let note_len = to_wire(note_bytes);
        let frame = Frame { note_bytes: note_len, ..self.frame(step, self.rank_info.rank, len) };
        let mut head = Vec::with_capacity(FRAME_BYTES + note_bytes);
        head.extend_from_slice(&frame.encode());
        for note in notes {
            head.extend_from_slice(&to_wire(note.len()).to_le_bytes());
            head.extend_from_slice(note);
        }
        Outgoing { head, written: 0 }
    }

    fn expect(&self, step: u32, side: Side, ranks: Range<usize>, len: usize) -> Incoming {
        let expected = self.frame(step, self.neighbour(side), len);
        // No valid message is shorter, so no byte of the following message is read.
        let shortest = FRAME_BYTES + ranks.len() * NOTE_LEN_BYTES + expected.body_bytes as usize;
        Incoming { expected, ranks, bytes: vec![0; shortest], read: 0, note_bytes: None }
    }

    fn frame(&self, step: u32, origin: usize, len: usize) -> Frame {
        let OpTag { kind, generation, sequence } = self.op_tag;
        let bytes = len * size_of::<f32>();
        Frame {
            kind,
            generation,
            sequence,
            step,
            segment: 0,
            origin: to_wire(origin),
            note_bytes: 0,
            total_bytes: bytes as u64,
            body_bytes: to_wire(bytes),
        }
    }

    /// Stores the notes of a complete message, and returns it.
    fn open(&mut self, port: &mut Port<'a>) -> Result<Incoming, Fault> {
        let incoming = port.incoming.take().expect("the message is expected");
        let (notes, _) = incoming.parts();
        self.take_notes(incoming.ranks.clone(), notes)
            .map_err(|reason| port.side.fault(LinkFault::Broken(reason)))?;
        Ok(incoming)
    }

    fn take_notes(&mut self, ranks: Range<usize>, bytes: &[u8]) -> Result<(), String> {
        for (rank, note) in ranks.clone().zip(split_notes(ranks, bytes)?) {
            self.notes[rank] = note.to_vec();
        }
        Ok(())
    }

    fn port(&self, side: Side) -> Port<'a> {
        let links = self.links;
        let link = match side {
            Side::Next => &*links.next.link,
            Side::Prev => &*links.prev.link,
        };
        Port { side, link, needed: false, outgoing: None, incoming: None }
    }

    fn neighbour(&self, side: Side) -> usize {
        match side {
            Side::Next => self.links.next.rank,
            Side::Prev => self.links.prev.rank,
        }
    }
}

impl Side {
    fn fault(self, fault: LinkFault) -> Fault {
        match self {
            Self::Next => Fault::Next(fault),
            Self::Prev => Fault::Prev(fault),
        }
    }
}

/// The link of a neighbour, and the messages in progress on it.
struct Port<'a> {
    side: Side,
    link: &'a Link,
    /// Whether a later phase of the operation needs the link, so that its end is a failure even
    /// when no message is in progress. A neighbour that has received everything may leave.
    needed: bool,
    outgoing: Option<Outgoing>,
    /// Message being received; a complete one stays until it is opened.
    incoming: Option<Incoming>,
}

impl Port<'_> {
    fn awaits(&self) -> bool {
        self.incoming.as_ref().is_some_and(|incoming| !incoming.is_complete())
    }

    fn is_busy(&self) -> bool {
        self.outgoing.is_some() || self.awaits()
    }

    /// Sends and receives as much as possible without blocking. Returns whether any byte moved.
    fn step(
        &mut self,
        elements: &[f32],
        progress: &mut TransferProgress<'_>,
    ) -> Result<bool, Fault> {
        let sent = self.send(elements, progress).map_err(|fault| self.side.fault(fault))?;
        let received = self.receive(progress).map_err(|fault| self.side.fault(fault))?;
        Ok(sent || received)
    }

    fn send(
        &mut self,
        elements: &[f32],
        progress: &mut TransferProgress<'_>,
    ) -> Result<bool, LinkFault> {
        let Some(Outgoing { head, written }) = &mut self.outgoing else { return Ok(false) };
        let body: &[u8] = bytemuck::cast_slice(elements);
        let sent = match written.checked_sub(head.len()) {
            None => self.link.send(&[IoSlice::new(&head[*written..]), IoSlice::new(body)]),
            Some(of_body) => self.link.send(&[IoSlice::new(&body[of_body..])]),
        };
        let Some(bytes) = sent.map_err(LinkFault::Lost)? else { return Ok(false) };
        *written += bytes;
        match self.side {
            Side::Next => progress.on_sent(bytes),
            Side::Prev => progress.on_sent_back(bytes),
        }
        if *written == head.len() + body.len() {
            self.outgoing = None;
        }
        Ok(true)
    }

    fn receive(&mut self, progress: &mut TransferProgress<'_>) -> Result<bool, LinkFault> {
        let Some(incoming) = self.incoming.as_mut().filter(|incoming| !incoming.is_complete())
        else {
            return Ok(false);
        };
        let into = &mut incoming.bytes[incoming.read..];
        let Some(bytes) = self.link.recv(&mut [IoSliceMut::new(into)])? else { return Ok(false) };
        incoming.on_read(bytes).map_err(LinkFault::Broken)?;
        match self.side {
            Side::Next => progress.on_received_back(bytes),
            Side::Prev => progress.on_received(bytes),
        }
        Ok(true)
    }
}

/// A message that is being sent.
#[derive(Clone)]
struct Outgoing {
    /// What comes before the elements.
    head: Vec<u8>,
    /// Number of bytes, of both, that are sent.
    written: usize,
}

/// A message that is being received.
struct Incoming {
    /// Expected frame header, except for the length of the notes.
    expected: Frame,
    /// Ranks whose notes are in the message.
    ranks: Range<usize>,
    /// Received bytes; as long as the message is known to be so far.
    bytes: Vec<u8>,
    read: usize,
    /// Length of the notes, once the frame header is complete.
    note_bytes: Option<usize>,
}

impl Incoming {
    fn is_complete(&self) -> bool {
        self.note_bytes.is_some() && self.read == self.bytes.len()
    }

    fn on_read(&mut self, bytes: usize) -> Result<(), String> {
        self.read += bytes;
        if self.note_bytes.is_some() || self.read < FRAME_BYTES {
            return Ok(());
        }
        let header = self.bytes.first_chunk().expect("a message is longer than its frame header");
        let frame = Frame::decode(header)?;
        let count = self.ranks.len();
        frame.check(&self.expected, count * (NOTE_LEN_BYTES + BLOCK_BYTES_MAX))?;
        let note_bytes = frame.note_bytes as usize;
        if note_bytes < count * NOTE_LEN_BYTES {
            return Err(format!("expected the notes of {count} ranks, got {note_bytes} bytes"));
        }
        self.bytes.resize(FRAME_BYTES + note_bytes + frame.body_bytes as usize, 0);
        self.note_bytes = Some(note_bytes);
        Ok(())
    }

    /// Returns the notes and the elements of a complete message.
    fn parts(&self) -> (&[u8], &[u8]) {
        let note_bytes = self.note_bytes.expect("the message is complete");
        self.bytes[FRAME_BYTES..].split_at(note_bytes)
    }

    /// Writes the elements of a complete message to `dst`.
    fn copy_to(&self, dst: &mut [f32]) {
        bytemuck::cast_slice_mut(dst).copy_from_slice(self.parts().1);
    }

    /// Adds the elements of a complete message to `dst`, which is the part of lower ranks if it
    /// `is_lower`.
    fn add_to(&self, dst: &mut [f32], is_lower: bool) {
        let (mut own, mut theirs) = ([0.0; ADDED_AT_ONCE], [0.0; ADDED_AT_ONCE]);
        let blocks = self.parts().1.chunks(size_of_val(&own));
        for (dst, block) in dst.chunks_mut(ADDED_AT_ONCE).zip(blocks) {
            let (own, theirs) = (&mut own[..dst.len()], &mut theirs[..dst.len()]);
            own.copy_from_slice(dst);
            bytemuck::cast_slice_mut(theirs).copy_from_slice(block);
            if is_lower { add(own, theirs, dst) } else { add(theirs, own, dst) }
        }
    }
}

/// Writes the sum of two parts, of which that of the lower ranks is the first: which of two NaNs a
/// sum keeps depends on the order of the operands, so this function must not know which is whose.
#[inline(never)]
fn add(first: &[f32], second: &[f32], dst: &mut [f32]) {
    for ((sum, first), second) in dst.iter_mut().zip(first).zip(second) {
        *sum = first + second;
    }
}

/// Returns the root cause of `fault`. A neighbour may have closed its link because of a protocol
/// violation that is also visible in data from other neighbours. The violation is reported in
/// preference to the closed link.
fn root_cause(
    fault: Fault,
    ports: &mut [Port<'_>],
    progress: &mut TransferProgress<'_>,
    at: usize,
) -> Fault {
    for port in ports.iter_mut().enumerate().filter(|(index, _)| *index != at).map(|(_, port)| port)
    {
        loop {
            match port.receive(progress) {
                Ok(true) => {}
                Err(broken @ LinkFault::Broken(_)) => return port.side.fault(broken),
                Ok(false) | Err(_) => break,
            }
        }
    }
    fault
}

/// Number of floats that stay in the nearest cache while they are added.
const ADDED_AT_ONCE: usize = 1024;

const UP: u32 = 0;

const DOWN: u32 = 1;

/// Returns the notes of these ranks, each of which follows its length.
pub(super) fn split_notes(ranks: Range<usize>, mut bytes: &[u8]) -> Result<Vec<&[u8]>, String> {
    let mut notes = Vec::with_capacity(ranks.len());
    for rank in ranks {
        let (length, rest) =
            bytes.split_first_chunk().ok_or("expected the length of another note")?;
        let length = u32::from_le_bytes(*length) as usize;
        if length > BLOCK_BYTES_MAX.min(rest.len()) {
            return Err(format!(
                "expected the note of rank {rank}, got a length of {length} bytes"
            ));
        }
        let (note, rest) = rest.split_at(length);
        notes.push(note);
        bytes = rest;
    }
    match bytes.len() {
        0 => Ok(notes),
        more => Err(format!("expected no more notes, got {more} bytes")),
    }
}

pub(super) const NOTE_LEN_BYTES: usize = size_of::<u32>();

/// Largest group; in larger ones the way along a [tree](super::tree) is shorter.
pub(crate) const WORLD_MAX: usize = 8;

#[cfg(test)]
mod tests;
