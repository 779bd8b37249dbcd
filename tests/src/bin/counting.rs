//! A model whose parameters count records: after training, parameter `i` is the number of times
//! that record `i` was absorbed. So the model itself proves that records are counted exactly once,
//! whatever happens to its workers.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Parser;
use elasticdl::candle::Candle;
use elasticdl::device::{
    self, CudaSlice, Device, DeviceGradients, DeviceModel, DeviceUpdate, DeviceUpdateRule,
};
use elasticdl::{
    AdamW, BatchRows, Gradients, Ids, Loss, Metrics, Model, NamedTensor, Optimizer, Predictions,
    RowOptimizer, Table, TableModel, Update, UpdateRule, UserError, report_sum,
};
use elasticdl_tests::cluster::{FIRST_GRADIENT, FIRST_UPDATE};
use elasticdl_tests::counts_summary;
use rustix::time::{ClockId, clock_gettime};

use self::candle::CandleCounting;

#[path = "counting/candle.rs"]
mod candle;

/// Counts records.
#[derive(Parser)]
struct Counting {
    /// Records in the data set: record `i` holds the number `i`, 8 bytes, little-endian.
    #[arg(long)]
    records: usize,
    /// Parameters, at least as many as records; the rest stay zero.
    #[arg(long, default_value_t = 0)]
    parameters: usize,
    /// Time to compute the gradient of a record.
    #[arg(long, default_value_t = 0)]
    micros_per_record: u64,
    /// Use a processor for that time, instead of sleeping.
    #[arg(long)]
    busy: bool,
    /// Time to evaluate a record, with one more metric, or to predict for it.
    #[arg(long)]
    inference_micros: Option<u64>,
    /// Take no time at all once this file exists.
    #[arg(long)]
    hurry_when: Option<PathBuf>,
    /// Records per micro-batch at most.
    #[arg(long)]
    micro_batch: Option<usize>,
    /// Length of the buckets that counts are summed in, while the rest is counted.
    #[arg(long)]
    bucket: Option<usize>,
    /// File to write the final counts to, as one line: smallest and greatest.
    #[arg(long)]
    counts: Option<PathBuf>,
    /// Panics at this record.
    #[arg(long)]
    panic_at: Option<u64>,
    /// Returns an error at this record.
    #[arg(long)]
    fail_at: Option<u64>,
    /// Panics when it evaluates a record that has been absorbed.
    #[arg(long)]
    panic_in_evaluation: bool,
    /// At this step, add a value of this process to its parameters: a model that is not
    /// deterministic.
    #[arg(long)]
    drift_at: Option<u64>,
    /// In this call of `gradients()`, a bit of the result flips: a fault of the processor.
    #[arg(long)]
    miscount_at: Option<u64>,
    /// In all calls from that one on.
    #[arg(long)]
    keeps_miscounting: bool,
    /// Adds the number of the call to each gradient: a model that is not deterministic.
    #[arg(long)]
    counts_calls: bool,
    /// Calls of `gradients()` so far.
    #[arg(skip)]
    calls: u64,
    /// Adds NaN to the gradient at this record.
    #[arg(long)]
    nan_at: Option<u64>,
    /// End the process at this record, without a report.
    #[arg(long)]
    exit_at: Option<u64>,
    /// Never return from the gradient of this record, in one worker of the job.
    #[arg(long)]
    hang_at: Option<u64>,
    /// Never return from the summary of the final state, in one worker of the job.
    #[arg(long)]
    hang_in_summary: bool,
    /// Folder of a file with the process id as its name: a line for each step, with the step and
    /// the records that this process has computed for it.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Count in the optimizer's state, of which the parameters are a copy.
    #[arg(long)]
    slots: bool,
    /// Learn with AdamW and clipping from whole numbers that follow from the parameters' bits:
    /// their sums are exact in any order, so the result's bits don't depend on the workers.
    #[arg(long)]
    learn: bool,
    /// Count in rows of a table, too.
    #[arg(long)]
    tables: bool,
    /// Count by a model of candle, which has a table.
    #[arg(long, requires = "tables")]
    candle: bool,
    /// Rows come into being with their second touch, and are removed after 20 steps without one.
    #[arg(long)]
    short_lived: bool,
    /// Rows of a thousand numbers.
    #[arg(long)]
    wide_rows: bool,
    /// Positions of the rows of records.
    #[arg(skip)]
    positions: HashMap<u64, usize>,
    /// Hold parameters and gradients on a GPU.
    #[arg(long)]
    gpu: bool,
    #[arg(skip)]
    device: Option<Device>,
    /// Whether the first gradient has been logged, or nothing is.
    #[arg(skip)]
    has_computed: bool,
}

impl Counting {
    fn parameter_count(&self) -> usize {
        self.parameters.max(self.records)
    }

    /// Whether delays have been ended.
    fn is_hurried(&self) -> bool {
        self.hurry_when.as_ref().is_some_and(|file| file.exists())
    }

    /// Does not return, unless another process of the job has hung: there is a file that says so.
    fn hang_if_first(&self) {
        let file = self.hurry_when.as_ref().map(|file| file.with_extension("hung"));
        let is_first = file.is_some_and(|file| std::fs::File::create_new(file).is_ok());
        if is_first {
            loop {
                std::thread::park();
            }
        }
    }

    /// Takes the configured time, and fails at the configured records.
    fn delay_and_fail(&self, batch: &[u64]) -> Result<(), UserError> {
        if !self.is_hurried() {
            std::thread::sleep(Duration::from_micros(
                self.inference_micros.unwrap_or(0) * batch.len() as u64,
            ));
        }
        if let Some(record) = batch.iter().find(|record| self.fail_at == Some(**record)) {
            return Err(format!("record {record} can't be learned").into());
        }
        Ok(())
    }

    /// Changes the count of a record, in the configured calls.
    fn miscount(&mut self, record: u64, counts: &mut [f32]) {
        self.calls += 1;
        let count = &mut counts[record as usize];
        if self.counts_calls {
            *count += self.calls as f32;
        }
        let is_wrong = |at| self.calls == at || (self.calls > at && self.keeps_miscounting);
        if self.miscount_at.is_some_and(is_wrong) {
            *count = f32::from_bits(count.to_bits() ^ (1 << 20));
        }
    }

    /// Adds 1 to the count of each record, in the configured time, and fails at the configured
    /// records.
    fn count(
        &mut self,
        parameters: &[f32],
        batch: &[u64],
        counts: &mut [f32],
    ) -> Result<(), UserError> {
        log_once(&mut self.has_computed, FIRST_GRADIENT);
        assert!(
            self.micro_batch.is_none_or(|most| batch.len() <= most),
            "{} records at once",
            batch.len()
        );
        let time = Duration::from_micros(self.micros_per_record * batch.len() as u64);
        let until = Instant::now() + time;
        for record in batch {
            assert!(self.panic_at != Some(*record), "record {record} is not to my liking");
            if self.fail_at == Some(*record) {
                return Err(format!("record {record} can't be learned").into());
            }
            if self.exit_at == Some(*record) {
                std::process::exit(9);
            }
            if self.hang_at == Some(*record) {
                self.hang_if_first();
            }
            let at = *record as usize;
            counts[at] += match self.nan_at {
                Some(nan_at) if nan_at == *record => f32::NAN,
                _ if self.learn => (parameters[at].to_bits() % 8 + 1) as f32,
                _ => 1.0,
            };
        }
        if self.busy {
            compute(time);
        } else if !self.is_hurried() {
            // Asleep, so that workers of other jobs compute meanwhile.
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }
}

/// Returns when this thread has run for this long.
fn compute(time: Duration) {
    let used = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let until = used() + time;
    while used() < until {}
}

impl Model for Counting {
    elasticdl_tests::read_counting_data!();

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameter_count()])]
    }

    fn gradients(
        &mut self,
        parameters: &[f32],
        batch: Vec<u64>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        report_sum("seen", batch.len() as f64);
        if self.trace.is_some() {
            TRACED.lock().expect("no thread panics").extend(&batch);
        }
        if self.tables {
            let (rows, _) = gradients.rows_and_sum();
            let (_, sums) = rows.of(0);
            batch.iter().for_each(|record| sums[self.positions[record]] += 1.0);
        }
        if !gradients.is_overlapped() {
            self.count(parameters, &batch, gradients.sum())?;
            self.miscount(batch[0], gradients.sum());
            return Ok(Loss::Sum(batch.len() as f64));
        }
        let quarter = self.parameter_count().div_ceil(4);
        for part in (0..4).rev() {
            let part = part * quarter..(part + 1) * quarter;
            let records = batch.iter().copied().filter(|record| part.contains(&(*record as usize)));
            self.count(parameters, &records.collect::<Vec<_>>(), gradients.sum())?;
            gradients.complete_from(part.start);
        }
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn as_device_model(&mut self) -> Option<&mut dyn DeviceModel<Batch = Vec<u64>>> {
        self.device.is_some().then_some(self as _)
    }

    fn as_table_model(&mut self) -> Option<&mut dyn TableModel<Batch = Vec<u64>>> {
        self.tables.then_some(self as _)
    }

    fn bucket_len(&self) -> Option<usize> {
        self.bucket
    }

    fn predict(&mut self, parameters: &[f32], batch: Vec<u64>) -> Result<Predictions, UserError> {
        self.delay_and_fail(&batch)?;
        let records = batch.iter().map(|&record| record as i64).collect();
        let values = batch.iter().map(|&record| parameters[record as usize]).collect();
        let names = batch.iter().map(|record| format!("record {record}")).collect();
        Ok(Predictions::new().i64("record", records).f32("value", values).text("name", names))
    }

    fn optimizer(&self) -> impl UpdateRule {
        let Self { drift_at, slots: has_slots, .. } = *self;
        let learns = self.learn.then(|| Optimizer::from(AdamW::new(3e-3)).clip_norm(0.1));
        let trace = self.trace.as_ref().map(|folder| folder.join(std::process::id().to_string()));
        Adding { drift_at, has_updated: self.hurry_when.is_none(), has_slots, learns, trace }
    }

    /// Metrics `seen`: the fraction of the records that has been absorbed; `loss`: the same for
    /// every model.
    fn evaluate(
        &mut self,
        parameters: &[f32],
        batch: Vec<u64>,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let seen = batch.iter().filter(|record| parameters[**record as usize] > 0.0).count();
        assert!(seen == 0 || !self.panic_in_evaluation, "a mistake in the evaluation");
        metrics.add_sum("seen", seen as f64);
        metrics.add_sum("loss", batch.len() as f64);
        if self.tables {
            let (values, _) = metrics.rows().of(0);
            let of = |record: &u64| f64::from(values[self.positions[record]]);
            let sum = batch.iter().map(of).fold(0.0, |sum, row| sum + row);
            metrics.add_sum("row", sum);
        }
        if self.inference_micros.is_some() {
            self.delay_and_fail(&batch)?;
            // Its last bits depend on the order of the summation.
            let of =
                |record: &u64| f64::from(parameters[*record as usize]) / (*record as f64 + 3.0);
            metrics.add_sum("harmonic", batch.iter().map(of).fold(0.0, |sum, one| sum + one));
        }
        Ok(())
    }

    fn max_micro_batch(&self) -> Option<usize> {
        self.micro_batch
    }

    fn summary(&mut self, parameters: &[f32]) -> Result<Option<String>, UserError> {
        if self.hang_in_summary {
            self.hang_if_first();
        }
        let text = counts_summary(&parameters[..self.records]);
        if let Some(path) = &self.counts {
            std::fs::write(path, &text)?;
        }
        Ok(Some(text))
    }
}

/// One row for each record.
impl TableModel for Counting {
    type Batch = Vec<u64>;

    fn tables(&self) -> Vec<Table> {
        let dim = if self.wide_rows { 1000 } else { 1 };
        let table = Table::new("counts", dim).optimized(RowOptimizer::sgd(1.0));
        vec![if self.short_lived { table.admitted_after(2).evicted_after(20) } else { table }]
    }

    fn ids(&mut self, batch: &mut Vec<u64>, ids: &mut Ids) -> Result<(), UserError> {
        for &record in batch.iter() {
            ids.begin_record();
            self.positions.insert(record, ids.push(0, record));
        }
        Ok(())
    }

    fn predict_with_rows(
        &mut self,
        parameters: &[f32],
        batch: Vec<u64>,
        rows: &BatchRows,
    ) -> Result<Predictions, UserError> {
        let row = |record: &u64| {
            let mut row = [0.0];
            rows.add_rows(0, &[self.positions[record]], 1.0, &mut row);
            row[0]
        };
        let values = batch.iter().map(row).collect();
        Ok(self.predict(parameters, batch)?.f32("row", values))
    }
}

/// Adds the sums to the parameters.
struct Adding {
    drift_at: Option<u64>,
    /// Whether the first update has been logged, or nothing is.
    has_updated: bool,
    /// Whether it adds to the slots, one by one.
    has_slots: bool,
    /// What it does instead.
    learns: Option<Optimizer>,
    /// Where the records of each step are noted.
    trace: Option<PathBuf>,
}

/// The records that this process has computed since its last step.
static TRACED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

impl UpdateRule for Adding {
    fn slots(&self) -> usize {
        self.learns.as_ref().map_or_else(|| usize::from(self.has_slots), Optimizer::slots)
    }

    fn is_elementwise(&self) -> bool {
        self.has_slots || self.learns.is_some()
    }

    fn as_optimizer(&self) -> Option<Optimizer> {
        self.learns
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        log_once(&mut self.has_updated, FIRST_UPDATE);
        if let Some(trace) = &self.trace {
            let records = std::mem::take(&mut *TRACED.lock().expect("no thread panics"));
            let numbers = std::iter::once(update.step + 1).chain(records);
            let line = numbers.map(|number| number.to_string()).collect::<Vec<_>>().join(" ");
            let mut file = OpenOptions::new().append(true).create(true).open(trace)?;
            writeln!(file, "{line}")?;
        }
        if let Some(optimizer) = self.learns {
            optimizer.apply(update);
            return Ok(());
        }
        let counts = if self.has_slots { &mut *update.slots } else { &mut *update.parameters };
        counts.iter_mut().zip(update.sum).for_each(|(count, sum)| *count += sum);
        if self.has_slots {
            update.parameters.copy_from_slice(update.slots);
        }
        if self.drift_at == Some(update.step) {
            update.parameters[0] += std::process::id() as f32;
        }
        Ok(())
    }
}

/// Line with a timestamp, in the log of a pod.
fn log_once(is_logged: &mut bool, what: &str) {
    if !std::mem::replace(is_logged, true) {
        // Standard error may be a full disk.
        let _ = writeln!(std::io::stderr(), "{what}");
    }
}

/// The same counts, computed on the host and copied to the GPU.
impl DeviceModel for Counting {
    type Batch = Vec<u64>;

    fn device(&self) -> &Device {
        self.device.as_ref().expect("it is only asked for where there is one")
    }

    fn gradients(
        &mut self,
        parameters: &CudaSlice<f32>,
        batch: Vec<u64>,
        gradients: &mut DeviceGradients<'_>,
    ) -> Result<Loss, UserError> {
        let parameters = match self.learn {
            true => parameters.stream().clone_dtoh(parameters)?,
            false => Vec::new(),
        };
        report_sum("seen", batch.len() as f64);
        let parts = if gradients.is_overlapped() { 4 } else { 1 };
        let part_len = self.parameter_count().div_ceil(parts);
        let mut counts = vec![0.0; self.parameter_count()];
        for part in (0..parts).rev() {
            let end = self.parameter_count().min((part + 1) * part_len);
            let part = end.min(part * part_len)..end;
            let records = batch.iter().copied().filter(|record| part.contains(&(*record as usize)));
            self.count(&parameters, &records.collect::<Vec<_>>(), &mut counts)?;
            if !part.is_empty() {
                let counts =
                    DeviceModel::device(self).stream().clone_htod(&counts[part.clone()])?;
                gradients.add_sum(part.clone(), &counts.as_view())?;
            }
            gradients.complete_from(part.start);
        }
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn evaluate(
        &mut self,
        parameters: &CudaSlice<f32>,
        batch: Vec<u64>,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let parameters = parameters.stream().clone_dtoh(parameters)?;
        Model::evaluate(self, &parameters, batch, metrics)
    }

    fn update_rule(&mut self) -> Option<&mut dyn DeviceUpdateRule> {
        (!self.learn).then_some(self as _)
    }
}

impl DeviceUpdateRule for Counting {
    fn apply(
        &mut self,
        update: DeviceUpdate<'_>,
        rule: &mut dyn UpdateRule,
    ) -> Result<(), UserError> {
        let (stream, records) = (update.sum.stream().clone(), update.records);
        let mut parameters = stream.clone_dtoh(update.parameters)?;
        let sum = stream.clone_dtoh(update.sum)?;
        // Without slots, there is memory for one.
        let mut slots = stream.clone_dtoh(update.slots)?;
        slots.truncate(rule.slots() * sum.len());
        rule.apply(Update::new(update.step, records, &sum, &mut parameters, &mut slots))?;
        if !slots.is_empty() {
            stream.memcpy_htod(&slots, update.slots)?;
        }
        Ok(stream.memcpy_htod(&parameters, update.parameters)?)
    }
}

#[expect(clippy::print_stderr, reason = "it is a program")]
pub(crate) fn main() -> ExitCode {
    let mut model = Counting::parse();
    model.has_computed = model.hurry_when.is_none();
    if model.gpu {
        match device::open() {
            Ok(device) => model.device = Some(device),
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::from(2);
            }
        }
    }
    match model.candle {
        true => elasticdl::run(Candle::new(CandleCounting(model))),
        false => elasticdl::run(model),
    }
}
