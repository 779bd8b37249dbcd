//! Transfers the pieces of one operation over the two links of a rank.
//!
//! ```text
//!   prev ── frame | note | body ──▶ this rank ── frame | note | body ──▶ next
//! ```
//!
//! One thread, two non-blocking sockets per channel, and one poll: with a core per rank this is
//! faster than a thread per direction.
//!
//! Performance on loopback with two cores: up to about 1 MiB the limit is system calls and
//! wake-ups, of which there are `2·(n−1)` writes and reads per rank in sequence. Above that, it is
//! the two copies of each byte, into the kernel and out of it. For 4 ranks and 16 MiB, of 33 ms of
//! CPU time the copies take 47 %, the additions, which wait for memory, 16 %, and the network stack
//! and everything else 37 %. On an idle machine both cores are busy for 16 ms, a bus bandwidth of
//! 1.6 GB/s. Zero-copy sends would require pages that stay unmodified until the neighbour has read
//! them, and an aborted operation cannot wait for that. Over a network the bandwidth of the network
//! is the limit.
//!
//! **Invariant:** a frame header, its note and its body are sent in one system call, unless the
//! socket's buffer is full or the link is encrypted: then each message of the cipher is a system
//! call.
//!
//! **Invariant:** the end of a link is a failure only while the operation still needs the link. A
//! neighbour that has received everything may leave.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::ops::Range;

use rustix::event::{PollFd, PollFlags};

use super::{Fault, HostStage, TransferProgress};
use crate::algorithm::payload::Payload;
use crate::algorithm::schedule::{Piece, Schedule};
use crate::communicator::BLOCK_BYTES_MAX;
use crate::net::fence::GroupRegistration;
use crate::net::frame::{FRAME_BYTES, Frame, OpTag, to_wire};
use crate::net::link::Link;
use crate::net::neighbours::{LinkFault, Links, check_idle_link};
use crate::net::progress::Progress;
use crate::net::socket::poll_until;
use crate::net::spin_wait::SpinWait;

/// One operation in progress on one channel.
pub(crate) struct Transfer<'a> {
    links: &'a Links,
    registration: &'a GroupRegistration,
    op_tag: OpTag,
    schedule: Schedule,
    payload: Payload<'a>,
    outgoing: Option<Outgoing>,
    incoming: Incoming,
    progress: TransferProgress<'a>,
    /// Whether the link to the next member is needed until the end, even after everything is sent.
    needs_next: bool,
    /// Part of the other ranks of this host, if this rank is their leader.
    host_stage: Option<&'a mut dyn HostStage>,
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
        let incoming = Incoming { header: [0; FRAME_BYTES], read: 0, note_bytes: 0 };
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
            host_stage: None,
        }
    }

    /// Requires the link to the next member until the end: that member cannot finish before this
    /// rank, so its end is a failure even after everything is sent.
    pub(crate) fn with_next_required(self) -> Self {
        Self { needs_next: true, ..self }
    }

    /// Configures a transfer in the ring of leaders; `host_stage`: present if this rank's host has
    /// several ranks. Its byte counts are not shown in the progress: they would be mistaken for
    /// those of the group's ring.
    pub(crate) fn between_hosts(mut self, host_stage: Option<&'a mut dyn HostStage>) -> Self {
        self.progress.hide_bytes();
        Self { host_stage, ..self }
    }

    /// Runs the transfer. Returns the notes in rank order when all pieces are sent and received.
    pub(crate) fn run(self) -> Result<Vec<Vec<u8>>, Fault> {
        run_all(vec![self])
    }

    /// Sends until the socket is full, or no further piece may be sent yet.
    fn send(&mut self) -> Result<Flow, Fault> {
        let mut flow = Flow::Idle;
        while let Some(piece) = self.schedule.next_send() {
            if self.outgoing.is_none() {
                if let Some(stage) = &mut self.host_stage {
                    stage.before_send(&piece, &mut self.payload).map_err(Fault::Local)?;
                    // The stage may have waited and recorded that.
                    self.progress.end_wait();
                }
                self.payload.prepare(&piece);
                let header = self.frame(&piece).encode();
                self.outgoing = Some(Outgoing { header, written: 0 });
            }
            let outgoing = self.outgoing.as_mut().expect("the frame was just created");
            let (note, body) = self.payload.send_bufs(&piece);
            let sent = outgoing.write(&self.links.next.link, note, body);
            let sent = sent.map_err(|error| Fault::Next(LinkFault::Lost(error)))?;
            let Some(bytes) = sent else { return Ok(Flow::Blocked) };
            self.progress.on_sent(bytes);
            if outgoing.written == FRAME_BYTES + note.len() + body.len() {
                self.outgoing = None;
                self.schedule.on_sent();
                flow = Flow::Moved;
            }
        }
        Ok(flow)
    }

    /// Receives until a piece is complete, or the socket is empty.
    fn receive(&mut self) -> Result<Flow, Fault> {
        let Some(piece) = self.schedule.next_receive() else { return Ok(Flow::Idle) };
        loop {
            let received = self.read(&piece).map_err(|error| Fault::Prev(error.into()))?;
            let Some(bytes) = received else { return Ok(Flow::Blocked) };
            let header_complete = self.incoming.read >= FRAME_BYTES;
            self.incoming.read += bytes;
            self.progress.on_received(bytes);
            if !header_complete && self.incoming.read >= FRAME_BYTES {
                let note_bytes =
                    self.check(&piece).map_err(|reason| Fault::Prev(LinkFault::Broken(reason)))?;
                self.incoming.note_bytes = note_bytes;
                if piece.note {
                    self.payload.expect_note(&piece, note_bytes);
                }
            }
            let Incoming { read, note_bytes, .. } = self.incoming;
            if read >= FRAME_BYTES
                && read == FRAME_BYTES + note_bytes + self.payload.piece_bytes(&piece)
            {
                self.incoming.read = 0;
                self.payload.on_received(&piece);
                if let Some(stage) = &mut self.host_stage {
                    stage.after_receive(&piece, &mut self.payload).map_err(Fault::Local)?;
                }
                self.schedule.on_received();
                return Ok(Flow::Moved);
            }
        }
    }

    /// Reads once: the rest of the frame header and, if its length is known, the body with it; or
    /// the rest of note and body.
    fn read(&mut self, piece: &Piece) -> io::Result<Option<usize>> {
        let Self { links, schedule, payload, incoming, .. } = self;
        let prev = &links.prev.link;
        if incoming.read < FRAME_BYTES {
            let header = &mut incoming.header[incoming.read..];
            if piece.note || schedule.next_receive_is_early() {
                return prev.recv(&mut [IoSliceMut::new(header)]);
            }
            let (_, body) = payload.recv_bufs(piece);
            return prev.recv(&mut [IoSliceMut::new(header), IoSliceMut::new(body)]);
        }
        let done = incoming.read - FRAME_BYTES;
        let (note, body) = payload.recv_bufs(piece);
        let (note_done, body_done) = (done.min(note.len()), done.saturating_sub(note.len()));
        prev.recv(&mut [
            IoSliceMut::new(&mut note[note_done..]),
            IoSliceMut::new(&mut body[body_done..]),
        ])
    }

    /// Checks the received frame header of `piece`, and returns the length of its note.
    fn check(&self, piece: &Piece) -> Result<usize, String> {
        let frame = Frame::decode(&self.incoming.header)?;
        let note_bytes_max = if piece.note { BLOCK_BYTES_MAX } else { 0 };
        frame.check(&self.frame(piece), note_bytes_max)?;
        if self.schedule.next_receive_is_early() {
            return Err("got a total without this rank's part".to_owned());
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

    /// Adds the descriptors that this transfer waits for to `fds`.
    fn watch<'s>(&'s self, send_blocked: bool, fds: &mut Vec<PollFd<'s>>) -> Watched {
        let when = |condition, flags| if condition { flags } else { PollFlags::empty() };
        let start = fds.len();
        let needs_next = self.schedule.has_sends_left() || self.needs_next;
        if needs_next {
            // The only readable event on this link is its end.
            let flags = PollFlags::IN | when(send_blocked, PollFlags::OUT);
            fds.push(PollFd::new(&*self.links.next.link, flags));
        }
        if self.schedule.next_receive().is_some() {
            fds.push(PollFd::new(&*self.links.prev.link, PollFlags::IN));
        }
        let of_host = fds.len();
        if let Some(stage) = &self.host_stage {
            stage.watch(fds);
        }
        Watched { next: needs_next.then_some(start), of_host: of_host..fds.len() }
    }

    /// Handles the polled events.
    fn handle_events(&mut self, watched: &Watched, events: &[PollFlags]) -> Result<(), Fault> {
        let host_has_event = events[watched.of_host.clone()].iter().any(|e| !e.is_empty());
        if let (true, Some(stage)) = (host_has_event, &mut self.host_stage) {
            stage.check().map_err(Fault::Local)?;
        }
        let next_speaks =
            watched.next.is_some_and(|next| !(events[next] - PollFlags::OUT).is_empty());
        if next_speaks {
            check_idle_link(&self.links.next.link).map_err(Fault::Next)
        } else {
            Ok(())
        }
    }

    /// Returns the root cause of `fault`. The next member may have closed its link because of a
    /// protocol violation that is also visible in data from the previous member. The violation is
    /// reported in preference to the closed link.
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

/// Runs the transfers of one operation concurrently, each over its own links to the same
/// neighbours. Returns the notes of the first one when all pieces are sent and received.
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

/// Records the progress of all transfers as one.
fn show_wait(transfers: &mut [Transfer<'_>], shown: &mut u64) {
    let (first, others) = transfers.split_first_mut().expect("there is at least one transfer");
    let sum = |of: fn(&TransferProgress<'_>) -> u64| {
        others.iter().map(|transfer| of(&transfer.progress)).sum()
    };
    let other_bytes: [u64; 2] = [sum(|progress| progress.received), sum(|progress| progress.sent)];
    if *shown != other_bytes[0] + other_bytes[1] {
        *shown = other_bytes[0] + other_bytes[1];
        first.progress.end_wait();
    }
    first.progress.wait_alongside(&first.op_tag, other_bytes);
}

/// Blocks until a link or the fence has an event.
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

/// Indexes of a transfer's descriptors among all that are polled.
#[derive(Debug)]
struct Watched {
    next: Option<usize>,
    of_host: Range<usize>,
}

/// Outcome of one attempt to send or receive.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Flow {
    /// The socket would block.
    Blocked,
    /// There was nothing to do.
    Idle,
    Moved,
}

#[derive(Debug)]
struct Outgoing {
    header: [u8; FRAME_BYTES],
    /// Number of bytes of header, note and body that are sent.
    written: usize,
}

impl Outgoing {
    /// Writes once; returns the number of bytes written, if the link takes any.
    fn write(&mut self, link: &Link, note: &[u8], body: &[u8]) -> io::Result<Option<usize>> {
        let mut skip = self.written;
        let slices = [self.header.as_slice(), note, body].map(|part| {
            let skipped = skip.min(part.len());
            skip -= skipped;
            IoSlice::new(&part[skipped..])
        });
        let sent = link.send(&slices)?;
        self.written += sent.unwrap_or(0);
        Ok(sent)
    }
}

#[derive(Debug)]
struct Incoming {
    header: [u8; FRAME_BYTES],
    /// Number of bytes of header, note and body that are received.
    read: usize,
    /// Length of the note, once the header is complete.
    note_bytes: usize,
}
