//! Curves over the age of a job, in a bounded number of points: when there are too many, two
//! neighbours become one, and further points cover twice the time.

use serde::{Deserialize, Serialize};

/// Values over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Curves {
    /// Time that a point covers, in seconds.
    pub(crate) interval_s: f64,
    /// The points, oldest first, at most [`POINTS_MAX`].
    pub(crate) points: Vec<Point>,
}

/// Values during one interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    /// Age of the job at the last sample.
    pub(crate) at_s: f64,
    /// Steps committed then.
    pub(crate) step: u64,
    /// Number of samples, which the means are over.
    pub(crate) samples: u64,
    /// Mean; `None` if it was not known.
    pub(crate) loss: Option<f64>,
    /// Of the last sample.
    pub(crate) learning_rate: Option<f64>,
    /// Mean.
    pub(crate) records_per_s: f64,
    /// Mean number of members.
    pub(crate) workers: f64,
}

impl Default for Curves {
    fn default() -> Self {
        Self { interval_s: INTERVAL_S, points: Vec::new() }
    }
}

impl Curves {
    /// Adds a sample. A sample that is older than the newest point is ignored.
    pub(crate) fn add(&mut self, sample: Point) {
        match self.points.last_mut() {
            Some(newest) if sample.at_s < newest.at_s => return,
            Some(newest) if slot(newest, self.interval_s) == slot(&sample, self.interval_s) => {
                *newest = newest.merged(&sample);
            }
            _ => self.points.push(sample),
        }
        while self.points.len() > POINTS_MAX {
            self.halve();
        }
    }

    /// Halves the resolution.
    pub(super) fn halve(&mut self) {
        self.interval_s *= 2.0;
        let points = std::mem::take(&mut self.points);
        for point in points {
            match self.points.last_mut() {
                Some(newest) if slot(newest, self.interval_s) == slot(&point, self.interval_s) => {
                    *newest = newest.merged(&point);
                }
                _ => self.points.push(point),
            }
        }
    }
}

impl Point {
    /// This point together with a later one.
    fn merged(&self, later: &Self) -> Self {
        let samples = self.samples.saturating_add(later.samples).max(1);
        let weight = later.samples as f64 / samples as f64;
        let mean = |a: f64, b: f64| a + (b - a) * weight;
        Self {
            at_s: later.at_s,
            step: later.step,
            samples,
            loss: match (self.loss, later.loss) {
                (Some(a), Some(b)) => Some(mean(a, b)),
                (a, b) => b.or(a),
            },
            learning_rate: later.learning_rate.or(self.learning_rate),
            records_per_s: mean(self.records_per_s, later.records_per_s),
            workers: mean(self.workers, later.workers),
        }
    }
}

/// Number of the interval that a point lies in.
fn slot(point: &Point, interval_s: f64) -> u64 {
    (point.at_s / interval_s) as u64
}

/// Interval of a short job: the one of snapshots.
const INTERVAL_S: f64 = 0.125;
/// More points than a chart has pixels in most windows.
pub(super) const POINTS_MAX: usize = 600;

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_s: f64, value: f64) -> Point {
        Point {
            at_s,
            step: (at_s * 10.0) as u64,
            samples: 1,
            loss: Some(value),
            learning_rate: Some(value),
            records_per_s: value,
            workers: value,
        }
    }

    #[test]
    fn a_long_job_has_few_points_that_cover_all_of_it() {
        let mut curves = Curves::default();
        let samples = 100_000;
        for number in 0..samples {
            curves.add(sample(f64::from(number) / 10.0, f64::from(number)));
            assert!(curves.points.len() <= POINTS_MAX);
        }
        let count: u64 = curves.points.iter().map(|point| point.samples).sum();
        assert_eq!(count, u64::from(samples as u32));
        assert!(curves.points.len() > POINTS_MAX / 3, "{}", curves.points.len());
        let sum: f64 = curves.points.iter().map(|p| p.records_per_s * p.samples as f64).sum();
        let expected = f64::from(samples) * f64::from(samples - 1) / 2.0;
        assert!((sum / expected - 1.0).abs() < 1e-9, "{sum} {expected}");
        assert!(curves.points.is_sorted_by(|a, b| a.at_s < b.at_s));
        let interval_s = curves.interval_s;
        let times = curves.points.windows(2).map(|pair| pair[1].at_s - pair[0].at_s);
        assert!(times.into_iter().all(|time| time <= interval_s * 1.5));
        assert_eq!(curves.points.last().unwrap().at_s, f64::from(samples - 1) / 10.0);
    }

    #[test]
    fn samples_of_one_interval_become_their_mean() {
        let mut curves = Curves::default();
        for (at_s, value) in [(0.0, 1.0), (0.05, 2.0), (0.1, 6.0)] {
            curves.add(sample(at_s, value));
        }
        let [point] = curves.points[..] else { panic!("{curves:?}") };
        assert_eq!((point.at_s, point.samples), (0.1, 3));
        assert_eq!((point.loss, point.learning_rate), (Some(3.0), Some(6.0)));
        curves.add(Point { loss: None, ..sample(0.11, 0.0) });
        assert_eq!(curves.points[0].loss, Some(3.0));
    }

    #[test]
    fn time_never_goes_back() {
        let mut curves = Curves::default();
        curves.add(sample(5.0, 1.0));
        curves.add(sample(4.0, 2.0));
        assert_eq!(curves.points, [sample(5.0, 1.0)]);
    }
}
