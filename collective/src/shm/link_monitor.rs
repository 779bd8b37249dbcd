//! Notices the end of a rank on this host, which a wait in shared memory does not show.

use std::io::ErrorKind;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use crate::net::frame::{FRAME_BYTES, Frame};
use crate::net::link::Link;
use crate::net::neighbours::{Links, Neighbour};
use crate::net::socket::poll_until;
use crate::transfer::LocalFault;

/// Monitors the links to the ranks of this host while this rank waits in shared memory. A closed
/// link ends the operation if its result is still incomplete. A frame of this operation on a link
/// means that its sender runs another operation.
pub(crate) struct LinkMonitor<'a> {
    watched: Vec<Watched<'a>>,
    sequence: u64,
}

struct Watched<'a> {
    neighbour: &'a Neighbour,
    flags: PollFlags,
}

impl<'a> LinkMonitor<'a> {
    /// Monitors those of `rings` that are links to ranks of the host. `sequence`: number of the
    /// operation.
    pub(crate) fn new(
        rings: [Option<&'a Links>; 2],
        of_host: impl Fn(usize) -> bool,
        sequence: u64,
    ) -> Self {
        let flags = PollFlags::IN | PollFlags::RDHUP;
        let links = rings.into_iter().flatten().flat_map(|links| [&links.next, &links.prev]);
        let watched = links.filter(|neighbour| of_host(neighbour.rank));
        let watched = watched.map(|neighbour| Watched { neighbour, flags }).collect();
        Self { watched, sequence }
    }

    /// Descriptors to poll.
    pub(crate) fn fds(&self) -> impl Iterator<Item = PollFd<'a>> + '_ {
        self.watched.iter().map(|watched| PollFd::new(&*watched.neighbour.link, watched.flags))
    }

    /// Whether there are bytes to check that `poll` does not show.
    pub(crate) fn has_unread(&self) -> bool {
        self.watched.iter().any(Watched::has_unread)
    }

    /// Checks the links, and returns the fault that ends the operation, if there is one. A link
    /// with a harmless frame is no longer polled for data.
    pub(crate) fn check(&mut self) -> Option<LocalFault> {
        let mut fds: Vec<_> = self.fds().collect();
        if !poll_until(&mut fds, Some(Instant::now())).ok()? && !self.has_unread() {
            return None;
        }
        let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        let mut fault = None;
        for (watched, events) in self.watched.iter_mut().zip(&events) {
            let rank = watched.neighbour.rank;
            if events.contains(PollFlags::IN) || watched.has_unread() {
                // Without a frame, the rest of an encrypted message follows.
                if let Some(reason) = disagreement(&watched.neighbour.link, self.sequence) {
                    let broken = reason.map(|reason| LocalFault::Broken(rank, reason));
                    fault = fault.or(broken);
                    watched.flags -= PollFlags::IN;
                }
            }
            if events.intersects(ENDS) {
                fault = fault.or(Some(LocalFault::Lost(rank)));
            }
        }
        fault
    }
}

impl Watched<'_> {
    fn has_unread(&self) -> bool {
        self.flags.contains(PollFlags::IN) && self.neighbour.link.has_unread()
    }
}

/// Returns the reason if the frame on `link` belongs to this operation: its sender then runs a
/// different one. A frame of the next operation is valid. The outer `None`: the frame is not
/// readable yet.
fn disagreement(link: &Link, sequence: u64) -> Option<Option<String>> {
    let mut header = [0; FRAME_BYTES];
    match link.peek(&mut header) {
        Ok(FRAME_BYTES) => {}
        Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
        Ok(_) | Err(_) => return Some(None),
    }
    Some(match Frame::decode(&header) {
        Ok(frame) if frame.sequence != sequence => None,
        Ok(frame) => Some(format!(
            "expected an operation over shared memory, got a frame of {:?}",
            frame.kind
        )),
        Err(reason) => Some(reason),
    })
}

const ENDS: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);
