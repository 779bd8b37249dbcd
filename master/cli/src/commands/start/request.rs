//! A job to start, and its specification.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::path::Path;

use elasticdl_master::job::{
    self, Batch, JobSpec, LinkEncryption, MAX_WORKERS_PER_POD, Shuffle, Work,
};
use elasticdl_master::jobdir;
use elasticdl_master::limits::WORKERS_MAX;
use elasticdl_master::local::hosts::slots_of;
use elasticdl_proto::DATA_OF_PROGRAM;

use crate::args::{
    ClusterOptions, HostList, InferenceData, InferenceOptions, JOB_NAME_LEN_MAX, JobOptions,
    OutputOptions, TrainingOptions, TuningOptions, WorkerOptions, sources,
};
use crate::process::Failure;

/// The options of a job, from the command that starts it. Each value has been validated when it was
/// parsed.
#[derive(Debug)]
pub(crate) struct StartRequest {
    pub(crate) program: Vec<OsString>,
    pub(crate) job: JobOptions,
    pub(crate) work: WorkOptions,
    pub(crate) workers: WorkerOptions,
    pub(crate) output: OutputOptions,
    pub(crate) cluster: ClusterOptions,
}

/// The options that depend on what the job does with its data.
#[derive(Debug)]
pub(crate) enum WorkOptions {
    Inference(InferenceData, Work),
    Training(Box<TrainingOptions>, TuningOptions),
}

impl StartRequest {
    /// A job that applies a model.
    pub(crate) fn inference(options: InferenceOptions, work: Work) -> Self {
        let InferenceOptions { program, model: _, job, data, workers, output, cluster } = options;
        Self { program, job, work: WorkOptions::Inference(data, work), workers, output, cluster }
    }

    /// Specification of the job, with this name. `absolute` resolves the path of checkpoints that
    /// an option names.
    pub(super) fn spec(
        &self,
        name: String,
        absolute: impl Fn(&str, &str) -> Result<String, Failure>,
    ) -> Result<JobSpec, Failure> {
        let common = self.common_spec(name)?;
        let spec = match &self.work {
            WorkOptions::Inference(data, work) => JobSpec {
                records_per_shard: data.records_per_shard.and_then(NonZeroU64::new),
                options: elasticdl_proto::WorkerOptions {
                    training_data: sources("--data", &data.data)?,
                    batch: batch(None, data.minibatch_size),
                    bad_records_max: data.bad_records.bad_records,
                    work: work.clone(),
                    ..common.options
                },
                ..common
            },
            WorkOptions::Training(options, tuning) => {
                let (checkpoints, resume_from) =
                    options.checkpoints.spec(self.job.local, absolute)?;
                let data = &options.data;
                let location = training_data(&data.training_data, &self.program)?;
                JobSpec {
                    restart_without_checkpoint: options.resilience.restart_without_checkpoint,
                    autoscale: options.autoscale,
                    spares: options.resilience.spares,
                    policies: self.job.lifecycle.policies()?,
                    options: elasticdl_proto::WorkerOptions {
                        training_data: location.clone(),
                        epochs: data.num_epochs,
                        max_steps: data.max_steps,
                        batch: batch(data.global_batch_size, data.minibatch_size),
                        shuffle: data.shuffle,
                        micro_batch: data.micro_batch.and_then(NonZeroU64::new),
                        deterministic: data.deterministic,
                        seed: data.seed,
                        checkpoints,
                        resume_from,
                        validation: options.validation.spec(&location)?,
                        work: Work::Train { export: options.export.clone() },
                        wire_dtype: tuning.wire_dtype,
                        channels: tuning.channels,
                        link_encryption: tuning.link_encryption,
                        bad_records_max: data.bad_records.bad_records,
                        table_replicas: tuning.table_replicas,
                        on_rows_lost: tuning.on_rows_lost,
                        shard_optimizer: tuning.shard_optimizer,
                        param_dtype: tuning.param_dtype,
                        table_memory: tuning.table_memory,
                        export_changes_since: tuning.export_changes_since,
                        table_lag: tuning.table_lag,
                        table_servers: tuning.table_servers,
                        audit: options.resilience.audit.unwrap_or(0),
                        on_nonfinite: options.resilience.on_nonfinite,
                        allow_mixed_builds: options.resilience.allow_mixed_builds,
                        ..common.options
                    },
                    ..common
                }
            }
        };
        spec.check().map_err(|e| Failure::usage(e.to_string()))?;
        spec.options
            .check_deterministic()
            .map_err(|e| Failure::usage(format!("--deterministic: {e}")))?;
        Ok(spec)
    }

    /// Checks the numbers of workers, which do not depend on the program.
    pub(super) fn check_workers(&self) -> Result<(), Failure> {
        WorkerCounts::new(self).map(drop)
    }

    /// Checks that the summary can be written to the file that the user names.
    pub(super) fn check_summary(&self) -> Result<(), Failure> {
        let Some(path) = &self.output.summary else { return Ok(()) };
        jobdir::check_writable(path).map_err(|e| {
            let wanted = "give --summary a file in an existing, writable directory";
            Failure::usage(format!("can't write the summary to {}: {e}; {wanted}", path.display()))
        })?;
        if jobdir::is_another_file(path) {
            return Err(Failure::usage(format!(
                "--summary {}: it exists and is no summary: it would be replaced; name another \
                 file, or remove this one first",
                path.display()
            )));
        }
        Ok(())
    }

    /// The parts of the specification that do not depend on the work, with a placeholder for the
    /// others.
    fn common_spec(&self, name: String) -> Result<JobSpec, Failure> {
        let counts = WorkerCounts::new(self)?;
        Ok(JobSpec {
            min_workers: counts.min,
            max_workers: counts.max,
            avoid_hosts: self.cluster.avoid_hosts.clone(),
            workers_per_pod: counts.per_pod,
            max_worker_restarts: self.workers.max_worker_restarts,
            step_timeout: self.workers.step_timeout,
            start_timeout: self.workers.start_timeout,
            master_timeout: self.workers.master_timeout,
            log_format: self.output.log_format,
            policies: self.job.lifecycle.policies()?,
            options: elasticdl_proto::WorkerOptions {
                shuffle: Shuffle::NONE,
                worker_timeout: Some(self.workers.worker_timeout),
                grace_period: self.workers.grace_period,
                ..elasticdl_proto::WorkerOptions::new("", Batch::Global(GLOBAL_BATCH_DEFAULT))
            },
            ..JobSpec::new(name, "", counts.num, Batch::Global(GLOBAL_BATCH_DEFAULT))
        })
    }
}

/// Numbers of workers, validated against one another.
struct WorkerCounts {
    num: u32,
    min: u32,
    max: u32,
    per_pod: u32,
}

impl WorkerCounts {
    fn new(request: &StartRequest) -> Result<Self, Failure> {
        let (per_pod, why) = workers_per_pod(&request.cluster, request.job.image.is_some())?;
        let min = match &request.work {
            WorkOptions::Inference(..) => None,
            WorkOptions::Training(options, _) => options.min_workers,
        };
        let min = min.unwrap_or(per_pod);
        let options = &request.workers;
        let slots = request.job.hosts.as_ref().map(|HostList(hosts)| slots_of(hosts));
        let num = options.num_workers.or(slots);
        let num = num.unwrap_or_else(|| NUM_WORKERS_DEFAULT.next_multiple_of(per_pod));
        let max = options.max_workers.unwrap_or_else(|| {
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

/// Number of workers per pod, and the option that it follows from.
pub(super) fn workers_per_pod(
    options: &ClusterOptions,
    in_cluster: bool,
) -> Result<(u32, String), Failure> {
    if let Some(workers) = options.workers_per_pod {
        return Ok((workers, format!("--workers-per-pod {workers}")));
    }
    let name = gpu_resource(options).filter(|_| in_cluster);
    let gpus = name.and_then(|name| options.worker_resources[name].parse::<u32>().ok());
    let (name, gpus) = (name.map_or(GPUS, String::as_str), gpus.unwrap_or(1).max(1));
    if gpus > MAX_WORKERS_PER_POD {
        return Err(Failure::usage(format!(
            "--worker-resources {name}={gpus}: a pod holds one worker for each GPU and at most \
             {MAX_WORKERS_PER_POD}; set the number with --workers-per-pod"
        )));
    }
    Ok((gpus, format!("{name}={gpus}")))
}

/// Name of the resource by which each pod requests GPUs, or instances of them; `None` without.
fn gpu_resource(options: &ClusterOptions) -> Option<&String> {
    let is_gpu = |name: &&String| *name == GPUS || name.starts_with(GPU_INSTANCES);
    options.worker_resources.keys().find(is_gpu)
}

/// A warning if the pods of a training job request GPUs whose gradients NCCL will not sum, because
/// links between the workers are encrypted.
pub(super) fn nccl_warning(options: &ClusterOptions, job: &JobSpec) -> Option<String> {
    let (resource, which) = (gpu_resource(options)?, job.options.link_encryption);
    let links_unencrypted = match which {
        LinkEncryption::Auto => job.workers_per_pod,
        LinkEncryption::Off => return None,
        LinkEncryption::On => 1,
    };
    (job.options.work.trains() && job.num_workers > links_unencrypted).then(|| {
        format!(
            "{resource} is requested, but NCCL is not used: it does not encrypt, and links between \
             {} are encrypted; gradients go through the hosts' memory, which is many times slower. \
             --link-encryption off enables NCCL; use it on a private network only",
            if which == LinkEncryption::On { "workers" } else { "pods" }
        )
    })
}

fn batch(global: Option<u64>, per_worker: Option<u64>) -> Batch {
    match per_worker.and_then(NonZeroU64::new) {
        Some(records) => Batch::PerWorker(records),
        None => Batch::Global(global.and_then(NonZeroU64::new).unwrap_or(GLOBAL_BATCH_DEFAULT)),
    }
}

/// Default name of a job: the program's name, or that of the script that Python runs, without
/// invalid characters, and random digits.
pub(super) fn default_name(words: &[OsString]) -> Result<String, Failure> {
    let is_script = |word: &&OsString| Path::new(word).extension().is_some_and(|e| e == "py");
    let script = words.get(1..).filter(|_| is_python(words)).unwrap_or_default();
    let program = script.iter().find(is_script).or_else(|| words.first());
    let program = program.map_or_else(|| Path::new(""), Path::new);
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

const GLOBAL_BATCH_DEFAULT: NonZeroU64 = NonZeroU64::new(64).expect("64 is not 0");
/// Resource name of GPUs, as the NVIDIA device plugin registers it.
const GPUS: &str = "nvidia.com/gpu";
/// Its names of instances of GPUs (MIG) begin with this, as in `nvidia.com/mig-1g.10gb`.
const GPU_INSTANCES: &str = "nvidia.com/mig-";
const MAX_WORKERS_DEFAULT_MIN: u32 = 8;
const MAX_WORKERS_FACTOR: u32 = 2;
const NUM_WORKERS_DEFAULT: u32 = 2;

/// The location of the training data. A Python program's sampler says how many records there are,
/// so it needs none.
fn training_data(given: &[String], program: &[OsString]) -> Result<String, Failure> {
    match given {
        [] if is_python(program) => Ok(DATA_OF_PROGRAM.into()),
        [_, ..] => sources("--training-data", given),
        [] => Err(Failure::usage(
            "--training-data is missing: name a file, a folder or a URI (only a Python program \
             needs none)",
        )),
    }
}

/// Whether a program is a Python interpreter or script.
fn is_python(program: &[OsString]) -> bool {
    let Some(program) = program.first().map(Path::new) else { return false };
    let name = program.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let version = name.strip_prefix("python");
    version.is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.'))
        || name.ends_with(".py")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use elasticdl_master::job::{CheckpointEvery, Policies, ShuffleMode, WireDtype};

    use super::*;
    use crate::args::parse_job_name;
    use crate::commands::parse_start;

    /// Specification of a job of this machine.
    fn spec(options: &str) -> JobSpec {
        parse_start(&format!("train --local --training-data d {options} -- true"))
            .unwrap()
            .spec("j".into(), |_, path| Ok(format!("/abs/{path}")))
            .map_err(|e| e.text)
            .unwrap()
    }

    /// Specification of a job in a cluster.
    fn pods(options: &str) -> JobSpec {
        parse_start(&format!("train --image i:1 --training-data d {options} -- true"))
            .unwrap()
            .spec("j".into(), |_, path| Ok(path.into()))
            .map_err(|e| e.text)
            .unwrap()
    }

    #[test]
    fn a_summary_in_place_of_another_file_is_refused_before_the_job_starts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mine.txt");
        let check = || {
            let line =
                format!("train --local --training-data d --summary {} -- true", path.display());
            parse_start(&line).unwrap().check_summary().map_err(|e| e.text)
        };
        assert_eq!(check(), Ok(()));
        std::fs::write(&path, "1\n2\n").unwrap();
        let error = check().unwrap_err();
        assert!(error.contains("mine.txt: it exists and is no summary"), "{error}");
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
        assert_eq!(numbers("--worker-resources nvidia.com/mig-1g.10gb=3"), [3, 3, 3, 6]);
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
        let error =
            parse_start("train --local --training-data d --workers-per-pod 2 -- true").unwrap_err();
        assert!(
            error.contains("'--local' cannot be used with '--workers-per-pod")
                || error.contains("'--workers-per-pod <K>' cannot be used with '--local'"),
            "{error}"
        );
    }

    #[test]
    fn gpus_that_link_encryption_keeps_from_nccl_are_warned_of_with_the_switch() {
        let warning = |options: &str| {
            let asked =
                parse_start(&format!("train --image i:1 --training-data d {options} -- true"));
            nccl_warning(&asked.unwrap().cluster, &pods(options))
        };
        for options in [
            "--worker-resources nvidia.com/gpu=1",
            "--worker-resources nvidia.com/gpu=4 --num-workers 8",
            "--worker-resources nvidia.com/mig-1g.10gb=1",
            "--worker-resources nvidia.com/gpu=4 --num-workers 4 --link-encryption on",
        ] {
            let text = warning(options).unwrap_or_else(|| panic!("{options}: no warning"));
            assert!(text.contains("--link-encryption off"), "{options}: {text}");
        }
        for options in [
            "",
            "--worker-resources cpu=4 --num-workers 8",
            "--worker-resources nvidia.com/gpu=4 --num-workers 4",
            "--worker-resources nvidia.com/gpu=4 --num-workers 8 --link-encryption off",
            "--worker-resources nvidia.com/gpu=1 --num-workers 1 --link-encryption on",
        ] {
            assert_eq!(warning(options), None, "{options}");
        }
    }

    #[test]
    fn only_a_python_program_needs_no_training_data() {
        let of = |program: &str| {
            parse_start(&format!("train --local -- {program}"))
                .unwrap()
                .spec("j".into(), |_, path| Ok(path.into()))
                .map(|spec| spec.options.training_data)
                .map_err(|error| error.text)
        };
        for program in ["python train.py", "/usr/bin/python3.11 -u train.py", "./train.py"] {
            assert_eq!(of(program).as_deref(), Ok("(data of the program)"), "{program}");
        }
        for program in ["./model", "pythonic", "python3-config", "model train.py"] {
            assert!(of(program).unwrap_err().contains("--training-data is missing"), "{program}");
        }
    }

    #[test]
    fn options_reach_the_spec() {
        assert_eq!(spec("--num-workers 7").max_workers, 14);
        assert_eq!(spec("--num-workers 16000").max_workers, 16_384);
        assert_eq!(spec("--num-workers 3 --max-workers 3").max_workers, 3);
        let per_worker = Batch::PerWorker(NonZeroU64::new(5).unwrap());
        assert_eq!(spec("--minibatch-size 5").options.batch, per_worker);
        assert_eq!(spec("--wire-dtype bf16").options.wire_dtype, WireDtype::Bf16);
        assert_eq!(spec("").options.link_encryption, LinkEncryption::Auto);
        assert_eq!(spec("--link-encryption off").options.link_encryption, LinkEncryption::Off);
        assert_eq!(spec("--link-encryption on").options.link_encryption, LinkEncryption::On);
        let micro_batch = |options: &str| spec(options).options.micro_batch_records().get();
        assert_eq!(micro_batch(""), 1);
        assert_eq!(micro_batch("--micro-batch 5"), 5);
        assert_eq!(micro_batch("--deterministic"), 4);
        assert_eq!(micro_batch("--deterministic --micro-batch 5"), 5);
        assert!(spec("--deterministic").options.deterministic);
        assert_eq!(spec("--channels 16").options.channels, 16);
        let mode = |options: &str| spec(options).options.shuffle.mode;
        assert_eq!(mode(""), ShuffleMode::Auto);
        assert_eq!(mode("--shuffle none"), ShuffleMode::None);
        assert_eq!(mode("--shuffle record"), ShuffleMode::Record);
        let block = spec("--shuffle=block:100").options.shuffle;
        assert_eq!((block.mode, block.buffer), (ShuffleMode::Block, NonZeroU64::new(100)));
        assert_eq!(spec("--master-timeout 2min").master_timeout, Duration::from_secs(120));
        let end_timeout = Some(Duration::from_secs(600));
        assert_eq!(spec("").policies, Policies { end_timeout, ..Policies::default() });
        let policies = spec(
            "--on-exit 3-9=restart --on-exit preempted=stop --deadline 2h --suspend \
             --end-timeout 5s",
        )
        .policies;
        let expected = Policies {
            on_exit: vec!["3-9=restart".parse().unwrap(), "preempted=stop".parse().unwrap()],
            deadline: Some(Duration::from_secs(7200)),
            end_timeout: Some(Duration::from_secs(5)),
            starts_suspended: true,
            starts_core_together: false,
            starts_together: false,
        };
        assert_eq!(policies, expected);
    }

    #[test]
    fn checkpoint_options_reach_the_spec() {
        let whole = spec(
            "--checkpoint-dir c --checkpoint-every 200 --checkpoint-keep 2 --resume-from \
             s3://b/c",
        );
        let checkpoints = whole.options.checkpoints.unwrap();
        assert_eq!(checkpoints.dir, "/abs/c");
        assert_eq!(
            (checkpoints.every, checkpoints.keep),
            (CheckpointEvery::Steps(NonZeroU64::new(200).unwrap()), 2)
        );
        assert_eq!(whole.options.resume_from.as_deref(), Some("s3://b/c"));
        let checkpoints = spec("--checkpoint-dir /c").options.checkpoints.unwrap();
        assert_eq!(
            (checkpoints.every, checkpoints.keep),
            (CheckpointEvery::Time(Duration::from_secs(300)), 3)
        );
    }

    #[test]
    fn workers_leave_within_the_grace_period_and_the_master_releases_them_before() {
        for (grace, leave, wait) in
            [(30_000, 28_000, 26_000), (10_000, 8000, 6000), (1000, 800, 600)]
        {
            let spec = spec(&format!("--grace-period {grace}ms"));
            let millis = [spec.options.leave_timeout(), spec.options.leave_wait()]
                .map(|time| time.as_millis());
            assert_eq!(millis, [leave, wait], "{grace}");
        }
    }

    #[test]
    fn the_default_name_is_valid_for_any_program() {
        for program in ["quickstart", "My_Model.v2.bin", "7up", "ünïcode", "---", &"x".repeat(200)]
        {
            let name = default_name(&[program.into()]).unwrap();
            assert_eq!(parse_job_name(&name).as_ref(), Ok(&name), "{program}");
        }
        let python = ["/usr/bin/python3", "-u", "/src/t.py", "other.py"].map(OsString::from);
        assert!(default_name(&python).unwrap().starts_with("t-"));
        let module = ["python3", "-m", "t"].map(OsString::from);
        assert!(default_name(&module).unwrap().starts_with("python3-"));
        let name = default_name(&["/bin/My_Model.bin".into()]).unwrap();
        assert!(name.starts_with("my-model-") && name.len() == "my-model-".len() + 6, "{name}");
    }
}
