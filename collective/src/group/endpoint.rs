use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, mem};

use rustix::event::{PollFd, PollFlags};

use super::host_group::TransportPlan;
use crate::algorithm::hosts::Hosts;
use crate::net::acceptor::{Acceptor, Identity};
use crate::net::fence::GroupRegistration;
use crate::net::handshake::{CHANNELS_MAX, Hello, JobDigest, Purpose};
use crate::net::link::{DialError, dial, poll_until, set_up_listener};
use crate::net::neighbours::{Links, Neighbour};
use crate::net::notifier::Notifier;
use crate::net::pending_requests::PendingRequests;
use crate::net::progress::{Progress, WaitPoint};
use crate::{
    CollectiveError, Fence, GroupSpec, HostGroup, Member, Position, Secret, StateReceiver,
    StateRequest, Transport, WireDtype,
};

/// Endpoint of a worker for links to its peers: its listener and its fence. One per worker process,
/// with the same lifetime.
///
/// A separate acceptor thread accepts the dials of peers, so that they never wait for a worker that
/// is computing.
#[derive(Debug)]
pub struct Endpoint {
    identity: Arc<Identity>,
    address: SocketAddr,
    fence: Fence,
    pending_requests: Arc<PendingRequests>,
    progress: Progress,
    /// Limit of one dial; `None` limits a dial only by the deadline of the whole attempt.
    dial_limit: Option<Duration>,
    wire: WireDtype,
    transport: Transport,
    /// Number of links between two neighbours.
    channels: u8,
    stop: Arc<Notifier>,
    /// `None` only while the endpoint is being dropped.
    acceptor: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Listens on a free port of `ip` as worker `own_id` of `job`, and starts the acceptor thread.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if the secret is empty, [`CollectiveError::Bind`],
    /// [`CollectiveError::Io`].
    pub fn bind(
        ip: IpAddr,
        job: &str,
        own_id: u64,
        secret: Secret,
    ) -> Result<Self, CollectiveError> {
        let listener =
            TcpListener::bind((ip, 0)).map_err(|source| CollectiveError::Bind { source })?;
        Self::from_listener(listener, job, own_id, secret)
    }

    /// Like [`bind`](Self::bind), on an existing listener: a worker tells the master its address
    /// before it learns its own id.
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    pub fn from_listener(
        listener: TcpListener,
        job: &str,
        own_id: u64,
        secret: Secret,
    ) -> Result<Self, CollectiveError> {
        if secret.bytes().is_empty() {
            return Err(CollectiveError::Invalid("the secret is empty".to_owned()));
        }
        let bind_error = |source| CollectiveError::Bind { source };
        set_up_listener(&listener).map_err(bind_error)?;
        let address = listener.local_addr().map_err(bind_error)?;
        let notifier = Notifier::new().map_err(|errno| CollectiveError::Io {
            action: "create an event descriptor",
            source: errno.into(),
        })?;
        let identity = Arc::new(Identity { job: JobDigest::of(job), own_id, secret });
        let fence = Fence::new();
        let stop = Arc::new(notifier);
        let pending_requests = Arc::new(PendingRequests::default());
        let acceptor = Acceptor {
            listener,
            identity: identity.clone(),
            fence: fence.clone(),
            pending_requests: pending_requests.clone(),
            stop: stop.clone(),
        };
        let acceptor = thread::Builder::new()
            .name("ring-accept".to_owned())
            .spawn(move || acceptor.run())
            .map_err(|source| CollectiveError::Io {
                action: "start the acceptor thread",
                source,
            })?;
        let (progress, dial_limit, wire) = (Progress::new(), None, WireDtype::default());
        let (transport, channels) = (Transport::default(), 1);
        Ok(Self {
            identity,
            address,
            fence,
            pending_requests,
            progress,
            dial_limit,
            wire,
            transport,
            channels,
            stop,
            acceptor: Some(acceptor),
        })
    }

    /// Sets the limit of a dial. The member's kernel answers regardless of what the member is
    /// computing, so this limit can be much shorter than the wait for the previous member, which
    /// may have to finish something first.
    #[must_use]
    pub fn with_dial_limit(mut self, limit: Duration) -> Self {
        self.dial_limit = Some(limit);
        self
    }

    /// Sets the data type of elements on the wire, for future groups. It must be the same on all
    /// members: an operation between members that differ fails.
    #[must_use]
    pub fn with_wire_dtype(mut self, wire: WireDtype) -> Self {
        self.wire = wire;
        self
    }

    /// Sets the transport of all-reduces, for future groups. It must be the same on all members.
    #[must_use]
    pub fn with_transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Sets the number of channels, that is of parallel links between two neighbours for long
    /// all-reduces, for future groups: 1 to 16. It must be the same on all members. Several
    /// channels help on a network that limits the bandwidth of each connection or that loses
    /// packets; within a host they only cost. Groups that share memory on some host use one
    /// channel.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`].
    pub fn with_channels(mut self, channels: u8) -> Result<Self, CollectiveError> {
        if !(1..=CHANNELS_MAX).contains(&channels) {
            let reason =
                format!("{channels} channels; the number must be from 1 to {CHANNELS_MAX}");
            return Err(CollectiveError::Invalid(reason));
        }
        self.channels = channels;
        Ok(self)
    }

    /// Address at which peers dial this worker.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Fence that aborts the groups and connection attempts of this endpoint.
    pub fn fence(&self) -> Fence {
        self.fence.clone()
    }

    /// Progress of this endpoint: at which point it waits for its peers.
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// Builds the group of one generation: dials the next member and accepts the dial of the
    /// previous one, both within `deadline`, and the dial also within the [dial
    /// limit](Self::with_dial_limit). From then on dials of older generations are refused. Older
    /// groups continue to work until they are dropped or the fence is raised.
    ///
    /// Success does not cover the other links of the ring; whether they exist shows in the first
    /// operation.
    ///
    /// # Errors
    /// [`CollectiveError`]; no link of the attempt stays open.
    pub fn connect(
        &self,
        group: &GroupSpec,
        deadline: Duration,
    ) -> Result<HostGroup, CollectiveError> {
        let rank = group.rank_of(self.identity.own_id)?;
        let registration = self.fence.register(group.generation)?;
        let world = group.members.len();
        let members = group.members.iter().map(|member| member.id).collect();
        if world == 1 {
            return Ok(HostGroup::new(registration, self.progress(), rank, members, None));
        }
        let hosts = Hosts::of(group.members.iter().map(|member| member.address.ip()));
        let position = hosts.position(rank);
        let may_share = self.transport == Transport::Auto && hosts.largest() > 1;
        let is_mixed = may_share && hosts.count() > 1;
        let until = Until { at: Instant::now().checked_add(deadline), waited: deadline };
        let attempt = |purpose, ranks: Vec<usize>| {
            let at = ranks.iter().position(|other| *other == rank)?;
            let [next, prev] = [at + 1, at + ranks.len() - 1].map(|at| ranks[at % ranks.len()]);
            let Self { identity, progress, dial_limit, .. } = self;
            let (registration, dial_limit) = (&registration, *dial_limit);
            let attempt = Attempt {
                identity,
                group,
                registration,
                progress,
                dial_limit,
                purpose,
                next,
                prev,
                until,
            };
            (ranks.len() > 1).then_some(attempt)
        };
        let ring = attempt(Purpose::Ring, (0..world).collect()).expect("this rank is in the group");
        let host_ring =
            attempt(Purpose::Host, hosts.ranks(position.host).to_vec()).filter(|_| is_mixed);
        let leaders = attempt(Purpose::Leaders, hosts.leaders()).filter(|_| is_mixed);
        let further = if may_share { 0 } else { self.channels - 1 };
        let channels =
            (1..=further).map(|number| attempt(Purpose::Channel(number), (0..world).collect()));
        let attempts = [Some(ring), host_ring, leaders].into_iter().chain(channels).collect();
        let mut links =
            Attempt::run_all(attempts).inspect_err(|_| registration.shut_down())?.into_iter();
        let mut next = || links.next().flatten();
        let (ring, host_ring, leaders) =
            (next().expect("every attempt has a result"), next(), next());
        let plan = may_share.then(|| TransportPlan { hosts, host_ring, leaders });
        let group = HostGroup::new(registration, self.progress(), rank, members, Some(ring))
            .with_extra_channels(links.flatten().collect())
            .with_wire_dtype(self.wire)
            .with_transport_plan(plan);
        Ok(group)
    }

    /// Returns the next joiner that requests this worker's state, if there is one. Never blocks.
    #[must_use]
    pub fn next_state_request(&self) -> Option<StateRequest> {
        self.pending_requests.pop().map(|(member, link)| StateRequest::new(member, link))
    }

    /// Dials `donor` for its state, within `limit`. `idle_timeout`: limit of the donor's silence
    /// once the transfer has begun. `position`: position of an earlier fetch from the same donor
    /// whose link broke.
    ///
    /// # Errors
    /// [`CollectiveError::Deadline`], [`CollectiveError::PeerLost`] (both with rank 0),
    /// [`CollectiveError::Io`].
    pub fn fetch(
        &self,
        donor: Member,
        limit: Duration,
        idle_timeout: Duration,
        position: Option<Position>,
    ) -> Result<StateReceiver, CollectiveError> {
        let lost = |source| CollectiveError::PeerLost { rank: 0, member: donor.id, source };
        let link =
            dial(donor.address, None, Instant::now().checked_add(limit)).map_err(|error| {
                match error {
                    DialError::Ended(error) => error,
                    DialError::Lost(source) => lost(source),
                    DialError::TimedOut | DialError::Unanswered(_) => {
                        CollectiveError::Deadline { rank: 0, member: donor.id, waited: limit }
                    }
                }
            })?;
        let link = Arc::new(link);
        self.fence.watch(&link);
        let Identity { job, own_id, secret } = &*self.identity;
        let hello = Hello {
            purpose: Purpose::State,
            job: *job,
            generation: 0,
            from: *own_id,
            to: donor.id,
        };
        // The buffer of a new socket holds many hellos, so this is one write and cannot block.
        (&*link).write_all(&hello.encode(secret)).map_err(lost)?;
        StateReceiver::new(donor.id, link, idle_timeout, position).map_err(|source| {
            CollectiveError::Io { action: "start the reporter thread of a fetch", source }
        })
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop.notify();
        if let Some(acceptor) = mem::take(&mut self.acceptor) {
            // An error means that the thread panicked, which it has reported itself.
            let _ = acceptor.join();
        }
    }
}

/// One attempt to build one ring of a generation.
struct Attempt<'a> {
    identity: &'a Identity,
    group: &'a GroupSpec,
    registration: &'a GroupRegistration,
    progress: &'a Progress,
    dial_limit: Option<Duration>,
    purpose: Purpose,
    /// Ranks of the two neighbours, in the group.
    next: usize,
    prev: usize,
    until: Until,
}

/// Deadline of an attempt.
#[derive(Clone, Copy)]
struct Until {
    /// `None` if the deadline exceeds the range of the clock.
    at: Option<Instant>,
    waited: Duration,
}

impl Attempt<'_> {
    /// Dials the next members of all rings before it waits for any previous one.
    fn run_all(attempts: Vec<Option<Self>>) -> Result<Vec<Option<Links>>, CollectiveError> {
        let dial = |attempt: Self| attempt.dial_next().map(|next| (attempt, next));
        let dialled: Result<Vec<_>, _> =
            attempts.into_iter().map(|attempt| attempt.map(dial).transpose()).collect();
        let finish = |(attempt, next): (Self, _)| attempt.finish(next);
        dialled?.into_iter().map(|dialled| dialled.map(finish).transpose()).collect()
    }

    fn finish(&self, next: Arc<TcpStream>) -> Result<Links, CollectiveError> {
        let generation = self.registration.generation();
        self.progress.begin_wait(WaitPoint {
            generation,
            operation: 0,
            received: 0,
            sent: 0,
            waits_for_next: false,
        });
        let prev = self.accept_prev(&next);
        self.progress.end_wait();
        let prev = prev?;
        self.registration.check()?;
        Ok(Links { next: self.neighbour(self.next, next), prev: self.neighbour(self.prev, prev) })
    }

    fn dial_next(&self) -> Result<Arc<TcpStream>, CollectiveError> {
        let peer = self.group.members[self.next];
        let link = self.dial_within_limit(peer.address).map_err(|error| match error {
            DialError::Ended(error) => error,
            DialError::Lost(source) => self.lost(self.next, source),
            DialError::TimedOut => self.deadline_exceeded(self.next),
            DialError::Unanswered(waited) => {
                CollectiveError::Unreachable { rank: self.next, member: peer.id, waited }
            }
        })?;
        let link = Arc::new(link);
        self.registration.register_link(&link);
        let hello = Hello {
            purpose: self.purpose,
            job: self.identity.job,
            generation: self.registration.generation(),
            from: self.identity.own_id,
            to: peer.id,
        };
        // The buffer of a new socket holds many hellos, so this is one write and cannot block.
        (&*link)
            .write_all(&hello.encode(&self.identity.secret))
            .map_err(|source| self.lost(self.next, source))?;
        Ok(link)
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
    fn accept_prev(&self, next: &Arc<TcpStream>) -> Result<Arc<TcpStream>, CollectiveError> {
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
                let fault = next.take_error().ok().flatten();
                return Err(
                    self.lost(self.next, fault.unwrap_or_else(|| ErrorKind::UnexpectedEof.into()))
                );
            }
        }
    }

    fn neighbour(&self, rank: usize, link: Arc<TcpStream>) -> Neighbour {
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

#[cfg(test)]
mod tests;
