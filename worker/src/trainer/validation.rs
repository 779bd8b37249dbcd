//! The validation data of a worker.

use std::collections::BTreeMap;
use std::ops::Range;

use elasticdl_data::{Purpose, Reader};
use elasticdl_proto::{RecordRange, ValidationSpec, WorkerOptions};
use elasticdl_tables::{BatchRows, Ids};

use super::device::is_on_gpu;
use crate::failure::call_user;
use crate::metrics::Metrics;
use crate::model::{Model, NamedTensor};
use crate::ordered_reader::{OrderedReader, ReadError, data_order};
use crate::session::evaluation::Plan;
use crate::split::open_reader;

/// The validation data and its reader.
pub(crate) struct Validation<R: Reader> {
    pub(crate) plan: Plan,
    pub(crate) reader: OrderedReader<R>,
}

impl<R: Reader> Validation<R> {
    /// Describes the validation data. Each worker does so itself.
    pub(crate) fn open<M: Model<Reader = R>>(
        model: &M,
        options: &WorkerOptions,
        spec: &ValidationSpec,
    ) -> Result<Self, String> {
        call_user("reading the validation data", || {
            let mut reader = open_reader(model, options, Purpose::Evaluate)?;
            let dataset = reader.describe(&spec.data)?;
            let plan = Plan {
                records: dataset.files.iter().map(|file| file.records).sum(),
                every: spec.every,
                metric: spec.metric.clone(),
                highest: spec.highest,
                patience: spec.patience,
            };
            let order = data_order(&dataset);
            Ok(Self { plan, reader: OrderedReader::new(reader, dataset, order) })
        })
    }

    /// Evaluates the initial model on a few records: a mistake is found before there is work to
    /// lose.
    ///
    /// # Errors
    /// The fault and the remedy.
    pub(crate) fn check<M: Model<Reader = R>>(
        &mut self,
        model: &mut M,
        seed: u64,
    ) -> Result<(), String> {
        let mut parameters = vec![0.0; NamedTensor::count(&model.tensors())];
        // A model without parameters is reported by the method that failed. One on a GPU is
        // evaluated on the parameters there, which a job only has when it trains.
        if parameters.is_empty() || is_on_gpu(model) {
            return Ok(());
        }
        call_user("initialize()", || model.initialize(seed, &mut parameters))?;
        if let Some(bridge) = model.as_bridge() {
            bridge.is_checked();
        }
        let most = model.max_micro_batch().map_or(RECORDS_CHECKED, |most| most.max(1) as u64);
        let records = self.plan.records.min(most).min(RECORDS_CHECKED);
        let records = self.read(0..records).map_err(|error| error.text)?;
        let mut sums = BTreeMap::new();
        let count = records.len();
        let tables = model.as_table_model().map(|model| model.tables()).unwrap_or_default();
        let mut ids = Ids::new(tables.len());
        let fed = match tables.is_empty() {
            true => call_user("feed()", || model.feed(records)),
            false => super::feed::feed(model, records, &mut ids),
        };
        let evaluated = fed.and_then(|batch| {
            let mut rows = BatchRows::initial(&tables, seed, &ids);
            let mut metrics = Metrics::new(&mut sums, count).with_rows(Some(&mut rows));
            call_user("evaluate()", || model.evaluate(&parameters, batch, &mut metrics))
        });
        evaluated.map_err(|error| {
            format!(
                "the model can't be evaluated on the validation data, which was tried before the \
                 first step: {error}; correct the model's evaluation, or train without validation \
                 data"
            )
        })?;
        self.plan.check_metric(&sums)
    }

    /// Reads records `range`, in the order of the data.
    pub(super) fn read(&mut self, range: Range<u64>) -> Result<Vec<R::Record>, ReadError> {
        self.reader.read(RecordRange { epoch: 0, start: range.start, end: range.end })
    }
}

/// Few enough that a slow model takes seconds.
const RECORDS_CHECKED: u64 = 32;
