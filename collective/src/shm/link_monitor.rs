use std::net::TcpStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::region::{SharedFault, WaitContext};
use crate::frame::{FRAME_BYTES, Frame};
use crate::host_group::{Links, Neighbour};
use crate::link::poll_until;

/// The links to ranks of this host, watched while one waits for something else. The end of one ends
/// an operation over their memory, if anything is still missing there; and a frame of this very
/// operation is one of a rank that believes in another.
pub(crate) struct LinkMonitor<'a> {
    watched: Vec<Watched<'a>>,
    sequence: u64,
}

struct Watched<'a> {
    neighbour: &'a Neighbour,
    flags: PollFlags,
}

impl<'a> LinkMonitor<'a> {
    pub(crate) fn new(context: WaitContext<'a>) -> Self {
        let flags = PollFlags::IN | PollFlags::RDHUP;
        let both = |links: &'a Links| [&links.next, &links.prev];
        let watched =
            context.host.into_iter().flat_map(both).map(|neighbour| Watched { neighbour, flags });
        let watched = watched.collect();
        Self { watched, sequence: context.sequence }
    }

    /// What to poll.
    pub(crate) fn fds(&self) -> impl Iterator<Item = PollFd<'a>> + '_ {
        self.watched.iter().map(|watched| PollFd::new(&*watched.neighbour.link, watched.flags))
    }

    /// What has come, if it ends the operation. A frame that does not is not polled for again.
    pub(crate) fn check(&mut self) -> Option<SharedFault> {
        let mut fds: Vec<_> = self.fds().collect();
        if !poll_until(&mut fds, Some(Instant::now())).ok()? {
            return None;
        }
        let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        let mut fault = None;
        for (watched, events) in self.watched.iter_mut().zip(&events) {
            let rank = watched.neighbour.rank;
            if events.contains(PollFlags::IN) {
                let reason = disagreement(&watched.neighbour.link, self.sequence);
                fault = fault.or_else(|| reason.map(|reason| SharedFault::Broken(rank, reason)));
                watched.flags -= PollFlags::IN;
            }
            if events.intersects(ENDS) {
                fault = fault.or(Some(SharedFault::Lost(rank)));
            }
        }
        fault
    }
}

/// What has come may be of the next operation; if it is of this one, its sender believes in
/// another.
fn disagreement(link: &TcpStream, sequence: u64) -> Option<String> {
    let mut head = [0; FRAME_BYTES];
    match link.peek(&mut head) {
        Ok(FRAME_BYTES) => {}
        Ok(_) | Err(_) => return None,
    }
    match Frame::decode(&head) {
        Ok(frame) if frame.sequence != sequence => None,
        Ok(frame) => {
            Some(format!("expected a sum over shared memory, got a frame of {:?}", frame.kind))
        }
        Err(reason) => Some(reason),
    }
}

const ENDS: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR);
