//! Evaluation and prediction without a group: each worker processes the shards that the master
//! leases to it, one after the other, independently of other workers.
//!
//! **Invariant:** the result of a shard depends only on the model and the shard. Its records are
//! taken in order, in batches of one size, and their metrics are added in that order.
//! **Invariant:** a shard is reported as done only after all of its output has been written.

mod output;

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::TryRecvError;

use elasticdl_data::Predictions;
use elasticdl_data::worker::wait_for_access;
use elasticdl_data::{Dataset, Reader};
use elasticdl_proto::{Format, MasterMessage, RecordRange, Work, WorkerMessage};
use elasticdl_tables::BatchRows;

use output::Output;
pub(crate) use output::check_output;

use crate::control::Control;
use crate::exported_tables::TrainedRows;
use crate::failure::{Failure, call_user};
use crate::messages::ControlEvent;
use crate::metrics::Metrics;
use crate::model::{Model, NamedTensor, tables_of};
use crate::ordered_reader::{OrderedReader, data_order};
use crate::prefetch::Prefetch;
use crate::session::Exit;
use crate::split::{PartReader, open_reader, purpose_of};
use crate::trained_model;
use crate::trainer::feed;

/// Processes the shards of `dataset` that the master leases to this worker, until the master ends
/// it.
pub(crate) fn work<M: Model>(
    model: M,
    trained: Trained,
    dataset: Dataset,
    control: &Control,
) -> Result<Exit, Failure> {
    let options = &control.welcome.options;
    let purpose = match &options.work {
        Work::Predict { output, format, .. } => {
            let output = Output::open(output).map_err(Failure::fatal)?;
            Purpose::Predict { output, format: *format }
        }
        Work::Evaluate { .. } | Work::Train { .. } => Purpose::Evaluate,
    };
    let reading =
        call_user("reader()", || Ok(open_reader(&model, options, purpose_of(&options.work))?));
    let reader = reading.map_err(Failure::fatal)?;
    // The batch size does not depend on the number of workers.
    let most = model.max_micro_batch().map_or(u64::MAX, |most| most as u64).max(1);
    let batch = options.batch.share(1).min(most);
    let order = data_order(&dataset);
    let reader = OrderedReader::new(reader, dataset, order);
    let prefetch = Prefetch::new(reader, batch.saturating_mul(BATCHES_AHEAD))
        .map_err(|error| Failure::local(format!("no thread for the reader: {error}")))?;
    control.outbox.send(WorkerMessage::Ready { parameters: trained.parameters.len() as u64 });
    let shards = VecDeque::new();
    let mut work = Inference { model, trained, purpose, batch, prefetch, shards, control };
    let exit = work.run();
    if let Purpose::Predict { output, .. } = &work.purpose {
        output.remove_leftovers();
    }
    exit
}

/// What the job has trained, or another program.
pub(crate) struct Trained {
    parameters: Vec<f32>,
    /// `None`: the model has no tables.
    rows: Option<TrainedRows>,
}

impl Trained {
    /// Reads the model at `address`, for this `model` with these tensors.
    ///
    /// # Errors
    /// It can't be read, or is another model.
    pub(crate) fn load<M: Model>(
        address: &str,
        model: &mut M,
        layout: &[NamedTensor],
    ) -> Result<Self, String> {
        let mut parameters = vec![0.0; NamedTensor::count(layout)];
        let tables = tables_of(model)?;
        let loaded = trained_model::load(address, layout, &mut parameters);
        let rows = loaded.and_then(|()| match trained_model::rows(address, &tables)? {
            Some(rows) if let Some(step) = rows.changes_since() => Err(format!(
                "{address} has only the rows that have changed since step {step} \
                 (--export-changes-since); name the file of a whole model"
            )),
            rows => Ok(rows),
        });
        let rows = rows.map_err(|error| format!("the model was not loaded: {error}"))?;
        Ok(Self { parameters, rows })
    }

    /// Builds a batch, and looks its rows up.
    fn feed<M: Model>(
        &mut self,
        model: &mut M,
        records: Vec<<M::Reader as Reader>::Record>,
    ) -> Result<(M::Batch, Option<BatchRows>), String> {
        let Some(trained) = &mut self.rows else {
            return Ok((call_user("feed()", || model.feed(records))?, None));
        };
        let mut ids = trained.ids();
        let batch = feed(model, records, &mut ids)?;
        Ok((batch, Some(trained.look_up(&ids)?)))
    }
}

/// Purpose of the job: what is computed for the records.
enum Purpose {
    Evaluate,
    Predict { output: Output, format: Format },
}

struct Inference<'a, M: Model> {
    model: M,
    trained: Trained,
    purpose: Purpose,
    /// Records per batch.
    batch: u64,
    prefetch: Prefetch<<M::Reader as Reader>::Record>,
    /// Shards that are leased and not yet started.
    shards: VecDeque<RecordRange>,
    control: &'a Control,
}

/// Sums over a shard's records, by name of the metric.
type Sums = BTreeMap<String, f64>;

/// `Err` when the worker has to end.
type Interruptible = Result<(), Exit>;

impl<M: Model> Inference<'_, M> {
    fn run(&mut self) -> Result<Exit, Failure> {
        self.request_leases(SHARDS_AHEAD);
        loop {
            if let Err(exit) = self.receive(self.shards.is_empty()) {
                return Ok(exit);
            }
            let Some(shard) = self.shards.pop_front() else { continue };
            let metrics = match self.process(shard)? {
                Ok(metrics) => metrics,
                Err(exit) => return Ok(exit),
            };
            tracing::debug!(%shard, "done");
            wait_for_access();
            self.control.outbox.send(WorkerMessage::ShardDone { range: shard, metrics });
            self.request_leases(1);
        }
    }

    fn request_leases(&self, shards: u64) {
        self.control.outbox.send(WorkerMessage::LeaseRequest { shards });
    }

    /// Handles the messages that the master has sent. With `wait`, blocks until there is at least
    /// one.
    fn receive(&mut self, wait: bool) -> Interruptible {
        let ended = || Exit::Shutdown("the control stream's thread ended".into());
        let mut should_wait = wait;
        loop {
            let message = if should_wait {
                self.control.inbox.recv().map_err(|_| ended())?
            } else {
                match self.control.inbox.try_recv() {
                    Ok(message) => message,
                    Err(TryRecvError::Empty) => return Ok(()),
                    Err(TryRecvError::Disconnected) => return Err(ended()),
                }
            };
            should_wait = false;
            match message {
                ControlEvent::Message(MasterMessage::Lease(ranges), _) => {
                    for range in ranges {
                        self.prefetch.want(range);
                        self.shards.push_back(range);
                    }
                }
                ControlEvent::Message(MasterMessage::Shutdown { reason, .. }, _) => {
                    return Err(Exit::Shutdown(reason));
                }
                // Messages for members of a group, and replies that were handled before, do not
                // matter here.
                _ => {}
            }
        }
    }

    /// Processes one shard. Returns its metrics, if it is evaluated.
    fn process(&mut self, shard: RecordRange) -> Result<Result<Sums, Exit>, Failure> {
        let mut sums = Sums::new();
        let mut predictions = Predictions::new();
        let mut start = shard.start;
        while start < shard.end {
            let part = RecordRange { start, end: shard.end.min(start + self.batch), ..shard };
            let mut records = Vec::new();
            let mut rest = Some(part);
            while let Some(range) = rest {
                // On shutdown the shard is abandoned: the master leases it to another worker.
                if let Err(exit) = self.receive(false) {
                    return Ok(Err(exit));
                }
                let taken = self.prefetch.take(range)?;
                records.extend(taken.records);
                rest = taken.rest;
            }
            let applied = (&mut self.model, &mut self.trained);
            match &self.purpose {
                Purpose::Evaluate => {
                    evaluate(applied, records, &mut sums).map_err(|error| fail(error, part))?;
                }
                Purpose::Predict { .. } => {
                    let found = predict(applied, records).map_err(|error| fail(error, part))?;
                    predictions.append(found).map_err(|error| fail(error.to_string(), part))?;
                }
            }
            start = part.end;
        }
        if let Purpose::Predict { output, format } = &self.purpose {
            output::write_shard(output, *format, shard, &predictions)
                .map_err(|error| fail(error, shard))?;
        }
        Ok(Ok(sums))
    }
}

/// Adds the metrics of a batch to `sums`.
fn evaluate<M: Model>(
    (model, trained): (&mut M, &mut Trained),
    records: Vec<<M::Reader as Reader>::Record>,
    sums: &mut Sums,
) -> Result<(), String> {
    let count = records.len();
    let (batch, mut rows) = trained.feed(model, records)?;
    let mut metrics = Metrics::new(sums, count).with_rows(rows.as_mut());
    call_user("evaluate()", || model.evaluate(&trained.parameters, batch, &mut metrics))?;
    match sums.iter().find(|(_, sum)| !sum.is_finite()) {
        Some((name, sum)) => Err(format!("evaluate() gave {sum} for {name:?}")),
        None => Ok(()),
    }
}

/// The predictions for a batch, one row for each record.
fn predict<M: Model>(
    (model, trained): (&mut M, &mut Trained),
    records: Vec<<M::Reader as Reader>::Record>,
) -> Result<Predictions, String> {
    let count = records.len();
    let (batch, rows) = trained.feed(model, records)?;
    let parameters = &trained.parameters;
    let predictions = call_user("predict()", || match (&rows, model.as_table_model()) {
        (Some(rows), Some(model)) => model.predict_with_rows(parameters, batch, rows),
        _ => model.predict(parameters, batch),
    })?;
    match predictions.rows() {
        Ok(rows) if rows == count => Ok(predictions),
        Ok(rows) => Err(format!("predict() gave {rows} rows for {count} records")),
        Err(reason) => Err(format!("predict(): {reason}")),
    }
}

/// Applies the job's model to the first record of the data, as the job will to all: what is wrong
/// with the model, or with the method that the job calls, is found before the work.
///
/// # Errors
/// The model cannot be loaded or applied.
pub(crate) fn try_first<M: Model>(
    model: &mut M,
    work: &Work,
    reader: &mut PartReader<M::Reader>,
    dataset: &Dataset,
) -> Result<(), String> {
    let (Work::Evaluate { model: weights } | Work::Predict { model: weights, .. }) = work else {
        return Ok(());
    };
    let Some(file) = dataset.files.iter().find(|file| file.records > 0) else { return Ok(()) };
    let layout = call_user("tensors()", || Ok(model.tensors()))?;
    let mut trained = Trained::load(weights, model, &layout)?;
    let first = call_user("reading the first record", || Ok(reader.read(file, 0..1)?))?;
    match work {
        Work::Evaluate { .. } => evaluate((model, &mut trained), first, &mut Sums::new()),
        Work::Predict { .. } => predict((model, &mut trained), first).map(drop),
        Work::Train { .. } => Ok(()),
    }
}

fn fail(error: String, range: RecordRange) -> Failure {
    Failure::on_records(error, vec![range])
}

/// Number of batches that the reader reads ahead.
const BATCHES_AHEAD: u64 = 4;
/// One shard is being processed while the next one is read.
const SHARDS_AHEAD: u64 = 2;
