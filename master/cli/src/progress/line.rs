//! One line that describes the state of a job, as text of a given width and as JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_master::job::{Time, format_value};
use elasticdl_proto::Status;
use serde::Serialize;
use tracing::info;

use super::text::{format_duration, format_learning_rate, format_rate, one_line};

/// The values of one line of progress. The names of its fields are a public format.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ProgressLine {
    state: String,
    /// Completed part of the job, 0 to 1.
    pub(crate) progress: f64,
    /// The current epoch, from 1.
    epoch: u32,
    epochs: u32,
    pub(crate) step: u64,
    loss: Option<f64>,
    /// Metrics of the program.
    metrics: BTreeMap<String, f64>,
    learning_rate: Option<f64>,
    records_per_s: f64,
    eta_s: Option<f64>,
    /// Size of the group.
    workers: usize,
    workers_desired: u32,
    generation: u64,
    /// Whether there is more to say than the state.
    #[serde(skip)]
    has_begun: bool,
    /// Whether the epoch is known: a master that resumes a job knows its step before its ledger.
    #[serde(skip)]
    knows_epoch: bool,
}

impl ProgressLine {
    pub(crate) fn of(status: &Status) -> Self {
        Self {
            state: status.state.clone().into_owned(),
            progress: status.progress,
            epoch: status.epoch.saturating_add(1).min(status.epochs),
            epochs: status.epochs,
            step: status.step,
            loss: status.loss,
            metrics: status.metrics.clone(),
            learning_rate: status.learning_rate,
            records_per_s: status.records_per_s,
            eta_s: status.eta_s,
            workers: status.members().filter(|member| !member.serves_tables).count(),
            workers_desired: status.workers_desired,
            generation: status.generation.0,
            has_begun: status.records_expected > 0 && status.generation.0 > 0,
            knows_epoch: status.step == 0 || status.records_counted > 0,
        }
    }

    /// Whether the line is of use after one at `last`, where each stays. Before the first step it
    /// would contain no information.
    pub(super) fn is_due(&self, now: Time, last: Option<Time>) -> bool {
        let is_due = match last {
            Some(last) => now.since(last) >= INTERVAL,
            None => self.step > 0 || now.0 >= INTERVAL,
        };
        is_due && self.knows_epoch
    }

    /// Writes the line to the log.
    pub(super) fn log(&self) {
        let Self { state, progress, epoch, epochs, step, loss, learning_rate, .. } = self;
        let Self { records_per_s, eta_s, workers, workers_desired, .. } = self;
        info!(
            state,
            progress,
            epoch,
            epochs,
            step,
            loss,
            learning_rate,
            records_per_s,
            eta_s,
            workers,
            workers_desired,
            "progress"
        );
    }

    /// The line as text of at most `width` characters: parts that do not fit are omitted, the
    /// least important ones first.
    pub(crate) fn to_text(&self, width: usize) -> String {
        if !self.has_begun {
            return one_line(&self.state);
        }
        let mut parts = self.parts();
        while length(&parts) > width {
            let Some(least) = (0..parts.len()).max_by_key(|&part| parts[part].0) else { break };
            if parts[least].0 == 0 {
                break;
            }
            parts.remove(least);
        }
        parts.into_iter().map(|(_, text)| text).collect::<Vec<_>>().join(SEPARATOR)
    }

    /// The parts of the text, in order, each with its rank: a part with a higher rank is omitted
    /// first, a part with rank 0 never.
    fn parts(&self) -> Vec<(u8, String)> {
        let workers = match (self.workers, self.workers_desired) {
            (1, 1) => "1 worker".into(),
            (workers, desired) if workers as u64 == u64::from(desired) => {
                format!("{workers} workers")
            }
            (workers, desired) => format!("{workers} of {desired} workers"),
        };
        let rate = format_rate(self.records_per_s);
        let metric = |(name, &mean): (&String, &f64)| {
            (1, format!("{} {}", one_line(name), format_value(mean)))
        };
        let before = [
            (self.state != "running").then(|| (0, one_line(&self.state))),
            (self.epochs > 1).then(|| (4, format!("epoch {}/{}", self.epoch, self.epochs))),
            Some((0, format!("step {}", self.step))),
            self.loss.map(|loss| (1, format!("loss {}", format_value(loss)))),
        ];
        let after = [
            self.learning_rate.map(|rate| (3, format!("lr {}", format_learning_rate(rate)))),
            Some((5, format!("{rate} records/s"))),
            Some((6, workers)),
            self.eta_s.map(|seconds| (2, format!("{} left", format_duration(seconds)))),
            Some((7, format!("generation {}", self.generation))),
        ];
        let metrics = self.metrics.iter().map(metric);
        before.into_iter().flatten().chain(metrics).chain(after.into_iter().flatten()).collect()
    }
}

fn length(parts: &[(u8, String)]) -> usize {
    let separators = SEPARATOR.chars().count() * parts.len().saturating_sub(1);
    parts.iter().map(|(_, text)| text.chars().count()).sum::<usize>() + separators
}

/// Shortest time between lines that stay.
const INTERVAL: Duration = Duration::from_secs(5);
const SEPARATOR: &str = " · ";

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::progress) fn line() -> ProgressLine {
        ProgressLine {
            state: "running".into(),
            progress: 0.5,
            epoch: 2,
            epochs: 3,
            step: 120,
            loss: Some(0.53),
            metrics: BTreeMap::new(),
            learning_rate: Some(0.001),
            records_per_s: 12_345.0,
            eta_s: Some(3725.0),
            workers: 2,
            workers_desired: 2,
            generation: 3,
            has_begun: true,
            knows_epoch: true,
        }
    }

    #[test]
    fn a_resumed_job_is_shown_once_its_epoch_is_known() {
        let knows_epoch = |step, records_counted| {
            ProgressLine::of(&Status { step, records_counted, ..Status::default() }).knows_epoch
        };
        assert!(knows_epoch(0, 0) && !knows_epoch(7, 0) && knows_epoch(7, 70));
    }

    #[test]
    fn a_narrow_line_keeps_its_most_important_parts() {
        let shown = |width| line().to_text(width);
        let all = "epoch 2/3 · step 120 · loss 0.5300 · lr 0.001 · 12.3 k records/s · 2 workers · \
            62 min left · generation 3";
        assert_eq!(shown(all.chars().count()), all);
        let narrower = "epoch 2/3 · step 120 · loss 0.5300 · lr 0.001 · 12.3 k records/s · \
            2 workers · 62 min left";
        assert_eq!(shown(all.chars().count() - 1), narrower);
        assert_eq!(shown(62), "epoch 2/3 · step 120 · loss 0.5300 · lr 0.001 · 62 min left");
        assert_eq!(shown(50), "step 120 · loss 0.5300 · lr 0.001 · 62 min left");
        assert_eq!(shown(0), "step 120");
        for width in 8..120 {
            assert!(shown(width).chars().count() <= width, "{width}");
        }
    }

    #[test]
    fn a_line_says_what_differs_from_the_usual() {
        let one_epoch = ProgressLine { epochs: 1, epoch: 1, eta_s: None, ..line() };
        let text =
            "step 120 · loss 0.5300 · lr 0.001 · 12.3 k records/s · 2 workers · generation 3";
        assert_eq!(one_epoch.to_text(100), text);
        let metrics = [("accuracy".into(), 0.9), ("norm".into(), 2.0)].into();
        let more = ProgressLine { metrics, ..one_epoch.clone() };
        assert_eq!(more.to_text(40), "step 120 · loss 0.5300 · accuracy 0.9000");
        let waiting = ProgressLine {
            state: "waiting".into(),
            workers: 1,
            loss: None,
            learning_rate: None,
            ..one_epoch
        };
        let text = "waiting · step 120 · 12.3 k records/s · 1 of 2 workers · generation 3";
        assert_eq!(waiting.to_text(100), text);
        let starting = ProgressLine { state: "starting".into(), has_begun: false, ..waiting };
        assert_eq!(starting.to_text(100), "starting");
    }
}
