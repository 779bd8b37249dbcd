//! Thousands of jobs of real processes under random schedules of faults: does each record count
//! exactly once?
//!
//! `cargo run --release -p elasticdl-tests --bin schedules -- --json FILE` runs the seeds that FILE
//! does not have yet for this commit, and writes each result there, so that they can be run over
//! several days. `--seeds 7..8` runs one schedule. After each job `.bench/witness.py`, which uses
//! nothing of elasticdl, compares data, options, summary and exported counts; a job with
//! `--deterministic` has to export the bytes of an undisturbed one. The folder of a job that was
//! not exact is kept beside FILE. A table of all results in FILE is printed at the end.
//!
//! Of a checkout with changes that are not committed, all seeds are run.

use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Parser;
use elasticdl_tests::{
    Disturbed, JobFixture, Programs, Schedule, built, exit_code, parse_seeds, print, read_results,
    write_results,
};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};

/// Run jobs under random schedules of faults.
#[derive(Debug, Parser)]
struct Arguments {
    /// Seeds of the schedules
    #[arg(long, value_name = "A..B", default_value = "0..3000", value_parser = parse_seeds)]
    seeds: Range<u64>,
    /// Jobs at a time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Add the results to this file, which may have some already
    #[arg(long)]
    json: PathBuf,
}

fn main() -> ExitCode {
    exit_code(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let path = |name| -> Result<&'static str, Box<dyn Error>> {
        Ok(built("elasticdl-tests", name)?.display().to_string().leak())
    };
    let programs =
        Programs { elasticdl: path("elasticdl-under-test")?, counting: path("counting")? };
    let determinism = path("determinism")?;
    let commit = commit()?;
    let results = read_results(&arguments.json)?;
    let is_known = |seed: &u64| {
        !commit.ends_with("-dirty")
            && results.get(&commit).is_some_and(|of| of.get(seed.to_string()).is_some())
    };
    let seeds: Vec<u64> = arguments.seeds.clone().filter(|seed| !is_known(seed)).collect();
    let state = Mutex::new((seeds.into_iter(), results));
    let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
    let run_all = || -> Result<(), String> {
        loop {
            let Some(seed) = lock().0.next() else { return Ok(()) };
            let schedule = Schedule::draw(seed);
            let fixture = schedule.fixture(programs, determinism);
            let result = run_one(schedule, fixture, &arguments.json);
            print(&format!("seed {seed}: {}", result["result"].as_str().unwrap_or_default()));
            let results = &mut lock().1;
            results.entry(&commit).or_insert_with(|| json!({}))[seed.to_string()] = result;
            write_results(&arguments.json, results).map_err(|error| error.to_string())?;
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..arguments.jobs).map(|_| scope.spawn(run_all)).collect();
        let ends = threads.into_iter().map(|thread| thread.join().expect("panics are caught"));
        ends.collect::<Result<Vec<()>, String>>()
    })?;
    let results = &lock().1;
    results.iter().for_each(|(commit, of_commit)| print_table(commit, of_commit));
    Ok(())
}

/// The commit of the checkout, and `-dirty` if it has changes.
fn commit() -> Result<String, Box<dyn Error>> {
    let output = Command::new("git")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
        .output()?;
    let text = String::from_utf8(output.stdout)?.trim().to_owned();
    if text.is_empty() { Err("git does not tell the commit".into()) } else { Ok(text) }
}

/// Runs a job. Its folder is moved beside the file of results if it was not exact.
fn run_one(schedule: Schedule, fixture: JobFixture, json: &Path) -> Value {
    let began = Instant::now();
    let ran = schedule.run(&fixture).and_then(|disturbed| {
        let said = witness(&schedule, &fixture);
        said.map(|()| disturbed)
            .map_err(|said| format!("seed {}: {schedule}: {said}", schedule.seed))
    });
    let mut result = json!({
        "job": schedule.to_string(),
        "date": Timestamp::now().strftime("%Y-%m-%d").to_string(),
        "seconds": began.elapsed().as_secs(),
    });
    match ran {
        Ok(Disturbed { ended, faults }) => {
            let checkpoints = ended.summary().checkpoints.as_ref();
            result["result"] = EXACT.into();
            result["faults"] = faults.trim().into();
            result["groups"] = ended.memberships().len().into();
            result["lost"] = ended.lost().len().into();
            result["restored"] = checkpoints.map_or(0, |known| known.restored.len()).into();
        }
        Err(error) => {
            result["result"] = error.into();
            let kept = json.with_extension(format!("seed-{}", schedule.seed));
            let moved = Command::new("cp").arg("-r").arg(fixture.folder.path()).arg(&kept).status();
            result["folder"] = match moved {
                Ok(status) if status.success() => kept.display().to_string().into(),
                _ => fixture.folder.keep().display().to_string().into(),
            };
        }
    }
    result
}

/// The error is what the witness says.
fn witness(schedule: &Schedule, fixture: &JobFixture) -> Result<(), String> {
    let mut command = Command::new("python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.bench/witness.py"));
    command.arg(Schedule::export(fixture)).arg("--training-data").arg(fixture.data());
    command.args(["--num-epochs", &fixture.epochs.to_string()]);
    command.arg("--summary").arg(Schedule::summary(fixture));
    if let Some(undisturbed) = schedule.undisturbed_export(fixture) {
        command.arg("--same-as").arg(undisturbed);
    }
    let output = command.output().map_err(|error| format!("python3: {error}"))?;
    let text = [output.stdout, output.stderr].concat();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&text).into_owned()) }
}

/// The results of a commit.
fn print_table(commit: &str, results: &Value) {
    let all: Vec<&Value> = results.as_object().into_iter().flat_map(Map::values).collect();
    let text = |result: &Value, key: &str| result[key].as_str().unwrap_or_default().to_owned();
    print(&format!("\n| {commit} | schedules | exact | lost workers | restored groups |"));
    print("|---|---|---|---|---|");
    for part in PARTS {
        let of_part: Vec<&&Value> =
            all.iter().filter(|result| text(result, "job").contains(part)).collect();
        let sum = |key: &str| of_part.iter().filter_map(|result| result[key].as_u64()).sum::<u64>();
        let exact = of_part.iter().filter(|result| result["result"] == EXACT).count();
        let name = if part.is_empty() { "all" } else { part };
        let (lost, restored) = (sum("lost"), sum("restored"));
        print(&format!("| {name} | {} | {exact} | {lost} | {restored} |", of_part.len()));
    }
    let faults: Vec<String> = all.iter().map(|result| text(result, "faults")).collect();
    let count = |name: &str| {
        let words = faults.iter().flat_map(|faults| faults.split([' ', ',', '(']));
        format!("{} {name}", words.filter(|word| *word == name).count())
    };
    print(&format!("\nfaults: {}", FAULTS.map(count).join(", ")));
    let failed: Vec<&&Value> = all.iter().filter(|result| result["result"] != EXACT).collect();
    failed.iter().for_each(|result| print(&format!("not exact: {}", text(result, "result"))));
    if failed.is_empty() && !all.is_empty() {
        let most = 300.0 / all.len() as f64;
        print(&format!("less than {most:.2} % of schedules are not exact (95 % confidence)"));
    }
}

/// Result of a job that was exact.
const EXACT: &str = "exact";
/// Parts of the table: words of [`Schedule`]'s description.
const PARTS: [&str; 11] = [
    "",
    "dense",
    "sharded optimizer",
    "tables",
    "deterministic",
    "checkpoints",
    "resumed",
    "one loss at a time",
    "evictions",
    "4 MiB",
    "buckets",
];
/// Names of faults.
const FAULTS: [&str; 9] =
    ["Kill", "KillTwo", "KillAll", "KillMaster", "Leave", "Scale", "Stop", "Checkpoint", "stop"];
