//! The table of deaths: for each way in which a worker can be lost, each number of ranks and each
//! size of the model, how long the others pause.
//!
//! `cargo run --release -p elasticdl-tests --bin deaths -- --json FILE` measures each cell that
//! FILE does not have yet, and writes it there, so that a table can be made over several days;
//! another build belongs to another file. No job has more than [`EVENTS_OF_A_JOB`] events: workers
//! that are killed soon after their start are replaced ever later. The workers' own event logs are
//! measured, as by `churn`: a pause is the longest time between two steps of a survivor, less the
//! median step; `detect` is its part until the loss was noticed. A thread that hangs is noticed
//! after `--step-timeout`, 2 s in these jobs and ten minutes by default. Workers that lose their
//! host are on network namespaces, which need root and iproute2; the packets of a host that is
//! switched off are dropped, and no link is closed.
//!
//! This program is at once the benchmark, the `elasticdl` command and the job's worker.

#[path = "../churn/model.rs"]
mod model;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use elasticdl_tests::churn::{DisturbedJob, Kind, Measured, disturb};
use elasticdl_tests::{print, read_results, run_benchmark, write_results};
use serde_json::{Value, json};

use crate::model::Counting;

/// Measure how long workers pause when one of them is lost, by kind of death, ranks and size
#[derive(Debug, Parser)]
struct Arguments {
    /// How workers are lost
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "kill,stop,hang,host,half-open"
    )]
    deaths: Vec<Kind>,
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "4,16,64",
        value_parser = clap::value_parser!(u32).range(2..=200))]
    ranks: Vec<u32>,
    /// Sizes of the model, in MiB of parameters
    #[arg(long, value_delimiter = ',', default_value = "4,400")]
    mib: Vec<usize>,
    /// Events of a cell
    #[arg(long, default_value_t = 100)]
    events: u32,
    /// Add the cells to this file, which may have some already
    #[arg(long)]
    json: PathBuf,
}

fn main() -> ExitCode {
    run_benchmark(Counting::parse, || measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let mut cells = read_results(&arguments.json)?;
    print("| death | ranks | MiB | events | detect p50 | pause p50 | p99 | longest | lost steps |");
    print("|---|---|---|---|---|---|---|---|---|");
    for &mib in &arguments.mib {
        for &ranks in &arguments.ranks {
            for &death in &arguments.deaths {
                let name = format!("{}, {ranks} ranks, {mib} MiB", death.name());
                if !cells.contains_key(&name) {
                    let cell = match cell(death, (ranks, mib), arguments.events) {
                        Ok(cell) => cell,
                        // What the master knows comes after the first words.
                        Err(error) => json!({ "error": shortened(&error.to_string()) }),
                    };
                    cells.insert(name.clone(), cell);
                    write_results(&arguments.json, &cells)?;
                }
                print(&row(death, (ranks, mib), &cells[&name]));
            }
        }
    }
    Ok(())
}

fn cell(death: Kind, (ranks, mib): (u32, usize), events: u32) -> Result<Value, Box<dyn Error>> {
    let parameters = (mib << 20) / size_of::<f32>();
    let settings =
        [("--params", parameters), ("--slots", 0), ("--records", RECORDS), ("--rows", 0)];
    let program =
        settings.into_iter().flat_map(|(name, value)| [name.into(), value.to_string().into()]);
    let job = DisturbedJob {
        workers: ranks,
        spares: 0,
        program: program.collect(),
        options: match death {
            Kind::Hang => vec![("step-timeout", HANG_TIMEOUT.into())],
            _ => Vec::new(),
        },
        flags: Vec::new(),
        records: RECORDS as u64,
        first_steps: 0,
        rest_steps: REST_STEPS,
    };
    let (mut measured, mut left) = (Measured::default(), events);
    while left > 0 {
        let folder = tempfile::tempdir()?;
        let events = left.min(EVENTS_OF_A_JOB);
        measured.add(disturb(&job, (death, events), folder.path())?);
        left -= events;
    }
    let mut cell = measured.json();
    cell["records_lost"] = json!(measured.records_lost);
    cell["records_repeated"] = json!(measured.records_repeated);
    Ok(cell)
}

/// A row of the table.
fn row(death: Kind, (ranks, mib): (u32, usize), cell: &Value) -> String {
    let head = format!("| {} | {ranks} | {mib}", death.name());
    if let Some(error) = cell["error"].as_str() {
        return format!("{head} | {error} |");
    }
    let ms = |value: &Value| value.as_f64().map_or_else(|| "-".into(), |ms| format!("{ms:.1} ms"));
    format!(
        "{head} | {} | {} | {} | {} | {} | {} |",
        cell["events"],
        ms(&cell["phases_p50_ms"]["detect"]),
        ms(&cell["p50_ms"]),
        ms(&cell["p99_ms"]),
        ms(&cell["max_ms"]),
        cell["steps_lost"],
    )
}

fn shortened(error: &str) -> String {
    error.chars().take(100).collect()
}

/// `--step-timeout` of jobs in which a thread hangs.
const HANG_TIMEOUT: &str = "2s";
/// Most events of one job.
const EVENTS_OF_A_JOB: u32 = 50;
/// Records of an epoch.
const RECORDS: usize = 1 << 15;
/// Steps between two events.
const REST_STEPS: u64 = 8;
