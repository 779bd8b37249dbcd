//! The lifetimes of workers: when each was started, connected, became a member and ended, and where
//! its time went.
//!
//! **Invariant:** nothing here decides anything. The table is bounded: the oldest ended workers are
//! dropped first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use elasticdl_proto::{Committed, WorkerId};
use serde::{Deserialize, Serialize};

use super::counters::End;
use crate::job::text::clip;
use crate::job::time::Time;

/// The lifetime of a worker. Times are seconds of the job's age.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerLifetime {
    /// Start of its process.
    pub launched_s: f64,
    /// Its first hello; `None` if none has come.
    pub connected_s: Option<f64>,
    /// Publication of the first membership that contains it.
    pub joined_s: Option<f64>,
    /// End of its process.
    pub ended_s: Option<f64>,
    /// Why its process has ended: the reason in metrics, or `unresponsive` if the master has killed
    /// it.
    pub end: Option<String>,
    /// How its process has ended, as text.
    pub end_text: Option<String>,
    /// Where its time went.
    pub times: WorkerTimes,
    /// What the worker has reported of checkpoints; `None` if it has told an earlier master, too.
    #[serde(skip)]
    pub(crate) checkpoint_us_seen: Option<u64>,
}

/// Where the time of a member went, in microseconds. Compute and input are estimates: the last step
/// of a report stands for all of its steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerTimes {
    /// In the model's code.
    pub compute_us: u64,
    /// Waiting for its records to be read.
    pub input_us: u64,
    /// The rest of the steps: the wait for other workers, and the transfer.
    pub network_us: u64,
    /// Pauses of membership changes, with the first step after each.
    pub recovery_us: u64,
    /// Stops of training, to copy the state for checkpoints.
    pub checkpoint_us: u64,
}

/// The end of a worker's process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkerEnd<'a> {
    pub(crate) end: End,
    /// Whether the master has killed it because it did not respond.
    pub(crate) is_unresponsive: bool,
    pub(crate) text: &'a str,
}

/// The lifetimes of a job's workers, shared with snapshots.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lifetimes(Arc<BTreeMap<WorkerId, WorkerLifetime>>);

impl Lifetimes {
    /// The table as it is now.
    pub(crate) fn share(&self) -> Arc<BTreeMap<WorkerId, WorkerLifetime>> {
        Arc::clone(&self.0)
    }

    /// Notes the start of a process.
    pub(crate) fn launch(&mut self, now: Time, worker: WorkerId) {
        self.entry(now, worker).checkpoint_us_seen = Some(0);
    }

    /// Notes a hello.
    pub(crate) fn connect(&mut self, now: Time, worker: WorkerId) {
        self.entry(now, worker).connected_s.get_or_insert_with(|| seconds(now));
    }

    /// Notes the publication of a membership that contains `worker`.
    pub(crate) fn join(&mut self, now: Time, worker: WorkerId) {
        self.entry(now, worker).joined_s.get_or_insert_with(|| seconds(now));
    }

    /// Notes the end of a process.
    pub(crate) fn end(&mut self, now: Time, worker: WorkerId, end: WorkerEnd<'_>) {
        let lifetime = self.entry(now, worker);
        lifetime.ended_s = Some(seconds(now));
        let name = if end.is_unresponsive { UNRESPONSIVE } else { end.end.name() };
        lifetime.end = Some(name.to_owned());
        lifetime.end_text = Some(clip(end.text).to_owned());
    }

    /// Notes committed steps of a group with these members, by rank.
    pub(crate) fn commit(&mut self, members: &[WorkerId], report: &Committed) {
        let steps = report.times.steps;
        if steps == 0 {
            return;
        }
        let table = Arc::make_mut(&mut self.0);
        for (member, rank) in members.iter().zip(&report.ranks) {
            let Some(lifetime) = table.get_mut(member) else { continue };
            // No rank computes for longer than the steps last.
            let compute_us = rank.compute_us.saturating_mul(steps).min(report.times.step_us);
            let left_us = report.times.step_us - compute_us;
            let input_us = rank.input_us.saturating_mul(steps).min(left_us);
            let seen = lifetime.checkpoint_us_seen.replace(rank.checkpoint_us);
            let checkpoint_us = rank.checkpoint_us.saturating_sub(seen.unwrap_or(u64::MAX));
            let checkpoint_us = checkpoint_us.min(left_us - input_us);
            let network_us = left_us - input_us - checkpoint_us;
            let times = &mut lifetime.times;
            times.compute_us = times.compute_us.saturating_add(compute_us);
            times.input_us = times.input_us.saturating_add(input_us);
            times.network_us = times.network_us.saturating_add(network_us);
            times.checkpoint_us = times.checkpoint_us.saturating_add(checkpoint_us);
        }
    }

    /// Notes the pause of a membership change, as `worker` has reported it.
    pub(crate) fn recover(&mut self, worker: WorkerId, gap_us: u64) {
        if let Some(lifetime) = Arc::make_mut(&mut self.0).get_mut(&worker) {
            lifetime.times.recovery_us = lifetime.times.recovery_us.saturating_add(gap_us);
        }
    }

    fn entry(&mut self, now: Time, worker: WorkerId) -> &mut WorkerLifetime {
        let table = Arc::make_mut(&mut self.0);
        if table.len() >= LIFETIMES_MAX && !table.contains_key(&worker) {
            let ended = table.iter().find(|(_, lifetime)| lifetime.ended_s.is_some());
            let oldest = ended.or_else(|| table.iter().next()).map(|(&id, _)| id);
            if let Some(oldest) = oldest {
                table.remove(&oldest);
            }
        }
        table.entry(worker).or_insert_with(|| WorkerLifetime {
            launched_s: seconds(now),
            ..WorkerLifetime::default()
        })
    }
}

impl WorkerLifetime {
    /// This lifetime as a later master knows it, with what an earlier one has noted.
    pub(crate) fn after(&self, earlier: &Self) -> Self {
        Self {
            launched_s: self.launched_s.min(earlier.launched_s),
            connected_s: earlier.connected_s.or(self.connected_s),
            joined_s: earlier.joined_s.or(self.joined_s),
            ended_s: self.ended_s.or(earlier.ended_s),
            end: self.end.clone().or_else(|| earlier.end.clone()),
            end_text: self.end_text.clone().or_else(|| earlier.end_text.clone()),
            times: self.times.plus(earlier.times),
            checkpoint_us_seen: self.checkpoint_us_seen,
        }
    }
}

impl WorkerTimes {
    fn plus(self, other: Self) -> Self {
        Self {
            compute_us: self.compute_us.saturating_add(other.compute_us),
            input_us: self.input_us.saturating_add(other.input_us),
            network_us: self.network_us.saturating_add(other.network_us),
            recovery_us: self.recovery_us.saturating_add(other.recovery_us),
            checkpoint_us: self.checkpoint_us.saturating_add(other.checkpoint_us),
        }
    }
}

/// Seconds, rounded to milliseconds.
fn seconds(Time(time): Time) -> f64 {
    Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)).as_secs_f64()
}

/// More than the largest job has workers at a time, as long as they are fewer than this.
const LIFETIMES_MAX: usize = 4096;
const UNRESPONSIVE: &str = "unresponsive";

#[cfg(test)]
mod tests {
    use elasticdl_proto::{RankStep, StepTimes};

    use super::*;

    fn at(ms: u64) -> Time {
        Time(Duration::from_millis(ms))
    }

    #[test]
    fn a_lifetime_has_the_first_time_of_each_stage_and_the_reason_of_its_end() {
        let (mut lifetimes, worker) = (Lifetimes::default(), WorkerId(3));
        lifetimes.launch(at(100), worker);
        for ms in [200, 250] {
            lifetimes.connect(at(ms), worker);
            lifetimes.join(at(ms + 100), worker);
        }
        let end = WorkerEnd { end: End::Killed, is_unresponsive: false, text: "by SIGKILL" };
        lifetimes.end(at(900), worker, end);
        let expected = WorkerLifetime {
            launched_s: 0.1,
            connected_s: Some(0.2),
            joined_s: Some(0.3),
            ended_s: Some(0.9),
            end: Some("killed".into()),
            end_text: Some("by SIGKILL".into()),
            times: WorkerTimes::default(),
            checkpoint_us_seen: Some(0),
        };
        assert_eq!(lifetimes.share()[&worker], expected);
        let end = WorkerEnd { is_unresponsive: true, ..end };
        lifetimes.end(at(950), WorkerId(4), end);
        assert_eq!(lifetimes.share()[&WorkerId(4)].end.as_deref(), Some("unresponsive"));
    }

    #[test]
    fn the_time_of_steps_is_divided_without_a_rest() {
        let (mut lifetimes, workers) = (Lifetimes::default(), [WorkerId(1), WorkerId(2)]);
        workers.iter().for_each(|&worker| lifetimes.launch(at(0), worker));
        lifetimes.connect(at(0), WorkerId(3));
        let rank = |compute_us, input_us| RankStep {
            records: 1,
            compute_us,
            input_us,
            checkpoint_us: 40,
            ..RankStep::default()
        };
        let report = Committed {
            ranks: vec![rank(100, 50), rank(400, 10), rank(100, 50)],
            times: StepTimes { steps: 2, step_us: 600, reduce_us: 0 },
            ..Committed::default()
        };
        lifetimes.commit(&[1, 2, 3].map(WorkerId), &report);
        lifetimes.recover(WorkerId(2), 7);
        let times = |lifetimes: &Lifetimes, id| {
            let times = lifetimes.share()[&WorkerId(id)].times;
            let WorkerTimes { compute_us, input_us, network_us, recovery_us, checkpoint_us } =
                times;
            [compute_us, input_us, network_us, recovery_us, checkpoint_us]
        };
        assert_eq!(times(&lifetimes, 1), [200, 100, 260, 0, 40]);
        assert_eq!(times(&lifetimes, 2), [600, 0, 0, 7, 0]);
        // An earlier master may have counted its checkpoints.
        assert_eq!(times(&lifetimes, 3), [200, 100, 300, 0, 0]);
        lifetimes.commit(&workers, &report);
        assert_eq!(times(&lifetimes, 1)[4], 40, "a checkpoint counts once");
    }

    #[test]
    fn the_table_is_bounded_and_keeps_workers_that_live() {
        let mut lifetimes = Lifetimes::default();
        let end = WorkerEnd { end: End::Killed, is_unresponsive: false, text: "" };
        lifetimes.launch(at(0), WorkerId(1));
        for id in 2..=(LIFETIMES_MAX as u64 + 10) {
            lifetimes.launch(at(id), WorkerId(id));
            lifetimes.end(at(id), WorkerId(id), end);
        }
        let table = lifetimes.share();
        assert_eq!(table.len(), LIFETIMES_MAX);
        assert!(table.contains_key(&WorkerId(1)) && !table.contains_key(&WorkerId(2)));
        assert!(table.contains_key(&WorkerId(LIFETIMES_MAX as u64 + 10)));
    }

    #[test]
    fn a_later_master_adds_to_what_an_earlier_one_has_noted() {
        let times = WorkerTimes { compute_us: 1, recovery_us: 4, ..WorkerTimes::default() };
        let earlier = WorkerLifetime {
            launched_s: 1.0,
            connected_s: Some(2.0),
            times,
            ..WorkerLifetime::default()
        };
        let later = WorkerLifetime {
            launched_s: 9.0,
            connected_s: Some(9.0),
            joined_s: Some(9.5),
            ended_s: Some(10.0),
            end: Some("killed".into()),
            end_text: Some("x".into()),
            times,
            checkpoint_us_seen: Some(0),
        };
        let whole = later.after(&earlier);
        assert_eq!(
            (whole.launched_s, whole.connected_s, whole.joined_s),
            (1.0, Some(2.0), Some(9.5))
        );
        assert_eq!((whole.times.compute_us, whole.times.recovery_us), (2, 8));
        assert_eq!((whole.ended_s, whole.end.as_deref()), (Some(10.0), Some("killed")));
    }
}
