//! One attempt to build the rings of a generation: the rank dials its next members, and waits for
//! the dials of its previous ones.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::net::acceptor::Identity;
use crate::net::dialled::{DialledError, DialledLink, Handshake, LinkRequest};
use crate::net::fence::GroupRegistration;
use crate::net::handshake::Purpose;
use crate::net::link::Link;
use crate::net::neighbours::{Links, Neighbour};
use crate::net::progress::{Progress, WaitPoint};
use crate::net::socket::{DialError, dial, poll_until};
use crate::transfer::tree::TreeLinks;
use crate::{CollectiveError, GroupSpec};

/// One attempt to build one ring of a generation.
pub(super) struct Attempt<'a> {
    pub(super) identity: &'a Identity,
    pub(super) group: &'a GroupSpec,
    pub(super) registration: &'a GroupRegistration,
    pub(super) progress: &'a Progress,
    pub(super) dial_limit: Option<Duration>,
    pub(super) purpose: Purpose,
    /// Ranks of this worker and of the two neighbours, in the group.
    pub(super) rank: usize,
    pub(super) next: usize,
    pub(super) prev: usize,
    pub(super) ends: Ends,
    pub(super) until: Until,
}

/// Links that an attempt builds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Ends {
    /// To the next member, and from the previous one.
    Both,
    Next,
    Prev,
}

/// The rings of a rank in one generation.
#[derive(Debug, Default)]
pub(super) struct Rings {
    /// `None` in a group of one.
    pub(super) ring: Option<Links>,
    /// `None` if no other rank is on this host, or all are.
    pub(super) host_ring: Option<Links>,
    /// `None` if this rank is not its host's leader, or all ranks are on one host.
    pub(super) leaders: Option<Links>,
    /// By the channels' numbers.
    pub(super) channels: BTreeMap<u8, Links>,
    pub(super) tree: TreeLinks,
}

/// Deadline of an attempt.
#[derive(Clone, Copy)]
pub(super) struct Until {
    /// `None` if the deadline exceeds the range of the clock.
    pub(super) at: Option<Instant>,
    pub(super) waited: Duration,
}

impl Attempt<'_> {
    /// Dials the next members of all rings, then waits for their answers, then for the previous
    /// members. A rank answers its previous member on the acceptor's thread, so no rank waits for
    /// another one to get further around the ring.
    pub(super) fn run_all(attempts: Vec<Self>) -> Result<Rings, CollectiveError> {
        let (accepting, dialling): (Vec<_>, Vec<_>) =
            attempts.into_iter().partition(|attempt| attempt.ends == Ends::Prev);
        let dial = |attempt: Self| attempt.dial_next().map(|dialled| (attempt, dialled));
        let dialled: Result<Vec<_>, _> = dialling.into_iter().map(dial).collect();
        let mut rings = Rings::default();
        for (attempt, next) in Self::await_answers(dialled?)? {
            if attempt.ends == Ends::Next {
                rings.tree.right = Some(attempt.neighbour(attempt.next, next));
                continue;
            }
            let links = attempt.finish(next)?;
            match attempt.purpose {
                Purpose::Host => rings.host_ring = Some(links),
                Purpose::Leaders => rings.leaders = Some(links),
                Purpose::Ring => rings.ring = Some(links),
                Purpose::Channel(number) => {
                    rings.channels.insert(number, links);
                }
                Purpose::Pair | Purpose::State | Purpose::Tree => {}
            }
        }
        for attempt in accepting {
            let Some(ring) = &rings.ring else { continue };
            let parent = attempt.await_prev(&ring.next.link)?;
            rings.tree.parent = Some(attempt.neighbour(attempt.prev, parent));
        }
        Ok(rings)
    }

    /// Finishes the handshakes of all dialled links, in whatever order the answers arrive.
    fn await_answers(
        mut waiting: Vec<(Self, DialledLink)>,
    ) -> Result<Vec<(Self, Arc<Link>)>, CollectiveError> {
        let mut links = Vec::with_capacity(waiting.len());
        loop {
            let mut unanswered = Vec::with_capacity(waiting.len());
            for (attempt, dialled) in waiting {
                match dialled.advance() {
                    Ok(Handshake::Complete(link)) => {
                        let link = Arc::new(link);
                        attempt.registration.register_link(&link);
                        links.push((attempt, link));
                    }
                    Ok(Handshake::Waiting(dialled)) => unanswered.push((attempt, dialled)),
                    Err(error) => return Err(attempt.refused(error)),
                }
            }
            waiting = unanswered;
            let Some((attempt, _)) = waiting.first() else { return Ok(links) };
            attempt.begin_wait(true);
            let event = attempt.await_answer(&waiting);
            attempt.progress.end_wait();
            event?;
        }
    }

    /// Blocks until one of the links or the fence has an event.
    fn await_answer(&self, waiting: &[(Self, DialledLink)]) -> Result<(), CollectiveError> {
        let mut fds = vec![PollFd::new(self.registration.notifier(), PollFlags::IN)];
        fds.extend(waiting.iter().map(|(_, link)| PollFd::new(link, PollFlags::IN)));
        let in_time = poll_until(&mut fds, self.until.at)
            .map_err(|source| CollectiveError::Io { action: "wait for a peer", source })?;
        self.registration.notifier().clear();
        self.registration.check()?;
        if in_time { Ok(()) } else { Err(self.deadline_exceeded(self.next)) }
    }

    /// Records that this rank waits for a neighbour before the first operation.
    fn begin_wait(&self, waits_for_next: bool) {
        self.progress.begin_wait(WaitPoint {
            generation: self.registration.generation(),
            operation: 0,
            received: 0,
            sent: 0,
            waits_for_next,
            far: Default::default(),
        });
    }

    fn finish(&self, next: Arc<Link>) -> Result<Links, CollectiveError> {
        let prev = self.await_prev(&next)?;
        Ok(Links { next: self.neighbour(self.next, next), prev: self.neighbour(self.prev, prev) })
    }

    fn await_prev(&self, next: &Arc<Link>) -> Result<Arc<Link>, CollectiveError> {
        self.begin_wait(false);
        let prev = self.accept_prev(next);
        self.progress.end_wait();
        let prev = prev?;
        self.registration.check()?;
        Ok(prev)
    }

    /// Dials the next member and sends the hello.
    pub(super) fn dial_next(&self) -> Result<DialledLink, CollectiveError> {
        let peer = self.group.members[self.next];
        let socket = self.dial_within_limit(peer.address).map_err(|error| match error {
            DialError::Ended(error) => error,
            DialError::Lost(source) => self.lost(self.next, source),
            DialError::TimedOut => self.deadline_exceeded(self.next),
            DialError::Unanswered(waited) => {
                CollectiveError::Unreachable { rank: self.next, member: peer.id, waited }
            }
        })?;
        let request = LinkRequest {
            purpose: self.purpose,
            generation: self.registration.generation(),
            to: peer.id,
            address: peer.address,
            own_address: self.group.members[self.rank].address,
        };
        DialledLink::new(socket, self.identity, request)
            .map_err(|source| self.lost(self.next, source))
    }

    pub(super) fn refused(&self, error: DialledError) -> CollectiveError {
        match error {
            DialledError::Lost(source) => self.lost(self.next, source),
            DialledError::Unauthenticated => CollectiveError::Unauthenticated {
                rank: self.next,
                member: self.group.members[self.next].id,
            },
        }
    }

    /// Dials several times within the dial limit. The kernel repeats a lost first packet only after
    /// a second, which may be longer than the limit.
    fn dial_within_limit(&self, address: SocketAddr) -> Result<TcpStream, DialError> {
        let Some(limit) = self.dial_limit else {
            return dial(address, Some(self.registration), self.until.at);
        };
        let started = Instant::now();
        for tries in 1..=DIALS_MAX {
            let until = started.checked_add(limit * tries / DIALS_MAX);
            let until = until.into_iter().chain(self.until.at).min();
            match dial(address, Some(self.registration), until) {
                Err(DialError::TimedOut) => {}
                // The error comes from a router or from an unanswered ARP request, and may be
                // temporary.
                Err(DialError::Lost(error)) if is_unreachable(error.kind()) => self.pause(until)?,
                done => return done,
            }
            if self.until.at.is_some_and(|end| end <= Instant::now()) {
                return Err(DialError::TimedOut);
            }
        }
        Err(DialError::Unanswered(limit))
    }

    /// Waits until `until`, or until the registration is aborted.
    fn pause(&self, until: Option<Instant>) -> Result<(), DialError> {
        loop {
            self.registration.check().map_err(DialError::Ended)?;
            let mut fds = [PollFd::new(self.registration.notifier(), PollFlags::IN)];
            if !poll_until(&mut fds, until).map_err(DialError::Lost)? {
                return Ok(());
            }
            self.registration.notifier().clear();
        }
    }

    /// Waits for the previous member's dial, and monitors the link to the next member meanwhile.
    /// Data on that link is not an error: the next member may have all its links and have begun an
    /// operation.
    fn accept_prev(&self, next: &Arc<Link>) -> Result<Arc<Link>, CollectiveError> {
        let member = self.group.members[self.prev].id;
        loop {
            self.registration.notifier().clear();
            self.registration.check()?;
            if let Some(link) = self.registration.take(member, self.purpose) {
                let link = Arc::new(link);
                self.registration.register_link(&link);
                return Ok(link);
            }
            let mut fds = [
                PollFd::new(self.registration.notifier(), PollFlags::IN),
                PollFd::new(&**next, PollFlags::RDHUP),
            ];
            let in_time = poll_until(&mut fds, self.until.at)
                .map_err(|source| CollectiveError::Io { action: "wait for a peer", source })?;
            if !in_time {
                return Err(self.deadline_exceeded(self.prev));
            }
            if !fds[1].revents().is_empty() {
                self.registration.check()?;
                // Data sent before the end of the link is irrelevant.
                let fault = next.take_error();
                return Err(
                    self.lost(self.next, fault.unwrap_or_else(|| ErrorKind::UnexpectedEof.into()))
                );
            }
        }
    }

    fn neighbour(&self, rank: usize, link: Arc<Link>) -> Neighbour {
        Neighbour { rank, member: self.group.members[rank].id, link }
    }

    fn lost(&self, rank: usize, source: io::Error) -> CollectiveError {
        // A link that the fence has shut down looks like a lost peer.
        if let Err(aborted) = self.registration.check() {
            return aborted;
        }
        CollectiveError::PeerLost { rank, member: self.group.members[rank].id, source }
    }

    fn deadline_exceeded(&self, rank: usize) -> CollectiveError {
        CollectiveError::Deadline {
            rank,
            member: self.group.members[rank].id,
            waited: self.until.waited,
        }
    }
}

/// Number of dials of one member within the dial limit.
const DIALS_MAX: u32 = 4;

fn is_unreachable(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::TimedOut)
}
