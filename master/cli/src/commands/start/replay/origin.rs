//! The job whose step is made once more.

use std::path::{Path, PathBuf};

use elasticdl_master::job::{Batch, JobSpec};
use elasticdl_master::jobdir;
use elasticdl_master::kube::client::ClusterChoice;
use elasticdl_master::lineage::{CompleteCheckpoint, JobFacts, LineageError};
use elasticdl_proto::{DATA_OF_PROGRAM, split_sources};

use crate::args::{JobOptions, TrainingOptions};
use crate::backend;
use crate::process::Failure;

/// The job whose step is made once more, as its directory describes it.
#[derive(Debug)]
pub(super) struct Origin {
    pub(super) facts: JobFacts,
    /// Its directory.
    pub(super) root: PathBuf,
}

impl Origin {
    /// The job that the options name; `None` if they name none.
    pub(super) fn find(options: &JobOptions) -> Result<Option<Self>, Failure> {
        let named = options.job_name.as_ref().map(|name| jobdir::directory_of(Path::new(name)));
        let Some(root) = options.job_dir.clone().or(named) else { return Ok(None) };
        let root = std::path::absolute(&root).unwrap_or(root);
        let facts = backend::find(&root, &ClusterChoice::default())?.facts()?;
        Ok(Some(Self { facts, root }))
    }

    /// Checks that the job has made `step`.
    pub(super) fn check_step(&self, step: u64) -> Result<(), Failure> {
        self.facts.made(step).map(drop).map_err(|error| match error {
            LineageError::NoSuchStep(why) => Failure::usage(format!("--replay-step: {why}")),
            error => Failure::failed(format!("--replay-step: {error}")),
        })
    }

    /// Sets the training data to the job's, unless it is given.
    pub(super) fn complete_data(&self, options: &mut TrainingOptions) {
        let (given, recorded) =
            (&mut options.data.training_data, &self.facts.spec.options.training_data);
        if given.is_empty() && recorded != DATA_OF_PROGRAM {
            *given = split_sources(recorded).map(str::to_owned).collect();
        }
    }

    /// Makes `spec` that of the job in what decides its steps. An option that is given must agree.
    pub(super) fn complete(
        &self,
        spec: &mut JobSpec,
        is_given: &dyn Fn(&str) -> bool,
    ) -> Result<(), Failure> {
        let job = &self.facts.spec;
        let split = |spec: &JobSpec| spec.options.validation.as_ref().and_then(|it| it.split);
        let (recorded, mut own) = (split(job), split(spec));
        agree(is_given("validation_split"), &mut own, &recorded, |split| {
            let fraction = |split| format!("--validation-split {}", f64::from(split) / 1000.0);
            split.map_or("no --validation-split".into(), |split| fraction(split.get()))
        })?;
        spec.options.validation.clone_from(&job.options.validation);
        if let Some(validation) = &mut spec.options.validation {
            validation.data.clone_from(&spec.options.training_data);
        }
        agree(is_given("num_epochs"), &mut spec.options.epochs, &job.options.epochs, |epochs| {
            format!("--num-epochs {epochs}")
        })?;
        agree(
            is_given("global_batch_size"),
            &mut spec.options.batch,
            &job.options.batch,
            |batch| match batch {
                Batch::Global(records) => format!("--global-batch-size {records}"),
                Batch::PerWorker(records) => format!("--minibatch-size {records}"),
            },
        )?;
        agree(is_given("seed"), &mut spec.options.seed, &job.options.seed, |seed| {
            format!("--seed {seed}")
        })?;
        agree(is_given("shuffle"), &mut spec.options.shuffle, &job.options.shuffle, |shuffle| {
            let buffer = shuffle.buffer.map(|records| format!(":{records}")).unwrap_or_default();
            format!("--shuffle {}{buffer}", shuffle.mode.name())
        })?;
        agree(
            is_given("micro_batch"),
            &mut spec.options.micro_batch,
            &job.options.micro_batch,
            |records| records.map_or("no --micro-batch".into(), |n| format!("--micro-batch {n}")),
        )?;
        agree(
            is_given("deterministic"),
            &mut spec.options.deterministic,
            &job.options.deterministic,
            |it| switch("--deterministic", *it),
        )?;
        agree(
            is_given("bad_records"),
            &mut spec.options.bad_records_max,
            &job.options.bad_records_max,
            |max| match max {
                0 => "--bad-records fail".into(),
                max => format!("--bad-records skip:{max}"),
            },
        )?;
        agree(
            is_given("on_nonfinite"),
            &mut spec.options.on_nonfinite,
            &job.options.on_nonfinite,
            |what| format!("--on-nonfinite {what:?}").to_lowercase(),
        )?;
        agree(
            is_given("wire_dtype"),
            &mut spec.options.wire_dtype,
            &job.options.wire_dtype,
            |dtype| format!("--wire-dtype {dtype:?}").to_lowercase(),
        )?;
        agree(
            is_given("param_dtype"),
            &mut spec.options.param_dtype,
            &job.options.param_dtype,
            |dtype| format!("--param-dtype {dtype:?}").to_lowercase(),
        )?;
        agree(
            is_given("shard_optimizer"),
            &mut spec.options.shard_optimizer,
            &job.options.shard_optimizer,
            |it| switch("--shard-optimizer", *it),
        )?;
        agree(is_given("table_lag"), &mut spec.options.table_lag, &job.options.table_lag, |lag| {
            format!("--table-lag {lag}")
        })
    }

    /// The loss of `step`, if the job has recorded it.
    pub(super) fn loss_of(&self, step: u64) -> Option<f64> {
        let progress = &self.facts.progress;
        match step {
            _ if progress.has_ended && Some(step) == self.facts.last_made() => progress.loss.last,
            _ if step == self.facts.begun?.step + 1 => progress.loss.first,
            _ => None,
        }
    }

    /// Keeps the checkpoints that are the job's.
    pub(super) fn keep_own(&self, found: &mut Vec<(CompleteCheckpoint, String)>) {
        found.retain(|(known, _)| self.facts.is_own(known));
    }
}

/// Makes `own` what is `recorded` of the job, unless it is given and differs.
fn agree<T: Clone + PartialEq>(
    is_given: bool,
    own: &mut T,
    recorded: &T,
    shown: impl Fn(&T) -> String,
) -> Result<(), Failure> {
    if is_given && own != recorded {
        return Err(Failure::usage(format!(
            "--replay-step: the job was started with {}, not with {}; leave the option out: the \
             job's own is taken",
            shown(recorded),
            shown(own)
        )));
    }
    own.clone_from(recorded);
    Ok(())
}

fn switch(option: &str, is_on: bool) -> String {
    if is_on { option.into() } else { format!("no {option}") }
}

#[cfg(test)]
mod tests {
    use elasticdl_master::lineage::{Begun, JobProgress};
    use elasticdl_proto::{FileList, LossSummary};

    use super::*;
    use crate::commands::parse_start;
    use crate::commands::start::WorkOptions;
    use crate::process::EXIT_USAGE;

    fn spec(options: &str) -> JobSpec {
        parse_start(&format!("train --local {options} -- python t.py"))
            .unwrap()
            .spec("j".into(), |_, path| Ok(path.into()))
            .map_err(|e| e.text)
            .unwrap()
    }

    /// A job of 5 epochs of 100 records that has ended with step 10.
    fn origin(options: &str) -> Origin {
        let progress = JobProgress {
            state: "completed".into(),
            has_ended: true,
            counted: 500,
            steps_skipped: 0,
            memberships: Vec::new(),
            checkpoints: None,
            records_skipped: None,
            loss: LossSummary { first: Some(9.0), last: Some(1.0) },
        };
        let facts = JobFacts {
            spec: spec(options),
            files: FileList::pack([("d/a.csv", 100)]),
            order: None,
            begun: Some(Begun::default()),
            progress,
            checkpoints: None,
            folder: None,
        };
        Origin { facts, root: PathBuf::new() }
    }

    const JOB: &str = "--training-data d --seed 7 --global-batch-size 50 --num-epochs 5 \
                       --shuffle record --validation-split 0.2 --deterministic";

    #[test]
    fn options_that_decide_a_step_are_those_of_the_job_and_a_given_one_that_differs_is_refused() {
        let origin = origin(JOB);
        let completed = |options: &str| {
            let mut spec = spec(options);
            let is_given = |id: &str| options.contains(&format!("--{}", id.replace('_', "-")));
            origin.complete(&mut spec, &is_given).map(|()| spec)
        };
        for options in ["--training-data d", JOB] {
            assert_eq!(completed(options).unwrap(), origin.facts.spec, "{options}");
        }
        for (given, recorded) in [
            ("--seed 0", "--seed 7"),
            ("--global-batch-size 64", "--global-batch-size 50"),
            ("--num-epochs 4", "--num-epochs 5"),
            ("--shuffle none", "--shuffle record"),
            ("--shuffle block:20", "--shuffle record"),
            ("--validation-split 0.1", "--validation-split 0.2"),
            ("--micro-batch 5", "no --micro-batch"),
            ("--on-nonfinite skip", "--on-nonfinite fail"),
            ("--bad-records skip:7", "--bad-records fail"),
        ] {
            let refused = completed(&format!("--training-data d {given}")).unwrap_err();
            let expected = format!("started with {recorded}, not with {given};");
            assert!(refused.text.contains(&expected), "{given}: {}", refused.text);
            assert_eq!(refused.code, EXIT_USAGE);
        }
    }

    #[test]
    fn the_training_data_of_the_job_is_taken_unless_it_is_given() {
        let origin = origin("--training-data d --training-data e");
        let data = |options: &str| {
            let mut request = parse_start(&format!("train --local {options} -- true")).unwrap();
            let WorkOptions::Training(training, _) = &mut request.work else { panic!() };
            origin.complete_data(training);
            training.data.training_data.clone()
        };
        assert_eq!(
            (data(""), data("--training-data f")),
            (vec!["d".to_owned(), "e".into()], vec!["f".to_owned()])
        );
    }

    #[test]
    fn a_step_that_the_job_has_not_made_is_refused_and_the_first_and_last_have_a_loss() {
        let origin = origin(JOB);
        assert_eq!([1, 5, 10].map(|step| origin.loss_of(step)), [Some(9.0), None, Some(1.0)]);
        assert!(origin.check_step(10).is_ok());
        let refused = origin.check_step(11).unwrap_err();
        assert_eq!(refused.code, EXIT_USAGE);
        assert!(refused.text.contains("ended with step 10"), "{}", refused.text);
    }

    #[test]
    fn a_job_that_is_not_there_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let nothing = folder.path().join("none");
        let line = format!("train --local --job-dir {} -- python t.py", nothing.display());
        let refused = Origin::find(&parse_start(&line).unwrap().job).unwrap_err();
        assert!(refused.text.contains("no such job"), "{}", refused.text);
        assert_eq!(refused.code, EXIT_USAGE);
        let unnamed = parse_start("train --local -- python t.py").unwrap().job;
        assert!(Origin::find(&unnamed).unwrap().is_none());
    }
}
