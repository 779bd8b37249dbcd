//! Turns a command line into a job that can be started, with every check that needs no worker.
//!
//! **Invariant:** when [`LocalJob::new`] fails, nothing has been written or started.

use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU64;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustix::fs::Access;

use super::checkpoint::CheckpointOptions;
use super::train::TrainArgs;
use super::{Failure, checkpoint, cluster};
use crate::job::{self, Batch, JobSpec, Work};
use crate::jobdir;
use crate::limits::{
    BATCH_RECORDS_MAX, EPOCHS_MAX, PATH_BYTES_MAX, SHARD_RECORDS_MAX, STEPS_MAX, WORKERS_MAX,
};

/// A validated job of this machine.
#[derive(Debug)]
pub(super) struct LocalJob {
    pub(super) spec: JobSpec,
    /// Path of the program.
    pub(super) program: PathBuf,
    pub(super) args: Vec<OsString>,
    pub(super) job_dir: PathBuf,
    pub(super) listen: IpAddr,
    pub(super) summary: Option<PathBuf>,
    pub(super) metrics: Option<SocketAddr>,
    pub(super) tensorboard_dir: Option<PathBuf>,
    pub(super) master_timeout: Duration,
    pub(super) quiet: bool,
    checkpoints: CheckpointOptions,
}

impl LocalJob {
    /// Validates the combination of `args`; each value has been validated when it was parsed.
    pub(super) fn new(args: TrainArgs) -> Result<Self, Failure> {
        if !args.local {
            return Err(Failure::usage(
                "neither --image nor --local is given: use --image IMG to train in a cluster, \
                 with pods of that image, or --local to train with processes of this machine",
            ));
        }
        // The numbers are checked first: they do not depend on the program.
        WorkerCounts::new(&args)?;
        let (program, program_args) =
            args.program.split_first().expect("clap asks for one where nothing is resumed");
        let program = find_program(program)?;
        if let Some(path) = &args.summary {
            jobdir::check_writable(path).map_err(|e| {
                let wanted = "give --summary a file in an existing, writable directory";
                Failure::usage(format!(
                    "can't write the summary to {}: {e}; {wanted}",
                    path.display()
                ))
            })?;
        }
        let name = match &args.job_name {
            Some(name) => name.clone(),
            None => default_name(&program)?,
        };
        let spec = job_spec(&args, name, checkpoint::absolute_path)?;
        let program_args = program_args.to_vec();
        let job_dir = args.job_dir.unwrap_or_else(|| jobdir::default_root().join(&spec.name));
        Ok(Self {
            spec,
            program,
            args: program_args,
            job_dir,
            listen: args.listen,
            summary: args.summary,
            metrics: args.metrics_port.map(|port| SocketAddr::new(args.listen, port)),
            tensorboard_dir: args.tensorboard_dir,
            master_timeout: args.master_timeout,
            quiet: args.quiet,
            checkpoints: args.checkpoints,
        })
    }

    /// Makes a training job write checkpoints to its own directory, `job_dir`, unless the user has
    /// given `--checkpoint-dir`.
    pub(super) fn keep_checkpoints_in(&mut self, job_dir: &Path) {
        if self.spec.checkpoints.is_none() && self.spec.work.trains() {
            self.spec.checkpoints = self.checkpoints.in_job_dir(job_dir);
        }
    }
}

/// Specification of the job of `args`, with this name. `absolute` resolves the path of checkpoints
/// that an option names.
pub(super) fn job_spec(
    args: &TrainArgs,
    name: String,
    absolute: impl Fn(&str, &str) -> Result<String, Failure>,
) -> Result<JobSpec, Failure> {
    let (checkpoints, resume_from) = args.checkpoints.spec(args.local, absolute)?;
    let workers = WorkerCounts::new(args)?;
    let work = args.work.clone().unwrap_or_else(|| Work::Train { export: args.export.clone() });
    let spec = JobSpec {
        name,
        training_data: args
            .training_data
            .clone()
            .expect("clap asks for it where nothing is resumed"),
        num_workers: workers.num,
        min_workers: workers.min,
        max_workers: workers.max,
        workers_per_pod: workers.per_pod,
        epochs: args.num_epochs,
        max_steps: args.max_steps,
        batch: batch(args.global_batch_size, args.minibatch_size),
        records_per_shard: args.records_per_shard.and_then(NonZeroU64::new),
        shuffle: work.trains() && !args.no_shuffle,
        seed: args.seed,
        max_worker_restarts: args.max_worker_restarts,
        worker_timeout: Some(args.worker_timeout),
        master_timeout: args.master_timeout,
        checkpoints,
        resume_from,
        validation: args.validation.spec()?,
        work,
        wire_dtype: args.wire_dtype.into(),
        channels: args.channels,
        on_nonfinite: args.resilience.on_nonfinite.into(),
        restart_without_checkpoint: args.resilience.restart_without_checkpoint,
        grace_period: args.resilience.grace_period,
    };
    spec.check().map_err(|e| Failure::usage(e.to_string()))?;
    Ok(spec)
}

/// Numbers of workers, validated against one another.
struct WorkerCounts {
    num: u32,
    min: u32,
    max: u32,
    per_pod: u32,
}

impl WorkerCounts {
    fn new(args: &TrainArgs) -> Result<Self, Failure> {
        let (per_pod, why) = cluster::workers_per_pod(&args.cluster)?;
        let num = args.num_workers.unwrap_or_else(|| NUM_WORKERS_DEFAULT.next_multiple_of(per_pod));
        let min = args.min_workers.unwrap_or(per_pod);
        let max = args.max_workers.unwrap_or_else(|| {
            let max =
                num.saturating_mul(MAX_WORKERS_FACTOR).clamp(MAX_WORKERS_DEFAULT_MIN, WORKERS_MAX);
            max / per_pod * per_pod
        });
        for (option, number) in
            [("--num-workers", num), ("--min-workers", min), ("--max-workers", max)]
        {
            if !number.is_multiple_of(per_pod) {
                return Err(Failure::usage(format!(
                    "{option} {number}: a pod holds {per_pod} workers ({why}), so this must be a \
                     multiple of {per_pod}: {}",
                    job::multiples_near(number, per_pod)
                )));
            }
        }
        if min > num {
            return Err(Failure::usage(format!(
                "--min-workers {min} is more than --num-workers {num}: the job could never start; \
                 lower the first or raise the second"
            )));
        }
        if num > max {
            return Err(Failure::usage(format!(
                "--num-workers {num} is more than --max-workers {max}; lower the first or raise \
                 the second"
            )));
        }
        Ok(Self { num, min, max, per_pod })
    }
}

fn batch(global: Option<u64>, per_worker: Option<u64>) -> Batch {
    match per_worker.and_then(NonZeroU64::new) {
        Some(records) => Batch::PerWorker(records),
        None => Batch::Global(global.and_then(NonZeroU64::new).unwrap_or(GLOBAL_BATCH_DEFAULT)),
    }
}

/// Resolves `program` as a shell does.
fn find_program(program: &OsStr) -> Result<PathBuf, Failure> {
    let path = Path::new(program);
    if path.as_os_str().is_empty() {
        return Err(Failure::usage("the program's name is empty; give its path after `--`"));
    }
    if path.components().count() > 1
        || path.is_absolute()
        || program.as_encoded_bytes().contains(&b'/')
    {
        return match executable(path) {
            Ok(()) => std::path::absolute(path)
                .map_err(|e| Failure::usage(format!("{}: {e}", path.display()))),
            Err(reason) => {
                Err(Failure::usage(format!("can't run the program {}: {reason}", path.display())))
            }
        };
    }
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&folders)
        .map(|folder| folder.join(path))
        .find(|p| executable(p).is_ok());
    found.ok_or_else(|| {
        let here = if path.is_file() {
            " (it is in the current directory: prefix its name with ./)"
        } else {
            ""
        };
        Failure::usage(format!(
            "the program `{}` is in no folder of $PATH{here}; \
             give its path, for example ./target/release/{0}",
            path.display()
        ))
    })
}

fn executable(path: &Path) -> Result<(), String> {
    let metadata = path.metadata().map_err(|e| e.to_string())?;
    if !metadata.is_file() {
        return Err("it is not a file".into());
    }
    // The mode bits first: for root, `access` may succeed for any file.
    let executable = metadata.permissions().mode() & 0o111 != 0
        && rustix::fs::access(path, Access::EXEC_OK).is_ok();
    if executable { Ok(()) } else { Err("it is not executable; `chmod +x` it".into()) }
}

/// Default name of a job: the program's name without invalid characters, and random digits.
pub(super) fn default_name(program: &Path) -> Result<String, Failure> {
    let stem = program.file_stem().unwrap_or_default().to_string_lossy().to_lowercase();
    let fit: String =
        stem.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let fit = fit.trim_matches('-');
    let prefix = if fit.starts_with(|c: char| c.is_ascii_lowercase()) { "" } else { "job-" };
    let mut random = [0; 3];
    getrandom::fill(&mut random)
        .map_err(|e| Failure::failed(format!("the system gives no random bytes: {e}")))?;
    let digits: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut name = format!("{prefix}{fit}");
    name.truncate(JOB_NAME_LEN_MAX - digits.len() - 1);
    Ok(format!("{}-{digits}", name.trim_end_matches('-')))
}

/// Parses a job name. Names are parts of file names and of names of Kubernetes objects, which have
/// the strictest rules.
pub(super) fn parse_job_name(text: &str) -> Result<String, String> {
    let fit = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let wanted = if text.is_empty() {
        "it must not be empty"
    } else if text.len() > JOB_NAME_LEN_MAX {
        "it must have at most 40 characters"
    } else if !text.chars().all(fit) {
        "it may have lower-case letters, digits and `-` only"
    } else if !text.starts_with(|c: char| c.is_ascii_lowercase()) {
        "it must start with a letter"
    } else if text.ends_with('-') {
        "it must end with a letter or digit"
    } else {
        return Ok(text.into());
    };
    Err(format!("{wanted}, for example `mnist-1`"))
}

pub(super) fn parse_listen(text: &str) -> Result<IpAddr, String> {
    match text.parse::<IpAddr>() {
        Ok(address) if address.is_unspecified() || address.is_multicast() => {
            Err("it must be one address that workers can connect to, for example `192.0.2.7`"
                .into())
        }
        Ok(address) => Ok(address),
        Err(_) => Err("it must be an IP address, for example `127.0.0.1` or `192.0.2.7`".into()),
    }
}

/// Checks the form of a URI or path of files. Workers open it.
pub(super) fn parse_uri(text: &str) -> Result<String, String> {
    let known = ["s3", "gs", "az", "file"];
    match text.split_once("://") {
        _ if text.is_empty() => Err("it must not be empty".into()),
        _ if text.len() > PATH_BYTES_MAX => {
            Err(format!("it must have at most {PATH_BYTES_MAX} bytes"))
        }
        Some((scheme, _)) if !known.contains(&scheme) => Err(format!(
            "`{scheme}://` is not supported; it must be a path, or s3://, gs:// or az://"
        )),
        Some((scheme, "")) => Err(format!("`{scheme}://` is not followed by a name")),
        _ => Ok(text.into()),
    }
}

pub(super) fn parse_workers(text: &str) -> Result<u32, String> {
    parse_count(text, "workers", WORKERS_MAX)
}

pub(super) fn parse_workers_per_pod(text: &str) -> Result<u32, String> {
    parse_count(text, "workers", job::MAX_WORKERS_PER_POD)
}

pub(super) fn parse_epochs(text: &str) -> Result<u32, String> {
    parse_count(text, "epochs", EPOCHS_MAX)
}

pub(super) fn parse_steps(text: &str) -> Result<u64, String> {
    parse_count(text, "steps", STEPS_MAX)
}

pub(super) fn parse_batch(text: &str) -> Result<u64, String> {
    parse_count(text, "records", BATCH_RECORDS_MAX)
}

pub(super) fn parse_shard(text: &str) -> Result<u64, String> {
    parse_count(text, "records", SHARD_RECORDS_MAX)
}

pub(super) fn parse_timeout(text: &str) -> Result<Duration, String> {
    parse_duration(text, TIMEOUT_MIN, "for example `30s` or `2min`, at least 1s and at most 30days")
}

pub(super) fn parse_interval(text: &str) -> Result<Duration, String> {
    parse_duration(
        text,
        INTERVAL_MIN,
        "for example `500ms` or `2s`, at least 50ms and at most 30days",
    )
}

pub(super) fn parse_worker_timeout(text: &str) -> Result<Duration, String> {
    parse_duration(
        text,
        WORKER_TIMEOUT_MIN,
        "for example `1s` or `500ms`, at least 100ms and at most 30days",
    )
}

fn parse_duration(text: &str, min: Duration, wanted: &str) -> Result<Duration, String> {
    let timeout = humantime::parse_duration(text)
        .map_err(|e| format!("{e}; it must be a duration, {wanted}"))?;
    if (min..=TIMEOUT_MAX).contains(&timeout) {
        Ok(timeout)
    } else {
        Err(format!("it must be {wanted}"))
    }
}

fn parse_count<T>(text: &str, what: &str, max: T) -> Result<T, String>
where
    T: FromStr + PartialOrd + From<u8> + std::fmt::Display,
{
    match text.parse::<T>() {
        Ok(count) if count >= T::from(1) && count <= max => Ok(count),
        _ => Err(format!("it must be a whole number of {what}, from 1 to {max}")),
    }
}

/// Shortest interval of `status --watch`; a shorter one would load the master.
const INTERVAL_MIN: Duration = Duration::from_millis(50);
const GLOBAL_BATCH_DEFAULT: NonZeroU64 = NonZeroU64::new(64).expect("64 is not 0");
/// Leaves space for the suffixes of Kubernetes objects within the 63 characters of their names.
const JOB_NAME_LEN_MAX: usize = 40;
const NUM_WORKERS_DEFAULT: u32 = 2;
const MAX_WORKERS_DEFAULT_MIN: u32 = 8;
const MAX_WORKERS_FACTOR: u32 = 2;
const TIMEOUT_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
const WORKER_TIMEOUT_MIN: Duration = Duration::from_millis(100);
const TIMEOUT_MIN: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::job::{CheckpointEvery, CheckpointSpec, OnNonfinite, WireDtype};

    fn local_job(options: &str) -> Result<LocalJob, String> {
        let line = format!("elasticdl train --training-data d {options} -- true a --b");
        match Cli::try_parse_from(line.split_whitespace()).map_err(|e| e.to_string())?.command {
            Command::Train(args) => LocalJob::new(*args).map_err(|e| e.text),
            other => panic!("{other:?}"),
        }
    }

    fn spec(options: &str) -> JobSpec {
        local_job(options).unwrap().spec
    }

    #[test]
    fn the_defaults_match_the_help() {
        let job = local_job("--local --job-name j").unwrap();
        let expected = JobSpec {
            name: "j".into(),
            training_data: "d".into(),
            num_workers: 2,
            min_workers: 1,
            max_workers: 8,
            workers_per_pod: 1,
            epochs: 1,
            max_steps: None,
            batch: Batch::Global(NonZeroU64::new(64).unwrap()),
            records_per_shard: None,
            shuffle: true,
            seed: 0,
            max_worker_restarts: 3,
            worker_timeout: Some(Duration::from_millis(800)),
            master_timeout: Duration::from_secs(30),
            checkpoints: None,
            resume_from: None,
            validation: None,
            work: Work::Train { export: None },
            wire_dtype: WireDtype::F32,
            channels: 1,
            on_nonfinite: OnNonfinite::Fail,
            restart_without_checkpoint: false,
            grace_period: Duration::from_secs(30),
        };
        assert_eq!(job.spec, expected);
        assert_eq!(job.master_timeout, Duration::from_secs(30));
        assert_eq!(
            (job.args, job.quiet, job.summary),
            (vec!["a".into(), "--b".into()], false, None)
        );
        assert!(job.program.is_absolute() && job.program.ends_with("true"), "{:?}", job.program);
        assert!(job.job_dir.ends_with("elasticdl/j") || job.job_dir.ends_with(".elasticdl/j"));
    }

    /// Specification of a job in a cluster.
    fn pods(options: &str) -> JobSpec {
        let line = format!("elasticdl train --image i:1 --training-data d {options} -- true");
        match Cli::try_parse_from(line.split_whitespace()).unwrap().command {
            Command::Train(args) => {
                job_spec(&args, "j".into(), |_, path| Ok(path.into())).map_err(|e| e.text).unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pod_holds_one_worker_per_gpu_unless_workers_per_pod_is_given() {
        let numbers = |options: &str| {
            let JobSpec { workers_per_pod, num_workers, min_workers, max_workers, .. } =
                pods(options);
            [workers_per_pod, num_workers, min_workers, max_workers]
        };
        assert_eq!(numbers(""), [1, 2, 1, 8]);
        assert_eq!(numbers("--worker-resources cpu=8,nvidia.com/gpu=1"), [1, 2, 1, 8]);
        assert_eq!(numbers("--worker-resources nvidia.com/gpu=3"), [3, 3, 3, 6]);
        assert_eq!(numbers("--worker-resources nvidia.com/gpu=8 --num-workers 16"), [8, 16, 8, 32]);
        assert_eq!(
            numbers("--worker-resources nvidia.com/gpu=8 --workers-per-pod 1"),
            [1, 2, 1, 8]
        );
        assert_eq!(
            numbers("--workers-per-pod 2 --num-workers 6 --min-workers 4 --max-workers 6"),
            [2, 6, 4, 6]
        );
        // With --local each worker is a process, and workers are spread over the GPUs.
        let error = local_job("--local --workers-per-pod 2").unwrap_err();
        assert!(
            error.contains("'--local' cannot be used with '--workers-per-pod")
                || error.contains("'--workers-per-pod <K>' cannot be used with '--local'"),
            "{error}"
        );
    }

    #[test]
    fn options_reach_the_spec() {
        assert_eq!(spec("--local --num-workers 7").max_workers, 14);
        assert_eq!(spec("--local --num-workers 600").max_workers, 1024);
        assert_eq!(spec("--local --num-workers 3 --max-workers 3").max_workers, 3);
        let per_worker = Batch::PerWorker(NonZeroU64::new(5).unwrap());
        assert_eq!(spec("--local --minibatch-size 5").batch, per_worker);
        assert_eq!(spec("--local --records-per-shard 9").records_per_shard, NonZeroU64::new(9));
        assert_eq!(spec("--local --wire-dtype bf16").wire_dtype, WireDtype::Bf16);
        assert_eq!(spec("--local --channels 16").channels, 16);
        assert_eq!(spec("--local --streams 16").channels, 16);
        assert!(!spec("--local --no-shuffle").shuffle);
        assert!(spec("--local --no-shuffle --shuffle").shuffle);
        assert_eq!(
            local_job("--local --master-timeout 2min").unwrap().master_timeout,
            Duration::from_secs(120)
        );
    }

    #[test]
    fn checkpoint_options_reach_the_spec() {
        let here = std::env::current_dir().unwrap();
        let whole = spec(
            "--local --checkpoint-dir c --checkpoint-every 200 --checkpoint-keep 2 --resume-from \
             s3://b/c",
        );
        let checkpoints = whole.checkpoints.unwrap();
        assert_eq!(checkpoints.dir, here.join("c").to_str().unwrap());
        assert_eq!(
            (checkpoints.every, checkpoints.keep),
            (CheckpointEvery::Steps(NonZeroU64::new(200).unwrap()), 2)
        );
        assert_eq!(whole.resume_from.as_deref(), Some("s3://b/c"));
        let checkpoints = spec("--local --checkpoint-dir /c").checkpoints.unwrap();
        assert_eq!(
            (checkpoints.every, checkpoints.keep),
            (CheckpointEvery::Time(Duration::from_secs(300)), 3)
        );
    }

    #[test]
    fn a_local_job_writes_checkpoints_to_its_directory_by_default() {
        let checkpoints = |options: &str| {
            let mut job = local_job(options).unwrap();
            job.keep_checkpoints_in(Path::new("/jobs/j"));
            job.spec.checkpoints
        };
        let every = CheckpointEvery::Time(Duration::from_secs(300));
        let own =
            CheckpointSpec { dir: "/jobs/j/checkpoints".into(), every, keep: 2, exclusive: true };
        assert_eq!(checkpoints("--local"), Some(own.clone()));
        let every = CheckpointEvery::Steps(NonZeroU64::new(200).unwrap());
        assert_eq!(
            checkpoints("--local --checkpoint-every 200 --checkpoint-keep 5"),
            Some(CheckpointSpec { every, keep: 5, ..own })
        );
        assert_eq!(checkpoints("--local --checkpoint-dir none"), None);
        assert!(checkpoints("--local --checkpoint-dir ./none").unwrap().dir.ends_with("/none"));
        assert!(!checkpoints("--local --checkpoint-dir /c").unwrap().exclusive);
        let error = local_job("--local --checkpoint-dir none --checkpoint-every 200").unwrap_err();
        assert!(
            error.contains("--checkpoint-every") && error.contains("--checkpoint-dir"),
            "{error}"
        );
    }

    #[test]
    fn workers_leave_within_the_grace_period_and_the_master_releases_them_before() {
        for (grace, leave, wait) in
            [(30_000, 28_000, 26_000), (10_000, 8000, 6000), (1000, 800, 600)]
        {
            let spec = spec(&format!("--local --grace-period {grace}ms"));
            let millis = [spec.leave_timeout(), spec.leave_wait()].map(|time| time.as_millis());
            assert_eq!(millis, [leave, wait], "{grace}");
        }
    }

    #[test]
    fn listen_accepts_only_an_address_that_workers_can_connect_to() {
        assert_eq!(local_job("--local").unwrap().listen.to_string(), "127.0.0.1");
        assert_eq!(local_job("--local --listen ::1").unwrap().listen.to_string(), "::1");
        for bad in ["0.0.0.0", "::", "224.0.0.1", "localhost", "127.0.0.1:80", ""] {
            assert!(parse_listen(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_uri_is_a_path_or_has_a_supported_scheme() {
        for good in ["m.safetensors", "/a/b", "s3://bucket/a", "gs://b/c", "az://c/d", "file:///a"]
        {
            assert_eq!(parse_uri(good).as_deref(), Ok(good));
        }
        for bad in ["", "http://host/a", "ftp://x", "s3://", &"a".repeat(5000)] {
            assert!(parse_uri(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn job_names_are_valid_for_files_and_kubernetes_objects() {
        for good in ["a", "mnist-1", &"a".repeat(40)] {
            assert_eq!(parse_job_name(good).as_deref(), Ok(good));
        }
        for bad in ["", "A", "a_b", "1a", "a-", "-a", "ä", "a/b", "..", &"a".repeat(41)] {
            assert!(parse_job_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_default_name_is_valid_for_any_program() {
        for program in ["quickstart", "My_Model.v2.bin", "7up", "ünïcode", "---", &"x".repeat(200)]
        {
            let name = default_name(Path::new(program)).unwrap();
            assert_eq!(parse_job_name(&name).as_ref(), Ok(&name), "{program}");
        }
        let name = default_name(Path::new("/bin/My_Model.bin")).unwrap();
        assert!(name.starts_with("my-model-") && name.len() == "my-model-".len() + 6, "{name}");
    }
}
