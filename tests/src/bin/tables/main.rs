//! What embedding tables cost.
//!
//! `cargo run --release -p elasticdl-tests --bin tables -- --json FILE` prints and writes:
//!
//! | key | meaning | module |
//! |---|---|---|
//! | `kill_p50_ratio`, `kill_p99_ratio` | pause after a kill, over that without tables | `pauses` |
//! | `join_ratio_16m` | pause of a join at the most rows, over that at the fewest | `pauses` |
//! | `second_copy_cost` | records/s with one copy of each row, over those with two, less 1 | `speed` |
//! | `vs_plain`, `vs_ddp` | records/s over PyTorch's, with one process and with several | `speed` |
//! | `vs_torchrec` | records/s over TorchRec's, with several processes | `speed` |
//! | `bytes_per_row` | memory of a row of 16 numbers with row-wise Adagrad, one copy | here |
//! | `lag_ratio` | records/s with `--table-lag 1`, over those without, on hosts with slow links | `links` |
//! | `auc_ratio` | AUC of the example `ctr` over the best possible one | `auc` |
//!
//! PyTorch and TorchRec are taken from the virtual environment `ELASTICDL_PYTHON_ENV`, or from that
//! of `.ci/python`, which has no TorchRec. The keys of what is missing are null. `--only` measures
//! parts. The program builds the programs that it measures.

mod auc;
mod links;
mod pauses;
mod speed;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use elasticdl::{RowOptimizer, Table};
use elasticdl_tables::{Ids, Member, Owned, RowGradients, Settings, StepCommit};
use elasticdl_tests::{exit_code, measure_parts};
use serde_json::json;

/// Measure tables.
#[derive(Debug, Parser)]
struct Arguments {
    /// Parts to measure
    #[arg(long, value_delimiter = ',', default_value = "memory,speed,links,pauses,auc")]
    only: Vec<String>,
    /// Kills, and joins, of each job
    #[arg(long, default_value_t = 20)]
    events: u32,
    /// Rows of the tables, fewest and most
    #[arg(long, value_delimiter = ',', default_value = "1000000,16000000")]
    rows: Vec<u64>,
    /// Rounds of the speed measurements, in turn
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Records of a speed measurement
    #[arg(long, default_value_t = 200_000)]
    records: u64,
    /// Records per step and process there
    #[arg(long, default_value_t = 1024)]
    batch: u64,
    /// Records that the model is trained on whose AUC is measured
    #[arg(long, default_value_t = 16_000_000)]
    auc_records: u64,
    /// Ids of the largest category there: the more, the fewer records tell about each
    #[arg(long, default_value_t = 10_000)]
    auc_ids: u64,
    /// Also write the result to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    exit_code(measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    measure_parts(&arguments.only, arguments.json.as_deref(), |part| {
        Ok(Some(match part {
            "auc" => auc::measure(arguments)?,
            "links" => links::measure(arguments)?,
            "memory" => json!({ "bytes_per_row": bytes_per_row(1_000_000)? }),
            "pauses" => pauses::measure(arguments)?,
            "speed" => speed::measure(arguments)?,
            _ => return Ok(None),
        }))
    })
}

/// Memory per row of a worker that holds this many, in bytes.
fn bytes_per_row(rows: u64) -> Result<f64, Box<dyn Error>> {
    let tables = [Table::new("rows", 16).optimized(RowOptimizer::adagrad(0.1))];
    let settings = Settings {
        seed: 0,
        shards: elasticdl_tables::SHARDS,
        copies: 1,
        lag: 0,
        copy_bytes: 1,
        copy_rate: 0,
    };
    let mut owned = Owned::new(1, settings, tables.to_vec());
    owned.create(1, vec![Member::new(1, 1)]);
    for start in (0..rows).step_by(10_000) {
        let mut ids = Ids::new(1);
        ids.begin_record();
        for id in start..start + 10_000 {
            ids.push(0, id);
        }
        let replies = owned.replies(&owned.requests(&ids))?;
        let batch = owned.receive(&ids, &replies)?;
        let mut gradients = RowGradients::default();
        gradients.add(&tables, ids, batch);
        owned.stage(&owned.pushes(&gradients, Duration::ZERO))?;
        owned.commit(StepCommit { generation: 1, divisor: 1.0, is_applied: true });
    }
    let size = owned.owned();
    Ok(size.bytes as f64 / size.rows as f64)
}
