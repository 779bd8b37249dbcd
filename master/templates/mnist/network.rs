//! A convolutional network: two convolutions, each followed by a rectifier and by the maximum of 2
//! by 2 pixels, and a linear layer.

use elasticdl::UserError;
use elasticdl::candle::{Init, Parameters};
use elasticdl::candle_core::{self, Tensor};

/// Channels after each convolution.
const CHANNELS: [usize; 2] = [8, 16];
const DIGITS: usize = 10;

/// The network's tensors.
#[derive(Clone, Debug)]
pub struct Classifier {
    /// Kernels, `[channels, channels before, 3, 3]`, and offsets, `[1, channels, 1, 1]`.
    convolutions: [(Tensor, Tensor); 2],
    /// `[pixels · channels, 10]`
    head: Tensor,
}

/// Parses the number of rows and columns of an image.
///
/// # Errors
/// It is out of range, or not divided twice by 2.
pub fn parse_size(text: &str) -> Result<u32, String> {
    let size = text.parse().ok().filter(|size| (4..=512).contains(size) && size % 4 == 0);
    size.ok_or_else(|| "it must be a multiple of 4 from 4 to 512".to_owned())
}

impl Classifier {
    /// Declares the tensors of a network for images of `size` by `size` pixels.
    ///
    /// # Errors
    /// The tensors can't be allocated.
    pub fn build(size: usize, parameters: &mut Parameters) -> Result<Self, UserError> {
        // He et al., Delving Deep into Rectifiers, 2015.
        let init = |inputs: usize| Init::Normal { std: (2.0 / inputs as f64).sqrt() };
        let mut convolution = |name: &str, before: usize, after: usize| {
            let kernel = (after, before, 3, 3);
            let kernel = parameters.declare(&format!("{name}.weight"), kernel, init(before * 9))?;
            let offsets = (1, after, 1, 1);
            let offsets =
                parameters.declare(&format!("{name}.bias"), offsets, Init::Constant(0.0))?;
            Ok::<_, UserError>((kernel, offsets))
        };
        let [first, second] = CHANNELS;
        let convolutions = [convolution("conv1", 1, first)?, convolution("conv2", first, second)?];
        let inputs = second * (size / 4).pow(2);
        let head = parameters.declare("head", (inputs, DIGITS), init(inputs))?;
        Ok(Self { convolutions, head })
    }

    /// The logits of each digit, `[n, 10]`, for images `[n, 1, size, size]` of values from 0 to 1.
    ///
    /// # Errors
    /// The images are of another size.
    pub fn logits(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let mut state = images.clone();
        for (kernel, offsets) in &self.convolutions {
            let convolved = state.conv2d(kernel, 1, 1, 1, 1)?.broadcast_add(offsets)?;
            state = convolved.relu()?.max_pool2d(2)?;
        }
        state.flatten_from(1)?.matmul(&self.head)
    }
}
