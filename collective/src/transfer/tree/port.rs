//! The link of a rank to a neighbour in the tree.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

use rustix::event::PollFlags;

use crate::communicator::BLOCK_BYTES_MAX;
use crate::net::frame::{FRAME_BYTES, Frame};
use crate::net::link::Link;
use crate::net::neighbours::{LinkFault, Neighbour};
use crate::transfer::TransferProgress;
use crate::transfer::chain::NOTE_LEN_BYTES;

/// Which link of a rank a port uses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Place {
    /// None of the ring.
    Far,
    Next,
    Prev,
}

/// The link to a neighbour in the tree, and the messages in progress on it.
pub(super) struct Port<'a> {
    pub(super) rank: usize,
    pub(super) member: u64,
    pub(super) link: &'a Link,
    pub(super) place: Place,
    /// Number of bytes that are to be sent in all, once it is known, that are ready, and sent.
    pub(super) sends: Option<usize>,
    ready: usize,
    pub(super) sent: usize,
    /// Expected frame header, except for the length of the notes, and the ranks of the notes;
    /// `None` if nothing is expected.
    expected: Option<(Frame, Option<Range<usize>>)>,
    /// Received frame header and notes; its length once that is known.
    pub(super) head: Vec<u8>,
    pub(super) head_read: usize,
    pub(super) head_bytes: Option<usize>,
    /// Number of received bytes of the elements.
    pub(super) body_read: usize,
    /// Received elements that are not added yet, so many bytes.
    pub(super) scratch: Vec<u8>,
    filled: usize,
    /// Number of elements that are added.
    pub(super) added: usize,
}

impl<'a> Port<'a> {
    pub(super) fn new(neighbour: &'a Neighbour, place: Place) -> Self {
        Self {
            rank: neighbour.rank,
            member: neighbour.member,
            link: &neighbour.link,
            place,
            sends: None,
            ready: 0,
            sent: 0,
            expected: None,
            head: Vec::new(),
            head_read: 0,
            head_bytes: None,
            body_read: 0,
            scratch: Vec::new(),
            filled: 0,
            added: 0,
        }
    }

    pub(super) fn expect(&mut self, frame: Frame, ranks: Option<Range<usize>>) {
        self.expected = Some((frame, ranks));
        self.head = vec![0; FRAME_BYTES];
    }

    pub(super) fn has_sent(&self) -> bool {
        self.sends == Some(self.sent)
    }

    pub(super) fn has_head(&self) -> bool {
        self.head_bytes == Some(self.head_read)
    }

    pub(super) fn has_received(&self) -> bool {
        let Some((frame, _)) = &self.expected else { return true };
        self.has_head() && self.body_read == frame.body_bytes as usize
    }

    /// Whether a read could bring more.
    pub(super) fn reads(&self) -> bool {
        let has_room = self.scratch.is_empty() || self.filled < self.scratch.len();
        !self.has_received() && (has_room || !self.has_head())
    }

    /// Whether nothing is expected on the link until this rank has sent its message.
    pub(super) fn is_idle(&self) -> bool {
        self.has_received() && !self.has_sent()
    }

    /// Events that matter on the link; none if the operation does not need it any more.
    pub(super) fn flags(&self) -> PollFlags {
        let when = |condition, flags| if condition { flags } else { PollFlags::empty() };
        let ends = when(!self.has_received(), PollFlags::RDHUP);
        when(self.reads() || self.is_idle(), PollFlags::IN)
            | when(self.sent < self.ready, PollFlags::OUT)
            | when(!self.reads(), ends)
    }

    /// Whether the neighbour has to do something next. Nothing can come from the parent before it
    /// has got the sum of this rank.
    pub(super) fn awaits(&self, is_parent: bool) -> bool {
        let is_blocked = self.sent < self.ready;
        is_blocked || (!self.has_received() && (!is_parent || self.has_sent()))
    }

    /// Receives once, without blocking: what is left of the head, and of the elements. Returns
    /// whether any byte came.
    pub(super) fn receive(
        &mut self,
        progress: &mut TransferProgress<'_>,
        body: Option<&mut [u8]>,
    ) -> Result<bool, LinkFault> {
        if !self.reads() {
            return Ok(false);
        }
        let Some((expected, ranks)) = &self.expected else { return Ok(false) };
        let left = expected.body_bytes as usize - self.body_read;
        let body = match body {
            Some(body) => body.get_mut(self.body_read..).unwrap_or_default(),
            None => {
                let end = self.scratch.len().min(self.filled + left);
                &mut self.scratch[self.filled..end]
            }
        };
        // The length of the notes has to be known before what follows them is read.
        let is_whole = match self.head_bytes {
            Some(bytes) => self.head.len() == bytes,
            None => ranks.is_none(),
        };
        let body = if is_whole { body } else { &mut [] };
        let head = &mut self.head[self.head_read..];
        let head_left = head.len();
        if head.is_empty() && body.is_empty() {
            return Ok(false);
        }
        let received = match head_left {
            0 => self.link.recv(&mut [IoSliceMut::new(body)])?,
            _ => self.link.recv(&mut [IoSliceMut::new(head), IoSliceMut::new(body)])?,
        };
        let Some(bytes) = received else { return Ok(false) };
        self.head_read += bytes.min(head_left);
        let of_body = bytes.saturating_sub(head_left);
        self.body_read += of_body;
        if !self.scratch.is_empty() {
            self.filled += of_body;
        }
        match self.place {
            Place::Far => progress.end_wait(),
            Place::Next => progress.on_received_back(bytes),
            Place::Prev => progress.on_received(bytes),
        }
        self.open_head().map_err(LinkFault::Broken)?;
        Ok(true)
    }

    /// Checks the frame header when it is complete, and makes room for more of the notes.
    fn open_head(&mut self) -> Result<(), String> {
        if self.head_read < FRAME_BYTES || self.has_head() {
            return Ok(());
        }
        let (expected, ranks) = self.expected.as_ref().expect("a message is expected");
        let header = self.head.first_chunk().expect("the header is complete");
        if self.head_bytes.is_none() {
            let frame = Frame::decode(header)?;
            let most = ranks.as_ref().map_or(0, |ranks| {
                (ranks.len() * (NOTE_LEN_BYTES + BLOCK_BYTES_MAX)).min(u32::MAX as usize)
            });
            frame.check(expected, most)?;
            self.head_bytes = Some(FRAME_BYTES + frame.note_bytes as usize);
        }
        // Not more memory than the received bytes justify.
        let most = self.head_read + SCRATCH_BYTES;
        self.head.resize(self.head_bytes.unwrap_or(0).min(most), 0);
        Ok(())
    }

    /// Sends once, without blocking, of `head` and `body`, the parts of the message that are ready.
    /// Returns whether any byte went.
    pub(super) fn send(
        &mut self,
        progress: &mut TransferProgress<'_>,
        head: &[u8],
        body: &[u8],
    ) -> Result<bool, LinkFault> {
        self.ready = head.len() + body.len();
        if self.sent >= self.ready {
            return Ok(false);
        }
        let head_rest = &head[self.sent.min(head.len())..];
        let body_rest = &body[self.sent.saturating_sub(head.len())..];
        let parts = [IoSlice::new(head_rest), IoSlice::new(body_rest)];
        let sent = self.link.send(&parts[usize::from(head_rest.is_empty())..]);
        let Some(bytes) = sent.map_err(LinkFault::Lost)? else { return Ok(false) };
        self.sent += bytes;
        match self.place {
            Place::Far => progress.end_wait(),
            Place::Next => progress.on_sent(bytes),
            Place::Prev => progress.on_sent_back(bytes),
        }
        Ok(true)
    }

    /// Adds received elements to `dst`, up to element `end`. Returns whether there were any.
    pub(super) fn add_to(&mut self, dst: &mut [f32], end: usize) -> bool {
        let count = (self.filled / size_of::<f32>()).min(end - self.added);
        let (elements, _) = self.scratch[..count * size_of::<f32>()].as_chunks();
        for (sum, bytes) in dst[self.added..][..count].iter_mut().zip(elements) {
            *sum += f32::from_le_bytes(*bytes);
        }
        self.scratch.copy_within(count * size_of::<f32>()..self.filled, 0);
        self.filled -= count * size_of::<f32>();
        self.added += count;
        count > 0
    }
}

/// Memory for elements that can't be added yet, and for notes that are on their way.
pub(super) const SCRATCH_BYTES: usize = 256 << 10;
