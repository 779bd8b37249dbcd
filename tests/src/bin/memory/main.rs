//! What a model's size costs: memory, steps, and pauses at kills and joins, with and without
//! `--shard-optimizer`.
//!
//! `cargo run --release -p elasticdl-tests --bin memory -- --json FILE` prints and writes:
//!
//! | key | meaning | part |
//! |---|---|---|
//! | `bytes_per_param{w4,w8}` | growth of a worker's resident memory with a parameter | `bytes` |
//! | `step_ratio{shm,gbit}` | a step with `--shard-optimizer` over one without it | `steps` |
//! | `kill_p50_ms` | from a kill to the next step, less a step, with `--shard-optimizer` | `kills` |
//! | `join_pause_ms{mib400,mib1600}` | longest time between two steps while a worker joins | `joins` |
//! | `step_ms{mib400,mib1600}` | median step of these jobs | `joins` |
//!
//! `…_sharded` are those of jobs with `--shard-optimizer`, `…_sgd` those with SGD instead of AdamW,
//! `…_bf16` those with `--param-dtype bf16`.
//! Jobs have four workers, if the key does not say otherwise. Steps are compared in turns, in
//! shared memory and on hosts with links of 1 Gbit/s; these need root and iproute2, without which
//! `gbit` is null, and `step_ratio_gbit_missing` says why.
//!
//! What the size of the model does not change drops out of `bytes_per_param`, and memory that ranks
//! share does not count. `mib400` and `mib1600` are sizes of the state: parameters and AdamW's two
//! moments, 12 bytes for each parameter, so 33.3 Mi and 133.3 Mi parameters. The model computes
//! next to nothing, which shows all costs, unless `--compute-ms` says otherwise. A `gbit` of `null`
//! has its reason beside it: hosts need root and iproute2. `--only` measures a part.
//!
//! Memory: `bytes` needs 2 GiB, `kills` 10 GiB and `joins` 20 GiB with the defaults. Sizes that do
//! not fit give `null`. This program is at once the benchmark, the `elasticdl` command and the
//! job's worker.

mod bytes;
mod job;
mod model;
mod pauses;
mod steps;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use elasticdl_tests::{measure_parts, run_benchmark};

use crate::model::Sized;

/// Measure what a model's size costs.
#[derive(Debug, Parser)]
struct Arguments {
    /// Parts to measure
    #[arg(long, value_delimiter = ',', default_value = "bytes,steps,kills,joins")]
    only: Vec<String>,
    /// Parameters of the model of `bytes` and `steps` [default: 8 Mi] and of `kills` [default: 100
    /// Mi]
    #[arg(long)]
    parameters: Option<usize>,
    /// Workers of the jobs whose memory is measured
    #[arg(long, value_delimiter = ',', default_value = "4,8")]
    workers: Vec<u32>,
    /// Rounds of the steps' comparison
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Steps of a job there
    #[arg(long, default_value_t = 20)]
    steps: u64,
    /// Milliseconds that a gradient takes at least
    #[arg(long, default_value_t = 0)]
    compute_ms: u64,
    /// Kills, and joins, of each job
    #[arg(long, default_value_t = 10)]
    events: u32,
    /// Sizes of the state of the jobs that workers join, in MiB
    #[arg(long, value_delimiter = ',', default_value = "400,1600")]
    state_mib: Vec<usize>,
    /// Also write the result to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    run_benchmark(Sized::parse, || measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    measure_parts(&arguments.only, arguments.json.as_deref(), |part| {
        Ok(Some(match part {
            "bytes" => bytes::measure(arguments)?,
            "joins" => pauses::measure_joins(arguments)?,
            "kills" => pauses::measure_kills(arguments)?,
            "steps" => steps::measure(arguments)?,
            _ => return Ok(None),
        }))
    })
}
