//! A convolutional network: two convolutions, each followed by a rectifier and by the maximum of 2
//! by 2 pixels, and a linear layer.

use elasticdl::candle_core::{self, Module as _, Tensor};
use elasticdl::candle_nn::{Conv2d, Conv2dConfig, Linear, VarBuilder, conv2d, linear};

/// Channels after each convolution.
const CHANNELS: [usize; 2] = [8, 16];
const DIGITS: usize = 10;

/// The network's layers.
#[derive(Clone, Debug)]
pub(crate) struct Classifier {
    convolutions: [Conv2d; 2],
    head: Linear,
}

/// Parses the number of rows and columns of an image.
///
/// # Errors
/// It is out of range, or not divided twice by 2.
pub(crate) fn parse_size(text: &str) -> Result<u32, String> {
    let size = text.parse().ok().filter(|size| (4..=512).contains(size) && size % 4 == 0);
    size.ok_or_else(|| "it must be a multiple of 4 from 4 to 512".to_owned())
}

impl Classifier {
    /// Builds a network for images of `size` by `size` pixels.
    ///
    /// # Errors
    /// The tensors can't be allocated.
    pub(crate) fn build(size: usize, parameters: &VarBuilder<'_>) -> candle_core::Result<Self> {
        let [first, second] = CHANNELS;
        let config = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
        let convolutions = [
            conv2d(1, first, 3, config, parameters.pp("conv1"))?,
            conv2d(first, second, 3, config, parameters.pp("conv2"))?,
        ];
        let head = linear(second * (size / 4).pow(2), DIGITS, parameters.pp("head"))?;
        Ok(Self { convolutions, head })
    }

    /// The logits of each digit, `[n, 10]`, for images `[n, 1, size, size]` of values from 0 to 1.
    ///
    /// # Errors
    /// The images are of another size.
    pub(crate) fn logits(&self, images: &Tensor) -> candle_core::Result<Tensor> {
        let mut state = images.clone();
        for convolution in &self.convolutions {
            state = convolution.forward(&state)?.relu()?.max_pool2d(2)?;
        }
        self.head.forward(&state.flatten_from(1)?)
    }
}
