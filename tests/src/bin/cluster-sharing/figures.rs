//! What is measured in a case, and how it is shown.

use elasticdl_tests::{jain, print, quantile};
use serde_json::{Value, json};

use crate::calls::Calls;

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
}

/// Means of ten passes, recomputed from the logs of PaddlePaddle EDL's own experiments.
const EDL_CASE_1: &str =
    "EDL: 191 of 200 jobs started, 47.2 s pending, Jain 0.437, 253 workers at the end";
const EDL_CASE_2: &str = "EDL: 49.1 s pending, the service never back in nine of ten passes";
