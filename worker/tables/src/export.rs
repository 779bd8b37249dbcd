//! Rows as they are exported: those of a part of the tables, in the order of their ids.
//!
//! A part consists of all rows whose hash lies in its range, so which rows it has, and in which
//! order, depends on the rows alone.

use crate::owned::saved::SavedShards;
use crate::rows::Counts;
use crate::shard::Shard;
use crate::table::Table;
use crate::wire::{InvalidRows, Message, put, put_u32};

/// One of several parts of all rows: that of `index`. [`shard_of`](crate::shard_of) with `parts` in
/// place of the number of shards says in which one a row lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// From 0.
    pub index: u32,
    /// Number of parts. It divides the number of shards.
    pub parts: u32,
}

/// Rows of one table, in the order of their ids.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExportedRows {
    /// Distinct ids, ascending.
    pub ids: Vec<u64>,
    /// Records that touched each row.
    pub touches: Vec<u32>,
    /// `[rows, dim]`.
    pub values: Vec<f32>,
}

impl SavedShards {
    /// Number of the rows of each table that this rank owns and a step after `since` has touched.
    pub fn rows(&self, tables: usize, since: u64) -> Vec<u64> {
        let of = |table: usize| {
            let rows = self.owned.iter().map(|saved| &saved.shard.tables[table]);
            rows.map(|rows| rows.iter().filter(|row| is_newer(row, since)).count() as u64).sum()
        };
        (0..tables).map(of).collect()
    }

    /// Touches of each table, in the shards that this rank owns, that no row has: those of rows
    /// that are not admitted yet or were evicted.
    pub fn touches_without_row(&self, tables: usize) -> Vec<u64> {
        let of = |table: usize| {
            self.owned.iter().map(|saved| saved.shard.touches_without_row(table)).sum()
        };
        (0..tables).map(of).collect()
    }

    /// Whether all numbers that this rank owns are finite.
    pub fn are_finite(&self) -> bool {
        self.owned.iter().all(|saved| saved.is_finite())
    }

    /// The rows of a part that this rank owns and a step after `since` has touched, for
    /// [`collect`].
    pub fn encode_part(&self, tables: &[Table], part: Part, since: u64) -> Vec<u8> {
        let shards: u32 = self.of_ranks.iter().map(|shards| shards.len() as u32).sum();
        assert_eq!(shards % part.parts, 0, "a part consists of whole shards");
        let per_part = shards / part.parts;
        let owned = self.owned.iter().filter(|saved| saved.number / per_part == part.index);
        let shards: Vec<&Shard> = owned.map(|saved| &*saved.shard).collect();
        let mut message = Vec::new();
        for (index, table) in tables.iter().enumerate() {
            let rows = shards.iter().flat_map(|shard| shard.tables[index].iter());
            let rows: Vec<_> = rows.filter(|row| is_newer(row, since)).collect();
            let rows = || rows.iter();
            put_u32(&mut message, rows().len());
            rows().for_each(|(id, ..)| put(&mut message, &[*id]));
            rows().for_each(|(_, counts, _)| put(&mut message, &[counts.touches]));
            rows().for_each(|(.., numbers)| put(&mut message, &numbers[..table.dim]));
        }
        message
    }
}

/// Whether a step after `since` has touched a row.
fn is_newer((_, counts, _): &(u64, Counts, &[f32]), since: u64) -> bool {
    u64::from(counts.last_step) > since
}

/// The rows of a part, by table, from the messages of all ranks.
///
/// # Errors
/// A message is invalid, or two have the same row.
pub fn collect(tables: &[Table], messages: &[Vec<u8>]) -> Result<Vec<ExportedRows>, InvalidRows> {
    let mut messages: Vec<Message<'_>> = messages.iter().map(|message| Message(message)).collect();
    let mut collected = Vec::with_capacity(tables.len());
    for table in tables {
        let mut rows = ExportedRows::default();
        for message in &mut messages {
            let len = message.u32()? as usize;
            rows.ids.extend(message.column::<u64>(len)?);
            rows.touches.extend(message.column::<u32>(len)?);
            rows.values.extend(message.column::<f32>(len.saturating_mul(table.dim))?);
        }
        collected.push(rows.in_order(table.dim)?);
    }
    match messages.iter().find(|message| !message.is_empty()) {
        Some(rest) => Err(InvalidRows(format!("{} bytes after the rows of a part", rest.0.len()))),
        None => Ok(collected),
    }
}

impl ExportedRows {
    fn in_order(self, dim: usize) -> Result<Self, InvalidRows> {
        let mut order: Vec<usize> = (0..self.ids.len()).collect();
        order.sort_unstable_by_key(|&row| self.ids[row]);
        let ids: Vec<u64> = order.iter().map(|&row| self.ids[row]).collect();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(InvalidRows(format!("two ranks own row {}", twice[0])));
        }
        let touches = order.iter().map(|&row| self.touches[row]).collect();
        let row = |&row: &usize| &self.values[row * dim..(row + 1) * dim];
        let values = order.iter().flat_map(row).copied().collect();
        Ok(Self { ids, touches, values })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BatchRows, Ids, Member, Owned, RowGradients, Settings, StepCommit, shard_of};

    const SHARDS: u32 = 16;

    fn tables() -> Vec<Table> {
        vec![Table::new("one", 1), Table::new("three", 3)]
    }

    /// The states of a group of `workers` after one step, in which record `i` touches row `i` of
    /// the first table, and row `i % 7` of the second.
    fn trained(workers: u64) -> Vec<SavedShards> {
        let members: Vec<Member> = (0..workers).map(|worker| Member::new(worker, worker)).collect();
        let settings =
            Settings { seed: 5, shards: SHARDS, copies: 2, lag: 0, copy_bytes: 1, copy_rate: 0 };
        let mut ranks: Vec<Owned> =
            (0..workers).map(|worker| Owned::new(worker, settings, tables())).collect();
        ranks.iter_mut().for_each(|rank| rank.create(1, members.clone()));
        let across = |sent: Vec<Vec<Vec<u8>>>| -> Vec<Vec<Vec<u8>>> {
            (0..sent.len()).map(|to| sent.iter().map(|s| s[to].clone()).collect()).collect()
        };
        let ids: Vec<Ids> = (0..workers)
            .map(|worker| {
                let mut ids = Ids::new(2);
                for record in (0..100).filter(|record| record % workers == worker) {
                    ids.begin_record();
                    ids.push(0, record);
                    ids.push(1, record % 7);
                }
                ids
            })
            .collect();
        let requests = across(ranks.iter().zip(&ids).map(|(r, ids)| r.requests(ids)).collect());
        let replies = ranks.iter().zip(&requests).map(|(r, all)| r.replies(all).unwrap());
        let replies = across(replies.collect());
        let mut pushes = Vec::new();
        for ((rank, ids), replies) in ranks.iter_mut().zip(&ids).zip(&replies) {
            let mut rows: BatchRows = rank.receive(ids, replies).unwrap();
            rows.of(0).1.fill(0.5);
            let mut gradients = RowGradients::default();
            gradients.add(&tables(), ids.clone(), rows);
            pushes.push(rank.pushes(&gradients, std::time::Duration::ZERO));
        }
        for (rank, pushes) in ranks.iter_mut().zip(across(pushes)) {
            rank.stage(&pushes).unwrap();
            assert!(rank.commit(StepCommit { generation: 1, divisor: 100.0, is_applied: true }));
        }
        ranks.iter().map(Owned::save).collect()
    }

    fn part(ranks: &[SavedShards], part: Part) -> Vec<ExportedRows> {
        let messages: Vec<_> =
            ranks.iter().map(|rank| rank.encode_part(&tables(), part, 0)).collect();
        collect(&tables(), &messages).unwrap()
    }

    #[test]
    fn parts_hold_all_rows_in_order_with_any_owners() {
        for parts in [1, 4, SHARDS] {
            let alone = trained(1);
            let (mut touches, mut rows) = ([0, 0], [0, 0]);
            for index in 0..parts {
                let exported = part(&alone, Part { index, parts });
                for workers in [2, 3, 5] {
                    assert_eq!(part(&trained(workers), Part { index, parts }), exported);
                }
                for (table, of) in exported.iter().enumerate() {
                    assert!(of.ids.is_sorted());
                    assert!(of.ids.iter().all(|&id| shard_of(table as u32, id, parts) == index));
                    assert_eq!(of.values.len(), of.ids.len() * tables()[table].dim);
                    rows[table] += of.ids.len();
                    touches[table] += of.touches.iter().sum::<u32>();
                }
            }
            assert_eq!((rows, touches), ([100, 7], [100, 100]), "{parts} parts");
        }
        let rows: Vec<_> = trained(3).iter().map(|rank| rank.rows(2, 0)).collect();
        assert_eq!(rows.iter().map(|rows| rows[0]).sum::<u64>(), 100);
        // All are of the first step.
        let whole = Part { index: 0, parts: 1 };
        for rank in trained(2) {
            assert_eq!(rank.rows(2, 1), [0, 0]);
            let none = collect(&tables(), &[rank.encode_part(&tables(), whole, 1)]).unwrap();
            assert!(none.iter().all(|rows| rows.ids.is_empty() && rows.values.is_empty()));
        }
    }

    #[test]
    fn rows_are_found_at_the_place_of_their_ids() {
        let exported = part(&trained(2), Part { index: 0, parts: 1 });
        let at = exported[1].ids.binary_search(&3).unwrap();
        let mut ids = Ids::new(2);
        ids.push(1, 3);
        // Its gradient was zero.
        let mut initial = BatchRows::initial(&tables(), 5, &ids);
        assert_eq!(exported[1].values[at * 3..(at + 1) * 3], *initial.of(1).0);
        assert_eq!(exported[1].touches[at], 14);
    }

    #[test]
    fn a_row_of_two_owners_and_torn_messages_are_refused() {
        let whole = trained(1)[0].encode_part(&tables(), Part { index: 0, parts: 1 }, 0);
        let error = collect(&tables(), &[whole.clone(), whole.clone()]).unwrap_err();
        assert!(error.to_string().contains("two ranks own row 0"), "{error}");
        for len in 0..whole.len() {
            assert!(collect(&tables(), &[whole[..len].to_vec()]).is_err(), "{len}");
        }
        let longer = [&whole[..], &[0]].concat();
        assert!(collect(&tables(), &[longer]).is_err());
    }
}
