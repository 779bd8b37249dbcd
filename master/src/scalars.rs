//! What a job exports to trackers of experiments: scalars over steps.

use elasticdl_proto::Status;

use crate::job::{Snapshot, StepTimes};

/// The points of one job, from one snapshot to the next.
#[derive(Debug, Default)]
pub(crate) struct Scalars {
    /// Step of the newest point.
    step: Option<u64>,
    /// Step times at the newest point.
    times: StepTimes,
    /// Number of the newest evaluation.
    evaluated: u64,
}

/// Values of one step, by name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) step: u64,
    pub(crate) values: Vec<(String, f64)>,
    /// Whether it is an evaluation, of which none may be dropped.
    pub(crate) is_evaluation: bool,
}

impl Scalars {
    /// The points that a snapshot adds: one for each new evaluation, and one for its step, if it is
    /// another one.
    pub(crate) fn next(&mut self, snapshot: &Snapshot) -> Vec<Point> {
        let status = &snapshot.status;
        let mut points = Vec::new();
        let known = snapshot.evaluations.partition_point(|(number, _)| *number <= self.evaluated);
        for (number, evaluated) in &snapshot.evaluations[known..] {
            self.evaluated = *number;
            let means = evaluated.metrics.iter();
            let means =
                means.filter_map(|(name, mean)| Some((format!("validation/{name}"), (*mean)?)));
            let (step, values) = (evaluated.step, means.collect());
            points.push(Point { step, values, is_evaluation: true });
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
            ("workers", workers(status)),
            ("step_ms", mean_ms(times.step_us, before.step_us)),
            ("all_reduce_ms", mean_ms(times.reduce_us, before.reduce_us)),
        ];
        let values = values.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        let metrics = status.metrics.iter().map(|(name, &mean)| (format!("training/{name}"), mean));
        let (step, values) = (status.step, values.chain(metrics).collect());
        points.push(Point { step, values, is_evaluation: false });
        points
    }
}

/// Number of workers; between two groups, and at the end of the job, that of the last group.
fn workers(status: &Status) -> Option<f64> {
    let last = status.memberships.last().map(|change| f64::from(change.world_size));
    match status.members().count() {
        0 => last,
        members => Some(members as f64),
    }
}
