//! What a job exports to trackers of experiments: scalars over steps.

use crate::job::{Snapshot, StepTimes};

/// The points of one job, from one snapshot to the next.
#[derive(Debug, Default)]
pub(crate) struct Scalars {
    /// Step of the newest point.
    step: Option<u64>,
    /// Step times at the newest point.
    times: StepTimes,
    /// Step of the newest evaluation.
    evaluated: Option<u64>,
}

/// Values of one step, by name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) step: u64,
    pub(crate) values: Vec<(String, f64)>,
}

impl Scalars {
    /// The points that a snapshot adds: one for its evaluation and one for its step, unless they
    /// are known.
    pub(crate) fn next(&mut self, snapshot: &Snapshot) -> Vec<Point> {
        let status = &snapshot.status;
        let mut points = Vec::new();
        if let Some(evaluated) =
            status.evaluated.as_ref().filter(|e| self.evaluated != Some(e.step))
        {
            self.evaluated = Some(evaluated.step);
            let means = evaluated.metrics.iter();
            let means =
                means.filter_map(|(name, mean)| Some((format!("validation/{name}"), (*mean)?)));
            points.push(Point { step: evaluated.step, values: means.collect() });
        }
        if status.step == 0 || self.step == Some(status.step) {
            return points;
        }
        self.step = Some(status.step);
        let times = snapshot.counters.times;
        let before = std::mem::replace(&mut self.times, times);
        let steps = times.steps.saturating_sub(before.steps);
        let mean_ms = |us: u64, before: u64| {
            (steps > 0).then(|| us.saturating_sub(before) as f64 / steps as f64 / 1000.0)
        };
        let values = [
            ("loss", status.loss),
            ("learning_rate", status.learning_rate),
            ("records_per_s", Some(status.records_per_s)),
            ("workers", Some(status.members().count() as f64)),
            ("step_ms", mean_ms(times.step_us, before.step_us)),
            ("all_reduce_ms", mean_ms(times.reduce_us, before.reduce_us)),
        ];
        let values = values.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        points.push(Point { step: status.step, values: values.collect() });
        points
    }
}
