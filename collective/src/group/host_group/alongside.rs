//! Support for operations that another backend runs while the host group monitors its links.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::HostGroup;
use crate::CollectiveError;
use crate::net::frame::Kind;
use crate::net::link::Link;
use crate::net::neighbours::LinkFault;
use crate::net::notifier::Notifier;
use crate::net::socket::poll_until;

/// Outcome of a wait.
#[derive(Debug)]
pub(crate) enum WaitOutcome {
    /// A neighbour has closed its links: it has failed, or has left after the operation was
    /// complete.
    NeighbourGone(CollectiveError),
    /// The notifier is set, or the time is over.
    Woken,
}

impl HostGroup {
    /// Checks that the next operation can begin.
    pub(crate) fn check_alive(&self) -> Result<(), CollectiveError> {
        self.check()
    }

    /// Like an all-gather, with a frame kind that differs from that of the caller's own
    /// all-gathers.
    ///
    /// # Errors
    /// As for an all-gather.
    pub(crate) fn gather_alongside(
        &mut self,
        block: &[u8],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.check()?;
        self.gather(Kind::Device, block)
    }

    /// Returns references to the links, which close when the last reference is dropped.
    pub(crate) fn shared_links(&self) -> Vec<Arc<Link>> {
        let links = self.links.iter().flat_map(|links| [&links.prev, &links.next]);
        links.map(|neighbour| neighbour.link.clone()).collect()
    }

    /// Waits until `notifier` is set, `limit` is over, a neighbour is gone, or the fence is raised.
    ///
    /// # Errors
    /// [`CollectiveError::Aborted`], [`CollectiveError::Io`].
    pub(crate) fn wait_alongside(
        &self,
        notifier: &Notifier,
        limit: Duration,
    ) -> Result<WaitOutcome, CollectiveError> {
        let mut fds = vec![
            PollFd::new(notifier, PollFlags::IN),
            PollFd::new(self.registration.notifier(), PollFlags::IN),
        ];
        if let Some(links) = &self.links {
            // The previous member may be in the next operation already; only closed links count
            // here.
            fds.push(PollFd::new(&*links.prev.link, PollFlags::RDHUP));
            fds.push(PollFd::new(&*links.next.link, PollFlags::RDHUP));
        }
        let deadline = Instant::now().checked_add(limit);
        poll_until(&mut fds, deadline)
            .map_err(|source| CollectiveError::Io { action: "wait for a peer", source })?;
        let gone = fds.iter().skip(2).position(|fd| !fd.revents().is_empty());
        drop(fds);
        self.registration.notifier().clear();
        self.check()?;
        let Some((links, gone)) = self.links.as_ref().zip(gone) else {
            return Ok(WaitOutcome::Woken);
        };
        let neighbour = if gone == 0 { &links.prev } else { &links.next };
        let lost = LinkFault::Lost(ErrorKind::ConnectionAborted.into());
        Ok(WaitOutcome::NeighbourGone(neighbour.error(lost)))
    }
}
