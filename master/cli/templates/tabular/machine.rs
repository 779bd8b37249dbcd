//! A factorization machine over hashed categories (Rendle, Factorization Machines, 2010).
//!
//! Parameters: the bias, a weight for each feature, a vector of [`RANK`] numbers for each feature.

use elasticdl::NamedTensor;
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};

/// Largest number of features.
const BUCKETS_MAX: usize = 1 << 28;
/// Length of the vector of a feature.
pub(crate) const RANK: usize = 4;

/// Parses a number of features.
///
/// # Errors
/// It is none, or out of range.
pub(crate) fn parse_buckets(text: &str) -> Result<usize, String> {
    let buckets = text.parse().ok().filter(|buckets| (1..=BUCKETS_MAX).contains(buckets));
    buckets.ok_or_else(|| format!("it must be a whole number from 1 to {BUCKETS_MAX}"))
}

/// The number of a category: a hash (FNV-1a) of its column and its text.
#[must_use]
pub(crate) fn feature(column: usize, category: &str, buckets: usize) -> usize {
    let bytes = (column as u64).to_le_bytes().into_iter().chain(category.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    // The last bytes of a short text have not reached the high bits: MurmurHash3's last step.
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    let hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    ((u128::from(hash) * buckets as u128) >> 64) as usize
}

/// The parameters by meaning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine<'a> {
    bias: f32,
    weights: &'a [f32],
    vectors: &'a [f32],
}

impl<'a> Machine<'a> {
    /// The parameters for this number of features.
    #[must_use]
    pub(crate) fn tensors(buckets: usize) -> Vec<NamedTensor> {
        vec![
            NamedTensor::new("bias", []),
            NamedTensor::new("weights", [buckets]),
            NamedTensor::new("vectors", [buckets, RANK]),
        ]
    }

    /// Writes initial parameters: small random vectors, and zeros.
    pub(crate) fn initialize(buckets: usize, seed: u64, parameters: &mut [f32]) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        parameters.fill(0.0);
        parameters[1 + buckets..].fill_with(|| random.random_range(-0.1..0.1));
    }

    /// Takes `parameters`, the elements of [`tensors`](Self::tensors), apart.
    #[must_use]
    pub(crate) fn new(buckets: usize, parameters: &'a [f32]) -> Self {
        let (weights, vectors) = parameters[1..].split_at(buckets);
        Self { bias: parameters[0], weights, vectors }
    }

    /// The logarithm of the odds that the label is 1.
    #[must_use]
    pub(crate) fn score(&self, features: &[usize]) -> f32 {
        let weights: f32 = features.iter().map(|&feature| self.weights[feature]).sum();
        let pairs: f32 = (0..RANK)
            .map(|k| {
                let sum: f32 = features.iter().map(|&feature| self.vector(feature)[k]).sum();
                let squares = features.iter().map(|&feature| self.vector(feature)[k].powi(2));
                sum * sum - squares.sum::<f32>()
            })
            .sum();
        self.bias + weights + pairs / 2.0
    }

    /// The logistic loss of a row.
    #[must_use]
    pub(crate) fn loss(&self, features: &[usize], label: f32) -> f64 {
        let score = f64::from(self.score(features));
        // ln(1 + e^score) − label · score, without overflow.
        score.max(0.0) + (-score.abs()).exp().ln_1p() - f64::from(label) * score
    }

    /// Adds the gradient of a row's loss to `sum`. Returns the loss.
    pub(crate) fn add_gradient(&self, features: &[usize], label: f32, sum: &mut [f32]) -> f64 {
        let error = 1.0 / (1.0 + (-self.score(features)).exp()) - label;
        let buckets = self.weights.len();
        let mut total = [0.0; RANK];
        for &feature in features {
            (0..RANK).for_each(|k| total[k] += self.vector(feature)[k]);
        }
        sum[0] += error;
        for &feature in features {
            sum[1 + feature] += error;
            let at = 1 + buckets + feature * RANK;
            for (k, sum) in sum[at..at + RANK].iter_mut().enumerate() {
                *sum += error * (total[k] - self.vector(feature)[k]);
            }
        }
        self.loss(features, label)
    }

    fn vector(&self, feature: usize) -> &[f32] {
        &self.vectors[feature * RANK..][..RANK]
    }
}
