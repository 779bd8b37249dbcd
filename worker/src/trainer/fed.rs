//! Batches that are built and wait for their rows.

use elasticdl_data::Reader;
use elasticdl_proto::RecordRange;
use elasticdl_tables::{Answered, BatchRows, Ids};

use super::feed::feed;
use crate::machine::{ReadError, Records};
use crate::model::Model;

/// A batch with the number and the positions of its records.
pub(super) type WaitingBatch<B> = (B, usize, Vec<RecordRange>);

/// Batches that wait for their rows.
#[derive(Debug)]
pub(super) struct WaitingBatches<B> {
    pub(super) batches: Vec<WaitingBatch<B>>,
    pub(super) ids: Ids,
}

/// The records of a step, fed before it begins.
#[derive(Debug)]
pub(crate) struct FedStep<B> {
    pub(super) ranges: Vec<RecordRange>,
    /// The batches of each micro-batch, or of all records together if sums may depend on the ranks.
    pub(super) pieces: Vec<(Vec<RecordRange>, WaitingBatches<B>)>,
}

/// Rows that were looked up for the next step.
#[derive(Debug)]
pub(super) struct EarlyRows {
    pub(super) rows: BatchRows,
    /// What this rank has answered the others.
    pub(super) answered: Answered,
}

impl<B> WaitingBatches<B> {
    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Builds the batch of the records at these positions.
    pub(super) fn push<M: Model<Batch = B>>(
        &mut self,
        model: &mut M,
        records: Vec<<M::Reader as Reader>::Record>,
        positions: Vec<RecordRange>,
    ) -> Result<(), String> {
        let count = records.len();
        let batch = feed(model, records, &mut self.ids)?;
        self.batches.push((batch, count, positions));
        Ok(())
    }
}

impl<B> FedStep<B> {
    /// The records of `ranges` that are not fed, and so are still to be read.
    pub(super) fn without(&self, ranges: &[RecordRange]) -> Vec<RecordRange> {
        ranges.iter().filter(|range| !self.ranges.contains(range)).copied().collect()
    }

    /// As [`Records::readable`], of which these were read before.
    pub(super) fn readable<R>(
        &self,
        records: &dyn Records<R>,
        upcoming: &[RecordRange],
    ) -> Result<Option<u64>, ReadError> {
        let fed: u64 = self.ranges.iter().map(RecordRange::len).sum();
        Ok(records.readable(&self.without(upcoming))?.map(|readable| fed + readable))
    }
}
