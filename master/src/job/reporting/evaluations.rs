//! Information about evaluations. The group makes them, and decides what follows; nothing here
//! influences the job.

use std::collections::BTreeMap;

pub use elasticdl_proto::{BestEvaluation, EvaluationsSummary};

use crate::job::event::Evaluated;
use crate::job::job::Job;

impl Job {
    /// The evaluations, if there is validation data.
    pub(crate) fn evaluations(&self) -> Option<EvaluationsSummary> {
        self.spec.validation.as_ref().map(|_| EvaluationsSummary {
            stopped_early: self.final_report.as_ref().is_some_and(|word| word.stopped_early),
            ..self.history.evaluations.clone()
        })
    }

    pub(crate) fn on_evaluated(&mut self, report: Evaluated) {
        let Some(spec) = &self.spec.validation else { return };
        let known = &mut self.history.evaluations;
        // A group that started from a checkpoint repeats steps.
        known.all.retain(|before| before.step < report.step);
        let Evaluated { step, records, metrics } = &report;
        let line =
            format!("step {step} evaluated on {records} records: {}", format_metrics(metrics));
        known.all.push(report);
        let is_better =
            |value: f64, best: f64| if spec.highest { value > best } else { value < best };
        let mut best: Option<BestEvaluation> =
            known.best.take().filter(|b| known.all.iter().all(|e| e.step > b.step));
        for evaluated in &known.all {
            if let Some(&Some(value)) = evaluated.metrics.get(&spec.metric)
                && best.as_ref().is_none_or(|best| is_better(value, best.value))
            {
                best = Some(BestEvaluation {
                    step: evaluated.step,
                    metric: spec.metric.clone(),
                    value,
                });
            }
        }
        known.best = best;
        let surplus = known.all.len().saturating_sub(EVALUATIONS_MAX);
        known.all.drain(..surplus);
        self.out.mark_dirty();
        self.log_event(line);
    }
}

/// Formats means for a log line.
pub(crate) fn format_metrics(metrics: &BTreeMap<String, Option<f64>>) -> String {
    let format_metrics = |(name, mean): (&String, &Option<f64>)| match mean {
        Some(mean) => format!("{name} {mean:.4}"),
        None => format!("{name} not finite"),
    };
    metrics.iter().map(format_metrics).collect::<Vec<_>>().join(", ")
}

const EVALUATIONS_MAX: usize = 1000;
