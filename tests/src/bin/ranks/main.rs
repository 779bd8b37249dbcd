//! What a job costs as its number of ranks grows, where computing costs nothing: each rank sleeps.
//!
//! `cargo run --release -p elasticdl-tests --bin ranks -- --json FILE` starts a job for each number
//! of ranks that FILE does not have yet, of real processes on this machine, measures it while
//! nothing happens, and then kills ranks. `--help` says what is measured, and what such a job on
//! one machine can't show. For larger groups the times are computed from what was measured
//! ([`computed`]).
//!
//! This program is at once the benchmark, the `elasticdl` command and the job's worker.

mod computed;
mod model;
mod operations;
mod processes;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use elasticdl_tests::churn::{Bench, DisturbedJob, Kind, RECORDS_PER_WORKER, disturb_running};
use elasticdl_tests::{print, read_results, run_benchmark, write_results};
use serde_json::{Map, Value, json};

use crate::model::Sleeping;
use crate::operations::Operations;
use crate::processes::measure_quiet;

/// Measure what a job costs as its number of ranks grows
///
/// Each rank is a process of this machine whose model sleeps instead of computing. So many more
/// ranks than cores run, and what a step takes beyond the sleep is the cost of being many.
///
/// What is real: processes, links, messages, bytes, memory, descriptors, kills, the master. What is
/// not: all ranks share the cores, so a step and a regroup take the CPU time of all of them,
/// divided by the cores, where on a cluster each rank has its own; and the network is loopback. Up
/// to 64 ranks share memory, as on one host; above that they use TCP, as between hosts,
/// unencrypted.
#[derive(Debug, Parser)]
#[command(after_long_help = COLUMNS)]
struct Arguments {
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "16,64,256",
        value_parser = clap::value_parser!(u32).range(2..=1000))]
    ranks: Vec<u32>,
    /// Time that the model of each rank sleeps in a step, in milliseconds
    #[arg(long, default_value_t = 100)]
    compute_ms: u64,
    /// Size of the gradient, in bytes
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(4..))]
    bytes: u64,
    /// Steps that are measured before the first kill
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Ranks that are killed, one after the other; each is replaced before the next one
    #[arg(long, default_value_t = 5)]
    kills: u32,
    /// Numbers of ranks whose operations are measured alone, without jobs, as threads of this
    /// process, over TCP
    #[arg(long, value_delimiter = ',', default_value = "16,64,256,1000",
        value_parser = clap::value_parser!(u32).range(2..=1500))]
    operations: Vec<u32>,
    /// Numbers of ranks for which the step's overhead is computed from what was measured
    #[arg(long, value_delimiter = ',', default_value = "256,1000,10000")]
    compute: Vec<u32>,
    /// Assumed time of a message in the network, for what is computed, in microseconds
    #[arg(long, default_value_t = 25.0)]
    network_us: f64,
    /// Add what is measured to this file, which may have some already
    #[arg(long, value_name = "FILE")]
    json: PathBuf,
}

fn main() -> ExitCode {
    run_benchmark(Sleeping::parse, || measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let mut cells = read_results(&arguments.json)?;
    measure_operations(arguments, &mut cells)?;
    print(HEAD);
    for &ranks in &arguments.ranks {
        let name = name(arguments, ranks);
        if !cells.contains_key(&name) {
            let cell = cell(arguments, ranks).unwrap_or_else(|error| {
                // What the master knows comes after the first words.
                json!({ "error": error.to_string().chars().take(200).collect::<String>() })
            });
            cells.insert(name.clone(), cell);
            write_results(&arguments.json, &cells)?;
        }
        print(&row(ranks, &cells[&name]));
    }
    print_computed(arguments, &cells);
    Ok(())
}

fn name(arguments: &Arguments, ranks: u32) -> String {
    let Arguments { compute_ms, bytes, .. } = arguments;
    format!("{ranks} ranks, {compute_ms} ms, {bytes} bytes")
}

/// Measures the operations alone.
fn measure_operations(
    arguments: &Arguments,
    cells: &mut Map<String, Value>,
) -> Result<(), Box<dyn Error>> {
    print(OPERATIONS_HEAD);
    for &ranks in &arguments.operations {
        let name = format!("operations of {ranks} ranks, {} bytes", arguments.bytes);
        if !cells.contains_key(&name) {
            let measured = Operations::measure(ranks, arguments.bytes, OPERATIONS)?;
            cells.insert(name.clone(), measured.json());
            write_results(&arguments.json, cells)?;
        }
        let number = |key: &str| cells[&name][key].as_f64().unwrap_or(0.0);
        print(&format!(
            "| {ranks} | {:.0} | {:.0} | {:.2} | {:.0} | {:.2} | {:.0} |",
            number("connect_ms"),
            number("connect_cpu_us"),
            number("gather_us") / 1e3,
            number("gather_cpu_us"),
            number("sum_us") / 1e3,
            number("sum_cpu_us"),
        ));
    }
    print("");
    Ok(())
}

/// Measures one job.
fn cell(arguments: &Arguments, ranks: u32) -> Result<Value, Box<dyn Error>> {
    let parameters = arguments.bytes / size_of::<f32>() as u64;
    let settings = [("--compute-ms", arguments.compute_ms), ("--parameters", parameters)];
    let program =
        settings.into_iter().flat_map(|(name, value)| [name.into(), value.to_string().into()]);
    let job = DisturbedJob {
        workers: ranks,
        spares: 0,
        program: program.collect(),
        options: Vec::new(),
        flags: Vec::new(),
        records: u64::from(ranks * RECORDS_PER_WORKER) * STEPS_PER_EPOCH,
        first_steps: FIRST_STEPS,
        rest_steps: REST_STEPS,
    };
    let folder = tempfile::tempdir()?;
    let mut bench = Bench::start(&job, folder.path(), None)?;
    let mut cell = measure_quiet(&mut bench, arguments.steps)?;
    let measured = disturb_running(bench, (Kind::Kill, arguments.kills))?;
    let Value::Object(of_kills) = measured.json() else { unreachable!("it is an object") };
    let cores = std::thread::available_parallelism()?.get();
    cell.extend([
        ("ranks".into(), json!(ranks)),
        ("cores".into(), json!(cores)),
        ("overhead_ms".into(), json!(measured.median_step - arguments.compute_ms as f64)),
        ("kills".into(), Value::Object(of_kills)),
        ("records_lost".into(), json!(measured.records_lost)),
        ("records_repeated".into(), json!(measured.records_repeated)),
    ]);
    Ok(Value::Object(cell))
}

/// A row of the table.
fn row(ranks: u32, cell: &Value) -> String {
    if let Some(error) = cell["error"].as_str() {
        return format!("| {ranks} | {error} |");
    }
    let number = |value: &Value| value.as_f64().map_or_else(|| "-".into(), |n| format!("{n:.1}"));
    let columns = [
        &cell["overhead_ms"],
        &cell["trainer_cpu_us"],
        &cell["rank_cpu_us"],
        &cell["link_bytes"],
        &cell["link_segments"],
        &cell["kills"]["p50_ms"],
        &cell["kills"]["max_ms"],
        &cell["private_mib"],
        &cell["descriptors"],
        &cell["threads"],
        &cell["master_cpu_percent"],
        &cell["master_mib"],
        &cell["load"],
    ];
    format!("| {ranks} | {} |", columns.map(number).join(" | "))
}

/// Prints the overhead of larger groups, if enough was measured.
fn print_computed(arguments: &Arguments, cells: &Map<String, Value>) {
    let measured = arguments.ranks.iter().filter_map(|ranks| {
        let cell = cells.get(&name(arguments, *ranks))?;
        Some((f64::from(*ranks), cell["trainer_cpu_us"].as_f64()?))
    });
    let Some(costs) = computed::Costs::of(&measured.collect::<Vec<_>>(), arguments.network_us)
    else {
        return;
    };
    print(&format!(
        "\ncomputed, not measured: each rank has a core, a message takes {} µs in the network\n\
         {costs}",
        arguments.network_us
    ));
    for &ranks in &arguments.compute {
        let ms = costs.overhead_us(ranks) / 1e3;
        let percent = 100.0 * ms / arguments.compute_ms.max(1) as f64;
        print(&format!(
            "{ranks} ranks: overhead {ms:.2} ms, {percent:.1} % of a step of {} ms",
            arguments.compute_ms
        ));
    }
}

const HEAD: &str = "\
| ranks | overhead ms | trainer µs | rank µs | link bytes | segments | pause p50 ms | max ms | private \
MiB | descriptors | threads | master CPU % | master MiB | load |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|";

const OPERATIONS_HEAD: &str = "\
| ranks | connect ms | CPU µs | gather ms | CPU µs | sum ms | CPU µs |
|---|---|---|---|---|---|---|";

const COLUMNS: &str = "\
Columns:
  overhead ms    median step, less the sleep
  trainer µs     CPU time of a rank's trainer thread in a step
  rank µs        CPU time of all threads of a rank in a step
  link bytes     bytes that a rank receives from other ranks in a step: headers and gradients; none
                 where ranks share memory
  segments       TCP segments with data that a rank sends to other ranks in a step
  pause ms       longest time between two steps of a survivor after a kill, less the median step
  private MiB    memory of a rank that it shares with no other
  master CPU %   of one core
  load           of the machine, over the last minute, at the end of the measured steps

The file has more: the parts of each pause, bytes of the streams to the master, resident memory.
Records that are lost or repeated are counted; there should be none.";

/// Operations of each kind.
const OPERATIONS: usize = 20;
/// Steps before the first measured one.
const FIRST_STEPS: u64 = 5;
/// Steps between two kills.
const REST_STEPS: u64 = 4;
/// Steps of an epoch.
const STEPS_PER_EPOCH: u64 = 64;
