//! What is measured in a case, and how it is shown.

use std::fs;
use std::path::Path;

use elasticdl_tests::{Curve, Plot, print, quantile};
use serde_json::{Value, json};

use crate::Fault;
use crate::calls::Calls;

/// The cluster at one time.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) at_s: f64,
    /// Running workers of each job.
    pub(crate) workers: Vec<usize>,
    /// Running pods of the service.
    pub(crate) service: usize,
    /// Worker pods without a node.
    pub(crate) pending: usize,
}

/// Figures of a case.
#[derive(Debug)]
pub(crate) struct Figures {
    pub(crate) seconds: f64,
    /// For each job, the time from its submission until it had its least number of workers; `None`
    /// if it never had.
    pub(crate) pending_s: Vec<Option<f64>>,
    /// Running workers of each job at the end.
    pub(crate) workers_end: Vec<usize>,
    /// Workers that were deleted while they ran.
    pub(crate) workers_taken: u64,
    pub(crate) has_service: bool,
    /// Time from the demand until the service had its pods again; `None` if it had not in time.
    pub(crate) service_back_s: Option<f64>,
    pub(crate) records_lost: u64,
    pub(crate) calls: Calls,
    pub(crate) samples: Vec<Sample>,
}

impl Figures {
    fn started(&self) -> Vec<f64> {
        self.pending_s.iter().flatten().copied().collect()
    }

    fn pending_s_mean(&self) -> f64 {
        let started = self.started();
        started.iter().sum::<f64>() / started.len().max(1) as f64
    }

    /// Prints the figures beside those of EDL, and the targets.
    pub(crate) fn print(&self, number: u8) {
        let mut started = self.started();
        let edl = if number == 1 { EDL_CASE_1 } else { EDL_CASE_2 };
        print(&format!("case {number}, {:.0} s ({edl})", self.seconds));
        print(&format!("  jobs that started       {} of {}", started.len(), self.pending_s.len()));
        print(&format!(
            "  pending                 {:.1} s mean, {:.1} s max (target: 8 s mean)",
            self.pending_s_mean(),
            quantile(&mut started, 1.0)
        ));
        let workers: usize = self.workers_end.iter().sum();
        print(&format!("  workers at the end      {workers}: {:?}", self.workers_end));
        print(&format!("  Jain's index            {:.3} (target: 0.99)", jain(&self.workers_end)));
        print(&format!("  running workers deleted {}", self.workers_taken));
        if self.has_service {
            let back = self.service_back_s;
            let back = back.map_or_else(|| "never".into(), |s| format!("after {s:.1} s"));
            print(&format!("  service is back         {back} (target: 12 s)"));
        }
        print(&format!("  records lost            {} (target: 0)", self.records_lost));
        let Calls { count, per_s, per_s_10, peak, .. } = &self.calls;
        print(&format!("  API calls of masters    {count}: {per_s:.1} per second (target: 50),"));
        print(&format!(
            "                          {per_s_10:.1} in the busiest 10 s, {peak} in the busiest \
             second"
        ));
        print(&format!("                          {}", self.calls_by_kind()));
    }

    fn calls_by_kind(&self) -> String {
        self.calls
            .kinds
            .iter()
            .map(|(kind, n)| format!("{kind} {n}"))
            .collect::<Vec<_>>()
            .join(", ")
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "jobs": self.pending_s.len(),
            "started": self.started().len(),
            "pending_s_mean": self.pending_s_mean(),
            "pending_s": self.pending_s,
            "jain": jain(&self.workers_end),
            "workers_end": self.workers_end.iter().sum::<usize>(),
            "workers_end_by_job": self.workers_end,
            "workers_deleted": self.workers_taken,
            "service_back_s": self.service_back_s,
            "records_lost": self.records_lost,
            "api_calls_per_s": self.calls.per_s,
            "api_calls_per_s_busiest_10_s": self.calls.per_s_10,
            "api_calls_busiest_second": self.calls.peak,
        })
    }

    /// Draws the workers of each job, and of the cluster, over time.
    pub(crate) fn plot(&self, number: u8, folder: &Path) -> Result<(), Fault> {
        fs::create_dir_all(folder)?;
        let curve = |color, width, value: &dyn Fn(&Sample) -> usize| {
            let points = self.samples.iter().map(|s| (s.at_s, value(s) as f64)).collect();
            Curve { points, color, width, dashes: None }
        };
        let of_job = |job: usize| {
            curve(COLORS[job % COLORS.len()], 1.2, &|sample: &Sample| sample.workers[job])
        };
        let end = format!("{:.0} s", self.seconds);
        let jobs = Plot {
            title: format!("case {number}: workers of each job"),
            end: end.clone(),
            decimals: 0,
            curves: (0..self.workers_end.len()).map(of_job).collect(),
        };
        fs::write(folder.join(format!("case{number}-jobs.svg")), jobs.to_svg())?;
        let mut curves = vec![
            curve(COLORS[0], 2.0, &|sample| sample.workers.iter().sum()),
            curve(COLORS[1], 1.2, &|sample| sample.pending),
        ];
        let mut title = format!("case {number}: workers (blue), pending pods (orange)");
        if self.has_service {
            title += ", pods of the service (green)";
            curves.push(curve(COLORS[2], 2.0, &|sample| sample.service));
        }
        let cluster = Plot { title, end, decimals: 0, curves };
        fs::write(folder.join(format!("case{number}-cluster.svg")), cluster.to_svg())?;
        Ok(())
    }
}

/// Jain's fairness index: 1 if all values are equal, 1/n if one of n has everything; 0 if no value
/// is above 0.
fn jain(values: &[usize]) -> f64 {
    let sum: f64 = values.iter().map(|&value| value as f64).sum();
    let squares: f64 = values.iter().map(|&value| (value * value) as f64).sum();
    if squares > 0.0 { sum * sum / (values.len() as f64 * squares) } else { 0.0 }
}

/// Means of ten passes, recomputed from the logs of PaddlePaddle EDL's own experiments.
const EDL_CASE_1: &str =
    "EDL: 191 of 200 jobs started, 47.2 s pending, Jain 0.437, 253 workers at the end";
const EDL_CASE_2: &str = "EDL: 49.1 s pending, the service never back in nine of ten passes";
const COLORS: [&str; 10] = [
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f",
    "#bcbd22", "#17becf",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jains_index_is_1_for_equal_shares_and_1_of_n_for_a_single_owner() {
        assert!((jain(&[20; 20]) - 1.0).abs() < 1e-9);
        assert!((jain(&[8, 0, 0, 0]) - 0.25).abs() < 1e-9);
        assert!((jain(&[1, 3]) - 0.8).abs() < 1e-9);
        assert_eq!((jain(&[0, 0]), jain(&[])), (0.0, 0.0));
    }
}
