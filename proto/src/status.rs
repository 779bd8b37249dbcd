//! The status of a running job, for the user and for programs.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::ids::{Generation, LaunchId, WorkerId};
use crate::message::Evaluated;
use crate::summary::{CheckpointsSummary, MembershipChange};

/// The status of a job. The names of its fields are a public format; aliases are the names of
/// earlier versions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The job's name.
    pub job: String,
    /// UUID of the run: the same for all its masters.
    #[serde(default)]
    pub run_id: String,
    /// `starting`, `resuming` (after a master's death), `waiting` (too few workers for a group),
    /// `running`, `stopping`, `ending`, or, once it has ended, `completed`, `failed`, `refused`,
    /// `stopped`.
    pub state: Cow<'static, str>,
    /// Completed part of the job: 0 to 1.
    pub progress: f64,
    /// The newest generation; 0 before the first.
    pub generation: Generation,
    /// Steps committed, as last reported.
    pub step: u64,
    /// The first epoch that is not complete; `epochs` when all are.
    pub epoch: u32,
    /// Passes over the data.
    pub epochs: u32,
    /// Records absorbed over all epochs, as last reported.
    pub records_counted: u64,
    /// Records of all epochs; 0 until the data set is known.
    pub records_expected: u64,
    /// Records committed per second, over the last few seconds.
    pub records_per_s: f64,
    /// Mean loss per record, smoothed over the last reports.
    pub loss: Option<f64>,
    /// Committed steps whose gradients were skipped because they were not finite; their records
    /// count as absorbed.
    #[serde(default)]
    pub steps_skipped: u64,
    /// Shards of `epoch`; of the last epoch when all are complete. `None` until the data set is
    /// known.
    pub shards: Option<ShardCounts>,
    /// Number of workers that the user wants.
    #[serde(alias = "workers_wanted")]
    pub workers_desired: u32,
    /// The connected workers, by id.
    pub workers: Vec<WorkerStatus>,
    /// Launches whose worker has not connected yet, by id.
    #[serde(default, alias = "waiting")]
    pub workers_pending: Vec<LaunchStatus>,
    /// Distribution of the launches over priority classes, beginning with the class of the first
    /// `min_workers` workers; empty without priority classes.
    #[serde(default, alias = "rungs")]
    pub priority_tiers: Vec<PriorityTierStatus>,
    /// The transport of the all-reduce, as text; `None` before the first step.
    #[serde(default, alias = "sums_over")]
    pub allreduce_transport: Option<String>,
    /// The newest evaluation.
    #[serde(default)]
    pub evaluated: Option<Evaluated>,
    /// Checkpoints; `None` if the job neither writes nor restores any.
    #[serde(default)]
    pub checkpoints: Option<CheckpointsSummary>,
    /// The last 20 membership changes, oldest first, with their pauses.
    pub memberships: Vec<MembershipChange>,
    /// The newest events, oldest first; at most 20 lines.
    pub events: Vec<String>,
    /// Number of events emitted so far; `events` has the newest.
    #[serde(default, alias = "events_said")]
    pub events_emitted: u64,
    /// In a cluster: age of the job at each of `events`, in seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events_at_s: Vec<f64>,
}

impl Status {
    /// The status as indented JSON.
    #[must_use]
    pub fn to_pretty_json(&self) -> String {
        let json = serde_json::to_string_pretty(self);
        json.expect("a status's keys are strings") + "\n"
    }

    /// The status as JSON of at most `bytes` (at least 64 KiB): indented if it fits, else in one
    /// line, else without the oldest and longest parts.
    #[must_use]
    pub fn into_json_within(mut self, bytes: usize) -> String {
        let pretty = self.to_pretty_json();
        if pretty.len() <= bytes {
            return pretty;
        }
        let mut json = self.to_json_line();
        let mut round = 0;
        while json.len() > bytes {
            match round {
                // Worker ids of older membership changes.
                0 => {
                    let older = self.memberships.len().saturating_sub(1);
                    self.memberships.drain(..older);
                }
                1 => self.memberships.clear(),
                2 => self.events.drain(..self.events.len() / 2).for_each(drop),
                // The number of workers remains in `workers_desired` and in the metrics.
                _ => {
                    self.workers_pending.truncate(self.workers_pending.len() / 2);
                    self.workers.truncate(self.workers.len() / 2);
                    self.evaluated = None;
                    self.events.drain(..self.events.len() / 2).for_each(drop);
                }
            }
            round += 1;
            json = self.to_json_line();
            if round > ROUNDS_MAX {
                break;
            }
        }
        json
    }

    /// The status as JSON in one line.
    #[must_use]
    pub fn to_json_line(&self) -> String {
        serde_json::to_string(self).expect("a status's keys are strings") + "\n"
    }
}

/// An epoch's shards by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardCounts {
    /// Shards that are not done and of which no record is leased. After a loss this includes partly
    /// absorbed shards and shards whose lost owner's last step is not accounted for yet.
    pub todo: u32,
    /// Shards of which some record is leased to a connected worker. (A lease may be a part of a
    /// shard.)
    pub leased: u32,
    /// Shards of which all records are absorbed, as last reported.
    pub done: u32,
}

/// The status of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// The worker.
    pub worker: WorkerId,
    /// Process id.
    pub pid: u32,
    /// Its rank in the newest generation; `None` while it is no member.
    pub rank: Option<u32>,
    /// `joining`, `describing`, `preparing`, `fetching`, `ready`, `training`, `evaluating`,
    /// `predicting`, `leaving`, `finished` or `ending`.
    pub state: Cow<'static, str>,
    /// Steps that its state contains, which are the group's; `None` while it does not have the
    /// group's state.
    pub step: Option<u64>,
    /// Microseconds in the model's code in the last reported step.
    pub compute_us: u64,
    /// Whether it is a straggler: the median of its last 7 reported steps is over 1.5 times the
    /// members' median, and over 5 ms more.
    pub straggler: bool,
    /// Leased records that are not committed.
    pub leased_records: u64,
    /// In a cluster: the worker's pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// In a cluster: the node of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// The status of a launch whose worker is not connected yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchStatus {
    /// The launch, whose worker will have its number.
    pub launch: LaunchId,
    /// Its slot among the job's workers, from 0.
    #[serde(alias = "index")]
    pub slot: u32,
    /// `requested`, `unschedulable` or `starting`.
    pub state: Cow<'static, str>,
    /// What it waits for, if known.
    #[serde(alias = "waits_for")]
    pub reason: Option<String>,
}

/// The launches of one priority class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriorityTierStatus {
    /// The class.
    pub class: String,
    /// Number of launches.
    pub launches: u32,
    /// Number of these launches whose workers are connected.
    pub workers: u32,
}

/// Enough rounds to halve a thousand workers and twenty lines down to none.
const ROUNDS_MAX: u32 = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::Cause;

    fn status() -> Status {
        let worker = |worker| WorkerStatus {
            worker: WorkerId(worker),
            pid: 70,
            rank: Some(0),
            state: "training".into(),
            step: Some(10),
            compute_us: 1500,
            straggler: false,
            leased_records: 64,
            pod: None,
            node: None,
        };
        let membership = MembershipChange {
            generation: Generation(2),
            cause: Cause::Lost,
            world_size: 2,
            at_step: 9,
            gap_ms: None,
            detect_ms: None,
            abort_ms: None,
            agree_ms: None,
            connect_ms: None,
            state_ms: None,
            first_step_ms: None,
            lost: vec![WorkerId(3)],
            left: vec![WorkerId(4)],
            joined: vec![WorkerId(5)],
        };
        let launch = LaunchStatus {
            launch: LaunchId(3),
            slot: 2,
            state: "unschedulable".into(),
            reason: None,
        };
        Status {
            job: "mnist".into(),
            run_id: "00000000-0000-0000-0000-000000000007".into(),
            state: "running".into(),
            step: 10,
            workers: vec![worker(1), worker(2)],
            workers_pending: vec![launch],
            memberships: vec![membership.clone(), membership],
            events: vec!["generation 2: 1 worker".into()],
            ..Status::default()
        }
    }

    #[test]
    fn a_status_of_any_job_fits_into_its_part_of_the_anchor() {
        let mut status = status();
        assert_eq!(status.clone().into_json_within(64 << 10), status.to_pretty_json());
        let worker = status.workers[0].clone();
        status.workers =
            (0..1024).map(|i| WorkerStatus { worker: WorkerId(i), ..worker.clone() }).collect();
        let names = (0..3000).map(|i| WorkerId(1_000_000 + i));
        for membership in &mut status.memberships {
            (membership.lost, membership.joined) =
                (names.clone().collect(), names.clone().collect());
        }
        let shortened = status.clone().into_json_within(224 << 10);
        assert!(shortened.len() <= 224 << 10, "{} KiB", shortened.len() >> 10);
        let read: Status = serde_json::from_str(&shortened).unwrap();
        assert_eq!((read.workers.len(), read.events.len()), (1024, status.events.len()));
        status.events = vec!["\u{1}".repeat(1000); 20];
        status.workers_pending = vec![status.workers_pending[0].clone(); 1024];
        status
            .workers_pending
            .iter_mut()
            .for_each(|launch| launch.reason = Some("\u{1}".repeat(100)));
        let shortened = status.clone().into_json_within(64 << 10);
        assert!(shortened.len() <= 64 << 10, "{} KiB", shortened.len() >> 10);
        let read: Status = serde_json::from_str(&shortened).unwrap();
        assert_eq!((read.step, read.state), (status.step, status.state));
    }
}
