//! Embedding tables on the trainer: the rows of each round, their gradients, their commit.
//!
//! ```text
//!   round:  look up ── exchange ids ── exchange rows ──► compute ──► push gradients ──► all-reduce
//! ```
//!
//! `row_look_ahead` moves the exchanges of ids and rows beside the computation of the step before.
//!
//! **Invariant:** all ranks of a group look rows up and push gradients once in each round with a
//! step, in this order, with or without records of their own.

use std::sync::Arc;
use std::time::Duration;

use elasticdl_collective::{CollectiveError, Communicator};
use elasticdl_proto::{Generation, OnRowsLost, RecordRange, WorkerId, WorkerOptions};
use elasticdl_tables::{
    BatchRows, ComparedShards, Ids, InvalidRows, LostShards, Member, Owned, OwnedHeader, OwnedSize,
    Placement, Recovery, RowGradients, SHARDS, SavedShards, Settings, StepCommit, Table,
};
use serde::{Deserialize, Serialize};

use super::Trainer;
use super::fed::{EarlyRows, WaitingBatch, WaitingBatches};
use super::peers::{Peers, Source, all_have_read};
use super::stopped::{Stopped, decode_all};
use super::table_memory::{self, TableMemory};
use super::work::Work;
use crate::failure::Failure;
use crate::machine::{CheckpointStore, Group};
use crate::model::Model;
use crate::session::header::{self, HeldRows};

/// The tables of a job on this worker.
#[derive(Debug)]
pub(crate) struct RowTables {
    pub(super) specs: Arc<[Table]>,
    pub(super) owned: Owned,
    /// Gradients of rows that no known step has absorbed.
    gradients: RowGradients,
    /// Whether this rank has looked up the rows of the round.
    pub(super) looked_up: bool,
    /// Whether rows are looked up one step early between hosts.
    pub(crate) looks_ahead: bool,
    /// The rows of the next step.
    pub(super) early: Option<EarlyRows>,
    /// Why the rows of the next step are not here, if the links broke meanwhile.
    pub(super) not_looked_ahead: Option<Stopped>,
    /// Step of the parameters that this joining worker has fetched, and its generation.
    fetched: Option<(u64, Generation)>,
    /// The ranks of the group.
    pub(super) peers: Peers,
    /// Touches of the rows of all ranks of the group, once they are counted.
    counted: Option<Counted>,
    /// What this rank held lately.
    held: Option<HeldRows>,
    /// What became of the model that this rank has exported at the end of the group's work, if it
    /// is over. A rank that reports its final state once more, to another master, does not export
    /// again, as it does not count.
    pub(super) exported: Option<Option<Result<(), String>>>,
    /// The rows of the best model, if they are not exported yet.
    pub(super) rows_of_best: Option<SavedShards>,
    /// What the group has given up because rows are lost, until it has a state again.
    lost: Option<LostRows>,
    /// The last rows that were lost and replaced by older ones.
    pub(crate) replaced: Option<ReplacedRows>,
    /// Whether a group that has lost rows goes on with those of a checkpoint. Otherwise it goes
    /// back.
    pub(crate) goes_on_with_older: bool,
    pub(super) memory_max: TableMemory,
    /// Number of workers on this host, if all shards lie where they should: 1 until then, as those
    /// that have just joined have none.
    pub(super) workers_of_host: u64,
    /// The step since which rows of the model are exported that have changed; `None`: all are.
    pub(super) export_since: Option<u64>,
}

/// The rows of all ranks, each counted by the rank that owns it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Counted {
    pub(super) touches: u64,
    /// Digest of the rows, their touches and their optimizers: a sum modulo 2^64.
    pub(super) digest: u64,
    pub(super) are_finite: bool,
}

/// A state that the group gives up because rows that belong to it are lost.
#[derive(Clone, Copy, Debug)]
pub(super) struct LostRows {
    pub(super) step: u64,
    /// Number of lost shards.
    pub(super) shards: u32,
    /// Touches of all rows, by the committed headers.
    pub(super) row_touches: u64,
}

/// Rows of a checkpoint that have taken the place of lost ones.
#[derive(Clone, Debug)]
pub struct ReplacedRows {
    /// Step of the group's state.
    pub step: u64,
    /// The lost shards.
    pub shards: Vec<u32>,
    /// Name of the checkpoint; `None`: the rows begin anew.
    pub checkpoint: Option<String>,
}

/// Shards that are nowhere in a new group, as all of its ranks find.
#[derive(Clone, Debug)]
pub(super) struct Loss {
    pub(super) lost: LostShards,
    pub(super) placement: Placement,
    pub(super) recovery: Recovery,
    pub(super) members: Vec<Member>,
}

/// Whether a group has all shards of its state. `L`: what is lost.
#[derive(Clone, Debug)]
pub(super) enum Regrouped<L = Box<Loss>> {
    /// All ranks know who holds which shards.
    Agreed,
    /// Shards are nowhere in the group.
    Lost(L),
    /// The checkpoint that the group begins from is damaged: some rank could not read its part.
    Unreadable,
}

impl RowTables {
    /// The tables of worker `me`; `None` if there are none.
    pub(crate) fn new(me: u64, options: &WorkerOptions, specs: Vec<Table>) -> Option<Self> {
        let (seed, copies) = (options.seed, options.table_replicas.into());
        let lag = options.table_lag.into();
        let (shards, copy_bytes, copy_rate) = (SHARDS, COPY_BYTES, COPY_RATE);
        let settings = Settings { seed, shards, copies, lag, copy_bytes, copy_rate };
        let tables = Self::with(me, settings, specs)?;
        Some(Self {
            goes_on_with_older: options.on_rows_lost == OnRowsLost::Stale,
            memory_max: TableMemory::new(options.table_memory),
            export_since: options.export_changes_since,
            ..tables
        })
    }

    /// As [`new`](Self::new), with these settings.
    pub(crate) fn with(me: u64, settings: Settings, specs: Vec<Table>) -> Option<Self> {
        let specs: Arc<[Table]> = specs.into();
        (!specs.is_empty()).then(|| Self {
            owned: Owned::new(me, settings, Arc::clone(&specs)),
            specs,
            gradients: RowGradients::default(),
            looked_up: false,
            looks_ahead: true,
            early: None,
            not_looked_ahead: None,
            fetched: None,
            peers: Peers::default(),
            counted: None,
            held: None,
            exported: None,
            rows_of_best: None,
            lost: None,
            replaced: None,
            goes_on_with_older: false,
            memory_max: TableMemory::Any,
            workers_of_host: 1,
            export_since: None,
        })
    }

    /// This worker's shards.
    pub(crate) fn owned(&self) -> &Owned {
        &self.owned
    }

    /// Size of what this rank holds, at most some steps before `step`.
    pub(super) fn held(&mut self, step: u64) -> HeldRows {
        if step.is_multiple_of(HELD_STEPS) {
            self.held = None;
        }
        let Self { owned, workers_of_host, .. } = self;
        *self.held.get_or_insert_with(|| {
            *workers_of_host = owned.workers_of_host();
            let OwnedSize { rows, bytes } = owned.owned();
            HeldRows { rows, bytes: bytes as u64, at_risk: owned.at_risk() as u32 }
        })
    }

    /// The rows that this rank owns after `step`.
    pub(super) fn save(&self, step: u64) -> SavedShards {
        assert_eq!(
            self.owned.step(),
            Some(step),
            "a checkpoint is of rows and parameters of a step"
        );
        self.owned.save()
    }

    /// The rows that this rank and others hold, after the last step.
    pub(super) fn compared(&self) -> ComparedShards {
        self.owned.compared()
    }

    /// The group gives up its state, with the rows, or a checkpoint if no rows are `lost`.
    pub(super) fn go_back(&mut self, lost: Option<LostRows>) {
        self.owned.clear();
        self.gradients.clear();
        self.peers.go_back();
        (self.looked_up, self.fetched, self.counted) = (false, None, None);
        (self.early, self.not_looked_ahead) = (None, None);
        self.lost = self.lost.or(lost);
    }

    /// What the group has given up, as long as it has no other state.
    pub(super) fn lost(&self) -> Option<LostRows> {
        self.lost
    }

    /// Whether the group has given its state up, as rows are lost, and has no other one yet.
    pub(crate) fn has_lost_rows(&self) -> bool {
        self.lost.is_some()
    }

    /// No ids of these tables.
    pub(super) fn ids(&self) -> Ids {
        Ids::new(self.specs.len())
    }

    /// Why this rank can't hold more rows, if it has reached its limit.
    pub(super) fn excess(&self, HeldRows { bytes, .. }: HeldRows) -> Option<String> {
        let of = |limit: TableMemory| limit.excess(bytes, self.workers_of_host);
        let what = of(self.memory_max).and_then(|_| of(self.memory_max.read_again()))?;
        Some(format!(
            "the rows of tables take {what}: {}; start more workers, remove rows (evicted_after, \
             admitted_after), or give the tables more memory",
            table_memory::largest(&self.specs, self.owned.held_by_table())
        ))
    }

    /// What this worker tells a new group. `step`: of its parameters, if it has any.
    pub(super) fn header(&self, step: Option<u64>) -> Option<OwnedHeader> {
        // A fetched state may have been given up since.
        let fetched = self.fetched.filter(|(fetched, _)| Some(*fetched) == step);
        let of_joiner = |(step, Generation(of))| OwnedHeader::of_joiner(step, of);
        self.owned.header().or_else(|| fetched.map(of_joiner))
    }

    /// This joining worker has the parameters of `step`, which its donor's group of `generation`
    /// committed.
    pub(super) fn fetched(&mut self, step: u64, generation: Generation) {
        self.fetched = Some((step, generation));
    }

    /// The step after `step` is committed, by the group of `generation` or, in a repair, by an
    /// earlier one.
    ///
    /// # Errors
    /// This worker has not staged the step's gradients in its own group. In a repair it may hold no
    /// rows of the step: then it gives its shards up when the group agrees on who holds which.
    pub(super) fn commit(
        &mut self,
        step: u64,
        generation: Option<Generation>,
        (divisor, is_applied): (f32, bool),
    ) -> Result<(), Failure> {
        self.looked_up = false;
        let committed_by = generation
            .map(|Generation(generation)| generation)
            .or_else(|| self.peers.generation_of(step + 1));
        let Some(of) = committed_by else { return Ok(()) };
        let is_held = self.owned.commit(StepCommit { generation: of, divisor, is_applied });
        if is_held || generation.is_none() {
            return Ok(());
        }
        let error =
            format!("step {} is committed, and the gradients of its rows are not here", step + 1);
        Err(Failure::local(error))
    }

    /// All ranks hold the parameters of `step`. They agree on who holds which rows, and read those
    /// of a checkpoint if the state comes from there.
    pub(super) fn regroup(
        &mut self,
        group: &mut dyn Group,
        step: u64,
        members: &[WorkerId],
        store: &mut dyn CheckpointStore,
    ) -> Result<Regrouped, Stopped> {
        (self.looked_up, self.counted, self.held) = (false, None, None);
        (self.early, self.not_looked_ahead) = (None, None);
        (self.exported, self.rows_of_best) = (None, None);
        let members = self.peers.members(members);
        let generation = group.generation();
        let recovery = self.peers.recovery(step);
        if !recovery.as_ref().is_some_and(|recovery| recovery.holds[group.rank()]) {
            store.forget_rows();
        }
        if step == 0 {
            self.owned.create(generation, members);
            self.lost = None;
            return Ok(Regrouped::Agreed);
        }
        let (recovery, placement) = match self.peers.source(group, step, &self.owned)? {
            Source::Members(recovery, placement) => (recovery, placement),
            Source::Checkpoint(name, same_run) => {
                let checkpoint = (&*name, same_run);
                let read = self.read(step, (generation, members), checkpoint, store)?;
                // All ranks know it, as any of them may create the next state.
                let Err(reason) = all_have_read(group, read)? else {
                    self.lost = None;
                    return Ok(Regrouped::Agreed);
                };
                store.pass_over(checkpoint, &reason);
                return Ok(Regrouped::Unreadable);
            }
        };
        let state = (step, placement.clone());
        let regrouped = self.owned.regroup(state, &recovery, (generation, members.clone()));
        Ok(match regrouped {
            Ok(()) => {
                self.lost = None;
                Regrouped::Agreed
            }
            Err(lost) => Regrouped::Lost(Box::new(Loss { lost, placement, recovery, members })),
        })
    }

    /// Takes the rows of this rank from a checkpoint of `step`. The inner error: no worker can.
    fn read(
        &mut self,
        step: u64,
        (generation, members): (u64, Vec<Member>),
        checkpoint: (&str, bool),
        store: &mut dyn CheckpointStore,
    ) -> Result<Result<(), String>, Failure> {
        let wanted = self.owned.shards_at_start(&members);
        let shards = match self.read_shards(checkpoint, &wanted, store)? {
            Ok(shards) => shards,
            Err(error) => return Ok(Err(error)),
        };
        self.owned.restore(step, (generation, members), shards);
        tracing::info!(step, checkpoint = checkpoint.0, shards = wanted.len(), "rows are read");
        Ok(Ok(()))
    }

    /// The batches of a task: for the first one of a step, or for more of its records.
    pub(super) fn begin_batches<B>(&mut self, is_first: bool) -> WaitingBatches<B> {
        if is_first {
            self.gradients.clear();
        }
        self.no_batches()
    }

    pub(super) fn no_batches<B>(&self) -> WaitingBatches<B> {
        WaitingBatches { batches: Vec::new(), ids: self.ids() }
    }

    /// All ranks see a loss that is not finite in this rank's header.
    fn check_finite(&self, work: &mut Work) {
        if !self.gradients.are_finite() {
            work.loss_sum = f64::NAN;
        }
    }

    /// Looks up the rows of `ids` as of the last commit.
    pub(super) fn look_up(
        &mut self,
        group: &mut dyn Group,
        ids: &Ids,
    ) -> Result<BatchRows, Stopped> {
        let requests = exchange(group, self.owned.requests(ids))?;
        let replies = exchange(group, self.owned.replies(&requests)?)?;
        Ok(self.owned.receive(ids, &replies)?)
    }

    /// Looks up the rows of `ids` that the next step reads.
    pub(super) fn look_up_of_step(
        &mut self,
        group: &mut dyn Group,
        ids: &Ids,
    ) -> Result<BatchRows, Stopped> {
        let requests = exchange(group, self.owned.requests(ids))?;
        let replies = exchange(group, self.owned.replies_of_step(&requests)?)?;
        Ok(self.owned.receive(ids, &replies)?)
    }

    /// Hands the gradients of this rank's records, which it has `computed` for so long, to the
    /// workers that hold their rows.
    pub(super) fn push(
        &mut self,
        group: &mut dyn Group,
        is_empty: bool,
        computed: Duration,
    ) -> Result<(), Stopped> {
        self.looked_up = false;
        if is_empty {
            self.gradients.clear();
        }
        if let Some(stopped) = self.not_looked_ahead.take() {
            return Err(stopped);
        }
        let pushes = exchange(group, self.owned.pushes(&self.gradients, computed))?;
        Ok(self.owned.stage(&pushes)?)
    }
}

impl RowTables {
    /// The ranks that stay receive the copies that are missing without those that leave. No row
    /// changes meanwhile.
    fn hand_over(&mut self, group: &mut dyn Group, leaves: &[bool]) -> Result<(), Stopped> {
        self.owned.begin_hand_over(leaves);
        while let Some(messages) = self.owned.handed_over()? {
            let received = exchange(group, messages)?;
            self.owned.take_over(&received)?;
        }
        // A rank that passes here knows that all have their copies.
        exchange(group, vec![Vec::new(); leaves.len()])?;
        self.owned.end_hand_over();
        Ok(())
    }

    /// The rows of all ranks at the end. A rank that reports its final state once more, to another
    /// master, does not count again: the others would have to take part.
    pub(super) fn count(&mut self, group: &mut dyn Group) -> Result<Counted, Stopped> {
        if let Some(counted) = self.counted {
            return Ok(counted);
        }
        let (touches, digest) = (self.owned.touches(), self.owned.digest());
        let owned = Counted { touches, digest, are_finite: self.owned.save().are_finite() };
        let all: Vec<Counted> = decode_all(group.all_gather(&header::encode(&owned))?)?;
        let sum = |sum: Counted, of_rank: Counted| Counted {
            touches: sum.touches + of_rank.touches,
            digest: sum.digest.wrapping_add(of_rank.digest),
            are_finite: sum.are_finite && of_rank.are_finite,
        };
        let none = Counted { touches: 0, digest: 0, are_finite: true };
        let sum = all.into_iter().fold(none, sum);
        Ok(*self.counted.insert(sum))
    }
}

impl<M: Model> Trainer<'_, M> {
    /// Ranks leave, and the others take their shards over.
    pub(super) fn hand_over(&mut self, leaves: &[bool]) -> Result<(), Stopped> {
        if let Some(tables) = &mut self.tables {
            tables.hand_over(self.tensors.group_mut()?, leaves)?;
        }
        if let Some(sharded) = &mut self.sharded {
            sharded.hand_over(self.tensors.group_mut()?, leaves)?;
        }
        let leaving = leaves.iter().filter(|leaves| **leaves).count();
        if leaving > 0 {
            tracing::info!(leaving, "shards are handed over");
        }
        let failed = self.session.fails_after_hand_over();
        self.session.handed_over();
        failed.map_or(Ok(()), |of_program| Err(Failure::from(of_program).into()))
    }

    /// Looks up the rows of the batches, and adds their gradients.
    pub(super) fn compute_with_rows(
        &mut self,
        WaitingBatches { batches, ids }: WaitingBatches<M::Batch>,
        ranges: &[RecordRange],
        work: &mut Work,
    ) -> Result<(), Stopped> {
        let mut rows = self.look_up(&ids, ranges)?;
        let compute = |trainer: &mut Self| trainer.gradients_of_all(batches, &mut rows, ranges);
        work.loss_sum += self.compute_looking_ahead(work, compute)?;
        work.row_touches = ids.touches();
        if let Some(tables) = &mut self.tables {
            tables.gradients.add(&tables.specs, ids, rows);
            tables.check_finite(work);
        }
        Ok(())
    }

    /// As [`compute_with_rows`](Self::compute_with_rows), with the gradient of each of these
    /// micro-batches by itself.
    pub(super) fn compute_micro_batches_with_rows(
        &mut self,
        waiting: Vec<(RecordRange, WaitingBatches<M::Batch>)>,
        ranges: &[RecordRange],
        work: &mut Work,
    ) -> Result<(), Stopped> {
        let tables = self.tables.as_ref().map_or(0, |tables| tables.specs.len());
        let union = Ids::union(tables, waiting.iter().map(|(_, waiting)| &waiting.ids));
        let all = self.look_up(&union, ranges)?;
        let (loss_sum, parts) = self.compute_looking_ahead(work, |trainer: &mut Self| {
            let (mut loss_sum, mut parts) = (0.0, Vec::with_capacity(waiting.len()));
            for (range, WaitingBatches { batches, ids }) in waiting {
                let mut rows = all.of_batch(&union, &ids);
                trainer.begin_micro_batch();
                loss_sum += trainer.gradients_of_all(batches, &mut rows, &[range])?;
                trainer.end_micro_batch();
                parts.push((range.start, ids, rows));
            }
            Ok::<_, Failure>((loss_sum, parts))
        })?;
        work.loss_sum += loss_sum;
        for (position, ids, rows) in parts {
            work.row_touches += ids.touches();
            if let Some(tables) = &mut self.tables {
                tables.gradients.add_part(position, ids, rows);
            }
        }
        self.tables.iter().for_each(|tables| tables.check_finite(work));
        Ok(())
    }

    /// Adds the gradients of these batches, of the records of `ranges`. Returns the sum of the
    /// loss.
    fn gradients_of_all(
        &mut self,
        batches: Vec<WaitingBatch<M::Batch>>,
        rows: &mut BatchRows,
        ranges: &[RecordRange],
    ) -> Result<f64, Failure> {
        let mut loss_sum = 0.0;
        for (batch, count, positions) in batches {
            let loss = self.gradients_of((batch, count), &positions, Some(rows));
            loss_sum +=
                loss.map_err(|error| Failure::on_records(error, self.order.ranges(ranges)))?;
        }
        Ok(loss_sum)
    }
}

/// Gives each rank its message, and returns those that the ranks give to this one.
pub(super) fn exchange(
    group: &mut (impl Communicator + ?Sized),
    messages: impl AsRef<[Vec<u8>]>,
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    let send: Vec<&[u8]> = messages.as_ref().iter().map(Vec::as_slice).collect();
    let mut received = Vec::new();
    group.exchange(&send, &mut received)?;
    Ok(received)
}

impl From<InvalidRows> for Stopped {
    fn from(error: InvalidRows) -> Self {
        Self::Failed(Failure::local(error.to_string()))
    }
}

/// Number of steps after which the size of what a rank holds is computed again: it takes as long as
/// a hundred rows.
const HELD_STEPS: u64 = 16;

/// Bytes that a worker sends and receives between two steps, to copy shards: a few milliseconds at
/// 10 Gbit/s. Until all copies are there, a second loss may lose rows.
const COPY_BYTES: u64 = 4 << 20;
/// How many more for each microsecond in which it computes: a quarter of a long step, where a
/// worker encodes, sends and decodes 256 MB/s.
const COPY_RATE: u64 = 64;
