//! Whether a step that is made once more is one of the job: the step, the checkpoint before it, and
//! the data.

use std::path::Path;

use super::{CompleteCheckpoint, JobFacts, LineageError, StepRecords};

impl JobFacts {
    /// The records of `step`, which the job has made.
    ///
    /// # Errors
    /// [`LineageError::StepsUnknown`], and [`LineageError::NoSuchStep`] if the job has not made it.
    pub fn made(&self, step: u64) -> Result<StepRecords, LineageError> {
        let name = &self.spec.name;
        let Some(found) = self.steps()?.records_of(step) else {
            let begun = self.begun.unwrap_or_default().step;
            return Err(LineageError::NoSuchStep(format!(
                "the job {name} began with the state of step {begun}: step {step} is none of its \
                 own"
            )));
        };
        let number = u64::from(found.epoch) * self.files.records() + found.start;
        if number < self.progress.counted {
            return Ok(found);
        }
        let last = self.last_made().unwrap_or_default();
        Err(LineageError::NoSuchStep(match self.progress.has_ended {
            true => format!("the job {name} has ended with step {last}: it has no step {step}"),
            false => format!(
                "the job {name} is at step {last}, as far as is known: it has not made step {step}"
            ),
        }))
    }

    /// The last step that the job has made; `None` if it has made none, or the steps are not known.
    #[must_use]
    pub fn last_made(&self) -> Option<u64> {
        let (last, records) = (self.progress.counted.checked_sub(1)?, self.files.records().max(1));
        let epoch = u32::try_from(last / records).ok()?;
        self.steps().ok()?.of(epoch, last % records).map(|found| found.step)
    }

    /// Whether a checkpoint is of this run, or one that a group has started from.
    #[must_use]
    pub fn is_own(&self, checkpoint: &CompleteCheckpoint) -> bool {
        let Some(recorded) = &self.progress.checkpoints else { return false };
        let newest = recorded.newest.as_ref();
        let newest = newest.and_then(|newest| CompleteCheckpoint::parse(&newest.name));
        let run = newest.as_ref().and_then(CompleteCheckpoint::run);
        (run.is_some() && checkpoint.run() == run)
            || recorded.restored.iter().any(|from| from.name == checkpoint.name)
    }

    /// How the data or the order of `other`, which has the options of this job, differs from this
    /// job's. Folders may differ, unless the names of the files decide what is validation data.
    #[must_use]
    pub fn difference_from(&self, other: &Self) -> Option<String> {
        if self.files.len() != other.files.len() {
            return Some(format!(
                "the job's data set has {} files, and this one {}",
                self.files.len(),
                other.files.len()
            ));
        }
        let has_split = self.spec.options.validation.as_ref().is_some_and(|it| it.split.is_some());
        let is_same_name = |a: &str, b: &str| match has_split {
            true => a == b,
            false => Path::new(a).file_name() == Path::new(b).file_name(),
        };
        let mut pairs = self.files.iter().zip(other.files.iter());
        let differ = pairs.find(|(a, b)| a.records != b.records || !is_same_name(&a.path, &b.path));
        if let Some((a, b)) = differ {
            return Some(format!(
                "the job's data set has {} with {} records where this one has {} with {}",
                a.path, a.records, b.path, b.records
            ));
        }
        match (self.order, other.order) {
            (Some(a), Some(b)) if a != b => {
                Some(format!("the job's records are in the order of {a}, and these in that of {b}"))
            }
            _ => None,
        }
    }
}
