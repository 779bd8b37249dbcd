//! Jobs of the counting model that tests disturb.

use std::ffi::OsString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rand::rngs::ChaCha8Rng;
use rand::seq::IteratorRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{Command, Ended, Proxy, Running, counting_data, send};

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
    /// Time to compute the gradient of a record.
    pub micros_per_record: u64,
    /// Number of parameters, of 4 bytes each, if more than there are records.
    pub parameters: u64,
    /// Length of the buckets that counts are summed in.
    pub bucket: Option<u64>,
    /// Records per step.
    pub global_batch_size: u64,
    /// `None`: the default. Longer than a busy machine delays any worker, so that only workers that
    /// the test has stopped are evicted.
    pub worker_timeout: Option<&'static str>,
    /// Folder of the GPU libraries, if workers compute on GPUs.
    pub gpu: Option<&'static Path>,
    /// Environment variables of all processes.
    pub variables: Vec<(&'static str, OsString)>,
    /// A proxy between the workers and their master.
    pub proxy: Option<std::sync::Arc<Proxy>>,
    /// Whether the master's kills reach only the process that starts a worker, as if the worker
    /// were on another machine.
    pub out_of_reach: bool,
}

impl JobFixture {
    /// A job of `num_workers` workers that takes some seconds.
    ///
    /// # Panics
    /// The temporary data can't be written.
    #[must_use]
    pub fn new(programs: Programs, num_workers: u32) -> Self {
        let folder = tempfile::tempdir().expect("there is a place for temporary files");
        counting_data(&folder.path().join("data"), RECORDS, 3).expect("the data has room there");
        Self {
            folder,
            programs,
            num_workers,
            micros_per_record: 400,
            parameters: 0,
            bucket: None,
            global_batch_size: 48,
            worker_timeout: Some("10s"),
            gpu: None,
            variables: Vec::new(),
            proxy: None,
            out_of_reach: false,
        }
    }

    /// A model of 4 MiB, which takes some milliseconds to transfer, and fewer steps.
    #[must_use]
    pub fn large(self) -> Self {
        Self { parameters: 1 << 20, global_batch_size: 300, ..self }
    }

    /// The job's command, with the options that all fixtures share.
    #[must_use]
    pub fn command(&self, seed: u64) -> Command {
        let mut program: Vec<PathBuf> = Vec::new();
        if let Some(proxy) = &self.proxy {
            program.extend(["/bin/sh", "-c", &proxy.script(), "sh"].map(Into::into));
        }
        if self.out_of_reach {
            program.extend(["/bin/sh", "-c", "setsid \"$@\" & wait $!", "sh"].map(Into::into));
        }
        program.push(self.programs.counting.into());
        for (name, value) in [
            ("--records", RECORDS),
            ("--parameters", self.parameters),
            ("--micros-per-record", self.micros_per_record),
        ] {
            program.extend([name.into(), value.to_string().into()]);
        }
        program.extend(
            self.bucket.iter().flat_map(|bucket| ["--bucket".into(), bucket.to_string().into()]),
        );
        let mut variables = self.variables.clone();
        if let Some(libraries) = self.gpu {
            program.push("--gpu".into());
            variables.push(("LD_LIBRARY_PATH", libraries.into()));
        }
        let mut starter: Vec<OsString> = Vec::new();
        if !variables.is_empty() {
            starter.push("env".into());
            starter.extend(variables.iter().map(|(name, value)| concat(name, value)));
        }
        let command =
            Command::new(self.programs.elasticdl, self.folder.path().join("job"), program)
                .option("training-data", self.folder.path().join("data"))
                .option("num-epochs", EPOCHS.to_string())
                .option("num-workers", self.num_workers.to_string())
                .option("global-batch-size", self.global_batch_size.to_string())
                .option("seed", seed.to_string())
                // A fault may hit all workers at once.
                .flag("restart-without-checkpoint")
                .started_by(starter);
        match self.worker_timeout {
            Some(timeout) => command.option("worker-timeout", timeout),
            None => command,
        }
    }

    /// Starts the job, and waits until it trains.
    #[must_use]
    pub fn start(self, seed: u64) -> Running {
        let mut job = self.command(seed).start().keeping(self.folder);
        job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
        job
    }

    /// Starts the job and kills a random worker after each pause (drawn from `pauses_ms`), until
    /// the job has ended; asserts that the result is exact.
    ///
    /// # Panics
    /// It is not, or the job was over before the second kill.
    pub fn survives_kills(self, seed: u64, pauses_ms: Range<u64>) {
        let mut job = self.start(seed);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut kills = 0;
        while job.is_running() {
            if let Some((_, pid)) = job.any_worker(&mut rng) {
                send(pid, Signal::KILL);
                kills += 1;
            }
            std::thread::sleep(Duration::from_millis(rng.random_range(pauses_ms.clone())));
        }
        job.wait().assert_exact(&format!("seed {seed}, {kills} kills"));
        assert!(kills > 1, "seed {seed}: too fast to be disturbed");
    }
}

impl Running {
    /// A random worker of the job, and its process id; `None` while there are none.
    pub fn any_worker(&self, rng: &mut impl rand::Rng) -> Option<(u64, u32)> {
        self.workers().into_iter().choose(rng)
    }
}

impl Ended {
    /// Asserts the result that the job of every [`JobFixture`] must have, whatever faults hit it.
    ///
    /// # Panics
    /// The result is another one.
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

const RECORDS: u64 = 6000;
const EPOCHS: u64 = 2;
