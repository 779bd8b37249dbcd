use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, mem};

use rustix::event::{PollFd, PollFlags};

use crate::acceptor::{Acceptor, Identity};
use crate::fence::GroupRegistration;
use crate::handshake::{CHANNELS_MAX, Hello, JobDigest, Purpose};
use crate::host_group::{Links, Neighbour, TransportPlan};
use crate::hosts::Hosts;
use crate::link::{DialError, dial, poll_until, set_up_listener};
use crate::notifier::Notifier;
use crate::pending_requests::PendingRequests;
use crate::progress::{Progress, WaitPoint};
use crate::schedule::RankInfo;
use crate::{
    CollectiveError, Fence, GroupSpec, HostGroup, Member, Position, Secret, StateReceiver,
    StateRequest, Transport, WireDtype,
};

/// A worker's end of all links: its listener and its fence. One per worker process, and lives as
/// long as it.
///
/// Peers' dials are taken in by a thread of its own, so that they never wait for a worker that is
/// computing.
#[derive(Debug)]
pub struct Endpoint {
    identity: Arc<Identity>,
    address: SocketAddr,
    fence: Fence,
    pending_requests: Arc<PendingRequests>,
    progress: Progress,
    /// How long a dial waits for an answer; `None` waits as long as the whole attempt.
    dial_limit: Option<Duration>,
    wire: WireDtype,
    transport: Transport,
    /// Links between two neighbours.
    channels: u8,
    stop: Arc<Notifier>,
    /// Taken only when the endpoint is dropped.
    acceptor: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Listens on a free port of `ip` as worker `me` of `job`, and starts the thread that takes in
    /// dials.
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

    /// As [`bind`](Self::bind), on a listener that is there already: a worker tells its master
    /// where peers reach it before it learns its own id.
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
            .map_err(|source| CollectiveError::Io { action: "start the accept thread", source })?;
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

    /// Sets how long a dial waits for an answer. The member's system answers whatever the member is
    /// busy with, so this can be much shorter than the wait for the previous member, which may have
    /// to finish something first.
    #[must_use]
    pub fn with_dial_limit(mut self, limit: Duration) -> Self {
        self.dial_limit = Some(limit);
        self
    }

    /// Sets as what the elements of sums travel, in groups to come. It must be the same on all
    /// members: an operation of two that differ fails.
    #[must_use]
    pub fn with_wire_dtype(mut self, wire: WireDtype) -> Self {
        self.wire = wire;
        self
    }

    /// Sets what sums go over, in groups to come. It must be the same on all members.
    #[must_use]
    pub fn with_transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Sets over how many links at once two neighbours send the parts of long sums, in groups to
    /// come: 1 to 16. It must be the same on all members. A network that gives each connection a
    /// share of its own, or that loses packets, carries more over several; within a host they only
    /// cost. Groups that share memory on some host have one.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`].
    pub fn with_channels(mut self, channels: u8) -> Result<Self, CollectiveError> {
        if !(1..=CHANNELS_MAX).contains(&channels) {
            let reason =
                format!("{channels} links between neighbours; 1 to {CHANNELS_MAX} are possible");
            return Err(CollectiveError::Invalid(reason));
        }
        self.channels = channels;
        Ok(self)
    }

    /// Where peers dial this worker.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The fence that ends what this endpoint has built or is building.
    pub fn fence(&self) -> Fence {
        self.fence.clone()
    }

    /// Where this endpoint waits for its peers.
    pub fn progress(&self) -> Progress {
        self.progress.clone()
    }

    /// Builds the ring of one generation: dials the next member and takes the dial of the previous
    /// one, both within `deadline`, the former within the [dial limit](Self::with_dial_limit) too.
    /// From here on, dials of older generations are refused; older rings live on until they are
    /// dropped or the fence is raised.
    ///
    /// Success says nothing about the other links of the ring; whether they stand shows in the
    /// first operation.
    ///
    /// # Errors
    /// [`CollectiveError`]; nothing of the attempt is left open.
    pub fn connect(
        &self,
        group: &GroupSpec,
        deadline: Duration,
    ) -> Result<HostGroup, CollectiveError> {
        let rank = group.rank_of(self.identity.own_id)?;
        let registration = self.fence.register(group.generation)?;
        let world = group.members.len();
        if world == 1 {
            return Ok(HostGroup::alone(registration, self.progress()));
        }
        let hosts = Hosts::of(&group.members);
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
        let (ring, host_ring, leaders) = (next().expect("it was asked for"), next(), next());
        let ring = HostGroup::linked(registration, self.progress(), RankInfo { rank, world }, ring);
        let ring = ring.with_extra_channels(links.flatten().collect());
        let members = group.members.iter().map(|member| member.id).collect();
        let plan = may_share.then(|| TransportPlan { members, hosts, host_ring, leaders });
        Ok(ring.with_wire_dtype(self.wire).with_transport_plan(plan))
    }

    /// The next newcomer that wants this worker's state, if one waits. Never blocks.
    #[must_use]
    pub fn next_state_request(&self) -> Option<StateRequest> {
        self.pending_requests.pop()
    }

    /// Dials `donor` for its state, within `limit`. `patience`: how long it may be silent once it
    /// has begun. `position`: how far an earlier fetch from it has come, if its link broke.
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
        // A fresh socket's buffer holds many hellos, so this is one write and cannot block.
        (&*link).write_all(&hello.encode(secret)).map_err(lost)?;
        StateReceiver::new(donor.id, link, idle_timeout, position)
            .map_err(|source| CollectiveError::Io { action: "start the thread of a fetch", source })
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.stop.notify();
        if let Some(acceptor) = mem::take(&mut self.acceptor) {
            // It can only have panicked, and has said so.
            let _ = acceptor.join();
        }
    }
}

/// One try at building one ring of a generation.
struct Attempt<'a> {
    identity: &'a Identity,
    group: &'a GroupSpec,
    registration: &'a GroupRegistration,
    progress: &'a Progress,
    dial_limit: Option<Duration>,
    purpose: Purpose,
    /// Ranks of the group.
    next: usize,
    prev: usize,
    until: Until,
}

/// How long an attempt may take.
#[derive(Clone, Copy)]
struct Until {
    /// None if it is beyond what the clock can tell.
    at: Option<Instant>,
    waited: Duration,
}

impl Attempt<'_> {
    /// Dials all next members before it waits for a previous one.
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
        // A fresh socket's buffer holds many hellos, so this is one write and cannot block.
        (&*link)
            .write_all(&hello.encode(&self.identity.secret))
            .map_err(|source| self.lost(self.next, source))?;
        Ok(link)
    }

    /// A dial whose first packet is lost is only repeated by the system after a second, which may
    /// be longer than the limit: so a few are made within it.
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
                // A router's word, or a neighbour's silence to the question for its address: it may
                // pass.
                Err(DialError::Lost(error)) if is_unreachable(error.kind()) => self.pause(until)?,
                done => return done,
            }
            if self.until.at.is_some_and(|end| end <= Instant::now()) {
                return Err(DialError::TimedOut);
            }
        }
        Err(DialError::Unanswered(limit))
    }

    /// Waits until then, or until the pass is aborted.
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

    /// Waits for the previous member's dial, and for the end of the link to the next member
    /// meanwhile. Bytes may come from there: the next member may have all its links, and have
    /// begun.
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
                // What has been sent before the end does not matter any more.
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

/// Dials of one member, each given up for the next, within the dial limit.
const DIALS_MAX: u32 = 4;

fn is_unreachable(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests;
