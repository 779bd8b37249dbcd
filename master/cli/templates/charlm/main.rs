//! A language model of characters: a transformer that predicts the next byte of text files.

use std::process::ExitCode;

use clap::Parser;
use elasticdl::candle::{Candle, CandleModel, Place};
use elasticdl::candle_core::{D, Device, Tensor};
use elasticdl::candle_nn::VarBuilder;
use elasticdl::readers::TextWindows;
use elasticdl::{AdamW, Loss, Optimizer, Predictions, Schedule, UpdateRule, UserError};

use self::network::{Transformer, parse_width};
use self::ops::cross_entropy;

mod network;
mod ops;

fn main() -> ExitCode {
    elasticdl::run(Candle::new(CharLm::parse()))
}

/// Trains a small language model on the bytes of text files.
#[derive(Debug, Parser)]
struct CharLm {
    /// Number of bytes that the model attends to
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    context: u16,
    /// Elements of the vector of one byte
    #[arg(long, default_value = "64", value_parser = parse_width)]
    width: usize,
    /// Number of blocks of attention and feed-forward network
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    layers: u16,
    /// Device: cpu, cuda, or auto, which is a GPU if there is one
    #[arg(long = "device", default_value = "cpu")]
    place: Place,
    #[arg(skip = Device::Cpu)]
    device: Device,
}

impl CandleModel for CharLm {
    type Reader = TextWindows;
    type Network = Transformer;
    // The bytes of the windows, `[n, context]` of u32, and the byte after each, `[n · context]`.
    type Batch = (Tensor, Tensor);

    fn reader(&self) -> TextWindows {
        TextWindows::new(self.context.into())
    }

    fn device(&mut self) -> Result<Device, UserError> {
        self.device = self.place.open()?;
        Ok(self.device.clone())
    }

    fn build(&self, parameters: VarBuilder<'static>) -> Result<Transformer, UserError> {
        let sizes = (self.context.into(), self.width, self.layers.into());
        Ok(Transformer::build(sizes, &parameters)?)
    }

    fn feed(&mut self, windows: Vec<Vec<u8>>) -> Result<Self::Batch, UserError> {
        let context = usize::from(self.context);
        let bytes = |start: usize| {
            let bytes = windows.iter().flat_map(|window| window[start..start + context].iter());
            Tensor::from_iter(bytes.map(|byte| u32::from(*byte)), &self.device)
        };
        Ok((bytes(0)?.reshape((windows.len(), context))?, bytes(1)?))
    }

    // In nats per byte.
    fn loss(
        &mut self,
        network: &Transformer,
        (windows, next): Self::Batch,
    ) -> Result<Loss<Tensor>, UserError> {
        Ok(Loss::Mean(cross_entropy(&network.logits(&windows)?, &next)?.mean_all()?))
    }

    // The character that follows each window.
    fn predict(
        &mut self,
        network: &Transformer,
        (windows, _): Self::Batch,
    ) -> Result<Predictions, UserError> {
        let (count, length) = windows.dims2()?;
        let bytes = network.logits(&windows)?.argmax(D::Minus1)?.reshape((count, length))?;
        let last: Vec<u32> = bytes.narrow(1, length - 1, 1)?.flatten_all()?.to_vec1()?;
        let text = |byte: u32| char::from_u32(byte).unwrap_or('?').to_string();
        Ok(Predictions::new().text("next", last.into_iter().map(text).collect()))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Optimizer::from(AdamW::new(0.006).weight_decay(0.1))
            .clip_norm(1.0)
            .schedule(Schedule::constant().warmup(20))
    }
}

#[cfg(test)]
#[path = "../../../../examples/src/charlm_tests.rs"]
mod tests;
