//! A sharded optimizer on the trainer: each rank holds the optimizer's state of some chunks of the
//! parameters, and all parameters. If these are in bf16, in a model's memory, the chunks also have
//! the f32 parameters that are updated, the masters. All of it is on the host: a model on a GPU
//! computes with a copy of the parameters, and its gradient is copied back.
//!
//! ```text
//!   compute ── sums of the rank's chunks, per bucket ──► staged
//!           ── headers of all ranks ──► update of its chunks, commit
//!           ── parameters of the other chunks, from their owners ──► next round
//! ```
//!
//! **Invariant:** a rank gives its header of a step when its sums are staged, and updates nothing
//! before it has the headers of all ranks. **Invariant:** the parameters are those of a step only
//! while they are [gathered](ShardedOptimizer::is_gathered). A group gathers them after each
//! commit, and at the end of each repair in which not all ranks have those of the same commit; what
//! a broken group has left is overwritten there.

mod sums;

use std::mem;
use std::ops::Range;

use elasticdl_collective::CollectiveError;
use elasticdl_proto::{Generation, WorkerId};
use elasticdl_tables::{ChunkUpdate, Chunks, OwnedHeader, StepCommit};
use half::bf16;
use half::slice::HalfFloatSliceExt as _;

use self::sums::{StepSums, parts};
use super::Trainer;
use super::peers::{Peers, Source, all_have_read, refused};
use super::row_tables::{LostRows, Regrouped, exchange};
use super::stopped::{Stopped, check_sums, decode_all, state_mismatch};
use crate::buckets::{self, BucketSums};
use crate::external::{Progress, observe};
use crate::failure::{Failure, call_user};
use crate::half_model::HalfModel;
use crate::machine::{CheckpointStore, Group};
use crate::metrics::UserError;
use crate::model::Model;
use crate::session::header;
use crate::tensor::Tensor;
use crate::tensors::{HostState, Tensors};
use crate::update::{Update, UpdateRule};

/// The optimizer's state on this worker.
#[derive(Debug)]
pub(crate) struct ShardedOptimizer {
    chunks: Chunks,
    /// Whether the first slot of each parameter is the parameter in f32, of which the ranks have
    /// the rounded one alone.
    has_masters: bool,
    sums: StepSums,
    pub(super) peers: Peers,
    /// Whether this rank has the parameters of its step.
    is_gathered: bool,
    /// Whether the program, if the model is one, has another state than this rank, and whether it
    /// has updated its own without the parameters of other ranks.
    is_new_to_program: bool,
    is_updated: bool,
    /// Digest of the chunks of all ranks of the group, once they are counted.
    counted: Option<u64>,
    /// What the group has given up because chunks are lost, until it has a state again.
    lost: Option<LostRows>,
    /// Parameters of a bucket, while they are received.
    scratch: Vec<f32>,
    /// What is sent to each rank of a bucket's parameters.
    outgoing: Vec<Vec<u8>>,
}

impl ShardedOptimizer {
    /// `bucket_len`: of the model, if it has buckets.
    pub(crate) fn new(chunks: Chunks, rule: &dyn UpdateRule, bucket_len: Option<usize>) -> Self {
        let layout = chunks.layout();
        let has_masters = layout.slots > rule.slots();
        Self {
            chunks,
            has_masters,
            sums: StepSums::new(layout, bucket_len, rule.clipped_from()),
            peers: Peers::default(),
            is_gathered: false,
            is_new_to_program: true,
            is_updated: false,
            counted: None,
            lost: None,
            scratch: Vec::new(),
            outgoing: Vec::new(),
        }
    }

    /// Whether a sum of the step is not finite that this rank has staged.
    pub(super) fn has_nonfinite_sum(&self) -> bool {
        !self.sums.are_finite()
    }

    /// This worker's chunks.
    pub(crate) fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// Whether the chunks have the parameters in f32, and the ranks the rounded ones.
    pub(super) fn has_masters(&self) -> bool {
        self.has_masters
    }

    /// Whether this rank has the parameters of its step.
    pub(crate) fn is_gathered(&self) -> bool {
        self.is_gathered
    }

    /// What this worker tells a new group.
    pub(super) fn header(&self) -> Option<OwnedHeader> {
        self.chunks.header()
    }

    /// Whether the group has given its state up, as chunks are lost, and has no other one yet.
    pub(crate) fn has_lost_chunks(&self) -> bool {
        self.lost.is_some()
    }

    /// What the group has given up, as long as it has no other state.
    pub(super) fn lost(&self) -> Option<LostRows> {
        self.lost
    }

    /// The group gives up its state, or a checkpoint if no chunks are `lost`.
    pub(super) fn go_back(&mut self, lost: Option<LostRows>) {
        self.chunks.clear();
        self.peers.go_back();
        (self.is_gathered, self.is_new_to_program, self.counted) = (false, true, None);
        self.lost = self.lost.or(lost);
    }

    /// The group goes on from another rank's state, whose parameters not all ranks have yet.
    /// `is_new`: this rank had none.
    pub(super) fn receive_state(&mut self, is_new: bool) {
        self.is_gathered = false;
        self.is_new_to_program |= is_new;
    }

    /// The sums of the buckets that follow are those of a step.
    pub(super) fn begin_sums(&mut self) -> &mut impl BucketSums {
        self.sums.begin(&self.chunks);
        &mut self.sums
    }

    /// Sums the buckets that are not summed already, hands chunks to the ranks that are to hold
    /// them, and keeps the sums until the step is committed. They are computed twice if the step
    /// `is_audited`.
    fn sum(
        &mut self,
        group: &mut dyn Group,
        gradient: &[f32],
        (summed, is_audited): (usize, bool),
    ) -> Result<(), Stopped> {
        if summed == 0 {
            self.begin_sums();
        }
        buckets::sum_rest_with(group, &[], gradient, &mut self.sums, summed)?;
        if is_audited && group.world_size() > 1 {
            let first = self.sums.digest();
            buckets::sum_rest_with(group, &[], gradient, self.begin_sums(), 0)?;
            check_sums(first, self.sums.digest())?;
        }
        if let Some(copies) = self.chunks.copies() {
            let received = exchange(group, copies)?;
            self.chunks.receive_copies(&received)?;
        }
        self.chunks.stage(self.sums.take(group)?);
        Ok(())
    }

    /// The step after `step` is committed, by the group of `generation` or, in a repair, by an
    /// earlier one: calls `update` with the chunks that this rank holds, if it `is_applied`.
    ///
    /// # Errors
    /// As for [`RowTables::commit`](super::row_tables::RowTables::commit).
    fn commit(
        &mut self,
        (step, generation): (u64, Option<Generation>),
        (records, is_applied): (u64, bool),
        update: &mut dyn FnMut(Vec<ChunkUpdate<'_>>) -> Result<(), UserError>,
    ) -> Result<(), Failure> {
        self.is_gathered = false;
        self.is_updated |= is_applied;
        let committed_by = generation
            .map(|Generation(generation)| generation)
            .or_else(|| self.peers.generation_of(step + 1));
        let mut applied = None;
        let mut apply = |chunks: Vec<ChunkUpdate<'_>>| {
            applied = Some(call_user("the update", || update(chunks)));
        };
        let sums = committed_by.and_then(|generation| {
            let commit = StepCommit { generation, divisor: records as f32, is_applied };
            self.chunks.commit(commit, &mut apply)
        });
        if is_applied && sums.is_none() {
            // A program has a state beside the chunks.
            apply(Vec::new());
        }
        applied.transpose().map_err(Failure::local)?;
        match sums {
            Some(sums) => self.sums.reuse(sums),
            None if generation.is_none() => {}
            None => {
                let error = format!("step {} is committed, and its sums are not here", step + 1);
                return Err(Failure::local(error));
            }
        }
        Ok(())
    }

    /// Replaces the parameters of all chunks by those of their owners. `in_round`: all ranks have
    /// just committed the step, so that a rank that holds a chunk has its parameters.
    fn gather<R: Replica>(
        &mut self,
        group: &mut dyn Group,
        replica: &mut R,
        in_round: bool,
    ) -> Result<(), Stopped> {
        let Self { chunks, scratch, outgoing, is_gathered, .. } = self;
        let (layout, world, me) = (chunks.layout(), group.world_size(), group.rank());
        scratch.resize(GATHERED_LEN_MAX.max(layout.chunk_len).min(layout.parameters), 0.0);
        let scratch: &mut [R::Parameter] = bytemuck::cast_slice_mut(scratch);
        let per_bucket = (scratch.len() / layout.chunk_len).max(1) as u32;
        outgoing.resize(world, Vec::new());
        let mut first = 0;
        while first < layout.chunks() && (world > 1 || !R::IS_OF_UPDATE) {
            let bucket = first..(first + per_bucket).min(layout.chunks());
            let mut of_ranks: Vec<Vec<Range<usize>>> = vec![Vec::new(); world];
            outgoing.iter_mut().for_each(Vec::clear);
            let mut are_here = true;
            for chunk in bucket.clone() {
                let mut having = chunks.holders(chunk);
                having.truncate(if in_round { world } else { 1 });
                are_here &= having.len() == world;
                let (owner, range) = (having[0], layout.range(chunk));
                if !having.contains(&me) {
                    of_ranks[owner].push(range);
                    continue;
                }
                let slots = chunks.slots_of(chunk).expect("a holder of the chunk has its slots");
                let lacks = |rank: usize| owner == me && !having.contains(&rank);
                let lacking = outgoing.iter_mut().enumerate().filter(|(rank, _)| lacks(*rank));
                let mut lacking = lacking.map(|(_, outgoing)| outgoing);
                replica.give(range, slots, &mut lacking)?;
            }
            first = bucket.end;
            if are_here {
                continue;
            }
            let send: Vec<&[u8]> = outgoing.iter().map(Vec::as_slice).collect();
            let mut receive =
                parts(scratch, of_ranks.iter().map(|r| r.iter().map(Range::len).sum()));
            group.exchange_into(&send, &mut receive)?;
            let mut rest = &*scratch;
            for range in of_ranks.iter().flatten() {
                let (part, later) = rest.split_at(range.len());
                replica.take(range.clone(), part)?;
                rest = later;
            }
        }
        *is_gathered = true;
        Ok(())
    }

    /// All ranks are at `step`. They agree on who holds which chunks, and read those of a
    /// checkpoint if the state comes from there. `created`: the parameters in f32, if this group
    /// has created them.
    fn regroup(
        &mut self,
        group: &mut dyn Group,
        (step, created): (u64, Option<&[f32]>),
        members: &[WorkerId],
        store: &mut dyn CheckpointStore,
    ) -> Result<Regrouped<u32>, Stopped> {
        // Links that break while a step is computed leave the parameters of all ranks as they were.
        self.is_gathered &= self.peers.have_gathered(step);
        self.counted = None;
        let members = self.peers.members(members);
        let of_group = (group.generation(), members);
        let masters = if self.has_masters { created } else { Some(&[][..]) };
        if let Some(masters) = masters.filter(|_| step == 0) {
            self.chunks.create_with(of_group.0, of_group.1, masters);
            self.lost = None;
            return Ok(Regrouped::Agreed);
        }
        match self.peers.source(group, step, &self.chunks)? {
            Source::Members(recovery, placement) => {
                if let Err(lost) = self.chunks.regroup((step, placement), &recovery, of_group) {
                    return Ok(Regrouped::Lost(lost.0.len() as u32));
                }
            }
            Source::Checkpoint(name, same_run) => {
                let wanted = self.chunks.shards_at_start(&of_group.1);
                let read = refused(store.read_chunks((&name, same_run), &wanted))?;
                let (chunks, read) = match read {
                    Ok(chunks) => (chunks, Ok(())),
                    Err(reason) => (Vec::new(), Err(reason)),
                };
                if let Err(reason) = all_have_read(group, read)? {
                    store.pass_over((&name, same_run), &reason);
                    return Ok(Regrouped::Unreadable);
                }
                self.chunks.restore(step, of_group, chunks);
                tracing::info!(step, name, chunks = wanted.len(), "the optimizer's state is read");
            }
        }
        self.lost = None;
        Ok(Regrouped::Agreed)
    }

    /// As [`RowTables::hand_over`](super::row_tables::RowTables::hand_over).
    pub(super) fn hand_over(
        &mut self,
        group: &mut dyn Group,
        leaves: &[bool],
    ) -> Result<(), Stopped> {
        self.chunks.begin_hand_over(leaves);
        while let Some(messages) = self.chunks.handed_over() {
            let received = exchange(group, messages)?;
            self.chunks.take_over(&received)?;
        }
        // A rank that passes here knows that all have their copies.
        exchange(group, vec![Vec::new(); leaves.len()])?;
        self.chunks.end_hand_over();
        Ok(())
    }

    /// Digest of the chunks of all ranks at the end. A rank that reports its final state once more,
    /// to another master, does not count again: the others would have to take part.
    pub(super) fn count(&mut self, group: &mut dyn Group) -> Result<u64, Stopped> {
        if let Some(counted) = self.counted {
            return Ok(counted);
        }
        let all: Vec<u64> = decode_all(group.all_gather(&header::encode(&self.chunks.digest()))?)?;
        Ok(*self.counted.insert(all.into_iter().fold(0, u64::wrapping_add)))
    }
}

/// What all ranks have of the parameters.
trait Replica {
    /// A parameter as it is sent.
    type Parameter: bytemuck::Pod;
    /// Whether the update of a chunk has changed its parameters here.
    const IS_OF_UPDATE: bool;

    /// Appends the parameters of a chunk that this rank holds, with these slots, to each of these.
    fn give(
        &mut self,
        range: Range<usize>,
        slots: &[f32],
        to: &mut dyn Iterator<Item = &mut Vec<u8>>,
    ) -> Result<(), Failure>;

    /// Takes in the parameters of a chunk that another rank owns.
    fn take(&mut self, range: Range<usize>, from: &[Self::Parameter]) -> Result<(), Failure>;
}

/// All parameters, in f32.
struct Floats<'a>(&'a mut [f32]);

impl Replica for Floats<'_> {
    type Parameter = f32;
    const IS_OF_UPDATE: bool = true;

    fn give(
        &mut self,
        range: Range<usize>,
        _: &[f32],
        to: &mut dyn Iterator<Item = &mut Vec<u8>>,
    ) -> Result<(), Failure> {
        to.for_each(|to| to.extend_from_slice(bytemuck::cast_slice(&self.0[range.clone()])));
        Ok(())
    }

    fn take(&mut self, range: Range<usize>, from: &[f32]) -> Result<(), Failure> {
        self.0[range].copy_from_slice(from);
        Ok(())
    }
}

/// All parameters, in bf16 in the model's memory.
struct Rounded<'a> {
    model: &'a mut dyn HalfModel,
    /// Those of a chunk.
    parameters: Vec<bf16>,
}

impl Replica for Rounded<'_> {
    type Parameter = u16;
    const IS_OF_UPDATE: bool = false;

    fn give(
        &mut self,
        range: Range<usize>,
        slots: &[f32],
        to: &mut dyn Iterator<Item = &mut Vec<u8>>,
    ) -> Result<(), Failure> {
        let mut parameters = mem::take(&mut self.parameters);
        parameters.resize(range.len(), bf16::ZERO);
        parameters.convert_from_f32_slice(&slots[..range.len()]);
        to.for_each(|to| to.extend_from_slice(bytemuck::cast_slice(&parameters)));
        self.take(range, bytemuck::cast_slice(&parameters))?;
        self.parameters = parameters;
        Ok(())
    }

    fn take(&mut self, range: Range<usize>, from: &[u16]) -> Result<(), Failure> {
        call_user("write()", || self.model.write(range.start, from)).map_err(Failure::local)
    }
}

impl<M: Model> Trainer<'_, M> {
    /// As [`step`](Self::step), with a sharded optimizer: each rank stages what it needs of the
    /// sum, and gives its header then.
    pub(super) fn step_sharded(&mut self, is_empty: bool) -> Result<(), Stopped> {
        let started = self.machine.now();
        let path = self.path();
        if self.exact.is_some() {
            self.sum_micro_batches(is_empty)?;
        } else if is_empty {
            self.tensors.clear_gradient()?;
        }
        let summed = mem::replace(&mut self.summed, Ok(0))?;
        let is_audited = self.is_audited()?;
        let (Some(sharded), Tensors::Host { group: Some(group), state }) =
            (&mut self.sharded, &mut self.tensors)
        else {
            return Err(CollectiveError::Aborted { generation: 0 }.into());
        };
        sharded.sum(&mut **group, &state.gradient, (summed, is_audited))?;
        let mine = self.header()?;
        let headers = decode_all(self.tensors.group_mut()?.all_gather(&mine)?)?;
        self.session.reports.reduced(self.machine.now() - started);
        self.report_transport(path);
        let failed = self.session.fails_alone(&headers);
        self.session.summed(headers, true).map_err(|mismatch| state_mismatch(&mismatch))?;
        let failed = failed.filter(|_| !self.session.is_handing_over());
        failed.map_or(Ok(()), |of_program| Err(Failure::from(of_program).into()))
    }

    /// As [`update`](Self::update), of the chunks that this rank holds.
    pub(super) fn update_sharded(&mut self, records: u64, is_applied: bool) -> Result<(), Stopped> {
        let round = self.session.in_round();
        self.update_chunks(round, (records, is_applied))?;
        self.commit(records, is_applied)?;
        if round.is_none() {
            return Ok(());
        }
        // Those that join another group next take part, as others may compute before they do.
        let is_in_group = self.session.group_rank().map(|(generation, _)| generation) == round;
        match self.gather_parameters(true) {
            Err(Stopped::Broken(error)) if !is_in_group => {
                tracing::info!(%error, "links broke; the next group gathers the parameters");
                Ok(())
            }
            gathered => {
                gathered?;
                self.observe_commit();
                Ok(())
            }
        }
    }

    /// Updates this rank's chunks with the sums that are staged of the step.
    fn update_chunks(
        &mut self,
        generation: Option<Generation>,
        of_step: (u64, bool),
    ) -> Result<(), Stopped> {
        let step = self.session.step();
        let (Some(sharded), Tensors::Host { state: HostState { parameters, slots, .. }, .. }) =
            (&mut self.sharded, &mut self.tensors)
        else {
            return Ok(());
        };
        let (model, rule, records) = (&mut self.model, &mut *self.rule, of_step.0);
        let (parameters, has_masters) = (parameters.writable(), sharded.has_masters);
        let update = &mut |chunks: Vec<ChunkUpdate<'_>>| {
            if let Some(bridge) = model.as_bridge() {
                let state = slots.writable();
                return bridge.update_chunks((step, records), parameters, state, chunks);
            }
            for ChunkUpdate { range, slots, sum, norm, .. } in chunks {
                let (parameters, slots) = match has_masters {
                    true => slots.split_at_mut(sum.len()),
                    false => (&mut parameters[range], slots),
                };
                let update = Update::new(step, records, sum, parameters, slots);
                rule.apply(Update { norm, ..update })?;
            }
            Ok(())
        };
        Ok(sharded.commit((step, generation), of_step, update)?)
    }

    /// Lets the model know the state after a commit. A program then continues with the parameters.
    pub(super) fn observe_commit(&mut self) {
        if let Some(state) = self.session.state() {
            let (epoch, records) = (state.ledger.epoch(), state.records_trained);
            observe(&mut self.model, Progress::Committed { step: state.step, epoch, records });
        }
    }

    /// Gathers the parameters of this rank's step. `in_round`: all ranks have just committed it.
    pub(super) fn gather_parameters(&mut self, in_round: bool) -> Result<(), Stopped> {
        let (Some(sharded), Tensors::Host { group: Some(group), state }) =
            (&mut self.sharded, &mut self.tensors)
        else {
            return Ok(());
        };
        if sharded.is_gathered {
            return Ok(());
        }
        match self.model.as_half_model().filter(|_| sharded.has_masters) {
            Some(model) => {
                let mut replica = Rounded { model, parameters: Vec::new() };
                sharded.gather(&mut **group, &mut replica, in_round)?;
            }
            None => {
                let mut replica = Floats(state.parameters.writable());
                sharded.gather(&mut **group, &mut replica, in_round)?;
            }
        }
        // A program looks at the parameters, also at those on its GPU.
        state.place()?;
        let is_updated = mem::take(&mut sharded.is_updated);
        let loads = mem::take(&mut sharded.is_new_to_program);
        if let Some(bridge) = self.model.as_bridge().filter(|_| is_updated || loads) {
            call_user("the end of the update", || bridge.gathered(loads))
                .map_err(Failure::local)?;
        }
        Ok(())
    }

    /// Broadcasts the optimizer's state or, if it is divided, what a program has beside the chunks.
    /// That of a rank that does not take it may be further by what follows a commit.
    pub(super) fn broadcast_slots(&mut self, root: usize, takes: bool) -> Result<(), Stopped> {
        let is_divided = self.sharded.is_some();
        if is_divided && self.tensors.size().slots == 0 {
            return Ok(());
        }
        let is_kept = is_divided && !takes;
        let kept = is_kept.then(|| self.tensors.to_host(Tensor::Slots)).transpose()?;
        let broadcast = self.tensors.broadcast(root, Tensor::Slots);
        if let (Some(kept), Tensors::Host { state, .. }) = (kept, &mut self.tensors) {
            state.slots.writable().copy_from_slice(&kept);
        }
        Ok(broadcast?)
    }

    /// The ranks agree on who holds which chunks, and gather the parameters. Returns `false` if the
    /// group goes back.
    pub(super) fn regroup_chunks(&mut self) -> Result<bool, Stopped> {
        let (Some(sharded), Tensors::Host { group, state }) =
            (&mut self.sharded, &mut self.tensors)
        else {
            return Ok(true);
        };
        let group = &mut **group.as_mut().ok_or(CollectiveError::Aborted { generation: 0 })?;
        let members = self.session.members();
        let (step, store) = (self.session.step(), &mut *self.checkpoints.store);
        let created = self.session.state().map(|state| state.created);
        let created = Some(&*state.gradient).filter(|_| created == Some(group.generation()));
        match sharded.regroup(group, (step, created), members, store)? {
            Regrouped::Agreed => self.gather_parameters(false).map(|()| true),
            Regrouped::Lost(chunks) if !self.session.follows_loss() => {
                // Those that left the group at its end may have them, and come back.
                let why = format!("{chunks} chunks of the optimizer's state are not here");
                Err(Stopped::Left(why))
            }
            Regrouped::Lost(chunks) => {
                self.go_back(Some(chunks));
                Ok(false)
            }
            Regrouped::Unreadable => {
                self.go_back(None);
                Ok(false)
            }
        }
    }
}

/// Number of parameters that are exchanged at a time, unless a chunk has more: 16 MiB.
const GATHERED_LEN_MAX: usize = 4 << 20;
