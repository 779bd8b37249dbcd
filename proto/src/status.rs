//! The status of a running job, for the user and for programs.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::host::HostReport;
use crate::ids::{Generation, LaunchId, WorkerId};
use crate::limiting_link::LimitingLink;
use crate::message::Evaluated;
use crate::row_touches::TablesStatus;
use crate::spares::Spares;
use crate::summary::{AuditSummary, BestEvaluation, CheckpointsSummary, MembershipChange};

/// The status of a job. The names of its fields are a public format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The job's name.
    pub job: String,
    /// UUID of the run: the same for all its masters.
    #[serde(default)]
    pub run_id: String,
    /// `queued` (by a scheduler with queues), `starting`, `resuming` (after a master's death),
    /// `waiting` (too few workers for a group), `running`, `suspending`, `suspended`, `stopping`,
    /// `ending`, or, once it has ended, `completed`, `failed`, `refused`, `stopped`.
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
    /// Records absorbed more than once, as last reported.
    #[serde(default)]
    pub records_repeated: u64,
    /// Records committed per second, over the last few seconds.
    pub records_per_s: f64,
    /// Mean loss per record, smoothed over the last reports.
    pub loss: Option<f64>,
    /// Metrics that the program reports during training, each a mean per record, smoothed as the
    /// loss is.
    #[serde(default)]
    pub metrics: BTreeMap<String, f64>,
    /// Learning rate of the last step; `None` before it, and if the model reports none.
    pub learning_rate: Option<f64>,
    /// Seconds until the end of the data, of `--max-steps` or of `--deadline` at the present speed;
    /// `None` while the job does not advance.
    pub eta_s: Option<f64>,
    /// Committed steps whose gradients were skipped because they were not finite; their records
    /// count as absorbed.
    #[serde(default)]
    pub steps_skipped: u64,
    /// Shards of an inference job; `None` until the data set is known, and for a training job.
    pub shards: Option<ShardCounts>,
    /// Why the job is being stopped or was stopped, unless a user does it: its deadline, or the
    /// exit of a worker.
    pub stop_reason: Option<String>,
    /// Number of workers that the job keeps: what the user wants, or what `--autoscale` has found.
    pub workers_desired: u32,
    /// Minimum number of workers: with fewer, training pauses.
    #[serde(default)]
    pub workers_min: u32,
    /// Maximum number of workers that the job keeps; 0 if its release does not tell.
    #[serde(default)]
    pub workers_max: u32,
    /// The spares; `None` without `--spares`.
    pub spares: Option<Spares>,
    /// What `--autoscale` has found last, and does therefore; `None` before the first measurement.
    pub autoscale: Option<String>,
    /// The connected workers, by id.
    pub workers: Vec<WorkerStatus>,
    /// Workers without contact to the master that are not lost, by id: the group may train on with
    /// them. Those that are silent, but whose stream is open, are also in `workers`.
    #[serde(default)]
    pub workers_disconnected: Vec<DisconnectedStatus>,
    /// Launches whose worker has not connected yet, by id.
    #[serde(default)]
    pub workers_pending: Vec<LaunchStatus>,
    /// Measurements of the hosts of workers, by the host's name; empty for a job on one machine.
    #[serde(default)]
    pub hosts: BTreeMap<String, HostReport>,
    /// Hosts on which no worker is started where another one has capacity, that with the newest
    /// fault last.
    #[serde(default)]
    pub hosts_avoided: Vec<AvoidedHost>,
    /// Distribution of the launches over priority classes, beginning with the class of the first
    /// `min_workers` workers; empty without priority classes.
    #[serde(default)]
    pub priority_tiers: Vec<PriorityTierStatus>,
    /// The transport of the all-reduce, as text; `None` before the first step.
    pub allreduce_transport: Option<String>,
    /// The link whose network limits the steps; `None` if there is none, or more than one and of
    /// several hosts.
    pub limiting_link: Option<LimitingLink>,
    /// What the audits have found; `None` without `--audit`.
    #[serde(default)]
    pub audit: Option<AuditSummary>,
    /// The model's tables, as last reported; `None` if it has none.
    pub tables: Option<TablesStatus>,
    /// The newest evaluation; of an evaluate job, its result.
    pub evaluated: Option<Evaluated>,
    /// The best evaluation of a training job by the selected metric.
    pub evaluated_best: Option<BestEvaluation>,
    /// Checkpoints; `None` if the job neither writes nor restores any.
    pub checkpoints: Option<CheckpointsSummary>,
    /// The last 20 membership changes, oldest first, with their pauses.
    pub memberships: Vec<MembershipChange>,
    /// The newest events, oldest first; at most 20 lines.
    pub events: Vec<String>,
    /// Number of events emitted so far; `events` has the newest.
    #[serde(default)]
    pub events_emitted: u64,
    /// In a cluster: age of the job at each of `events`, in seconds.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub events_at_s: Vec<f64>,
}

impl Status {
    /// The members of the newest generation, by id.
    pub fn members(&self) -> impl Iterator<Item = &WorkerStatus> {
        self.workers.iter().filter(|worker| worker.rank.is_some())
    }

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
                2 => self.workers.iter_mut().for_each(|worker| {
                    (worker.cpu, worker.memory_bytes) = (None, None);
                }),
                3 => self.events.drain(..self.events.len() / 2).for_each(drop),
                4 => self.hosts.clear(),
                // The number of workers remains in `workers_desired` and in the metrics.
                _ => {
                    self.hosts_avoided.truncate(self.hosts_avoided.len() / 2);
                    self.workers_pending.truncate(self.workers_pending.len() / 2);
                    self.workers_disconnected.truncate(self.workers_disconnected.len() / 2);
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

/// A host on which no worker is started where another one has capacity.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AvoidedHost {
    /// Name of the host, in a cluster that of the node.
    pub host: String,
    /// The faults of workers there, or the option.
    pub why: String,
    /// Seconds until it is not avoided any more; `None`: it always is.
    pub for_s: Option<f64>,
}

/// The shards of an inference job, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardCounts {
    /// Shards that are neither leased nor done.
    pub todo: u32,
    /// Shards that are leased to a connected worker.
    pub leased: u32,
    /// Shards that are evaluated, or whose predictions are written.
    pub done: u32,
}

/// The status of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerStatus {
    /// The worker.
    pub worker: WorkerId,
    /// Process id.
    pub pid: u32,
    /// Its rank in the newest generation; `None` while it is no member.
    pub rank: Option<u32>,
    /// `joining`, `describing`, `preparing`, `fetching`, `ready` to join, `spare` in its place or,
    /// if it has not followed the group's steps for 10 s, `lagging`,
    /// `training`, `serving` of a table server, `evaluating`, `predicting`, `leaving`, `finished`,
    /// `ending`, or `disconnected` while it is silent.
    pub state: Cow<'static, str>,
    /// Steps that its state contains, which of a member are the group's; `None` while it does not
    /// have the group's state.
    pub step: Option<u64>,
    /// Microseconds in the model's code in the last reported step.
    pub compute_us: u64,
    /// Its part of the records of that step, 0 to 1; `None` without a report.
    pub share: Option<f64>,
    /// Microseconds of waiting for its records to be read in that step.
    #[serde(default)]
    pub input_us: u64,
    /// What most of the step's time went to: `compute`, `input`, `network` for the wait for other
    /// workers and the transfer, or `others` for that wait alone, where workers share memory;
    /// `None` without a report.
    pub limited_by: Option<Cow<'static, str>>,
    /// Whether it is a straggler: for 10 s, the median of its last 7 reported steps, each as if its
    /// records had been an equal part of the step, has been over 1.5 times the members' median, and
    /// over 5 ms more.
    pub straggler: bool,
    /// Cores that its process uses, on average over some seconds; `None` if it has not told, as
    /// without heartbeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<f64>,
    /// Resident memory of its process, in bytes; `None` if it has not told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Whether it is a table server: it holds rows of tables, and computes no records. Only written
    /// where it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub serves_tables: bool,
    /// Memory of the rows of tables that it holds, in bytes; `None` if the model has none.
    pub table_bytes: Option<u64>,
    /// Records of the shards that are leased to it; `None` in a training job.
    pub leased_records: Option<u64>,
    /// In a cluster: the worker's pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// In a cluster: the node of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// A worker without contact to the master that is not lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DisconnectedStatus {
    /// The worker.
    pub worker: WorkerId,
    /// Its rank in the newest generation; `None` if it is no member.
    pub rank: Option<u32>,
    /// Seconds since its last message or the end of its stream; for a stream to an earlier master,
    /// since this master started.
    pub disconnected_s: f64,
}

/// The status of a launch whose worker is not connected yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchStatus {
    /// The launch, whose worker will have its number.
    pub launch: LaunchId,
    /// Its slot among the job's workers, from 0.
    pub slot: u32,
    /// `requested`, `queued`, `unschedulable` or `starting`.
    pub state: Cow<'static, str>,
    /// What it waits for, if known.
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
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::host::DiskReport;
    use crate::summary::tests::{checkpoints, membership};

    /// A status in which no field has its default value, so that a field that is lost on the way
    /// differs. A new field has to be set here, as no default is used.
    pub(crate) fn full_status() -> Status {
        let worker = WorkerStatus {
            worker: WorkerId(1),
            pid: 71,
            rank: Some(3),
            state: "training".into(),
            step: Some(10),
            compute_us: 1500,
            share: Some(0.5),
            input_us: 100,
            limited_by: Some("compute".into()),
            straggler: true,
            cpu: Some(1.5),
            memory_bytes: Some(9_000),
            serves_tables: true,
            table_bytes: Some(8_000),
            leased_records: Some(64),
            pod: Some("mnist-w-1".into()),
            node: Some("node-2".into()),
        };
        let launch = LaunchStatus {
            launch: LaunchId(3),
            slot: 2,
            state: "unschedulable".into(),
            reason: Some("0/1 nodes are available".into()),
        };
        Status {
            job: "mnist".into(),
            run_id: "00000000-0000-0000-0000-000000000007".into(),
            audit: Some(AuditSummary { steps: 6, disagreements: 1, workers_replaced: 2 }),
            state: "running".into(),
            progress: 0.375,
            generation: Generation(2),
            step: 10,
            epoch: 1,
            epochs: 3,
            records_counted: 640,
            records_expected: 1920,
            records_repeated: 1,
            records_per_s: 20_000.0,
            loss: Some(0.25),
            metrics: [("accuracy".into(), 0.625)].into(),
            learning_rate: Some(0.125),
            eta_s: Some(64.0),
            steps_skipped: 4,
            shards: Some(ShardCounts { todo: 5, leased: 3, done: 2 }),
            stop_reason: Some("the deadline has passed".into()),
            workers_desired: 2,
            workers_min: 1,
            workers_max: 4,
            spares: Some(Spares { desired: 2, caught_up: 1, promoted: 3 }),
            autoscale: Some("2 workers make 20000 records/s; trying 3".into()),
            workers: vec![worker],
            workers_disconnected: vec![DisconnectedStatus {
                worker: WorkerId(6),
                rank: Some(4),
                disconnected_s: 2.5,
            }],
            workers_pending: vec![launch],
            hosts: [(
                "node-2".into(),
                HostReport {
                    copied_per_s: 9_000_000_000,
                    gpus: 2,
                    disks: vec![DiskReport {
                        folder: "/tmp".into(),
                        free_bytes: 5_000,
                        written_per_s: Some(700),
                    }],
                },
            )]
            .into(),
            hosts_avoided: vec![AvoidedHost {
                host: "node-3".into(),
                why: "3 faults".into(),
                for_s: Some(600.5),
            }],
            priority_tiers: vec![PriorityTierStatus {
                class: "elasticdl-core".into(),
                launches: 2,
                workers: 1,
            }],
            allreduce_transport: Some("TCP".into()),
            limiting_link: Some(LimitingLink {
                from: WorkerId(3),
                from_host: Some("b".into()),
                to: WorkerId(4),
                to_host: Some("c".into()),
                host: Some("b".into()),
                limited: 0.75,
                bytes_per_s: 1.5e6,
            }),
            tables: Some(TablesStatus { rows: 30, touches: 64, shards_at_risk: 5 }),
            evaluated: Some(Evaluated {
                step: 9,
                records: 50,
                metrics: [("accuracy".into(), Some(0.75))].into(),
            }),
            evaluated_best: Some(BestEvaluation {
                step: 8,
                metric: "accuracy".into(),
                value: 0.875,
                export: Some("/b".into()),
            }),
            checkpoints: Some(checkpoints()),
            memberships: vec![membership()],
            events: vec!["generation 2: 1 worker".into()],
            events_emitted: 7,
            events_at_s: vec![1.5],
        }
    }

    /// Asserts that no value in a document is one that a field has by default.
    pub(crate) fn assert_full(json: &Value, path: &str) {
        match json {
            Value::Object(fields) if !fields.is_empty() => {
                fields.iter().for_each(|(key, value)| assert_full(value, &format!("{path}.{key}")));
            }
            Value::Array(items) if !items.is_empty() => {
                items.iter().for_each(|item| assert_full(item, path));
            }
            Value::Bool(true) => {}
            Value::Number(number) => assert_ne!(number.as_f64(), Some(0.0), "{path}"),
            Value::String(text) => assert_ne!(text, "", "{path}"),
            _ => panic!("{path} is {json}"),
        }
    }

    #[test]
    fn the_keys_and_values_of_a_status_are_stable() {
        let json = serde_json::to_value(full_status()).unwrap();
        assert_full(&json, "status");
        let mut expected = json!({
            "job": "mnist", "run_id": "00000000-0000-0000-0000-000000000007",
            "state": "running", "progress": 0.375, "generation": 2, "step": 10, "epoch": 1,
            "epochs": 3, "records_counted": 640, "records_expected": 1920,
            "records_repeated": 1, "records_per_s": 20_000.0, "loss": 0.25, "steps_skipped": 4,
            "shards": {"todo": 5, "leased": 3, "done": 2},
            "workers_desired": 2,
            "workers": [{
                "worker": 1, "pid": 71, "rank": 3, "state": "training", "step": 10,
                "compute_us": 1500, "share": 0.5, "input_us": 100,
                "limited_by": "compute", "straggler": true, "cpu": 1.5, "memory_bytes": 9000,
                "serves_tables": true,
                "table_bytes": 8000,
                "leased_records": 64, "pod": "mnist-w-1", "node": "node-2",
            }],
            "workers_disconnected": [{"worker": 6, "rank": 4, "disconnected_s": 2.5}],
            "workers_pending": [{
                "launch": 3, "slot": 2, "state": "unschedulable",
                "reason": "0/1 nodes are available",
            }],
            "priority_tiers": [{"class": "elasticdl-core", "launches": 2, "workers": 1}],
            "allreduce_transport": "TCP",
            "evaluated": {"step": 9, "records": 50, "metrics": {"accuracy": 0.75}},
            "checkpoints": {
                "dir": "s3://b/c", "newest": {"step": 9, "name": "step-9", "bytes": 400},
                "saved": 2, "failed": 1, "damaged": 3, "error": "disk full",
                "restored": [{"step": 5, "name": "step-5", "lost_steps": 6}],
            },
            "memberships": [{
                "generation": 2, "cause": "lost", "world_size": 2, "at_step": 9, "gap_ms": 3.0,
                "detect_ms": 0.125, "abort_ms": 0.25, "agree_ms": 0.375, "connect_ms": 0.5,
                "state_ms": 0.625, "first_step_ms": 1.125, "lost": [3], "left": [4], "joined": [5],
            }],
            "events": ["generation 2: 1 worker"], "events_emitted": 7, "events_at_s": [1.5],
        });
        expected["memberships"][0]["promoted"] = json!([5]);
        expected["workers_min"] = json!(1);
        expected["workers_max"] = json!(4);
        expected["spares"] = json!({"desired": 2, "caught_up": 1, "promoted": 3});
        expected["metrics"] = json!({"accuracy": 0.625});
        // One invocation of the macro has a limit.
        expected["evaluated_best"] =
            json!({"step": 8, "metric": "accuracy", "value": 0.875, "export": "/b"});
        expected["stop_reason"] = json!("the deadline has passed");
        let disk = json!({"folder": "/tmp", "free_bytes": 5000, "written_per_s": 700});
        expected["hosts"] = json!({
            "node-2": {"copied_per_s": 9_000_000_000_u64, "gpus": 2, "disks": [disk]}
        });
        expected["hosts_avoided"] = json!([{"host": "node-3", "why": "3 faults", "for_s": 600.5}]);
        expected["autoscale"] = json!("2 workers make 20000 records/s; trying 3");
        expected["learning_rate"] = json!(0.125);
        expected["eta_s"] = json!(64.0);
        expected["limiting_link"] = json!({
            "from": 3, "from_host": "b", "to": 4, "to_host": "c", "host": "b", "limited": 0.75,
            "bytes_per_s": 1.5e6,
        });
        expected["audit"] = json!({"steps": 6, "disagreements": 1, "workers_replaced": 2});
        expected["tables"] = json!({"rows": 30, "touches": 64, "shards_at_risk": 5});
        assert_eq!(json, expected);
        let read: Status = serde_json::from_value(json).unwrap();
        assert_eq!(read, full_status());
    }

    /// What does not apply or is not known yet is null. The keys of a cluster are omitted.
    #[test]
    fn a_new_status_has_all_keys_but_those_of_a_cluster() {
        let worker = WorkerStatus {
            rank: None,
            step: None,
            leased_records: None,
            pod: None,
            node: None,
            ..full_status().workers[0].clone()
        };
        let json = serde_json::to_value(Status { workers: vec![worker], ..Status::default() });
        let json = json.unwrap();
        let keys = |json: &Value| Vec::from_iter(json.as_object().unwrap().keys().cloned());
        let mut full = serde_json::to_value(full_status()).unwrap();
        full.as_object_mut().unwrap().remove("events_at_s");
        let full_worker = full["workers"][0].as_object_mut().unwrap();
        ["pod", "node"].into_iter().for_each(|key| drop(full_worker.remove(key)));
        assert_eq!(keys(&json), keys(&full));
        assert_eq!(keys(&json["workers"][0]), keys(&full["workers"][0]));
        let unknown = [
            "loss",
            "learning_rate",
            "eta_s",
            "shards",
            "stop_reason",
            "autoscale",
            "allreduce_transport",
            "limiting_link",
            "audit",
            "tables",
            "evaluated",
            "evaluated_best",
            "checkpoints",
        ];
        assert!(unknown.iter().all(|key| json[key].is_null()), "{json}");
        let keys_of_some = ["rank", "step", "leased_records"];
        assert!(keys_of_some.iter().all(|key| json["workers"][0][key].is_null()), "{json}");
    }

    #[test]
    fn a_status_of_any_job_fits_into_its_part_of_the_anchor() {
        let mut status = full_status();
        status.memberships.push(membership());
        assert_eq!(status.clone().into_json_within(64 << 10), status.to_pretty_json());
        let worker = status.workers[0].clone();
        let worker =
            |i: u64| WorkerStatus { worker: WorkerId(i), serves_tables: i == 0, ..worker.clone() };
        status.workers = (0..1024).map(worker).collect();
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
