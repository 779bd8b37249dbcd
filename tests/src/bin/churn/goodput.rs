//! The amount of work that is done while workers are killed and replaced, relative to undisturbed
//! training.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use elasticdl_tests::churn::{Bench, DisturbedEnded, now};
use rustix::process::Signal;

use crate::Arguments;

/// Records committed per second, in alternating windows of one job: undisturbed, disturbed,
/// undisturbed, …, undisturbed. So other load on the machine affects both.
#[derive(Debug)]
pub(crate) struct Goodput {
    /// Rates of the undisturbed windows; one more than of the disturbed ones.
    pub(crate) undisturbed: Vec<f64>,
    pub(crate) disturbed: Vec<f64>,
    pub(crate) steps_lost: usize,
    pub(crate) records_lost: u64,
    pub(crate) records_repeated: u64,
}

impl Goodput {
    /// Kills one worker every two seconds, for `goodput_seconds` in all.
    pub(crate) fn measure(arguments: &Arguments, folder: &Path) -> Result<Self, Box<dyn Error>> {
        let mut bench = Bench::start(&arguments.job(), folder, None)?;
        let windows = arguments.goodput_seconds.div_ceil(WINDOW.as_secs()).max(1);
        let kills_each =
            arguments.goodput_seconds.div_ceil(windows).div_ceil(PERIOD.as_secs()).max(1);
        let length = PERIOD * kills_each as u32;
        let (mut undisturbed, mut disturbed, mut victims) = (Vec::new(), Vec::new(), Vec::new());
        for window in 0..=windows {
            bench.settle()?;
            let start = now();
            bench.rest_until(start + length)?;
            undisturbed.push(start);
            if window == windows {
                break;
            }
            let start = now();
            disturbed.push(start);
            for kill in 0..kills_each as u32 {
                bench.rest_until(start + PERIOD * kill)?;
                victims.push(bench.signal(Signal::KILL)?);
            }
            bench.rest_until(start + length)?;
        }
        let ended = bench.stop()?;
        let (records_lost, records_repeated) = ended.records_lost_and_repeated()?;
        let rates =
            |starts: &[Duration]| starts.iter().map(|start| rate(&ended, *start, length)).collect();
        Ok(Self {
            undisturbed: rates(&undisturbed),
            disturbed: rates(&disturbed),
            steps_lost: ended.steps_lost(&victims),
            records_lost,
            records_repeated,
        })
    }

    /// For each disturbed window, its rate relative to the mean of its undisturbed neighbours.
    pub(crate) fn parts(&self) -> Vec<f64> {
        let around = self.undisturbed.windows(2).map(|pair| f64::midpoint(pair[0], pair[1]));
        self.disturbed
            .iter()
            .zip(around)
            .map(|(disturbed, undisturbed)| disturbed / undisturbed)
            .collect()
    }

    /// The mean of [`Self::parts`].
    pub(crate) fn part(&self) -> f64 {
        let parts = self.parts();
        parts.iter().sum::<f64>() / parts.len() as f64
    }
}

/// Records per second of the steps committed in this window.
fn rate(ended: &DisturbedEnded, start: Duration, length: Duration) -> f64 {
    let steps = ended.logs.steps();
    let within = steps.values().filter(|(at, _)| (start..start + length).contains(at));
    within.map(|(_, records)| *records).sum::<u64>() as f64 / length.as_secs_f64()
}

/// Time between two kills.
const PERIOD: Duration = Duration::from_secs(2);
/// Length of a window.
const WINDOW: Duration = Duration::from_secs(10);
