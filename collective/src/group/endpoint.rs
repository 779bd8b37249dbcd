use std::mem;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::attempt::{Attempt, Until};
use super::host_group::{EncryptedLinks, TransportPlan};
use crate::algorithm::hosts::Hosts;
use crate::net::acceptor::{Acceptor, Identity};
use crate::net::dialled::{DialledError, DialledLink, LinkRequest};
use crate::net::encryption::SharedLinkEncryption;
use crate::net::handshake::{CHANNELS_MAX, JobDigest, Purpose};
use crate::net::notifier::Notifier;
use crate::net::pending_requests::{Joiners, PendingRequests};
use crate::net::progress::Progress;
use crate::net::socket::{DialError, dial, set_up_listener};
use crate::{
    CollectiveError, Fence, GroupSpec, HostGroup, LinkEncryption, Member, Position, Secret,
    StateReceiver, StateRequest, Transport, WireDtype,
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
        let (job, link_encryption) = (JobDigest::of(job), SharedLinkEncryption::default());
        let identity = Arc::new(Identity { job, own_id, secret, link_encryption });
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

    /// Sets which links are encrypted, for future links. It must be the same on all members: a link
    /// that the acceptor requires to be encrypted, and that is not, is refused.
    #[must_use]
    pub fn with_link_encryption(self, choice: LinkEncryption) -> Self {
        self.identity.link_encryption.set(choice);
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
        let encrypted = match self.identity.link_encryption.get() {
            LinkEncryption::On => EncryptedLinks::All,
            LinkEncryption::Auto if hosts.count() > 1 => EncryptedLinks::BetweenHosts,
            LinkEncryption::Auto => EncryptedLinks::NotNeeded,
            LinkEncryption::Off => EncryptedLinks::None,
        };
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
                rank,
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
            .with_encrypted_links(encrypted)
            .with_transport_plan(plan);
        Ok(group)
    }

    /// Handle to name the joiners that may fetch this worker's state; at first, none may.
    pub fn joiners(&self) -> Joiners {
        Joiners(self.pending_requests.clone())
    }

    /// Returns the next named joiner that requests this worker's state, if there is one. Never
    /// blocks.
    #[must_use]
    pub fn next_state_request(&self) -> Option<StateRequest> {
        self.pending_requests.pop().map(|(member, link)| StateRequest::new(member, link))
    }

    /// Dials `donor` for its state, within `limit`. `idle_timeout`: limit of the donor's silence
    /// once the transfer has begun. `position`: position of an earlier fetch from the same donor
    /// whose link broke.
    ///
    /// # Errors
    /// [`CollectiveError::Deadline`], [`CollectiveError::PeerLost`],
    /// [`CollectiveError::Unauthenticated`] (all with rank 0), [`CollectiveError::Io`].
    pub fn fetch(
        &self,
        donor: Member,
        limit: Duration,
        idle_timeout: Duration,
        position: Option<Position>,
    ) -> Result<StateReceiver, CollectiveError> {
        let (rank, member) = (0, donor.id);
        let lost = |source| CollectiveError::PeerLost { rank, member, source };
        let late = || CollectiveError::Deadline { rank, member, waited: limit };
        let until = Instant::now().checked_add(limit);
        let socket = dial(donor.address, None, until).map_err(|error| match error {
            DialError::Ended(error) => error,
            DialError::Lost(source) => lost(source),
            DialError::TimedOut | DialError::Unanswered(_) => late(),
        })?;
        let request = LinkRequest {
            purpose: Purpose::State,
            generation: 0,
            to: donor.id,
            address: donor.address,
            own_address: self.address,
        };
        let dialled = DialledLink::new(socket, &self.identity, request).map_err(lost)?;
        let link = dialled.finish(until).map_err(|error| match error {
            Some(DialledError::Lost(source)) => lost(source),
            Some(DialledError::Unauthenticated) => {
                CollectiveError::Unauthenticated { rank, member }
            }
            None => late(),
        })?;
        let link = Arc::new(link);
        self.fence.watch(&link);
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

#[cfg(test)]
mod tests;
