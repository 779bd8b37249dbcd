//! What the shipped trainer and donor touch outside of themselves, in a simulated process.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use elasticdl::machine::{
    CheckpointStore, Completion, Group, Links, Machine, OwnShard, ReadError, Receiver, Records,
    Request, RequestLink, RestoreError, Restored, SavedPart, Sender, TakeShard, Taken,
};
use elasticdl::session::checkpoint::Written;
use elasticdl::session::header::{self, StateRecord};
use elasticdl::session::transport_switch::NcclBuild;
use elasticdl_collective::device::Path;
use elasticdl_collective::testing::schedule::RankInfo;
use elasticdl_collective::{
    CollectiveError, Communicator, FetchError, GroupSpec, HostGroup, Member, Position,
    StateMessageHeader,
};
use elasticdl_proto::RecordRange;
use elasticdl_tables::SavedChunk;

use super::clock::Micros;
use super::coroutine::{act, act_and_wait, act_on_drop, now, until};
use super::state::checkpoints::{Part, SavedRows};
use super::state::network::LinkId;
use super::state::operation::{Collective, Operated};
use super::state::packet::StateMessage;
use super::state::thread::StateRequest;
use super::state::trainer::Shared;

/// The clock and the threads of a process.
#[derive(Debug)]
pub(super) struct SimulatedMachine;

impl Machine for SimulatedMachine {
    fn now(&self) -> Instant {
        instant(now())
    }

    fn spawn(&self, name: &'static str, work: Box<dyn FnOnce() + Send>) -> io::Result<()> {
        act(move |world, thread| world.spawn(thread.p, name, work));
        Ok(())
    }

    fn block(&self, timeout: Duration, is_ready: &mut dyn FnMut(Duration) -> bool) {
        let end = end_of(timeout);
        while !is_ready(Duration::ZERO) && now() < end {
            act_and_wait(move |world, thread| world.block(thread, end));
        }
    }
}

/// A point in simulated time as the shipped code knows it.
pub(super) fn instant(at: Micros) -> Instant {
    *ORIGIN + Duration::from_micros(at)
}

/// The end of a wait that begins now.
fn end_of(timeout: Duration) -> Micros {
    now().saturating_add(Micros::try_from(timeout.as_micros()).unwrap_or(Micros::MAX))
}

/// The point in time that simulated time counts from. Its value has no effect.
static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The links of a process.
#[derive(Debug)]
pub(super) struct SimulatedLinks {
    /// Requests of joiners.
    pub(super) requests: Shared<StateRequest>,
}

impl Links for SimulatedLinks {
    fn connect(
        &self,
        group: &GroupSpec,
        _deadline: Duration,
    ) -> Result<Box<dyn Group>, CollectiveError> {
        let group = group.clone();
        let generation = group.generation;
        act(move |world, thread| world.connect(thread.p, &group))?;
        let place = until(|world, thread| world.continue_connect(thread.p))?;
        Ok(Box::new(SimulatedGroup { generation, place, sequence: 0 }))
    }

    fn next_request(&self) -> Option<Box<dyn Request>> {
        let request = self.requests.borrow_mut().pop_front()?;
        Some(Box::new(JoinerRequest { request, is_served: false }))
    }

    fn fetch(
        &self,
        donor: Member,
        limit: Duration,
        idle_timeout: Duration,
        position: Option<Position>,
    ) -> Result<Box<dyn Receiver>, FetchError> {
        let (member, end) = (donor.id, end_of(limit));
        let again = position.is_some();
        let link = act(move |world, thread| world.dial_donor(thread.p, donor, again));
        let dialled = until(move |world, thread| world.dialled_donor(thread.p, end, position));
        match dialled {
            Ok(()) => {
                let idle_us = idle_timeout.as_micros() as Micros;
                Ok(Box::new(DonorLink { donor: member, link, idle_us, floats: Vec::new() }))
            }
            Err(Some(source)) => Err(FetchError::Lost { member, source }),
            Err(None) => Err(FetchError::Deadline { member, waited: limit }),
        }
    }
}

impl Drop for SimulatedLinks {
    fn drop(&mut self) {
        act_on_drop(|world, thread| world.close_endpoint(thread.p));
    }
}

/// The group of one generation.
#[derive(Debug)]
struct SimulatedGroup {
    generation: u64,
    place: RankInfo,
    /// Number of operations.
    sequence: u64,
}

impl SimulatedGroup {
    fn operate(
        &mut self,
        what: Collective,
        note: Option<Vec<u8>>,
        body: Vec<f32>,
    ) -> Result<Operated, CollectiveError> {
        self.sequence += 1;
        let mut begun = Some((note, body));
        until(move |world, thread| {
            let begins = begun.take();
            let failed = begins.map(|(note, body)| world.operate(thread.p, what, note, body));
            match failed {
                Some(Err(error)) => Some(Err(error)),
                Some(Ok(())) | None => world.advance(thread.p),
            }
        })
    }
}

impl Communicator for SimulatedGroup {
    fn rank(&self) -> usize {
        self.place.rank
    }

    fn world_size(&self) -> usize {
        self.place.world
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn sums_pairwise(&self) -> bool {
        self.world_size() > 2 && self.spans_hosts()
    }

    fn all_gather(&mut self, block: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        // The first operation of a group.
        let is_first = self.sequence == 0;
        let what = if is_first { Collective::Synchronize } else { Collective::IdleRound };
        Ok(self.operate(what, Some(block.to_vec()), Vec::new())?.notes)
    }

    fn all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.sum(Path::Host, header, src, dst)
    }

    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        let note = (root == self.place.rank).then(|| bytes.clone());
        let mut done = self.operate(Collective::BroadcastBytes { root }, note, Vec::new())?;
        *bytes = std::mem::take(&mut done.notes[root]);
        Ok(())
    }

    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError> {
        let done = self.operate(Collective::Broadcast { root }, None, buf.to_vec())?;
        buf.copy_from_slice(&done.body);
        Ok(())
    }

    fn exchange(
        &mut self,
        send: &[&[u8]],
        receive: &mut Vec<Vec<u8>>,
    ) -> Result<(), CollectiveError> {
        let done = self.operate(Collective::Exchange, Some(header::encode(&send)), Vec::new())?;
        let of_rank = |note: &Vec<u8>| {
            let mut payloads: Vec<Vec<u8>> = header::decode(note).expect("a rank encoded them");
            payloads.swap_remove(self.place.rank)
        };
        *receive = done.notes.iter().map(of_rank).collect();
        Ok(())
    }
}

impl Group for SimulatedGroup {
    fn host_mut(&mut self) -> Option<&mut HostGroup> {
        None
    }

    fn into_host(self: Box<Self>) -> Option<HostGroup> {
        None
    }

    fn describe(&self) -> String {
        "simulated".into()
    }

    /// Of some groups.
    fn spans_hosts(&self) -> bool {
        !self.generation.is_multiple_of(4)
    }

    fn sum(
        &mut self,
        path: Path,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let what = Collective::Step(path);
        let change = |of_all| {
            let header = header.to_vec();
            act(move |world, thread| world.changes_sum(thread.p, &header, of_all))
        };
        let mut src = src.to_vec();
        src[0] += change(true);
        let done = self.operate(what, Some(header.to_vec()), src)?;
        dst.copy_from_slice(&done.body);
        dst[0] += change(false);
        Ok(done.notes)
    }

    fn begin_nccl(&mut self) -> Result<(), CollectiveError> {
        self.operate(Collective::NcclId, None, Vec::new())?;
        act(|world, thread| world.begin_nccl(thread.p));
        Ok(())
    }

    fn nccl(&self) -> Option<NcclBuild> {
        act(|world, thread| world.nccl(thread.p))
    }
}

impl Drop for SimulatedGroup {
    fn drop(&mut self) {
        act_on_drop(|world, thread| world.leave_ring(thread.p));
    }
}

/// The request of a joiner.
#[derive(Debug)]
struct JoinerRequest {
    request: StateRequest,
    is_served: bool,
}

impl Request for JoinerRequest {
    fn member(&self) -> u64 {
        self.request.member.0
    }

    fn link(&self) -> Box<dyn RequestLink> {
        Box::new(JoinerLink(self.request.link))
    }

    fn serve(mut self: Box<Self>, _idle_timeout: Duration) -> Box<dyn Sender> {
        self.is_served = true;
        let StateRequest { link, position, .. } = self.request;
        act(|world, thread| world.serve(thread));
        Box::new(ToJoiner { link, first: position, last: None })
    }
}

impl Drop for JoinerRequest {
    fn drop(&mut self) {
        let link = self.request.link;
        if !self.is_served {
            act_on_drop(move |world, thread| world.shut(link, thread.p + 1));
        }
    }
}

#[derive(Debug)]
struct JoinerLink(LinkId);

impl RequestLink for JoinerLink {
    fn shut_down(&self) {
        let link = self.0;
        act(move |world, thread| world.shut(link, thread.p + 1));
    }
}

/// Donor's end of a transfer.
#[derive(Debug)]
struct ToJoiner {
    link: LinkId,
    /// The position that the request brought.
    first: Option<Position>,
    last: Option<Position>,
}

impl Sender for ToJoiner {
    fn first_position(&mut self) -> io::Result<Option<Position>> {
        self.last = self.first;
        Ok(self.first)
    }

    fn position(&mut self) -> io::Result<Option<Position>> {
        let link = self.link;
        let newer = act(move |world, thread| world.take_positions(thread.p, link))?;
        self.last = newer.or(self.last);
        Ok(self.last)
    }

    fn send(&mut self, kind: u32, generation: u64, note: &[u8], floats: &[f32]) -> io::Result<()> {
        let (link, note, floats) = (self.link, note.to_vec(), floats.to_vec());
        let message = StateMessage { kind, generation, note, floats, lineage: 0 };
        let mut message = Some(message);
        until(move |world, thread| match message.take() {
            Some(message) => world.send_state(thread, link, message).err().map(Err),
            None => Some(Ok(())),
        })
    }

    fn heartbeat(&mut self) -> io::Result<()> {
        self.send(0, 0, &[], &[])
    }

    fn finish(self: Box<Self>) {}
}

impl Drop for ToJoiner {
    fn drop(&mut self) {
        let link = self.link;
        act_on_drop(move |world, thread| world.shut(link, thread.p + 1));
    }
}

/// Joiner's end of a transfer.
#[derive(Debug)]
struct DonorLink {
    donor: u64,
    link: LinkId,
    idle_us: Micros,
    /// Floats of the current message.
    floats: Vec<f32>,
}

impl Receiver for DonorLink {
    fn donor(&self) -> u64 {
        self.donor
    }

    fn report(&self, position: Position) {
        act(move |world, thread| world.report_position(thread.p, position));
    }

    fn next(&mut self, _wait: Duration) -> io::Result<Option<StateMessageHeader>> {
        let idle_us = self.idle_us;
        let next = until(move |world, thread| world.next_state_message(thread.p, idle_us));
        let Some(message) = next? else { return Ok(None) };
        let StateMessage { kind, generation, ref note, ref floats, .. } = *message;
        self.floats.clone_from(floats);
        let (note, floats) = (note.clone(), floats.len() as u64);
        Ok(Some(StateMessageHeader { kind, generation, note, floats }))
    }

    fn take(&mut self, buf: &mut [f32]) -> io::Result<()> {
        buf.copy_from_slice(&self.floats);
        Ok(())
    }
}

impl Drop for DonorLink {
    fn drop(&mut self) {
        let link = self.link;
        act_on_drop(move |world, thread| world.drop_source(thread.p, link));
    }
}

/// The training data: while the storage does not answer, a worker has only what it has read before.
#[derive(Debug)]
pub(super) struct SimulatedRecords {
    /// Number of records of an epoch.
    pub(super) records: u64,
    /// Whether the storage does not answer.
    pub(super) is_unavailable: Rc<Cell<bool>>,
}

impl Records<usize> for SimulatedRecords {
    fn replace(&self, _now: &[RecordRange], _later: &[RecordRange]) {}

    fn take(&self, range: RecordRange) -> Result<Taken<usize>, ReadError> {
        let read = match self.is_unavailable.get() {
            true => act(move |world, _| world.read(range.len())),
            false => range.len(),
        };
        let cut = range.start + read;
        let first = u64::from(range.epoch) * self.records;
        let records = (range.start..cut).map(|record| (first + record) as usize).collect();
        let rest = (cut < range.end).then_some(RecordRange { start: cut, ..range });
        Ok(Taken { records, rest })
    }

    fn readable(&self, ranges: &[RecordRange]) -> Result<Option<u64>, ReadError> {
        let records: u64 = ranges.iter().map(RecordRange::len).sum();
        let is_unavailable = self.is_unavailable.get();
        Ok(is_unavailable.then(|| act(move |world, _| world.rng.below(records + 1))))
    }
}

/// The checkpoints of a job.
#[derive(Debug)]
pub(super) struct SimulatedCheckpoints {
    pub(super) is_written: bool,
    /// Results of writes.
    pub(super) completions: Shared<Completion>,
}

impl CheckpointStore for SimulatedCheckpoints {
    fn is_written(&self) -> bool {
        self.is_written
    }

    fn prepare(&mut self, _world_size: usize) {}

    fn write(
        &mut self,
        shard: OwnShard,
        state: StateRecord,
        (parameters, _): (&[f32], &[f32]),
        owned: Option<(Vec<Vec<u32>>, SavedPart)>,
    ) {
        let OwnShard { rank, world_size, .. } = shard;
        let at = |rank: usize| parameters.len() * rank / world_size;
        let parameters = super::model::counts(&parameters[at(rank)..at(rank + 1)]);
        let of_rank = |(of_ranks, mut owned): (Vec<Vec<u32>>, SavedPart)| {
            let balance = owned.take_balance();
            let shards: Vec<Vec<u8>> = match owned {
                SavedPart::Chunks(chunks, _) => {
                    chunks.into_iter().map(|chunk| chunk.encode()).collect()
                }
                SavedPart::Rows(rows, _) => rows.into_iter().map(|shard| shard.encode()).collect(),
            };
            (of_ranks[rank].iter().copied().zip(shards).collect(), balance)
        };
        let (rows, balance) = owned.map(of_rank).unwrap_or_default();
        let part = Part { parameters, rows, balance };
        act(move |world, thread| world.write_checkpoint(thread.p, shard, state, part));
    }

    fn commit(&mut self, step: u64, parts: &[Written]) {
        let world_size = parts.len();
        act(move |world, thread| world.commit_checkpoint(thread.p, step, world_size));
    }

    fn poll(&mut self) -> Option<Completion> {
        self.completions.borrow_mut().pop_front()
    }

    fn restore(
        &mut self,
        parameters: &mut [f32],
        _slots: &mut [f32],
        _damaged: &mut dyn FnMut(&str, &str),
    ) -> Result<Option<Restored>, RestoreError> {
        let restored = act(|world, thread| world.restore(thread.p));
        Ok(restored.map(|((step, generation), (state, counts))| {
            parameters.iter_mut().zip(counts).for_each(|(to, count)| *to = f32::from(count));
            let name = format!("{step} of {generation}");
            Restored { state, name, same_run: true, differences: Vec::new() }
        }))
    }

    fn newest(
        &mut self,
        step: u64,
        _damaged: &mut dyn FnMut(&str, &str),
    ) -> Result<Option<(String, bool)>, RestoreError> {
        let newest = act(move |world, _| {
            let mut complete = world.checkpoint_store.complete.keys().rev();
            complete.find(|(of, _)| *of <= step).copied()
        });
        Ok(newest.map(|(step, generation)| (format!("{step} of {generation}"), true)))
    }

    fn read_rows(
        &mut self,
        (name, _): (&str, bool),
        shards: &[u32],
        take: &mut TakeShard<'_>,
    ) -> Result<(), RestoreError> {
        let rows = saved_rows(name);
        for shard in shards {
            take(*shard, &rows[shard]).map_err(RestoreError::Refused)?;
        }
        Ok(())
    }

    fn read_chunks(
        &mut self,
        (name, _): (&str, bool),
        chunks: &[u32],
    ) -> Result<Vec<SavedChunk>, RestoreError> {
        let (saved, layout) = (saved_rows(name), act(|world, _| world.setting.layout()));
        let layout = layout.expect("the optimizer's state is divided");
        let decode = |chunk| layout.decode(chunk, &saved[&chunk]).expect("a rank has written it");
        Ok(chunks.iter().copied().map(decode).collect())
    }

    fn pass_over(&mut self, _checkpoint: (&str, bool), _reason: &str) {}
}

/// The shards in the checkpoint of this name.
fn saved_rows(name: &str) -> SavedRows {
    let key = checkpoint_key(name);
    act(move |world, _| world.checkpoint_store.rows[&key].clone())
}

/// Step and generation of the checkpoint of this name.
pub(super) fn checkpoint_key(name: &str) -> (u64, u64) {
    let (step, generation) = name.split_once(" of ").expect("a checkpoint was found");
    (step.parse().expect("a step"), generation.parse().expect("a generation"))
}
