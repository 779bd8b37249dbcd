//! Turns a request into a job that this machine leads, with every check that needs no worker.
//!
//! **Invariant:** when [`LocalJob::new`] fails, nothing has been written or started.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elasticdl_master::job::{JobSpec, Work};
use elasticdl_master::jobdir::{self, EarlierJob, earlier_job, quoted};
use elasticdl_master::local::hosts::{HOST, Host, Hosts, SHELL};
use rustix::fs::Access;

use super::background::name_of;
use super::request::{StartRequest, WorkOptions, default_name};
use crate::args::DashboardPort;
use crate::process::{Console, Failure, cannot};

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
    /// Where the dashboard is served, if it is.
    pub(super) dashboard: Option<SocketAddr>,
    pub(super) tensorboard_dir: Option<PathBuf>,
    pub(super) master_timeout: Duration,
    pub(super) console: Console,
    /// The hosts of its workers, if they are not on this machine.
    pub(super) hosts: Option<Hosts>,
    /// Whether it may replace an earlier job in its directory.
    replace: bool,
    work: WorkOptions,
}

impl LocalJob {
    /// Validates the combination of options.
    pub(super) fn new(mut request: StartRequest) -> Result<Self, Failure> {
        request.job.local |= request.job.hosts.is_some();
        if !request.job.local {
            return Err(Failure::usage(
                "none of --image, --local and --hosts is given: use --image IMG to train in a \
                 cluster, with pods of that image, --local to train with processes of this \
                 machine, or --hosts FILE to train with processes of other hosts",
            ));
        }
        // The numbers are checked first: they do not depend on the program.
        request.check_workers()?;
        let (program, program_args) =
            request.program.split_first().expect("clap asks for one where nothing is resumed");
        let program = find_program(program)?;
        request.check_summary()?;
        let name = match &request.job.job_name {
            Some(name) => name.clone(),
            None => default_name(&request.program)?,
        };
        let mut spec = with_whole_outputs(request.spec(name, absolute_path)?)?;
        spec.policies.starts_together = true;
        let args = program_args.to_vec();
        let StartRequest { mut job, work, workers, output, .. } = request;
        let mut listen = job.listen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let hosts = job.hosts.take().map(|list| hosts_of(list.0, &job.host_command)).transpose()?;
        if let Some(hosts) = &hosts {
            check_storage(&work)?;
            if job.listen.is_none() {
                listen = address_towards(&hosts.hosts[0].name)?;
            }
        }
        let job_dir = job.job_dir.unwrap_or_else(|| jobdir::default_root().join(&spec.name));
        let local = Self {
            spec,
            program,
            args,
            job_dir,
            listen,
            console: output.console(),
            summary: output.summary,
            metrics: output.metrics_port.map(|port| SocketAddr::new(listen, port)),
            dashboard: output
                .dashboard_port
                .unwrap_or(DashboardPort::Port(0))
                .port()
                .map(|port| SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)),
            tensorboard_dir: output.tensorboard_dir,
            master_timeout: workers.master_timeout,
            hosts,
            replace: job.replace,
            work,
        };
        local.check_outputs()?;
        Ok(local)
    }

    /// Refuses to replace what an earlier job has trained, unless the user asks for it, or goes on
    /// with its checkpoints.
    pub(super) fn refuse_to_replace(&self) -> Result<(), Failure> {
        let own = std::path::absolute(&self.job_dir).unwrap_or_else(|_| self.job_dir.clone());
        let continues = self
            .spec
            .options
            .resume_from
            .as_ref()
            .is_some_and(|from| Path::new(from).starts_with(own));
        if self.replace || continues {
            return Ok(());
        }
        match earlier_job(&self.job_dir) {
            Some(earlier) => Err(Failure::usage(explain(&earlier, &self.job_dir))),
            None => Ok(()),
        }
    }

    /// Makes a training job write checkpoints to its own directory, `job_dir`, unless the user has
    /// given `--checkpoint-dir`.
    pub(super) fn keep_checkpoints_in(&mut self, job_dir: &Path) {
        if let (None, WorkOptions::Training(options, _)) =
            (&self.spec.options.checkpoints, &self.work)
        {
            self.spec.options.checkpoints = options.checkpoints.in_job_dir(job_dir);
        }
    }
}

/// The hosts of the workers, which `command` reaches.
fn hosts_of(hosts: Vec<Host>, command: &str) -> Result<Hosts, Failure> {
    let command: Vec<String> = command.split_whitespace().map(Into::into).collect();
    if !command.iter().any(|word| word.contains(HOST)) {
        return Err(Failure::usage(format!(
            "--host-command: it has no {HOST}, where the name of a host belongs, as in `ssh {HOST}`"
        )));
    }
    find_program(OsStr::new(&command[0]))
        .map_err(|failure| Failure::usage(format!("--host-command: {}", failure.text)))?;
    let own = std::env::current_exe().map_err(cannot("learn the path of this command"))?;
    if own.to_str().is_none_or(|own| own.contains(|c| SHELL.contains(c))) {
        return Err(Failure::usage(format!(
            "--hosts: the path of this command, {}, has characters that a shell on a host would \
             take apart; put it elsewhere",
            own.display()
        )));
    }
    let folder = std::env::current_dir().map_err(cannot("learn the current directory"))?;
    Ok(Hosts { hosts, command, elasticdl: own.into(), folder: folder.into() })
}

/// Workers on several hosts write the parts of a checkpoint, and any of them reads it.
fn check_storage(work: &WorkOptions) -> Result<(), Failure> {
    match work {
        WorkOptions::Training(options, _) if options.checkpoints.checkpoint_dir.is_none() => {
            Err(Failure::usage(
                "--hosts: give --checkpoint-dir a folder that all hosts share or an object store, \
                 or `none`",
            ))
        }
        _ => Ok(()),
    }
}

/// The address from which this machine reaches a host.
fn address_towards(host: &str) -> Result<IpAddr, Failure> {
    let name = host.rsplit_once('@').map_or(host, |(_, name)| name);
    let found = (name, DISCARD).to_socket_addrs().and_then(|addresses| {
        let reached = addresses.filter_map(|address| {
            let any: IpAddr = match address {
                SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            // No packet is sent.
            let socket = UdpSocket::bind((any, 0)).ok()?;
            socket.connect(address).ok()?;
            Some(socket.local_addr().ok()?.ip())
        });
        { reached }.next().ok_or_else(|| io::Error::other("there is no route to it"))
    });
    found.map_err(|error| {
        Failure::usage(format!(
            "--hosts: {name}: {error}; give --listen the address of this machine that the hosts \
             reach"
        ))
    })
}

/// Why an earlier job is in the way, and the ways out.
fn explain(earlier: &EarlierJob, job_dir: &Path) -> String {
    let job = name_of(job_dir);
    let state = earlier.state.as_deref();
    let ended = match state {
        Some(state) => format!("a job that is {state}, at step {}", earlier.steps),
        None => "a job whose master has died".into(),
    };
    let mut ways = Vec::new();
    if state.is_none() {
        ways.push(format!("elasticdl train --resume {job}   goes on with it"));
    }
    if let Some(folder) = &earlier.checkpoints {
        ways.push(format!("--resume-from {}   begins with its newest checkpoint", quoted(folder)));
    }
    ways.push(format!("elasticdl delete {job}   deletes it"));
    ways.push("--replace   replaces it".into());
    format!(
        "{} holds {ended}; choose another --job-name or --job-dir, or:\n  {}",
        job_dir.display(),
        ways.join("\n  ")
    )
}

/// Makes the paths of models and predictions absolute: the summary shows them to a user who may be
/// in another directory.
fn with_whole_outputs(mut spec: JobSpec) -> Result<JobSpec, Failure> {
    let best =
        spec.options.validation.as_mut().and_then(|validation| validation.export_best.as_mut());
    let last = match &mut spec.options.work {
        Work::Train { export } => export.as_mut().map(|export| ("--export", export)),
        Work::Predict { output, .. } => Some(("--predictions", output)),
        Work::Evaluate { .. } => None,
    };
    for (option, address) in best.map(|best| ("--export-best", best)).into_iter().chain(last) {
        if !address.contains("://") {
            *address = absolute_path(option, address)?;
        }
    }
    Ok(spec)
}

/// Resolves a path of a local job against the current directory.
fn absolute_path(option: &str, path: &str) -> Result<String, Failure> {
    let whole =
        std::path::absolute(path).map_err(|e| Failure::usage(format!("{option} {path}: {e}")))?;
    whole
        .into_os_string()
        .into_string()
        .map_err(|_| Failure::usage(format!("{option} {path}: it must be UTF-8")))
}

/// Resolves `program` as a shell does.
pub(crate) fn find_program(program: &OsStr) -> Result<PathBuf, Failure> {
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
    if executable { check_format(path) } else { Err("it is not executable; `chmod +x` it".into()) }
}

/// Checks what the system looks at before it runs a file: whether it is a binary, or names an
/// interpreter that exists.
fn check_format(path: &Path) -> Result<(), String> {
    let mut head = Vec::new();
    // A file that may be run and not be read is a binary.
    let Ok(file) = File::open(path) else { return Ok(()) };
    file.take(FORMAT_BYTES).read_to_end(&mut head).map_err(|e| e.to_string())?;
    let Some(line) = head.strip_prefix(b"#!") else {
        return match head.contains(&0) {
            true => Ok(()),
            false => Err("it is text without a first line such as `#!/bin/sh`".into()),
        };
    };
    let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let mut words = line.split(|byte| b" \t\r".contains(byte)).filter(|word| !word.is_empty());
    let interpreter = Path::new(OsStr::from_bytes(words.next().unwrap_or_default()));
    if line.ends_with(b"\r") {
        return Err(
            "its first line ends with a carriage return; save it with Unix line ends".into()
        );
    }
    match interpreter.is_file() {
        true => Ok(()),
        false => Err(format!("its interpreter {} does not exist", interpreter.display())),
    }
}

/// The port of no service: what is sent there is discarded.
const DISCARD: u16 = 9;
/// Bytes of a file that the system looks at.
const FORMAT_BYTES: u64 = 256;

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use elasticdl_master::job::{
        Batch, CheckpointEvery, CheckpointSpec, OnNonfinite, Policies, WireDtype,
    };

    use elasticdl_proto::{LogFormat, WorkerOptions};

    use super::*;
    use crate::commands::parse_start;

    fn local_job(options: &str) -> Result<LocalJob, String> {
        let line = format!("train --training-data d {options} -- true a --b");
        LocalJob::new(parse_start(&line)?).map_err(|e| e.text)
    }

    #[test]
    fn the_defaults_match_the_help() {
        let job = local_job("--local --job-name j").unwrap();
        let expected = JobSpec {
            name: "j".into(),
            num_workers: 2,
            min_workers: 1,
            max_workers: 8,
            autoscale: false,
            spares: 0,
            avoid_hosts: Vec::new(),
            workers_per_pod: 1,
            records_per_shard: None,
            max_worker_restarts: 3,
            step_timeout: None,
            start_timeout: Duration::from_secs(600),
            master_timeout: Duration::from_secs(30),
            restart_without_checkpoint: false,
            log_format: LogFormat::Text,
            policies: Policies {
                end_timeout: Some(Duration::from_secs(600)),
                starts_together: true,
                ..Default::default()
            },
            options: WorkerOptions {
                training_data: "d".into(),
                epochs: 1,
                max_steps: None,
                batch: Batch::Global(NonZeroU64::new(64).unwrap()),
                shuffle: Default::default(),
                micro_batch: None,
                deterministic: false,
                seed: 0,
                worker_timeout: Some(Duration::from_millis(800)),
                checkpoints: None,
                resume_from: None,
                validation: None,
                work: Work::Train { export: None },
                wire_dtype: WireDtype::F32,
                channels: 1,
                link_encryption: Default::default(),
                on_nonfinite: OnNonfinite::Fail,
                allow_mixed_builds: false,
                bad_records_max: 0,
                table_replicas: 2,
                on_rows_lost: Default::default(),
                shard_optimizer: false,
                param_dtype: Default::default(),
                table_memory: None,
                export_changes_since: None,
                table_lag: 0,
                table_servers: 0,
                audit: 0,
                grace_period: Duration::from_secs(30),
            },
        };
        assert_eq!(job.spec, expected);
        assert_eq!(job.master_timeout, Duration::from_secs(30));
        assert_eq!(
            (job.args, job.console, job.summary),
            (vec!["a".into(), "--b".into()], Console::default(), None)
        );
        assert!(job.program.is_absolute() && job.program.ends_with("true"), "{:?}", job.program);
        assert!(job.job_dir.ends_with("elasticdl/j") || job.job_dir.ends_with(".elasticdl/j"));
    }

    #[test]
    fn outputs_of_a_local_job_are_named_by_their_whole_path() {
        let here = std::env::current_dir().unwrap();
        let at = |name: &str| Some(here.join(name).to_str().unwrap().to_owned());
        let job = local_job("--local --export ./m --validation-data v --export-best b").unwrap();
        assert_eq!(job.spec.options.work, Work::Train { export: at("m") });
        assert_eq!(job.spec.options.validation.unwrap().export_best, at("b"));
        let job = local_job("--local --export s3://b/./m").unwrap();
        assert_eq!(job.spec.options.work, Work::Train { export: Some("s3://b/./m".into()) });
    }

    #[test]
    fn a_local_job_writes_checkpoints_to_its_directory_by_default() {
        let checkpoints = |options: &str| {
            let mut job = local_job(options).unwrap();
            job.keep_checkpoints_in(Path::new("/jobs/j"));
            job.spec.options.checkpoints
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
    fn a_job_that_has_trained_something_is_replaced_only_if_the_user_asks_for_it() {
        let scratch = tempfile::tempdir().unwrap();
        let root = scratch.path().join("mnist");
        let refused = |options: &str| {
            let line = format!("--local --job-dir {} {options}", root.display());
            local_job(&line).unwrap().refuse_to_replace().err().map(|failure| failure.text)
        };
        assert_eq!(refused(""), None);
        drop(jobdir::JobDir::create(&root).unwrap());
        assert_eq!(refused(""), None, "it has trained nothing");
        let checkpoints = root.join("checkpoints");
        let checkpoint = checkpoints.join("step-000000000200-0123abcd-g1");
        std::fs::create_dir_all(&checkpoint).unwrap();
        std::fs::write(checkpoint.join("manifest.json"), "{}").unwrap();
        assert!(refused("").unwrap().contains("train --resume "));
        let summary = r#"{"state": "completed", "steps": 200}"#;
        std::fs::write(root.join("summary.json"), summary).unwrap();
        let text = refused("").unwrap();
        for way in ["at step 200", "--resume-from ", "elasticdl delete ", "--replace"] {
            assert!(text.contains(way), "{way:?} is not in: {text}");
        }
        assert_eq!(refused("--replace"), None);
        assert_eq!(refused(&format!("--resume-from {}", checkpoints.display())), None);
        assert!(refused("--resume-from /elsewhere").is_some());
    }

    #[test]
    fn a_script_that_cannot_be_run_is_refused_before_the_job_starts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.sh");
        let checked = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            find_program(path.as_os_str()).map(drop).map_err(|failure| failure.text)
        };
        for good in [&b"#!/bin/sh\nexit"[..], b"#! /usr/bin/env python3\n", b"\x7fELF\x02\0\0"] {
            assert_eq!(checked(good), Ok(()));
        }
        for (bad, why) in [
            (&b"#!/opt/none/python -u\n"[..], "its interpreter /opt/none/python does not exist"),
            (b"#!/bin/sh\r\nexit\r\n", "carriage return"),
            (b"echo hello\n", "#!/bin/sh"),
            (b"", "#!/bin/sh"),
        ] {
            let refused = checked(bad).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn the_master_listens_on_the_loopback_interface_by_default() {
        assert_eq!(local_job("--local").unwrap().listen.to_string(), "127.0.0.1");
        assert_eq!(local_job("--local --listen ::1").unwrap().listen.to_string(), "::1");
    }

    #[test]
    fn the_dashboard_is_served_on_the_loopback_interface_whatever_the_master_listens_on() {
        let dashboard = |options: &str| local_job(options).map(|job| job.dashboard);
        let port = |port: u16| Ok(Some(SocketAddr::from(([127, 0, 0, 1], port))));
        assert_eq!(dashboard("--local --listen 192.0.2.7"), port(0));
        assert_eq!(dashboard("--local --dashboard-port 8080"), port(8080));
        assert_eq!(dashboard("--local --dashboard-port none"), Ok(None));
        let error = dashboard("--local --dashboard-port 65536").unwrap_err();
        assert!(error.contains("0 (a free one) to 65535, or none"), "{error}");
    }
}
