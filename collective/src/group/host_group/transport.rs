//! Choice of the transport of all-reduces and exchanges: negotiation of shared memory, and the use
//! of memory and links.

use std::mem;

use super::HostGroup;
use crate::algorithm::hosts::{HostPosition, Hosts};
use crate::algorithm::payload::{Body, Payload};
use crate::algorithm::schedule::{RankInfo, Schedule};
use crate::algorithm::wire_dtype::Half;
use crate::group::exchange;
use crate::net::frame::Kind;
use crate::net::neighbours::Links;
use crate::shm::{
    self, Address, Hierarchy, LeaderRing, Memory, Notes, PipeNotifier, SharedRegion, ShmGroup,
    WaitContext,
};
use crate::transfer::{Fault, Incoming, Pair, Ports, Transfer};
use crate::{CollectiveError, Communicator};

/// Whether ranks share memory.
#[derive(Debug, Default)]
pub(super) enum ShmState {
    #[default]
    Off,
    On(TransportPlan, ActiveTransport),
    /// Not negotiated yet; decided before the first all-reduce.
    Undecided(TransportPlan),
}

/// Ranks and links that shared memory may use.
#[derive(Debug)]
pub(crate) struct TransportPlan {
    pub(crate) hosts: Hosts,
    /// Ring of this host's ranks, if there are several, and the group has several hosts.
    pub(crate) host_ring: Option<Links>,
    /// Ring of the hosts' leaders, if this rank is one, and the group has several hosts.
    pub(crate) leaders: Option<Links>,
}

#[derive(Debug)]
pub(super) enum ActiveTransport {
    /// All ranks are on one host.
    ShmGroup(Box<ShmGroup>),
    /// The group has several hosts, connected by a ring of leaders.
    Hierarchy(Box<Hierarchy>),
}

impl HostGroup {
    pub(crate) fn with_transport_plan(self, plan: Option<TransportPlan>) -> Self {
        let plan = plan.filter(|plan| plan.hosts.largest() <= shm::HOST_RANKS_MAX);
        Self { shm: plan.map_or(ShmState::Off, ShmState::Undecided), ..self }
    }

    /// Whether all-reduces use memory that the whole group shares. Known after the first one.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        matches!(self.shm, ShmState::On(_, ActiveTransport::ShmGroup(_)))
    }

    /// Whether all-reduces use memory inside hosts and TCP between them. Known after the first one.
    #[must_use]
    pub fn is_hierarchical(&self) -> bool {
        matches!(self.shm, ShmState::On(_, ActiveTransport::Hierarchy(_)))
    }

    /// Negotiates, once and with all ranks, whether the ranks of each host share memory. The first
    /// rank of a host creates the memory, every rank creates a notifier, and all ranks publish the
    /// addresses. Every rank tries to open those of its host and publishes whether it succeeded.
    /// Shared memory is used by all ranks or by none.
    pub(super) fn negotiate_transport(&mut self) -> Result<(), CollectiveError> {
        let plan = match mem::take(&mut self.shm) {
            ShmState::Undecided(plan) => plan,
            decided => {
                self.shm = decided;
                return Ok(());
            }
        };
        let HostPosition { host, local_rank } = plan.hosts.position(self.rank_info.rank);
        let ranks = plan.hosts.ranks(host);
        let is_mixed = plan.hosts.count() > 1;
        let bytes =
            if is_mixed { Hierarchy::bytes(ranks.len()) } else { ShmGroup::bytes(ranks.len()) };
        let own_offer =
            if ranks.len() > 1 { TransportOffer::make(local_rank == 0, bytes) } else { None };
        let encoded = own_offer.as_ref().and_then(TransportOffer::encode).unwrap_or_default();
        let offers = self.gather(Kind::Negotiation, &encoded)?;
        let offers: Vec<&[u8]> = ranks.iter().map(|rank| offers[*rank].as_slice()).collect();
        let region = own_offer.and_then(|offer| {
            let (memory, notifiers) = offer.open(local_rank, bytes, &offers)?;
            Some(SharedRegion::new(
                memory,
                RankInfo { rank: local_rank, world: ranks.len() },
                ranks.to_vec(),
                notifiers,
            ))
        });
        let is_ready = region.is_some() || ranks.len() == 1;
        let all = self.gather(Kind::Negotiation, &[u8::from(is_ready)])?;
        if all.iter().all(|ready| ready == &[1]) {
            let transport = match region {
                Some(region) if !is_mixed => {
                    ActiveTransport::ShmGroup(Box::new(ShmGroup::new(region)))
                }
                region => ActiveTransport::Hierarchy(Box::new(Hierarchy::new(
                    plan.hosts.clone(),
                    host,
                    region,
                ))),
            };
            self.shm = ShmState::On(plan, transport);
        }
        let (shared, hierarchical) = (self.shares_memory(), self.is_hierarchical());
        tracing::debug!(shared, hierarchical, "transport of all-reduces");
        Ok(())
    }

    /// Sends the length of the buffer to the next rank, and compares it with that of the previous
    /// rank. In a hierarchy not all neighbours of the ring communicate, so without this check ranks
    /// in different operations could wait for each other.
    pub(super) fn check_len_with_neighbours(&mut self, len: usize) -> Result<(), CollectiveError> {
        let own_len = (len as u64).to_le_bytes();
        let payload = Payload::new(Body::Empty, self.notes(&own_len)?);
        let Some(links) = &self.links else { return Ok(()) };
        let (op_tag, schedule) = (self.op_tag(self.sum_kind()), Schedule::exchange(self.rank_info));
        let transfer =
            Transfer::new(links, &self.registration, &self.progress, op_tag, schedule, payload);
        let notes = transfer.with_next_required().run();
        let notes = self.end(notes)?;
        let RankInfo { rank, world } = self.rank_info;
        let prev = (rank + world - 1) % world;
        let theirs = notes[prev].as_slice();
        if theirs == own_len {
            return Ok(());
        }
        let got = match <[u8; 8]>::try_from(theirs) {
            Ok(bytes) => u64::from_le_bytes(bytes).to_string(),
            Err(_) => format!("{} bytes instead of a length", theirs.len()),
        };
        self.fail();
        let reason = format!("expected a buffer of {len} elements, got {got}");
        Err(self.protocol_error(prev, reason))
    }

    /// All-reduce over shared memory.
    pub(super) fn shm_all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let op_tag = self.op_tag(self.sum_kind());
        let (ShmState::On(plan, transport), Some(ring)) = (&mut self.shm, &self.links) else {
            unreachable!("the caller has checked the transport");
        };
        let Self { registration, progress, sequence, .. } = self;
        let context =
            WaitContext { host: None, ring: None, registration, progress, sequence: *sequence };
        let result = match transport {
            ActiveTransport::ShmGroup(shared) => {
                let context = WaitContext { host: Some(ring), ..context };
                shared.all_reduce(context, header, src, dst).map_err(Fault::Local)
            }
            ActiveTransport::Hierarchy(hierarchy) => {
                let context = WaitContext { host: plan.host_ring.as_ref(), ..context };
                let half = Half::of(self.wire);
                let leader_ring =
                    plan.leaders.as_ref().map(|links| LeaderRing { links, op_tag, half });
                hierarchy.all_reduce(context, leader_ring, header, src, dst)
            }
        };
        let fault = match result {
            Ok(Notes::All(notes)) => {
                self.sequence += 1;
                return Ok(notes);
            }
            Ok(Notes::TooLong) => {
                self.sequence += 1;
                return self.all_gather(header);
            }
            Err(fault) => fault,
        };
        self.fail();
        self.registration.check()?;
        let ShmState::On(plan, _) = &self.shm else { unreachable!("the transport stays") };
        Err(self.error(fault, plan.leaders.as_ref()))
    }
}

impl HostGroup {
    /// Exchanges payloads over shared memory and links. The caller has checked them.
    pub(super) fn exchange_payloads<'a>(
        &mut self,
        send: &[&'a [u8]],
        receive: impl Iterator<Item = Incoming<'a>>,
    ) -> Result<(), CollectiveError> {
        let rank = self.rank_info.rank;
        self.negotiate_transport()?;
        self.connect_pairs()?;
        let pairs = send.iter().zip(receive).enumerate();
        let pairs = pairs.map(|(rank, (send, receive))| Pair { rank, send, receive });
        let mut pairs: Vec<Pair<'_>> = pairs.collect();
        let own = pairs.remove(rank);
        // The first payload is that for the next rank, to which no other rank writes first.
        pairs.rotate_left(rank);
        let result = self.run_exchange(own, pairs);
        self.sequence += 1;
        let Err(fault) = result else { return Ok(()) };
        self.fail();
        self.registration.check()?;
        Err(self.error(fault, None))
    }

    /// Builds the links between this rank and those to which it has none, once.
    fn connect_pairs(&mut self) -> Result<(), CollectiveError> {
        let Some(dialler) = self.further.dialler.take() else { return Ok(()) };
        let world = self.rank_info.world;
        if world <= NEIGHBOURS_MAX || self.shares_memory() {
            return Ok(());
        }
        // All ranks are in this operation before one of them waits for another one's dial.
        self.gather(Kind::Exchange, &[])?;
        let Some(links) = &self.links else { return Ok(()) };
        let rank = self.rank_info.rank;
        let neighbours = [links.next.rank, links.prev.rank];
        let of_host = self.shm.ranks_of_host(rank);
        let has_link =
            |other: &usize| rank == *other || neighbours.contains(other) || of_host.contains(other);
        let peers = (0..world).filter(|other| !has_link(other)).collect();
        let mut shown = exchange::show(&self.progress, self.is_hierarchical());
        shown.wait(&self.op_tag(Kind::Exchange), false);
        let connected = dialler.connect(&self.registration, &self.progress, links, rank, peers);
        drop(shown);
        match connected {
            Ok(links) => self.further.links = links,
            Err(error) => {
                self.fail();
                self.registration.check()?;
                return Err(error);
            }
        }
        // No rank sends payloads while another one waits for links: it reads nothing meanwhile, and
        // the end of a neighbour would be behind what fills its window.
        self.gather(Kind::Exchange, &[])?;
        Ok(())
    }

    /// `own`: what this rank gives to itself.
    fn run_exchange(&mut self, own: Pair<'_>, pairs: Vec<Pair<'_>>) -> Result<(), Fault> {
        let (rank, op_tag) = (self.rank_info.rank, self.op_tag(Kind::Exchange));
        let hides_bytes = self.is_hierarchical();
        let Some(ring) = &self.links else {
            own.copy();
            return Ok(());
        };
        let Self { registration, progress, sequence, shm, .. } = self;
        let shown = exchange::show(progress, hides_bytes);
        let ranks_of_host = shm.ranks_of_host(rank).to_vec();
        let (of_host, others): (Vec<_>, Vec<_>) =
            pairs.into_iter().partition(|pair| ranks_of_host.contains(&pair.rank));
        let links = |pair: &Pair<'_>| exchange::links_to(pair.rank, ring, &self.further.links);
        let others = others.into_iter().map(|pair| (links(&pair), pair)).collect();
        let ports = Ports::new(registration, shown, op_tag, rank, others);
        let context = WaitContext {
            host: Some(ring),
            ring: None,
            registration,
            progress,
            sequence: *sequence,
        };
        let mail = match shm {
            ShmState::On(_, ActiveTransport::ShmGroup(shared)) => {
                Some(shared.begin_exchange(context, of_host))
            }
            ShmState::On(plan, ActiveTransport::Hierarchy(hierarchy)) => {
                let (host, ring) = (plan.host_ring.as_ref(), Some(ring));
                hierarchy.begin_exchange(WaitContext { host, ring, ..context }, of_host)
            }
            ShmState::Off | ShmState::Undecided(_) => None,
        };
        exchange::run(registration, own, mail, ports)
    }
}

impl ShmState {
    /// Ranks that share memory with `rank`, and itself; none if it shares none.
    pub(super) fn ranks_of_host(&self, rank: usize) -> &[usize] {
        match self {
            Self::On(plan, _) => plan.hosts.ranks(plan.hosts.position(rank).host),
            Self::Off | Self::Undecided(_) => &[],
        }
    }
}

/// Resources that a rank has created for the ranks of its host.
struct TransportOffer {
    notifier: PipeNotifier,
    /// Memory; created by the first rank of the host.
    memory: Option<Memory>,
}

impl TransportOffer {
    /// Creates the resources; `None` if the operating system refuses.
    fn make(with_memory: bool, bytes: usize) -> Option<Self> {
        let memory = if with_memory { Some(Memory::create(bytes).ok()?) } else { None };
        Some(Self { notifier: PipeNotifier::new().ok()?, memory })
    }

    /// Encodes the address of the notifier, followed by that of the memory.
    fn encode(&self) -> Option<Vec<u8>> {
        let mut bytes = self.notifier.address().ok()?.encode().to_vec();
        if let Some(memory) = &self.memory {
            bytes.extend_from_slice(&memory.address().ok()?.encode());
        }
        Some(bytes)
    }

    /// Opens the offers of the other ranks. `local_rank`: index of this rank among them. `None` if
    /// one cannot be opened.
    fn open(
        self,
        local_rank: usize,
        bytes: usize,
        offers: &[&[u8]],
    ) -> Option<(Memory, Vec<PipeNotifier>)> {
        let Self { notifier, memory } = self;
        let mut own_notifier = Some(notifier);
        let mut notifiers = Vec::with_capacity(offers.len());
        for (other, offer) in offers.iter().enumerate() {
            let (address, _) = Address::split(offer)?;
            notifiers.push(if other == local_rank {
                own_notifier.take()?
            } else {
                PipeNotifier::open(&address).ok()?
            });
        }
        let memory = match memory {
            Some(memory) => memory,
            None => {
                let (_, rest) = Address::split(offers.first()?)?;
                Memory::open(&Address::split(rest)?.0, bytes).ok()?
            }
        };
        Some((memory, notifiers))
    }
}

/// Largest group in which all ranks are neighbours.
const NEIGHBOURS_MAX: usize = 3;
