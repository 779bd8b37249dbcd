//! The two neighbours of a rank in a ring, and what a fault of a link to one of them means.

use std::io::{self, ErrorKind, IoSliceMut};
use std::sync::Arc;

use super::frame::{FRAME_BYTES, Frame, OpTag};
use super::link::Link;
use crate::CollectiveError;

/// The two links of a rank in a ring.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) next: Neighbour,
    pub(crate) prev: Neighbour,
}

/// A neighbour and the link to or from it.
#[derive(Debug)]
pub(crate) struct Neighbour {
    pub(crate) rank: usize,
    pub(crate) member: u64,
    pub(crate) link: Arc<Link>,
}

/// Fault of a link.
#[derive(Debug)]
pub(crate) enum LinkFault {
    Broken(String),
    Lost(io::Error),
}

impl From<io::Error> for LinkFault {
    /// Bytes that the peer has not sent are a violation of the protocol.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::InvalidData => Self::Broken(error.to_string()),
            _ => Self::Lost(error),
        }
    }
}

impl Neighbour {
    /// Returns the error of an operation that this fault of the neighbour's link has ended.
    pub(crate) fn error(&self, fault: LinkFault) -> CollectiveError {
        fault.error(self.rank, self.member)
    }
}

impl LinkFault {
    /// Returns the error of an operation that this fault of a link to `rank` has ended.
    pub(crate) fn error(self, rank: usize, member: u64) -> CollectiveError {
        match self {
            Self::Broken(reason) => CollectiveError::Protocol { rank, member, reason },
            Self::Lost(source) => CollectiveError::PeerLost { rank, member, source },
        }
    }
}

/// Checks a link on which no data is expected: a read returns its end, or a protocol violation.
pub(crate) fn check_idle_link(link: &Link) -> Result<(), LinkFault> {
    match link.recv(&mut [IoSliceMut::new(&mut [0])])? {
        None => Ok(()),
        Some(_) => {
            Err(LinkFault::Broken("expected no data on the link to it, got bytes".to_owned()))
        }
    }
}

/// Checks a link that an operation does not use, until it has ended or has a frame. A frame of this
/// operation comes from a rank that runs another one. That of the next operation, from a rank that
/// has finished this one, stays unread.
pub(crate) fn check_unused_link(
    unused: &mut Option<&Link>,
    op_tag: &OpTag,
) -> Result<(), LinkFault> {
    let Some(link) = unused.take() else { return Ok(()) };
    let mut header = [0; FRAME_BYTES];
    // The end of this link does not matter here, and a frame header is never sent in parts.
    match link.peek(&mut header) {
        Ok(FRAME_BYTES) => {}
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            // The rest of an encrypted message follows.
            *unused = Some(link);
            return Ok(());
        }
        Ok(_) | Err(_) => return Ok(()),
    }
    let Frame { kind, generation, sequence, total_bytes, .. } =
        Frame::decode(&header).map_err(LinkFault::Broken)?;
    if (generation, sequence) != (op_tag.generation, op_tag.sequence) {
        return Ok(());
    }
    Err(LinkFault::Broken(format!(
        "expected nothing in this operation, got a frame of {kind:?} of {total_bytes} bytes"
    )))
}
