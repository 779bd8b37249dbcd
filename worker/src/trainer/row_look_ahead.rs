//! The rows of the next step, looked up while this one is computed.
//!
//! ```text
//!   round s:  changed rows of s ──► compute ──► push gradients ──► all-reduce ──► plan of s + 1
//!                                 ∥ ids, rows of s + 1                has looked ahead
//! ```
//!
//! Each rank feeds the records that it will compute next if nothing happens to its group, and looks
//! their rows up. If the headers say that all ranks have, the next step consists of these records,
//! and the ranks send each other the rows that the commit has changed. Otherwise, and in a new
//! group, all rows are looked up once more: what was fed is used, if it is wanted.
//!
//! **Invariant:** all ranks of a group decide alike whether rows are looked up ahead, and whether
//! they are used: by the plan, the placement and the headers. **Invariant:** a broken link while
//! rows are looked up ahead leaves the gradient pending; the push reports it.

use std::thread;
use std::time::Duration;

use elasticdl_collective::Communicator;
use elasticdl_proto::RecordRange;
use elasticdl_tables::{BatchRows, Ids, Owned};

use super::Trainer;
use super::fed::{EarlyRows, FedStep, WaitingBatches};
use super::parts::Parts;
use super::row_tables::{RowTables, exchange};
use super::stopped::Stopped;
use super::work::Work;
use crate::machine::Group;
use crate::model::Model;
use crate::tensors::Tensors;

impl RowTables {
    /// Whether rows of the next step are looked up in this round, if it is known. All ranks find
    /// the same.
    fn may_look_ahead(&self, group: &dyn Group) -> bool {
        self.looks_ahead && self.owned.may_look_ahead() && group.spans_hosts()
    }

    /// Brings rows that were looked up one step early to the last commit.
    fn update_early(
        &self,
        group: &mut dyn Group,
        ids: &Ids,
        EarlyRows { mut rows, answered }: EarlyRows,
    ) -> Result<BatchRows, Stopped> {
        if self.owned.reads_last_commit() {
            let changes = exchange(group, self.owned.changes(&answered)?)?;
            self.owned.receive_changes(ids, &mut rows, &changes)?;
        }
        Ok(rows)
    }
}

/// Looks up the rows of `ids` as of the last commit, which is not that of their step.
fn look_up_early(
    owned: &Owned,
    group: &mut (impl Communicator + ?Sized),
    ids: &Ids,
) -> Result<EarlyRows, Stopped> {
    let answered = owned.answer_early(exchange(group, owned.requests(ids))?)?;
    let rows = owned.receive_early(ids, &exchange(group, answered.rows())?)?;
    Ok(EarlyRows { rows, answered })
}

impl<M: Model> Trainer<'_, M> {
    /// Looks up the rows of `ids`, of the records of `ranges`: of the step's, once in its round.
    pub(super) fn look_up(
        &mut self,
        ids: &Ids,
        ranges: &[RecordRange],
    ) -> Result<BatchRows, Stopped> {
        let Some(tables) = &mut self.tables else { return Ok(BatchRows::default()) };
        tables.looked_up = true;
        let is_foreseen = self.session.assignment.is_foreseen() && tables.owned.may_look_ahead();
        let early = tables.early.take().filter(|_| is_foreseen);
        let group = self.tensors.group_mut()?;
        let rows = match early {
            Some(early) => tables.update_early(group, ids, early),
            None => tables.look_up_of_step(group, ids),
        };
        if rows.is_err() {
            self.session.assignment.not_computed(ranges);
        }
        rows
    }

    /// Computes while the rows of the next step are looked up, if they are. To be called once in
    /// each round with a step, after its rows were looked up.
    pub(super) fn compute_looking_ahead<T>(
        &mut self,
        work: &mut Work,
        compute: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let (tables, group) = (self.tables.as_ref(), self.tensors.group());
        let may = tables.zip(group).is_some_and(|(tables, group)| tables.may_look_ahead(group));
        if !may || self.session.assignment.next().is_none() {
            self.fed = None;
            return self.timed(work, compute);
        }
        let fed = self.feed_next(work);
        let Some(mut tables) = self.tables.take() else { unreachable!("it has tables") };
        let pieces = fed.as_ref().map_or(&[][..], |fed| &fed.pieces);
        let union;
        let ids = match pieces {
            [(_, waiting)] => &waiting.ids,
            _ => {
                let all = pieces.iter().map(|(_, waiting)| &waiting.ids);
                union = Ids::union(tables.ids().tables(), all);
                &union
            }
        };
        let mut group = match &mut self.tensors {
            Tensors::Device { .. } => None,
            Tensors::Host { group, .. } => group.take(),
        };
        let host = group.as_mut().and_then(|group| group.host_mut());
        let (computed, early) = match host {
            Some(host) => thread::scope(|scope| {
                let early = scope.spawn(|| look_up_early(&tables.owned, host, ids));
                let computed = self.timed(work, compute);
                (computed, early.join().expect("an exchange of rows does not panic"))
            }),
            // An operation of this group is bound to this thread.
            None => {
                let early = match &mut group {
                    Some(group) => look_up_early(&tables.owned, &mut **group, ids),
                    None => (self.tensors.group_mut().map_err(Stopped::from))
                        .and_then(|group| look_up_early(&tables.owned, group, ids)),
                };
                (self.timed(work, compute), early)
            }
        };
        if let Tensors::Host { group: none, .. } = &mut self.tensors {
            *none = group;
        }
        match early {
            Ok(early) => tables.early = Some(early),
            Err(stopped) => tables.not_looked_ahead = Some(stopped),
        }
        (self.tables, self.fed) = (Some(tables), fed);
        computed
    }

    /// Hands the gradients of this rank's rows over. A rank that has computed nothing in the round
    /// looks up as often as the others.
    pub(super) fn push_rows(&mut self, is_empty: bool) -> Result<(), Stopped> {
        let Some(tables) = &self.tables else { return Ok(()) };
        if !tables.looked_up {
            let none = tables.ids();
            self.look_up(&none, &[])?;
            self.compute_looking_ahead(&mut Work::default(), |_| ());
        }
        let computed = Duration::from_micros(self.session.assignment.computed_us());
        match &mut self.tables {
            Some(tables) => tables.push(self.tensors.group_mut()?, is_empty, computed),
            None => Ok(()),
        }
    }

    /// Whether the next step is fed and its rows are looked up, for this rank's header.
    pub(super) fn has_looked_ahead(&self) -> bool {
        let has_rows = self.tables.as_ref().is_some_and(|tables| tables.early.is_some());
        has_rows && self.fed.is_some()
    }

    /// The batches of these pieces of the step, if exactly they were fed before.
    pub(super) fn take_fed(
        &mut self,
        pieces: &[Vec<RecordRange>],
    ) -> Option<Vec<WaitingBatches<M::Batch>>> {
        let FedStep { pieces: fed, .. } = self.fed.take()?;
        let is_it = fed.iter().map(|(ranges, _)| ranges).eq(pieces);
        is_it.then(|| fed.into_iter().map(|(_, waiting)| waiting).collect())
    }

    /// Feeds the records of the next step; `None` if they can't be read now, or fed: then the step
    /// itself reads them.
    fn feed_next(&mut self, work: &mut Work) -> Option<FedStep<M::Batch>> {
        let (ranges, micro_batches) = self.session.assignment.next()?;
        let pieces: Vec<Vec<RecordRange>> = match self.exact {
            Some(_) => micro_batches.into_iter().map(|range| vec![range]).collect(),
            None if ranges.is_empty() => Vec::new(),
            None => vec![ranges.to_vec()],
        };
        let ranges = ranges.to_vec();
        if !matches!(self.records.readable(&ranges), Ok(None)) {
            return None;
        }
        let most = self.model.max_micro_batch().unwrap_or(usize::MAX).max(1);
        let mut fed = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let started = self.machine.now();
            let (mut records, mut parts) = (Vec::new(), Parts::default());
            for range in &piece {
                let taken = self.records.take(*range).ok().filter(|taken| taken.rest.is_none())?;
                parts.push(*range, taken.records.len() as u64);
                records.extend(taken.records);
            }
            let read = self.machine.now();
            work.input += read - started;
            let mut waiting = self.tables.as_ref()?.no_batches();
            while !records.is_empty() {
                let rest = records.split_off(records.len().min(most));
                let batch = std::mem::replace(&mut records, rest);
                let parts = parts.split_off(batch.len() as u64);
                waiting.push(&mut self.model, batch, parts).ok()?;
            }
            work.busy += self.machine.now() - read;
            fed.push((piece, waiting));
        }
        Some(FedStep { ranges, pieces: fed })
    }

    /// Computes, and adds the time.
    fn timed<T>(&mut self, work: &mut Work, compute: impl FnOnce(&mut Self) -> T) -> T {
        let started = self.machine.now();
        let computed = compute(self);
        work.busy += self.machine.now() - started;
        computed
    }
}
