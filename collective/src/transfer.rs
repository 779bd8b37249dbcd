//! Moves one operation's pieces over the two links of a rank.
//!
//! ```text
//!   prev ── frame | note | body ──▶ this rank ── frame | note | body ──▶ next
//! ```
//!
//! One thread, two non-blocking sockets (or several pairs of them, a part of the sum each), one
//! poll: with a core per rank this beats a thread per direction.
//!
//! What binds, on loopback and two cores: up to about 1 MiB system calls and wake-ups, of which
//! there are `2·(n−1)` writes and reads per rank one behind the other; above that the two copies of
//! each byte, into the kernel and out of it. Of the processor time of 4 ranks and 16 MiB, 33 ms,
//! they take 47 %, the additions, which wait for memory, 16 %, the way through the stack and all
//! else 37 %; on an idle machine both cores are busy with it for 16 ms, 1.6 GB/s of bus bandwidth.
//! To save the copy into the kernel would take pages that nobody changes until the neighbour has
//! read them, and an operation that is aborted can't wait for that. Over a network the wire binds.
//!
//! **Invariant:** a frame, its note and its body leave in one system call, unless the socket's
//! buffer is full.
//!
//! **Invariant:** a link's end counts only while the operation still needs the link. A neighbour
//! that has all it needs may leave.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::net::TcpStream;
use std::ops::Range;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use crate::communicator::BLOCK_BYTES_MAX;
use crate::fence::GroupRegistration;
use crate::frame::{FRAME_BYTES, Frame, Kind};
use crate::host_group::Links;
use crate::link::poll_until;
use crate::payload::Payload;
use crate::progress::{Progress, WaitPoint};
use crate::schedule::{Piece, Schedule};
use crate::shm::{LinkMonitor, SharedFault, SharedRegion};
use crate::spin_wait::SpinWait;

/// One operation under way.
pub(crate) struct Transfer<'a> {
    links: &'a Links,
    registration: &'a GroupRegistration,
    op_tag: OpTag,
    schedule: Schedule,
    payload: Payload<'a>,
    outgoing: Option<Outgoing>,
    incoming: Incoming,
    progress: TransferProgress<'a>,
    /// The next member's link is needed to the end, whatever is left to be sent.
    needs_next: bool,
    /// What is watched beside the links.
    link_monitor: Option<LinkMonitor<'a>>,
    /// What the ranks of this host share, where this one leads them.
    region: Option<&'a SharedRegion>,
}

/// What all frames of one operation have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpTag {
    pub(crate) kind: Kind,
    pub(crate) generation: u64,
    pub(crate) sequence: u64,
}

/// Why a transfer stopped. Whether that was the fence's doing is for the caller to ask.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Among the ranks of this host, or at a link beside the transfer's.
    Here(SharedFault),
    Next(LinkFault),
    Prev(LinkFault),
    Wait(io::Error),
}

/// What is wrong with a link.
#[derive(Debug)]
pub(crate) enum LinkFault {
    Broken(String),
    Lost(io::Error),
}

impl<'a> Transfer<'a> {
    pub(crate) fn new(
        links: &'a Links,
        registration: &'a GroupRegistration,
        progress: &'a Progress,
        op_tag: OpTag,
        schedule: Schedule,
        payload: Payload<'a>,
    ) -> Self {
        let incoming = Incoming { head: [0; FRAME_BYTES], read: 0, note_bytes: 0 };
        let progress = TransferProgress::one_way(progress);
        Self {
            links,
            registration,
            op_tag,
            schedule,
            payload,
            outgoing: None,
            incoming,
            progress,
            needs_next: false,
            link_monitor: None,
            region: None,
        }
    }

    /// The next member can't be done before this rank is: its end is that of the operation, even if
    /// all is sent.
    pub(crate) fn with_next_required(self) -> Self {
        Self { needs_next: true, ..self }
    }

    /// Among leaders of hosts: their ring is not the group's. So neither are its bytes shown, which
    /// would be taken for those between neighbours of the group.
    pub(crate) fn alongside(
        self,
        link_monitor: LinkMonitor<'a>,
        region: Option<&'a SharedRegion>,
    ) -> Self {
        let progress = TransferProgress {
            is_shown: false,
            ..TransferProgress::one_way(self.progress.progress)
        };
        Self { link_monitor: Some(link_monitor), region, progress, ..self }
    }

    /// Returns when all pieces are sent and received, with the notes in rank order.
    pub(crate) fn run(self) -> Result<Vec<Vec<u8>>, Fault> {
        run_all(vec![self])
    }

    /// Sends until the socket is full, or nothing more may be sent yet.
    fn send(&mut self) -> Result<Flow, Fault> {
        let mut flow = Flow::Idle;
        while let Some(piece) = self.schedule.next_send() {
            if self.outgoing.is_none() {
                self.payload.prepare(&piece).map_err(Fault::Here)?;
                // It may have waited meanwhile, and shown that.
                self.progress.end_wait();
                let head = self.frame(&piece).encode();
                self.outgoing = Some(Outgoing { head, written: 0 });
            }
            let outgoing = self.outgoing.as_mut().expect("it was just put there");
            let (note, body) = self.payload.send_bufs(&piece);
            match outgoing.write(&self.links.next.link, note, body) {
                Ok(bytes) => {
                    self.progress.on_sent(bytes);
                    if outgoing.written == FRAME_BYTES + note.len() + body.len() {
                        self.outgoing = None;
                        self.schedule.on_sent();
                        flow = Flow::Moved;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Flow::Blocked),
                Err(errno) => return Err(Fault::Next(LinkFault::Lost(errno.into()))),
            }
        }
        Ok(flow)
    }

    /// Receives until a piece is complete, or the socket is empty.
    fn receive(&mut self) -> Result<Flow, Fault> {
        let Some(piece) = self.schedule.next_receive() else { return Ok(Flow::Idle) };
        loop {
            match self.read(&piece) {
                Ok(0) => return Err(Fault::Prev(LinkFault::Lost(ErrorKind::UnexpectedEof.into()))),
                Ok(bytes) => {
                    let head_complete = self.incoming.read >= FRAME_BYTES;
                    self.incoming.read += bytes;
                    self.progress.on_received(bytes);
                    if !head_complete && self.incoming.read >= FRAME_BYTES {
                        let note_bytes = self
                            .check(&piece)
                            .map_err(|reason| Fault::Prev(LinkFault::Broken(reason)))?;
                        self.incoming.note_bytes = note_bytes;
                        if piece.note {
                            self.payload.expect_note(&piece, note_bytes);
                        }
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Flow::Blocked),
                Err(error) => return Err(Fault::Prev(LinkFault::Lost(error))),
            }
            let Incoming { read, note_bytes, .. } = self.incoming;
            if read >= FRAME_BYTES
                && read == FRAME_BYTES + note_bytes + self.payload.piece_bytes(&piece)
            {
                self.incoming.read = 0;
                self.payload.on_received(&piece).map_err(Fault::Here)?;
                self.schedule.on_received();
                return Ok(Flow::Moved);
            }
        }
    }

    /// One read: the rest of the head and, where its length is sure, the body with it; or what is
    /// left behind the head.
    fn read(&mut self, piece: &Piece) -> io::Result<usize> {
        let Self { links, schedule, payload, incoming, .. } = self;
        let mut prev: &TcpStream = &links.prev.link;
        if incoming.read < FRAME_BYTES {
            let head = &mut incoming.head[incoming.read..];
            if piece.note || schedule.next_receive_is_early() {
                return prev.read(head);
            }
            let (_, body) = payload.recv_bufs(piece);
            return prev.read_vectored(&mut [IoSliceMut::new(head), IoSliceMut::new(body)]);
        }
        let done = incoming.read - FRAME_BYTES;
        let (note, body) = payload.recv_bufs(piece);
        let (note_done, body_done) = (done.min(note.len()), done.saturating_sub(note.len()));
        prev.read_vectored(&mut [
            IoSliceMut::new(&mut note[note_done..]),
            IoSliceMut::new(&mut body[body_done..]),
        ])
    }

    /// Checks the head that has arrived for `piece`, and returns the length of its note.
    fn check(&self, piece: &Piece) -> Result<usize, String> {
        let frame = Frame::decode(&self.incoming.head)?;
        let note_bytes_max = if piece.note { BLOCK_BYTES_MAX } else { 0 };
        frame.check(&self.frame(piece), note_bytes_max)?;
        if self.schedule.next_receive_is_early() {
            return Err("got a total that this rank's part is not in".to_owned());
        }
        Ok(frame.note_bytes as usize)
    }

    fn frame(&self, piece: &Piece) -> Frame {
        let OpTag { kind, generation, sequence } = self.op_tag;
        let (note, _) = self.payload.send_bufs(piece);
        Frame {
            kind,
            generation,
            sequence,
            step: to_wire(piece.step),
            segment: to_wire(piece.segment),
            origin: to_wire(piece.origin),
            note_bytes: to_wire(note.len()),
            total_bytes: self.payload.total_bytes() as u64,
            body_bytes: to_wire(self.payload.piece_bytes(piece)),
        }
    }

    /// Adds what it waits for to `fds`.
    fn watch(&self, send_blocked: bool, fds: &mut Vec<PollFd<'a>>) -> Watched {
        let when = |condition, flags| if condition { flags } else { PollFlags::empty() };
        let start = fds.len();
        let needs_next = self.schedule.has_sends_left() || self.needs_next;
        if needs_next {
            // Nothing ever comes from there but the news of its end.
            let flags = PollFlags::IN | when(send_blocked, PollFlags::OUT);
            fds.push(PollFd::new(&*self.links.next.link, flags));
        }
        if self.schedule.next_receive().is_some() {
            fds.push(PollFd::new(&*self.links.prev.link, PollFlags::IN));
        }
        let others = fds.len();
        fds.extend(self.region.map(|region| PollFd::new(region.notifier(), PollFlags::IN)));
        fds.extend(self.link_monitor.iter().flat_map(LinkMonitor::fds));
        Watched { next: needs_next.then_some(start), others: others..fds.len() }
    }

    /// Looks at what has stirred.
    fn handle_events(&mut self, watched: &Watched, events: &[PollFlags]) -> Result<(), Fault> {
        if events[watched.others.clone()].iter().any(|events| !events.is_empty()) {
            self.check_host()?;
        }
        let next_speaks =
            watched.next.is_some_and(|next| !(events[next] - PollFlags::OUT).is_empty());
        if next_speaks {
            check_idle_link(&self.links.next.link).map_err(Fault::Next)
        } else {
            Ok(())
        }
    }

    /// Something has stirred beside the transfer's links.
    fn check_host(&mut self) -> Result<(), Fault> {
        let said = self.region.and_then(|region| {
            region.notifier().clear();
            region.failed()
        });
        let fault = said.or_else(|| self.link_monitor.as_mut().and_then(LinkMonitor::check));
        fault.map_or(Ok(()), |fault| Err(Fault::Here(fault)))
    }

    /// A next member that ended the link may have done so over a disagreement that shows in what
    /// the previous one has sent, too; that says more than an end.
    fn root_cause(&mut self, fault: Fault) -> Fault {
        loop {
            match self.receive() {
                Ok(Flow::Moved) => {}
                Err(broken @ Fault::Prev(LinkFault::Broken(_))) => return broken,
                Ok(_) | Err(_) => return fault,
            }
        }
    }
}

/// Runs transfers side by side, of one operation, each over links of its own to the same
/// neighbours. Returns when all pieces are sent and received, with the first one's notes.
pub(crate) fn run_all(mut transfers: Vec<Transfer<'_>>) -> Result<Vec<Vec<u8>>, Fault> {
    let bytes = transfers.iter().map(|transfer| transfer.payload.total_bytes()).sum();
    let mut spin_wait = SpinWait::for_bytes(bytes);
    let mut blocked = vec![false; transfers.len()];
    let mut shown = 0;
    loop {
        let mut has_moved = false;
        for at in 0..transfers.len() {
            match transfers[at].send() {
                Ok(flow) => blocked[at] = flow == Flow::Blocked,
                Err(fault) => return Err(root_cause(&mut transfers, fault)),
            }
            has_moved |= transfers[at].receive()? == Flow::Moved;
        }
        if transfers.iter().all(|transfer| transfer.schedule.is_done()) {
            return Ok(transfers.swap_remove(0).payload.into_notes());
        }
        if has_moved {
            spin_wait.reset();
            continue;
        }
        if spin_wait.should_spin() {
            continue;
        }
        spin_wait.reset();
        show_wait(&mut transfers, &mut shown);
        if let Err(fault) = wait(&mut transfers, &blocked) {
            return Err(root_cause(&mut transfers, fault));
        }
    }
}

/// Shows how far all of them have come, as one.
fn show_wait(transfers: &mut [Transfer<'_>], shown: &mut u64) {
    let (first, others) = transfers.split_first_mut().expect("there is one at least");
    let sum = |of: fn(&TransferProgress<'_>) -> u64| {
        others.iter().map(|transfer| of(&transfer.progress)).sum()
    };
    let alongside: [u64; 2] = [sum(|progress| progress.received), sum(|progress| progress.sent)];
    if *shown != alongside[0] + alongside[1] {
        *shown = alongside[0] + alongside[1];
        first.progress.end_wait();
    }
    first.progress.wait_alongside(&first.op_tag, alongside);
}

/// Sleeps until a link or the fence stirs.
fn wait(transfers: &mut [Transfer<'_>], blocked: &[bool]) -> Result<(), Fault> {
    let registration = transfers[0].registration;
    let mut fds = vec![PollFd::new(registration.notifier(), PollFlags::IN)];
    let watched: Vec<Watched> = transfers
        .iter()
        .zip(blocked)
        .map(|(transfer, blocked)| transfer.watch(*blocked, &mut fds))
        .collect();
    poll_until(&mut fds, None).map_err(Fault::Wait)?;
    let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
    drop(fds);
    if !events[0].is_empty() {
        registration.notifier().clear();
        if registration.check().is_err() {
            return Err(Fault::Wait(ErrorKind::Interrupted.into()));
        }
    }
    transfers
        .iter_mut()
        .zip(&watched)
        .try_for_each(|(transfer, watched)| transfer.handle_events(watched, &events))
}

fn root_cause(transfers: &mut [Transfer<'_>], fault: Fault) -> Fault {
    transfers.iter_mut().fold(fault, |fault, transfer| transfer.root_cause(fault))
}

/// What a transfer has polled, by where it is among all that is polled.
#[derive(Debug)]
struct Watched {
    next: Option<usize>,
    others: Range<usize>,
}

/// How far a direction got.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Flow {
    /// Until the socket would have blocked.
    Blocked,
    /// There was nothing to do.
    Idle,
    Moved,
}

#[derive(Debug)]
struct Outgoing {
    head: [u8; FRAME_BYTES],
    /// Bytes of head, note and body that have left.
    written: usize,
}

impl Outgoing {
    /// One write; the number of bytes that have left with it.
    fn write(&mut self, link: &TcpStream, note: &[u8], body: &[u8]) -> rustix::io::Result<usize> {
        let mut skip = self.written;
        let slices = [self.head.as_slice(), note, body].map(|part| {
            let skipped = skip.min(part.len());
            skip -= skipped;
            IoSlice::new(&part[skipped..])
        });
        let mut nothing = SendAncillaryBuffer::default();
        let bytes = rustix::net::sendmsg(link, &slices, &mut nothing, SendFlags::NOSIGNAL)?;
        self.written += bytes;
        Ok(bytes)
    }
}

/// How far the operation has come, and what is shown of it. The clock is read once a wait, and
/// nothing is shown between two waits.
pub(crate) struct TransferProgress<'a> {
    progress: &'a Progress,
    received: u64,
    sent: u64,
    /// Shown as waiting, and no byte has moved since.
    waits: bool,
    /// Whether what has come and gone is shown, too.
    is_shown: bool,
}

impl<'a> TransferProgress<'a> {
    /// Of an operation whose bytes come from the previous member and go to the next one.
    fn one_way(progress: &'a Progress) -> Self {
        Self { progress, received: 0, sent: 0, waits: false, is_shown: true }
    }

    /// Of an operation that uses links both ways. What comes back is taken off what was sent, and
    /// what is sent back off what has come, from a start that is large enough: so the two ends of a
    /// link still differ by what is on its way, whichever way.
    pub(crate) fn both_ways(progress: &'a Progress) -> Self {
        Self {
            progress,
            received: BOTH_WAYS_START,
            sent: BOTH_WAYS_START,
            waits: false,
            is_shown: true,
        }
    }

    pub(crate) fn on_received(&mut self, bytes: usize) {
        self.received += bytes as u64;
        self.end_wait();
    }

    pub(crate) fn on_received_back(&mut self, bytes: usize) {
        self.sent -= bytes as u64;
        self.end_wait();
    }

    pub(crate) fn on_sent(&mut self, bytes: usize) {
        self.sent += bytes as u64;
        self.end_wait();
    }

    pub(crate) fn on_sent_back(&mut self, bytes: usize) {
        self.received -= bytes as u64;
        self.end_wait();
    }

    pub(crate) fn wait(&mut self, op_tag: &OpTag, waits_for_next: bool) {
        self.wait_with(op_tag, [self.received, self.sent], waits_for_next);
    }

    /// `beside`: bytes that have been received and sent over other links of the operation.
    fn wait_alongside(&mut self, op_tag: &OpTag, alongside: [u64; 2]) {
        self.wait_with(op_tag, [self.received + alongside[0], self.sent + alongside[1]], false);
    }

    fn wait_with(&mut self, op_tag: &OpTag, bytes: [u64; 2], waits_for_next: bool) {
        if !self.waits {
            let (generation, operation) = (op_tag.generation, op_tag.sequence + 1);
            let [received, sent] = if self.is_shown { bytes } else { [0; 2] };
            self.progress.begin_wait(WaitPoint {
                generation,
                operation,
                received,
                sent,
                waits_for_next,
            });
            self.waits = true;
        }
    }

    fn end_wait(&mut self) {
        if self.waits {
            self.progress.end_wait();
            self.waits = false;
        }
    }
}

impl Drop for TransferProgress<'_> {
    fn drop(&mut self) {
        self.end_wait();
    }
}

const BOTH_WAYS_START: u64 = 1 << 62;

/// Whatever can be read from a link on which nothing is awaited is the link's end.
pub(crate) fn check_idle_link(mut link: &TcpStream) -> Result<(), LinkFault> {
    Err(match link.read(&mut [0]) {
        Ok(0) => LinkFault::Lost(ErrorKind::UnexpectedEof.into()),
        Ok(_) => LinkFault::Broken("expected silence on the link to it, got bytes".to_owned()),
        Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {
            return Ok(());
        }
        Err(error) => LinkFault::Lost(error),
    })
}

#[derive(Debug)]
struct Incoming {
    head: [u8; FRAME_BYTES],
    /// Bytes of head, note and body that have arrived.
    read: usize,
    /// Known when the head is complete.
    note_bytes: usize,
}

/// Steps, segments, ranks and lengths that the limits keep small.
pub(crate) fn to_wire(number: usize) -> u32 {
    u32::try_from(number).expect("members, segments and blocks are limited")
}
