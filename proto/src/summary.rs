//! The summary of a job, for the user and for programs.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use self::checkpoints::{CheckpointsSummary, RestoredCheckpoint, SavedCheckpoint};
pub use self::membership_change::MembershipChange;
use crate::ids::WorkerId;
use crate::message::{Evaluated, Kept};
use crate::row_touches::{RowTouchesSummary, RowsLoss};
use crate::spares::Spares;

/// The summary of a job. The names of its fields are a public format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The job's name.
    pub job: String,
    /// As [`Status::run_id`](crate::Status::run_id).
    #[serde(default)]
    pub run_id: String,
    /// As [`Status::state`](crate::Status::state).
    pub state: Cow<'static, str>,
    /// Steps committed.
    pub steps: u64,
    /// Epochs complete.
    pub epochs: u32,
    /// Seconds since the job's start.
    pub wall_s: f64,
    /// Records expected, counted, missing and repeated.
    pub records: RecordsSummary,
    /// Numbers of workers.
    pub workers: WorkersSummary,
    /// Every generation, in order: the newest 10,000, and those that name 100,000 workers together.
    pub memberships: Vec<MembershipChange>,
    /// Mean loss per record, in training of the first and of the last step.
    pub loss: LossSummary,
    /// As [`Status::metrics`](crate::Status::metrics), of the last steps.
    #[serde(default)]
    pub training_metrics: BTreeMap<String, f64>,
    /// From the first group's start to the last report.
    pub throughput: ThroughputSummary,
    /// What gradients were summed over, in words, at the end.
    pub allreduce_transport: Option<String>,
    /// Evaluations, if there is validation data.
    pub evaluations: Option<EvaluationsSummary>,
    /// Where the job has to do with checkpoints.
    pub checkpoints: Option<CheckpointsSummary>,
    /// Shards on which the user's code failed; the first 100.
    pub failed_shards: Vec<FailedShard>,
    /// Records of the data's files that are not part of the data set.
    pub records_skipped: Option<SkippedRecords>,
    /// Steps skipped because gradients were not finite; their records count as trained.
    #[serde(default)]
    pub steps_skipped: u64,
    /// What audits have found; `None` if the job audits no step.
    pub audit: Option<AuditSummary>,
    /// Touches of the rows of the model's tables, if it has tables.
    pub row_touches: Option<RowTouchesSummary>,
    /// Set if all copies of rows of tables, or of parts of a sharded optimizer's state, were lost.
    pub rows_lost: Option<RowsLoss>,
    /// Set if a state was lost of which there was no checkpoint.
    pub state_lost: Option<StateLoss>,
    /// Why the job failed or was refused.
    pub error: Option<String>,
    /// Why the job was stopped, unless a user stopped it: its deadline, or the exit of a worker.
    pub stop_reason: Option<String>,
    /// The model's summary text.
    pub model_summary: Option<String>,
    /// Means over all records, by metric, of an evaluated model; `None`: not finite.
    pub metrics: Option<BTreeMap<String, Option<f64>>>,
    /// Folder of the predictions.
    pub output: Option<String>,
    /// Path of the final model, if its export was requested and has succeeded.
    pub export: Option<String>,
    /// Why the tracking server does not have all metrics of the job.
    pub tracking_error: Option<String>,
    /// Digest of the final parameters, optimizer state and ledger: 16 hexadecimal digits.
    pub digest: Option<String>,
}

impl Summary {
    /// The summary as indented JSON, with a final newline.
    #[must_use]
    pub fn to_pretty_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a summary's keys are strings") + "\n"
    }

    /// The summary as JSON in one line.
    #[must_use]
    pub fn to_json_line(&self) -> String {
        serde_json::to_string(self).expect("a summary's keys are strings") + "\n"
    }

    /// The summary as JSON of at most `bytes` (at least 128 KiB): indented if it fits, else in one
    /// line, else with shortened lists. The fields about the end of the job are always retained.
    #[must_use]
    pub fn into_json_within(mut self, bytes: usize) -> String {
        let pretty = self.to_pretty_json();
        if pretty.len() <= bytes {
            return pretty;
        }
        let mut json = self.to_json_line();
        while json.len() > bytes {
            let evaluations = self.evaluations.as_mut().map(|known| &mut known.all);
            let lengths = [
                self.memberships.len(),
                self.failed_shards.len(),
                evaluations.as_ref().map_or(0, |all| all.len()),
                self.checkpoints.as_ref().map_or(0, |known| known.restored.len()),
            ];
            if lengths.iter().all(|len| *len == 0) {
                break;
            }
            // Retains the newest half of each list, and the first half of the failures.
            self.memberships.drain(..lengths[0].div_ceil(2));
            self.failed_shards.truncate(lengths[1] / 2);
            if let Some(all) = evaluations {
                all.drain(..lengths[2].div_ceil(2));
            }
            if let Some(known) = &mut self.checkpoints {
                known.restored.drain(..lengths[3].div_ceil(2));
            }
            json = self.to_json_line();
        }
        json
    }
}

/// Records over all epochs, by the group's ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordsSummary {
    /// Records of all epochs, or of `max_steps`; of a job that stopped early, the records that its
    /// steps counted.
    pub expected: u64,
    /// Distinct records in the final ledger.
    pub counted: u64,
    /// `expected` less `counted` and `not_trained`.
    pub missing: u64,
    /// Of a job that was stopped: records that it did not come to.
    #[serde(default)]
    pub not_trained: u64,
    /// Records absorbed more than once.
    pub repeated: u64,
}

/// Records that a reader has skipped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedRecords {
    /// Number of records that cannot be read.
    pub bad: u64,
    /// Number of records that were skipped for a null.
    pub nulls: u64,
    /// The first few of them: file, place and reason.
    pub first: Vec<String>,
    /// Number of files in the folders of the data that are not read, for their names.
    #[serde(default)]
    pub files: u64,
    /// The first of these files; empty without one.
    #[serde(default)]
    pub first_file: String,
}

/// Numbers of workers of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkersSummary {
    /// The largest group.
    pub peak: u32,
    /// The last group.
    #[serde(rename = "final")]
    pub last: u32,
    /// Table servers to keep, which are part of both.
    #[serde(default)]
    pub table_servers: u32,
    /// Workers started to replace one that had ended.
    pub restarts: u64,
    /// The spares; `None` without `--spares`.
    pub spares: Option<Spares>,
}

/// Why a generation was published; of several reasons the last in this list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// The first one.
    #[default]
    Start,
    /// Workers came.
    Join,
    /// Members left in order.
    Leave,
    /// A member was lost, or a link between members that live.
    Lost,
    /// A member did not answer its neighbours, though its process ran.
    Hung,
}

impl Cause {
    /// As it is shown, in JSON too.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Join => "join",
            Self::Leave => "leave",
            Self::Lost => "lost",
            Self::Hung => "hung",
        }
    }
}

/// Mean loss per record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossSummary {
    /// Of the first step.
    pub first: Option<f64>,
    /// Of the last step.
    pub last: Option<f64>,
}

/// Work per second, from the first group's start to the last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ThroughputSummary {
    /// Records counted per second.
    pub records_per_s: f64,
    /// Steps per second.
    pub steps_per_s: f64,
    /// Mean time of a step's all-reduce on the lowest rank, in milliseconds, with the wait for
    /// slower ranks.
    #[serde(default)]
    pub all_reduce_ms: f64,
    /// Time for which workers waited for storage that did not answer, summed over workers, in
    /// seconds.
    #[serde(default)]
    pub storage_wait_s: f64,
}

/// Evaluations of a job's model. The names of its fields are a public format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationsSummary {
    /// Evaluations of the job's steps, in order; the newest 1000.
    pub all: Vec<Evaluated>,
    /// The best evaluation by the selected metric.
    pub best: Option<BestEvaluation>,
    /// Whether training stopped early because evaluations did not improve.
    pub stopped_early: bool,
    /// Why the best model could not be exported, if its newest export failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export_error: Option<String>,
    /// What the best model has replaced, if that is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
}

/// The best evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BestEvaluation {
    /// Steps that the evaluated model contains.
    pub step: u64,
    /// The selected metric.
    pub metric: String,
    /// Its mean over the validation data.
    pub value: f64,
    /// Where the model is, if it was exported.
    pub export: Option<String>,
}

/// What the audits of a training job have found. The names of its fields are a public format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditSummary {
    /// Committed steps whose records were all computed by two workers, with equal results. A step
    /// that was committed just before its group was lost may not be counted.
    pub steps: u64,
    /// How often results differed, so that no worker applied the step and some were replaced.
    pub disagreements: u64,
    /// Workers that were replaced for it.
    pub workers_replaced: u64,
}

/// Losses of a state of which there was no checkpoint, with all workers or with all copies of rows.
/// The names of its fields are a public format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateLoss {
    /// Number of losses.
    pub count: u64,
    /// Steps that the last lost state contained.
    pub at_step: u64,
    /// Steps that all lost states contained, in sum.
    #[serde(default)]
    pub steps: u64,
    /// Their records.
    #[serde(default)]
    pub records: u64,
}

/// Records that a worker was working on when the user's code failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedShard {
    /// The worker.
    pub worker: WorkerId,
    /// The epoch.
    pub epoch: u32,
    /// The file.
    pub file: String,
    /// First record, counted within the file.
    pub start: u64,
    /// One past the last record, counted within the file.
    pub end: u64,
    /// The error of the user's code.
    pub error: String,
}

mod checkpoints;
mod membership_change;

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;
    use crate::Generation;
    use crate::status::tests::assert_full;

    pub(crate) fn membership() -> MembershipChange {
        MembershipChange {
            generation: Generation(2),
            cause: Cause::Lost,
            world_size: 2,
            at_step: 9,
            gap_ms: Some(3.0),
            detect_ms: Some(0.125),
            abort_ms: Some(0.25),
            agree_ms: Some(0.375),
            connect_ms: Some(0.5),
            state_ms: Some(0.625),
            first_step_ms: Some(1.125),
            lost: vec![WorkerId(3)],
            left: vec![WorkerId(4)],
            joined: vec![WorkerId(5)],
            promoted: vec![WorkerId(5)],
        }
    }

    pub(crate) fn checkpoints() -> CheckpointsSummary {
        CheckpointsSummary {
            dir: Some("s3://b/c".into()),
            newest: Some(SavedCheckpoint { step: 9, name: "step-9".into(), bytes: 400 }),
            saved: 2,
            failed: 1,
            damaged: 3,
            error: Some("disk full".into()),
            restored: vec![RestoredCheckpoint { step: 5, name: "step-5".into(), lost_steps: 6 }],
        }
    }

    /// A summary in which no field has its default value.
    fn full_summary() -> Summary {
        Summary {
            job: "mnist".into(),
            run_id: "00000000-0000-0000-0000-000000000007".into(),
            state: "completed".into(),
            steps: 10,
            epochs: 3,
            wall_s: 2.5,
            records: RecordsSummary {
                expected: 1920,
                counted: 1910,
                missing: 4,
                not_trained: 6,
                repeated: 1,
            },
            workers: WorkersSummary {
                peak: 4,
                last: 2,
                table_servers: 1,
                restarts: 3,
                spares: Some(Spares { desired: 2, caught_up: 1, promoted: 3 }),
            },
            memberships: vec![membership()],
            loss: LossSummary { first: Some(1.5), last: Some(0.25) },
            training_metrics: [("accuracy".into(), 0.5)].into(),
            throughput: ThroughputSummary {
                records_per_s: 20_000.0,
                steps_per_s: 100.0,
                all_reduce_ms: 1.5,
                storage_wait_s: 0.5,
            },
            allreduce_transport: Some("TCP".into()),
            evaluations: Some(EvaluationsSummary {
                all: vec![Evaluated {
                    step: 9,
                    records: 50,
                    metrics: [("accuracy".into(), Some(0.75))].into(),
                }],
                best: Some(BestEvaluation {
                    step: 9,
                    metric: "accuracy".into(),
                    value: 0.75,
                    export: Some("/best".into()),
                }),
                stopped_early: true,
                export_error: None,
                kept: Some(Kept { address: "/best.previous".into(), value: Some(0.875) }),
            }),
            checkpoints: Some(checkpoints()),
            failed_shards: vec![FailedShard {
                worker: WorkerId(3),
                epoch: 1,
                file: "part-000.bin".into(),
                start: 20,
                end: 30,
                error: "a bad record".into(),
            }],
            records_skipped: Some(SkippedRecords {
                bad: 2,
                nulls: 1,
                first: vec!["a.csv line 3: 1 column".into()],
                files: 3,
                first_file: "_SUCCESS".into(),
            }),
            steps_skipped: 4,
            audit: Some(AuditSummary { steps: 5, disagreements: 1, workers_replaced: 2 }),
            row_touches: Some(RowTouchesSummary {
                missing: 1,
                repeated: 2,
                ..crate::RowTouches { expected: 9, counted: 9 }.into()
            }),
            rows_lost: Some(RowsLoss { count: 1, at_step: 7, row_touches: 30, missing: Some(2) }),
            state_lost: Some(StateLoss { count: 1, at_step: 8, steps: 8, records: 90 }),
            error: Some("too many failures".into()),
            stop_reason: Some("the deadline of 60 s has passed".into()),
            model_summary: Some("3 3 5760".into()),
            metrics: Some([("loss".into(), Some(0.5))].into()),
            output: Some("/out".into()),
            export: Some("/model".into()),
            tracking_error: Some("refused".into()),
            digest: Some("0123456789abcdef".into()),
        }
    }

    #[test]
    fn the_keys_and_values_of_a_summary_are_stable() {
        let json = serde_json::to_value(full_summary()).unwrap();
        assert_full(&json, "summary");
        let expected = json!({
            "job": "mnist", "run_id": "00000000-0000-0000-0000-000000000007",
            "state": "completed", "steps": 10, "epochs": 3, "wall_s": 2.5,
            "records": {
                "expected": 1920, "counted": 1910, "missing": 4, "not_trained": 6, "repeated": 1,
            },
            "workers": {
                "peak": 4, "final": 2, "table_servers": 1, "restarts": 3,
                "spares": {"desired": 2, "caught_up": 1, "promoted": 3},
            },
            "memberships": [{
                "generation": 2, "cause": "lost", "world_size": 2, "at_step": 9, "gap_ms": 3.0,
                "detect_ms": 0.125, "abort_ms": 0.25, "agree_ms": 0.375, "connect_ms": 0.5,
                "state_ms": 0.625, "first_step_ms": 1.125, "lost": [3], "left": [4], "joined": [5],
                "promoted": [5],
            }],
            "loss": {"first": 1.5, "last": 0.25}, "training_metrics": {"accuracy": 0.5},
            "throughput": {
                "records_per_s": 20_000.0, "steps_per_s": 100.0, "all_reduce_ms": 1.5,
                "storage_wait_s": 0.5,
            },
            "allreduce_transport": "TCP",
            "evaluations": {
                "all": [{"step": 9, "records": 50, "metrics": {"accuracy": 0.75}}],
                "best": {
                    "step": 9, "metric": "accuracy", "value": 0.75, "export": "/best",
                },
                "stopped_early": true, "kept": {"address": "/best.previous", "value": 0.875},
            },
            "checkpoints": {
                "dir": "s3://b/c", "newest": {"step": 9, "name": "step-9", "bytes": 400},
                "saved": 2, "failed": 1, "damaged": 3, "error": "disk full",
                "restored": [{"step": 5, "name": "step-5", "lost_steps": 6}],
            },
            "failed_shards": [{
                "worker": 3, "epoch": 1, "file": "part-000.bin", "start": 20, "end": 30,
                "error": "a bad record",
            }],
            "records_skipped": {"bad": 2, "nulls": 1, "first": ["a.csv line 3: 1 column"],
                "files": 3, "first_file": "_SUCCESS"},
            "steps_skipped": 4,
            "audit": {"steps": 5, "disagreements": 1, "workers_replaced": 2},
            "row_touches": {"expected": 9, "counted": 9, "missing": 1, "repeated": 2},
            "rows_lost": {"count": 1, "at_step": 7, "row_touches": 30, "missing": 2},
            "state_lost": {"count": 1, "at_step": 8, "steps": 8, "records": 90},
            "error": "too many failures",
            "stop_reason": "the deadline of 60 s has passed", "model_summary": "3 3 5760",
            "metrics": {"loss": 0.5},
            "output": "/out", "export": "/model", "tracking_error": "refused",
            "digest": "0123456789abcdef",
        });
        assert_eq!(json, expected);
        let read: Summary = serde_json::from_value(json).unwrap();
        assert_eq!(read, full_summary());
    }

    #[test]
    fn a_loss_that_is_not_a_number_still_makes_valid_json() {
        let loss = |last| LossSummary { first: Some(1.0), last };
        let text = Summary { loss: loss(Some(f64::NAN)), ..full_summary() }.to_pretty_json();
        let read: Summary = serde_json::from_str(&text).unwrap();
        assert_eq!(read, Summary { loss: loss(None), ..full_summary() });
    }

    #[test]
    fn a_summary_fits_into_its_part_of_the_anchor_and_retains_how_the_job_ended() {
        assert_eq!(full_summary().into_json_within(128 << 10), full_summary().to_pretty_json());
        let named = MembershipChange { joined: (0..3000).map(WorkerId).collect(), ..membership() };
        let failed = FailedShard {
            worker: WorkerId(1),
            epoch: 0,
            file: "f".repeat(4096),
            start: 0,
            end: 1,
            error: "\u{1}".repeat(4096),
        };
        let long = Summary {
            memberships: (0..200)
                .map(|i| MembershipChange { generation: Generation(i), ..named.clone() })
                .collect(),
            failed_shards: vec![failed; 100],
            ..full_summary()
        };
        let text = long.clone().into_json_within(256 << 10);
        assert!(text.len() <= 256 << 10, "{} KiB", text.len() >> 10);
        let read: Summary = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (read.records, read.digest, read.error),
            (long.records, long.digest, long.error)
        );
        assert!(!read.memberships.is_empty() && !read.failed_shards.is_empty());
        assert_eq!(read.memberships.last().unwrap().generation, Generation(199));
    }
}
