//! How a worker's process is started: on this machine, or by a command that reaches another host.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use elasticdl_proto::{LogFormat, gpu_instance};
use tokio::process::{Child, Command};
use tracing::warn;

use super::hosts::{HostLaunch, Hosts, Place};
use super::log;
use crate::job::LaunchId;
use crate::jobdir::{self, JobDir, Owner, ProgramCopy, ProgramSource};

/// How a job's worker processes are started.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments of the program.
    pub args: Vec<OsString>,
    /// Environment variables in addition to the master's own; each launch further gets
    /// `ELASTICDL_LAUNCH` and `ELASTICDL_INDEX`.
    pub env: Vec<(OsString, OsString)>,
    /// The job whose directory has the files below.
    pub owner: Owner,
    /// Folder of the workers' logs.
    pub logs: PathBuf,
    /// File that lists the started processes.
    pub processes: PathBuf,
    /// Copy of the program's file from when the job began.
    pub copy: Option<ProgramCopy>,
    /// Number of threads with which a worker computes, unless the master's environment sets it.
    pub threads: usize,
    /// Other hosts, if the workers run there.
    pub hosts: Option<Hosts>,
}

impl Launcher {
    /// A launcher of `program` with `args` for the job in `dir`. A worker exits when it has had no
    /// master for `master_timeout`.
    #[must_use]
    pub fn new(
        program: PathBuf,
        args: Vec<OsString>,
        dir: &JobDir,
        master_timeout: Duration,
    ) -> Self {
        let mut env = vec![
            ("ELASTICDL_JOB_DIR".into(), dir.path().into()),
            ("ELASTICDL_TOKEN_FILE".into(), dir.token_path().into()),
            ("ELASTICDL_MASTER_TIMEOUT_MS".into(), master_timeout.as_millis().to_string().into()),
        ];
        if let Some(ca) = dir.ca_path() {
            env.push(("ELASTICDL_CA_FILE".into(), ca.into()));
            env.push(("ELASTICDL_MASTER_NAME".into(), jobdir::MASTER_DNS_NAME.into()));
        }
        Self {
            program,
            args,
            env,
            owner: dir.owner().clone(),
            logs: dir.logs(),
            processes: dir.processes_path(),
            copy: None,
            threads: 1,
            hosts: None,
        }
    }

    /// Lets workers log in this format.
    pub(crate) fn logging(mut self, format: LogFormat) -> Self {
        self.env.push((LogFormat::VARIABLE.into(), format.name().into()));
        self
    }

    /// Starts workers from `copy` when the file at the program's path has been replaced.
    pub(crate) fn with_copy(self, copy: Option<ProgramCopy>) -> Self {
        Self { copy, ..self }
    }

    /// Starts the workers on these hosts, if there are any.
    pub(crate) fn on_hosts(self, hosts: Option<Hosts>) -> Self {
        Self { hosts, ..self }
    }

    /// Divides the cores of this machine among `workers` workers: each computes with its share.
    pub(crate) fn sharing_cores(self, workers: u32) -> Self {
        Self { threads: share_of_cores(workers), ..self }
    }

    /// The program and its first argument, which for Python is the script.
    pub(super) fn command_line(&self) -> String {
        let program = self.program.file_name().unwrap_or(self.program.as_os_str());
        let words = std::iter::once(program).chain(self.args.first().map(OsString::as_os_str));
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    pub(super) fn source(&self) -> ProgramSource<'_> {
        self.copy.as_ref().map_or(ProgramSource::Original, |copy| copy.source(&self.program))
    }

    pub(super) fn spawn(
        &self,
        launch: LaunchId,
        index: u32,
        place: Option<Place>,
    ) -> io::Result<Child> {
        if self.owner.is_replaced() {
            return Err(io::Error::other(
                "the job's directory was removed or renamed, and is now that of another job",
            ));
        }
        let log = log::create(&jobdir::worker_log(&self.logs, launch)).or_else(|error| {
            // A full disk: a worker without a log trains as well.
            warn!(launch = launch.0, %error, "the worker's output is not kept");
            std::fs::File::options().write(true).open("/dev/null")
        })?;
        if let Some((hosts, place)) = self.hosts.as_ref().zip(place) {
            let words = hosts.words(place.host);
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).stdin(Stdio::piped()).stdout(log.try_clone()?).stderr(log);
            return command.process_group(0).spawn();
        }
        let mut command = match self.source() {
            ProgramSource::Copy(copy) => Command::new(copy),
            ProgramSource::Replaced | ProgramSource::Original => Command::new(&self.program),
        };
        command
            .arg0(&self.program)
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env("ELASTICDL_LAUNCH", launch.0.to_string())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0);
        command.envs(env_of_slot(index, self.threads)).spawn()
    }

    /// What the host of a worker reads from its input.
    pub(super) fn host_launch(
        &self,
        launch: LaunchId,
        place: Place,
    ) -> io::Result<Option<Vec<u8>>> {
        let Some(hosts) = &self.hosts else { return Ok(None) };
        let host = &hosts.hosts[place.host];
        let (mut env, mut files) = (Vec::new(), Vec::new());
        for (name, value) in &self.env {
            match name.to_str() {
                // It is on this machine.
                Some("ELASTICDL_JOB_DIR") => {}
                Some(name @ ("ELASTICDL_TOKEN_FILE" | "ELASTICDL_CA_FILE")) => {
                    files.push((name.to_owned(), std::fs::read(value)?));
                }
                _ => env.push((name.clone(), value.clone())),
            }
        }
        env.push(("ELASTICDL_LAUNCH".into(), launch.0.to_string().into()));
        env.push(("ELASTICDL_NODE_NAME".into(), host.name.clone().into()));
        let launch = HostLaunch {
            program: self.program.clone().into(),
            args: self.args.clone(),
            env,
            folder: hosts.folder.clone(),
            files,
            slot: (place.slot, host.slots),
        };
        Ok(Some(serde_json::to_vec(&launch).expect("it has no maps")))
    }
}

/// Variables of the worker in a slot of this machine, which computes with this number of threads.
/// The environment of this process takes precedence.
#[must_use]
pub fn env_of_slot(slot: u32, threads: usize) -> Vec<(&'static str, String)> {
    let mut env = vec![("ELASTICDL_INDEX", slot.to_string())];
    let instance = gpu_instance(slot, |name| std::env::var(name).ok());
    env.extend(instance.map(|instance| ("CUDA_VISIBLE_DEVICES", instance)));
    // What a program in Python prints reaches its log at once. More threads than cores would make
    // the ranks wait for each other.
    let defaults = THREADS.map(|name| (name, threads.to_string()));
    let defaults = defaults.into_iter().chain([(UNBUFFERED, "1".to_owned())]);
    env.extend(defaults.filter(|(name, _)| std::env::var_os(name).is_none()));
    env
}

/// The number of this machine's cores for each of `workers` workers, at least one.
#[must_use]
pub fn share_of_cores(workers: u32) -> usize {
    share_of(std::thread::available_parallelism().map_or(1, usize::from), workers)
}

/// The share of each of `workers` workers in `cores` cores, at least one.
pub(super) fn share_of(cores: usize, workers: u32) -> usize {
    (cores / (workers.max(1) as usize)).max(1)
}

const UNBUFFERED: &str = "PYTHONUNBUFFERED";
pub(super) const THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];
