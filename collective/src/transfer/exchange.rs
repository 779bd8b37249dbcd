//! Exchange over the links of a rank: one frame from each rank to each other one, with the payload
//! as its note.
//!
//! ```text
//!   this rank ── frame | payload ──▶ rank r        one link per pair, used in both directions;
//!             ◀── frame | payload ──               two ranks have two links, one per direction
//! ```
//!
//! One thread and one poll for all links. All payloads are sent and received concurrently, as far
//! as the sockets take and give bytes, so no order of ranks can make two of them wait for each
//! other. Payloads are received at their final address.
//!
//! **Invariant:** of a rank whose payload is complete no more is read: it may be in the next
//! operation.
//!
//! **Invariant:** the end of a link is a failure only while one of its two payloads is incomplete.

use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::{Fault, TransferProgress};
use crate::PAYLOAD_BYTES_MAX;
use crate::algorithm::chain_topology::Side;
use crate::communicator::check_length;
use crate::net::fence::GroupRegistration;
use crate::net::frame::{FRAME_BYTES, Frame, OpTag, to_wire};
use crate::net::link::Link;
use crate::net::neighbours::LinkFault;
use crate::net::socket::poll_until;
use crate::net::spin_wait::SpinWait;

/// What this rank and another one give to each other.
#[derive(Debug)]
pub(crate) struct Pair<'a> {
    /// The other rank.
    pub(crate) rank: usize,
    pub(crate) send: &'a [u8],
    pub(crate) receive: Incoming<'a>,
}

/// Where a payload is received.
#[derive(Debug)]
pub(crate) enum Incoming<'a> {
    /// A payload of any length.
    Any(&'a mut Vec<u8>),
    /// A payload that is as long.
    Exact(&'a mut [u8]),
}

impl Pair<'_> {
    /// Copies what a rank gives to itself.
    pub(crate) fn copy(self) {
        match self.receive {
            Incoming::Any(payload) => {
                payload.clear();
                payload.extend_from_slice(self.send);
            }
            Incoming::Exact(payload) => payload.copy_from_slice(self.send),
        }
    }
}

impl Incoming<'_> {
    /// Checks the length of the payload that begins.
    pub(crate) fn check(&self, bytes: usize) -> Result<(), String> {
        match self {
            Self::Any(_) if bytes <= PAYLOAD_BYTES_MAX => Ok(()),
            Self::Any(_) => {
                Err(format!("expected a payload of at most {PAYLOAD_BYTES_MAX} bytes, got {bytes}"))
            }
            Self::Exact(payload) => check_length(bytes, payload.len()),
        }
    }

    /// Memory for more of a payload of `bytes` bytes, of which `done` are here.
    fn missing(&mut self, done: usize, bytes: usize) -> &mut [u8] {
        match self {
            Self::Any(payload) => {
                if done == 0 {
                    payload.truncate(bytes);
                }
                if done == payload.len() {
                    grow(payload, bytes);
                }
                &mut payload[done..]
            }
            Self::Exact(payload) => &mut payload[done..],
        }
    }
}

/// Links to another rank and from it, which may be the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairLinks<'a> {
    pub(crate) to: Direction<'a>,
    pub(crate) from: Direction<'a>,
}

/// A link, in one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Direction<'a> {
    pub(crate) link: &'a Link,
    /// Neighbour in the ring whose link it is, if it is one of the ring's.
    pub(crate) side: Option<Side>,
}

/// The part of an exchange that goes over links.
pub(crate) struct Ports<'a> {
    registration: &'a GroupRegistration,
    op_tag: OpTag,
    ports: Vec<Port<'a>>,
    progress: TransferProgress<'a>,
}

impl<'a> Ports<'a> {
    /// `own_rank`: rank of this member.
    pub(crate) fn new(
        registration: &'a GroupRegistration,
        progress: TransferProgress<'a>,
        op_tag: OpTag,
        own_rank: usize,
        pairs: Vec<(PairLinks<'a>, Pair<'a>)>,
    ) -> Self {
        let ports = pairs.into_iter().map(|(links, Pair { rank, send, receive })| Port {
            rank,
            links,
            header: frame(op_tag, own_rank, send.len()).encode(),
            send,
            sent: 0,
            expected: frame(op_tag, rank, 0),
            incoming: [0; FRAME_BYTES],
            receive,
            bytes: None,
            received: 0,
        });
        Self { registration, op_tag, ports: ports.collect(), progress }
    }

    /// Policy of the waits for these payloads.
    pub(crate) fn spin_wait(&self) -> SpinWait {
        SpinWait::for_bytes(self.ports.iter().map(|port| port.send.len()).sum())
    }

    /// Sends and receives as much as possible without blocking. Returns whether any byte moved.
    pub(crate) fn step(&mut self) -> Result<bool, Fault> {
        let mut has_moved = false;
        for at in 0..self.ports.len() {
            let port = &mut self.ports[at];
            let moved = port
                .send(&mut self.progress)
                .and_then(|sent| port.receive(&mut self.progress).map(|received| sent || received));
            match moved {
                Ok(moved) => has_moved |= moved,
                Err(fault) => return Err(self.root_cause(at, fault)),
            }
        }
        Ok(has_moved)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.ports.iter().all(Port::is_done)
    }

    /// Descriptors of the links that are still needed.
    pub(crate) fn fds(&self) -> Vec<PollFd<'a>> {
        self.ports.iter().flat_map(Port::fds).map(|(fd, _)| fd).collect()
    }

    /// Blocks until a link or the fence has an event. To be called after a step in which nothing
    /// moved.
    pub(crate) fn wait(&mut self) -> Result<(), Fault> {
        let waits_for_next = self.ports.iter().any(Port::waits_for_next);
        self.progress.wait(&self.op_tag, waits_for_next);
        self.poll(None)
    }

    /// Checks whether a link has ended on which only bytes to send are left.
    pub(crate) fn check_ends(&mut self) -> Result<(), Fault> {
        if self.is_done() { Ok(()) } else { self.poll(Some(Instant::now())) }
    }

    fn poll(&mut self, deadline: Option<Instant>) -> Result<(), Fault> {
        let mut fds = vec![PollFd::new(self.registration.notifier(), PollFlags::IN)];
        fds.extend(self.fds());
        poll_until(&mut fds, deadline).map_err(Fault::Wait)?;
        if !fds[0].revents().is_empty() {
            self.registration.notifier().clear();
            if self.registration.check().is_err() {
                return Err(Fault::Wait(ErrorKind::Interrupted.into()));
            }
        }
        let of_ports = self.ports.iter().enumerate();
        let of_ports =
            of_ports.flat_map(|(at, port)| port.fds().map(move |(_, is_read)| (at, is_read)));
        // What is still expected on a link that has ended may be in its socket, and is read first.
        let mut ended = of_ports.zip(&fds[1..]).filter(|(_, fd)| fd.revents().intersects(ENDS));
        let lost = ended.find_map(|((at, is_read), _)| (!is_read).then_some(at));
        let Some(lost) = lost else { return Ok(()) };
        let error = self.ports[lost].links.to.link.take_error();
        let error = error.unwrap_or_else(|| ErrorKind::UnexpectedEof.into());
        Err(self.root_cause(lost, LinkFault::Lost(error)))
    }

    /// Returns the root cause of a fault of the port at `at`. A rank may have closed its link
    /// because of a violation of the protocol that is also visible in data from another one. The
    /// violation is reported in preference to the closed link.
    fn root_cause(&mut self, at: usize, fault: LinkFault) -> Fault {
        let rank = self.ports[at].rank;
        if matches!(fault, LinkFault::Lost(_)) {
            for port in self.ports.iter_mut().filter(|port| port.bytes.is_none()) {
                if let Err(broken @ LinkFault::Broken(_)) = port.receive(&mut self.progress) {
                    return Fault::Rank(port.rank, broken);
                }
            }
        }
        Fault::Rank(rank, fault)
    }
}

/// One pair in progress.
struct Port<'a> {
    rank: usize,
    links: PairLinks<'a>,
    header: [u8; FRAME_BYTES],
    send: &'a [u8],
    /// Number of bytes of header and payload that are sent.
    sent: usize,
    /// Expected header, except for the length of the payload.
    expected: Frame,
    incoming: [u8; FRAME_BYTES],
    receive: Incoming<'a>,
    /// Length of the payload, once the header is complete.
    bytes: Option<usize>,
    /// Number of bytes of header and payload that are received.
    received: usize,
}

impl<'a> Port<'a> {
    fn is_sent(&self) -> bool {
        self.sent == FRAME_BYTES + self.send.len()
    }

    fn is_received(&self) -> bool {
        self.bytes.is_some_and(|bytes| self.received == FRAME_BYTES + bytes)
    }

    fn is_done(&self) -> bool {
        self.is_sent() && self.is_received()
    }

    fn waits_for_next(&self) -> bool {
        self.links.to.side == Some(Side::Next) && !self.is_done()
    }

    /// Descriptors of the links, as far as they are needed, and whether more is to be read there.
    fn fds(&self) -> impl Iterator<Item = (PollFd<'a>, bool)> + use<'a> {
        let PairLinks { to, from } = self.links;
        let when = |condition, flags| if condition { flags } else { PollFlags::empty() };
        let sends = when(!self.is_sent(), PollFlags::OUT | PollFlags::RDHUP);
        let receives = when(!self.is_received(), PollFlags::IN);
        let parts = if std::ptr::eq(to.link, from.link) {
            [(to.link, sends | receives), (from.link, PollFlags::empty())]
        } else {
            [(to.link, sends), (from.link, receives)]
        };
        let needed = parts.into_iter().filter(|(_, flags)| !flags.is_empty());
        needed.map(|(link, flags)| (PollFd::new(link, flags), flags.contains(PollFlags::IN)))
    }

    fn send(&mut self, progress: &mut TransferProgress<'_>) -> Result<bool, LinkFault> {
        if self.is_sent() {
            return Ok(false);
        }
        let Direction { link, side } = self.links.to;
        let header = &self.header[self.sent.min(FRAME_BYTES)..];
        let payload = &self.send[self.sent.saturating_sub(FRAME_BYTES)..];
        let sent = link.send(&[IoSlice::new(header), IoSlice::new(payload)]);
        let Some(bytes) = sent.map_err(LinkFault::Lost)? else { return Ok(false) };
        self.sent += bytes;
        match side {
            Some(Side::Next) => progress.on_sent(bytes),
            Some(Side::Prev) => progress.on_sent_back(bytes),
            None => progress.end_wait(),
        }
        Ok(true)
    }

    /// Receives once: the rest of the header, or of the payload.
    fn receive(&mut self, progress: &mut TransferProgress<'_>) -> Result<bool, LinkFault> {
        if self.is_received() {
            return Ok(false);
        }
        let Direction { link, side } = self.links.from;
        let missing = match self.bytes {
            Some(bytes) => self.receive.missing(self.received - FRAME_BYTES, bytes),
            None => &mut self.incoming[self.received..],
        };
        let Some(bytes) = link.recv(&mut [IoSliceMut::new(missing)])? else { return Ok(false) };
        self.received += bytes;
        match side {
            Some(Side::Next) => progress.on_received_back(bytes),
            Some(Side::Prev) => progress.on_received(bytes),
            None => progress.end_wait(),
        }
        if self.bytes.is_none() && self.received == FRAME_BYTES {
            let bytes = self.check_header().map_err(LinkFault::Broken)?;
            // What an earlier payload has left is not part of this one, even if this one is empty.
            self.receive.missing(0, bytes);
            self.bytes = Some(bytes);
        }
        Ok(true)
    }

    /// Checks the received header, and returns the length of the payload.
    fn check_header(&self) -> Result<usize, String> {
        let frame = Frame::decode(&self.incoming)?;
        frame.check(&self.expected, usize::MAX)?;
        let bytes = frame.note_bytes as usize;
        self.receive.check(bytes).map(|()| bytes)
    }
}

fn frame(op_tag: OpTag, origin: usize, bytes: usize) -> Frame {
    let OpTag { kind, generation, sequence } = op_tag;
    Frame {
        kind,
        generation,
        sequence,
        step: 0,
        segment: 0,
        origin: to_wire(origin),
        note_bytes: to_wire(bytes),
        total_bytes: 0,
        body_bytes: 0,
    }
}

/// Makes room for more of a payload of `bytes` bytes: for all of it if the allocation has it, and
/// otherwise for not much more than what has arrived, since a length costs its sender nothing.
fn grow(payload: &mut Vec<u8>, bytes: usize) {
    let is_allocated = payload.capacity() >= bytes;
    let len = if is_allocated { bytes } else { bytes.min(2 * payload.len().max(GROWTH_BYTES_MIN)) };
    payload.resize(len, 0);
}

/// Half of what is allocated when a payload begins, if it is as long.
const GROWTH_BYTES_MIN: usize = 1 << 20;

const ENDS: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);
