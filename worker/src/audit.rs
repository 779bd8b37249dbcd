//! Which models can be audited, and what is compared.

use elasticdl_collective::zeros;
use elasticdl_data::{Dataset, Reader as _};
use elasticdl_proto::{RecordRange, WorkerOptions};
use elasticdl_tables::Table;
use xxhash_rust::xxh3::Xxh3Default;

use crate::buckets::{Gradients, RecordKeys};
use crate::failure::call_user;
use crate::metrics;
use crate::model::{Model, NamedTensor, tensors_of};
use crate::split::PartReader;
use crate::trainer::is_on_gpu;

/// Digest of a part of a step: of the gradients of its records, and of the sum of their losses.
/// Metrics of the program do not count: they change no state, and may be times.
#[derive(Default)]
pub(crate) struct PartDigest(Xxh3Default);

impl PartDigest {
    pub(crate) fn add(&mut self, gradient: &[f32]) {
        self.0.update(bytemuck::cast_slice(gradient));
    }

    pub(crate) fn end(mut self, loss_sum: f64) -> u64 {
        self.0.update(&loss_sum.to_bits().to_le_bytes());
        self.0.digest()
    }
}

/// Checks that the steps of this model can be audited: the library can compute its gradients a
/// second time.
///
/// # Errors
/// Why not, and what would be right.
pub(crate) fn check_audited<M: Model>(model: &mut M, tables: &[Table]) -> Result<(), String> {
    let why = if is_on_gpu(model) {
        "the model computes on a GPU, whose results can differ from one run to the next"
    } else if !tables.is_empty() {
        "the model has tables, whose rows are looked up for a worker's own records"
    } else {
        return Ok(());
    };
    Err(format!("--audit can't be used for this job: {why}; train it without"))
}

/// Computes the gradient of the first records twice, before there is work to lose: a model that is
/// not deterministic would have its healthy workers evicted.
///
/// # Errors
/// The steps of this model can't be audited, and what would be right.
pub(crate) fn try_twice<M: Model>(
    model: &mut M,
    options: &WorkerOptions,
    reader: &mut PartReader<M::Reader>,
    dataset: &Dataset,
) -> Result<(), String> {
    let Some(file) = dataset.files.iter().find(|file| file.records > 0) else { return Ok(()) };
    // The loop of a program computes a step: its first one is audited.
    if options.audit == 0 || model.as_bridge().is_some() {
        return Ok(());
    }
    let mut parameters = vec![0.0; NamedTensor::count(&tensors_of(model)?)];
    call_user("initialize()", || model.initialize(options.seed, &mut parameters))?;
    let most = model.max_micro_batch().map_or(RECORDS_TRIED, |most| most.max(1) as u64);
    let end = file.records.min(most).min(RECORDS_TRIED);
    let keys = RecordKeys::new(options.seed, &[RecordRange { epoch: 0, start: 0, end }]);
    let mut compute = || {
        let records = call_user("reading the first records", || Ok(reader.read(file, 0..end)?))?;
        let count = records.len();
        let batch = call_user("feed()", || model.feed(records))?;
        let mut gradient = zeros(parameters.len());
        let mut sum = Gradients::of(&mut gradient, count, keys.clone());
        let compute = || model.gradients(&parameters, batch, &mut sum);
        let loss = metrics::reporting(count, || call_user("gradients()", compute));
        drop(metrics::take_reported());
        let mut digest = PartDigest::default();
        digest.add(&gradient);
        loss.map(|loss| digest.end(loss.sum_over(count)))
    };
    match (compute()?, compute()?) {
        (first, second) if first == second => Ok(()),
        _ => Err("--audit: the model is not deterministic: of the same parameters and records it \
                  has computed two different gradients or losses, so wrong arithmetic could not be \
                  told apart; its methods must depend on their arguments alone (for random \
                  numbers, on Gradients::record_key); correct it, or train without --audit"
            .into()),
    }
}

/// Few enough that a slow model takes seconds.
const RECORDS_TRIED: u64 = 32;
