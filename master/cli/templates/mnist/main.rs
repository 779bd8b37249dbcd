//! Images of digits: a convolutional network on data in MNIST's IDX format.

use std::process::ExitCode;

use clap::Parser;
use elasticdl::candle::{Candle, CandleModel, Place};
use elasticdl::candle_core::{D, DType, Device, Tensor};
use elasticdl::candle_nn::{VarBuilder, loss};
use elasticdl::readers::{IdxImages, LabeledImage};
use elasticdl::{AdamW, Loss, Metrics, Predictions, UpdateRule, UserError};

use self::network::{Classifier, parse_size};

mod network;

fn main() -> ExitCode {
    elasticdl::run(Candle::new(Mnist::parse()))
}

/// Recognizes the digits of images in MNIST's format.
#[derive(Debug, Parser)]
struct Mnist {
    /// Rows and columns of an image, a multiple of 4
    #[arg(long, default_value_t = 28, value_parser = parse_size)]
    size: u32,
    /// Device: cpu, cuda, or auto, which is a GPU if there is one
    #[arg(long = "device", default_value = "cpu")]
    place: Place,
    #[arg(skip = Device::Cpu)]
    device: Device,
}

impl CandleModel for Mnist {
    type Reader = IdxImages;
    type Network = Classifier;
    // The images, `[n, 1, size, size]`, and their digits, `[n]` of u32.
    type Batch = (Tensor, Tensor);

    fn reader(&self) -> IdxImages {
        IdxImages::new(self.size, self.size)
    }

    fn device(&mut self) -> Result<Device, UserError> {
        self.device = self.place.open()?;
        Ok(self.device.clone())
    }

    fn build(&self, parameters: VarBuilder<'static>) -> Result<Classifier, UserError> {
        Ok(Classifier::build(self.size as usize, &parameters)?)
    }

    fn feed(&mut self, images: Vec<LabeledImage>) -> Result<Self::Batch, UserError> {
        let (size, count) = (self.size as usize, images.len());
        let digits = Tensor::from_iter(images.iter().map(|i| u32::from(i.label)), &self.device)?;
        let pixels = images.into_iter().flat_map(|image| image.pixels);
        let pixels = Tensor::from_iter(pixels.map(|p| f32::from(p) / 255.0), &self.device)?;
        Ok((pixels.reshape((count, 1, size, size))?, digits))
    }

    fn loss(
        &mut self,
        network: &Classifier,
        (pixels, digits): Self::Batch,
    ) -> Result<Loss<Tensor>, UserError> {
        Ok(Loss::Mean(loss::cross_entropy(&network.logits(&pixels)?, &digits)?))
    }

    fn evaluate(
        &mut self,
        network: &Classifier,
        (pixels, digits): Self::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let logits = network.logits(&pixels)?;
        let right = logits.argmax(D::Minus1)?.eq(&digits)?.to_dtype(DType::F32)?.sum_all()?;
        metrics.add_sum("accuracy", right.to_scalar::<f32>()?.into());
        let loss = loss::cross_entropy(&logits, &digits)?;
        metrics.add_mean("loss", loss.to_scalar::<f32>()?.into());
        Ok(())
    }

    fn predict(
        &mut self,
        network: &Classifier,
        (pixels, _): Self::Batch,
    ) -> Result<Predictions, UserError> {
        let digits = network.logits(&pixels)?.argmax(D::Minus1)?.to_dtype(DType::I64)?;
        Ok(Predictions::new().i64("digit", digits.to_vec1()?))
    }

    fn optimizer(&self) -> impl UpdateRule {
        AdamW::new(0.005)
    }
}

#[cfg(test)]
#[path = "../../../../examples/src/mnist_tests.rs"]
mod tests;
