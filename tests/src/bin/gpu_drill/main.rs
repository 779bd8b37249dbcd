//! Checks and measures the GPU path on this machine, in about seven minutes: `cargo run --release
//! -p elasticdl-tests --bin gpu_drill -- --json FILE`. `.bench/gpu-bundle` packs it for a machine
//! without Rust.
//!
//! The ranks of most phases are processes of this program. They have a GPU each if there are
//! enough, and share the first one otherwise: then NCCL is configured as if they were on different
//! hosts, and uses sockets. The phases with jobs start this program as the `elasticdl` command, and
//! as a worker, so that it needs no other. A phase that fails is reported, and the others run.

use std::any::Any;
use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use elasticdl_tests::{Command, print};
use serde_json::{Value, json};

mod abort_init;
#[path = "../counting.rs"]
mod counting;
mod job;
mod kernels;
mod layer;
mod libraries;
mod memory;
mod model;
mod phases;
mod processes;
mod rank;

/// Checks and measures the GPU path, and prints a table
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Also write all figures to this file, after each phase
    #[arg(long)]
    json: Option<PathBuf>,
    /// Folder in which libcuda.so and libnccl.so.2 are looked up first: the fakes of the tests, or
    /// a package's folder
    #[arg(long, value_name = "DIR")]
    stand_in: Option<PathBuf>,
    /// The largest buffer, in bytes
    #[arg(long, default_value_t = 1 << 30)]
    bytes_max: usize,
    /// The buffer of the phases in which a rank fails, in bytes
    #[arg(long, default_value_t = 400 << 20)]
    bytes_lost: usize,
    /// Seconds after which remaining phases are skipped
    #[arg(long, default_value_t = 420)]
    seconds: u64,
    /// Milliseconds that each sum is repeated for
    #[arg(long, default_value_t = 1500)]
    effort_ms: u64,
    /// Only these phases
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Run as this rank, and execute the commands on standard input
    #[arg(long, hide = true)]
    rank: Option<u64>,
    /// Index of the rank's GPU
    #[arg(long, hide = true, default_value_t = 0)]
    ordinal: usize,
    /// The rank's NCCL, in place of the system's
    #[arg(long, hide = true)]
    nccl: Option<PathBuf>,
}

/// A measured figure.
#[derive(Clone, Debug)]
struct Figure {
    phase: &'static str,
    what: String,
    value: f64,
    unit: &'static str,
}

/// Context of all phases.
#[derive(Debug)]
struct Drill {
    arguments: Arguments,
    devices: usize,
    /// Copy rate per direction with both directions active, in bytes per second.
    copy_rate: f64,
    begun: Instant,
    figures: Vec<Figure>,
    /// Errors that ended a phase, by phase.
    failures: BTreeMap<&'static str, String>,
    /// Reasons for which this machine can't run a phase, by phase.
    left_out: BTreeMap<&'static str, String>,
    /// What a phase does not show on this machine, or what it ran on, with the phase.
    notes: Vec<(&'static str, String)>,
}

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    if env::var_os("ELASTICDL_MASTER").is_some() {
        // As a worker: only the counting model has to know the number of records.
        let counts = env::args_os().any(|word| word == "--records");
        return if counts { counting::main() } else { model::run() };
    }
    if is_command() {
        return elasticdl_cli::main();
    }
    let arguments = Arguments::parse();
    if let Some(me) = arguments.rank {
        return rank::serve(me, &arguments);
    }
    let mut drill = Drill {
        arguments,
        devices: 0,
        copy_rate: f64::INFINITY,
        begun: Instant::now(),
        figures: Vec::new(),
        failures: BTreeMap::new(),
        left_out: BTreeMap::new(),
        notes: Vec::new(),
    };
    // A machine without a GPU is reported by each phase.
    if let Ok(ranks) = processes::Ranks::start(&drill, 1, false) {
        drill.devices = ranks.devices();
    }
    for phase in phases::ALL {
        let only = &drill.arguments.only;
        if only.is_empty() || only.iter().any(|only| only == phase.name) {
            drill.run(&phase);
            if let Err(error) = drill.write() {
                print(&error);
                return ExitCode::FAILURE;
            }
        }
    }
    drill.end()
}

/// Whether this program is called as the `elasticdl` command: by that name, or with a subcommand.
/// The drill itself has options only.
fn is_command() -> bool {
    let mut words = env::args_os();
    let is_named =
        words.next().is_some_and(|name| Path::new(&name).file_name() == Some("elasticdl".as_ref()));
    is_named || words.next().is_some_and(|word| !word.as_encoded_bytes().starts_with(b"-"))
}

impl Drill {
    /// Runs a phase, and prints its figures and what became of it.
    fn run(&mut self, phase: &phases::Phase) {
        let name = phase.name;
        if self.left().is_zero() {
            let reason = "skipped: the time is up";
            print(&format!("{name:<10}  {reason}"));
            self.failures.insert(name, reason.to_owned());
            return;
        }
        if self.devices == 0 && self.failures.contains_key(phases::MACHINE) {
            self.left_out.insert(name, "there is no GPU".to_owned());
            return;
        }
        print(&format!("{name:<10}  {}", phase.shows));
        let had = self.figures.len();
        // The tests' support for jobs panics where a job does not do what is waited for.
        let ended = catch_unwind(AssertUnwindSafe(|| (phase.run)(self)));
        let ended = ended.unwrap_or_else(|panic| Err(panic_message(&*panic).into()));
        for figure in &self.figures[had..] {
            print(&figure.line());
        }
        let Err(error) = ended else { return };
        let error = shortened(&error.to_string());
        print(&format!("{name:<10}  FAILED: {error}"));
        self.failures.insert(name, error);
    }

    fn add(
        &mut self,
        phase: &'static str,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
    ) {
        self.figures.push(Figure { phase, what: what.into(), value, unit });
    }

    /// Says, once, what a phase does not show on this machine, or what it ran on.
    fn note(&mut self, phase: &'static str, text: impl Into<String>) {
        let note = (phase, text.into());
        if !self.notes.contains(&note) {
            print(&format!("{phase:<10}  note: {}", note.1));
            self.notes.push(note);
        }
    }

    /// Number of repetitions of an operation that takes `once` seconds.
    fn iterations(&self, once: f64) -> u64 {
        (self.arguments.effort_ms as f64 / 1e3 / once.max(1e-6)).clamp(3.0, 300.0) as u64
    }

    /// Fails if the time is up: no further phase begins.
    fn check_time(&self) -> Fallible<()> {
        if self.left().is_zero() { Err("skipped from here: the time is up".into()) } else { Ok(()) }
    }

    /// Time that is left of the whole drill.
    fn left(&self) -> Duration {
        Duration::from_secs(self.arguments.seconds).saturating_sub(self.begun.elapsed())
    }

    /// `LD_LIBRARY_PATH` of processes that use a GPU, if it differs from that of this one.
    fn library_path(&self) -> Fallible<Option<OsString>> {
        let Some(folder) = &self.arguments.stand_in else { return Ok(None) };
        let mut folders = vec![folder.clone()];
        folders.extend(env::var_os(LIBRARY_PATH).iter().flat_map(env::split_paths));
        Ok(Some(env::join_paths(folders)?))
    }

    /// A local job, in `folder`, of workers that run `program`.
    fn job<A: AsRef<OsStr>>(&self, folder: &Path, program: &[A]) -> Fallible<Command> {
        self.job_with(folder, program, &[])
    }

    /// As [`job`](Self::job), with these environment variables.
    fn job_with<A: AsRef<OsStr>>(
        &self,
        folder: &Path,
        program: &[A],
        variables: &[(&str, &str)],
    ) -> Fallible<Command> {
        let program = program.iter().map(|word| word.as_ref().to_owned());
        let command = Command::new(env::current_exe()?, folder, program);
        let mut starter = vec![OsString::from("env")];
        starter.extend(variables.iter().map(|(name, value)| format!("{name}={value}").into()));
        if let Some(path) = self.library_path()? {
            let mut variable = OsString::from(format!("{LIBRARY_PATH}="));
            variable.push(path);
            starter.push(variable);
        }
        Ok(command.started_by(starter))
    }

    /// Writes what is known so far, where it was asked for.
    fn write(&self) -> Result<(), String> {
        let Some(path) = &self.arguments.json else { return Ok(()) };
        let figures: Vec<_> = self.figures.iter().map(Figure::value).collect();
        let notes = self.notes.iter();
        let notes: Vec<_> =
            notes.map(|(phase, text)| json!({ "phase": phase, "text": text })).collect();
        let all = json!({
            "figures": figures,
            "failures": self.failures,
            "left_out": self.left_out,
            "notes": notes,
        });
        fs::write(path, format!("{all:#}\n"))
            .map_err(|error| format!("{}: {error}", path.display()))
    }

    fn end(self) -> ExitCode {
        print(&format!(
            "done in {:.0} s, {} phases failed, {} skipped",
            self.begun.elapsed().as_secs_f64(),
            self.failures.len(),
            self.left_out.len()
        ));
        if self.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

impl Figure {
    fn line(&self) -> String {
        format!("{:<10}  {:<58} {:>12.3} {}", self.phase, self.what, self.value, self.unit)
    }

    fn value(&self) -> Value {
        json!({ "phase": self.phase, "what": self.what, "value": self.value, "unit": self.unit })
    }
}

/// The start of a message, of at most [`ERROR_CHARS`] characters.
fn shortened(message: &str) -> String {
    match message.char_indices().nth(ERROR_CHARS) {
        Some((end, _)) => format!("{} …", &message[..end]),
        None => message.to_owned(),
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}

/// Longest error of a phase.
const ERROR_CHARS: usize = 1500;

const LIBRARY_PATH: &str = "LD_LIBRARY_PATH";
