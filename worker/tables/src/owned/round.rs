//! A round of a group: rows for the ranks, gradients of the ranks, their commit.
//!
//! ```text
//!           requests            replies                        pushes
//!  ids ───────────────▶ owners ─────────▶ rows ── gradients ─────────────▶ owners and copies
//!                        + shards to be copied                          staged
//!                                                  all-reduce, headers ──▶ commit
//! ```
//!
//! A rank takes part in a step's all-reduce only after it has staged the gradients of all ranks.
//! So if any rank has committed the step, every holder of a shard, and every worker that receives a
//! copy, can commit it, even if it learns of the commit only in a later group.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use super::{Committed, Content, Owned, Ownership, Settings, Staged};
use crate::lookup::{BatchRows, Ids, RowGradients, TableGradients};
use crate::placement::Placement;
use crate::rows::Rows;
use crate::shard::Shard;
use crate::table::Table;
use crate::wire::{InvalidRows, Message, put, put_u32};

/// A committed step, for the tables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCommit {
    /// Generation of the group that committed it.
    pub generation: u64,
    /// What the sums of gradients are divided by: the number of records of the step, or the sum of
    /// their weights.
    pub divisor: f32,
    /// Whether rows change. If not, their touches alone do.
    pub is_applied: bool,
}

impl Owned {
    /// What to ask each rank for: the rows of these ids.
    ///
    /// # Panics
    /// The worker is in no group, as below.
    pub fn requests(&self, ids: &Ids) -> Vec<Vec<u8>> {
        let group = self.group();
        let mut requests = vec![Vec::new(); group.members.len()];
        for table in 0..self.content.len() {
            let mut of_ranks = vec![Vec::new(); group.members.len()];
            for &(shard, at) in ids.in_shards(table, self.settings.shards) {
                of_ranks[self.source(shard)].push(ids.of(table)[at]);
            }
            for (request, ids) in requests.iter_mut().zip(of_ranks) {
                if !ids.is_empty() {
                    put_u32(request, table);
                    put_u32(request, ids.len());
                    put(request, &ids);
                }
            }
        }
        requests
    }

    /// Answers the requests of all ranks: with rows as of the last commit, and the shards that the
    /// ranks are to hold.
    ///
    /// # Errors
    /// A request is invalid.
    pub fn replies(&self, requests: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, InvalidRows> {
        self.replies_as_of(0, requests)
    }

    /// As [`replies`](Self::replies), with the rows that the next step reads: those of `lag`
    /// commits before the last one, or the initial ones.
    ///
    /// # Errors
    /// A request is invalid.
    pub fn replies_of_step(&self, requests: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, InvalidRows> {
        self.replies_as_of(self.settings.lag, requests)
    }

    fn replies_as_of(&self, age: u32, requests: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, InvalidRows> {
        let group = self.group();
        let mut replies = Vec::with_capacity(requests.len());
        for (request, member) in requests.iter().zip(&group.members) {
            let mut reply = Vec::new();
            self.answer(age, request, &mut reply)?;
            for copy in group.copies.iter().filter(|c| c.from == self.me && c.to == member.worker) {
                put_u32(&mut reply, copy.shard as usize);
                self.committed().shards[&copy.shard].encode(&mut reply);
            }
            replies.push(reply);
        }
        Ok(replies)
    }

    /// Writes the rows that a request asks for as they were `age` commits ago.
    pub(super) fn answer(
        &self,
        age: u32,
        request: &[u8],
        reply: &mut Vec<u8>,
    ) -> Result<(), InvalidRows> {
        let mut request = Message(request);
        let mut initial = Vec::new();
        while !request.is_empty() {
            let (index, table) = self.table(request.u32()?)?;
            let len = request.u32()? as usize;
            let wanted = self.held_by_id(index, request.column(len)?)?;
            reply.reserve(len * table.dim * size_of::<f32>());
            for wanted in wanted.chunks(AT_ONCE) {
                for (&(rows, id), at) in wanted.iter().zip(Rows::positions(wanted)) {
                    let newest = at.map(|at| &rows.numbers(at)[..table.dim]);
                    let values = match age {
                        0 => newest,
                        _ => self.older(age, (index, id)).unwrap_or(newest),
                    };
                    if let Some(values) = values {
                        put(reply, values);
                        continue;
                    }
                    initial.resize(table.dim, 0.0);
                    table.initialize(self.settings.seed, index as u32, id, &mut initial);
                    put(reply, &initial);
                }
            }
        }
        Ok(())
    }

    /// What a row was `age` commits ago, if it has changed since: its values, `[dim]`, or nothing
    /// if there was none.
    fn older(&self, age: u32, row: (usize, u64)) -> Option<Option<&[f32]>> {
        let Committed { step, shards, .. } = self.committed();
        let shard = shards.get(&self.shard_of(row.0, row.1))?;
        let values = shard.history.as_of(row, step.saturating_sub(age.into()) as u32)?;
        Some((!values.is_empty()).then_some(values))
    }

    /// These ids, each with the rows of its shard.
    fn held_by_id(&self, table: usize, ids: Vec<u64>) -> Result<Vec<(&Rows, u64)>, InvalidRows> {
        let mut last: Option<(u32, &Rows)> = None;
        let held = |id| {
            let number = self.shard_of(table, id);
            let rows = match last.filter(|(shard, _)| *shard == number) {
                Some((_, rows)) => rows,
                None => {
                    let shard = self.committed().shards.get(&number);
                    &shard.ok_or_else(|| not_held(number))?.tables[table]
                }
            };
            last = Some((number, rows));
            Ok((rows, id))
        };
        ids.into_iter().map(held).collect()
    }

    /// Takes in the answers of all ranks to the requests for `ids`.
    ///
    /// # Errors
    /// An answer is invalid.
    pub fn receive(&mut self, ids: &Ids, replies: &[Vec<u8>]) -> Result<BatchRows, InvalidRows> {
        let (rows, mut replies) = self.rows_of(ids, replies)?;
        let group = self.group();
        let mut copied = BTreeMap::new();
        for copy in group.copies.iter().filter(|copy| copy.to == self.me) {
            let from = group.members.iter().position(|member| member.worker == copy.from);
            let from = from.expect("a copy comes from a member of the group");
            let shard = replies[from].u32()?;
            if shard != copy.shard {
                return Err(InvalidRows(format!("shard {shard} in place of {}", copy.shard)));
            }
            copied.insert(shard, Arc::new(Shard::decode(&mut replies[from], &self.content)?));
        }
        if let Some(rest) = replies.iter().find(|reply| !reply.is_empty()) {
            return Err(InvalidRows(format!("{} bytes more than asked for", rest.0.len())));
        }
        self.group_mut().copied = copied;
        Ok(rows)
    }

    /// The rows of `ids` in the answers of all ranks, and what comes after them in each.
    pub(super) fn rows_of<'a>(
        &self,
        ids: &Ids,
        replies: &'a [Vec<u8>],
    ) -> Result<(BatchRows, Vec<Message<'a>>), InvalidRows> {
        let mut replies: Vec<Message<'_>> = replies.iter().map(|reply| Message(reply)).collect();
        let mut values = Vec::with_capacity(self.content.len());
        for (index, table) in self.content.iter().enumerate() {
            let dim = table.dim;
            let mut rows = vec![0.0; ids.of(index).len() * dim];
            for &(shard, at) in ids.in_shards(index, self.settings.shards) {
                replies[self.source(shard)].fill(&mut rows[at * dim..(at + 1) * dim])?;
            }
            values.push(rows);
        }
        Ok((BatchRows::new(values), replies))
    }

    /// What to give each rank: the gradients of the rows that it holds, or will hold. This rank has
    /// `computed` for so long.
    pub fn pushes(&self, gradients: &RowGradients, computed: Duration) -> Vec<Vec<u8>> {
        let group = self.group();
        // All ranks derive from these numbers how many shards are copied at a time.
        let shards = &self.committed().shards;
        let bytes: u64 = shards.values().map(|shard| shard.encoded_bytes()).sum();
        let mut head = Vec::new();
        put(&mut head, &[shards.len() as u64, bytes, computed.as_micros() as u64]);
        let mut pushes = vec![head; group.members.len()];
        let mut receivers = vec![Vec::new(); self.settings.shards as usize];
        for (position, index, gradients) in gradients.tables() {
            let dim = self.content[index].dim;
            let mut of_ranks = vec![Vec::new(); group.members.len()];
            for &(shard, at) in gradients.ids.in_shards(index, self.settings.shards) {
                let receivers: &mut Vec<usize> = &mut receivers[shard as usize];
                if receivers.is_empty() {
                    *receivers = group.receivers(shard);
                }
                receivers.iter().for_each(|&rank| of_ranks[rank].push(at));
            }
            for (push, rows) in pushes.iter_mut().zip(of_ranks).filter(|(_, r)| !r.is_empty()) {
                push.reserve(16 + rows.len() * TableGradients::bytes(dim));
                put(push, &[position]);
                put_u32(push, index);
                put_u32(push, rows.len());
                rows.iter().for_each(|&at| put(push, &gradients.ids[at..=at]));
                rows.iter().for_each(|&at| put(push, &gradients.touches[at..=at]));
                rows.iter().for_each(|&at| put(push, &gradients.sums[at * dim..(at + 1) * dim]));
            }
        }
        pushes
    }

    /// Keeps the gradients of all ranks until the step is committed.
    ///
    /// # Errors
    /// A rank's gradients are invalid.
    pub fn stage(&mut self, pushes: &[Vec<u8>]) -> Result<(), InvalidRows> {
        let group = self.group();
        let (mut shards, mut bytes, mut micros) = (0_u64, 0_u64, 0_u64);
        let mut parts = Vec::new();
        for push in pushes {
            let mut push = Message(push);
            let of_rank = push.column::<u64>(3)?;
            (shards, bytes) = (shards.saturating_add(of_rank[0]), bytes.saturating_add(of_rank[1]));
            micros = micros.saturating_add(of_rank[2]);
            while !push.is_empty() {
                let position = push.column::<u64>(1)?[0];
                let (index, table) = self.table(push.u32()?)?;
                let rows = push.u32()? as usize;
                let part = push.part(rows.saturating_mul(TableGradients::bytes(table.dim)))?;
                parts.push((position, index, rows, part));
            }
        }
        // The sums have the same bits whichever ranks have computed the parts.
        parts.sort_by_key(|(position, ..)| *position);
        let empty = |(index, table): (usize, &Table)| {
            let of_table = parts.iter().filter(|(_, of, ..)| *of == index);
            TableGradients::with_capacity(of_table.map(|(.., rows, _)| rows).sum(), table.dim)
        };
        let mut gradients: Vec<_> = self.content.iter().enumerate().map(empty).collect();
        let shards_held = &self.committed().shards;
        let mut last = None;
        for (_, index, rows, mut part) in parts {
            let mut ids = part.part(rows * size_of::<u64>())?;
            let mut touches = part.part(rows * size_of::<u32>())?;
            let mut gradient = vec![0.0; self.content[index].dim];
            for _ in 0..rows {
                let (id, touches) = (ids.u64()?, touches.u32()?);
                part.fill(&mut gradient)?;
                let shard = self.shard_of(index, id);
                let is_held = last == Some(shard)
                    || shards_held.contains_key(&shard)
                    || group.copied.contains_key(&shard);
                if !is_held {
                    return Err(not_held(shard));
                }
                last = Some(shard);
                gradients[index].add(id, touches, &gradient);
            }
        }
        // Copying takes part of a step's time, however long its computing takes.
        let Settings { copy_bytes, copy_rate, .. } = self.settings;
        let mean = micros / pushes.len().max(1) as u64;
        let copied = copy_bytes.saturating_add(copy_rate.saturating_mul(mean));
        self.keep(gradients, copied / bytes.div_ceil(shards.max(1)).max(1));
        Ok(())
    }

    /// The step after this worker's is committed: applies what is staged of it. Returns `false` if
    /// nothing is, so that this worker holds no rows of it.
    pub fn commit(&mut self, commit: StepCommit) -> bool {
        let StepCommit { generation, divisor, is_applied } = commit;
        let Some((gradients, placement)) = self.take_staged(generation) else { return false };
        let Committed { step, shards, .. } = self.committed.as_mut().expect("gradients are staged");
        let (step, lag) = (*step + 1, self.settings.lag);
        for (index, (table, gradients)) in self.content.iter().zip(gradients).enumerate() {
            let (scale, dim) = (1.0 / divisor, table.dim);
            let mut mean = vec![0.0; dim];
            let in_shards = gradients.ids.in_shards(index, self.settings.shards);
            for of_shard in in_shards.chunk_by(|(shard, _), (other, _)| shard == other) {
                let shard = shards.get_mut(&of_shard[0].0).expect("staged rows are held");
                let shard = Arc::make_mut(shard);
                // A step after this one reads rows as of `lag` commits before it.
                let oldest = step.saturating_sub(lag.into()) as u32;
                if !shard.history.is_empty() {
                    shard.history.forget_before(oldest);
                }
                let wanted =
                    of_shard.iter().map(|&(_, at)| (&shard.tables[index], gradients.ids[at]));
                let found = Rows::positions(&wanted.collect::<Vec<_>>());
                for (&(_, at), found) in of_shard.iter().zip(found) {
                    let touched = (gradients.ids[at], gradients.touches[at], found);
                    let older = (lag > 0).then(|| shard.values(table.dim, (index, found)));
                    let seed = self.settings.seed;
                    let row = shard.touch((index, table), touched, (step as u32, seed));
                    if let Some(row) = row.filter(|_| is_applied) {
                        let sum = &gradients.sums[at * dim..(at + 1) * dim];
                        mean.iter_mut().zip(sum).for_each(|(mean, sum)| *mean = sum * scale);
                        table.optimizer.apply(step, row, &mean);
                        if let Some(older) = older {
                            shard.history.note((index, touched.0), step as u32, &older);
                        }
                    }
                }
            }
        }
        let checked = (step % u64::from(self.settings.shards)) as u32;
        if let Some(shard) = shards.get_mut(&checked) {
            Shard::evict(shard, &self.content, (step as u32, lag));
        }
        self.advance(generation, placement);
        true
    }

    pub(super) fn table(&self, index: u32) -> Result<(usize, &Table), InvalidRows> {
        let index = index as usize;
        let table = self.content.get(index);
        Ok((index, table.ok_or_else(|| InvalidRows(format!("there is no table {index}")))?))
    }
}

impl<C: Content> Ownership<C> {
    /// Keeps the gradients of all ranks, with the copies that were received, until a step is
    /// committed. `copied`: number of shards that a worker sends, and receives, from then on.
    pub(super) fn keep(&mut self, gradients: C::Gradients, copied: u64) {
        let group = self.group();
        let placement = match group.is_settled {
            true => group.placement.clone(),
            false => group.placement.after(&group.copies, &group.members),
        };
        let placement = placement.copied_per_step(copied);
        let generation = group.generation;
        let group = self.group_mut();
        let mut copied = mem::take(&mut group.copied);
        copied.extend(group.older.clone());
        self.staged.retain(|staged| staged.generation != generation);
        self.staged.push(Staged { generation, placement, copied, gradients });
    }

    /// The next step is committed by the group of this generation: returns the gradients that are
    /// staged of it, and the placement after it. The copied shards are held from now on.
    pub(super) fn take_staged(&mut self, generation: u64) -> Option<(C::Gradients, Placement)> {
        let committed = self.committed.as_mut()?;
        let at = self.staged.iter().position(|staged| staged.generation == generation)?;
        let Staged { placement, copied, gradients, .. } = self.staged.swap_remove(at);
        self.staged.clear();
        // What only `shards` holds is changed where it is.
        self.group.iter_mut().for_each(|group| group.older.clear());
        committed.shards.extend(copied);
        Some((gradients, placement))
    }

    /// The gradients are applied: the step is that of the shards, and `placement` says who holds
    /// them.
    pub(super) fn advance(&mut self, generation: u64, placement: Placement) {
        let committed = self.committed.as_mut().expect("a worker of a group has a state");
        let me = self.me;
        committed.shards.retain(|&shard, _| placement.holders(shard).contains(&me));
        (committed.step, committed.generation) = (committed.step + 1, generation);
        if let Some(group) = self.group.as_mut().filter(|group| group.generation == generation) {
            if !group.is_settled {
                group.is_settled = group.copies.is_empty() && placement.is_as(&group.placement);
                group.copies = placement.copies(&group.members);
            }
            group.placement = placement.clone();
            group.copied.clear();
        }
        committed.placement = placement;
    }
}

/// Number of rows that are looked for at once.
const AT_ONCE: usize = 64;

fn not_held(shard: u32) -> InvalidRows {
    InvalidRows(format!("a row of shard {shard}, which this worker does not hold"))
}
