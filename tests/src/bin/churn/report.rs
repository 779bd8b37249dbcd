//! The benchmark's result, as a table and as JSON.

use elasticdl_tests::churn::{Kind, Measured, PHASES, Phases};
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
        print(&line(&measured, kind.name()));
        self.kinds.push((kind, measured));
    }

    pub(crate) fn add_goodput(&mut self, goodput: Goodput) {
        let mut parts = goodput.parts();
        print(&format!(
            "goodput {:.1} % ({:.1} to {:.1} % over {} windows, {} kills; {} steps lost; \
             {} records lost, {} repeated)",
            goodput.part() * 100.0,
            quantile(&mut parts, 0.0) * 100.0,
            quantile(&mut parts, 1.0) * 100.0,
            parts.len(),
            goodput.kills,
            goodput.steps_lost,
            goodput.records_lost,
            goodput.records_repeated,
        ));
        self.goodput = Some(goodput);
    }

    /// Prints the head of the table.
    pub(crate) fn print_head(arguments: &Arguments) {
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let Arguments { workers, params, events, .. } = arguments;
        print(&format!(
            "{workers} workers of {params} parameters, {events} events of each kind; {cores} \
             cores, load {:.1}: with more processes than free cores the figures include the \
             machine's other work, which `before` estimates",
            load(),
        ));
        print(
            "Milliseconds. gap: the longest time that a survivor saw between two steps, less the \
             median step. before: the same in an equally long time just before each event. \
             switch: when the joiner becomes a member. latency: from the joiner's start until its \
             first contribution is committed.",
        );
        print(&format!(
            "{:<6} {:>6} {:>7} {:>7} {:>7} {:>7} {:>15} {:>15} {:>15} {:>5} {:>8} {:>9}",
            "",
            "events",
            "step",
            "gap p50",
            "p99",
            "max",
            "before p50/max",
            "switch p50/max",
            "latency p50/max",
            "lost",
            "records",
            "repeated",
        ));
    }

    /// The result as JSON; prints the parts of the gaps as a table.
    pub(crate) fn finish(&self, arguments: &Arguments) -> Value {
        print(&format!(
            "\n{:<14}{}   (median parts of the gap, ms)",
            "",
            PHASES.map(|p| format!("{p:>11}")).concat()
        ));
        for (kind, measured) in &self.kinds {
            let name = kind.name();
            print(&format!("{name:<14}{}", row(&measured.phases)));
            if *kind != Kind::Join {
                print(&format!(
                    "{:<14}{}",
                    format!("{name}, return"),
                    row(&measured.switch_phases)
                ));
            }
        }
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
            "records_lost": lost.sum::<u64>(),
            "records_repeated": repeated.sum::<u64>(),
            "cores": std::thread::available_parallelism().map_or(0, usize::from),
            "load": load(),
        })
    }
}

/// The row of a kind of event.
fn line(measured: &Measured, name: &str) -> String {
    let gap = |part| quantile(&mut measured.gaps.clone(), part);
    let pair = |values: &[f64]| {
        let mut values = values.to_vec();
        format!("{:.1} / {:.1}", quantile(&mut values, 0.5), quantile(&mut values, 1.0))
    };
    format!(
        "{name:<6} {:>6} {:>7.1} {:>7.1} {:>7.1} {:>7.1} {:>15} {:>15} {:>15} {:>5} {:>8} \
         {:>9}",
        measured.gaps.len(),
        measured.median_step,
        gap(0.5),
        gap(0.99),
        gap(1.0),
        pair(&measured.quiet),
        pair(&measured.switches),
        pair(&measured.latencies),
        measured.steps_lost,
        measured.records_lost,
        measured.records_repeated,
    )
}

fn row(phases: &Phases) -> String {
    phases.iter().map(|values| format!("{:>11.2}", quantile(&mut values.clone(), 0.5))).collect()
}

/// Load average of the machine over the last minute.
fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0.0)
}
