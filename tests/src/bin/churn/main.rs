//! The cost of membership changes: kills, leaves, joins and stops of real worker processes, one at
//! a time.
//!
//! `cargo run --release -p elasticdl-tests --bin churn -- --workers 4 --params 1048576 --events 20`
//! prints, per kind of event, the gap between two committed steps that the other workers saw, less
//! the median step; `before_ms`, the same in an equally long time just before each event, is the
//! effect of the machine's other work. `switch_ms` is the gap when the joiner becomes a member, and
//! `latency_ms` the time from its start until its first contribution is committed. All this is
//! measured from the workers' own event logs; the master's summary gives the parts of the gaps and
//! is checked against what the model counted. A lost step is one that a worker which was not itself
//! killed or stopped had to compute again, or that was undone, or that a worker which left in order
//! had begun in vain.
//!
//! This program is at once the benchmark, the `elasticdl` command and the job's worker.
//!
//! Memory: a worker holds four buffers of the parameters' size, `--slots` more, and the buffers of
//! its connections; there is one worker more than `--workers` while one joins, and a donor holds a
//! snapshot for it.
//!
//! A large state, with a time-out that is much shorter than its transfer: `--workers 2 --params
//! 134217728 --slots 2 --worker-timeout 300ms --kind join --events 2 --goodput-seconds 0`.

mod goodput;
mod model;
mod report;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use elasticdl_tests::churn::{DisturbedJob, Kind, RECORDS_PER_WORKER, disturb};
use elasticdl_tests::{print, run_benchmark};

use crate::goodput::Goodput;
use crate::model::{Counting, ROWS_PER_RECORD};
use crate::report::Report;

/// Measure what membership changes cost the other workers.
#[derive(Debug, Parser)]
struct Arguments {
    /// Workers of the job
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=1000))]
    workers: u32,
    /// Workers beyond them that take the places of lost ones: the job's --spares
    #[arg(long, default_value_t = 0)]
    spares: u32,
    /// Parameters of the model
    #[arg(long, default_value_t = 1 << 20)]
    params: usize,
    /// Floats of optimizer state per parameter; 2 as with AdamW
    #[arg(long, default_value_t = 0)]
    slots: usize,
    /// Rows of 16 numbers of a table that the workers divide among them, with row-wise Adagrad;
    /// a record touches 64 of them
    #[arg(long, default_value_t = 0)]
    rows: u64,
    /// Workers that hold each row
    #[arg(long, default_value_t = 2)]
    table_replicas: u32,
    /// The job's --worker-timeout, such as 300ms [default: the job's own]
    #[arg(long, value_name = "TIME")]
    worker_timeout: Option<String>,
    /// Events of each kind
    #[arg(long, default_value_t = 20)]
    events: u32,
    /// What happens to workers; all: kill, leave, join and stop
    #[arg(long, value_enum, default_value = "all")]
    kind: Kind,
    /// Duration of the phase in which a worker is killed every 2 s, to measure the remaining
    /// throughput; as much time again is measured undisturbed; 0 to leave it out
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    goodput_seconds: u64,
    /// Also write the result to this file
    #[arg(long)]
    json: Option<PathBuf>,
}

impl Arguments {
    /// The job, which is disturbed when each row has its copies.
    fn job(&self) -> DisturbedJob {
        let records = match self.rows {
            0 => RECORDS,
            rows => rows.div_ceil(ROWS_PER_RECORD) as usize,
        };
        let records = records.min(self.params);
        let settings = [
            ("--params", self.params as u64),
            ("--slots", self.slots as u64),
            ("--records", records as u64),
            ("--rows", self.rows),
        ];
        let program =
            settings.into_iter().flat_map(|(name, value)| [name.into(), value.to_string().into()]);
        let mut options = vec![("table-replicas", self.table_replicas.to_string())];
        options.extend(self.worker_timeout.iter().map(|time| ("worker-timeout", time.clone())));
        // An epoch touches all rows.
        let steps = records as u64 / u64::from(self.workers * RECORDS_PER_WORKER) + 1;
        let moved = self.rows * ROW_BYTES * 2 / u64::from(self.workers);
        DisturbedJob {
            workers: self.workers,
            spares: self.spares,
            program: program.collect(),
            options,
            flags: Vec::new(),
            records: records as u64,
            first_steps: if self.rows > 0 { steps } else { 0 },
            rest_steps: REST_STEPS + moved / COPIED_PER_STEP,
        }
    }
}

fn main() -> ExitCode {
    run_benchmark(Counting::parse, || measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let mut report = Report::default();
    for kind in [Kind::Kill, Kind::Leave, Kind::Join, Kind::Stop] {
        if [kind, Kind::All].contains(&arguments.kind) {
            let events = (kind, arguments.events);
            let measured = disturb(&arguments.job(), events, &folder.path().join(kind.name()))?;
            report.add(kind, measured);
        }
    }
    if arguments.goodput_seconds > 0 {
        report.add_goodput(Goodput::measure(arguments, &folder.path().join("goodput"))?);
    }
    let result = report.finish(arguments).to_string();
    print(&result);
    if let Some(path) = &arguments.json {
        std::fs::write(path, result)?;
    }
    Ok(())
}

/// Maximum number of records of an epoch.
const RECORDS: usize = 1 << 15;
/// Steps between two events, at least.
const REST_STEPS: u64 = 8;
/// Bytes of a row, and of those that a worker receives between two steps.
const ROW_BYTES: u64 = 84;
const COPIED_PER_STEP: u64 = 4 << 20;
