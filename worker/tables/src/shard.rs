//! The rows of one shard, of all tables.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::changes::Removed;
use crate::history::History;
use crate::rows::Rows;
use crate::table::{Eviction, Table};
use crate::wire::{InvalidRows, Message, put, put_u32};

/// Rows of one shard, by table.
///
/// **Invariant:** the touches of all committed steps are counted in one of the three.
#[derive(Clone, Debug)]
pub struct Shard {
    pub(crate) tables: Vec<Rows>,
    /// Rows that are not admitted yet, without numbers.
    pub(crate) waiting: Vec<Rows>,
    /// Touches of the rows that were evicted.
    pub(crate) evicted: Vec<u64>,
    /// Which rows were removed, for checkpoints of what has changed.
    pub(crate) removed: Removed,
    /// What rows were before the last steps, if steps read older rows.
    pub(crate) history: History,
}

impl Shard {
    /// No rows of these tables.
    pub(crate) fn new(tables: &[Table]) -> Self {
        Self {
            tables: tables.iter().map(|table| Rows::new(table.stored())).collect(),
            waiting: tables.iter().map(|_| Rows::new(0)).collect(),
            evicted: vec![0; tables.len()],
            removed: Removed::default(),
            history: History::default(),
        }
    }

    /// Counts so many touches of the row of `id`, which is at the position `found` if it is
    /// admitted, in this step. Returns the row, `[stored]`, if it is admitted now.
    pub(crate) fn touch(
        &mut self,
        (index, table): (usize, &Table),
        (id, touches, found): (u64, u32, Option<usize>),
        (step, seed): (u32, u64),
    ) -> Option<&mut [f32]> {
        let (rows, waiting) = (&mut self.tables[index], &mut self.waiting[index]);
        let mut touches = touches;
        // Rows wait, too, that a checkpoint of a job with another admission brings.
        let may_wait = table.admission > 1 || waiting.len() > 0;
        if may_wait && found.is_none() {
            let (counts, _) = waiting.touch((id, waiting.position(id)), 0, |_| ());
            counts.touches = counts.touches.saturating_add(touches);
            counts.last_step = step;
            if counts.touches < table.admission {
                return None;
            }
            touches = counts.touches;
            waiting.remove(id);
        }
        let initialize = |row: &mut [f32]| table.initialize(seed, index as u32, id, row);
        let (counts, row) = rows.touch((id, found), table.dim, initialize);
        counts.touches = counts.touches.saturating_add(touches);
        counts.last_step = step;
        Some(row)
    }

    /// Values of the row of a table at a position, `[dim]`; nothing if there is none.
    pub(crate) fn values(&self, dim: usize, (table, at): (usize, Option<usize>)) -> Vec<f32> {
        at.map_or(Vec::new(), |at| self.tables[table].numbers(at)[..dim].to_vec())
    }

    /// Removes the rows whose time is over at this step. Their touches stay counted. `lag`: number
    /// of commits of which older rows are kept.
    pub(crate) fn evict(shard: &mut Arc<Self>, tables: &[Table], (step, lag): (u32, u32)) {
        for (index, table) in tables.iter().enumerate() {
            let Eviction { age, norm } = table.eviction;
            if age.is_none() && norm.is_none() {
                continue;
            }
            let is_old = |last: u32| age.is_some_and(|age| step.saturating_sub(last) >= age);
            let is_small = |row: &[f32]| {
                let squares: f32 = row[..table.dim].iter().map(|value| value * value).sum();
                norm.is_some_and(|norm| squares.sqrt() < norm)
            };
            let expired = shard.tables[index]
                .expired(|counts, row| is_old(counts.last_step) || is_small(row));
            let waiting = shard.waiting[index].expired(|counts, _| is_old(counts.last_step));
            if expired.is_empty() && waiting.is_empty() {
                continue;
            }
            let shard = Arc::make_mut(shard);
            for &row in expired.iter().filter(|_| lag > 0) {
                let rows = &shard.tables[index];
                let values = &rows.numbers(row)[..table.dim];
                shard.history.note((index, rows.id(row)), step, values);
            }
            for (rows, expired) in
                [(&mut shard.tables[index], expired), (&mut shard.waiting[index], waiting)]
            {
                shard.removed.add(index, step, expired.iter().map(|&row| rows.id(row)));
                shard.evicted[index] += rows.remove_all(&expired);
            }
            let rows: usize = shard.all().map(Rows::len).sum();
            shard.removed.limit(rows / 4 + REMOVED_LEN, step);
        }
    }

    /// Writes the whole shard.
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        self.encode_rows(&self.removed, to, |rows, to| {
            put_u32(to, rows.len());
            rows.parts().for_each(|part| put(to, part));
        });
    }

    /// Writes the shard with these of its rows, and of those that were removed.
    pub(crate) fn encode_rows(
        &self,
        removed: &Removed,
        to: &mut Vec<u8>,
        encode: impl Fn(&Rows, &mut Vec<u8>),
    ) {
        self.all().for_each(|rows| encode(rows, to));
        put(to, &self.evicted);
        removed.encode(to, !self.history.is_empty());
        if !self.history.is_empty() {
            self.history.encode(to);
        }
    }

    /// Reads what [`encode`](Self::encode) has written, of these tables.
    pub(crate) fn decode(message: &mut Message<'_>, tables: &[Table]) -> Result<Self, InvalidRows> {
        let mut read = |stored: usize| {
            let len = message.u32()? as usize;
            let words = message.column(len.saturating_mul(Rows::stride(stored)))?;
            let rows = Rows::from_words(stored, &words);
            rows.ok_or_else(|| InvalidRows("a shard holds an id twice".into()))
        };
        let admitted: Vec<Rows> =
            tables.iter().map(|table| read(table.stored())).collect::<Result<_, _>>()?;
        let waiting: Vec<Rows> = tables.iter().map(|_| read(0)).collect::<Result<_, _>>()?;
        let evicted = message.column(tables.len())?;
        let (removed, has_history) = Removed::decode(message, tables.len())?;
        let history = match has_history {
            true => History::decode(message, tables)?,
            false => History::default(),
        };
        let is_admitted = |(rows, waiting): (&Rows, &Rows)| {
            waiting.iter().any(|(id, ..)| rows.position(id).is_some())
        };
        if admitted.iter().zip(&waiting).any(is_admitted) {
            return Err(InvalidRows("a row of a shard is admitted, and waits".into()));
        }
        Ok(Self { tables: admitted, waiting, evicted, removed, history })
    }

    /// Number of bytes that [`encode`](Self::encode) writes, about.
    pub(crate) fn encoded_bytes(&self) -> u64 {
        self.all().map(|rows| rows.stored_bytes() as u64).sum()
    }

    pub(crate) fn touches(&self) -> u64 {
        let of_table =
            |(table, rows): (usize, &Rows)| rows.touches() + self.touches_without_row(table);
        self.tables.iter().enumerate().map(of_table).sum()
    }

    /// Touches of a table that no row has: those of rows that are not admitted yet or were evicted.
    pub(crate) fn touches_without_row(&self, table: usize) -> u64 {
        self.waiting[table].touches() + self.evicted[table]
    }

    /// Sum of the digests of all rows, modulo 2^64.
    pub(crate) fn digest(&self) -> u64 {
        let rows = (0..).zip(&self.tables).map(|(table, rows)| rows.digest(table));
        let waiting = (0..).zip(&self.waiting).map(|(table, rows)| rows.digest(table | WAITING));
        let evicted = (0..).zip(&self.evicted).filter(|(_, touches)| **touches > 0);
        let evicted = evicted
            .map(|(table, touches)| xxh3_64_with_seed(&touches.to_le_bytes(), table | EVICTED));
        rows.chain(waiting).chain(evicted).fold(0, u64::wrapping_add)
    }

    pub(crate) fn is_finite(&self) -> bool {
        let mut numbers = self.tables.iter().flat_map(Rows::iter).flat_map(|(.., numbers)| numbers);
        numbers.all(|number| number.is_finite())
    }

    pub(crate) fn rows(&self) -> u64 {
        self.tables.iter().map(|rows| rows.len() as u64).sum()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.all().map(Rows::bytes).sum::<usize>() + self.removed.bytes() + self.history.bytes()
    }

    /// Rows of a table, and its memory.
    pub(crate) fn size_of(&self, table: usize) -> (u64, usize) {
        let rows = &self.tables[table];
        (rows.len() as u64, rows.bytes() + self.waiting[table].bytes())
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Rows> {
        self.tables.iter().chain(&self.waiting)
    }
}

/// Removed rows that a shard remembers, besides a quarter of the number of its rows.
const REMOVED_LEN: usize = 1024;

/// What the seeds of the digests differ in.
const WAITING: u64 = 1 << 32;
const EVICTED: u64 = 1 << 33;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::RowOptimizer;

    fn touch(shard: &mut Shard, table: &Table, id: u64, step: u32) -> Option<Vec<f32>> {
        let found = shard.tables[0].position(id);
        let row = shard.touch((0, table), (id, 2, found), (step, 1))?;
        row[0] += 1.0;
        Some(row.to_vec())
    }

    #[test]
    fn a_row_is_admitted_with_the_touch_that_makes_it_enough_and_touches_count_once() {
        let table = Table::new("user", 2).optimized(RowOptimizer::adagrad(0.1)).admitted_after(5);
        let tables = [table.clone()];
        let mut shard = Shard::new(&tables);
        for step in 1..=2 {
            assert_eq!(touch(&mut shard, &table, 7, step), None);
        }
        assert_eq!((shard.rows(), shard.touches(), shard.touches_without_row(0)), (0, 4, 4));
        let digest = shard.digest();
        let mut initial = [0.0; 2];
        table.initialize(1, 0, 7, &mut initial);
        let row = touch(&mut shard, &table, 7, 3).unwrap();
        assert_eq!(row, [initial[0] + 1.0, initial[1], 0.0]);
        assert_eq!((shard.rows(), shard.touches(), shard.touches_without_row(0)), (1, 6, 0));
        assert_ne!(shard.digest(), digest);
        let mut bytes = Vec::new();
        shard.encode(&mut bytes);
        let copy = Shard::decode(&mut Message(&bytes), &tables).unwrap();
        assert_eq!((copy.digest(), copy.touches()), (shard.digest(), 6));
    }

    #[test]
    fn rows_that_wait_are_admitted_under_the_rule_of_the_job_that_goes_on() {
        let (late, early) = (Table::new("user", 1).admitted_after(9), Table::new("user", 1));
        let mut shard = Shard::new(std::slice::from_ref(&late));
        assert_eq!(touch(&mut shard, &late, 7, 1), None);
        assert!(touch(&mut shard, &early, 7, 2).is_some());
        assert_eq!((shard.rows(), shard.touches(), shard.touches_without_row(0)), (1, 4, 0));
    }

    #[test]
    fn rows_are_evicted_by_age_and_norm_and_their_touches_stay_counted() {
        let table = Table::new("user", 2).evicted_after(3).evicted_below(0.5).admitted_after(3);
        let tables = [table.clone()];
        let mut shard = Shard::new(&tables);
        // Row 1 is small, row 2 is old, 3 waits for too long, 4 waits, 5 is neither.
        let touched = [(1, 8), (1, 9), (2, 5), (2, 6), (3, 6), (4, 7), (5, 6), (5, 7)];
        for (id, step) in touched {
            let found = shard.tables[0].position(id);
            let row = shard.touch((0, &table), (id, 2, found), (step, 1));
            row.into_iter().for_each(|row| row.fill(if id == 1 { 0.3 } else { 0.4 }));
        }
        let touches = shard.touches();
        let mut shard = Arc::new(shard);
        let mut other = Arc::clone(&shard);
        Shard::evict(&mut shard, &[Table::new("user", 2).evicted_after(3)], (8, 0));
        assert!(Arc::ptr_eq(&shard, &other), "nothing is due");
        Shard::evict(&mut shard, &tables, (9, 0));
        let ids: Vec<u64> = shard.tables[0].iter().map(|(id, ..)| id).collect();
        let waiting: Vec<u64> = shard.waiting[0].iter().map(|(id, ..)| id).collect();
        assert_eq!((ids, waiting, shard.evicted[0]), (vec![5], vec![4], 10));
        assert_eq!((shard.touches(), shard.touches_without_row(0)), (touches, 12));
        // Copies come to the same, and snapshots stay as they are.
        assert_eq!(other.touches_without_row(0), 4);
        Shard::evict(&mut other, &tables, (9, 0));
        assert_eq!(other.digest(), shard.digest());
        let mut shard = Arc::unwrap_or_clone(shard);
        assert_eq!(touch(&mut shard, &table, 2, 10), None, "it begins anew");
        let mut bytes = Vec::new();
        shard.encode(&mut bytes);
        let copy = Shard::decode(&mut Message(&bytes), &tables).unwrap();
        assert_eq!((copy.digest(), copy.evicted[0]), (shard.digest(), 10));
    }
}
