//! Options for checkpoints.

use std::num::NonZeroU64;
use std::path::Path;
use std::time::Duration;

use clap::Args;
use elasticdl_master::job::{CheckpointEvery, CheckpointSpec};
use elasticdl_master::jobdir;
use elasticdl_master::limits::STEPS_MAX;

use super::values;
use crate::process::Failure;

/// Checkpoint options of `elasticdl train`.
#[derive(Args, Debug)]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct CheckpointOptions {
    /// Folder for checkpoints: a path, s3://, gs:// or az:// with a bucket, or `none`. [default:
    /// with --local, `checkpoints` in the job's directory]
    ///
    /// A checkpoint holds the whole state: parameters, optimizer state, and the ledger of the
    /// records that they have absorbed. Workers write it while training continues. When all workers
    /// are lost, their replacements start from the newest complete checkpoint. All workers must see
    /// the same folder, and one that sees another is refused: in a cluster a path must be in a
    /// --volume, with --hosts in a folder that the hosts share. Buckets are opened with the usual
    /// variables (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT, GOOGLE_SERVICE_ACCOUNT,
    /// AZURE_STORAGE_ACCOUNT_NAME, …; in a cluster see --env-from-secret and
    /// --worker-service-account), S3 also with the profile AWS_PROFILE of ~/.aws. A checkpoint is
    /// also written at the job's end, when the job is stopped, when all workers receive SIGTERM,
    /// and by `elasticdl checkpoint`. Checkpoints in the job's directory are retained until the
    /// next job in that directory has written one. Write ./none for a folder named `none`.
    #[arg(long, value_name = "URI", value_parser = values::parse_uri)]
    pub(crate) checkpoint_dir: Option<String>,

    /// Checkpoint interval: a number of steps (`200`) or a duration (`2min`), from 1s to 30days.
    /// [default: 5min]
    ///
    /// With a duration, the first checkpoint of a job is written after at most 30 seconds.
    #[arg(long, value_name = "STEPS|DURATION", value_parser = parse_every)]
    pub(crate) checkpoint_every: Option<CheckpointEvery>,

    /// Number of complete checkpoints of this job to retain. [default: 3; in the job's directory 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) checkpoint_keep: Option<u32>,

    /// Start from the newest complete checkpoint in this folder, or from this checkpoint.
    ///
    /// The model and the data set must be those of the checkpoint. The number of workers, the batch
    /// size, the epochs, the steps and the arguments of PROGRAM (e.g. a learning rate) may differ.
    /// Records in the checkpoint's ledger are not trained again.
    #[arg(long, value_name = "URI", value_parser = values::parse_uri)]
    pub(crate) resume_from: Option<String>,
}

impl CheckpointOptions {
    /// Specification of the job's checkpoints, and the URI of the checkpoint that it starts from.
    /// `absolute` resolves paths. A `local` job without a folder may keep checkpoints [in its
    /// directory](Self::in_job_dir).
    pub(crate) fn spec(
        &self,
        local: bool,
        absolute: impl Fn(&str, &str) -> Result<String, Failure>,
    ) -> Result<(Option<CheckpointSpec>, Option<String>), Failure> {
        let whole =
            |option: &str, address: &Option<String>| {
                address
                    .as_ref()
                    .map(|address| {
                        if is_path(address) {
                            absolute(option, address)
                        } else {
                            Ok(address.clone())
                        }
                    })
                    .transpose()
            };
        let dir = self.checkpoint_dir.clone().filter(|dir| dir != NONE);
        let has_place = dir.is_some() || (local && self.checkpoint_dir.is_none());
        let options = [
            ("--checkpoint-every", self.checkpoint_every.is_some()),
            ("--checkpoint-keep", self.checkpoint_keep.is_some()),
        ];
        if let Some((option, _)) = options.iter().find(|(_, is_given)| *is_given && !has_place) {
            let wanted = "give --checkpoint-dir a folder";
            return Err(Failure::usage(format!(
                "{option}: the job writes no checkpoints; {wanted}"
            )));
        }
        let checkpoints =
            whole("--checkpoint-dir", &dir)?.map(|dir| self.spec_in(dir, KEEP_DEFAULT));
        Ok((checkpoints, whole("--resume-from", &self.resume_from)?))
    }

    /// Specification of checkpoints in the job's own directory; `None` if `--checkpoint-dir` is
    /// given.
    pub(crate) fn in_job_dir(&self, job_dir: &Path) -> Option<CheckpointSpec> {
        if self.checkpoint_dir.is_some() {
            return None;
        }
        // A path that is not UTF-8 can't be sent to workers.
        let dir = job_dir.join(jobdir::CHECKPOINTS).into_os_string().into_string().ok()?;
        Some(CheckpointSpec { exclusive: true, ..self.spec_in(dir, KEEP_IN_JOB_DIR_DEFAULT) })
    }

    fn spec_in(&self, dir: String, keep: u32) -> CheckpointSpec {
        CheckpointSpec {
            dir,
            every: self.checkpoint_every.unwrap_or(CheckpointEvery::Time(EVERY_DEFAULT)),
            keep: self.checkpoint_keep.unwrap_or(keep),
            exclusive: false,
        }
    }
}

fn is_path(uri: &str) -> bool {
    !uri.contains("://")
}

fn parse_every(text: &str) -> Result<CheckpointEvery, String> {
    let wanted =
        "it must be a number of steps from 1, for example `200`, or a duration, for example `30s`";
    if let Ok(steps) = text.parse::<u64>() {
        return NonZeroU64::new(steps)
            .filter(|steps| steps.get() <= STEPS_MAX)
            .map(CheckpointEvery::Steps)
            .ok_or_else(|| wanted.into());
    }
    let time =
        humantime::parse_duration(text).ok().filter(|time| (SHORTEST..=LONGEST).contains(time));
    time.map(CheckpointEvery::Time).ok_or_else(|| format!("{wanted}, from 1s to 30days"))
}

const EVERY_DEFAULT: Duration = Duration::from_secs(300);
const KEEP_DEFAULT: u32 = 3;
const KEEP_IN_JOB_DIR_DEFAULT: u32 = 2;
const LONGEST: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// Value of `--checkpoint-dir` that disables checkpoints.
const NONE: &str = "none";
const SHORTEST: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_a_number_of_steps_or_a_duration() {
        assert_eq!(parse_every("200"), Ok(CheckpointEvery::Steps(NonZeroU64::new(200).unwrap())));
        assert_eq!(parse_every("30s"), Ok(CheckpointEvery::Time(Duration::from_secs(30))));
        for bad in ["0", "", "-1", "1ms", "2 steps", "60days", "18446744073709551616"] {
            assert!(parse_every(bad).is_err_and(|why| why.contains("`200`")), "{bad}");
        }
    }
}
