//! The side of the program's thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use elasticdl_data::{Predictions, Purpose};
use elasticdl_tables::{BatchRows, Ids};

use super::bridge::Comparison;
use super::calls::{Call, Change, Reply, Sums};
use super::events::{Chunk, Counted, Ended, Event, NextBatch};
use super::lent::{Lent, LentChunk, LentMut};
use super::memory::Memory;
use super::micro_batches::MicroBatches;
use super::model::{CallChannel, ExternalModel, GroupProgress, Shape, Shared};
use super::worker::{Worker, WorkerError};

/// Drives a trainer from the program's thread.
#[derive(Debug)]
pub struct Driver {
    calls: Receiver<Call>,
    replies: Sender<Result<Reply, String>>,
    /// From a call until the reply.
    held: Option<Held>,
    /// A call that no wait has taken yet, as it may belong to a later epoch.
    later: Option<Call>,
    /// Ids of the rows that the call lends.
    ids: Ids,
    /// Ids of the requests whose gradients are computed next, in order.
    looked_up: VecDeque<Ids>,
    shared: Arc<Shared>,
    batches: MicroBatches,
    /// Whether each request is cut in the same way.
    is_strict: bool,
    /// Metrics of the micro-batch that is delivered next, each a mean over its records.
    means: Vec<(String, f64)>,
    /// What the micro-batch that is delivered next adds to the step's tally.
    tally: Vec<(String, f64)>,
    /// When the program began to compute the micro-batch that is delivered next.
    since: Instant,
    trainer: Trainer,
}

/// What a call lends.
#[derive(Debug)]
enum Held {
    AppliedIds {
        ids: Ids,
    },
    Evaluate {
        rows: BatchRows,
    },
    Gathered,
    Gradient {
        gradient: LentMut,
        before: u64,
        is_overlapped: bool,
        comparison: Comparison,
        sums: Sums,
    },
    Ids {
        ids: Ids,
        starts_over: bool,
    },
    Initialize {
        parameters: LentMut,
    },
    Predict {
        rows: BatchRows,
    },
    Update {
        sum: Lent,
        norm: Option<f64>,
        parameters: LentMut,
        state: LentMut,
        chunks: Vec<LentChunk>,
    },
}

/// The trainer's thread.
#[derive(Debug)]
enum Trainer {
    Ended(Ended),
    Running(JoinHandle<Ended>),
    /// It starts at the first wait: until then, the program writes its initial values.
    Waiting(Box<(Worker, ExternalModel)>),
}

/// The progress of a worker's group.
#[derive(Clone, Debug)]
pub struct Watch {
    shared: Arc<Shared>,
}

impl Watch {
    /// What the group has trained.
    pub fn progress(&self) -> GroupProgress {
        self.shared.progress().clone()
    }
}

impl Driver {
    /// A trainer, which starts at the first [wait](Self::wait). `micro_batch`: maximum number of
    /// records of a micro-batch.
    pub fn new(worker: Worker, shape: Shape, memory: Memory, micro_batch: usize) -> Self {
        let (to_program, calls) = channel();
        let (replies, from_program) = channel();
        let shared = Arc::new(Shared::default());
        let channel = CallChannel::new(to_program, from_program);
        let model = ExternalModel::new(shape, memory.into(), channel, Arc::clone(&shared));
        Self {
            calls,
            replies,
            held: None,
            later: None,
            ids: Ids::default(),
            looked_up: VecDeque::new(),
            shared,
            batches: MicroBatches::new(micro_batch.max(1)),
            is_strict: worker.options().is_deterministic,
            means: Vec::new(),
            tally: Vec::new(),
            since: Instant::now(),
            trainer: Trainer::Waiting(Box::new((worker, model))),
        }
    }

    /// A view of the group's progress, for any thread.
    pub fn watch(&self) -> Watch {
        Watch { shared: Arc::clone(&self.shared) }
    }

    /// The parameters, `[parameters]`: while they are initialized or updated. This and the slices
    /// below are `None` where they are on a GPU; initial values are written on the host.
    pub fn parameters(&mut self) -> Option<&mut [f32]> {
        match &mut self.held {
            Some(Held::Initialize { parameters } | Held::Update { parameters, .. }) => {
                parameters.slice()
            }
            _ => None,
        }
    }

    /// The program's state, initially zero: while it is updated.
    pub fn state(&mut self) -> Option<&mut [f32]> {
        match &mut self.held {
            Some(Held::Update { state, .. }) => state.slice(),
            _ => None,
        }
    }

    /// The sum to update by, `[parameters]`.
    pub fn sum(&self) -> Option<&[f32]> {
        match &self.held {
            Some(Held::Update { sum, .. }) => sum.slice(),
            _ => None,
        }
    }

    /// Euclidean norm of the whole sum, from [`Shape::clipped_from`] on, if updates need it: while
    /// parameters are updated.
    pub fn norm(&self) -> Option<f64> {
        match &self.held {
            Some(Held::Update { norm, .. }) => *norm,
            _ => None,
        }
    }

    /// The chunks of this worker, in the order of their parameters: while they are updated.
    pub fn chunks(&self) -> Vec<Chunk> {
        let Some(Held::Update { chunks, .. }) = &self.held else { return Vec::new() };
        let chunk = |chunk: &LentChunk| Chunk {
            start: chunk.start,
            len: chunk.len,
            slots: chunk.slots.address(),
            sum: chunk.sum.address(),
        };
        chunks.iter().map(chunk).collect()
    }

    /// This rank's gradient of the step, a sum over records, `[parameters]`, without the elements
    /// that are complete: while it is requested.
    pub fn gradient(&mut self) -> Option<&mut [f32]> {
        match &mut self.held {
            Some(Held::Gradient { gradient, .. }) => gradient.slice(),
            _ => None,
        }
    }

    /// Address of what [`parameters`](Self::parameters), [`gradient`](Self::gradient) or
    /// [`sum`](Self::sum) returns while they are initialized, requested and updated: on the GPU,
    /// for a program with [`DeviceMemory`](crate::device::DeviceMemory).
    pub fn address(&self) -> Option<usize> {
        match &self.held {
            Some(Held::Gradient { gradient, .. }) => Some(gradient.address()),
            Some(Held::Initialize { parameters }) => Some(parameters.address()),
            Some(Held::Update { sum, .. }) => Some(sum.address()),
            _ => None,
        }
    }

    /// The rows of the program's tables, while a gradient, metrics or predictions are requested:
    /// those of the ids of all micro-batches of the request, with the sums of their gradients, to
    /// which the program adds.
    pub fn rows(&mut self) -> Option<&mut BatchRows> {
        match &mut self.held {
            Some(Held::Gradient { sums, .. }) => Some(&mut sums.rows),
            Some(Held::Evaluate { rows } | Held::Predict { rows }) => Some(rows),
            _ => None,
        }
    }

    /// The ids of [`rows`](Self::rows), with their positions.
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// Whether what was announced has to be announced again.
    pub fn starts_over(&self) -> bool {
        matches!(self.held, Some(Held::Ids { starts_over: true, .. }))
    }

    /// Whether the trainer waits for ids of micro-batches, and whether it has those of all.
    pub fn announced(&self) -> Option<bool> {
        matches!(self.held, Some(Held::Ids { .. })).then(|| self.batches.is_complete())
    }

    /// Announces the ids of the micro-batch that was drawn first: calls `add` with those of the
    /// request. Returns whether the micro-batch counts. If not, it is not to be computed; its
    /// records are drawn again.
    ///
    /// # Errors
    /// No ids are requested, no micro-batch was drawn, or `add` fails.
    pub fn announce<E: From<WorkerError>>(
        &mut self,
        add: impl FnOnce(&mut Ids) -> Result<(), E>,
    ) -> Result<bool, E> {
        let Some(Held::Ids { ids, .. }) = &mut self.held else {
            return Err(WorkerError::Failed("no ids are requested now".into()).into());
        };
        let Some(counts) = self.batches.announce() else {
            let error = "there is no micro-batch to announce: each needs its own draw";
            return Err(WorkerError::Failed(error.into()).into());
        };
        if counts {
            add(ids)?;
        }
        Ok(counts)
    }

    /// Announces the ids of records that are evaluated or predicted.
    ///
    /// # Errors
    /// `add` fails.
    pub fn announce_applied<E>(
        &mut self,
        add: impl FnOnce(&mut Ids) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Some(Held::AppliedIds { ids }) = &mut self.held {
            add(ids)?;
        }
        self.look_up();
        Ok(())
    }

    /// All ids are announced. The rows are there at the next event, if that is a request for the
    /// gradient.
    pub fn look_up(&mut self) {
        let ids = match &self.held {
            Some(Held::AppliedIds { ids }) => {
                self.ids = ids.clone();
                ids.clone()
            }
            Some(Held::Ids { ids, .. }) => {
                self.looked_up.push_back(ids.clone());
                ids.clone()
            }
            _ => return,
        };
        self.reply(Ok(Reply::Ids(ids)));
    }

    /// How the micro-batch that is delivered next counts; `None` if it will be discarded.
    pub fn counted(&self) -> Option<Counted> {
        let Some(&Held::Gradient { before, is_overlapped, comparison, .. }) = self.held.as_ref()
        else {
            return None;
        };
        let (records, is_last) = self.batches.counted()?;
        let is_overlapped = is_last && is_overlapped;
        Some(Counted { records, before, is_last, is_overlapped, comparison })
    }

    /// Declares the elements of the gradient from `start` on complete, if it is summed meanwhile:
    /// in the last micro-batch of a step, with buckets and other workers.
    pub fn complete_from(&mut self, start: usize) {
        if self.counted().is_some_and(|counted| counted.is_overlapped)
            && let Some(Held::Gradient { gradient, .. }) = &mut self.held
        {
            gradient.truncate(start);
            let _ = self.replies.send(Ok(Reply::CompleteFrom(start)));
        }
    }

    /// Waits for the next event, for at most `timeout`. `until`: no event of a later epoch is taken
    /// yet.
    pub fn wait(&mut self, timeout: Duration, until: Option<u32>) -> Option<Event> {
        if let Err(ended) = self.start() {
            return Some(Event::Ended(ended));
        }
        // The trainer tells of a commit before its next call.
        let has_passed = |driver: &Self| driver.has_passed(until);
        if self.later.is_none() && !has_passed(self) {
            match self.calls.recv_timeout(timeout) {
                Ok(call) => self.later = Some(call),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Some(Event::Ended(self.join())),
            }
        }
        if has_passed(self) {
            return Some(Event::EpochComplete);
        }
        let call = self.later.take()?;
        let (held, event) = match call {
            Call::Evaluate { records, rows } => {
                (Held::Evaluate { rows }, Event::Evaluate { records })
            }
            Call::AppliedIds { purpose, records, ids } => {
                let predicts = purpose == Purpose::Predict;
                (Held::AppliedIds { ids }, Event::AppliedIds { predicts, records })
            }
            Call::Gathered { loads } => (Held::Gathered, Event::Gathered { loads }),
            Call::Gradient {
                records,
                before,
                gradient,
                rows,
                is_overlapped,
                comparison,
                loads,
            } => {
                if self.batches.is_announced() {
                    self.batches.compute(records.len());
                    self.ids = self.looked_up.pop_front().unwrap_or_default();
                } else {
                    let is_compared = comparison != Comparison::None;
                    self.batches.request(records, self.is_strict || is_compared);
                }
                self.since = Instant::now();
                let sums = Sums { rows, ..Sums::default() };
                let held = Held::Gradient { gradient, before, is_overlapped, comparison, sums };
                (held, Event::Gradient { loads })
            }
            Call::Ids { records, ids, starts_over } => {
                if starts_over {
                    self.batches.start_over();
                    self.looked_up.clear();
                }
                self.batches.request(records, self.is_strict);
                (Held::Ids { ids, starts_over }, Event::Ids { starts_over })
            }
            Call::Initialize { seed, parameters } => {
                (Held::Initialize { parameters }, Event::Initialize { seed })
            }
            Call::Predict { records, rows } => (Held::Predict { rows }, Event::Predict { records }),
            Call::Update(change) => {
                let Change { step, records, sum, norm, parameters, state, chunks, loads } = change;
                let held = Held::Update { sum, norm, parameters, state, chunks };
                (held, Event::Update { step, records, loads })
            }
        };
        self.held = Some(held);
        Some(event)
    }

    /// Whether the group has completed this epoch.
    fn has_passed(&self, until: Option<u32>) -> bool {
        until.is_some_and(|until| self.shared.progress().epoch > until)
    }

    /// The next micro-batch. A program that draws several before it delivers the first gets
    /// repetitions of the last where the trainer has nothing for it. `until`: the last epoch whose
    /// records may be drawn; [`NextBatch::Ended`] if it is complete.
    pub fn next_batch(&mut self, until: Option<u32>) -> NextBatch {
        if self.has_passed(until) || matches!(self.trainer, Trainer::Ended(_)) {
            return NextBatch::Ended;
        }
        if self.batches.drawn() == 0 && self.batches.is_complete() {
            return NextBatch::Wait;
        }
        let deadline = Instant::now() + READ_AHEAD_WAIT;
        loop {
            if let Some(batch) = self.batches.draw(&self.shared.ahead(), until) {
                return NextBatch::Batch(batch);
            }
            if self.batches.drawn() > 1 {
                return NextBatch::Later;
            }
            if Instant::now() >= deadline {
                // The loader would end if it had nothing in flight.
                return self.batches.repeat().map_or(NextBatch::Wait, NextBatch::Batch);
            }
            std::thread::sleep(READ_AHEAD_POLL);
        }
    }

    /// Reports `mean`, a mean over the micro-batch that is delivered next, as the metric `name`.
    pub fn report(&mut self, name: String, mean: f64) {
        self.means.push((name, mean));
    }

    /// Adds `value` to the number `name` of the step's tally, if the micro-batch that is delivered
    /// next counts. Each worker's update sees the sums over all workers:
    /// [`GroupProgress::tally`].
    pub fn add(&mut self, name: String, value: f64) {
        self.tally.push((name, value));
    }

    /// Delivers the gradient of the micro-batch that was drawn first, which is in
    /// [`gradient`](Self::gradient). `loss`: mean over its records. Returns whether the micro-batch
    /// counts. If not, its records are drawn again.
    ///
    /// # Errors
    /// No micro-batch was drawn.
    pub fn deliver(&mut self, loss: f64) -> Result<bool, WorkerError> {
        let counted = self.counted();
        let means = std::mem::take(&mut self.means);
        let tally = std::mem::take(&mut self.tally);
        let took = self.since.elapsed();
        self.since += took;
        if !self.batches.deliver(counted.is_some()) {
            let error = "there is no micro-batch to deliver: each needs its own draw";
            return Err(WorkerError::Failed(error.into()));
        }
        let Some(Held::Gradient { before, sums, .. }) = &mut self.held else { return Ok(false) };
        let Some(counted) = counted else {
            sums.discarded += took;
            return Ok(false);
        };
        *before += counted.records as u64;
        let records = counted.records as f64;
        sums.loss += loss * records;
        sums.metrics.extend(means.into_iter().map(|(name, mean)| (name, mean * records)));
        sums.tally.extend(tally);
        if counted.is_last {
            let sums = std::mem::take(sums);
            self.reply(Ok(Reply::Gradient(sums)));
        }
        Ok(true)
    }

    /// Whether the trainer waits for a micro-batch: for its gradient or its ids.
    pub fn is_requested(&self) -> bool {
        matches!(self.held, Some(Held::Gradient { .. } | Held::Ids { .. }))
    }

    /// The parameters are initialized or updated.
    pub fn done(&mut self) {
        self.reply(Ok(Reply::Done));
    }

    /// The metrics of the records to evaluate, each a mean over them.
    pub fn evaluated(&mut self, means: Vec<(String, f64)>) {
        if let Some(Held::Evaluate { rows }) = &mut self.held {
            let rows = std::mem::take(rows);
            self.reply(Ok(Reply::Metrics(means, rows)));
        }
    }

    /// The predictions, one row for each record.
    pub fn predicted(&mut self, rows: Predictions) {
        self.reply(Ok(Reply::Predictions(rows)));
    }

    /// The program has failed. Waits until the master knows, for at most `timeout`. `is_refused`:
    /// it does what no worker accepts, so the job ends; once training has begun, when another
    /// worker reports the same.
    pub fn fail(&mut self, error: String, is_refused: bool, timeout: Duration) {
        if matches!(self.trainer, Trainer::Waiting(_)) {
            let failed = Trainer::Ended(Ended::Failed(error.clone()));
            if let Trainer::Waiting(parts) = std::mem::replace(&mut self.trainer, failed) {
                parts.0.fail(error, is_refused);
            }
            return;
        }
        self.shared.is_refused.store(is_refused, Ordering::Release);
        let deadline = Instant::now() + timeout;
        while !matches!(self.trainer, Trainer::Ended(_)) {
            self.reply(Err(error.clone()));
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.wait(left, None).is_none() {
                break;
            }
        }
    }

    fn reply(&mut self, reply: Result<Reply, String>) {
        if self.held.take().is_some() {
            // A trainer that has ended is noticed by the next wait.
            let _ = self.replies.send(reply);
        }
    }

    /// Starts the trainer's thread, once. `Err`: it has ended.
    fn start(&mut self) -> Result<(), Ended> {
        let not_now = Trainer::Ended(Ended::Failed("the trainer does not start".into()));
        match std::mem::replace(&mut self.trainer, not_now) {
            Trainer::Waiting(parts) => {
                let (worker, model) = *parts;
                let shared = Arc::clone(&self.shared);
                let run = move || worker.train(model, || shared.progress().finished.clone());
                let started = std::thread::Builder::new().name("trainer".into()).spawn(run);
                self.trainer = match started {
                    Ok(thread) => Trainer::Running(thread),
                    Err(error) => {
                        Trainer::Ended(Ended::Failed(format!("no thread for the trainer: {error}")))
                    }
                };
            }
            other => self.trainer = other,
        }
        match &self.trainer {
            Trainer::Ended(ended) => Err(ended.clone()),
            Trainer::Running(_) | Trainer::Waiting(_) => Ok(()),
        }
    }

    /// Waits for the end of the trainer's thread.
    fn join(&mut self) -> Ended {
        let panicked = Ended::Failed("the trainer's thread panicked".into());
        let ended = match std::mem::replace(&mut self.trainer, Trainer::Ended(panicked.clone())) {
            Trainer::Ended(ended) => ended,
            Trainer::Running(thread) => thread.join().unwrap_or(panicked),
            Trainer::Waiting(_) => panicked,
        };
        self.trainer = Trainer::Ended(ended.clone());
        ended
    }
}

/// Time for which a draw waits for records that are read ahead, if the program has one micro-batch
/// in flight.
const READ_AHEAD_WAIT: Duration = Duration::from_millis(20);
const READ_AHEAD_POLL: Duration = Duration::from_millis(1);
