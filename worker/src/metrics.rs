//! What a model reports of a batch.

use std::collections::BTreeMap;

/// Any error of the user's code. Its text is reported in the summary, with the worker and the
/// records that it was processing.
pub type UserError = Box<dyn std::error::Error + Send + Sync>;

/// A loss of a batch, and how it depends on the number of records: a mean does not, a sum grows
/// with it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Loss<T = f64> {
    /// Mean over the records.
    Mean(T),
    /// Sum over the records.
    Sum(T),
}

impl Loss {
    /// The sum over `records` records.
    #[must_use]
    pub fn sum_over(self, records: usize) -> f64 {
        match self {
            Self::Mean(mean) => mean * records as f64,
            Self::Sum(sum) => sum,
        }
    }
}

/// The metrics that [`Model::evaluate`](crate::Model::evaluate) reports. Users see their means over
/// all records of the validation data.
#[derive(Debug)]
pub struct Metrics<'a> {
    sums: &'a mut BTreeMap<String, f64>,
    records: usize,
}

impl<'a> Metrics<'a> {
    pub(crate) fn new(sums: &'a mut BTreeMap<String, f64>, records: usize) -> Self {
        Self { sums, records }
    }

    /// Number of records in the batch.
    pub fn records(&self) -> usize {
        self.records
    }

    /// Adds `mean`, a mean over the batch's records, to the metric `name`.
    pub fn add_mean(&mut self, name: &str, mean: f64) {
        self.add_sum(name, mean * self.records as f64);
    }

    /// Adds `sum`, a sum over the batch's records, to the metric `name`.
    pub fn add_sum(&mut self, name: &str, sum: f64) {
        match self.sums.get_mut(name) {
            Some(before) => *before += sum,
            None => drop(self.sums.insert(name.to_owned(), sum)),
        }
    }
}
