//! Values that rows had before the last steps, for steps that read rows of an older commit.
//!
//! ```text
//!   step        7       8       9        commits, of which the last is 9
//!   row         a ──▶ b         c        kept: (8, a), (9, b)
//!   as of 7: a, what it was before 8     as of 8: b, what it was before 9     as of 9: c
//! ```
//!
//! They belong to the shard, like its rows: its copies have them, and its checkpoints.
//!
//! **Invariant:** what a row was as of a step that is kept is what it was before the first later
//! step that has changed it; if none has, it is what it is.

use std::collections::BTreeMap;

use crate::table::Table;
use crate::wire::{InvalidRows, Message, put, put_u32};

/// Older values of the rows of a shard.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct History(BTreeMap<(u32, u64), Vec<OlderRow>>);

/// What a row of a table was before a step.
#[derive(Clone, Debug, PartialEq)]
struct OlderRow {
    step: u32,
    /// `[dim]`; nothing if there was no row.
    values: Vec<f32>,
}

impl History {
    /// This step changes the row of `id` in a table, whose values, `[dim]`, are these before it;
    /// nothing if there is none.
    pub(crate) fn note(&mut self, (table, id): (usize, u64), step: u32, values: &[f32]) {
        let older = OlderRow { step, values: values.to_vec() };
        self.0.entry((table as u32, id)).or_default().push(older);
    }

    /// What the row was as of this step, if a later one has changed it: its values, `[dim]`, or
    /// nothing if there was none.
    pub(crate) fn as_of(&self, (table, id): (usize, u64), step: u32) -> Option<&[f32]> {
        let older = self.0.get(&(table as u32, id))?;
        older.iter().find(|older| older.step > step).map(|older| &*older.values)
    }

    /// No step reads rows as of an earlier step than this one any more.
    pub(crate) fn forget_before(&mut self, step: u32) {
        self.0.retain(|_, older| {
            older.retain(|older| older.step > step);
            !older.is_empty()
        });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Memory, in bytes, about.
    pub(crate) fn bytes(&self) -> usize {
        let of_row = |older: &Vec<OlderRow>| {
            let values = older.iter().map(|older| older.values.capacity() * size_of::<f32>());
            NODE_BYTES + older.capacity() * size_of::<OlderRow>() + values.sum::<usize>()
        };
        self.0.values().map(of_row).sum()
    }

    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        put_u32(to, self.0.values().map(Vec::len).sum());
        for (&(table, id), older) in &self.0 {
            for OlderRow { step, values } in older {
                put(to, &[id]);
                put(to, &[table, *step, values.len() as u32]);
                put(to, values);
            }
        }
    }

    /// Reads what [`encode`](Self::encode) has written, of these tables.
    pub(crate) fn decode(message: &mut Message<'_>, tables: &[Table]) -> Result<Self, InvalidRows> {
        let mut history = Self::default();
        for _ in 0..message.u32()? {
            let (id, table, step) = (message.u64()?, message.u32()?, message.u32()?);
            let len = message.u32()? as usize;
            let dim = tables.get(table as usize).map(|table| table.dim);
            if len > 0 && dim != Some(len) {
                return Err(InvalidRows(format!("an older row of {len} numbers in table {table}")));
            }
            history.note((table as usize, id), step, &message.column::<f32>(len)?);
        }
        Ok(history)
    }
}

/// Memory of an entry of the map, about.
const NODE_BYTES: usize = 48;

#[cfg(test)]
mod tests {
    use super::*;

    fn history() -> History {
        let mut history = History::default();
        history.note((0, 7), 3, &[]);
        history.note((0, 7), 5, &[1.0, 2.0]);
        history.note((1, 7), 4, &[3.0]);
        history
    }

    #[test]
    fn a_row_is_as_of_a_step_what_it_was_before_the_first_later_change() {
        let mut history = history();
        let of_user = |history: &History, step| history.as_of((0, 7), step).map(<[f32]>::to_vec);
        assert_eq!([0, 2].map(|step| of_user(&history, step)), [Some(vec![]), Some(vec![])]);
        assert_eq!(
            [3, 4].map(|step| of_user(&history, step)),
            [(); 2].map(|()| Some(vec![1.0, 2.0]))
        );
        assert_eq!(of_user(&history, 5), None);
        history.forget_before(4);
        assert_eq!((of_user(&history, 4), history.as_of((1, 7), 4)), (Some(vec![1.0, 2.0]), None));
        history.forget_before(5);
        assert!(history.is_empty());
    }

    #[test]
    fn torn_histories_are_refused() {
        let tables = [Table::new("user", 2), Table::new("item", 1)];
        let mut bytes = Vec::new();
        history().encode(&mut bytes);
        let read = |bytes: &[u8]| History::decode(&mut Message(bytes), &tables);
        assert_eq!(read(&bytes).unwrap(), history());
        assert!((0..bytes.len()).all(|len| read(&bytes[..len]).is_err()));
        // A row of the second table cannot have two numbers.
        let mut other = History::default();
        other.note((1, 7), 4, &[1.0, 2.0]);
        bytes.clear();
        other.encode(&mut bytes);
        let error = read(&bytes).unwrap_err();
        assert_eq!(error.reason(), "an older row of 2 numbers in table 1");
    }
}
