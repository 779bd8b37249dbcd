//! Moves a small sum: partial sums up the ring's two [arms](crate::arms), the total down. Two ranks
//! just tell each other their parts.
//!
//! ```text
//! up, down, to each other:  frame | the notes that are in it, each behind its length (u32) | the elements
//! ```
//!
//! What binds are the writes, with each of which the system delivers into the other's socket, and
//! the wake-ups: 4 KiB take 3 to 6 µs at 2 ranks on 2 cores (14 around the ring), 25 at 4 (100), 95
//! at 8 (450). Then the ring's shorter messages begin to win: 64 KiB take 111 µs at 3 ranks (ring
//! 86), 128 at 4 (97), 221 at 6 (319), 280 at 8 (419); 96 KiB take 502 µs at 6 (321), 575 at 8
//! (489). With α for a message and β for a byte, a relay takes world·(α + β·bytes), a ring
//! 2·(world−1)·(α + β·bytes/world): equal at about α/β bytes: 20 KB at 20 µs and 1 GB/s, more where
//! ranks share cores and α grows.
//!
//! **Invariant:** the total is computed once, at rank 0, and copied from there; of two ranks, both
//! add the same two parts in the same order.
//!
//! **Invariant:** a rank has the total only when every rank's part is in it.
//!
//! **Invariant:** who sends on a link waits for an answer on the same link before it sends there
//! again. So nothing comes that is not awaited, and what can be read without that is the link's
//! end.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::ops::Range;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::arms::{self, Side};
use crate::communicator::BLOCK_BYTES_MAX;
use crate::fence::Pass;
use crate::frame::{FRAME_BYTES, Frame};
use crate::link::poll_until;
use crate::patience::Patience;
use crate::progress::Progress;
use crate::schedule::Seat;
use crate::tcp::Links;
use crate::transfer::{Course, Fault, LinkFault, Stamp, narrow, probe};

/// One small sum under way.
pub(crate) struct Relay<'a> {
    links: &'a Links,
    pass: &'a Pass,
    stamp: Stamp,
    seat: Seat,
    course: Course<'a>,
    /// The link to this rank that no relay uses, between the ends of the arms. A frame of this
    /// operation on it is one of a rank that believes in another operation, and may not show
    /// anywhere else.
    unused: Option<&'a TcpStream>,
    /// By rank; what has not arrived yet is empty.
    notes: Vec<Vec<u8>>,
}

impl<'a> Relay<'a> {
    /// `notes`: one per rank, the own one filled in.
    pub(crate) fn new(
        links: &'a Links,
        pass: &'a Pass,
        progress: &'a Progress,
        stamp: Stamp,
        seat: Seat,
        notes: Vec<Vec<u8>>,
    ) -> Self {
        Self { links, pass, stamp, seat, course: Course::both_ways(progress), unused: None, notes }
    }

    /// Returns with the sum in `dst` and the notes in rank order.
    pub(crate) fn all_reduce(
        mut self,
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, Fault> {
        match self.seat.world {
            2 => self.exchange(src, dst)?,
            _ => self.up_and_down(src, dst)?,
        }
        Ok(self.notes)
    }

    fn exchange(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), Fault> {
        let Seat { rank, .. } = self.seat;
        let other = 1 - rank;
        let message = self.encode(UP, rank..rank + 1, src);
        let mut ports = [self.port(Side::Next), self.port(Side::Prev)];
        ports[0].outgoing = Some((message, 0));
        ports[1].incoming = Some(self.expect(UP, Side::Prev, other..other + 1, src.len()));
        self.pump(&mut ports)?;
        let theirs = self.open(&mut ports[1])?;
        // The first rank's part comes first on both: which of two NaNs a sum is depends on their
        // order.
        let (first, second) = if rank == 0 { (src, &*theirs) } else { (&*theirs, src) };
        for ((sum, first), second) in dst.iter_mut().zip(first).zip(second) {
            *sum = first + second;
        }
        Ok(())
    }

    fn up_and_down(&mut self, src: &[f32], dst: &mut [f32]) -> Result<(), Fault> {
        let Seat { rank, world } = self.seat;
        let place = arms::place(rank, world);
        dst.copy_from_slice(src);
        if place.parent == Some(Side::Next) && !place.prev_is_child {
            self.unused = Some(&self.links.prev.link);
        }

        let mut children = Vec::with_capacity(2);
        for (side, is_child) in
            [(Side::Next, place.next_is_child), (Side::Prev, place.prev_is_child)]
        {
            if is_child {
                let ranks = arms::place(self.neighbour(side), world).subtree;
                let incoming = Some(self.expect(UP, side, ranks, src.len()));
                children.push(Port { needed: true, incoming, ..self.port(side) });
            }
        }
        let mut ports = children;
        ports.extend(place.parent.map(|side| Port { needed: true, ..self.port(side) }));
        self.pump(&mut ports)?;
        for child in ports.iter_mut().filter(|port| port.incoming.is_some()) {
            for (sum, part) in dst.iter_mut().zip(self.open(child)?) {
                *sum += part;
            }
        }

        if let Some(side) = place.parent {
            let parent = ports.last_mut().expect("the parent's is the last one");
            parent.outgoing = Some((self.encode(UP, place.subtree, dst), 0));
            parent.incoming = Some(self.expect(DOWN, side, 0..world, src.len()));
            self.pump(&mut ports)?;
            let mut parent = ports.pop().expect("the parent's is the last one");
            dst.copy_from_slice(&self.open(&mut parent)?);
        }
        if ports.is_empty() {
            return Ok(());
        }
        let message = self.encode(DOWN, 0..world, dst);
        for child in &mut ports {
            child.outgoing = Some((message.clone(), 0));
            child.needed = false;
        }
        self.pump(&mut ports)
    }

    /// Returns when all that is outgoing has left and all that is incoming is there.
    fn pump(&mut self, ports: &mut [Port<'a>]) -> Result<(), Fault> {
        let mut patience = Patience::of(0);
        loop {
            let mut moved = false;
            for index in 0..ports.len() {
                match ports[index].step(&mut self.course) {
                    Ok(flow) => moved |= flow,
                    Err(fault) => {
                        let fault = root_of(fault, ports, &mut self.course, index);
                        return Err(fault);
                    }
                }
            }
            if ports.iter().all(|port| !port.is_busy()) {
                return Ok(());
            }
            if moved {
                patience.restore();
            } else if !patience.lasts() {
                patience.restore();
                self.wait(ports)?;
            }
        }
    }

    /// Sleeps until a link or the fence stirs.
    fn wait(&mut self, ports: &[Port<'a>]) -> Result<(), Fault> {
        let waits_for_next = ports.iter().any(|port| port.side == Side::Next && port.awaits());
        self.course.wait(&self.stamp, waits_for_next);
        let mut fds = vec![PollFd::new(self.pass.bell(), PollFlags::IN)];
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
            self.pass.bell().clear();
            if self.pass.check().is_err() {
                return Err(Fault::Wait(ErrorKind::Interrupted.into()));
            }
        }
        for (port, fd) in ports().zip(&fds[watched..]) {
            if !port.awaits() && !(fd.revents() - PollFlags::OUT).is_empty() {
                probe(port.link).map_err(|fault| port.side.fault(fault))?;
            }
        }
        if self.unused.is_some() && !fds[1].revents().is_empty() {
            self.look_at_unused().map_err(|reason| Fault::Prev(LinkFault::Broken(reason)))?;
        }
        Ok(())
    }

    /// What is there may be of the next operation, from a rank that is done with this one; then it
    /// is left for later.
    fn look_at_unused(&mut self) -> Result<(), String> {
        let Some(unused) = self.unused.take() else { return Ok(()) };
        let mut head = [0; FRAME_BYTES];
        // An end does not matter here, and a head is never sent in parts.
        if !matches!(unused.peek(&mut head), Ok(FRAME_BYTES)) {
            return Ok(());
        }
        let frame = Frame::decode(&head)?;
        if (frame.generation, frame.sequence) == (self.stamp.generation, self.stamp.sequence) {
            let Frame { kind, total_bytes, .. } = frame;
            return Err(format!(
                "expected nothing in this operation, got a frame of {kind:?} of {total_bytes} bytes"
            ));
        }
        Ok(())
    }

    /// The notes of `ranks` and the elements, as they travel.
    fn encode(&self, step: u32, ranks: Range<usize>, elements: &[f32]) -> Vec<u8> {
        let notes = &self.notes[ranks];
        let note_bytes = notes.iter().map(|note| NOTE_HEAD_BYTES + note.len()).sum();
        let frame = Frame {
            note_bytes: narrow(note_bytes),
            ..self.frame(step, self.seat.rank, elements.len())
        };
        let mut message = Vec::with_capacity(FRAME_BYTES + note_bytes + size_of_val(elements));
        message.extend_from_slice(&frame.encode());
        for note in notes {
            message.extend_from_slice(&narrow(note.len()).to_le_bytes());
            message.extend_from_slice(note);
        }
        message.extend_from_slice(bytemuck::cast_slice(elements));
        message
    }

    fn expect(&self, step: u32, side: Side, ranks: Range<usize>, len: usize) -> Incoming {
        let expected = self.frame(step, self.neighbour(side), len);
        // No message is shorter, so that no byte of the one behind is read.
        let shortest = FRAME_BYTES + ranks.len() * NOTE_HEAD_BYTES + expected.body_bytes as usize;
        Incoming { expected, ranks, bytes: vec![0; shortest], read: 0, note_bytes: None }
    }

    fn frame(&self, step: u32, origin: usize, len: usize) -> Frame {
        let Stamp { kind, generation, sequence } = self.stamp;
        let bytes = len * size_of::<f32>();
        Frame {
            kind,
            generation,
            sequence,
            step,
            segment: 0,
            origin: narrow(origin),
            note_bytes: 0,
            total_bytes: bytes as u64,
            body_bytes: narrow(bytes),
        }
    }

    /// Takes the notes of what has arrived, and returns its elements.
    fn open(&mut self, port: &mut Port<'a>) -> Result<Vec<f32>, Fault> {
        let incoming = port.incoming.take().expect("it was awaited");
        let (note, body) = incoming.parts();
        self.take_notes(incoming.ranks.clone(), note)
            .map_err(|reason| port.side.fault(LinkFault::Broken(reason)))?;
        let (elements, _) = body.as_chunks();
        Ok(elements.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    fn take_notes(&mut self, ranks: Range<usize>, mut bytes: &[u8]) -> Result<(), String> {
        for rank in ranks {
            let (length, rest) =
                bytes.split_first_chunk().ok_or("expected another note's length")?;
            let length = u32::from_le_bytes(*length) as usize;
            if length > BLOCK_BYTES_MAX.min(rest.len()) {
                return Err(format!(
                    "expected the note of rank {rank}, got a length of {length} bytes"
                ));
            }
            let (note, rest) = rest.split_at(length);
            self.notes[rank] = note.to_vec();
            bytes = rest;
        }
        match bytes.len() {
            0 => Ok(()),
            more => Err(format!("expected no more notes, got {more} bytes")),
        }
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

/// A neighbour's link, and what is under way on it.
struct Port<'a> {
    side: Side,
    link: &'a TcpStream,
    /// The operation needs it later, so that its end counts even if nothing is under way on it. A
    /// neighbour that has all it needs may leave.
    needed: bool,
    /// A message, and how much of it has left.
    outgoing: Option<(Vec<u8>, usize)>,
    /// Stays, when it is complete, until it is opened.
    incoming: Option<Incoming>,
}

impl Port<'_> {
    fn awaits(&self) -> bool {
        self.incoming.as_ref().is_some_and(|incoming| !incoming.is_complete())
    }

    fn is_busy(&self) -> bool {
        self.outgoing.is_some() || self.awaits()
    }

    /// Sends and receives what can be now. Whether anything moved.
    fn step(&mut self, course: &mut Course<'_>) -> Result<bool, Fault> {
        let sent = self.send(course).map_err(|fault| self.side.fault(fault))?;
        let received = self.receive(course).map_err(|fault| self.side.fault(fault))?;
        Ok(sent || received)
    }

    fn send(&mut self, course: &mut Course<'_>) -> Result<bool, LinkFault> {
        let Some((message, written)) = &mut self.outgoing else { return Ok(false) };
        match rustix::net::send(self.link, &message[*written..], SendFlags::NOSIGNAL) {
            Ok(bytes) => {
                *written += bytes;
                match self.side {
                    Side::Next => course.on_sent(bytes),
                    Side::Prev => course.on_sent_back(bytes),
                }
                if *written == message.len() {
                    self.outgoing = None;
                }
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(LinkFault::Lost(errno.into())),
        }
    }

    fn receive(&mut self, course: &mut Course<'_>) -> Result<bool, LinkFault> {
        let Some(incoming) = self.incoming.as_mut().filter(|incoming| !incoming.is_complete())
        else {
            return Ok(false);
        };
        let mut link = self.link;
        match link.read(&mut incoming.bytes[incoming.read..]) {
            Ok(0) => Err(LinkFault::Lost(ErrorKind::UnexpectedEof.into())),
            Ok(bytes) => {
                incoming.on_read(bytes).map_err(LinkFault::Broken)?;
                match self.side {
                    Side::Next => course.on_received_back(bytes),
                    Side::Prev => course.on_received(bytes),
                }
                Ok(true)
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) =>
            {
                Ok(false)
            }
            Err(error) => Err(LinkFault::Lost(error)),
        }
    }
}

/// A message that arrives.
struct Incoming {
    /// All but the length of its notes.
    expected: Frame,
    /// Whose notes are in it.
    ranks: Range<usize>,
    /// As long as is sure so far.
    bytes: Vec<u8>,
    read: usize,
    /// Known when the head has arrived.
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
        let head = self.bytes.first_chunk().expect("a message is longer than its head");
        let frame = Frame::decode(head)?;
        let count = self.ranks.len();
        frame.check(&self.expected, count * (NOTE_HEAD_BYTES + BLOCK_BYTES_MAX))?;
        let note_bytes = frame.note_bytes as usize;
        if note_bytes < count * NOTE_HEAD_BYTES {
            return Err(format!("expected the notes of {count} ranks, got {note_bytes} bytes"));
        }
        self.bytes.resize(FRAME_BYTES + note_bytes + frame.body_bytes as usize, 0);
        self.note_bytes = Some(note_bytes);
        Ok(())
    }

    /// The notes and the elements.
    fn parts(&self) -> (&[u8], &[u8]) {
        let note_bytes = self.note_bytes.expect("it is complete");
        self.bytes[FRAME_BYTES..].split_at(note_bytes)
    }
}

/// A neighbour that ended its link may have done so over a disagreement that shows in what others
/// have sent, too; that says more than an end.
fn root_of(fault: Fault, ports: &mut [Port<'_>], course: &mut Course<'_>, at: usize) -> Fault {
    for port in ports.iter_mut().enumerate().filter(|(index, _)| *index != at).map(|(_, port)| port)
    {
        loop {
            match port.receive(course) {
                Ok(true) => {}
                Err(broken @ LinkFault::Broken(_)) => return port.side.fault(broken),
                Ok(false) | Err(_) => break,
            }
        }
    }
    fault
}

const UP: u32 = 0;

const DOWN: u32 = 1;

const NOTE_HEAD_BYTES: usize = size_of::<u32>();

/// A frame says the length of all notes together, at most `WORLD_MAX` blocks, in 32 bits.
pub(crate) const WORLD_MAX: usize = 128;

#[cfg(test)]
mod tests;
