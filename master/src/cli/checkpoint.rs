//! `elasticdl checkpoint`, and the options about checkpoints.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use elasticdl_proto::v1;
use tokio::time::Instant;

use super::client::{Connection, print, to_failure};
use super::cluster::ClusterTarget;
use super::remote::{self, JobLookup};
use super::render::CheckpointsJson;
use super::train::TrainArgs;
use super::{Failure, job_options, new_runtime};
use crate::job::{CheckpointEvery, CheckpointSpec};
use crate::jobdir;
use crate::limits::STEPS_MAX;

/// What `elasticdl checkpoint` is told.
#[derive(Args, Debug)]
pub struct CheckpointArgs {
    /// The job's name, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    /// Wait for it at most this long.
    #[arg(long, value_name = "DURATION", default_value = "10min", value_parser = job_options::parse_timeout)]
    pub timeout: Duration,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// What `elasticdl train` is told about checkpoints.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub struct CheckpointOptions {
    /// Keep checkpoints in this folder: a path, or s3://, gs:// or az:// and a bucket; or `none`.
    /// [default: with --local, `checkpoints` in the job's directory]
    ///
    /// A checkpoint is the whole state: parameters, optimizer, and the ledger of the records that
    /// they have absorbed. Workers write it while they train on. When all workers are lost, new
    /// ones begin from the newest whole one. Workers must see the folder: in a cluster a path is
    /// one of a --volume; buckets are opened with the usual variables (AWS_ACCESS_KEY_ID,
    /// AWS_REGION, AWS_ENDPOINT, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME, …; see --env),
    /// S3 also with the profile AWS_PROFILE of ~/.aws. One more is written at the job's end, when
    /// it is stopped, when all workers are told to end, and by `elasticdl checkpoint`. Those in the
    /// job's directory stay until the next job there has one of its own. A folder that is called
    /// `none` is written ./none.
    #[arg(long, value_name = "URI", value_parser = parse_address)]
    pub checkpoint_dir: Option<String>,

    /// How often: a number of steps, e.g. `200`, or a time, e.g. `2min`. [default: 5min]
    ///
    /// Where it is a time, a job's first checkpoint is written after 30 seconds at the latest.
    #[arg(long, value_name = "STEPS|DURATION", value_parser = parse_every)]
    pub checkpoint_every: Option<CheckpointEvery>,

    /// How many complete ones of this job stay. [default: 3; in the job's directory 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub checkpoint_keep: Option<u32>,

    /// Begin with the newest whole checkpoint in this folder, or with the one that it is.
    ///
    /// The model and the data set must be those of the checkpoint; the number of workers, the
    /// batch, the epochs, the steps and what PROGRAM is told (a learning rate) may be others.
    /// Records that it has absorbed are not trained again.
    #[arg(long, value_name = "URI", value_parser = parse_address)]
    pub resume_from: Option<String>,
}

impl CheckpointOptions {
    /// Where and when checkpoints are kept, and what the job begins with. Paths are made whole by
    /// `absolute`. A `local` job without a folder may keep them [in its
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
                "{option}: there is no place for checkpoints; {wanted}"
            )));
        }
        let checkpoints =
            whole("--checkpoint-dir", &dir)?.map(|dir| self.spec_in(dir, KEEP_DEFAULT));
        Ok((checkpoints, whole("--resume-from", &self.resume_from)?))
    }

    /// As a job keeps them in its own directory that has no other place; `None` where the user
    /// wants none.
    pub(super) fn in_job_dir(&self, job_dir: &Path) -> Option<CheckpointSpec> {
        if self.checkpoint_dir.is_some() {
            return None;
        }
        // What is no text can't be told to workers.
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

/// On this machine, a path is taken from the current directory.
pub(super) fn absolute_path(option: &str, path: &str) -> Result<String, Failure> {
    let whole =
        std::path::absolute(path).map_err(|e| Failure::usage(format!("{option} {path}: {e}")))?;
    whole
        .into_os_string()
        .into_string()
        .map_err(|_| Failure::usage(format!("{option} {path}: it must be UTF-8")))
}

/// In a cluster, a path is one of the workers' volumes.
pub(super) fn path_in_volume(
    args: &TrainArgs,
    mounts: &[&str],
    option: &str,
    path: &str,
) -> Result<String, Failure> {
    let mounted = mounts.iter().any(|mount| Path::new(path).starts_with(mount));
    // What a template mounts is the template's affair.
    if mounted || (Path::new(path).is_absolute() && args.cluster.worker_pod_template.is_some()) {
        return Ok(path.to_owned());
    }
    Err(Failure::usage(format!(
        "{option} {path}: in a cluster it must be in a folder that all workers share: below the mount_path of a --volume, or \
         in a bucket (s3://, gs://, az://)"
    )))
}

/// Asks a job for a checkpoint, and waits for it; the exit code.
pub(super) fn checkpoint(args: &CheckpointArgs) -> Result<u8, Failure> {
    let root = match remote::find(&args.job, &args.target)? {
        JobLookup::Cluster(job) => return job.checkpoint(args.timeout),
        JobLookup::Local(root) => root,
    };
    new_runtime()?.block_on(async {
        let mut connection =
            Connection::open(&root).await.map_err(|error| error.to_failure(&root))?;
        let ask = connection.ask(v1::CheckpointRequest {}, async |client, request| {
            client.checkpoint(request).await
        });
        let asked_at = ask.await.map_err(|status| to_failure(&root, &status))?.step;
        let mut wait = CheckpointWait::new(args.timeout);
        loop {
            let ask = connection
                .ask(v1::StatusRequest {}, async |client, request| client.status(request).await);
            let status = ask.await.map_err(|status| to_failure(&root, &status))?;
            if let Some(code) =
                wait.poll(asked_at, status.checkpoints.map(CheckpointsJson::from))?
            {
                return Ok(code);
            }
            tokio::time::sleep(POLL).await;
        }
    })
}

/// Waits for the checkpoint that was asked for.
pub(super) struct CheckpointWait {
    until: Instant,
    limit: Duration,
    /// How many had failed before.
    failed: Option<u64>,
}

impl CheckpointWait {
    pub(super) fn new(limit: Duration) -> Self {
        Self { until: Instant::now() + limit, limit, failed: None }
    }

    /// What to make of the newest status, of a job that was at step `asked_at` when it was asked;
    /// the exit code, at the end.
    pub(super) fn poll(
        &mut self,
        asked_at: u64,
        known: Option<CheckpointsJson>,
    ) -> Result<Option<u8>, Failure> {
        let known = known.unwrap_or_default();
        if let Some(newest) = known.newest.filter(|newest| newest.step > asked_at) {
            let dir = known.dir.unwrap_or_default();
            return print(&format!("{}/{}\n", dir.trim_end_matches('/'), newest.name)).map(Some);
        }
        let failed = *self.failed.get_or_insert(known.failed);
        if let Some(error) = known.error.filter(|_| known.failed > failed) {
            return Err(Failure::failed(format!("the checkpoint could not be written: {error}")));
        }
        match Instant::now() < self.until {
            true => Ok(None),
            false => Err(Failure::failed(format!(
                "no checkpoint is complete after {} s; the job goes on with it",
                self.limit.as_secs()
            ))),
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
    let wanted = "it must be a number of steps, for example `200`, or a time, for example `30s`";
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
/// In place of a folder: no checkpoints are kept.
const NONE: &str = "none";
/// How often a job is looked at that has been asked for a checkpoint.
const POLL: Duration = Duration::from_millis(50);
const SHORTEST: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::SavedCheckpoint;

    #[test]
    fn an_interval_is_steps_or_a_time() {
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
    fn the_checkpoint_that_was_asked_for_is_waited_for_and_no_older_one() {
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
