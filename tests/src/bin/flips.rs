//! Planted bit flips: how many are found, how soon, and what is left of them.
//!
//! `cargo run --release -p elasticdl-tests --bin flips -- --json FILE` trains a job in which one
//! worker after the other flips a random bit, once in its life: of a gradient that it has computed,
//! of a parameter or of the optimizer's state. Keys of each kind: `planted`; `found`, whose workers
//! were replaced; `steps_p50` and `steps_max`, which the worker has applied until then. Of all:
//! `same_bits`, whether the job ends with the state of one without flips; `false_alarms`, workers
//! that were replaced and had flipped nothing.
//!
//! This program is at once the benchmark, the `elasticdl` command and the job's worker.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::ffi::OsString;
use std::fs::{DirEntry, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use elasticdl::{Gradients, Loss, Model, NamedTensor, Update, UpdateRule, UserError};
use elasticdl_tests::{
    Command, Ended, counting_data, counts_summary, print, quantile, run_benchmark,
};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

/// Measure what becomes of flipped bits
#[derive(Debug, Parser)]
struct Arguments {
    /// Flips, at least
    #[arg(long, default_value_t = 100)]
    flips: u64,
    /// Workers of the job
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(3..=16))]
    workers: u64,
    /// Steps between two flips, within which a worker is replaced
    #[arg(long, default_value_t = 2000)]
    spacing: u64,
    /// Seed of the places of the flips
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the figures to this file, too
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Arguments of a worker.
#[derive(Debug, Parser)]
struct WorkerArguments {
    #[arg(long)]
    seed: u64,
    /// Steps between two flips; 0 for none.
    #[arg(long)]
    spacing: u64,
    /// Folder of notes: a file per launch that has flipped a bit, named like the launch.
    #[arg(long)]
    notes: PathBuf,
}

/// What a launch flips a bit of, by its number.
const KINDS: [&str; 3] = ["gradient", "parameter", "state"];

fn kind_of(launch: u64) -> &'static str {
    KINDS[launch as usize % KINDS.len()]
}

/// The flip of a worker.
#[derive(Debug)]
struct Flip {
    kind: &'static str,
    rng: ChaCha8Rng,
    /// The first step in which a bit flips; `None` for none.
    due: Option<u64>,
    has_flipped: bool,
    /// The next step that is applied.
    step: u64,
    /// A line for the flip, and one for each step that is applied after it.
    notes: PathBuf,
}

impl Flip {
    /// That of this process: launch 1 flips nothing, the others one after the other.
    fn of_worker(arguments: WorkerArguments) -> Self {
        let WorkerArguments { seed, spacing, notes } = arguments;
        let launch = std::env::var("ELASTICDL_LAUNCH").ok().and_then(|text| text.parse().ok());
        let launch: u64 = launch.expect("a job has started this process");
        Self {
            kind: kind_of(launch),
            rng: ChaCha8Rng::seed_from_u64(seed ^ launch << 32),
            due: (launch > 1 && spacing > 0).then(|| (launch - 1) * spacing),
            has_flipped: false,
            step: 0,
            notes: notes.join(launch.to_string()),
        }
    }

    /// Flips a bit of these values, if it is time, and this is the kind.
    fn flip(&mut self, kind: &str, values: &mut [f32]) -> Result<(), UserError> {
        if self.has_flipped || self.kind != kind || self.due.is_none_or(|due| self.step < due) {
            return Ok(());
        }
        self.has_flipped = true;
        let at = self.rng.random_range(0..values.len());
        // The sign of a zero does no harm, and is lost in the next sum.
        let bits = if values[at] == 0.0 { 31 } else { 32 };
        values[at] = f32::from_bits(values[at].to_bits() ^ 1 << self.rng.random_range(0..bits));
        self.note()
    }

    fn note(&self) -> Result<(), UserError> {
        let mut file = OpenOptions::new().append(true).create(true).open(&self.notes)?;
        Ok(writeln!(file, "{}", self.step)?)
    }
}

/// Counts records, in the parameters and in the optimizer's state.
struct Counting {
    parameters: usize,
    flip: Rc<RefCell<Flip>>,
}

impl Model for Counting {
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
        std::thread::sleep(STEP);
        batch.iter().for_each(|record| gradients.sum()[*record as usize] += 1.0);
        self.flip.borrow_mut().flip("gradient", gradients.sum())?;
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Adding { flip: Rc::clone(&self.flip) }
    }

    fn summary(&mut self, parameters: &[f32]) -> Result<Option<String>, UserError> {
        Ok(Some(counts_summary(parameters)))
    }
}

struct Adding {
    flip: Rc<RefCell<Flip>>,
}

impl UpdateRule for Adding {
    fn slots(&self) -> usize {
        1
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        update.parameters.iter_mut().zip(update.sum).for_each(|(count, sum)| *count += sum);
        update.slots.iter_mut().zip(update.sum).for_each(|(count, sum)| *count += sum);
        let mut flip = self.flip.borrow_mut();
        flip.step = update.step + 1;
        if flip.has_flipped {
            flip.note()?;
        }
        flip.flip("parameter", update.parameters)?;
        flip.flip("state", update.slots)
    }
}

/// Time of a step.
const STEP: Duration = Duration::from_millis(2);
/// Records of a step, and of an epoch.
const BATCH: u64 = 16;
const RECORDS: u64 = 20_000;

fn main() -> ExitCode {
    let model = || {
        let flip = Flip::of_worker(WorkerArguments::parse());
        Counting { parameters: RECORDS as usize, flip: Rc::new(RefCell::new(flip)) }
    };
    run_benchmark(model, || measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    counting_data(&data, RECORDS, 1)?;
    let clean = train(arguments, folder.path(), "clean", 0)?;
    let ended = train(arguments, folder.path(), "flips", arguments.spacing)?;
    let lost: BTreeSet<u64> = ended.lost().iter().map(|worker| worker.0).collect();
    let mut figures = serde_json::Map::new();
    let planted = planted(&folder.path().join("flips"))?;
    for kind in KINDS {
        let of_kind = planted.iter().filter(|(launch, _)| kind_of(**launch) == kind);
        let (mut steps, mut found) = (Vec::new(), 0);
        for (launch, applied) in of_kind {
            found += u64::from(lost.contains(launch));
            steps.push(*applied as f64);
        }
        let entry = json!({
            "planted": steps.len(), "found": found,
            "steps_p50": quantile(&mut steps, 0.5), "steps_max": quantile(&mut steps, 1.0),
        });
        figures.insert(kind.into(), entry);
    }
    let same_bits = ended.summary().digest == clean.summary().digest;
    figures.insert("same_bits".into(), same_bits.into());
    let false_alarms = lost.iter().filter(|launch| !planted.contains_key(launch)).count();
    figures.insert("false_alarms".into(), false_alarms.into());
    if false_alarms > 0 || planted.keys().any(|launch| !lost.contains(launch)) {
        print(&format!("{}\nflips, by launch, and steps after them: {planted:?}", ended.output));
    }
    let text = Value::Object(figures).to_string();
    print(&text);
    arguments.json.as_ref().map_or(Ok(()), |file| std::fs::write(file, text + "\n"))?;
    Ok(())
}

/// Trains the job, in `folder/name`, where the workers' notes are.
fn train(
    arguments: &Arguments,
    folder: &Path,
    name: &str,
    spacing: u64,
) -> Result<Ended, Box<dyn Error>> {
    let notes = folder.join(name);
    std::fs::create_dir(&notes)?;
    let this = std::env::current_exe()?;
    let program: [OsString; 7] = [
        this.clone().into(),
        "--seed".into(),
        arguments.seed.to_string().into(),
        "--spacing".into(),
        spacing.to_string().into(),
        "--notes".into(),
        notes.into(),
    ];
    // The last flip is found before the end.
    let epochs = ((arguments.flips + 2) * arguments.spacing * BATCH).div_ceil(RECORDS);
    let ended = Command::new(this, folder.join(format!("{name}-job")), program)
        .option("training-data", folder.join("data"))
        .option("num-epochs", epochs.to_string())
        .option("num-workers", arguments.workers.to_string())
        .option("global-batch-size", BATCH.to_string())
        .option("max-worker-restarts", "100000")
        .option("checkpoint-dir", "none")
        .option("audit", "100%")
        .start()
        .wait_within(Duration::from_secs(1800));
    ended.assert_exactly_once(name, RECORDS, epochs);
    Ok(ended)
}

/// The launches that have flipped a bit, with the number of steps that they have applied since.
fn planted(notes: &Path) -> Result<BTreeMap<u64, usize>, Box<dyn Error>> {
    let of_file = |entry: std::io::Result<DirEntry>| -> Result<_, Box<dyn Error>> {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().parse()?;
        Ok((name, std::fs::read_to_string(path)?.lines().count() - 1))
    };
    std::fs::read_dir(notes)?.map(of_file).collect()
}
