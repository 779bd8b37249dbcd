//! What a job's training reports of itself, as means per record, smoothed over the last reports.

use std::collections::BTreeMap;

use elasticdl_proto::limits::METRICS_MAX;

/// Smoothed means.
#[derive(Debug, Default)]
pub(crate) struct Smoothed {
    pub(crate) loss: Option<f64>,
    /// Those of the program's metrics.
    pub(crate) metrics: BTreeMap<String, f64>,
}

impl Smoothed {
    /// Notes the mean loss of a report, which is finite.
    pub(super) fn note_loss(&mut self, loss: f64) {
        self.loss = Some(mix(self.loss, loss));
    }

    /// Notes the sums of the program's metrics over the records of a report.
    pub(super) fn note_metrics(&mut self, records: u64, sums: &BTreeMap<String, f64>) {
        for (name, sum) in sums {
            // A report without records gives no mean.
            let mean = sum / records as f64;
            let known = self.metrics.get(name).copied();
            if mean.is_finite() && (known.is_some() || self.metrics.len() < METRICS_MAX) {
                self.metrics.insert(name.clone(), mix(known, mean));
            }
        }
    }
}

fn mix(before: Option<f64>, mean: f64) -> f64 {
    let before = before.unwrap_or(mean);
    before + (mean - before) * SMOOTHING
}

const SMOOTHING: f64 = 0.2;
