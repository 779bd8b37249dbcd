//! When a record of a training job was trained, or will be.
//!
//! The order of an epoch's records is a function, and so is its division into steps. So nothing is
//! listed: a record's position follows from the inverse of the order.
//!
//! | of an epoch | comes from |
//! |---|---|
//! | position | the order's inverse, [`Order::position`] |
//! | step, and its records | the batch, and the state that the job began with |
//! | generation, workers | the recorded memberships |
//! | checkpoint before the step | the folder of checkpoints, or what the job has recorded of it |
//!
//! The workers of a step divide its records by their speeds, which nothing records: so which of
//! them has computed a record is known only if there was one.
//!
//! **Invariant:** no IO, and no list of an epoch's records.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use elasticdl_proto::{
    Cause, CheckpointsSummary, DATA_OF_PROGRAM, DataPart, FileList, Generation, LossSummary,
    MembershipChange, Order, OrderName, ShuffleMode, SkippedRecords, Split, Status, Summary,
    WorkerId,
};
use serde::{Serialize, Serializer};

pub use self::steps::{Begun, StepRecords, Steps};
use crate::job::{Batch, JobSpec, PersistedJob};

/// A record, as the user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordName {
    /// A record of a file, from 0.
    InFile {
        /// The path, absolute or as the job has it, or the end of it from the beginning of a name.
        file: String,
        /// Number of the record in the file.
        record: u64,
    },
    /// A record of the data set, from 0, numbered through its files.
    Number(u64),
}

/// What is known of a training job.
#[derive(Debug)]
pub struct JobFacts {
    /// The job's specification.
    pub spec: JobSpec,
    /// The files of its data set, with the numbers of records that are trained.
    pub files: FileList,
    /// The order of its records; `None` if no worker has reported it.
    pub order: Option<OrderName>,
    /// The state that its first group began with; `None` if it is not known.
    pub begun: Option<Begun>,
    /// How far it is.
    pub progress: JobProgress,
    /// Complete checkpoints in the job's folder, also those of other runs, in any order; `None` if
    /// the folder is not on this machine.
    pub checkpoints: Option<Vec<CompleteCheckpoint>>,
    /// The folder in which its workers run, to which paths of files are relative; `None` if it is
    /// not on this machine.
    pub folder: Option<PathBuf>,
}

/// How far a job is.
#[derive(Clone, Debug)]
pub struct JobProgress {
    /// As [`Status::state`].
    pub state: String,
    /// Whether it has ended.
    pub has_ended: bool,
    /// Records absorbed over all epochs.
    pub counted: u64,
    /// Steps whose update was skipped.
    pub steps_skipped: u64,
    /// Its memberships, oldest first, as far as they are known.
    pub memberships: Vec<MembershipChange>,
    /// Its checkpoints, as it has recorded them.
    pub checkpoints: Option<CheckpointsSummary>,
    /// Records of the files that the data set does not contain.
    pub records_skipped: Option<SkippedRecords>,
    /// The losses of its first and its last step, as far as it has recorded them.
    pub loss: LossSummary,
}

/// When a record was trained, or will be. The names of the fields are a public format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lineage {
    /// The job's name.
    pub job: String,
    /// As [`Status::state`].
    pub state: String,
    /// Path of the file that holds the record.
    pub file: String,
    /// Number of the record in its file, from 0.
    pub record_in_file: u64,
    /// What it is used for.
    pub part: RecordPart,
    /// Its number among the records that are trained, from 0, through all files; `None` for
    /// validation data.
    pub record: Option<u64>,
    /// Records of an epoch.
    pub records_per_epoch: u64,
    /// The order of the records.
    #[serde(serialize_with = "write_order")]
    pub order: OrderName,
    /// When it is trained: an entry for each epoch.
    pub epochs: Vec<EpochLineage>,
    /// What the entries don't say, in sentences.
    pub notes: Vec<String>,
}

/// What a record is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordPart {
    /// It is trained.
    Training,
    /// The model is evaluated on it.
    Validation,
}

/// The step of an epoch that trains a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EpochLineage {
    /// The epoch, from 0.
    pub epoch: u32,
    /// Whether the step has been made.
    pub state: StepState,
    /// Position in the epoch's order, from 0.
    pub position: u64,
    /// The step, from 1; `None` if it can't be derived, or was made by an earlier job.
    pub step: Option<u64>,
    /// First position of the step's records, and one past the last.
    pub step_positions: Option<(u64, u64)>,
    /// The generation that committed the step; `None` if that is not recorded.
    pub generation: Option<Generation>,
    /// Its members; `None` if that is not recorded.
    pub workers: Option<Vec<WorkerId>>,
    /// Whether the step was committed before, too, in a state that was lost with all workers.
    pub was_repeated: bool,
    /// The newest known checkpoint of fewer steps.
    pub checkpoint: Option<CompleteCheckpoint>,
}

/// Whether a step has been made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepState {
    /// By an earlier job, with whose checkpoint this one began.
    Before,
    /// The job has ended, or ends, without it.
    NotTrained,
    /// Not yet.
    ToCome,
    /// By this job.
    Trained,
}

impl StepState {
    /// As it is shown, in JSON too.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::NotTrained => "not-trained",
            Self::ToCome => "to-come",
            Self::Trained => "trained",
        }
    }
}

/// A complete checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct CompleteCheckpoint {
    /// Steps that it contains.
    pub step: u64,
    /// Its folder's name.
    pub name: String,
}

impl CompleteCheckpoint {
    /// The checkpoint in a folder of this name; `None` if that is not the name of one.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        let step = name.strip_prefix("step-")?.split('-').next()?;
        Some(Self { step: step.parse().ok()?, name: name.to_owned() })
    }

    /// Identifies the run that wrote it.
    #[must_use]
    pub fn run(&self) -> Option<&str> {
        self.name.split('-').nth(2)
    }
}

/// Why something is not known of a job's records.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LineageError {
    /// No record has this name, or several files have it: name another one.
    #[error("{0}")]
    NoSuchRecord(String),
    /// The job has not made this step: name another one.
    #[error("{0}")]
    NoSuchStep(String),
    /// The job trains no records.
    #[error("the job trains no records: it evaluates a model, or predicts")]
    NotTraining,
    /// No order is recorded. A worker reports it once it has looked at the data.
    #[error("the order of the job's records is not known: no worker has reported it yet")]
    OrderUnknown,
    /// The steps do not follow from what is recorded, for this reason.
    #[error("the steps are not known: {0}")]
    StepsUnknown(&'static str),
}

impl JobFacts {
    /// What is known of the job `record`, which has its list of files; `None` if no worker has
    /// described its data.
    #[must_use]
    pub fn of_record(record: &PersistedJob, progress: JobProgress) -> Option<Self> {
        Some(Self {
            spec: record.spec().clone(),
            files: record.file_list()?.clone(),
            order: record.order(),
            begun: record.begun_with().map(|(records, step)| Begun { step, records }),
            progress: progress.with_older(record.memberships()),
            checkpoints: None,
            folder: None,
        })
    }

    /// When the record was trained, or will be.
    ///
    /// # Errors
    /// [`LineageError`].
    pub fn lineage(&self, record: &RecordName) -> Result<Lineage, LineageError> {
        let Self { spec, progress, .. } = self;
        if !spec.options.work.trains() {
            return Err(LineageError::NotTraining);
        }
        let order = self.order_name()?;
        let counts: Vec<u64> = self.files.iter().map(|file| file.records).collect();
        let found = self.find(record, &counts)?;
        let mut lineage = Lineage {
            job: spec.name.clone(),
            state: progress.state.clone(),
            file: found.file,
            record_in_file: found.in_file,
            part: RecordPart::Validation,
            record: None,
            records_per_epoch: self.files.records(),
            order,
            epochs: Vec::new(),
            notes: Vec::new(),
        };
        if let Some(record) = found.trained {
            let order = Order::named(order, &counts);
            (lineage.part, lineage.record) = (RecordPart::Training, Some(record));
            let entry = |epoch| self.entry(epoch, order.position(epoch, record));
            lineage.epochs = (0..spec.options.epochs).map(entry).collect();
        }
        lineage.notes = self.notes(&lineage);
        Ok(lineage)
    }

    /// The division of the records into steps.
    ///
    /// # Errors
    /// [`LineageError::StepsUnknown`].
    pub fn steps(&self) -> Result<Steps, LineageError> {
        let begun = self.begun.ok_or(LineageError::StepsUnknown(
            "the job began with a checkpoint, and how many records that contained is not recorded",
        ))?;
        let batch = match (self.spec.options.batch, &*self.progress.memberships) {
            (Batch::Global(records), _) => records.get(),
            (Batch::PerWorker(records), [only]) if only.cause == Cause::Start => {
                let workers = only.world_size.saturating_sub(self.spec.options.table_servers);
                records.get() * u64::from(workers.max(1))
            }
            (Batch::PerWorker(_), _) => {
                return Err(LineageError::StepsUnknown(
                    "with --minibatch-size the records of a step depend on the number of workers, \
                     which has changed",
                ));
            }
        };
        Ok(Steps::new(begun, self.files.records(), batch))
    }

    /// The folder of the job's checkpoints, if it is a path.
    #[must_use]
    pub fn checkpoint_dir(&self) -> Option<PathBuf> {
        let dir = &self.spec.options.checkpoints.as_ref()?.dir;
        let path = Path::new(dir.strip_prefix("file://").unwrap_or(dir));
        (!dir.contains("://") || dir.starts_with("file://")).then(|| path.to_owned())
    }

    /// The order of the records.
    ///
    /// # Errors
    /// [`LineageError::OrderUnknown`].
    pub fn order(&self) -> Result<Order, LineageError> {
        let counts: Vec<u64> = self.files.iter().map(|file| file.records).collect();
        Ok(Order::named(self.order_name()?, &counts))
    }

    fn order_name(&self) -> Result<OrderName, LineageError> {
        self.order.ok_or(LineageError::OrderUnknown)
    }

    fn find(&self, record: &RecordName, counts: &[u64]) -> Result<Found, LineageError> {
        let split = self.spec.options.validation.as_ref().and_then(|validation| validation.split);
        let split = split.map(|thousandths| Split::new(thousandths, self.spec.options.seed));
        let (file, in_file) = match record {
            RecordName::InFile { file, record } => (self.file_named(file)?, *record),
            RecordName::Number(number) if split.is_some() && counts.len() > 1 => {
                return Err(LineageError::NoSuchRecord(format!(
                    "the job has --validation-split, so records are numbered within their files: \
                     give FILE:{number}"
                )));
            }
            RecordName::Number(number) => self.file_of(*number, counts)?,
        };
        let listed = self.files.iter().nth(file).expect("it is one of them");
        let part = split
            .map_or((DataPart::Training, in_file), |split| split.part_of(&listed.path, in_file));
        let first: u64 = counts[..file].iter().sum();
        let trained = match part {
            (DataPart::Validation, _) => None,
            (DataPart::Training, number) if number < counts[file] => Some(first + number),
            (DataPart::Training, _) => {
                let what = if split.is_some() { "training records" } else { "records" };
                let (path, count) = (&listed.path, counts[file]);
                return Err(LineageError::NoSuchRecord(format!(
                    "{path} has {count} {what}, and no record {in_file}"
                )));
            }
        };
        Ok(Found { file: listed.path, in_file, trained })
    }

    /// The file that holds the record of this number, and the record's number in it.
    fn file_of(&self, number: u64, counts: &[u64]) -> Result<(usize, u64), LineageError> {
        let mut first = 0;
        for (file, count) in counts.iter().enumerate() {
            // The last records of a single file may be validation data.
            if number < first + count || counts.len() == 1 {
                return Ok((file, number - first));
            }
            first += count;
        }
        Err(LineageError::NoSuchRecord(format!(
            "the data set has {first} records, 0 to {}",
            first.saturating_sub(1)
        )))
    }

    fn entry(&self, epoch: u32, position: u64) -> EpochLineage {
        let Self { progress, begun, spec, .. } = self;
        let number = u64::from(epoch) * self.files.records() + position;
        let found = self.steps().ok().and_then(|steps| steps.of(epoch, position));
        let step = found.map(|found| found.step);
        let is_beyond = spec.options.max_steps.zip(step).is_some_and(|(max, step)| step > max);
        let state = if begun.is_some_and(|begun| number < begun.records) {
            StepState::Before
        } else if number < progress.counted {
            StepState::Trained
        } else if progress.has_ended || is_beyond {
            StepState::NotTrained
        } else {
            StepState::ToCome
        };
        let trained = step.filter(|_| state == StepState::Trained);
        let membership = trained.and_then(|step| progress.membership_of(step));
        EpochLineage {
            epoch,
            state,
            position,
            step,
            step_positions: found.map(|found| (found.start, found.end)),
            generation: membership.map(|at| progress.memberships[at].generation),
            workers: membership.and_then(|at| progress.members(at)),
            was_repeated: trained.is_some_and(|step| progress.was_lost(step)),
            checkpoint: step.and_then(|step| self.checkpoint_before(step)),
        }
    }

    /// The newest checkpoint of fewer than `step` steps: of those of this run that are there, and
    /// of those that groups have started from.
    fn checkpoint_before(&self, step: u64) -> Option<CompleteCheckpoint> {
        let recorded = self.progress.checkpoints.as_ref()?;
        let known = |step, name: &String| CompleteCheckpoint { step, name: name.clone() };
        let newest = recorded.newest.as_ref().map(|newest| known(newest.step, &newest.name));
        let restored = recorded.restored.iter().map(|from| known(from.step, &from.name));
        let own = match &self.checkpoints {
            Some(there) => there.iter().filter(|known| self.is_own(known)).cloned().collect(),
            None => Vec::from_iter(newest),
        };
        own.into_iter().chain(restored).filter(|known| known.step < step).max()
    }

    fn notes(&self, lineage: &Lineage) -> Vec<String> {
        let Self { progress, spec, .. } = self;
        let mut notes = Vec::new();
        if lineage.part == RecordPart::Validation {
            notes.push(
                "the record is validation data (--validation-split): no step trains it".into(),
            );
        }
        let skipped = progress.records_skipped.as_ref();
        if let Some(skipped) = skipped.filter(|skipped| skipped.bad + skipped.nulls > 0) {
            let (count, first) = (skipped.bad + skipped.nulls, skipped.first.first());
            notes.push(format!(
                "{count} records of the files were skipped: they are no part of the data set, and \
                 have no number{}",
                first.map(|first| format!(" (the first: {first})")).unwrap_or_default()
            ));
        }
        if spec.options.training_data == DATA_OF_PROGRAM {
            notes
                .push("the program reads its data itself: records are those of its sampler".into());
        }
        if spec.options.shuffle.mode == ShuffleMode::Auto && lineage.order.mode == ShuffleMode::None
        {
            notes.push(
                "the program orders its records itself: numbers are those of its order".into(),
            );
        }
        let is_trained = |row: &EpochLineage| row.state == StepState::Trained;
        let trained: Vec<&EpochLineage> =
            lineage.epochs.iter().filter(|row| is_trained(row)).collect();
        if !lineage.epochs.is_empty()
            && let Err(why) = self.steps()
        {
            notes.push(why.to_string());
        } else if trained.iter().any(|row| row.workers.is_none()) {
            notes.push(
                "of some steps the workers are not known: the job's older memberships are not kept"
                    .into(),
            );
        }
        if trained.iter().any(|row| row.workers.as_ref().is_some_and(|all| all.len() > 1)) {
            notes.push(
                "the workers divide the records of a step by their speeds: which of them computed \
                 this record is not recorded"
                    .into(),
            );
        }
        if trained.iter().any(|row| row.was_repeated) {
            notes.push(
                "a step was trained again, because the state that contained it was lost with all \
                 workers; it is in the model once"
                    .into(),
            );
        }
        if progress.steps_skipped > 0 && !trained.is_empty() {
            notes.push(format!(
                "the update of {} steps was skipped (--on-nonfinite skip): of which is not \
                 recorded",
                progress.steps_skipped
            ));
        }
        notes
    }
}

/// As users write the order, not as checkpoints name it.
fn write_order<S: Serializer>(order: &OrderName, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Shown {
        mode: &'static str,
        seed: u64,
        block: u64,
        buffer: u64,
    }
    let OrderName { mode, seed, block, buffer } = *order;
    Shown { mode: mode.name(), seed, block, buffer }.serialize(serializer)
}

/// A record of the data.
struct Found {
    file: String,
    in_file: u64,
    /// Its number among the records that are trained; `None` for validation data.
    trained: Option<u64>,
}

impl JobProgress {
    /// Adds the older ones of `recorded` to the memberships.
    fn with_older(mut self, recorded: &[MembershipChange]) -> Self {
        let first = self.memberships.first().map(|first| first.generation);
        let is_older =
            |known: &&MembershipChange| first.is_none_or(|first| known.generation < first);
        let older = recorded.iter().filter(is_older).cloned();
        self.memberships = older.chain(self.memberships.iter().cloned()).collect();
        self
    }

    /// Number of the membership whose group committed `step`: the last one that formed before it.
    fn membership_of(&self, step: u64) -> Option<usize> {
        let formed = |change: &MembershipChange| {
            // One that was replaced before its first step has no pause, though members survived.
            let is_new = change.joined.len() == change.world_size as usize;
            change.gap_ms.is_some() || is_new
        };
        self.memberships.iter().rposition(|change| formed(change) && change.at_step < step)
    }

    /// The members of the membership number `at`; `None` if the first memberships are not known.
    fn members(&self, at: usize) -> Option<Vec<WorkerId>> {
        self.memberships.first().filter(|first| first.cause == Cause::Start)?;
        let mut members = BTreeSet::new();
        for change in &self.memberships[..=at] {
            for gone in change.lost.iter().chain(&change.left) {
                members.remove(gone);
            }
            members.extend(&change.joined);
        }
        let count = self.memberships[at].world_size as usize;
        (members.len() == count).then(|| members.into_iter().collect())
    }

    /// Whether a state that contained `step` was lost with all workers.
    fn was_lost(&self, step: u64) -> bool {
        let restored = self.checkpoints.iter().flat_map(|known| &known.restored);
        restored
            .into_iter()
            .any(|from| from.step < step && step <= from.step.saturating_add(from.lost_steps))
    }
}

impl From<Summary> for JobProgress {
    fn from(summary: Summary) -> Self {
        Self {
            state: summary.state.into_owned(),
            has_ended: true,
            counted: summary.records.counted,
            steps_skipped: summary.steps_skipped,
            memberships: summary.memberships,
            checkpoints: summary.checkpoints,
            records_skipped: summary.records_skipped,
            loss: summary.loss,
        }
    }
}

impl From<Status> for JobProgress {
    fn from(status: Status) -> Self {
        Self {
            state: status.state.into_owned(),
            has_ended: false,
            counted: status.records_counted,
            steps_skipped: status.steps_skipped,
            memberships: status.memberships,
            checkpoints: status.checkpoints,
            records_skipped: None,
            loss: LossSummary::default(),
        }
    }
}

mod file_names;
mod made_again;
mod steps;

#[cfg(test)]
mod tests;
