//! Jobs of the counting model that tests disturb.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elasticdl_proto::{Status, WorkerId};
use rand::rngs::ChaCha8Rng;
use rand::seq::IteratorRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{Command, Ended, Proxy, Running, S3, counting_data, send};

/// The programs under test, whose paths only a test binary knows.
#[derive(Clone, Copy, Debug)]
pub struct Programs {
    /// Path of `elasticdl`.
    pub elasticdl: &'static str,
    /// Path of the counting model.
    pub counting: &'static str,
}

/// A job of the counting model, and its data.
#[derive(Debug)]
pub struct JobFixture {
    /// Folder of the data and of the job's directory.
    pub folder: TempDir,
    /// The programs under test.
    pub programs: Programs,
    /// Number of workers at the start.
    pub num_workers: u32,
    /// Number of records of the data.
    pub records: u64,
    /// Number of files of the data.
    pub files: u64,
    /// Passes over the data.
    pub epochs: u64,
    /// Time to compute the gradient of a record.
    pub micros_per_record: u64,
    /// Number of parameters, of 4 bytes each, if more than there are records.
    pub parameters: u64,
    /// Length of the buckets that counts are summed in.
    pub bucket: Option<u64>,
    /// Further options of the counting model.
    pub program_options: &'static [&'static str],
    /// Records per step.
    pub global_batch_size: u64,
    /// `None`: the default. Longer than a busy machine delays any worker, so that only workers that
    /// the test has stopped are evicted.
    pub worker_timeout: Option<&'static str>,
    /// Whether a job without checkpoints starts anew when a fault hits all workers at once.
    pub restart_without_checkpoint: bool,
    /// Folder of the GPU libraries, if workers compute on GPUs.
    pub gpu: Option<&'static Path>,
    /// Environment variables of all processes.
    pub variables: Vec<(&'static str, OsString)>,
    /// A proxy between the workers and their master.
    pub proxy: Option<std::sync::Arc<Proxy>>,
    /// Whether the master's kills reach only the process that starts a worker, as if the worker
    /// were on another machine.
    pub out_of_reach: bool,
    /// Script for `sh -c` that runs its arguments, a worker's program.
    pub script: Option<String>,
    /// The object store that the data lies in; `None`: in a folder.
    pub store: Option<S3>,
}

/// The file in the fixture's folder that ends the delay per record.
pub(crate) const HURRY: &str = "hurry";

impl JobFixture {
    /// A job of `num_workers` workers that takes some seconds.
    pub fn new(programs: Programs, num_workers: u32) -> Self {
        Self {
            folder: tempfile::tempdir().expect("there is a place for temporary files"),
            programs,
            num_workers,
            records: RECORDS,
            files: 3,
            epochs: EPOCHS,
            micros_per_record: 400,
            parameters: 0,
            bucket: None,
            program_options: &[],
            global_batch_size: 48,
            worker_timeout: Some("10s"),
            restart_without_checkpoint: true,
            gpu: None,
            variables: Vec::new(),
            proxy: None,
            out_of_reach: false,
            script: None,
            store: None,
        }
    }

    /// A model of 4 MiB, which takes some milliseconds to transfer, and fewer steps.
    pub fn large(self) -> Self {
        Self { parameters: 1 << 20, global_batch_size: 300, ..self }
    }

    /// A job that lasts until [`Running::hurry`], also on a slow machine.
    pub fn lasting(self) -> Self {
        Self { micros_per_record: 4 * self.micros_per_record, ..self }
    }

    /// A path in the fixture's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Ends the delay per record of all workers of the fixture's jobs.
    pub fn hurry(&self) {
        std::fs::write(self.path(HURRY), "").expect("the folder can be written to");
    }

    /// The folder of the data, which is written at the first call.
    pub fn data(&self) -> PathBuf {
        let folder = self.path("data");
        if !folder.exists() {
            counting_data(&folder, self.records, self.files).expect("the data has room there");
        }
        folder
    }

    /// The URL or path of the data, which is written at the first call.
    fn training_data(&self) -> OsString {
        let folder = self.data();
        let Some(store) = &self.store else { return folder.into() };
        for file in std::fs::read_dir(folder).expect("the data was written") {
            let file = file.expect("the folder can be read");
            let name = file.file_name().to_string_lossy().into_owned();
            let bytes = std::fs::read(file.path()).expect("the data can be read");
            store.put(&format!("bucket/data/{name}"), bytes);
        }
        "s3://bucket/data".into()
    }

    /// The job's command, with the options that all fixtures share.
    pub fn command(&self, seed: u64) -> Command {
        let mut variables = self.variables.clone();
        if let Some(libraries) = self.gpu {
            variables.push(("LD_LIBRARY_PATH", libraries.into()));
        }
        let mut starter: Vec<OsString> = Vec::new();
        let store = self.store.iter().flat_map(S3::environment).map(OsString::from);
        let settings = variables.iter().map(|(name, value)| concat(name, value)).chain(store);
        let settings: Vec<OsString> = settings.collect();
        if !settings.is_empty() {
            starter.push("env".into());
            starter.extend(settings);
        }
        let command = Command::new(self.programs.elasticdl, self.path("job"), self.program())
            .option("training-data", self.training_data())
            .option("num-epochs", self.epochs.to_string())
            .option("num-workers", self.num_workers.to_string())
            .option("global-batch-size", self.global_batch_size.to_string())
            .option("seed", seed.to_string())
            .started_by(starter);
        let command = match self.worker_timeout {
            Some(timeout) => command.option("worker-timeout", timeout),
            None => command,
        };
        match self.restart_without_checkpoint {
            true => command.flag("restart-without-checkpoint"),
            false => command,
        }
    }

    /// The worker's program with its arguments.
    fn program(&self) -> Vec<OsString> {
        let mut program: Vec<OsString> = Vec::new();
        if let Some(proxy) = &self.proxy {
            program.extend(["/bin/sh", "-c", &proxy.script(), "sh"].map(Into::into));
        }
        if let Some(script) = &self.script {
            program.extend(["/bin/sh", "-c", script, "sh"].map(Into::into));
        }
        if self.out_of_reach {
            program.extend(["/bin/sh", "-c", "setsid \"$@\" & wait $!", "sh"].map(Into::into));
        }
        program.push(self.programs.counting.into());
        for (name, value) in [
            ("--records", Some(self.records)),
            ("--parameters", Some(self.parameters)),
            ("--micros-per-record", Some(self.micros_per_record)),
            ("--bucket", self.bucket),
        ] {
            program.extend(value.into_iter().flat_map(|v| [name.into(), v.to_string().into()]));
        }
        program.extend(["--hurry-when".into(), self.path(HURRY).into()]);
        program.extend(self.program_options.iter().map(Into::into));
        program.extend(self.gpu.map(|_| "--gpu".into()));
        program
    }

    /// Starts the job, and waits until it trains.
    pub fn start(self, seed: u64) -> Running {
        let mut job = self.command(seed).start().keeping(self.folder);
        job.wait_for_first_steps();
        job
    }

    /// Starts the job and kills a random worker after each pause (drawn from `pauses_ms`), until
    /// the job has ended; asserts that the result is exact.
    pub fn survives_kills(self, seed: u64, pauses_ms: Range<u64>) {
        let mut job = self.start(seed);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut kills = 0;
        while job.is_running() {
            let victim = job.any_worker(&mut rng).filter(|_| kills < KILLS_MAX);
            if let Some((_, pid)) = victim {
                send(pid, Signal::KILL);
                kills += 1;
            }
            std::thread::sleep(Duration::from_millis(rng.random_range(pauses_ms.clone())));
        }
        job.wait().assert_exact(&format!("seed {seed}, {kills} kills"));
        assert!(kills > 1, "seed {seed}: too fast to be disturbed");
    }
}

/// Kills of one schedule: fewer than those without progress that end a job, which a busy machine
/// would not let it make.
pub const KILLS_MAX: u32 = 18;

impl Running {
    /// A random worker of the job, and its process id; `None` while there are none.
    pub fn any_worker(&self, rng: &mut impl rand::Rng) -> Option<(WorkerId, u32)> {
        self.workers().into_iter().choose(rng)
    }

    /// Waits until the job has written this number of checkpoints.
    pub fn wait_for_checkpoints(&mut self, count: u64) -> Status {
        self.wait_for("checkpoints", |status| {
            status.checkpoints.as_ref().is_some_and(|known| known.saved >= count)
        })
    }

    /// Sends a signal to all workers of the job.
    pub fn signal_workers(&self, signal: Signal) {
        self.workers().into_values().for_each(|pid| send(pid, signal));
    }
}

impl Ended {
    /// Asserts the result that a job with a fixture's default records and epochs must have,
    /// whatever faults hit it.
    pub fn assert_exact(&self, context: &str) {
        self.assert_exactly_once(context, RECORDS, EPOCHS);
    }
}

/// `name=value`
fn concat(name: &str, value: &OsString) -> OsString {
    let mut whole = OsString::from(format!("{name}="));
    whole.push(value);
    whole
}

/// Records of a fixture's data by default.
const RECORDS: u64 = 6000;
/// Passes over the data by default.
const EPOCHS: u64 = 2;
