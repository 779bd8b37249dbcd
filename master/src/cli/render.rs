//! Rendering of a job's status, as a table and as JSON.

use std::fmt::Write as _;

use elasticdl_proto::{Generation, WorkerId, v1};
use serde::{Deserialize, Serialize};

use crate::job::{Cause, Evaluated, MembershipChange, SavedCheckpoint, format_metrics};
use crate::progress::{format_rate, one_line};
use crate::report;

/// Status of a job. The names of its fields are a public format; aliases are the names of earlier
/// versions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct StatusJson {
    pub(super) job: String,
    pub(super) state: String,
    pub(super) progress: f64,
    pub(super) generation: u64,
    pub(super) step: u64,
    pub(super) epoch: u32,
    pub(super) epochs: u32,
    pub(super) records_counted: u64,
    pub(super) records_expected: u64,
    pub(super) records_per_s: f64,
    pub(super) loss: Option<f64>,
    pub(super) shards: Option<ShardsJson>,
    #[serde(alias = "workers_wanted")]
    pub(super) workers_desired: u32,
    pub(super) workers: Vec<WorkerJson>,
    #[serde(default, alias = "waiting")]
    pub(super) workers_pending: Vec<LaunchJson>,
    #[serde(default, alias = "rungs")]
    pub(super) priority_tiers: Vec<PriorityTierJson>,
    #[serde(default, alias = "sums_over")]
    pub(super) allreduce_transport: Option<String>,
    #[serde(default)]
    pub(super) evaluated: Option<Evaluated>,
    #[serde(default)]
    pub(super) checkpoints: Option<CheckpointsJson>,
    pub(super) memberships: Vec<MembershipChange>,
    pub(super) events: Vec<String>,
    /// Number of all event lines; `events` has the newest.
    #[serde(default, alias = "events_said")]
    pub(super) events_emitted: u64,
    /// In a cluster: age of the job at each of `events`, in seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) events_at_s: Vec<f64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CheckpointsJson {
    pub(super) dir: Option<String>,
    pub(super) newest: Option<SavedCheckpoint>,
    pub(super) saved: u64,
    pub(super) failed: u64,
    pub(super) error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ShardsJson {
    pub(super) todo: u32,
    pub(super) leased: u32,
    pub(super) done: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WorkerJson {
    pub(super) worker: u64,
    pub(super) pid: u32,
    pub(super) rank: Option<u32>,
    pub(super) state: String,
    pub(super) step: Option<u64>,
    pub(super) compute_us: u64,
    pub(super) straggler: bool,
    pub(super) leased_records: u64,
    /// In a cluster: the worker's pod, and the node of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) pod: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) node: Option<String>,
}

/// A launch whose worker is not connected yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LaunchJson {
    pub(super) launch: u64,
    #[serde(alias = "index")]
    pub(super) slot: u32,
    pub(super) state: String,
    #[serde(alias = "waits_for")]
    pub(super) reason: Option<String>,
}

/// Number of launches with a priority class, and of their connected workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PriorityTierJson {
    pub(super) class: String,
    pub(super) launches: u32,
    pub(super) workers: u32,
}

impl StatusJson {
    /// The status as indented JSON.
    pub(super) fn to_pretty_json(&self) -> String {
        let json = serde_json::to_string_pretty(self);
        json.expect("a status's keys are strings") + "\n"
    }

    /// The status as JSON of at most `bytes` (at least 64 KiB): indented if it fits, else in one
    /// line, else without the oldest and longest parts.
    pub(super) fn into_json_within(mut self, bytes: usize) -> String {
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
    pub(super) fn to_json_line(&self) -> String {
        serde_json::to_string(self).expect("a status's keys are strings") + "\n"
    }
}

impl From<v1::StatusReply> for StatusJson {
    fn from(status: v1::StatusReply) -> Self {
        Self {
            job: status.job,
            state: status.state,
            progress: status.progress,
            generation: status.generation,
            step: status.step,
            epoch: status.epoch,
            epochs: status.epochs,
            records_counted: status.records_counted,
            records_expected: status.records_expected,
            records_per_s: status.records_per_s,
            loss: status.loss,
            shards: status.shards.map(|s| ShardsJson {
                todo: s.todo,
                leased: s.leased,
                done: s.done,
            }),
            workers_desired: status.workers_desired,
            workers: status.workers.into_iter().map(WorkerJson::from).collect(),
            workers_pending: status.workers_pending.into_iter().map(LaunchJson::from).collect(),
            priority_tiers: status.priority_tiers.into_iter().map(PriorityTierJson::from).collect(),
            allreduce_transport: status.allreduce_transport,
            evaluated: status.evaluated.map(|v1::Evaluated { step, records, metrics }| Evaluated {
                step,
                records,
                metrics: metrics
                    .into_iter()
                    .map(|(name, m)| (name, m.is_finite().then_some(m)))
                    .collect(),
            }),
            checkpoints: status.checkpoints.map(CheckpointsJson::from),
            memberships: status.memberships.into_iter().filter_map(to_record).collect(),
            events: status.events,
            events_emitted: status.events_emitted,
            events_at_s: Vec::new(),
        }
    }
}

impl From<v1::CheckpointStatus> for CheckpointsJson {
    fn from(known: v1::CheckpointStatus) -> Self {
        let v1::CheckpointStatus { dir, newest, saved, failed, error } = known;
        let newest = newest.map(|v1::CheckpointSaved { step, name, bytes }| SavedCheckpoint {
            step,
            name,
            bytes,
        });
        Self { dir: Some(dir), newest, saved, failed, error }
    }
}

impl From<v1::WorkerStatus> for WorkerJson {
    fn from(worker: v1::WorkerStatus) -> Self {
        Self {
            worker: worker.worker,
            pid: worker.pid,
            rank: worker.rank,
            state: worker.state,
            step: worker.step,
            compute_us: worker.compute_us,
            straggler: worker.straggler,
            leased_records: worker.leased_records,
            pod: None,
            node: None,
        }
    }
}

impl From<v1::LaunchStatus> for LaunchJson {
    fn from(launch: v1::LaunchStatus) -> Self {
        let v1::LaunchStatus { launch, slot, state, reason } = launch;
        Self { launch, slot, state, reason }
    }
}

impl From<v1::PriorityTierStatus> for PriorityTierJson {
    fn from(tier: v1::PriorityTierStatus) -> Self {
        let v1::PriorityTierStatus { class, launches, workers } = tier;
        Self { class, launches, workers }
    }
}

/// Returns `None` for a cause that this version does not know.
fn to_record(record: v1::MembershipChange) -> Option<MembershipChange> {
    let ms = |us: fn(&v1::Phases) -> u64| {
        record.phases.as_ref().map(|phases| us(phases) as f64 / 1000.0)
    };
    let ids = |workers: &[u64]| workers.iter().copied().map(WorkerId).collect();
    let gap_us = |p: &v1::Phases| {
        [p.detect_us, p.abort_us, p.agree_us, p.connect_us, p.state_us, p.first_step_us]
            .into_iter()
            .fold(0, u64::saturating_add)
    };
    Some(MembershipChange {
        generation: Generation(record.generation),
        cause: Cause::from_name(&record.cause)?,
        world_size: record.world_size,
        at_step: record.at_step,
        gap_ms: ms(gap_us),
        detect_ms: ms(|p| p.detect_us),
        abort_ms: ms(|p| p.abort_us),
        agree_ms: ms(|p| p.agree_us),
        connect_ms: ms(|p| p.connect_us),
        state_ms: ms(|p| p.state_us),
        first_step_ms: ms(|p| p.first_step_us),
        lost: ids(&record.lost),
        left: ids(&record.left),
        joined: ids(&record.joined),
    })
}

/// The status as a table.
pub(super) fn to_table(status: &StatusJson) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &str| {
        writeln!(text, "{}", format!("{name:<12} {value}").trim_end())
            .expect("a string takes any text");
    };
    row("job", &status.job);
    row("state", &format!("{} ({:.1} %)", status.state, status.progress * 100.0));
    let epoch = (status.epoch.saturating_add(1)).min(status.epochs);
    row("epoch", &format!("{epoch} of {}", status.epochs));
    if let Some(ShardsJson { todo, leased, done }) = status.shards {
        row("shards", &format!("{todo} to do, {leased} leased, {done} done"));
    }
    row("step", &status.step.to_string());
    row("records", &format!("{} of {}", status.records_counted, status.records_expected));
    if let Some(loss) = status.loss {
        row("loss", &format!("{loss:.4}"));
    }
    row("speed", &format!("{} records/s", format_rate(status.records_per_s)));
    if let Some(allreduce_transport) = &status.allreduce_transport {
        row("all-reduce", &one_line(allreduce_transport));
    }
    row("generation", &status.generation.to_string());
    row("workers", &format!("{} desired", status.workers_desired));
    let in_pods = status.workers.iter().any(|worker| worker.pod.is_some());
    if !status.workers.is_empty() {
        let process = if in_pods { "" } else { PROCESS_COLUMN };
        let pod = if in_pods { "  pod" } else { "" };
        row("", &format!("worker  {process}{WORKER_COLUMNS}  records leased{pod}"));
    }
    for worker in &status.workers {
        row("", &worker_row(worker, in_pods));
    }
    for (index, launch) in status.workers_pending.iter().enumerate() {
        let reason = launch.reason.as_deref().map(|why| format!(": {}", one_line(why)));
        let what =
            format!("worker {} {}{}", launch.launch, launch.state, reason.unwrap_or_default());
        row(if index == 0 { "pending" } else { "" }, &what);
    }
    if !status.priority_tiers.is_empty() {
        let tiers = status
            .priority_tiers
            .iter()
            .map(|r| format!("{} {}/{}", r.class, r.workers, r.launches));
        row("tiers", &tiers.collect::<Vec<_>>().join(", "));
    }
    if let Some(Evaluated { step, metrics, .. }) = &status.evaluated {
        row("evaluated", &format!("step {step}: {}", one_line(&format_metrics(metrics))));
    }
    if let Some(known) = &status.checkpoints {
        row("checkpoints", &checkpoints_row(known));
    }
    let hidden = status.memberships.len().saturating_sub(MEMBERSHIPS_SHOWN);
    if !status.memberships.is_empty() {
        row("memberships", report::MEMBERSHIP_COLUMNS);
    }
    for record in &status.memberships[hidden..] {
        row("", &report::membership(record));
    }
    for (index, event) in status.events.iter().enumerate() {
        row(if index == 0 { "events" } else { "" }, &one_line(event));
    }
    text
}

fn checkpoints_row(known: &CheckpointsJson) -> String {
    let newest = known
        .newest
        .as_ref()
        .map_or_else(|| "none yet".into(), |newest| format!("step {}", newest.step));
    let error =
        known.error.as_deref().map(|error| format!("; the last one failed: {}", one_line(error)));
    format!("{newest} in {}{}", known.dir.as_deref().unwrap_or_default(), error.unwrap_or_default())
}

/// One worker as a row. In a cluster the row has the pod instead of the process id, which is the
/// same in all pods.
fn worker_row(worker: &WorkerJson, in_pods: bool) -> String {
    let or_dash =
        |number: Option<u64>| number.map_or_else(|| "-".into(), |number| number.to_string());
    let process = if in_pods { String::new() } else { format!("{:>8}  ", worker.pid) };
    let node = worker.node.as_deref().map(|node| format!(" on {node}")).unwrap_or_default();
    let pod = worker.pod.as_deref().map(|pod| format!("  {pod}{node}")).unwrap_or_default();
    format!(
        "{:>6}  {process}{:>4}  {:<10}  {:>8}  {:>8.1}  {:>14}{pod}{}",
        worker.worker,
        or_dash(worker.rank.map(u64::from)),
        worker.state,
        or_dash(worker.step),
        worker.compute_us as f64 / 1000.0,
        worker.leased_records,
        if worker.straggler { "  straggler" } else { "" }
    )
}

const MEMBERSHIPS_SHOWN: usize = 5;
const PROCESS_COLUMN: &str = "     pid  ";
const WORKER_COLUMNS: &str = "rank  state           step   ms/step";

/// Enough rounds to halve a thousand workers and twenty lines down to none.
const ROUNDS_MAX: u32 = 16;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn reply() -> v1::StatusReply {
        let worker = |worker, rank: Option<u32>| v1::WorkerStatus {
            worker,
            pid: 70 + worker as u32,
            rank,
            state: "training".into(),
            compute_us: 1500,
            leased_records: 64,
            step: rank.map(|_| 10),
            straggler: worker == 1,
        };
        let membership = |generation, phases| v1::MembershipChange {
            generation,
            cause: "lost".into(),
            world_size: 2,
            at_step: 9,
            phases,
            lost: vec![3],
            left: vec![4],
            joined: vec![5],
        };
        let phases = v1::Phases {
            detect_us: 100,
            abort_us: 200,
            agree_us: 300,
            connect_us: 400,
            state_us: 500,
            first_step_us: 1500,
        };
        v1::StatusReply {
            job: "mnist".into(),
            state: "running".into(),
            generation: 2,
            step: 10,
            epoch: 0,
            epochs: 3,
            records_counted: 640,
            records_expected: 1920,
            loss: Some(0.25),
            records_per_s: 20_000.0,
            workers_desired: 2,
            workers: vec![worker(1, Some(0)), worker(2, None)],
            events: vec!["generation 2: 1 worker".into()],
            progress: 1.0 / 3.0,
            shards: Some(v1::ShardCounts { todo: 5, leased: 3, done: 2 }),
            memberships: vec![membership(1, None), membership(2, Some(phases))],
            events_emitted: 7,
            workers_pending: vec![v1::LaunchStatus {
                launch: 3,
                slot: 2,
                state: "unschedulable".into(),
                reason: Some("0/1 nodes are available".into()),
            }],
            priority_tiers: vec![
                v1::PriorityTierStatus { class: "elasticdl-core".into(), launches: 2, workers: 2 },
                v1::PriorityTierStatus {
                    class: "elasticdl-tier-1".into(),
                    launches: 1,
                    workers: 0,
                },
            ],
            allreduce_transport: Some("TCP".into()),
            evaluated: Some(v1::Evaluated {
                step: 9,
                records: 50,
                metrics: [("loss".into(), 0.5), ("accuracy".into(), 0.75)].into(),
            }),
            checkpoints: Some(v1::CheckpointStatus {
                dir: "s3://b/c".into(),
                newest: Some(v1::CheckpointSaved { step: 9, name: "step-9".into(), bytes: 400 }),
                saved: 2,
                failed: 1,
                error: Some("disk full".into()),
            }),
        }
    }

    #[test]
    fn the_table_shows_the_whole_status() {
        let expected = "\
job          mnist
state        running (33.3 %)
epoch        1 of 3
shards       5 to do, 3 leased, 2 done
step         10
records      640 of 1920
loss         0.2500
speed        20.0 k records/s
all-reduce   TCP
generation   2
workers      2 desired
             worker       pid  rank  state           step   ms/step  records leased
                  1        71     0  training          10       1.5              64  straggler
                  2        72     -  training           -       1.5              64
pending      worker 3 unschedulable: 0/1 nodes are available
tiers        elasticdl-core 2/2, elasticdl-tier-1 0/1
evaluated    step 9: accuracy 0.7500, loss 0.5000
checkpoints  step 9 in s3://b/c; the last one failed: disk full
memberships  generation  cause  workers     at step     gap ms
                      1  lost         2           9          -
                      2  lost         2           9        3.0  (detect 0.1, abort 0.2, agree 0.3, \
connect 0.4, state 0.5, first step 1.5)
events       generation 2: 1 worker
";
        assert_eq!(to_table(&reply().into()), expected);
    }

    #[test]
    fn workers_in_a_cluster_are_shown_with_their_pods_and_nodes() {
        let mut status = StatusJson::from(reply());
        status.workers[0].pod = Some("mnist-w-1".into());
        status.workers[0].node = Some("node-7".into());
        let table = to_table(&status);
        let expected = "\
             worker  rank  state           step   ms/step  records leased  pod
                  1     0  training          10       1.5              64  \
mnist-w-1 on node-7  straggler
                  2     -  training           -       1.5              64
";
        assert!(table.contains(expected), "{table}");
    }

    #[test]
    fn the_table_shows_the_newest_memberships_and_json_shows_all() {
        let one = reply().memberships.remove(0);
        let many =
            (1..=20).map(|generation| v1::MembershipChange { generation, ..one.clone() }).collect();
        let status = StatusJson::from(v1::StatusReply { memberships: many, ..reply() });
        let shown = to_table(&status).lines().filter(|line| line.contains("  lost  ")).count();
        assert_eq!((shown, status.memberships.len()), (5, 20));
    }

    #[test]
    fn the_keys_of_the_json_are_stable() {
        let json: serde_json::Value =
            serde_json::from_str(&StatusJson::from(reply()).to_json_line()).unwrap();
        let membership = |generation: u64| {
            serde_json::json!({
                "generation": generation, "cause": "lost", "world_size": 2, "at_step": 9,
                "gap_ms": null, "detect_ms": null, "abort_ms": null, "agree_ms": null,
                "connect_ms": null, "state_ms": null, "first_step_ms": null,
                "lost": [3], "left": [4], "joined": [5],
            })
        };
        let mut recovered = membership(2);
        for (name, ms) in [
            ("gap_ms", 3.0),
            ("detect_ms", 0.1),
            ("abort_ms", 0.2),
            ("agree_ms", 0.3),
            ("connect_ms", 0.4),
            ("state_ms", 0.5),
            ("first_step_ms", 1.5),
        ] {
            recovered[name] = ms.into();
        }
        let expected = serde_json::json!({
            "job": "mnist", "state": "running", "progress": 1.0 / 3.0, "generation": 2,
            "step": 10, "epoch": 0, "epochs": 3, "records_counted": 640,
            "records_expected": 1920, "records_per_s": 20_000.0,
            "loss": 0.25, "shards": {"todo": 5, "leased": 3, "done": 2}, "workers_desired": 2,
            "workers": [
                {"worker": 1, "pid": 71, "rank": 0, "state": "training", "step": 10,
                 "compute_us": 1500, "straggler": true, "leased_records": 64},
                {"worker": 2, "pid": 72, "rank": null, "state": "training", "step": null,
                 "compute_us": 1500, "straggler": false, "leased_records": 64},
            ],
            "workers_pending": [
                {"launch": 3, "slot": 2, "state": "unschedulable",
                 "reason": "0/1 nodes are available"},
            ],
            "priority_tiers": [
                {"class": "elasticdl-core", "launches": 2, "workers": 2},
                {"class": "elasticdl-tier-1", "launches": 1, "workers": 0},
            ],
            "allreduce_transport": "TCP",
            "evaluated": {"step": 9, "records": 50, "metrics": {"accuracy": 0.75, "loss": 0.5}},
            "checkpoints": {
                "dir": "s3://b/c", "newest": {"step": 9, "name": "step-9", "bytes": 400},
                "saved": 2, "failed": 1, "error": "disk full",
            },
            "memberships": [membership(1), recovered],
            "events": ["generation 2: 1 worker"], "events_emitted": 7,
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn a_status_of_any_job_fits_into_its_part_of_the_anchor() {
        let mut status = StatusJson::from(reply());
        assert_eq!(status.clone().into_json_within(64 << 10), status.to_pretty_json());
        let worker = status.workers[0].clone();
        status.workers = (0..1024).map(|i| WorkerJson { worker: i, ..worker.clone() }).collect();
        let names = (0..3000).map(|i| WorkerId(1_000_000 + i));
        for membership in &mut status.memberships {
            (membership.lost, membership.joined) =
                (names.clone().collect(), names.clone().collect());
        }
        let shortened = status.clone().into_json_within(224 << 10);
        assert!(shortened.len() <= 224 << 10, "{} KiB", shortened.len() >> 10);
        let read: StatusJson = serde_json::from_str(&shortened).unwrap();
        assert_eq!((read.workers.len(), read.events.len()), (1024, status.events.len()));
        status.events = vec!["\u{1}".repeat(1000); 20];
        status.workers_pending = vec![status.workers_pending[0].clone(); 1024];
        status
            .workers_pending
            .iter_mut()
            .for_each(|launch| launch.reason = Some("\u{1}".repeat(100)));
        let shortened = status.clone().into_json_within(64 << 10);
        assert!(shortened.len() <= 64 << 10, "{} KiB", shortened.len() >> 10);
        let read: StatusJson = serde_json::from_str(&shortened).unwrap();
        assert_eq!((read.step, read.state), (status.step, status.state));
    }
}
