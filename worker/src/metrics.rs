//! What a model reports of a batch.

use std::cell::RefCell;
use std::collections::BTreeMap;

use elasticdl_proto::limits::{METRIC_NAME_BYTES_MAX, METRICS_MAX};
use elasticdl_tables::BatchRows;

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
    pub(crate) rows: Option<&'a mut BatchRows>,
}

impl<'a> Metrics<'a> {
    pub(crate) fn new(sums: &'a mut BTreeMap<String, f64>, records: usize) -> Self {
        Self { sums, records, rows: None }
    }

    /// With rows of the model's tables.
    pub(crate) fn with_rows(self, rows: Option<&'a mut BatchRows>) -> Self {
        Self { rows, ..self }
    }

    /// The rows of the batch's [ids](crate::TableModel::ids).
    ///
    /// # Panics
    /// The model has no [tables](crate::TableModel).
    pub fn rows(&mut self) -> &mut BatchRows {
        self.rows.as_deref_mut().expect("a model with tables has rows")
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

/// Reports `mean`, a mean over the records of a batch, as the metric `name` of the training. To be
/// called by [`Model::gradients`](crate::Model::gradients), or a loss, on its own thread; elsewhere
/// it does nothing.
///
/// Users see the mean over all records of the steps since the last report, smoothed like the loss:
/// in the status, the progress, TensorBoard, MLflow and the Prometheus metrics. So each batch
/// reports the same metrics. At most 100, with names of 1 to 100 bytes; more end the job.
pub fn report_mean(name: &str, mean: f64) {
    report(name, |records| mean * records as f64);
}

/// Like [`report_mean`], with a `sum` over the records of the batch.
pub fn report_sum(name: &str, sum: f64) {
    report(name, |_| sum);
}

fn report(name: &str, sum: impl FnOnce(usize) -> f64) {
    REPORTED.with_borrow_mut(|Reported { records, sums }| {
        if let Some(records) = *records {
            Metrics::new(sums, records).add_sum(name, sum(records));
        }
    });
}

/// Metrics of the gradient that this thread computes, in sums over its records.
#[derive(Default)]
struct Reported {
    /// Number of records of the batch; `None` between two batches.
    records: Option<usize>,
    sums: BTreeMap<String, f64>,
}

thread_local! {
    static REPORTED: RefCell<Reported> = RefCell::default();
}

/// Runs `compute`, which adds the gradient of a batch of `records` records.
pub(crate) fn reporting<T>(records: usize, compute: impl FnOnce() -> T) -> T {
    REPORTED.with_borrow_mut(|reported| reported.records = Some(records));
    let result = compute();
    REPORTED.with_borrow_mut(|reported| reported.records = None);
    result
}

/// Takes what was reported since the last call.
///
/// # Errors
/// The limit that it exceeds.
pub(crate) fn take_reported() -> Result<BTreeMap<String, f64>, String> {
    let sums = REPORTED.with_borrow_mut(std::mem::take).sums;
    let is_wrong = |name: &&String| name.is_empty() || name.len() > METRIC_NAME_BYTES_MAX;
    if let Some(name) = sums.keys().find(is_wrong) {
        return Err(format!(
            "gradients() reports a metric with a name of {} bytes; it must have 1 to \
             {METRIC_NAME_BYTES_MAX}",
            name.len()
        ));
    }
    match sums.len() {
        0..=METRICS_MAX => Ok(sums),
        count => Err(format!("gradients() reports {count} metrics; at most {METRICS_MAX} are")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_batches_add_up_and_wrong_ones_are_refused() {
        report_mean("early", 1.0);
        assert_eq!(reporting(4, || report_mean("accuracy", 0.5)), ());
        reporting(2, || {
            report_sum("accuracy", 1.0);
            report_mean("norm", 3.0);
        });
        report_sum("late", 1.0);
        let expected = [("accuracy".to_owned(), 3.0), ("norm".to_owned(), 6.0)];
        assert_eq!(take_reported(), Ok(expected.into()));
        assert_eq!(take_reported(), Ok(BTreeMap::new()));
        let name = "x".repeat(101);
        reporting(1, || report_mean(&name, 1.0));
        assert!(take_reported().unwrap_err().contains("a name of 101 bytes"));
        reporting(1, || (0..101).for_each(|i| report_mean(&i.to_string(), 1.0)));
        assert!(take_reported().unwrap_err().contains("101 metrics"));
    }
}
