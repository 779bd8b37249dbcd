//! The benchmark's result, as JSON.

use elasticdl_tests::churn::{Kind, Measured};
use elasticdl_tests::{print, quantile, spread};
use serde_json::{Map, Value, json};

use crate::Arguments;
use crate::goodput::Goodput;

/// All measurements.
#[derive(Debug, Default)]
pub(crate) struct Report {
    kinds: Vec<(Kind, Measured)>,
    goodput: Option<Goodput>,
}

impl Report {
    pub(crate) fn add(&mut self, kind: Kind, measured: Measured) {
        print(&json!({ kind.name(): measured.json() }).to_string());
        self.kinds.push((kind, measured));
    }

    pub(crate) fn add_goodput(&mut self, goodput: Goodput) {
        self.goodput = Some(goodput);
    }

    pub(crate) fn finish(&self, arguments: &Arguments) -> Value {
        let all = |values: fn(&Measured) -> &[f64]| {
            self.kinds
                .iter()
                .flat_map(|(_, measured)| values(measured))
                .copied()
                .collect::<Vec<f64>>()
        };
        let mut steps: Vec<f64> =
            self.kinds.iter().map(|(_, measured)| measured.median_step).collect();
        let mut latencies = all(|measured| &measured.latencies);
        let kinds: Map<String, Value> = self
            .kinds
            .iter()
            .map(|(kind, measured)| (kind.name().to_owned(), measured.json()))
            .collect();
        let lost = self
            .kinds
            .iter()
            .map(|(_, m)| m.records_lost)
            .chain(self.goodput.iter().map(|g| g.records_lost));
        let repeated = self
            .kinds
            .iter()
            .map(|(_, m)| m.records_repeated)
            .chain(self.goodput.iter().map(|g| g.records_repeated));
        json!({
            "workers": arguments.workers,
            "params": arguments.params,
            "median_step_ms": quantile(&mut steps, 0.5),
            "kinds": kinds,
            "join_latency_ms": spread(&mut latencies),
            "goodput": self.goodput.as_ref().map(Goodput::part),
            "goodput_windows": self.goodput.as_ref().map(Goodput::parts),
            "goodput_steps_lost": self.goodput.as_ref().map(|goodput| goodput.steps_lost),
            "records_lost": lost.sum::<u64>(),
            "records_repeated": repeated.sum::<u64>(),
            "cores": std::thread::available_parallelism().map_or(0, usize::from),
            "load": load(),
        })
    }
}

/// Load average of the machine over the last minute.
fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0.0)
}
