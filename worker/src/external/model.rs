//! The model that passes each of the trainer's calls to the program's thread.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use elasticdl_data::{Predictions, Purpose};
use elasticdl_tables::{BatchRows, ChunkUpdate, Ids, Table};

use super::bridge::{Bridge, Comparison, Division, Progress, SourceFile, StatePart};
use super::calls::{Call, Change, Reply, Sums};
use super::lent::{Lent, LentChunk, LentMut};
use super::memory::Taken;
use super::numbers::{Numbered, Numbers, Record};
use crate::buckets::Gradients;
use crate::conversion::Conversion;
#[cfg(feature = "gpu")]
use crate::device::{DeviceMemory, DeviceModel};
use crate::metrics::{Loss, Metrics, UserError, report_sum};
use crate::model::{Model, NamedTensor};
use crate::optimizer::norm_from;
use crate::state_buffer::StateMemory;
use crate::table_model::TableModel;
use crate::update::{Update, UpdateRule};

/// The size of a program's model and data.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shape {
    /// Number of records of the training data.
    pub records: u64,
    /// Names and shapes of the tensors that make up the parameters.
    pub tensors: Vec<NamedTensor>,
    /// Embedding tables.
    pub tables: Vec<Table>,
    /// Number of `f32`s of state: if it is divided, of the state that all workers have.
    pub state: usize,
    /// How the rest of the state is divided over the workers, in a job with `--shard-optimizer`.
    pub division: Option<Division>,
    /// What lies where in the state: what is divided, if there is any, and what is not.
    pub state_parts: Vec<StatePart>,
    /// The first element of the gradient that counts in its [norm](super::Driver::norm), if updates
    /// need that.
    pub clipped_from: Option<usize>,
    /// Number of elements of a bucket of the gradient, if it is summed in buckets.
    pub bucket_len: Option<usize>,
    /// Number of records that the program's initial state has absorbed: the first ones of the
    /// order, over all epochs.
    pub absorbed: u64,
    /// What the program evaluates; `None` if it does not say how.
    pub evaluation: Option<Inference>,
    /// What the program makes predictions for; `None` if it does not say how.
    pub prediction: Option<Inference>,
    /// The program's source files, which are the same on all workers.
    pub sources: Vec<SourceFile>,
    /// The optimizer and its settings as the program has made it, as text. The group's state has
    /// settings of its own.
    pub settings: String,
}

impl Shape {
    /// Does what `elasticdl convert` asks this process for; `None` if it does not.
    pub fn convert(&self) -> Option<Result<(), String>> {
        let conversion = Conversion::read(|name| std::env::var(name).ok())?;
        Some(conversion.write(&self.tensors, &self.tables))
    }
}

/// Data to which a program applies its model without training it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inference {
    /// Number of records.
    pub records: u64,
    /// Maximum number of records of a call.
    pub batch: NonZeroUsize,
}

/// What a worker knows of its group and of what it has trained.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupProgress {
    /// Generation of the group; 0 before the first.
    pub generation: u64,
    /// Index of this worker.
    pub rank: usize,
    /// Number of workers.
    pub world_size: usize,
    /// Number of committed steps.
    pub step: u64,
    /// Epoch of the next step.
    pub epoch: u32,
    /// Number of records that the state has absorbed, those of an initial state included.
    pub records: u64,
    /// What the micro-batches of the step that is applied have [added](super::Driver::add), on all
    /// workers.
    pub tally: BTreeMap<String, f64>,
    /// Whether the work is over, and the error that ended it.
    pub finished: Option<Option<String>>,
}

/// What both threads see at any time.
#[derive(Debug, Default)]
pub(super) struct Shared {
    ahead: Mutex<VecDeque<Record>>,
    progress: Mutex<GroupProgress>,
    /// Whether the program has failed by what no worker accepts.
    pub(super) is_refused: AtomicBool,
}

impl Shared {
    /// Records that the trainer will request after those that it has requested, in order.
    pub(super) fn ahead(&self) -> MutexGuard<'_, VecDeque<Record>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, GroupProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The trainer's end of the calls, which its model and its update rule share.
#[derive(Debug)]
pub(super) struct CallChannel {
    calls: Sender<Call>,
    replies: Receiver<Result<Reply, String>>,
    /// Whether this worker has computed a gradient of its state. From then on that changes by
    /// updates alone, until it is given up; before, it may be replaced at any time.
    has_computed: bool,
    /// Whether the program has the state that this worker had at its first gradient.
    is_loaded: bool,
}

impl CallChannel {
    pub(super) fn new(calls: Sender<Call>, replies: Receiver<Result<Reply, String>>) -> Self {
        Self { calls, replies, has_computed: false, is_loaded: false }
    }

    /// Lets the program change parameters and state.
    pub(super) fn change(&mut self, change: Change) -> Result<(), UserError> {
        let loads = !self.has_computed || !self.is_loaded;
        self.is_loaded = self.has_computed;
        self.send(Call::Update(Change { loads, ..change }))?;
        self.receive().map(drop)
    }

    /// The worker gives its state up: the program loads the next one.
    fn forget(&mut self) {
        (self.has_computed, self.is_loaded) = (false, false);
    }

    fn send(&self, call: Call) -> Result<(), UserError> {
        Ok(self.calls.send(call).map_err(|_| ENDED)?)
    }

    /// Waits for the program's reply.
    fn receive(&self) -> Result<Reply, UserError> {
        Ok(self.replies.recv().map_err(|_| ENDED)??)
    }
}

/// The program's update rule.
struct ProgramRule {
    channel: Arc<Mutex<CallChannel>>,
    state: usize,
    division: Option<Division>,
    clipped_from: Option<usize>,
}

impl UpdateRule for ProgramRule {
    fn slots(&self) -> usize {
        self.division.map_or(0, |division| division.slots)
    }

    fn state_len(&self, parameters: usize) -> usize {
        let divided = |Division { first, slots }| slots * parameters.saturating_sub(first);
        self.state + self.division.map_or(0, divided)
    }

    fn clipped_from(&self) -> Option<usize> {
        self.clipped_from
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        let Update { step, records, sum, parameters, slots, .. } = update;
        let norm = self.clipped_from.map(|first| norm_from(sum, first));
        let (parameters, state) = (LentMut::new(parameters), LentMut::new(slots));
        let change = Change::new((step, records), Lent::new(sum), parameters, state);
        locked(&self.channel).change(Change { norm, ..change })
    }
}

/// A model whose code runs on the program's thread.
#[derive(Debug)]
pub(super) struct ExternalModel {
    pub(super) shape: Shape,
    pub(super) memory: Taken,
    channel: Arc<Mutex<CallChannel>>,
    shared: Arc<Shared>,
    /// Number of records that this worker's gradient of the step contains, and while one is
    /// computed again, that of the pending one.
    pub(super) step_records: u64,
    pending_records: u64,
    comparison: Comparison,
    /// Whether ids that were requested are requested again: the group has changed since.
    starts_over: bool,
    /// Whether the program's memory has the parameters of a model that is not trained.
    is_shown: bool,
    /// Time that the program has spent on micro-batches that were discarded.
    discarded: Duration,
    /// What the program has added since it was last taken.
    tally: BTreeMap<String, f64>,
}

impl ExternalModel {
    pub(super) fn new(
        shape: Shape,
        memory: Taken,
        channel: CallChannel,
        shared: Arc<Shared>,
    ) -> Self {
        let channel = Arc::new(Mutex::new(channel));
        let discarded = Duration::ZERO;
        let (step_records, pending_records, comparison) = Default::default();
        let (starts_over, is_shown, tally) = Default::default();
        Self {
            shape,
            memory,
            channel,
            shared,
            step_records,
            pending_records,
            comparison,
            starts_over,
            is_shown,
            discarded,
            tally,
        }
    }

    pub(super) fn channel(&self) -> MutexGuard<'_, CallChannel> {
        locked(&self.channel)
    }

    /// Copies the parameters to the program's memory, unless the trainer keeps them there.
    fn show(&mut self, parameters: &[f32]) {
        if let Some(memory) = &mut self.memory.host
            && !self.is_shown
        {
            memory.parameters.floats_mut().copy_from_slice(parameters);
            self.is_shown = true;
        }
    }

    /// Lets the program add the gradient of these records, also to that of `rows`. `complete` is
    /// called as parts of it are.
    pub(super) fn compute(
        &mut self,
        records: Vec<Record>,
        (gradient, rows): (LentMut, &mut BatchRows),
        is_overlapped: bool,
        mut complete: impl FnMut(usize),
    ) -> Result<Loss, UserError> {
        let mut channel = locked(&self.channel);
        let loads = !mem::replace(&mut channel.has_computed, true);
        let before = self.step_records;
        self.step_records += records.len() as u64;
        let (rows_lent, comparison) = (mem::take(rows), self.comparison);
        channel.send(Call::Gradient {
            records,
            before,
            gradient,
            rows: rows_lent,
            is_overlapped,
            comparison,
            loads,
        })?;
        loop {
            match channel.receive()? {
                Reply::CompleteFrom(start) => complete(start),
                Reply::Gradient(Sums { loss, metrics, tally, discarded, rows: with_gradients }) => {
                    *rows = with_gradients;
                    self.discarded += discarded;
                    for (name, value) in tally {
                        *self.tally.entry(name).or_default() += value;
                    }
                    metrics.iter().for_each(|(name, sum)| report_sum(name, *sum));
                    return Ok(Loss::Sum(loss));
                }
                Reply::Done | Reply::Ids(_) | Reply::Metrics(..) | Reply::Predictions(_) => {
                    return Err("the program has replied without a gradient".into());
                }
            }
        }
    }

    /// Lets the program evaluate the records.
    pub(super) fn measure(
        &self,
        records: &[Record],
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let channel = self.channel();
        for part in records.chunks(batch_of(self.shape.evaluation)) {
            let rows = metrics.rows.as_deref_mut().map(mem::take).unwrap_or_default();
            channel.send(Call::Evaluate { records: part.to_vec(), rows })?;
            let Reply::Metrics(means, rows) = channel.receive()? else {
                return Err("the program has replied without metrics".into());
            };
            if let Some(lender) = metrics.rows.as_deref_mut() {
                *lender = rows;
            }
            for (name, mean) in means {
                metrics.add_sum(&name, mean * part.len() as f64);
            }
        }
        Ok(())
    }

    /// Lets the program predict for the records.
    fn predictions(&self, records: &[Record], rows: &BatchRows) -> Result<Predictions, UserError> {
        let (channel, mut all) = (self.channel(), Predictions::new());
        for part in records.chunks(batch_of(self.shape.prediction)) {
            channel.send(Call::Predict { records: part.to_vec(), rows: rows.clone() })?;
            let Reply::Predictions(rows) = channel.receive()? else {
                return Err("the program has replied without predictions".into());
            };
            all.append(rows)?;
        }
        Ok(all)
    }
}

impl Model for ExternalModel {
    type Reader = Numbers;
    type Batch = Batch;

    fn reader(&self) -> Numbers {
        let Shape { records, evaluation, prediction, .. } = self.shape;
        let [evaluation, prediction] = [evaluation, prediction].map(|data| Some(data?.records));
        let data = [Some(records), evaluation, prediction];
        Numbers { data, purpose: Purpose::Train, epoch: 0 }
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        self.shape.tensors.clone()
    }

    /// It reports no learning rate.
    fn optimizer(&self) -> impl UpdateRule {
        let Shape { state, division, clipped_from, .. } = self.shape;
        ProgramRule { channel: Arc::clone(&self.channel), state, division, clipped_from }
    }

    fn bucket_len(&self) -> Option<usize> {
        self.shape.bucket_len
    }

    fn as_bridge(&mut self) -> Option<&mut dyn Bridge> {
        Some(self)
    }

    #[cfg(feature = "gpu")]
    fn as_device_model(&mut self) -> Option<&mut dyn DeviceModel<Batch = Batch>> {
        self.memory.device.is_some().then_some(self as _)
    }

    fn as_table_model(&mut self) -> Option<&mut dyn TableModel<Batch = Batch>> {
        (!self.shape.tables.is_empty()).then_some(self as _)
    }

    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        let channel = self.channel();
        channel.send(Call::Initialize { seed, parameters: LentMut::new(parameters) })?;
        channel.receive().map(drop)
    }

    fn feed(&mut self, records: Vec<Numbered>) -> Result<Batch, UserError> {
        let purpose = records.first().map(|first| first.purpose).unwrap_or_default();
        let records = records.into_iter().map(|numbered| numbered.record).collect();
        Ok(Batch { purpose, records })
    }

    fn gradients(
        &mut self,
        _parameters: &[f32],
        Batch { records, .. }: Batch,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        let is_overlapped = gradients.is_overlapped();
        if self.shape.tables.is_empty() {
            let lent = (LentMut::new(gradients.sum()), &mut BatchRows::default());
            return self.compute(records, lent, is_overlapped, |start| {
                gradients.complete_from(start);
            });
        }
        let (rows, sum) = gradients.rows_and_sum();
        self.compute(records, (LentMut::new(sum), rows), false, |_| {})
    }

    fn evaluate(
        &mut self,
        parameters: &[f32],
        batch: Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        self.show(parameters);
        self.measure(&batch.records, metrics)
    }

    fn predict(&mut self, parameters: &[f32], batch: Batch) -> Result<Predictions, UserError> {
        self.show(parameters);
        self.predictions(&batch.records, &BatchRows::default())
    }
}

impl TableModel for ExternalModel {
    type Batch = Batch;

    fn tables(&self) -> Vec<Table> {
        self.shape.tables.clone()
    }

    fn ids(&mut self, batch: &mut Batch, ids: &mut Ids) -> Result<(), UserError> {
        let Self { shape, channel, starts_over, .. } = self;
        let channel = locked(channel);
        let purpose = batch.purpose;
        let most = match purpose {
            Purpose::Evaluate => batch_of(shape.evaluation),
            Purpose::Predict => batch_of(shape.prediction),
            _ => usize::MAX,
        };
        for part in batch.records.chunks(most) {
            let (records, lent) = (part.to_vec(), mem::take(ids));
            channel.send(match purpose {
                Purpose::Evaluate | Purpose::Predict => {
                    Call::AppliedIds { purpose, records, ids: lent }
                }
                _ => Call::Ids { records, ids: lent, starts_over: mem::take(starts_over) },
            })?;
            let Reply::Ids(of_program) = channel.receive()? else {
                return Err("the program has replied without ids".into());
            };
            *ids = of_program;
        }
        Ok(())
    }

    fn predict_with_rows(
        &mut self,
        parameters: &[f32],
        batch: Batch,
        rows: &BatchRows,
    ) -> Result<Predictions, UserError> {
        self.show(parameters);
        self.predictions(&batch.records, rows)
    }
}

impl Bridge for ExternalModel {
    fn take_memory(&mut self) -> Option<StateMemory> {
        self.memory.host.take()
    }

    #[cfg(feature = "gpu")]
    fn take_device_memory(&mut self) -> Option<DeviceMemory> {
        self.memory.on_device.take()
    }

    fn sources(&self) -> &[SourceFile] {
        &self.shape.sources
    }

    fn settings(&self) -> &str {
        &self.shape.settings
    }

    fn absorbed(&self) -> u64 {
        self.shape.absorbed
    }

    fn is_checked(&mut self) {
        // The program's memory has its initial parameters.
        self.is_shown = true;
    }

    fn upcoming(&mut self, records: &mut dyn Iterator<Item = (u32, u64)>) {
        *self.shared.ahead() = records.map(|(epoch, number)| Record { epoch, number }).collect();
    }

    fn begin_gradient(&mut self) {
        self.step_records = 0;
    }

    fn compare(&mut self, comparison: Comparison) {
        let was_again = self.comparison == Comparison::Again;
        self.comparison = comparison;
        match (was_again, comparison == Comparison::Again) {
            (false, true) => self.pending_records = self.step_records,
            (true, false) => {
                self.step_records = self.pending_records;
                (self.discarded, self.tally) = Default::default();
            }
            _ => {}
        }
    }

    fn take_discarded(&mut self) -> Duration {
        mem::take(&mut self.discarded)
    }

    fn take_tally(&mut self) -> BTreeMap<String, f64> {
        mem::take(&mut self.tally)
    }

    fn division(&self) -> Option<Division> {
        self.shape.division
    }

    fn state_parts(&self) -> &[StatePart] {
        &self.shape.state_parts
    }

    fn update_chunks(
        &mut self,
        step: (u64, u64),
        parameters: &mut [f32],
        whole: &mut [f32],
        chunks: Vec<ChunkUpdate<'_>>,
    ) -> Result<(), UserError> {
        let norm = chunks.first().and_then(|chunk| chunk.norm);
        let chunks = chunks.into_iter().map(LentChunk::new).collect();
        let (parameters, whole) = (LentMut::new(parameters), LentMut::new(whole));
        let change = Change::new(step, Lent::new(&[]), parameters, whole);
        self.channel().change(Change { norm, chunks, ..change })
    }

    fn gathered(&mut self, loads: bool) -> Result<(), UserError> {
        let channel = self.channel();
        channel.send(Call::Gathered { loads })?;
        channel.receive().map(drop)
    }

    fn forget(&mut self) {
        self.channel().forget();
    }

    fn is_refused(&self) -> bool {
        self.shared.is_refused.load(Ordering::Acquire)
    }

    fn observe(&mut self, event: Progress<'_>) {
        let shared = Arc::clone(&self.shared);
        let mut known = shared.progress();
        match event {
            Progress::Applied { tally } => known.tally = tally,
            Progress::Committed { step, epoch, records }
            | Progress::Resumed { step, epoch, records } => {
                (known.step, known.epoch, known.records) = (step, epoch, records);
            }
            Progress::Finished { error } => known.finished = Some(error.map(str::to_owned)),
            Progress::Grouped { generation, rank, world_size } => {
                self.starts_over = true;
                (known.generation, known.rank, known.world_size) = (generation, rank, world_size);
            }
        }
    }
}

/// Records that the program computes, or evaluates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) purpose: Purpose,
    pub(super) records: Vec<Record>,
}

fn locked(channel: &Mutex<CallChannel>) -> MutexGuard<'_, CallChannel> {
    channel.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of records of a call.
fn batch_of(data: Option<Inference>) -> usize {
    data.map_or(usize::MAX, |data| data.batch.get())
}

/// Error of a call that no program answers.
const ENDED: &str = "the program has ended";
