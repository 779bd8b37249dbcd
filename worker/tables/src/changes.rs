//! What has changed in a shard since a step, for differential checkpoints.
//!
//! Every row has the number of the last step that has touched it. A row that was removed is
//! nowhere, so its id is kept for a while.
//!
//! ```text
//!   WHOLE    the shard
//!   CHANGED  the same, but of the rows only those that a later step has touched
//! ```

use crate::rows::Rows;
use crate::shard::Shard;
use crate::table::Table;
use crate::wire::{InvalidRows, Message, put, put_u32};

/// Ids of rows that were removed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Removed {
    /// Those of all later steps are here.
    since: u32,
    rows: Vec<RemovedRow>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RemovedRow {
    id: u64,
    table: u32,
    step: u32,
}

impl Removed {
    /// These rows of a table are removed in this step.
    pub(crate) fn add(&mut self, table: usize, step: u32, ids: impl Iterator<Item = u64>) {
        self.rows.extend(ids.map(|id| RemovedRow { id, table: table as u32, step }));
    }

    /// Forgets all if there are more than `most`: from then on the shard is written as a whole.
    pub(crate) fn limit(&mut self, most: usize, step: u32) {
        if self.rows.len() > most {
            *self = Self { since: step, rows: Vec::new() };
        }
    }

    /// Those of the steps after `step`; `None` if not all of them are known.
    fn after(&self, step: u32) -> Option<Self> {
        let rows = self.rows.iter().filter(|row| row.step > step).copied().collect();
        (step >= self.since).then_some(Self { since: step, rows })
    }

    /// Memory, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.rows.capacity() * size_of::<RemovedRow>()
    }

    /// Writes them, and whether a history of rows follows.
    pub(crate) fn encode(&self, to: &mut Vec<u8>, has_history: bool) {
        put_u32(to, self.since as usize);
        put_u32(to, self.rows.len() | if has_history { HAS_HISTORY as usize } else { 0 });
        for row in &self.rows {
            put(to, &[row.id]);
            put(to, &[row.table, row.step]);
        }
    }

    /// Reads what [`encode`](Self::encode) has written, of so many tables.
    pub(crate) fn decode(
        message: &mut Message<'_>,
        tables: usize,
    ) -> Result<(Self, bool), InvalidRows> {
        let (since, len) = (message.u32()?, message.u32()?);
        let (has_history, len) = (len & HAS_HISTORY != 0, (len & !HAS_HISTORY) as usize);
        let mut rows = message.part(len.saturating_mul(ROW_BYTES))?;
        let mut removed = Self { since, rows: Vec::with_capacity(len) };
        for _ in 0..len {
            let row = RemovedRow { id: rows.u64()?, table: rows.u32()?, step: rows.u32()? };
            if row.table as usize >= tables {
                return Err(InvalidRows(format!("a removed row of table {}", row.table)));
            }
            removed.rows.push(row);
        }
        Ok((removed, has_history))
    }
}

impl Shard {
    /// Writes what has changed after `step`, or the whole shard if that is not more.
    pub(crate) fn encode_changes(&self, step: u32, to: &mut Vec<u8>) {
        let changed: u64 = self.all().map(|rows| rows.changed_bytes(step)).sum();
        match self.removed.after(step).filter(|_| 2 * changed <= self.encoded_bytes()) {
            Some(removed) => {
                put_u32(to, CHANGED);
                self.encode_rows(&removed, to, |rows, to| rows.encode_changed(step, to));
            }
            None => {
                put_u32(to, WHOLE);
                self.encode(to);
            }
        }
    }

    /// The shard with these `changes`.
    fn with(mut self, changes: Self) -> Self {
        for row in changes.removed.rows {
            self.tables[row.table as usize].remove(row.id);
            self.waiting[row.table as usize].remove(row.id);
        }
        let place = |rows: &mut Rows, changed: &Rows| {
            for (id, of_changed, numbers) in changed.iter() {
                let (counts, row) = rows.touch((id, rows.position(id)), 0, |_| ());
                *counts = of_changed;
                row.copy_from_slice(numbers);
            }
        };
        let tables = self.tables.iter_mut().zip(&mut self.waiting);
        let changed = changes.tables.iter().zip(&changes.waiting);
        for ((rows, waiting), (of_rows, of_waiting)) in tables.zip(changed) {
            // Those that have waited until then.
            of_rows.iter().for_each(|(id, ..)| _ = waiting.remove(id));
            place(rows, of_rows);
            place(waiting, of_waiting);
        }
        self.evicted = changes.evicted;
        self.removed = Removed::default();
        self.history = changes.history;
        self
    }
}

/// The whole shard that `changes` is, if it is one: what `SavedShard::encode_changes` has written.
///
/// # Errors
/// It is neither a shard nor changes.
pub fn whole_shard(changes: &[u8]) -> Result<Option<&[u8]>, InvalidRows> {
    let mut message = Message(changes);
    match message.u32()? as usize {
        WHOLE => Ok(Some(message.0)),
        CHANGED => Ok(None),
        kind => Err(InvalidRows(format!("changes of the kind {kind}"))),
    }
}

/// The bytes of a shard, of these tables: as of an `older` state, and what has changed since.
///
/// # Errors
/// One of them is invalid.
pub fn changed_shard(
    tables: &[Table],
    older: &[u8],
    changes: &[u8],
) -> Result<Vec<u8>, InvalidRows> {
    let mut message = Message(changes);
    if message.u32()? as usize != CHANGED {
        return Err(InvalidRows("a whole shard in place of changes".into()));
    }
    let read = |mut message: Message<'_>| {
        let shard = Shard::decode(&mut message, tables)?;
        match message.is_empty() {
            true => Ok(shard),
            false => Err(InvalidRows(format!("{} bytes after a shard", message.0.len()))),
        }
    };
    let mut bytes = Vec::new();
    read(Message(older))?.with(read(message)?).encode(&mut bytes);
    Ok(bytes)
}

const WHOLE: usize = 0;
const CHANGED: usize = 1;
/// Set in the number of removed rows if a history of rows follows.
const HAS_HISTORY: u32 = 1 << 31;
/// Bytes of a removed row.
const ROW_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::optimizer::RowOptimizer;

    fn tables() -> Vec<Table> {
        let user = Table::new("user", 2).optimized(RowOptimizer::adagrad(0.1));
        vec![user.admitted_after(3).evicted_after(4), Table::new("item", 1)]
    }

    fn touch(shard: &mut Shard, table: usize, id: u64, step: u32) {
        let found = shard.tables[table].position(id);
        let row = shard.touch((table, &tables()[table]), (id, 2, found), (step, 1));
        row.into_iter().for_each(|row| row.fill(step as f32 + id as f32));
    }

    /// A shard as of each of 12 steps, in which rows are admitted, changed, evicted and come back.
    fn history() -> Vec<Shard> {
        let mut shard = Shard::new(&tables());
        (0..200).for_each(|id| touch(&mut shard, 1, 1000 + id, 0));
        let mut shards = vec![shard.clone()];
        for step in 1..=12 {
            let ids: &[u64] = match step {
                1 | 2 => &[1, 2, 3],
                3 => &[4, 5],
                5 => &[5],
                8 => &[1, 6],
                11 => &[1, 7],
                _ => &[],
            };
            ids.iter().for_each(|&id| touch(&mut shard, 0, id, step));
            touch(&mut shard, 1, 1000 + u64::from(step) % 3, step);
            let mut shared = Arc::new(shard);
            Shard::evict(&mut shared, &tables(), (step, 0));
            shard = Arc::unwrap_or_clone(shared);
            shards.push(shard.clone());
        }
        shards
    }

    fn whole(shard: &Shard) -> Vec<u8> {
        let mut bytes = Vec::new();
        shard.encode(&mut bytes);
        bytes
    }

    #[test]
    fn an_older_shard_and_what_has_changed_since_are_the_shard() {
        let history = history();
        assert!(history[12].evicted[0] > 0 && history[12].removed.rows.len() > 3);
        for (from, older) in history.iter().enumerate() {
            // In one part, and in a chain of two.
            for (to, newer) in history.iter().enumerate().skip(from) {
                let mut bytes = whole(older);
                for (since, shard) in [(from, &history[(from + to) / 2]), ((from + to) / 2, newer)]
                {
                    let mut changes = Vec::new();
                    shard.encode_changes(since as u32, &mut changes);
                    assert_eq!(whole_shard(&changes).unwrap(), None);
                    assert!(4 * changes.len() < bytes.len(), "{} bytes", changes.len());
                    bytes = changed_shard(&tables(), &bytes, &changes).unwrap();
                }
                let read = Shard::decode(&mut Message(&bytes), &tables()).unwrap();
                let of = |shard: &Shard| (shard.digest(), shard.touches(), shard.evicted.clone());
                assert_eq!(of(&read), of(newer), "{from} to {to}");
            }
        }
    }

    #[test]
    fn a_shard_whose_removed_rows_are_forgotten_is_written_as_a_whole() {
        let mut shard = history().pop().unwrap();
        let changes = |shard: &Shard, since| {
            let mut changes = Vec::new();
            shard.encode_changes(since, &mut changes);
            changes
        };
        shard.removed.limit(3, 12);
        let [forgotten, known] = [11, 12].map(|since| changes(&shard, since));
        assert_eq!(whole_shard(&forgotten).unwrap(), Some(&*whole(&shard)));
        assert_eq!(whole_shard(&known).unwrap(), None);
        // Nor are changes written that are no less.
        (0..150).for_each(|id| touch(&mut shard, 1, 1000 + id, 13));
        assert_eq!(whole_shard(&changes(&shard, 12)).unwrap(), Some(&*whole(&shard)));
        assert!(changed_shard(&tables(), &whole(&shard), &forgotten).is_err());
    }

    #[test]
    fn torn_changes_are_refused() {
        let history = history();
        let mut changes = Vec::new();
        history[12].encode_changes(7, &mut changes);
        let older = whole(&history[7]);
        for len in 0..changes.len() {
            assert!(changed_shard(&tables(), &older, &changes[..len]).is_err(), "{len}");
        }
        assert!(changed_shard(&tables(), &older, &[&*changes, &[0]].concat()).is_err());
        assert!(whole_shard(&[2, 0, 0, 0]).is_err());
        let (mut removed, mut bytes) = (Removed::default(), Vec::new());
        removed.add(2, 5, [1].into_iter());
        removed.encode(&mut bytes, false);
        let error = Removed::decode(&mut Message(&bytes), 2).unwrap_err();
        assert_eq!(error.reason(), "a removed row of table 2");
    }
}
