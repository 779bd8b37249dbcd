//! Which sums go through memory, and how that is found out.

use std::io::ErrorKind;
use std::mem;

use super::{Links, TcpRing};
use crate::frame::Kind;
use crate::hosts::{Hosts, Place};
use crate::payload::{Body, Payload};
use crate::schedule::{Schedule, Seat};
use crate::shared::{
    self, Address, Doorbell, Hierarchy, Lead, Memory, Notes, Room, Shared, SharedFault, Watch,
};
use crate::transfer::{Fault, LinkFault, Transfer};
use crate::wire::Half;
use crate::{CollectiveError, Communicator};

/// Whether ranks share memory.
#[derive(Debug, Default)]
pub(super) enum Sharing {
    #[default]
    Off,
    On(Plan, Way),
    /// To be found out before the first sum.
    Open(Plan),
}

/// What a group may share, and with whom.
#[derive(Debug)]
pub(crate) struct Plan {
    /// All ids in order.
    pub(crate) members: Vec<u64>,
    pub(crate) hosts: Hosts,
    /// The ring of the ranks of this host, if there are several, and other hosts too.
    pub(crate) home: Option<Links>,
    /// That of the hosts' leaders, if this rank is one, and there are others.
    pub(crate) leaders: Option<Links>,
}

#[derive(Debug)]
pub(super) enum Way {
    /// All ranks are on one host.
    Shared(Box<Shared>),
    /// Hosts have rings between them.
    Hierarchy(Box<Hierarchy>),
}

impl TcpRing {
    pub(crate) fn with_sharing(self, plan: Option<Plan>) -> Self {
        let plan = plan.filter(|plan| plan.hosts.largest() <= shared::WORLD_MAX);
        Self { sharing: plan.map_or(Sharing::Off, Sharing::Open), ..self }
    }

    /// Whether sums go through memory that the whole group shares. Known after the first one.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        matches!(self.sharing, Sharing::On(_, Way::Shared(_)))
    }

    /// Whether sums go through memory inside hosts and over TCP between them. Known after the first
    /// one.
    #[must_use]
    pub fn is_hierarchical(&self) -> bool {
        matches!(self.sharing, Sharing::On(_, Way::Hierarchy(_)))
    }

    /// Finds out, once and with all others, whether the ranks of each host share memory: the first
    /// of them makes it, all make bells, and say where; all try to open the others', and say how
    /// that went. All use it, or nobody.
    pub(super) fn settle(&mut self) -> Result<(), CollectiveError> {
        let plan = match mem::take(&mut self.sharing) {
            Sharing::Open(plan) => plan,
            settled => {
                self.sharing = settled;
                return Ok(());
            }
        };
        let Place { host, index } = plan.hosts.place(self.seat.rank);
        let ranks = plan.hosts.ranks(host);
        let is_mixed = plan.hosts.count() > 1;
        let bytes =
            if is_mixed { Hierarchy::bytes(ranks.len()) } else { Shared::bytes(ranks.len()) };
        let mine = if ranks.len() > 1 { Offer::make(index == 0, bytes) } else { None };
        let said = mine.as_ref().and_then(Offer::encode).unwrap_or_default();
        let offers = self.gather(Kind::Meeting, &said)?;
        let offers: Vec<&[u8]> = ranks.iter().map(|rank| offers[*rank].as_slice()).collect();
        let room = mine.and_then(|mine| {
            let (memory, doorbells) = mine.open(index, bytes, &offers)?;
            Some(Room::new(
                memory,
                Seat { rank: index, world: ranks.len() },
                ranks.to_vec(),
                doorbells,
            ))
        });
        let is_ready = room.is_some() || ranks.len() == 1;
        let all = self.gather(Kind::Meeting, &[u8::from(is_ready)])?;
        if all.iter().all(|ready| ready == &[1]) {
            let way = match room {
                Some(room) if !is_mixed => Way::Shared(Box::new(Shared::new(room))),
                room => Way::Hierarchy(Box::new(Hierarchy::new(plan.hosts.clone(), host, room))),
            };
            self.sharing = Sharing::On(plan, way);
        }
        let (shared, hierarchical) = (self.shares_memory(), self.is_hierarchical());
        tracing::debug!(shared, hierarchical, "what sums go over");
        Ok(())
    }

    /// Tells the next rank how long the sum is that begins, and hears it from the previous one. In
    /// a hierarchy not all neighbours of the ring speak with each other, so that a rank in another
    /// operation might wait for one that waits for it.
    pub(super) fn agree(&mut self, len: usize) -> Result<(), CollectiveError> {
        let mine = (len as u64).to_le_bytes();
        let payload = Payload::new(Body::Empty, self.notes(&mine)?);
        let Some(links) = &self.links else { return Ok(()) };
        let (stamp, schedule) = (self.stamp(self.sum_kind()), Schedule::exchange(self.seat));
        let transfer = Transfer::new(links, &self.pass, &self.progress, stamp, schedule, payload);
        let notes = transfer.needing_next().run();
        let notes = self.end(notes)?;
        let Seat { rank, world } = self.seat;
        let theirs = &notes[(rank + world - 1) % world];
        let Some(links) = self.links.as_ref().filter(|_| theirs != &mine) else { return Ok(()) };
        let reason = format!("expected a buffer of {len} elements, got the length {theirs:?}");
        self.failed = true;
        self.pass.shut_down();
        Err(links.prev.error(LinkFault::Broken(reason)))
    }

    /// A sum over memory that ranks share.
    pub(super) fn sum_shared(
        &mut self,
        mine: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let stamp = self.stamp(self.sum_kind());
        let (Sharing::On(plan, way), Some(ring)) = (&mut self.sharing, &self.links) else {
            unreachable!("the caller has looked");
        };
        let Self { pass, progress, sequence, .. } = self;
        let watch = Watch { host: None, pass, progress, sequence: *sequence };
        let result = match way {
            Way::Shared(shared) => {
                let watch = Watch { host: Some(ring), ..watch };
                shared.all_reduce(watch, mine, src, dst).map_err(Fault::Here)
            }
            Way::Hierarchy(hierarchy) => {
                let watch = Watch { host: plan.home.as_ref(), ..watch };
                let half = Half::of(self.wire);
                let lead = plan.leaders.as_ref().map(|links| Lead { links, stamp, half });
                hierarchy.all_reduce(watch, lead, mine, src, dst)
            }
        };
        let fault = match result {
            Ok(Notes::All(notes)) => {
                self.sequence += 1;
                return Ok(notes);
            }
            Ok(Notes::TooLong) => {
                self.sequence += 1;
                return self.all_gather(mine);
            }
            Err(fault) => fault,
        };
        let error = plan.error(fault, pass.generation());
        self.failed = true;
        self.pass.shut_down();
        self.pass.check()?;
        Err(error)
    }
}

impl Plan {
    fn error(&self, fault: Fault, generation: u64) -> CollectiveError {
        let leaders = || self.leaders.as_ref().expect("only leaders have such links");
        match fault {
            Fault::Here(SharedFault::Aborted) => CollectiveError::Aborted { generation },
            Fault::Here(SharedFault::Broken(rank, reason)) => {
                CollectiveError::Protocol { rank, member: self.members[rank], reason }
            }
            Fault::Here(SharedFault::Lost(rank)) => {
                let source = ErrorKind::ConnectionAborted.into();
                CollectiveError::PeerLost { rank, member: self.members[rank], source }
            }
            Fault::Next(fault) => leaders().next.error(fault),
            Fault::Prev(fault) => leaders().prev.error(fault),
            Fault::Wait(source) => CollectiveError::Io { action: "wait for a peer", source },
        }
    }
}

/// What a rank has made for those of its host.
struct Offer {
    doorbell: Doorbell,
    /// Made by the first of them.
    memory: Option<Memory>,
}

impl Offer {
    /// None where the system refuses.
    fn make(with_memory: bool, bytes: usize) -> Option<Self> {
        let memory = if with_memory { Some(Memory::create(bytes).ok()?) } else { None };
        Some(Self { doorbell: Doorbell::new().ok()?, memory })
    }

    /// Where the doorbell is, and then the memory.
    fn encode(&self) -> Option<Vec<u8>> {
        let mut bytes = self.doorbell.address().ok()?.encode().to_vec();
        if let Some(memory) = &self.memory {
            bytes.extend_from_slice(&memory.address().ok()?.encode());
        }
        Some(bytes)
    }

    /// Opens what the others offer; `index`: the own one's place among them. None if one can't be
    /// opened.
    fn open(self, index: usize, bytes: usize, offers: &[&[u8]]) -> Option<(Memory, Vec<Doorbell>)> {
        let Self { doorbell, memory } = self;
        let mut mine = Some(doorbell);
        let mut doorbells = Vec::with_capacity(offers.len());
        for (other, offer) in offers.iter().enumerate() {
            let (address, _) = Address::split(offer)?;
            doorbells.push(match other == index {
                true => mine.take()?,
                false => Doorbell::open(&address).ok()?,
            });
        }
        let memory = match memory {
            Some(memory) => memory,
            None => {
                let (_, rest) = Address::split(offers.first()?)?;
                Memory::open(&Address::split(rest)?.0, bytes).ok()?
            }
        };
        Some((memory, doorbells))
    }
}
