//! `elasticdl lineage`: when a record was trained, and by whom.

use std::path::{Component, Path};

use clap::Args;
use elasticdl_master::lineage::{LineageError, RecordName};

use crate::backend::NamedJob;
use crate::process::{Failure, print};
use crate::render::{lineage_to_json, lineage_to_table};

/// Arguments of `elasticdl lineage`.
#[derive(Args, Debug)]
#[command(after_long_help = AFTER_HELP)]
pub(crate) struct LineageArgs {
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) job: NamedJob,

    /// The record: its number in the data set, or FILE:NUMBER with its number in a file; from 0.
    ///
    /// FILE is the path of a file of the data set, absolute or as the job has it, or the end of it.
    /// With --validation-split and several files, records are named by their files.
    #[arg(value_name = "RECORD", value_parser = parse_record)]
    pub(crate) record: RecordName,
}

const AFTER_HELP: &str = "\
A row for each epoch of the job. Epochs, positions and records count from 0, steps from 1: a
checkpoint of step N contains steps 1 to N.
  POSITION    of the record in the epoch's order, derived from --shuffle, --seed and the data set
  STEP        derived from the position, --global-batch-size, and the state that the job began with
  IN STEP     number of the record in the step, and records of the step
  STATE       trained; to-come; not-trained: the job ended before, or --max-steps ends it before;
              before: an earlier job, with whose checkpoint this one began, has trained it
  GENERATION  the recorded membership whose group committed the step, and its workers. They divide a
              step by their speeds: which of them computed the record is not recorded
  CHECKPOINT  the newest checkpoint of fewer steps: of those that are on this machine, or that the
              job has recorded

JSON (keys are stable; null for values that do not apply or are not known):
  job, state, file, record_in_file, part (training or validation), record (its number among the
  records that are trained), records_per_epoch, order {mode, seed, block, buffer},
  epochs[] {epoch, state, position, step, step_positions: [first, end], generation, workers,
  was_repeated (the step was made again after a loss of all workers), checkpoint: {step, name}},
  notes[] (what the epochs do not say, in sentences)

Exit codes:
  0    the epochs were printed
  1    the job does not answer, or has not recorded what this depends on
  2    invalid command line, no such job, or no such record";

/// Prints when a record was trained. Returns the exit code.
pub(super) fn lineage(args: &LineageArgs) -> Result<u8, Failure> {
    let facts = args.job.find()?.facts()?;
    let lineage = facts.lineage(&from_here(&args.record)).map_err(|error| failure(&error))?;
    print(&if args.json { lineage_to_json(&lineage) } else { lineage_to_table(&lineage) })
}

/// The record, in an absolute path where `..` leads from the current directory.
fn from_here(record: &RecordName) -> RecordName {
    let mut record = record.clone();
    if let RecordName::InFile { file, .. } = &mut record
        && Path::new(&*file).components().any(|part| part == Component::ParentDir)
        && let Some(whole) = std::path::absolute(&*file).ok().as_deref().and_then(Path::to_str)
    {
        *file = whole.to_owned();
    }
    record
}

fn failure(error: &LineageError) -> Failure {
    match error {
        LineageError::OrderUnknown => Failure::failed(error.to_string()),
        _ => Failure::usage(error.to_string()),
    }
}

fn parse_record(text: &str) -> Result<RecordName, String> {
    let wanted = "it must be a number from 0, or FILE:NUMBER";
    if let Ok(number) = text.parse() {
        return Ok(RecordName::Number(number));
    }
    let (file, record) = text.rsplit_once(':').ok_or(wanted)?;
    match record.parse() {
        Ok(record) if !file.is_empty() => Ok(RecordName::InFile { file: file.into(), record }),
        _ => Err(wanted.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{EXIT_FAILED, EXIT_USAGE};

    #[test]
    fn what_is_not_recorded_yet_is_no_error_of_the_command_line() {
        assert_eq!(failure(&LineageError::OrderUnknown).code, EXIT_FAILED);
        assert_eq!(failure(&LineageError::NoSuchRecord("none".into())).code, EXIT_USAGE);
    }

    #[test]
    fn a_record_is_named_by_its_number_or_by_its_file() {
        assert_eq!(parse_record("17"), Ok(RecordName::Number(17)));
        let in_file = |file: &str, record| Ok(RecordName::InFile { file: file.into(), record });
        assert_eq!(parse_record("d/a.csv:0"), in_file("d/a.csv", 0));
        assert_eq!(parse_record("s3://b/a:b.csv:9"), in_file("s3://b/a:b.csv", 9));
        for bad in ["", "-1", "a.csv", "a.csv:", ":7", "a:b"] {
            assert!(parse_record(bad).unwrap_err().contains("FILE:NUMBER"), "{bad}");
        }
    }
}
