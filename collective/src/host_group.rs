use std::iter;
use std::mem;
use std::net::TcpStream;
use std::sync::Arc;

use crate::chain::{self, ChainReduce};
use crate::chunk::chunk;
use crate::fence::GroupRegistration;
use crate::frame::Kind;
use crate::payload::{Body, Halves, Payload};
use crate::progress::Progress;
use crate::schedule::{RankInfo, Schedule, Span};
use crate::transfer::{self, Fault, LinkFault, OpTag, Transfer};
use crate::wire::Half;
use crate::{BLOCK_BYTES_MAX, BROADCAST_BYTES_MAX, CollectiveError, Communicator, WireDtype};

mod alongside;

pub(crate) use alongside::WaitOutcome;

/// The ring of one generation over TCP: a link to the next rank and one from the previous.
///
/// A group of one is an ordinary state: no links, and operations copy.
///
/// **Invariant:** after a failed operation both links are shut down and nothing more is sent or
/// received.
///
/// Dropping a ring whose operations have succeeded takes nothing from the peers: what they still
/// have to read is in the kernel's hands.
#[derive(Debug)]
pub struct HostGroup {
    registration: GroupRegistration,
    progress: Progress,
    rank_info: RankInfo,
    links: Option<Links>,
    /// Between the same neighbours, beside `links`: what parts of long sums take.
    channels: Vec<Links>,
    /// Of the next operation.
    sequence: u64,
    failed: bool,
    /// The same on every rank.
    segment_bytes: usize,
    wire: WireDtype,
    shm: ShmState,
    /// From here on a sum goes around the ring. The same on every rank.
    ring_bytes_min: usize,
}

/// What sums go over. All else goes around the ring.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Transport {
    /// Memory between members on one host that can open each other's, TCP between hosts. What
    /// shares memory has one address, sees the same processes, and may look into them: the
    /// processes of one user in one container. Where the members of some host can't, all go over
    /// TCP.
    #[default]
    Auto,
    /// TCP.
    Tcp,
}

/// A rank's two links.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) next: Neighbour,
    pub(crate) prev: Neighbour,
}

/// A neighbour and the link to or from it.
#[derive(Debug)]
pub(crate) struct Neighbour {
    pub(crate) rank: usize,
    pub(crate) member: u64,
    pub(crate) link: Arc<TcpStream>,
}

impl HostGroup {
    pub(crate) fn alone(registration: GroupRegistration, progress: Progress) -> Self {
        Self::new(registration, progress, RankInfo { rank: 0, world: 1 }, None)
    }

    pub(crate) fn linked(
        registration: GroupRegistration,
        progress: Progress,
        rank_info: RankInfo,
        links: Links,
    ) -> Self {
        Self::new(registration, progress, rank_info, Some(links))
    }

    fn new(
        registration: GroupRegistration,
        progress: Progress,
        rank_info: RankInfo,
        links: Option<Links>,
    ) -> Self {
        Self {
            registration,
            progress,
            rank_info,
            links,
            channels: Vec::new(),
            sequence: 0,
            failed: false,
            segment_bytes: SEGMENT_BYTES,
            wire: WireDtype::default(),
            shm: ShmState::default(),
            ring_bytes_min: ring_bytes_min(rank_info.world),
        }
    }

    pub(crate) fn with_extra_channels(self, channels: Vec<Links>) -> Self {
        Self { channels, ..self }
    }

    pub(crate) fn with_wire_dtype(self, wire: WireDtype) -> Self {
        Self { wire, ..self }
    }

    #[cfg(test)]
    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// The next operation can begin.
    fn check(&self) -> Result<(), CollectiveError> {
        if self.failed {
            return Err(CollectiveError::Aborted { generation: self.generation() });
        }
        self.registration.check()
    }

    /// One note per rank, of which this rank's is `mine`.
    fn notes(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        if mine.len() > BLOCK_BYTES_MAX {
            let reason =
                format!("a block of {} bytes; at most {BLOCK_BYTES_MAX} are possible", mine.len());
            return Err(CollectiveError::Invalid(reason));
        }
        let mut notes = vec![Vec::new(); self.rank_info.world];
        notes[self.rank_info.rank] = mine.to_vec();
        Ok(notes)
    }

    fn check_root(&self, root: usize) -> Result<(), CollectiveError> {
        if root < self.rank_info.world {
            return Ok(());
        }
        let reason = format!("root {root} in a group of {}", self.rank_info.world);
        Err(CollectiveError::Invalid(reason))
    }

    fn gather(&mut self, kind: Kind, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let payload = Payload::new(Body::Empty, self.notes(mine)?);
        self.run(kind, Schedule::all_gather(self.rank_info), payload)
    }

    /// Runs one operation along the ring.
    fn run(
        &mut self,
        kind: Kind,
        schedule: Schedule,
        payload: Payload<'_>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let Some(links) = &self.links else { return Ok(payload.into_notes()) };
        let transfer = Transfer::new(
            links,
            &self.registration,
            &self.progress,
            self.op_tag(kind),
            schedule,
            payload,
        );
        let result = transfer.run();
        self.end(result)
    }

    /// A sum around the ring. A long one goes in parts, each around a ring of its own, side by
    /// side.
    fn sum_along(
        &self,
        links: &Links,
        notes: Vec<Vec<u8>>,
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, Fault> {
        let is_long = size_of_val(src) >= CHANNEL_BYTES_MIN * (1 + self.channels.len());
        let channels: Vec<&Links> =
            iter::once(links).chain(self.channels.iter().filter(|_| is_long)).collect();
        let none = || vec![Vec::new(); self.rank_info.world];
        let (mut notes, mut rest) = (Some(notes), dst);
        let mut transfers = Vec::with_capacity(channels.len());
        for (channel, links) in channels.iter().enumerate() {
            let part = chunk(src.len(), channels.len(), channel);
            let (dst, others) = rest.split_at_mut(part.len());
            rest = others;
            let src = &src[part];
            let body = match Half::of(self.wire) {
                None => Body::Sum { src, dst },
                Some(half) => Body::Rounded { src, dst, halves: Halves::new(half) },
            };
            let payload = Payload::new(body, notes.take().unwrap_or_else(none));
            let schedule = Schedule::all_reduce(self.rank_info, payload.span(self.segment_bytes));
            let op_tag = self.op_tag(self.sum_kind());
            transfers.push(Transfer::new(
                links,
                &self.registration,
                &self.progress,
                op_tag,
                schedule,
                payload,
            ));
        }
        transfer::run_all(transfers)
    }

    /// What all frames of the next operation have in common.
    fn op_tag(&self, kind: Kind) -> OpTag {
        OpTag { kind, generation: self.registration.generation(), sequence: self.sequence }
    }

    /// A sum's, by what it travels as.
    fn sum_kind(&self) -> Kind {
        match self.wire {
            WireDtype::Bf16 => Kind::AllReduceBf16,
            WireDtype::F16 => Kind::AllReduceF16,
            WireDtype::F32 => Kind::AllReduce,
        }
    }

    /// Ends an operation, and the links with it if it has failed.
    fn end<T>(&mut self, result: Result<T, Fault>) -> Result<T, CollectiveError> {
        self.sequence += 1;
        let fault = match result {
            Ok(value) => return Ok(value),
            Err(fault) => fault,
        };
        let links = self.links.as_ref().expect("without links nothing fails");
        self.failed = true;
        self.registration.shut_down();
        // A link that the fence has shut down looks like a lost peer.
        self.registration.check()?;
        Err(match fault {
            Fault::Here(_) => unreachable!("the whole group is in the ring"),
            Fault::Next(fault) => links.next.error(fault),
            Fault::Prev(fault) => links.prev.error(fault),
            Fault::Wait(source) => CollectiveError::Io { action: "wait for a peer", source },
        })
    }
}

impl Communicator for HostGroup {
    fn rank(&self) -> usize {
        self.rank_info.rank
    }

    fn world_size(&self) -> usize {
        self.rank_info.world
    }

    fn generation(&self) -> u64 {
        self.registration.generation()
    }

    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.check()?;
        self.gather(Kind::AllGather, mine)
    }

    fn all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.check()?;
        if src.len() != dst.len() {
            let reason = format!("a source of {} elements for a sum of {}", src.len(), dst.len());
            return Err(CollectiveError::Invalid(reason));
        }
        let notes = self.notes(header)?;
        self.negotiate_transport()?;
        let is_small =
            size_of_val(src) < self.ring_bytes_min && self.rank_info.world <= chain::WORLD_MAX;
        if self.is_hierarchical() && !is_small {
            self.check_len_with_neighbours(src.len())?;
            return self.sum_shared(header, src, dst);
        }
        if self.shares_memory() {
            return self.sum_shared(header, src, dst);
        }
        let kind = self.sum_kind();
        let Some(links) = &self.links else {
            dst.copy_from_slice(src);
            return Ok(notes);
        };
        if is_small {
            let op_tag = self.op_tag(kind);
            let chain = ChainReduce::new(
                links,
                &self.registration,
                &self.progress,
                op_tag,
                self.rank_info,
                notes,
            );
            let result = chain.all_reduce(src, dst);
            return self.end(result);
        }
        let result = self.sum_along(links, notes, src, dst);
        self.end(result)
    }

    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.check()?;
        self.check_root(root)?;
        let is_root = self.rank_info.rank == root;
        if is_root && bytes.len() > BROADCAST_BYTES_MAX {
            let reason =
                format!("{} bytes to all; at most {BROADCAST_BYTES_MAX} are possible", bytes.len());
            return Err(CollectiveError::Invalid(reason));
        }
        if self.links.is_none() {
            return Ok(());
        }
        let announcement =
            if is_root { Announcement::encode(bytes, self.segment_bytes) } else { Vec::new() };
        let mut notes = vec![Vec::new(); self.rank_info.world];
        notes[root] = announcement;
        let nothing = Span { len: 0, segment_len: 1 };
        let schedule = Schedule::broadcast(self.rank_info, root, nothing, true);
        let mut notes = self.run(Kind::Announcement, schedule, Payload::new(Body::Empty, notes))?;
        let announcement = mem::take(&mut notes[root]);
        let body = match Announcement::decode(announcement, self.segment_bytes) {
            Ok(Announcement::All(short)) if !is_root => {
                *bytes = short;
                return Ok(());
            }
            Ok(Announcement::All(_)) => return Ok(()),
            Ok(Announcement::Follow(_)) if is_root => bytes,
            Ok(Announcement::Follow(len)) => {
                *bytes = vec![0; len];
                bytes
            }
            Err(reason) => {
                self.failed = true;
                self.registration.shut_down();
                let links = self.links.as_ref().expect("a group of one has returned above");
                return Err(links.prev.error(LinkFault::Broken(reason)));
            }
        };
        let payload = Payload::new(Body::Bytes(body), notes);
        let schedule =
            Schedule::broadcast(self.rank_info, root, payload.span(self.segment_bytes), false);
        self.run(Kind::BroadcastBytes, schedule, payload).map(drop)
    }

    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError> {
        self.check()?;
        self.check_root(root)?;
        let payload = Payload::new(Body::Floats(buf), vec![Vec::new(); self.rank_info.world]);
        let schedule =
            Schedule::broadcast(self.rank_info, root, payload.span(self.segment_bytes), false);
        self.run(Kind::Broadcast, schedule, payload).map(drop)
    }
}

impl Neighbour {
    fn error(&self, fault: LinkFault) -> CollectiveError {
        let Self { rank, member, .. } = *self;
        match fault {
            LinkFault::Broken(reason) => CollectiveError::Protocol { rank, member, reason },
            LinkFault::Lost(source) => CollectiveError::PeerLost { rank, member, source },
        }
    }
}

/// What goes ahead of the bytes of a `broadcast_bytes`, as only the root knows how many there are.
///
/// `length (u64, little endian) | the bytes, if they fit a segment`
#[derive(Debug, Eq, PartialEq)]
enum Announcement {
    /// The bytes; nothing follows.
    All(Vec<u8>),
    /// So many bytes follow.
    Follow(usize),
}

impl Announcement {
    fn encode(bytes: &[u8], segment_bytes: usize) -> Vec<u8> {
        let mut note = (bytes.len() as u64).to_le_bytes().to_vec();
        if bytes.len() <= segment_bytes {
            note.extend_from_slice(bytes);
        }
        note
    }

    fn decode(mut note: Vec<u8>, segment_bytes: usize) -> Result<Self, String> {
        let Some(length) = note.first_chunk() else {
            return Err(format!("expected a length, got {} bytes", note.len()));
        };
        let length = u64::from_le_bytes(*length);
        let behind = note.len() - size_of::<u64>();
        if length <= segment_bytes as u64 {
            if behind as u64 != length {
                return Err(format!("expected {length} bytes, as announced, got {behind}"));
            }
            note.drain(..size_of::<u64>());
            return Ok(Self::All(note));
        }
        if behind > 0 {
            return Err(format!("expected nothing behind the length {length}, got {behind} bytes"));
        }
        match usize::try_from(length) {
            Ok(length) if length <= BROADCAST_BYTES_MAX => Ok(Self::Follow(length)),
            _ => Err(format!("expected at most {BROADCAST_BYTES_MAX} bytes, got {length}")),
        }
    }
}

mod transport;

use transport::ShmState;
pub(crate) use transport::TransportPlan;

/// From how many bytes on the ring is faster than a [`relay`], as measured there.
fn ring_bytes_min(world: usize) -> usize {
    match world {
        0..6 => (32 << 10) + 1,
        _ => (64 << 10) + 1,
    }
}

/// Small enough to stay in a core's cache while it is received, reduced and sent on; large enough
/// for system calls not to matter.
const SEGMENT_BYTES: usize = 256 << 10;

/// A link's part of a sum: below that it is waited for more than worked on.
const CHANNEL_BYTES_MIN: usize = 256 << 10;

#[cfg(test)]
pub(crate) mod tests;
