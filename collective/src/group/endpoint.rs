//! The sockets of a worker: its listener, and the links of its groups and of state transfers,
//! dialled or accepted.

use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::attempt::{Attempt, Ends, Rings, Until};
use super::host_group::{EncryptedLinks, TransportPlan};
use super::pairs::PairDialler;
use crate::algorithm::hosts::Hosts;
use crate::algorithm::tree_topology;
use crate::net::acceptor::{Acceptor, Identity};
use crate::net::dialled::{DialledError, DialledLink, LinkRequest};
use crate::net::handshake::{CHANNELS_MAX, JobDigest, Purpose};
use crate::net::notifier::Notifier;
use crate::net::pending_requests::{Joiners, PendingRequests};
use crate::net::progress::Progress;
use crate::net::socket::{DialError, dial, set_up_listener};
use crate::transfer::chain;
use crate::{
    CollectiveError, Fence, FetchError, GroupSpec, HostGroup, LinkEncryption, Member, Position,
    Secret, StateReceiver, StateRequest, Transport, WireDtype,
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
    dial_limit: Option<Duration>,
    wire_dtype: WireDtype,
    transport: Transport,
    channels: u8,
    stop: Arc<Notifier>,
    /// `None` only while the endpoint is being dropped.
    acceptor: Option<JoinHandle<()>>,
}

/// Options of an [`Endpoint`]. All but `own_id` and `dial_limit` must be the same on all members.
#[derive(Clone, Debug)]
pub struct EndpointOptions {
    /// Name of the job.
    pub job: String,
    /// Id of this worker in the job.
    pub own_id: u64,
    /// Secret of the job. It must not be empty.
    pub secret: Secret,
    /// Limit of one dial; `None` limits a dial only by the deadline of the whole attempt. The
    /// member's kernel answers regardless of what the member is computing, so this limit can be
    /// much shorter than the wait for the previous member, which may have to finish something
    /// first.
    pub dial_limit: Option<Duration>,
    /// Data type of elements on the wire. An operation between members that differ fails.
    pub wire_dtype: WireDtype,
    /// Transport of all-reduces.
    pub transport: Transport,
    /// Which links are encrypted. A link that the acceptor requires to be encrypted, and that is
    /// not, is refused.
    pub link_encryption: LinkEncryption,
    /// Whether links that this worker dials and does not encrypt have digests of all bytes: what
    /// the network or a memory changes on the way then ends the link.
    pub has_digests: bool,
    /// Number of channels, that is of parallel links between two neighbours for long all-reduces:
    /// 1 to 16. Several channels help on a network that limits the bandwidth of each connection or
    /// that loses packets; within a host they only cost. Groups that share memory on some host use
    /// one channel.
    pub channels: u8,
}

impl EndpointOptions {
    /// Options of worker `own_id` of `job`, with default values.
    #[must_use]
    pub fn new(job: &str, own_id: u64, secret: Secret) -> Self {
        Self {
            job: job.to_owned(),
            own_id,
            secret,
            dial_limit: None,
            wire_dtype: WireDtype::default(),
            transport: Transport::default(),
            link_encryption: LinkEncryption::default(),
            has_digests: false,
            channels: 1,
        }
    }
}

impl Endpoint {
    /// Listens on a free port of `ip`, and starts the acceptor thread.
    ///
    /// # Errors
    /// [`CollectiveError::Invalid`] if the options are out of range, [`CollectiveError::Bind`],
    /// [`CollectiveError::Io`].
    pub fn bind(ip: IpAddr, options: EndpointOptions) -> Result<Self, CollectiveError> {
        let listener =
            TcpListener::bind((ip, 0)).map_err(|source| CollectiveError::Bind { source })?;
        Self::from_listener(listener, options)
    }

    /// Like [`bind`](Self::bind), on an existing listener: a worker tells the master its address
    /// before it learns its own id.
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    pub fn from_listener(
        listener: TcpListener,
        options: EndpointOptions,
    ) -> Result<Self, CollectiveError> {
        let EndpointOptions { job, own_id, secret, dial_limit, .. } = options;
        let EndpointOptions {
            wire_dtype, transport, link_encryption, has_digests, channels, ..
        } = options;
        if secret.bytes().is_empty() {
            return Err(CollectiveError::Invalid("the secret is empty".to_owned()));
        }
        if !(1..=CHANNELS_MAX).contains(&channels) {
            let reason =
                format!("{channels} channels; the number must be from 1 to {CHANNELS_MAX}");
            return Err(CollectiveError::Invalid(reason));
        }
        let bind_error = |source| CollectiveError::Bind { source };
        set_up_listener(&listener).map_err(bind_error)?;
        let address = listener.local_addr().map_err(bind_error)?;
        let notifier = Notifier::new().map_err(|errno| CollectiveError::Io {
            action: "create an event descriptor",
            source: errno.into(),
        })?;
        let job = JobDigest::of(&job);
        let identity = Arc::new(Identity { job, own_id, secret, link_encryption, has_digests });
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
        Ok(Self {
            identity,
            address,
            fence,
            pending_requests,
            progress: Progress::new(),
            dial_limit,
            wire_dtype,
            transport,
            channels,
            stop,
            acceptor: Some(acceptor),
        })
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
    /// limit](EndpointOptions::dial_limit). From then on dials of older generations are refused.
    /// Older groups continue to work until they are dropped or the fence is raised.
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
        let encrypted = match self.identity.link_encryption {
            LinkEncryption::On => EncryptedLinks::All,
            LinkEncryption::Auto if hosts.count() > 1 => EncryptedLinks::BetweenHosts,
            LinkEncryption::Auto => EncryptedLinks::NotNeeded,
            LinkEncryption::Off => EncryptedLinks::None,
        };
        let may_share = self.transport == Transport::Auto && hosts.largest() > 1;
        let is_mixed = may_share && hosts.count() > 1;
        let until = Until { at: Instant::now().checked_add(deadline), waited: deadline };
        // `None` where this rank is not in the ring, or alone in it.
        let attempt = |purpose, ranks: &[usize]| {
            let at = ranks.iter().position(|other| *other == rank)?;
            let [next, prev] = [at + 1, at + ranks.len() - 1].map(|at| ranks[at % ranks.len()]);
            (ranks.len() > 1).then_some(Attempt {
                identity: &self.identity,
                group,
                registration: &registration,
                progress: &self.progress,
                dial_limit: self.dial_limit,
                purpose,
                rank,
                next,
                prev,
                ends: Ends::Both,
                until,
            })
        };
        let all: Vec<usize> = (0..world).collect();
        let further = if may_share { 0 } else { self.channels - 1 };
        let mut purposes = vec![(Purpose::Ring, &all[..])];
        let leaders = hosts.leaders();
        if is_mixed {
            purposes.push((Purpose::Host, hosts.ranks(hosts.position(rank).host)));
            purposes.push((Purpose::Leaders, &leaders));
        }
        purposes.extend((1..=further).map(|number| (Purpose::Channel(number), &all[..])));
        let mut attempts: Vec<Attempt<'_>> =
            purposes.into_iter().filter_map(|(purpose, ranks)| attempt(purpose, ranks)).collect();
        let has_tree = world > chain::WORLD_MAX;
        if has_tree {
            let position = tree_topology::position(rank, world);
            let far = |peer: usize, ends| {
                let attempt = attempt(Purpose::Tree, &all)?;
                Some(Attempt { next: peer, prev: peer, ends, ..attempt })
            };
            attempts.extend(position.right.and_then(|right| far(right, Ends::Next)));
            let parent = position.parent.filter(|_| position.is_right_child());
            attempts.extend(parent.and_then(|parent| far(parent, Ends::Prev)));
        }
        let rings = Attempt::run_all(attempts).inspect_err(|_| registration.shut_down())?;
        let Rings { ring, host_ring, leaders, channels, tree } = rings;
        let plan = may_share.then_some(TransportPlan { hosts, host_ring, leaders });
        let (identity, dial_limit) = (self.identity.clone(), self.dial_limit);
        let dialler = PairDialler { identity, group: group.clone(), dial_limit };
        let group = HostGroup::new(registration, self.progress(), rank, members, ring)
            .with_extra_channels(channels.into_values().collect())
            .with_tree(has_tree.then_some(tree))
            .with_wire_dtype(self.wire_dtype)
            .with_protection(encrypted, self.identity.has_digests)
            .with_transport_plan(plan)
            .with_pair_dialler(dialler);
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
    /// [`FetchError`].
    pub fn fetch(
        &self,
        donor: Member,
        limit: Duration,
        idle_timeout: Duration,
        position: Option<Position>,
    ) -> Result<StateReceiver, FetchError> {
        let member = donor.id;
        let lost = |source| FetchError::Lost { member, source };
        let late = || FetchError::Deadline { member, waited: limit };
        let until = Instant::now().checked_add(limit);
        let socket = dial(donor.address, None, until).map_err(|error| match error {
            DialError::Ended(error) => lost(io::Error::other(error)),
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
            Some(DialledError::Unauthenticated) => FetchError::Unauthenticated { member },
            None => late(),
        })?;
        let link = Arc::new(link);
        self.fence.watch(&link);
        StateReceiver::new(donor.id, link, idle_timeout, position)
            .map_err(|source| FetchError::Thread { source })
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
