//! The operations of a rank on host memory: their order, their checks, and the choice of the
//! transport.

use std::io::ErrorKind;
use std::iter;
use std::mem;

use crate::algorithm::chunk::chunk;
use crate::algorithm::payload::{Body, Halves, Payload};
use crate::algorithm::schedule::{RankInfo, Schedule, Span};
use crate::algorithm::wire_dtype::Half;
use crate::communicator::{check_payloads, check_receivers};
use crate::group::pairs::{FurtherLinks, PairDialler};
use crate::net::fence::GroupRegistration;
use crate::net::frame::{Kind, OpTag};
use crate::net::neighbours::{LinkFault, Links};
use crate::net::progress::Progress;
use crate::transfer::chain::{self, ChainReduce};
use crate::transfer::tree::TreeLinks;
use crate::transfer::{self, Fault, Incoming, LocalFault, Transfer};
use crate::{BLOCK_BYTES_MAX, BROADCAST_BYTES_MAX, CollectiveError, Communicator, WireDtype};

#[cfg(feature = "gpu")]
mod alongside;

#[cfg(feature = "gpu")]
pub(crate) use alongside::WaitOutcome;

/// Group of one generation on host memory. Its ranks form a ring of TCP links: each rank has a link
/// to the next rank and one from the previous rank. All-reduces and exchanges also use [shared
/// memory](Transport) inside hosts, and exchanges direct links between all other ranks, which are
/// built before the first one: an older group that has not exchanged yet can't once a newer one
/// exists.
///
/// A group of one rank is an ordinary case: no links, and operations copy.
///
/// **Invariant:** after a failed operation all links are shut down, and nothing more is sent or
/// received.
///
/// A rank that drops its group after successful operations does not affect its peers: unread data
/// is in the kernel's buffers.
#[derive(Debug)]
pub struct HostGroup {
    registration: GroupRegistration,
    progress: Progress,
    rank_info: RankInfo,
    /// Ids of all members, in rank order.
    members: Vec<u64>,
    links: Option<Links>,
    /// Links of the additional channels, between the same neighbours as `links`; used by long
    /// all-reduces.
    channels: Vec<Links>,
    /// Sequence number of the next operation.
    sequence: u64,
    failed: bool,
    /// Segment size; identical on every rank.
    segment_bytes: usize,
    wire: WireDtype,
    shm: ShmState,
    /// Size from which an all-reduce uses the ring algorithm; identical on every rank.
    ring_bytes_min: usize,
    encrypted: EncryptedLinks,
    has_digests: bool,
    further: FurtherLinks,
    /// `None` in small groups.
    tree: Option<TreeLinks>,
}

/// Which links of a group are encrypted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum EncryptedLinks {
    /// All of them.
    All,
    /// Those between hosts. The group has several.
    BetweenHosts,
    /// None, although some may leave the host.
    None,
    /// None, and none leaves the host.
    #[default]
    NotNeeded,
}

/// Transport of all-reduces and exchanges. All other operations use the ring of TCP links.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Transport {
    /// Shared memory between members on one host, TCP between hosts. Members can share memory if
    /// they have one address, are in one PID namespace and may open each other's descriptors:
    /// processes of one user in one container. If the members of some host cannot, all ranks use
    /// TCP.
    #[default]
    Auto,
    /// TCP only.
    Tcp,
}

impl HostGroup {
    /// `members`: ids in rank order. `links`: `None` if this rank is alone.
    pub(crate) fn new(
        registration: GroupRegistration,
        progress: Progress,
        rank: usize,
        members: Vec<u64>,
        links: Option<Links>,
    ) -> Self {
        let rank_info = RankInfo { rank, world: members.len() };
        Self {
            registration,
            progress,
            rank_info,
            members,
            links,
            channels: Vec::new(),
            sequence: 0,
            failed: false,
            segment_bytes: SEGMENT_BYTES,
            wire: WireDtype::default(),
            shm: ShmState::default(),
            ring_bytes_min: ring_bytes_min(rank_info.world),
            encrypted: EncryptedLinks::default(),
            has_digests: false,
            further: FurtherLinks::default(),
            tree: None,
        }
    }

    pub(crate) fn with_extra_channels(self, channels: Vec<Links>) -> Self {
        Self { channels, ..self }
    }

    /// Sums buffers of this many bytes and more by the ring.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn with_ring_bytes_min(self, ring_bytes_min: usize) -> Self {
        Self { ring_bytes_min, ..self }
    }

    pub(crate) fn with_wire_dtype(self, wire: WireDtype) -> Self {
        Self { wire, ..self }
    }

    /// `has_digests`: links that are not encrypted.
    pub(crate) fn with_protection(self, encrypted: EncryptedLinks, has_digests: bool) -> Self {
        Self { encrypted, has_digests, ..self }
    }

    pub(crate) fn with_pair_dialler(self, dialler: PairDialler) -> Self {
        let further = FurtherLinks { dialler: Some(dialler), ..FurtherLinks::default() };
        Self { further, ..self }
    }

    /// Which links of the group are encrypted.
    #[must_use]
    pub fn encrypted_links(&self) -> EncryptedLinks {
        self.encrypted
    }

    /// Whether links that are not encrypted have digests of their bytes.
    #[must_use]
    pub fn has_digests(&self) -> bool {
        self.has_digests
    }

    /// Number of links to ranks that are no neighbours in the ring.
    #[cfg(test)]
    pub(crate) fn further_links(&self) -> usize {
        self.further.links.len()
    }

    #[cfg(test)]
    pub(crate) fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Checks that the next operation can begin.
    fn check(&self) -> Result<(), CollectiveError> {
        if self.failed {
            return Err(CollectiveError::Aborted { generation: self.generation() });
        }
        self.registration.check()
    }

    /// Fails the group, so that the neighbours detect it.
    pub(crate) fn fail(&mut self) {
        self.failed = true;
        self.registration.shut_down();
    }

    /// Returns the error of a rank that sent invalid data.
    pub(crate) fn protocol_error(&self, rank: usize, reason: String) -> CollectiveError {
        CollectiveError::Protocol { rank, member: self.members[rank], reason }
    }

    /// Returns one note per rank; the note of this rank is `block`, all others are empty.
    fn notes(&self, block: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        // A frame header holds the length of all blocks in 32 bits.
        let most = BLOCK_BYTES_MAX.min(u32::MAX as usize / self.rank_info.world - size_of::<u32>());
        if block.len() > most {
            let reason = format!("a block of {} bytes; the limit is {most}", block.len());
            return Err(CollectiveError::Invalid(reason));
        }
        let mut notes = vec![Vec::new(); self.rank_info.world];
        notes[self.rank_info.rank] = block.to_vec();
        Ok(notes)
    }

    fn check_root(&self, root: usize) -> Result<(), CollectiveError> {
        if root < self.rank_info.world {
            return Ok(());
        }
        let reason = format!("root {root} in a group of {}", self.rank_info.world);
        Err(CollectiveError::Invalid(reason))
    }

    fn gather(&mut self, kind: Kind, block: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let notes = self.notes(block)?;
        let along_tree = self.tree_transfer(kind);
        if let Some(result) = along_tree.map(|tree| tree.all_reduce(block, &[], &mut [])) {
            return self.end(result);
        }
        let payload = Payload::new(Body::Empty, notes);
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

    /// Ring all-reduce. A long buffer is split over the channels, each of which runs a ring of its
    /// own concurrently.
    fn ring_all_reduce(
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

    /// Fields that all frames of the next operation have in common.
    fn op_tag(&self, kind: Kind) -> OpTag {
        OpTag { kind, generation: self.registration.generation(), sequence: self.sequence }
    }

    /// The algorithm that sums this many bytes, the same on all ranks.
    fn algorithm(&self, bytes: usize) -> Algorithm {
        let (is_small, has_tree) = (bytes < self.ring_bytes_min, self.tree.is_some());
        if self.is_hierarchical() && !is_small {
            Algorithm::Hierarchy
        } else if self.shares_memory() {
            Algorithm::SharedMemory
        } else if is_small && has_tree {
            Algorithm::Tree
        } else if is_small && self.rank_info.world <= chain::WORLD_MAX {
            Algorithm::Chain
        } else {
            Algorithm::Ring
        }
    }

    /// Frame kind of an all-reduce, by its type on the wire.
    fn sum_kind(&self) -> Kind {
        match self.wire {
            WireDtype::Bf16 => Kind::AllReduceBf16,
            WireDtype::F16 => Kind::AllReduceF16,
            WireDtype::F32 => Kind::AllReduce,
        }
    }

    /// Finishes an operation; shuts the links down if it has failed.
    fn end<T>(&mut self, result: Result<T, Fault>) -> Result<T, CollectiveError> {
        self.sequence += 1;
        let fault = match result {
            Ok(value) => return Ok(value),
            Err(fault) => fault,
        };
        self.fail();
        // A link that the fence has shut down looks like a lost peer.
        self.registration.check()?;
        Err(self.error(fault, self.links.as_ref()))
    }

    /// Returns the error of an operation that a fault has ended. `ring`: the ring whose neighbours
    /// the operation used.
    fn error(&self, fault: Fault, ring: Option<&Links>) -> CollectiveError {
        let ring = || ring.expect("only an operation on a ring has faults of its neighbours");
        match fault {
            Fault::Local(LocalFault::Aborted) => {
                CollectiveError::Aborted { generation: self.generation() }
            }
            Fault::Local(LocalFault::Broken(rank, reason)) => self.protocol_error(rank, reason),
            Fault::Local(LocalFault::Lost(rank)) => {
                let lost = LinkFault::Lost(ErrorKind::ConnectionAborted.into());
                lost.error(rank, self.members[rank])
            }
            Fault::Next(fault) => ring().next.error(fault),
            Fault::Prev(fault) => ring().prev.error(fault),
            Fault::Rank(rank, fault) => fault.error(rank, self.members[rank]),
            Fault::Wait(source) => CollectiveError::Io { action: "wait for a peer", source },
        }
    }
}

/// How the ranks of a group sum.
#[derive(Clone, Copy, Debug)]
enum Algorithm {
    /// Along the ranks and back, for few bytes.
    Chain,
    /// Shared memory inside of each host, a ring between the hosts.
    Hierarchy,
    Ring,
    SharedMemory,
    /// Up and down a tree, for few bytes in a large group.
    Tree,
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

    fn sums_pairwise(&self) -> bool {
        // An all-reduce sums within hosts first, and can send numbers of half the size.
        let has_memory = self.shares_memory() || self.is_hierarchical();
        self.world_size() > 2 && !has_memory && self.wire == WireDtype::F32
    }

    fn all_gather(&mut self, block: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.check()?;
        self.gather(Kind::AllGather, block)
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
        match (self.algorithm(size_of_val(src)), &self.links) {
            (Algorithm::Hierarchy, _) => {
                self.check_len_with_neighbours(src.len())?;
                self.shm_all_reduce(header, src, dst)
            }
            (Algorithm::SharedMemory, _) => self.shm_all_reduce(header, src, dst),
            (Algorithm::Chain, Some(links)) => {
                let op_tag = self.op_tag(self.sum_kind());
                let (registration, progress) = (&self.registration, &self.progress);
                let chain =
                    ChainReduce::new(links, registration, progress, op_tag, self.rank_info, notes);
                let result = chain.all_reduce(src, dst);
                self.end(result)
            }
            (Algorithm::Ring, Some(links)) => {
                let result = self.ring_all_reduce(links, notes, src, dst);
                self.end(result)
            }
            (Algorithm::Tree, Some(_)) => {
                let kind = self.sum_kind();
                let transfer = self.tree_transfer(kind).expect("the group has a tree");
                let result = transfer.all_reduce(header, src, dst);
                self.end(result)
            }
            (_, None) => {
                dst.copy_from_slice(src);
                Ok(notes)
            }
        }
    }

    fn exchange(
        &mut self,
        send: &[&[u8]],
        receive: &mut Vec<Vec<u8>>,
    ) -> Result<(), CollectiveError> {
        self.check()?;
        check_payloads(send, self.rank_info.world)?;
        receive.resize_with(send.len(), Vec::new);
        self.exchange_payloads(send, receive.iter_mut().map(Incoming::Any))
    }

    fn exchange_into(
        &mut self,
        send: &[&[u8]],
        receive: &mut [&mut [u8]],
    ) -> Result<(), CollectiveError> {
        self.check()?;
        check_receivers(self.rank_info.rank, send, receive, self.rank_info.world)?;
        self.exchange_payloads(send, receive.iter_mut().map(|into| Incoming::Exact(into)))
    }

    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.check()?;
        self.check_root(root)?;
        let is_root = self.rank_info.rank == root;
        if is_root && bytes.len() > BROADCAST_BYTES_MAX {
            let reason =
                format!("a broadcast of {} bytes; the limit is {BROADCAST_BYTES_MAX}", bytes.len());
            return Err(CollectiveError::Invalid(reason));
        }
        if self.links.is_none() {
            return Ok(());
        }
        let mut announcement =
            if is_root { Announcement::encode(bytes, self.segment_bytes) } else { Vec::new() };
        let (kind, note) = (Kind::Announcement, Some(&mut announcement));
        if !self.broadcast_along_tree(kind, root, note, &mut [])? {
            let mut notes = vec![Vec::new(); self.rank_info.world];
            notes[root] = announcement;
            let nothing = Span { len: 0, segment_len: 1 };
            let schedule = Schedule::broadcast(self.rank_info, root, nothing, true);
            let mut notes = self.run(kind, schedule, Payload::new(Body::Empty, notes))?;
            announcement = mem::take(&mut notes[root]);
        }
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
                self.fail();
                let links = self.links.as_ref().expect("a group of one has returned above");
                return Err(links.prev.error(LinkFault::Broken(reason)));
            }
        };
        if self.broadcast_along_tree(Kind::BroadcastBytes, root, None, body)? {
            return Ok(());
        }
        let payload = Payload::new(Body::Bytes(body), vec![Vec::new(); self.rank_info.world]);
        let schedule =
            Schedule::broadcast(self.rank_info, root, payload.span(self.segment_bytes), false);
        self.run(Kind::BroadcastBytes, schedule, payload).map(drop)
    }

    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError> {
        self.check()?;
        self.check_root(root)?;
        let bytes = bytemuck::cast_slice_mut(buf);
        if self.broadcast_along_tree(Kind::Broadcast, root, None, bytes)? {
            return Ok(());
        }
        let payload = Payload::new(Body::Floats(buf), vec![Vec::new(); self.rank_info.world]);
        let schedule =
            Schedule::broadcast(self.rank_info, root, payload.span(self.segment_bytes), false);
        self.run(Kind::Broadcast, schedule, payload).map(drop)
    }
}

/// Announcement of a `broadcast_bytes`: only the root knows the length.
///
/// `length (u64, little endian) | the bytes, if they fit into a segment`
#[derive(Debug, Eq, PartialEq)]
enum Announcement {
    /// The bytes; nothing follows.
    All(Vec<u8>),
    /// This number of bytes follows.
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
            return Err(format!("expected nothing after the length {length}, got {behind} bytes"));
        }
        match usize::try_from(length) {
            Ok(length) if length <= BROADCAST_BYTES_MAX => Ok(Self::Follow(length)),
            _ => Err(format!("expected at most {BROADCAST_BYTES_MAX} bytes, got {length}")),
        }
    }
}

mod transport;
mod tree;

use transport::ShmState;
pub(crate) use transport::TransportPlan;

/// Returns the size from which the ring is faster than the [chains](chain), as measured there.
fn ring_bytes_min(world: usize) -> usize {
    if world == 2 { (128 << 10) + 1 } else { (64 << 10) + 1 }
}

/// Segment size: small enough to stay in a core's cache while it is received, reduced and sent;
/// large enough to amortize system calls.
const SEGMENT_BYTES: usize = 256 << 10;

/// Smallest part of an all-reduce per channel; below it, waiting dominates.
const CHANNEL_BYTES_MIN: usize = 256 << 10;

#[cfg(test)]
pub(crate) mod tests;
