//! Images of digits on a GPU, without a framework: a multilayer perceptron with one hidden layer,
//! whose forward and backward passes are kernels of its own. It needs a GPU with its driver and
//! NVRTC, which are loaded at run time, and no CUDA toolkit.

use std::process::ExitCode;

use clap::Parser;
use elasticdl::device::cudarc::driver::CudaViewMut;
use elasticdl::device::{self, CudaSlice, Device, DeviceGradients, DeviceModel};
use elasticdl::readers::{IdxImages, LabeledImage};
use elasticdl::{AdamW, Gradients, Loss, Metrics, Model, NamedTensor, UpdateRule, UserError};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

mod kernels;

use kernels::Kernel::{InputGradient, Linear, LossGradient, Losses, Rectified, WeightGradient};
use kernels::{Kernels, Shape};

#[expect(clippy::print_stderr, reason = "it is a program")]
fn main() -> ExitCode {
    match Perceptron::open(Settings::parse()) {
        Ok(model) => elasticdl::run(model),
        Err(error) => {
            eprintln!("gpu_mlp trains on a GPU: {error}");
            ExitCode::from(2)
        }
    }
}

/// Recognizes the digits of images in MNIST's format, on a GPU.
#[derive(Debug, Parser)]
struct Settings {
    /// Rows and columns of an image: 28 for MNIST
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=512))]
    size: u32,
    /// Elements of the hidden layer
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    hidden: u32,
}

struct Perceptron {
    settings: Settings,
    device: Device,
    kernels: Kernels,
}

/// Images in the GPU's memory: their pixels, `[n, pixels]`, from 0 to 1, and digits, `[n]`.
struct Images {
    pixels: CudaSlice<f32>,
    digits: CudaSlice<f32>,
}

impl Perceptron {
    /// Opens this worker's GPU, and compiles the kernels for it.
    fn open(settings: Settings) -> Result<Self, UserError> {
        let device = device::open()?;
        Ok(Self { kernels: Kernels::compile(&device)?, settings, device })
    }

    /// The shapes of both layers, whose weights lie one after the other in the parameters.
    fn layers(&self, records: usize) -> [Shape; 2] {
        let [pixels, hidden] = [self.settings.size.pow(2), self.settings.hidden];
        let layers = [(pixels as usize, hidden as usize), (hidden as usize, DIGITS)];
        layers.map(|(inputs, outputs)| Shape { records, inputs, outputs })
    }

    /// Returns the loss of each image and the logits, `[n, 10]`; adds the gradient of the summed
    /// loss to `gradient`, if it is asked for.
    fn pass(
        &self,
        parameters: &CudaSlice<f32>,
        Images { pixels, digits }: &Images,
        gradient: Option<CudaViewMut<'_, f32>>,
    ) -> Result<(Vec<f32>, Vec<f32>), UserError> {
        let [first, second] = self.layers(digits.len());
        let (records, split, images) = (digits.len(), first.weights(), pixels.as_view());
        let (stream, kernels) = (self.device.stream(), &self.kernels);
        let zeros = |len: usize| stream.alloc_zeros::<f32>(len);
        let (weights, output_weights) = (parameters.slice(..split), parameters.slice(split..));
        let mut hidden = zeros(records * first.outputs)?;
        kernels.launch(Rectified, first, (&images, &weights), &mut hidden.as_view_mut())?;
        let mut logits = zeros(records * DIGITS)?;
        let layer = (&hidden.as_view(), &output_weights);
        kernels.launch(Linear, second, layer, &mut logits.as_view_mut())?;
        let mut losses = zeros(records)?;
        let case = (&logits.as_view(), &digits.as_view());
        kernels.launch(Losses, second, case, &mut losses.as_view_mut())?;
        if let Some(mut gradient) = gradient {
            let (mut by_weights, mut by_output_weights) = gradient.split_at_mut(split);
            let mut by_logits = zeros(records * DIGITS)?;
            kernels.launch(LossGradient, second, case, &mut by_logits.as_view_mut())?;
            let by_logits = by_logits.as_view();
            let layer = (&hidden.as_view(), &by_logits);
            kernels.launch(WeightGradient, second, layer, &mut by_output_weights)?;
            // From here on, `hidden` is the gradient by the first layer's outputs.
            let layer = (&by_logits, &output_weights);
            kernels.launch(InputGradient, second, layer, &mut hidden.as_view_mut())?;
            let layer = (&images, &hidden.as_view());
            kernels.launch(WeightGradient, first, layer, &mut by_weights)?;
        }
        // These copies wait for the kernels.
        Ok((stream.clone_dtoh(&losses)?, stream.clone_dtoh(&logits)?))
    }
}

impl Model for Perceptron {
    type Reader = IdxImages;
    type Batch = Images;

    fn reader(&self) -> IdxImages {
        IdxImages::new(self.settings.size, self.settings.size)
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        let tensor = |(name, layer): (_, &Shape)| NamedTensor::new(name, [layer.weights()]);
        ["hidden", "output"].into_iter().zip(&self.layers(0)).map(tensor).collect()
    }

    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut rest = parameters;
        for layer in self.layers(0) {
            let (weights, after) = rest.split_at_mut(layer.weights());
            // He et al., Delving Deep into Rectifiers, 2015.
            let most = (6.0 / layer.inputs as f32).sqrt();
            weights.fill_with(|| random.random_range(-most..most));
            weights[layer.inputs * layer.outputs..].fill(0.0);
            rest = after;
        }
        Ok(())
    }

    fn feed(&mut self, images: Vec<LabeledImage>) -> Result<Images, UserError> {
        if let Some(image) = images.iter().find(|image| usize::from(image.label) >= DIGITS) {
            return Err(format!("an image has the label {}", image.label).into());
        }
        let stream = self.device.stream();
        let digits: Vec<f32> = images.iter().map(|image| image.label.into()).collect();
        let pixels = images.into_iter().flat_map(|image| image.pixels);
        let pixels: Vec<f32> = pixels.map(|pixel| f32::from(pixel) / 255.0).collect();
        Ok(Images { pixels: stream.clone_htod(&pixels)?, digits: stream.clone_htod(&digits)? })
    }

    fn gradients(
        &mut self,
        _parameters: &[f32],
        _images: Images,
        _gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        Err("this model computes on a GPU, in a training job".into())
    }

    fn optimizer(&self) -> impl UpdateRule {
        AdamW::new(0.003)
    }

    fn as_device_model(&mut self) -> Option<&mut dyn DeviceModel<Batch = Images>> {
        Some(self)
    }
}

impl DeviceModel for Perceptron {
    type Batch = Images;

    fn device(&self) -> &Device {
        &self.device
    }

    fn gradients(
        &mut self,
        parameters: &CudaSlice<f32>,
        images: Images,
        gradients: &mut DeviceGradients<'_>,
    ) -> Result<Loss, UserError> {
        let (losses, _) = self.pass(parameters, &images, Some(gradients.sum()))?;
        Ok(Loss::Sum(losses.into_iter().map(f64::from).sum()))
    }

    fn evaluate(
        &mut self,
        parameters: &CudaSlice<f32>,
        images: Images,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let (losses, logits) = self.pass(parameters, &images, None)?;
        metrics.add_sum("loss", losses.into_iter().map(f64::from).sum());
        let digits = self.device.stream().clone_dtoh(&images.digits)?;
        let is_right = |(logits, digit): &(&[f32], f32)| {
            logits.iter().all(|logit| *logit <= logits[*digit as usize])
        };
        let right = logits.chunks_exact(DIGITS).zip(digits).filter(is_right);
        metrics.add_sum("accuracy", right.count() as f64);
        Ok(())
    }
}

const DIGITS: usize = 10;

#[cfg(test)]
mod tests;
