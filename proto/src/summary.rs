//! The summary of a job, for the user and for programs.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::{Generation, WorkerId};
use crate::message::Evaluated;

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
    /// Every generation, in order. Limited to the newest 10,000, and to those that name 100,000
    /// workers together.
    pub memberships: Vec<MembershipChange>,
    /// Mean loss per record.
    pub loss: LossSummary,
    /// From the first group's start to the last report.
    pub throughput: ThroughputSummary,
    /// What gradients were summed over, in words, at the end.
    #[serde(alias = "sums_over")]
    pub allreduce_transport: Option<String>,
    /// Evaluations, if there is validation data.
    pub evaluations: Option<EvaluationsSummary>,
    /// Where the job has to do with checkpoints.
    pub checkpoints: Option<CheckpointsSummary>,
    /// Shards on which the user's code failed; the first 100.
    pub failed_shards: Vec<FailedShard>,
    /// Steps whose gradients were skipped because they were not finite; their records count as
    /// trained.
    #[serde(default)]
    pub steps_skipped: u64,
    /// Set if all workers were lost with a state of which there was no checkpoint.
    #[serde(default)]
    pub state_lost: Option<StateLoss>,
    /// Why the job failed or was refused.
    pub error: Option<String>,
    /// The model's summary text.
    pub model_summary: Option<String>,
    /// Means over all records, by metric, of an evaluated model; `None` for a mean that is not
    /// finite.
    pub metrics: Option<BTreeMap<String, Option<f64>>>,
    /// Folder of the predictions.
    pub output: Option<String>,
    /// Path of the final model, if its export was requested and has succeeded.
    pub export: Option<String>,
    /// Digest of the final parameters, optimizer state and ledger: 16 hexadecimal digits.
    pub digest: Option<String>,
}

/// Records over all epochs, by the group's ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordsSummary {
    /// Records of all epochs; for a job that `max_steps` or the user ended earlier, the records
    /// that its steps counted.
    pub expected: u64,
    /// Distinct records in the final ledger.
    pub counted: u64,
    /// `expected` less `counted`.
    pub missing: u64,
    /// Records absorbed more than once.
    pub repeated: u64,
}

/// Numbers of workers of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkersSummary {
    /// The largest group.
    pub peak: u32,
    /// The last group.
    #[serde(rename = "final")]
    pub last: u32,
    /// Workers started to replace one that had ended.
    pub restarts: u64,
}

/// A membership change: its cause, and the pause that it caused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MembershipChange {
    /// The generation.
    pub generation: Generation,
    /// Cause of the change.
    pub cause: Cause,
    /// Number of members.
    pub world_size: u32,
    /// Steps committed when it formed (or, if it never did, when it was published).
    pub at_step: u64,
    /// From the last commit before to the first one in it, on the member that lost the most time.
    /// `None` for the first generation, and for one that was replaced before it committed a step.
    /// All in milliseconds.
    pub gap_ms: Option<f64>,
    /// Part of the gap: until that member detected the failure (a link's error, or the arrival of a
    /// membership that aborts the step), or until the switch was agreed.
    pub detect_ms: Option<f64>,
    /// Part of the gap: until its training thread was out of the collective call or the user's
    /// code, and its links were down.
    pub abort_ms: Option<f64>,
    /// Part of the gap: until the new membership was known.
    pub agree_ms: Option<f64>,
    /// Part of the gap: until the new links were connected.
    pub connect_ms: Option<f64>,
    /// Part of the gap: until all ranks held the same state.
    pub state_ms: Option<f64>,
    /// Part of the gap: until the first step was committed.
    pub first_step_ms: Option<f64>,
    /// Members of the previous generation that were lost.
    pub lost: Vec<WorkerId>,
    /// Members of the previous generation that left in order.
    pub left: Vec<WorkerId>,
    /// Members that were not in the previous generation.
    pub joined: Vec<WorkerId>,
}

impl MembershipChange {
    /// The parts of the gap in order, with their names.
    #[must_use]
    pub fn phases(&self) -> [(&'static str, Option<f64>); 6] {
        [
            ("detect", self.detect_ms),
            ("abort", self.abort_ms),
            ("agree", self.agree_ms),
            ("connect", self.connect_ms),
            ("state", self.state_ms),
            ("first step", self.first_step_ms),
        ]
    }

    /// Workers that it names.
    #[must_use]
    pub fn named(&self) -> usize {
        self.lost.len() + self.left.len() + self.joined.len()
    }
}

/// Why a generation was published; of several reasons the last in this list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// The first one.
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

    /// The one of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Start, Self::Join, Self::Leave, Self::Lost, Self::Hung]
            .into_iter()
            .find(|c| c.name() == name)
    }
}

/// Mean loss per record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossSummary {
    /// Of the first report.
    pub first: Option<f64>,
    /// Of the last report.
    pub last: Option<f64>,
}

/// Work per second, from the first group's start to the last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ThroughputSummary {
    /// Records counted per second.
    pub records_per_s: f64,
    /// Steps per second.
    pub steps_per_s: f64,
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
}

/// A job's checkpoints. The names of its fields are a public format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointsSummary {
    /// Their folder; `None` if the job writes none and only started from another job's checkpoint.
    pub dir: Option<String>,
    /// The newest complete one.
    pub newest: Option<SavedCheckpoint>,
    /// Number of completed checkpoints.
    pub saved: u64,
    /// Number of checkpoints that could not be written.
    pub failed: u64,
    /// Number of checkpoints that were found damaged when a group tried to start from them.
    pub damaged: u64,
    /// Error of the last failed write; `None` after the next successful one.
    pub error: Option<String>,
    /// Checkpoints from which the group started; the newest 100.
    pub restored: Vec<RestoredCheckpoint>,
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedCheckpoint {
    /// Steps that it contains.
    pub step: u64,
    /// Its folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
}

/// A checkpoint from which the group started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredCheckpoint {
    /// Steps that it contains.
    pub step: u64,
    /// Its folder.
    pub name: String,
    /// Steps committed after it, as far as the master knew: this work is repeated.
    pub lost_steps: u64,
}

/// Losses of a state, with all workers, of which there was no checkpoint. The names of its fields
/// are a public format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateLoss {
    /// Number of losses.
    pub count: u64,
    /// Steps that the last lost state contained.
    pub at_step: u64,
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
