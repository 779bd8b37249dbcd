//! Rows that are looked up one step early, while the step before is computed.
//!
//! ```text
//!   step s       ids of s + 1 ──▶ owners ── rows as of the last commit ──▶    while s is computed
//!   commit of s
//!   step s + 1   owners ── rows that the commit has changed ──▶               in place of a look-up
//! ```
//!
//! A worker that has answered keeps the requests and its answers. After the commit it answers once
//! more, and sends the rows that differ: what a step changes, admits or evicts shows by itself.
//!
//! If steps read rows of an older commit, the rows of the next step are all there, and nothing
//! follows after the commit.
//!
//! **Invariant:** the rows that were received, with these changes, are those that a look-up after
//! the commit would bring. **Invariant:** between the two, the same worker answers for a row. So
//! rows are looked up early only if all shards lie where they should.

use super::Owned;
use crate::lookup::{BatchRows, Ids};
use crate::wire::{InvalidRows, Message, put, put_u32};

/// What a worker has answered, by rank.
#[derive(Clone, Debug)]
pub struct Answered {
    requests: Vec<Vec<u8>>,
    rows: Vec<Vec<u8>>,
}

impl Answered {
    /// The answers, one for each rank.
    pub fn rows(&self) -> &[Vec<u8>] {
        &self.rows
    }
}

impl Owned {
    /// Whether rows may be looked up early. All ranks of a group find the same.
    pub fn may_look_ahead(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.is_settled)
    }

    /// Whether a commit changes rows that were looked up before it: the next step reads them as of
    /// that commit.
    pub fn reads_last_commit(&self) -> bool {
        self.settings.lag == 0
    }

    /// Answers the requests of all ranks with the rows that the step after the next commit reads,
    /// as far as they are known. No shards are copied with them.
    ///
    /// # Errors
    /// A request is invalid.
    pub fn answer_early(&self, requests: Vec<Vec<u8>>) -> Result<Answered, InvalidRows> {
        let mut rows = Vec::with_capacity(requests.len());
        for request in &requests {
            let mut reply = Vec::new();
            self.answer(self.settings.lag.saturating_sub(1), request, &mut reply)?;
            rows.push(reply);
        }
        Ok(Answered { requests, rows })
    }

    /// Takes in the early answers of all ranks to the requests for `ids`.
    ///
    /// # Errors
    /// An answer is invalid.
    pub fn receive_early(&self, ids: &Ids, answers: &[Vec<u8>]) -> Result<BatchRows, InvalidRows> {
        let (rows, rest) = self.rows_of(ids, answers)?;
        match rest.iter().find(|rest| !rest.is_empty()) {
            Some(rest) => Err(InvalidRows(format!("{} bytes more than asked for", rest.0.len()))),
            None => Ok(rows),
        }
    }

    /// For each rank, the rows that differ from those that this worker has answered it: their
    /// numbers within the answer, ascending, and their values.
    ///
    /// # Errors
    /// A request is invalid.
    pub fn changes(&self, answered: &Answered) -> Result<Vec<Vec<u8>>, InvalidRows> {
        let mut now = Vec::new();
        let mut all = Vec::with_capacity(answered.requests.len());
        for (request, before) in answered.requests.iter().zip(&answered.rows) {
            now.clear();
            self.answer(0, request, &mut now)?;
            all.push(self.changed_rows(request, before, &now)?);
        }
        Ok(all)
    }

    fn changed_rows(
        &self,
        request: &[u8],
        before: &[u8],
        now: &[u8],
    ) -> Result<Vec<u8>, InvalidRows> {
        let (mut request, mut at, mut number) = (Message(request), 0, 0_u32);
        let (mut numbers, mut rows) = (Vec::new(), Vec::new());
        while !request.is_empty() {
            let (_, table) = self.table(request.u32()?)?;
            let len = request.u32()? as usize;
            request.part(len * size_of::<u64>())?;
            let bytes = table.dim * size_of::<f32>();
            for _ in 0..len {
                let row = at..at + bytes;
                if before[row.clone()] != now[row.clone()] {
                    numbers.push(number);
                    rows.extend_from_slice(&now[row]);
                }
                (at, number) = (at + bytes, number + 1);
            }
        }
        let mut message = Vec::new();
        put_u32(&mut message, numbers.len());
        put(&mut message, &numbers);
        message.extend(rows);
        Ok(message)
    }

    /// Brings the early `rows` of `ids` to the last commit, by the changes of all ranks.
    ///
    /// # Errors
    /// Changes are invalid.
    pub fn receive_changes(
        &self,
        ids: &Ids,
        rows: &mut BatchRows,
        changes: &[Vec<u8>],
    ) -> Result<(), InvalidRows> {
        let mut of_ranks = Vec::with_capacity(changes.len());
        for changes in changes {
            let mut changes = Message(changes);
            let len = changes.u32()? as usize;
            let mut numbers = changes.column::<u32>(len)?;
            numbers.reverse();
            of_ranks.push(Changes { row: 0, numbers, values: changes });
        }
        for (index, table) in self.content.iter().enumerate() {
            let values = rows.values_mut(index);
            for &(shard, at) in ids.in_shards(index, self.settings.shards) {
                let of_rank = &mut of_ranks[self.source(shard)];
                if of_rank.next() {
                    of_rank.values.fill(&mut values[at * table.dim..(at + 1) * table.dim])?;
                }
            }
        }
        match of_ranks.iter().find(|it| !it.numbers.is_empty() || !it.values.is_empty()) {
            Some(_) => Err(InvalidRows("changes of rows that were not asked for".into())),
            None => Ok(()),
        }
    }
}

/// The changed rows of a rank's answer.
struct Changes<'a> {
    /// Number of the answer's next row.
    row: u32,
    /// Numbers of the rows that have changed, the next one last.
    numbers: Vec<u32>,
    values: Message<'a>,
}

impl Changes<'_> {
    /// Whether the next row of the answer has changed.
    fn next(&mut self) -> bool {
        self.row += 1;
        self.numbers.pop_if(|number| *number + 1 == self.row).is_some()
    }
}
