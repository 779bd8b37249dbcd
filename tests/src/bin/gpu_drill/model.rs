//! The model of the phase `kernels`: what its job computes on a GPU, and the same on the CPU.

use std::process::ExitCode;

use clap::Parser;
use elasticdl::device::{self, CudaSlice, Device, DeviceGradients, DeviceModel};
use elasticdl::readers::FixedRecords;
use elasticdl::{
    AdamW, Gradients, Loss, Metrics, Model, NamedTensor, Optimizer, Schedule, Sgd, Update,
    UpdateRule, UserError,
};
use elasticdl_tests::counting_reader;

/// Names of the optimizers, and whether a GPU computes the CPU's bits: the norm for clipping is
/// summed in another order.
pub(crate) const OPTIMIZERS: [(&str, bool); 7] = [
    ("sgd", true),
    ("sgd-decay", true),
    ("momentum", true),
    ("nesterov", true),
    ("adamw", true),
    ("sgd-clipped", false),
    ("adamw-clipped", false),
];

/// Steps of a training, the records of a step, and those of a micro-batch.
pub(crate) const STEPS: usize = 8;
pub(crate) const BATCH: usize = 24;
const MICRO_BATCH: usize = 16;
/// A step whose gradient has a NaN, and is skipped.
const SKIPPED: usize = 5;

/// A model whose gradient depends on the parameters and on the number of records only.
#[derive(Parser)]
struct Arithmetic {
    #[arg(long)]
    parameters: usize,
    #[arg(long, value_parser = optimizer)]
    optimizer: Optimizer,
    #[arg(skip)]
    device: Option<Device>,
    /// Number of micro-batches so far.
    #[arg(skip)]
    computed: usize,
}

/// Runs this process as a worker, on a GPU.
#[expect(clippy::print_stderr, reason = "it is a program")]
pub(crate) fn run() -> ExitCode {
    let mut model = Arithmetic::parse();
    match device::open() {
        Ok(device) => model.device = Some(device),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    }
    elasticdl::run(model)
}

/// The parameters that the training ends with, computed on the CPU by this process.
pub(crate) fn trained_on_cpu(parameters: usize, name: &str) -> Result<Vec<f32>, String> {
    let optimizer = optimizer(name)?;
    let mut trained: Vec<f32> = (0..parameters).map(initial).collect();
    let mut slots = vec![0.0; parameters * optimizer.slots()];
    for step in (0..STEPS as u64).filter(|step| *step != SKIPPED as u64) {
        let mut sum = vec![0.0; parameters];
        for records in [MICRO_BATCH, BATCH - MICRO_BATCH] {
            let gradient = gradient(&trained, records);
            sum.iter_mut().zip(gradient).for_each(|(sum, element)| *sum += element);
        }
        optimizer.apply(Update::new(step, BATCH as u64, &sum, &mut trained, &mut slots));
    }
    Ok(trained)
}

fn optimizer(name: &str) -> Result<Optimizer, String> {
    let schedule = Schedule::constant().warmup(3);
    let sgd = Sgd::new(0.1);
    let adam_w = AdamW::new(0.003).betas(0.8, 0.95).weight_decay(0.1);
    Ok(match name {
        "sgd" => sgd.into(),
        "sgd-decay" => Optimizer::from(sgd.weight_decay(0.01)).schedule(schedule),
        "momentum" => sgd.momentum(0.9).weight_decay(0.01).into(),
        "nesterov" => sgd.momentum(0.9).nesterov().into(),
        "adamw" => Optimizer::from(adam_w).schedule(schedule),
        "sgd-clipped" => Optimizer::from(sgd).clip_norm(0.5),
        "adamw-clipped" => Optimizer::from(adam_w).clip_norm(0.5),
        _ => return Err(format!("there is no optimizer {name}")),
    })
}

/// The gradient of a batch, summed over its records.
fn gradient(parameters: &[f32], records: usize) -> Vec<f32> {
    let of = |(index, parameter): (usize, &f32)| records as f32 * (noise(index) + parameter / 4.0);
    parameters.iter().enumerate().map(of).collect()
}

fn initial(index: usize) -> f32 {
    noise(index ^ 0x5555_5555)
}

/// A number from -16 to 16 that depends on the index alone, of various magnitudes.
fn noise(index: usize) -> f32 {
    // The finalizer of SplitMix64.
    let mut bits = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let from_minus_1_to_1 = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
    from_minus_1_to_1 * f32::from(1_u8 << (index % 9).min(4)) / f32::from(1_u8 << (index % 5))
}

impl Model for Arithmetic {
    type Reader = FixedRecords;
    /// The number of records.
    type Batch = usize;

    fn reader(&self) -> FixedRecords {
        counting_reader()
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameters])]
    }

    fn initialize(&mut self, _seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        for (index, parameter) in parameters.iter_mut().enumerate() {
            *parameter = initial(index);
        }
        Ok(())
    }

    fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<usize, UserError> {
        Ok(records.len())
    }

    fn gradients(
        &mut self,
        _parameters: &[f32],
        _records: usize,
        _gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        Err("this model trains on a GPU".into())
    }

    fn optimizer(&self) -> impl UpdateRule {
        self.optimizer
    }

    fn max_micro_batch(&self) -> Option<usize> {
        Some(MICRO_BATCH)
    }

    fn as_device_model(&mut self) -> Option<&mut dyn DeviceModel<Batch = usize>> {
        Some(self)
    }
}

impl DeviceModel for Arithmetic {
    type Batch = usize;

    fn device(&self) -> &Device {
        self.device.as_ref().expect("it was opened before the model is used")
    }

    fn gradients(
        &mut self,
        parameters: &CudaSlice<f32>,
        records: usize,
        gradients: &mut DeviceGradients<'_>,
    ) -> Result<Loss, UserError> {
        let stream = self.device().stream();
        let on_host = stream.clone_dtoh(parameters)?;
        stream.synchronize()?;
        let mut gradient = gradient(&on_host, records);
        if self.computed / BATCH.div_ceil(MICRO_BATCH) == SKIPPED {
            *gradient.last_mut().ok_or("no parameters")? = f32::NAN;
        }
        let gradient = stream.clone_htod(&gradient)?;
        self.computed += 1;
        gradients.add_sum(0..gradient.len(), &gradient.as_view())?;
        Ok(Loss::Sum(records as f64))
    }

    fn evaluate(
        &mut self,
        _parameters: &CudaSlice<f32>,
        _records: usize,
        _metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        Err("this model has no metrics".into())
    }
}
