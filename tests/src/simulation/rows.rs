//! The tables of the simulation's model, and a reference that applies each step to them in one
//! piece.
//!
//! Which rows a record touches, and their gradients, are functions of the record's parameter. All
//! sums are exact, in any order.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use elasticdl::simulated::{Settings, shard_of};
use elasticdl::{BatchRows, Ids, RowOptimizer, Table};

/// The tables of the model.
pub(super) fn tables() -> Vec<Table> {
    vec![
        Table::new("plain", 2).optimized(RowOptimizer::sgd(1.0)),
        Table::new("adaptive", 1)
            .optimized(RowOptimizer::Adagrad { learning_rate: 0.5, epsilon: 1.0 })
            .admitted_after(ADMISSION)
            .evicted_after(AGE),
    ]
}

/// Table and id of each row that the record of this parameter needs; one may be there twice.
pub(super) fn ids_of(record: usize) -> [(usize, u64); 3] {
    let record = record as u64;
    [(0, record.wrapping_mul(0x9e37_79b9) % 11), (0, record % 5), (1, record % 7)]
}

/// The gradient of the record of this parameter at a row, the same for each of its numbers.
pub(super) fn gradient_of(record: usize, id: u64) -> f32 {
    ((record as u64 * 7 + id) % 16) as f32 - 8.0
}

/// Pairs of one of these records and a row that it touches.
pub(super) fn touches(records: impl Iterator<Item = usize>) -> u64 {
    records.map(|record| BTreeSet::from(ids_of(record)).len() as u64).sum()
}

/// Rows by shard, table and id. [`EVICTED`] stands for those that were evicted. Then those of the
/// commits before, the last one first, that later steps may read.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rows(pub(super) BTreeMap<(u32, usize, u64), Row>, pub(super) Vec<Rc<Self>>);

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Row {
    /// Number of records that have touched it.
    pub(super) touches: u64,
    /// The last step with one.
    pub(super) last_step: u64,
    /// Values and the state of the optimizer; nothing before it is admitted.
    pub(super) numbers: Vec<f32>,
}

impl Rows {
    /// The rows of a shard.
    pub(super) fn of(&self, shard: u32) -> impl Iterator<Item = (&(u32, usize, u64), &Row)> {
        self.0.range((shard, 0, 0)..(shard + 1, 0, 0))
    }

    /// The rows with these shards as in `other`.
    pub(super) fn with(&self, shards: &[u32], other: &Self) -> Self {
        let is_of = |of_shards| {
            move |(key, _): &(&(u32, usize, u64), &Row)| shards.contains(&key.0) == of_shards
        };
        let own = self.0.iter().filter(is_of(false)).chain(other.0.iter().filter(is_of(true)));
        Self(own.map(|(key, row)| (*key, row.clone())).collect(), self.1.clone())
    }

    /// The rows that the next step reads.
    pub(super) fn of_step(&self, settings: &Settings) -> &Self {
        match settings.lag as usize {
            0 => self,
            // There are fewer only until so many steps are committed.
            lag => self.1.get(lag - 1).or_else(|| self.1.last()).map_or(self, |rows| rows),
        }
    }

    /// Sum of the touches of all rows.
    pub(super) fn touches(&self) -> u64 {
        self.0.values().map(|row| row.touches).sum()
    }

    /// Values of a row.
    pub(super) fn values(&self, settings: &Settings, (table, id): (usize, u64)) -> Vec<f32> {
        let shard = shard_of(table as u32, id, settings.shards);
        match self.0.get(&(shard, table, id)).filter(|row| !row.numbers.is_empty()) {
            Some(row) => row.numbers[..tables()[table].dim].to_vec(),
            None => initial(settings.seed, table, id),
        }
    }

    /// The rows after this step, of these records.
    pub(super) fn after(&self, settings: &Settings, (step, records): (u64, &[usize])) -> Self {
        let mut sums: BTreeMap<(usize, u64), (BTreeSet<usize>, f32)> = BTreeMap::new();
        for &record in records {
            for (table, id) in ids_of(record) {
                let (touched_by, sum) = sums.entry((table, id)).or_default();
                touched_by.insert(record);
                *sum += gradient_of(record, id);
            }
        }
        let last = Rc::new(Self(self.0.clone(), Vec::new()));
        let older = [last].into_iter().chain(self.1.iter().cloned());
        let mut next = Self(self.0.clone(), older.take(settings.lag as usize).collect());
        for ((table, id), (touched_by, sum)) in sums {
            let shard = shard_of(table as u32, id, settings.shards);
            let Row { touches, last_step, numbers } = next.0.entry((shard, table, id)).or_default();
            *touches += touched_by.len() as u64;
            *last_step = step;
            if table == 1 && *touches < u64::from(ADMISSION) {
                continue;
            }
            if numbers.is_empty() {
                *numbers = initial(settings.seed, table, id);
                numbers.resize(2, 0.0);
            }
            let mean = sum * (1.0 / records.len() as f32);
            match table {
                0 => numbers.iter_mut().for_each(|value| *value -= mean),
                _ => {
                    numbers[1] += mean * mean;
                    numbers[0] -= 0.5 / (numbers[1].sqrt() + 1.0) * mean;
                }
            }
        }
        next.evict((step % u64::from(settings.shards)) as u32, step);
        next
    }

    /// Removes the old rows of a shard.
    fn evict(&mut self, shard: u32, step: u64) {
        let of_shard = self.0.range((shard, 1, 0)..(shard, 1, EVICTED));
        let old = of_shard.filter(|(_, row)| step - row.last_step >= u64::from(AGE));
        for key in old.map(|(key, _)| *key).collect::<Vec<_>>() {
            let evicted = self.0.remove(&key).map_or(0, |row| row.touches);
            self.0.entry((shard, 1, EVICTED)).or_default().touches += evicted;
        }
    }
}

fn initial(seed: u64, table: usize, id: u64) -> Vec<f32> {
    let tables = tables();
    let mut ids = Ids::new(tables.len());
    ids.begin_record();
    ids.push(table, id);
    BatchRows::initial(&tables, seed, &ids).of(table).0.to_vec()
}

/// Touches with which a row of the second table is admitted.
const ADMISSION: u32 = 3;
/// Steps after which one is evicted.
const AGE: u32 = 5;
/// Stands for the rows of a shard and a table that were evicted.
pub(super) const EVICTED: u64 = u64::MAX;
