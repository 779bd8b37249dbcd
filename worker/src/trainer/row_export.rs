//! Exports of rows: the lowest rank says what is to be written where, and all ranks write.
//!
//! ```text
//!   lowest rank ── order ──► all ranks ── rows of each part ──► its writer ──► storage
//!   model's file ◄── names of the parts ──┘
//! ```
//!
//! **Invariant:** the model's file is written after all parts of its rows.

use std::cell::RefCell;

use elasticdl_tables::{Part, SavedShards, collect};
use serde::{Deserialize, Serialize};

use super::row_tables::{RowTables, exchange};
use super::stopped::{Stopped, decode_all};
use crate::exported_tables::{ExportedPart, ExportedTables, parts_of, write_part};
use crate::machine::Group;
use crate::session::InvalidData;
use crate::session::header;
use crate::weights::WeightsError;

/// What the lowest rank has all ranks do.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Nothing more is to be done. The rows of the best model are needed again, or not.
    End { keeps_best: bool },
    /// The rows are those of the best model.
    KeepBest,
    /// Write the rows, or those of the best model, beside the model at this address.
    Write { address: String, is_best: bool },
}

/// The lowest rank's side of an export. Without tables there is nothing to do.
pub(super) struct RowExport<'a>(Option<RefCell<Lead<'a>>>);

struct Lead<'a> {
    tables: &'a mut RowTables,
    group: &'a mut dyn Group,
    /// Why the ranks do not take part any more.
    stopped: Option<Stopped>,
}

impl<'a> RowExport<'a> {
    pub(super) fn new(with: Option<(&'a mut RowTables, &'a mut dyn Group)>) -> Self {
        Self(with.map(|(tables, group)| RefCell::new(Lead { tables, group, stopped: None })))
    }

    /// The rows are those of the best model.
    pub(super) fn keep_best(&self) -> Result<(), WeightsError> {
        self.order(&Order::KeepBest).map(drop)
    }

    /// Has all ranks write their rows, or those of the best model, beside the model at `address`.
    pub(super) fn write(
        &self,
        address: &str,
        is_best: bool,
    ) -> Result<Option<ExportedTables>, WeightsError> {
        let written = self.order(&Order::Write { address: address.to_owned(), is_best })?;
        if let Some(tables) = &written {
            tables.check_parts(address)?;
        }
        Ok(written)
    }

    fn order(&self, order: &Order) -> Result<Option<ExportedTables>, WeightsError> {
        let Some(lead) = &self.0 else { return Ok(None) };
        let Lead { tables, group, stopped } = &mut *lead.borrow_mut();
        if stopped.is_some() {
            return Err(WeightsError::Broken);
        }
        let mut bytes = header::encode(order);
        let sent = group.broadcast_bytes(0, &mut bytes).map_err(Stopped::from);
        match sent.and_then(|()| tables.perform(&mut **group, order)) {
            Ok(done) => done.map_err(WeightsError::Rows),
            Err(error) => {
                *stopped = Some(error);
                Err(WeightsError::Broken)
            }
        }
    }

    /// Whether the other ranks do not take part any more, so that no attempt can succeed.
    pub(super) fn has_stopped(&self) -> bool {
        self.0.as_ref().is_some_and(|lead| lead.borrow().stopped.is_some())
    }

    /// Ends the export.
    ///
    /// # Errors
    /// Why the ranks do not take part any more.
    pub(super) fn end(self, keeps_best: bool) -> Result<(), Stopped> {
        drop(self.order(&Order::End { keeps_best }));
        match self.0.map(RefCell::into_inner) {
            Some(Lead { stopped: Some(stopped), .. }) => Err(stopped),
            _ => Ok(()),
        }
    }
}

impl RowTables {
    /// Takes part in what the lowest rank exports.
    pub(super) fn follow_export(&mut self, group: &mut dyn Group) -> Result<(), Stopped> {
        loop {
            let mut bytes = Vec::new();
            group.broadcast_bytes(0, &mut bytes)?;
            let order: Order = header::decode(&bytes).ok_or(InvalidData("an order to export"))?;
            if let Err(error) = self.perform(group, &order)? {
                tracing::warn!(error, "rows are not exported");
            }
            if matches!(order, Order::End { .. }) {
                return Ok(());
            }
        }
    }

    /// The inner error, which all ranks have: rows can't be written.
    fn perform(
        &mut self,
        group: &mut dyn Group,
        order: &Order,
    ) -> Result<Result<Option<ExportedTables>, String>, Stopped> {
        match order {
            Order::End { keeps_best } => {
                self.rows_of_best.take_if(|_| !keeps_best);
                Ok(Ok(None))
            }
            Order::KeepBest => {
                self.rows_of_best = Some(self.owned().save());
                Ok(Ok(None))
            }
            Order::Write { address, is_best } => {
                let (saved, since) = match is_best {
                    true => {
                        let saved = self.rows_of_best.clone();
                        (saved.expect("all ranks keep those of the best"), None)
                    }
                    false => (self.owned().save(), self.export_since),
                };
                Ok(self.write_rows(group, (&saved, since), address)?.map(Some))
            }
        }
    }

    /// Writes this rank's parts of the rows, or of those that steps after `since` have touched,
    /// beside the model at `address`.
    fn write_rows(
        &self,
        group: &mut dyn Group,
        (saved, since): (&SavedShards, Option<u64>),
        address: &str,
    ) -> Result<Result<ExportedTables, String>, Stopped> {
        let changes_since = since;
        let since = since.unwrap_or(0);
        let rows = match saved.are_finite() {
            true => {
                let tables = self.specs.len();
                Ok([saved.rows(tables, since), saved.touches_without_row(tables)])
            }
            false => Err("a table contains a NaN or an infinity".to_owned()),
        };
        let all: Vec<Result<[Vec<u64>; 2], String>> =
            decode_all(group.all_gather(&header::encode(&rows))?)?;
        let all: Vec<[Vec<u64>; 2]> = match all.into_iter().collect() {
            Ok(all) => all,
            Err(error) => return Ok(Err(error)),
        };
        let sums = |what: usize| -> Vec<u64> {
            let of = |table: usize| all.iter().filter_map(|counts| counts[what].get(table)).sum();
            (0..self.specs.len()).map(of).collect()
        };
        let (rows, touches_without_row) = (sums(0), sums(1));
        let parts = parts_of(&self.specs, &rows);
        let mut mine: Result<Vec<(u32, ExportedPart)>, String> = Ok(Vec::new());
        let (rank, world_size) = (group.rank() as u32, group.world_size() as u32);
        for first in (0..parts).step_by(world_size as usize) {
            let of_rank =
                |rank| Some(Part { index: first + rank, parts }).filter(|p| p.index < parts);
            let message =
                |rank| of_rank(rank).map(|part| saved.encode_part(&self.specs, part, since));
            let messages = (0..world_size).map(|rank| message(rank).unwrap_or_default());
            let received = exchange(group, messages.collect::<Vec<_>>())?;
            if let (Some(part), Ok(written)) = (of_rank(rank), &mut mine) {
                let rows = collect(&self.specs, &received)?;
                match write_part(address, part, &self.specs, rows) {
                    Ok(done) => written.push((part.index, done)),
                    // The other ranks' parts are exchanged nevertheless.
                    Err(error) => mine = Err(error.to_string()),
                }
            }
        }
        let all: Vec<Result<Vec<(u32, ExportedPart)>, String>> =
            decode_all(group.all_gather(&header::encode(&mine))?)?;
        let all: Result<Vec<Vec<(u32, ExportedPart)>>, String> = all.into_iter().collect();
        Ok(all.map(|all| {
            let mut parts: Vec<(u32, ExportedPart)> = all.into_iter().flatten().collect();
            parts.sort_by_key(|(index, _)| *index);
            let parts = parts.into_iter().map(|(_, part)| part).collect();
            let (tables, seed) = (self.specs.to_vec(), self.owned().seed());
            ExportedTables { tables, seed, touches_without_row, changes_since, parts }
        }))
    }
}
