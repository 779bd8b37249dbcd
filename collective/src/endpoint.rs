use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, mem};

use rustix::event::{PollFd, PollFlags};

use crate::bell::Bell;
use crate::fence::Pass;
use crate::hello::{Hello, JobDigest, Purpose, STREAMS_MAX};
use crate::hosts::Hosts;
use crate::link::{DialError, dial, poll_until, set_up_listener};
use crate::lobby::Lobby;
use crate::porter::{Identity, Porter};
use crate::progress::{Place, Progress};
use crate::schedule::Seat;
use crate::tcp::{Links, Neighbour, Plan};
use crate::{
    CollectiveError, Fence, GroupSpec, Member, Position, Secret, StateReceiver, TcpRing, Transport,
    Visitor, WireDtype,
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
    lobby: Arc<Lobby>,
    progress: Progress,
    /// How long a dial waits for an answer; `None` waits as long as the whole attempt.
    dial_limit: Option<Duration>,
    wire: WireDtype,
    transport: Transport,
    /// Links between two neighbours.
    streams: u8,
    quit: Arc<Bell>,
    /// Taken only when the endpoint is dropped.
    porter: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Listens on a free port of `ip` as worker `me` of `job`, and starts the thread that takes in
    /// dials.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if the secret is empty, [`CollectiveError::Bind`],
    /// [`CollectiveError::Io`].
    pub fn bind(ip: IpAddr, job: &str, me: u64, secret: Secret) -> Result<Self, CollectiveError> {
        let listener =
            TcpListener::bind((ip, 0)).map_err(|source| CollectiveError::Bind { source })?;
        Self::from_listener(listener, job, me, secret)
    }

    /// As [`bind`](Self::bind), on a listener that is there already: a worker tells its master
    /// where peers reach it before it learns its own id.
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    pub fn from_listener(
        listener: TcpListener,
        job: &str,
        me: u64,
        secret: Secret,
    ) -> Result<Self, CollectiveError> {
        if secret.bytes().is_empty() {
            return Err(CollectiveError::Invalid("the secret is empty".to_owned()));
        }
        let bind_error = |source| CollectiveError::Bind { source };
        set_up_listener(&listener).map_err(bind_error)?;
        let address = listener.local_addr().map_err(bind_error)?;
        let bell = Bell::new().map_err(|errno| CollectiveError::Io {
            action: "create an event descriptor",
            source: errno.into(),
        })?;
        let identity = Arc::new(Identity { job: JobDigest::of(job), me, secret });
        let fence = Fence::new();
        let quit = Arc::new(bell);
        let lobby = Arc::new(Lobby::default());
        let porter = Porter {
            listener,
            identity: identity.clone(),
            fence: fence.clone(),
            lobby: lobby.clone(),
            quit: quit.clone(),
        };
        let porter = thread::Builder::new()
            .name("ring-accept".to_owned())
            .spawn(move || porter.run())
            .map_err(|source| CollectiveError::Io { action: "start the accept thread", source })?;
        let (progress, dial_limit, wire) = (Progress::new(), None, WireDtype::default());
        let (transport, streams) = (Transport::default(), 1);
        Ok(Self {
            identity,
            address,
            fence,
            lobby,
            progress,
            dial_limit,
            wire,
            transport,
            streams,
            quit,
            porter: Some(porter),
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
    pub fn with_streams(mut self, streams: u8) -> Result<Self, CollectiveError> {
        if !(1..=STREAMS_MAX).contains(&streams) {
            let reason =
                format!("{streams} links between neighbours; 1 to {STREAMS_MAX} are possible");
            return Err(CollectiveError::Invalid(reason));
        }
        self.streams = streams;
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
    ) -> Result<TcpRing, CollectiveError> {
        let rank = group.rank_of(self.identity.me)?;
        let pass = self.fence.enter(group.generation)?;
        let world = group.members.len();
        if world == 1 {
            return Ok(TcpRing::alone(pass, self.progress()));
        }
        let hosts = Hosts::of(&group.members);
        let place = hosts.place(rank);
        let may_share = self.transport == Transport::Auto && hosts.largest() > 1;
        let is_mixed = may_share && hosts.count() > 1;
        let until = Until { at: Instant::now().checked_add(deadline), waited: deadline };
        let attempt = |purpose, ranks: Vec<usize>| {
            let at = ranks.iter().position(|other| *other == rank)?;
            let [next, prev] = [at + 1, at + ranks.len() - 1].map(|at| ranks[at % ranks.len()]);
            let Self { identity, progress, dial_limit, .. } = self;
            let (pass, dial_limit) = (&pass, *dial_limit);
            let attempt =
                Attempt { identity, group, pass, progress, dial_limit, purpose, next, prev, until };
            (ranks.len() > 1).then_some(attempt)
        };
        let ring = attempt(Purpose::Ring, (0..world).collect()).expect("this rank is in the group");
        let home = attempt(Purpose::Home, hosts.ranks(place.host).to_vec()).filter(|_| is_mixed);
        let leaders = attempt(Purpose::Leaders, hosts.leaders()).filter(|_| is_mixed);
        let further = if may_share { 0 } else { self.streams - 1 };
        let lanes =
            (1..=further).map(|number| attempt(Purpose::Stream(number), (0..world).collect()));
        let attempts = [Some(ring), home, leaders].into_iter().chain(lanes).collect();
        let mut links = Attempt::run_all(attempts).inspect_err(|_| pass.shut_down())?.into_iter();
        let mut next = || links.next().flatten();
        let (ring, home, leaders) = (next().expect("it was asked for"), next(), next());
        let ring = TcpRing::linked(pass, self.progress(), Seat { rank, world }, ring);
        let ring = ring.with_lanes(links.flatten().collect());
        let members = group.members.iter().map(|member| member.id).collect();
        let plan = may_share.then(|| Plan { members, hosts, home, leaders });
        Ok(ring.with_wire_dtype(self.wire).with_sharing(plan))
    }

    /// The next newcomer that wants this worker's state, if one waits. Never blocks.
    #[must_use]
    pub fn visitor(&self) -> Option<Visitor> {
        self.lobby.next()
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
        patience: Duration,
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
        let Identity { job, me, secret } = &*self.identity;
        let hello =
            Hello { purpose: Purpose::State, job: *job, generation: 0, from: *me, to: donor.id };
        // A fresh socket's buffer holds many hellos, so this is one write and cannot block.
        (&*link).write_all(&hello.encode(secret)).map_err(lost)?;
        StateReceiver::new(donor.id, link, patience, position)
            .map_err(|source| CollectiveError::Io { action: "start the thread of a fetch", source })
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.quit.ring();
        if let Some(porter) = mem::take(&mut self.porter) {
            // It can only have panicked, and has said so.
            let _ = porter.join();
        }
    }
}

/// One try at building one ring of a generation.
struct Attempt<'a> {
    identity: &'a Identity,
    group: &'a GroupSpec,
    pass: &'a Pass,
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
        let generation = self.pass.generation();
        self.progress.wait_at(Place {
            generation,
            operation: 0,
            received: 0,
            sent: 0,
            waits_for_next: false,
        });
        let prev = self.take_prev(&next);
        self.progress.go_on();
        let prev = prev?;
        self.pass.check()?;
        Ok(Links { next: self.neighbour(self.next, next), prev: self.neighbour(self.prev, prev) })
    }

    fn dial_next(&self) -> Result<Arc<TcpStream>, CollectiveError> {
        let peer = self.group.members[self.next];
        let link = self.dial_within_limit(peer.address).map_err(|error| match error {
            DialError::Ended(error) => error,
            DialError::Lost(source) => self.lost(self.next, source),
            DialError::TimedOut => self.late(self.next),
            DialError::Unanswered(waited) => {
                CollectiveError::Unreachable { rank: self.next, member: peer.id, waited }
            }
        })?;
        let link = Arc::new(link);
        self.pass.register(&link);
        let hello = Hello {
            purpose: self.purpose,
            job: self.identity.job,
            generation: self.pass.generation(),
            from: self.identity.me,
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
            return dial(address, Some(self.pass), self.until.at);
        };
        let started = Instant::now();
        for tries in 1..=DIALS_MAX {
            let until = started.checked_add(limit * tries / DIALS_MAX);
            let until = until.into_iter().chain(self.until.at).min();
            match dial(address, Some(self.pass), until) {
                Err(DialError::TimedOut) => {}
                // A router's word, or a neighbour's silence to the question for its address: it may
                // pass.
                Err(DialError::Lost(error)) if is_no_way(error.kind()) => self.pause(until)?,
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
            self.pass.check().map_err(DialError::Ended)?;
            let mut fds = [PollFd::new(self.pass.bell(), PollFlags::IN)];
            if !poll_until(&mut fds, until).map_err(DialError::Lost)? {
                return Ok(());
            }
            self.pass.bell().clear();
        }
    }

    /// Waits for the previous member's dial, and for the end of the link to the next member
    /// meanwhile. Bytes may come from there: the next member may have all its links, and have
    /// begun.
    fn take_prev(&self, next: &Arc<TcpStream>) -> Result<Arc<TcpStream>, CollectiveError> {
        let member = self.group.members[self.prev].id;
        loop {
            self.pass.bell().clear();
            self.pass.check()?;
            if let Some(link) = self.pass.take(member, self.purpose) {
                let link = Arc::new(link);
                self.pass.register(&link);
                return Ok(link);
            }
            let mut fds = [
                PollFd::new(self.pass.bell(), PollFlags::IN),
                PollFd::new(&**next, PollFlags::RDHUP),
            ];
            let in_time = poll_until(&mut fds, self.until.at)
                .map_err(|source| CollectiveError::Io { action: "wait for a peer", source })?;
            if !in_time {
                return Err(self.late(self.prev));
            }
            if !fds[1].revents().is_empty() {
                self.pass.check()?;
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
        if let Err(aborted) = self.pass.check() {
            return aborted;
        }
        CollectiveError::PeerLost { rank, member: self.group.members[rank].id, source }
    }

    fn late(&self, rank: usize) -> CollectiveError {
        CollectiveError::Deadline {
            rank,
            member: self.group.members[rank].id,
            waited: self.until.waited,
        }
    }
}

/// Dials of one member, each given up for the next, within the dial limit.
const DIALS_MAX: u32 = 4;

fn is_no_way(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable | ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests;
