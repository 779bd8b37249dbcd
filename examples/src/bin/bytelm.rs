//! A small byte-level language model.
//!
//! A current transformer, scaled down to show progress within a minute on two cores: blocks of
//! causal attention and a feed-forward network, each preceded by a normalization. The input is
//! unusual: the embedding of a byte is summed with embeddings of the few bytes before it, each from
//! a separate table. That costs next to nothing, and the attention need not learn which bytes are
//! adjacent.

use std::process::ExitCode;

use clap::Parser;
use elasticdl::candle::{Candle, CandleModel, Cuts, Place};
use elasticdl::candle_core::{D, Device, Tensor};
use elasticdl::candle_nn::{Init, VarBuilder};
use elasticdl::readers::TextWindows;
use elasticdl::{AdamW, Loss, Optimizer, Schedule, UpdateRule, UserError};

use self::ops::{causal_softmax, cross_entropy, rms_norm};

#[path = "../../../master/cli/templates/charlm/ops.rs"]
mod ops;
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};

fn main() -> ExitCode {
    elasticdl::run(Candle::new(ByteModel::new(Arguments::parse())))
}

/// Trains a small language model on the bytes of text files.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Number of bytes that the model attends to
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    context: u32,
    /// Elements of the vector of one byte; a multiple of --heads
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    width: u32,
    /// Number of blocks of attention and feed-forward network
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    layers: u32,
    /// Attention heads per block
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    heads: u32,
    /// Number of bytes, ending with the current one, whose embeddings are summed
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    tail: u32,
    /// Learning rate, after the warm-up
    #[arg(long, default_value_t = 0.006, value_parser = rate)]
    rate: f64,
    /// Number of warm-up steps
    #[arg(long, default_value_t = 20)]
    warm_up: u64,
    /// Step at which the learning rate has decayed to a tenth [default: constant]
    #[arg(long)]
    steps: Option<u64>,
    /// In folders, read only files with these extensions, as rs,md [default: all]
    #[arg(long, value_delimiter = ',')]
    extensions: Vec<String>,
    /// Maximum number of bytes to read, from the first file on [default: all]
    #[arg(long)]
    limit_bytes: Option<u64>,
    /// Device: cpu, cuda, or auto, which is a GPU if there is one
    #[arg(long, default_value = "cpu")]
    device: Place,
    /// Elements per gradient bucket, which is all-reduced while the rest is computed; 0: one
    /// all-reduce when the gradient is complete
    #[arg(long, default_value_t = 1 << 18)]
    bucket: usize,
    /// Prompt of the text that is sampled at the end
    #[arg(long, default_value = "\n")]
    prompt: String,
}

/// The model, and its recent loss.
#[derive(Debug)]
struct ByteModel {
    arguments: Arguments,
    /// Device of the batches.
    device: Device,
    /// Running mean over this worker's latest records, each predicted before the model was trained
    /// on it.
    bits_per_byte: Option<f64>,
}

#[derive(Debug)]
struct Network {
    /// `[256, width]` each: embeddings of the last byte, of the byte before it, and so on.
    embeddings: Vec<Tensor>,
    /// `[context, width]`
    positions: Tensor,
    blocks: Vec<Block>,
    /// `[width, 256]`
    head: Tensor,
}

/// The matrices of a block, each `[inputs, outputs]`.
#[derive(Debug)]
struct Block {
    /// Queries, keys and values.
    attend: Tensor,
    merge: Tensor,
    widen: Tensor,
    narrow: Tensor,
}

#[derive(Debug)]
struct Batch {
    windows: usize,
    /// For each position of the tail, that byte of all positions of all windows: `[windows ·
    /// context]` of u32.
    inputs: Vec<Tensor>,
    /// `[windows · context]` of u32.
    targets: Tensor,
}

impl CandleModel for ByteModel {
    type Reader = TextWindows;
    type Network = Network;
    type Batch = Batch;

    fn reader(&self) -> TextWindows {
        let extensions: Vec<&str> = self.arguments.extensions.iter().map(String::as_str).collect();
        TextWindows::new(self.arguments.context as usize)
            .extensions(&extensions)
            .limit_bytes(self.arguments.limit_bytes.unwrap_or(u64::MAX))
    }

    fn build(&self, parameters: VarBuilder<'static>) -> Result<Network, UserError> {
        let Arguments { context, width, layers, heads, tail, .. } = self.arguments;
        if width % heads > 0 {
            return Err(format!("--width {width} is not a multiple of --heads {heads}").into());
        }
        let width = width as usize;
        let drawn = |name: &str, shape: (usize, usize), stdev: f64| {
            parameters.get_with_hints(shape, name, Init::Randn { mean: 0.0, stdev })
        };
        // In the order in which the loss uses them, so that the gradient is completed from its end.
        let embeddings = (0..tail)
            .map(|i| drawn(&format!("embedding.{i}"), (256, width), 0.5))
            .collect::<Result<_, _>>()?;
        let positions = drawn("positions", (context as usize, width), 0.02)?;
        let matrix = |name: String, inputs: usize, outputs: usize, gain: f64| {
            drawn(&name, (inputs, outputs), gain / (inputs as f64).sqrt())
        };
        let mut blocks = Vec::new();
        // A block's contribution starts small, so that the sum over blocks has about the norm of
        // one.
        let small = 1.0 / f64::from(2 * layers).sqrt();
        for i in 0..layers {
            blocks.push(Block {
                attend: matrix(format!("block.{i}.attend"), width, 3 * width, 1.0)?,
                merge: matrix(format!("block.{i}.merge"), width, width, small)?,
                widen: matrix(format!("block.{i}.widen"), width, 4 * width, 1.0)?,
                narrow: matrix(format!("block.{i}.narrow"), 4 * width, width, small)?,
            });
        }
        let head = matrix("head".to_owned(), width, 256, 0.1)?;
        Ok(Network { embeddings, positions, blocks, head })
    }

    fn device(&mut self) -> Result<Device, UserError> {
        self.device = self.arguments.device.open()?;
        Ok(self.device.clone())
    }

    fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<Batch, UserError> {
        let targets =
            records.iter().flat_map(|record| record[1..].iter().map(|&byte| u32::from(byte)));
        let targets = Tensor::from_iter(targets, &self.device)?;
        let inputs: Vec<&[u8]> = records.iter().map(|record| &record[..record.len() - 1]).collect();
        Ok(Batch { windows: records.len(), inputs: self.inputs(&inputs)?, targets })
    }

    fn loss(&mut self, network: &Network, batch: Batch) -> Result<Loss<Tensor>, UserError> {
        self.loss_in_parts(network, batch, &mut Cuts::none())
    }

    fn loss_in_parts(
        &mut self,
        network: &Network,
        batch: Batch,
        cuts: &mut Cuts,
    ) -> Result<Loss<Tensor>, UserError> {
        Ok(Loss::Sum(self.loss_sum(network, batch, cuts)?))
    }

    fn bucket_len(&self) -> Option<usize> {
        (self.arguments.bucket > 0).then_some(self.arguments.bucket)
    }

    fn optimizer(&self) -> impl UpdateRule {
        let Arguments { rate, warm_up, steps, .. } = self.arguments;
        let schedule = steps.map_or(Schedule::constant(), |total| Schedule::cosine(total, 0.1));
        let adam_w = AdamW::new(rate).betas(0.9, 0.95).weight_decay(0.1);
        Optimizer::from(adam_w).clip_norm(1.0).schedule(schedule.warmup(warm_up))
    }

    fn max_micro_batch(&self) -> Option<usize> {
        Some(MICRO_BATCH)
    }

    fn summary(&mut self, network: &Network) -> Result<Option<String>, UserError> {
        let text = self.sample(network, SAMPLE_BYTES)?;
        let bits = self
            .bits_per_byte
            .map_or_else(|| "no records on this worker".to_owned(), |bits| format!("{bits:.3}"));
        Ok(Some(format!("bits per byte: {bits}\nsample:\n{text}")))
    }
}

impl ByteModel {
    fn new(arguments: Arguments) -> Self {
        Self { arguments, device: Device::Cpu, bits_per_byte: None }
    }

    /// The loss, summed over the windows. A window's loss is the mean over its bytes, so the job's
    /// loss is in nats per byte.
    fn loss_sum(
        &mut self,
        network: &Network,
        batch: Batch,
        cuts: &mut Cuts,
    ) -> Result<Tensor, UserError> {
        let Batch { windows, inputs, targets } = batch;
        let logits = self.logits(network, windows, &inputs, cuts)?;
        let loss =
            (cross_entropy(&logits, &targets)?.sum_all()? / f64::from(self.arguments.context))?;
        let bits = f64::from(loss.to_scalar::<f32>()?) / windows as f64 / std::f64::consts::LN_2;
        let mean = self.bits_per_byte.unwrap_or(bits);
        self.bits_per_byte = Some(mean + (bits - mean) * (windows as f64 / 256.0).min(1.0));
        Ok(loss)
    }

    /// The bytes of the tail at each position of each window; zero before the beginning.
    fn inputs(&self, windows: &[&[u8]]) -> Result<Vec<Tensor>, UserError> {
        let shifted = |back: usize| {
            let bytes = windows.iter().flat_map(|window| {
                (0..window.len())
                    .map(move |i| if i < back { 0 } else { u32::from(window[i - back]) })
            });
            Ok(Tensor::from_iter(bytes, &self.device)?)
        };
        (0..self.arguments.tail as usize).map(shifted).collect()
    }

    /// Logits of each next byte, `[windows · length, 256]`, for windows of one length.
    fn logits(
        &self,
        network: &Network,
        windows: usize,
        inputs: &[Tensor],
        cuts: &mut Cuts,
    ) -> Result<Tensor, UserError> {
        let width = self.arguments.width as usize;
        let length = inputs[0].elem_count() / windows;
        let positions = network.positions.narrow(0, 0, length)?;
        let mut state = network.embeddings[0].index_select(&inputs[0], 0)?;
        for (embedding, input) in network.embeddings.iter().zip(inputs).skip(1) {
            state = (state + embedding.index_select(input, 0)?)?;
        }
        let mut state = state
            .reshape((windows, length, width))?
            .broadcast_add(&positions)?
            .reshape(((), width))?;
        for block in &network.blocks {
            state = cuts.cut(&state)?;
            state = (&state + self.attention(block, windows, &rms_norm(&state)?)?)?;
            let wide = rms_norm(&state)?.matmul(&block.widen)?.relu()?.sqr()?;
            state = (&state + wide.matmul(&block.narrow)?)?;
        }
        let state = cuts.cut(&state)?;
        Ok(rms_norm(&state)?.matmul(&network.head)?)
    }

    fn attention(
        &self,
        block: &Block,
        windows: usize,
        state: &Tensor,
    ) -> Result<Tensor, UserError> {
        let heads = self.arguments.heads as usize;
        let (rows, width) = state.dims2()?;
        let (length, depth) = (rows / windows, width / heads);
        let all = state.matmul(&block.attend)?.reshape((windows, length, 3, heads, depth))?;
        let part = |i: usize| {
            let part = all.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous()?;
            part.reshape((windows * heads, length, depth))
        };
        let (queries, keys, values) = (part(0)?, part(1)?, part(2)?);
        let scores =
            (queries.matmul(&keys.transpose(D::Minus1, D::Minus2)?)? / (depth as f64).sqrt())?;
        let seen = causal_softmax(&scores)?.matmul(&values)?;
        let seen = seen
            .reshape((windows, heads, length, depth))?
            .transpose(1, 2)?
            .reshape((rows, width))?;
        Ok(seen.matmul(&block.merge)?)
    }

    /// The prompt and `bytes` bytes drawn after it, with non-printable characters replaced.
    fn sample(&self, network: &Network, bytes: usize) -> Result<String, UserError> {
        let mut random = ChaCha8Rng::seed_from_u64(0);
        let mut text = self.arguments.prompt.clone().into_bytes();
        if text.is_empty() {
            text.push(b'\n');
        }
        for _ in 0..bytes {
            let window = &text[text.len().saturating_sub(self.arguments.context as usize)..];
            let logits = self.logits(network, 1, &self.inputs(&[window])?, &mut Cuts::none())?;
            let logits: Vec<f32> = logits.get(window.len() - 1)?.to_vec1()?;
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> =
                logits.iter().map(|logit| ((logit - max) / TEMPERATURE).exp()).collect();
            let uniform = (random.next_u32() >> 8) as f32 / (1u32 << 24) as f32;
            let mut rest = uniform * weights.iter().sum::<f32>();
            let drawn = weights.iter().position(|weight| {
                rest -= weight;
                rest < 0.0
            });
            // Rounding errors may leave a remainder after the last.
            text.push(drawn.unwrap_or(255) as u8);
        }
        let printable = |c: char| if c == '\n' || !c.is_control() { c } else { '\u{fffd}' };
        Ok(String::from_utf8_lossy(&text).chars().map(printable).collect())
    }
}

/// Windows per micro-batch: as many as keep the arithmetic units busy without leaving the caches.
const MICRO_BATCH: usize = 16;

const SAMPLE_BYTES: usize = 200;

/// Below 1, so that the sample prefers bytes that the model is sure of.
const TEMPERATURE: f32 = 0.7;

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if rate > 0.0 && rate < 10.0 => Ok(rate),
        _ => Err("a learning rate must be above 0 and below 10".to_owned()),
    }
}

#[cfg(test)]
#[path = "../bytelm_tests.rs"]
mod tests;
