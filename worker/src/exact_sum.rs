//! Sums of gradients that do not depend on the order of addition.
//!
//! ```text
//! gradient of each micro-batch   g₁ g₂ … on any rank
//! per block of 1024 elements     e = the largest exponent in g₁, g₂, …     (all ranks agree: maximum)
//! rounded                        q = g to multiples of 2^(e − bits)        (at most 2^bits of them)
//! summed                         Σ q, exact while it has at most 24 bits   (any order, any ranks)
//! ```
//!
//! An f32 holds every integer of up to 24 bits. With at most `n` micro-batches in a step, `bits` is
//! 24 less the bits of `n`, so that no partial sum is ever rounded: all-reduces of any kind give
//! the same bits. With 16 micro-batches, each adds an error of at most 2^-20 of the block's largest
//! element; rounding to bf16 would be off by 2^-9 of the element itself.
//!
//! **Invariant:** the sum is a function of the set of gradients, and of `n`.

use elasticdl_collective::zeros;

/// The gradients of a rank's micro-batches in one step.
#[derive(Debug)]
pub(crate) struct ExactSum {
    /// Number of bits to which gradients are rounded.
    bits: u32,
    /// Number of elements of a gradient.
    len: usize,
    gradients: Vec<Vec<f32>>,
    /// For each block the largest exponent in the gradients, as an f32 has it.
    exponents: Vec<u8>,
    /// Buffers of earlier steps.
    unused: Vec<Vec<f32>>,
}

impl ExactSum {
    /// For gradients of `len` elements, in steps of at most `micro_batches`.
    pub(crate) fn new(len: usize, micro_batches: u64) -> Self {
        let bits = MANTISSA_BITS.saturating_sub(micro_batches.next_power_of_two().ilog2());
        Self {
            bits: bits.min(BITS_MAX),
            len,
            gradients: Vec::new(),
            exponents: vec![0; len.div_ceil(BLOCK_LEN)],
            unused: Vec::new(),
        }
    }

    /// Forgets all gradients.
    pub(crate) fn clear(&mut self) {
        self.unused.append(&mut self.gradients);
        self.exponents.fill(0);
    }

    /// Adds a micro-batch, whose gradient is zero at first. Its end is
    /// [`complete_last`](Self::complete_last).
    pub(crate) fn add(&mut self) {
        let gradient = match self.unused.pop() {
            Some(mut used) => {
                used.fill(0.0);
                used
            }
            None => zeros(self.len),
        };
        self.gradients.push(gradient);
    }

    /// The gradient of the micro-batch that was added last.
    pub(crate) fn last(&mut self) -> Option<&mut [f32]> {
        self.gradients.last_mut().map(Vec::as_mut_slice)
    }

    /// Forgets the micro-batch that was added last, and is not [complete](Self::complete_last).
    pub(crate) fn drop_last(&mut self) {
        self.unused.extend(self.gradients.pop());
    }

    /// The gradients of the micro-batches, in their order.
    pub(crate) fn gradients(&self) -> &[Vec<f32>] {
        &self.gradients
    }

    /// Takes the exponents of the gradient that was added last, while other ranks still compute.
    pub(crate) fn complete_last(&mut self) {
        let Some(gradient) = self.gradients.last() else { return };
        for (largest, block) in self.exponents.iter_mut().zip(gradient.chunks(BLOCK_LEN)) {
            // Signed, because processors without AVX have no maximum of unsigned integers.
            let magnitude = |value: &f32| (value.to_bits() & !SIGN).cast_signed();
            let bits = block.iter().map(magnitude).fold(0, i32::max);
            *largest = (bits >> FRACTION_BITS).max(i32::from(*largest)) as u8;
        }
    }

    /// The largest exponents of this rank's blocks.
    pub(crate) fn exponents(&self) -> &[u8] {
        &self.exponents
    }

    /// Writes the sum of the gradients to `sum`, rounded by the exponents that all ranks agree on.
    pub(crate) fn sum(&self, exponents: &[u8], sum: &mut [f32]) {
        let blocks = sum.chunks_mut(BLOCK_LEN).zip(exponents).enumerate();
        for (index, (sum, &exponent)) in blocks {
            // A block stays in the L1 cache.
            sum.fill(0.0);
            if exponent > self.exponent_max() {
                // A partial sum may overflow, which would depend on the order. So the sum is
                // infinite, by the ranks that have such elements.
                if self.exponents[index] > self.exponent_max() {
                    sum.fill(f32::INFINITY);
                }
                continue;
            }
            let start = index * BLOCK_LEN;
            for gradient in &self.gradients {
                let block = &gradient[start..start + sum.len()];
                self.add_rounded(block, exponent.into(), sum);
            }
        }
    }

    /// The largest biased exponent with which no partial sum overflows.
    fn exponent_max(&self) -> u8 {
        EXPONENT_MAX - (MANTISSA_BITS - self.bits) as u8
    }

    /// `exponent`: the biased exponent of the largest element that any rank has in this block.
    fn add_rounded(&self, block: &[f32], exponent: u32, sum: &mut [f32]) {
        // |element| < 2^(exponent − 126); 0 stands for the smallest normal numbers' exponent, too.
        let unit = exponent.max(1) as i32 - 126 - self.bits as i32;
        if unit <= SUBNORMAL {
            // Every element is a multiple of the unit.
            sum.iter_mut().zip(block).for_each(|(sum, element)| *sum += element);
        } else if exponent <= SHIFTED_MAX {
            // Adding this number leaves no bits below the unit: rounded to nearest, ties to even.
            let shift = (1.5 * 2_f64.powi(unit + FRACTION_BITS as i32)) as f32;
            sum.iter_mut().zip(block).for_each(|(sum, element)| *sum += (element + shift) - shift);
        } else {
            let unit = 2_f64.powi(unit);
            for (sum, element) in sum.iter_mut().zip(block) {
                *sum += ((f64::from(*element) / unit).round_ties_even() * unit) as f32;
            }
        }
    }
}

/// Raises exponents to those of another rank.
pub(crate) fn raise(exponents: &mut [u8], others: &[u8]) {
    exponents.iter_mut().zip(others).for_each(|(mine, other)| *mine = (*mine).max(*other));
}

/// Number of elements that share an exponent. Over `n` ranks, the exponents add `n/8192` to the
/// bytes of the all-reduce.
const BLOCK_LEN: usize = 1024;

/// Bits of an f32's mantissa, with the leading one.
const MANTISSA_BITS: u32 = 24;

/// Most bits that [`ExactSum::add_rounded`] can leave.
const BITS_MAX: u32 = MANTISSA_BITS - 2;

/// Bits of an f32 below its exponent.
const FRACTION_BITS: u32 = 23;

const SIGN: u32 = 1 << 31;

/// Biased exponent of the largest f32, less one, because elements may be rounded up.
const EXPONENT_MAX: u8 = 253;

/// Exponent of the smallest positive f32: all are multiples of it.
const SUBNORMAL: i32 = -149;

/// Largest exponent for which the shift of [`ExactSum::add_rounded`] is finite.
const SHIFTED_MAX: u32 = 230;

#[cfg(test)]
mod tests {
    use rand::rngs::ChaCha8Rng;
    use rand::seq::SliceRandom;
    use rand::{RngExt, SeedableRng};

    use super::*;

    const LEN: usize = BLOCK_LEN + 60;

    /// Gradients over the whole range of exponents, and narrow ones.
    fn random_gradients(rng: &mut ChaCha8Rng, count: usize) -> Vec<Vec<f32>> {
        let center = rng.random_range(-120..100);
        let width = [0, 10, 150][rng.random_range(0..3)];
        let mut element = |_| {
            let exponent = center + rng.random_range(-width..=width.min(110 - center));
            (rng.random_range(-1.0..1.0) * 2_f64.powi(exponent)) as f32
        };
        (0..count).map(|_| (0..LEN).map(&mut element).collect()).collect()
    }

    fn rank(gradients: &[&Vec<f32>], micro_batches: u64) -> ExactSum {
        let mut sum = ExactSum::new(LEN, micro_batches);
        for gradient in gradients {
            sum.add();
            sum.last().unwrap().copy_from_slice(gradient);
            sum.complete_last();
        }
        sum
    }

    /// The sum over ranks that have these gradients each, added in the ranks' order.
    fn sum_over(ranks: &[ExactSum]) -> Vec<f32> {
        let mut exponents = ranks[0].exponents().to_vec();
        ranks.iter().for_each(|rank| raise(&mut exponents, rank.exponents()));
        let (mut total, mut part) = (vec![0.0; LEN], vec![f32::NAN; LEN]);
        for rank in ranks {
            rank.sum(&exponents, &mut part);
            total.iter_mut().zip(&part).for_each(|(total, part)| *total += part);
        }
        total
    }

    #[test]
    fn the_sum_has_the_same_bits_for_any_ranks_in_any_order_and_is_near_the_real_one() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for count in [1, 2, 3, 5, 16, 37, 64] {
            for _ in 0..6 {
                let gradients = random_gradients(&mut rng, count);
                let mut order: Vec<&Vec<f32>> = gradients.iter().collect();
                let alone = sum_over(&[rank(&order, count as u64)]);
                for ranks in [2, 3, 7, 64] {
                    order.shuffle(&mut rng);
                    let mut ranks: Vec<ExactSum> = (0..ranks)
                        .map(|r| {
                            let own: Vec<_> =
                                order.iter().skip(r).step_by(ranks).copied().collect();
                            rank(&own, count as u64)
                        })
                        .collect();
                    ranks.shuffle(&mut rng);
                    let bits = |sum: &[f32]| sum.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&alone), bits(&sum_over(&ranks)));
                }
                let bits = ExactSum::new(LEN, count as u64).bits as i32;
                for (index, sum) in alone.iter().enumerate() {
                    let block = index / BLOCK_LEN * BLOCK_LEN;
                    let block = block..LEN.min(block + BLOCK_LEN);
                    let largest = gradients.iter().flat_map(|g| &g[block.clone()]);
                    let largest = largest.fold(0.0, |max: f64, x| max.max(x.abs().into()));
                    let real: f64 = gradients.iter().map(|g| f64::from(g[index])).sum();
                    let bound = count as f64 * largest * 2_f64.powi(-bits);
                    assert!((f64::from(*sum) - real).abs() <= bound, "{sum} for {real}");
                }
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_stay_so() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut gradient = vec![1.0; LEN];
            gradient[3] = bad;
            let sum = sum_over(&[rank(&[&gradient], 4), rank(&[&vec![1.0; LEN]], 4)]);
            assert!(!sum[3].is_finite());
            assert_eq!(sum[LEN - 1], 2.0);
        }
    }

    #[test]
    fn sums_that_may_overflow_are_infinite_in_any_order() {
        let gradient = |value| vec![value; LEN];
        let (huge, negative) = (gradient(2_f32.powi(127)), gradient(-2_f32.powi(127)));
        let zero = gradient(0.0);
        let of =
            |gradients: [&Vec<f32>; 4]| sum_over(&gradients.map(|gradient| rank(&[gradient], 4)));
        for order in [[&huge, &huge, &negative, &zero], [&huge, &negative, &huge, &zero]] {
            assert_eq!(of(order), gradient(f32::INFINITY));
        }
        // The rank of the zeros is not at fault.
        let zeros = rank(&[&zero], 4);
        let mut part = gradient(1.0);
        zeros.sum(&[254, 254], &mut part);
        assert_eq!(part, zero);
        let largest = 2_f32.powi(124);
        let large = gradient(largest);
        assert_eq!(of([&large, &large, &large, &zero]), gradient(3.0 * largest));
    }

    #[test]
    fn buffers_of_the_last_step_are_cleared() {
        let mut sum = rank(&[&vec![1.0; LEN]], 2);
        sum.clear();
        assert_eq!(sum.exponents(), [0, 0]);
        sum.add();
        assert_eq!(sum.last().unwrap()[7], 0.0);
    }
}
