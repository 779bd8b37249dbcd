//! Jobs of the counting model, to be disturbed.

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

/// The programs under test, which only a test binary knows.
#[derive(Clone, Copy, Debug)]
pub struct Programs {
    /// `elasticdl`.
    pub elasticdl: &'static str,
    /// The counting model.
    pub counting: &'static str,
}

/// A job of the counting model, and its data.
#[derive(Debug)]
pub struct Stage {
    /// Of the data and the job's directory.
    pub folder: TempDir,
    /// What is run.
    pub programs: Programs,
    /// Workers to start with.
    pub num_workers: u32,
    /// Time that a record's gradient takes.
    pub micros_per_record: u64,
    /// Parameters, of 4 bytes each, if more than records.
    pub parameters: u64,
    /// Counts are summed in buckets of so many.
    pub bucket: Option<u64>,
    /// Records of a step.
    pub global_batch_size: u64,
    /// `None`: the default. Generous where a busy machine is to take nobody out whom the test did
    /// not stop.
    pub worker_timeout: Option<&'static str>,
    /// Where the libraries of the GPUs are that workers compute on.
    pub gpu: Option<&'static Path>,
    /// Variables of the environment that all processes get.
    pub variables: Vec<(&'static str, OsString)>,
    /// What stands between the workers and their master.
    pub proxy: Option<std::sync::Arc<Proxy>>,
    /// Whether the master's kills reach only what starts a worker, as where it is on another
    /// machine.
    pub out_of_reach: bool,
}

impl Stage {
    /// A job of `num_workers` workers that lasts some seconds.
    ///
    /// # Panics
    /// The system gives no place for its data.
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

    /// With a model of 4 MiB, which is on its way for some milliseconds, and fewer steps.
    #[must_use]
    pub fn large(self) -> Self {
        Self { parameters: 1 << 20, global_batch_size: 300, ..self }
    }

    /// Its command, with the options that all have.
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
                // A blow may take all workers at once.
                .flag("restart-without-checkpoint")
                .started_by(starter);
        match self.worker_timeout {
            Some(timeout) => command.option("worker-timeout", timeout),
            None => command,
        }
    }

    /// Starts it, and waits until it trains.
    #[must_use]
    pub fn start(self, seed: u64) -> Running {
        let mut job = self.command(seed).start().keeping(self.folder);
        job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
        job
    }

    /// Starts it, and kills a worker now and then, until it has ended as it should. `pauses_ms`:
    /// between two kills.
    ///
    /// # Panics
    /// It hasn't, or was over before the second kill.
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
    /// One of its workers, by chance, and its process; `None` while there are none.
    pub fn any_worker(&self, rng: &mut impl rand::Rng) -> Option<(u64, u32)> {
        self.workers().into_iter().choose(rng)
    }
}

impl Ended {
    /// What any [`Stage`]'s job must say of itself, whatever was done to it.
    ///
    /// # Panics
    /// It doesn't.
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
