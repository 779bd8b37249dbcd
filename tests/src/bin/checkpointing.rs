//! The cost of a checkpoint: the pause of training, and the write throughput.
//!
//! `cargo run --release -p elasticdl-tests --bin checkpointing` trains a model of 100 Mi parameters
//! with AdamW (a state of 1.2 GiB) while checkpoints are written, and in turn while `dd` writes as
//! many bytes to the same folder. The pause is the time between a step's update and the next
//! gradient, and is compared with a copy of as many bytes. Needs about 5 GB of memory. This program
//! is at once the benchmark, the `elasticdl` command and the job's worker.

use std::cell::Cell;
use std::error::Error;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;

use clap::Parser;
use elasticdl::{
    AdamW, Gradients, Loss, Model, NamedTensor, Optimizer, Update, UpdateRule, UserError,
};
use elasticdl_tests::{Command, Running, counting_data, print, quantile, run_benchmark};
use rustix::process::Signal;

#[derive(Debug, Parser)]
struct Arguments {
    /// Parameters of the model
    #[arg(long, default_value_t = 100 << 20)]
    parameters: usize,
    /// Workers of the job
    #[arg(long, default_value_t = 1)]
    workers: u32,
    /// Checkpoints, and as many copies by dd
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Folder that both are written to [default: the folder for temporary files]
    #[arg(long)]
    folder: Option<PathBuf>,
}

/// A model whose steps are little more than their update, and that records the time between them.
#[derive(Debug, Parser)]
struct Timed {
    #[arg(long)]
    parameters: usize,
    /// Folder of the recorded times: microseconds between two steps, one per line.
    #[arg(long)]
    notes: PathBuf,
    #[arg(skip)]
    file: Option<File>,
    #[arg(skip)]
    updated: Rc<Cell<Option<Instant>>>,
}

/// AdamW, which notes when it has been applied.
struct TimedRule {
    adam_w: Optimizer,
    updated: Rc<Cell<Option<Instant>>>,
}

impl UpdateRule for TimedRule {
    fn slots(&self) -> usize {
        self.adam_w.slots()
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        self.adam_w.apply(update);
        self.updated.set(Some(Instant::now()));
        Ok(())
    }
}

impl Model for Timed {
    elasticdl_tests::read_counting_data!();

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameters])]
    }

    fn gradients(
        &mut self,
        _: &[f32],
        batch: Vec<u64>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        if let Some(updated) = self.updated.take() {
            let file = match &mut self.file {
                Some(file) => file,
                none => none.insert(File::create(self.notes.join(std::process::id().to_string()))?),
            };
            writeln!(file, "{}", updated.elapsed().as_micros())?;
        }
        gradients.sum()[0] += 1.0;
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn optimizer(&self) -> impl UpdateRule {
        TimedRule { adam_w: AdamW::new(0.001).into(), updated: Rc::clone(&self.updated) }
    }
}

fn main() -> ExitCode {
    run_benchmark(Timed::parse, || measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let folder = match &arguments.folder {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let folder = folder.path();
    let bytes = 3 * arguments.parameters * size_of::<f32>();
    let part = bytes / arguments.workers as usize;
    let copy_ms = copy_ms(part, arguments.rounds);
    let mut job = start(arguments, folder)?;
    job.wait_for_first_steps();
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..arguments.rounds {
        let path = job.checkpoint();
        let written = written(&folder.join("job/logs"), &path)?;
        let by_dd = dd(folder, bytes)?;
        print(&format!("round {round}: checkpoint {written:.2} GB/s, dd {by_dd:.2} GB/s"));
        ours.push(written);
        theirs.push(by_dd);
        ratios.push(written / by_dd);
    }
    job.signal(Signal::TERM);
    let ended = job.wait();
    let saved = ended.summary().checkpoints.as_ref().map_or(0, |all| all.saved) as usize;
    // The last checkpoint is written at the job's end, after which no step follows.
    let pauses = pauses(&folder.join("notes"), saved.saturating_sub(1))?;
    let gb = bytes as f64 / 1e9;
    print(&format!("state of {gb:.2} GB on {} workers, {saved} checkpoints", arguments.workers));
    print(&format!("copy of a rank's part ({:.2} GB): {copy_ms:.0} ms", part as f64 / 1e9));
    print(&format!(
        "between two steps: {:.1} ms without a checkpoint, {:.0} ms with one (median), \
         {:.0} ms at most",
        pauses.usual, pauses.median, pauses.most
    ));
    let (ours, theirs) = (quantile(&mut ours, 0.5), quantile(&mut theirs, 0.5));
    let ratio = quantile(&mut ratios, 0.5);
    print(&format!(
        "written at {ours:.2} GB/s, by dd at {theirs:.2} GB/s; ratio {ratio:.2} (medians)"
    ));
    Ok(())
}

fn start(arguments: &Arguments, folder: &Path) -> Result<Running, Box<dyn Error>> {
    const RECORDS: u64 = 1 << 20;
    counting_data(&folder.join("data"), RECORDS, 1)?;
    std::fs::create_dir_all(folder.join("notes"))?;
    let this = std::env::current_exe()?;
    let program = [
        this.clone(),
        "--parameters".into(),
        arguments.parameters.to_string().into(),
        "--notes".into(),
        folder.join("notes"),
    ];
    Ok(Command::new(&this, folder.join("job"), program)
        .option("training-data", folder.join("data"))
        .option("num-workers", arguments.workers.to_string())
        .option("global-batch-size", "8")
        .option("worker-timeout", "30s")
        .option("checkpoint-dir", folder.join("checkpoints"))
        .option("checkpoint-every", "1h")
        .option("checkpoint-keep", "1")
        .start())
}

/// Write throughput of all parts of a checkpoint, in GB/s, from the logs of its workers.
fn written(logs: &Path, checkpoint: &str) -> Result<f64, Box<dyn Error>> {
    let name = Path::new(checkpoint).file_name().and_then(|name| name.to_str()).ok_or("no name")?;
    let (mut bytes, mut slowest) = (0.0, 0.0_f64);
    for entry in std::fs::read_dir(logs)? {
        let text = std::fs::read_to_string(entry?.path())?;
        for line in text.lines().filter(|line| line.contains("part written") && line.contains(name))
        {
            let field = |field: &str| {
                let rest = line.split_once(&format!(" {field}="))?.1;
                rest.split(' ').next()?.parse::<f64>().ok()
            };
            bytes += field("bytes").ok_or("no bytes")?;
            slowest = slowest.max(field("ms").ok_or("no time")?);
        }
    }
    Ok(bytes / slowest / 1e6)
}

/// Throughput of dd with as many bytes, in GB/s.
fn dd(folder: &Path, bytes: usize) -> Result<f64, Box<dyn Error>> {
    let file = folder.join("dd");
    let began = Instant::now();
    let count = bytes.div_ceil(16 << 20);
    let status = std::process::Command::new("dd")
        .args(["if=/dev/zero", "bs=16M", "conv=fsync", "status=none"])
        .arg(format!("of={}", file.display()))
        .arg(format!("count={count}"))
        .status()?;
    let seconds = began.elapsed().as_secs_f64();
    std::fs::remove_file(&file)?;
    if status.success() {
        Ok((count << 24) as f64 / seconds / 1e9)
    } else {
        Err("dd failed".into())
    }
}

/// Median time to copy this number of bytes into memory that is already mapped.
fn copy_ms(bytes: usize, rounds: usize) -> f64 {
    let from = vec![1_u8; bytes];
    let mut to = vec![2_u8; bytes];
    let copy = |to: &mut Vec<u8>| {
        let began = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(to);
        began.elapsed().as_secs_f64() * 1e3
    };
    let mut times: Vec<f64> = (0..rounds.max(1)).map(|_| copy(&mut to)).collect();
    quantile(&mut times, 0.5)
}

struct Pauses {
    usual: f64,
    median: f64,
    most: f64,
}

/// Milliseconds between steps; the `checkpoints` longest ones of each worker contain a checkpoint.
fn pauses(notes: &Path, checkpoints: usize) -> Result<Pauses, Box<dyn Error>> {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(notes)? {
        let text = std::fs::read_to_string(entry?.path())?;
        let mut times: Vec<f64> = text
            .lines()
            .map(|line| line.parse::<f64>().map(|us| us / 1e3))
            .collect::<Result<_, _>>()?;
        times.sort_by(f64::total_cmp);
        let longest = times.split_off(times.len().saturating_sub(checkpoints));
        with.extend(longest);
        without.extend(times);
    }
    let most = with.iter().copied().fold(0.0, f64::max);
    Ok(Pauses { usual: quantile(&mut without, 0.5), median: quantile(&mut with, 0.5), most })
}
