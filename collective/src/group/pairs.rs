//! Links between ranks that are no neighbours in the ring, for exchanges. They are dialled before
//! the first exchange of a generation, so groups without exchanges have none.
//!
//! Of two ranks, the one that reaches the other in fewer steps along the ring dials. Its peers are
//! dialled in the order of the ring, so at any time about one rank dials another one.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::attempt::{Attempt, Ends, Until};
use crate::net::acceptor::Identity;
use crate::net::dialled::{DialledLink, Handshake};
use crate::net::fence::GroupRegistration;
use crate::net::handshake::Purpose;
use crate::net::link::Link;
use crate::net::neighbours::{LinkFault, Links};
use crate::net::progress::Progress;
use crate::net::socket::poll_until;
use crate::{CollectiveError, GroupSpec};

/// What it takes to dial the members of a group later.
#[derive(Debug)]
pub(crate) struct PairDialler {
    pub(crate) identity: Arc<Identity>,
    pub(crate) group: GroupSpec,
    pub(crate) dial_limit: Option<Duration>,
}

/// Links to ranks that are no neighbours in the ring.
#[derive(Debug, Default)]
pub(crate) struct FurtherLinks {
    /// Dials them before the first exchange; `None` once it has.
    pub(crate) dialler: Option<PairDialler>,
    pub(crate) links: BTreeMap<usize, Arc<Link>>,
}

impl PairDialler {
    /// Builds the links between this rank and `peers`, all of which build theirs too. Without a
    /// deadline: a group with a silent member is ended by its fence.
    ///
    /// # Errors
    /// [`CollectiveError`]. A neighbour in the ring that ends is an error: it can't have finished
    /// an exchange without this rank.
    pub(crate) fn connect(
        &self,
        registration: &GroupRegistration,
        progress: &Progress,
        ring: &Links,
        rank: usize,
        peers: Vec<usize>,
    ) -> Result<BTreeMap<usize, Arc<Link>>, CollectiveError> {
        let world = self.group.members.len();
        let attempt = |peer: usize| Attempt {
            identity: &self.identity,
            group: &self.group,
            registration,
            progress,
            dial_limit: self.dial_limit,
            purpose: Purpose::Pair,
            rank,
            next: peer,
            prev: peer,
            ends: Ends::Both,
            until: Until { at: None, waited: Duration::ZERO },
        };
        let steps = |peer: usize| (peer + world - rank) % world;
        let dials = |peer: &usize| match 2 * steps(*peer) {
            twice if twice == world => rank < *peer,
            twice => twice < world,
        };
        let (mut to_dial, mut to_accept): (Vec<_>, Vec<_>) = peers.into_iter().partition(dials);
        to_dial.sort_by_key(|peer| std::cmp::Reverse(steps(*peer)));
        let mut waiting: Vec<(Attempt<'_>, DialledLink)> = Vec::new();
        let mut links = BTreeMap::new();
        loop {
            registration.notifier().clear();
            registration.check()?;
            while let Some(peer) = to_dial.pop_if(|_| waiting.len() < DIALS_MAX) {
                let attempt = attempt(peer);
                let dialled = attempt.dial_next()?;
                waiting.push((attempt, dialled));
            }
            let before = links.len();
            let mut add = |peer, link| {
                let link = Arc::new(link);
                registration.register_link(&link);
                links.insert(peer, link);
            };
            let mut unanswered = Vec::with_capacity(waiting.len());
            for (attempt, dialled) in waiting {
                match dialled.advance().map_err(|error| attempt.refused(error))? {
                    Handshake::Complete(link) => add(attempt.next, link),
                    Handshake::Waiting(dialled) => unanswered.push((attempt, dialled)),
                }
            }
            waiting = unanswered;
            to_accept.retain(|peer| {
                let link = registration.take(self.group.members[*peer].id, Purpose::Pair);
                link.is_none_or(|link| {
                    add(*peer, link);
                    false
                })
            });
            if waiting.is_empty() && to_dial.is_empty() && to_accept.is_empty() {
                return Ok(links);
            }
            if links.len() == before {
                wait(registration, ring, &waiting)?;
            }
        }
    }
}

/// Blocks until a link or the fence has an event.
fn wait(
    registration: &GroupRegistration,
    ring: &Links,
    waiting: &[(Attempt<'_>, DialledLink)],
) -> Result<(), CollectiveError> {
    let neighbours = [&ring.next, &ring.prev];
    let mut fds = vec![PollFd::new(registration.notifier(), PollFlags::IN)];
    fds.extend(neighbours.map(|neighbour| PollFd::new(&*neighbour.link, PollFlags::RDHUP)));
    fds.extend(waiting.iter().map(|(_, link)| PollFd::new(link, PollFlags::IN)));
    poll_until(&mut fds, None)
        .map_err(|source| CollectiveError::Io { action: "wait for a peer", source })?;
    let ended = neighbours.iter().zip(&fds[1..]).find(|(_, fd)| !fd.revents().is_empty());
    let Some((neighbour, _)) = ended else { return Ok(()) };
    let error = neighbour.link.take_error();
    let error = error.unwrap_or_else(|| ErrorKind::UnexpectedEof.into());
    Err(neighbour.error(LinkFault::Lost(error)))
}

/// Handshakes of this rank in progress: fewer than an acceptor takes from one address.
const DIALS_MAX: usize = 16;
