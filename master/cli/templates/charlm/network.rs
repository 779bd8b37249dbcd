//! A transformer that predicts the next byte of a text: blocks of causal attention and a
//! feed-forward network, each after a normalization.

use elasticdl::candle_core::{self, D, DType, Tensor};
use elasticdl::candle_nn::{Init, VarBuilder};

use crate::ops::{causal_softmax, rms_norm};

/// Number of values of a byte.
pub(crate) const BYTES: usize = 256;
const HEADS: usize = 2;

/// The network's tensors.
#[derive(Clone, Debug)]
pub(crate) struct Transformer {
    /// `[256, width]`
    embedding: Tensor,
    /// `[context, width]`
    positions: Tensor,
    blocks: Vec<Block>,
    /// `[width, 256]`
    head: Tensor,
}

/// The matrices of a block, each `[inputs, outputs]`.
#[derive(Clone, Debug)]
struct Block {
    /// Queries, keys and values.
    attend: Tensor,
    merge: Tensor,
    widen: Tensor,
    narrow: Tensor,
}

/// Parses the width of a layer.
///
/// # Errors
/// It is out of range, or not a multiple of the number of heads.
pub(crate) fn parse_width(text: &str) -> Result<usize, String> {
    let width = text.parse().ok().filter(|w| (HEADS..=4096).contains(w) && w % HEADS == 0);
    width.ok_or_else(|| format!("it must be a multiple of {HEADS} from {HEADS} to 4096"))
}

impl Transformer {
    /// Builds a network for windows of up to `context` bytes.
    ///
    /// # Errors
    /// The tensors can't be allocated.
    pub(crate) fn build(
        (context, width, layers): (usize, usize, usize),
        parameters: &VarBuilder<'_>,
    ) -> candle_core::Result<Self> {
        let matrix = |name: &str, inputs: usize, outputs: usize, stdev: f64| {
            parameters.get_with_hints((inputs, outputs), name, Init::Randn { mean: 0.0, stdev })
        };
        let (usual, small) = (1.0 / (width as f64).sqrt(), 0.5 / (width as f64).sqrt());
        let embedding = matrix("embedding", BYTES, width, 0.5)?;
        let positions = matrix("positions", context, width, 0.02)?;
        let mut blocks = Vec::new();
        for i in 0..layers {
            blocks.push(Block {
                attend: matrix(&format!("block.{i}.attend"), width, 3 * width, usual)?,
                merge: matrix(&format!("block.{i}.merge"), width, width, small)?,
                widen: matrix(&format!("block.{i}.widen"), width, 4 * width, usual)?,
                narrow: matrix(&format!("block.{i}.narrow"), 4 * width, width, small / 2.0)?,
            });
        }
        let head = matrix("head", width, BYTES, usual / 10.0)?;
        Ok(Self { embedding, positions, blocks, head })
    }

    /// The logits of each next byte, `[n · length, 256]`, for windows `[n, length]` of u32.
    ///
    /// # Errors
    /// The windows are longer than the context.
    pub(crate) fn logits(&self, windows: &Tensor) -> candle_core::Result<Tensor> {
        let (count, length) = windows.dims2()?;
        let width = self.embedding.dim(1)?;
        // In f32, so that the gradients of many bytes are added in it.
        let embedding = self.embedding.to_dtype(DType::F32)?;
        let bytes = embedding.index_select(&windows.flatten_all()?, 0)?;
        let positions = self.positions.to_dtype(DType::F32)?.narrow(0, 0, length)?;
        let state = bytes.reshape((count, length, width))?.broadcast_add(&positions)?;
        let mut state = state.reshape((count * length, width))?;
        for block in &self.blocks {
            state = (&state + block.attention(count, &rms_norm(&state)?)?)?;
            let wide = product(&rms_norm(&state)?, &block.widen)?.relu()?;
            state = (&state + product(&wide, &block.narrow)?)?;
        }
        product(&rms_norm(&state)?, &self.head)
    }
}

impl Block {
    /// What each position takes from those up to itself, `[rows, width]` for as many windows.
    fn attention(&self, windows: usize, state: &Tensor) -> candle_core::Result<Tensor> {
        let (rows, width) = state.dims2()?;
        let (length, depth) = (rows / windows, width / HEADS);
        let all = product(state, &self.attend)?.reshape((windows, length, 3, HEADS, depth))?;
        let part = |i: usize| {
            let part = all.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous()?;
            part.reshape((windows * HEADS, length, depth))
        };
        let (queries, keys, values) = (part(0)?, part(1)?, part(2)?);
        let scores =
            (queries.matmul(&keys.transpose(D::Minus1, D::Minus2)?)? / (depth as f64).sqrt())?;
        let seen = causal_softmax(&scores)?.matmul(&values)?;
        let seen = seen.reshape((windows, HEADS, length, depth))?.transpose(1, 2)?;
        product(&seen.reshape((rows, width))?, &self.merge)
    }
}

/// The product of a state and a matrix, computed in the matrix's type: bf16 with `--param-dtype
/// bf16`. The state and the result are f32.
fn product(state: &Tensor, matrix: &Tensor) -> candle_core::Result<Tensor> {
    state.to_dtype(matrix.dtype())?.matmul(matrix)?.to_dtype(DType::F32)
}
