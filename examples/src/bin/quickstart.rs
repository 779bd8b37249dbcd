//! `cargo quickstart`: an elastic job that trains on real text while workers leave and join.
//!
//! Builds the command and the example, starts a job of four workers, kills one of them after a
//! third of the job (the master replaces it), and adds one after two thirds. It only runs commands
//! that a user would run: `elasticdl train`, `elasticdl status`, `elasticdl scale`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use clap::Parser;
use serde_json::Value;

/// Trains a small language model of bytes on real text with four workers; kills one after a third
/// of the job and adds one after two thirds.
#[derive(Parser)]
#[command(
    after_help = "All other options are passed to `elasticdl train`, for example --summary FILE or \
                  --num-workers 3."
)]
struct Quickstart {
    /// Text to train on: a file or a folder [default: the Rust sources that this build has
    /// downloaded]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Options of `elasticdl train`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<OsString>,
}

fn main() -> ExitCode {
    match run(&Quickstart::parse()) {
        Ok(status) => {
            ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
        }
        Err(error) => {
            print_message(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(quickstart: &Quickstart) -> Result<ExitStatus, String> {
    let programs = build()?;
    let (elasticdl, bytelm) = (programs.join("elasticdl"), programs.join("bytelm"));
    let data = quickstart.data.clone().unwrap_or_else(|| default_text(&programs));
    let filter: &[&str] = if quickstart.data.is_some() { &[] } else { &CODE };
    let job_dir = programs.join("quickstart-job");
    print_message(&format!(
        "training on {} with elasticdl train; one worker will be killed during the job",
        data.display()
    ));

    let mut command = Command::new(&elasticdl);
    command.args(["train", "--local"]);
    let defaults: [(&str, OsString); 4] = [
        ("--job-dir", job_dir.into()),
        ("--training-data", data.into()),
        ("--num-workers", WORKERS.to_string().into()),
        ("--global-batch-size", BATCH.to_string().into()),
    ];
    if given(&quickstart.options, "--job-dir").is_none() {
        // The job of an earlier quickstart.
        command.arg("--replace");
    }
    let mut known = Options { elasticdl, job_dir: PathBuf::new(), num_workers: WORKERS };
    for (name, value) in &defaults {
        let given = given(&quickstart.options, name);
        if given.is_none() {
            command.arg(name).arg(value);
        }
        let value = given.unwrap_or_else(|| value.clone());
        match *name {
            "--job-dir" => known.job_dir = value.into(),
            "--num-workers" => {
                known.num_workers = value.to_str().and_then(|v| v.parse().ok()).unwrap_or(WORKERS)
            }
            _ => {}
        }
    }
    let job =
        command.args(&quickstart.options).arg("--").arg(bytelm).args(LIMIT).args(filter).spawn();
    let mut job = job.map_err(|error| format!("elasticdl could not be started: {error}"))?;
    known.disturb(&mut job);
    job.wait().map_err(|error| format!("elasticdl train: {error}"))
}

/// The options that the job was started with.
struct Options {
    elasticdl: PathBuf,
    job_dir: PathBuf,
    num_workers: u32,
}

impl Options {
    /// Kills a worker after a third of the job and adds one after two thirds.
    fn disturb(&self, job: &mut Child) {
        let (mut killed, mut added) = (false, false);
        while !added && matches!(job.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(100));
            let status = self.status();
            let progress = status["progress"].as_f64().unwrap_or(0.0);
            if !killed && progress > 1.0 / 3.0 {
                killed = true;
                kill_one(&status);
            } else if killed && progress > 2.0 / 3.0 {
                added = true;
                self.scale(self.num_workers + 1);
            }
        }
    }

    /// The job's status; null while the job does not answer.
    fn status(&self) -> Value {
        let output =
            Command::new(&self.elasticdl).arg("status").arg(&self.job_dir).arg("--json").output();
        output
            .ok()
            .and_then(|output| serde_json::from_slice(&output.stdout).ok())
            .unwrap_or(Value::Null)
    }

    fn scale(&self, num_workers: u32) {
        let mut command = Command::new(&self.elasticdl);
        command.arg("scale").arg(&self.job_dir).args(["--num-workers", &num_workers.to_string()]);
        // The job logs why, if it refuses.
        let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

/// Kills the member with rank 0, which reports to the master for the group: the hardest case.
fn kill_one(status: &Value) {
    let workers = status["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
    let first = workers.iter().find(|worker| worker["rank"] == 0);
    if let Some(pid) = first.and_then(|worker| worker["pid"].as_u64()) {
        // The standard library can only kill child processes.
        let _ = Command::new("sh").arg("-c").arg(format!("kill -KILL {pid}")).status();
    }
}

/// Builds the command and the example as this program was built, by `cargo quickstart` with the
/// profile `quickstart`. Returns the folder of the programs.
fn build() -> Result<PathBuf, String> {
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let folder = this.parent().map(Path::to_path_buf).unwrap_or_default();
    // Cargo names the folder after the profile.
    let profile = folder.file_name().unwrap_or_else(|| "quickstart".as_ref());
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // Builds the whole workspace, like the build of this program, so that no dependency is built
    // again with other features.
    let workspace =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or_else(|| Path::new("."));
    let mut command = Command::new(cargo);
    // Without optimization, the targets of the tests: they have the features of the tests.
    let debug: &[&str] = &["build", "--workspace", "--lib", "--bins", "--examples"];
    let optimized: &[&str] = &["build", "--bin", "elasticdl", "--bin", "bytelm", "--profile"];
    match cfg!(debug_assertions) {
        true => command.args(debug),
        false => command.args(optimized).arg(profile),
    };
    command.current_dir(workspace);
    // Cargo sets these variables for the programs that it runs. Build scripts would treat them as
    // changes, and much would be built again.
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|prefix| name.to_string_lossy().starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    let status = command.status().map_err(|error| format!("cargo: {error}"))?;
    if !status.success() {
        return Err(format!(
            "the build failed; `cargo quickstart` in {} starts this program with what it needs",
            workspace.display()
        ));
    }
    Ok(folder)
}

/// Text that exists on every machine that has just built this program: the sources of the
/// dependencies, else of this workspace.
fn default_text(programs: &Path) -> PathBuf {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let sources =
        home.map(|home| home.join("registry").join("src")).filter(|folder| folder.is_dir());
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf);
    sources.or(workspace).unwrap_or_else(|| programs.to_path_buf())
}

/// The value of option `name`, given as `--name value` or `--name=value`.
fn given(options: &[OsString], name: &str) -> Option<OsString> {
    let prefix = format!("{name}=");
    options.iter().enumerate().find_map(|(i, option)| {
        if option == name {
            return options.get(i + 1).cloned();
        }
        option.to_str()?.strip_prefix(&prefix).map(OsString::from)
    })
}

#[expect(clippy::print_stderr, reason = "messages to the user")]
fn print_message(text: &str) {
    eprintln!("quickstart: {text}");
}

const WORKERS: u32 = 4;
const BATCH: u32 = 64;
/// About a minute of training on two cores.
const LIMIT: [&str; 2] = ["--limit-bytes", "3000000"];
/// Restricts the default text to source code.
const CODE: [&str; 2] = ["--extensions", "rs"];
