//! `elasticdl checkpoint`, and the checkpoint options of `elasticdl train`.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use elasticdl_proto::wire::{CheckpointRequest, StatusRequest};
use tokio::time::Instant;

use super::client::{Connection, print, to_failure};
use super::cluster::ClusterTarget;
use super::lookup::{self, JobLookup};
use super::render::CheckpointsJson;
use super::train::TrainArgs;
use super::{Failure, job_options, new_runtime};
use crate::job::{CheckpointEvery, CheckpointSpec};
use crate::jobdir;
use crate::limits::STEPS_MAX;

/// Arguments of `elasticdl checkpoint`.
#[derive(Args, Debug)]
pub struct CheckpointArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    /// Longest wait for the checkpoint, from 1s to 30days.
    #[arg(long, value_name = "DURATION", default_value = "10min",
          value_parser = job_options::parse_timeout)]
    pub timeout: Duration,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Checkpoint options of `elasticdl train`.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub struct CheckpointOptions {
    /// Folder for checkpoints: a path, or s3://, gs:// or az:// and a bucket; or `none`. [default:
    /// with --local, `checkpoints` in the job's directory]
    ///
    /// A checkpoint is the whole state: parameters, optimizer state, and the ledger of the records
    /// that they have absorbed. A worker writes it while training continues. When all workers are
    /// lost, their replacements start from the newest complete checkpoint. All workers must see the
    /// folder: in a cluster a path must lie in a --volume. Buckets are opened with the usual
    /// variables (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT, GOOGLE_SERVICE_ACCOUNT,
    /// AZURE_STORAGE_ACCOUNT_NAME, …; see --env), S3 also with the profile AWS_PROFILE of ~/.aws. A
    /// checkpoint is also written at the job's end, when the job is stopped, when all workers
    /// receive SIGTERM, and by `elasticdl checkpoint`. Checkpoints in the job's directory are
    /// retained until the next job in that directory has written one. A folder named `none` is
    /// given as ./none.
    #[arg(long, value_name = "URI", value_parser = parse_address)]
    pub checkpoint_dir: Option<String>,

    /// Checkpoint interval: a number of steps, e.g. `200`, or a duration from 1s to 30days, e.g.
    /// `2min`. [default: 5min]
    ///
    /// With a duration, the first checkpoint of a job is written after at most 30 seconds.
    #[arg(long, value_name = "STEPS|DURATION", value_parser = parse_every)]
    pub checkpoint_every: Option<CheckpointEvery>,

    /// Number of complete checkpoints of this job to retain. [default: 3; in the job's directory 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub checkpoint_keep: Option<u32>,

    /// Start from the newest complete checkpoint in this folder, or from this checkpoint.
    ///
    /// The model and the data set must be those of the checkpoint. The number of workers, the batch
    /// size, the epochs, the steps and the arguments of PROGRAM (e.g. a learning rate) may differ.
    /// Records that the checkpoint has absorbed are not trained again.
    #[arg(long, value_name = "URI", value_parser = parse_address)]
    pub resume_from: Option<String>,
}

impl CheckpointOptions {
    /// Specification of the job's checkpoints, and the URI of the checkpoint that it starts from.
    /// `absolute` resolves paths. A `local` job without a folder may keep checkpoints [in its
    /// directory](Self::in_job_dir).
    pub(super) fn spec(
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
    pub(super) fn in_job_dir(&self, job_dir: &Path) -> Option<CheckpointSpec> {
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

/// Resolves a path of a local job against the current directory.
pub(super) fn absolute_path(option: &str, path: &str) -> Result<String, Failure> {
    let whole =
        std::path::absolute(path).map_err(|e| Failure::usage(format!("{option} {path}: {e}")))?;
    whole
        .into_os_string()
        .into_string()
        .map_err(|_| Failure::usage(format!("{option} {path}: it must be UTF-8")))
}

/// Checks that a path of a job in a cluster lies in a volume of the workers.
pub(super) fn path_in_volume(
    args: &TrainArgs,
    mounts: &[&str],
    option: &str,
    path: &str,
) -> Result<String, Failure> {
    let mounted = mounts.iter().any(|mount| Path::new(path).starts_with(mount));
    // A pod template may mount more volumes.
    if mounted || (Path::new(path).is_absolute() && args.cluster.worker_pod_template.is_some()) {
        return Ok(path.to_owned());
    }
    Err(Failure::usage(format!(
        "{option} {path}: in a cluster it must be in a folder that all workers share: below the \
         mount_path of a --volume, or in a bucket (s3://, gs://, az://)"
    )))
}

/// Requests a checkpoint of a job and waits for it. Returns the exit code.
pub(super) fn checkpoint(args: &CheckpointArgs) -> Result<u8, Failure> {
    let root = match lookup::find(&args.job, &args.target)? {
        JobLookup::Cluster(job) => return job.checkpoint(args.timeout),
        JobLookup::Local(root) => root,
    };
    new_runtime()?.block_on(async {
        let mut connection =
            Connection::open(&root).await.map_err(|error| error.to_failure(&root))?;
        let ask = connection
            .request(CheckpointRequest, async |client, request| client.checkpoint(request).await);
        let requested_at = ask.await.map_err(|status| to_failure(&root, &status))?.step;
        let mut wait = CheckpointWait::new(args.timeout);
        loop {
            let ask = connection
                .request(StatusRequest, async |client, request| client.status(request).await);
            let status = ask.await.map_err(|status| to_failure(&root, &status))?;
            if let Some(code) = wait.poll(requested_at, status.checkpoints)? {
                return Ok(code);
            }
            tokio::time::sleep(POLL).await;
        }
    })
}

/// Wait for a requested checkpoint.
pub(super) struct CheckpointWait {
    until: Instant,
    limit: Duration,
    /// Number of failed checkpoints at the first poll.
    failed: Option<u64>,
}

impl CheckpointWait {
    pub(super) fn new(limit: Duration) -> Self {
        Self { until: Instant::now() + limit, limit, failed: None }
    }

    /// Evaluates the newest status of a job that was at step `requested_at` when the checkpoint was
    /// requested. Returns the exit code once the checkpoint is complete.
    pub(super) fn poll(
        &mut self,
        requested_at: u64,
        known: Option<CheckpointsJson>,
    ) -> Result<Option<u8>, Failure> {
        let known = known.unwrap_or_default();
        if let Some(newest) = known.newest.filter(|newest| newest.step > requested_at) {
            let dir = known.dir.unwrap_or_default();
            return print(&format!("{}/{}\n", dir.trim_end_matches('/'), newest.name)).map(Some);
        }
        let failed = *self.failed.get_or_insert(known.failed);
        if let Some(error) = known.error.filter(|_| known.failed > failed) {
            return Err(Failure::failed(format!("the checkpoint could not be written: {error}")));
        }
        if Instant::now() < self.until {
            Ok(None)
        } else {
            Err(Failure::failed(format!(
                "the checkpoint is not complete after {} s; the job continues to write it",
                self.limit.as_secs()
            )))
        }
    }
}

fn is_path(address: &str) -> bool {
    !address.contains("://")
}

fn parse_address(text: &str) -> Result<String, String> {
    let known = ["file", "s3", "gs", "az"];
    match text.split_once("://") {
        None if text.is_empty() => {
            Err("it must be a path, or s3://, gs:// or az:// and a bucket".into())
        }
        None => Ok(text.into()),
        Some((scheme, rest)) if known.contains(&scheme) && !rest.is_empty() => Ok(text.into()),
        Some(_) => Err("it must be a path, or s3://, gs:// or az:// and a bucket".into()),
    }
}

fn parse_every(text: &str) -> Result<CheckpointEvery, String> {
    let wanted =
        "it must be a number of steps, for example `200`, or a duration, for example `30s`";
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
const HEADING: &str = "Checkpoints";
const KEEP_DEFAULT: u32 = 3;
const KEEP_IN_JOB_DIR_DEFAULT: u32 = 2;
const LONGEST: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// Value of `--checkpoint-dir` that disables checkpoints.
const NONE: &str = "none";
/// Interval between status requests while a checkpoint is awaited.
const POLL: Duration = Duration::from_millis(50);
const SHORTEST: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::SavedCheckpoint;

    #[test]
    fn an_interval_is_a_number_of_steps_or_a_duration() {
        assert_eq!(parse_every("200"), Ok(CheckpointEvery::Steps(NonZeroU64::new(200).unwrap())));
        assert_eq!(parse_every("30s"), Ok(CheckpointEvery::Time(Duration::from_secs(30))));
        for bad in ["0", "", "-1", "1ms", "2 steps", "60days", "18446744073709551616"] {
            assert!(parse_every(bad).is_err_and(|why| why.contains("`200`")), "{bad}");
        }
    }

    #[test]
    fn an_address_is_a_path_or_a_bucket() {
        for good in ["a", "/a", "s3://b/c", "gs://b", "az://c/d", "file:///a"] {
            assert_eq!(parse_address(good).as_deref(), Ok(good));
        }
        for bad in ["", "http://a", "s3://", "ftp://a/b"] {
            assert!(parse_address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_wait_ends_with_the_requested_checkpoint_and_not_with_an_older_one() {
        let known = |step, failed, error: Option<&str>| CheckpointsJson {
            dir: Some("/c".into()),
            newest: Some(SavedCheckpoint { step, name: "n".into(), bytes: 1 }),
            failed,
            error: error.map(Into::into),
            ..CheckpointsJson::default()
        };
        let mut wait = CheckpointWait::new(Duration::from_secs(60));
        let old = known(10, 1, Some("long ago"));
        assert!(wait.poll(10, Some(old.clone())).is_ok_and(|code| code.is_none()));
        assert!(wait.poll(10, Some(known(11, 1, None))).is_ok_and(|code| code == Some(0)));
        let failed = wait.poll(10, Some(known(10, 2, Some("disk full"))));
        assert!(failed.is_err_and(|failure| failure.text.contains("disk full")));
        let late = CheckpointWait::new(Duration::ZERO).poll(10, Some(old));
        assert!(late.is_err_and(|failure| failure.text.contains("after 0 s")));
    }
}
